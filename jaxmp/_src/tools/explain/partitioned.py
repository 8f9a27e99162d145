"""A program ahead of and behind XLA's partitioner: which instruction of one is which of the other."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmp._src.tools.explain import hlo
from jaxmp._src.tools.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction, Module

# For each dimension of an array the mesh axes that shard it; () where none does.
Dims = tuple[tuple[str, ...], ...]
Place = tuple[Computation, Instruction]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program, and the same ahead of and behind XLA's partitioner, where XLA has told them.

    Ahead of it each instruction is of whole arrays and has the sharding that was decided for it. Behind it each
    collective lies beside the operation that it serves; later passes fuse both.
    """

    compiled: Module
    mesh: Mapping[str, int]
    whole: Module | None = None
    parts: Module | None = None
    # What `wholes`, `dims` and `axes` have told, by what was asked.
    _alike: dict[Any, tuple[list[Place], dict[str, int]]] = dataclasses.field(default_factory=dict)
    _dims: dict[tuple[str, str], Dims] = dataclasses.field(default_factory=dict)
    _axes: dict[Instruction, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _wholes(self) -> dict[tuple[str, str], list[Place]]:
        return _by_name(self.whole)

    @functools.cached_property
    def _parts(self) -> dict[tuple[str, str], list[Place]]:
        return _by_name(self.parts)

    @functools.cached_property
    def _partitioned(self) -> dict[str, list[Place]]:
        """The collectives behind the partitioner by their channels, their names in JAX, and those of their operands."""
        found: dict[str, list[Place]] = {}
        for computation in self.parts.computations.values() if self.parts else ():
            for each in computation.instructions.values():
                if each.kind in COLLECTIVES:
                    for key in keys(computation, each, 0):
                        found.setdefault(key, []).append((computation, each))
        return found

    def axes(self, collective: Instruction) -> tuple[str, ...]:
        if collective not in self._axes:
            groups = hlo.groups(collective, math.prod(self.mesh.values()))
            self._axes[collective] = hlo.axes_of(groups, self.mesh) or ()
        return self._axes[collective]

    def wholes(self, part: Instruction) -> list[Place]:
        """The instructions of whole arrays that one behind the partitioner may come from, the likeliest first.

        Layers that one line makes are told from each other by their order.
        """
        if not part.op_name:
            return []
        key, shape = (origin(part), part.opcode), part.shapes[:1]
        if (*key, *shape) not in self._alike:
            every = self._wholes.get(key) or self._wholes.get((key[0], ""), [])[::-1]
            found = [place for place in every if self.local(*place) == shape]
            twins = [each.name for _, each in self._parts.get(key, ()) if each.shapes[:1] == shape]
            places = {name: i for i, name in enumerate(twins)} if len(twins) == len(found) else {}
            self._alike[*key, *shape] = found or every, places
        found, places = self._alike[*key, *shape]
        at = places.get(part.name, 0)
        return found[at:] + found[:at]

    def named(self, part: Instruction) -> list[Place]:
        """All of the name and the opcode of one behind the partitioner."""
        return self._wholes.get((origin(part), part.opcode), [])

    def local(self, computation: Computation, each: Instruction) -> list[tuple[str, tuple[int, ...]]]:
        """The type and extents of an instruction, or of its first part, on one device."""
        by = [math.prod(self.mesh[axis] for axis in dim) for dim in self.dims(computation, each, "0")]
        return [
            (kind, tuple(n // m for n, m in zip(extents, by, strict=False)) if by else extents)
            for kind, extents in each.shapes[:1]
        ]

    def dims(self, computation: Computation, of: Instruction, part: str = "") -> Dims:
        """For each dimension of a whole array the axes that shard it."""
        text = of.sharding
        if (text, part) not in self._dims:
            texts = list(split(text)) if text.startswith("{") else [text]  # of a tuple
            at = int(part or len(texts)) if text.startswith("{") else 0
            dims = (hlo.sharded(texts[at], self.mesh) or ()) if at < len(texts) else ()
            self._dims[text, part] = dims if any(dims) else ()
        return self._dims[text, part]

    def partitioned(self, computation: Computation, collective: Instruction, operand: int) -> Place | None:
        """The collective behind the partitioner that one of the compiled program was, as far as names tell."""
        size = computation.operands(collective)[operand].nbytes

        # The products of a layer's gradient have one name.
        def alike(place: Place) -> tuple[bool, bool]:
            return place[0].operands(place[1])[0].nbytes == size, self.axes(place[1]) == self.axes(collective)

        for key in keys(computation, collective, operand):
            # Later passes make a reduce-scatter of an all-reduce.
            kinds = {"all-reduce", "reduce-scatter"} if "reduce" in collective.kind else {collective.kind}
            found = [place for place in self._partitioned.get(key, ()) if place[1].kind in kinds]
            found = [place for place in found if all(alike(place))] if key.startswith("in ") else found
            if found:
                return max(found, key=alike)
        return None

    @functools.cached_property
    def callers(self) -> dict[str, Place]:
        """By the name of a computation who runs it: a loop, a branch or a call."""
        return {
            name: (computation, each)
            for computation in (self.whole.computations.values() if self.whole else ())
            for each in computation.instructions.values()
            for name, _ in hlo.called_by(each)
        }


def _by_name(module: Module | None) -> dict[tuple[str, str], list[Place]]:
    """The instructions by their names in JAX and their opcodes, and by their names alone."""
    found: dict[tuple[str, str], list[Place]] = {}
    for computation in module.computations.values() if module else ():
        for each in computation.instructions.values():
            if name := origin(each):
                for opcode in (each.opcode, ""):
                    found.setdefault((name, opcode), []).append((computation, each))
    return found


def keys(computation: Computation, collective: Instruction, operand: int) -> list[str]:
    """What tells a collective from others, in every version of a program, the surest first.

    The last is where the operation lies that makes its operand, which XLA may have put in the place of another.
    """
    is_single = len(collective.operands) == 1 or collective.kind == "all-to-all"  # others XLA has combined
    channel = collective.attribute("channel_id") if is_single else ""
    made = source(computation, collective, operand)
    names = [origin(collective), f"of {origin(made)}" if made.op_name else ""]
    scope, _, frame = origin(made).rpartition(":")
    names = [*names[:: 1 if is_single else -1], f"in {scope.rpartition('/')[0]}:{frame}" if frame else ""]
    return [key for key in (f"channel {channel}" if channel else "", *names) if key]


def source(computation: Computation, collective: Instruction, operand: int) -> Instruction:
    """The operation whose result a collective takes; the collective itself where that is an argument."""
    at = collective
    part = operand
    while at is collective or at.opcode in MOVES | {"select"} or at.kind in COLLECTIVES:
        if not at.operands:
            break
        # A lookup in a part of a table gives values where it finds them, and else zeros.
        if at.opcode == "select":
            part = 2 if computation.operands(at)[1].opcode == "broadcast" else 1
        at, index = operand_of(computation, at, part)
        part = int(index or 0) * (at.kind in COLLECTIVES)  # of several arrays that XLA has combined
    return at if at.op_name and at.opcode != "parameter" else collective


def operand_of(computation: Computation, at: Instruction, number: int) -> tuple[Instruction, str]:
    """What an operand is, and which part of it, through the tuples that hold it."""
    found, part = computation.instructions[at.operands[number]], at.parts[number]
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


def split(text: str) -> Iterator[str]:
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
