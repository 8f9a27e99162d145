"""Layers for Equinox that compute product, bias and activation as `jaxmp.linear` does, and a mixture of experts.

pip install equinox
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmp._src.core.ops import routing
from jaxmp._src.core.ops.matmul import linear
from jaxmp._src.core.spec.levels import Determinism
from jaxmp._src.core.spec.options import Activation, Sharding
from jaxmp._src.core.spec.refusal import of_layer

try:
    import equinox as _equinox
except ImportError as error:
    raise ImportError("jaxmp.equinox needs Equinox, which is not installed; run `pip install equinox`") from error

__all__ = ["Linear", "MoE"]


class Linear(_equinox.nn.Linear):  # type: ignore[misc]
    """`equinox.nn.Linear` with a fused bias and activation, `act(weight @ x + bias)`.

    Parameters, names and initializers are as in `equinox.nn.Linear`, so either loads the other's leaves.

    Args:
      in_features, out_features: the extents of x and of the result, or "scalar" for an x or result of shape ().
      use_bias, dtype, key: as in `equinox.nn.Linear`.
      activation: as in `jaxmp.linear`. A function that is a module becomes a part of this layer, with its parameters.

    A call takes x (in_features,), as in Equinox, or (..., in_features) without `jax.vmap`, and returns
    (..., out_features). An `out_sharding` with dimensions other than the features needs the second form.

    A call raises what `jaxmp.linear` raises, and ValueError for an x of another shape. The constructor does not check
    `activation`.

    >>> import jax, jax.numpy as jnp, jaxmp.equinox
    >>> layer = jaxmp.equinox.Linear(3, 4, activation="silu", key=jax.random.key(0))
    >>> jax.vmap(layer)(jnp.ones((2, 3))).shape, layer(jnp.ones((2, 3))).shape
    ((2, 4), (2, 4))
    """

    # A name or a function is not part of the pytree, so the pytree equals the one without an activation.
    _static_activation: Any = _equinox.field(static=True)
    _module_activation: Any

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        activation: Activation | None = None,
        key: jax.Array,
    ) -> None:
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        is_module = isinstance(activation, _equinox.Module)
        self._static_activation = None if is_module else activation
        self._module_activation = activation if is_module else None

    @property
    def activation(self) -> Activation | None:
        """The activation that the layer was made with."""
        found: Activation | None = self._static_activation or self._module_activation
        return found

    def __call__(
        self, x: jax.Array, *, out_sharding: Sharding | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns act(weight @ x + bias), sharded as `out_sharding`; `key` is ignored, as in Equinox."""
        if self.in_features == "scalar":
            if x.shape != ():
                raise ValueError(f"jaxmp.equinox.Linear: x must have scalar shape, got {x.shape}")
            x = x[None]
        with of_layer("jaxmp.equinox.Linear", a="x", b="weight"):
            y: jax.Array = linear(
                x, self.weight, self.bias, transpose_b=True, activation=self.activation, out_sharding=out_sharding
            )
        return y[..., 0] if self.out_features == "scalar" else y


class MoE(_equinox.Module):  # type: ignore[misc]
    """A mixture of experts, as `jaxmp.flax.MoE`.

    Args:
      features, hidden_features, num_experts, top_k, scores, normalize, activation, determinism: as in
        `jaxmp.flax.MoE`.
      dtype, key: as in `equinox.nn.Linear`.

    A call takes x (features,), as in Equinox, or (..., features) without `jax.vmap`. It returns y with x's shape and
    the loss of this call's tokens that balances experts.

    A call raises what `jaxmp.moe_mlp` raises, and ValueError for other scores, and unless top_k is from 1 to
    num_experts. The constructor checks neither.

    >>> import jax, jax.numpy as jnp, jaxmp.equinox
    >>> layer = jaxmp.equinox.MoE(3, 8, num_experts=4, top_k=2, key=jax.random.key(0))
    >>> y, loss = layer(jnp.ones((5, 3)))
    >>> y.shape, loss.shape
    ((5, 3), ())
    """

    router: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    top_k: int = _equinox.field(static=True)
    scores: routing.Scores = _equinox.field(static=True)
    normalize: bool = _equinox.field(static=True)
    activation: Activation | None = _equinox.field(static=True)
    determinism: Determinism = _equinox.field(static=True)

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        num_experts: int,
        top_k: int,
        scores: routing.Scores = "softmax",
        normalize: bool = True,
        activation: Activation | None = "silu",
        determinism: Determinism = "run_to_run",
        dtype: Any = None,
        key: jax.Array,
    ) -> None:
        def uniform(key: jax.Array, *shape: int) -> jax.Array:
            limit = shape[-2] ** -0.5
            return jax.random.uniform(key, shape, dtype or jnp.float32, -limit, limit)

        keys = jax.random.split(key, 4)
        self.router = uniform(keys[0], features, num_experts)
        self.gate = uniform(keys[1], num_experts, features, hidden_features)
        self.up = uniform(keys[2], num_experts, features, hidden_features)
        self.down = uniform(keys[3], num_experts, hidden_features, features)
        self.top_k, self.scores, self.normalize, self.activation = top_k, scores, normalize, activation
        self.determinism = determinism

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns (y, loss); `key` is ignored, as in Equinox."""
        weights = {"w_gate": self.gate, "w_up": self.up, "w_down": self.down}
        with of_layer("jaxmp.equinox.MoE", a="x"):
            return routing.mixture(self, x, self.router, weights)
