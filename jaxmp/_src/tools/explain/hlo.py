"""Reads XLA's programs from their text: instructions, their lines in the user's program, and how often they run.

The grammar is defined by xla/hlo/parser (HloParser); `compiled.as_text()` of JAX prints it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmp._src.platform.jax_internals import source_lines

# Instructions that return their operand in another order, place or type.
MOVES = {"bitcast", "bitcast-convert", "broadcast", "convert", "copy", "copy-done", "copy-start", "get-tuple-element"}
MOVES |= {"optimization-barrier", "reshape", "transpose", "tuple", "slice", "dynamic-slice", "opt-barrier", "pad"}
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"),
    "collective-broadcast",
)

_HEAD = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_BRACKET = re.compile(r'\\.|["(){}\[\]]')
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(eq=False)  # frozen ones take three times as long to create, and programs have 10,000s
class Instruction:
    """One instruction. `operands`: names of instructions in its computation. `attributes`: the text after them.

    `parts`: for each operand its index in a tuple, or "" for a whole value; for a parameter its number.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    parts: tuple[str, ...]
    attributes: str
    is_root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name of the equation, "jit(step)/transpose(jvp())/dot_general"; for a parameter the argument's name."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def is_argument(self) -> bool:
        """True if it has the name of one of the program's arguments."""
        return bool(self.op_name) and "/" not in self.op_name

    @property
    def primitive(self) -> str:
        """The primitive of JAX's equation; "" for arguments, because their names have no slash; "jit" for a copy that
        an inner jit makes to ask for a sharding."""
        name = self.op_name.rpartition("/")[2] if "/" in self.op_name else ""
        return "jit" if self.opcode == "copy" and name.startswith("jit(") else name  # an inner jit asks for a sharding

    @property
    def kind(self) -> str:
        """The opcode; for the start of an asynchronous operation the opcode of the operation."""
        return self.opcode.removesuffix("-start")

    @property
    def sharding(self) -> str:
        return self.attribute("sharding")

    @functools.cached_property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(type, extents) of the result, or of each part of a tuple, as a list."""
        found = re.findall(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\]", self.type)
        return [(kind, tuple(int(n.lstrip("<=")) for n in extents.split(",") if n)) for kind, extents in found]

    @property
    def results(self) -> list[tuple[str, tuple[int, ...]]]:
        """`shapes` without the operands that an asynchronous operation's start repeats, and without a product's
        workspace."""
        count = len(self.operands)
        if self.opcode.endswith("-start") and len(self.shapes) >= 2 * count:
            return self.shapes[count : 2 * count]
        return self.shapes[:1] if self.is_product else self.shapes

    @functools.cached_property
    def nbytes(self) -> int:
        return _bytes_of(self.shapes)

    @functools.cached_property
    def held(self) -> int:
        """The bytes of `results`."""
        return _bytes_of(self.results)

    @property
    def is_product(self) -> bool:
        """True for XLA's product, and for a call of cuBLAS into which XLA has turned one."""
        target = self.attribute("custom_call_target") if self.opcode == "custom-call" else ""
        return self.opcode == "dot" or target.startswith('"__cublas')

    @property
    def summed(self) -> tuple[int, ...]:
        """The dimensions of the first operand that a product sums."""
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)', self.attributes)
        return ints(found[1]) if found else self.numbers("lhs_contracting_dims")

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute without the braces around it, or ""."""
        return _attribute(self.attributes, name)

    def numbers(self, name: str) -> tuple[int, ...]:
        return ints(self.attribute(name))


@functools.lru_cache(8192)  # layers repeat the texts of their instructions
def _attribute(text: str, name: str) -> str:
    at = text.find(f"{name}=")
    while at > 0 and text[at - 1] not in " ,":  # the end of a longer name
        at = text.find(f"{name}=", at + 1)
    if at < 0:
        return ""
    start = at + len(name) + 1
    if text[start : start + 1] == "{":
        return text[start + 1 : _closing(text, start)]
    return re.match(r"[^ ,]*", text[start:])[0]  # type: ignore[index]


@functools.lru_cache(8192)
def ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


class Computation:
    """The instructions in the order of the text. A scheduled module runs them in this order."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self.instructions = {each.name: each for each in map(_instruction, lines) if each is not None}

    @functools.cached_property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.is_root)

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for each in self.instructions.values():
            for name in dict.fromkeys(each.operands):
                users[name].append(each)
        return users

    def operands(self, of: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in of.operands]


class Frame(NamedTuple):
    """A line of a function."""

    file: str
    line: int
    function: str


class Module:
    """A program of XLA from its text."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        header, *bodies = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{\n)", text)
        self.computations: dict[str, Computation] = {}
        for body in bodies:
            head, *lines = body.splitlines()
            name = head.removeprefix("ENTRY ").partition(" ")[0].lstrip("%")
            self.computations[name] = Computation(name, lines)
            self.entry = name if head.startswith("ENTRY ") else self.entry
        self._stacks, self._callers = _frames(header)
        # For each argument: True if XLA chooses its sharding.
        chosen = re.search(r"allow_spmd_sharding_propagation_to_parameters=\{([^}]*)\}", header)
        self.chooses_arguments = [flag == "true" for flag in chosen[1].split(",")] if chosen else []
        # True if XLA chooses the shardings of results.
        self.chooses_results = "allow_spmd_sharding_propagation_to_output={true" in header

    def places(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction with its computation."""
        for computation in self.computations.values():
            yield from ((computation, each) for each in computation.instructions.values())

    def line(self, of: Instruction) -> str:
        """Returns the user's line of an instruction (`innermost`), or "" if it is unknown; after "caller -> " if
        several lines call its function. "train.py:41 -> norm:12" is line 12 in a function norm of the same file. A line
        in another file has the file's name."""
        inner, stack = self.innermost(of), self._stack(of)
        callers = ((b, self._callers.get(a, ())) for a, b in itertools.pairwise(stack))
        caller = next((b for b, lines in callers if len(lines) > 1 and b in lines), None)
        if caller is None or (outer := source_lines.line_name(*caller[:2])) == inner:
            return inner
        file, line, function = stack[0]
        name = function.split("<locals>.")[-1].strip("<>")
        return f"{outer} -> " + (f"{name}:{line}" if file == caller.file else inner)

    def innermost(self, of: Instruction) -> str:
        """Returns the innermost line outside libraries of layers, "train.py:41", or ""."""
        return next((source_lines.line_name(*frame[:2]) for frame in self._stack(of)), "")

    def _stack(self, of: Instruction) -> Sequence[Frame]:
        found = re.search(r"stack_frame_id=(\d+)", of.attributes)
        return self._stacks.get(int(found[1]), ()) if found else ()

    def executed(self, name: str = "", count: int | None = 1) -> Iterator[tuple[Computation, int | None]]:
        """Yields (computation, how often the program runs it): the computation `name`, or the entry, which runs
        `count` times, and what it runs (`called_by`). None stands for an unknown number."""
        computation = self.computations[name or self.entry]
        yield computation, count
        for each in computation.instructions.values():
            for called, times in called_by(each):
                yield from self.executed(called, None if None in (count, times) else count * times)  # type: ignore[operator]


def called_by(instruction: Instruction) -> list[tuple[str, int | None]]:
    """Returns (name of a computation, how often) for each that an instruction runs as a whole, not element by element:
    a loop's body (None if its count is unknown), branches, calls and fusions."""
    if instruction.opcode == "while":
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
        return [(instruction.attribute("body").lstrip("%"), int(trips[1]) if trips else None)]
    names = {
        "conditional": ("branch_computations", "true_computation", "false_computation"),
        "call": ("to_apply",),
        "call-start": ("to_apply",),
        "fusion": ("calls",),
        "async-start": ("calls",),
    }.get(instruction.opcode, ())
    return [(name, 1) for key in names for name in re.findall(r"[\w.\-]+", instruction.attribute(key))]


def _bytes_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    bits = [(extents, re.match(r"pred|[a-z]+(\d+)", kind)) for kind, extents in shapes]  # a token has no match
    return sum(math.ceil(math.prod(extents) * int(found[1] or 8) / 8) for extents, found in bits if found)


def _frames(header: str) -> tuple[dict[int, Sequence[Frame]], dict[Frame, set[Frame]]]:
    """Returns (the user's frames from the innermost on, by frame number; the frames that directly call each frame)."""

    def table(title: str, entry: str) -> list[Any]:
        found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", header, re.M | re.S)
        return re.findall(rf"^(\d+) {entry}", found[1], re.M) if found else []

    files, functions = (dict(table(title, '"(.*)"$')) for title in ("FileNames", "FunctionNames"))
    located = table("FileLocations", r"\{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
    locations = {at: Frame(files[file], int(line), functions[function]) for at, file, function, line in located}
    stacks: dict[int, Sequence[Frame]] = {}
    # The text counts parents from 1 and lists them first; 0 or none means outermost.
    frames = table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    for at, location, parent in frames:
        stacks[int(at)] = (locations[location], *stacks.get(int(parent or 1) - 1, ()))
    stacks = {at: _of_user(stack) for at, stack in stacks.items()}
    callers, outer = collections.defaultdict[Frame, set[Frame]](set), collections.defaultdict[Frame, set[Frame]](set)
    for innermost in stacks.keys() - {int(parent or 1) - 1 for *_, parent in frames}:
        for i, frame in enumerate(stack := stacks[innermost]):
            callers[frame].update(stack[i + 1 : i + 2])
            outer[frame].update(stack[i + 2 :])
    # Operations that jax.checkpoint recomputes lack some frames between.
    return stacks, {frame: found - outer[frame] for frame, found in callers.items()}


def _of_user(stack: Sequence[Frame]) -> Sequence[Frame]:
    """Returns the frames outside libraries of layers, only the innermost of each function, because JAX repeats frames
    around a loop for its body; the innermost frame alone if all are in libraries. A call of an exported function has
    the frames of the export inside its own. A function in both keeps the call's frame."""
    frames: dict[Any, Frame] = {}
    ends = [i + 1 for i, frame in enumerate(stack) if frame.function == "<module>"]
    for start, end in reversed([*itertools.pairwise(sorted({0, *ends, len(stack)}))]):
        inner = {each[::2]: each for each in reversed(stack[start:end]) if not source_lines.is_of_library(each.file)}
        frames |= {key: each for key, each in inner.items() if key not in frames}
    return (*reversed(frames.values()),) or stack[:1]


def _instruction(line: str) -> Instruction | None:
    """Reads an instruction from its line; None for another line."""
    if (head := _HEAD.match(line)) is None:
        return None
    root, name = head.groups()
    at = head.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    start = line.index("(", end)
    stop = _closing(line, start)
    kind, opcode, inner = line[at:end], line[end:start].strip(), line[start + 1 : stop]
    attributes = line[stop + 1 :].lstrip(", ")
    operands = [("", inner)] if opcode == "parameter" else []
    operands = operands if opcode in ("constant", "parameter", "iota") else _OPERAND.findall(inner)
    names, parts = tuple([name for name, _ in operands if name]), tuple([part for _, part in operands])
    return Instruction(name, opcode, kind, names, parts, attributes, bool(root))


def _closing(text: str, at: int) -> int:
    """Returns the position at which the bracket that opens at `at` closes; ignores texts in quotes. Raises ValueError
    if it does not close."""
    depth, quoted = 0, False
    for found in _BRACKET.finditer(text, at):
        token = found[0]
        if token == '"':
            quoted = not quoted
        elif not quoted and token in "({[":
            depth += 1
        elif not quoted and token in ")}]":
            depth -= 1
            if depth == 0:
                return found.start()
    raise ValueError(f"brackets do not close: {text[at : at + 200]}")
