"""Scales (factors) of an array, and the dimensions, or parts of dimensions, along which they vary.

A reshape cuts a dimension into parts: one of 12 elements that becomes (3, 4) has the parts 3, slower, and 4, faster.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.fuse.graph import Graph
from jaxmp._src.fuse.operands import axes_of_type, is_explicit
from jaxmp._src.platform.jax_internals import jax_tracing

# A part of an operand's dimension: the dimension, then for each cut 0 (the slower part) or 1 (the faster part).
Part = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor of an array. `dims`: for each dimension of `value` the array's dimension, or None if it has size 1."""

    value: Any
    dims: tuple[int | None, ...] = ()

    @property
    def varying(self) -> tuple[int, ...]:
        return tuple(d for d in self.dims if d is not None)

    def along(self, order: Mapping[int, int] | Sequence[int]) -> Scale:
        """Returns the scale for another array: dimension i of the array is dimension `order[i]` of the other."""
        return Scale(self.value, tuple(None if d is None else order[d] for d in self.dims))

    def is_sharded_as(self, aval: Any) -> bool:
        """True if the scale is sharded like the dimensions of an array of type `aval` along which it varies. Always
        true if it varies along none, or if `aval` has no explicit axes."""
        if not self.varying or not is_explicit(aval):
            return True
        own, axes = axes_of_type(self.value.aval), axes_of_type(aval)
        return all(own[i] == (() if d is None else axes[d]) for i, d in enumerate(self.dims))

    def times(self, x: jax.Array, value: Any) -> jax.Array:
        """Returns x times the scale, multiplied in float32 and rounded to the type of x. `value`: the array of
        `self.value`."""
        factor = lax.squeeze(jnp.asarray(value, jnp.float32), [i for i, d in enumerate(self.dims) if d is None])
        factor = lax.transpose(factor, sorted(range(factor.ndim), key=self.varying.__getitem__))
        if self.varying:
            factor = lax.expand_dims(factor, [d for d in range(x.ndim) if d not in self.varying])
        return (x.astype(jnp.float32) * factor).astype(x.dtype)


class Parts:
    """The parts into which reshapes cut the dimensions of an operand, with their extents."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.sizes: dict[Part, int] = {(i,): extent for i, extent in enumerate(shape)}
        self._cut: dict[Part, tuple[Part, Part]] = {}

    def of(self, dims: Sequence[Sequence[Part]]) -> tuple[tuple[Part, ...], ...]:
        """Returns the parts of each dimension in `dims` as they are cut now, without parts of extent 1."""
        return tuple(tuple(itertools.chain(*map(self._pieces, dim))) for dim in dims)

    def _pieces(self, part: Part) -> tuple[Part, ...]:
        if part in self._cut:
            return sum(map(self._pieces, self._cut[part]), ())
        return (part,) if self.sizes[part] != 1 else ()

    def reshaped(self, dims: Sequence[Sequence[Part]], shape: Sequence[int]) -> tuple[tuple[Part, ...], ...] | None:
        """Returns the parts of each dimension after a reshape of an array with the parts `dims` to `shape`, and cuts
        parts where needed. Returns None if extents do not divide, or are symbolic or 0; parts may be cut even then."""
        left, found = [*itertools.chain(*self.of(dims))], []
        if not all(isinstance(extent, int) and extent for extent in (*shape, *map(self.sizes.get, left))):
            return None
        for extent in shape:
            dim: tuple[Part, ...] = ()
            while extent > 1 and left:
                part = left.pop(0)
                size = self.sizes[part]
                if size > extent and size % extent == 0:
                    first, rest = self._cut[part] = (*part, 0), (*part, 1)
                    self.sizes |= {first: extent, rest: size // extent}
                    left.insert(0, rest)
                    part, size = first, extent
                if extent % size:
                    return None
                dim, extent = (*dim, part), extent // size
            found.append(dim)
        return tuple(found)

    def scale(self, value: Any, dims: Sequence[Sequence[Part]], ndim: int) -> Scale:
        """Returns `value`, with the parts `dims`, as a scale of the operand, which has `ndim` dimensions. The scale's
        `dims` have -1 for parts that are not a whole dimension of the operand (blocks)."""
        whole = {self.of([[(i,)]])[0]: i for i in range(ndim)} | {(): None}
        return Scale(value, tuple(whole.get(dim, -1) for dim in self.of(dims)))

    def spread(self, x: Any, dims: Sequence[Sequence[Part]], over: Sequence[Part]) -> jax.Array:
        """Returns the scale `x`, with the parts `dims`, as a float32 factor of sums (`of_sums`) with one dimension for
        each part in `over`. It is repeated along parts that `dims` lacks; `over` has all parts of `dims`."""
        own = tuple(itertools.chain(*dims))
        x = jnp.reshape(of_sums(x), [self.sizes[part] for part in own])
        at = [over.index(part) for part in own]
        x = lax.transpose(x, sorted(range(len(own)), key=at.__getitem__))
        return lax.broadcast_in_dim(x, [self.sizes[part] for part in over], sorted(at))


def of_sums(scale: Any) -> jax.Array:
    """Returns a scale as a float32 factor of sums. Infinity becomes NaN, because it makes a weight of 0 NaN."""
    factor = jnp.asarray(scale, jnp.float32)
    return factor + lax.stop_gradient(jnp.where(jnp.isinf(factor), jnp.nan, 0).astype(jnp.float32))


def summable(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Returns (x times powers of two, the inverse powers in float32, with extent 1 along `dims`). Each sum along `dims`
    has one power, by its largest number: 2**-64 above 2**63, 2**32 below 2**-96, else 1. The powers keep sums of narrow
    numbers in float32's range. A float16 x is returned unchanged, with ones."""
    if x.dtype == np.float16:
        return x, jnp.ones([1 if i in dims else n for i, n in enumerate(x.shape)], jnp.float32)
    most = jnp.max(jnp.abs(lax.stop_gradient(x)), dims, keepdims=True, initial=0)
    is_small = (most > 0) & (most < 2.0**-96)
    power = jnp.where(most > 2.0**63, 2.0**-64, jnp.where(is_small, 2.0**32, 1)).astype(jnp.float32)
    return x * power.astype(x.dtype), 1 / power


def centred(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the scale times a power of two, the inverse), in float32. The largest number is then near 2**24."""
    scale = scale.astype(jnp.float32)
    exponent = jnp.frexp(jnp.max(jnp.abs(lax.stop_gradient(scale)), keepdims=True, initial=0))[1]
    exponent = (exponent - 24).clip(-126, 126)
    return scale * jnp.ldexp(jnp.float32(1), -exponent), jnp.ldexp(jnp.float32(1), exponent)


def repeated(graph: Graph, v: Any, parts: Parts, dims: Any) -> tuple[Any, Any]:
    """Returns (the array that `v` repeats, the parts of its dimensions), through broadcasts, reshapes of broadcasts and
    reshapes that only add or remove dimensions of extent 1; `v` itself if it repeats none. `dims`: the parts of v's
    dimensions. A dimension of extent 1 has no parts. May cut `parts`."""

    def varying(v: Any, dims: Any) -> Any:
        return tuple(dim if extent != 1 else () for dim, extent in zip(dims, v.aval.shape, strict=True))

    found = v, varying(v, dims) if v.aval.shape else ()
    while (eqn := graph.made_by(found[0])) is not None:
        if len(eqn.invars) != 1 or jax_tracing.is_literal(eqn.invars[0]):
            break
        x, own, maker = eqn.invars[0], None, graph.made_by(eqn.invars[0])
        extents, of_x = ([n for n in each.aval.shape if n != 1] for each in (found[0], x))
        if eqn.primitive.name == "broadcast_in_dim":
            own = tuple(found[1][i] for i in eqn.params["broadcast_dimensions"])
        elif eqn.primitive.name == "reshape" and (
            extents == of_x or (maker is not None and maker.primitive.name == "broadcast_in_dim")
        ):
            own = parts.reshaped(found[1], x.aval.shape)
        if own is None:
            break
        found = x, varying(x, own)
    return found
