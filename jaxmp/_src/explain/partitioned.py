"""A program ahead of and behind XLA's partitioner: which instruction of one is which of the other."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping

from jaxmp._src.explain import hlo
from jaxmp._src.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction, Module

# For each dimension of an array the mesh axes that shard it; () where none does.
Dims = tuple[tuple[str, ...], ...]
Place = tuple[Computation, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, and the same ahead of and behind XLA's partitioner, where XLA has told them.

    Ahead of it each instruction is of whole arrays and has the sharding that was decided for it. Behind it each
    collective lies beside the operation that it serves; later passes fuse both.
    """

    compiled: Module
    mesh: Mapping[str, int]
    whole: Module | None = None
    parts: Module | None = None

    @functools.cached_property
    def _wholes(self) -> dict[tuple[str, str], Place]:
        """The instructions of whole arrays by their names in JAX and their opcodes, and the last one of each name."""
        found: dict[tuple[str, str], Place] = {}
        for computation in self.whole.computations.values() if self.whole else ():
            for each in computation.instructions.values():
                found.setdefault((origin(each), each.opcode), (computation, each))
                found[origin(each), ""] = computation, each
        return found

    @functools.cached_property
    def _partitioned(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """The collectives behind the partitioner by their channels, their names in JAX, and those of their operands."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.parts.computations.values() if self.parts else ():
            for each in computation.instructions.values():
                if each.kind in COLLECTIVES:
                    for key in keys(computation, each, 0):
                        found.setdefault(key, []).append((computation, each))
        return found

    def axes(self, collective: Instruction) -> tuple[str, ...]:
        groups = hlo.groups(collective, math.prod(self.mesh.values()))
        return hlo.axes_of(groups, self.mesh) or ()

    def as_whole(self, part: Instruction) -> tuple[Computation, Instruction] | None:
        """The instruction of whole arrays that one behind the partitioner comes from."""
        found = self._wholes.get((origin(part), part.opcode)) or self._wholes.get((origin(part), ""))
        return found if part.op_name else None

    def dims(self, computation: Computation, of: Instruction, part: str = "") -> Dims:
        """For each dimension of a whole array the axes that shard it."""
        text = of.attribute("sharding")
        if text.startswith("{"):  # of a tuple
            texts = list(_split(text))
            text = texts[int(part)] if part and int(part) < len(texts) else ""
        dims = hlo.sharded(text, self.mesh) or ()
        return dims if any(dims) else ()

    def partitioned(self, computation: Computation, collective: Instruction, operand: int) -> Place | None:
        """The collective behind the partitioner that one of the compiled program was, as far as names tell."""
        for key in keys(computation, collective, operand):
            for place, each in self._partitioned.get(key, ()):
                # Later passes make a reduce-scatter of an all-reduce.
                if each.kind == collective.kind or {each.kind, collective.kind} == {"all-reduce", "reduce-scatter"}:
                    return place, each
        return None

    @functools.cached_property
    def _callers(self) -> dict[str, Place]:
        """By the name of a computation who runs it: a loop, a branch or a call."""
        return {
            name: (computation, each)
            for computation in (self.whole.computations.values() if self.whole else ())
            for each in computation.instructions.values()
            for name, _ in hlo.called_by(each)
        }

    def arguments(self, computation: Computation, of: Instruction, part: str, axes: Collection[str]) -> list[str]:
        """The names of the program's arguments that bring a sharding over `axes` into a whole array."""
        waiting, seen, found = [(computation, of, part)], set[tuple[str, str, str]](), dict[str, None]()
        while waiting and len(seen) < 2000:
            place, at, part = waiting.pop(0)
            if (place.name, at.name, part) in seen:
                continue
            seen.add((place.name, at.name, part))
            if at.opcode == "get-tuple-element":
                waiting.append((place, place.operands(at)[0], at.attribute("index")))
            elif at.opcode == "tuple" and part:
                waiting.append((place, place.operands(at)[int(part)], at.parts[int(part)]))
            elif at.opcode in ("while", "opt-barrier", "optimization-barrier") and part:
                waiting.append((place, place.operands(at)[0], part))
            elif at.opcode == "parameter" and place.name in self._callers:
                outer, caller = self._callers[place.name]
                # A branch has its own operand behind the one that chooses.
                branches = [name for name, _ in hlo.called_by(caller)] if caller.opcode == "conditional" else []
                number = 1 + branches.index(place.name) if branches else int(at.parts[0])
                waiting.append((outer, outer.operands(caller)[number], part or caller.parts[number]))
            elif not {axis for dim in self.dims(place, at, part) for axis in dim}.isdisjoint(axes):
                if at.opcode == "parameter":
                    found |= {at.op_name: None} if at.is_argument else {}
                else:
                    waiting += zip([place] * len(at.operands), place.operands(at), at.parts, strict=True)
        return list(found)


def keys(computation: Computation, collective: Instruction, operand: int) -> list[str]:
    """What tells a collective from others, in every version of a program, the surest first."""
    is_single = len(collective.operands) == 1 or collective.kind == "all-to-all"  # others XLA has combined
    channel = collective.attribute("channel_id") if is_single else ""
    made = source(computation, collective, operand)
    found = [f"channel {channel}" if channel else "", origin(collective)]
    return [key for key in (*found, f"of {origin(made)}" if made.op_name else "") if key]


def source(computation: Computation, collective: Instruction, operand: int) -> Instruction:
    """The operation whose result a collective takes; the collective itself where that is an argument."""
    at = collective
    part = operand
    while at is collective or at.opcode in MOVES | {"select"} or at.kind in COLLECTIVES:
        if not at.operands:
            break
        # select(mask, values, zeros) is what a lookup in a part of a table gives.
        part = 1 if at.opcode == "select" else part if at is collective else 0
        at, _ = behind(computation, at, part)
        part = 0
    return at if at.op_name and at.opcode != "parameter" else collective


def behind(computation: Computation, at: Instruction, operand: int) -> tuple[Instruction, str]:
    """What an operand is, and which part of it, through the tuples that hold it."""
    found, part = computation.instructions[at.operands[operand]], at.parts[operand]
    part = at.attribute("index") if at.opcode == "get-tuple-element" else part
    while part and found.opcode in ("tuple", "opt-barrier", "optimization-barrier", "get-tuple-element"):
        step = int(part) if found.opcode == "tuple" else 0
        part = part if "barrier" in found.opcode else found.attribute("index") or found.parts[step]
        found = computation.instructions[found.operands[step]]
    return found, part


def origin(instruction: Instruction) -> str:
    """JAX's name of an equation with its frame, which together tell it from others."""
    frame = instruction.attributes.rpartition("stack_frame_id=")[2].partition("}")[0]
    return f"{instruction.op_name}:{frame}" if instruction.op_name else ""


def _split(text: str) -> Iterator[str]:
    """The parts of "{a}, {b}", without their braces."""
    depth = start = 0
    for i, letter in enumerate(text):
        if letter == "{":
            start = i + 1 if depth == 0 else start
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                yield text[start:i]
