"""Bits do not depend on which device comes last to a product, also if numbers are subnormal. XLA takes subnormal
numbers as zero. A device that waits for the others resumes on one of our threads, and any free thread computes tiles.
Without these tests, bits could change from run to run."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_bitwise_equal

TINY, LARGE = np.float32(1e-40), np.float32(1e30)  # their product is a normal number, or 0
STEPS = 3_000_000  # a loop of some milliseconds: a device waits 0.1 ms for the others on its own thread


def numbers(seed, shape, unit):
    return (np.random.default_rng(seed).integers(1, 8, shape) * unit).astype(np.float32)


def spin(steps):
    """Returns 1 after `steps` steps of arithmetic, which no compiler can remove."""
    x = jax.lax.fori_loop(0, steps, lambda i, x: x * jnp.float32(0.5) + jnp.float32(1), jnp.float32(1))
    return jnp.where(x > 0, jnp.float32(1), jnp.float32(0))


def program(a, b, last, **options):
    """Computes a product that device `last` reaches last; the arithmetic after it shows a subnormal number."""
    steps = jnp.where(jax.lax.axis_index("x") == last, STEPS, 0)
    d = jaxmp.matmul_all_reduce(a * spin(steps), b, axis_name="x", **options)
    one = jnp.where(d[0, 0] >= 0, jnp.float32(1), jnp.float32(0))
    return d + jnp.sum((a * one) * LARGE)  # depends on the product, so it runs after it


def run_on(mesh, operands, **options):
    specs = (P(None, "x"), P("x", None))
    run = jax.jit(
        jax.shard_map(
            functools.partial(program, **options),
            mesh=mesh,
            in_specs=(*specs, P()),
            out_specs=P("x", None),
            check_vma=False,
        )
    )
    return [np.asarray(run(*operands, jnp.int32(last % 4))) for last in range(12)]


@pytest.mark.parametrize("options", [{}, {"determinism": "batch"}, {"determinism": "topology"}], ids=str)
@pytest.mark.parametrize("extents", [(8, 8, 16), (96, 160, 512)], ids=str)
def test_bits_do_not_depend_on_which_device_comes_last(extents, options, mesh_of):
    cases.require(None)
    m, n, k = extents
    operands = numbers(0, (m, k), TINY), numbers(1, (k, n), LARGE)
    runs = run_on(mesh_of({"x": 4}, jax.sharding.AxisType.Auto), operands, **options)
    for got in runs:
        assert_bitwise_equal(got, runs[0])
        assert not np.any(got)  # as in XLA: a product with a subnormal number is 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("extents", [(1, 3, 5), (4, 64, 64), (300, 200, 600)], ids=str)
def test_products_treat_subnormal_numbers_as_zero(extents, dtype):
    """On the main thread and on XLA's, with any kernel: few rows in place, tiles, one order of sums."""
    cases.require(None)
    m, n, k = extents
    a = jnp.asarray(numbers(0, (m, k), TINY)).astype(dtype)
    b = jnp.asarray(numbers(1, (k, n), LARGE)).astype(dtype)
    for determinism in ("run_to_run", "batch", "topology"):
        f = functools.partial(jaxmp.matmul, determinism=determinism)
        for call in (f, jax.jit(f)):
            assert not np.any(np.asarray(call(a, b)).astype(np.complex64))
