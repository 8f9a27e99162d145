"""The types of what the layers pass to each other, for annotations.

`jax.Array` stands for tracers too, and `int` for extents that may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.interpreters import ad

Shape = tuple[int, ...]
# The type of what is traced.
Aval = jax.core.ShapedArray
# Operands or results of a call by name.
Operands = dict[str, jax.Array]

# What rules of differentiation take: tangents and cotangents may be symbolic zeros, and in a transposition the operands
# whose cotangents are asked for have no value.
Tangent = jax.Array | ad.Zero
Operand = jax.Array | ad.UndefinedPrimal
# What rules of vmap take and give: the batch dimension of each array, None where it has none.
BatchDims = Sequence[int | None]


class ArrayType(Protocol):
    """What has a shape and a dtype: an array, or the type of one."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


def is_symbolic(*arrays: ArrayType) -> bool:
    """Whether an extent of these arrays is symbolic; a custom call needs numbers."""
    return not all(isinstance(extent, int) for x in arrays for extent in x.shape)
