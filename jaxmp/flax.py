"""Layers for Flax NNX that compute product, bias and activation as `jaxmp.linear` does.

    pip install 'flax>=0.12'

Flax's own layers run on jaxmp's products too (`flax.nnx.Linear(..., dot_general=jaxmp.dot_general)`), with the bias and
the activation as further operations. `DotGeneral` is that function for layers which take a class of Flax Linen.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jaxmp._src.ops.dot_general import dot_general
from jaxmp._src.ops.matmul import linear
from jaxmp._src.spec.options import Activation, Sharding

try:
    from flax import linen, nnx
except ImportError as error:
    raise ImportError("jaxmp.flax needs Flax, which is not installed; run `pip install 'flax>=0.12'`") from error

__all__ = ["DotGeneral", "Linear"]


class Linear(nnx.Linear):  # type: ignore[misc]
    """`flax.nnx.Linear` with a fused bias and activation, `act(x @ kernel + bias)`.

    Parameters, names and initializers are those of `flax.nnx.Linear`, so either loads the other's checkpoint.

    Args:
      in_features, out_features: the last dimension of x and of the result.
      activation: as in `jaxmp.linear`.
      kernel_metadata, bias_metadata: as in Flax; `{"out_sharding": (None, "model")}` shards a parameter on a mesh with
        explicit axes.

    The other arguments are those of `flax.nnx.Linear`, but `dot_general`, which is jaxmp's.

    A call takes x (..., in_features) and an `out_sharding`, and returns (..., out_features). Parameters take part in
    JAX's promotion as Flax has it (`dtype`, `promote_dtype`).

    Raises: as `jaxmp.linear`; ValueError for another `dot_general`.

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
        """act(inputs @ kernel + bias), sharded as `out_sharding` says."""
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
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
        """As `jaxmp.dot_general`."""
        return dot_general(*args, **options)


def __dir__() -> list[str]:
    return __all__
