"""vmap rules: fold the batch into rows or columns if one call can compute it, else keep it as a batch.

only a (and c) batched   rows:    (batch, m, k) -> (batch * m, k)
only b batched           columns: (batch, k, n) -> (k, batch * n), without C and epilog (a bias is added afterwards)
both                     a batched product
else                     one call per index in a scan, also for both on one rank if the caller asks for a library or for
                         its order of sums

XLA has a batched product (one dot and one collective for the whole batch), cuBLASMp has none. The better one is known
only when the program is lowered (`backend`), so a batch stays one equation until then. All its operands have the batch
dimensions in front. It means vmap of the product of one index, and its rules are vmap of the rules of that product. On
automatic axes a batch always stays one equation and its dimensions are not merged, so that XLA may shard each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.primitive.jvp import matmul_jvp_rule, zero_tangent
from jaxmp._src.core.primitive.primitives import (
    activated_matmul_parts,
    activation_grad,
    bind,
    bind_named,
    bind_operands,
    bind_rows,
    by_batch,
    fold_rows,
    has_rows,
    matmul_abstract_eval,
)
from jaxmp._src.core.primitive.transpose import matmul_transpose_rule
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, accumulator
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Aval, BatchDims, Operand, Tangent, is_symbolic


def _front(x: jax.Array, dim: int | None) -> jax.Array:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def matmul_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Returns (the results, their batch dimensions) by the first way of the table above that is possible."""
    if spec.rule.gradient:
        return _split_gradient(args, dims, spec)
    names = spec.names
    operands = dict(zip(names, map(_front, args, dims), strict=True))
    batched = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    is_decoded = low_precision.is_low_precision(low_precision.operand_type(args[0].dtype, args[1].dtype))
    is_only_bias = spec.epilog == Epilog.BIAS and not spec.has_c and not is_decoded
    if is_only_bias and "a" not in batched:
        return _split_bias(args, dims, spec)
    # In the global order a batch is not folded into columns: the gradient of a would sum it inside each rank's columns.
    is_plain = spec.is_bilinear and not is_decoded and not spec.global_order
    if is_plain and "a" not in batched and not _crosses_blocks(spec, "b"):
        b = operands["b"]
        batch, n, k = b.shape if spec.transpose_b else (b.shape[0], b.shape[2], b.shape[1])
        b = b.reshape(batch * n, k) if spec.transpose_b else jnp.swapaxes(b, 0, 1).reshape(k, batch * n)
        d = bind(spec, operands["a"], b)["d"]
        return [d.reshape(d.shape[0], batch, n)], [1]
    size = next(operands[name].shape[0] for name in names if name in batched)
    is_known = not spec.distributions and not is_symbolic(*args)
    if _folds_into_rows(spec, batched):
        for name in spec.operand_names:
            if _folds(spec, name) and name not in batched:
                operands[name] = jnp.broadcast_to(operands[name][None], (size, *operands[name].shape))
        outputs = bind_rows(spec.folded(size), operands)
    elif batched.issuperset("ab") and (may_batch(spec, *args) or (is_known and spec.group.nranks > 1)):
        whole = {
            name: x if name in batched else jnp.broadcast_to(x[None], (size, *x.shape)) for name, x in operands.items()
        }
        outputs = bind_named(spec.replace(batch=1), whole)
    else:
        fixed = {name: operands.pop(name) for name in names if name not in batched}
        outputs = jax.lax.map(lambda mapped: bind_named(spec, fixed | mapped), operands)
    results = [outputs[name] for name in spec.output_names]
    return results, [0] * len(results)


def _crosses_blocks(spec: MatmulSpec, batched: str) -> bool:
    """True if a fold of the batch would move blocks to other ranks: with block-cyclic operands, and with a batched
    operand ("a" or "b") of a grid that is stored transposed."""
    return bool(spec.distributions or (spec.contraction.is_grid and getattr(spec, f"transpose_{batched}")))


def _split_bias(
    args: Sequence[jax.Array], dims: BatchDims, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int | None]]:
    """Computes the product without bias, so that batched weights fold into columns; adds the bias and rounds once. Only
    b and the bias may be batched."""
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
    """Sums each element's bias gradient outside the call, so that the call's rows can be folded. The gradient has no
    batch if the matrix that it sums has none. Raises NotImplementedError in the global order."""
    if spec.global_order:
        raise spec.level.mesh_refusal(
            f"has no epilog {spec.epilog.name} under vmap, because XLA completes its sums",
            "take the gradient of a bias",
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
    """True if a is batched, b is not, and every other batched operand has rows. False for largest absolute values, for
    an a with scales of blocks, and if `_crosses_blocks`."""
    if spec.scales.amax_d or spec.scales.amax_aux or spec.scales.a in low_precision.BLOCK:
        return False  # each product has one maximum, and scales of blocks may span rows
    is_fixed = all(_folds(spec, name) for name in batched - {"a"})
    return "a" in batched and is_fixed and not _crosses_blocks(spec, "a")


def _folds(spec: MatmulSpec, name: str) -> bool:
    """True if an operand other than a and b has an entry for each row of a or d."""
    return has_rows(name) or (name == "scale_a" and spec.scales.a == low_precision.OUTER_VEC)


def activation_grad_batch_rule(
    args: Sequence[jax.Array], dims: BatchDims, *, activation: str, spec: MatmulSpec | None
) -> tuple[jax.Array, int]:
    """Folds the batch into the rows of `aux` and `t`."""
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


def may_batch(spec: MatmulSpec, *operands: jax.Array) -> bool:
    """True if a batch of such products may be one equation: if XLA partitions the call and no extent is symbolic, or if
    the caller asks neither for a library nor for its order of sums. False for block-cyclic operands."""
    is_partitioned = spec.is_unsettled and not is_symbolic(*operands)
    return (is_partitioned or not spec.asked_of_library) and not spec.distributions


def batched_abstract_eval(*avals: Aval, spec: MatmulSpec) -> list[Aval]:
    outputs = abstract_eval(*map(jax_compat.without_first_dimension, avals), spec=spec)
    return [jax_compat.with_first_dimension(aval, avals[0].shape[0]) for aval in outputs]


def batched_jvp_rule(primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec) -> tuple[Any, Any]:
    def one(primals: list[jax.Array], moving: dict[int, jax.Array]) -> tuple[Any, dict[int, jax.Array]]:
        given = [moving.get(i, zero_tangent(x)) for i, x in enumerate(primals)]
        outputs, moved = jvp_rule(primals, given, spec=spec)
        return outputs, _nonzero(moved)

    outputs, moved = jax.vmap(one)(list(primals), _nonzero(tangents))
    return outputs, [moved.get(i, zero_tangent(x)) for i, x in enumerate(outputs)]


def _nonzero(xs: Sequence[Any]) -> dict[int, jax.Array]:
    """Returns the arrays in `xs` by position, without None, `ad.Zero` and `ad.UndefinedPrimal`."""
    return {i: x for i, x in enumerate(xs) if not isinstance(x, ad.Zero | ad.UndefinedPrimal | None)}


def batched_transpose_rule(cts: Sequence[Any], *operands: Operand, spec: MatmulSpec) -> list[jax.Array | None]:
    known, given = _nonzero(operands), _nonzero(cts)
    if not given:
        return [None] * len(operands)

    def of_one(kind: Any, x: Any) -> Any:
        return kind(jax_compat.without_first_dimension(x.aval))

    def one(known: dict[int, jax.Array], given: dict[int, jax.Array]) -> dict[int, jax.Array]:
        each = [known[i] if i in known else of_one(ad.UndefinedPrimal, x) for i, x in enumerate(operands)]
        ct = [given[i] if i in given else of_one(ad.Zero, x) for i, x in enumerate(cts)]
        return _nonzero(transpose_rule(ct, *each, spec=spec))

    results = jax.vmap(one)(known, given)
    return [results.get(i) for i in range(len(operands))]


def batched_batch_rule(
    operands: Sequence[jax.Array], dims: BatchDims, *, spec: MatmulSpec
) -> tuple[list[jax.Array], list[int]]:
    """Maps a batch of products over a new batch. If all operands have the new one, it becomes the first dimension of
    one equation and of the results. Otherwise each index of the old one maps over it, and it is the results' second
    dimension."""
    batched = [dim for dim in dims if dim is not None]
    if len(batched) == len(operands):
        outputs = bind_operands(spec.replace(batch=spec.batch + 2), *map(_front, operands, dims))
        return outputs, [0] * len(outputs)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in zip(operands, dims, strict=True)]
    inner = jax.vmap(functools.partial(bind_operands, spec), in_axes=tuple(None if dim is None else 0 for dim in dims))
    outputs = jax.vmap(inner)(*moved)
    return outputs, [1] * len(outputs)


abstract_eval = by_batch(matmul_abstract_eval, batched_abstract_eval)
jvp_rule = by_batch(matmul_jvp_rule, batched_jvp_rule)
transpose_rule = by_batch(matmul_transpose_rule, batched_transpose_rule)
batch_rule = by_batch(matmul_batch_rule, batched_batch_rule)
