"""The judge of bits: which elements differ, by how much, and apparent differences that are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.tools.audit import bits
from jaxmp._src.tools.audit.variation import Variation

TINY = np.float32(2.0**-149)
# Case: (type, actual, expected, elements that differ, units in the last place, absolute difference).
CASES = {
    "equal": ("float32", [1, -0.0, np.nan, np.inf], [1, -0.0, np.nan, np.inf], 0, 0, 0),
    "one unit": ("float32", [1, 1 + 2.0**-23], [1, 1], 1, 1, 2.0**-23),
    "zeros": ("float32", [0.0], [-0.0], 1, 1, 0),
    "across zero": ("float32", [TINY], [-TINY], 1, 3, 2 * float(TINY)),
    "float64": ("float64", [-1e300], [1e300], 1, 2 * int(np.float64(1e300).view(np.int64)) + 1, 2e300),
    "bfloat16": (jnp.bfloat16, [256, 3], [258, 3], 1, 1, 2),
    "fp8": (jnp.float8_e4m3fn, [1, 1.25], [1, 1], 1, 2, 0.25),
    "complex": ("complex64", [1 + 2j], [1 + 5j], 1, 0xA00000, 3),
    "integers": ("int32", [2**31 - 1], [-(2**31)], 1, 2**32 - 1, 2.0**32 - 1),
    "bools": ("bool", [True, False], [False, False], 1, 1, 1),
    "NaN": ("float32", [np.nan, 1], [1, 1], 1, 0, np.inf),
    "infinities": ("float32", [np.inf, 1], [-np.inf, 1], 1, 4278190081, np.inf),
}


@pytest.mark.parametrize("name", CASES)
def test_differences_have_their_numbers(name):
    dtype, actual, expected, differing, ulps, absolute = CASES[name]
    found = bits.difference(np.array(actual).astype(dtype), np.array(expected).astype(dtype))
    if not differing:
        assert found is None
        return
    assert (found.differing, found.elements, found.absolute) == (differing, len(actual), absolute)
    assert found.ulps == ulps


def test_every_copy_is_looked_at(mesh_of):
    mesh = mesh_of({"x": 2})
    shards = [jax.device_put(np.array([value], np.float32), device) for value, device in zip((1, 2), mesh.devices)]  # noqa: B905
    copies = jax.make_array_from_single_device_arrays((1,), NamedSharding(mesh, P()), shards)
    assert bits.difference(copies, np.ones(1, np.float32)).absolute == 1


def test_another_order_is_told_from_other_values(rng):
    x = rng.standard_normal((6, 4)).astype(np.float32)
    x[0, :2] = -0.0, np.nan
    moved, varied = x[::-1].copy(), Variation("4 devices")
    assert varied.is_reordered(moved, x)
    assert varied.is_reordered(np.concatenate([moved, x]).reshape(8, 6), x)  # two copies
    assert not varied.is_reordered(moved[:5], x)
    assert not varied.is_reordered(np.abs(moved), x)  # the sign of zero differs
    moved[0, 0] = np.nextafter(moved[0, 0], np.float32(9))
    assert not varied.is_reordered(moved, x)
    x, moved = x[1:], moved[:5]
    least = varied.least_difference(moved, x)
    assert (least.differing, least.ulps) == (1, 1)
    assert varied.least_difference(np.nextafter(x, np.float32(9)), x) is None  # already in the same order
