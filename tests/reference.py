"""The same mathematics in plain `jnp`: global arrays, no sharding, no primitive, differentiable. `is_majorant` replaces
each function by its majorant, for non-negative operands: every factor and activation becomes a function that dominates
it and its derivatives of each order. Errors are measured relative to it (bounds.py)."""

import functools

import jax
import jax.numpy as jnp
from suite import BIASED, FORWARD, WITH_AUX

from jaxmp import Epilog

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def matmul(a, b, *, alpha=1.0, epilog=Epilog.NONE, epilog_inputs=None, is_majorant=False):
    """Returns `d`, or `(d, {"gelu_aux": z})`, of `epilog(alpha * a @ b)`; suite.py covers the other options."""
    z = (abs(alpha) if is_majorant else alpha) * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    if epilog in BIASED:
        z = z + _as_row(epilog_inputs["bias"], z.ndim)
    d = activate(FORWARD[epilog], z, is_majorant)
    return (d, {"gelu_aux": z}) if epilog in WITH_AUX else d


def linear(x, w, bias=None, *, activation=None, is_majorant=False):
    """`act(x @ w + bias)` for x (..., k), w (k, n), bias (n,)."""
    z = jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)
    return activate(activation, z if bias is None else z + _as_row(bias, z.ndim), is_majorant)


def mlp(x, w_in, b_in, w_out, b_out, *, activation, is_majorant=False):
    """`act(x @ w_in + b_in) @ w_out + b_out` for x (..., k)."""
    return linear(linear(x, w_in, b_in, activation=activation, is_majorant=is_majorant), w_out, b_out)


def gated_mlp(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, *, activation="silu", is_majorant=False):
    """`(act(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down` for x (..., k)."""
    gate = linear(x, w_gate, b_gate, activation=activation, is_majorant=is_majorant)
    return linear(gate * linear(x, w_up, b_up), w_down, b_down)


def activate(activation, z, is_majorant=False):
    """Returns act(z), or z if `activation` is None.

    |relu'| <= 1. Both gelus, silu and tanh have |f| <= |z|, |f'| < 1.2, |f''| < 2 and |f'''| < 4; so has sigmoid minus
    its value at 0.
    """
    if is_majorant:
        is_plain = activation in (None, "relu")
        return z if is_plain else 1.2 * z + z * z + 2 * z * z * z / 3 + (0.5 if activation == "sigmoid" else 0)
    return z if activation is None else ACTIVATIONS.get(activation, activation)(z)


matmul_majorant = functools.partial(matmul, is_majorant=True)


def _as_row(bias, ndim):
    return jnp.expand_dims(bias, tuple(range(ndim - 1)))
