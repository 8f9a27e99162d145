"""Global arrays to block-cyclic parts and back.

A redistribution is one all-to-all per dimension, of parts padded to the largest: what each process holds of a
contiguous sharding is sorted by who is to have it, exchanged, and put in place. It is a permutation, so its transpose
is the way back.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmp._src.primitive import collectives
from jaxmp._src.sharding import meshes
from jaxmp._src.spec import process_grid
from jaxmp._src.spec.options import Mesh
from jaxmp._src.spec.process_grid import BlockCyclic, Distributed

# The mesh axes of the process rows and of the process columns.
Axes = tuple[tuple[str, ...], tuple[str, ...]]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def spread(x: jax.Array, mesh: Mesh, axes: Axes, layout: BlockCyclic) -> jax.Array:
    """Global array to data."""
    shape = (x.shape[0], x.shape[1])
    plain = process_grid.contiguous(shape, layout.grid)
    padding = [(0, nb * p - n) for n, nb, p in zip(shape, plain.block, layout.grid, strict=True)]
    if 0 in shape:
        return empty(shape, layout, x.dtype)
    if any(after for _, after in padding):
        # A sharded dimension cannot grow by a number that its shards do not divide.
        x = jnp.pad(_resharded(x, mesh, P(None, None)), padding)
    data: jax.Array = move(_resharded(x, mesh, P(*axes)), mesh, axes, Distributed(shape, plain), layout)
    return data


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def collect(data: jax.Array, shape: tuple[int, int], mesh: Mesh, axes: Axes, layout: BlockCyclic) -> jax.Array:
    """Data to global array."""
    if 0 in shape:
        return jnp.zeros(shape, data.dtype)
    x = move(data, mesh, axes, Distributed(shape, layout), process_grid.contiguous(shape, layout.grid))
    return x if x.shape == shape else _resharded(x, mesh, P(None, None))[: shape[0], : shape[1]]


def empty(shape: tuple[int, int], layout: BlockCyclic, dtype: np.dtype) -> jax.Array:
    rows, cols = layout.local_shape(shape)
    return jnp.zeros((rows * layout.grid[0], cols * layout.grid[1]), dtype)


def _resharded(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`x` with this sharding where shardings are part of types; elsewhere shard_map brings it there."""
    if not meshes.has_explicit_axes(mesh):
        return x
    return meshes.reshard(x, mesh, meshes.type_spec(x), spec, is_explicit=True)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def move(data: jax.Array, mesh: Mesh, axes: Axes, source: Distributed, target: BlockCyclic) -> jax.Array:
    """Data in one layout to data in another on the same grid."""
    shape = source.shape
    if 0 in shape:
        return empty(shape, target, data.dtype)
    exchanges = [process_grid.exchange(shape, dimension, source.layout, target) for dimension in range(2)]

    def exchange_all(x: jax.Array) -> jax.Array:
        for dimension, (exchange, names) in enumerate(zip(exchanges, axes, strict=True)):
            if exchange is not None:
                x = _exchanged(x, dimension, names, exchange)
        return x

    return jax.shard_map(exchange_all, mesh=mesh, in_specs=P(*axes), out_specs=P(*axes))(data)


def _exchanged(x: jax.Array, dimension: int, names: tuple[str, ...], exchange: process_grid.Exchange) -> jax.Array:
    nprocs, me = len(exchange.take), lax.axis_index(names)
    send = jnp.asarray(exchange.send.reshape(nprocs, -1))[me]
    x = jnp.take(x, send, axis=dimension, mode="fill", fill_value=0)
    x = collectives.all_to_all(x, names, dimension, dimension)
    return jnp.take(x, jnp.asarray(exchange.take)[me], axis=dimension, mode="fill", fill_value=0)
