"""Compares how mesh axes shard values with how operations need them, puts both in words, and finds the reader of a
collective: the first instruction after it that does not only move data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from jaxmp._src.tools.explain import partitioned
from jaxmp._src.tools.explain.hlo import MOVES, Computation, Instruction, Module, called_by
from jaxmp._src.tools.explain.operations import only_moves, worked_along
from jaxmp._src.tools.explain.origins import ASKING, Dim, Origins, is_backward, value
from jaxmp._src.tools.explain.partitioned import Place, Program

# The use of operand `number` by an instruction, its user: (computation, user, number).
Edge = tuple[Computation, Instruction, int]


@dataclasses.dataclass(frozen=True)
class Values:
    """Answers how the mesh axes `axes` shard values of whole arrays."""

    origins: Origins
    axes: tuple[str, ...]

    @property
    def program(self) -> Program:
        return self.origins.program

    @property
    def over(self) -> str:
        return joined(self.axes) or "the devices"

    @property
    def every(self) -> Values:
        """`Values` for all axes of the mesh."""
        return self.on(self.program.mesh)

    def on(self, axes: Iterable[str]) -> Values:
        """Returns `Values` for other axes."""
        return Values(self.origins, (*axes,))

    def axes_of(self, at: Dim) -> tuple[str, ...]:
        """Returns the axes in `axes` that shard a dimension."""
        return tuple(axis for axis in self.origins.axes(at) if axis in self.axes)

    def axes_in(self, dims: Iterable[Dim]) -> set[str]:
        """Returns all mesh axes that shard one of `dims`."""
        return {axis for each in dims for axis in self.origins.axes(each)}

    def all(self, at: Dim) -> list[Dim]:
        """Returns the dimensions that the axes shard, of the value that has the dimension `at`."""
        return [each for each in at.all if self.axes_of(each)]

    def sharded(self, place: Computation, user: Instruction, number: int) -> list[Dim]:
        """Returns the dimensions of an operand that the axes shard; none if the user has no such operand."""
        return self.all(value(place, user, number)) if number < len(user.operands) else []

    def differs(self, place: Computation, user: Instruction, number: int) -> bool:
        """True if the axes shard a dimension of an operand that its user sums, needs whole, or sharded over others."""
        wants = dict[int, set[str]]()
        operand = value(place, user, number)
        for above in Dim(place, user, "", 0).all:
            for below in self.origins.operands(above):
                if below[:3] == operand[:3]:
                    wants.setdefault(below.dim, set()).update(self.origins.axes(above))
        return any(set(self.axes_of(each)) - wants.get(each.dim, set()) for each in self.sharded(place, user, number))

    # Words -------------------------------------------------------------------------------------------------------

    def dims(self, dims: Iterable[Dim]) -> str:
        """Describes dimensions and the origin of their sharding: "dimension 1 of x (from dimension 0 of w)"."""
        texts = dict[str, None]()
        for each in dims:
            name, index = self.origins.name(each)
            text = f"dimension {index} of {name}"
            texts[text + self.origin(each, text)] = None
        return joined(texts)

    def origin(self, each: Dim, name: str = "") -> str:
        """Describes the origins of a dimension's sharding, other than `name`: " (from dimension 0 of w)" for producers,
        or else " (to meet out_shardings)" for consumers; "" if there is none."""
        axes = self.axes_of(each)
        producers = [name for axis in axes for name in self.origins.producers(each, axis)]
        found = producers or [name for axis in axes for name in self.origins.consumers(each, axis)]
        named = [each for each in dict.fromkeys(found) if each != name][:2]
        return f" ({'from' if producers else 'to meet'} {joined(named)})" * bool(named)

    def describe(self, dims: Iterable[Dim]) -> str:
        """Returns text like "model shards dimension 1 of x"."""
        return joined([f"{shard(axes)} {self.dims(same)}" for axes, same in self._by_axes(dims)])

    def which(self, dims: Iterable[Dim]) -> str:
        """Returns text like "dimension 1 of x, which model shards"."""
        splits = f"XLA splits over {self.over}"
        texts = [f"{self.dims(same)}, which {shard(axes) if axes else splits}" for axes, same in self._by_axes(dims)]
        return ", and ".join(texts) or f"a dimension, which {splits}"

    def _by_axes(self, dims: Iterable[Dim]) -> Iterable[tuple[tuple[str, ...], list[Dim]]]:
        by_axes: dict[tuple[str, ...], list[Dim]] = {}
        for each in dims:
            by_axes.setdefault(self.axes_of(each), []).append(each)
        return by_axes.items()

    def operand(self, found: Edge) -> str:
        """Describes the sharding of an operand: "model shards dimension 1 of x", with ", transposed" after its own if
        the program transposes the named value. Describes a value that it is computed from if only that value is
        sharded. If neither is, says that XLA splits it."""
        if text := self.describe(self.sharded(*found)):
            each, is_turned = found[0].operands(found[1])[found[2]], False
            while each.opcode in MOVES and each.operands and not is_turned:
                is_turned = each.opcode == "transpose" and not is_backward(each)
                each = found[0].operands(each)[0]
            return text + ", transposed" * is_turned
        at = value(*found)
        below = (dim for each in at.all for dim in self.origins.operands(each))
        return self.describe([dim for dim in below if self.axes_of(dim)][:1]) or (
            f"XLA splits {self.origins.name(at)[0]} over {self.over}"
        )

    def result(self, at: Dim, *, origins: bool = True) -> str:
        """Describes the sharding of a result or a constraint over the axes, or else over any axis: "model on dimension
        0 (from dimension 0 of w)"; "" if it is whole. The origin is left out for a constraint, or without `origins`."""
        texts = []
        for each in self.all(at) or self.every.all(at):
            text = f"{joined(self.axes_of(each) or self.origins.axes(each))} on dimension {each.dim}"
            is_made = origins and at.instruction.primitive not in ASKING
            texts.append(text + self.every.origin(each) * is_made)
        return joined(texts)

    def leave_whole(self, dims: Iterable[Dim]) -> str:
        """Returns the remedy to leave the dimensions whole where their sharding begins, "leave dimension 0 of x whole"
        for arguments or "change with_sharding_constraint in train.py:12" for other origins, or to shard another
        dimension if the array has one."""
        pairs = [(each, axis) for each in dims for axis in self.axes_of(each)]
        found = (self.origins.producers(*pair) or self.origins.consumers(*pair) for pair in pairs)
        names = [*dict.fromkeys(itertools.chain(*found))][:2]
        if not names:
            return "leave this dimension whole"
        arrays = [name for name in names if name.startswith("dimension")]
        remedy = f"leave {joined(arrays)} whole" if arrays else f"change {joined(names)}"
        has_others, axes = any(len(each.extents) > 1 for each, _ in pairs), {axis for _, axis in pairs}
        return remedy + f"; shard another dimension over {joined(axes)}" * has_others


class Cause(NamedTuple):
    """Why a collective runs: `kind` in one word, `text` and `remedy` in words, `line` of the operation that asks."""

    kind: str
    text: str
    remedy: str
    line: str


@dataclasses.dataclass(frozen=True)
class Search(Values):
    """A collective in a computation of `module`, the `axes` of its devices, and the number of the operand it moves.

    XLA's partitioner has run, so there is a program before it (`whole`).
    """

    module: Module
    computation: Computation
    collective: Instruction
    number: int

    @property
    def source(self) -> Instruction:
        return partitioned.source(self.computation, self.collective, self.number)

    def reader(self) -> tuple[Instruction | None, Instruction]:
        """Returns (reader of the collective's result, or None if that leaves the computation; the instruction read)."""
        waiting = [self.collective]
        for at in waiting:
            for user in self.computation.users[at.name]:
                if user.is_root and user.opcode == "tuple":
                    return None, at
                if not only_moves(user):
                    return user, at
                waiting += [user] * (user not in waiting)
            if at.is_root:
                return None, at
        return None, self.collective

    def edge(self, reader: Instruction, through: Instruction | None = None) -> Edge | None:
        """Returns the first edge on whole arrays where the reader, or a move before it, wants a value in another
        sharding; else the reader's own operand, and None if the reader is not found there. `through`: the instruction
        that it reads; by default the first operand, or the largest of a concatenate."""
        first: Edge | None = None
        for place, user in self.program.wholes(reader):
            joins = place.operands(user) if user.opcode == "concatenate" else []
            number = max(range(len(joins)), key=lambda i: joins[i].nbytes, default=0)
            number = reader.operands.index(through.name) if through and through.name in reader.operands else number
            found = place, user, min(number, len(user.operands) - 1)
            while found[2] >= 0:
                first = first or found
                if self.differs(*found):
                    return found
                below = place.operands(found[1])[found[2]]
                found = place, below, 0 if below.opcode in MOVES and len(below.operands) == 1 else -1
        return first

    def worked(self, found: Edge) -> list[Dim]:
        """Returns the dimensions, sharded over the axes, of operand 0 (of a concatenate, of the operand in `found`)
        that the user in `found` needs whole; all sharded ones if its needs are unknown."""
        dims = self.sharded(*found[:2], found[2] * (found[1].opcode == "concatenate"))
        along = worked_along(*found[:2])
        return [each for each in dims if along is None or each.dim in along]

    def returned(self, through: Instruction) -> tuple[Dim, Dim]:
        """Returns (the value that the program returns as `through`, before moves if the axes shard it there; the
        program's result), both as dimension 0. Only for a collective in the entry computation."""
        place, root = self.origins.whole.computations[self.origins.whole.entry], self.computation.root
        at = result = Dim(place, place.root, "", 0)
        if place.root.opcode == root.opcode == "tuple" and through.name in root.operands:
            number = root.operands.index(through.name)
            at, result = value(place, place.root, number), result._replace(part=str(number))
        while not self.all(at) and at.instruction.opcode in MOVES and (below := next(self.origins.operands(at), None)):
            at = below
        return at, result

    def in_branches(self, place: Computation, at: Instruction, user: Instruction) -> Iterator[Place]:
        """Yields the parameters of a conditional's branches that get the value `at`; nothing for another `user`."""
        for i, (name, _) in enumerate(called_by(user) if user.opcode == "conditional" else ()):
            inner = self.origins.whole.computations[name]
            if place.operands(user)[1 + i] is at:
                yield from ((inner, each) for each in inner.instructions.values() if each.opcode == "parameter")


def chain(computation: Computation, at: Instruction) -> Iterator[Instruction]:
    """Yields `at`, then the instruction that its data comes from, and so on, up to one that does not only move data."""
    yield at
    while at.operands and only_moves(at):
        at, _ = partitioned.operand_of(computation, at, 0)
        yield at


def shard(axes: Collection[str]) -> str:
    """Returns "data and model shard" or "data shards"."""
    return f"{joined(axes) or 'devices'} shard{'s' * (len(axes) == 1)}"


def joined(names: Collection[str]) -> str:
    return " and ".join(sorted(names) or ["no axis"] if isinstance(names, set) else names)
