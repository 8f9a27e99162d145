"""Every product of a fused function is a row of `explain`, with a true reason. Without these tests, a product could
silently stay JAX's: in a differentiation rule, in a derivative of JAX's own, or if it is another primitive than
`dot_general`."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_alike
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

X = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (8, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (4, 4)), jnp.float32)


def explained(fn, *args):
    return jaxmp.explain(fn, quiet=True)(*args)


total = jax.custom_vjp(lambda x, w: jnp.sum(x @ w))
total.defvjp(lambda x, w: (jnp.sum(x @ w), w), lambda w, g: (g * jnp.ones_like(X) @ w.T, None))

# The value has no product; the rule has one.
elementwise = jax.custom_vjp(lambda x, w: jnp.sum(x))
elementwise.defvjp(lambda x, w: (jnp.sum(x), (x, w)), lambda kept, g: (g * kept[0] @ kept[1], None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scaled(x, w, by):
    return by * jnp.sum(x @ w)


def _scaled_bwd(by, kept, g):
    return by * g * jnp.ones_like(X) @ kept.T, None


scaled.defvjp(lambda x, w, by: (scaled(x.value, w.value, by), w.value), _scaled_bwd, symbolic_zeros=True)


@jax.custom_jvp
def tangent(x, w):
    return jnp.sum(x @ w)


@tangent.defjvp
def _tangent_jvp_rule(primals, tangents):
    return tangent(*primals), 2 * jnp.sum(tangents[0] @ primals[1])


# Like flash attention: blocks of keys in a loop, and again in the backward pass.
@jax.custom_vjp
def attended(q, k):
    return lax.scan(lambda sums, block: (sums + jnp.sum((q @ block.T) ** 2), None), 0.0, k.reshape(2, 2, 4))[0]


def _attended_bwd(kept, g):
    q, k = kept
    return lax.scan(lambda dq, block: (dq + 2 * g * (q @ block.T) @ block, None), 0 * q, k.reshape(2, 2, 4))[0], None


attended.defvjp(lambda q, k: (attended(q, k), (q, k)), _attended_bwd)

RULES = {
    "custom_vjp": total,
    "rule alone": elementwise,
    "symbolic zeros": lambda x, w: scaled(x, w, 3.0),
    "custom_jvp": tangent,
    "loops": attended,
    "jit": lambda x, w: jax.jit(elementwise)(x, w),
    "scan": lambda x, w: lax.scan(lambda c, _: (c + elementwise(c + x, w), None), 0.0, None, length=3)[0],
    "checkpoint": lambda x, w: jax.checkpoint(total)(jnp.sin(x), w),
    "nested": lambda x, w: total(x * tangent(x, w), w),
    "jnp.linalg": lambda x, w: jnp.linalg.slogdet(x.T @ x + jnp.eye(4))[1],
}


@pytest.mark.parametrize("name", RULES)
def test_products_in_rules_of_differentiation_are_counted(name):
    """Finds as many products as JAX's gradient has; the users' rules keep a level of determinism."""
    plain = jax.grad(RULES[name])
    count = sum(row.count for row in explained(jaxmp.fuse(plain), X, W).rows)
    for level in ("run_to_run", *(("batch",) if name != "jnp.linalg" else ())):
        fused = jax.grad(jaxmp.fuse(RULES[name], determinism=level))
        found = explained(fused, X, W)
        sums = sum(row.count for row in found.rows if 1 in row.extents[::2])  # a level makes calls of them
        assert found.calls - sums + found.left == count > 0, str(found)
        assert level == "run_to_run" or found.left == 0, str(found)
    np.testing.assert_allclose(jax.jit(plain)(X, W), jax.jit(fused)(X, W), rtol=1e-5)


def test_a_rule_that_asks_for_values_runs_as_it_is():
    f = jax.custom_vjp(lambda x: jnp.sum(x))
    f.defvjp(lambda x: (jnp.sum(x), x), lambda x, g: (x * 2 if g > 0 else x,))
    np.testing.assert_array_equal(jax.grad(jaxmp.fuse(f))(X), 2 * X)


def test_products_of_groups_in_a_loop_and_of_scaled_blocks_are_counted():
    sizes = jnp.array([3])
    (row,) = explained(jaxmp.fuse(lambda x: lax.map(lambda w: lax.ragged_dot(x, w[None], sizes), W[None])), X).rows
    assert (row.operation, row.count) == ("ragged_dot", 1)
    scale = jnp.ones((1, 16, 1), jnp.float8_e8m0fnu)
    blocks = jnp.ones((1, 16, 32), jnp.float8_e4m3fn)
    numbers = (((2,), (2,)), ((0,), (0,)))
    for f, operation in (
        (lambda x, scale: jax.nn.scaled_matmul(x, x, scale, scale), "matmul"),
        (lambda x, s: lax.scaled_dot(x, x, dimension_numbers=numbers, lhs_scale=s, rhs_scale=s), "scaled_dot"),
    ):
        (row,) = explained(jaxmp.fuse(f), blocks, scale).rows
        assert row.operation == operation
        assert operation == "matmul" or row.extents == (16, 32, 16), row


def test_int8_has_a_kernel():
    """If int8 wraps around, which is slow in XLA, it is a call; else it stays JAX's, like other unshared products."""
    x, w = X.astype(jnp.int8), W.astype(jnp.int8)
    wide = functools.partial(jnp.matmul, preferred_element_type=jnp.int32)
    for model, (calls, left) in ((jnp.matmul, (1, 0)), (wide, (0, 1))):
        found = explained(jaxmp.fuse(model), x, w)
        assert (found.calls, found.left) == (calls, left), str(found)
        assert "kernel" not in found.rows[0].why
        assert_alike(model(x, w), jaxmp.fuse(model)(x, w))
    (row,) = explained(jaxmp.fuse(jnp.matmul), x.astype(jnp.int16), w.astype(jnp.int16)).rows
    assert "its types have no kernel" in row.why


BATCHES_OF_ONE = {
    "first": ("bik,bkj->bij", (1, 8, 4), (1, 4, 4)),
    "second": ("ibk,bkj->bij", (8, 1, 4), (1, 4, 4)),
    "two": ("abik,abkj->abij", (1, 1, 8, 4), (1, 1, 4, 4)),
    "transposed": ("bki,bjk->bij", (1, 4, 8), (1, 4, 4)),
    "outer": ("bi,bj->bij", (1, 8), (1, 4)),
}


@pytest.mark.parametrize("name", BATCHES_OF_ONE)
def test_a_batch_of_one_is_a_product_of_matrices(name):
    subscripts, *shapes = BATCHES_OF_ONE[name]
    x, w = (jnp.asarray(np.random.default_rng(2).integers(-2, 3, shape), jnp.float32) for shape in shapes)

    def model(x, w):
        return jax.nn.relu(jnp.einsum(subscripts, x, w))

    def step(f):
        return jax.value_and_grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))

    (row,) = explained(jaxmp.fuse(model), x, w).rows
    assert row.operation == ("matmul+epilog" if name not in ("transposed", "outer") else row.operation), row
    for fused in (jaxmp.fuse(step(model)), step(jaxmp.fuse(model))):
        assert not any("batch" in row.why for row in explained(fused, x, w).rows)
        assert_alike(step(model)(x, w), fused(x, w))


def test_a_batch_whose_contraction_ranks_share_is_a_call(mesh_of):
    with jax.set_mesh(mesh_of({"b": 2, "s": 2})):
        x = jax.device_put(jnp.ones((4, 8, 16)), P("b", "s", None))
        w = jax.device_put(jnp.ones((4, 16, 8)), P("b", None, None))

        def loss(x, w):
            return jnp.sum(jnp.einsum("bsd,bdf->bsf", x, w) ** 2)

        for fused in (jaxmp.fuse(jax.grad(loss, (0, 1))), jax.grad(jaxmp.fuse(loss), (0, 1))):
            found = explained(fused, x, w)
            assert ([row.pattern for row in found.rows].count("all_reduce"), found.left) == (1, 0), str(found)
            assert_alike(jax.jit(jax.grad(loss, (0, 1)))(x, w), jax.jit(fused)(x, w))
        heads = jax.device_put(jnp.ones((4, 8, 16)), P(("b", "s"), None, None))
        (row,) = explained(jaxmp.fuse(lambda x: jnp.einsum("bsd,btd->bst", x, x)), heads).rows
        assert "it has a batch" in row.why


def test_the_work_of_tracing_grows_with_the_layers():
    def loss(ws, x):
        for w in ws:
            x = x + jax.nn.relu(x @ w) @ w.T
        return jnp.sum(x**2)

    def calls(layers):
        """Returns the number of calls to functions of `fuse`."""
        frames = []

        def count(frame, event, _):
            if event == "call" and "jaxmp/_src/fuse" in frame.f_code.co_filename:
                frames.append(None)

        sys.setprofile(count)
        try:
            jax.make_jaxpr(lambda *args: jaxmp.fuse(jax.grad(loss))(*args))([W] * layers, X)
        finally:
            sys.setprofile(None)
        return len(frames)

    few, some, many = map(calls, (8, 16, 32))
    assert 0 < many - some < 2.2 * (some - few)
