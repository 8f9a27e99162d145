"""A collective of a compiled program, who reads what it gives, and what an operation along a dimension needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxmp._src.tools.explain import partitioned
from jaxmp._src.tools.explain.hlo import MOVES, Computation, Instruction, Module
from jaxmp._src.tools.explain.lies import Edge, Lies
from jaxmp._src.tools.explain.operations import ALONG, CUMULATIVE, OTHERWISE, hands_on, is_cumulative, worked_along
from jaxmp._src.tools.explain.origins import SLICE_OF_SCAN, Dim, function, value

RESULT, CARRY = "result", "carry"
# What names the dimensions that a lookup or a scatter indexes.
_INDEXED = {"lookup": "start_index_map", "scatter": "scatter_dims_to_operand_dims"}


class Cause(NamedTuple):
    """Why a collective runs: `kind` for programs, the words for people, and the line of the operation that wants it."""

    kind: str
    text: str
    remedy: str
    line: str


@dataclasses.dataclass(frozen=True)
class Search(Lies):
    """A collective in its computation, and the axes over which it communicates."""

    module: Module
    computation: Computation
    collective: Instruction
    operand: int

    @property
    def source(self) -> Instruction:
        return partitioned.source(self.computation, self.collective, self.operand)

    def _readers(self) -> Iterator[tuple[Instruction | str, Instruction]]:
        """(who reads what the collective gives, or how it leaves the computation; by way of which instruction)."""
        waiting, seen = [self.collective], {self.collective.name}
        while waiting:
            at = waiting.pop(0)
            for user in self.computation.users[at.name]:
                if user.is_root and user.opcode == "tuple":
                    yield self._leaves, at
                elif user.name not in seen and hands_on(user):
                    waiting.append(user)
                elif user.name not in seen:
                    yield user, at
                seen.add(user.name)
            if at.is_root:
                yield self._leaves, at

    def _edge(self, reader: Instruction, through: Instruction | None = None) -> Edge | None:
        """Which value of whole arrays the reader, or what leads to it, wants otherwise than it lies."""
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

    def _worked(self, found: Edge) -> list[Dim]:
        """The sharded dimensions that an operation needs whole, of the array that it writes to, or looks up in."""
        dims = self.sharded(*found[:2], found[2] * (found[1].opcode == "concatenate"))
        along = worked_along(*found[:2])
        return [each for each in dims if along is None or each.dim in along]

    def _is_along(self, found: Edge) -> bool:
        """Whether that is why XLA moves data, as far as the operation tells."""
        return bool(self._worked(found)) or not self.sharded(*found[:2], 0)

    def _unsplit(self, name: str, found: Edge, line: str) -> Cause:
        """An operation that XLA splits along none of its dimensions."""
        what = self.origins.name(value(*found))[0]
        text = f"XLA does not split {name} over {self.over}: each device does all of {what}"
        return Cause(ALONG[name][0], text, f"run it in jax.shard_map over {self.over}, each device on its part", line)

    def _along(self, name: str, found: Edge | None, line: str) -> Cause:
        """An operation with a dimension that it does not split."""
        kind, does = ALONG[name]
        dims = self._worked(found)[:1] if found is not None else []
        if found is not None and not dims:
            every = self._over_others(self.program.mesh)
            # Of a lookup or a scatter the indices, which JAX has made of the user's, stand last.
            numbers = sorted(range(len(found[1].operands)), key=lambda i: i == 1)
            lies = (every.lies(every.sharded(*found[:2], i)) for i in numbers)
            have = ", and ".join([*dict.fromkeys(filter(None, lies))][:3])
            text = f"XLA does not split {name} over {self.over}" + f", but {have}" * bool(have)
            remedy = every.shard_another(dims) if (dims := every.sharded(*found[:2], 0)[:1]) else ""
            return Cause(kind, text, remedy, line)
        what = self.origins.name(value(*found))[0] if found is not None else self._operand()
        where = self.which(dims) if dims else f"a dimension of {what} over {self.over}"
        if found is not None and name == "dynamic_slice" and SLICE_OF_SCAN.search(found[1].op_name):
            line = self.origins.line(*found[:2]) or line
            text = f"a scan takes one slice an iteration along {where}"
            return Cause("scan", text, f"leave the dimension that the scan runs over whole in {what}", line)
        if found is not None and kind == "window" and is_cumulative(found[1]):
            kind, does, name = "cumulative", "runs along", CUMULATIVE.get(name, "a cumulative operation")
        primitive, name = name, "argmax or another reduction of pairs" if name == "reduce" else name
        shown = function(*found[:2], name) if found is not None and found[1].primitive == primitive else name
        text = f"{shown} {does} {where}"
        text += f"; {self.has(found)}" if found is not None and "update" in name and found[2] else ""
        remedy = OTHERWISE.get(name, "")
        if found is not None and kind in _INDEXED and len(found[1].numbers(_INDEXED[kind])) > 1:
            is_window = len(value(*found[:2], 1).extents) < 2  # as x.at[1:-1].set
            indexes = "jax.vmap over it, so that each device indexes in its own shard"
            remedy = OTHERWISE["slice"] if is_window else indexes
        return Cause(kind, text, "; or ".join(filter(None, (self.shard_another(dims), remedy))), line)

    def _for_cut(self, each: Instruction) -> Cause | None:
        """A slice of one element along a sharded dimension, which XLA moves where a reshape drops that dimension."""
        for place, whole in self.program.wholes(each)[: each.primitive in ("squeeze", "reshape")]:
            below = place.operands(whole)[0]
            if below.opcode == "slice" and any(at.extents[at.dim] == 1 for at in self.sharded(place, whole, 0)):
                return self._along("slice", (place, below, 0), self.origins.line(place, below))
        return None

    @property
    def _leaves(self) -> str:
        return RESULT if self.computation.name == self.module.entry else CARRY

    def _over_others(self, axes: Iterable[str]) -> Lies:
        return Lies(self.origins, tuple(sorted(axes)))

    def _operand(self) -> str:
        """What the collective takes, where no user of whole arrays tells."""
        at, _ = partitioned.behind(self.computation, self.collective, self.operand)
        *_, at = chain(self.computation, at)
        if at.opcode == "parameter" and self._leaves == RESULT and at.is_argument:
            return at.op_name
        if self.source is self.collective:
            return "an operand"
        found = [Dim(*place, "", 0) for place in self.program.wholes(self.source)]
        return self.origins.name(found[0])[0] if found else f"the result of {self.source.primitive}"


def chain(computation: Computation, at: Instruction) -> Iterator[Instruction]:
    """An instruction, and what it hands on."""
    yield at
    while at.operands and hands_on(at):
        at, _ = partitioned.behind(computation, at, 0)
        yield at
