"""A matrix times its own transpose: only half is computed. Without these tests, a half could stay unwritten, a block
could be at another rank's place, the two halves could differ, and bits under a level could depend on whether both
operands are in one memory."""

import re

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_text
from conftest import require_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_bitwise_equal

ROWS, COLS = P("x", None), P(None, "x")
# (sharding of x, whether columns are multiplied, shardings of the result)
SPLITS = {
    "all_gather": (ROWS, False, (ROWS, COLS)),
    "along_k": (COLS, False, (P(), ROWS, COLS)),
    "all_gather_of_columns": (COLS, True, (ROWS, COLS)),
    "rows_along_k": (ROWS, True, (P(), ROWS, COLS)),
    "grid": (P("x", "y"), False, (P("x", "y"),)),
}


def product(is_of_columns, **options):
    """Returns the function x.T @ y or x @ y.T."""
    return lambda x, y: jaxmp.matmul(x, y, transpose_a=is_of_columns, transpose_b=not is_of_columns, **options)


def check(f, x, again, is_ordered=False):
    """Asserts that one array gives the result of two, bitwise under a level, and symmetric bits, also under `jit`."""
    one, two = f(x, x), f(x, again)
    if is_ordered:
        assert_bitwise_equal(one, two)
    rtol, atol = (2e-2, 0.2) if x.dtype.itemsize == 2 else (1e-4, 1e-3)
    np.testing.assert_allclose(*(np.asarray(d, np.float64) for d in (one, two)), rtol, atol)
    assert_bitwise_equal(jax.jit(lambda x: f(x, x))(x), one)
    assert_bitwise_equal(np.asarray(one).T, one)
    return one


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("extents", [(301, 97), (515, 300), (256, 0), (1, 7), (0, 5)], ids=str)
def test_one_device(extents, dtype, rng, x64):
    x, digits = (jnp.asarray(numbers, dtype) for numbers in (rng.normal(size=extents), rng.integers(-1, 2, extents)))
    for alpha, level in ((1.0, None), (-0.7, None), (1.0, "topology")):
        options = {"alpha": alpha} | ({"determinism": level} if level else {})
        check(product(False, **options), x, jnp.array(x), level is not None)
        check(product(True, **options), x.T, jnp.array(x.T), level is not None)
    np.testing.assert_array_equal(product(False)(digits, digits), np.asarray(digits) @ np.asarray(digits).T)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split(split, count, dtype, axis_type, rng):
    stored, is_of_columns, results = SPLITS[split]
    shape = (2, count // 2) if split == "grid" else (count, 1)
    require_devices(count)
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(axis_type,) * 2, devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        numbers = np.asarray(rng.normal(size=(516, 260)), dtype)
        x, again = (jax.device_put(numbers.copy(), NamedSharding(mesh, stored)) for _ in range(2))
        whole = product(is_of_columns, determinism="topology")(*(jnp.asarray(numbers),) * 2)
        for out in results:
            given = {} if axis_type == AxisType.Explicit else {"in_shardings": (stored,) * 2, "mesh": mesh}
            check(product(is_of_columns, out_sharding=out, **given), x, again)
            ordered = product(is_of_columns, out_sharding=out, determinism="topology", **given)
            assert_bitwise_equal(check(ordered, x, again, is_ordered=True), np.asarray(whole))


def test_a_complex_product_with_the_conjugate(rng):
    """The result is Hermitian, so one half is the conjugate of the other."""
    x = jnp.asarray(rng.normal(size=(300, 40)) + 1j * rng.normal(size=(300, 40)), jnp.complex64)
    for conjugates in (False, True):
        got = jaxmp.matmul(x, x, transpose_b=True, conjugate_b=conjugates)
        np.testing.assert_allclose(got, x @ (x.conj() if conjugates else x).T, rtol=1e-3, atol=1e-4)


def fused(program):
    return lambda x, **given: jaxmp.fuse(lambda x: program(x, **given))(x)


CALLS = {
    "matmul": lambda x, **given: jaxmp.matmul(x, x, transpose_a=True, **given),
    "dot_general": lambda x, **given: jaxmp.dot_general(x, x, (((0,), (0,)), ((), ())), **given),
    "einsum": lambda x, **given: jaxmp.einsum("ki,kj->ij", x, x, **given),
    "fuse": fused(lambda x, **given: jnp.matmul(x.T, x, **given)),
    "fuse_rows": fused(lambda x, **given: jnp.matmul(x, x.T, **given)),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("axis_type", [None, AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_call_has_one_array_twice(name, axis_type, rng):
    x, given = jnp.asarray(rng.normal(size=(320, 320)), jnp.float32), {}
    if axis_type is not None:
        require_devices(2)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
        x = jax.device_put(x, NamedSharding(mesh, COLS))
        given = {"out_sharding": NamedSharding(mesh, COLS)} if axis_type == AxisType.Explicit else {}
    text = compiled_text(lambda x: CALLS[name](x, **given), x)
    assert re.search(r'custom-call\((\S+), \1[,)].*"jaxmp_matmul"', text), text


def test_gradients(rng):
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((300, 40), (300, 300)))
    for weights in (w, w + w.T):
        got = jax.grad(lambda x, weights=weights: (jaxmp.matmul(x, x, transpose_b=True) * weights).sum())(x)
        want = (np.asarray(weights, np.float64) + np.asarray(weights.T)) @ np.asarray(x)
        largest = np.abs(weights + 0.0) @ np.abs(x) + np.abs(weights.T) @ np.abs(x)
        bounds.judge("gradient", got, want, bounds.PROGRAM * bounds.unit_roundoff(np.float32) * largest)
