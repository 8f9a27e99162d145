"""Types of 8 bits and fewer: which go together, how they are scaled, decoded and encoded; knows nothing of calls.

A scale multiplies what it stands beside. In the logical layout, which is `jax.nn.scaled_matmul`'s, the blocks of an
operand run along its last dimension:

    ()                    float32          scalar_fp32       one scale
    (rows,)               float32          outer_vec_fp32    one a row
    (rows, k/32)          float8_e8m0fnu   vec32_ue8m0       MXFP8
    (rows, k/16)          float8_e4m3fn    vec16_ue4m3       NVFP4
    (rows, k/128)         float32          vec128_fp32
    (rows/128, k/128)     float32          blk128x128_fp32

Names, meaning and memory layout: cuBLAS documentation, "Narrow Precision Data Types Usage", and cublasmp.h's
cublasMpMatmulMatrixScale_t.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._layout import round_up

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOAT4 = "float4_e2m1fn"
SCALED = (*FLOAT8, FLOAT4)
INT8 = "int8"

NONE, SCALAR, OUTER_VEC = "none", "scalar_fp32", "outer_vec_fp32"
VEC16, VEC32, VEC128, BLK128 = "vec16_ue4m3", "vec32_ue8m0", "vec128_fp32", "blk128x128_fp32"
BLOCK = {VEC16: 16, VEC32: 32, VEC128: 128, BLK128: 128}
_SCALE_DTYPE = {VEC16: "float8_e4m3fn", VEC32: "float8_e8m0fnu"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """What the operands of fp8 and fp4 are multiplied with, and what the result is before it is stored.

    The mode follows from shape and dtype; `rows` and `k` are the operand's own extents as stored, (rows, k):

        ()                    float32          one scale
        (rows,)               float32          one a row (a and b alike)
        (rows, k/32)          float8_e8m0fnu   MXFP8 (a and b alike)
        (rows, k/16)          float8_e4m3fn    NVFP4 (a and b alike)
        (rows, k/128)         float32          1 x 128 blocks
        (rows/128, k/128)     float32          128 x 128 blocks, beside 1 x 128 blocks of the other operand

    Args:
      a, b: of the operands, sharded like them (a scalar is the same everywhere). None is a scale of 1.
      c: scalar float32, for tensor-wide scales only.
      d: scalar float32, for a result of fp8 (tensor-wide scales) or fp4: the result is multiplied with it.
      aux: scalar float32, for a gelu_aux of fp8 (`aux_dtype=`): it is multiplied with it.

    Source: cuBLAS documentation, "Narrow Precision Data Types Usage".
    """

    a: Any = None
    b: Any = None
    c: Any = None
    d: Any = None
    aux: Any = None


def scale_dtype(mode: str) -> np.dtype:
    return np.dtype(_SCALE_DTYPE.get(mode, "float32"))


def is_narrow(dtype) -> bool:
    return np.dtype(dtype).name in (*SCALED, INT8)


def is_scaled(dtype) -> bool:
    """Whether numbers of this type take scales: fp8 and fp4."""
    return np.dtype(dtype).name in SCALED


# What goes together --------------------------------------------------------------------------------------------


def result_dtypes(a, b) -> tuple[str, ...]:
    """Types of D for operands of types a and b; empty where the two do not go together."""
    names = {np.dtype(a).name, np.dtype(b).name}
    if names == {INT8}:
        return ("int32",)
    wide = ("bfloat16", "float16", "float32")
    if names == {FLOAT4}:
        return (*wide, FLOAT4)
    if names <= set(FLOAT8) and "float8_e4m3fn" in names:
        return (*wide, *(name for name in FLOAT8 if name == "float8_e4m3fn" or name in names))
    return ()


def resolve_dtypes(name: str, a, b, preferred) -> np.dtype:
    """Type of D for operands of which one at least is narrow; they are never promoted."""
    allowed = result_dtypes(a.dtype, b.dtype)
    if not allowed:
        raise NotImplementedError(
            f"{name}: a is {a.dtype.name} and b is {b.dtype.name}; float8 goes with float8 (float8_e5m2 not with "
            "itself), float4_e2m1fn and int8 with their own type: convert one of them"
        )
    if preferred is None and len(allowed) == 1:
        return np.dtype(allowed[0])
    if preferred is None:
        raise TypeError(
            f"{name}: operands of {a.dtype.name} and {b.dtype.name} need preferred_element_type; "
            f"available: {', '.join(allowed)}"
        )
    out = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
    if out.name not in allowed:
        raise NotImplementedError(
            f"{name}: preferred_element_type {out.name} is not available for {a.dtype.name} and {b.dtype.name} "
            f"operands; available: {', '.join(allowed)}"
        )
    return out


def check_transpositions(name: str, dtype, transpose_a: bool, transpose_b: bool) -> None:
    if is_scaled(dtype) and (transpose_a or not transpose_b):
        raise ValueError(
            f"{name}: {np.dtype(dtype).name} operands are multiplied along their last dimensions only, a stored (m, k) "
            f"and b stored (n, k): pass transpose_a=False and transpose_b=True, got transpose_a={transpose_a} and "
            f"transpose_b={transpose_b}"
        )


def side_dtypes(name: str, out, c) -> tuple[np.dtype, np.dtype]:
    """(type of C, type of the bias) beside a D of type `out` from narrow operands."""
    out = np.dtype(out)
    if not is_scaled(out):
        return out, np.dtype(jnp.bfloat16) if out == np.float32 else out
    if c is None:
        return np.dtype(np.float16), np.dtype(np.float16)
    if c.dtype.name not in ("float16", "bfloat16"):
        raise TypeError(f"{name}: c has dtype {c.dtype} but a result of {out.name} takes c in float16 or bfloat16")
    return c.dtype, c.dtype


def check_bias(name: str, bias, dtype, out) -> None:
    have = getattr(bias, "dtype", None)
    if have is not None and np.dtype(have) != np.dtype(dtype):
        raise TypeError(
            f"{name}: bias has dtype {have}, but a result of {np.dtype(out).name} from 8-bit operands takes it in "
            f"{np.dtype(dtype).name}; convert it"
        )


_EPILOGS = ("NONE", "BIAS", "RELU", "RELU_BIAS", "RELU_AUX", "RELU_AUX_BIAS", "DRELU")
_GELU_AUX = ("GELU_AUX", "GELU_AUX_BIAS")


def check_epilog(name: str, epilog_name: str, dtype, out) -> None:
    """Raise NotImplementedError for what cuBLAS does not have for 8-bit operands."""
    allowed = ("NONE",) if np.dtype(dtype).name == INT8 else _EPILOGS
    if is_scaled(dtype) and np.dtype(out).name != FLOAT4:
        allowed = (*allowed, *_GELU_AUX)
    if epilog_name not in allowed:
        raise NotImplementedError(
            f"{name}: epilog {epilog_name} is not available for {np.dtype(dtype).name} operands and a result of "
            f"{np.dtype(out).name}; available: {', '.join(allowed)}"
        )


def resolve_aux(name: str, epilog_name: str, dtypes, c, scale_a: str, given: dict[str, Any]) -> np.dtype | None:
    """Type of gelu_aux, or None where the epilog has none.

    It has the type of d, or where d is float8 that of c (float16 without c), as nvmath-python has it; or float8_e4m3fn,
    with a scale and its largest value, where cuBLAS has that (its documentation, cublasLtMatmulDescAttributes_t).
    `dtypes` are those of a, b and d; `given` what the user said of the aux, by argument.
    """
    said = [argument for argument, value in given.items() if value is not None and value is not False]
    if epilog_name not in _GELU_AUX:
        if said:
            raise ValueError(
                f"{name}: {said[0]} is of gelu_aux, but epilog {epilog_name} has none; drop it, or take "
                f"{' or '.join(_GELU_AUX)}"
            )
        return None
    a, b, out = (np.dtype(dtype).name for dtype in dtypes)
    default = np.dtype(c) if out in FLOAT8 else np.dtype(out)
    asked = default if given["aux_dtype"] is None else np.dtype(jax.dtypes.canonicalize_dtype(given["aux_dtype"]))
    is_e4m3 = {a, b, out} == {"float8_e4m3fn"} and np.dtype(c) == np.float16 and scale_a in (NONE, SCALAR)
    allowed = (default.name, "float8_e4m3fn") if is_e4m3 and epilog_name == "GELU_AUX" else (default.name,)
    if asked.name not in allowed:
        raise NotImplementedError(
            f"{name}: aux_dtype {asked.name} is not available for epilog {epilog_name} with {a} and {b} operands, c of "
            f"{np.dtype(c).name} and a result of {out}; available: {', '.join(allowed)} (float8_e4m3fn goes with "
            "GELU_AUX, operands and a result of float8_e4m3fn, tensor-wide scales, and c of float16 or none)"
        )
    rest = [argument for argument in said if argument != "aux_dtype"]
    if rest and asked.name not in FLOAT8:
        raise ValueError(
            f"{name}: {rest[0]} is of a gelu_aux of float8, but it is {asked.name} here; drop it, or pass "
            "aux_dtype=jnp.float8_e4m3fn"
        )
    return asked


# Scales --------------------------------------------------------------------------------------------------------


def find_mode(name: str, argument: str, scale, shape: tuple[int, ...], dtype) -> str:
    """The mode of an operand's scale from its shape and dtype; `shape` is the operand's, (..., rows, k)."""
    is_float4, k = np.dtype(dtype).name == FLOAT4, shape[-1]
    if scale is None:
        if is_float4:
            raise ValueError(
                f"{name}: scales.{argument} is missing; {FLOAT4} operands need one a block of 16, shape "
                f"{(*shape[:-1], k // 16)} of float8_e4m3fn"
            )
        return NONE
    if not hasattr(scale, "shape") or not hasattr(scale, "dtype"):
        raise TypeError(f"{name}: scales.{argument} must be an array, got {type(scale).__name__}")
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
    blocked = {BLOCK[mode] for mode in options if mode in BLOCK and k % BLOCK[mode]}
    options = {mode: wanted for mode, wanted in options.items() if BLOCK.get(mode) not in blocked}
    for mode, wanted in options.items():
        if scale.dtype.name == _SCALE_DTYPE.get(mode, "float32") and tuple(scale.shape) == wanted:
            return mode
    texts = [f"{wanted} of {_SCALE_DTYPE.get(mode, 'float32')}" for mode, wanted in options.items()]
    rest = f"no scale of blocks of {' or '.join(map(str, sorted(blocked)))}, which do not divide its k={k}"
    raise ValueError(
        f"{name}: scales.{argument} has shape {tuple(scale.shape)} and dtype {scale.dtype.name}; an operand of shape "
        f"{shape} and dtype {np.dtype(dtype).name} takes {', '.join([*texts, rest] if blocked else texts)}"
    )


def check_scalar(name: str, argument: str, scale) -> str:
    if scale is None:
        return NONE
    if getattr(scale, "shape", None) != () or getattr(scale, "dtype", None) != np.float32:
        got = f"shape {scale.shape} of {scale.dtype}" if hasattr(scale, "dtype") else type(scale).__name__
        raise ValueError(f"{name}: scales.{argument} must be a float32 scalar of shape (), got {got}")
    return SCALAR


def check_modes(name: str, modes: dict[str, str], out) -> None:
    """Raise where the modes of a, b, c and d do not go together."""
    a, b = modes["a"], modes["b"]
    tensorwide = {a, b} <= {NONE, SCALAR}
    both_128 = {a, b} == {VEC128} or {a, b} == {VEC128, BLK128}
    if not tensorwide and not both_128 and (a != b or a == BLK128):
        raise NotImplementedError(
            f"{name}: scales.a is {a} and scales.b is {b}, which do not go together; both must be of one mode, or "
            "(rows, k/128) with (rows, k/128) or (rows/128, k/128)"
        )
    out_is_narrow = is_narrow(out)
    if out_is_narrow and not tensorwide and a not in (VEC16, VEC32):
        raise NotImplementedError(
            f"{name}: with scales of {a} the result must be bfloat16, float16 or float32, got {np.dtype(out).name}"
        )
    if modes["c"] != NONE and not tensorwide:
        raise ValueError(f"{name}: scales.c goes with tensor-wide scales only, scales.a is {a}; multiply beta with it")
    if modes["d"] != NONE and not (out_is_narrow and (tensorwide or a == VEC16)):
        raise ValueError(
            f"{name}: scales.d scales a result of float8 with tensor-wide scales, or of float4; the result is "
            f"{np.dtype(out).name} and scales.a is {a}: drop it" + (", blocks get their own" if a == VEC32 else "")
        )


def check_units(name: str, dtype, scale_mode: str, other_mode: str, extents: dict[str, int]) -> None:
    """Raise unless m, n and k on each device are whole blocks and rows begin at multiples of 16 bytes."""
    outer, k = {VEC16: (128, 64), VEC32: (128, 128)}.get(scale_mode, (16, 16))
    k = 128 if 128 in (BLOCK.get(scale_mode), BLOCK.get(other_mode)) else k
    for what, extent in extents.items():
        unit = k if what == "k" else outer
        if extent % unit:
            kind = f" with scales of {scale_mode}" if scale_mode not in (NONE, SCALAR) else ""
            raise ValueError(
                f"{name}: {what} must be a multiple of {unit} on each device for {np.dtype(dtype).name}{kind}, got "
                f"{extent}; pad it to {round_up(extent, unit)}"
            )


# Decoding and encoding -----------------------------------------------------------------------------------------


def expand(scale, mode: str, shape: tuple[int, ...]):
    """The scale of every element of a (..., rows, k) operand, in float32, or something that broadcasts to it."""
    scale = scale.astype(jnp.float32)
    if mode == SCALAR:
        return scale
    if mode == OUTER_VEC:
        return scale[..., None]
    full = jnp.repeat(scale, BLOCK[mode], axis=-1, total_repeat_length=shape[-1])
    return jnp.repeat(full, 128, axis=-2)[..., : shape[-2], :] if mode == BLK128 else full


def dequantize(x, scale, mode: str, dtype):
    """x times its scales, in `dtype`."""
    wide = x.astype(dtype)
    return wide if mode == NONE else (wide * expand(scale, mode, x.shape).astype(dtype))


def encode(x, dtype):
    """x in an fp8 or fp4 type, saturating: CUDA's SATFINITE, as cuBLASLt stores. `astype` gives NaN or infinity."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def mx_scale(amax, dtype):
    """float8_e8m0fnu: the power of two from `amax` divided by the type's largest number on; cuBLAS documentation,
    "1D Block Quantization", and JAX's `scaled_matmul` quantization."""
    bits = lax.bitcast_convert_type((amax / float(jnp.finfo(dtype).max)).astype(jnp.float32), jnp.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    goes_up = jnp.where(exponent == 0, mantissa > 0x400000, (mantissa > 0) & (exponent < 254))
    return lax.bitcast_convert_type((exponent + goes_up.astype(jnp.uint32)).astype(jnp.uint8), jnp.float8_e8m0fnu)


def blocks(x, size: int):
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def block_amax(x, size: int):
    return jnp.max(jnp.abs(blocks(x, size)), axis=-1)


def encode_blocks(x, mode: str, dtype):
    """(x in blocks of `dtype`, their scales), as cuBLASLt quantizes a result; x is float32."""
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


# Bytes ---------------------------------------------------------------------------------------------------------


def as_bytes(x):
    """The bits of 8-bit numbers as uint8; of 4-bit ones, two in a byte, the first in the low half."""
    if np.dtype(x.dtype).name != FLOAT4:
        return x if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8)
    halves = blocks(lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8), 2)
    return halves[..., 0] | halves[..., 1] << 4


def from_bytes(x, dtype):
    """The inverse of `as_bytes`."""
    if np.dtype(dtype).name != FLOAT4:
        return x if np.dtype(dtype) == np.uint8 else lax.bitcast_convert_type(x, dtype)
    halves = jnp.stack([x & 0xF, x >> 4], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
    return lax.bitcast_convert_type(halves.astype(jnp.uint4), dtype)


def as_moved(x):
    """What a collective moves of `x`: of 8 bits and fewer its bytes, which every platform moves."""
    return as_bytes(x) if x.dtype.itemsize == 1 else x


def from_moved(x, dtype):
    """The inverse of `as_moved`."""
    return from_bytes(x, dtype) if np.dtype(dtype).itemsize == 1 else x


def swizzle(scales):
    """Scales of blocks (rows, blocks) in cuBLASLt's order, flat: tiles of 128 x 4 one after the other along the blocks,
    each in 32 lines of 4 x 4: byte 16 (r % 32) + 4 (r / 32) + c of a tile is its row r, column c. Padded with 0."""
    rows, cols = scales.shape
    padded = jnp.pad(scales, ((0, -rows % 128), (0, -cols % 4)))
    tiles = padded.reshape(-(-rows // 128), 4, 32, -(-cols // 4), 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat, rows: int, cols: int):
    """The inverse of `swizzle`, without the padding."""
    tiles = flat.reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(round_up(rows, 128), round_up(cols, 4))[:rows, :cols]


def for_library(scale, mode: str):
    """A logical scale of one device's operand as cuBLASLt reads it."""
    if mode in (VEC16, VEC32):
        return swizzle(as_bytes(scale))
    if mode == VEC128:  # row-fastest
        return scale.T.reshape(-1)
    if mode == BLK128:  # k-fastest, padded to a multiple of 4
        return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % 4))).reshape(-1)
    return scale.reshape(-1)
