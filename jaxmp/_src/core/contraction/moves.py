"""Communication in and around a call: transfers, steps from one sharding to another, gathers before a call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.typing import DTypeLike

from jaxmp._src.core.contraction.contraction import Contraction, Dim, Dims
from jaxmp._src.platform.hardware.call_time import Transfer

# The types for sending an operand and its gradient between ranks, or None for their own.
Narrow = tuple[DTypeLike | None, DTypeLike | None]
WIDE: Narrow = None, None


def size_of(mesh: Mapping[str, int], axes: Dim) -> int:
    """Returns the number of ranks of these axes."""
    return math.prod(mesh[axis] for axis in axes)


def in_call(call: Contraction, mesh: Mapping[str, int], a: int, b: int, sums: int) -> tuple[Transfer, ...]:
    """Returns the transfers that a rank receives in one call. `a`, `b`: the bytes of the rank's shards of the operands.
    `sums`: the bytes of its shard of d in the accumulator's type. A grid has the transfers of `in_grid`. Any other call
    has one transfer, or none if nothing moves. With P ranks in the group, a gather receives P - 1 shards, a
    reduce-scatter P - 1 times `sums` (a ring), and an all-reduce 2 (P - 1) / P times `sums`."""
    if call.is_grid:
        return in_grid(call, mesh, a, b)
    axes = call.row_axes
    p = size_of(mesh, axes)
    if call.gathered:
        kind, nbytes = "all_gather", (a if call.gathered[0] == "a" else b) * (p - 1)
    elif call.is_reduced:
        kind, nbytes = "all_reduce", 2 * sums * (p - 1) // p
    else:
        kind, nbytes = "reduce_scatter", sums * (p - 1)
    return (Transfer.over(mesh, axes, nbytes, kind),) if nbytes else ()


def in_grid(
    call: Contraction, mesh: Mapping[str, int], a: int, b: int, is_whole: Sequence[bool] = (False, False)
) -> tuple[Transfer, ...]:
    """Returns the all-gathers that a rank of a grid receives: the blocks of a in its row, and the blocks of b in its
    column; for a and b that are gathered whole, by `is_whole`, all blocks. `a`, `b`: the bytes of its own blocks. A
    gather that moves nothing is left out."""
    moved = []
    for nbytes, kept, takes_all in zip((a, b), (0, 1), is_whole, strict=True):
        for dimension, axes in enumerate((call.row_axes, call.col_axes)):
            p = size_of(mesh, axes)
            if nbytes and p > 1 and (takes_all or dimension != kept):
                moved.append(Transfer.over(mesh, axes, nbytes * (p - 1), "all_gather"))
                nbytes *= p
    return tuple(moved)


def received(shape: Sequence[int], have: Dims, want: Dims, mesh: Mapping[str, int]) -> int:
    """Returns the number of elements that a device receives, on average over the devices, in all `steps` from `have` to
    `want` of an array of this shape. A slice counts 0."""
    total = 0
    for before, after in itertools.pairwise((have, *steps(have, want, mesh))):
        parts = 1  # on average, a device holds 1 / parts of the shard that it needs
        for dim, wanted in zip(before, after, strict=True):
            common = len(dim) if dim == wanted[: len(dim)] else len(wanted) if wanted == dim[: len(wanted)] else 0
            parts *= size_of(mesh, dim[common:])
        if parts > 1:
            total += math.prod(shape) // size_of(mesh, sum(after, ())) * (parts - 1) // parts
    return total


class Gather(NamedTuple):
    """An all-gather of a device's shard of an operand, along `dimension` over `axes`, inside shard_map. `varies`: the
    ranks compute different results from it, so its transpose is a reduce-scatter. `narrow`: the types for sending the
    operand and its gradient."""

    dimension: int
    axes: Dim
    varies: bool
    narrow: Narrow = WIDE


def steps(have: Dims, want: Dims, mesh: Mapping[str, int]) -> tuple[Dims, ...]:
    """Returns the shardings after each step from `have` to `want`. The last one is `want`. The tuple is empty if `have`
    equals `want`. Each step is one slice, all-to-all, all-gather or permutation: the first of these that is possible.
    For a step that combines several of these, XLA would replicate the array or end the process."""
    found: list[Dims] = []
    while (now := found[-1] if found else have) != want:
        step = _slice(now, want) or _all_to_all(now, want) or _all_gather(now, want) or _permutation(now, want)
        is_permutation = all(size_of(mesh, dim) == size_of(mesh, other) for dim, other in zip(now, want, strict=True))
        found.append(step or (want if is_permutation else _all_gather(now, want, is_wanted=True)) or want)
    return tuple(found)


def kind_of(have: Dims, want: Dims, mesh: Mapping[str, int]) -> str:
    """Returns the collective of one step, which is no slice: "collective_permute", "all_to_all" or "all_gather"."""
    if all(size_of(mesh, dim) == size_of(mesh, other) for dim, other in zip(have, want, strict=True)):
        return "collective_permute"
    return "all_to_all" if sorted(sum(have, ())) == sorted(sum(want, ())) else "all_gather"


def permuted(have: Dims, want: Dims, mesh: Mapping[str, int]) -> Dim:
    """Returns the axes along which devices exchange shards in a permutation, in the order of the mesh: all that shard
    another dimension in `want` than in `have`, or have another stride in their dimension."""

    def parts(dims: Dims) -> set[tuple[int, str, int]]:
        """Returns (dimension, axis, stride of the axis in the dimension) for each axis."""
        return {(i, axis, size_of(mesh, dim[j + 1 :])) for i, dim in enumerate(dims) for j, axis in enumerate(dim)}

    moved = {axis for _, axis, _ in parts(have) ^ parts(want)}
    return tuple(axis for axis in mesh if axis in moved)


# The next four return the sharding after one such step towards `want`, or None if none is possible. They take the first
# dimension that allows one. An all-gather keeps axes that `want` has anywhere, unless `is_wanted`.
def _slice(now: Dims, want: Dims) -> Dims | None:
    """Returns `now` after the first slice that is possible, or None. A slice adds axes to a dimension that `want`
    extends: the next axes in `want`, up to the first axis that is in use now."""
    used = set(sum(now, ()))
    for i, (dim, wanted) in enumerate(zip(now, want, strict=True)):
        fresh = tuple(itertools.takewhile(lambda axis: axis not in used, wanted[len(dim) :]))
        if fresh and wanted[: len(dim)] == dim:
            return _with(now, {i: dim + fresh})
    return None


def _all_to_all(now: Dims, want: Dims) -> Dims | None:
    for i, j in itertools.permutations(range(len(now)), 2):
        if now[i] and now[i] != want[i][: len(now[i])] and (*now[j], now[i][-1]) == want[j][: len(now[j]) + 1]:
            return _with(now, {i: now[i][:-1], j: (*now[j], now[i][-1])})
    return None


def _all_gather(now: Dims, want: Dims, *, is_wanted: bool = False) -> Dims | None:
    wanted = set(sum(want, ()))
    for i, dim in enumerate(now):
        if dim and (dim != want[i][: len(dim)] if is_wanted else dim[-1] not in wanted):
            return _with(now, {i: dim[:-1]})
    return None


def _permutation(now: Dims, want: Dims) -> Dims | None:
    for i, (dim, wanted) in enumerate(zip(now, want, strict=True)):
        first = tuple(itertools.takewhile(dim.__contains__, wanted))
        if first != dim[: len(first)]:
            return _with(now, {i: first + tuple(axis for axis in dim if axis not in first)})
    return None


def _with(dims: Dims, changes: Mapping[int, Dim]) -> Dims:
    return tuple(changes.get(i, dim) for i, dim in enumerate(dims))


def entry(have: Dims, want: Dims, layout: Iterable[Dims]) -> tuple[Dims, tuple[Gather, ...]]:
    """Returns (an operand's sharding at the entry to shard_map, the gathers inside that bring it to `want`). A
    dimension enters as in `have` if its axes there begin with its axes in `want`, and no dimension of `want` has any of
    the rest; the rest is gathered inside. Any other dimension enters as in `want`. `layout`: the shardings of the
    call's arrays. A gather over axes that shard one of these arrays varies; other axes have a gather of their own."""
    used = {axis for dims in layout for dim in dims for axis in dim}
    own = {axis for dim in want for axis in dim}
    dims, found = list(want), []
    for i, (dim, wanted) in enumerate(zip(have, want, strict=True)):
        rest = dim[len(wanted) :]
        if dim[: len(wanted)] != wanted or own.intersection(rest):
            continue
        dims[i] = dim
        runs = [(varies, tuple(axes)) for varies, axes in itertools.groupby(rest, used.__contains__)]
        found += [Gather(i, axes, varies) for varies, axes in reversed(runs)]  # the last axis is the fastest
    return tuple(dims), tuple(found)
