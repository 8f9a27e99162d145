"""The blocks of the matrices of a call: which devices hold each block, and which blocks device 0 receives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.tools.explain.row import Row


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of a call. `grid`: the numbers of rows and of columns of blocks. `blocks`: by (row, column), the
    positions in the mesh of a block's devices. `received`: the blocks that device 0 receives from other devices."""

    name: str
    shape: tuple[int, int]
    grid: tuple[int, int]
    blocks: Mapping[tuple[int, int], tuple[int, ...]]
    received: frozenset[tuple[int, int]]


def matrices(row: Row) -> tuple[Matrix, ...]:
    """Returns op(A), op(B) and D of a call; () if `row` is a collective or a product that XLA computes, or if the mesh
    is unknown. The array of a `ragged_dot` that has a matrix per group, B or D, is drawn as a matrix with a row for
    each group, and its name is "B of groups" or "D of groups"."""
    if not row.placement or not row.mesh:
        return ()
    m, k, n = row.extents
    shapes, names = ((m, k), (k, n), (m, n)), ["A", "B", "D"]
    if not row.has_matrices:  # a row of blocks for each part of the groups
        of_groups = next(i for i, shape in enumerate(row.global_shapes) if len(shape) == 3)
        groups = (row.global_shapes[of_groups][0], n)
        shapes = ((m, k), groups, (m, n)) if of_groups == 1 else ((k, m), (k, n), groups)
        names[of_groups] += " of groups"
    received, sizes = _received(row), dict(row.mesh)
    return tuple(
        Matrix(name, shape, _grid(dims, sizes), _blocks(dims, sizes), frozenset(received.get(name, ())))
        for name, shape, dims in zip(names, shapes, row.placement, strict=True)
    )


def _grid(dims: tuple[Dim, Dim], sizes: Mapping[str, int]) -> tuple[int, int]:
    rows, columns = (math.prod(sizes[axis] for axis in dim) for dim in dims)
    return rows, columns


def _blocks(dims: tuple[Dim, Dim], sizes: Mapping[str, int]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns the devices of each block of a matrix with rows and columns sharded over the axes `dims`."""
    names, grid = [*sizes], _grid(dims, sizes)
    order = [names.index(axis) for dim in dims for axis in dim]
    order += [i for i in range(len(names)) if i not in order]
    devices = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
    held = devices.transpose(order).reshape(*grid, -1)
    return {(i, j): tuple(held[i, j].tolist()) for i, j in np.ndindex(*grid)}


def _received(row: Row) -> dict[str, set[tuple[int, int]]]:
    """Returns, by the matrix' name, the blocks that device 0 gets from others. Device 0 holds each matrix' first block.
    An all-gather gathers the rows of A in its group, a grid the blocks of A in its row and the blocks of B in its
    column. The result is empty for all other patterns."""
    if row.pattern not in ("all_gather", "grid"):
        return {}
    (of_a, of_b, of_d), sizes = row.placement, dict(row.mesh)
    if row.pattern == "all_gather":
        group = [axis for axis in of_a[0] if axis not in of_d[0]]
        return {"A": {(i, 0) for i in range(1, math.prod(sizes[axis] for axis in group))}}
    columns, rows = (math.prod(sizes[axis] for axis in dim) for dim in (of_a[1], of_b[0]))
    return {"A": {(0, j) for j in range(1, columns)}, "B": {(i, 0) for i in range(1, rows)}}


def label(devices: Sequence[int], total: int) -> str:
    """Returns devices as short text: "0-3" for more than 2 consecutive ones, "0 1 ... 9" (the first two and the last)
    for more than 4 others, "0 2" for fewer, and "all" for all `total` devices if they are several."""
    if len(devices) == total and total > 1:
        return "all"
    if len(devices) > 2 and devices[-1] - devices[0] == len(devices) - 1:
        return f"{devices[0]}-{devices[-1]}"
    return " ".join(map(str, devices)) if len(devices) <= 4 else f"{devices[0]} {devices[1]} ... {devices[-1]}"


def shown(count: int, most: int) -> list[int | None]:
    """Returns the indices of the blocks that are drawn: all, or the first `most` - 2, None for a gap, and the last."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


_SUMS = {
    "reduce_scatter": "each device multiplies its blocks; the partial products are summed, each keeps its block of D",
    "all_reduce": "each device multiplies its blocks; the partial products are summed for every device",
}


def sentence(row: Row) -> str:
    """Says in one sentence how devices compute a call: they sum partial products, multiply the rows of their groups,
    receive blocks of A or B (said for device 0), or multiply what they hold; or why a call has no `matrices`."""
    if not row.placement or not row.mesh:
        return "one device holds everything" if row.ndevices == 1 else "XLA decides which device holds what"
    if row.pattern in _SUMS:
        return _SUMS[row.pattern]
    if not row.has_matrices:
        return "each device multiplies its rows that are of its groups" + (
            ", and reads the rows of other devices in place" if row.pattern == "experts" else ""
        )
    received = _received(row)
    parts = [name for name in "AB" if received.get(name)]
    if not parts:
        return "each device multiplies what it holds; nothing moves"
    return f"while it multiplies, device 0 receives the blocks of {' and '.join(parts)} in brackets"
