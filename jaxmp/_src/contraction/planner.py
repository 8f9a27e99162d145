"""How a call runs on operands that lie so, for a result that is to lie so: one planner for every public function.

Where one call gives this result of these operands, it is that call; each device at most takes its part of what it
holds. Elsewhere every choice of roles for the axes is a layout, and the cheapest is taken: its cost are the bytes that
a device receives, ahead of the call, in it and for its result, and the operations that it computes. An axis may split
only an index that it shards in some array, so nothing moves that the shardings do not ask for.

Worked example, FSDP: x (m, k) on P("data", None), w (k, n) on P("data", None), the result on P("data", None). "data"
may split the rows, for which w is gathered, or the contraction, for which x moves and the result is reduce-scattered.
With m > k the weights are the smaller: each device gathers w and multiplies its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxmp._src.contraction.contraction import Contraction, Dims, Layout, Role
from jaxmp._src.contraction.moves import received, size_of
from jaxmp._src.runtime.types import Shape

# Operations in the time in which a device receives a byte: an H200 multiplies float32 with 67 Tflop/s and receives
# 0.45 TB/s over NVLink (NVIDIA H200 data sheet). Tensor cores do more of them, a CPU and its memory do fewer.
OPERATIONS_PER_BYTE = 150.0


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a plan depends on beside indices and shardings: the extent of each index, the sizes of mesh axes, and the
    bytes of an element of a, b, the result and a sum.

    `keeps_result`: the call has to give the result in the sharding that was asked for. `gathers_k`: it may gather
    operands along k, which are not stored transposed. `shares_columns`: ranks may share columns of the result.
    """

    extents: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    itemsizes: tuple[int, int, int, int]
    keeps_result: bool
    gathers_k: bool
    shares_columns: bool = True


def extents(given: Contraction, shapes: Sequence[Shape], mesh: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The extent of each index of a, b and d of these shapes; for a symbolic one a number that every axis divides."""
    found: dict[str, int] = {}
    for indices, shape in zip(given.indices, shapes, strict=True):
        found |= dict(zip(indices, shape, strict=True))
    nominal = 1024 * math.prod(mesh.values())
    return tuple((index, extent if isinstance(extent, int) else nominal) for index, extent in found.items())


def plan(given: Contraction, terms: Terms) -> Contraction:
    """The call for operands that lie, and a result that is to lie, as in `given`."""
    found = as_given(given, gathers_k=terms.gathers_k)
    # A gather along k may cost more than to move operands.
    if found is None or found.gathers_k or (found.is_transposed and not terms.shares_columns):
        found = cheapest(given, terms)
    return found


@functools.lru_cache(maxsize=4096)
def as_given(given: Contraction, *, gathers_k: bool = False) -> Contraction | None:
    """The one call that gives this result of operands that lie so, or None."""
    if given.is_block_grid:
        return given
    roles = {axis: _completed(given, role) for axis, role in given.roles.items()}
    if not all(_is_of_a_call(given, role, gathers_k=gathers_k) for role in roles.values()):
        return None
    if not given.is_one_call(roles):
        return None
    layout = _layout(given, roles)
    is_given = layout.d == given.layout.d and all(
        want[: len(have)] == have
        for which in (0, 1)
        for have, want in zip(given.layout[which], layout[which], strict=True)
    )
    return given.replace(layout) if is_given else None


def _completed(given: Contraction, role: Role) -> Role:
    """The role of an axis where an operand that is whole takes its part of it, which moves nothing."""
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


def _is_of_a_call(given: Contraction, role: Role, *, gathers_k: bool) -> bool:
    """Whether `role` is one of the table's (`contraction`)."""
    if not role.communicates:
        return role.d == (role.a or role.b)
    if given.is_grid_role(role):
        free = role.a if role.a in given.rows else role.b if role.b in given.cols else ""
        return gathers_k and free == role.d != ""
    if role.is_contracted:
        return role.a in given.contracted and (role.d == "" or role.d not in given.batch)
    return role.a in given.rows and role.b in given.cols and role.d in (role.a, role.b)


@functools.lru_cache(maxsize=4096)
def cheapest(given: Contraction, terms: Terms) -> Contraction:
    """The call of least cost for operands and a result that are sharded as `given`."""
    return min(_calls(given, terms), key=lambda call: call[0])[1]


def _calls(given: Contraction, terms: Terms) -> Iterator[tuple[float, Contraction]]:
    """(cost, call) of every choice of roles."""
    mesh, extents = dict(terms.mesh), dict(terms.extents)
    axes = [axis for axis, _ in terms.mesh if axis in given.roles]
    for choice in itertools.product(*(_choices(given, terms, given.roles[axis]) for axis in axes)):
        roles = dict(zip(axes, choice, strict=True))
        if not given.is_one_call(roles):
            continue
        call = given.replace(_layout(given, roles))
        is_wanted = call.layout.d == given.layout.d or not terms.keeps_result
        is_wanted = is_wanted and (terms.shares_columns or not call.is_transposed)
        if is_wanted and _divides(call, extents, mesh):
            yield _cost(given, terms, call.layout, roles), call


def _choices(given: Contraction, terms: Terms, have: Role) -> list[Role]:
    """The roles that an axis may have; only the one that it has where that communicates nothing."""
    where = [index for index in dict.fromkeys(have) if index]
    batch, rows, cols, contracted = (
        [index for index in where if index in group]
        for group in (given.batch, given.rows, given.cols, given.contracted)
    )
    roles = []
    if terms.gathers_k:  # ahead of what costs as much, for a call may read the shards in place
        roles += [Role(row, k, row) for row in rows for k in contracted if have.b == k]
        roles += [Role(k, col, col) for col in cols for k in contracted if have.a == k]
    roles += [Role(index, index, index) for index in batch]
    roles += [Role(index, "", index) for index in rows] + [Role("", index, index) for index in cols] + [Role()]
    if have in roles and not given.is_grid_role(have):
        return [have]
    if have.a in rows and have.b in cols:
        roles += [Role(have.a, have.b, have.b), Role(have.a, have.b, have.a)]
    for k in contracted:
        roles += [Role(k, k, index) for index in ("", *rows, *cols)]
    return [role for role in roles if role.d == have.d or not terms.keeps_result]


def _layout(given: Contraction, roles: Mapping[str, Role]) -> Layout:
    """The layout in which axes have these roles; those of the group come last where a pattern wants it."""
    # Axes that share a dimension stay in the order that they have in d, or else in a or b.
    given_dims = (*given.layout.d, *given.layout.a, *given.layout.b)
    places = {axis: [dim.index(axis) for dim in given_dims if axis in dim] for axis in roles}
    # Contracted dimensions follow each other in the order of a's.
    contracted = [axis for axis, role in roles.items() if role.is_contracted]
    contracted.sort(key=lambda axis: (given.a.index(roles[axis].a), places[axis]))

    def dims(which: int) -> Dims:
        found = []
        for index, own in zip(given.indices[which], given.layout[which], strict=True):
            axes = sorted((axis for axis, role in roles.items() if role[which] == index), key=places.__getitem__)
            # Axes over which a dimension is contracted, scattered or gathered follow the others.
            last = [axis for axis in contracted if axis in axes]
            gathered = [axis for axis in axes if axis not in contracted and roles[axis][which] != roles[axis].d]
            last += sorted(gathered, key=lambda axis: own.index(axis) if axis in own else len(own))
            found.append((*(axis for axis in axes if axis not in last), *last))
        return tuple(found)

    return Layout(dims(0), dims(1), dims(2))


def _divides(call: Contraction, extents: Mapping[str, int], mesh: Mapping[str, int]) -> bool:
    """Whether the axes of every dimension divide its extent."""
    return all(
        extents[index] % size_of(mesh, dim) == 0
        for indices, dims in zip(call.indices, call.layout, strict=True)
        for index, dim in zip(indices, dims, strict=True)
    )


def _cost(given: Contraction, terms: Terms, layout: Layout, roles: Mapping[str, Role]) -> float:
    """Bytes that each device receives, and its operations as bytes."""
    mesh, extents, have = dict(terms.mesh), dict(terms.extents), given.layout
    shapes = [[extents[index] for index in indices] for indices in given.indices]
    a, b, d, acc = terms.itemsizes
    cost: float = a * received(shapes[0], have.a, layout.a, mesh) + b * received(shapes[1], have.b, layout.b, mesh)
    cost += d * received(shapes[2], layout.d, have.d, mesh)
    group = tuple(axis for axis, role in roles.items() if role.communicates)
    p = size_of(mesh, group)
    local = [math.prod(shape) / size_of(mesh, sum(dims, ())) for shape, dims in zip(shapes, layout, strict=True)]
    if group:
        role = roles[group[0]]
        if role.is_contracted:
            whole = local[2] * (p if role.d else 1)
            cost += acc * whole * (p - 1) / p * (1 if role.d else 2)
        elif given.is_grid_role(role):
            over_b = size_of(mesh, tuple(axis for axis in group if roles[axis].b not in given.d))
            cost += (over_b - 1) * local[1] * b + (p // over_b - 1) * local[0] * a
        else:
            is_rows = role.d == role.b
            cost += (p - 1) * (local[0] * a if is_rows else local[1] * b)
    used = tuple(axis for axis, role in roles.items() if role != Role())
    return cost + 2 * math.prod(extents.values()) / size_of(mesh, used) / OPERATIONS_PER_BYTE
