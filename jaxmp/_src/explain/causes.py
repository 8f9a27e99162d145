"""Why XLA communicates: the operation of the user's program that wants other shards than there are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxmp._src.explain import partitioned
from jaxmp._src.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction, Module
from jaxmp._src.explain.partitioned import Dims, Place, Program


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
# Operations with a dimension along which they need neighbours, or all of it: (kind, what they do there).
_ALONG = {
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), ("sort", "runs along")),
    **dict.fromkeys(("argmax", "argmin", "reduce"), ("reduction", "runs along")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), ("cumulative", "runs along")),
    **dict.fromkeys(("reduce_window_sum", "reduce_window", "reduce_window_max"), ("cumulative", "runs along")),
    **dict.fromkeys(("fft", "rev", "cholesky", "triangular_solve", "eigh", "svd", "lu", "qr"), ("whole", "runs along")),
    **dict.fromkeys(("slice", "split", "dynamic_slice", "dynamic_update_slice"), ("slice", "cuts")),
    **dict.fromkeys(("concatenate", "pad", "roll"), ("slice", "moves data along")),
    "conv_general_dilated": ("window", "has windows that reach over the borders of shards of"),
    "gather": ("lookup", "looks up along"),
    "scatter": ("scatter", "writes along"),
    "scatter-add": ("scatter", "adds along"),
}
# Functions of jax.numpy that other operations make up.
_NAMED = {"_roll_static": "roll", "_roll_dynamic": "roll", "_pad": "pad"}
_SLICE_OF_SCAN = re.compile(r"while/body/(?:jit\(dynamic_index_in_dim\)/)?dynamic_slice$")
_RESULT, _CARRY = "result", "carry"


def cause(program: Program, computation: Computation, collective: Instruction, operand: int = 0) -> Cause:
    """Why a collective of the compiled program runs, for one of its operands."""
    if collective.primitive in _WRITTEN:
        return _written(collective, program.compiled.line(collective))
    module, place, each = program.compiled, computation, collective
    if (found := program.partitioned(computation, collective, operand)) is not None and program.parts is not None:
        module, (place, each), operand = program.parts, found, 0
    search = _Search(program, module, place, each, operand, program.axes(collective))
    return search.sum() if each.kind in ("all-reduce", "reduce-scatter") else search.move()


@dataclasses.dataclass(frozen=True)
class _Search:
    """A collective in its computation, and the axes over which it communicates."""

    program: Program
    module: Module
    computation: Computation
    collective: Instruction
    operand: int
    axes: tuple[str, ...]

    @property
    def over(self) -> str:
        return " and ".join(self.axes) or "the devices"

    @property
    def shards(self) -> str:
        return f"{self.over} shard{'s' * (len(self.axes) == 1)}"

    @property
    def source(self) -> Instruction:
        return partitioned.source(self.computation, self.collective, self.operand)

    # Sums --------------------------------------------------------------------------------------------------------

    def sum(self) -> Cause:
        """Partial sums, or other partial results, of an operation whose operands are sharded."""
        over, source, name = self.over, self.source, self.source.primitive
        line = self.module.line(source) or self.module.line(self.collective)
        is_gradient, is_scalar = "transpose(" in source.op_name, not self.collective.shapes[0][1]
        if source.opcode == "dot" or name == "dot_general":
            if is_gradient:
                text = f"the gradient of this product contracts a dimension that {self.shards}"
                remedy = "needed; where the result is sharded a reduce-scatter moves half, and jaxmp.matmul hides it"
                return Cause("gradient", text, remedy, line)
            text = f"this product contracts a dimension that {self.shards}, so that each device has a partial sum"
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
        what = name.removeprefix("reduce_") if name.startswith(("reduce", "arg", "cum")) else "sum"
        text = f"a {what} over a dimension that {self.shards}, as in a mean, a norm, a softmax or a loss"
        remedy = "needed for a value of the whole batch, such as a loss" if is_scalar else "leave this dimension whole"
        return Cause("reduction", text, remedy, line)

    # Moves -------------------------------------------------------------------------------------------------------

    def move(self) -> Cause:
        """Data that goes to other devices, for the first reader that tells why."""
        for reader, through in self._readers():
            if (found := self._wants(reader, through)) is not None:
                return found
        line = self.module.line(self.collective) or self.module.line(self.source)
        name = self.collective.primitive or self.source.primitive or "an operation without a name"
        return Cause("unplaced", f"XLA moves an operand or a result of {name}", "", line)

    def _readers(self) -> Iterator[tuple[Instruction | str, Instruction]]:
        """(who reads what the collective gives, or how it leaves the computation; by way of which instruction)."""
        waiting, seen = [self.collective], {self.collective.name}
        while waiting:
            at = waiting.pop(0)
            if at.is_root:
                yield (_RESULT if self._is_entry else _CARRY), at
            for user in self.computation.users[at.name]:
                if user.name in seen:
                    continue
                seen.add(user.name)
                if _passes(user):
                    waiting.append(user)
                else:
                    yield user, at

    def _wants(self, reader: Instruction | str, through: Instruction) -> Cause | None:
        made = self.module.line(self.source) or self.module.line(self.collective)
        if reader == _RESULT:
            return self._result(made)
        if reader == _CARRY:
            text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
            return Cause("carry", text, "constrain the carry to one sharding, at the start and in the body", made)
        assert isinstance(reader, Instruction)
        line, found = self.module.line(reader), self.program.as_whole(reader)
        have = self._operand(found)
        if reader.opcode == "while":
            text = f"the loop carries {have} with another sharding over {self.over} than it has at the start"
            return Cause("carry", text, "give the first carry the sharding that the body gives", line)
        if reader.primitive in _CONSTRAINTS:
            return self._constraint(reader, self.module)
        if reader.opcode == "dot" or reader.primitive == "dot_general":
            side = reader.operands.index(through.name) if through.name in reader.operands else 0
            return self._for_product(side, line, found, "backward, " * ("transpose(" in reader.op_name))
        if reader.primitive == "reshape":
            return self._for_reshape(reader, found, line)
        name = next((name for scope, name in _NAMED.items() if f"({scope})" in reader.op_name), reader.primitive)
        if name in _ALONG:
            is_scan = _SLICE_OF_SCAN.search(reader.op_name) is not None
            return self._along(name, found, line, is_scan=is_scan)
        if found is not None and (cause := self._for_elements(*found)) is not None:
            return cause
        text = f"{reader.primitive or reader.opcode} wants {have} with another sharding over {self.over}"
        return Cause("elementwise", text, "give its operands and its result one sharding", line)

    def _result(self, line: str) -> Cause:
        have = self._operand(None)
        if self.program.compiled.chooses_results:
            text = f"XLA gives a result of the program another sharding than {have} has over {self.over}"
            return Cause("out_shardings", text, "name the sharding of the result, as out_shardings", line)
        text = f"a result of the program is wanted with another sharding than {have} has over {self.over}"
        return Cause("out_shardings", text, "let out_shardings be those that the computation gives", line)

    def _constraint(self, at: Instruction, module: Module) -> Cause:
        who = "backward, " * ("transpose(" in at.op_name) + _CONSTRAINTS[at.primitive]
        text = f"{who} asks for another sharding over {self.over} than {self._operand(None)} has"
        return Cause("constraint", text, "drop it, or constrain to the sharding that there is", module.line(at))

    def _along(self, name: str, found: Place | None, line: str, *, is_scan: bool) -> Cause:
        """An operation with a dimension that it does not split."""
        have, dimension = self._operand(found), self._dimension(found)
        kind, does = _ALONG[name]
        if is_scan:
            text = f"a scan takes one slice of {have} an iteration, along a dimension that {self.shards}"
            return Cause("scan", text, "leave the dimension that the scan runs over whole", line)
        own = found[1].numbers("dimensions") if found is not None and kind in ("sort", "reduction") else ()
        if found is not None and name == "top_k":
            own = (len(found[0].operands(found[1])[0].shapes[0][1]) - 1,)
        if own and dimension and int(dimension.split()[-1]) not in own:
            return Cause(kind, f"XLA does not split {name} over {self.over}: each device does all of {have}", "", line)
        name = "argmax or another reduction of pairs" if name == "reduce" else name
        text = f"{name} {does} {dimension or 'a dimension'} of {have}, which {self.shards}"
        return Cause(kind, text, f"leave that dimension whole; shard another one over {self.over}", line)

    def _for_reshape(self, reader: Instruction, found: Place | None, line: str) -> Cause:
        change = ""
        if found is not None:
            computation, whole = found
            change = " from {} to {}".format(*map(_extents, (computation.operands(whole)[0], whole)))
        text = f"a reshape{change} cannot keep the shards of {self._operand(found)} over {self.over}"
        remedy = "take extents that the axis divides, as of heads, or shard another dimension"
        return Cause("reshape", text, remedy, line)

    def _for_product(self, side: int, line: str, found: Place | None, when: str) -> Cause:
        have, axes = self._operand(found), set(self.axes)
        if found is not None:
            computation, dot = found
            mine, other = (self._dims(computation, dot, i) for i in (side, 1 - side))
            summed, others = (dot.numbers(f"{name}_contracting_dims") for name in ("lhs", "rhs")[:: 1 - 2 * side])
            mine_k, other_k = _axes(mine, summed), _axes(other, others)
            other_free = {axis for dim in other for axis in dim} - other_k
            if axes & mine_k and not axes & other_k and axes & other_free:
                beside = self._arguments(computation, dot, [1 - side], axes)
                text = f"{when}this product sums a dimension of {have} that {self.shards}, as another one of "
                text += _and(beside) or "the other operand"
                remedy = (
                    "shard what the product sums in both operands; weights as under FSDP jaxmp.matmul and fuse gather"
                )
                return Cause("shared axis", text, f"{remedy} while they multiply", line)
            if axes & mine_k and not axes & other_k:
                text = (
                    f"{when}{have} is sharded over {self.over} along what this product sums, the other operand is not"
                )
                remedy = f"shard the other operand's dimension {', '.join(map(str, others))} over {self.over} too, or "
                return Cause("contraction", text, f"{remedy}this one along another dimension", line)
            if mine_k != other_k:
                differ = mine_k ^ other_k
                brings = self._arguments(computation, dot, (0, 1), differ)
                text = f"{when}this product sums a dimension that one operand has over {_and(mine_k)} and the other "
                text += f"over {_and(other_k)}" + (f" ({_and(differ)} as in {_and(brings)})" if brings else "")
                return Cause("contraction", text, "give both the same axes there", line)
            if axes & other_free and not axes & mine_k:
                text = f"{when}both operands are sharded over {self.over} along dimensions of the result"
                remedy = "the result can keep one: shard one of them over another axis, or jaxmp.matmul"
                return Cause("shared axis", text, remedy, line)
            if cause := self._downstream(computation, dot):
                return cause
        text = f"{when}this product wants {have} with another sharding over {self.over}"
        return Cause("product", text, "jaxmp.matmul or fuse moves it while it multiplies", line)

    def _for_elements(self, computation: Computation, operation: Instruction) -> Cause | None:
        """An operation on each element, whose operands differ in their shardings, or whose result is wanted otherwise.

        XLA gives the sharding that is wanted to the operations that lead there, so it may be asked for further on.
        """
        return self._meets(computation, operation, None) or self._downstream(computation, operation)

    def _meets(self, computation: Computation, at: Instruction, come: Instruction | None) -> Cause | None:
        """An operation whose operands have two shardings, or where one that comes from another meets an argument."""
        module, wanted = self.program.whole, [*_axes(self.program.dims(computation, at))]
        assert module is not None
        operands = [i for i, each in enumerate(computation.operands(at)) if not _is_constant(computation, each)]
        if come is None and len({self._dims(computation, at, i) for i in operands}) < 2:
            return None
        others = [i for i in operands if come is None or at.operands[i] != come.name]
        meets = self._arguments(computation, at, others, wanted)
        if come is not None and not meets:
            return None
        text = f"{at.primitive or at.opcode} of operands with two shardings"
        text += f" (the result's as in {_and(meets)})" * bool(meets) + f": {self._operand(None)} moves over {self.over}"
        return Cause("elementwise", text, "give both operands one sharding, where they are made", module.line(at))

    def _downstream(self, computation: Computation, operation: Instruction) -> Cause | None:
        """Who asks for the sharding of a result."""
        dims, module = self.program.dims(computation, operation), self.program.whole
        assert module is not None
        waiting, seen = [operation], {operation.name}
        while waiting:
            at = waiting.pop(0)
            if at.primitive in _CONSTRAINTS and at is not operation:
                return self._constraint(at, module)
            if at.is_root and computation.name == module.entry:
                return self._result(module.line(operation))
            for user in computation.users[at.name]:
                is_alike = user.opcode == "tuple" or self.program.dims(computation, user) == dims
                if user.name in seen or not is_alike:
                    continue
                is_binary = len(user.operands) > 1 and user.opcode not in ("tuple", "dot", "while")
                if dims and is_binary and (found := self._meets(computation, user, at)) is not None:
                    return found
                seen.add(user.name)
                waiting.append(user)
        return None

    # Words -------------------------------------------------------------------------------------------------------

    @property
    def _is_entry(self) -> bool:
        return self.computation.name == self.module.entry

    def _at(self, computation: Computation, of: Instruction, operand: int) -> tuple[Instruction, str]:
        return computation.instructions[of.operands[operand]], of.parts[operand]

    def _arguments(
        self, computation: Computation, of: Instruction, operands: Iterable[int], axes: Collection[str]
    ) -> list[str]:
        """At most two arguments of the program that bring a sharding over these axes into the operands."""
        names = (self.program.arguments(computation, *self._at(computation, of, i), axes) for i in operands)
        return [*dict.fromkeys(name for each in names for name in each)][:2]

    def _dims(self, computation: Computation, of: Instruction, operand: int) -> Dims:
        return self.program.dims(computation, *self._at(computation, of, operand))

    def _dimension(self, found: Place | None) -> str:
        """Which dimension of an operand the axes shard: "dimension 1"."""
        if found is None:
            return ""
        for i in range(len(found[1].operands)):
            for dimension, axes in enumerate(self._dims(found[0], found[1], i)):
                if not set(axes).isdisjoint(self.axes):
                    return f"dimension {dimension}"
        return ""

    def _operand(self, found: Place | None) -> str:
        """What the collective takes: an argument, or an operation's result with the argument that sharded it."""
        at, _ = partitioned.behind(self.computation, self.collective, self.operand)
        while at.operands and _passes(at):
            at, _ = partitioned.behind(self.computation, at, 0)
        if at.opcode == "parameter" and self._is_entry and at.is_argument:
            return at.op_name
        source, name = self.source, ""
        if source is not self.collective:
            name = f"the result of {source.primitive if source.primitive != 'shard_map' else 'a function'}"
        whole = self.program.as_whole(source) if name else None
        brings = self.program.arguments(*whole, "", self.axes)[:2] if whole else []
        if not brings and found is not None:
            brings = self._arguments(*found, range(len(found[1].operands)), self.axes)
        if not name:
            return _and(brings) or "an operand"
        return f"{name} (sharded as {_and(brings)})" if brings else name


def _and(names: Collection[str]) -> str:
    return " and ".join(sorted(names) or ["no axis"] if isinstance(names, set) else names)


def _axes(dims: Dims, dimensions: Sequence[int] | None = None) -> set[str]:
    """The axes that shard these dimensions, or any."""
    return {axis for i, dim in enumerate(dims) if dimensions is None or i in dimensions for axis in dim}


def _extents(each: Instruction) -> str:
    return "x".join(map(str, each.shapes[0][1]))


def _written(collective: Instruction, line: str) -> Cause:
    name = f"jax.lax.{collective.primitive.removesuffix('_invariant')}"
    if "jaxmp" in collective.op_name:
        return Cause("jaxmp", f"{name} beside a call of jaxmp, whose row says why", "", line)
    if "transpose(" in collective.op_name:
        text = f"the transpose of a collective, or of a value that devices share, is {name}"
        return Cause("gradient", text, "", line)
    name += " (or pmean)" * (name == "jax.lax.psum")
    return Cause("written", f"{name} stands in the program", "", line)


def _passes(user: Instruction) -> bool:
    """Whether an instruction only hands its operand on, as the partitioner emits it around a collective."""
    if user.primitive in _CONSTRAINTS:
        return False
    # The program's own reshapes and cuts are no such ones.
    own = {"reshape": "reshape", "slice": "slice", "split": "slice", "pad": "pad", "dynamic_slice": "dynamic-slice"}
    is_handed_on = user.opcode in MOVES or user.kind in COLLECTIVES or user.opcode.endswith("-done")
    return is_handed_on and own.get(user.primitive) != user.opcode


def _is_constant(computation: Computation, each: Instruction) -> bool:
    """Whether a value has no sharding of its own: a constant, or one scalar in every element."""
    if each.opcode == "broadcast":
        return not computation.operands(each)[0].shapes[0][1]
    return each.opcode in ("constant", "iota")
