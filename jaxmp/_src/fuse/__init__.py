"""A function transformation: turns a function's products, and the communication around them, into calls of jaxmp.

A product is an equation that multiplies matrices. The free dimensions of its operand x come first in its result, the
free dimensions of w last. A call is an operation of jaxmp that replaces a product and equations around it. "At a level"
means: `determinism` is "batch" or "topology". "topology" has a global order, the same for sums on every mesh. An epilog
is what a call does to its sums, such as a bias or gelu; its aux is another result, which the derivative reads.
"""
