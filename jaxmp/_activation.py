"""Activations, their derivatives, and the packed relu mask, in plain `jnp`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmp import _layout


def gelu(z):
    """GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415; cuBLASLt's CUBLASLT_EPILOGUE_GELU)."""
    return jax.nn.gelu(z, approximate=True)


def gelu_derivative(z, order: int = 1):
    """Derivative of the tanh GELU with respect to z, in float32 at least."""
    f = gelu
    for _ in range(order):
        f = _elementwise_derivative(f)
    return f(z.astype(jnp.promote_types(z.dtype, jnp.float32)))


def _elementwise_derivative(f):
    return lambda z: jax.jvp(f, (z,), (jnp.ones_like(z),))[1]


def unpack_relu_aux(aux, n: int):
    """Boolean mask of shape (..., n) from the packed bits: bit i % 8 of byte i // 8 says z[i] > 0."""
    return jnp.unpackbits(aux, axis=-1, count=n, bitorder="little").astype(bool)


def pack_relu_aux(mask):
    """The packed bits of a boolean mask of shape (..., n), padded with zeros to `relu_aux_bytes(n)`."""
    packed = jnp.packbits(mask, axis=-1, bitorder="little")
    pad = _layout.relu_aux_bytes(mask.shape[-1]) - packed.shape[-1]
    return jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, pad)])
