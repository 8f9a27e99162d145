"""What a library, or a card, does not take in any form; `forms` has those in which it takes the others."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxmp._src.spec import low_precision, precisions
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import MatmulSpec


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a library takes beyond cuBLASMp's documented forms; csrc/cublasmp/api_table.h declares it per library."""

    all_reduce_any_transposition: bool = False
    all_reduce_c: bool = False
    grid_any_shape: bool = False
    grid_epilogs: bool = False
    complex_epilogs: bool = False
    fixed_reduction_order: bool = False


def is_tiled(spec: MatmulSpec, capabilities: Capabilities) -> bool:
    """Whether calls of one shape keep a fixed order, for the library keeps none."""
    return spec.fixed_reduction_order and not capabilities.fixed_reduction_order


def why_unsupported(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Why the library takes the call in no form, or the empty string."""
    has_tiles = is_tiled(spec, capabilities)  # which are local products, whatever the pattern is
    why = why_no_epilog(spec.ungrouped() if has_tiles else spec, capabilities)
    if why and spec.fixed_reduction_order:
        return f"{why}, and XLA's would not keep {spec.level}"
    if has_tiles:
        return ""
    is_free = spec.distributions or capabilities.grid_any_shape
    if is_free or not spec.contraction.is_grid:
        return ""
    nrow, ncol = spec.group.shape
    return "" if nrow == ncol else f"cuBLASMp multiplies contiguous shards on square grids only, not {nrow}x{ncol}"


def takes_mixed(spec: MatmulSpec, wide: np.dtype, implementation: str) -> bool:
    """Whether a call takes a mixed pair as it is; elsewhere the narrow operand is converted to `wide` ahead of it."""
    return implementation == "host" and precisions.find(spec.precision, wide) in ("32F", "32F_PEDANTIC")


def why_not_cublasmp(spec: MatmulSpec, operands: tuple[np.dtype, ...]) -> str:
    """Why no call of cuBLASMp computes this with operands of these types as it was asked for, or the empty string."""
    if precisions.sums_in_16_bits(spec.precision):
        return f"precision={spec.precision} sums in 16 bits, which jaxmp does not ask of cuBLASMp"
    if any(np.dtype(dtype).name == low_precision.INT8 for dtype in operands):
        return "cuBLASMp multiplies int8 to float32 only, not to int32"
    return ""


# Compute capabilities from which on cuBLASMp multiplies float8 (cublasmp.h 0.10, cublasMpMatmul; its modes of scales
# begin at 8.9) and has scales of blocks (cublasMpMatmulMatrixScale_t), and the one that has the other modes.
_FLOAT8_CARD, _BLOCK_CARD, _HOPPER = (9, 0), (10, 0), (9, 0)
_HOPPER_MODES = (low_precision.OUTER_VEC, low_precision.VEC128, low_precision.BLK128)


def why_card_refuses(spec: MatmulSpec, operands: tuple[np.dtype, ...], capability: tuple[int, int] | None) -> str:
    """Why a card of this compute capability does not multiply operands of these types, or the empty string.

    None: the card is not known, for the program is for another machine.
    """
    names = [np.dtype(dtype).name for dtype in operands]
    if capability is None or not any(name in low_precision.SCALED for name in names):
        return ""
    modes = {spec.scales.a, spec.scales.b}
    has = f"this card has {capability[0]}.{capability[1]}"
    if modes & {low_precision.VEC16, low_precision.VEC32} or low_precision.FLOAT4 in names:
        kind = "NVFP4" if low_precision.FLOAT4 in names else "MXFP8"
        return "" if capability >= _BLOCK_CARD else f"{kind} needs compute capability 10.0 or later, {has}"
    if hopper := sorted(modes.intersection(_HOPPER_MODES)):
        return "" if capability == _HOPPER else f"scales of {hopper[0]} need compute capability 9.0, {has}"
    return "" if capability >= _FLOAT8_CARD else f"{names[0]} needs compute capability 9.0 or later, {has}"


def why_no_epilog(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Why the library has this epilog nowhere or not here, or the empty string."""
    if spec.epilog == Epilog.NONE:
        return ""
    # The table of types of cublasLtMatmul (cuBLAS 13 documentation), which does the local products.
    if np.issubdtype(np.dtype(spec.out_dtype), np.complexfloating) and not capabilities.complex_epilogs:
        return "cuBLASMp has no epilogs of complex numbers"
    if spec.contraction.is_grid and not capabilities.grid_epilogs:
        return "cuBLASMp has no epilogs on 2-D grids"
    return ""


def asked_of_library(spec: MatmulSpec) -> str:
    """The option that asks for a library's product, or the empty string."""
    if spec.implementation in ("host", "cublasmp"):
        return f"implementation={spec.implementation!r}"
    return str(spec.level) if spec.fixed_reduction_order else ""
