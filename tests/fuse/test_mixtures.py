"""`fuse` on mixtures of experts as users write them, with `lax.ragged_dot` and `lax.ragged_all_to_all`. Without these
tests, a token could return to another token's place, and a gradient could be one rank's part."""

import functools

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

WIDTH, HIDDEN, EXPERTS, TOKENS, TOP_K = 6, 8, 4, 8, 2


class Experts(equinox.Module):
    """A layer that does not use jaxmp."""

    router: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.router = jax.random.normal(keys[0], (WIDTH, EXPERTS))
        self.up = jax.random.normal(keys[1], (EXPERTS, WIDTH, HIDDEN))
        self.down = jax.random.normal(keys[2], (EXPERTS, HIDDEN, WIDTH))

    def routes(self, x):
        gates, experts = lax.top_k(jax.nn.softmax(x @ self.router), TOP_K)
        return gates / gates.sum(-1, keepdims=True), experts

    def __call__(self, x):
        gates, experts = self.routes(x)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
        h = jax.nn.silu(lax.ragged_dot(x[order // TOP_K], self.up, sizes))
        y = lax.ragged_dot(h, self.down, sizes)[jnp.argsort(order)]
        return (y.reshape(*gates.shape, WIDTH) * gates[..., None]).sum(1)


def dense(layer, x):
    gates, experts = layer.routes(x)
    every = jnp.einsum("gth,ghn->gtn", jax.nn.silu(jnp.einsum("tk,gkh->gth", x, layer.up)), layer.down)
    return jnp.einsum("tj,tjg,gtn->tn", gates, jax.nn.one_hot(experts, EXPERTS), every)


def exchanged(layer, x):
    """Expert parallelism on shards, one expert per token: sends tokens to their rank, applies it, sends them back."""
    ranks = lax.axis_size("p")
    own, tokens = layer.up.shape[0], x.shape[0]
    expert = jnp.argmax(x @ layer.router, -1)
    order = jnp.argsort(expert)
    send = jnp.bincount(expert // own, length=ranks)
    every = lax.all_gather(send, "p")  # (sender, receiver)
    me = lax.axis_index("p")
    begin = jnp.cumsum(send) - send
    to = (jnp.cumsum(every, 0) - every)[me]
    receive = every[:, me]
    empty = lax.pcast(jnp.zeros((ranks * tokens, x.shape[1] + 1)), "p", to="varying")
    # Each row carries the number of its expert.
    rows = jnp.concatenate([x, expert[:, None].astype(x.dtype)], 1)[order]
    got = lax.ragged_all_to_all(rows, empty, begin, send, to, receive, axis_name="p")
    is_token = jnp.arange(ranks * tokens) < receive.sum()
    local = jnp.where(is_token, got[:, -1].astype(int) - me * own, own)
    inner = jnp.argsort(local)
    sizes = jnp.bincount(local, length=own)
    h = jax.nn.silu(lax.ragged_dot(got[inner, :-1], layer.up, sizes))
    y = lax.ragged_dot(h, layer.down, sizes)[jnp.argsort(inner)]
    back = lax.all_to_all(begin, "p", 0, 0, tiled=True)
    y = lax.ragged_all_to_all(y, empty[:tokens, :-1], jnp.cumsum(receive) - receive, receive, back, send, axis_name="p")
    return y[jnp.argsort(order)]


def loss_of(f, layer, x):
    return (f(layer, x) * jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))).sum()


def judge(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=2e-4)


LAYER = Experts(jax.random.key(0))
X = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))


def test_a_layer_of_the_users_trains_alike(standard_promotion):
    steps = optax.adam(1e-2)

    def train(f, step):
        @jax.jit
        def train_step(layer, state):
            loss, gradient = step(functools.partial(loss_of, f))(layer, X)
            updates, state = steps.update(gradient, state)
            return optax.apply_updates(layer, updates), state, loss

        layer, state, losses = LAYER, steps.init(LAYER), []
        for _ in range(4):
            layer, state, loss = train_step(layer, state)
            losses.append(loss)
        return layer, losses

    def fused(loss):
        return jaxmp.fuse(jax.value_and_grad(loss))

    judge(train(lambda layer, x: layer(x), fused), train(dense, jax.value_and_grad))
    rows = jaxmp.explain(fused(functools.partial(loss_of, lambda layer, x: layer(x))), quiet=True)(LAYER, X).rows
    # Two products, with the derivatives in both weights and in the hidden rows.
    assert [row.operation for row in rows if "ragged" in row.operation] == ["ragged_dot"] * 5


def test_an_exchange_of_tokens_runs_on_cpus():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = Experts.__new__(Experts)
    for name, spec in (("router", P()), ("up", P("p")), ("down", P("p"))):
        object.__setattr__(specs, name, spec)
    sharded = jax.shard_map(exchanged, mesh=mesh, in_specs=(specs, P("p")), out_specs=P("p"))

    def one_each(layer, x):
        every = jnp.einsum("gth,ghn->gtn", jax.nn.silu(jnp.einsum("tk,gkh->gth", x, layer.up)), layer.down)
        return jnp.einsum("tg,gtn->tn", jax.nn.one_hot(jnp.argmax(x @ layer.router, -1), EXPERTS), every)

    got = jax.jit(jax.value_and_grad(functools.partial(loss_of, jaxmp.fuse(sharded)), (0, 1)))(LAYER, X)
    judge(got, jax.value_and_grad(functools.partial(loss_of, one_each), (0, 1))(LAYER, X))


@pytest.mark.parametrize("of_tokens", [P("p"), P(("p", "q")), P("q")], ids=str)
def test_a_layer_of_the_users_on_automatic_axes(of_tokens):
    mesh = jax.make_mesh((2, 2), ("p", "q"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    where = dict(zip(("router", "up", "down"), (P(), P("p", None, "q"), P("p", "q")), strict=True))

    def place(layer):
        every = jax.tree.leaves(layer)
        placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(every, where.values(), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(layer), placed)

    def constrained(layer, x):
        y = layer(lax.with_sharding_constraint(x, NamedSharding(mesh, of_tokens)))
        return lax.with_sharding_constraint(y, NamedSharding(mesh, of_tokens))

    step = jax.value_and_grad(functools.partial(loss_of, constrained), (0, 1))
    for fused in (jaxmp.fuse(step), jax.value_and_grad(functools.partial(loss_of, jaxmp.fuse(constrained)), (0, 1))):
        got = equinox.filter_jit(fused)(place(LAYER), X)
        judge(got, jax.value_and_grad(functools.partial(loss_of, dense), (0, 1))(LAYER, X))
        rows = jaxmp.explain(fused, quiet=True)(place(LAYER), X).rows
        found = [row for row in rows if "ragged" in row.operation]
        assert [(row.operation, row.implementation) for row in found] == [("ragged_dot", "host")] * 6
