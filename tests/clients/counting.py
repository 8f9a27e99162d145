"""Counts what `jaxmp.fuse` does with products in a whole process, under any caller and any jit."""

import collections
import contextlib

from jaxmp._src.fuse import graph, reasons, rewrite


class Count:
    """The number of products that became calls, and of the others by reason; a loop's body counts once."""

    def __init__(self):
        self.calls, self.left = 0, collections.Counter()

    @property
    def met(self):
        return self.calls + self.left.total()


@contextlib.contextmanager
def counting():
    """Yields the `Count` of the programs that are traced in the context."""
    count = Count()
    of_group, of_equation = rewrite.Rewriter._group, rewrite.Rewriter._equation

    def group(self, whole, found, values):
        left = count.left.total()
        of_group(self, whole, found, values)
        products = sum(whole.equations[i].primitive.name == "dot_general" for i in found.equations)
        count.calls += products - (count.left.total() - left)

    def equation(self, eqn, operands, why):
        if eqn.primitive.name != "dot_general":
            count.left["groups"] += eqn.primitive.name in graph.PRODUCTS
        elif why:  # without a reason it is unused
            count.left[why if why in reasons.REASONS else reasons.reason_in([reasons.SCOPE + why])] += 1
        return of_equation(self, eqn, operands, why)

    rewrite.Rewriter._group, rewrite.Rewriter._equation = group, equation
    try:
        yield count
    finally:
        count.left = +count.left
        rewrite.Rewriter._group, rewrite.Rewriter._equation = of_group, of_equation
