"""64-bit types in a function that contains `with jax.enable_x64(True)`: JAX lowers and transposes it outside the scope.
Rules that take no care create 32-bit constants and results there: other values, or a program that does not compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

RNG = np.random.default_rng(0)
X, W, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 4, 8), (2, 8, 8), (8,)))

FUNCTIONS = {
    "matmul": (jaxmp.matmul, jnp.matmul, (X[0], W[0])),
    "batch": (jaxmp.matmul, jnp.matmul, (X, W)),
    "gelu": (
        lambda *args: jaxmp.linear(*args, activation="gelu"),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (X, W[0], BIAS),
    ),
    "tanh": (
        lambda *args: jaxmp.linear(*args, activation="tanh"),
        lambda x, w, b: jnp.tanh(x @ w + b),
        (X[0], W[0], BIAS),
    ),
    "ragged_dot": (
        lambda x, w: jaxmp.ragged_dot(x, w, jnp.array([1, 3])),
        lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([1, 3])),
        (X[0], W),
    ),
}


def in_64_bits(f, dtype=np.float64):
    def run(*args):
        with jax.enable_x64(True):
            return f(*(x.astype(dtype) for x in args))

    return run


@pytest.mark.usefixtures("promotion_of_users")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_in_enable_x64_is_computed_in_64_bits(name):
    ours, plain, args = FUNCTIONS[name]

    def loss(f):
        return lambda *args: in_64_bits(lambda *args: (f(*args) ** 2).sum())(*args).astype(np.float32)

    def runs(f):
        yield jax.jit(in_64_bits(f))(*args)
        yield jax.jit(jax.vmap(in_64_bits(f)))(*(np.stack([x, 2 * x]) for x in args))
        yield from jax.jit(jax.grad(jax.checkpoint(loss(f)), range(len(args))))(*args)

    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in args]
        want = [plain(*wide), np.stack([plain(*wide), plain(*(2 * x for x in wide))])]
        want += jax.grad(lambda *args: (plain(*args) ** 2).sum(), range(len(args)))(*wide)
    for got, exact in zip(runs(ours), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-11 if got.dtype == np.float64 else 1e-6, atol=1e-12)


def test_int64_does_not_wrap():
    x = np.full((2, 2), 2**20, np.int32)
    batch = np.stack([x, x])
    for args in ((x, x), (batch, batch)):
        got = jax.jit(in_64_bits(jaxmp.matmul, np.int64))(*args)
        np.testing.assert_array_equal(got, np.full(args[0].shape, 2**41))


# Outside the scope JAX's own dot_general has no transpose, so "grad" needs a call.
@pytest.mark.parametrize(
    ("wrap", "level"),
    [("jit", "run_to_run"), ("vmap", "run_to_run"), ("jit", "topology"), ("vmap", "topology"), ("grad", "topology")],
)
def test_fuse_evaluates_in_the_scope_of_enable_x64(wrap, level):
    def excess(x):
        """Returns the difference of two large numbers."""
        with jax.enable_x64(True):
            y = x.astype(jnp.float64)
            return (y @ y - 64 * 4096.0**2).astype(jnp.float32)

    fused = jaxmp.fuse(excess, determinism=level)
    x = np.float32(4096 + RNG.random((3, 64)))
    if wrap == "grad":
        np.testing.assert_array_equal(jax.jit(jax.grad(jax.checkpoint(fused)))(x[0]), 2 * x[0])
        return
    got = jax.jit(jax.vmap(fused))(x) if wrap == "vmap" else jnp.stack([jax.jit(fused)(row) for row in x])
    np.testing.assert_array_equal(got, np.float32((x.astype(np.float64) ** 2).sum(1) - 64 * 4096.0**2))
