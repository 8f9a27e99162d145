"""`scaled_matmul`: `jax.nn.scaled_matmul`'s signature on our call."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmp._src.sharding.sharded_call import product
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.low_precision import Scaling
from jaxmp._src.spec.options import Array
from jaxmp._src.spec.refusal import InvalidType, InvalidValue
from jaxmp._src.spec.request import Request
from jaxmp._src.validation.public import public


@public
def scaled_matmul(
    lhs: Array,
    rhs: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    preferred_element_type: DTypeLike = jnp.float32,
) -> jax.Array:
    """Product of block-scaled operands along their last dimensions, `jax.nn.scaled_matmul` on every platform.

        out[b] = (lhs * repeat(lhs_scales)) @ (rhs * repeat(rhs_scales)).T

    MXFP8 (float8 in blocks of 32 with float8_e8m0fnu scales) and NVFP4 (float4_e2m1fn in blocks of 16 with
    float8_e4m3fn scales) are one low-precision product a batch element, padded to whole tiles. Other operands are
    scaled in float32 first.

    Args:
      lhs: (batch, m, k).
      rhs: (batch, n, k).
      lhs_scales: (batch, m, blocks), where `blocks` divides k.
      rhs_scales: (batch, n, blocks).
      preferred_element_type: float32, bfloat16 or float16.

    Returns:
      (batch, m, n) of `preferred_element_type`.

    Raises:
      TypeError: an operand is not an array.
      ValueError: shapes that do not fit.

    Source: `jax.nn.scaled_matmul` (JAX 0.10.2).

    >>> import jax.numpy as jnp, jaxmp
    >>> one = jnp.ones((1, 1, 32), jnp.float8_e4m3fn)
    >>> scale = jnp.full((1, 1, 1), 0.5, jnp.float8_e8m0fnu)
    >>> jaxmp.scaled_matmul(one, one, scale, scale)
    Array([[[8.]]], dtype=float32)
    """
    _check_shapes(lhs, rhs, lhs_scales, rhs_scales)
    size = lhs.shape[-1] // lhs_scales.shape[-1]
    mode = _mode(lhs, rhs, lhs_scales, rhs_scales, size)
    if mode is None:
        wide_a, wide_b = (
            x.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), size, axis=-1)
            for x, scale in ((lhs, lhs_scales), (rhs, rhs_scales))
        )
        out: Any = jax.vmap(lambda a, b: product(Request("scaled_matmul", a, b, transpose_b=True)))(wide_a, wide_b)
        return cast(jax.Array, out.astype(preferred_element_type))
    n_tiles = 64 if mode == low_precision.VEC16 else 128
    operands = [_padded(jnp.asarray(x), (128, n_tiles)) for x in (lhs, rhs)]
    scales = [_padded(jnp.asarray(x), (128, n_tiles // size)) for x in (lhs_scales, rhs_scales)]

    def scaled(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> Any:
        request = Request("scaled_matmul", a, b, transpose_b=True, preferred_element_type=preferred_element_type)
        return product(request._replace(scaling=Scaling(a=scale_a, b=scale_b)))

    return cast(jax.Array, jax.vmap(scaled)(*operands, *scales)[:, : lhs.shape[1], : rhs.shape[1]])


def _check_shapes(lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array) -> None:
    shapes = {"lhs": lhs, "rhs": rhs, "lhs_scales": lhs_scales, "rhs_scales": rhs_scales}
    for name, x in shapes.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise InvalidType(f"{name} must be an array, got {type(x).__name__}")
    texts = ", ".join(f"{name} {tuple(x.shape)}" for name, x in shapes.items())
    if any(x.ndim != 3 for x in shapes.values()):
        raise InvalidValue(f"every operand must have 3 dimensions, (batch, rows, k or blocks); got {texts}")
    if lhs.shape[0] != rhs.shape[0] or lhs.shape[2] != rhs.shape[2]:
        raise InvalidValue(f"lhs and rhs must have equal batch and k; got {texts}")
    if lhs_scales.shape[:2] != lhs.shape[:2] or rhs_scales.shape[:2] != rhs.shape[:2]:
        raise InvalidValue(f"scales must have the batch and rows of their operand; got {texts}")
    if lhs_scales.shape[2] != rhs_scales.shape[2] or not lhs_scales.shape[2] or lhs.shape[2] % lhs_scales.shape[2]:
        raise InvalidValue(f"both scales must have one number of blocks, which divides k; got {texts}")


def _mode(lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, size: int) -> str | None:
    """The block mode of the operands, or None for operands that no mode describes."""
    if not low_precision.result_dtypes(lhs.dtype, rhs.dtype) or not low_precision.is_scaled(lhs.dtype):
        return None
    mode = low_precision.VEC16 if lhs.dtype.name == low_precision.FLOAT4 else low_precision.VEC32
    fits = all(x.dtype == low_precision.scale_dtype(mode) for x in (lhs_scales, rhs_scales))
    return mode if fits and size == low_precision.BLOCK[mode] else None


def _padded(x: jax.Array, units: tuple[int, int]) -> jax.Array:
    """x with rows and columns brought to multiples of `units` by zeros."""
    pads = tuple(-extent % unit for extent, unit in zip(x.shape[1:], units, strict=True))
    if pads == (0, 0):
        return x
    bits = low_precision.as_bytes(x) if x.dtype.name != low_precision.FLOAT4 else x
    filled = jnp.pad(bits, ((0, 0), *((0, pad) for pad in pads)))
    return low_precision.from_bytes(filled, x.dtype) if bits is not x else filled
