"""`jax.nn.scaled_matmul` and `scaled_dot_general` through `jaxmp.fuse`. Without these tests, a scale could multiply a
wrong block, on one device or on a mesh, and a gradient could differ from JAX's definition."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision_cases import E4M3, E5M2, E8M0, FP4, powers, small

import jaxmp

# Kind: the types of both operands, the size of a block, the type of its scale.
KINDS = {
    "mx": (E4M3, E4M3, 32, E8M0),
    "mx, e5m2": (E5M2, E4M3, 32, E8M0),
    "nv": (FP4, FP4, 16, E4M3),
    "plain": (np.float32, np.float32, 32, np.float32),
}
fused = jax.jit(jaxmp.fuse(jax.nn.scaled_matmul), static_argnames="preferred_element_type")


def case(rng, kind, batch, m, n, k):
    """Returns (operands and scales, the exact result)."""
    of_a, of_b, size, of_scales = KINDS[kind]
    arrays = [small(rng, (batch, m, k), of_a), small(rng, (batch, n, k), of_b)]
    scales = [powers(rng, (batch, rows, k // size), of_scales) for rows in (m, n)]
    wide = [
        x.astype(np.float32) * np.repeat(scale.astype(np.float32), size, axis=-1)
        for x, scale in zip(arrays, scales, strict=True)
    ]
    return [*arrays, *scales], np.einsum("bmk,bnk->bmn", *wide)


@pytest.mark.small("values")
@pytest.mark.parametrize("shape", [(2, 128, 128, 128), (3, 5, 7, 64), (1, 1, 1, 32), (2, 16, 130, 96)])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, shape, rng):
    operands, wanted = case(rng, kind, *shape)
    np.testing.assert_array_equal(fused(*operands), wanted)
    assert fused(*operands, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16


# Shardings of each operand and its scales, and of the result of a shard_map body.
SPLITS = {
    "rows": (P(None, "x"), P(), P(None, "x")),
    "columns": (P(), P(None, "x"), P(None, None, "x")),
    "k": (P(None, None, "x"), P(None, None, "x"), P()),
}


@pytest.mark.parametrize("kind", ["mx", "nv"])
@pytest.mark.parametrize("axes", ["explicit", "auto", "shard_map"])
def test_meshes(axes, kind, rng):
    operands, wanted = case(rng, kind, 1, 48, 32, 64)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit if axes == "explicit" else AxisType.Auto,))
    runs, placed = [], []
    for name, (of_a, of_b, of_d) in SPLITS.items():
        specs = (of_a, of_b, of_a, of_b)

        def body(*args, is_summed=name == "k"):
            d = jax.nn.scaled_matmul(*args)
            return lax.psum(d, "x") if is_summed else d

        mapped = jax.shard_map(jaxmp.fuse(body), mesh=mesh, in_specs=specs, out_specs=of_d)
        runs.append(mapped if axes == "shard_map" else jaxmp.fuse(jax.nn.scaled_matmul))
        placed.append([jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip(operands, specs, strict=True)])
    with jax.set_mesh(mesh):
        run = jax.jit(lambda placed: [f(*each) for f, each in zip(runs, placed, strict=True)])
        for d in run(placed):
            np.testing.assert_array_equal(d, wanted)
        assert run.lower(placed).compile().as_text().count('custom_call_target="jaxmp_matmul') == len(runs)


@pytest.mark.parametrize(("mode", "size"), [("mxfp8", 32), ("nvfp4", 16)])
def test_scaled_dot_general(mode, size, rng):
    """The result is the product of JAX's quantized operands; gradients by JAX's rule are such products, too."""
    quantize = jaxmp.quantize.mxfp8 if mode == "mxfp8" else jaxmp.quantize.nvfp4
    config = jax.nn.get_scaled_dot_general_config(mode, None if mode == "mxfp8" else jnp.ones((1,), jnp.float32))
    x, w, ct = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (32, 128), (64, 32)))
    numbers = (((1,), (1,)), ((), ()))

    def layer(x, w):
        return jax.nn.scaled_dot_general(x, w, numbers, preferred_element_type=jnp.float32, configs=[config] * 3)

    def pulled(f):
        return lambda x, w, ct: (lambda d, pull: (d, *pull(ct)))(*jax.vjp(f, x, w))

    def rounded(x):
        return jaxmp.quantize.dequantize(*quantize(jnp.asarray(x)))

    wanted = [rounded(x) @ rounded(w).T]
    if mode == "mxfp8":  # nvfp4 gradients are rounded at random
        wanted += [rounded(ct) @ rounded(w.T).T, rounded(ct.T) @ rounded(x.T).T]
    run = jax.jit(lambda *args: [pulled(jaxmp.fuse(layer))(*args), jaxmp.fuse(pulled(layer))(*args)])
    with jax.numpy_rank_promotion("allow"):  # JAX's nvfp4 needs it
        results = run(x, w, ct)
    for found in results:
        for d, each in zip(found, wanted, strict=False):
            np.testing.assert_allclose(d, each, rtol=1e-5, atol=1e-4)


# Scales after exact sums of int8, as models (AQT, qwix) write them.


def _by_rows_and_columns(x, w, s, t, bias):
    z = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return jax.nn.relu(z.astype(jnp.float32) * s[:, None] * t[None, :] + bias[None, :])


def _by_kept_dimensions(x, w, s, t, bias):
    z = jnp.einsum("mk,nk->mn", x, w.T, preferred_element_type=jnp.int32).astype(jnp.float32)
    return jax.nn.relu(t.reshape(1, -1) * (z * s[:, None]))


def _by_the_tensor(x, w, s, t, bias):
    z = jnp.matmul(x, w, preferred_element_type=jnp.int32).astype(jnp.float32)
    return jax.nn.relu((z * t[0] * t[None, :]).astype(jnp.bfloat16))


def _by_blocks_of_columns(x, w, s, t, bias):
    z = jnp.matmul(x, w, preferred_element_type=jnp.int32).astype(jnp.float32)
    return jax.nn.relu(z * s[:, None] * jnp.repeat(t[: t.size // 2], 2)[None, :])


LAYERS = {
    _by_rows_and_columns: "int8 x int8 -> float32, scales outer_vec_fp32 x outer_vec_fp32",
    _by_kept_dimensions: "int8 x int8 -> float32, scales outer_vec_fp32 x outer_vec_fp32",
    _by_the_tensor: "int8 x int8 -> bfloat16, scales scalar_fp32 x outer_vec_fp32",
    _by_blocks_of_columns: "",
}


@pytest.mark.parametrize("axis_type", [None, AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_layers_of_int8(layer, axis_type, rng):
    x, w = rng.integers(-128, 128, (8, 16), np.int8), rng.integers(-128, 128, (16, 12), np.int8)
    args = x, w, powers(rng, (8,)), powers(rng, (12,)), small(rng, 12, np.float32)
    want, specs, fused_layer = layer(*map(jnp.asarray, args)), (P("x"), P(), P("x"), P(), P()), jaxmp.fuse(layer)
    mesh = axis_type and jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        if mesh:
            args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        np.testing.assert_array_equal(jax.jit(fused_layer)(*args), want)
        found = jaxmp.explain(fused_layer, quiet=True)(*args)
    is_left = layer is _by_blocks_of_columns and not mesh  # XLA multiplies by t, and applies relu
    assert (found.calls, found.left) == ((0, 1) if is_left else (1, 0))
    assert layer is _by_blocks_of_columns or found.rows[0].dtypes == LAYERS[layer]


def test_gradients_of_scales_of_int8(rng):
    x, w = rng.integers(-3, 4, (8, 16), np.int8), rng.integers(-3, 4, (16, 12), np.int8)
    args = x, w, powers(rng, (8,)), powers(rng, (12,)), small(rng, 12, np.float32)
    for derive in (lambda f: jax.grad(jaxmp.fuse(f), (2, 3, 4)), lambda f: jaxmp.fuse(jax.grad(f, (2, 3, 4)))):
        got = derive(lambda *args: jnp.sum(_by_rows_and_columns(*args)))(*map(jnp.asarray, args))
        want = jax.grad(lambda *args: jnp.sum(_by_rows_and_columns(*args)), (2, 3, 4))(*map(jnp.asarray, args))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
