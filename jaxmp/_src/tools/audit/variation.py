"""The parts that stay the same in a variant: how elements of its arrays correspond to the reference's elements.

The relation of a variant's value to the reference's is `Rows` if it has its rows, "same" if it is the same, "packed" if
it says the same in an order that only the gradient knows (a mask, packed by the shape of a device's part; what each
device keeps), or "other" by its nature (it depends on the size of the batch, or on the place of a row).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from jaxmp._src.tools.audit import bits


@dataclasses.dataclass(frozen=True)
class Rows:
    """The position of a batch's rows in an array: dimension `dim` is (outer, rows, inner) in row-major order.

    For a batch of 4 rows, an array of shape (8, 5) is Rows(0, 1, 2) if each row has two neighbouring lines, and
    Rows(0, 2, 1) if the batch stands there twice.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def apart(self, x: np.ndarray, nrows: int) -> np.ndarray:
        """Returns `x` with the rows as first dimension; dimension `dim` becomes two, of `outer` and of `inner`."""
        shape = (*x.shape[: self.dim], self.outer, nrows, self.inner, *x.shape[self.dim + 1 :])
        return np.moveaxis(x.reshape(shape), self.dim + 1, 0)

    def take(self, x: np.ndarray, nrows: int, rows: np.ndarray) -> np.ndarray:
        """Returns `x`, of `nrows` rows, with the rows of these numbers instead, in their order; they may repeat."""
        shape = (*x.shape[: self.dim], self.outer * len(rows) * self.inner, *x.shape[self.dim + 1 :])
        taken = np.moveaxis(self.apart(x, nrows)[rows], 0, self.dim + 1)
        return np.ascontiguousarray(taken).reshape(shape)


Relation = Rows | Literal["same", "packed", "other"]

# Arrays count as reordered if sorting brings them closer by this factor.
_CLOSER = 8


@dataclasses.dataclass(frozen=True)
class Variation:
    """One variant.

    Attributes:
      name: as reports have it: "2 devices (x=2)", "3 rows".
      nrows: how many rows the reference's batch has.
      rows: of each row of the variant's batch its number in the reference's; None where the batch is the same.
      across: whether the variant's arrays are on devices of several processes.
    """

    name: str
    nrows: int = 0
    rows: tuple[int, ...] | None = None
    across: bool = False

    def relations(self, reference: tuple[int, ...], variant: tuple[int, ...]) -> list[Relation]:
        """Returns how arrays of these shapes may relate, likeliest first: only "same" for equal shapes. Other shapes
        have the rows in the one dimension that differs, with each possible `outer` and `inner`. The result is empty if
        no batch varies, if ranks or several dimensions differ, or if the extents are no multiples of the numbers of
        rows."""
        if reference == variant:
            return ["same"]
        if self.rows is None or len(reference) != len(variant):
            return []
        changed = [i for i, (a, b) in enumerate(zip(reference, variant, strict=True)) if a != b]
        (dim, *others), m = changed, len(self.rows)
        each = reference[dim] // self.nrows
        if others or reference[dim] != each * self.nrows or variant[dim] != each * m:
            return []
        return [Rows(dim, each // inner, inner) for inner in range(each, 0, -1) if each % inner == 0]

    def expected(self, reference: np.ndarray, relation: Relation) -> np.ndarray:
        """Returns the array that the variant should have: the reference's rows for `Rows`, else the reference."""
        if isinstance(relation, Rows):
            assert self.rows is not None
            return relation.take(reference, self.nrows, np.array(self.rows))
        return reference

    def difference(self, array: Any, reference: np.ndarray, relation: Relation) -> bits.Difference | None:
        """Compares an array of the variant with its expected value; None if the bits are equal."""
        return bits.difference(array, self.expected(reference, relation), across=self.across)

    def is_reordered(self, array: np.ndarray, reference: np.ndarray) -> bool:
        """True if an array has the reference's type and, in any order, the reference's elements, each of them equally
        often. False for empty arrays."""
        is_of_size = reference.size > 0 and array.size > 0 and array.size % reference.size == 0
        return is_of_size and array.dtype == reference.dtype and self._sorted_difference(array, reference) is None

    def least_difference(self, array: np.ndarray, reference: np.ndarray) -> bits.Difference | None:
        """Returns the difference of the sorted arrays if it is smaller by a factor `_CLOSER` than of the arrays as they
        are: their orders differ, and some elements too. Else None. The arrays have one shape, and differ both ways."""
        found, least = self.difference(array, reference, "same"), self._sorted_difference(array, reference)
        assert found is not None
        assert least is not None
        return least if _CLOSER * least.absolute < found.absolute else None

    def _sorted_difference(self, array: np.ndarray, reference: np.ndarray) -> bits.Difference | None:
        copies = array.size // reference.size
        return bits.difference(bits.ascending(array), np.repeat(bits.ascending(reference), copies), across=self.across)

    def decision(self, reference: np.ndarray) -> np.ndarray:
        """Returns a value that decides how the program goes on: the first process's if arrays are on several."""
        return bits.first(reference) if self.across else reference


def batches(nrows: int, multiple: int) -> list[Variation]:
    """Returns variants of a batch of `nrows`: `multiple` rows, about half of them, and 3 `multiple` more; none has
    `nrows`. Rows are taken from the last one down, and then again, so that they have other places."""
    half = multiple * math.ceil(nrows / 2 / multiple)
    found = []
    for size in dict.fromkeys((multiple, half, nrows + 3 * multiple)):
        if size != nrows:
            rows = tuple((nrows - 1 - i) % nrows for i in range(size))
            found.append(Variation(f"{size} row{'s' * (size != 1)}", nrows, rows))
    return found
