"""The judge itself: a judge that passes wrong answers would make every other test of rounding worthless."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from bounds import judge, judge_product, unit_roundoff
from reference import matmul_majorant

from jaxmp import Epilog


@pytest.fixture
def product(rng):
    a, b = rng.standard_normal((512, 96)).astype(np.float32), rng.standard_normal((96, 640)).astype(np.float32)
    return a, b, a @ b


def judged(a, b, d):
    return judge_product("product", d, a.astype(np.float64), b.astype(np.float64), operands="float32")


def test_a_right_product_passes_and_reports_its_percentage(product, capsys):
    percentage = judged(*product)
    assert 0 < percentage < 100
    assert f"product: {percentage:.1f} % of the bound" in capsys.readouterr().out


def lost_tile(a, b, d):
    d[32:48, 64:80] = 0  # 0.08 % of the elements: a norm over the matrix would pass it


def one_element_slightly_off(a, b, d):
    d[7, 11] += 1e-4 * np.abs(a[7]) @ np.abs(b[:, 11])


def no_number(value):
    return lambda a, b, d: d.__setitem__((0, 0), value)


def lost_rank(a, b, d):
    d[:] = a[:, :72] @ b[:72]


WRONG = [(lost_tile, "256 of 327680 elements are out"), (one_element_slightly_off, r"1 of 327680 .* at \(7, 11\)")]
WRONG += [(lost_rank, "out of bounds"), *((no_number(x), "1 of 327680") for x in (np.nan, np.inf, -np.inf))]


@pytest.mark.parametrize(("spoil", "said"), WRONG)
def test_a_wrong_product_fails(spoil, said, product):
    spoil(*product)
    with pytest.raises(AssertionError, match=said):
        judged(*product)


def test_shapes_empty_results_and_bounds_of_nought():
    assert judge("empty", np.ones((0, 4)), np.ones((0, 4)), np.ones((0, 4))) == 0
    zero = np.zeros((2, 2))
    assert judge("equal", zero, zero, zero) == 0
    with pytest.raises(AssertionError, match="inf"):
        judge("unequal", zero + 1e-30, zero, zero)
    with pytest.raises(AssertionError, match="shapes"):
        judge("shape", np.ones((1, 4)), np.ones((4, 4)), np.ones((4, 4)))


def test_two_roundings_fail_where_one_is_allowed(rng):
    """bfloat16 partial sums of each rank are rounded before their sum, which a fused product must not do."""
    a, b = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((64, 256), (256, 64)))
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    once = (a64 @ b64).astype(jnp.bfloat16)
    judge_product("once", once, a64, b64, operands="bfloat16", c=1.001)
    parts = [(a64[:, s : s + 64] @ b64[s : s + 64]).astype(jnp.bfloat16).astype(np.float32) for s in range(0, 256, 64)]
    with pytest.raises(AssertionError, match="out of bounds"):
        judge_product("twice", sum(parts).astype(jnp.bfloat16), a64, b64, operands="bfloat16", c=1.001)


@pytest.mark.parametrize("activation", [Epilog.RELU, Epilog.GELU])
def test_a_jvp_wrong_by_a_third_fails(rng, x64, activation):
    """`jax.test_util.check_grads` passes an error of this size."""
    a, b, ta = (rng.standard_normal((96, 96)) / 10 for _ in range(3))

    def tangent(f, *args):
        return jax.jvp(lambda a: f(a, args[1], epilog=activation), args[:1], args[2:])[1]

    want = tangent(reference.matmul, a, b, ta)
    allowed = 4 * unit_roundoff("float32") * tangent(matmul_majorant, *map(np.abs, (a, b, ta)))
    judge("right", want.astype(np.float32), want, allowed)
    with pytest.raises(AssertionError, match="out of bounds"):
        judge("a third off", want * 4 / 3, want, allowed)


def test_the_majorant_of_gelu_dominates_its_derivatives(x64):
    z = np.linspace(0, 8, 401)

    def derivatives(f):
        for _ in range(4):
            yield jax.jit(jax.vmap(f))(z)
            f = jax.grad(f)

    gelu = derivatives(lambda z: reference.activate("gelu", z))
    both_sides = zip(gelu, derivatives(lambda z: reference.activate("gelu", -z)), strict=True)
    major = derivatives(lambda z: matmul_majorant(z[None, None], jnp.ones((1, 1)), epilog=Epilog.GELU)[0, 0])
    for (right, left), dominating in zip(both_sides, major, strict=True):
        assert np.all(np.abs(right) <= dominating)
        assert np.all(np.abs(left) <= dominating)
