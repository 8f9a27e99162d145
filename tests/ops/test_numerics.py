"""Rounding: products and gradients of every type and layout against float64, under the componentwise bound.

Placement is tested bitwise elsewhere; here a wrong accumulator, a narrowed partial sum or a gradient that lost a
conjugation would show.
"""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P

import jaxmp

EXPLICIT = modes.BY_ID["explicit"]
COMPLEX = ("complex64", "complex128")


def placed(case, *arrays):
    return [EXPLICIT.put(case, x, s) for x, s in zip(arrays, (*case.stored, case.out), strict=False)]


@pytest.mark.small("pairs")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX[:7]))
def test_product_within_the_bound(case, dtype, implementation, rng):
    cases.require(implementation)
    case = case.replace(dtype=dtype, per_shard=(67, 43, 301))
    a, b = case.values(rng)
    with jax.enable_x64(dtype in cases.NEEDS_X64), EXPLICIT.scope(case):
        d = EXPLICIT.run(EXPLICIT.product(case, implementation=implementation), *placed(case, a, b))
    want = cases.wide(a) @ cases.wide(b)
    if dtype in cases.NEEDS_X64:  # float64 has no wider judge than itself, so half of what is allowed is the judge's
        bounds.judge_product(case.id, d, cases.wide(a), cases.wide(b), want, operands=dtype, c=2 * bounds.PRODUCT)
    else:
        bounds.judge_product(case.id, d, cases.wide(a), cases.wide(b), want, operands=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX[:7]))
def test_sixteen_bit_products_are_as_good_as_one_rounding(case, dtype, rng):
    """The accumulator's error is far below the last bit of D, so one rounding of D is nearly all that is allowed."""
    cases.require(None)
    case = case.replace(dtype=dtype, per_shard=(67, 43, 301))
    a, b = case.values(rng)
    with EXPLICIT.scope(case):
        d = EXPLICIT.run(EXPLICIT.product(case), *placed(case, a, b))
    a, b = cases.wide(a), cases.wide(b)
    want = a @ b
    accumulated = bounds.PRODUCT * bounds.unit_roundoff("float32") * (np.abs(a) @ np.abs(b))
    bounds.judge(case.id, d, want, 1.001 * bounds.unit_roundoff(dtype) * np.abs(want) + accumulated)


@pytest.mark.parametrize(
    "case", cases.by_id([cases.BY_NAME[n] for n in ("local", "ag", "rs", "ar", "grid", "rs-transposed")])
)
def test_a_long_contraction(case, rng):
    """k in the thousands: the bound does not drift with it."""
    cases.require(None)
    case = case.replace(per_shard=(5, 7, 4099))
    a, b = case.values(rng)
    with EXPLICIT.scope(case):
        d = EXPLICIT.run(EXPLICIT.product(case), *placed(case, a, b))
    bounds.judge_product(case.id, d, cases.wide(a), cases.wide(b), operands="float32")


def gradients(f, a, b, w):
    """Gradients of Re(sum(w * d)): linear, so the bound is that of one product."""
    return jax.grad(lambda a, b: jnp.sum(jnp.real(w * f(a, b))), (0, 1))(a, b)


def check_gradients(case, rng, **options):
    m, n, _ = case.extents
    a, b = case.values(rng)
    w = cases.normal(rng, (m, n), case.dtype)
    with jax.enable_x64(case.dtype in cases.NEEDS_X64), EXPLICIT.scope(case):
        f = EXPLICIT.product(case, **options)
        got = EXPLICIT.run(functools.partial(gradients, f), *placed(case, a, b, w))
    with jax.enable_x64(True):
        plain = functools.partial(reference.matmul, **case.transpose, **case.conjugate)
        a, b, w = map(cases.wide, (a, b, w))
        want = gradients(plain, a, b, w)
        major = gradients(functools.partial(reference.matmul, **case.transpose), *map(np.abs, (a, b, w)))
    u = bounds.unit_roundoff(case.dtype)
    for name, x, y, z in zip("ab", got, want, major, strict=True):
        assert x.dtype == case.dtype
        bounds.judge(f"{case.id} d{name}", x, y, bounds.PROGRAM * u * np.asarray(z))


@pytest.mark.small(
    "values",
    of=lambda case, transposition: ((case.pattern, case.computes_transposed, case.gathers, transposition), case),
)
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id(cases.CASES))
def test_gradients_of_every_layout_and_transposition(case, transposition, rng):
    cases.require(None)
    check_gradients(case.replace(per_shard=(3, 5, 7), transposition=transposition), rng)


@pytest.mark.small("values", of=lambda case, transposition: ((case.pattern, transposition), case))
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_gradients_xla(case, transposition, rng):
    check_gradients(case.replace(per_shard=(3, 5, 7), transposition=transposition), rng, implementation="xla")


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", [dtype for dtype in cases.DTYPES if dtype != "float32"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_gradients_of_every_type(case, dtype, rng):
    cases.require(None)
    check_gradients(case.replace(per_shard=(3, 5, 7), dtype=dtype, transposition="TN"), rng)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("conjugation", [(True, False), (False, True), (True, True)], ids=["a", "b", "both"])
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX[:5]))
def test_gradients_of_conjugated_operands(case, transposition, conjugation, rng):
    """JAX's convention: the gradient of a conjugated operand is conjugated."""
    cases.require(None)
    case = case.replace(per_shard=(3, 5, 2), dtype="complex64", transposition=transposition, conjugation=conjugation)
    check_gradients(case, rng)


@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_gradients_of_a_widened_result(case, rng):
    """bfloat16 operands, float32 result: float32 cotangents, bfloat16 gradients rounded once."""
    cases.require(None)
    case = case.replace(per_shard=(3, 5, 7), dtype="bfloat16")
    m, n, _ = case.extents
    a, b = case.values(rng)
    w = rng.standard_normal((m, n)).astype(np.float32)
    with EXPLICIT.scope(case):
        f = EXPLICIT.product(case, preferred_element_type=jnp.float32)
        da, db = EXPLICIT.run(functools.partial(gradients, f), *placed(case, a, b, w))
    a, b, w = map(cases.wide, (a, b, w))
    for name, got, left, right in (("da", da, w, b.T), ("db", db, a.T, w)):
        assert got.dtype == jnp.bfloat16
        allowed = bounds.unit_roundoff("bfloat16") * 1.01 * np.abs(left @ right)
        allowed += bounds.PRODUCT * bounds.unit_roundoff("float32") * (np.abs(left) @ np.abs(right))
        bounds.judge(f"{case.id} {name}", got, left @ right, allowed)


# Types -----------------------------------------------------------------------------------------------------------

MIXED = {
    ("float32", "bfloat16"): "float32",
    ("float16", "bfloat16"): "float32",
    ("float16", "float32"): "float32",
    ("float32", "complex64"): "complex64",
    ("float64", "float32"): "float64",
    ("complex64", "float64"): "complex128",
}


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize(("left", "right", "result"), [(*pair, result) for pair, result in MIXED.items()])
def test_mixed_operands_follow_jax(left, right, result, implementation, rng, standard_promotion, x64):
    cases.require(implementation)
    a, b = cases.normal(rng, (5, 7), left), cases.normal(rng, (7, 3), right)
    assert jnp.matmul(a, b).dtype == result
    for x, y in ((a, b), (b.T, a.T)):
        d = jaxmp.matmul(jnp.asarray(x), jnp.asarray(y), implementation=implementation)
        assert d.dtype == result
        bounds.judge_product(f"{left} {right}", d, cases.wide(x), cases.wide(y), operands=result, c=8)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_python_scalars_do_not_promote(dtype, implementation, rng):
    cases.require(implementation)
    with jax.enable_x64(dtype in cases.NEEDS_X64):
        a, b, c = (jnp.asarray(cases.normal(rng, (4, 4), dtype)) for _ in range(3))
        for alpha, beta in ((2, 3), (0.5, 0.25), (np.float64(0.5), np.int32(2))):
            d = jaxmp.matmul(a, b, c, alpha=alpha, beta=beta, implementation=implementation)
            assert d.dtype == dtype
            wide = [cases.wide(x) for x in (a, b, c)]
            want = alpha * (wide[0] @ wide[1]) + beta * wide[2]
            allowed = (
                8 * bounds.unit_roundoff(dtype) * (alpha * np.abs(wide[0]) @ np.abs(wide[1]) + beta * np.abs(wide[2]))
            )
            bounds.judge(f"{dtype} {alpha} {beta}", d, want, allowed)


def test_c_and_bias_of_narrower_types_are_widened(standard_promotion):
    cases.require(None)
    a, b = jnp.ones((2, 3)), jnp.ones((3, 4))
    c, bias = jnp.full((2, 4), 0.5, jnp.bfloat16), jnp.full(4, 0.25, jnp.float16)
    d = jaxmp.matmul(a, b, c, beta=2.0, epilog=jaxmp.Epilog.BIAS, epilog_inputs={"bias": bias})
    assert d.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(d), np.full((2, 4), 4.25))


@pytest.mark.parametrize("precision", [None, "default", "high", "highest", jax.lax.Precision.HIGHEST, ("high", None)])
def test_every_precision_that_jax_knows(precision, rng):
    cases.require(None)
    a, b = (rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
    d = jaxmp.matmul(jnp.asarray(a), jnp.asarray(b), precision=precision)
    bounds.judge_product(str(precision), d, cases.wide(a), cases.wide(b), operands="float32")


def test_non_finite_operands_stay_in_their_rows_and_columns(rng):
    """A NaN reaches its own row only: no scaling or blocking may spread it."""
    cases.require(None)
    case = cases.BY_NAME["rs"].replace(per_shard=(4, 9, 5))
    a, b = case.values(rng)
    a[3, 2], b[1, 5] = np.nan, np.inf
    with EXPLICIT.scope(case):
        d = np.asarray(EXPLICIT.run(EXPLICIT.product(case), *placed(case, a, b)))
    is_finite = np.ones(d.shape, bool)
    is_finite[3], is_finite[:, 5] = False, False
    np.testing.assert_array_equal(np.isfinite(d), is_finite)
    np.testing.assert_array_equal(np.isnan(d[3]), True)


def test_bias_sharded_as_the_result_needs_no_gather(rng):
    cases.require(None)
    case = cases.BY_NAME["ag-data"].replace(per_shard=(3, 5, 7))
    a, b = case.integers(rng)
    bias = np.arange(case.extents[1], dtype=np.float32)
    with EXPLICIT.scope(case):
        f = EXPLICIT.product(case, epilog=jaxmp.Epilog.BIAS)
        x = [*placed(case, a, b), None, EXPLICIT.put(case, bias, P(case.out[1]))]
        np.testing.assert_array_equal(np.asarray(EXPLICIT.run(f, *x)), a @ b + bias)
