"""Types of 8 bits and fewer: which can be multiplied, how they are scaled, decoded and encoded, apart from any call.

Each scale belongs to a block of numbers and multiplies them; `Scaling` has the table of modes. In the logical layout,
as in `jax.nn.scaled_matmul`, an operand's blocks run along its last dimension. Names, meaning and memory layout:
cuBLAS documentation, "Narrow Precision Data Types Usage", and cublasmp.h's cublasMpMatmulMatrixScale_t.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxmp._src.core.spec.process_grid import round_up
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue
from jaxmp._src.platform.runtime.types import ArrayType

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOAT4 = "float4_e2m1fn"
SCALED = (*FLOAT8, FLOAT4)
INT8 = "int8"
# Types that hostmp decodes as it packs them if the other operand is wide; cuBLASMp takes no such pair.
NARROW = (
    *(INT8, "uint8", "int4", "uint4", *SCALED),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
WIDE = ("bfloat16", "float16", "float32")

NONE, SCALAR, OUTER_VEC = "none", "scalar_fp32", "outer_vec_fp32"
VEC16, VEC32, VEC128, BLK128 = "vec16_ue4m3", "vec32_ue8m0", "vec128_fp32", "blk128x128_fp32"
BLOCK = {VEC16: 16, VEC32: 32, VEC128: 128, BLK128: 128}
# Types that pack two numbers into a byte.
HALVES = (FLOAT4, "int4", "uint4")
_SCALE_DTYPE = {VEC16: "float8_e4m3fn", VEC32: "float8_e8m0fnu"}


Scale = jax.Array | np.ndarray | np.generic


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["a", "b", "c", "d", "aux"],
    meta_fields=["result_amax", "aux_dtype", "aux_amax"],
)
@dataclasses.dataclass(frozen=True)
class Scaling:
    """The scales of float8, float4 and int8 operands and results, and which amaxes to return too: a pytree.

    The mode of a scale follows from its shape and dtype. For an operand that is stored as (rows, k):

        ()                    float32          one scale
        (rows,)               float32          one a row (both a and b)
        (rows, k/32)          float8_e8m0fnu   MXFP8 (both a and b)
        (rows, k/16)          float8_e4m3fn    NVFP4 (both a and b)
        (rows, k/128)         float32          1 x 128 blocks
        (rows/128, k/128)     float32          128 x 128 blocks; the other operand has 1 x 128 blocks

    int8 operands, stored either way, take the first two modes, which may differ for a and b. Rows then mean m of a and
    n of b. Sums are exact for k below 131072, else modulo 2^32; they become float32 if scales multiply them.

    Args:
      a, b: scales of the operands, sharded like them (a scalar is the same everywhere). None is a scale of 1.
      c: scalar float32 that multiplies c, with tensor-wide scales only.
      d: scalar float32 that multiplies a float8 result (tensor-wide scales) or a float4 result.
      aux: scalar float32 that multiplies a float8 gelu_aux (see `aux_dtype`).
      result_amax: also return "result_amax", the largest absolute value of a float8 result before scaling.
      aux_dtype: type of gelu_aux: None for the default, or float8_e4m3fn.
      aux_amax: also return "gelu_aux_amax", the largest absolute value of a float8 gelu_aux before scaling.

    docs/low-precision.md has the details. Source: cuBLAS documentation, "Narrow Precision Data Types Usage".
    """

    a: Scale | None = None
    b: Scale | None = None
    c: Scale | None = None
    d: Scale | None = None
    aux: Scale | None = None
    result_amax: bool = False
    aux_dtype: DTypeLike | None = None
    aux_amax: bool = False


def scale_dtype(mode: str) -> np.dtype:
    return np.dtype(_SCALE_DTYPE.get(mode, "float32"))


@functools.cache  # the name of a type takes microseconds, and eager calls ask often
def is_low_precision(dtype: DTypeLike) -> bool:
    return np.dtype(dtype).name in (*SCALED, INT8)


@functools.cache
def is_scaled(dtype: DTypeLike) -> bool:
    """True for the floats in `SCALED`, of 8 and 4 bits; False for int8, which takes scales only if they are given."""
    return np.dtype(dtype).name in SCALED


@functools.cache
def is_mixed(a: DTypeLike, b: DTypeLike) -> bool:
    """True if one type is in `NARROW` (8 bits or fewer) and the other in `WIDE` (floats of 16 and 32 bits)."""
    return _is_narrow_with_wide(a, b) or _is_narrow_with_wide(b, a)


@functools.cache
def operand_type(a: DTypeLike, b: DTypeLike) -> np.dtype:
    """Returns the type of the multiplication: the wide type of a mixed pair, else the type of a."""
    return np.dtype(b if _is_narrow_with_wide(a, b) else a)


def _is_narrow_with_wide(a: DTypeLike, b: DTypeLike) -> bool:
    return np.dtype(a).name in NARROW and np.dtype(b).name in WIDE


def is_of_tensor(mode: str) -> bool:
    """True if `mode` is no scale or one scale for the whole operand."""
    return mode in (NONE, SCALAR)


def widened(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a mixed pair (`is_mixed`) with the narrow operand converted to the wide type, for products that take no
    such pair. Other pairs are returned unchanged."""
    wide = operand_type(a.dtype, b.dtype)
    if not is_mixed(a.dtype, b.dtype):
        return a, b
    return (a, b.astype(wide)) if a.dtype == wide else (a.astype(wide), b)


def result_dtypes(a: DTypeLike, b: DTypeLike, has_scaling: bool = False) -> tuple[str, ...]:
    """Returns the names of the types that D may have, for two types of 8 bits or fewer. float8 pairs and float4:
    `WIDE`, then float4 for float4, float8_e4m3fn and any float8 type of an operand for float8. int8 pairs: `WIDE` with
    scaling, else int32. Any other pair, mixed ones and two float8_e5m2 too: ()."""
    names = {np.dtype(a).name, np.dtype(b).name}
    if names == {INT8}:
        return WIDE if has_scaling else ("int32",)
    if names == {FLOAT4}:
        return (*WIDE, FLOAT4)
    if names <= set(FLOAT8) and "float8_e4m3fn" in names:
        return (*WIDE, *(name for name in FLOAT8 if name == "float8_e4m3fn" or name in names))
    return ()


# Scales --------------------------------------------------------------------------------------------------------


def find_mode(argument: str, scale: ArrayType | None, x: ArrayType, *, is_k_first: bool | None = None) -> str:
    """Returns the mode of `scale` for x, (..., rows, k), by the scale's shape and dtype; NONE if `scale` is None.
    `is_k_first` is given for int8 operands, which then take SCALAR and OUTER_VEC only: if True, x is (..., k, rows).
    Raises TypeError if `scale` is no array. Raises ValueError if no mode fits, or a float4 x has no scale. `argument`
    names the scale in messages."""
    shape, dtype = tuple(x.shape), x.dtype
    is_float4, k = np.dtype(dtype).name == FLOAT4, shape[-1]
    if scale is None:
        if is_float4:
            raise InvalidValue(
                f"{argument} is missing; {FLOAT4} operands need one a block of 16, shape "
                f"{(*shape[:-1], k // 16)} of float8_e4m3fn"
            )
        return NONE
    if not hasattr(scale, "shape") or not hasattr(scale, "dtype"):
        raise InvalidType(
            f"{argument} must be an array, got {type(scale).__name__}; convert it with jnp.asarray(..., jnp.float32)"
        )
    options = {
        SCALAR: (),
        OUTER_VEC: shape[:-1],
        VEC128: (*shape[:-1], k // 128),
        BLK128: (*shape[:-2], -(-shape[-2] // 128), k // 128),
        VEC32: (*shape[:-1], k // 32),
    }
    if len(shape) > 2:
        del options[BLK128]  # rows fold, blocks of rows do not
    if is_float4:
        options = {VEC16: (*shape[:-1], k // 16)}
    if np.dtype(dtype).name == INT8 and is_k_first is not None:
        options = {SCALAR: (), OUTER_VEC: (*shape[:-2], shape[-1]) if is_k_first else shape[:-1]}
    blocked = {BLOCK[mode] for mode in options if mode in BLOCK and k % BLOCK[mode]}
    options = {mode: wanted for mode, wanted in options.items() if BLOCK.get(mode) not in blocked}
    for mode, wanted in options.items():
        if scale.dtype.name == _SCALE_DTYPE.get(mode, "float32") and tuple(scale.shape) == wanted:
            return mode
    texts = [f"{wanted} of {_SCALE_DTYPE.get(mode, 'float32')}" for mode, wanted in options.items()]
    rest = f"no scale of blocks of {' or '.join(map(str, sorted(blocked)))}, which do not divide its k={k}"
    raise InvalidValue(
        f"{argument} has shape {tuple(scale.shape)} and dtype {scale.dtype.name}; an operand of shape "
        f"{shape} and dtype {np.dtype(dtype).name} takes {', '.join([*texts, rest] if blocked else texts)}"
    )


def check_units(dtype: DTypeLike, scale_mode: str, other_mode: str, extents: dict[str, int]) -> None:
    """Raises ValueError unless `extents`, {"m" or "n" or "k": extent on each device}, are multiples of their unit, 16
    in most modes. VEC16 and VEC32 need multiples of 128 for m and n, and multiples of 64 (VEC16) or 128 (VEC32) for k.
    k is a multiple of 128 too if either operand has blocks of 128. `other_mode`: the other operand's. `dtype` is for
    the message only."""
    outer, k = {VEC16: (128, 64), VEC32: (128, 128)}.get(scale_mode, (16, 16))
    k = 128 if 128 in (BLOCK.get(scale_mode), BLOCK.get(other_mode)) else k
    for what, extent in extents.items():
        unit = k if what == "k" else outer
        if extent % unit:
            kind = f" with scales of {scale_mode}" if scale_mode not in (NONE, SCALAR) else ""
            raise InvalidValue(
                f"{what} must be a multiple of {unit} on each device for {np.dtype(dtype).name}{kind}, got "
                f"{extent}; pad it to {round_up(extent, unit)}"
            )


# Decoding and encoding -----------------------------------------------------------------------------------------


def expand(scale: jax.Array, mode: str, shape: tuple[int, ...]) -> jax.Array:
    """Returns a scale in float32 in a shape that broadcasts with `shape`, (..., rows, k): scales of blocks have that
    shape, scales of rows are (..., rows, 1), and a scalar stays one."""
    scale = scale.astype(jnp.float32)
    if mode == SCALAR:
        return scale
    if mode == OUTER_VEC:
        return scale[..., None]
    full = repeat(scale, BLOCK[mode])
    return repeat(full.mT, 128).mT[..., : shape[-2], :] if mode == BLK128 else full


def repeat(x: jax.Array, count: int) -> jax.Array:
    """Repeats each element of the last dimension: `jnp.repeat`, which does not support explicit axes there."""
    return jnp.broadcast_to(x[..., None], (*x.shape, count)).reshape(*x.shape[:-1], x.shape[-1] * count)


def dequantize(
    x: jax.Array, scale: jax.Array | None, mode: str, dtype: DTypeLike, *, is_k_first: bool = False
) -> jax.Array:
    """Returns x times its scales in `dtype`, multiplied in float32 or wider; with scale None or mode NONE only converts
    x. `is_k_first`: x is (..., k, rows)."""
    if scale is None or mode == NONE:
        return x.astype(dtype)
    if is_k_first:
        return dequantize(x.mT, scale, mode, dtype).mT
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))
    if mode == VEC32:  # 2^-127 is no normal number, and XLA takes it for 0 on CPUs
        is_least = lax.bitcast_convert_type(scale, jnp.uint8) == 0
        wide = wide * expand(jnp.where(is_least, 0.5, 1.0), mode, x.shape)
        scale = jnp.where(is_least, 2.0**-126, scale.astype(jnp.float32))
    return (wide * expand(scale, mode, x.shape)).astype(dtype)


def encode(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds x to a type of 8 bits or fewer, and clips to the largest finite number, as cuBLASLt does (CUDA's
    SATFINITE). int8 numbers are at least -127, and NaN is 0 in int8."""
    most = largest(dtype)
    if np.dtype(dtype).name == INT8:
        x = jnp.where(jnp.isnan(x), 0, jnp.round(x))
    return jnp.clip(x, -most, most).astype(dtype)


def largest(dtype: DTypeLike) -> float:
    """Returns the largest number that quantizers use: 127 for int8, because -128 has no opposite."""
    return 127.0 if np.dtype(dtype).name == INT8 else float(jnp.finfo(dtype).max)


def mx_scale(amax: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the float8_e8m0fnu scale of each block with the largest absolute value `amax`: the smallest power of two
    that is not below `amax` / (the largest number of `dtype`), at least 2^-127, also for an amax of 0. An infinite or
    NaN amax gives NaN. cuBLAS documentation, "1D Block Quantization"; JAX's `scaled_matmul` quantization."""
    amax = amax.astype(jnp.float32)
    is_small = amax < 2.0**-64  # the quotient may be no normal number, which XLA takes for 0 on CPUs
    quotient = jnp.where(is_small, amax * 2.0**64, amax) / float(jnp.finfo(dtype).max)
    bits = lax.bitcast_convert_type(quotient, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    goes_up = (mantissa > 0) & (exponent < 254)
    exponent = exponent + goes_up.astype(jnp.int32) - jnp.where(is_small, 64, 0)
    return lax.bitcast_convert_type(jnp.maximum(exponent, 0).astype(jnp.uint8), jnp.float8_e8m0fnu)


def blocks(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def amax(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns the largest absolute value along `axis`, or of the whole array. It is 0 for no elements, and NaN if an
    element is NaN: XLA's maximum loses NaN on CPUs for more than a few thousand elements."""
    return jnp.where(jnp.any(jnp.isnan(x), axis), jnp.nan, jnp.max(jnp.abs(x), axis, initial=0.0))


def block_amax(x: jax.Array, size: int) -> jax.Array:
    return amax(blocks(x, size), -1)


def encode_blocks(x: jax.Array, mode: str, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Quantizes x, float32 (..., k), as cuBLASLt does. Returns (x / scales in `dtype`, in x's shape; the scales of
    blocks, (..., k / block)) for VEC32 or VEC16. A block with a VEC16 scale of 0 becomes 0."""
    amax = block_amax(x, BLOCK[mode])
    if mode == VEC32:
        scales = mx_scale(amax, dtype)
        exponent = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
        # 2^(127 - e), put together from its bits: the reciprocal of the smallest scale is not subnormal, the scale is.
        inverse = lax.bitcast_convert_type((254 - jnp.minimum(exponent, 253)) << 23, jnp.float32)
    else:
        scales = encode(amax / float(jnp.finfo(dtype).max), jnp.float8_e4m3fn)
        inverse = jnp.where(scales == 0, 0.0, 1.0 / scales.astype(jnp.float32))
    scaled = blocks(x, BLOCK[mode]) * inverse[..., None]
    return encode(scaled.reshape(x.shape), dtype), scales


@functools.cache
def is_narrow_float(dtype: DTypeLike) -> bool:
    """True if numbers of this type are floats of 8 bits or fewer."""
    return np.dtype(dtype).name in NARROW and jnp.issubdtype(dtype, jnp.floating)
