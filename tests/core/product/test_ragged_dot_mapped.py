"""Products of groups under `jax.vmap` over a sharded dimension, on meshes with two kinds of axes, and in a `shard_map`
over some of the axes, against a loop of `jnp` products, exactly, on small integers. Without these tests, a result or a
gradient could have another sharding than JAX's, groups could be counted over a whole batch, and a level could be
dropped if XLA partitions."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compiled import collectives_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import CONTRACTED, assert_same, contraction, integers, reference

import jaxmp
import jaxmp.equinox

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SIZES = (2, 0, 3, 1)
SEQUENCES = integers((4, 8, 6))
W_IN, W_OUT = jnp.sign(integers((4, 6, 4), 1)), jnp.sign(integers((4, 4, 6), 2))
MOE = jaxmp.equinox.MoE(6, 4, num_experts=4, top_k=2, key=jax.random.key(0))


def ragged(x, w, _):
    return jaxmp.ragged_dot(x, w, jnp.array(SIZES))


def layers(x, w_in, w_out):
    return jaxmp.moe_mlp(x, None, w_in, w_out, jnp.array(SIZES), activation="relu")


def loop(x, w_in, w_out, is_layer=True):
    h = reference(x, w_in, SIZES)
    return reference(jax.nn.relu(h), w_out, SIZES) if is_layer else h


FUNCTIONS = [(ragged, functools.partial(loop, is_layer=False)), (layers, loop)]


def stacked(f):
    """Maps f over the sequences of x with a loop."""
    return lambda x, *rest: jnp.stack([f(each, *rest) for each in x])


def gradients_of(f):
    return jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=(0, 1, 2))


def make_mesh(*kinds):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds, devices=jax.devices()[:4])


def put(mesh, *pairs):
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in pairs]


@pytest.mark.parametrize(
    ("spec", "of_w", "of_d"),
    [
        (P("x"), P(), P("x")),
        (P(("x", "y")), P(), P(("x", "y"))),
        (P("x", "y"), P("y"), P("x", "y")),
        (P(None, "x"), P(), P(None, "x")),
    ],
)
def test_vmap_over_an_explicit_axis(spec, of_w, of_d):
    dim = spec.index("x") if "x" in spec else 0
    x = jnp.moveaxis(SEQUENCES, 0, dim)
    wanted = [stacked(f)(SEQUENCES, W_IN, W_OUT) for _, f in FUNCTIONS]
    of_sum = [gradients_of(stacked(f))(SEQUENCES, W_IN, W_OUT) for _, f in FUNCTIONS]
    mesh = make_mesh(EXPLICIT, EXPLICIT)
    with jax.set_mesh(mesh):
        args = put(mesh, (x, spec), (W_IN, of_w), (W_OUT, of_w))

        def run(*args):
            mapped = [jax.vmap(f, (dim, None, None), dim) for f, _ in FUNCTIONS]
            each = [jax.vmap(gradients_of(f), (dim, None, None), (dim, 0, 0)) for f, _ in FUNCTIONS]
            return [(f(*args), gradients_of(f)(*args), g(*args)) for f, g in zip(mapped, each, strict=True)]

        for (d, of_all, of_each), want, derivatives in zip(jax.jit(run)(*args), wanted, of_sum, strict=True):
            assert jax.typeof(d).sharding.spec == P(*of_d, *[None] * (3 - len(of_d)))
            assert [jax.typeof(y).sharding for y in of_all] == [jax.typeof(y).sharding for y in args]
            assert_same(jnp.moveaxis(jax.device_get(d), dim, 0), want)
            found = jax.device_get([of_all, (of_each[0], of_each[1].sum(0), of_each[2].sum(0))])
            for dx, *rest in found:
                assert_same([jnp.moveaxis(dx, dim, 0), *rest], derivatives)


def test_each_device_multiplies_its_own_sequences():
    mesh = make_mesh(EXPLICIT, EXPLICIT)
    with jax.set_mesh(mesh):
        args = put(mesh, (SEQUENCES, P(("x", "y"))), (W_IN, P()), (W_OUT, P()))
        run = jax.jit(jax.vmap(layers, (0, None, None)))
        text = run.lower(*args).compile().as_text()
    assert text.count('custom_call_target="jaxmp_grouped"') == 2
    assert not collectives_of(text)


def test_weights_sizes_and_two_dimensions_are_mapped():
    mesh, sizes = make_mesh(EXPLICIT, EXPLICIT), jnp.array([SIZES, SIZES[::-1]])
    weights = jnp.stack([W_IN, -W_IN])
    want = jnp.stack([reference(SEQUENCES[i], weights[i], sizes[i].tolist()) for i in (0, 1)])
    square = SEQUENCES.reshape(2, 2, 8, 6)
    inner = jax.vmap(ragged, (0, None, None))
    with jax.set_mesh(mesh):
        args = put(mesh, (SEQUENCES[:2], P("x", "y")), (weights, P("x", "y")), (sizes, P("x")))
        d = jax.jit(jax.vmap(jaxmp.ragged_dot))(*args)
        nested = jax.jit(jax.vmap(inner, (0, 0, None)))(*put(mesh, (square, P("x", "y")), (weights, P("x"))), None)
        of_k = jax.vmap(lambda x: jaxmp.ragged_dot_general(x, x, jnp.array(SIZES), CONTRACTED))
        sums = jax.jit(of_k)(*put(mesh, (SEQUENCES, P("x"))))
    assert [tuple(jax.typeof(y).sharding.spec[:2]) for y in (d, nested)] == [("x", "y")] * 2
    assert_same(jax.device_get(d), want)
    by_loop = [[reference(x, w, SIZES) for x in xs] for xs, w in zip(square, weights, strict=True)]
    assert_same(jax.device_get(nested), jnp.array(by_loop))
    assert_same(jax.device_get(sums), jnp.stack([contraction(x, x, SIZES) for x in SEQUENCES]))


@pytest.mark.parametrize("f", [lambda x: MOE(x)[0], lambda x: jax.vmap(lambda x: MOE(x)[0])(x)], ids=["rows", "tokens"])
def test_layers_of_experts_are_mapped(f):
    want = [f(x) for x in SEQUENCES]
    mesh = make_mesh(EXPLICIT, EXPLICIT)
    with jax.set_mesh(mesh):
        for spec in (P("x"), P("x", "y")):
            d = jax.jit(jax.vmap(f))(*put(mesh, (SEQUENCES, spec)))
            assert jax.typeof(d).sharding.spec == P(*spec, *[None] * (3 - len(spec)))
            for each, wanted in zip(jax.device_get(d), want, strict=True):
                assert abs(each - wanted).max() < 1e-5


def test_levels_are_kept_or_refused():
    mesh, x = make_mesh(EXPLICIT, EXPLICIT), jax.random.normal(jax.random.key(1), (4, 8, 6))
    w = jax.random.normal(jax.random.key(2), W_IN.shape)

    def product(level):
        return jax.jit(jax.vmap(lambda x: jaxmp.ragged_dot(x, w, jnp.array(SIZES), determinism=level)))

    want = product("batch")(x)
    with jax.set_mesh(mesh):
        (x,) = put(mesh, (x, P("x")))
        assert_same(jax.device_get(product("batch")(x)), want)
        with pytest.raises(NotImplementedError, match=r"^ragged_dot: determinism='topology' is not available"):
            product("topology")(x)


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
def test_a_mesh_of_explicit_and_automatic_axes(kinds):
    x, mesh = SEQUENCES[0], make_mesh(*kinds)
    wanted = [(f(x, W_IN, W_OUT), gradients_of(f)(x, W_IN, W_OUT)) for _, f in FUNCTIONS]
    with jax.set_mesh(mesh):
        args = put(mesh, (x, P("x")), (W_IN, P(None, None, "y")), (W_OUT, P(None, "y")))
        run = jax.jit(lambda *args: [(f(*args), gradients_of(f)(*args)) for f, _ in FUNCTIONS])
        for (d, grads), want in zip(run(*args), wanted, strict=True):
            assert jax.typeof(d).sharding.spec[0] == ("x" if kinds[0] == EXPLICIT else None)
            assert [jax.typeof(y).sharding for y in grads] == [jax.typeof(y).sharding for y in args]
            assert_same(jax.device_get((d, grads)), want)


@pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_a_shard_map_that_is_manual_over_some_axes(kinds):
    mesh, rows = make_mesh(*kinds), SEQUENCES[:2].reshape(16, 6)
    wanted = [stacked(f)(SEQUENCES[:2], W_IN, W_OUT).reshape(16, -1) for _, f in FUNCTIONS]
    of_sum = [gradients_of(stacked(f))(SEQUENCES[:2], W_IN, W_OUT) for _, f in FUNCTIONS]

    def stage(f):
        specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x"), "axis_names": {"x"}}
        return jax.shard_map(f, **specs)

    with jax.set_mesh(mesh):
        args = put(mesh, (rows, P("x")), (W_IN, P("y")), (W_OUT, P("y")))
        run = jax.jit(lambda *args: [(stage(f)(*args), gradients_of(stage(f))(*args)) for f, _ in FUNCTIONS])
        for (d, grads), want, derivatives in zip(run(*args), wanted, of_sum, strict=True):
            assert_same(jax.device_get(d), want)
            dx, *rest = jax.device_get(grads)
            assert_same([dx.reshape(2, 8, 6), *rest], derivatives)
            if kinds[0] == kinds[1]:  # otherwise JAX 0.10 loses shardings of cotangents
                assert [jax.typeof(y).sharding for y in grads] == [jax.typeof(y).sharding for y in args]
