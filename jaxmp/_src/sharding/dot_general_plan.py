"""How a product with dimension numbers runs over a mesh."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxmp._src.contraction import contraction, planner
from jaxmp._src.contraction.contraction import Contraction, Dims, Layout
from jaxmp._src.sharding import meshes, shardings
from jaxmp._src.sharding.on_shards import Frame, frame_of
from jaxmp._src.spec.matmul_spec import accumulator, axes_text
from jaxmp._src.spec.refusal import InvalidValue
from jaxmp._src.validation.dimension_numbers import DimensionNumbers, pick


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """How one product runs, hashable; `columns` are rhs's free dimensions in the order in which they fold."""

    contraction: Contraction
    columns: tuple[int, ...]
    frame: Frame


def plan_product(
    numbers: DimensionNumbers,
    placement: meshes.Placement,
    operands: tuple[jax.Array, jax.Array],
    dtypes: tuple[np.dtype, np.dtype],
    *,
    gathers_inside: bool,
) -> ProductPlan:
    """The plan of a product of global arrays, in `dtypes` (of the operands, of the result).

    `gathers_inside`: operands may be gathered inside shard_map, whose transpose is a reduce-scatter.
    """
    lhs, rhs = operands
    layout = Layout(placement.a, placement.b, _asked_result(numbers, placement))
    shapes = lhs.shape, rhs.shape, numbers.result(lhs.shape, rhs.shape)
    mesh = placement.mesh.shape
    for argument, dims, shape in zip(("{a}", "{b}", "the result"), layout, shapes, strict=True):
        shardings.check_dims(argument, dims, shape, mesh)
    given = _described(numbers, lhs.ndim, rhs.ndim, layout)
    itemsizes = lhs.dtype.itemsize, rhs.dtype.itemsize, dtypes[1].itemsize, accumulator(dtypes[0]).itemsize
    terms = planner.Terms(planner.extents(given, shapes, mesh), tuple(mesh.items()), itemsizes, keeps_result=False)
    plan = planner.plan(given, lambda: terms, gathers_k=gathers_inside and _is_plain(numbers))
    columns = tuple(given.b.index(index) for index in plan.columns)
    return ProductPlan(
        plan, columns, frame_of((placement.mesh, placement.is_explicit), layout, plan, gathers_inside=gathers_inside)
    )


def _is_plain(numbers: DimensionNumbers) -> bool:
    """Whether operands are matrices as they are stored, but for a batch: lhs (rows..., k) and rhs (k, columns...)."""
    if len(numbers.lhs_contract) != 1:
        return False
    (i,), (j,) = numbers.lhs_contract, numbers.rhs_contract
    return all(free < i for free in numbers.lhs_free) and all(free > j for free in numbers.rhs_free)


def _asked_result(numbers: DimensionNumbers, placement: meshes.Placement) -> Dims:
    """The sharding that the result is to have."""
    if placement.out is not None:
        return placement.out
    lhs, rhs = placement.a, placement.b
    batch = []
    for i, j in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True):
        if lhs[i] and rhs[j] and lhs[i] != rhs[j]:
            raise InvalidValue(
                f"batch dimension {i} of {{a}} is sharded over {axes_text(lhs[i])} but dimension {j} of {{b}} over "
                f"{axes_text(rhs[j])}; pass out_sharding, or reshard one of them"
            )
        batch.append(lhs[i])  # as JAX 0.10 has it; later versions refuse other shardings in rhs
    contracted = [(lhs[i], rhs[j]) for i, j in zip(numbers.lhs_contract, numbers.rhs_contract, strict=True)]
    free = shardings.default_result(pick(lhs, numbers.lhs_free), pick(rhs, numbers.rhs_free), contracted)
    used = [axis for dim in (*batch, *free) for axis in dim]
    if repeated := [axis for axis in sum(batch, ()) if used.count(axis) > 1]:
        raise InvalidValue(
            f"a batch dimension and a free one are both sharded over axis {repeated[0]!r}, so the sharding of "
            "the result is ambiguous; pass out_sharding"
        )
    return (*batch, *free)


def _described(numbers: DimensionNumbers, lhs_ndim: int, rhs_ndim: int, layout: Layout) -> Contraction:
    """The product in letters."""
    letters = iter(contraction.LETTERS)
    a = [next(letters) for _ in range(lhs_ndim)]
    b = [next(letters) for _ in range(rhs_ndim)]
    same = zip((*numbers.lhs_batch, *numbers.lhs_contract), (*numbers.rhs_batch, *numbers.rhs_contract), strict=True)
    for i, j in same:
        b[j] = a[i]
    return Contraction("".join(a), "".join(b), "".join(numbers.result(a, b)), layout)
