"""A mixture of experts: which experts each token goes to, and the sum of what they make of it."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.ops.matmul import matmul
from jaxmp._src.ops.moe_mlp import layers
from jaxmp._src.spec.levels import Determinism
from jaxmp._src.spec.options import Activation
from jaxmp._src.spec.refusal import InvalidValue
from jaxmp._src.validation import operand_checks

Scores = Literal["softmax", "sigmoid"]


class Routes(NamedTuple):
    """Of each token the indices of its experts and their gates, (tokens, top_k), and the loss that balances experts."""

    experts: jax.Array
    gates: jax.Array
    loss: jax.Array


def routes_of(logits: jax.Array, top_k: int, scores: Scores, *, normalizes: bool) -> Routes:
    """The experts of each token by its logits (tokens, experts), in the order of their scores.

    Gates are the scores of the chosen experts, divided by their sum where that `normalizes`: the softmax of the chosen
    logits (Mixtral, arXiv:2401.04088), or sigmoids (DeepSeek-V3, arXiv:2412.19437, without its bias).

    The loss is `experts * sum(f * P)`, with f the part of all choices that falls on an expert, and P its mean score, of
    scores that sum to 1 (Fedus et al., arXiv:2101.03961, which has top_k = 1). It is 1 where all experts have the same.
    """
    count = logits.shape[-1]
    if scores not in ("softmax", "sigmoid"):
        raise InvalidValue(f'scores must be "softmax" or "sigmoid", got {scores!r}')
    if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= count:
        raise InvalidValue(f"top_k must be an integer from 1 to the {count} experts, got {top_k}")
    each = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    gates, experts = lax.top_k(each, top_k)
    gates = gates / gates.sum(-1, keepdims=True) if normalizes else gates
    chosen = (experts[..., None] == jnp.arange(count, dtype=experts.dtype)[None, None]).astype(each.dtype)
    parts = each / each.sum(-1, keepdims=True)
    tokens = max(1, logits.shape[0])
    return Routes(experts, gates, count * (chosen.sum((0, 1)) / (tokens * top_k) * parts.sum(0) / tokens).sum())


def mixture(
    x: jax.Array,
    router: jax.Array,
    weights: dict[str, jax.Array],
    *,
    top_k: int,
    scores: Scores,
    normalizes: bool,
    activation: Activation | None,
    determinism: Determinism,
) -> tuple[jax.Array, jax.Array]:
    """Each token of x (..., features) through `top_k` experts, and the loss; the router computes in float32."""
    operand_checks.check_array("{a}", x)
    if x.shape[-1:] != router.shape[:1]:
        raise InvalidValue(f"{{a}} must have shape (..., {router.shape[0]}), got {x.shape}")
    tokens = x.reshape(-1, x.shape[-1])
    product = jnp.matmul if determinism == "run_to_run" else functools.partial(matmul, determinism=determinism)
    logits = product(tokens.astype(jnp.float32), router.astype(jnp.float32))
    experts, gates, loss = routes_of(logits, top_k, scores, normalizes=normalizes)
    y = layers(tokens, weights, {"experts": experts, "gates": gates}, {}, activation, {"determinism": determinism})
    return y.reshape(*x.shape[:-1], y.shape[-1]), loss
