"""Derivatives and vmap of fp8 and fp4 products, compared with products of decoded operands."""

import bounds
import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from low_precision_cases import E4M3, E8M0, F32, TN, by_name, make_scale, powers, scaled, small

import jaxmp
from jaxmp import CommOptions, Epilog, Scaling


@pytest.mark.small("values")
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["local", "ag", "rs", "ar", "ag-transposed", "rs-transposed", "gather-a", "gather-b"])
def test_gradients(name, out, rng):
    case = by_name(name)[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)
    weight = small(rng, (m, n), np.float32)
    mesh = case.jax_mesh(AxisType.Explicit)

    def ours(a, b, s, t, weight):
        scaling = Scaling(a=s, b=t)
        d = jaxmp.matmul(a, b, scaling=scaling, out_sharding=case.out, preferred_element_type=out, **TN)
        return jnp.sum(d.astype(jnp.float32) * weight)

    def plain(a, b, s, t, weight):
        return jnp.sum((a.astype(jnp.float32) * s) @ (b.astype(jnp.float32) * t).T * weight)

    s, t = np.float32(0.5), np.float32(0.25)
    with jax.set_mesh(mesh):
        specs = (*case.stored, P(), P(), case.out)
        placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, s, t, weight), specs, strict=True)]
        got = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(*placed)
    want = jax.grad(plain, (0, 1, 2, 3))(a, b, s, t, weight)
    for x, g, w in zip((a, b, s, t), got, want, strict=True):
        assert g.dtype == x.dtype
        # Small integers times powers of two: exact until the cast to the operand's type.
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def test_derivatives_take_only_communication_options_that_apply(rng):
    """Partial sums of a bfloat16 result may travel in bfloat16, but partial sums of its float32 derivatives may not."""
    case = by_name("rs")[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)

    def loss(s, comm=None):
        where = {"in_shardings": case.stored, "out_sharding": case.out, "mesh": case.jax_mesh(AxisType.Auto)}
        d = jaxmp.matmul(a, b, scaling=Scaling(a=s), preferred_element_type=jnp.bfloat16, comm=comm, **TN, **where)
        return jnp.sum(d.astype(jnp.float32))

    at = (jnp.float32(0.5),), (jnp.float32(1),)
    given = jax.jvp(lambda s: loss(s, CommOptions(dtype=jnp.bfloat16)), *at)
    assert given == jax.jvp(loss, *at)


def test_gradients_of_c_bias_and_block_scaled_operands(rng):
    a, b = small(rng, (128, 128), E4M3), small(rng, (128, 128), E4M3)
    scale = make_scale(rng, "mx", a.shape)
    rows = powers(rng, (128,))
    c, bias = small(rng, (128, 128), np.float32), small(rng, 128, ml_dtypes.bfloat16)

    def of_blocks(a, c, bias):
        inputs = {"epilog_inputs": {"bias": bias}, "epilog": Epilog.RELU_BIAS}
        return jnp.sum(jaxmp.matmul(a, b, c, beta=2.0, scaling=Scaling(a=scale, b=scale), **inputs, **TN, **F32))

    def of_rows(rows):
        return jnp.sum(jaxmp.matmul(a, b, scaling=Scaling(a=rows, b=rows), **TN, **F32))

    full = np.repeat(scale.astype(np.float32), 32, axis=1)

    def plain(a, c, bias):
        z = (a.astype(jnp.float32) * full) @ scaled(b, scale).astype(np.float32).T
        return jnp.sum(jax.nn.relu(z + 2.0 * c + bias.astype(jnp.float32)[None]))

    for g, w in zip(jax.grad(of_blocks, (0, 1, 2))(a, c, bias), jax.grad(plain, (0, 1, 2))(a, c, bias), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g).astype(np.float32), np.asarray(w).astype(np.float32))
    wide = a.astype(np.float32), b.astype(np.float32)
    want = jax.grad(lambda rows: jnp.sum((wide[0] * rows[:, None]) @ (wide[1] * rows[:, None]).T))(rows)
    bounds.judge("rows", jax.grad(of_rows)(rows), want, 1e-5 * np.abs(want) + 1e-2)


def test_gradients_of_a_c_with_a_scale(rng):
    a, b = small(rng, (16, 32), E4M3), small(rng, (16, 32), E4M3)
    c, w = small(rng, (16, 16), np.float32), small(rng, (16, 16), np.float32)

    def loss(c, scale):
        d = jaxmp.matmul(a, b, c, beta=2.0, scaling=Scaling(c=scale), **TN, **F32)
        return jnp.sum(w * d)

    dc, dscale = jax.grad(loss, (0, 1))(c, jnp.float32(0.25))
    np.testing.assert_array_equal(np.asarray(dc), 0.5 * w)
    assert dscale == 2 * np.sum(w * c)


@pytest.mark.parametrize("aux_dtype", [None, E4M3])
def test_gradients_through_gelu_aux(aux_dtype, rng):
    """The rounding of gelu_aux is ignored: d and gelu_aux have the derivatives of gelu(z) and of z times its scale."""
    a, b = small(rng, (16, 32), E4M3), small(rng, (32, 32), E4M3)
    weights = [powers(rng, (16, 32)) for _ in range(2)]
    scale_of_aux = jnp.float32(0.5) if aux_dtype else jnp.float32(1)

    def ours(s, t):
        scaling = Scaling(a=s, aux=t if aux_dtype else None, aux_dtype=aux_dtype)
        options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX}
        d, more = jaxmp.matmul(a, b, alpha=2.0**-5, scaling=scaling, **options, **TN)
        return sum(jnp.sum(x.astype(jnp.float32) * w) for x, w in zip((d, more["gelu_aux"]), weights, strict=True))

    def plain(s, t):
        z = 2.0**-5 * (s * a.astype(jnp.float32)) @ b.astype(jnp.float32).T
        return jnp.sum(jax.nn.gelu(z) * weights[0]) + jnp.sum(z * t * weights[1])

    got = jax.grad(ours, (0, 1))(jnp.float32(0.5), scale_of_aux)
    want = jax.grad(plain, (0, 1))(jnp.float32(0.5), scale_of_aux)
    size = float(sum(np.abs(w).sum() for w in weights)) * 32 * 9 * 2.0**-5
    for name, g, w in zip(("scale of a", "scale of the aux"), got, want, strict=True):
        if aux_dtype or name == "scale of a":
            # Sums of all elements of cotangents that were cast to float8, scaled by powers of two.
            bounds.judge(name, g, w, 8 * bounds.unit_roundoff("float32") * size)


def test_vmap(rng):
    a, b = small(rng, (3, 128, 128), E4M3), small(rng, (128, 128), E4M3)
    scale_a, scale_b = powers(rng, (3,)), powers(rng, (128, 4), E8M0)
    blocks = powers(rng, (3, 128, 4), E8M0)

    def with_scalar(a, s):
        options = {"preferred_element_type": E4M3, "alpha": 2.0**-6}
        return jaxmp.matmul(a, b, scaling=Scaling(a=s, result_amax=True), **TN, **options)

    d, more = jax.jit(jax.vmap(with_scalar))(a, scale_a)
    each = [with_scalar(x, s) for x, s in zip(a, scale_a, strict=True)]
    np.testing.assert_array_equal(np.asarray(d), np.stack([np.asarray(x) for x, _ in each]))
    np.testing.assert_array_equal(more["result_amax"], np.stack([y["result_amax"] for _, y in each]))
    got = jax.vmap(lambda a, s: jaxmp.matmul(a, b, scaling=Scaling(a=s, b=scale_b), **TN, **F32))(a, blocks)
    want = np.stack([scaled(x, s) @ scaled(b, scale_b).T for x, s in zip(a, blocks, strict=True)])
    np.testing.assert_array_equal(got, want)
    every = jnp.stack([b, b[::-1], b])
    got = jax.vmap(lambda a, b, s: jaxmp.matmul(a, b, scaling=Scaling(a=s, b=scale_b), **TN, **F32))(a, every, blocks)
    want = np.stack([scaled(x, s) @ scaled(y, scale_b).T for x, y, s in zip(a, every, blocks, strict=True)])
    np.testing.assert_array_equal(got, want)
