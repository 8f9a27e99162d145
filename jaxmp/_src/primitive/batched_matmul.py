"""Products whose operands all have one batch dimension, in front: what vmap makes of a call where nothing folds.

batched_matmul_p(a, b)            a (batch, m, k), b (batch, k, n) to d (batch, m, n), on the shards of one device
batched_matmul_epilog_p(a, b, *operands)   the same with C and an epilog

cuBLASMp has no batched product, XLA has: one dot and one collective for the whole batch. So this is a primitive of its
own, for it is known only when a program is lowered which of the two serves it better (`backend`). What it means is vmap
of the product of one index, and so are its rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxmp._src.primitive.primitives import BATCHED
from jaxmp._src.runtime import jax_compat
from jaxmp._src.runtime.types import BatchDims, Operand, Tangent
from jaxmp._src.spec.matmul_spec import MatmulSpec

# The primitive of one product, by that of the batch.
ONE = {batched: one for one, batched in BATCHED.items()}


def may_batch(spec: MatmulSpec) -> bool:
    """Whether XLA may serve a batch of such products: not where a library or its order of sums is asked for."""
    return spec.implementation in (None, "xla") and not spec.fixed_reduction_order and not spec.distributions


def _abstract_eval(*avals: jax.core.ShapedArray, primitive: jax_compat.Primitive, spec: MatmulSpec) -> Any:
    size = avals[0].shape[0]
    assert all(aval.shape[0] == size for aval in avals), avals
    outputs, _ = ONE[primitive].abstract_eval(*map(jax_compat.without_front, avals), spec=spec)
    return jax.tree.map(lambda aval: jax_compat.with_front(aval, size), outputs)


def _jvp(
    primitive: jax_compat.Primitive, primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec
) -> tuple[Any, Any]:
    rule = ad.primitive_jvps[ONE[primitive]]
    moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)}

    def one(primals: list[jax.Array], moving: dict[int, jax.Array]) -> tuple[Any, dict[int, jax.Array]]:
        given = [moving.get(i, ad.Zero(jax.typeof(x).to_tangent_aval())) for i, x in enumerate(primals)]
        outputs, moved = rule(primals, given, spec=spec)
        moved = moved if primitive.multiple_results else [moved]
        return outputs, {i: t for i, t in enumerate(moved) if not isinstance(t, ad.Zero)}

    outputs, moved = jax.vmap(one)(list(primals), moving)
    listed = outputs if primitive.multiple_results else [outputs]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in listed]
    changed = [moved.get(i, zero) for i, zero in enumerate(zeros)]
    return outputs, changed if primitive.multiple_results else changed[0]


def _transpose(
    primitive: jax_compat.Primitive, cts: Any, *operands: Operand, spec: MatmulSpec
) -> list[jax.Array | None]:
    rule = ad.primitive_transposes[ONE[primitive]]
    cts = list(cts) if primitive.multiple_results else [cts]
    linear = {i: jax_compat.without_front(x.aval) for i, x in enumerate(operands) if isinstance(x, ad.UndefinedPrimal)}
    known = {i: x for i, x in enumerate(operands) if not isinstance(x, ad.UndefinedPrimal)}
    given = {i: ct for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)}
    if not given:
        return [None] * len(operands)

    def one(known: dict[int, jax.Array], given: dict[int, jax.Array]) -> dict[int, jax.Array]:
        each = [known[i] if i in known else ad.UndefinedPrimal(linear[i]) for i in range(len(operands))]
        ct = [given[i] if i in given else ad.Zero(jax_compat.without_front(x.aval)) for i, x in enumerate(cts)]
        results = rule(ct if primitive.multiple_results else ct[0], *each, spec=spec)
        return {i: x for i, x in enumerate(results) if x is not None and not isinstance(x, ad.Zero)}

    results = jax.vmap(one)(known, given)
    return [results.get(i) for i in range(len(operands))]


def batch_rule(
    primitive: jax_compat.Primitive, operands: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec
) -> tuple[Any, Any]:
    """A further batch joins the one there is, where all operands have it; else it is the inner one of two."""
    batched = [dim for dim in dims if dim is not None]
    if len(batched) == len(operands):
        fronted = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, batched, strict=True)]
        sizes = fronted[0].shape[:2]
        outputs = primitive.bind(*(x.reshape(math.prod(sizes), *x.shape[2:]) for x in fronted), spec=spec)
        parted = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), outputs)
        return parted, jax.tree.map(lambda _: 0, parted)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in zip(operands, dims, strict=True)]
    inner = jax.vmap(
        functools.partial(ONE[primitive].bind, spec=spec), in_axes=tuple(None if dim is None else 0 for dim in dims)
    )
    outputs = jax.vmap(inner)(*moved)
    return outputs, jax.tree.map(lambda _: 1, outputs)


for _primitive in ONE:
    _primitive.def_abstract_eval(functools.partial(_abstract_eval, primitive=_primitive))
    ad.primitive_jvps[_primitive] = jax_compat.under_known_flags(functools.partial(_jvp, _primitive))
    ad.primitive_transposes[_primitive] = jax_compat.under_known_flags(functools.partial(_transpose, _primitive))
