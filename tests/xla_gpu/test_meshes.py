"""How a call on XLA:GPU learns the devices of its mesh: a communicator belongs to certain devices.

Without these tests, a program could use the communicator of another mesh with the same shape.
"""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_calls import mesh_over, operands, put

import jaxmp


@pytest.mark.parametrize("is_eager", [False, True], ids=["jit", "eager"])
@pytest.mark.parametrize("scope", [jax.set_mesh, contextlib.nullcontext], ids=["set_mesh", "operands alone"])
def test_meshes_of_one_shape_follow_each_other(scope, is_eager):
    """Also if only the operands tell the mesh and JAX already has the program of another mesh."""
    compiled = {}
    for order in ((0, 1), (2, 3), (1, 0), (3, 1), (0, 1)):
        mesh = mesh_over(order)
        for name in ("all_gather", "reduce_scatter"):
            with scope(mesh):
                product, given, expected = operands(name, mesh)
                product = product if is_eager else compiled.setdefault(name, jax.jit(product))
                d = product(*given)
            np.testing.assert_array_equal(d, expected)
            assert [shard.device for shard in d.addressable_shards] == list(mesh.devices)


def test_a_shard_map_over_an_abstract_mesh_knows_its_devices():
    """A user's shard_map inside jit; its programs do not serve another mesh."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8) % 5

    @jax.jit
    def product(a, b):
        return jax.shard_map(
            lambda a, b: jaxmp.all_gather_matmul(a, b, "y"),
            in_specs=(P("y", None), P(None, "y")),
            out_specs=P(None, "y"),
            mesh=jax.typeof(a).sharding.mesh,
        )(a, b)

    for order in ((1, 0), (2, 3)):
        mesh = mesh_over(order)
        given = put(x, mesh, P("y", None)), put(x, mesh, P(None, "y"))
        assert f"devices = dense<[{order[0]}, {order[1]}]>" in product.lower(*given).as_text()
        np.testing.assert_array_equal(product(*given), x @ x)
