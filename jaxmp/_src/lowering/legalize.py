"""What a library takes, and the form in which a call reaches it.

cuBLASMp all-reduces with op(A) = A^T, op(B) = B and without C only, multiplies contiguous shards on square grids only,
and has its epilogs on one-dimensional layouts and of real numbers only. hostmp declares that it takes more. A call that
a library does not take directly is put together from calls that it takes, the cheapest way; `explain` names it.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from jaxmp._src.runtime.types import Shape
from jaxmp._src.spec import low_precision, precisions
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import INTEGERS, MatmulSpec, Pattern, extents

# Cost of a byte sent over a link, relative to a byte of local memory: an H200 reads and writes 4.8 TB/s and sends
# 0.45 TB/s each way over NVLink (NVIDIA H200 data sheet).
LINK_COST = 10.0


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a library takes beyond cuBLASMp's documented forms; csrc/cublasmp/api_table.h declares it per library."""

    all_reduce_any_transposition: bool = False
    all_reduce_c: bool = False
    grid_any_shape: bool = False
    grid_epilogs: bool = False
    complex_epilogs: bool = False
    fixed_reduction_order: bool = False


class Form(enum.StrEnum):
    """How a call reaches the library."""

    DIRECT = "direct"
    # Operands are copied, so that they are stored as the library wants them.
    TRANSPOSED_COPY = "transposed_copy"
    # An all-reduce is a reduce-scatter and an all-gather of its rows.
    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
    # Zeros are added along k.
    PADDED_K = "padded_k"
    # Each rank gathers what its part of d needs, and multiplies on its own.
    GATHERED = "gathered"
    # On a grid of one axis, one operand is gathered, and each rank multiplies on its own.
    GATHERED_OPERAND = "gathered_operand"
    # On a grid of one axis that shares the contraction, rows of d, or those of d transposed, are reduce-scattered.
    REDUCE_SCATTER = "reduce_scatter"
    # A local product is many calls of one shape.
    FIXED_SHAPE_TILES = "fixed_shape_tiles"
    # XLA adds C to the plain product and applies the epilog.
    SEPARATE_EPILOG = "separate_epilog"
    # XLA computes everything but, on CPUs of several processes, the local product.
    XLA = "xla"


def why_unsupported(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Why the library takes the call in no form, or the empty string."""
    has_tiles = is_tiled(spec, capabilities)  # which are local products, whatever the pattern is
    why = why_no_epilog(spec.regroup(pattern=Pattern.LOCAL) if has_tiles else spec, capabilities)
    if why and spec.fixed_reduction_order:
        return f"{why}, and XLA's would not keep determinism={spec.determinism!r}"
    if has_tiles:
        return ""
    is_free = spec.distributions or capabilities.grid_any_shape or along_one_axis(spec)
    if spec.group.pattern != Pattern.GRID or is_free:
        return ""
    nrow, ncol = spec.group.shape
    return "" if nrow == ncol else f"cuBLASMp multiplies contiguous shards on square grids only, not {nrow}x{ncol}"


def why_no_library(operands: tuple[np.dtype, ...]) -> str:
    """Why neither library multiplies operands of these types, or the empty string."""
    name = np.dtype(operands[0]).name if operands else ""
    return f"XLA alone multiplies {name}" if name in INTEGERS else ""


def why_too_long(spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> str:
    """Why hostmp does not multiply operands of these local shapes, or the empty string."""
    found = extents(spec, a_shape, b_shape)
    if max(found.m, found.n, found.k) < 2**31:
        return ""
    return f"hostmp counts in 32 bits, and the group's product has m={found.m}, n={found.n}, k={found.k}"


def takes_mixed(spec: MatmulSpec, wide: np.dtype, implementation: str) -> bool:
    """Whether a call takes a mixed pair as it is; elsewhere the narrow operand is converted to `wide` ahead of it."""
    return implementation == "host" and precisions.find(spec.precision, wide).name in ("32F", "32F_PEDANTIC")


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
    if spec.group.pattern == Pattern.GRID and not capabilities.grid_epilogs:
        return "cuBLASMp has no epilogs on 2-D grids"
    return ""


def is_tiled(spec: MatmulSpec, capabilities: Capabilities) -> bool:
    """Whether a level of determinism is kept by calls of one shape, for the library keeps none."""
    return spec.fixed_reduction_order and not capabilities.fixed_reduction_order


@dataclasses.dataclass(frozen=True)
class OneAxis:
    """What a grid of one row, or column, of ranks is: a local product with an operand (0 for a, 1 for b) gathered along
    the stored dimension `dimension`, or one whose results are summed and scattered along a dimension of d."""

    gathered: int | None
    dimension: int

    @property
    def scattered(self) -> int | None:
        """The dimension of d that is scattered, if one is."""
        return self.dimension if self.gathered is None else None


def along_one_axis(spec: MatmulSpec) -> OneAxis | None:
    """The grid as collectives over its one axis, where it is such and a collective does it."""
    group, product = spec.group, spec.contraction
    if group.pattern != Pattern.GRID or (group.row_axes and group.col_axes) or spec.distributions:
        return None
    role = next(iter(product.roles.values()))
    if role.is_contracted:
        return OneAxis(None, product.d.index(role.d))
    if role.d == role.b:
        return OneAxis(0, product.a.index(role.a))
    return OneAxis(1, product.b.index(role.b)) if role.d == role.a else None


def find_form(
    spec: MatmulSpec, a_shape: Shape, b_shape: Shape, itemsize: int, capabilities: Capabilities
) -> tuple[Form, str]:
    """(the cheapest form in which the library takes the call with these local shapes, why)."""
    if is_tiled(spec, capabilities):
        form = Form.FIXED_SHAPE_TILES if spec.group.pattern == Pattern.LOCAL else Form.GATHERED
        return form, "the library promises no order of sums"
    axis = None if capabilities.grid_any_shape else along_one_axis(spec)
    if axis and (found := _find_on_one_axis(spec, axis)):
        return found, "cuBLASMp multiplies contiguous shards on square grids only"
    if why := why_no_epilog(spec, capabilities):
        return Form.SEPARATE_EPILOG, why
    if spec.rule.derivative and extents(spec, a_shape, b_shape).k == 1:
        return Form.PADDED_K, "cuBLASMp multiplies by an activation's derivative only where k is not 1"
    if spec.group.pattern == Pattern.ALL_REDUCE:
        return _find_all_reduce(spec, a_shape, b_shape, itemsize, capabilities)
    return Form.DIRECT, ""


def whole_shapes(spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> tuple[Shape, Shape]:
    """The shapes of a and b where the grid's one axis has gathered its operand."""
    axis, shapes = along_one_axis(spec), [list(a_shape), list(b_shape)]
    if axis is not None and axis.gathered is not None:
        shapes[axis.gathered][axis.dimension] *= spec.group.nranks
    return tuple(shapes[0]), tuple(shapes[1])


def transposed_reduce_scatter(spec: MatmulSpec) -> MatmulSpec:
    """Of b and a, for D = a @ b^T whose columns are scattered: D^T = b @ a^T."""
    return spec.regroup(pattern=Pattern.REDUCE_SCATTER, row_axes=spec.group.col_axes, col_axes=()).replace(
        transpose_a=False, transpose_b=True, conjugate_a=spec.conjugate_b, conjugate_b=spec.conjugate_a
    )


def _find_on_one_axis(spec: MatmulSpec, axis: OneAxis) -> Form | None:
    """The form of a grid of one axis, or None where XLA has to apply the epilog first."""
    if axis.gathered is not None:
        return None if spec.rule.gradient else Form.GATHERED_OPERAND  # a local call would sum its own part
    has_rows = spec.has_c or spec.epilog != Epilog.NONE  # in the order of d, where the call computes it transposed
    return Form.SEPARATE_EPILOG if axis.dimension == 1 and has_rows else Form.REDUCE_SCATTER


def _find_all_reduce(
    spec: MatmulSpec, a_shape: Shape, b_shape: Shape, itemsize: int, capabilities: Capabilities
) -> tuple[Form, str]:
    # In JAX's order cuBLASMp's TN is a stored (m, k) and b stored (n, k).
    misplaced = [shape for shape, wrong in ((a_shape, spec.transpose_a), (b_shape, not spec.transpose_b)) if wrong]
    # If cuBLASMp adds C ahead of the reduction, one rank has to add it; if behind it, each has to.
    adds_c = spec.has_c and spec.beta != 0 and spec.group.nranks > 1 and not capabilities.all_reduce_c
    c_why = "no source says whether cuBLASMp adds c before or after the all-reduce"
    if not misplaced or capabilities.all_reduce_any_transposition:
        return (Form.SEPARATE_EPILOG, c_why) if adds_c else (Form.DIRECT, "")
    rows, cols = extents(spec, a_shape, b_shape).d
    p = spec.group.nranks
    if spec.epilog in (Epilog.BGRADA, Epilog.BGRADB):
        # A copy would be stored so that it cannot be summed.
        why = "cuBLASMp all-reduces no product whose operand it sums"
        return (Form.SEPARATE_EPILOG if rows % p else Form.REDUCE_SCATTER_ALL_GATHER), why
    copied = 2 * sum(math.prod(shape) for shape in misplaced) * itemsize
    gathered = rows * cols * (p - 1) // p * np.dtype(spec.out_dtype).itemsize
    why = "cuBLASMp all-reduces with a stored (m, k) and b stored (n, k) only"
    if rows % p or copied <= LINK_COST * gathered:
        if adds_c:  # the plain product is copied then
            return Form.SEPARATE_EPILOG, c_why
        return Form.TRANSPOSED_COPY, f"{why}; copying {copied} bytes is the cheapest way"
    return Form.REDUCE_SCATTER_ALL_GATHER, f"{why}; gathering {gathered} bytes beats copying {copied}"


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


def with_k(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, k: int) -> tuple[Shape, Shape]:
    """The local shapes of a and b as stored, with `k` for the extent along which they are contracted."""
    rows, _, _, cols = extents(spec, a_shape, b_shape).local
    return (k, rows) if spec.transpose_a else (rows, k), (cols, k) if spec.transpose_b else (k, cols)
