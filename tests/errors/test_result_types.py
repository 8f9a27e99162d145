"""Every pair of types that `jnp.matmul` and `lax.dot_general` take, operands and `preferred_element_type`, is taken,
with the same type and values; also those of which no kernel has a product."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

TYPES = ("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")
TYPES += ("float8_e4m3fn", "float8_e5m2")
NN = (((1,), (0,)), ((), ()))


@pytest.fixture(autouse=True)
def on_host():
    cases.require("host")


def small(dtype, shape=(4, 16), seed=0):
    """Small integers, of which every type holds the products' sums but the narrowest."""
    x = np.random.default_rng(seed).integers(0, 2, shape)
    return jnp.asarray(x if dtype == "bool" else x * np.array([1, 0, 1, 1])[:, None] if shape[0] == 4 else x).astype(
        dtype
    )


def taken_by_jax(dtype, out):
    x = jax.ShapeDtypeStruct((4, 16), dtype)
    try:
        jax.eval_shape(lambda x: jnp.matmul(x, x.T, preferred_element_type=out), x)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("dtype", TYPES)
def test_what_jax_takes_has_its_type_and_values(dtype):
    a, b = small(dtype), small(dtype, (16, 3), 1)
    outs = [out for out in TYPES if taken_by_jax(dtype, out)]
    assert dtype in outs

    def products(matmul, dot_general):
        def run(a, b):
            return [
                *(matmul(a, b, preferred_element_type=out) for out in outs),
                *(dot_general(a, b, NN, preferred_element_type=out) for out in outs),
                *(dot_general(a.T, b, (((0,), (0,)), ((), ())), preferred_element_type=out) for out in outs),
            ]

        return jax.jit(run)(a, b)

    want, got = products(jnp.matmul, lax.dot_general), products(jaxmp.matmul, jaxmp.dot_general)
    for w, g, out in zip(want, got, itertools.cycle(outs)):
        assert (w.dtype, w.shape) == (g.dtype, g.shape) == (np.dtype(out), (4, 3))
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w), err_msg=f"{dtype} to {out}")


# Types that JAX multiplies with themselves and promotes beside others, and of which no kernel has a product.
NARROW = ("int4", "uint4", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW += ("float8_e8m0fnu",)


@pytest.fixture
def promotes():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("promotes")
@pytest.mark.parametrize("dtype", [*TYPES, *NARROW])
def test_every_pair_of_types_is_promoted_as_jax_does(dtype):
    for other in (*TYPES, *NARROW):
        a, b = jax.ShapeDtypeStruct((4, 16), dtype), jax.ShapeDtypeStruct((16, 3), other)
        try:
            want = jax.eval_shape(jnp.matmul, a, b)
        except (TypeError, ValueError):
            continue
        assert jax.eval_shape(jaxmp.matmul, a, b) == want, other


PAIRS = [("int8", "bool"), ("bool", "int8"), ("uint4", "bool"), ("float8_e3m4", "int32")]
PAIRS += [(name, name) for name in NARROW]


@pytest.mark.usefixtures("promotes")
@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_products_of_narrow_types_are_those_of_jax(dtype, other, rng):
    a = jnp.asarray(rng.integers(0, 8, (8, 16))).astype(dtype)
    b = jnp.asarray(rng.integers(0, 3, (16, 8))).astype(other)  # sums beyond the narrow integers, which wrap around
    bias = jnp.ones(8, jnp.matmul(a, b).dtype)

    def run(module):
        linear = jaxmp.linear if module is jaxmp else lambda a, b, bias: jnp.matmul(a, b) + bias[None]
        return module.matmul(a, b), module.einsum("ij,jk->ki", a, b), module.matmul(a[0], b), linear(a, b, bias)

    results = (jax.jit(functools.partial(run, module))() for module in (jaxmp, jnp))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
        step = 0.25 if jnp.issubdtype(bias.dtype, jnp.floating) else 0  # JAX may round more than once
        np.testing.assert_allclose(got, want, rtol=step)


@pytest.mark.parametrize("narrow", ["int8", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_weights_of_few_bits_beside_wide_operands(narrow, rng):
    """Without promotion, as in `lax.dot_general`: with an epilog, to another type, and with gradients."""
    x, w = jnp.asarray(rng.integers(-2, 3, (8, 16)), jnp.bfloat16), jnp.asarray(rng.integers(0, 4, (16, 8)))
    w, bias = w.astype(narrow), jnp.arange(8, dtype=jnp.bfloat16)

    def run(dot_general, linear):
        def loss(x):
            return (dot_general(x, w, NN) * bias[None]).sum()

        wide = [dot_general(x.astype(t), w, NN, preferred_element_type="float32") for t in ("bfloat16", "float16")]
        relu = linear(x, w, bias, activation="relu", preferred_element_type="bfloat16")
        return [*wide, dot_general(w.T, x.T, NN), relu, jax.grad(loss)(x)]

    def linear_of_jax(x, w, bias, *, activation, preferred_element_type):
        return jax.nn.relu(lax.dot_general(x, w, NN, preferred_element_type=preferred_element_type) + bias[None])

    got = jax.jit(functools.partial(run, jaxmp.dot_general, jaxmp.linear))()
    for g, w_ in zip(got, jax.jit(functools.partial(run, lax.dot_general, linear_of_jax))(), strict=True):
        assert g.dtype == w_.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w_, np.float32))


def test_without_a_preferred_type_products_of_8_bits_are_those_of_jax(rng):
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        a, b = (jnp.asarray(rng.integers(-2, 3, (4, 4)), jnp.float32).astype(dtype) for _ in range(2))
        for got, want in (
            (jaxmp.matmul(a, b), jnp.matmul(a, b)),
            (jaxmp.matmul(a, b, transpose_b=True), jnp.matmul(a, b.T)),
            (jaxmp.einsum("ij,jk->ik", a, b), jnp.einsum("ij,jk->ik", a, b)),
        ):
            assert got.dtype == want.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_sum_is_rounded_once_and_to_the_type_that_was_asked_for(rng):
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 64), (64, 8)))
    want = jnp.asarray(np.asarray(a, np.float64) @ np.asarray(b, np.float64), jnp.bfloat16)
    got = jaxmp.matmul(a, b, preferred_element_type="bfloat16")
    assert np.mean(np.asarray(got != want)) < 0.05  # double rounding alone
    with jax.enable_x64(True):
        wide = jaxmp.matmul(a, b, preferred_element_type="float64")
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        assert wide.dtype == np.float64
        np.testing.assert_allclose(wide, exact, rtol=1e-13, atol=1e-13)
        both = jaxmp.matmul(a, b, preferred_element_type="complex128")
        np.testing.assert_allclose(both, exact, rtol=1e-13, atol=1e-13)


def test_the_other_options_apply(rng):
    """Epilogs with their further results, levels and c, before the result is converted."""
    a, b = (jnp.asarray(rng.integers(-2, 3, (8, 8)), jnp.float32) for _ in range(2))
    bias = jnp.arange(8, dtype=jnp.float32)
    row = bias[None]
    d, more = jaxmp.matmul(
        a, b, epilog=jaxmp.Epilog.GELU_AUX_BIAS, epilog_inputs={"bias": bias}, preferred_element_type="float16"
    )
    assert (d.dtype, more["gelu_aux"].dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(more["gelu_aux"], a @ b + row)
    d = jaxmp.matmul(a, b, row + a * 0, beta=2.0, determinism="topology", preferred_element_type="float16")
    np.testing.assert_array_equal(d, (a @ b + 2 * row).astype("float16"))
    d = jaxmp.linear(a, b, bias, activation="silu", preferred_element_type="bfloat16")
    np.testing.assert_allclose(d.astype("float32"), jax.nn.silu(a @ b + row), rtol=1e-2)
    grad = jax.grad(lambda a: jaxmp.matmul(a, b, preferred_element_type="float16").astype("float32").sum())(a)
    assert grad.dtype == np.float32
    np.testing.assert_array_equal(grad, jnp.ones((8, 8)) @ b.T)


@pytest.mark.parametrize("out", ["bfloat16", "int32"])
def test_on_meshes(out):
    require_devices(4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    a, b = small("float32", (8, 16)), small("float32", (16, 8), 1)
    with jax.set_mesh(mesh):
        x, y = jax.device_put(a, P(None, "x")), jax.device_put(b, P("x", None))
        d = jax.jit(lambda x, y: jaxmp.matmul(x, y, out_sharding=P("x", None), preferred_element_type=out))(x, y)
        local = functools.partial(jaxmp.matmul_reduce_scatter, axis_name="x", preferred_element_type=out)
        specs = {"in_specs": (P(None, "x"), P("x", None)), "out_specs": P("x", None)}
        by_hand = jax.jit(jax.shard_map(local, **specs))(x, y)
    assert d.sharding == NamedSharding(mesh, P("x", None))
    np.testing.assert_array_equal(np.asarray(d), np.asarray(by_hand))
    np.testing.assert_array_equal(np.asarray(d), np.asarray(jnp.matmul(a, b, preferred_element_type=out)))


def test_what_jax_refuses_is_refused_by_name():
    a = small("int32", (16, 16))
    with pytest.raises(NotImplementedError, match="preferred_element_type int8 is not available for int32 operands"):
        jaxmp.matmul(a, a, preferred_element_type="int8")
    with pytest.raises(TypeError, match=r"preferred_element_type must be a dtype, such as jnp\.float32, got 'typo'"):
        jaxmp.matmul(a, a, preferred_element_type="typo")
    f = a.astype("float8_e5m2")
    with pytest.raises(NotImplementedError, match="float8 goes with float8"):
        jaxmp.matmul(f, f, transpose_b=True, preferred_element_type="float32", implementation="host")
