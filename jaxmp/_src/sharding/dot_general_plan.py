"""How a product with dimension numbers runs over a mesh: its pattern, and the shardings that operands take for it.

The free dimensions of lhs are the rows of one product of matrices, those of rhs its columns. What several dimensions
are split over counts as one list of axes.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmp._src.sharding import layouts, meshes, patterns
from jaxmp._src.sharding.layouts import Layout
from jaxmp._src.sharding.meshes import partition_spec
from jaxmp._src.sharding.patterns import Dim, Dims
from jaxmp._src.spec.matmul_spec import Pattern, accumulator, axes_text
from jaxmp._src.validation.dimension_numbers import DimensionNumbers, pick


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """How one product runs, hashable.

    `columns` are rhs's free dimensions in the order in which they fold into columns: one that is gathered or scattered
    comes first, since ranks are the slowest index of what they share. `in_specs` are the shardings in which operands
    enter shard_map, `gathers` what is gathered there, `out_spec` that of the call's result, and `asked` the one that it
    is to have.
    """

    pattern: patterns.Plan
    columns: tuple[int, ...]
    in_specs: tuple[P, P]
    gathers: tuple[layouts.Gather, ...]
    out_spec: P
    asked: P


def plan_product(
    name: str,
    numbers: DimensionNumbers,
    placement: meshes.Placement,
    lhs: jax.Array,
    rhs: jax.Array,
    dtypes: tuple[np.dtype, np.dtype],
    *,
    gathers_inside: bool,
) -> ProductPlan:
    """The plan of a product of global arrays, in `dtypes` (of the operands, of the result).

    `gathers_inside`: operands may be gathered inside shard_map, whose transpose is a reduce-scatter.
    """
    given = Layout(placement.a, placement.b, _asked_result(name, numbers, placement))
    shapes = lhs.shape, rhs.shape, numbers.result(lhs.shape, rhs.shape)
    for argument, dims, shape in zip(("lhs", "rhs", "the result"), given, shapes, strict=True):
        patterns.check_dims(name, argument, dims, shape, placement.mesh.shape)
    gathers_k = gathers_inside and _is_plain(numbers)
    found = _find(numbers, given, gathers_k=gathers_k)
    if found is None or found[0].gathers_k:
        described = _described(numbers, placement, lhs, rhs, dtypes, gathers_k=gathers_k)
        found = _find(numbers, layouts.cheapest(described, given), gathers_k=gathers_k)
        assert found is not None, given
    plan, columns, layout = found
    (a, b), gathers = layouts.entries(given, layout) if gathers_inside else ((layout.a, layout.b), ())
    specs = partition_spec(a), partition_spec(b)
    return ProductPlan(plan, columns, specs, gathers, partition_spec(layout.d), partition_spec(given.d))


def _is_plain(numbers: DimensionNumbers) -> bool:
    """Whether operands are matrices as they are stored, but for a batch: lhs (rows..., k) and rhs (k, columns...)."""
    if len(numbers.lhs_contract) != 1:
        return False
    (i,), (j,) = numbers.lhs_contract, numbers.rhs_contract
    return all(free < i for free in numbers.lhs_free) and all(free > j for free in numbers.rhs_free)


def _asked_result(name: str, numbers: DimensionNumbers, placement: meshes.Placement) -> Dims:
    """The sharding that the result is to have."""
    if placement.out is not None:
        return placement.out
    lhs, rhs = placement.a, placement.b
    batch = []
    for i, j in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True):
        if lhs[i] and rhs[j] and lhs[i] != rhs[j]:
            raise ValueError(
                f"{name}: batch dimension {i} of lhs is sharded over {axes_text(lhs[i])} but dimension {j} of rhs over "
                f"{axes_text(rhs[j])}; pass out_sharding, or reshard one of them"
            )
        batch.append(lhs[i])  # as JAX 0.10 has it; later versions refuse other shardings in rhs
    contracted = [(lhs[i], rhs[j]) for i, j in zip(numbers.lhs_contract, numbers.rhs_contract, strict=True)]
    free = patterns.default_result(name, pick(lhs, numbers.lhs_free), pick(rhs, numbers.rhs_free), contracted)
    used = [axis for dim in (*batch, *free) for axis in dim]
    if repeated := [axis for axis in sum(batch, ()) if used.count(axis) > 1]:
        raise ValueError(
            f"{name}: a batch dimension and a free one are both sharded over axis {repeated[0]!r}, so the sharding of "
            "the result is ambiguous; pass out_sharding"
        )
    return (*batch, *free)


def _described(
    numbers: DimensionNumbers,
    placement: meshes.Placement,
    lhs: jax.Array,
    rhs: jax.Array,
    dtypes: tuple[np.dtype, np.dtype],
    *,
    gathers_k: bool,
) -> layouts.Product:
    """What the call multiplies, for the search of a layout."""
    letters = iter(string.ascii_letters)
    indices = {("lhs", i): next(letters) for i in range(lhs.ndim)}
    same = zip((*numbers.lhs_batch, *numbers.lhs_contract), (*numbers.rhs_batch, *numbers.rhs_contract), strict=True)
    indices |= {("rhs", j): indices["lhs", i] for i, j in same}
    indices |= {("rhs", j): next(letters) for j in numbers.rhs_free}
    a, b = ([indices[side, i] for i in range(x.ndim)] for side, x in (("lhs", lhs), ("rhs", rhs)))
    dtype, out = dtypes
    mesh, extents = placement.mesh.shape, dict(zip((*a, *b), (*lhs.shape, *rhs.shape), strict=True))
    return layouts.Product(
        "".join(a),
        "".join(b),
        "".join(numbers.result(a, b)),
        tuple((index, layouts.nominal_extent(extent, mesh)) for index, extent in extents.items()),
        tuple(mesh.items()),
        (lhs.dtype.itemsize, rhs.dtype.itemsize, out.itemsize, accumulator(dtype).itemsize),
        keeps_result=False,
        gathers_k=gathers_k,
    )


def _find(
    numbers: DimensionNumbers, layout: Layout, *, gathers_k: bool
) -> tuple[patterns.Plan, tuple[int, ...], Layout] | None:
    """(plan, order of the columns, the layout with what operands take their part of), or None where no call fits."""
    lhs, rhs = _agreed(numbers.lhs_batch, numbers.rhs_batch, layout.a, layout.b)
    if pick(lhs, numbers.lhs_batch) == pick(rhs, numbers.rhs_batch) == layout.d[: len(numbers.lhs_batch)]:
        plan = _grid(numbers, lhs, rhs, layout.d)
        if plan is not None:
            return plan, numbers.rhs_free, Layout(lhs, rhs, layout.d)
        matrices = _find_matrices(numbers, lhs, rhs, layout.d, gathers_k=True) if gathers_k else None
        if matrices is not None and matrices[0].pattern == Pattern.GRID:
            return *matrices, Layout(lhs, rhs, layout.d)
    lhs, rhs = _agreed(numbers.lhs_contract, numbers.rhs_contract, lhs, rhs)
    lhs, rhs = _sliced(numbers, lhs, rhs, layout.d)
    is_batched_alike = (
        pick(lhs, numbers.lhs_batch) == pick(rhs, numbers.rhs_batch) == layout.d[: len(numbers.lhs_batch)]
    )
    is_contracted_alike = pick(lhs, numbers.lhs_contract) == pick(rhs, numbers.rhs_contract)
    used = [[axis for dim in dims for axis in dim] for dims in (lhs, rhs)]
    if not is_batched_alike or not is_contracted_alike or any(len(set(axes)) < len(axes) for axes in used):
        return None
    found = _find_matrices(numbers, lhs, rhs, layout.d)
    return None if found is None else (*found, Layout(lhs, rhs, layout.d))


def _agreed(left: Sequence[int], right: Sequence[int], lhs: Dims, rhs: Dims) -> tuple[Dims, Dims]:
    """The shardings where an operand that holds a dimension of a pair whole takes its part of it."""
    lhs_dims, rhs_dims = list(lhs), list(rhs)
    for i, j in zip(left, right, strict=True):
        lhs_dims[i], rhs_dims[j] = lhs[i] or rhs[j], rhs[j] or lhs[i]
    return tuple(lhs_dims), tuple(rhs_dims)


def _grid(numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims) -> patterns.Plan | None:
    """The plan where every matrix is in blocks on the same two axes."""
    a = tuple(dim for i, dim in enumerate(lhs) if i not in numbers.lhs_batch)
    b = tuple(dim for i, dim in enumerate(rhs) if i not in numbers.rhs_batch)
    is_one_each = len(numbers.lhs_free) == len(numbers.lhs_contract) == len(numbers.rhs_free) == 1
    if not is_one_each or a != b or b != out[len(numbers.lhs_batch) :] or not a[0] or not a[1]:
        return None
    return patterns.Plan(Pattern.GRID, a[0], a[1])


def _sliced(numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims) -> tuple[Dims, Dims]:
    """Where the result is finer than an operand, each device takes its own part of it: no communication."""
    lhs_dims, rhs_dims = list(lhs), list(rhs)

    def finer(have: Dim, want: Dim, *operands: Sequence[Dim]) -> Dim:
        extra = want[len(have) :] if want[: len(have)] == have else ()
        return have if any(axis in dim for axis in extra for dims in operands for dim in dims) else have + extra

    wanted = iter(out)
    for i, j in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True):
        want = next(wanted)
        if lhs_dims[i] == rhs_dims[j]:
            lhs_dims[i] = rhs_dims[j] = finer(lhs_dims[i], want, lhs_dims, rhs_dims)
    for dims, free in ((lhs_dims, numbers.lhs_free), (rhs_dims, numbers.rhs_free)):
        for i in free:
            dims[i] = finer(dims[i], next(wanted), dims)
    return tuple(lhs_dims), tuple(rhs_dims)


def _find_matrices(
    numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims, *, gathers_k: bool = False
) -> tuple[patterns.Plan, tuple[int, ...]] | None:
    """(plan, order of the columns) of the product as one of matrices.

    What several dimensions are split over counts as one list of axes. Its order matters where ranks share one of them,
    whose axes then come last.
    """
    ahead = len(numbers.lhs_batch)
    rows, cols = pick(lhs, numbers.lhs_free), pick(rhs, numbers.rhs_free)
    k_a, k_b = sum(pick(lhs, numbers.lhs_contract), ()), sum(pick(rhs, numbers.rhs_contract), ())
    shared = [i for i, dim in enumerate(rows + cols) if out[ahead + i] != dim]
    if len(shared) > 1:  # a call gathers or scatters one dimension
        return None
    first = shared[0] - len(rows) if shared and shared[0] >= len(rows) else 0
    order = sorted(range(len(cols)), key=lambda i: i != first)

    def merged(dims: Dims) -> Dim:
        return sum((dims[i] for i in reversed(order)), ())

    result = (*(out[ahead : ahead + len(rows)] or ((),)), merged(out[ahead + len(rows) :]))
    a, b = (*(rows or ((),)), k_a), (k_b, merged(cols))
    plan = patterns.find_plan(a, b, result, False, False, gathers_k=gathers_k)
    return None if plan is None else (plan, pick(numbers.rhs_free, order))
