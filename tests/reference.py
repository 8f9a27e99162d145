"""The same mathematics in plain `jnp`: global arrays, no sharding, no primitive, differentiable.

`is_majorant` makes of each function its majorant, for operands that are not negative: every factor and activation gives
way to what dominates it and its derivatives order by order, which is what errors are measured in (bounds.py).
"""

import functools

import jax
import jax.numpy as jnp

from jaxmp import Epilog
from jaxmp._src.spec import activations, epilogs


def matmul(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=None,
    transpose_a=False,
    transpose_b=False,
    conjugate_a=False,
    conjugate_b=False,
    epilog=Epilog.NONE,
    epilog_inputs=None,
    relu_aux_shards=1,
    is_majorant=False,
):
    """`d`, or `(d, {name: aux})`, of `epilog(alpha * op(a) @ op(b) + beta * c)` in the operands' common type.

    Arguments are those of `jaxmp.matmul`; a packed mask is padded in each of the `relu_aux_shards` of d's columns.
    """
    a, b = _operand(a, transpose_a, conjugate_a), _operand(b, transpose_b, conjugate_b)
    row = epilogs.RULES[Epilog(int(epilog) & ~Epilog.ALLREDUCE)]
    factor = abs if is_majorant else lambda scalar: scalar
    z = factor(alpha) * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    if c is not None:
        z = z + factor(beta) * c
    if row.has_bias:
        z = z + _as_row(epilog_inputs["bias"], z.ndim)
    d = activate(row.activation, z, is_majorant)
    if row.derivative == "relu" and not is_majorant:
        d = jnp.where(_unpack(epilog_inputs["relu_aux"], z.shape[-1], relu_aux_shards), z, jnp.zeros_like(z))
    elif row.derivative == "gelu":
        x = epilog_inputs["gelu_aux"]
        # |gelu'| < 1.2, and its derivatives are as in `activate`: this dominates it order by order.
        d = z * (1.2 + 2 * x + 2 * x * x if is_majorant else activations.gelu_derivative(x))
    if row.gradient:
        sums = {"bgrada": lambda: jnp.sum(a, -1), "bgradb": lambda: jnp.sum(b, 0)}
        return d, {row.gradient: sums.get(row.gradient, lambda: jnp.sum(d, tuple(range(d.ndim - 1))))()}
    if row.aux is None:
        return d
    if row.aux == "gelu_aux" or is_majorant:
        return d, {row.aux: z}
    masks = [activations.pack_relu_aux(x) for x in jnp.split(z > 0, relu_aux_shards, axis=-1)]
    return d, {row.aux: jnp.concatenate(masks, axis=-1)}


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
    """act(z), or z where there is no activation.

    |relu'| <= 1.  Both gelus, silu and tanh have |f| <= |z|, |f'| < 1.2, |f''| < 2 and |f'''| < 4, and so has sigmoid
    less its value at 0.
    """
    if is_majorant:
        is_plain = activation in (None, "relu")
        return z if is_plain else 1.2 * z + z * z + 2 * z * z * z / 3 + (0.5 if activation == "sigmoid" else 0)
    found = activations.find(activation)
    if found is None:
        return z
    return (activations.FUNCTIONS[found] if isinstance(found, str) else found)(z)


matmul_majorant = functools.partial(matmul, is_majorant=True)


def _unpack(mask, columns, shards):
    parts = jnp.split(mask, shards, axis=-1)
    return jnp.concatenate([activations.unpack_relu_aux(x, columns // shards) for x in parts], axis=-1)


def _as_row(bias, ndim):
    return jnp.expand_dims(bias, tuple(range(ndim - 1)))


def _operand(x, is_transposed, is_conjugated):
    x = jnp.swapaxes(x, -1, -2) if is_transposed else x
    return jnp.conj(x) if is_conjugated else x
