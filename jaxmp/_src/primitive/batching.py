"""vmap rules: fold the batch into rows or columns where one call can do it, else keep it as a batch.

only a (and c) batched   rows:    (batch, m, k) -> (batch * m, k)
only b batched           columns: (batch, k, n) -> (k, batch * n)
both                     a product with a batch of its own (`batched_matmul`), or, where a library or its order of
                         sums is asked for, one call per index in a scan
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jaxmp._src.primitive import bias_grad
from jaxmp._src.primitive.batched_matmul import ONE, batch_rule, may_batch
from jaxmp._src.primitive.primitives import (
    AUTO_TWIN,
    activated_matmul_p,
    activated_matmul_parts,
    activation_grad,
    activation_grad_p,
    auto_activation_grad_p,
    bind,
    bind_rows,
    has_rows,
    matmul_epilog_p,
    matmul_p,
    merge_rows,
)
from jaxmp._src.runtime import jax_compat
from jaxmp._src.runtime.types import BatchDims
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import DIMS, MatmulSpec, Pattern, accumulator


def _front(x: jax.Array, dim: int | None) -> jax.Array:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def _matmul_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec, auto: bool
) -> tuple[jax.Array, int]:
    (a, b), (da, db) = map(_front, args, dims), dims
    crosses = _crosses_blocks(spec, a_is_batched=da is not None, b_is_batched=db is not None)
    if db is None and not crosses:
        return bind_rows(spec.folded(a.shape[0]), a, b, auto=auto)["d"], 0
    # Folded into columns the batch would stand inside of those of each rank, in the sum of the gradient in a.
    if da is None and not crosses and spec.determinism != "topology":
        return _bind_columns(spec, a, b, auto), 1
    mapped = {name: x for name, x, dim in (("a", a, da), ("b", b, db)) if dim is not None}
    fixed = {name: x for name, x, dim in (("a", a, da), ("b", b, db)) if dim is None}
    if may_batch(spec) and not fixed:
        return bind(spec, a, b, auto=auto, batched=True)["d"], 0

    def one(mapped: dict[str, jax.Array]) -> jax.Array:
        each = fixed | mapped
        return bind(spec, each["a"], each["b"], auto=auto)["d"]

    return jax.lax.map(one, mapped), 0


def _crosses_blocks(spec: MatmulSpec, a_is_batched: bool, b_is_batched: bool) -> bool:
    """Whether a batched operand is a transposed one of a grid: its blocks then lie across those of D, and no fold of
    the batch into rows or columns keeps them in their places; nor does any of block-cyclic ones."""
    is_grid = spec.group.pattern == Pattern.GRID
    return bool(spec.distributions) or (
        is_grid and ((a_is_batched and spec.transpose_a) or (b_is_batched and spec.transpose_b))
    )


def _bind_columns(spec: MatmulSpec, a: jax.Array, b: jax.Array, auto: bool) -> jax.Array:
    """d of shape (m, batch, n) for b of shape (batch, k, n), or (batch, n, k) where it is transposed."""
    batch, k, n = b.shape if not spec.transpose_b else (b.shape[0], b.shape[2], b.shape[1])
    b = b.reshape(batch * n, k) if spec.transpose_b else jnp.swapaxes(b, 0, 1).reshape(k, batch * n)
    d = bind(spec, a, b, auto=auto)["d"]
    return d.reshape(d.shape[0], batch, n)


def _matmul_epilog_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec, auto: bool
) -> tuple[list[jax.Array], list[int | None]]:
    if spec.rule.gradient:
        return _split_gradient(args, dims, spec, auto)
    names = ("a", "b", *spec.operand_names)
    operands = dict(zip(names, map(_front, args, dims), strict=True))
    batched = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    is_decoded = low_precision.is_low_precision(low_precision.operand_type(args[0].dtype, args[1].dtype))
    is_only_bias = spec.epilog == Epilog.BIAS and not spec.has_c and not is_decoded
    if is_only_bias and "a" not in batched:
        return _split_bias(args, dims, spec, auto)
    size = next(operands[name].shape[0] for name in names if name in batched)
    if _folds_into_rows(spec, batched):
        for name in spec.operand_names:
            if has_rows(name) and name not in batched:
                operands[name] = jnp.broadcast_to(operands[name][None], (size, *operands[name].shape))
        outputs = bind_rows(spec.folded(size), operands.pop("a"), operands.pop("b"), operands, auto=auto)
    elif may_batch(spec) and batched.issuperset("ab"):
        whole = {
            name: x if name in batched else jnp.broadcast_to(x[None], (size, *x.shape)) for name, x in operands.items()
        }
        outputs = bind(spec, whole.pop("a"), whole.pop("b"), whole, auto=auto, batched=True)
    else:
        fixed = {name: operands.pop(name) for name in names if name not in batched}

        def one(mapped: dict[str, jax.Array]) -> dict[str, jax.Array]:
            each = fixed | mapped
            return bind(spec, each.pop("a"), each.pop("b"), each, auto=auto)

        outputs = jax.lax.map(one, operands)
    results = [outputs[name] for name in spec.output_names]
    return results, [0] * len(results)


def _split_bias(
    args: Sequence[jax.Array], dims: BatchDims, spec: MatmulSpec, auto: bool
) -> tuple[list[jax.Array], list[int | None]]:
    """Batched weights fold into columns where no bias is in the way: it is added behind, ahead of the one rounding."""
    a, b, bias = args
    plain = spec.bilinear(out_dtype=accumulator(low_precision.operand_type(a.dtype, b.dtype)))
    if dims[1] is None:
        z = bind(plain, a, b, auto=auto)["d"]
    else:
        z = jax.vmap(lambda b: bind(plain, a, b, auto=auto)["d"], in_axes=dims[1])(b)

    def add(z: jax.Array, bias: jax.Array) -> jax.Array:
        return (z + bias.astype(z.dtype)[None, :]).astype(spec.out_dtype)

    return [jax.vmap(add, in_axes=(None if dims[1] is None else 0, dims[2]))(z, bias)], [0]


def _split_gradient(
    args: Sequence[jax.Array], dims: BatchDims, spec: MatmulSpec, auto: bool
) -> tuple[list[jax.Array], list[int | None]]:
    """A bias gradient is one per batch element, so it leaves the call, whose rows then fold."""
    if spec.determinism == "topology":
        raise NotImplementedError(
            f'jaxmp: determinism="topology" has no epilog {spec.epilog.name} under vmap, for XLA completes its sums; '
            'take the gradient of a bias, or pass determinism="batch"'
        )
    row = spec.rule
    plain = spec.replace(epilog=row.without_gradient)

    def one(*args: jax.Array) -> jax.Array:
        return _bind_in_order(plain, args, auto)

    d = jax.vmap(one, in_axes=tuple(dims), out_axes=0)(*args)
    x, dim = {"a": (args[0], dims[0]), "b": (args[1], dims[1]), "d": (d, 0)}[bias_grad.summed(row.gradient)]
    sums = functools.partial(bias_grad.bias_gradient, row.gradient, spec)
    if dim is None:
        return [d, sums(x)], [0, None]
    return [d, jax.vmap(sums, in_axes=dim)(x)], [0, 0]


def _bind_in_order(spec: MatmulSpec, args: Sequence[jax.Array], auto: bool) -> jax.Array:
    a, b, *extra = args
    return bind(spec, a, b, dict(zip(spec.operand_names, extra, strict=True)), auto=auto)["d"]


def _folds_into_rows(spec: MatmulSpec, batched: set[str]) -> bool:
    """Whether everything that is batched has rows, and b has not."""
    if spec.scales.amax_d or spec.scales.amax_aux or spec.scales.a not in (low_precision.NONE, low_precision.SCALAR):
        return False  # the maximum is one a product, and scales have rows of their own
    is_fixed = all(name in DIMS and has_rows(name) for name in batched - {"a"})
    return "a" in batched and is_fixed and not _crosses_blocks(spec, a_is_batched=True, b_is_batched=False)


def _activation_grad_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, activation: str, spec: MatmulSpec | None, auto: bool
) -> tuple[jax.Array, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    aux, t = (
        jnp.broadcast_to(x[None], (size, *x.shape)) if dim is None else _front(x, dim)
        for x, dim in zip(args, dims, strict=True)
    )
    rows = activation_grad(activation, merge_rows(aux), merge_rows(t), spec, auto=auto)
    return rows.reshape(t.shape), 0


def _activated_matmul_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec, activation: str
) -> tuple[jax.Array, int]:
    parts = functools.partial(activated_matmul_parts, spec=spec, activation=activation)
    return jax.vmap(parts, in_axes=tuple(dims))(*args), 0


_RULES: dict[jax_compat.Primitive, Callable[..., Any]] = {
    matmul_p: functools.partial(_matmul_batch_rule, auto=False),
    matmul_epilog_p: functools.partial(_matmul_epilog_batch_rule, auto=False),
    AUTO_TWIN[matmul_p]: functools.partial(_matmul_batch_rule, auto=True),
    AUTO_TWIN[matmul_epilog_p]: functools.partial(_matmul_epilog_batch_rule, auto=True),
    activation_grad_p: functools.partial(_activation_grad_batch_rule, auto=False),
    auto_activation_grad_p: functools.partial(_activation_grad_batch_rule, auto=True),
    activated_matmul_p: _activated_matmul_batch_rule,
    **{primitive: functools.partial(batch_rule, primitive) for primitive in ONE},
}
for _primitive, _rule in _RULES.items():
    batching.primitive_batchers[_primitive] = jax_compat.under_known_flags(_rule)
