"""Factors that `jaxmp.fuse` moves across a rounding, at both ends of each type's range. Without these tests a moved
scale could underflow (gradients of float16 layers do), sums could overflow before they are scaled, and an infinite
scale could miss a NaN. Compares the errors of fused results and of plain JAX against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

M, K, N = 3, 32, 16


def decode(q, s, x):
    return q.astype(x.dtype) * s.astype(x.dtype)


# Places of the factor: the function, and the shape of the factor.
PLACES = {
    "columns": (lambda x, q, s: x @ decode(q, s, x), (N,)),
    "columns of the left operand": (lambda x, q, s: (decode(q, s, x).T @ x.T).T, (N,)),
    "the tensor": (lambda x, q, s: x @ decode(q, s, x), ()),
    "rows of k": (lambda x, q, s: x @ decode(q, s, x), (K, 1)),
    "blocks of k": (lambda x, q, s: x[:1] @ decode(q.reshape(2, K // 2, N), s, x).reshape(K, N), (2, 1, N)),
    "a group": (lambda x, q, s: lax.ragged_dot(x, decode(q[None], s, x), jnp.array([M])), (1, 1, N)),
    "behind the product": (lambda x, q, s: (x @ q.astype(x.dtype)) * s.astype(x.dtype), (N,)),
    "a number behind": (lambda x, q, s: (x @ q.astype(x.dtype)) * 2.0**-9, ()),
}
NARROW = {"float16": "int8", "bfloat16": "float8_e4m3fn", "float32": "int8"}
ENDS = [(1, 1), (1e36, 1e-3), (1e36, 1e-36), (1e-36, 1e-3), (1e-33, 1e36), (3e38, 1e-30), (1, 0), (1, np.inf)]
# Magnitudes of x and of the factor.
MAGNITUDES = {
    "float16": [(1, 1), (1, 5e-4), (1e-3, 5e-4), (6e-5, 1), (6e-5, 6e-5), (3e4, 5e-4), (3e4, 3e4), (1, 0), (1, np.inf)],
    "bfloat16": ENDS,
    "float32": ENDS,
}


def operands(dtype, shape):
    """Returns (x for each magnitude, q, the factor for each magnitude)."""
    rng = np.random.default_rng(0)
    q = rng.integers(-9, 10, (K, N)) if NARROW[dtype] == "int8" else rng.standard_normal((K, N))
    q[0] = 0  # times an infinite factor, this is NaN
    xs, scales = [], []
    for of_x, of_s in MAGNITUDES[dtype]:
        xs.append(np.minimum(rng.uniform(0.3, 1, (M, K)) * rng.choice([-1, 1], (M, K)), 1) * of_x)
        scale = rng.uniform(0.3, 1, shape) * (of_s if np.isfinite(of_s) else 1)
        scales.append(scale if np.isfinite(of_s) else np.where(np.arange(scale.size).reshape(shape) == 0, of_s, scale))
    return jnp.asarray(np.stack(xs), dtype), jnp.asarray(q, NARROW[dtype]), jnp.asarray(np.stack(scales), dtype)


def check(got, plain, want, dtype):
    """Asserts that `got` is at most a few roundings worse than plain JAX, and NaN or infinite where it must be."""
    got, plain, want = (np.asarray(y, np.float64) for y in (got, plain, want))
    limits, size = jnp.finfo(dtype), np.abs(np.where(np.isfinite(want), want, 0)).max(axis=(-2, -1), keepdims=True)
    least = float(limits.smallest_subnormal if dtype == "float16" else limits.tiny)  # XLA flushes smaller numbers
    with np.errstate(invalid="ignore"):
        is_near = np.abs(got - want) <= 2 * np.abs(plain - want) + 4 * limits.eps * size + 4 * least
    is_beyond = ~np.isfinite(plain) & (np.isfinite(want) | np.isfinite(got))  # plain JAX overflows on the way
    is_alike = np.where(np.isnan(want), np.isnan(got), is_near | is_beyond | (got == plain))
    assert is_alike.all(), [(each[~is_alike][:3]) for each in (got, plain, want)]


def in_float64(runs, *arrays):
    with jax.enable_x64(True):
        return [run(*(jnp.asarray(np.asarray(y, np.float64)) for y in arrays)) for run in runs]


@pytest.mark.parametrize("dtype", NARROW)
def test_products_hold_at_both_ends(dtype):
    # Large sums overflow before a later factor unless XLA keeps them in float32.
    places = [place for name, place in PLACES.items() if dtype == "float16" or "behind" not in name]
    cases = [(f, *operands(dtype, shape)) for f, shape in places]

    def each(f):
        return lambda x, q, s: lax.map(lambda pair: f(pair[0], q, pair[1]), (x, s))

    plain, fused = (
        jax.jit(lambda given, wrap=wrap: [each(wrap(f))(*y) for (f, _), y in zip(places, given, strict=True)])
        for wrap in (lambda f: f, jaxmp.fuse)
    )
    arrays = [case[1:] for case in cases]
    for (f, *of_f), got, theirs in zip(cases, fused(arrays), plain(arrays), strict=True):
        check(got, theirs, in_float64([each(f)], *of_f)[0], dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_do_not_underflow(dtype):
    x, q, s = operands(dtype, (N,))
    size = {"float16": 1e-4, "bfloat16": 1e-36}[dtype]
    ct = jnp.asarray(np.random.default_rng(1).standard_normal((M, N)) * size, dtype)
    x, s = x[:1], jnp.asarray(np.asarray(s[:1], np.float32) * 5e-4, dtype)
    layer = PLACES["columns"][0]

    def pulled(f):
        return lambda x, q, s, ct: jax.vjp(lambda x: f(x, q, s), x)[1](ct.astype(x.dtype))[0]

    runs = pulled(layer), jaxmp.fuse(pulled(layer)), pulled(jaxmp.fuse(layer))
    plain, *got = jax.jit(lambda *args: [run(*args) for run in runs])(x[0], q, s[0], ct)
    (want,) = in_float64([pulled(layer)], x[0], q, s[0], ct)
    for dx in got[: 1 if dtype == "bfloat16" else 2]:
        check(dx, plain, want, dtype)


def test_scales_of_int8_are_not_multiplied_first():
    """A call takes one scale per operand; a product of several may be 0 or infinite although the results are not."""

    def sums(x, w):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32).astype("float32")

    forms = [lambda x, w, t, c: sums(x, w) * t * c * t, lambda x, w, t, c: sums(x, w) * t * t * c]
    w = np.random.default_rng(0).integers(-99, 100, (K, N), np.int8)
    w[:, 0] = 0
    run = jax.jit(lambda *args: [jaxmp.fuse(f, determinism="batch")(*args) for f in forms])
    for size in (1e-20, 1e20):
        args = jnp.asarray(w.T), jnp.asarray(w), jnp.float32(size), jnp.full(N, 1 / size, jnp.float32)
        for got, f in zip(run(*args), forms, strict=True):
            np.testing.assert_allclose(got, f(*args), rtol=1e-6)
    assert run.lower(*args).as_text().count("call @jaxmp_call") + run.lower(*args).as_text().count("jaxmp_matmul") >= 2
