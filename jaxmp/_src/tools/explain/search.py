"""Finds the reader of a collective in a compiled program, and the values that it wants in another sharding.

A reader is the first instruction after the collective that does not only move data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._src.tools.explain import partitioned
from jaxmp._src.tools.explain.hlo import MOVES, Computation, Instruction, Module, called_by
from jaxmp._src.tools.explain.operations import only_moves, worked_along
from jaxmp._src.tools.explain.origins import Dim, value
from jaxmp._src.tools.explain.partitioned import Place
from jaxmp._src.tools.explain.values import Edge, Values


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

    @property
    def is_entry(self) -> bool:
        return self.computation.name == self.module.entry

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
