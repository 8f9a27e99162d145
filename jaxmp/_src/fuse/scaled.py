"""Emits `jax.nn.scaled_matmul`, and so `jax.nn.scaled_dot_general`, as calls of jaxmp.

JAX runs them on some GPUs, and on CPUs only from 0.12 on. For each element i of the batch, out[i] = (a *
repeat(scale_a)) @ (b * repeat(scale_b)).T, with blocks along the last dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxmp._src.core.sharding.sharded_call import product
from jaxmp._src.core.spec import low_precision, wire
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.core.spec.request import Request
from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.operands import is_auto, is_explicit


def call(eqn: Any, options: Options, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns [the result of a `scaled_matmul`]. MXFP8 and NVFP4 run as one low-precision product for each element of
    the batch, padded to whole tiles. Other types, automatic axes, and products that this refuses (for example shards
    that do not fit tiles) are decoded and multiplied in a wide type. JAX's type of the result has no sharding: it is
    sharded like its operands or, if that is refused, whole. Raises the last refusal if all are refused."""
    aval, mode = eqn.outvars[0].aval, _mode(*operands)
    programs: list[Callable[..., jax.Array]] = [_decoded]
    if mode is not None and not is_auto(aval):
        programs.insert(0, functools.partial(_scaled, mode))
    shardings = (None, P()) if is_explicit(jax.typeof(operands[0])) else (None,)
    for out_sharding, program in itertools.product(shardings, programs):
        shared = {
            "transpose_b": True,
            "preferred_element_type": aval.dtype,
            "out_sharding": out_sharding,
            "implementation": options.implementation,
            **options.level.option,
        }
        try:
            return [program(functools.partial(Request, "scaled_matmul", **shared), *operands)]
        except Refusal as error:
            refusal = error
    raise refusal


def _scaled(mode: str, request: Any, *operands: jax.Array) -> jax.Array:
    """Returns the result from `operands` (a, b, scale_a, scale_b): one scaled product for each element of the batch,
    without the padding to tiles. `mode`: VEC16 or VEC32. `request`: makes a Request from a, b and `scaling`."""
    k, size = (64 if mode == low_precision.VEC16 else 128), low_precision.BLOCK[mode]
    units = (128, k), (128, k), (128, k // size), (128, k // size)
    d = _each(
        lambda a, b, scale_a, scale_b: product(request(a, b, scaling=Scaling(a=scale_a, b=scale_b))),
        list(map(_padded, operands, units)),
    )
    return d[:, : operands[0].shape[1], : operands[1].shape[1]]


def _decoded(request: Any, a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> jax.Array:
    """Returns the product of the decoded operands, multiplied in float32. MXFP8 and NVFP4 are decoded to bfloat16
    instead, which represents each number times its block's scale."""
    wide = jnp.bfloat16 if _mode(a, b, scale_a, scale_b) else jnp.float32
    return _each(lambda a, b: product(request(a, b)), [_times(a, scale_a, wide), _times(b, scale_b, wide)])


def _each(f: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """Returns f of each element of a batch (the first dimension), by vmap if there are several."""
    if operands[0].shape[0] == 1:
        d: jax.Array = f(*(x[0] for x in operands))[None]
        return d
    batched: jax.Array = jax.vmap(f)(*operands)
    return batched


def _mode(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> str | None:
    """Returns VEC32 for MXFP8 operands, VEC16 for NVFP4 operands, by types, scales and block sizes; else None."""
    if not low_precision.result_dtypes(a.dtype, b.dtype) or not low_precision.is_scaled(a.dtype):
        return None
    mode = low_precision.VEC16 if a.dtype.name == low_precision.FLOAT4 else low_precision.VEC32
    fits = all(x.dtype == low_precision.scale_dtype(mode) for x in (scale_a, scale_b))
    return mode if fits and a.shape[-1] == low_precision.BLOCK[mode] * scale_a.shape[-1] else None


def _padded(x: jax.Array, units: tuple[int, int]) -> jax.Array:
    """Returns x (batch, rows, columns) with rows and columns padded with zero bits to multiples of `units`."""
    pads = tuple(-extent % unit for extent, unit in zip(x.shape[1:], units, strict=True))
    if pads == (0, 0):
        return x
    bits = wire.as_bytes(x) if x.dtype.name != low_precision.FLOAT4 else x
    filled = jnp.pad(bits, ((0, 0), *((0, pad) for pad in pads)))
    return wire.from_bytes(filled, x.dtype) if bits is not x else filled


def _times(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns x times its scales, multiplied in float32 and cast to `dtype`."""
    aval = jax.typeof(x)
    repeated = jnp.broadcast_to(scale.astype(jnp.float32)[..., None], (*scale.shape, x.shape[-1] // scale.shape[-1]))
    factor = lax.reshape(repeated, x.shape, out_sharding=aval.sharding if is_explicit(aval) else None)
    return (x.astype(jnp.float32) * factor).astype(dtype)
