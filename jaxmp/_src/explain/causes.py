"""Why XLA communicates: the operation of the user's program that wants other shards than there are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxmp._src.explain import hlo
from jaxmp._src.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction, Module

Dims = tuple[tuple[str, ...], ...]


class Cause(NamedTuple):
    """Why a collective runs: `kind` for programs, the words for people, and the line of the operation that wants it."""

    kind: str
    text: str
    remedy: str
    line: str


# JAX's collectives, which a program writes itself.
_WRITTEN = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_WRITTEN |= {"reduce_scatter", "unreduced_reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast"}
_CONSTRAINTS = {"sharding_constraint": "jax.lax.with_sharding_constraint", "reshard": "jax.sharding.reshard"}
_BY_XLA = {"dot": "product", "convolution": "convolution", "gather": "lookup", "scatter": "scatter", "sort": "sort"}
# What each operation with a sharded dimension of its own is called, by opcode; other opcodes act on each element.
_WHOLE = {
    **_BY_XLA,
    "concatenate": "concatenation",
    "cumsum": "cumulative sum",
    "custom-call": "custom call",
    "dynamic-slice": "slice at a computed place",
    "dynamic-update-slice": "update of a slice",
    "fft": "Fourier transform",
    "pad": "padding",
    "reduce-window": "cumulative or windowed operation",
    "reshape": "reshape",
    "reverse": "reversal",
    "slice": "slice",
}
_RESULT, _CARRY = "result", "carry"


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
    def _wholes(self) -> dict[tuple[str, str], tuple[Computation, Instruction]]:
        """The instructions of whole arrays by their names in JAX and their opcodes."""
        found: dict[tuple[str, str], tuple[Computation, Instruction]] = {}
        for computation in self.whole.computations.values() if self.whole else ():
            for each in computation.instructions.values():
                found.setdefault((_origin(each), each.opcode), (computation, each))
        return found

    @functools.cached_property
    def _partitioned(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """The collectives behind the partitioner by their channels, their names in JAX, and those of their operands."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.parts.computations.values() if self.parts else ():
            for each in computation.instructions.values():
                if each.kind in COLLECTIVES:
                    for key in _keys(computation, each, 0):
                        found.setdefault(key, []).append((computation, each))
        return found

    def cause(self, computation: Computation, collective: Instruction, operand: int = 0) -> Cause:
        """Why a collective of the compiled program runs, for one of its operands."""
        if collective.primitive in _WRITTEN:
            return _written(collective, self.compiled.line(collective))
        module, place, each = self.compiled, computation, collective
        for key in _keys(computation, collective, operand):
            alike = [one for one in self._partitioned.get(key, ()) if _is_alike(one[1], collective)]
            if alike:
                module, (place, each), operand = self.parts or module, alike[0], 0
                break
        found = _Search(self, module, place, each, operand, self.axes(collective))
        return found.sum() if each.kind in ("all-reduce", "reduce-scatter") else found.move()

    def axes(self, collective: Instruction) -> tuple[str, ...]:
        groups = hlo.groups(collective, max(1, _size(self.mesh)))
        return hlo.axes_of(groups, self.mesh) or ()

    def as_whole(self, part: Instruction) -> tuple[Computation, Instruction] | None:
        """The instruction of whole arrays that one behind the partitioner comes from."""
        return self._wholes.get((_origin(part), part.opcode)) if part.op_name else None

    def dims(self, computation: Computation, of: Instruction, part: str = "") -> Dims:
        """For each dimension of a whole array the axes that shard it."""
        text = of.attribute("sharding")
        if text.startswith("{"):  # of a tuple
            texts = list(_split(text))
            text = texts[int(part)] if part and int(part) < len(texts) else ""
        dims = hlo.sharded(text, self.mesh) or ()
        return dims if any(dims) else ()


@dataclasses.dataclass(frozen=True)
class _Search:
    """A collective in its computation, and the axes over which it communicates."""

    program: Program
    module: Module
    computation: Computation
    collective: Instruction
    operand: int
    axes: tuple[str, ...]

    # Sums --------------------------------------------------------------------------------------------------------

    def sum(self) -> Cause:
        """Partial sums, or other partial results, of an operation whose operands are sharded."""
        over, source = self._over(), self._source()
        line = self.module.line(source) or self.module.line(self.collective)
        is_gradient = "transpose(" in source.op_name
        name = source.primitive
        if source.opcode == "dot" or name == "dot_general":
            if is_gradient:
                text = f"the gradient of this product contracts a dimension that {self._shards()}"
                remedy = "needed; where the result is sharded a reduce-scatter moves half, and jaxmp.matmul hides it"
                return Cause("gradient", text, remedy, line)
            text = f"this product contracts a dimension that {self._shards()}, so that each device has a partial sum"
            remedy = "keep the result sharded (out_sharding, reduce-scatter), or jaxmp.matmul, which hides the sum"
            return Cause("contraction", text, remedy, line)
        if name == "gather" or source.opcode == "gather":
            text = f"a lookup in a table whose rows are sharded over {over}: each device finds some and adds zeros"
            return Cause("lookup", text, "shard the table along its features, or gather it once if it is small", line)
        if "scatter" in name or source.opcode == "scatter":
            text = f"each device over {over} adds its part of a scatter" + (", the gradient of a lookup" * is_gradient)
            return Cause("gradient" if is_gradient else "scatter", text, "shard the updates as the array", line)
        if is_gradient:
            text = f"the gradient of a value that is the same over {over} (a bias, a scale, a loss) is summed over it"
            return Cause("gradient", text, "needed where the value is the same on every device", line)
        if name.startswith(("reduce", "arg", "cum")) or source.opcode.startswith("reduce"):
            what = name.replace("reduce_", "") or "sum"
            text = f"a {what} (of a mean, norm, softmax or loss) over a dimension that {self._shards()}"
            return Cause("reduction", text, "do not shard this dimension, or reduce once over several values", line)
        text = f"partial results of {name or source.opcode} are summed over {over}"
        return Cause("partial", text, "", line)

    def _source(self) -> Instruction:
        return _source(self.computation, self.collective, self.operand)

    # Moves -------------------------------------------------------------------------------------------------------

    def move(self) -> Cause:
        """Data that goes to other devices, for the first reader that tells why."""
        readers = list(self._readers())
        causes = [cause for reader, through in readers if (cause := self._wants(reader, through)) is not None]
        if causes:
            return causes[0]
        line = self.module.line(self.collective) or self.module.line(self._source())
        name = self.collective.primitive or self._source().primitive
        return Cause(
            "unplaced", f"XLA moves an operand or a result of {name or 'an operation without a name'}", "", line
        )

    def _readers(self) -> Iterator[tuple[Instruction | str, Instruction]]:
        """(who reads what the collective gives, or how it leaves the computation; by way of which instruction)."""
        waiting, seen = [self.collective], {self.collective.name}
        while waiting:
            at = waiting.pop(0)
            if at.is_root:
                yield (_RESULT if self.is_entry else _CARRY), at
            for user in self.computation.users[at.name]:
                if user.name in seen:
                    continue
                seen.add(user.name)
                if _passes(user):
                    waiting.append(user)
                else:
                    yield user, at

    def _wants(self, reader: Instruction | str, through: Instruction) -> Cause | None:
        over = self._over()
        have = self._operand()
        made = self.module.line(self._source()) or self.module.line(self.collective)
        if reader == _RESULT:
            text = f"a result of the program is wanted with another sharding than {have} has over {over}"
            return Cause("out_shardings", text, "let out_shardings be those that the computation gives", made)
        if reader == _CARRY:
            line = made
            text = f"the loop's carry changes its sharding over {over}, in each iteration"
            return Cause("carry", text, "constrain the carry to one sharding, at the start and in the body", line)
        assert isinstance(reader, Instruction)
        line = self.module.line(reader)
        if reader.opcode == "while":
            text = f"the loop carries {have} with another sharding over {over} than it has at the start"
            return Cause("carry", text, "give the first carry the sharding that the body gives", line)
        if reader.primitive in _CONSTRAINTS:
            text = f"{_CONSTRAINTS[reader.primitive]} wants {have} with another sharding over {over}"
            return Cause("constraint", text, "drop the constraint, or constrain to the sharding that it has", line)
        found = self.program.as_whole(reader)
        if reader.opcode == "dot" or reader.primitive == "dot_general":
            return self._for_product(reader, through, line, found)
        if what := _WHOLE.get(reader.opcode) or _WHOLE.get(reader.primitive.replace("_", "-")):
            text = f"a {what} wants {have} without shards over {over}"
            return Cause(what.split(" ")[0], text, f"shard a dimension that the {what} leaves alone", line)
        if found is not None:
            return self._for_elements(*found, line)
        text = f"{reader.primitive or reader.opcode} wants {have} with another sharding over {over}"
        return Cause("elementwise", text, "give its operands one sharding", line)

    def _for_product(
        self, reader: Instruction, through: Instruction, line: str, found: tuple[Computation, Instruction] | None
    ) -> Cause:
        over, have = self._over(), self._operand()
        side = reader.operands.index(through.name) if through.name in reader.operands else 0
        when = "backward, " if "transpose(" in reader.op_name else ""
        if found is not None:
            computation, dot = found
            mine, other = (
                self.program.dims(computation, computation.instructions[dot.operands[i]], dot.parts[i])
                for i in (side, 1 - side)
            )
            summed, others = (dot.numbers(f"{name}_contracting_dims") for name in ("lhs", "rhs")[:: 1 - 2 * side])
            mine_k = [axis for i in summed if i < len(mine) for axis in mine[i]]
            other_k = [axis for i in others if i < len(other) for axis in other[i]]
            other_free = [axis for i, dim in enumerate(other) if i not in others for axis in dim]
            at = ", ".join(str(i) for i in summed)
            if set(self.axes) & set(mine_k) and not set(self.axes) & set(other_k):
                if set(self.axes) & set(other_free):
                    text = (
                        f"{when}this product wants {have} whole: {self._shards()} the other operand's rows or columns"
                    )
                    remedy = "as under FSDP; jaxmp.matmul or fuse gathers it while it multiplies"
                    return Cause("shared axis", text, remedy, line)
                text = f"{when}{have} is sharded over {over} along dimension {at}, which this product sums, and the "
                text += "other operand is not"
                remedy = f"shard the other operand's dimension {', '.join(map(str, others))} over {over} too, or this "
                return Cause("contraction", text, remedy + "one along another dimension", line)
            if set(self.axes) & set(other_free) and not set(self.axes) & set(mine_k):
                text = f"{when}both operands are sharded over {over} along dimensions of the result, which can keep one"
                return Cause("shared axis", text, "shard one of them over another axis, or jaxmp.matmul", line)
            if cause := self._downstream(computation, dot):
                return cause
        text = f"{when}this product wants {have} with another sharding over {over}"
        return Cause("product", text, "jaxmp.matmul or fuse moves it while it multiplies", line)

    def _for_elements(self, computation: Computation, operation: Instruction, line: str) -> Cause:
        """An operation on each element: its operands differ in their shardings, or its result is wanted otherwise."""
        over, dims = self._over(), self.program.dims(computation, operation)
        operands = [
            self.program.dims(computation, each, part)
            for each, part in zip(computation.operands(operation), operation.parts, strict=True)
            if not _is_constant(computation, each)
        ]
        name = operation.primitive or operation.opcode
        if len({each for each in operands if any(each)}) > 1 or (any(map(any, operands)) and dims in operands[1:]):
            text = f"{name} of operands with two shardings: one of them moves over {over}"
            return Cause("elementwise", text, "give both operands one sharding, where they are made", line)
        if cause := self._downstream(computation, operation):
            return cause
        text = f"{name} wants {self._operand()} with another sharding over {over}"
        return Cause("elementwise", text, "give its operands and its result one sharding", line)

    def _downstream(self, computation: Computation, operation: Instruction) -> Cause | None:
        """Who asks for the sharding of a result, which XLA then gives to the operations that lead to it."""
        over, dims = self._over(), self.program.dims(computation, operation)
        module = self.program.whole
        assert module is not None
        waiting, seen = [operation], {operation.name}
        while waiting:
            at = waiting.pop(0)
            if at.primitive in _CONSTRAINTS and at is not operation:
                text = f"{_CONSTRAINTS[at.primitive]} asks for another sharding over {over} than its operand has"
                return Cause("constraint", text, "drop the constraint, or constrain to what there is", module.line(at))
            if at.is_root and computation.name == module.entry:
                text = f"a result of the program is wanted with another sharding over {over} than it would have"
                remedy = "let out_shardings be those that the computation gives"
                return Cause("out_shardings", text, remedy, module.line(operation))
            for user in computation.users[at.name]:
                if user.name not in seen and (user.opcode == "tuple" or self.program.dims(computation, user) == dims):
                    seen.add(user.name)
                    waiting.append(user)
        return None

    @property
    def is_entry(self) -> bool:
        return self.computation.name == self.module.entry

    # Words -------------------------------------------------------------------------------------------------------

    def _over(self) -> str:
        return " and ".join(self.axes) or "the devices"

    def _shards(self) -> str:
        return f"{self._over()} shard{'s' * (len(self.axes) == 1)}"

    def _operand(self) -> str:
        """What the collective takes: the argument's name, or that of the operation which made it."""
        at = self.computation.operands(self.collective)[self.operand]
        while at.operands and _passes(at):
            at = self.computation.operands(at)[0]
        if at.opcode == "parameter":
            is_named = at.op_name and "/" not in at.op_name
            return at.op_name if is_named else "an argument" if self.is_entry else "what the loop carries"
        source = self._source()
        return f"the result of {source.primitive}" if source.primitive else "an operand"


def _is_alike(part: Instruction, collective: Instruction) -> bool:
    """Whether XLA may have made the one collective of the other."""
    return part.kind == collective.kind or {part.kind, collective.kind} == {"all-reduce", "reduce-scatter"}


def _keys(computation: Computation, collective: Instruction, operand: int) -> list[str]:
    """What tells a collective from others, in every version of a program, the surest first."""
    channel = collective.attribute("channel_id") if _is_single(collective) else ""
    source = _source(computation, collective, operand)
    keys = [f"channel {channel}" if channel else "", _origin(collective)]
    return [key for key in (*keys, f"of {_origin(source)}" if source.op_name else "") if key]


def _is_single(collective: Instruction) -> bool:
    """Whether a collective moves one array; XLA combines others that move several."""
    return len(collective.operands) == 1 or collective.kind == "all-to-all"


def _source(computation: Computation, collective: Instruction, operand: int) -> Instruction:
    """The operation whose result a collective takes; the collective itself where that is an argument."""
    at, behind = collective, computation.operands(collective)[operand : operand + 1]
    while behind:
        at = next((each for each in behind if each.opcode not in ("constant", "iota")), behind[0])
        is_passed = at.opcode in MOVES | {"select"} or at.kind in COLLECTIVES
        behind = computation.operands(at) if is_passed else []
        # select(mask, values, zeros): what a lookup in a part of a table gives.
        behind = behind[1:] if at.opcode == "select" else behind
    return at if at.op_name and at.opcode != "parameter" else collective


def _written(collective: Instruction, line: str) -> Cause:
    name = f"jax.lax.{collective.primitive.removesuffix('_invariant')}"
    if "jaxmp" in collective.op_name:
        return Cause("jaxmp", f"{name} beside a call of jaxmp, whose row says why", "", line)
    if "transpose(" in collective.op_name:
        return Cause(
            "gradient", f"the transpose of a collective, or of a value that devices share, is {name}", "", line
        )
    return Cause("written", f"{name} stands in the program", "", line)


def _passes(user: Instruction) -> bool:
    """Whether an instruction only hands its operand on, as the partitioner emits it around a collective."""
    if user.primitive in _CONSTRAINTS:
        return False
    is_own = user.opcode.replace("-", "_") == user.primitive and user.opcode in _WHOLE
    return (user.opcode in MOVES or user.kind in COLLECTIVES or user.opcode.endswith("-done")) and not is_own


def _is_constant(computation: Computation, each: Instruction) -> bool:
    """Whether a value has no sharding of its own: a constant, or one scalar in every element."""
    if each.opcode == "broadcast":
        return not computation.operands(each)[0].shapes[0][1]
    return each.opcode in ("constant", "iota")


def _origin(instruction: Instruction) -> str:
    """JAX's name of an equation with its frame, which together tell it from others."""
    frame = instruction.attributes.rpartition("stack_frame_id=")[2].partition("}")[0]
    return f"{instruction.op_name}:{frame}" if instruction.op_name else ""


def _size(mesh: Mapping[str, int]) -> int:
    size = 1
    for extent in mesh.values():
        size *= extent
    return size


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
