"""Why XLA sends data to other devices: the operation that wants other shards than there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxmp._src.tools.explain.hlo import MOVES, Computation, Instruction, called_by
from jaxmp._src.tools.explain.lies import Edge, joined, shard
from jaxmp._src.tools.explain.operations import ALONG, NAMED
from jaxmp._src.tools.explain.origins import ASKING, Dim, asker, function, is_backward, is_call, summed, value
from jaxmp._src.tools.explain.partitioned import Dims, Place
from jaxmp._src.tools.explain.search import CARRY, RESULT, Cause, Search, chain

# Kinds of operations that XLA computes whole where a dimension that they do not need whole is sharded.
_UNSPLIT = {"sort", "reduction", "whole"}
_CONSTRAINTS = {"sharding_constraint", "reshard"}
_HIDES = "jaxmp.matmul or fuse moves it while it multiplies"
_APART = "leave the dimensions apart (jnp.einsum takes both), or shard the first of them, if the axis divides it"
_EXTENTS = "take extents that the axis divides, as of heads, or shard another dimension"


class Moves(Search):
    """A collective that moves data to other devices."""

    def move(self) -> Cause:
        """Data that goes to other devices, for the first reader that tells why."""
        for reader, through in self._readers():
            if (found := self._wants(reader, through)) is not None:
                return found
        line = self.module.line(self.collective) or self.module.line(self.source)
        name = self.collective.primitive or self.source.primitive or "an operation without a name"
        return Cause("unplaced", f"XLA moves an operand or a result of {name}", "", line)

    def _wants(self, reader: Instruction | str, through: Instruction) -> Cause | None:
        made = self.module.line(self.source) or self.module.line(self.collective)
        lies, wants, is_asked = self._of_result(through) if reader == RESULT else ([], None, False)
        # The partitioner's own moves around an operation that it does not split, maybe in a loop.
        if self.collective.primitive in ALONG:
            leaves = reader in (RESULT, CARRY) and not is_asked
            is_own = self.source.op_name == self.collective.op_name
            wholes = self.program.wholes(self.source)[:1] if is_own else []
            turned = any(self.program.local(*place) != self.source.shapes[:1] for place in wholes)  # for itself
            edge = self._edge(self.source if is_own else self.collective) if turned or leaves else None
            if (leaves and not edge) or (edge and self._worked(edge)):
                return self._along(_named(self.collective), edge, made)
        if reader == RESULT:
            return self._result(lies, wants, made)
        if reader == CARRY:
            root = self.computation.root
            number = root.operands.index(through.name) if through.name in root.operands else -1
            text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
            text += self._in_body(self.computation.name, number)
            lines = map(self.module.line, chain(self.computation, through))
            return self._carry(text, next(filter(None, lines), made))
        assert isinstance(reader, Instruction)
        line, found = self.module.line(reader), self._edge(reader, through)
        if reader.opcode == "while":
            ways = (chain(self.computation, each) for each in self.computation.operands(through))
            number = next((i for i, way in enumerate(ways) if self.collective in way), -1)
            text = f"the loop carries {self._operand()} with another sharding over {self.over} than it has at the start"
            text += self._in_body(reader.attribute("body").lstrip("%"), number)
            return Cause("carry", text, "give the first carry the sharding that the body gives", line)
        wholes = self.program.wholes(reader)[:1] or [(self.computation, reader)]
        for place, asks in [*([found[:2]] if found else []), *wholes]:
            if asks.primitive in ASKING:
                return self._constraint(found, place, asks)
        if reader.opcode == "dot" or reader.primitive == "dot_general":
            return self._for_product(found, line, "backward, " * is_backward(reader))
        if cause := self._for_cut(reader):
            return cause
        if reader.primitive in ("reshape", "tile"):
            return self._for_reshape(found, line)
        name = _named(reader)
        if name in ALONG:
            if found and found[1].opcode == "convolution" and not self._worked(found):
                return self._for_product(found, line, "backward, " * is_backward(reader))
            if found is None or self._is_along(found):
                return self._along(name, found, line)
            if name == "top_k" or ((cause := self._downstream(found)) is None and ALONG[name][0] in _UNSPLIT):
                return self._unsplit(name, found, line)
            if cause is not None:
                return cause
        edge = self._edge(self.source) if self.source.primitive in ALONG else None
        if found and edge and self._is_along(edge) and (self.differs(*edge) or not self.differs(*found)):
            return self._along(self.source.primitive, edge, made)
        if found and (cause := self._downstream(found)):
            return cause
        name = function(*found[:2], name) if found and found[1].primitive == name else name or reader.opcode
        name = "backward, " * is_backward(reader) + name
        text = f"{name} of values with two shardings over {self.over}: {self._meets(found)}"
        return Cause("elementwise", text, "give both one sharding, where they are made", line)

    def _of_result(self, through: Instruction) -> tuple[list[Dim], Dim | None, bool]:
        """(the sharded dimensions of the whole array that is returned there, the result, whether it lies otherwise)."""
        if (whole := self.program.whole) is None:
            return [], None, True
        place, root = whole.computations[whole.entry], self.computation.root
        at = result = Dim(place, place.root, "", 0)
        if place.root.opcode == root.opcode == "tuple" and through.name in root.operands:
            number = root.operands.index(through.name)
            at, result = value(place, place.root, number), result._replace(part=str(number))
        while not (found := self.all(at)) and at.instruction.opcode in MOVES:
            if (below := next(self.origins.operands(at), None)) is None:
                break
            at = below
        return found, result, self.program.dims(*result[:3]) != self.program.dims(*at[:3])

    def _result(self, lies: Sequence[Dim], result: Dim | None, line: str) -> Cause:
        mesh, is_chosen = self.program.mesh, self.program.compiled.chooses_results
        wants = f"with another sharding over {self.over} than it has" if result is None else self._wanted(result)
        text = f"a result of the program {wants}, but {self.lies(lies) or f'{self._operand()} is sharded'}"
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

    def _wanted(self, at: Dim) -> str:
        """ "with model on dimension 0", "whole over model" or "whole (replicated)": how a result is wanted."""
        axes = [f"{joined(self.axes_of(dim))} on dimension {dim.dim}" for dim in self.all(at)]
        if axes:
            return f"with {joined(axes)}"
        return f"whole over {self.over}" if any(self.program.dims(*at[:3])) else "whole (replicated)"

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
            f"{asker(place, each)} ({whole.line(each)}) {does[: None if _is_one(each) else -1]} it"
            if each.primitive in ASKING
            else f"{each.primitive} ({whole.line(each)}) {does} it"
            for does, found in (("reads", reads[:1]), ("gives", [gives]))
            for each in found
            if whole.line(each)
        ]
        return f": {joined(who)}" * bool(who)

    def _constraint(self, found: Edge | None, place: Computation, asks: Instruction) -> Cause:
        """What asks for a sharding: the user in `found`, or one that it leads to."""
        who = "backward, " * is_backward(asks) + asker(place, asks)
        verb = "asks" if _is_one(asks) else "ask"
        wants = self.all(Dim(place, asks, "", 0)) if found else []
        axes = [f"{joined(self.axes_of(at))} on dimension {at.dim}" for at in wants]
        text = f"{who} {verb} for {joined(axes) or f'a value that is whole over {self.over}'}, but "
        text += self.has(found) if found else f"{self._operand()} is sharded"
        remedy = "drop it, or constrain to the sharding that there is"
        if asks.primitive not in _CONSTRAINTS or is_call(asks):
            remedy = "give the array what it asks for, or let it ask for the sharding that there is"
        return Cause("constraint", text, remedy, (self.program.whole or self.module).line(asks))

    def _for_reshape(self, found: Edge | None, line: str) -> Cause:
        change, where = "", self._operand()
        if found is not None:
            change = " from {} to {}".format(*map(_extents, (found[0].operands(found[1])[0], found[1])))
            where = self.dims(self.sharded(*found)) or where
        text = f"a reshape{change} cannot keep the shards of {where} over {self.over}"
        is_merge = found is not None and len(found[0].operands(found[1])[0].shapes[0][1]) > len(found[1].shapes[0][1])
        return Cause("reshape", text, _APART if is_merge else _EXTENTS, line)

    def _for_product(self, found: Edge | None, line: str, when: str) -> Cause:
        what = f"{when}this {'convolution' if found and found[1].opcode == 'convolution' else 'product'}"
        wants = f"{what} wants another sharding over {self.over}: {self._meets(found)}"
        if found is None or found[1].opcode not in ("dot", "convolution"):
            return Cause("product", wants, _HIDES, line)
        place, dot, side = found
        mine, other = summed(place, dot, side), summed(place, dot, 1 - side)
        mine_k, other_k = self.axes_in(mine), self.axes_in(other)
        lost = self._over_others(mine_k - other_k)
        kept = [each for each in lost.sharded(place, dot, 1 - side) if each not in other]
        if kept:
            text = f"{what} sums {lost.dims(filter(lost.axes_of, mine))} and keeps {lost.dims(kept)}"
            remedy = "shard what it sums in both operands"
            if dot.opcode == "dot" and self.origins.name(value(*found))[0].startswith("the "):
                remedy += ", or let jaxmp.matmul or fuse move it while they multiply"
            elif dot.opcode == "dot":
                remedy += "; of weights that have to be gathered (FSDP), let jaxmp.matmul or fuse gather while they "
                remedy += "multiply"
            return Cause("shared axis", f"{text}: both lie over {lost.over}", remedy, line)
        if mine_k != other_k:
            differ, sides = self._over_others(mine_k ^ other_k), ((mine, mine_k), (other, other_k))
            lie = (f"{differ.dims(each)}, which " + (f"{shard(k)}" if k else "is whole") for each, k in sides)
            text = f"{what} sums {', with '.join(lie)}"
            remedy = f"shard {differ.dims(other)} so too, or {differ.leave_whole(mine)}" if not other_k else ""
            return Cause("contraction", text, remedy or "give both the same axes there", line)
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
                return self._constraint(found, *met[:2])
            if met.instruction.opcode == "while":
                text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
                return self._carry(text, whole.line(met.instruction))
            if not self.origins.ahead(met, asked[0][1]):
                return self._result(self.sharded(*found), met, whole.line(operation))
        is_met = any(self._lies_so(place, operation, i, dims) for i in range(len(operation.operands)))
        waiting = [(place, operation)] * (not is_met and not self.all(Dim(place, operation, "", 0)))
        seen, is_chosen = {operation.name}, False
        result = self._result(self.sharded(*found), Dim(place, operation, "", 0), whole.line(operation))
        while waiting:
            place, at = waiting.pop(0)
            if at.primitive in ASKING and at is not operation:
                return self._constraint(found, place, at)
            if at.is_root and place.name == whole.entry:
                if not whole.chooses_results:
                    return result
                is_chosen = not self._conflict(found)  # unless something else asks
            for user in place.users[at.name]:
                if user.name not in seen and (user.opcode == "tuple" or self.program.dims(place, user) == dims):
                    seen.add(user.name)
                    waiting += [*self._in_branches(place, at, user), (place, user)]
        return result if is_chosen else None

    def _in_branches(self, place: Computation, at: Instruction, user: Instruction) -> Iterator[Place]:
        """A value in the branches of a conditional."""
        for i, (name, _) in enumerate(called_by(user) if user.opcode == "conditional" else ()):
            inner = self.program.whole.computations[name]  # type: ignore[union-attr]
            if place.operands(user)[1 + i] is at:
                yield from ((inner, each) for each in inner.instructions.values() if each.opcode == "parameter")

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

    def _meets(self, found: Edge | None) -> str:
        """How a value lies, and how the result of its user does, or the other operands."""
        if found is None:
            return self._operand()
        place, user, number = found
        every = self._over_others(self.program.mesh)
        others = (every.lies(every.sharded(place, user, i)) for i in range(len(user.operands)) if i != number)
        results = (lies.lies(lies.all(Dim(place, user, "", 0)), "the result") for lies in (self, every))
        result = next(filter(None, results), "") or joined([*filter(None, others)])
        return self.has(found) + f", and {result}" * bool(result)


def _is_one(asks: Instruction) -> bool:
    """Whether what asks for a sharding is a single thing, and not a function's shardings."""
    return asks.primitive in _CONSTRAINTS or is_call(asks)


def _named(each: Instruction) -> str:
    return next((name for scope, name in NAMED.items() if f"({scope})" in each.op_name), each.primitive)


def _extents(each: Instruction) -> str:
    return "x".join(map(str, each.shapes[0][1]))
