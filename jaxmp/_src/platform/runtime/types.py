"""Types for annotations, shared by the layers.

`jax.Array` includes tracers, and `int` includes extents that may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.interpreters import ad

Shape = tuple[int, ...]
# The type of a traced value.
Aval = jax.core.ShapedArray
# Operands or results of a call by name.
Operands = dict[str, jax.Array]

# For rules of differentiation: tangents and cotangents may be symbolic zeros, and transposed operands have no values.
Tangent = jax.Array | ad.Zero
Operand = jax.Array | ad.UndefinedPrimal
# For rules of vmap: the batch dimension of each array, None for an array without one.
BatchDims = Sequence[int | None]


class ArrayType(Protocol):
    """Anything with a shape and a dtype: an array, or the type of an array."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


def is_symbolic(*arrays: ArrayType) -> bool:
    """True if an extent of these arrays is symbolic; a custom call needs numbers."""
    return not all(isinstance(extent, int) for x in arrays for extent in x.shape)
