"""`quantize`. Without these tests, a scale could be rounded differently from the formats' specification, or be stored
where the library does not read it."""

import functools
import itertools

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision_cases import E4M3, FP4, saturated, scaled, small

import jaxmp
from jaxmp import quantize


def test_mxfp8_is_what_the_specification_says(rng):
    """The scale is the power of two at or above amax / 448; each element is divided by it and rounded once."""
    x = (rng.standard_normal((64, 256)) * np.exp2(rng.integers(-20, 20, (64, 1)))).astype(np.float32)
    x[0, :32] = 0
    x[1, :32] = 448 * 4  # exactly a power of two
    q, scale = quantize.mxfp8(jnp.asarray(x))
    amax = np.abs(x).reshape(64, 8, 32).max(-1)
    with np.errstate(divide="ignore"):
        exponent = np.where(amax == 0, -127, np.ceil(np.log2((amax / np.float32(448)).astype(np.float64))))
    np.testing.assert_array_equal(np.asarray(scale).view(np.uint8), (exponent + 127).astype(np.uint8))
    scaled_x = x.astype(np.float64) / np.repeat(np.exp2(exponent), 32, 1)
    np.testing.assert_array_equal(np.asarray(q), scaled_x.astype(np.float32).astype(E4M3))


def test_nvfp4(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x[0, :16] = 0
    one = quantize.nvfp4_global_scale(quantize.amax(jnp.asarray(x)))
    q, scale = quantize.nvfp4(jnp.asarray(x), global_scale=one)
    y = x / np.float32(one)
    want = (np.abs(y).reshape(64, 16, 16).max(-1) / np.float32(6)).astype(E4M3)
    np.testing.assert_array_equal(np.asarray(scale), want)
    wide = np.repeat(want.astype(np.float32), 16, 1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.asarray(q), saturated(np.where(wide == 0, 0, y / wide), FP4))
    assert float(np.asarray(scale).astype(np.float32).max()) == 448


# Quantizers, and their error for a number near the largest of its block.
QUANTIZERS = {
    "tensor": (quantize.tensor, 2.0**-4),
    "tensor-e5m2": (functools.partial(quantize.tensor, dtype=jnp.float8_e5m2), 2.0**-3),
    "rows": (quantize.rows, 2.0**-4),
    "vec128": (quantize.vec128, 2.0**-4),
    "blk128": (quantize.blk128, 2.0**-4),
    "mxfp8": (quantize.mxfp8, 2.0**-4),
    "nvfp4": (quantize.nvfp4, 0.3),
}
SIZES = (
    *((2.0**-126, 2.0**20), (1e-36, 1.0), (1e-36, 1e-3), (3e-36, 1e30), (1e-33, 1e-10)),
    *((2.0**-100, 2.0**-90), (1e30, 1e-36), (2.0**126, 2.0**-20), (1e30, 1e30)),
)


@pytest.mark.parametrize("quantizer", [quantize.tensor, quantize.rows])
def test_int8_rounds_to_the_nearest_of_255_numbers(quantizer, rng):
    x = jnp.asarray(rng.standard_normal((32, 64)), jnp.float32).at[0].set(0).at[1, 0].set(jnp.nan)
    q, scale = jax.jit(functools.partial(quantizer, dtype=jnp.int8))(x)
    wide, step = np.asarray(x, np.float64), np.broadcast_to(np.asarray(scale).reshape(-1, 1), (32, 1))
    want = np.clip(np.round(np.nan_to_num(wide) / step), -127, 127)
    assert q.dtype == jnp.int8
    assert np.abs(np.asarray(q) - want).max() <= 1  # a tie may fall to the other side in float32
    error = np.abs(np.asarray(quantize.dequantize(q, scale)) - np.nan_to_num(wide))
    is_finite = quantizer is quantize.rows  # a NaN makes the scale of the whole tensor 1
    assert (error[2:] <= 0.5001 * step[2:]).all() or not is_finite


def test_what_has_no_mode_is_refused():
    x = jnp.ones((2, 128, 128))
    for dtype in (jnp.int8, jnp.float32, jnp.float4_e2m1fn, jnp.float8_e8m0fnu):
        with pytest.raises(TypeError, match=r"int8 has one scale|scales only"):
            quantize.mxfp8(x, dtype)
    with pytest.raises(TypeError, match="float8 or a float4 type, got float32"):
        quantize.encode(x, jnp.float32)
    with pytest.raises(TypeError, match=r"its \.real and \.imag"):
        quantize.encode(x.astype(jnp.complex64))
    with pytest.raises(TypeError, match="got None"):
        quantize.expand(None, x)
    for scale in (0.5, [0.5]):
        with pytest.raises(TypeError, match=r"quantize\.dequantize: scale must be an array, got"):
            quantize.dequantize(x.astype(E4M3), scale)
    with pytest.raises(ValueError, match=r"one matrix, got shape \(2, 128, 128\)"):
        quantize.blk128(x)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_numbers_of_every_size(name, rng):
    """Zeros stay 0 and numbers keep their digits over all normal float32 numbers. The product with their scales is
    right even if a scale, its reciprocal or a product of scales is not normal."""
    quantizer, error = QUANTIZERS[name]
    shape = rng.uniform(1, 2, (128, 128)).astype(np.float32)
    shape[0] = 0
    w_quantizer = quantize.tensor if name == "tensor-e5m2" else quantize.vec128 if name == "blk128" else quantizer

    def quantized(quantizer, x):
        if name != "nvfp4":
            return (*quantizer(x), 1.0)
        one = quantize.nvfp4_global_scale(quantize.amax(x))
        return (*quantizer(x, global_scale=one), float(one))

    for size, w_size in SIZES:
        (q, scale, one), (w, w_scale, w_one) = (
            quantized(f, jnp.asarray(shape * np.float32(s))) for f, s in ((quantizer, size), (w_quantizer, w_size))
        )
        x = shape * np.float32(size)
        wide = one * scaled(q, scale)
        bounds.judge(f"{name} {size}", wide, x, error * np.abs(x))
        if name != "nvfp4":
            back = quantize.dequantize(q, scale)
            bounds.judge(f"{name} {size} back", back, wide, 2.0**-23 * np.abs(wide))
            if np.asarray(scale).astype(np.float64).min() >= 2.0**-126:  # XLA's products take smaller ones as 0
                np.testing.assert_array_equal(quantize.expand(scale, q) * q.astype(jnp.float32), back)
        if not 2.0**-126 <= one * w_one < 2.0**128:  # float32 alpha cannot hold it
            continue
        other = w_one * scaled(w, w_scale).T
        with np.errstate(over="ignore"):
            want = (wide @ other).astype(np.float32)
        # Numbers below 2^-126 become 0: one per product if operands are scaled before it.
        for implementation, flushed in (("host", 128 if name == "mxfp8" else 1), ("xla", 128)):
            d = jaxmp.matmul(
                q, w, transpose_b=True, alpha=one * w_one, scaling=jaxmp.Scaling(a=scale, b=w_scale),
                preferred_element_type=jnp.float32, implementation=implementation,
            )  # fmt: skip
            allowed = 2.0**-16 * np.abs(wide) @ np.abs(other) + flushed * 2.0**-126
            bounds.judge_special(f"{name} {size} x {w_size} {implementation}", d, want, allowed)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_gradients_and_sixty_four_bits(name, rng):
    """A gradient has no NaN even if the square of a scale, or a scale of NVFP4, is 0; finite numbers stay finite."""
    quantizer, _ = QUANTIZERS[name]
    shape = rng.uniform(-2, 2, (128, 128))
    shape[:2, :40] = 0

    def loss(x):
        return jnp.sum(quantize.dequantize(*quantizer(x)))

    for size in (0, 1e-45, 2.0**-126, 1e-36, 1e-20, 1e-3, 1):
        x = jnp.asarray(shape * size, jnp.float32)
        assert np.isfinite(jax.grad(loss)(x)).all(), size
        for result, alone in zip(jax.vmap(quantizer)(x[None]), quantizer(x), strict=True):
            np.testing.assert_array_equal(np.asarray(result[0]), np.asarray(alone))
    with jax.enable_x64(True):
        for wide in (shape * 1e300, jnp.asarray(shape * 1e300)):
            q, scale = quantizer(wide)
            back = np.asarray(quantize.dequantize(q, scale)) * (3e38 / 6 / 448 if name == "nvfp4" else 1)
            assert np.all(np.abs(back[shape != 0]) > 1e35)
            assert not back[shape == 0].any()


@pytest.mark.small("values")
@pytest.mark.parametrize("spec", [P("y", None), P(None, "y"), P("y", "x")], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_explicit_axes(name, spec, rng):
    x, mesh = rng.standard_normal((512, 512)).astype(np.float32), cases.BY_NAME["local"].jax_mesh()

    def there_and_back(x):
        q, scale = QUANTIZERS[name][0](x)
        return q, scale, quantize.dequantize(q, scale), quantize.expand(scale, q)

    want = jax.jit(there_and_back)(x)
    with jax.set_mesh(mesh):
        got = jax.jit(there_and_back)(cases.put(x, mesh, spec))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_scale_of_any_amax():
    """The scale is 1 if it would divide by 0 or infinity; otherwise it is a normal number."""
    most = float(np.finfo(np.float32).max)
    amax = jnp.asarray([0, np.inf, np.nan, 2.0**-126, 1e-36, 448, most], jnp.float32)
    want = [1, 1, 1, 2.0**-126, 2.0**-126, 1, most / 448]
    np.testing.assert_array_equal(quantize.scale_for(amax), np.asarray(want, np.float32))
    assert [float(quantize.delayed_scale(x[None])) for x in amax] == quantize.scale_for(amax).tolist()
    np.testing.assert_array_equal(quantize.scale_for(amax, margin=200), [1, 1, 1, *[most] * 4])
    np.testing.assert_array_equal(quantize.nvfp4_global_scale(amax)[:5], want[:5])
    assert quantize.scale_for(jnp.float32(1e-40)) in (1, 2.0**-126)  # subnormal, which a backend may take for 0


def test_delayed_scaling():
    history = jnp.zeros(3)
    assert float(quantize.delayed_scale(history)) == 1
    for amax in (448.0, 896.0, 1.0):
        history = quantize.update_history(history, jnp.float32(amax))
    assert history.tolist() == [1.0, 896.0, 448.0]
    assert float(quantize.delayed_scale(history)) == 2
    assert float(quantize.delayed_scale(history, margin=1)) == 4
    history = quantize.update_history(history, jnp.float32(np.inf))
    assert float(quantize.delayed_scale(history)) == 1


def test_swizzle_and_packing(rng):
    scale = rng.integers(1, 255, (200, 7)).astype(np.uint8)
    flat = np.asarray(quantize.swizzle(jnp.asarray(scale)))
    assert flat.shape == (256 * 8,)
    for row, block in itertools.product(range(200), range(7)):
        assert flat[quantize.scale_offset(row, block, 7)] == scale[row, block]
    assert np.count_nonzero(flat) == scale.size  # the padding is zero
    np.testing.assert_array_equal(quantize.unswizzle(jnp.asarray(flat), 200, 7, jnp.uint8), scale)
    with pytest.raises(ValueError, match=r"take 2048 bytes.*got shape \(8,\)"):
        quantize.unswizzle(jnp.zeros(8, jnp.uint8), 200, 7)
    q = small(rng, (3, 8), FP4)
    packed = np.asarray(quantize.pack_fp4(jnp.asarray(q)))
    np.testing.assert_array_equal(packed, q.view(np.uint8)[:, ::2] | q.view(np.uint8)[:, 1::2] << 4)
    np.testing.assert_array_equal(np.asarray(quantize.unpack_fp4(packed)), q)
