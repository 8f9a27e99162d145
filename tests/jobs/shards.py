"""Arrays on the devices of several processes, placed and compared without a collective."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding


def mesh_of(shape=None, names=("x",)):
    """Returns a mesh of explicit axes, by default one over all devices of the job, and sets it."""
    shape = shape or (jax.device_count(),)
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))
    jax.set_mesh(mesh)
    return mesh


def put(mesh, x, spec):
    """Puts `x`, which every process has, on the devices of the mesh."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def ones(mesh, shape, spec, dtype="float32"):
    return put(mesh, np.ones(shape, dtype), spec)


def compare(got, want, message=""):
    """Asserts that each device's part of `got` is the same part of the array `want`, to the bit."""
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(want)[shard.index], err_msg=message)
