"""Activations, their derivatives, and the packed relu mask, in plain `jnp`."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.core.spec import process_grid
from jaxmp._src.core.spec.refusal import InvalidValue
from jaxmp._src.platform.jax_internals import jax_compat

# Elementwise, traced by JAX.
Function = Callable[..., jax.Array]

_SCALE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


@jax.custom_jvp
def gelu(z: jax.Array) -> jax.Array:
    """GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415; cuBLASLt's CUBLASLT_EPILOGUE_GELU).

    0.5 z (1 + tanh(u)) = z sigmoid(2u), u = sqrt(2/pi) (z + 0.044715 z^3): the right side does not cancel at z << 0.
    """
    scale, cubic = _constants(z)
    return z * jax.nn.sigmoid(scale * (z + cubic * z**3))


@gelu.defjvp
@jax_compat.as_traced
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Uses `gelu_derivative`, which is 0 or 1 far out: the formula above has a NaN derivative where z^3 overflows."""
    (z,), (t,) = primals, tangents
    return gelu(z), multiply_by_slope("gelu", z, t)


def _constants(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the constants of the sigmoid's argument in z's type: in shard_map, x64 makes a Python float a double."""
    return jnp.asarray(_SCALE, z.dtype), jnp.asarray(_CUBIC, z.dtype)


@jax.custom_jvp
def gelu_derivative(z: jax.Array) -> jax.Array:
    """Returns d gelu / dz at z, in float32 for types of 16 bits and fewer, else in z's type."""
    return _gelu_derivative(z)


@gelu_derivative.defjvp
@jax_compat.as_traced
def _gelu_derivative_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Multiplies the tangent by one factor, the second derivative: its terms would give NaN for an infinite tangent."""
    (z,), (t,) = primals, tangents
    curve = gelu_second_derivative(z)
    return gelu_derivative(z), t.astype(curve.dtype) * curve


def _gelu_derivative(z: jax.Array) -> jax.Array:
    """Returns s + z s (1 - s) 2u' with s = sigmoid(2u) and 1 - s = sigmoid(-2u), in float32 or wider. z is clipped to
    [-32, 32]; the derivative is 0 or 1 beyond."""
    z = jnp.clip(_widen(z), -32, 32)  # beyond, the derivative is 0 or 1 in every type, and z^2 may not overflow
    scale, cubic = _constants(z)
    u2 = scale * (z + cubic * z**3)
    s = jax.nn.sigmoid(u2)
    return s + z * s * jax.nn.sigmoid(-u2) * scale * (1 + 3 * cubic * z**2)


def _widen(z: jax.Array) -> jax.Array:
    return z.astype(jnp.float32) if z.dtype.itemsize < 4 else z


def gelu_second_derivative(z: jax.Array) -> jax.Array:
    """Returns d^2 gelu / dz^2 at z, in float32 or wider."""
    z = _widen(z)
    return jax.jvp(_gelu_derivative, (z,), (jnp.ones_like(z),))[1]


# By name; cuBLASMp has epilogs for the first two. PyTorch and Keras call the gelu that uses erf "exact" or
# "not approximate".
FUNCTIONS: dict[str, Function] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
# The functions of JAX that epilogs compute. `fuse` finds them in programs.
FUSED: dict[str, Function] = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


def parse(activation: Any) -> str | Function | None:
    """Returns "relu" or "gelu" for these names and for `jax.nn.relu` and `jax.nn.gelu`. For another name in `FUNCTIONS`
    returns the function. None and other callables are returned unchanged. Raises ValueError for an unknown name and for
    anything else that is not callable."""
    if isinstance(activation, str) and activation in FUNCTIONS:
        return activation if activation in FUSED else FUNCTIONS[activation]
    if activation is not None and not callable(activation):
        close = difflib.get_close_matches(str(activation), FUNCTIONS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidValue(
            f"activation must be one of {', '.join(FUNCTIONS)}, or a function of an array, got {activation!r}{hint}"
        )
    return next((name for name, f in FUSED.items() if f is activation), activation)


def is_named(f: Function | None) -> bool:
    """True if `f` is None or a value of `FUNCTIONS`: a user's function may close over arrays, but these do not."""
    return f is None or any(f is named for named in FUNCTIONS.values())


def multiply_by_slope(activation: str, aux: jax.Array, t: jax.Array) -> jax.Array:
    """Returns `t * act'(z)` in t's type, for "relu" or "gelu". `aux`: what the forward call stored, for "relu" the
    packed signs of z, for "gelu" z itself."""
    if activation == "relu":
        return jnp.where(unpack_relu_aux(aux, t.shape[-1]), t, jnp.zeros_like(t))
    slope = gelu_derivative(aux)
    return (t.astype(slope.dtype) * slope).astype(t.dtype)


def unpack_relu_aux(aux: jax.Array, n: int) -> jax.Array:
    """Returns the boolean mask (..., n) of packed bits, uint8: bit i % 8 of byte i // 8 says z[i] > 0."""
    if aux.size == 0:  # which jnp.unpackbits does not take
        return jnp.zeros((*aux.shape[:-1], n), bool)
    return jnp.unpackbits(aux, axis=-1, count=n, bitorder="little").astype(bool)


def pack_relu_aux(mask: jax.Array) -> jax.Array:
    """Returns the bits of a boolean mask (..., n), packed into `relu_aux_bytes(n)` bytes of uint8; the rest is 0."""
    packed = jnp.packbits(mask, axis=-1, bitorder="little")
    pad = process_grid.relu_aux_bytes(mask.shape[-1]) - packed.shape[-1]
    return jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, pad)])
