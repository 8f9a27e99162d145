"""Matches the instructions of a program before and after XLA's partitioner."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmp._src.core.contraction.contraction import Dims
from jaxmp._src.tools.explain import hlo
from jaxmp._src.tools.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction, Module, ints

# An instruction with its computation.
Place = tuple[Computation, Instruction]
# An axis, or a part of it, in a sharding or in replica groups.
_AXIS = r"'([^']*)'(?::\((\d+)\)(\d+))?"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program, and the program before (`whole`) and after (`parts`) XLA's partitioner, if XLA ran it.

    Before it, each instruction is on whole arrays and has its decided sharding. After it, each collective is next to
    the operation that it serves; later passes fuse both.
    """

    compiled: Module
    mesh: Mapping[str, int]
    whole: Module | None = None
    parts: Module | None = None
    # Caches of `wholes`, `dims` and `axes`.
    _places_of_shape: dict[Any, tuple[list[Place], dict[str, int]]] = dataclasses.field(default_factory=dict)
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
        """Returns the collectives after the partitioner, by each of their `keys` for operand 0; {} without `parts`."""
        found: dict[str, list[Place]] = {}
        for computation, each in self.parts.places() if self.parts else ():
            for key in keys(computation, each, 0) if each.kind in COLLECTIVES else ():
                found.setdefault(key, []).append((computation, each))
        return found

    def axes(self, collective: Instruction) -> tuple[str, ...]:
        if collective not in self._axes:
            groups = groups_of(collective, math.prod(self.mesh.values()))
            self._axes[collective] = axes_of(groups, self.mesh) or ()
        return self._axes[collective]

    def wholes(self, part: Instruction) -> list[Place]:
        """Returns the instructions on whole arrays that `part`, one after the partitioner, may come from, the likeliest
        first: with its name, if possible also with its opcode and local shape. Empty if it has no name. Layers of one
        line are distinguished by their order."""
        if not part.op_name:
            return []
        key, shape = (origin(part), part.opcode), part.shapes[:1]
        if (*key, *shape) not in self._places_of_shape:
            every = self._wholes.get(key) or self._wholes.get((key[0], ""), [])[::-1]
            found = [place for place in every if self.local(*place) == shape]
            twins = [each.name for _, each in self._parts.get(key, ()) if each.shapes[:1] == shape]
            places = {name: i for i, name in enumerate(twins)} if len(twins) == len(found) else {}
            self._places_of_shape[*key, *shape] = found or every, places
        found, places = self._places_of_shape[*key, *shape]
        at = places.get(part.name, 0)
        return found[at:] + found[:at]

    def local(self, computation: Computation, each: Instruction) -> list[tuple[str, tuple[int, ...]]]:
        """Returns [(type, extents)] that an instruction, or the first array of its tuple, has on one device."""
        by = [math.prod(self.mesh[axis] for axis in dim) for dim in self.dims(computation, each, "0")]
        return [
            (kind, tuple(n // m for n, m in zip(extents, by, strict=False)) if by else extents)
            for kind, extents in each.shapes[:1]
        ]

    def dims(self, computation: Computation, of: Instruction, part: str = "") -> Dims:
        """Returns the axes that shard each dimension of a whole array, or of this part of a tuple; () if none do, if
        the sharding is unknown, or for a tuple without `part`."""
        text = of.sharding
        if (text, part) not in self._dims:
            texts = list(split(text)) if text.startswith("{") else [text]  # a tuple
            at = int(part or len(texts)) if text.startswith("{") else 0
            dims = (sharded(texts[at], self.mesh) or ()) if at < len(texts) else ()
            self._dims[text, part] = dims if any(dims) else ()
        return self._dims[text, part]

    def partitioned(self, computation: Computation, collective: Instruction, operand: int) -> Place | None:
        """Returns the collective after the partitioner that became `collective` of the compiled program, found by
        `keys`; None if there is none. Of several, prefers one with the same size of the operand, and then the same
        axes. The last key finds only one with both."""
        size = computation.operands(collective)[operand].nbytes

        # The products in a layer's gradient have the same name.
        def matches(place: Place) -> tuple[bool, bool]:
            return place[0].operands(place[1])[0].nbytes == size, self.axes(place[1]) == self.axes(collective)

        for key in keys(computation, collective, operand):
            # Later passes turn an all-reduce into a reduce-scatter.
            kinds = {"all-reduce", "reduce-scatter"} if "reduce" in collective.kind else {collective.kind}
            found = [place for place in self._partitioned.get(key, ()) if place[1].kind in kinds]
            found = [place for place in found if all(matches(place))] if key.startswith("in ") else found
            if found:
                return max(found, key=matches)
        return None

    @functools.cached_property
    def callers(self) -> dict[str, Place]:
        """Returns the loop, branch or call that runs each computation, by the computation's name, in the program before
        the partitioner (`whole`); {} without it."""
        return {name: place for place in self.places() for name, _ in hlo.called_by(place[1])}

    def places(self) -> Iterator[Place]:
        """Yields the instructions of `whole`; nothing without it."""
        yield from self.whole.places() if self.whole else ()


def _by_name(module: Module | None) -> dict[tuple[str, str], list[Place]]:
    """Returns the instructions with a name, by (`origin`, opcode), and by (`origin`, ""); {} without a module."""
    found: dict[tuple[str, str], list[Place]] = {}
    for place in module.places() if module else ():
        if name := origin(place[1]):
            for opcode in (place[1].opcode, ""):
                found.setdefault((name, opcode), []).append(place)
    return found


def keys(computation: Computation, collective: Instruction, operand: int) -> list[str]:
    """Returns keys that identify a collective in every version of a program, the most reliable one first: its channel,
    its `origin`, the `origin` of its `source`, and the scope and frame of its `source`, which XLA may have replaced. A
    combined collective has no channel, and its own `origin` comes second. Leaves out keys without a value."""
    is_single = len(collective.operands) == 1 or collective.kind == "all-to-all"  # XLA has combined others
    channel = collective.attribute("channel_id") if is_single else ""
    made = source(computation, collective, operand)
    names = [origin(collective), f"of {origin(made)}" if made.op_name else ""]
    scope, _, frame = origin(made).rpartition(":")
    names = [*names[:: 1 if is_single else -1], f"in {scope.rpartition('/')[0]}:{frame}" if frame else ""]
    return [key for key in (f"channel {channel}" if channel else "", *names) if key]


def source(computation: Computation, collective: Instruction, operand: int) -> Instruction:
    """Returns the operation that computes a collective's operand, looking through moves, selects and collectives; the
    collective itself if that is an argument or has no name."""
    at = collective
    part = operand
    while at is collective or at.opcode in MOVES | {"select"} or at.kind in COLLECTIVES:
        if not at.operands:
            break
        # A lookup in a part of a table selects the values that it finds, or zeros.
        if at.opcode == "select":
            part = 2 if computation.operands(at)[1].opcode == "broadcast" else 1
        at, index = operand_of(computation, at, part)
        part = int(index or 0) * (at.kind in COLLECTIVES)  # if XLA has combined several arrays
    return at if at.op_name and at.opcode != "parameter" else collective


def operand_of(computation: Computation, at: Instruction, number: int) -> tuple[Instruction, str]:
    """Returns (operand number `number` of `at`, its part), looking through tuples and barriers."""
    found, part = computation.instructions[at.operands[number]], at.parts[number]
    part = at.attribute("index") if at.opcode == "get-tuple-element" else part
    while part and found.opcode in ("tuple", "opt-barrier", "optimization-barrier", "get-tuple-element"):
        step = int(part) if found.opcode == "tuple" else 0
        part = part if "barrier" in found.opcode else found.attribute("index") or found.parts[step]
        found = computation.instructions[found.operands[step]]
    return found, part


def origin(instruction: Instruction) -> str:
    """Returns JAX's name of an equation with its frame, which identify it together; "" without a name."""
    frame = instruction.attributes.rpartition("stack_frame_id=")[2].partition("}")[0]
    return f"{instruction.op_name}:{frame}" if instruction.op_name else ""


def split(text: str) -> Iterator[str]:
    """Yields the parts of "{a}, {b}" without their braces."""
    depth = start = 0
    for i, letter in enumerate(text):
        if letter == "{":
            start = i + 1 if depth == 0 else start
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                yield text[start:i]


def groups_of(instruction: Instruction, ndevices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that communicate with each other, by their numbers in the program. For a permute,
    returns pairs (from, to) of different devices. One group of all devices if the text lists none, () if it says
    nothing."""
    if pairs := instruction.attribute("source_target_pairs"):
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", "{" + pairs + "}") if a != b)
    found = re.search(
        r"replica_groups=(?P<all>\{[\d,{} ]*\}|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[^)]*\)?)\))? "
        r"\{(?P<axes>[^}]*)\}|\[(?P<tile>[\d,]+)\]<=\S+)",
        instruction.attributes,
    )
    if found is None:
        return ()
    if found["mesh"]:
        # A part of an axis is 'x':(2)4: of size 4, after a part of size 2.
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found["mesh"])}
        ids = _iota(found["ids"]) if found["ids"] else np.arange(math.prod(sizes.values()))
        within = {n: (int(a or 1), int(b or sizes[n])) for n, a, b in re.findall(_AXIS, found["axes"])}
        split = [(a, b, sizes[n] // (a * b)) for n in sizes for a, b in [within.get(n, (1, sizes[n]))]]
        ids = ids.reshape([extent for each in split for extent in each])
        inner = [3 * i + 1 for i, name in enumerate(sizes) if name in within]
        outer = [i for i in range(ids.ndim) if i not in inner]
        table = ids.transpose(outer + inner).reshape(-1, math.prod(ids.shape[i] for i in inner))
    elif found["tile"]:
        table = _iota(found["all"].partition("<=")[2].rstrip(",")).reshape(ints(found["tile"]))
    else:
        listed = re.findall(r"\{([\d,]+)\}", found["all"])
        return tuple(map(ints, listed)) or (tuple(range(ndevices)),)
    return tuple(map(tuple, table.tolist()))


def sharded(text: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes that shard each dimension, from the text of a sharding; () if replicated, None if unknown.
    Not for the text of a tuple, where the result is meaningless: pass one of its parts (`split`)."""
    if dims := re.search(r"mesh\[.*?\], \[(.*)\]", text):
        return tuple(tuple(re.findall(r"'([^']*)'", dim)) for dim in re.findall(r"\{([^{}]*)\}", dims[1]))
    found = re.match(r"devices=\[([\d,]+)\](<=)?(\S+)", text)
    if found is None:
        return () if "replicated" in text else None
    tile = ints(found[1])
    ids = _iota(found[3]) if found[2] else np.array(ints(found[3]))
    place = np.empty(ids.size, int)
    place[ids] = np.arange(ids.size)
    places = np.unravel_index(place.reshape(tuple(mesh.values()) or (1,)), tile)
    axes = [tuple(name for i, name in enumerate(mesh) if np.ptp(dim, axis=i).any()) for dim in places]
    rank = len(tile) - ("last_tile_dim_replicate" in text)
    return tuple(axes[:rank])


def axes_of(found: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which devices of a group or pair in `found` differ. None without groups or a mesh, or
    if the mesh does not have all devices."""
    size = math.prod(mesh.values())
    if not found or not mesh or any(device >= size for group in found for device in group):
        return None
    places = [np.array(np.unravel_index(np.array(group), tuple(mesh.values()))) for group in found]
    return tuple(name for i, name in enumerate(mesh) if any(np.ptp(place[i]) for place in places))


def _iota(text: str) -> np.ndarray:
    """Returns device numbers from "[2,4]T(1,0)": an iota of this shape, transposed, in one dimension."""
    shape, _, order = text.partition("T")
    dims = ints(shape)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(ints(order)) if order else ids).reshape(-1)
