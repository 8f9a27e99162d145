"""Products whose operands all have one batch dimension, in front: what vmap makes of a call where nothing folds.

cuBLASMp has no batched product, XLA has: one dot and one collective for the whole batch. So a batch stays one equation,
for it is known only when a program is lowered which of the two serves it better (`backend`). What it means is vmap of
the product of one index, and so are its rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.primitive.jvp import matmul_jvp_rule
from jaxmp._src.primitive.primitives import bind_operands, matmul_abstract_eval
from jaxmp._src.primitive.transpose import matmul_transpose_rule
from jaxmp._src.runtime.types import BatchDims, Operand, Tangent
from jaxmp._src.spec.matmul_spec import MatmulSpec


def may_batch(spec: MatmulSpec) -> bool:
    """Whether XLA may serve a batch of such products: not where a library or its order of sums is asked for."""
    return spec.implementation in (None, "xla") and not spec.fixed_reduction_order and not spec.distributions


def abstract_eval(*avals: jax.core.ShapedArray, spec: MatmulSpec) -> list[jax.core.ShapedArray]:
    size = avals[0].shape[0]
    assert all(aval.shape[0] == size for aval in avals), avals
    outputs = matmul_abstract_eval(*map(jax_compat.without_front, avals), spec=spec)
    return [jax_compat.with_front(aval, size) for aval in outputs]


def jvp_rule(primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec) -> tuple[Any, Any]:
    moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)}

    def one(primals: list[jax.Array], moving: dict[int, jax.Array]) -> tuple[Any, dict[int, jax.Array]]:
        given = [moving.get(i, ad.Zero(jax.typeof(x).to_tangent_aval())) for i, x in enumerate(primals)]
        outputs, moved = matmul_jvp_rule(primals, given, spec=spec)
        return outputs, {i: t for i, t in enumerate(moved) if not isinstance(t, ad.Zero)}

    outputs, moved = jax.vmap(one)(list(primals), moving)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outputs]
    return outputs, [moved.get(i, zero) for i, zero in enumerate(zeros)]


def transpose_rule(cts: Sequence[Any], *operands: Operand, spec: MatmulSpec) -> list[jax.Array | None]:
    linear = {i: jax_compat.without_front(x.aval) for i, x in enumerate(operands) if isinstance(x, ad.UndefinedPrimal)}
    known = {i: x for i, x in enumerate(operands) if not isinstance(x, ad.UndefinedPrimal)}
    given = {i: ct for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)}
    if not given:
        return [None] * len(operands)

    def one(known: dict[int, jax.Array], given: dict[int, jax.Array]) -> dict[int, jax.Array]:
        each = [known[i] if i in known else ad.UndefinedPrimal(linear[i]) for i in range(len(operands))]
        ct = [given[i] if i in given else ad.Zero(jax_compat.without_front(x.aval)) for i, x in enumerate(cts)]
        results = matmul_transpose_rule(ct, *each, spec=spec)
        return {i: x for i, x in enumerate(results) if x is not None and not isinstance(x, ad.Zero)}

    results = jax.vmap(one)(known, given)
    return [results.get(i) for i in range(len(operands))]


def batch_rule(
    operands: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int]]:
    """A further batch joins the one there is, where all operands have it; else it is the inner one of two."""
    batched = [dim for dim in dims if dim is not None]
    if len(batched) == len(operands):
        fronted = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, batched, strict=True)]
        sizes = fronted[0].shape[:2]
        outputs = bind_operands(
            spec.replace(is_batch=True), *(x.reshape(math.prod(sizes), *x.shape[2:]) for x in fronted)
        )
        return [x.reshape(*sizes, *x.shape[1:]) for x in outputs], [0] * len(outputs)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in zip(operands, dims, strict=True)]
    inner = jax.vmap(functools.partial(bind_operands, spec), in_axes=tuple(None if dim is None else 0 for dim in dims))
    outputs = jax.vmap(inner)(*moved)
    return outputs, [1] * len(outputs)
