"""vmap rules: fold the batch into rows or columns where one call can do it, else keep it as a batch.

only a (and c) batched   rows:    (batch, m, k) -> (batch * m, k)
only b batched           columns: (batch, k, n) -> (k, batch * n)
both                     a product with a batch of its own, or, where a library or its order of sums is asked for,
                         one call per index in a scan

cuBLASMp has no batched product, XLA has: one dot and one collective for the whole batch. So a batch stays one equation,
for it is known only when a program is lowered which of the two serves it better (`backend`). All its operands have one
more dimension in front. What it means is vmap of the product of one index, and so are its rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.primitive.jvp import matmul_jvp_rule
from jaxmp._src.core.primitive.primitives import (
    activated_matmul_parts,
    activation_grad,
    bind,
    bind_named,
    bind_operands,
    bind_rows,
    fold_rows,
    has_rows,
    matmul_abstract_eval,
)
from jaxmp._src.core.primitive.transpose import matmul_transpose_rule
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, accumulator
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Aval, BatchDims, Operand, Tangent


def _front(x: jax.Array, dim: int | None) -> jax.Array:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def matmul_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int | None]]:
    if spec.rule.gradient:
        return _split_gradient(args, dims, spec)
    names = spec.names
    operands = dict(zip(names, map(_front, args, dims), strict=True))
    batched = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    is_decoded = low_precision.is_low_precision(low_precision.operand_type(args[0].dtype, args[1].dtype))
    is_only_bias = spec.epilog == Epilog.BIAS and not spec.has_c and not is_decoded
    if is_only_bias and "a" not in batched:
        return _split_bias(args, dims, spec)
    # Folded into columns the batch would stand inside of those of each rank, in the sum of the gradient in a.
    is_plain = spec.is_bilinear and not is_decoded and not spec.global_order
    if is_plain and "a" not in batched and not _crosses_blocks(spec, a_is_batched=False, b_is_batched=True):
        b = operands["b"]
        batch, n, k = b.shape if spec.transpose_b else (b.shape[0], b.shape[2], b.shape[1])
        b = b.reshape(batch * n, k) if spec.transpose_b else jnp.swapaxes(b, 0, 1).reshape(k, batch * n)
        d = bind(spec, operands["a"], b)["d"]
        return [d.reshape(d.shape[0], batch, n)], [1]
    size = next(operands[name].shape[0] for name in names if name in batched)
    if _folds_into_rows(spec, batched):
        for name in spec.operand_names:
            if _folds(spec, name) and name not in batched:
                operands[name] = jnp.broadcast_to(operands[name][None], (size, *operands[name].shape))
        outputs = bind_rows(spec.folded(size), operands)
    elif may_batch(spec) and batched.issuperset("ab"):
        whole = {
            name: x if name in batched else jnp.broadcast_to(x[None], (size, *x.shape)) for name, x in operands.items()
        }
        outputs = bind_named(spec.replace(is_batch=True), whole)
    else:
        fixed = {name: operands.pop(name) for name in names if name not in batched}
        outputs = jax.lax.map(lambda mapped: bind_named(spec, fixed | mapped), operands)
    results = [outputs[name] for name in spec.output_names]
    return results, [0] * len(results)


def _crosses_blocks(spec: MatmulSpec, a_is_batched: bool, b_is_batched: bool) -> bool:
    """Whether a batched operand is a transposed one of a grid: its blocks then lie across those of D, and no fold of
    the batch into rows or columns keeps them in their places; nor does any of block-cyclic ones."""
    is_grid = spec.contraction.is_grid
    return bool(spec.distributions) or (
        is_grid and ((a_is_batched and spec.transpose_a) or (b_is_batched and spec.transpose_b))
    )


def _split_bias(
    args: Sequence[jax.Array], dims: BatchDims, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Batched weights fold into columns where no bias is in the way: it is added behind, ahead of the one rounding."""
    a, b, bias = args
    plain = spec.bilinear(out_dtype=accumulator(low_precision.operand_type(a.dtype, b.dtype)))
    if dims[1] is None:
        z = bind(plain, a, b)["d"]
    else:
        z = jax.vmap(lambda b: bind(plain, a, b)["d"], in_axes=dims[1])(b)

    def add(z: jax.Array, bias: jax.Array) -> jax.Array:
        return (z + bias.astype(z.dtype)[None, :]).astype(spec.out_dtype)

    return [jax.vmap(add, in_axes=(None if dims[1] is None else 0, dims[2]))(z, bias)], [0]


def _split_gradient(
    args: Sequence[jax.Array], dims: BatchDims, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """A bias gradient is one per batch element, so it leaves the call, whose rows then fold."""
    if spec.global_order:
        raise spec.level.mesh_refusal(
            f"has no epilog {spec.epilog.name} under vmap, for XLA completes its sums", "take the gradient of a bias"
        )
    row = spec.rule
    plain = spec.replace(epilog=row.without_gradient)

    def one(*args: jax.Array) -> jax.Array:
        return bind_operands(plain, *args)[0]

    d = jax.vmap(one, in_axes=tuple(dims), out_axes=0)(*args)
    x, dim = {"a": (args[0], dims[0]), "b": (args[1], dims[1]), "d": (d, 0)}[bias_grad.summed(row.gradient)]
    sums = functools.partial(bias_grad.bias_gradient, row.gradient, spec)
    if dim is None:
        return [d, sums(x)], [0, None]
    return [d, jax.vmap(sums, in_axes=dim)(x)], [0, 0]


def _folds_into_rows(spec: MatmulSpec, batched: set[str]) -> bool:
    """Whether everything that is batched has rows, and b has not."""
    if spec.scales.amax_d or spec.scales.amax_aux or spec.scales.a in low_precision.BLOCK:
        return False  # the maximum is one a product, and blocks may have rows of their own
    is_fixed = all(_folds(spec, name) for name in batched - {"a"})
    return "a" in batched and is_fixed and not _crosses_blocks(spec, a_is_batched=True, b_is_batched=False)


def _folds(spec: MatmulSpec, name: str) -> bool:
    """Whether an operand beside a and b has a number for each row of a or of d."""
    return has_rows(name) or (name == "scale_a" and spec.scales.a == low_precision.OUTER_VEC)


def activation_grad_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, activation: str, spec: MatmulSpec | None
) -> tuple[jax.Array, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    aux, t = (
        jnp.broadcast_to(x[None], (size, *x.shape)) if dim is None else _front(x, dim)
        for x, dim in zip(args, dims, strict=True)
    )
    rows = activation_grad(activation, fold_rows(aux, 2, 0, 1), fold_rows(t, 2, 0, 1), spec)
    return rows.reshape(t.shape), 0


def activated_matmul_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec, activation: str
) -> tuple[jax.Array, int]:
    parts = functools.partial(activated_matmul_parts, spec=spec, activation=activation)
    return jax.vmap(parts, in_axes=tuple(dims))(*args), 0


# A batch ---------------------------------------------------------------------------------------------------------


def may_batch(spec: MatmulSpec) -> bool:
    """Whether XLA may serve a batch of such products: not where a library or its order of sums is asked for."""
    return spec.implementation in (None, "xla") and not spec.fixed_reduction_order and not spec.distributions


def batched_abstract_eval(*avals: Aval, spec: MatmulSpec) -> list[Aval]:
    size = avals[0].shape[0]
    assert all(aval.shape[0] == size for aval in avals), avals
    outputs = matmul_abstract_eval(*map(jax_compat.without_front, avals), spec=spec)
    return [jax_compat.with_front(aval, size) for aval in outputs]


def batched_jvp_rule(primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec) -> tuple[Any, Any]:
    moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)}

    def one(primals: list[jax.Array], moving: dict[int, jax.Array]) -> tuple[Any, dict[int, jax.Array]]:
        given = [moving.get(i, ad.Zero(jax.typeof(x).to_tangent_aval())) for i, x in enumerate(primals)]
        outputs, moved = matmul_jvp_rule(primals, given, spec=spec)
        return outputs, {i: t for i, t in enumerate(moved) if not isinstance(t, ad.Zero)}

    outputs, moved = jax.vmap(one)(list(primals), moving)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outputs]
    return outputs, [moved.get(i, zero) for i, zero in enumerate(zeros)]


def batched_transpose_rule(cts: Sequence[Any], *operands: Operand, spec: MatmulSpec) -> list[jax.Array | None]:
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


def batched_batch_rule(
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
