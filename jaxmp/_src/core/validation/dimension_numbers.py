"""The dimension numbers of `lax.dot_general`: which dimensions are contracted, which are a batch, which are free."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from jaxmp._src.core.contraction.contraction import LETTERS, Contraction, in_no_layout
from jaxmp._src.core.spec.refusal import InvalidOperands
from jaxmp._src.core.validation import operand_checks
from jaxmp._src.platform.runtime.types import ArrayType

T = TypeVar("T")
_Dimensions = tuple[Sequence[int], Sequence[int]]
# The user's form: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)).
GivenNumbers = tuple[_Dimensions, _Dimensions]


@dataclasses.dataclass(frozen=True)
class DimensionNumbers:
    """Every dimension of lhs and rhs, as contracted, batch or free; the free dimensions keep their order."""

    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_free: tuple[int, ...]
    rhs_free: tuple[int, ...]

    @property
    def given(self) -> GivenNumbers:
        """The dimension numbers in the form that `lax.dot_general` takes."""
        return (self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch)

    def result(self, lhs: Sequence[T], rhs: Sequence[T]) -> tuple[T, ...]:
        """Arranges one value per dimension of lhs and rhs in the order of the result's dimensions."""
        return (*pick(lhs, self.lhs_batch), *pick(lhs, self.lhs_free), *pick(rhs, self.rhs_free))

    def product(self, lhs_ndim: int, rhs_ndim: int) -> Contraction:
        """Returns the product of unsharded arrays with these numbers of dimensions, with a letter for each dimension as
        in an einsum: the two of a batch or contracted pair have the same. d has the order of `lax.dot_general`."""
        a = LETTERS[:lhs_ndim]
        b = list(LETTERS[lhs_ndim : lhs_ndim + rhs_ndim])
        for i, j in zip(self.lhs_batch + self.lhs_contract, self.rhs_batch + self.rhs_contract, strict=True):
            b[j] = a[i]
        return in_no_layout(a, "".join(b), "".join(self.result(a, b)))


def pick(values: Sequence[T], indices: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in indices)


def parse(dimension_numbers: Any, lhs: ArrayType, rhs: ArrayType) -> DimensionNumbers:
    """Returns the dimension numbers, none of them negative, with the contracted pairs sorted by the dimension of lhs
    and the batch pairs as given. None stands for the numbers of `lax.dot`, if no operand has more than 2 dimensions. An
    integer stands for a sequence of one. Raises a TypeError that is a ValueError if they do not fit."""
    for argument, x in (("{a}", lhs), ("{b}", rhs)):
        operand_checks.check_array(argument, x)
    if dimension_numbers is None and max(len(lhs.shape), len(rhs.shape)) <= 2:  # lax.dot
        dimension_numbers = (-1, 0), ((), ())
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        parts = [
            [operator.index(i) for i in (part if np.iterable(part) else (part,))]
            for part in (lhs_contract, rhs_contract, lhs_batch, rhs_batch)
        ]
    except (TypeError, ValueError):
        raise InvalidOperands(
            f"dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), "
            f"got {dimension_numbers!r}"
        ) from None
    lhs_contract, rhs_contract, lhs_batch, rhs_batch = (
        tuple(i + ndim if -ndim <= i < 0 else i for i in part)
        for part, ndim in zip(parts, (len(lhs.shape), len(rhs.shape)) * 2, strict=True)
    )
    numbers = (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)
    params = {"precision": None, "preferred_element_type": None, "out_sharding": None}
    shapes = (jax.core.ShapedArray(x.shape, np.dtype(np.float32)) for x in (lhs, rhs))
    try:
        lax.dot_general_p.abstract_eval(*shapes, dimension_numbers=numbers, **params)
    except (TypeError, ValueError) as error:
        raise InvalidOperands(
            f"dimension_numbers do not fit {{a}} of shape {tuple(lhs.shape)} and {{b}} of shape {tuple(rhs.shape)}: "
            f"{error}"
        ) from None
    # The order of the pairs is free. This order leaves lhs, which is larger in most layers, as it is.
    pairs = sorted(zip(lhs_contract, rhs_contract, strict=True))
    lhs_contract, rhs_contract = tuple(i for i, _ in pairs), tuple(j for _, j in pairs)
    lhs_free = tuple(i for i in range(len(lhs.shape)) if i not in lhs_contract + lhs_batch)
    rhs_free = tuple(j for j in range(len(rhs.shape)) if j not in rhs_contract + rhs_batch)
    return DimensionNumbers(lhs_contract, rhs_contract, lhs_batch, rhs_batch, lhs_free, rhs_free)
