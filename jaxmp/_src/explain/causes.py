"""Why XLA communicates: the operation of the user's program that wants other shards than there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxmp._src.explain import partitioned
from jaxmp._src.explain.hlo import MOVES, Computation, Instruction, Module
from jaxmp._src.explain.lies import Edge, Lies, joined
from jaxmp._src.explain.operations import ALONG, CUMULATIVE, NAMED, OTHERWISE, hands_on, is_cumulative
from jaxmp._src.explain.origins import ASKING, SLICE_OF_SCAN, Dim, Origins, asker, is_call, summed, value
from jaxmp._src.explain.partitioned import Dims


class Cause(NamedTuple):
    """Why a collective runs: `kind` for programs, the words for people, and the line of the operation that wants it."""

    kind: str
    text: str
    remedy: str
    line: str


# JAX's collectives, which a program writes itself.
_WRITTEN = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_WRITTEN |= {"reduce_scatter", "unreduced_reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast"}
_CONSTRAINTS = {"sharding_constraint", "reshard"}
_RESULT, _CARRY = "result", "carry"
# What names the dimensions that a lookup or a scatter indexes.
_INDEXED = {"lookup": "start_index_map", "scatter": "scatter_dims_to_operand_dims"}
_HIDES = "jaxmp.matmul or fuse moves it while it multiplies"
_NEEDED_WHERE_SAME = "needed where the value is the same on every device"
_APART = "leave the dimensions apart (jnp.einsum takes both), or shard the first of them, if the axis divides it"
_EXTENTS = "take extents that the axis divides, as of heads, or shard another dimension"


def cause(origins: Origins, computation: Computation, collective: Instruction, operand: int = 0) -> Cause:
    """Why a collective of the compiled program runs, for one of its operands."""
    program = origins.program
    if collective.primitive in _WRITTEN:
        return _written(collective, joined(program.axes(collective)), program.compiled.line(collective))
    module, place, each = program.compiled, computation, collective
    if (found := program.partitioned(computation, collective, operand)) is not None and program.parts is not None:
        module, (place, each), operand = program.parts, found, 0
    search = _Search(origins, program.axes(collective), module, place, each, operand)
    why = search.sum() if each.kind in ("all-reduce", "reduce-scatter") else search.move()
    if why.kind == "gradient" and search.accumulates():
        text = f"{why.text}; the loop adds it up, and sums over devices in each iteration"
        return why._replace(text=text, remedy="run the loop in shard_map, and sum (jax.lax.psum) once behind it")
    if "rematted_computation" in each.op_name + search.source.op_name:
        text = f"{why.text}; jax.checkpoint computes it again for the gradient"
        return why._replace(
            kind="recomputed", text=text, remedy="let its policy save the result, as save_only_these_names does"
        )
    return why


def _is_backward(each: Instruction) -> bool:
    """Whether an instruction is of a gradient, and not of a forward pass that jax.checkpoint runs again."""
    return "transpose(" in each.op_name and "rematted_computation" not in each.op_name


@dataclasses.dataclass(frozen=True)
class _Search(Lies):
    """A collective in its computation, and the axes over which it communicates."""

    module: Module
    computation: Computation
    collective: Instruction
    operand: int

    @property
    def source(self) -> Instruction:
        return partitioned.source(self.computation, self.collective, self.operand)

    # Sums --------------------------------------------------------------------------------------------------------

    def sum(self) -> Cause:
        """Partial sums, or other partial results, of an operation whose operands are sharded."""
        over, source, name = self.over, self.source, self.source.primitive
        line = self.module.line(source) or self.module.line(self.collective)
        # What a user's own backward function reduces is no sum that a gradient adds.
        is_gradient = _is_backward(source) and name not in ("reduce_max", "reduce_min") and not self._spreads(source)
        is_scalar = not self.collective.shapes[0][1]
        if source.opcode in ("dot", "convolution") or name in ("dot_general", "conv_general_dilated"):
            return self._for_sum_of_products(line, is_gradient)
        if name == "gather" or source.opcode == "gather":
            sharded = (self.sharded(*place, 0) for place in self.program.wholes(source))
            dims = next(filter(None, sharded), [])
            text = f"a lookup along {self.which(dims)}: each device looks up in its shard, and adds zeros for the rest"
            return Cause("lookup", text, self.shard_another(dims), line)
        if cause := self._for_cut(self.collective):
            return cause
        if "scatter" in name or source.opcode == "scatter":
            updates = next(filter(None, (self.sharded(*place, 2) for place in self.program.wholes(source))), [])
            text = f"each device adds its part of a scatter of {self.which(updates)}"
            remedy = f"{self.leave_whole(updates)}, or shard the result over {over} too (reduce-scatter)"
            if is_gradient:
                return Cause("gradient", f"{text}: the gradient of a lookup", _NEEDED_WHERE_SAME, line)
            return Cause("scatter", text, remedy, line)
        reduced = (
            [each for each in self.sharded(*place, 0) if each.dim in place[1].numbers("dimensions")]
            for place in self.program.wholes(source)
        )
        dims = next(filter(None, reduced), [])
        if is_gradient:
            where = self.dims(dims) or "a dimension"
            text = (
                f"the gradient of a value that is the same over {over} (a bias, a scale, a loss) is a sum over {where}"
            )
            return Cause("gradient", text, _NEEDED_WHERE_SAME, line)
        kind = name.removeprefix("reduce_") if name.startswith(("reduce", "arg", "cum")) else "sum"
        text = f"a {kind} over {self.which(dims)}, as in a mean, a norm, a softmax or a loss"
        remedy = "needed for one value of all, such as a loss or a norm" if is_scalar else self.leave_whole(dims)
        return Cause("reduction", text, remedy, line)

    def _spreads(self, reduction: Instruction) -> bool:
        """Whether a reduction's result returns to the shape that it had, as in a norm and its gradient."""
        for place, at in self.program.wholes(reduction)[: reduction.opcode == "reduce"]:
            extents, waiting = place.operands(at)[0].shapes[0], [at]
            while waiting and len(waiting) < 50:
                users = [user for each in waiting for user in place.users[each.name]]
                if any(user.opcode == "broadcast" and user.shapes[0] == extents for user in users):
                    return True
                size = math.prod(at.shapes[0][1])
                waiting = [user for user in users if user.shapes and math.prod(user.shapes[0][1]) == size]
        return False

    def _for_sum_of_products(self, line: str, is_gradient: bool) -> Cause:
        products = [each for each in self.program.wholes(self.source) if each[1].opcode in ("dot", "convolution")]
        what = "convolution" if "conv" in self.source.primitive else "product"
        pairs = [[*zip(summed(*each, 0), summed(*each, 1), strict=True)] for each in products]
        over = ([pair for pair in each if test(map(self.axes_of, pair))] for test in (all, any) for each in pairs)
        dims = [each for pair in next(filter(None, over), []) for each in pair]
        dims = dims or [each for place in products[:1] for side in (0, 1) for each in summed(*place, side)]
        has = [each for each in dims if self.axes_of(each)] or dims
        lacks = [each for each in dims if each not in has]
        text = f"{'the gradient of ' * is_gradient}this {what} sums {self.which(has)}"
        text += f" (but not {self.dims(lacks)})" * bool(lacks)
        if is_gradient:
            remedy = "needed; where the result is sharded a reduce-scatter moves half, and jaxmp.matmul hides it"
            return Cause("gradient", text, remedy, line)
        remedy = "keep the result sharded (out_sharding, reduce-scatter), or jaxmp.matmul, which hides the sum"
        remedy = f"{self.leave_whole(has)}, or {remedy}" if lacks else remedy
        remedy = self.shard_another(has) if what == "convolution" else remedy
        return Cause("contraction", f"{text}, so that each device has a partial sum", remedy, line)

    def accumulates(self) -> bool:
        """Whether a loop adds what the collective gives to a value that it carries."""
        readers = [
            reader for reader, _ in self._readers() if isinstance(reader, Instruction) and reader.opcode == "add"
        ]
        terms = (term for reader in readers for term in self.computation.operands(reader))
        carries = (each for term in terms for each in _chain(self.computation, term))
        return self._leaves == _CARRY and any(each.opcode == "parameter" for each in carries)

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

    def _wants(self, reader: Instruction | str, through: Instruction) -> Cause | None:
        made = self.module.line(self.source) or self.module.line(self.collective)
        lies, is_asked = self._of_result(through) if reader == _RESULT else ([], False)
        # The partitioner's own moves around an operation that it does not split, maybe in a loop.
        if reader in (_RESULT, _CARRY) and self.collective.primitive in ALONG and not is_asked:
            is_own = self.source.primitive == self.collective.primitive
            edge = self._edge(self.source if is_own else self.collective)
            return self._along(self.collective.primitive, edge, made)
        if reader == _RESULT:
            return self._result(lies, made)
        if reader == _CARRY:
            root = self.computation.root
            number = root.operands.index(through.name) if through.name in root.operands else -1
            text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
            text += self._in_body(self.computation.name, number)
            lines = map(self.module.line, _chain(self.computation, through))
            return self._carry(text, next(filter(None, lines), made))
        assert isinstance(reader, Instruction)
        line, found = self.module.line(reader), self._edge(reader, through)
        if reader.opcode == "while":
            ways = (_chain(self.computation, each) for each in self.computation.operands(through))
            number = next((i for i, way in enumerate(ways) if self.collective in way), -1)
            text = f"the loop carries {self._operand()} with another sharding over {self.over} than it has at the start"
            text += self._in_body(reader.attribute("body").lstrip("%"), number)
            return Cause("carry", text, "give the first carry the sharding that the body gives", line)
        for asks in (found[1] if found else reader, reader):
            if asks.primitive in ASKING:
                return self._constraint(found, asks)
        if reader.opcode == "dot" or reader.primitive == "dot_general":
            return self._for_product(found, line, "backward, " * _is_backward(reader))
        if cause := self._for_cut(reader):
            return cause
        if reader.primitive in ("reshape", "tile"):
            return self._for_reshape(found, line)
        name = next((name for scope, name in NAMED.items() if f"({scope})" in reader.op_name), reader.primitive)
        if name in ALONG:
            is_scan = SLICE_OF_SCAN.search(reader.op_name) is not None
            line = self.origins.line(found[0], reader) if is_scan and found else line
            return self._along(name, found, line, is_scan=is_scan)
        edge = self._edge(self.source) if self.source.primitive in ALONG else None
        if found and edge and (self.differs(*edge) or not self.differs(*found)):
            return self._along(self.source.primitive, edge, made)
        if found and (cause := self._downstream(found)):
            return cause
        text = f"{name or reader.opcode} of values with two shardings over {self.over}: {self._meets(found)}"
        return Cause("elementwise", text, "give both one sharding, where they are made", line)

    def _edge(self, reader: Instruction, through: Instruction | None = None) -> Edge | None:
        """Which value of whole arrays the reader, or what leads to it, wants otherwise than it lies."""
        first: Edge | None = None
        for place, user in self.program.wholes(reader):
            number = reader.operands.index(through.name) if through and through.name in reader.operands else 0
            found = place, user, min(number, len(user.operands) - 1)
            while found[2] >= 0:
                first = first or found
                if self.differs(*found):
                    return found
                below = place.operands(found[1])[found[2]]
                found = place, below, 0 if below.opcode in MOVES and len(below.operands) == 1 else -1
        return first

    def _of_result(self, through: Instruction) -> tuple[list[Dim], bool]:
        """(the sharded dimensions of the whole array that is returned there, whether it is to lie otherwise)."""
        if (whole := self.program.whole) is None:
            return [], True
        place, root = whole.computations[whole.entry], self.computation.root
        at = result = Dim(place, place.root, "", 0)
        if place.root.opcode == root.opcode == "tuple" and through.name in root.operands:
            number = root.operands.index(through.name)
            at, result = value(place, place.root, number), result._replace(part=str(number))
        while not (found := self.all(at)) and at.instruction.opcode in MOVES:
            if (below := next(self.origins.operands(at), None)) is None:
                break
            at = below
        return found, self.program.dims(*result[:3]) != self.program.dims(*at[:3])

    def _result(self, lies: Sequence[Dim], line: str) -> Cause:
        mesh, is_chosen = self.program.mesh, self.program.compiled.chooses_results
        have = f": {self.lies(lies)}" if lies else f" than {self._operand()} has"
        text = f"a result of the program with another sharding over {self.over}{have}"
        uneven = [at for at in lies if at.extents[at.dim] % math.prod(mesh[axis] for axis in self.axes_of(at))]
        if uneven and is_chosen:
            maker = self._maker(uneven[0])
            text = f"a result of the program is whole over {self.over}, which does not divide the "
            text += f"{maker.extents[maker.dim]} of {self.dims([maker])}"
            return Cause("out_shardings", text, _EXTENTS, self.origins.line(*maker[:2]) or line)
        if is_chosen:
            return Cause("out_shardings", f"XLA gives {text}", "name its sharding, as out_shardings", line)
        remedy = "name the sharding that the computation gives in out_shardings"
        return Cause("out_shardings", f"out_shardings want {text}", remedy, line)

    def _maker(self, at: Dim) -> Dim:
        """The value that first has this extent."""
        while below := [each for each in self.origins.operands(at) if each.extents[each.dim] == at.extents[at.dim]]:
            made = [each for each in below if each.instruction.opcode != "parameter"]
            at = (made or below)[0]
        return at

    def _carry(self, text: str, line: str) -> Cause:
        return Cause("carry", text, "constrain the carry to one sharding, at the start and in the body", line)

    def _in_body(self, body: str, number: int) -> str:
        """Who reads a carried value in the loop's body, and who gives its next one."""
        whole, name = self.program.whole, body.removesuffix("_spmd")
        if whole is None or number < 0 or name not in whole.computations:
            return ""
        place, part = whole.computations[name], str(number)
        carry = next(each for each in place.instructions.values() if each.opcode == "parameter")
        reads = [
            each
            for each in place.users[carry.name]
            if not each.is_root
            and ((carry.name, part) in zip(each.operands, each.parts, strict=False) or each.attribute("index") == part)
        ]
        while reads and reads[0].primitive not in ASKING and reads[0].opcode in MOVES and not reads[0].is_root:
            reads = place.users[reads[0].name]
        gives = place.operands(place.root)[number] if place.root.opcode == "tuple" else place.root
        while gives.primitive not in ASKING and gives.opcode in MOVES and gives.operands:
            gives = place.operands(gives)[0]
        who = [
            f"{asker(each) if each.primitive in ASKING else each.primitive} ({whole.line(each)}) {does} it"
            for does, found in (("reads", reads[:1]), ("gives", [gives]))
            for each in found
            if whole.line(each)
        ]
        return f": {joined(who)}" * bool(who)

    def _constraint(self, found: Edge | None, asks: Instruction) -> Cause:
        """What asks for a sharding: the user in `found`, or one that it leads to."""
        who = "backward, " * _is_backward(asks) + asker(asks)
        wants = self.all(Dim(found[0], asks, "", 0)) if found else []
        axes = [f"{joined(self.axes_of(at))} on dimension {at.dim}" for at in wants]
        text = f"{who} asks for {joined(axes) or f'a value that is whole over {self.over}'}, but "
        text += self.has(found) if found else f"{self._operand()} is sharded"
        remedy = "drop it, or constrain to the sharding that there is"
        if asks.primitive not in _CONSTRAINTS or is_call(asks):
            remedy = "give the array what it asks for, or let it ask for the sharding that there is"
        return Cause("constraint", text, remedy, (self.program.whole or self.module).line(asks))

    def _along(self, name: str, found: Edge | None, line: str, *, is_scan: bool = False) -> Cause:
        """An operation with a dimension that it does not split."""
        kind, does = ALONG[name]
        # The array that an update writes to, or a lookup reads, tells the dimension.
        dims = self.sharded(*found[:2], found[2] * (name == "concatenate"))[:1] if found is not None else []
        if found is not None and not dims:
            every = self._over_others(self.program.mesh)
            lies = (every.lies(every.sharded(*found[:2], i)) for i in range(len(found[1].operands)))
            have = ", and ".join([*dict.fromkeys(filter(None, lies))][:3])
            text = f"XLA moves data of {name} over {self.over}" + f": {have}" * bool(have)
            remedy = every.shard_another(dims) if (dims := every.sharded(*found[:2], 0)[:1]) else ""
            return Cause(kind, text, remedy, line)
        what = self.origins.name(value(*found))[0] if found is not None else self._operand()
        where = self.which(dims) if dims else f"a dimension of {what} over {self.over}"
        if is_scan:
            text = f"a scan takes one slice an iteration along {where}"
            return Cause("scan", text, f"leave the dimension that the scan runs over whole in {what}", line)
        own = found[1].numbers("dimensions") if found is not None and kind in ("sort", "reduction") else ()
        if found is not None and name == "top_k":
            own = (len(found[0].operands(found[1])[0].shapes[0][1]) - 1,)
        if own and dims and dims[0].dim not in own:
            return Cause(kind, f"XLA does not split {name} over {self.over}: each device does all of {what}", "", line)
        if found is not None and kind == "window" and is_cumulative(found[1]):
            kind, does, name = "cumulative", "runs along", CUMULATIVE.get(name, "a cumulative operation")
        name = "argmax or another reduction of pairs" if name == "reduce" else name
        text = f"{name} {does} {where}"
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

    def _for_reshape(self, found: Edge | None, line: str) -> Cause:
        change, where = "", self._operand()
        if found is not None:
            change = " from {} to {}".format(*map(_extents, (found[0].operands(found[1])[0], found[1])))
            where = self.dims(self.sharded(*found)) or where
        text = f"a reshape{change} cannot keep the shards of {where} over {self.over}"
        is_merge = found is not None and len(found[0].operands(found[1])[0].shapes[0][1]) > len(found[1].shapes[0][1])
        return Cause("reshape", text, _APART if is_merge else _EXTENTS, line)

    def _for_product(self, found: Edge | None, line: str, when: str) -> Cause:
        wants = f"{when}this product wants another sharding over {self.over}: {self._meets(found)}"
        if found is None or found[1].opcode != "dot":
            return Cause("product", wants, _HIDES, line)
        place, dot, side = found
        mine, other = summed(place, dot, side), summed(place, dot, 1 - side)
        mine_k, other_k = self.axes_in(mine), self.axes_in(other)
        lost = self._over_others(mine_k - other_k)
        kept = [each for each in lost.sharded(place, dot, 1 - side) if each not in other]
        if kept:
            text = f"{when}this product sums {lost.dims(filter(lost.axes_of, mine))} and keeps {lost.dims(kept)}"
            remedy = "shard what the product sums in both operands; of weights that have to be gathered (FSDP), let "
            remedy += "jaxmp.matmul or fuse gather while they multiply"
            return Cause("shared axis", f"{text}: both lie over {lost.over}", remedy, line)
        if mine_k != other_k:
            differ = self._over_others(mine_k ^ other_k)
            text = f"{when}this product sums {differ.dims(mine)} over {joined(mine_k)} and {differ.dims(other)} over "
            remedy = f"shard {differ.dims(other)} so too, or {differ.leave_whole(mine)}" if not other_k else ""
            return Cause("contraction", text + joined(other_k), remedy or "give both the same axes there", line)
        if not self.sharded(*found) and self.axes != (every := (*self.program.mesh,)):  # a further step of a move
            return dataclasses.replace(self, axes=every)._for_product(found, line, when)
        beside = [each for each in self.sharded(place, dot, 1 - side) if each not in other]
        if beside and mine_k.isdisjoint(self.axes):
            over = joined([axis for axis in self.axes if axis in self.axes_in(beside)])
            text = f"{when}both operands are sharded over {over} along dimensions of the result: "
            text += f"{self.dims(self.sharded(*found))}, and {self.dims(beside)}"
            remedy = "the result can keep one of the two: shard the other over another axis, or jaxmp.matmul"
            return Cause("shared axis", text, remedy, line)
        if cause := self._downstream(found):
            return cause
        result, whole = Dim(place, dot, "", 0), self._over_others(self.program.mesh)
        asked = (self.begins(self.all(result)) or whole.begins(whole.all(result)))[:1]
        remedy = f"give {asked[0].partition(' of ')[2]} the sharding of this product's operands" if asked else _HIDES
        return Cause("product", wants, remedy, line)

    def _downstream(self, found: Edge) -> Cause | None:
        """Who asks for a result that the axes do not shard, or shard though no operand has it so."""
        (place, operation, _), whole = found, self.program.whole
        assert whole is not None
        dims = self.program.dims(place, operation)
        asked = [(at, axis) for at in self.all(Dim(place, operation, "", 0)) for axis in self.axes_of(at)]
        if asked and not any(self.origins.ahead(*each) for each in asked) and (met := self.origins.met(*asked[0])):
            if met.instruction.primitive in ASKING:
                return self._constraint(found, met.instruction)
            if met.instruction.opcode == "while":
                text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
                return self._carry(text, whole.line(met.instruction))
            if not self.origins.ahead(met, asked[0][1]):
                return self._result(self.sharded(*found), whole.line(operation))
        is_met = any(self._lies_so(place, operation, i, dims) for i in range(len(operation.operands)))
        waiting, seen = [operation] * (not is_met and not self.all(Dim(place, operation, "", 0))), {operation.name}
        while waiting:
            at = waiting.pop(0)
            if at.primitive in ASKING and at is not operation:
                return self._constraint(found, at)
            if at.is_root and place.name == whole.entry and (not self._conflict(found) or not whole.chooses_results):
                return self._result(self.sharded(*found), whole.line(operation))
            for user in place.users[at.name]:
                if user.name not in seen and (user.opcode == "tuple" or self.program.dims(place, user) == dims):
                    seen.add(user.name)
                    waiting.append(user)
        return None

    def _conflict(self, found: Edge) -> bool:
        """Whether an operation on elements has operands of two shardings, of which XLA keeps neither."""
        place, user, number = found
        kinds = [self.program.dims(*value(place, user, i)[:3]) for i in range(len(user.operands))]
        return any(kind and kind != kinds[number] for kind in kinds)

    def _lies_so(self, place: Computation, user: Instruction, number: int, dims: Dims) -> bool:
        """Whether an operand is sharded as the result of its user, by where it comes from."""
        at = value(place, user, number)
        every = [(at._replace(dim=i), axis) for i, axes in enumerate(dims) for axis in axes]
        return dims == self.program.dims(*at[:3]) and any(self.origins.ahead(*each) for each in every)

    @property
    def _leaves(self) -> str:
        return _RESULT if self.computation.name == self.module.entry else _CARRY

    def _meets(self, found: Edge | None) -> str:
        """How a value lies, and how the result of its user does, or the other operands."""
        if found is None:
            return self._operand()
        place, user, number = found
        every = self._over_others(self.program.mesh)
        others = (every.lies(every.sharded(place, user, i)) for i in range(len(user.operands)) if i != number)
        results = (lies.lies(lies.all(Dim(place, user, "", 0)), "the result") for lies in (self, every))
        result = next(filter(None, results), "") or joined([*filter(None, others)])
        is_turned = place.operands(user)[number].opcode == "transpose"
        return self.has(found) + ", transposed" * is_turned + f", and {result}" * bool(result)

    def _over_others(self, axes: Iterable[str]) -> Lies:
        return Lies(self.origins, tuple(sorted(axes)))

    def _operand(self) -> str:
        """What the collective takes, where no user of whole arrays tells."""
        at, _ = partitioned.behind(self.computation, self.collective, self.operand)
        *_, at = _chain(self.computation, at)
        if at.opcode == "parameter" and self._leaves == _RESULT and at.is_argument:
            return at.op_name
        if self.source is self.collective:
            return "an operand"
        found = [Dim(*place, "", 0) for place in self.program.wholes(self.source)]
        return self.origins.name(found[0])[0] if found else f"the result of {self.source.primitive}"


def _chain(computation: Computation, at: Instruction) -> Iterator[Instruction]:
    """An instruction, and what it hands on."""
    yield at
    while at.operands and hands_on(at):
        at, _ = partitioned.behind(computation, at, 0)
        yield at


def _extents(each: Instruction) -> str:
    return "x".join(map(str, each.shapes[0][1]))


def _written(collective: Instruction, over: str, line: str) -> Cause:
    name = f"jax.lax.{collective.primitive.removesuffix('_invariant')}"
    if "jaxmp" in collective.op_name:
        return Cause("jaxmp", f"{name} beside a call of jaxmp", "", line)
    if _is_backward(collective):
        of_sum = " (or of a sum over it)" * (collective.primitive == "psum")
        text = f"the gradient of a value that is the same over {over}{of_sum}"
        text = f"{text} is {name}" if name == "jax.lax.psum" else f"the transpose of a collective is {name}"
        return Cause("gradient", text, "", line)
    name += " (or pmean)" * (name == "jax.lax.psum")
    return Cause("written", f"{name} stands in the program", "", line)
