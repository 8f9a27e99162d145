"""Layers for Equinox that compute product, bias and activation as `jaxmp.linear` does.

pip install equinox
"""

from __future__ import annotations

from typing import Any, Literal

import jax

from jaxmp._src.ops.matmul import linear
from jaxmp._src.spec.options import Activation, Sharding

try:
    import equinox as _equinox
except ImportError as error:
    raise ImportError("jaxmp.equinox needs Equinox, which is not installed; run `pip install equinox`") from error

__all__ = ["Linear"]


class Linear(_equinox.nn.Linear):  # type: ignore[misc]
    """`equinox.nn.Linear` with a fused bias and activation, `act(weight @ x + bias)`.

    Parameters, names and initializers are those of `equinox.nn.Linear`, so either loads the other's leaves.

    Args:
      in_features, out_features: the extents of x and of the result, or "scalar".
      use_bias, dtype, key: as in `equinox.nn.Linear`.
      activation: as in `jaxmp.linear`. A function that is a module is a part of this one, with its parameters.

    A call takes x (in_features,), as in Equinox, or (..., in_features) without `jax.vmap`, which an `out_sharding` of
    more than the features needs, and returns (..., out_features).

    Raises: as `jaxmp.linear`; ValueError for an x of another shape.

    >>> import jax, jax.numpy as jnp, jaxmp.equinox
    >>> layer = jaxmp.equinox.Linear(3, 4, activation="silu", key=jax.random.key(0))
    >>> jax.vmap(layer)(jnp.ones((2, 3))).shape, layer(jnp.ones((2, 3))).shape
    ((2, 4), (2, 4))
    """

    # A name or a function is no part of the pytree, as that of a layer without an activation has none.
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
        """What the layer was made with."""
        found: Activation | None = self._static_activation or self._module_activation
        return found

    def __call__(
        self, x: jax.Array, *, out_sharding: Sharding | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """act(weight @ x + bias), sharded as `out_sharding` says; `key` is ignored, as in Equinox."""
        if self.in_features == "scalar":
            if x.shape != ():
                raise ValueError(f"jaxmp.equinox.Linear: x must have scalar shape, got {x.shape}")
            x = x[None]
        y: jax.Array = linear(
            x, self.weight, self.bias, transpose_b=True, activation=self.activation, out_sharding=out_sharding
        )
        return y[..., 0] if self.out_features == "scalar" else y


def __dir__() -> list[str]:
    return __all__
