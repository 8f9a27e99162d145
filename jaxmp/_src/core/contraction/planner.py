"""Chooses how a call runs for given shardings of its operands and result: one planner for every public function.

If a single call computes this result from these operands, the plan is that call; at most, a device slices what it
holds. Otherwise each choice of roles for the axes is a layout, and the cheapest layout is taken. The cost is the time
(`hardware/call_time`) on a nominal machine for receiving data before, in and after the call, and for computing. An axis
may split only an index that it shards in some array, so nothing moves unless the shardings ask for it. `layouts` yields
calls of a product without resharding, for `advise`, which uses the times of a real machine.

Worked example, FSDP: x (m, k) on P("data", None), w (k, n) on P("data", None), the result on P("data", None). If
"data" splits the rows, w is gathered. If "data" splits the contraction, x moves and the result is reduce-scattered.
With m > k the weights are smaller than x, so each device gathers w and multiplies its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxmp._src.core.contraction.contraction import DEFERRED, Contraction, Dims, Layout, Role
from jaxmp._src.core.contraction.moves import in_call, received, size_of
from jaxmp._src.platform.hardware.call_time import Transfer, call_time
from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.platform.runtime.types import Shape

# The machine that plans are made for. Only the ratio of its rates matters: operations per byte that a device receives.
# An H200 multiplies float32 at 67 Tflop/s and receives 0.45 TB/s over NVLink (NVIDIA H200 data sheet), a ratio of 150.
# Tensor cores have a higher ratio, a CPU and its memory have a lower ratio.
NOMINAL = Hardware("nominal", {"float32": 150.0}, memory_bandwidth=math.inf, link_bandwidth=1.0)


@dataclasses.dataclass(frozen=True)
class Terms:
    """The inputs of a plan other than indices and shardings: (index, extent) pairs, (mesh axis, size) pairs, and the
    bytes of an element of a, b, the result and a sum.

    `keeps_result`: the call has to return the result in the requested sharding. `gathers_k`: the call may gather
    operands along k. `shares_columns`: the call may gather b's columns, and may scatter sums over d's columns.
    """

    extents: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    itemsizes: tuple[int, int, int, int]
    keeps_result: bool
    gathers_k: bool = False
    shares_columns: bool = True


def extents_of(given: Contraction, shapes: Sequence[Shape], mesh: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Returns (index, extent) pairs for a, b and d of these shapes. A symbolic extent counts as 1024 for each device,
    so that every axis divides it."""
    found: dict[str, int] = {}
    for indices, shape in zip(given.indices, shapes, strict=True):
        found |= dict(zip(indices, shape, strict=True))
    nominal = 1024 * math.prod(mesh.values())
    return tuple((index, extent if isinstance(extent, int) else nominal) for index, extent in found.items())


def plan(given: Contraction, terms: Terms) -> Contraction:
    """Returns the call for operands and a result that are sharded as in `given`: usually `as_given`. It is the
    `cheapest` if there is no such call, if that call gathers one operand along k, or if it gathers or scatters
    columns without `terms.shares_columns`. Ignores `terms.gathers_k` unless `given.is_stored_in_order`. Raises as
    `cheapest` does."""
    terms = dataclasses.replace(terms, gathers_k=terms.gathers_k and given.is_stored_in_order)
    found = as_given(given, gathers_k=terms.gathers_k)
    # A gather along k may cost more than moving operands.
    if found is None or found.gathers_k or (found.is_transposed and not terms.shares_columns):
        found = cheapest(given, terms)
    return found


@functools.lru_cache(maxsize=4096)
def as_given(given: Contraction, *, gathers_k: bool = False) -> Contraction | None:
    """Returns the one call that computes the result as sharded in `given` from the operands as sharded there. Devices
    may first slice an operand, which moves nothing. A grid of blocks is returned as it is. Returns None if the result
    needs several calls, a reshard, or a role that is not in `_roles`. `gathers_k`: as in `Terms`."""
    if given.is_block_grid:
        return given
    roles = {axis: _completed(given, role) for axis, role in given.roles.items()}
    known = {*_roles(given, given.a + given.b, gathers_k=gathers_k)}
    if not {role for role in roles.values() if role.d != DEFERRED} <= known or not given.is_one_call(roles):
        return None
    layout = _layout(given, roles)
    is_given = layout.d == given.layout.d and all(
        want[: len(have)] == have
        for which in (0, 1)
        for have, want in zip(given.layout[which], layout[which], strict=True)
    )
    return given.replace(layout) if is_given else None


def _completed(given: Contraction, role: Role) -> Role:
    """Returns an axis's role after devices slice operands that they hold whole, which moves nothing: along a contracted
    or batch index of the other operand, or along d's index. Returns `role` if there is nothing to slice."""
    a, b, d = role
    if {a, b} != {""} and "" in (a, b) and (a + b) not in (*given.rows, *given.cols):
        a = b = a + b
    if d in given.batch and a == b == "":
        a = b = d
    if d and d in given.rows and not a:
        a = d
    if d and d in given.cols and not b:
        b = d
    return Role(a, b, d)


@functools.lru_cache(maxsize=4096)
def cheapest(given: Contraction, terms: Terms) -> Contraction:
    """Returns the cheapest call, of all that `terms` allow, for operands and a result sharded as in `given`. Raises
    ValueError if there is no such call, for example because the axes divide the extents in none."""
    axes = [axis for axis, _ in terms.mesh if axis in given.roles]
    calls = _calls(given, terms, axes, itertools.product(*(_choices(given, terms, given.roles[axis]) for axis in axes)))
    if terms.keeps_result:
        calls = (call for call in calls if call.layout.d == given.layout.d)
    if not terms.shares_columns:
        calls = (call for call in calls if not call.is_transposed)
    return min(calls, key=lambda call: _cost(given, terms, call))


def layouts(product: Contraction, terms: Terms) -> Iterator[Contraction]:
    """Yields calls of an unsharded product that need no resharding. Every mesh axis has a role, and no two axes have
    the same. A set of roles is assigned to the axes in one order only: roles that communicate go to the last axes."""
    axes, roles = [axis for axis, _ in terms.mesh], _roles(product, product.a + product.b, gathers_k=terms.gathers_k)
    roles.sort(key=lambda role: role.communicates)  # so that adjacent axes communicate
    for call in _calls(product, terms, axes, itertools.combinations(roles, len(axes))):
        if plan(call, terms) == call:
            yield call


def _calls(
    given: Contraction, terms: Terms, axes: Sequence[str], choices: Iterable[Sequence[Role]]
) -> Iterator[Contraction]:
    """Yields a call for each choice of roles for `axes`. Skips a choice that needs several calls, and one with axes
    that do not divide the extents."""
    mesh, extents = dict(terms.mesh), dict(terms.extents)
    for choice in choices:
        roles = dict(zip(axes, choice, strict=True))
        if given.is_one_call(roles):
            call = given.replace(_layout(given, roles))
            if _divides(call, extents, mesh):
                yield call


def _roles(product: Contraction, where: Iterable[str], *, gathers_k: bool) -> list[Role]:
    """Returns the roles that an axis may have in a call, the preferred ones at equal costs first: the table of
    `contraction` without "deferred", and without grids unless `gathers_k`. `where`: the indices for these roles."""
    batch, rows, cols, contracted = (
        [index for index in dict.fromkeys(where) if index and index in group]
        for group in (product.batch, product.rows, product.cols, product.contracted)
    )
    roles = []
    if gathers_k:  # first among equal costs, because a call may read the shards in place
        roles += [Role(row, k, row) for row in rows for k in contracted]
        roles += [Role(k, col, col) for col in cols for k in contracted]
    roles += [Role(index, index, index) for index in batch]
    roles += [Role(index, "", index) for index in rows] + [Role("", index, index) for index in cols] + [Role()]
    roles += [Role(row, col, index) for row in rows for col in cols for index in (col, row)]
    return roles + [Role(k, k, index) for k in contracted for index in ("", *rows, *cols)]


def _choices(given: Contraction, terms: Terms, have: Role) -> list[Role]:
    """Returns the roles that an axis with role `have` may have. It is only `have` if that is deferred, or if it is in
    `_roles` and does not communicate. Otherwise it is all roles of the indices in `have` that `_is_sharded_for` allows;
    with `terms.keeps_result`, only roles that have d's index of `have`."""
    roles = _roles(given, have, gathers_k=terms.gathers_k)
    if have.d == DEFERRED or (have in roles and not have.communicates):
        return [have]
    return [
        role for role in roles if _is_sharded_for(given, role, have) and (role.d == have.d or not terms.keeps_result)
    ]


def _is_sharded_for(given: Contraction, role: Role, have: Role) -> bool:
    """True if `have` shards the operands as a gather in a call with `role` needs them, so that they do not move before
    the call. In a grid this concerns the gathered operand, in an all-gather both. True for a role that gathers
    nothing."""
    if not role.communicates or role.is_contracted:
        return True
    if given.is_grid_role(role):
        return role.b == have.b if role.a == role.d else role.a == have.a
    return role[:2] == have[:2]


def _layout(given: Contraction, roles: Mapping[str, Role]) -> Layout:
    """Returns the layout of axes with these roles. Axes of one dimension are in the order of `given`, except that axes
    that contract, scatter or gather the dimension come last."""
    # Axes that shard one dimension keep the order that they have in d, or else in a or b.
    given_dims = (*given.layout.d, *given.layout.a, *given.layout.b)
    places = {axis: [dim.index(axis) for dim in given_dims if axis in dim] for axis in roles}
    # Axes of contracted dimensions come in the order of these dimensions in a.
    contracted = [axis for axis, role in roles.items() if role.is_contracted]
    contracted.sort(key=lambda axis: (given.a.index(roles[axis].a), places[axis]))

    def dims(which: int) -> Dims:
        found = []
        for index, own in zip(given.indices[which], given.layout[which], strict=True):
            axes = sorted((axis for axis, role in roles.items() if role[which] == index), key=places.__getitem__)
            # Axes that contract, scatter or gather a dimension come after the other axes.
            last = [axis for axis in contracted if axis in axes]
            gathered = [axis for axis in axes if axis not in contracted and roles[axis][which] != roles[axis].d]
            last += sorted(gathered, key=lambda axis: own.index(axis) if axis in own else len(own))
            found.append((*(axis for axis in axes if axis not in last), *last))
        return tuple(found)

    return Layout(dims(0), dims(1), dims(2))


def _divides(call: Contraction, extents: Mapping[str, int], mesh: Mapping[str, int]) -> bool:
    """True if the axes of every dimension divide its extent."""
    return all(
        extents[index] % size_of(mesh, dim) == 0
        for indices, dims in zip(call.indices, call.layout, strict=True)
        for index, dim in zip(indices, dims, strict=True)
    )


def local_bytes(call: Contraction, terms: Terms) -> tuple[int, int, int, int]:
    """Returns the bytes of a device's shards in the call: (of a, of b, of d, of d in the accumulator's type)."""
    mesh, extents, (*sizes, of_sums) = dict(terms.mesh), dict(terms.extents), terms.itemsizes
    held = [
        math.prod(extents[index] // size_of(mesh, dim) for index, dim in zip(indices, dims, strict=True))
        for indices, dims in zip(call.indices, call.layout, strict=True)
    ]
    a, b, d = (elements * size for elements, size in zip(held, sizes, strict=True))
    return a, b, d, held[2] * of_sums


def _cost(given: Contraction, terms: Terms, call: Contraction) -> float:
    """Returns the time of `call` on `NOMINAL`, for its products and for what a device receives: while the operands are
    resharded from `given`, in the call, and while the result is resharded to `given`. Good for comparisons only."""
    mesh, extents = dict(terms.mesh), dict(terms.extents)
    ends = zip(given.indices, (*given.layout[:2], call.layout.d), (*call.layout[:2], given.layout.d), strict=True)
    moved = [
        size * received([extents[index] for index in indices], have, want, mesh)
        for (indices, have, want), size in zip(ends, terms.itemsizes, strict=False)
    ]
    a, b, _, sums = local_bytes(call, terms)
    transfers = (*(Transfer(nbytes, 2) for nbytes in moved), *in_call(call, mesh, a, b, sums))
    used, flops = size_of(mesh, tuple(call.roles)), 2 * math.prod(extents.values())
    return call_time(NOMINAL, flops=flops, kind="float32", ndevices=used, transfers=transfers).total
