"""What `jaxmp.fuse` made of the products that it met, in a whole process, whoever calls it and under whose jit."""

import collections
import contextlib

from jaxmp._src.fuse import rewrite


class Count:
    """How many products became calls, and how many stay JAX's, by reason; a loop's body counts once."""

    def __init__(self):
        self.calls, self.left = 0, collections.Counter()

    @property
    def met(self):
        return self.calls + self.left.total()


@contextlib.contextmanager
def counting():
    """The `Count` of what is traced within."""
    count = Count()
    of_group, of_equation = rewrite.Rewriter._group, rewrite.Rewriter._equation

    def group(self, graph, found, values):
        left = count.left.total()
        of_group(self, graph, found, values)
        products = sum(graph.equations[i].primitive.name == "dot_general" for i in found.equations)
        count.calls += products - (count.left.total() - left)

    def equation(self, eqn, operands, why):
        if eqn.primitive.name != "dot_general":
            count.left["groups"] += eqn.primitive.name in rewrite.PRODUCTS
        elif why:  # without a reason it is dead code
            count.left[why if why in rewrite.REASONS else rewrite.reason_in([rewrite.SCOPE + why])] += 1
        return of_equation(self, eqn, operands, why)

    rewrite.Rewriter._group, rewrite.Rewriter._equation = group, equation
    try:
        yield count
    finally:
        count.left = +count.left
        rewrite.Rewriter._group, rewrite.Rewriter._equation = of_group, of_equation
