"""Keyword arguments that the overloads of the public functions share, as a type checker sees them.

The functions themselves name every option with its default; tests/ops/test_signatures.py holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.options import CommOptions, Determinism, Implementation, Mesh, Precision, Scalar, Sharding
from jaxmp._src.spec.process_grid import BlockCyclic

# What a call returns follows from its epilog: d alone, or d with further results by name.
PlainEpilog = Literal[
    Epilog.NONE,
    Epilog.DEFAULT,
    Epilog.ALLREDUCE,
    Epilog.BIAS,
    Epilog.RELU,
    Epilog.RELU_BIAS,
    Epilog.GELU,
    Epilog.GELU_BIAS,
    Epilog.DRELU,
    Epilog.DGELU,
]
AuxEpilog = Literal[
    Epilog.RELU_AUX,
    Epilog.RELU_AUX_BIAS,
    Epilog.GELU_AUX,
    Epilog.GELU_AUX_BIAS,
    Epilog.DRELU_BGRAD,
    Epilog.DGELU_BGRAD,
    Epilog.BGRADA,
    Epilog.BGRADB,
]
WithResults = tuple[jax.Array, dict[str, jax.Array]]
ShardingPair = tuple[Sharding | None, Sharding | None] | list[Sharding | None]
ShardingTriple = tuple[Sharding | None, Sharding | None, Sharding | None] | list[Sharding | None]


class _Product(TypedDict, total=False):
    """Options of every product."""

    alpha: Scalar
    transpose_a: bool
    transpose_b: bool
    conjugate_a: bool
    conjugate_b: bool
    precision: Precision
    preferred_element_type: DTypeLike | None
    implementation: Implementation | None
    determinism: Determinism
    comm: CommOptions | None


class _Placed(TypedDict, total=False):
    """Options of a product of global arrays."""

    out_sharding: Sharding | None
    in_shardings: ShardingPair | None
    mesh: Mesh | None


class ShardOptions(_Product, total=False):
    """Options of the products inside shard_map, less those that decide what they return."""

    beta: Scalar | None
    epilog_inputs: Mapping[str, ArrayLike] | None


class MatmulOptions(ShardOptions, _Placed, total=False):
    """Options of `matmul`, likewise."""


class LinearOptions(_Product, _Placed, total=False):
    """Options of `linear`, likewise."""


class BlockCyclicOptions(TypedDict, total=False):
    """Options of `matmul` with block-cyclic operands."""

    alpha: complex
    beta: complex | None
    transpose_a: bool
    transpose_b: bool
    conjugate_a: bool
    conjugate_b: bool
    precision: Precision
    preferred_element_type: DTypeLike | None
    out_sharding: BlockCyclic | None
    implementation: Implementation | None
    comm: CommOptions | None
