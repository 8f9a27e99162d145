"""Converts to int8, float8 and float4 and back: quantizers for every mode of `jaxmp.Scaling`, delayed scaling, layouts.

A quantizer returns `(q, scale)` with x = q * scale up to rounding, ready for `matmul(..., scaling=Scaling(a=scale))`.
Blocks run along the last dimension, as in `jax.nn.scaled_matmul`. int8 takes `tensor` and `rows`. JAX gives a cotangent
of q the type of q, which makes large ones NaN and small ones 0: to train, write the derivative yourself
(examples/05_fp8_linear.py). Quantizers compute in float32. They raise TypeError for complex numbers, and for int8 in
blocks; ValueError if the blocks do not divide k, or x has too few dimensions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.core.spec import low_precision, wire
from jaxmp._src.core.spec.low_precision import Scale
from jaxmp._src.core.spec.options import Array
from jaxmp._src.core.spec.process_grid import round_up
from jaxmp._src.core.spec.refusal import naming

__all__ = [
    "amax",
    "blk128",
    "delayed_scale",
    "dequantize",
    "encode",
    "expand",
    "largest",
    "mxfp8",
    "nvfp4",
    "nvfp4_global_scale",
    "pack_fp4",
    "rows",
    "scale_for",
    "scale_offset",
    "swizzle",
    "tensor",
    "unpack_fp4",
    "unswizzle",
    "update_history",
    "vec128",
]

_E4M3 = jnp.float8_e4m3fn


def largest(dtype: DTypeLike) -> float:
    """Returns the largest number that a quantizer uses: 127 for int8, else the largest finite number of the type, for
    example 448 (float8_e4m3fn), 57344 (float8_e5m2), 6 (float4_e2m1fn).

    Raises TypeError unless `dtype` is int8, a float8 or a float4 type; also for e8m0, which is for scales only.
    """
    name = jnp.dtype(dtype).name
    if name == "int8" or (name.startswith(("float8", "float4")) and name != "float8_e8m0fnu"):
        return low_precision.largest(dtype)
    why = ", which is for scales only" if name == "float8_e8m0fnu" else ""
    raise TypeError(f"quantize: dtype must be int8, a float8 or a float4 type, got {name}{why}")


def amax(x: Array) -> jax.Array:
    """Returns the largest absolute value of `x`, a float32 scalar; NaN if `x` has one."""
    return low_precision.amax(_wide(x))


def scale_for(amax: ArrayLike, dtype: DTypeLike = _E4M3, *, margin: int = 0) -> jax.Array:
    """Returns the float32 scale, of amax's shape, that makes amax / scale `2**-margin` times `largest(dtype)`.

    It is 1 if amax is 0 or not finite, and otherwise a normal number (TransformerEngine's rules): a smaller one, which
    XLA treats as 0 on CPUs, becomes 2^-126, and a larger one the largest float32. Raises TypeError as `largest`.
    """
    amax = jnp.asarray(amax, jnp.float32)
    return _usable(amax * (2.0**margin / largest(dtype)), amax)


def encode(x: Array, dtype: DTypeLike = _E4M3) -> jax.Array:
    """Rounds `x` to `dtype`, to the nearest number, ties to even, and saturates.

    `x.astype(dtype)` gives NaN or infinity for large numbers, and truncates for int8. int8 has no NaN: NaN becomes 0.
    Raises TypeError for complex numbers, and for a dtype that `largest` refuses.
    """
    largest(dtype)
    x = jnp.asarray(x)
    _check_real(x)
    return low_precision.encode(x, dtype)


def tensor(x: Array, dtype: DTypeLike = _E4M3, *, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns (q, scale) with one float32 scalar: the given `scale`, as in delayed scaling, or `scale_for(amax(x))`.

    >>> import jax.numpy as jnp, jaxmp
    >>> q, scale = jaxmp.quantize.tensor(jnp.array([1.0, -2.0, 0.5]))
    >>> (q.astype(jnp.float32) * scale).tolist()
    [1.0, -2.0, 0.5]
    """
    largest(dtype)  # raises for other types
    scale = scale_for(amax(x), dtype) if scale is None else scale
    return low_precision.encode(_over(_wide(x), scale), dtype), scale


def update_history(history: jax.Array, amax: Array) -> jax.Array:
    """Returns an amax history (length,), newest first, with `amax` added in front and the oldest dropped."""
    return jnp.roll(history, 1).at[0].set(amax.astype(history.dtype))


def delayed_scale(history: Array, dtype: DTypeLike = _E4M3, *, margin: int = 0) -> jax.Array:
    """Returns the next step's scale from the largest of past absolute maxima; Micikevicius et al., "FP8 Formats for
    Deep Learning" (2022), as in TransformerEngine's DelayedScaling."""
    return scale_for(jnp.max(history), dtype, margin=margin)


def rows(x: Array, dtype: DTypeLike = _E4M3) -> tuple[jax.Array, jax.Array]:
    """Returns (q, scale (rows,)) of x (rows, k): one float32 scale for each row. x may have more dimensions in front.

    For the columns of w (k, n) in int8: `q, scale = rows(w.T, jnp.int8)`, and `q.T` is the operand.
    """
    if not jnp.ndim(x):
        raise ValueError("quantize.rows: x must have rows, got a scalar")
    scale = scale_for(low_precision.amax(_wide(x), -1), dtype)
    return low_precision.encode(_over(_wide(x), scale[..., None]), dtype), scale


def vec128(x: Array, dtype: DTypeLike = _E4M3) -> tuple[jax.Array, jax.Array]:
    """Returns (q, scale (rows, k/128)) of x (rows, k): one float32 scale for 128 adjacent elements of a row. x may have
    more dimensions in front, also for `mxfp8` and `nvfp4`."""
    _check_blocks("vec128", x, 128, dtype=dtype)
    scale = scale_for(low_precision.block_amax(_wide(x), 128), dtype)
    divisor = low_precision.expand(scale, low_precision.VEC128, x.shape)
    return low_precision.encode(_over(_wide(x), divisor), dtype), scale


def blk128(x: Array, dtype: DTypeLike = _E4M3) -> tuple[jax.Array, jax.Array]:
    """Returns (q, scale (ceil(rows/128), k/128)) of x (rows, k): one float32 scale for 128 x 128 elements. Raises
    ValueError for more dimensions."""
    _check_blocks("blk128", x, 128, dtype=dtype)
    if x.ndim > 2:
        raise ValueError(f"quantize.blk128: takes one matrix, got shape {tuple(x.shape)}; use jax.vmap for more")
    by_rows = low_precision.block_amax(_wide(x), 128)
    padded = jnp.pad(by_rows, ((0, -x.shape[0] % 128), (0, 0)))
    scale = scale_for(low_precision.amax(padded.reshape(padded.shape[0] // 128, 128, padded.shape[1]), 1), dtype)
    divisor = low_precision.expand(scale, low_precision.BLK128, x.shape)
    return low_precision.encode(_over(_wide(x), divisor), dtype), scale


def mxfp8(x: Array, dtype: DTypeLike = _E4M3) -> tuple[jax.Array, jax.Array]:
    """Returns (q, scale (rows, k/32) of float8_e8m0fnu): MXFP8, with scales rounded up to powers of two.

    The bits equal the quantization of `jax.nn.scaled_dot_general` with the config "mxfp8".
    """
    _check_blocks("mxfp8", x, 32, dtype=dtype)
    return low_precision.encode_blocks(_wide(x), low_precision.VEC32, dtype)


def nvfp4(x: Array, *, global_scale: ArrayLike = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns (q, scale (..., k/16) of float8_e4m3fn) of x (..., rows, k): NVFP4; x = q * scale * global_scale.

    `global_scale`, float32, goes into alpha; `nvfp4_global_scale` makes full use of the scales' range. The bits equal
    the quantization of `jax.nn.scaled_dot_general` with the config "nvfp4", except blocks of zeros, where JAX has NaN.
    """
    _check_blocks("nvfp4", x, 16)
    scaled = _wide(x) / global_scale
    scale = low_precision.encode(low_precision.block_amax(scaled, 16) / largest(jnp.float4_e2m1fn), _E4M3)
    wide = low_precision.repeat(scale.astype(jnp.float32), 16)
    quotient = jnp.where(wide == 0, 0.0, scaled / jnp.where(wide == 0, 1.0, wide))  # nor in the gradient 0 / 0
    return low_precision.encode(quotient, jnp.float4_e2m1fn), scale


def nvfp4_global_scale(amax: ArrayLike) -> jax.Array:
    """Returns the scale that brings `amax` to 6 * 448, the largest e2m1 times the largest e4m3, as `scale_for`."""
    amax = jnp.asarray(amax, jnp.float32)
    return _usable(amax / (largest(jnp.float4_e2m1fn) * largest(_E4M3)), amax)


def dequantize(q: Array, scale: Scale, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns q times its scale in `dtype`; the scale's shape and dtype give the mode, as in `jaxmp.Scaling`, and a
    float32 scalar fits any q. None is a scale of 1, except for float4. Raises ValueError if no mode fits."""
    mode = _mode("dequantize", q, scale)
    factor = None if scale is None else jnp.asarray(scale)
    return low_precision.dequantize(jnp.asarray(q), factor, mode, jnp.dtype(dtype))


def expand(scale: Scale, q: Array) -> jax.Array:
    """Returns the float32 scale of every element of `q`, in q's shape, by the rules of `dequantize`. Raises TypeError
    if `scale` is None."""
    if scale is None:
        raise TypeError("quantize.expand: takes an array of scales, got None")
    mode = _mode("expand", q, scale)
    return jnp.broadcast_to(low_precision.expand(jnp.asarray(scale), mode, q.shape), q.shape)


def swizzle(scale: Array) -> jax.Array:
    """Returns block scales (rows, blocks) as bytes in cuBLASLt's order (tiles of 128 x 4, padded with 0), flat.

    `jaxmp.matmul` does this itself; use it for data that other libraries share. Raises ValueError if `scale` is not a
    matrix, or its elements are wider than a byte.
    """
    if scale.ndim != 2 or scale.dtype.itemsize != 1:
        raise ValueError(f"quantize.swizzle: scale must be (rows, blocks) of one byte each, got {_described(scale)}")
    return wire.swizzle(wire.as_bytes(jnp.asarray(scale)))


def unswizzle(flat: Array, rows: int, blocks: int, dtype: DTypeLike = jnp.float8_e8m0fnu) -> jax.Array:
    """Inverts `swizzle`: returns scales (rows, blocks) of `dtype` from the bytes `flat`. Raises ValueError if their
    number does not fit."""
    size = round_up(rows, 128) * round_up(blocks, 4)
    if flat.shape != (size,):
        raise ValueError(
            f"unswizzle: {rows} x {blocks} scales take {size} bytes in tiles of 128 x 4, got shape {flat.shape}"
        )
    return wire.from_bytes(wire.unswizzle(jnp.asarray(flat), rows, blocks), dtype)


def scale_offset(row: int, block: int, blocks: int) -> int:
    """Returns where `swizzle` puts the scale of `block` (of `blocks`) in `row` (nvmath's get_block_scale_offset)."""
    tile = row // 128 * round_up(blocks, 4) // 4 + block // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4


def pack_fp4(q: Array) -> jax.Array:
    """Packs float4_e2m1fn (..., k) into uint8 (..., k/2), the first of two in the low half of its byte.

    Raises TypeError for another type, ValueError if k is odd.
    """
    _check_type("pack_fp4", q, "float4_e2m1fn")
    _check_blocks("pack_fp4", q, 2, ndim=1)
    return wire.as_bytes(jnp.asarray(q))


def unpack_fp4(packed: Array) -> jax.Array:
    """Inverts `pack_fp4`: returns float4_e2m1fn (..., k) from uint8 (..., k/2). Raises TypeError for other types."""
    _check_type("unpack_fp4", packed, "uint8")
    return wire.from_bytes(jnp.asarray(packed), jnp.float4_e2m1fn)


def _usable(scale: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns `scale`, limited to normal float32 numbers, so that it can divide; 1 if amax is 0, infinite or NaN."""
    limits = jnp.finfo(jnp.float32)
    return jnp.where((amax > 0) & jnp.isfinite(amax), jnp.clip(scale, limits.tiny, limits.max), 1.0)


def _over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale. A scale below 2^-60 gets no gradient, because 1 / scale^2 would overflow."""
    return x / jnp.where(scale < 2.0**-60, lax.stop_gradient(scale), scale)


def _wide(x: Array) -> jax.Array:
    """Returns `x` in float32; finite float64 numbers stay finite. Raises TypeError unless x is an array and real."""
    if not hasattr(x, "astype"):
        raise TypeError(f"quantize: takes an array of real numbers, got {x!r}")
    _check_real(x)
    if x.dtype == np.float64:
        most, xp = float(jnp.finfo(jnp.float32).max), jnp if isinstance(x, jax.Array) else np
        x = xp.where(xp.isinf(x), x, xp.clip(x, -most, most))
    return jnp.asarray(x.astype(jnp.float32))


def _check_real(x: Array) -> None:
    if jnp.iscomplexobj(x):
        raise TypeError(f"quantize: takes an array of real numbers, got {x.dtype}; pass its .real and .imag")


def _described(x: Array) -> str:
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"


def _check_type(name: str, x: Array, dtype: str) -> None:
    if x.dtype.name != dtype:
        raise TypeError(f"quantize.{name}: takes {dtype}, got {_described(x)}")


def _check_blocks(name: str, x: Array, size: int, ndim: int = 2, dtype: DTypeLike = _E4M3) -> None:
    """Raises TypeError unless `dtype` is a float8 type for numbers (not e8m0); ValueError unless x has at least `ndim`
    dimensions and `size` divides the last. `name`: the function in messages."""
    if not jnp.dtype(dtype).name.startswith("float8"):
        raise TypeError(
            f"quantize.{name}: dtype must be a float8 type, got {jnp.dtype(dtype).name}; int8 has one scale, or one "
            "for each row (quantize.tensor, quantize.rows), and float4 has quantize.nvfp4"
        )
    largest(dtype)  # raises for the type of scales
    if x.ndim < ndim or x.shape[-1] % size:
        raise ValueError(
            f"quantize.{name}: the last dimension must be a multiple of {size}, got shape {tuple(x.shape)}"
        )


def _mode(name: str, q: Array, scale: Any) -> str:
    if getattr(scale, "dtype", None) == np.float32 and scale.shape == ():
        return low_precision.SCALAR
    with naming(f"quantize.{name}"):
        return low_precision.find_mode("scale", scale, q)
