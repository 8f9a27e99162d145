"""The cheapest shardings in which one call can run, where it cannot run in those that it was given.

In a call every mesh axis has one of a few roles. With rows m, columns n, contraction k and batch i, it shards

    role             a   b   result
    rows             m   -   m
    columns          -   n   n
    batch            i   i   i
    all-reduce       k   k   -
    reduce-scatter   k   k   m or n
    all-gather       m   n   n (rows are gathered) or m (columns are gathered)
    grid             m   k   m (b is gathered along k), or k   n   n (a is gathered along k)
    none             -   -   -        the ranks of the axis compute the same

and the axes of the group (the four roles that communicate) have one role. Every choice of roles is a layout; its cost
are the bytes that a device receives, ahead of the call, in it and for its result, and the operations that it computes.

Worked example, FSDP: x (m, k) on P("data", None), w (k, n) on P("data", None), the result on P("data", None). "data"
may shard the rows, for which w is gathered, or the contraction, for which x moves and the result is reduce-scattered.
With m > k the weights are the smaller: each device gathers w and multiplies its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmp._src.sharding.patterns import Dim, Dims

# Operations in the time in which a device receives a byte: an H200 multiplies float32 with 67 Tflop/s and receives
# 0.45 TB/s over NVLink (NVIDIA H200 data sheet). Tensor cores do more of them, a CPU and its memory do fewer.
OPERATIONS_PER_BYTE = 150.0


@dataclasses.dataclass(frozen=True)
class Product:
    """What a call multiplies: the indices of a, b and the result as `jnp.einsum` writes them, for operands as stored,
    with the extent of each, the sizes of mesh axes, and the bytes of an element of a, b, the result and a sum.

    `keeps_result`: the call has to give the result in the sharding that was asked for. `gathers_k`: it may gather
    operands along k, which are not stored transposed.
    """

    a: str
    b: str
    d: str
    extents: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    itemsizes: tuple[int, int, int, int]
    keeps_result: bool
    gathers_k: bool


class Layout(NamedTuple):
    """How a, b and the result of a call are sharded."""

    a: Dims
    b: Dims
    d: Dims


class _Role(NamedTuple):
    """The index that an axis shards in a, in b and in the result, each or ""."""

    a: str = ""
    b: str = ""
    d: str = ""

    @property
    def communicates(self) -> bool:
        return self.a != "" and self.b != "" and not self.a == self.b == self.d

    @property
    def is_contracted(self) -> bool:
        return self.communicates and self.a == self.b

    def is_grid(self, product: Product) -> bool:
        """Whether one operand is sharded along a contracted index, and the other is not."""
        return self.communicates and (self.a in product.d) != (self.b in product.d)


_GRID = _Role("m", "k", "m")


@functools.lru_cache(maxsize=4096)
def cheapest(product: Product, given: Layout) -> Layout:
    """The layout of least cost for operands and a result that are sharded as `given`."""
    return min(_layouts(product, given), key=lambda layout: layout[0])[1]


def _layouts(product: Product, given: Layout) -> Iterator[tuple[float, Layout]]:
    """(cost, layout) of every choice of roles."""
    axes = [axis for axis, _ in product.mesh if any(axis in dim for dims in given for dim in dims)]
    for roles in itertools.product(*(_roles(product, given, axis) for axis in axes)):
        chosen = dict(zip(axes, roles, strict=True))
        # The axes of the group have one role, but may shard several contracted dimensions, or both sides of a grid.
        group = {
            role._replace(a="k", b="k") if role.is_contracted else _GRID if role.is_grid(product) else role
            for role in roles
            if role.communicates
        }
        if len(group) > 1:
            continue
        layout = _layout(product, given, chosen)
        is_wanted = layout.d == given.d or not product.keeps_result
        if is_wanted and _divides(product, layout):
            yield _cost(product, given, layout, chosen), layout


def _roles(product: Product, given: Layout, axis: str) -> list[_Role]:
    """The roles that an axis may have; only the one that it has where that communicates nothing."""
    have = _Role(*(_index(indices, dims, axis) for indices, dims in zip(_indices(product), given, strict=True)))
    where = [index for index in dict.fromkeys(have) if index]
    batch = [index for index in where if index in product.a and index in product.b and index in product.d]
    rows = [index for index in where if index in product.a and index not in product.b]
    cols = [index for index in where if index in product.b and index not in product.a]
    contracted = [index for index in where if index not in product.d]
    roles = []
    if product.gathers_k:  # ahead of what costs as much, for a call may read the shards in place
        roles += [_Role(row, k, row) for row in rows for k in contracted if have.b == k]
        roles += [_Role(k, col, col) for col in cols for k in contracted if have.a == k]
    roles += [_Role(index, index, index) for index in batch]
    roles += [_Role(index, "", index) for index in rows] + [_Role("", index, index) for index in cols] + [_Role()]
    if have in roles and not have.is_grid(product):
        return [have]
    if have.a in rows and have.b in cols:
        roles += [_Role(have.a, have.b, have.b), _Role(have.a, have.b, have.a)]
    for k in contracted:
        roles += [_Role(k, k, index) for index in ("", *rows, *cols)]
    return [role for role in roles if role.d == have.d or not product.keeps_result]


def _indices(product: Product) -> tuple[str, str, str]:
    return product.a, product.b, product.d


def _index(indices: str, dims: Dims, axis: str) -> str:
    """The index that `axis` shards, or ""."""
    return next((index for index, dim in zip(indices, dims, strict=True) if axis in dim), "")


def _layout(product: Product, given: Layout, roles: Mapping[str, _Role]) -> Layout:
    """The layout in which axes have these roles; those of the group come last where a pattern wants it."""
    group = [axis for axis, role in roles.items() if role.communicates]
    asked = (*given.d, *given.a, *given.b)  # in whose order axes stay, where they share a dimension
    places = {axis: [dim.index(axis) for dim in asked if axis in dim] for axis in roles}
    # Contracted dimensions follow each other in the order of a's.
    ordered = sorted(group, key=lambda axis: (product.a.index(roles[axis].a), places[axis]))

    def dims(which: int) -> Dims:
        found = []
        for index in _indices(product)[which]:
            axes = sorted((axis for axis, role in roles.items() if role[which] == index), key=places.__getitem__)
            # Axes over which a dimension is gathered, contracted or scattered follow the others.
            last = [axis for axis in ordered if axis in axes and is_last(roles[axis], which)]
            found.append((*(axis for axis in axes if axis not in last), *last))
        return tuple(found)

    def is_last(role: _Role, which: int) -> bool:
        return role.is_contracted or role[which] != role.d

    return Layout(dims(0), dims(1), dims(2))


def _divides(product: Product, layout: Layout) -> bool:
    """Whether the axes of every dimension divide its extent."""
    extents, mesh = dict(product.extents), dict(product.mesh)
    return all(
        extents[index] % _size(mesh, dim) == 0
        for indices, dims in zip(_indices(product), layout, strict=True)
        for index, dim in zip(indices, dims, strict=True)
    )


def _cost(product: Product, given: Layout, layout: Layout, roles: Mapping[str, _Role]) -> float:
    """Bytes that each device receives, and its operations as bytes."""
    mesh, extents = dict(product.mesh), dict(product.extents)
    shapes = [[extents[index] for index in indices] for indices in _indices(product)]
    a, b, d, acc = product.itemsizes
    cost: float = a * received(shapes[0], given.a, layout.a, mesh) + b * received(shapes[1], given.b, layout.b, mesh)
    cost += d * received(shapes[2], layout.d, given.d, mesh)
    group = tuple(axis for axis, role in roles.items() if role.communicates)
    p = _size(mesh, group)
    local = [math.prod(shape) / _size(mesh, sum(dims, ())) for shape, dims in zip(shapes, layout, strict=True)]
    if group:
        role = roles[group[0]]
        if role.is_contracted:
            whole = local[2] * (p if role.d else 1)
            cost += acc * whole * (p - 1) / p * (1 if role.d else 2)
        elif role.is_grid(product):
            over_b = _size(mesh, tuple(axis for axis in group if roles[axis].b not in product.d))
            cost += (over_b - 1) * local[1] * b + (p // over_b - 1) * local[0] * a
        else:
            is_rows = role.d == role.b
            cost += (p - 1) * (local[0] * a if is_rows else local[1] * b)
    used = tuple(axis for axis, role in roles.items() if role != _Role())
    return cost + 2 * math.prod(extents.values()) / _size(mesh, used) / OPERATIONS_PER_BYTE


def received(shape: Sequence[int], have: Dims, want: Dims, mesh: Mapping[str, int]) -> int:
    """Elements that a device receives while an array goes from one sharding to another, in `steps`."""
    total = 0
    for before, after in itertools.pairwise((have, *steps(have, want))):
        parts = 1  # a device holds one of so many of the shard that it is to have, on average
        for dim, wanted in zip(before, after, strict=True):
            common = len(dim) if dim == wanted[: len(dim)] else len(wanted) if wanted == dim[: len(wanted)] else 0
            parts *= _size(mesh, dim[common:])
        if parts > 1:
            total += math.prod(shape) // _size(mesh, sum(after, ())) * (parts - 1) // parts
    return total


def nominal_extent(extent: Any, mesh: Mapping[str, int]) -> int:
    """An extent, and for a symbolic one a number that every axis divides, for the choice of a layout."""
    return extent if isinstance(extent, int) else 1024 * math.prod(mesh.values())


def _size(mesh: Mapping[str, int], axes: Dim) -> int:
    return math.prod(mesh[axis] for axis in axes)


# What moves around a call ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather of a device's shard of an operand, along `dimension` over `axes`, inside of shard_map.

    `varies`: the ranks of the axes do not compute the same with it, so that its transpose is a reduce-scatter.
    """

    operand: str
    dimension: int
    axes: Dim
    varies: bool


def steps(have: Dims, want: Dims) -> tuple[Dims, ...]:
    """The shardings through which an array goes from one to another, each by one slice, all-to-all or all-gather.

    XLA would replicate an array for a step that is several of these at once.
    """
    found: list[Dims] = []
    while (now := found[-1] if found else have) != want:
        found.append(_slice(now, want) or _all_to_all(now, want) or _all_gather(now, want) or want)
    return tuple(found)


def _slice(now: Dims, want: Dims) -> Dims | None:
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


def _all_gather(now: Dims, want: Dims) -> Dims | None:
    wanted = set(sum(want, ()))
    for i, dim in enumerate(now):
        if dim and dim[-1] not in wanted:
            return _with(now, {i: dim[:-1]})
    return None


def _with(dims: Dims, changes: Mapping[int, Dim]) -> Dims:
    return tuple(changes.get(i, dim) for i, dim in enumerate(dims))


def entries(given: Layout, layout: Layout) -> tuple[tuple[Dims, Dims], tuple[Gather, ...]]:
    """(the shardings in which a and b enter shard_map, the gathers that bring them from there to the layout's)."""
    a, of_a = _gathers("a", given.a, layout.a, layout)
    b, of_b = _gathers("b", given.b, layout.b, layout)
    return (a, b), of_a + of_b


def _gathers(operand: str, have: Dims, want: Dims, layout: Layout) -> tuple[Dims, tuple[Gather, ...]]:
    """As `entries`, of one operand."""
    used = {axis for dims in layout for dim in dims for axis in dim}
    own = {axis for dim in want for axis in dim}
    entry, found = list(want), []
    for i, (dim, wanted) in enumerate(zip(have, want, strict=True)):
        rest = dim[len(wanted) :]
        if dim[: len(wanted)] != wanted or own.intersection(rest):
            continue
        entry[i] = dim
        runs = [(varies, tuple(axes)) for varies, axes in itertools.groupby(rest, used.__contains__)]
        found += [Gather(operand, i, axes, varies) for varies, axes in reversed(runs)]  # the last axis is the fastest
    return tuple(entry), tuple(found)
