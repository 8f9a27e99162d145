"""Calls trace and lower under JAX's flags that users set and that will become defaults. Without these tests, under
jax_remat3 a checkpoint's policy could miss products, so that all of them run twice."""

import re

import cases
import coming_flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp


def losses(x, w, v, bias):
    """Yields products of all patterns, with epilogs of calls and epilogs that XLA computes, on axes x and y."""
    whole, rows = P(None, None), P("x", None)
    at_x, at_xy = jax.sharding.reshard(x, P(None, "x")), jax.sharding.reshard(x, P("x", "y"))
    w_rows = jax.sharding.reshard(w, rows)
    gathered = jax.sharding.reshard(x, P(("x", "y"), None)), jax.sharding.reshard(w, P(("x", "y"), None))
    yield jaxmp.linear(at_x, w_rows, bias, activation="gelu", out_sharding=whole)  # all-reduce
    yield jaxmp.linear(at_x, w_rows, bias, activation="gelu", out_sharding=P("x", None))
    yield jaxmp.linear(at_x, w_rows, bias, activation="gelu", out_sharding=P(None, "x"))  # computed transposed
    yield jaxmp.matmul(at_xy, jax.sharding.reshard(w, P("x", "y")), out_sharding=P("x", "y"))  # grid
    yield jaxmp.matmul(*gathered, out_sharding=P(("x", "y"), None))
    yield jaxmp.mlp(x, jax.sharding.reshard(w, P(None, "x")), None, w_rows, bias, activation="silu", out_sharding=whole)
    yield jaxmp.einsum("bij,bjk->bik", *(jnp.stack([each] * 2) for each in (x, w)))
    yield jax.vmap(lambda v: jaxmp.matmul(x, v, determinism="batch"))(v)
    yield jax.shard_map(in_shard_map, out_specs=rows)(at_x.T, jax.sharding.reshard(bias, P("x")), bias)


def in_shard_map(x, part, bias):
    """Multiplies by a weight that all ranks share, with an alpha that differs between ranks."""
    return jaxmp.matmul(x, jnp.outer(bias, bias), x, alpha=part.sum(), beta=2.0)


def values_and_gradients(mesh):
    with jax.set_mesh(mesh):
        rng = np.random.default_rng(0)
        shapes = (8, 8), (8, 8), (2, 8, 8), (8,)
        operands = [cases.put(rng.integers(-2, 3, s).astype(np.float32), mesh, P(*[None] * len(s))) for s in shapes]

        def loss(*operands):
            return sum(y.sum() * (i + 1) for i, y in enumerate(losses(*operands)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*operands)


@pytest.mark.parametrize("name", [*coming_flags.SAID_ELSEWHERE, "jax_remat3"])
def test_values_and_gradients_under_a_flag(name, mesh_of):
    if name == "jax_remat3" and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.10 has no shard_map under jax_remat3")
    mesh = mesh_of({"x": 2, "y": 2})
    want = values_and_gradients(mesh)
    with coming_flags.FLAGS[name](coming_flags.SAID_ELSEWHERE.get(name, True)):
        got = values_and_gradients(mesh)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.10 has no shard_map under jax_remat3")
def test_a_policy_keeps_products_under_the_coming_checkpoint(mesh_of):
    mesh = mesh_of({"x": 2})

    def calls(policy):
        def layer(x, w):
            return jnp.sin(jaxmp.linear(jnp.sin(jaxmp.matmul(x, w)), w, jnp.ones(8)))

        def loss(x, w):
            return jax.checkpoint(layer, policy=policy)(x, w).sum()

        x = cases.put(np.ones((8, 8), np.float32), mesh, P())
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, x)
        return len(re.findall("custom_call @jaxmp_matmul", program.as_text()))

    with coming_flags.FLAGS["jax_remat3"](True), jax.set_mesh(mesh):
        assert (calls(None), calls(jaxmp.dots_saveable)) == (8, 6)


@pytest.mark.skipif("jax_custom_jvp3" not in coming_flags.FLAGS, reason="JAX 0.10 has no jax_custom_jvp3")
def test_xlas_partitioner_asks_for_a_gradient_under_custom_jvp3(mesh_of):
    """The partitioned body contains jax.nn.relu's derivative, in an equation of JAX that has no lowering."""
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    x, w = (cases.put(np.ones(s, np.float32), mesh, P("x", None)) for s in ((8, 16), (16, 12)))

    def loss(x, w):
        y = jax.lax.with_sharding_constraint(jaxmp.linear(x, w, activation="relu"), P(None, "x"))
        return (y**2).sum()

    with jax.set_mesh(mesh), coming_flags.FLAGS["jax_custom_jvp3"](True):
        for gradient, shape in zip(jax.jit(jax.grad(loss, (0, 1)))(x, w), (x.shape, w.shape), strict=True):
            np.testing.assert_array_equal(gradient, np.full(shape, 384.0 if shape == x.shape else 256.0))
