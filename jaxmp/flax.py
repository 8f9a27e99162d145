"""Layers for Flax NNX that compute product, bias and activation as `jaxmp.linear` does, and a mixture of experts.

    pip install 'flax>=0.12'

Flax's own layers run on jaxmp's products too (`flax.nnx.Linear(..., dot_general=jaxmp.dot_general)`); bias and
activation are then separate operations. `DotGeneral` is that function for layers that take a class of Flax Linen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.core.ops import routing
from jaxmp._src.core.ops.dot_general import dot_general
from jaxmp._src.core.ops.matmul import linear
from jaxmp._src.core.spec.levels import Determinism
from jaxmp._src.core.spec.options import Activation, Sharding
from jaxmp._src.core.spec.refusal import of_layer

try:
    from flax import linen, nnx
except ImportError as error:
    raise ImportError("jaxmp.flax needs Flax, which is not installed; run `pip install 'flax>=0.12'`") from error

__all__ = ["DotGeneral", "Linear", "MoE"]


class Linear(nnx.Linear):  # type: ignore[misc]
    """`flax.nnx.Linear` with a fused bias and activation, `act(x @ kernel + bias)`.

    Parameters, names and initializers are as in `flax.nnx.Linear`, so either loads the other's checkpoint.

    Args:
      in_features, out_features: the last dimension of x and of the result.
      activation: as in `jaxmp.linear`.
      kernel_metadata, bias_metadata: as in Flax; `{"out_sharding": (None, "model")}` shards a parameter on a mesh with
        explicit axes.

    The other arguments are as in `flax.nnx.Linear`, except `dot_general`, which is always jaxmp's.

    A call takes x (..., in_features) and an `out_sharding`, and returns (..., out_features). Parameters take part in
    JAX's promotion as in Flax (`dtype`, `promote_dtype`).

    A call raises what `jaxmp.linear` raises. The constructor raises ValueError for another `dot_general`.

    >>> import jax.numpy as jnp, jaxmp.flax
    >>> from flax import nnx
    >>> layer = jaxmp.flax.Linear(3, 4, activation="silu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self, in_features: int, out_features: int, *, activation: Activation | None = None, **options: Any
    ) -> None:
        if options.get("dot_general", dot_general) not in (dot_general, lax.dot_general):
            raise ValueError("jaxmp.flax.Linear: dot_general is jaxmp's own; drop it, or use flax.nnx.Linear")
        super().__init__(in_features, out_features, **options)
        self.activation = activation

    def __call__(self, inputs: jax.Array, out_sharding: Sharding | None = None) -> jax.Array:
        """Returns act(inputs @ kernel + bias), sharded as `out_sharding`."""
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        with of_layer("jaxmp.flax.Linear", a="inputs", b="kernel"):
            result: jax.Array = linear(
                inputs,
                kernel,
                bias,
                activation=self.activation,
                precision=self.precision,
                preferred_element_type=self.preferred_element_type,
                out_sharding=out_sharding,
            )
        return result


class MoE(nnx.Module):  # type: ignore[misc]
    """A mixture of experts, with gated layers as in `jaxmp.moe_mlp`; no capacity limit, so no token is dropped.

        y = sum over the top_k experts e of x, in the order of their scores: gate[e] * expert[e](x)

    Gates are the scores of the chosen experts, by default divided by their sum: softmax scores as in Mixtral (Jiang et
    al., arXiv:2401.04088), or sigmoids as in DeepSeek-V3 (arXiv:2412.19437, without its bias). The router computes in
    float32. Each device sorts its own tokens; tokens never move between ranks of data.

    Args:
      features, hidden_features: the extents of x and the result, and of an expert's hidden layer.
      num_experts, top_k: how many experts there are, and how many a token goes to.
      scores: "softmax" or "sigmoid".
      normalize: divide the gates of a token by their sum.
      activation: as in `jaxmp.moe_mlp`.
      determinism: as in `jaxmp.moe_mlp`, also for the router's product; XLA computes the scores.
      dtype, param_dtype, kernel_init (not of the router), rngs: as in `flax.nnx.Linear`.
      kernel_metadata: for the experts' weights (num_experts, ...); `{"out_sharding": ("expert",)}` gives each rank of
        an explicit axis its own experts.

    A call takes x (..., features). It returns y (..., features), sharded as x, and the loss that balances experts,
    `num_experts * sum(f * P)`: f is the fraction of all choices that an expert gets, P its mean score (Fedus et al.,
    arXiv:2101.03961). The loss is 1 for a perfect balance.

    A call raises what `jaxmp.moe_mlp` raises, and ValueError for other scores, and unless top_k is from 1 to
    num_experts. The constructor checks neither.

    >>> import jax.numpy as jnp, jaxmp.flax
    >>> from flax import nnx
    >>> layer = jaxmp.flax.MoE(3, 8, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
    >>> y, loss = layer(jnp.ones((5, 3)))
    >>> y.shape, loss.shape
    ((5, 3), ())
    """

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
        param_dtype: Any = jnp.float32,
        kernel_init: Any = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ) -> None:
        init = kernel_init or nnx.initializers.lecun_normal(batch_axis=(0,))
        for name in ("gate", "up", "down"):
            shape = (hidden_features, features) if name == "down" else (features, hidden_features)
            kernel = init(rngs.params(), (num_experts, *shape), param_dtype)
            setattr(self, name, nnx.Param(kernel, **kernel_metadata))
        router = nnx.initializers.lecun_normal()(rngs.params(), (features, num_experts), param_dtype)
        self.router = nnx.Param(router)
        self.dtype, self.activation = dtype, activation
        self.top_k, self.scores, self.normalize, self.determinism = top_k, scores, normalize, determinism

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (y, loss)."""
        kernels = {f"w_{name}": getattr(self, name)[...] for name in ("gate", "up", "down")}
        inputs, *cast = nnx.nn.dtypes.promote_dtype((inputs, *kernels.values()), dtype=self.dtype)
        with of_layer("jaxmp.flax.MoE", a="inputs"):
            return routing.mixture(self, inputs, self.router[...], dict(zip(kernels, cast, strict=True)))


class DotGeneral(linen.Module):  # type: ignore[misc]
    """`jaxmp.dot_general` as a module of Flax Linen without parameters, for layers that take a class.

    A call takes what `jaxmp.dot_general` takes, returns what it returns, and raises what it raises.

    >>> import jax, jax.numpy as jnp, jaxmp.flax
    >>> from flax import linen
    >>> layer = linen.Dense(4, dot_general_cls=jaxmp.flax.DotGeneral)
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 3)))[0].shape
    (2, 4)
    """

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """Computes `jaxmp.dot_general`."""
        return dot_general(*args, **options)
