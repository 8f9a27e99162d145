"""Makes products of convolutions with windows that do not overlap (patches, 1 x 1), and of their gradients.

A convolution of (n, p w, c) and (w, c, f) with the stride w becomes a product of (n, p, w, c) and (w, c, f).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.fuse.graph import spliced
from jaxmp._src.fuse.operands import axes_of_type, is_explicit


def as_product(eqn: Any) -> Sequence[Any] | None:
    """Returns equations that compute a convolution by a product. Returns None for other equations, for groups, integers
    and types of 8 bits, if windows overlap or leave elements out, and if explicit axes shard more than the first
    dimension of an array, or shard it where windows move along it."""
    if eqn.primitive.name != "conv_general_dilated":
        return None
    params, avals = eqn.params, [v.aval for v in (*eqn.invars, *eqn.outvars)]
    specs = params["dimension_numbers"]
    extents = [[aval.shape[d] for d in spec[2:]] for aval, spec in zip(avals, specs, strict=True)]
    given = (params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    parts = [_parts(i, *each) for i, each in enumerate(zip(*extents, *given, strict=True))]
    axes = [axes_of_type(aval) if is_explicit(aval) else ((),) for aval in avals]
    is_split = any(any(each[1:]) or (each[0] and 0 in spec[2:]) for each, spec in zip(axes, specs, strict=True))
    is_one = params["feature_group_count"] == params["batch_group_count"] == 1
    is_wide = all(jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize > 1 and 0 not in x.shape for x in avals)
    if is_split or not (is_one and is_wide and all(parts)):
        return None
    # The parts of each array's dimensions, as (number, extent): 0 is the batch, 1 and 2 are features.
    split = []
    for i, pair in enumerate(((0, 1), (2, 1), (0, 2))):
        features = [[(number, avals[i].shape[d])] for number, d in zip(pair, specs[i][:2], strict=True)]
        found = dict(zip(specs[i], [*features, *(part[i] for part in parts)], strict=True))
        split.append([part for d in sorted(found) for part in found[d]])
    names = [[number for number, _ in each] for each in split]

    def sharded(i: int, ndim: int) -> NamedSharding | None:
        spec = P(axes[i][0] or None, *[None] * (ndim - 1))
        return NamedSharding(avals[i].sharding.mesh, spec) if is_explicit(avals[i]) else None

    def product(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        x = lax.reshape(x, [extent for _, extent in split[0]], out_sharding=sharded(0, len(names[0])))
        y = lax.rev(y, [d for d, (*_, of_d) in zip(specs[1][2:], parts, strict=True) if len(of_d) > 1])
        options = {"precision": params["precision"], "preferred_element_type": avals[2].dtype}
        d = jnp.einsum(x, names[0], y, names[1], names[2], out_sharding=sharded(2, len(names[2])), **options)
        return [lax.reshape(d, avals[2].shape, out_sharding=sharded(2, avals[2].ndim))]

    return spliced(eqn, product, eqn.invars)


def _parts(i: int, n: int, w: int, m: int, stride: int, padding: Any, spread: int, apart: int) -> tuple[Any, ...]:
    """Returns (number, extent) of each part of dimension `i` of the windows, in both operands and the result: of the
    places of windows, and of the elements in a window. `n`, `w`, `m`: the three extents. () if windows overlap or leave
    elements out."""
    places, inside = (3 + 2 * i, min(n, m)), (4 + 2 * i, w)
    if (n, padding, spread) == (m * w, (0, 0), 1):
        if (stride == w or m == 1) and (apart == 1 or w == 1):
            return (places, inside), (inside,), (places,)
        if (stride == 1 or m == 1) and apart == m:  # the gradient of the second operand
            return (inside, places), (inside,), (places,)
    if (m, padding, stride, apart) == (n * w, (w - 1, w - 1), 1, 1) and (spread == w or n == 1):
        return (places,), (inside,), (places, inside)  # the gradient of the first operand: the window is reversed
    return ()
