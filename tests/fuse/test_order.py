"""`fuse` evaluates the whole program in order; otherwise a failed check could be missed, or another one reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

X = jnp.ones((4, 4))
NINE = jnp.array(9)


def unread(x):
    _ = x[NINE]
    return x @ x


def log_then_index(x):
    a = jnp.log(-x)
    return x[NINE].sum() + a.sum() + jnp.sum(x @ x)


def index_then_log(x):
    b = x[NINE]
    return jnp.log(-x).sum() + b.sum() + jnp.sum(x @ x)


def before_a_product(x):
    a = jnp.log(-x)
    return jax.nn.relu(x @ (x * jnp.inf - jnp.inf)) + a


def by_the_user(x):
    checkify.check(jnp.all(x < 0), "not negative")
    y = jax.nn.gelu(x @ x)
    checkify.check(jnp.all(x > 2), "not large")
    return y


def in_a_loop(x):
    def step(c, i):
        _ = x[i]
        return jax.nn.relu(c @ x), None

    return lax.scan(step, x, jnp.arange(6))[0]


def in_a_branch(x):
    return lax.cond(x[0, 0] > 0, unread, lambda x: x, x)


def in_a_derivative(x):
    return jax.grad(lambda x: jnp.sum(unread(x) ** 2))(x)


def in_a_weight(x):
    q, scale = (100 * x).astype(jnp.int8), jnp.ones(4) / (x[0] - x[0])
    return x @ (q.astype(x.dtype) * scale)


PROGRAMS = (
    unread,
    log_then_index,
    index_then_log,
    before_a_product,
    by_the_user,
    in_a_loop,
    in_a_branch,
    in_a_derivative,
    in_a_weight,
)


def first_error(f, errors):
    error, _ = jax.jit(checkify.checkify(f, errors=errors))(X)
    return (error.get() or "no error").splitlines()[0].split(" (")[0]


@pytest.mark.parametrize("level", ["run_to_run", "topology"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_checkify_finds_the_first_error(program, level):
    errors = checkify.all_checks | checkify.user_checks
    want = first_error(program, errors)
    assert want != "no error"
    assert first_error(jaxmp.fuse(program, determinism=level), errors) == want


@pytest.mark.parametrize("is_compiled", [True, False])
def test_effects_keep_their_order(is_compiled, mesh_of):
    said = []

    def say(text):
        jax.debug.callback(lambda: said.append(text), ordered=True)

    def program(x, w):
        say("first")
        y = jnp.matmul(x, w, out_sharding=P("x"))
        say("second")
        bias = jax.pure_callback(lambda: said.append("bias") or np.ones(4, np.float32), jnp.ones(4))
        say("third")
        z = jax.nn.gelu(y + bias)
        say("fourth")
        return z

    with jax.set_mesh(mesh_of({"x": 1}, AxisType.Explicit)):
        fused = jaxmp.fuse(program)
        jax.block_until_ready((jax.jit(fused) if is_compiled else fused)(X, X))
        jax.effects_barrier()
    assert [text for text in said if text != "bias"] == ["first", "second", "third", "fourth"]
    assert "bias" in said
