"""The types of a call's options, as users write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.core.contraction.moves import Narrow

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
    """A dataclass with a short repr, because jaxprs print it: only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={x!r}' for f, x in values if x != f.default)})"


@dataclasses.dataclass(frozen=True, repr=False)
class CommOptions(Parts):
    """How the ranks of a product communicate.

    `dtype`, `algorithm` and `sm_count` are options for cuBLASMp, which "host" checks and "xla" ignores. They do not
    change the mathematics. A gradient's calls have other patterns; they keep the options that apply to them.

    `weights` and `gradients` round what crosses between ranks, on every platform. They need a call that gathers b, and
    no level of determinism. Every rank uses the same rounded b, also in the backward pass.

    Args:
      dtype: the type of partial sums on the way, with reduce-scatter and all-reduce only: no smaller than the
        result's, no larger than the accumulator's. None: the library's choice.
      algorithm: how communication overlaps with computation: "split_p2p", "split_multicast", "atomic_p2p",
        "atomic_multicast", "no_overlap" or "fused". None or "default": the library's choice.
      sm_count: the number of multiprocessors that communicate. None: the library's choice.
      weights: "int8" or "float8_e4m3fn", the type that b is gathered in, with a float32 scale for each block of 128
        consecutive numbers of a shard: 132 bytes for 128 numbers. Let M be the largest absolute value of a block, and u
        the unit roundoff of b's type (2^-8, 2^-11, 2^-24 for bfloat16, float16, float32). Each all-gather changes a
        number w by at most `(1 + 2^-14) e + u M + 2^-126`, with e = M / 254 for int8 and e = max(|w| / 16, M / 458752)
        for float8_e4m3fn. A block with an infinity or a NaN becomes NaN. The derivative is an exact gather's.
      gradients: "bfloat16", the type that the gradient of b is exchanged in (all-to-all) before each rank sums its
        part in float32. With P ranks, and S the sum of the absolute values of their terms, it differs from the exact
        sum by at most `(1 + u) (2^-8 + P 2^-23) S + u S`. Without it, the ranks reduce-scatter in b's type. Tangents in
        forward mode are rounded to bfloat16.

    Source: cublasmp.h 0.10, `cublasMpMatmulAlgoType_t` and `cublasMpMatmulDescriptorAttribute_t`; for `weights` and
    `gradients`, Wang et al., "ZeRO++" (2023, arXiv:2306.10209), qwZ and qgZ.

    >>> import jaxmp
    >>> jaxmp.CommOptions(algorithm="no_overlap")
    CommOptions(algorithm='no_overlap')
    """

    dtype: DTypeLike | None = None
    algorithm: Algorithm | None = None
    sm_count: int | None = None
    weights: DTypeLike | None = None
    gradients: DTypeLike | None = None

    @property
    def narrow(self) -> Narrow:
        """The types for sending b and its gradient between ranks."""
        return self.weights, self.gradients
