"""Whole programs: JAX and jaxmp compute every product, and the results are compared (tests/side_by_side.py). Without
these tests, a result could have another type or weak type, be on other devices or be committed to them, so that the
rest of the program differs from JAX's."""

import contextlib

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import side_by_side
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


def draw(rng, *shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def train(loss, params, *data):
    """Takes two steps of an optimizer, jitted."""
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(loss)(params, *data)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(2):
        params, state = step(params, state)


def every_function(rng):
    a, b, batch = draw(rng, 4, 6), draw(rng, 6, 4), draw(rng, 3, 6, 4)
    for x, y in ((a, b), (a, b[:, 0]), (a[0], b), (a[0], b[:, 0]), (a, batch), (np.asarray(a), b), (a, np.asarray(b))):
        jnp.matmul(x, y)
        jnp.dot(x, y) if y.ndim < 3 else x @ y
    for x, y in ((batch, a[:, 0]), (b[:, 0], batch), (batch, batch.mT), (batch[:, None], batch.mT)):
        x @ y
    np.asarray(a) @ b, a @ np.asarray(b)
    jnp.matmul(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))
    jnp.einsum("ij,jk->ki", a, b), jnp.einsum("ij,jk,kl->il", a, b, a), jnp.einsum("ij->j", a)
    jnp.einsum(a, [0, 1], b, [1, 2], [2, 0])
    lax.dot_general(batch, batch, (((1,), (1,)), ((0,), (0,))))
    lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    jnp.vdot(a, b), jnp.inner(a, a), jnp.tensordot(a, b, 1), jnp.tensordot(a, b, ((0, 1), (1, 0)))
    jnp.vecdot(a, a), jnp.matvec(a, b[:, 0]), jnp.outer(a[0], a[0])


def every_type(rng):
    for dtype in ("bfloat16", "int8", "uint8", "bool", "complex64"):
        a = draw(rng, 4, 4).astype(dtype)
        jnp.matmul(a, a), jnp.einsum("ij,jk->ik", a, a), lax.dot_general(a, a, (((1,), (0,)), ((), ())))
    a = draw(rng, 4, 4, dtype="bfloat16")
    jnp.matmul(a, a, preferred_element_type=jnp.float32)
    a @ draw(rng, 4, 4), a @ jnp.arange(16).reshape(4, 4)


def weak_types(rng):
    weak = jnp.full((4, 4), 0.5)
    for other in (weak, draw(rng, 4, 4, dtype="bfloat16"), jnp.arange(16).reshape(4, 4)):
        jnp.matmul(weak, other), jnp.einsum("ij,jk->ik", other, weak), jnp.dot(weak, other)
    lax.dot_general(weak, weak, (((1,), (0,)), ((), ())))


def committed(rng):
    """Multiplies operands that are committed to a device with uncommitted ones."""
    require_devices(2)
    a = draw(rng, 4, 4)
    there = jax.device_put(a, jax.devices()[1])
    for x, y in ((there, there), (there, a), (a, there), (np.asarray(a), there)):
        jnp.matmul(x, y), jnp.einsum("ij,jk->ik", x, y), jnp.dot(x, y), x @ y[0]
        lax.dot_general(x, y, (((1,), (0,)), ((), ())))
    with jax.default_device(jax.devices()[1]):
        jnp.matmul(a, a), jnp.ones((2, 2)) @ jnp.ones((2, 2))


def attention(rng):
    q, k, v = (draw(rng, 2, 5, 4, 8) for _ in range(3))
    jax.jit(jax.grad(lambda q: jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True).sum()))(q)


def scanned(rng):
    """Runs a recurrent network, rematerialized and batched by vmap."""
    w, xs = draw(rng, 6, 6), draw(rng, 3, 2, 6)

    def loss(w, x):
        step = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None))
        return jnp.sum(lax.scan(step, x, length=3)[0] ** 2)

    jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(w, xs)
    jax.vmap(jax.grad(loss), (None, 0))(w, xs)
    jax.jit(lambda w: lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ jnp.abs(w), jnp.abs(xs[0])))(w)


def custom_rules(rng):
    @jax.custom_vjp
    def layer(x, w):
        return jnp.einsum("ij,jk->ik", x, w)

    layer.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda kept, ct: (ct @ kept[1].T, jnp.matmul(kept[0].T, ct)))
    jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(layer(x, w))), (0, 1)))(draw(rng, 4, 6), draw(rng, 6, 3))


def linen(rng):
    class Block(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = x + flax.linen.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16)(x)
            return flax.linen.Dense(6)(flax.linen.gelu(flax.linen.Dense(8, dtype=jnp.bfloat16)(x)))

    x, model = draw(rng, 2, 3, 6), Block()
    params = jax.jit(model.init)(jax.random.key(0), x)
    train(lambda params, x: jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2), params, x)


@contextlib.contextmanager
def on_mesh(axis_type, rng):
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    placed = (((8, 4), P("x", None)), ((4, 8), P(None, "y")), ((8, 4), P("y", "x")))
    with jax.set_mesh(mesh):
        yield mesh, *(jax.device_put(draw(rng, *shape), NamedSharding(mesh, spec)) for shape, spec in placed)


def of_sharded_arrays(a, b, c, rng):
    vector, square = draw(rng, 4), draw(rng, 4, 4)
    a @ b, jnp.einsum("ij,jk->ik", a, b), jnp.dot(a, b), jnp.inner(a, vector), a @ vector, jnp.matmul(vector, b)
    jnp.einsum("ij,jk->ki", a, b), lax.dot_general(b, a, (((0,), (1,)), ((), ()))), jnp.tensordot(a, b, 1)
    jax.jit(jax.grad(lambda a, b: jnp.sum((a @ b) ** 2), (0, 1)))(a, b)
    jax.grad(lambda c, square: jnp.sum((c @ square) ** 2), (0, 1))(c, square)


def explicit_axes(rng):
    with on_mesh(AxisType.Explicit, rng) as (_, a, b, c):
        of_sharded_arrays(a, b, c, rng)
        for out in (P("x", "y"), P(None, None), P(("x", "y"), None)):
            jnp.matmul(a, b, out_sharding=out)
            jnp.einsum("ij,jk->ik", b, c, out_sharding=out)
            jax.jit(lambda b, c, out=out: lax.dot_general(b, c, (((1,), (0,)), ((), ())), out_sharding=out))(b, c)


def automatic_axes(rng):
    with on_mesh(AxisType.Auto, rng) as (mesh, a, b, c):
        of_sharded_arrays(a, b, c, rng)
        jnp.matmul(b, c), jnp.einsum("ij,jk->ik", c, a.T), jnp.vdot(a, a), b @ draw(rng, 8, 8)
        jax.jit(lambda a: jnp.einsum("ij,kj->ki", a, np.ones((8, 4), np.float32)))(a)
        out = NamedSharding(mesh, P("x", "y"))
        jax.jit(lambda b, c: lax.with_sharding_constraint(jnp.matmul(b, c), out))(b, c)


def manual_axes(rng):
    def product(a, c):
        return lax.psum_scatter(jnp.matmul(lax.all_gather(a, "x", tiled=True), c), "x", tiled=True)

    with on_mesh(AxisType.Auto, rng) as (mesh, a, _, c):
        for check_vma in (True, False):
            specs = {"in_specs": (P("x", None), P(None, "x")), "out_specs": P("x", None)}
            mapped = jax.shard_map(product, mesh=mesh, check_vma=check_vma, **specs)
            jax.jit(jax.grad(lambda a, c, f=mapped: jnp.sum(f(a, c)), (0, 1)))(a.T @ a, c[:4])


PROGRAMS = (
    *(every_function, every_type, weak_types, committed, attention, scanned, custom_rules, linen),
    *(explicit_axes, automatic_axes, manual_axes),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_product(program, rng, standard_promotion):
    with side_by_side.side_by_side():
        program(rng)


ONES = np.ones((4, 4), np.float32)
TAMPERED = {
    "value": lambda a, b: jaxmp.matmul(a, b).at[1, 2].add(1e-5),
    "dtype": lambda a, b: jaxmp.matmul(a, b, preferred_element_type=jnp.bfloat16),
    "weak type": lambda a, b: jnp.full((4, 4), 4.0),
    "sharding": lambda a, b: jax.device_put(jaxmp.matmul(a, b), jax.devices()[1]),
    "committedness": lambda a, b: jax.device_put(jaxmp.matmul(a, b), jax.devices()[0]),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_product_is_noticed(what):
    require_devices(2)
    a = jax.device_put(ONES, jax.devices()[0]) if what == "sharding" else jnp.asarray(ONES)
    with pytest.raises(AssertionError) as caught, side_by_side.side_by_side([(jnp, "matmul", TAMPERED[what])]):
        jnp.matmul(a, a)
    assert [line for line in str(caught.value).splitlines() if f": {what} is " not in line] == []


@pytest.mark.parametrize("what", ["value", "dtype", "gradient"])
def test_a_tampered_product_is_noticed_in_a_program(what):
    tampered = TAMPERED | {"gradient": lambda a, b: jaxmp.matmul(2 * a - lax.stop_gradient(a), b)}
    with pytest.raises(AssertionError) as caught, side_by_side.side_by_side([(jnp, "matmul", tampered[what])]):
        jax.jit(jax.grad(lambda a: jnp.sum(lax.scan(lambda x, _: (jnp.matmul(x, a), None), a, length=2)[0])))(ONES)
    first = "gradient of matmul" if what == "gradient" else "matmul"
    assert str(caught.value).startswith(first)


def test_a_program_without_products_is_no_program():
    with pytest.raises(AssertionError, match="no product was compared"), side_by_side.side_by_side():
        jnp.sin(ONES)
