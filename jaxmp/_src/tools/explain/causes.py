"""Explains why XLA communicates: an operation of the user's program needs another sharding than its operands have.

There are three kinds of sentences: "sort wants dimension 0 of x whole, but data shards it" for operations along a
dimension, "this product sums dimension 1 of x, which model shards" for operations that add parts, and "add has data on
dimension 1, but data shards dimension 0 of x" for other operations. An `Edge`, (computation, user, number), is the use
of operand `number` by the instruction `user`; a `Place` is an instruction with its computation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.explain.hlo import Computation, Instruction, Module
from jaxmp._src.tools.explain.loops import summed_once
from jaxmp._src.tools.explain.operations import ALONG, NAMED, OTHERWISE, UNSPLIT, cheaper_way, cumulative
from jaxmp._src.tools.explain.origins import (
    ASKING,
    SLICE_OF_SCAN,
    Dim,
    Origins,
    asker,
    function,
    is_backward,
    summed,
    value,
)
from jaxmp._src.tools.explain.partitioned import Place
from jaxmp._src.tools.explain.search import Cause, Search, chain
from jaxmp._src.tools.explain.values import Edge, Values, joined, shard

# JAX's collectives, which a program calls explicitly.
_WRITTEN = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_WRITTEN |= {"reduce_scatter", "unreduced_reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast"}
_PRODUCTS = ("dot", "convolution")
_NEEDED_WHERE_SAME = "needed where the value is the same on every device"
_HIDES = "jaxmp.matmul or fuse moves it while it multiplies"
_APART = "leave the dimensions apart (jnp.einsum takes both), or shard the first of them, if the axis divides it"
_EXTENTS = "take extents that the axis divides, as of heads, or shard another dimension"


def cause(origins: Origins, computation: Computation, collective: Instruction, operand: int = 0) -> Cause:
    """Returns why a collective of the compiled program moves operand number `operand`. It is explained as it is after
    the partitioner if it is found there. A collective that the program itself calls has the kind "written", "gradient"
    or "jaxmp"; an operation that jax.checkpoint repeats has "recomputed"; others have the kinds of `_Causes.sum` and
    `_Causes.move`. A gradient's sum in a loop also gets what `summed_once` says."""
    program = origins.program
    module, axes = program.compiled, program.axes(collective)
    if collective.primitive in _WRITTEN:
        why = _written(collective, module.line(collective))
        sites = _in_shard_map(program.whole, collective) if why.kind == "gradient" else ()
        return summed_once(Values(origins, axes), sites, why)
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


def _in_shard_map(whole: Module | None, collective: Instruction) -> Iterator[Place]:
    """Yields the operations of `whole` that a collective may come from: they have its kind, and its name ends with
    theirs, because in a shard_map their names lack the scopes around it."""
    for place in whole.computations.values() if whole else ():
        for each in place.instructions.values():
            if each.kind == collective.kind and each.op_name and collective.op_name.endswith(each.op_name):
                yield place, each


def _written(collective: Instruction, line: str) -> Cause:
    who = "a call of jaxmp" if "jaxmp" in collective.op_name else "the program"
    who = "the gradient" if is_backward(collective) and who == "the program" else who
    kind = {"a call of jaxmp": "jaxmp", "the gradient": "gradient"}.get(who, "written")
    name = f"jax.lax.{collective.primitive.removesuffix('_invariant')}"
    return Cause(kind, f"{who} runs {name}{' (or pmean)' * (name == 'jax.lax.psum')}", "", line)


class _Causes(Search):
    """Finds the cause of one collective: by `sum` if it adds parts, otherwise by `move`."""

    def sum(self) -> Cause:
        """Returns the cause of a collective that reduces partial results of an operation with sharded operands: a
        product or convolution ("product"), a gather or slice (`_for_dropped_slice`; "whole"), a scatter, a reduction or
        any other operation ("reduction"). In a gradient "product" and "reduction" become "gradient", except for a
        maximum, a minimum, and a reduction that `_spreads`."""
        source, name = self.source, self.source.primitive
        line = self.module.line(source) or self.module.line(self.collective)
        places = self.program.wholes(source)
        # A reduction in a user's own backward function is no sum that JAX's gradient adds.
        is_gradient = is_backward(source) and name not in ("reduce_max", "reduce_min") and not self._spreads(source)
        if source.opcode in _PRODUCTS or name in ("dot_general", "conv_general_dilated"):
            dims = self._summed(places)
            is_conv = "conv" in name
            text = f"this {'convolution' if is_conv else 'product'} sums {self.which(dims)}"
            text = "the gradient of " * is_gradient + text
            # On CPUs XLA all-reduces and slices.
            is_cpu = jax_compat.default_platform() == "cpu"
            remedy = "" if is_cpu else "keep the result sharded (out_sharding, reduce-scatter), or "
            remedy = self.shard_another(dims) if is_conv else f"{remedy}jaxmp.matmul, which hides the sum"
            needed = "needed" + "; jaxmp.matmul hides it" * (not is_conv)
            return Cause("gradient", text, needed, line) if is_gradient else Cause("product", text, remedy, line)
        if name == "gather" or source.opcode == "gather":
            edges = [(*place, 0) for place in places]
            return self._along("gather", next(filter(self.worked, edges), next(iter(edges), None)), line)
        if cause := self._for_dropped_slice(self.collective):
            return cause
        is_scatter = "scatter" in name or source.opcode == "scatter"
        reduced = (
            [
                each
                for each in self.sharded(*at, 2 * is_scatter)
                if is_scatter or each.dim in at[1].numbers("dimensions")
            ]
            for at in places
        )
        dims = next(filter(None, reduced), [])
        who = "this scatter sums" if is_scatter else f"this {name.removeprefix('reduce_') or 'sum'} reduces"
        text = f"{'the gradient sums' if is_gradient else who} {self.which(dims)}"
        if is_gradient:
            return Cause("gradient", text, _NEEDED_WHERE_SAME, line)
        remedy = self.leave_whole(dims)
        if not is_scatter and any(each.dim == 0 for each in dims):
            remedy += "; or let each device use the value of its own part (jax.shard_map), as a batch norm may"
        is_scalar = not self.collective.shapes[0][1]
        return Cause(
            "reduction", text, "needed for one value of all, such as a loss or a norm" * is_scalar or remedy, line
        )

    def _summed(self, places: Sequence[Place]) -> list[Dim]:
        """Returns the dimensions, of both operands, that a product sums and the axes shard: of the product in `places`
        with the most such dimensions, or else of one with the name of `source`. If the axes shard none, returns all
        that the first product in `places` sums; [] if `places` has no product."""
        products = [place for place in places if place[1].opcode in _PRODUCTS]
        # Another product of this name may have a result of other extents.
        for found in (products, self.program.named(self.source)):
            sums = ([dim for i in (0, 1) for dim in summed(*place, i) if self.axes_of(dim)] for place in found)
            if dims := max(sums, key=len, default=[]):
                return dims
        return [dim for place in products[:1] for i in (0, 1) for dim in summed(*place, i)]

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
        reader, through = next(self.readers(), (None, self.collective))
        made = self.module.line(self.source) or self.module.line(self.collective)
        leaves = self.returned(through) if reader is None and self.is_entry else ([], None, False)
        if self.collective.primitive in ALONG and (cause := self._around(reader is None and not leaves[2], made)):
            return cause
        if reader is None:
            return self._result(*leaves[:2], made) if self.is_entry else self._next_carry(through, made)
        line, found, name = self.module.line(reader), self.edge(reader, through), _named(reader)
        if reader.opcode == "while":
            return self._first_carry(reader, through, line)
        wholes = self.program.wholes(reader)[:1] or [(self.computation, reader)]
        for asks in [*([found[:2]] if found else []), *wholes]:
            if asks[1].primitive in ASKING:
                return self._constraint(found, asks)
        if found and found[1].opcode in _PRODUCTS and not (found[1].opcode == "convolution" and self.worked(found)):
            return self._product(found, line)
        if cause := self._for_dropped_slice(reader):
            return cause
        if reader.primitive in ("reshape", "tile"):
            return self._reshape(found, line)
        if name in ALONG:
            if found is None or self.is_along(found):
                return self._along(name, found, line)
            if name == "top_k" or ((cause := self._asked(found)) is None and name in UNSPLIT):
                return self._unsplit(name, found, line)
            if cause is not None:
                return cause
        edge = self.edge(self.source) if self.source.primitive in ALONG else None
        if found and edge and self.is_along(edge) and (self.differs(*edge) or not self.differs(*found)):
            return self._along(self.source.primitive, edge, made)
        if found and (cause := self._asked(found)):
            return cause
        if found is None:
            return Cause("unplaced", f"XLA moves an operand or a result of {name or reader.opcode}", "", line)
        text = self._has(_who(found, name or reader.opcode), found, Dim(*found[:2], "", 0))
        return Cause("elementwise", text, "give both one sharding, where they are made", line)

    # Words -------------------------------------------------------------------------------------------------------

    def _has(self, who: str, found: Edge, result: Dim) -> str:
        """Returns text like "add has data on dimension 1, but data shards dimension 0 of x"."""
        dims = (self.every.sharded(*found[:2], i) for i in range(len(found[1].operands)) if i != found[2])
        others = (f"{joined(self.origins.axes(dim))} on {self.dims([dim])}" for each in dims for dim in each)
        has = self.result(result) or next(others, f"{self.over} on no dimension")
        return f"{who} ha{'ve' if 's of ' in who else 's'} {has}, but {self.operand(found)}"

    def _whole(self, who: str, found: Edge | None, dims: Sequence[Dim]) -> str:
        """Returns text like "sort wants dimension 0 of x whole, but data shards it"."""
        what = self.dims(dims) or (self.origins.name(value(*found))[0] if found else "an operand")
        axes = self.axes_of(dims[0]) if dims else ()
        return f"{who} wants {what} whole, but {shard(axes) if axes else f'XLA splits over {self.over}'} it"

    # Operations along a dimension --------------------------------------------------------------------------------

    def _around(self, leaves: bool, line: str) -> Cause | None:
        """Returns the cause of the partitioner's moves around an operation that it does not split, if the operation
        needs a sharded dimension whole, and if XLA has resharded the operation or the result `leaves`; else None.
        `leaves`: the program returns the result with the sharding that it has, or a loop's body returns it. Then there
        is also a cause if the operation's operand is unknown."""
        is_own = self.source.op_name == self.collective.op_name
        wholes = self.program.wholes(self.source)[:1] if is_own else []
        turned = any(self.program.local(*place) != self.source.shapes[:1] for place in wholes)  # XLA reshards it
        edge = self.edge(self.source if is_own else self.collective) if turned or leaves else None
        if (leaves and not edge) or (edge and self.worked(edge)):
            return self._along(_named(self.collective), edge, line)
        return None

    def _along(self, name: str, found: Edge | None, line: str) -> Cause:
        """Returns the cause, "whole", of a move around the operation `name`, which needs a dimension whole; the cause
        of `_unsplit` if it needs no sharded one. `found`: the use of its operand, or None if that is unknown. `line`:
        the line of the cause, but a slice of a scan has the scan's line."""
        if found is None:
            return Cause("whole", self._whole(name, None, []), OTHERWISE.get(name, ""), line)
        if not (dims := self.worked(found)[:1]):
            return self._unsplit(name, found, line)
        who, other = _who(found, cumulative(name, found[1])), cheaper_way(name, *found[:2])
        if name == "dynamic_slice" and SLICE_OF_SCAN.search(found[1].op_name):
            who, other, line = "the scan", "", self.origins.line(*found[:2]) or line
        text = self._whole(who, found, dims)
        text += f"; {self.operand(found)}" if "update" in name and found[2] else ""
        return Cause("whole", text, "; or ".join(filter(None, (self.shard_another(dims), other))), line)

    def _unsplit(self, name: str, found: Edge, line: str) -> Cause:
        """Returns the cause, "whole", for an operation that XLA does not split, or not along these dimensions."""
        # The indices of a lookup or scatter come last, because JAX has computed them from the user's indices.
        numbers = sorted(range(len(found[1].operands)), key=lambda i: i == 1)
        have = filter(None, (self.every.describe(self.every.sharded(*found[:2], i)) for i in numbers))
        text = f"XLA does not split {name} over {self.over}, but {joined([*dict.fromkeys(have)][:2])}"
        dims = self.every.sharded(*found[:2], 0)[:1]
        remedy = f"run it in jax.shard_map over {self.over}, each device on its part"
        return Cause("whole", text, remedy if self.sharded(*found[:2], 0) else self.every.shard_another(dims), line)

    def _for_dropped_slice(self, each: Instruction) -> Cause | None:
        """Returns the cause for `each`, a squeeze or reshape, if it drops a sharded dimension that a slice cut to one
        element; else None."""
        for place, whole in self.program.wholes(each)[: each.primitive in ("squeeze", "reshape")]:
            below = place.operands(whole)[0]
            if below.opcode == "slice" and any(at.extents[at.dim] == 1 for at in self.sharded(place, whole, 0)):
                return self._along("slice", (place, below, 0), self.origins.line(place, below))
        return None

    def _reshape(self, found: Edge | None, line: str) -> Cause:
        """Returns the cause, "reshape", for a reshape of the operand in `found`, or of an unknown one."""
        if found is None:
            return Cause("reshape", self._whole("a reshape", None, []), _EXTENTS, line)
        before, after = (each.shapes[0][1] for each in (found[0].operands(found[1])[0], found[1]))
        who = f"a reshape from {'x'.join(map(str, before))} to {'x'.join(map(str, after))}"
        remedy = _APART if len(before) > len(after) else _EXTENTS
        return Cause("reshape", self._whole(who, found, self.sharded(*found)), remedy, line)

    # Products ----------------------------------------------------------------------------------------------------

    def _product(self, found: Edge, line: str) -> Cause:
        """Returns the cause, "product", for a product that reads the data in `found`: how the dimensions that it sums
        and keeps are sharded. If these agree, returns the cause of `_asked`, or else how the result is sharded."""
        place, product, side = found
        who = "the gradient's " if is_backward(product) else "this "
        who += "convolution" if product.opcode == "convolution" else "product"
        mine, other = summed(place, product, side), summed(place, product, 1 - side)
        mine_k, other_k = self.axes_in(mine), self.axes_in(other)
        lost = self._over(mine_k - other_k)
        if kept := [each for each in lost.sharded(place, product, 1 - side) if each not in other]:
            text = f"{who} sums {lost.dims(filter(lost.axes_of, mine))} and keeps {lost.dims(kept)}"
            remedy = "shard what it sums in both operands, or let jaxmp.matmul or fuse gather while they multiply"
            return Cause("product", f"{text}, but {shard(lost.axes)} both", remedy, line)
        if mine_k != other_k:
            differ = self._over(mine_k ^ other_k)
            sides = [
                f"{differ.dims(dims)}, which {shard(k) if k else 'is whole'}"
                for dims, k in ((mine, mine_k), (other, other_k))
            ]
            remedy = f"shard {differ.dims(other)} so too, or {differ.leave_whole(mine)}" if not other_k else ""
            return Cause(
                "product", f"{who} sums {', with '.join(sides)}", remedy or "give both the same axes there", line
            )
        if not self.sharded(*found) and self.axes != (every := (*self.program.mesh,)):  # a later step of a move
            return dataclasses.replace(self, axes=every)._product(found, line)
        kept = [each for each in self.sharded(place, product, 1 - side) if each not in other]
        if kept and mine_k.isdisjoint(self.axes):
            both = self.axes_in(kept) & {*self.axes}
            text = f"{who} keeps {self.dims(self.sharded(*found))} and {self.dims(kept)}, but {shard(both)} both"
            return Cause("product", text, "shard one of them over another axis, or jaxmp.matmul", line)
        if cause := self._asked(found):
            return cause
        result = Dim(place, product, "", 0)
        asked = (self.begins(self.all(result)) or self.every.begins(self.every.all(result)))[:1]
        remedy = f"give {asked[0].partition(' of ')[2]} the sharding of this product's operands" if asked else _HIDES
        return Cause("product", self._has(who, found, result), remedy, line)

    # Requests for a sharding -------------------------------------------------------------------------------------

    def _asked(self, found: Edge) -> Cause | None:
        """Returns the cause if a constraint, a loop or the program's results ask for the sharding of the result of the
        user in `found`; else None."""
        assert self.program.whole is not None
        if (met := self.consumer(found)) is None:
            return None
        if met.instruction.primitive in ASKING:
            return self._constraint(found, met[:2])
        line = self.program.whole.line(met.instruction if met.instruction.opcode == "while" else found[1])
        if met.instruction.opcode == "while":
            return self._carry(found, met, line)
        return self._result(self.sharded(*found), met, line)

    def _constraint(self, found: Edge | None, asks: Place) -> Cause:
        """Returns the cause for `asks`, a constraint on the user in `found` or on a value that the user leads to."""
        who = "the gradient's " * is_backward(asks[1]) + asker(*asks)
        text = self._has(who, found, Dim(*asks, "", 0)) if found else f"{who} has another sharding over {self.over}"
        remedy = "ask for the sharding that the array has, or make the array with the sharding that this asks for"
        return Cause("constraint", text, remedy, (self.program.whole or self.module).line(asks[1]))

    def _result(self, have: Sequence[Dim], result: Dim | None, line: str) -> Cause:
        """Returns the cause for a result of the program: out_shardings, or XLA if it chooses, give the result another
        sharding than `have`; or XLA keeps it whole, because the axes do not divide an extent. `result`: a dimension of
        the result, or None if it is unknown."""
        is_chosen = self.program.compiled.chooses_results
        sharded = self.describe(have) or f"XLA splits an operand over {self.over}"
        for at in have if is_chosen else ():
            if at.extents[at.dim] % math.prod(self.program.mesh[axis] for axis in self.axes_of(at)):
                while below := [dim for dim in self.origins.operands(at) if dim.extents[dim.dim] == at.extents[at.dim]]:
                    at = next((dim for dim in below if dim.instruction.opcode != "parameter"), below[0])
                text = f"a result is whole, because {self.over} does not divide the {at.extents[at.dim]} of "
                return Cause("out_shardings", text + self.dims([at]), _EXTENTS, self.origins.line(*at[:2]) or line)
        has = (result and self.result(result, origins=False)) or f"{self.over} on no dimension"
        who, remedy = "out_shardings have", "name the sharding that the computation gives in out_shardings"
        who, remedy = ("XLA's result has", "name its sharding, as out_shardings") if is_chosen else (who, remedy)
        return Cause("out_shardings", f"{who} {has}, but {sharded}", remedy, line)

    def _first_carry(self, loop: Instruction, through: Instruction, line: str) -> Cause:
        ways = (chain(self.computation, each) for each in self.computation.operands(through))
        number = next((i for i, way in enumerate(ways) if self.collective in way), 0)
        for place, whole in self.program.wholes(loop)[:1]:
            return self._carry((place, place.operands(whole)[0], number), Dim(place, whole, str(number), 0), line)
        return self._carry(None, None, line)

    def _next_carry(self, through: Instruction, line: str) -> Cause:
        """Returns the cause, "carry", of a move of data that a loop's body returns as `through`, for its next
        iteration. `line`: the line of the cause if the data has none."""
        whole, root = self.program.whole, self.computation.root
        lines = map(self.module.line, chain(self.computation, through))
        line = next(filter(None, lines), line)
        place = whole and whole.computations.get(self.computation.name.removesuffix("_spmd"))
        if not place or place.root.opcode != "tuple" or through.name not in root.operands:
            return self._carry(None, None, line)
        number = root.operands.index(through.name)
        return self._carry((place, place.root, number), Dim(place, place.root, str(number), 0), line)

    def _carry(self, found: Edge | None, carry: Dim | None, line: str) -> Cause:
        text = f"the loop's carry changes its sharding over {self.over}, in each iteration"
        text = self._has("the loop's carry", found, carry) if found and carry else text
        return Cause("carry", text, "constrain the carry to one sharding, at the start and in the body", line)

    def _over(self, axes: Collection[str]) -> Values:
        return Values(self.origins, tuple(sorted(axes)))


def _who(found: Edge, name: str) -> str:
    name = function(*found[:2], name) if found[1].primitive == name else name
    return "the gradient's " * is_backward(found[1]) + name


def _named(each: Instruction) -> str:
    return next((name for scope, name in NAMED.items() if f"({scope})" in each.op_name), each.primitive)
