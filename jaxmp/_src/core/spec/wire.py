"""Bytes of narrow types: how they move between devices, and the layouts of scales that cuBLASLt reads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.low_precision import BLK128, FLOAT4, HALVES, VEC16, VEC32, VEC128, blocks, is_narrow_float
from jaxmp._src.core.spec.process_grid import round_up

# The number of weights that share a scale when they are gathered in 8 bits.
BLOCK = 128


def as_bytes(x: jax.Array) -> jax.Array:
    """Returns 8-bit numbers as uint8; packs two 4-bit numbers of the last dimension in a byte, the first one low."""
    if np.dtype(x.dtype).name not in HALVES:
        return x if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8)
    halves = blocks(lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8), 2)
    return halves[..., 0] | halves[..., 1] << 4


def from_bytes(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Inverts `as_bytes`: returns the numbers of type `dtype`."""
    if np.dtype(dtype).name not in HALVES:
        return x if np.dtype(dtype) == np.uint8 else lax.bitcast_convert_type(x, dtype)
    halves = jnp.stack([x & 0xF, x >> 4], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
    return lax.bitcast_convert_type(halves.astype(jnp.uint4), dtype)


@functools.cache
def is_widened(dtype: DTypeLike) -> bool:
    """True if XLA:CPU widens numbers of this type in a collective that only moves them."""
    return np.dtype(dtype).name in ("bfloat16", *HALVES) or is_narrow_float(np.dtype(dtype))


def as_moved(x: jax.Array, platform: str = "", parts: int = 1) -> jax.Array:
    """Returns `x` in the type that a collective moves; the collective may cut the last dimension into `parts`.

    8-bit numbers, but not bool, become uint8. 4-bit floats, and on CPUs 4-bit integers, are packed two to a byte as
    uint8 if each part has whole bytes, so the last dimension halves; if not, they become uint4 on CPUs and stay
    elsewhere. bfloat16 becomes uint16 on CPUs. All other numbers stay. Only the `platform` "cpu" is a CPU, not ""."""
    name, is_cpu = np.dtype(x.dtype).name, platform == "cpu"
    if name == "bfloat16":
        return lax.bitcast_convert_type(x, jnp.uint16) if is_cpu else x
    if name in HALVES:
        if x.shape[-1] % (2 * parts) == 0 and (is_cpu or name == FLOAT4):
            return as_bytes(x)
        return lax.bitcast_convert_type(x, jnp.uint4) if is_cpu else x
    return as_bytes(x) if x.dtype.itemsize == 1 and x.dtype != np.bool_ else x


def from_moved(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Inverts `as_moved`: returns `x` in its own type `dtype`."""
    if x.dtype == dtype:
        return x
    return from_bytes(x, dtype) if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, dtype)


def moved(collective: Callable[[jax.Array], jax.Array], x: jax.Array, platform: str, parts: int = 1) -> jax.Array:
    """Returns `collective(x)` in x's type; the collective, which only moves data, gets x as `as_moved` returns it.
    `parts`: into how many the collective cuts the last dimension."""
    return from_moved(collective(as_moved(x, platform, parts)), x.dtype)


def packed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns `x`, flattened and rounded to the 8-bit type `dtype`, as uint8 (blocks, BLOCK + 4): each row has BLOCK
    numbers, the last row padded with 0, and their float32 scale, the largest absolute value / `largest(dtype)`."""
    blocks = jnp.pad(x.reshape(-1).astype(jnp.float32), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / low_precision.largest(dtype)
    scale = jnp.maximum(scale, float(jnp.finfo(jnp.float32).tiny))  # XLA treats smaller numbers as 0 on CPUs
    q = as_bytes(low_precision.encode(blocks / scale, dtype))
    return jnp.concatenate([q, lax.bitcast_convert_type(scale, jnp.uint8).reshape(-1, 4)], axis=1)


def unpacked(packed: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Inverts `packed` up to rounding: returns float32 (blocks, BLOCK), with the padding and not in x's shape."""
    scale = lax.bitcast_convert_type(packed[:, BLOCK:], jnp.float32)
    return from_bytes(packed[:, :BLOCK], dtype).astype(jnp.float32) * scale[:, None]


def swizzle(scales: jax.Array) -> jax.Array:
    """Returns scales of blocks, 8-bit (rows, blocks), flat in cuBLASLt's order: tiles of 128 x 4 one after the other,
    first along the blocks. A tile has 32 lines of 4 x 4: byte 16 (r % 32) + 4 (r / 32) + c of a tile is its row r,
    column c. Padded with 0."""
    rows, cols = scales.shape
    padded = jnp.pad(scales, ((0, -rows % 128), (0, -cols % 4)))
    tiles = padded.reshape(-(-rows // 128), 4, 32, -(-cols // 4), 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: jax.Array, rows: int, cols: int) -> jax.Array:
    """Inverts `swizzle`: returns scales (rows, cols), without the padding."""
    tiles = flat.reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(round_up(rows, 128), round_up(cols, 4))[:rows, :cols]


def for_library(scale: jax.Array, mode: str) -> jax.Array:
    """Returns the logical scale of one device's operand as a flat array in the order that cuBLASLt reads. VEC16 and
    VEC32: bytes, by `swizzle`. VEC128: the rows vary fastest. BLK128: k varies fastest, padded to a multiple of 4.
    Other modes: in order."""
    if mode in (VEC16, VEC32):
        return swizzle(as_bytes(scale))
    if mode == VEC128:  # row-fastest
        return scale.T.reshape(-1)
    if mode == BLK128:  # k-fastest, padded to a multiple of 4
        return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % 4))).reshape(-1)
    return scale.reshape(-1)
