"""Runs one device's part of a call: from shards of any rank to the calls on matrices that the plan needs, and back.

This module does around a library call what the call itself does not do. Before it, leading dimensions fold into rows,
and operands are gathered. After it, alpha and beta that are arrays and the epilog of a transposed product are applied.
"""

from __future__ import annotations

import math

import jax
from jax import lax

from jaxmp._src.core.contraction.contraction import Contraction, Dim
from jaxmp._src.core.lowering import numerics
from jaxmp._src.core.primitive import bias_grad, collectives
from jaxmp._src.core.primitive.primitives import (
    bind,
    bind_named,
    bind_rows,
    fold_rows,
    global_amax,
    has_rows,
    over_batch,
)
from jaxmp._src.core.spec import epilogs, low_precision, matmul_spec
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.extents import axes_text
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.core.validation.comm_options import fit_comm_options
from jaxmp._src.core.validation.dimension_numbers import DimensionNumbers, pick
from jaxmp._src.core.validation.epilog_checks import check_gathered_scales
from jaxmp._src.core.validation.scale_checks import check_stored
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands, Shape


def bind_plan(plan: Contraction, spec: MatmulSpec, operands: Operands) -> Operands:
    """Runs one device's part of a planned call, on shards by name; returns the shards of the results by name. If the
    plan computes d transposed, the operands are exchanged; with `determinism` "batch" or "topology" they are gathered
    instead, and the call is local. Bias gradients of d and largest absolute values are of the whole result. Raises as
    `_untransposed` and `_sum_over_data` do."""
    if plan.is_transposed and spec.fixed_reduction_order:
        plan, spec, operands = _untransposed(plan, spec, operands)
    # Inside a user's shard_map the global array is not known, so sums go rank after rank.
    if spec.global_order and not spec.contraction.is_grid and not plan.is_partial:
        spec = _with_order(plan, spec, operands["a"])
    if plan.is_transposed:
        outputs = _bind_transposed(plan, spec, operands)
    else:
        outputs = bind_shards(spec, plan.dimension, operands)
        if spec.rule.gradient:
            outputs = _sum_over_data(spec, outputs, plan.outside_group(sum(plan.layout.d[:-1], ())))
    if spec.scales.amax_d or spec.scales.amax_aux:
        return global_amax(spec, outputs, tuple(axis for axis, _ in spec.group.mesh))
    return outputs


def _bind_transposed(plan: Contraction, spec: MatmulSpec, operands: Operands) -> Operands:
    """Computes D = (op(b)^T @ op(a)^T)^T: the columns of D take the place that rows have in the pattern. XLA then adds
    C and applies the epilog, except a sum of an operand, which the call returns."""
    a, b, is_transposed = operands["a"], operands["b"], spec.transpose_a and operands["a"].ndim == 2
    rows = a.shape[1:] if is_transposed else a.shape[:-1]
    if a.ndim > 2:
        a = a.swapaxes(-1, -2) if spec.transpose_a else a
        rows = a.shape[:-1]
        a = fold_rows(a, len(rows), 0, 1)
    is_plain = not (spec.has_c or spec.traced or low_precision.is_scaled(spec.out_dtype)) and not spec.epilog
    accumulated = matmul_spec.accumulator(low_precision.operand_type(a.dtype, b.dtype), spec.out_dtype)
    swapped = spec.replace(transpose_a=is_transposed).swapped()
    transposed = swapped.bilinear(
        out_dtype=spec.out_dtype if is_plain else accumulated,  # cotangents have this type too
        is_typed=jax_compat.is_vma_checked(),
        epilog=epilogs.TRANSPOSED.get(spec.epilog, Epilog.NONE),
        scales=matmul_spec.ScaleModes(a=spec.scales.b, b=spec.scales.a),
        traced=spec.traced,
    )
    extra = {}
    for name in transposed.operand_names:
        extra[name] = operands["scale_b"] if name == "scale_a" else operands["scale_a"]
    if not low_precision.is_of_tensor(spec.scales.a):
        extra["scale_b"] = fold_rows(extra["scale_b"], len(rows), 0, 1)
    z, *gradient = bind(fit_comm_options(transposed), b, a, extra).values()
    if gradient:
        rest = _apply_epilog(z.T, operands, spec.replace(alpha=1.0, epilog=Epilog.NONE), rows)
        return rest | {spec.rule.gradient: gradient[0].astype(spec.out_dtype)}
    outputs = _apply_epilog(z.T, operands, spec.replace(alpha=1.0), rows)
    return _sum_over_data(spec, outputs, sum(plan.layout.d[:-1], ()))


def _sum_over_data(spec: MatmulSpec, outputs: Operands, axes: tuple[str, ...]) -> Operands:
    """Sums the bias gradients of d in `outputs` over `axes`, which shard d's rows outside the call's group; returns
    other results unchanged. Raises NotImplementedError for such a sum with `determinism` "topology"."""
    names = [name for name in outputs if axes and bias_grad.summed(name) == "d"]
    if names and spec.global_order:
        raise spec.level.mesh_refusal(
            f"has no epilog {spec.epilog.name} on rows that are sharded over {axes_text(axes)} outside "
            f"the call, because XLA would complete {names[0]}",
            "take the gradient of a bias",
        )
    with jax.named_scope(bias_grad.SCOPE):
        return {
            name: collectives.psum(x, axes, source_line=spec.source_line) if name in names else x
            for name, x in outputs.items()
        }


def _untransposed(plan: Contraction, spec: MatmulSpec, operands: Operands) -> tuple[Contraction, MatmulSpec, Operands]:
    """Turns a call that computes D transposed into a local call on gathered operands, with the library's epilog. Raises
    NotImplementedError for a gradient epilog, and for scales that cannot be gathered.

    XLA's epilog is not bit-identical to the library's, and its bits depend on what XLA fuses it with.
    """
    why = f"where columns of the result are gathered or scattered over {axes_text(plan.row_axes)}"
    if spec.rule.gradient:
        raise spec.level.refusal(f"has no epilog {spec.epilog.name} {why}", "take another out_sharding")
    check_gathered_scales(spec, why)
    a, b, (k, n) = operands["a"], operands["b"], (1, 0) if spec.transpose_b else (0, 1)
    of_columns = ["scale_b"] * (spec.scales.b == low_precision.OUTER_VEC)
    with jax.named_scope("jaxmp_whole_operands"):
        if plan.gathers:
            operands = operands | {x: gathered(plan.row_axes, operands[x], 0, spec.source_line) for x in of_columns}
            b = gathered(plan.row_axes, b, n, spec.source_line)
        else:
            operands = operands | {x: collectives.own_part(operands[x], 0, plan.row_axes) for x in of_columns}
            a = gathered(plan.row_axes, a, a.ndim - (2 if spec.transpose_a else 1), spec.source_line)
            b = collectives.all_to_all(b, plan.row_axes, n, k, source_line=spec.source_line)
    return plan.local(), spec.ungrouped(), operands | {"a": a, "b": b}


def _with_order(plan: Contraction, spec: MatmulSpec, a: jax.Array) -> MatmulSpec:
    """Returns the spec with the order of D's rows and columns: the extent and axes of each row dimension, and the axes
    of columns. `a` is the device's shard, with its leading dimensions. The group's row axes are left out. If the call
    gathers, the extent of the gathered dimension is the extent over all its ranks."""
    shape = (*a.shape[:-2], a.shape[-1]) if spec.transpose_a else a.shape[:-1]
    rows = [
        (extent, tuple(axis for axis in axes if axis not in spec.group.row_axes))
        for extent, axes in zip(shape, plan.layout.d[:-1], strict=True)
    ]
    if spec.contraction.gathers:
        extent, axes = rows[plan.dimension]
        rows[plan.dimension] = (extent * spec.group.nranks, axes)
    return spec.reorder(rows=tuple(rows), cols=plan.layout.d[-1])


def gathered(axes: Dim, x: jax.Array, dimension: int, source_line: str, to: str = "invarying") -> jax.Array:
    """Gathers an operand because the shardings require it. Returns it as it is over one device if `to` is "varying"."""
    if to == "varying" and lax.axis_size(axes) == 1:
        return x
    with jax.named_scope("jaxmp_all_gather"):
        return collectives.all_gather(x, axes, axis=dimension, to=to, source_line=source_line)


def _apply_epilog(z: jax.Array, operands: Operands, spec: MatmulSpec, rows: tuple[int, ...]) -> Operands:
    """Applies the epilog to a product that a call left plain; returns the results by name. `rows`: the extents of the
    row dimensions of operands and results, which are one dimension of z.

    A bias gradient of d covers this device's rows only.
    """
    folded = {name: x.reshape(z.shape[0], x.shape[-1]) if has_rows(name) else x for name, x in operands.items()}
    outputs = numerics.apply_epilog(z, folded, spec.ungrouped())
    return {name: x.reshape(*rows, x.shape[-1]) if has_rows(name) else x for name, x in outputs.items()}


def bind_shards(spec: MatmulSpec, dimension: int, operands: Operands) -> Operands:
    """Returns the results by name from shards; a may have leading dimensions. `dimension`: the dimension of a that is
    gathered or scattered. If alpha or beta is an array, XLA applies alpha, C and the epilog to the plain product."""
    if not spec.is_typed:
        spec = spec.replace(is_typed=jax_compat.is_vma_checked())
    operands = collectives.cast_reduced(operands, spec.group.axes)
    a, b = operands["a"], operands["b"]
    if spec.traced and set(spec.traced) <= set(operands):
        # cuBLASMp takes its scalars from the host, before the call. A traced scalar instead scales the accumulated
        # product, in operations that XLA fuses with C and the epilog.
        out = matmul_spec.accumulator(low_precision.operand_type(a.dtype, b.dtype))
        plain = spec.bilinear(out_dtype=out, traced=spec.traced)
        z = bind_shards(plain, dimension, {"a": a, "b": b})["d"]
        return _apply_epilog(fold_rows(z, z.ndim - 1, 0, 1), operands, spec.replace(alpha=1.0), z.shape[:-1])
    operands = {name: operands[name] for name in spec.names}
    if a.ndim == 2:
        return bind_named(spec, operands)
    if spec.global_order:
        ordered = spec.contraction.gathers or spec.contraction.scatters
        spec = spec.reorder(outer_rows=math.prod(a.shape[:dimension]) if ordered else 1)
    return bind_rows(spec, operands, dimension)


# Any dimension numbers ------------------------------------------------------------------------------------------


def bind_folded(
    spec: MatmulSpec,
    numbers: DimensionNumbers,
    operands: Operands,
    *,
    plan: Contraction | None = None,
    shape: Shape | None = None,
) -> Operands:
    """Runs a product with dimension `numbers`, as a product of a (rows..., k) or (k, m) and b (k, n) or (n, k) for each
    index of the batch. `shape`: the shape of a shard of d under a `plan`; without a plan the product is local, or XLA's
    partitioner divides it. Returns {"d": d}. Raises as `check_stored` and `bind_plan` do."""
    a, b = collectives.cast_reduced({name: operands[name] for name in "ab"}).values()  # because vmap has no such cast
    shape = numbers.result(a.shape, b.shape) if shape is None else shape
    columns = tuple(map(plan.b.index, plan.columns)) if plan else numbers.rhs_free
    # Row dimensions stay separate if ranks share one of them that is not the first.
    keeps_rows = plan is not None and plan.dimension > 0
    front = len(numbers.lhs_batch)
    a, transpose_a = _matrix(a, numbers.lhs_batch, numbers.lhs_free, numbers.lhs_contract, keeps_rows)
    b, transpose_b = _matrix(b, numbers.rhs_batch, numbers.rhs_contract, columns)
    spec = spec.replace(transpose_a=transpose_a, transpose_b=transpose_b)
    if low_precision.is_scaled(low_precision.operand_type(a.dtype, b.dtype)):
        check_stored(spec, a.dtype)

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        matrices = {"a": a, "b": b}
        return (bind_plan(plan, spec, matrices) if plan else bind_shards(spec, 0, matrices))["d"]

    if not spec.is_unsettled:  # else XLA may shard each dimension of the batch
        a, b = (x.reshape(*[math.prod(x.shape[:front])] * (front > 0), *x.shape[front:]) for x in (a, b))
        front = min(front, 1)
    d = over_batch(multiply, front)(a, b)
    ahead = len(numbers.lhs_batch) + len(numbers.lhs_free)
    order = tuple(map(numbers.rhs_free.index, columns))
    d = d.reshape(*shape[:ahead], *pick(shape[ahead:], order))
    return {"d": lax.transpose(d, (*range(ahead), *(ahead + order.index(i) for i in range(len(order)))))}


def _matrix(
    x: jax.Array, batch: Shape, first: Shape, second: Shape, keeps_first: bool = False
) -> tuple[jax.Array, bool]:
    """Returns (x as (*batch, first, second), False), or (x as (*batch, second, first), True) if only the latter needs
    no copy. `batch`, `first`, `second`: the numbers of x's dimensions.

    The dimensions in `first` become one, and the dimensions in `second` too. If `keeps_first`, the dimensions in
    `first` stay as they are, and the result is always the former.
    """
    stored = tuple(i for i in range(x.ndim) if i not in batch)
    is_transposed = stored == second + first and stored != first + second and not keeps_first
    parts = [pick(x.shape, first) if keeps_first else (math.prod(pick(x.shape, first)),)]
    parts.insert(0 if is_transposed else 1, (math.prod(pick(x.shape, second)),))
    x = lax.transpose(x, (*batch, *(stored if is_transposed else first + second)))
    return x.reshape(*x.shape[: len(batch)], *parts[0], *parts[1]), is_transposed
