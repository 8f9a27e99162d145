"""Products of groups of rows as a loop of `jnp` products, and values that tests compare with it, exactly."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxmp


def integers(shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def reference(x, w, sizes, first=0):
    """Computes `ragged_dot` by a loop over the groups; the sizes are numbers."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), x.shape[0])
    at = [0, *ends.tolist()]
    rows = [jnp.zeros((at[first], w.shape[2]), x.dtype)]
    for i, matrix in enumerate(w):
        begin, end = (at[min(first + j, len(sizes))] for j in (i, i + 1))
        rows.append(jnp.matmul(x[begin:end], matrix, precision="highest"))
    done = sum(len(part) for part in rows)
    return jnp.concatenate([*rows, jnp.zeros((x.shape[0] - done, w.shape[2]), x.dtype)])


CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def contraction(x, y, sizes):
    """Returns x^T y for the rows of each group."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), x.shape[0]).tolist()
    parts = [(x[begin:end].T, y[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return jnp.stack([jnp.matmul(*part, precision="highest") for part in parts])


def assert_same(got, want):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@functools.partial(jax.jit, static_argnums=0)
def derivatives(f, x, w):
    """Returns the value, a tangent, the cotangents, and the cotangents of a function of the cotangents."""
    moved = integers(x.shape, 2, x.dtype), integers(w.shape, 3, w.dtype)
    d, tangent = jax.jvp(f, (x, w), moved)
    ct = integers(d.shape, 4, d.dtype)

    def second(x, w):
        dx, dw = jax.vjp(f, x, w)[1](ct)
        return (dx * x).sum() + (dw * w).sum()

    return d, tangent, jax.vjp(f, x, w)[1](ct), jax.grad(second, (0, 1))(x, w)


def with_bias(x, w, bias, sizes, act=jax.nn.relu):
    """Adds each group's bias to the loop's products and applies `act`, in the type of x."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    rest = jnp.zeros((x.shape[0] - len(rows), bias.shape[1]), x.dtype)
    return act(reference(x, w, sizes) + jnp.concatenate([bias[rows], rest]))


def shardings(ndim, axes):
    """Returns all shardings of an array; several axes of one dimension are in the mesh's order."""
    found = []
    for where in itertools.product(range(-1, ndim), repeat=len(axes)):
        dims = [tuple(axis for axis, at in zip(axes, where, strict=True) if at == i) for i in range(ndim)]
        found.append(P(*(dim or None for dim in dims)))
    return found


def activated(x, w, bias, sizes, **options):
    return jaxmp.ragged_dot(x, w, sizes, bias=bias, activation="relu", **options)
