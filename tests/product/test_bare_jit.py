"""Programs under a bare `jit` on automatic axes, in layouts where the partitioner's call is not the plainest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

M, K, N = 16, 32, 512
# Shardings of a, b and the result in which ranks share columns of the result, scattered or gathered.
SCATTERED = P(None, "x"), P("x", "y"), P("y", "x")
GATHERED = P("x", None), P(None, "x"), P("x", None)


def traced_alpha(a, b, c, scale, determinism):
    return jaxmp.matmul(a, b, c, alpha=scale, beta=scale, determinism=determinism)


def gradient(a, b, c, scale, determinism):
    def loss(a, b):
        bias = {"bias": c[0]}
        return (jaxmp.matmul(a, b, epilog=Epilog.RELU_BIAS, epilog_inputs=bias, determinism=determinism) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(a, b)


def derivative_and_sums(a, b, c, scale, determinism):
    _, aux = jaxmp.matmul(a, b, epilog=Epilog.RELU_AUX, determinism=determinism)
    d, more = jaxmp.matmul(a, b, epilog=Epilog.DRELU_BGRAD, epilog_inputs=aux, determinism=determinism)
    return d, more["drelu_bgrad"]


@pytest.mark.parametrize("shardings", [SCATTERED, GATHERED], ids=["scattered", "gathered"])
@pytest.mark.parametrize(
    ("program", "determinism"),
    [
        (traced_alpha, "run_to_run"),
        (gradient, "run_to_run"),
        (gradient, "batch"),
        (derivative_and_sums, "batch"),
        (derivative_and_sums, "topology"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_results_are_those_of_one_device(program, determinism, shardings, rng):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    a, b, c = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    of_a, of_b, of_d = (NamedSharding(mesh, spec) for spec in shardings)

    def constrained(*operands):
        results = program(*operands, determinism)
        first, *rest = results if isinstance(results, tuple) else (results,)
        where = of_a if first.shape == a.shape else of_d
        return jax.lax.with_sharding_constraint(first, where), *rest

    scale = jnp.float32(2)
    want = jax.tree.leaves(jax.jit(program, static_argnums=4)(a, b, c, scale, determinism))
    got = jax.jit(constrained)(jax.device_put(a, of_a), jax.device_put(b, of_b), c, scale)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
