"""Levels of determinism on fp8 and fp4. Without these tests, bits could depend on the mesh or the batch, because
operands are decoded in K blocks and scales are applied to sums.
"""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from low_precision_cases import E4M3, F32, IMPLEMENTATIONS, SCALE_MODES, TN, by_name, products_of, scaled, small

import jaxmp
from jaxmp import Epilog, Scaling, testing


def drawn(rng, mode, m, n, k):
    """Returns operands and scales; none of their sums is exact."""
    a, b = (rng.standard_normal(shape).astype(mode.dtype) for shape in ((m, k), (n, k)))
    return a, b, *mode.scales(rng, a.shape, b.shape)


@pytest.mark.small("values", of=lambda case, mode, is_deep: (mode, (case, is_deep)))
@pytest.mark.parametrize("case", by_name("ag", "rs", "ar-data", "grid"), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", SCALE_MODES, ids=lambda mode: mode.id)
@pytest.mark.parametrize("is_deep", [False, True], ids=["", "deep"])
def test_bits_do_not_know_the_mesh(is_deep, mode, case, rng):
    """Ranks hold incomplete blocks of the processor's instructions, and k is cut inside one K block or several."""
    k = 5 * 128 if is_deep else 144 if mode.unit == 16 else mode.unit
    case = case.replace(transposition="NT", per_shard=(mode.unit, mode.unit, k))
    a, b, scale_a, scale_b = drawn(rng, mode, *case.extents)
    options = {"determinism": "topology", **F32}
    want = jaxmp.matmul(a, b, scaling=Scaling(a=scale_a, b=scale_b), **options, **TN)
    testing.assert_bitwise_equal(products_of([(case, (a, b, scale_a, scale_b), options)])[0], want)
    bounds.judge_product(mode.id, want, scaled(a, scale_a), scaled(b, scale_b).T, operands=jnp.bfloat16, out="float32")


@pytest.mark.parametrize("mode", SCALE_MODES, ids=lambda mode: mode.id)
def test_a_row_does_not_know_its_batch(mode, rng):
    """k exceeds one K block of the decoding, which is 1024 deep."""
    unit = 128 if mode.a == "blk128" else mode.unit
    a, b, scale_a, scale_b = drawn(rng, mode, 3 * unit, mode.unit, 1152)
    options = {"determinism": "batch", **F32}
    whole = np.asarray(jaxmp.matmul(a, b, scaling=Scaling(a=scale_a, b=scale_b), **options, **TN))
    for at in (0, unit, 2 * unit):
        rows = slice(at, at + unit)
        block = rows if mode.a != "blk128" else slice(at // 128, at // 128 + 1)
        part = scale_a if np.ndim(scale_a) == 0 else scale_a[block]
        d = jaxmp.matmul(a[rows], b, scaling=Scaling(a=part, b=scale_b), **options, **TN)
        testing.assert_bitwise_equal(d, whole[rows])


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["ag", "rs", "ar", "grid", "ag-transposed", "rs-transposed"])
def test_float8_results_and_gradients_keep_bits_on_any_mesh(name, implementation, rng):
    """Also on "xla", with scales of whole tensors; covers the epilog, the largest values and c."""
    case = by_name(name)[0].replace(transposition="NT", per_shard=(16, 16, 48))
    m, n, k = case.extents
    a, b = (rng.standard_normal(shape).astype(E4M3) for shape in ((m, k), (n, k)))
    c, w = rng.standard_normal((m, n)).astype(np.float16), rng.standard_normal((m, n)).astype(np.float32)

    def program(a, b, c, w, **where):
        def outputs(a, b, c):
            return jaxmp.matmul(
                a, b, c, alpha=0.7, beta=1.3,
                scaling=Scaling(a=jnp.float32(0.3), d=jnp.float32(5), result_amax=True),
                epilog=Epilog.GELU_AUX, preferred_element_type=E4M3, determinism="topology", **where, **TN,
            )  # fmt: skip

        def loss(a, b, c):
            return jnp.sum(outputs(a, b, c)[0].astype(jnp.float32) * w)

        return outputs(a, b, c), jax.grad(loss, (0, 1, 2))(a, b, c)

    want = jax.jit(program)(a, b, c, w)
    mesh = case.jax_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = (*case.stored, case.out, case.out)
        placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, c, w), specs, strict=True)]
        where = {"out_sharding": case.out, "implementation": implementation}
        got = jax.jit(functools.partial(program, **where))(*placed)
    jax.tree.map(testing.assert_bitwise_equal, got, want)


def test_levels_refuse_what_would_be_gathered_with_its_scales(rng):
    blocks = SCALE_MODES[4]
    for name, message in (
        (
            "rs-transposed",
            "scales of whole tensors and rows only where columns of the result are gathered or scattered over 'y'",
        ),
        ("rs", "takes scales of whole tensors and rows only where operands are gathered over 4 ranks"),
    ):
        case = by_name(name)[0].replace(transposition="NT", per_shard=(128, 128, 128))
        operands = drawn(rng, blocks, *case.extents)
        with pytest.raises(NotImplementedError, match=f"{message}; got scaling.a of vec128_fp32"):
            products_of([(case, operands, {"determinism": "batch", "implementation": "xla", **F32})])

    a, b = small(rng, (32, 64), E4M3), small(rng, (48, 64), E4M3)

    def loss(scale, level):
        d = jaxmp.matmul(a, b, scaling=Scaling(b=scale), determinism=level, **F32, **TN)
        return jnp.sum(d)

    assert float(jax.grad(loss)(jnp.float32(1), "batch")) == scaled(a, None).sum(0) @ scaled(b, None).sum(0)
    with pytest.raises(NotImplementedError, match=r'determinism="topology" has no derivative in scaling\.b, which XLA'):
        jax.grad(loss)(jnp.float32(1), "topology")
