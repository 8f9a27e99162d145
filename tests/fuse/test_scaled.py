"""`jax.nn.scaled_matmul` and `scaled_dot_general` through `jaxmp.fuse`.

Without these a scale could multiply another block than its own, on one device or on a mesh, and a gradient could differ
from the one that JAX defines.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision_cases import E4M3, E5M2, E8M0, FP4, powers, small

import jaxmp

# By kind: the types of both operands, the size of a block, the type of its scale.
KINDS = {
    "mx": (E4M3, E4M3, 32, E8M0),
    "mx, e5m2": (E5M2, E4M3, 32, E8M0),
    "nv": (FP4, FP4, 16, E4M3),
    "plain": (np.float32, np.float32, 32, np.float32),
}
fused = jax.jit(jaxmp.fuse(jax.nn.scaled_matmul), static_argnames="preferred_element_type")


def case(rng, kind, batch, m, n, k):
    """(the operands, what they give)."""
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


# Shardings of the operands, each beside its scales, and of what a body of shard_map gives.
SPLITS = {
    "rows": (P(None, "x"), P(), P(None, "x")),
    "columns": (P(), P(None, "x"), P(None, None, "x")),
    "k": (P(None, None, "x"), P(None, None, "x"), P()),
}


@pytest.mark.parametrize("kind", ["mx", "nv"])
@pytest.mark.parametrize("axes", ["explicit", "auto", "shard_map"])
def test_meshes(axes, kind, rng):
    """A call, on whatever shards; inside shard_map with its own collective behind it."""
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
    """The product of what JAX quantizes to, and the gradients of its rule: products of quantized operands again."""
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
    if mode == "mxfp8":  # whose gradients are not rounded at random
        wanted += [rounded(ct) @ rounded(w.T).T, rounded(ct.T) @ rounded(x.T).T]
    run = jax.jit(lambda *args: [pulled(jaxmp.fuse(layer))(*args), jaxmp.fuse(pulled(layer))(*args)])
    with jax.numpy_rank_promotion("allow"):  # which JAX's nvfp4 needs
        results = run(x, w, ct)
    for found in results:
        for d, each in zip(found, wanted, strict=False):
            np.testing.assert_allclose(d, each, rtol=1e-5, atol=1e-4)
