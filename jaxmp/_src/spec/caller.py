"""The public function that a user called, as messages name it and its operands."""

from __future__ import annotations


class Caller(str):
    """The name of a public function that calls operands a and b of a product, or its bias, something else.

    Checks take a function's name as a `str`; `operand_name` is how they name an operand.

    >>> linear = Caller("linear", a="x", b="w")
    >>> f"{linear}: {operand_name(linear, 'a')} and {operand_name(linear, 'bias')}"
    'linear: x and bias'
    """

    arguments: dict[str, str]
    takes_transposed: bool

    def __new__(cls, name: str, *, takes_transposed: bool = True, **arguments: str) -> Caller:
        """`arguments`: the function's own name of each operand that is called otherwise in a product;
        `takes_transposed`: it has the options `transpose_a` and `transpose_b`."""
        caller = super().__new__(cls, name)
        caller.arguments, caller.takes_transposed = arguments, takes_transposed
        return caller


def operand_name(caller: str, operand: str) -> str:
    """What the function that the user called calls an operand of the product ("a", "b", "bias")."""
    return caller.arguments.get(operand, operand) if isinstance(caller, Caller) else operand
