"""The same mathematics in plain `jnp`, for tests and documents; global arrays, no sharding, no primitive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmp._src.spec import activations, epilogs
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.options import Activation, Scalar
from jaxmp._src.spec.refusal import naming

__all__ = ["activate", "linear", "matmul", "mlp"]


def __dir__() -> list[str]:
    return list(__all__)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    epilog: Epilog | int = Epilog.NONE,
    epilog_inputs: Mapping[str, ArrayLike] | None = None,
    relu_aux_shards: int = 1,
) -> Any:
    """`d`, or `(d, {name: aux})`, of `epilog(alpha * op(a) @ op(b) + beta * c)` in the operands' common type.

    Args:
      a: (..., m, k), or (..., k, m) with `transpose_a`.
      b: (k, n), or (n, k) with `transpose_b`.
      c: (..., m, n) or None.
      relu_aux_shards: over how many shards the columns of d are split; the packed mask is padded per shard.
    Everything else is as in `jaxmp.matmul`. Differentiable; pass float64 operands for a reference in float64.
    """
    return _matmul(
        _operand(a, transpose_a, conjugate_a),
        _operand(b, transpose_b, conjugate_b),
        c,
        alpha,
        beta,
        epilogs.RULES[Epilog(int(epilog) & ~Epilog.ALLREDUCE)],
        epilog_inputs,
        relu_aux_shards,
    )


def _matmul(
    a: ArrayLike, b: ArrayLike, c: Any, alpha: Any, beta: Any, row: epilogs.EpilogRule, inputs: Any, shards: int
) -> Any:
    z: jax.Array = alpha * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    if c is not None:
        z = z + beta * c
    if row.has_bias:
        z = z + _as_row(inputs["bias"], z.ndim)
    d = activate(row.activation, z)
    if row.derivative == "relu":
        d = jnp.where(_unpack(inputs["relu_aux"], z.shape[-1], shards), z, jnp.zeros_like(z))
    elif row.derivative == "gelu":
        d = z * activations.gelu_derivative(inputs["gelu_aux"])
    if row.gradient:
        sums = {"bgrada": lambda: jnp.sum(a, -1), "bgradb": lambda: jnp.sum(b, 0)}
        return d, {row.gradient: sums.get(row.gradient, lambda: jnp.sum(d, tuple(range(d.ndim - 1))))()}
    if row.aux is None:
        return d
    if row.aux == "gelu_aux":
        return d, {row.aux: z}
    masks = [activations.pack_relu_aux(x) for x in jnp.split(z > 0, shards, axis=-1)]
    return d, {row.aux: jnp.concatenate(masks, axis=-1)}


def _unpack(mask: ArrayLike, columns: int, shards: int) -> jax.Array:
    parts = jnp.split(mask, shards, axis=-1)
    return jnp.concatenate([activations.unpack_relu_aux(x, columns // shards) for x in parts], axis=-1)


def linear(
    x: ArrayLike, w: ArrayLike, bias: ArrayLike | None = None, *, activation: Activation | None = None
) -> jax.Array:
    """`act(x @ w + bias)` for x (..., k), w (k, n), bias (n,)."""
    z = jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)
    return activate(activation, z if bias is None else z + _as_row(bias, z.ndim))


def mlp(
    x: ArrayLike,
    w_in: ArrayLike,
    b_in: ArrayLike | None,
    w_out: ArrayLike,
    b_out: ArrayLike | None,
    *,
    activation: Activation,
) -> jax.Array:
    """`act(x @ w_in + b_in) @ w_out + b_out` for x (..., k)."""
    return linear(linear(x, w_in, b_in, activation=activation), w_out, b_out)


def gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    *,
    activation: Activation | None = "silu",
) -> jax.Array:
    """`(act(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down` for x (..., k)."""
    return linear(linear(x, w_gate, b_gate, activation=activation) * linear(x, w_up, b_up), w_down, b_down)


def activate(activation: Activation | str | None, z: jax.Array) -> jax.Array:
    """act(z), or z where there is no activation."""
    with naming("reference"):
        found = activations.find(activation)
    if found is None:
        return z
    return (activations.FUNCTIONS[found] if isinstance(found, str) else found)(z)


def _as_row(bias: ArrayLike, ndim: int) -> jax.Array:
    return jnp.expand_dims(bias, tuple(range(ndim - 1)))


def _operand(x: ArrayLike, is_transposed: bool, is_conjugated: bool) -> ArrayLike:
    x = jnp.swapaxes(x, -1, -2) if is_transposed else x
    return jnp.conj(x) if is_conjugated else x
