"""A call in the forms that a library takes.

cuBLASMp all-reduces with op(A) = A^T, op(B) = B only, multiplies contiguous shards on square grids only, and has its
epilogs on one-dimensional layouts and of real numbers only. hostmp declares that it takes more. What a library does not
take directly is put together from what it takes, the cheapest way, and `explain` names it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxmp._src.spec import epilogs, low_precision, precisions
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern, global_extents, local_extents, output_shape

# What a byte through a link costs beside a byte through local memory: an H200 reads and writes 4.8 TB/s and sends
# 0.45 TB/s each way over NVLink (NVIDIA H200 data sheet).
LINK_COST = 10.0


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a library takes beyond cuBLASMp's documented forms; csrc/cublasmp/api_table.h declares it per library."""

    all_reduce_any_transposition: bool = False
    grid_any_shape: bool = False
    grid_epilogs: bool = False
    complex_epilogs: bool = False
    orders_sums: bool = False


@dataclasses.dataclass(frozen=True)
class Route:
    """How a call reaches the library.

    `kind`: "direct"; "transposed_copy", operands copied so that they are stored as the library wants them;
    "reduce_scatter_all_gather", an AR as an RS call and an all-gather of its rows; "padded_k", zeros added along k
    (`with_k`); "fixed_chunks", gathered where it has several ranks and then as local calls of one shape
    (`fixed_shape`); "separate_epilog", the plain product followed by XLA's epilog; "unsupported", which
    `implementation=None` gives to "xla".
    """

    kind: str
    why: str


def why_unsupported(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Why no route leads to the library, or the empty string."""
    has_chunks = is_chunked(spec, capabilities)  # which are local products, whatever the pattern is
    why = _why_no_epilog(spec.replace(pattern=Pattern.LOCAL) if has_chunks else spec, capabilities)
    if why and spec.is_invariant:
        return f"{why}, and XLA's would not keep determinism={spec.determinism!r}"
    if has_chunks:
        return ""
    if spec.pattern != Pattern.GRID or spec.cyclic or capabilities.grid_any_shape:
        return ""
    nrow, ncol = spec.axis_size(spec.row_axes), spec.axis_size(spec.col_axes)
    return "" if nrow == ncol else f"cuBLASMp multiplies contiguous shards on square grids only, not {nrow}x{ncol}"


def why_not_cublasmp(spec: MatmulSpec, operands: tuple) -> str:
    """Why no call of cuBLASMp computes this with operands of these types as it was asked for, or the empty string."""
    if precisions.sums_narrowly(spec.precision):
        return f"precision={spec.precision} sums in 16 bits, which jaxmp does not ask of cuBLASMp"
    if any(np.dtype(dtype).name == low_precision.INT8 for dtype in operands):
        return "cuBLASMp multiplies int8 to float32 only, not to int32"
    return ""


# Compute capabilities from which on cuBLASMp multiplies float8 (cublasmp.h 0.10, cublasMpMatmul; its modes of scales
# begin at 8.9) and has scales of blocks (cublasMpMatmulMatrixScale_t), and the one that has the other modes.
_FLOAT8_CARD, _BLOCK_CARD, _HOPPER = (9, 0), (10, 0), (9, 0)
_HOPPER_MODES = (low_precision.OUTER_VEC, low_precision.VEC128, low_precision.BLK128)


def why_card_refuses(spec: MatmulSpec, operands: tuple, capability: tuple[int, int] | None) -> str:
    """Why a card of this compute capability does not multiply operands of these types, or the empty string.

    None: the card is not known, for the program is for another machine.
    """
    names = [np.dtype(dtype).name for dtype in operands]
    if capability is None or not any(name in low_precision.SCALED for name in names):
        return ""
    modes = {spec.scale_a, spec.scale_b}
    has = f"this card has {capability[0]}.{capability[1]}"
    if modes & {low_precision.VEC16, low_precision.VEC32} or low_precision.FLOAT4 in names:
        kind = "NVFP4" if low_precision.FLOAT4 in names else "MXFP8"
        return "" if capability >= _BLOCK_CARD else f"{kind} needs compute capability 10.0 or later, {has}"
    if hopper := sorted(modes.intersection(_HOPPER_MODES)):
        return "" if capability == _HOPPER else f"scales of {hopper[0]} need compute capability 9.0, {has}"
    return "" if capability >= _FLOAT8_CARD else f"{names[0]} needs compute capability 9.0 or later, {has}"


def _is_complex(spec: MatmulSpec) -> bool:
    return np.issubdtype(np.dtype(spec.out_dtype), np.complexfloating)


def _why_no_epilog(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Why the library has this epilog nowhere or not here, or the empty string."""
    if spec.epilog == Epilog.NONE:
        return ""
    # The table of types of cublasLtMatmul (cuBLAS 13 documentation), which does the local products.
    if _is_complex(spec) and not capabilities.complex_epilogs:
        return "cuBLASMp has no epilogs of complex numbers"
    if spec.pattern == Pattern.GRID and not capabilities.grid_epilogs:
        return "cuBLASMp has no epilogs on 2-D grids"
    return ""


def is_chunked(spec: MatmulSpec, capabilities: Capabilities) -> bool:
    """Whether a level of determinism is kept by calls of one shape, for the library keeps none."""
    return spec.is_invariant and not capabilities.orders_sums


def find_route(spec: MatmulSpec, a_shape, b_shape, itemsize: int, capabilities: Capabilities) -> Route:
    """The cheapest way to give the call with these local shapes to the library."""
    if is_chunked(spec, capabilities):
        return Route("fixed_chunks", "the library promises no order of sums")
    if why := why_unsupported(spec, capabilities):
        return Route("unsupported", why)
    if why := _why_no_epilog(spec, capabilities):
        return Route("separate_epilog", why)
    if epilogs.rule(spec.epilog).derivative and global_extents(spec, a_shape, b_shape)[2] == 1:
        return Route("padded_k", "cuBLASMp multiplies by an activation's derivative only where k is not 1")
    if spec.pattern == Pattern.ALL_REDUCE:
        return _route_all_reduce(spec, a_shape, b_shape, itemsize, capabilities)
    return Route("direct", "")


def without_conjugation(spec: MatmulSpec) -> MatmulSpec:
    """The spec less the conjugations that precede the call: cuBLASMp conjugates only what it transposes, and sums
    only what it does not conjugate."""
    return spec.replace(
        conjugate_a=spec.conjugate_a and spec.transpose_a and spec.epilog != Epilog.BGRADA,
        conjugate_b=spec.conjugate_b and spec.transpose_b,
    )


# What k is padded to: a call may multiply by a derivative then. The zeros add +0 to sums that begin at +0, so that no
# element changes, not even the sign of a zero, and they lie on every rank alike, for k = 1 is whole on each.
PADDED_K = 2


def with_k(spec: MatmulSpec, a_shape, b_shape, k: int):
    """The local shapes of a and b as stored, with `k` for the extent along which they are contracted."""
    rows, _, _, cols = local_extents(spec, a_shape, b_shape)
    return (k, rows) if spec.transpose_a else (rows, k), (cols, k) if spec.transpose_b else (k, cols)


def _route_all_reduce(spec: MatmulSpec, a_shape, b_shape, itemsize: int, capabilities: Capabilities) -> Route:
    # In JAX's order cuBLASMp's TN is a stored (m, k) and b stored (n, k).
    misplaced = [shape for shape, wrong in ((a_shape, spec.transpose_a), (b_shape, not spec.transpose_b)) if wrong]
    if not misplaced or capabilities.all_reduce_any_transposition:
        return Route("direct", "")
    rows, cols = output_shape(spec, a_shape, b_shape)
    p = spec.nranks
    if spec.epilog in (Epilog.BGRADA, Epilog.BGRADB):
        # A copy would be stored so that it cannot be summed.
        form = "cuBLASMp all-reduces no product whose operand it sums"
        kind = "separate_epilog" if rows % p else "reduce_scatter_all_gather"
        return Route(kind, form)
    copied = 2 * sum(math.prod(shape) for shape in misplaced) * itemsize
    gathered = rows * cols * (p - 1) // p * np.dtype(spec.out_dtype).itemsize
    form = "cuBLASMp all-reduces with a stored (m, k) and b stored (n, k) only"
    if rows % p or copied <= LINK_COST * gathered:
        return Route("transposed_copy", f"{form}; copying {copied} bytes is the cheapest way")
    return Route("reduce_scatter_all_gather", f"{form}; gathering {gathered} bytes beats copying {copied}")
