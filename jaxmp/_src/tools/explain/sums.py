"""Why XLA adds values of several devices: an operation whose operands are sharded along what it sums."""

from __future__ import annotations

import math

from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.explain.hlo import Instruction
from jaxmp._src.tools.explain.origins import is_backward, summed
from jaxmp._src.tools.explain.search import CARRY, Cause, Search, chain

_NEEDED_WHERE_SAME = "needed where the value is the same on every device"


class Sums(Search):
    """A collective that adds partial sums, or other partial results."""

    def sum(self) -> Cause:
        """Partial sums, or other partial results, of an operation whose operands are sharded."""
        over, source, name = self.over, self.source, self.source.primitive
        line = self.module.line(source) or self.module.line(self.collective)
        # What a user's own backward function reduces is no sum that a gradient adds.
        is_gradient = is_backward(source) and name not in ("reduce_max", "reduce_min") and not self._spreads(source)
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
            remedy = self.leave_whole(updates)
            remedy += f", or shard the result over {over} too (reduce-scatter)" * _has_reduce_scatters()
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
        kind = f"logical {kind}" if kind in ("or", "and") else kind
        text = f"a {kind} over {self.which(dims)}, as in a mean, a norm, a softmax or a loss"
        remedy = "needed for one value of all, such as a loss or a norm" if is_scalar else self.leave_whole(dims)
        if not is_scalar and any(each.dim == 0 for each in dims):
            remedy += "; or let each device take that of its own part (jax.shard_map), as a batch norm may"
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
        sums = [dim for place in products for side in (0, 1) for dim in summed(*place, side)]
        if not any(map(self.axes_of, sums)):  # another of the name, whose result has other extents
            products = self.program.named(self.source) or products
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
            half = "where the result is sharded a reduce-scatter moves half, and " * _has_reduce_scatters()
            return Cause("gradient", text, f"needed; {half}jaxmp.matmul hides it", line)
        remedy = "keep the result sharded (out_sharding, reduce-scatter), or " * _has_reduce_scatters()
        remedy += "jaxmp.matmul, which hides the sum"
        remedy = f"{self.leave_whole(has)}, or {remedy}" if lacks else remedy
        remedy = self.shard_another(has) if what == "convolution" else remedy
        return Cause("contraction", f"{text}, so that each device has a partial sum", remedy, line)

    def accumulates(self) -> bool:
        """Whether a loop adds what the collective gives to a value that it carries."""
        readers = [
            reader for reader, _ in self._readers() if isinstance(reader, Instruction) and reader.opcode == "add"
        ]
        terms = (term for reader in readers for term in self.computation.operands(reader))
        carries = (each for term in terms for each in chain(self.computation, term))
        return self._leaves == CARRY and any(each.opcode == "parameter" for each in carries)


def _has_reduce_scatters() -> bool:
    """Whether XLA makes a reduce-scatter of a sum with a sharded result; on CPUs it sums for every device, and cuts."""
    return jax_compat.default_platform() != "cpu"
