"""A user's request for one product: one record, and its keyword arguments as a type checker sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Required, TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.core.spec import levels
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.levels import Determinism
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.spec.options import (
    CommOptions,
    GroupedImplementation,
    Implementation,
    Mesh,
    Precision,
    Scalar,
    Sharding,
)
from jaxmp._src.core.spec.process_grid import BlockCyclic

# The results of a call depend on its epilog: d alone, or d with further results by name.
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


class Request(NamedTuple):
    """One call as the user wrote it, with the argument names of `matmul` and the defaults of every public function.

    `function`: the name for messages, as "mlp (x @ w_in)". `takes_transposed`: the function has the options
    `transpose_a` and `transpose_b`. `first_operand_is_b`: as in `MatmulSpec`."""

    function: str
    a: Any
    b: Any
    c: Any = None
    alpha: Scalar = 1.0
    beta: Scalar | None = None
    transpose_a: bool = False
    transpose_b: bool = False
    conjugate_a: bool = False
    conjugate_b: bool = False
    epilog: Epilog | int = Epilog.NONE
    epilog_inputs: Mapping[str, ArrayLike] | None = None
    precision: Precision = None
    preferred_element_type: DTypeLike | None = None
    out_sharding: Any = None
    in_shardings: Any = None
    mesh: Mesh | None = None
    implementation: GroupedImplementation | None = None
    determinism: Determinism = "run_to_run"
    scaling: Scaling | None = None
    comm: CommOptions | None = None
    takes_transposed: bool = True
    first_operand_is_b: bool = False

    @property
    def level(self) -> levels.Level:
        return levels.parse(self.determinism)


class _Matrices(TypedDict, total=False):
    """Options of every product of matrices, block-cyclic ones too."""

    transpose_a: bool
    transpose_b: bool
    conjugate_a: bool
    conjugate_b: bool
    precision: Precision
    preferred_element_type: DTypeLike | None
    implementation: Implementation | None
    comm: CommOptions | None


class _Product(_Matrices, total=False):
    """Options of every product of arrays."""

    alpha: Scalar
    determinism: Determinism


class _Placed(TypedDict, total=False):
    """Options of a product of global arrays."""

    out_sharding: Sharding | None
    in_shardings: ShardingPair | None
    mesh: Mesh | None


class _WithC(_Product, total=False):
    """Options of products with C and an epilog, except options that decide what they return."""

    beta: Scalar | None
    epilog_inputs: Mapping[str, ArrayLike] | None


class OfPlain(_WithC, total=False):
    """Options with which a product inside shard_map returns d alone."""

    epilog: PlainEpilog
    scaling: None


class OfAux(_WithC, total=False):
    """Options with which a product inside shard_map returns further results too."""

    epilog: Required[AuxEpilog]
    scaling: Scaling | None


class OfAny(_WithC, total=False):
    """Options of the products inside shard_map."""

    epilog: Epilog | int
    scaling: Scaling | None


class PlainMatmul(OfPlain, _Placed, total=False):
    """Options with which `matmul` returns d alone."""


class AuxMatmul(OfAux, _Placed, total=False):
    """Options with which `matmul` returns further results too."""


class AnyMatmul(OfAny, _Placed, total=False):
    """Options of `matmul`."""


class MatmulOptions(OfAny, total=False):
    """Options of `matmul`, of arrays and of block-cyclic ones."""

    out_sharding: Sharding | BlockCyclic | None
    in_shardings: ShardingPair | None
    mesh: Mesh | None


class PlainLinear(_Product, _Placed, total=False):
    """Options with which `linear` returns y alone."""

    scaling: None


class AnyLinear(_Product, _Placed, total=False):
    """Options of `linear`."""

    scaling: Scaling | None


class ContractionOptions(_Placed, total=False):
    """Options of each product of `dot_general` and `einsum`."""

    implementation: Implementation | None
    determinism: Literal["run_to_run", "batch"]


class GroupOptions(_Placed, total=False):
    """Options of `ragged_dot` and `ragged_dot_general`."""

    precision: Precision
    preferred_element_type: DTypeLike | None
    implementation: GroupedImplementation | None
    determinism: Determinism


class LayerOptions(TypedDict, total=False):
    """Options of each product of `mlp` and `gated_mlp`."""

    precision: Precision
    out_sharding: Sharding | None
    in_shardings: ShardingTriple | None
    mesh: Mesh | None
    implementation: Implementation | None
    determinism: Determinism


class ExpertOptions(TypedDict, total=False):
    """Options of each product of `moe_mlp`."""

    out_sharding: Sharding | None
    in_shardings: ShardingTriple | None
    mesh: Mesh | None
    implementation: GroupedImplementation | None
    determinism: Determinism


class BlockCyclicOptions(_Matrices, total=False):
    """Options of `matmul` with block-cyclic operands."""

    alpha: complex
    beta: complex | None
    out_sharding: BlockCyclic | None
