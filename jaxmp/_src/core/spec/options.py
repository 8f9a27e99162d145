"""The types of a call's options, as users write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

ActivationName = Literal["relu", "gelu", "silu", "swish", "gelu_exact", "tanh", "sigmoid"]
Activation = ActivationName | Callable[[jax.Array], jax.Array]
Algorithm = Literal["default", "split_p2p", "split_multicast", "atomic_p2p", "atomic_multicast", "no_overlap", "fused"]
Implementation = Literal["host", "xla", "cublasmp"]
# Products of groups also take a function with the signature of lax.ragged_dot_general.
GroupedImplementation = Implementation | Callable[..., jax.Array]

# Anything with a shape and a dtype; alpha and beta; the name or names of mesh axes.
Array = jax.Array | np.ndarray
Scalar = ArrayLike
AxisName = str | tuple[str, ...]
# lax.dot_general's precision, and the names of cuBLAS's compute types.
Precision = (
    str
    | jax.lax.Precision
    | jax.lax.DotAlgorithm
    | jax.lax.DotAlgorithmPreset
    | tuple[str | jax.lax.Precision | None, str | jax.lax.Precision | None]
    | None
)
Sharding = jax.sharding.PartitionSpec | jax.sharding.NamedSharding
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


class Parts:
    """A dataclass with a short repr, only fields that differ from their defaults: each equation of a jaxpr has one."""

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={x!r}' for f, x in values if x != f.default)})"


@dataclasses.dataclass(frozen=True, repr=False)
class CommOptions(Parts):
    """How the ranks of a product communicate: options for cuBLASMp, which "host" checks and "xla" ignores.

    No option changes the mathematics. A gradient's calls have other patterns; they keep the options that apply to them.

    Args:
      dtype: the type of partial sums on the way, with reduce-scatter and all-reduce only: no smaller than the
        result's, no larger than the accumulator's. None: the library's choice.
      algorithm: how communication overlaps with computation: "split_p2p", "split_multicast", "atomic_p2p",
        "atomic_multicast", "no_overlap" or "fused". None or "default": the library's choice.
      sm_count: the number of multiprocessors that communicate. None: the library's choice.

    Source: cublasmp.h 0.10, `cublasMpMatmulAlgoType_t` and `cublasMpMatmulDescriptorAttribute_t`.

    >>> import jaxmp
    >>> jaxmp.CommOptions(algorithm="no_overlap")
    CommOptions(algorithm='no_overlap')
    """

    dtype: DTypeLike | None = None
    algorithm: Algorithm | None = None
    sm_count: int | None = None
