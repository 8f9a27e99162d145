"""The blocks of the matrices of a call: which devices hold each block, and which blocks device 0 receives."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.tools.explain.row import Row


@dataclasses.dataclass(frozen=True)
class Block:
    """A block: its row and column among the blocks of a matrix, and the positions in the mesh of its devices."""

    row: int
    column: int
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of a call. `grid`: the numbers of rows and of columns of blocks. `blocks`: row by row. `received`: (row,
    column) of each block that device 0 receives from other devices."""

    name: str
    shape: tuple[int, int]
    grid: tuple[int, int]
    blocks: tuple[Block, ...]
    received: frozenset[tuple[int, int]]


def matrices(row: Row) -> tuple[Matrix, ...]:
    """Returns op(A), op(B) and D of a call; () if `row` is a collective or a product that XLA computes, or if the mesh
    is unknown. The array of a `ragged_dot` that has a matrix per group, B or D, is drawn as a matrix with a row for
    each group, and its name is "B of groups" or "D of groups"."""
    if not row.placement or not row.mesh:
        return ()
    m, k, n = row.extents
    shapes, received, names = ((m, k), (k, n), (m, n)), _received(row), ["A", "B", "D"]
    if not row.has_matrices:  # a row of blocks for each part of the groups
        of_groups = next(i for i, shape in enumerate(row.global_shapes) if len(shape) == 3)
        k, m, n = (k, m, n) if of_groups == 1 else (m, k, n)
        matrix, rows = (row.global_shapes[of_groups][0], n), (m, n)
        shapes = ((m, k), matrix, rows) if of_groups == 1 else ((m, k), rows, matrix)
        names[of_groups] += " of groups"
    return tuple(
        Matrix(name, shape, _grid(dims, dict(row.mesh)), _blocks(dims, row.mesh), frozenset(received.get(name, ())))
        for name, shape, dims in zip(names, shapes, row.placement, strict=True)
    )


def _grid(dims: tuple[Dim, Dim], sizes: Mapping[str, int]) -> tuple[int, int]:
    rows, columns = (math.prod(sizes[axis] for axis in dim) for dim in dims)
    return rows, columns


def _blocks(dims: tuple[Dim, Dim], mesh: Sequence[tuple[str, int]]) -> tuple[Block, ...]:
    """Returns the blocks, row by row, of a matrix with rows and columns sharded over the axes `dims`."""
    holders: dict[tuple[int, int], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for _, size in mesh))):
        coordinates = dict(zip((name for name, _ in mesh), place, strict=True))
        holders.setdefault(_place(dims, coordinates, dict(mesh)), []).append(device)
    return tuple(Block(i, j, tuple(devices)) for (i, j), devices in sorted(holders.items()))


def _place(dims: tuple[Dim, Dim], coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns (row, column) of the block that the device at these mesh coordinates holds."""
    place = []
    for dim in dims:
        index = 0
        for axis in dim:
            index = index * sizes[axis] + coordinates[axis]
        place.append(index)
    return place[0], place[1]


def _received(row: Row) -> dict[str, set[tuple[int, int]]]:
    """Returns, by the matrix' name, the blocks that device 0 gets from others. Device 0 holds each matrix' first block.
    An all-gather gathers the rows of A in its group, a grid the blocks of A in its row and the blocks of B in its
    column. The result is empty for all other patterns."""
    if row.pattern not in ("all_gather", "grid"):
        return {}
    (of_a, _, of_d), sizes = row.placement, dict(row.mesh)
    if row.pattern == "all_gather":
        group = [axis for axis in of_a[0] if axis not in of_d[0]]
        return {"A": {(i, 0) for i in range(1, math.prod(sizes[axis] for axis in group))}}
    along_k = (math.prod(sizes[axis] for axis in dim) for dim in (row.placement[0][1], row.placement[1][0]))
    a, b = along_k
    return {"A": {(0, j) for j in range(1, a)}, "B": {(i, 0) for i in range(1, b)}}


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
    receive blocks of A or B (said for device 0), or multiply what they hold."""
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
