"""Mixtures of experts: chooses the experts of each token, and sums their results."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.ops.moe_mlp import layers
from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.spec.refusal import InvalidValue
from jaxmp._src.core.spec.request import ExpertOptions
from jaxmp._src.core.validation import operand_checks
from jaxmp._src.platform.runtime.types import Shape

Scores = Literal["softmax", "sigmoid"]


def routes_of(
    logits: jax.Array, top_k: int, scores: Scores, *, normalizes: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses `top_k` experts for each token, in descending order of their scores. Returns each token's experts
    (indices) and gates, both (tokens, top_k), and the loss that balances experts.

    Scores are the "softmax" or "sigmoid" of `logits` (tokens, experts).
    Gates are the scores of the chosen experts; `normalizes` divides them by their sum: the softmax of the chosen
    logits (Mixtral, arXiv:2401.04088), or sigmoids (DeepSeek-V3, arXiv:2412.19437, without its bias).

    The loss is `experts * sum(f * P)`: f is the fraction of all choices that an expert gets, and P is its mean score,
    with scores that sum to 1 (Fedus et al., arXiv:2101.03961, which has top_k = 1). It is 1 for a perfect balance.
    Raises ValueError for other `scores`, and unless top_k is from 1 to the number of experts.
    """
    count = logits.shape[-1]
    if scores not in ("softmax", "sigmoid"):
        raise InvalidValue(f'scores must be "softmax" or "sigmoid", got {scores!r}')
    if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= count:
        raise InvalidValue(f"top_k must be an integer from 1 to the {count} experts, got {top_k}")
    # Logarithms of scores: they are finite even if the scores underflow.
    logs = jax.nn.log_softmax(logits) if scores == "softmax" else jax.nn.log_sigmoid(logits)
    most, experts = lax.top_k(logs, top_k)
    gates = jax.nn.softmax(most) if normalizes else jnp.exp(most)
    chosen = (experts[..., None] == jnp.arange(count, dtype=experts.dtype)[None, None]).astype(gates.dtype)
    parts = jax.nn.softmax(logs)
    tokens = max(1, logits.shape[0])
    return experts, gates, count * (chosen.sum((0, 1)) / (tokens * top_k) * parts.sum(0) / tokens).sum()


def mixture(layer: Any, x: jax.Array, router: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sends each token of x (..., features) through `top_k` experts; returns (y (..., columns of w_down), the loss of
    `routes_of`). Logits are x times `router` (features, experts) in float32, by jnp for "run_to_run", else by
    `jaxmp.matmul`. Raises ValueError if the router's features are not x's.

    `layer` is the user's layer, with attributes `top_k`, `scores`, `normalize`, `activation` and `determinism`.
    `weights`: as in `layers`."""
    operand_checks.check_array("{a}", x)
    if x.shape[-1:] != router.shape[:1]:
        raise InvalidValue(f"{{a}} must have shape (..., {router.shape[0]}), got {x.shape}")
    *lead, features = meshes.type_dims("{a}", x)
    here = jax.typeof(x).sharding
    rows = P(sum(lead, ()), features)
    tokens = _reshaped(x, (-1, x.shape[-1]), here.spec, rows) if any(lead[1:]) else x.reshape(-1, x.shape[-1])
    options: ExpertOptions = {"determinism": layer.determinism}
    if meshes.has_explicit_axes(here.mesh):
        options["out_sharding"] = rows
    of_levels = functools.partial(matmul, determinism=layer.determinism)
    product = jnp.matmul if layer.determinism == "run_to_run" else of_levels
    logits = product(tokens.astype(jnp.float32), router.astype(jnp.float32))
    experts, gates, loss = routes_of(logits, layer.top_k, layer.scores, normalizes=layer.normalize)
    y = layers(tokens, weights, {"experts": experts, "gates": gates}, {}, layer.activation, **options)
    if any(lead[1:]):
        return _reshaped(y, (*here.shard_shape(x.shape)[:-1], -1), rows, here.spec), loss
    return y.reshape(*x.shape[:-1], y.shape[-1]), loss


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _reshaped(x: jax.Array, shape: Shape, have: P, want: P) -> jax.Array:
    """Reshapes each device's shard of x to `shape` in `shard_map`. `have`, `want`: the shardings of x and of the
    result. No token moves, but the order of tokens differs from a reshape of the global array."""
    mesh = jax.typeof(x).sharding.mesh
    return jax.shard_map(lambda x: x.reshape(shape), mesh=mesh, in_specs=have, out_specs=want)(x)
