"""alpha and beta as scalar arrays and tracers: in every mode, differentiated, batched, carried by a loop.

What would be silently wrong without it: beta * C added once per rank, a gradient in alpha that is one rank's part of
it, a scalar that widens the result.
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

import jaxmp
from jaxmp import Epilog

MATRIX = modes.pairs(modes.MODES, [case.replace(per_shard=(4, 4, 4)) for case in cases.MATRIX])
EXPLICIT = modes.BY_ID["explicit"]


def operands_of(case, rng, draw=cases.normal):
    m, n, _ = case.extents
    return (*case.values(rng), draw(rng, (m, n), case.dtype), draw(rng, (m, n), case.dtype))


def placed(mode, case, arrays):
    return [mode.put(case, x, spec) for x, spec in zip(arrays, (*case.stored, case.out, case.out), strict=True)]


def value_and_gradients(product, a, b, c, w, alpha, beta):
    """Of a loss that is quadratic in the result; `product(alpha, beta)` gives f(a, b, c)."""

    def loss(a, b, c, alpha, beta):
        d = product(alpha, beta)(a, b, c)
        return jnp.sum(w * d**2), d

    (_, d), grads = jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True)(a, b, c, alpha, beta)
    return d, *grads


def check(name, got, plain, arrays, scalars):
    """Judge against `plain(alpha, beta)` in float64, with what the same program on absolute values allows."""
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in arrays]
        want = value_and_gradients(plain(reference.matmul), *wide, *map(np.float64, scalars))
        majorant = plain(reference.matmul_majorant)
        major = value_and_gradients(majorant, *map(np.abs, wide), *map(np.float64, np.abs(scalars)))
    u = bounds.unit_roundoff("float32")
    for part, x, y, z in zip(("d", "da", "db", "dc", "dalpha", "dbeta"), got, want, major, strict=True):
        assert x.dtype == jnp.float32
        bounds.judge(f"{name} {part}", x, y, 2 * bounds.PROGRAM * u * np.asarray(z))


@pytest.mark.small("values")
@pytest.mark.parametrize(("mode", "case"), MATRIX)
def test_both_scalars_and_their_gradients(mode, case, rng):
    cases.require(None)
    arrays, scalars = operands_of(case, rng), (np.float32(-1.5), np.float32(0.75))
    with mode.scope(case):
        program = functools.partial(value_and_gradients, lambda alpha, beta: mode.product(case, alpha=alpha, beta=beta))
        got = mode.run(program, *placed(mode, case, arrays), *map(jnp.asarray, scalars))

    def plain(matmul):
        return lambda alpha, beta: functools.partial(matmul, alpha=alpha, beta=beta)

    check(f"{mode.id} {case.name}", got, plain, arrays, scalars)


@pytest.mark.small("values")
@pytest.mark.parametrize("traced", [("alpha",), ("beta",)], ids=lambda names: names[0])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_one_of_them_with_an_epilog(case, traced, rng):
    """The other one is a number, and is in the call where it can be."""
    cases.require(None)
    case = case.replace(per_shard=(4, 4, 4))
    arrays, scalars = operands_of(case, rng), (np.float32(-1.5), np.float32(0.75))
    numbers = {"alpha": -1.5, "beta": 0.75}

    def with_options(make):
        def product(alpha, beta):
            given = {"alpha": alpha, "beta": beta}
            chosen = {name: given[name] if name in traced else number for name, number in numbers.items()}
            return make(**chosen, epilog=Epilog.GELU)

        return product

    with EXPLICIT.scope(case):
        program = functools.partial(value_and_gradients, with_options(functools.partial(EXPLICIT.product, case)))
        got = EXPLICIT.run(program, *placed(EXPLICIT, case, arrays), *map(jnp.asarray, scalars))
    check(case.name, got, lambda matmul: with_options(functools.partial(functools.partial, matmul)), arrays, scalars)


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_small_integers_agree_with_numbers_to_the_bit(case, dtype, rng):
    cases.require(None)
    case = case.replace(per_shard=(3, 5, 2), dtype=dtype)
    a, b = case.integers(rng)
    c = rng.integers(-3, 4, case.extents[:2]).astype(a.dtype)
    with EXPLICIT.scope(case):
        x = placed(EXPLICIT, case, (a, b, c, c))[:3]
        want = EXPLICIT.run(EXPLICIT.product(case, alpha=2, beta=-3), *x)
        f = jax.jit(lambda alpha, beta, *x: EXPLICIT.product(case, alpha=alpha, beta=beta)(*x))
        for scalar_type in (jnp.float32, jnp.int32, jnp.bfloat16):
            got = f(jnp.asarray(2, scalar_type), jnp.asarray(-3, scalar_type), *x)
            assert (got.dtype, got.sharding) == (want.dtype, want.sharding)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_scalar_is_rounded_with_the_accumulator_and_the_result_once(rng):
    """bfloat16 operands: alpha stays float32, and so does the product that it scales."""
    cases.require(None)
    a, b = (rng.standard_normal((32, 32)).astype(jnp.bfloat16) for _ in range(2))
    alpha = np.float32(1 + 2**-12)
    d = jax.jit(lambda a, b, alpha: jaxmp.matmul(a, b, alpha=alpha))(a, b, alpha)
    assert d.dtype == jnp.bfloat16
    a, b = cases.wide(a), cases.wide(b)
    want = float(alpha) * (a @ b)
    allowed = 1.001 * bounds.unit_roundoff("bfloat16") * np.abs(want)
    allowed += bounds.PRODUCT * bounds.unit_roundoff("float32") * (np.abs(a) @ np.abs(b))
    bounds.judge("bfloat16", d, want, allowed)


@pytest.mark.parametrize("case", cases.by_id([cases.BY_NAME[name] for name in ("local", "ag-data", "ar-data", "rs")]))
def test_vmap_and_scan_over_scalars(case, rng):
    cases.require(None)
    case = case.replace(per_shard=(4, 4, 4))
    a, b = case.integers(rng)
    scalars = np.arange(1.0, 4.0, dtype=np.float32)
    with EXPLICIT.scope(case):
        x = placed(EXPLICIT, case, (a, b, a @ b, a @ b))

        def scaled(alpha):
            return EXPLICIT.product(case, alpha=alpha, beta=alpha)(*x[:3])

        got = jax.jit(jax.vmap(scaled))(scalars)
        total, _ = jax.jit(lambda s: jax.lax.scan(lambda c, alpha: (c + scaled(alpha), None), x[3], s))(scalars)
        slopes = jax.jit(jax.vmap(jax.grad(lambda alpha: jnp.sum(scaled(alpha)))))(scalars)
    want = 2 * np.asarray(a @ b)
    np.testing.assert_array_equal(np.asarray(got), scalars[:, None, None] * want)
    np.testing.assert_array_equal(np.asarray(total), a @ b + 6 * want)
    np.testing.assert_array_equal(np.asarray(slopes), np.full(3, want.sum()))


def test_linear_takes_alpha(rng):
    cases.require(None)
    x, w, bias = rng.standard_normal((4, 8)), rng.standard_normal((8, 4)), rng.standard_normal(4)
    x, w, bias = (v.astype(np.float32) for v in (x, w, bias))
    got = jax.jit(lambda alpha: jaxmp.linear(x, w, bias, activation="relu", alpha=alpha))(jnp.float32(0.5))
    want = jax.nn.relu(0.5 * (x.astype(np.float64) @ w) + bias)
    bounds.judge("linear", got, want, 8 * bounds.unit_roundoff("float32") * (np.abs(x) @ np.abs(w) + np.abs(bias)))


@pytest.mark.parametrize("name", ["relu_aux", "gelu_aux"])
def test_aux_outputs_are_those_of_the_scaled_product(name, rng):
    cases.require(None)
    case = cases.BY_NAME["ag-data"].replace(per_shard=(3, 5, 2))
    a, b = case.integers(rng)
    epilog = {"relu_aux": Epilog.RELU_AUX, "gelu_aux": Epilog.GELU_AUX}[name]
    with EXPLICIT.scope(case):
        x = placed(EXPLICIT, case, (a, b, a @ b, a @ b))[:2]
        d, aux = EXPLICIT.run(EXPLICIT.product(case, alpha=-2.0, epilog=epilog), *x)
        got, got_aux = jax.jit(lambda alpha: EXPLICIT.product(case, alpha=alpha, epilog=epilog)(*x))(jnp.float32(-2))
    np.testing.assert_array_equal(np.asarray(got_aux[name]), np.asarray(aux[name]))
    bounds.judge(name, got, np.asarray(d), 16 * bounds.unit_roundoff("float32") * np.abs(2 * a @ b))


def test_explain_says_what_a_traced_scalar_changes():
    cases.require(None)
    a, alpha = jax.ShapeDtypeStruct((4, 4), "bfloat16"), jax.ShapeDtypeStruct((), "float32")
    (row,) = jaxmp.explain(lambda a, alpha: jaxmp.matmul(a, a, alpha=alpha, epilog=Epilog.GELU))(a, alpha).rows
    assert row.why.endswith("; alpha traced, so scaling, c and epilog follow the call")
    assert row.dtypes == "bfloat16 x bfloat16 -> float32"
    (row,) = jaxmp.explain(lambda a: jaxmp.matmul(a, a, alpha=2.0, epilog=Epilog.GELU))(a).rows
    assert (row.why, row.epilog) == ("CPU devices of one process", "GELU"), "a number stays in the call"


def test_one_program_serves_every_value():
    cases.require(None)
    a = jnp.ones((4, 4))
    f = jax.jit(lambda alpha: jaxmp.matmul(a, a, alpha=alpha))
    for alpha in (0.0, 1.0, 2.5):
        np.testing.assert_array_equal(np.asarray(f(jnp.float32(alpha))), np.full((4, 4), 4 * alpha))
    assert f._cache_size() == 1
