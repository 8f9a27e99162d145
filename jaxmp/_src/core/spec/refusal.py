# ruff: noqa: N818
"""Errors of calls that jaxmp refuses. In a message {a}, {b} and {bias} stand for the operands' names in the user's
function, and {out_sharding} for the sharding of its result.

The names are filled in by code that knows the function: `validation/public` around each public function, and the rules
of a primitive, which run later than the call, from its spec.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmp._src.platform.jax_internals.jax_compat import ShardingTypeError, TypePromotionError

_ROLE = re.compile(r"\{(a|b|bias|out_sharding)\}")


class Refusal(Exception):
    """A call that jaxmp does not take. Each subclass is also of the type that users catch.

    >>> str(InvalidValue("{b} has k=3 but {a} has k=2").of("linear", {"a": "x", "b": "w"}))
    'linear: w has k=3 but x has k=2'
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = ""
        self.names: dict[str, str] = {}

    def of(self, function: str, names: Mapping[str, str] | None = None) -> Refusal:
        """Sets the function's name and the names of its operands where none is set yet, and returns this error."""
        self.function = self.function or function
        self.names = {**(names or {}), **self.names}
        return self

    def __str__(self) -> str:
        text = _ROLE.sub(lambda role: self.names.get(role[1], role[1]), self.args[0])
        return f"{self.function}: {text}" if self.function else text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__bases__[1], (str(self),)  # for another process, which may not have jaxmp


class InvalidValue(Refusal, ValueError):
    """A value or a shape that does not fit."""


class InvalidOperands(InvalidValue, TypeError):
    """Operands or dimensions that do not fit: a TypeError of JAX's products, a ValueError of its einsum."""


class InvalidSharding(InvalidValue, ShardingTypeError):
    """Shardings that leave the sharding of the result open, in JAX too."""


class InvalidType(Refusal, TypeError):
    """A type, of Python or of numbers, that does not fit."""


class NoPromotion(InvalidType, TypePromotionError):
    """Types that JAX does not promote to one either."""


class NotAvailable(Refusal, NotImplementedError):
    """Something that no implementation of the call supports."""


class NoKernel(NotAvailable, TypeError):
    """Types that no kernel supports, and JAX does not either."""


class NoPrecision(NotAvailable, ValueError):
    """A precision that no implementation supports for these types, and JAX on CPUs does not either."""


class NotInstalled(Refusal, RuntimeError):
    """A library that was asked for and cannot be opened."""


# Tracebacks show the type that users know.
_OF_JAX = InvalidOperands, InvalidSharding, NoPromotion, NoKernel, NoPrecision
for _kind in (InvalidValue, InvalidType, NotAvailable, NotInstalled, *_OF_JAX):
    _kind.__module__ = _kind.__bases__[1].__module__
    _kind.__name__ = _kind.__qualname__ = _kind.__bases__[1].__name__


@contextlib.contextmanager
def naming(function: str, **names: str) -> Iterator[None]:
    """Names a function and the operands of its product in refusals raised inside; names set further inside stay."""
    try:
        yield
    except Refusal as refusal:
        refusal.of(function, names)
        raise


@contextlib.contextmanager
def of_layer(function: str, **names: str) -> Iterator[None]:
    """Names a layer and its arguments in refusals raised inside, instead of the names that the functions inside set."""
    try:
        yield
    except Refusal as refusal:
        refusal.function, refusal.names = function, {**refusal.names, **names}
        raise
