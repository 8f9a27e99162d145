"""Explains why XLA communicates: an operation of the user's program needs another sharding than its operands have.

There are three kinds of sentences: "sort wants dimension 0 of x whole, but data shards it" for operations along a
dimension, "this product sums dimension 1 of x, which model shards" for operations that add parts, and "add has data on
dimension 1, but data shards dimension 0 of x" for other operations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jaxmp._src.tools.explain.hlo import Computation, Instruction
from jaxmp._src.tools.explain.loops import summed_once
from jaxmp._src.tools.explain.operations import ALONG, NAMED, UNSPLIT, cheaper_way, cumulative
from jaxmp._src.tools.explain.origins import ASKING, OF_SCAN, Dim, Origins, asker, function, is_backward, summed, value
from jaxmp._src.tools.explain.partitioned import Place
from jaxmp._src.tools.explain.values import Cause, Edge, Search, Values, chain, joined, shard

# JAX's collectives, which a program calls explicitly.
_WRITTEN = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_WRITTEN |= {"reduce_scatter", "unreduced_reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast"}
_PRODUCTS = ("dot", "convolution")
# Remedies.
_SCATTERED = "keep the result sharded (out_sharding; a reduce-scatter, except on CPUs), or jaxmp.matmul, which hides "
_SCATTERED += "the sum"
_NEEDED_WHERE_SAME = "needed where the value is the same on every device"
_OF_PARTS = "; or let each device use the value of its own part (jax.shard_map), as a batch norm may"
_IN_BOTH = "shard what it sums in both operands, or let jaxmp.matmul or fuse gather while they multiply"
_HIDES = "give its result the sharding of its operands, or let jaxmp.matmul or fuse move it while they multiply"
_APART = "leave the dimensions apart (jnp.einsum takes both), or shard the first of them, if the axis divides it"
_EXTENTS = "take extents that the axis divides, as of heads, or shard another dimension"
_ASK = "ask for the sharding that the array has, or make the array with the sharding that this asks for"
_NAME_RESULTS = "name the sharding that the computation gives in out_shardings"


def cause(origins: Origins, computation: Computation, collective: Instruction, operand: int = 0) -> Cause:
    """Returns why a collective of the compiled program moves operand number `operand`. It is explained as it is after
    the partitioner if it is found there. A collective that the program itself calls has the kind "written", "gradient"
    or "jaxmp"; an operation that jax.checkpoint repeats has "recomputed"; others have the kinds of `_Causes.sum` and
    `_Causes.move`, or "unplaced" without a partitioner. A gradient's sum also gets what `summed_once` says."""
    program = origins.program
    module, axes = program.compiled, program.axes(collective)
    if collective.primitive in _WRITTEN:
        why = _written(collective, module.line(collective))
        # In a shard_map, names lack the scopes around it.
        sites = (
            place
            for place in program.places()
            if place[1].kind == collective.kind and place[1].op_name and collective.op_name.endswith(place[1].op_name)
        )
        return summed_once(Values(origins, axes), sites, why) if why.kind == "gradient" else why
    if program.whole is None:
        return Cause("unplaced", f"XLA moves a result of {collective.primitive}", "", module.line(collective))
    if (found := program.partitioned(computation, collective, operand)) is not None and program.parts is not None:
        module, (computation, collective), operand = program.parts, found, 0
    search = _Causes(origins, axes, module, computation, collective, operand)
    why = search.sum() if collective.kind in ("all-reduce", "reduce-scatter") else search.move()
    if why.kind == "gradient":
        why = summed_once(search, program.wholes(search.source), why)
    if "rematted_computation" in collective.op_name + search.source.op_name:
        text = f"{why.text}; jax.checkpoint computes it again for the gradient"
        return Cause("recomputed", text, "let its policy save the result, as save_only_these_names does", why.line)
    return why


def _written(collective: Instruction, line: str) -> Cause:
    kind, who = ("gradient", "the gradient") if is_backward(collective) else ("written", "the program")
    if "jaxmp" in collective.op_name:
        kind, who = "jaxmp", "a call of jaxmp"
    name = collective.primitive.removesuffix("_invariant")
    return Cause(kind, f"{who} runs jax.lax.{name}{' (or pmean)' * (name == 'psum')}", "", line)


class _Causes(Search):
    """Finds the cause of one collective: by `sum` if it adds parts, otherwise by `move`."""

    def sum(self) -> Cause:
        """Returns the cause of a collective that reduces partial results of an operation with sharded operands: a
        product or convolution ("product"), a gather or slice (`_for_dropped_slice`; "whole"), a scatter, a reduction or
        any other operation ("reduction"). In a gradient "product" and "reduction" become "gradient", except for a
        reduction that `_spreads`."""
        source, name = self.source, self.source.primitive
        line = self.module.line(source) or self.module.line(self.collective)
        places = self.program.wholes(source)
        if name == "gather" or source.opcode == "gather":
            edges = [(*place, 0) for place in places]
            return self._along("gather", next(filter(self.worked, edges), next(iter(edges), None)), line)
        if cause := self._for_dropped_slice(self.collective):
            return cause
        dims = self._summed(places)
        # A reduction in a user's own backward function is no sum that JAX's gradient adds.
        is_gradient = is_backward(source) and not self._spreads(source)
        if source.opcode in _PRODUCTS or name in ("dot_general", "conv_general_dilated"):
            what = "convolution" if "conv" in name else "product"
            text = f"{'the gradient of ' * is_gradient}this {what} sums {self.which(dims)}"
            if is_gradient:
                return Cause("gradient", text, "needed" + "; jaxmp.matmul hides it" * (what == "product"), line)
            return Cause("product", text, _SCATTERED if what == "product" else self.leave_whole(dims), line)
        if is_gradient:
            return Cause("gradient", f"the gradient sums {self.which(dims)}", _NEEDED_WHERE_SAME, line)
        is_scatter = "scatter" in name or source.opcode == "scatter"
        who = "scatter sums" if is_scatter else f"{name.removeprefix('reduce_') or 'sum'} reduces"
        remedy = self.leave_whole(dims) + _OF_PARTS * (not is_scatter and any(each.dim == 0 for each in dims))
        if not self.collective.shapes[0][1]:
            remedy = "needed for one value of all, such as a loss or a norm"
        return Cause("reduction", f"this {who} {self.which(dims)}", remedy, line)

    def _summed(self, places: Sequence[Place]) -> list[Dim]:
        """Returns the dimensions that an operation sums and the axes shard: of the one in `places` with the most such
        dimensions. If the axes shard none, returns all that the first one in `places` sums."""
        every = [[dim for i in (0, 1) for dim in summed(*place, i)] for place in places]
        sharded = ([dim for dim in dims if self.axes_of(dim)] for dims in every)
        return max(sharded, key=len, default=[]) or next(filter(None, every), [])

    def _spreads(self, reduction: Instruction) -> bool:
        """True if the result of a reduction is broadcast to the shape of its operand, as in a norm and its gradient.
        False for other instructions than a "reduce"."""
        for place, at in self.program.wholes(reduction)[: reduction.opcode == "reduce"]:
            extents, size, reached = place.operands(at)[0].shapes[0], math.prod(at.shapes[0][1]), [at]
            for each in reached:
                users = [user for user in place.users[each.name] if user.shapes and len(reached) < 50]
                if any(user.opcode == "broadcast" and user.shapes[0] == extents for user in users):
                    return True
                reached += [user for user in users if math.prod(user.shapes[0][1]) == size]
        return False

    def move(self) -> Cause:
        """Returns the cause of a collective that moves data: the operation that reads the data first, the operation
        that made the data if it needs a dimension whole, or the loop or result that the data goes to. The kind is
        "whole", "product", "reshape", "constraint", "carry" or "out_shardings"; for other readers "elementwise", or
        "unplaced" if the place of the reader's operand is unknown."""
        reader, through = self.reader()
        made = self.module.line(self.source) or self.module.line(self.collective)
        is_end = reader is None and self.computation.name == self.module.entry
        returned = self.returned(through) if is_end else None
        kinds = [self.program.dims(*each[:3]) for each in returned or ()]
        keeps = reader is None and kinds[:1] == kinds[1:]
        if self.collective.primitive in ALONG and (cause := self._around(keeps, made)):
            return cause
        if returned:
            return self._result(self.all(returned[0]), returned[1], made)
        if reader is None:
            lines = map(self.module.line, chain(self.computation, through))
            return self._of_loop(None, through, next(filter(None, lines), made))
        line, found, name = self.module.line(reader), self.edge(reader, through), _named(reader)
        if reader.opcode == "while":
            return self._of_loop(reader, through, line)
        for asks in [*([found[:2]] if found else []), *self.program.wholes(reader)[:1]]:
            if asks[1].primitive in ASKING:
                return self._constraint(found, asks)
        if found and found[1].opcode in _PRODUCTS and not (found[1].opcode == "convolution" and self.worked(found)):
            return self._product(found, line)
        if cause := self._for_dropped_slice(reader):
            return cause
        if found is None:
            return Cause("unplaced", f"XLA moves an operand or a result of {name or reader.opcode}", "", line)
        if reader.primitive in ("reshape", "tile"):
            return self._reshape(found, line)
        asked = self._asked(found)
        is_whole = bool(self.worked(found)) or not self.sharded(*found[:2], 0)
        if name in ALONG and (is_whole or (name in UNSPLIT and not asked)):
            return self._along(name, found, line)
        text = self._has(_who(found, name or reader.opcode), found, Dim(*found[:2], "", 0))
        return asked or Cause("elementwise", text, "give both one sharding, where they are made", line)

    # Words -------------------------------------------------------------------------------------------------------

    def _has(self, who: str, found: Edge, result: Dim) -> str:
        """Returns text like "add has data on dimension 1, but data shards dimension 0 of x"."""
        dims = (self.every.sharded(*found[:2], i) for i in range(len(found[1].operands)) if i != found[2])
        others = (f"{joined(self.origins.axes(dim))} on {self.dims([dim])}" for each in dims for dim in each)
        has = self.result(result) or next(others, f"{self.over} on no dimension")
        return f"{who} ha{'ve' if 's of ' in who else 's'} {has}, but {self.operand(found)}"

    def _whole(self, who: str, found: Edge, dims: Sequence[Dim]) -> str:
        """Returns text like "sort wants dimension 0 of x whole, but data shards it"."""
        if not dims:
            return f"{who} wants {self.origins.name(value(*found))[0]} whole, but XLA splits it over {self.over}"
        return f"{who} wants {self.dims(dims)} whole, but {shard(self.axes_of(dims[0]))} it"

    # Operations along a dimension --------------------------------------------------------------------------------

    def _around(self, keeps: bool, line: str) -> Cause | None:
        """Returns the cause of the partitioner's moves around an operation that it does not split, if the operation
        needs a sharded dimension whole, and if XLA has resharded the operation or the program `keeps` its sharding in
        a result or a loop's next value; else None."""
        is_own = self.source.op_name == self.collective.op_name
        wholes = self.program.wholes(self.source)[:1] if is_own else []
        turned = any(self.program.local(*place) != self.source.shapes[:1] for place in wholes)  # XLA reshards it
        edge = self.edge(self.source if is_own else self.collective) if turned or keeps else None
        return self._along(_named(self.collective), edge, line) if edge and self.worked(edge) else None

    def _along(self, name: str, found: Edge | None, line: str) -> Cause:
        """Returns the cause, "whole", of a move around the operation `name`, which needs a dimension whole, or which
        XLA does not split. `found`: the use of its operand, or None if that is unknown. `line`: the line of the cause,
        but a slice of a scan has the scan's line."""
        if found is None:
            return Cause("whole", f"{name} wants an operand whole, but XLA splits it over {self.over}", "", line)
        if not (dims := self.worked(found)[:1]):
            # The indices of a lookup or scatter come last, because JAX has computed them from the user's indices.
            numbers = sorted(range(len(found[1].operands)), key=lambda i: i == 1)
            have = filter(None, (self.every.describe(self.every.sharded(*found[:2], i)) for i in numbers))
            text = f"XLA does not split {name} over {self.over}, but {joined([*dict.fromkeys(have)][:2])}"
            remedy = f"run it in jax.shard_map over {self.over}, each device on its part"
            if not self.sharded(*found[:2], 0):
                remedy = self.every.leave_whole(self.every.sharded(*found[:2], 0)[:1])
            return Cause("whole", text, remedy, line)
        who, other = _who(found, cumulative(name, found[1])), cheaper_way(name, *found[:2])
        if name == "dynamic_slice" and OF_SCAN.search(found[1].op_name):
            who, other, line = "the scan", "", self.origins.line(*found[:2]) or line
        text = self._whole(who, found, dims) + f"; {self.operand(found)}" * ("update" in name and found[2] > 0)
        return Cause("whole", text, self.leave_whole(dims) + f"; or {other}" * bool(other), line)

    def _for_dropped_slice(self, each: Instruction) -> Cause | None:
        """Returns the cause for `each`, a squeeze or reshape, if it drops a sharded dimension that a slice cut to one
        element; else None."""
        for place, whole in self.program.wholes(each)[: each.primitive in ("squeeze", "reshape")]:
            below = place.operands(whole)[0]
            if below.opcode == "slice" and any(at.extents[at.dim] == 1 for at in self.sharded(place, whole, 0)):
                return self._along("slice", (place, below, 0), self.origins.line(place, below))
        return None

    def _reshape(self, found: Edge, line: str) -> Cause:
        before, after = (each.shapes[0][1] for each in (found[0].operands(found[1])[0], found[1]))
        who = f"a reshape from {'x'.join(map(str, before))} to {'x'.join(map(str, after))}"
        remedy = _APART if len(before) > len(after) else _EXTENTS
        return Cause("reshape", self._whole(who, found, self.sharded(*found)), remedy, line)

    def _product(self, found: Edge, line: str) -> Cause:
        """Returns the cause, "product", for a product that reads the data in `found`: how the dimensions that it sums
        and keeps are sharded. If these agree, returns the cause of `_asked`, or else how the result is sharded."""
        place, product, side = found
        who = "the gradient's " if is_backward(product) else "this "
        who += "convolution" if product.opcode == "convolution" else "product"
        mine, other = summed(place, product, side), summed(place, product, 1 - side)
        mine_k, other_k = self.axes_in(mine), self.axes_in(other)
        over = self.on(sorted(mine_k - other_k or other_k - mine_k))
        sums = [each for each in (*mine, *other) if over.axes_of(each)]
        if not sums and not self.sharded(*found):  # a later step of a move
            over = self.every
        elif not sums:
            over = self
        of_sides = (over.sharded(place, product, i) for i in (side, 1 - side))
        kept = [[each for each in dims if each not in (*mine, *other)] for dims in of_sides]
        if sums and any(kept):
            keeps = over.dims(itertools.chain(*kept))
            text = f"{who} sums {over.dims(sums)} and keeps {keeps}, but {shard(over.axes)} both"
            return Cause("product", text, _IN_BOTH, line)
        if sums:
            sides = ((mine, mine_k), (other, other_k))
            which = [f"{over.dims(dims)}, which {shard(k) if k else 'is whole'}" for dims, k in sides]
            remedy = f"give both the same axes there, or {over.leave_whole(sums)}"
            return Cause("product", f"{who} sums {', with '.join(which)}", remedy, line)
        if both := self.axes_in(kept[0]) & self.axes_in(kept[1]) & {*over.axes}:
            text = f"{who} keeps {over.dims(kept[0])} and {over.dims(kept[1])}, but {shard(both)} both"
            return Cause("product", text, "shard one of them over another axis, or jaxmp.matmul", line)
        return self._asked(found) or Cause("product", self._has(who, found, Dim(place, product, "", 0)), _HIDES, line)

    # Requests for a sharding -------------------------------------------------------------------------------------

    def _asked(self, found: Edge) -> Cause | None:
        """Returns the cause if a constraint, a loop or the program's results ask for the sharding of the result of the
        user in `found`; else None. Considers only results that `axes` do not shard, or that get their sharding from no
        operand. If XLA chooses the shardings of the program's results, these ask only if no other operand of the user
        is sharded in another way."""
        place, user, number = found
        whole, result, have = self.origins.whole, Dim(place, user, "", 0), self.sharded(*found)
        asked = [(at, axis) for at in self.all(result) for axis in self.axes_of(at)]
        if asked and not any(self.origins.producers(*each) for each in asked):
            met = self.origins.met(*asked[0])
            if met and met.instruction.primitive in ASKING:
                return self._constraint(found, met[:2])
            if met and met.instruction.opcode == "while":
                return self._carry(found, met, whole.line(met.instruction))
            if met and not self.origins.producers(met, asked[0][1]):
                return self._result(have, met, whole.line(user))
        dims, waiting, seen, is_returned = self.program.dims(place, user), [(place, user)], {user.name}, False
        for place, at in () if asked else waiting:
            if at.primitive in ASKING and at is not user:
                return self._constraint(found, (place, at))
            is_returned |= at.is_root and place.name == whole.entry
            for each in place.users[at.name]:
                if each.name not in seen and (each.opcode == "tuple" or self.program.dims(place, each) == dims):
                    seen.add(each.name)
                    waiting += [*self.in_branches(place, at, each), (place, each)]
        kinds = [self.program.dims(*value(*found[:2], i)[:3]) for i in range(len(user.operands))]
        is_alone = not any(kind and kind != kinds[number] for kind in kinds)
        asks = is_returned and (is_alone or not whole.chooses_results)
        return self._result(have, result, whole.line(user)) if asks else None

    def _constraint(self, found: Edge | None, asks: Place) -> Cause:
        """Returns the cause for `asks`, a constraint on the user in `found` or on a value that the user leads to."""
        who = "the gradient's " * is_backward(asks[1]) + asker(*asks)
        text = self._has(who, found, Dim(*asks, "", 0)) if found else f"{who} has another sharding over {self.over}"
        return Cause("constraint", text, _ASK, self.origins.whole.line(asks[1]))

    def _result(self, have: Sequence[Dim], result: Dim, line: str) -> Cause:
        """Returns the cause for a result of the program: out_shardings, or XLA if it chooses, give the result another
        sharding than `have`; or XLA keeps it whole, because the axes do not divide an extent."""
        is_chosen = self.program.compiled.chooses_results
        for at in have if is_chosen else ():
            if at.extents[at.dim] % math.prod(self.program.mesh[axis] for axis in self.axes_of(at)):
                while below := [dim for dim in self.origins.operands(at) if dim.extents[dim.dim] == at.extents[at.dim]]:
                    at = next((dim for dim in below if dim.instruction.opcode != "parameter"), below[0])
                text = f"a result is whole, because {self.over} does not divide the {at.extents[at.dim]} of "
                return Cause("out_shardings", text + self.dims([at]), _EXTENTS, self.origins.line(*at[:2]) or line)
        has = self.result(result, origins=False) or f"{self.over} on no dimension"
        sharded = self.describe(have) or f"XLA splits an operand over {self.over}"
        who = "XLA's result has" if is_chosen else "out_shardings have"
        return Cause("out_shardings", f"{who} {has}, but {sharded}", _NAME_RESULTS, line)

    def _of_loop(self, loop: Instruction | None, through: Instruction, line: str) -> Cause:
        """Returns the cause, "carry", of a move of data that `loop` reads as `through`; or, if it is None, that the
        body of one returns for its next iteration."""
        body = self.origins.whole.computations.get(self.computation.name.removesuffix("_spmd"))
        places = [(body, body.root, body.root)] if body and body.root.opcode == "tuple" else []
        if loop:
            places = [(place, place.operands(whole)[0], whole) for place, whole in self.program.wholes(loop)[:1]]
        parts = self.computation.operands(through if loop else self.computation.root)
        ways = (chain(self.computation, each) for each in parts)
        number = next((i for i, way in enumerate(ways) if self.collective in way), 0)
        for place, ends, carry in places:
            return self._carry((place, ends, number), Dim(place, carry, str(number), 0), line)
        return self._carry(None, None, line)

    def _carry(self, found: Edge | None, carry: Dim | None, line: str) -> Cause:
        text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
        text = self._has("the loop's carry", found, carry) if found and carry else text
        return Cause("carry", text, "constrain the carry to one sharding, at the start and in the body", line)


def _who(found: Edge, name: str) -> str:
    name = function(*found[:2], name) if found[1].primitive == name else name
    return "the gradient's " * is_backward(found[1]) + name


def _named(each: Instruction) -> str:
    return next((name for scope, name in NAMED.items() if f"({scope})" in each.op_name), each.primitive)
