"""`moe_mlp` against a loop of `jnp` products, exactly, on small integers. Without these tests, hidden rows could meet
another expert's weights, and terms of ranks could be summed twice or not at all."""

import functools
import random

import jax
import jax.numpy as jnp
import pytest
from compiled import collectives_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import assert_same, integers, reference, shardings, with_bias

import jaxmp

SIZES = (3, 0, 4, 0)
M, K, H, N = 8, 4, 4, 8


def small(shape, seed, dtype="float32"):
    """Integers from -1 to 1, so that products of four layers, forward and backward, are exact in float32."""
    return jnp.sign(integers(shape, seed, dtype))


WEIGHTS = [small((4, K, H), 1), small((4, K, H), 2), small((4, H, N), 3)]
X, CT = small((M, K), 0), small((M, N), 4)
BIASES = [small((4, H), 5), small((4, H), 6), small((4, N), 7)]


def loop(x, w_gate, w_up, w_down, sizes=SIZES):
    return reference(jax.nn.relu(reference(x, w_gate, sizes)) * reference(x, w_up, sizes), w_down, sizes)


def ours(*operands, **options):
    return jaxmp.moe_mlp(*operands, jnp.array(SIZES), activation="relu", **options)


def pulled(f, *operands, ct=CT):
    d, pull = jax.vjp(f, *operands)
    return d, *pull(ct)


def passes(f, *operands):
    return jax.jit(functools.partial(pulled, f))(*operands)


def test_one_device():
    assert_same(passes(ours, X, *WEIGHTS), passes(loop, X, *WEIGHTS))
    moved = tuple(-x for x in (X, *WEIGHTS))
    tangents = [jax.jit(functools.partial(jax.jvp, f))((X, *WEIGHTS), moved) for f in (ours, loop)]
    assert_same(*tangents)

    def second(f):
        return jax.grad(lambda *operands: sum((y * y).sum() for y in pulled(f, *operands)[1:]), range(4))

    assert_same(*(jax.jit(second(f))(X, *WEIGHTS) for f in (ours, loop)))


def test_sixteen_bits_outside_of_jit():
    operands = [x.astype(jnp.bfloat16) for x in (X, *WEIGHTS)]
    assert_same(*(jax.grad(lambda *operands, f=f: f(*operands).sum(), range(4))(*operands) for f in (ours, loop)))


@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_narrow_weights_are_decoded_in_the_calls(narrow):
    x, *weights = (integers(shape, seed, jnp.bfloat16) for seed, shape in enumerate(((8, 4), *3 * [(2, 4, 4)])))
    ours = functools.partial(jaxmp.moe_mlp, group_sizes=jnp.array([3, 4]))
    quantized = [w.astype(narrow) for w in weights]
    assert_same(ours(x, *quantized), ours(x, *weights))
    assert "tensor<2x4x4xbf16>" not in jax.jit(ours).lower(x, *quantized).as_text()


def test_without_a_gate():
    def theirs(x, w_up, w_down):
        return reference(jax.nn.relu(reference(x, w_up, SIZES)), w_down, SIZES)

    got = passes(lambda x, *weights: ours(x, None, *weights), X, *WEIGHTS[1:])
    assert_same(got, passes(theirs, X, *WEIGHTS[1:]))


def test_biases():
    def theirs(x, gate, up, down, *biases):
        plain = functools.partial(with_bias, sizes=SIZES, act=lambda z: z)
        h = with_bias(x, gate, biases[0], SIZES) * plain(x, up, biases[1])
        return plain(h, down, biases[2])

    def mine(x, gate, up, down, *biases):
        return ours(x, gate, up, down, **dict(zip(("b_gate", "b_up", "b_down"), biases, strict=True)))

    want = passes(theirs, X, *WEIGHTS, *BIASES)
    assert_same(passes(mine, X, *WEIGHTS, *BIASES), want)
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    for spec in (P("p"), P(None, None, "p")):  # experts, hidden features
        with jax.set_mesh(mesh):
            down = P("p") if spec == P("p") else P(None, "p")
            where = [NamedSharding(mesh, s) for s in (spec, spec, down)]
            weights = jax.device_put(WEIGHTS, where)
            got = passes(mine, X, *weights, *BIASES)
        assert_same(got, want)


def test_group_offset():
    got = jaxmp.moe_mlp(X, *(w[1:3] for w in WEIGHTS), jnp.array(SIZES), jnp.array(1), activation="relu")
    assert_same(got, jnp.zeros((M, N)).at[3:7].set(loop(X, *WEIGHTS)[3:7]))


@pytest.mark.parametrize("activation", ["silu", jnp.tanh, None])
def test_one_rounding_of_the_hidden_rows(activation):
    x, weights = X.astype("bfloat16") / 3, [w.astype("bfloat16") / 3 for w in WEIGHTS]
    wide = [jaxmp.ragged_dot(x, w, jnp.array(SIZES), preferred_element_type="float32") for w in weights[:2]]
    act = {"silu": jax.nn.silu, None: lambda z: z}.get(activation, activation)
    want = jaxmp.ragged_dot((act(wide[0]) * wide[1]).astype("bfloat16"), weights[2], jnp.array(SIZES))
    assert_same(jaxmp.moe_mlp(x, *weights, jnp.array(SIZES), activation=activation), want)


WANT = passes(loop, X, *WEIGHTS)


@pytest.mark.parametrize("seed", range(16))
def test_drawn_shardings_of_a_square(seed):
    rng = random.Random(seed)
    of_x, of_in, of_down, of_d = (rng.choice(shardings(ndim, "pq")) for ndim in (2, 3, 3, 2))
    kind = rng.choice((AxisType.Explicit, AxisType.Auto))
    mesh = jax.make_mesh((2, 2), ("p", "q"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    options = {"in_shardings": (of_x, of_in, of_down)} if kind == AxisType.Auto else {}
    specs = of_x, of_in, of_in, of_down, of_d
    with jax.set_mesh(mesh):
        placed = [jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip((X, *WEIGHTS, CT), specs, strict=True)]
        f = functools.partial(ours, out_sharding=of_d, **options)
        got = jax.jit(lambda *operands: pulled(f, *operands[:-1], ct=operands[-1]))(*placed)
    assert_same(got, WANT)
    for y, spec in zip(got, (of_d, *specs), strict=False):
        assert kind == AxisType.Auto or y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)


@pytest.mark.parametrize(
    ("specs", "collectives"),
    [
        ((P("p"), P("p"), P("p"), P("p")), []),  # experts: calls read other ranks' rows in place
        ((P(), P("p"), P("p"), P()), ["all-reduce"]),
        ((P(), P(None, None, "p"), P(None, "p"), P()), ["all-reduce"]),  # hidden features
        ((P("p"), P(), P(), P("p")), []),  # rows
    ],
)
def test_nothing_is_exchanged_between_the_products(specs, collectives):
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x, sizes = jnp.ones((M, K)), jnp.ones(64, int)
    weights = [jnp.ones((64, K, H)), jnp.ones((64, K, H)), jnp.ones((64, H, N))]
    with jax.set_mesh(mesh):
        each = (specs[0], specs[1], specs[1], specs[2])
        placed = [jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip((x, *weights), each, strict=True)]
        f = jax.jit(functools.partial(jaxmp.moe_mlp, group_sizes=sizes, out_sharding=specs[3]))
        text = f.lower(*placed).compile().as_text()
    assert sorted(collectives_of(text)) == collectives


def test_shardings_that_xla_chooses():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(ours, out_sharding=P("p")))(jax.device_put(X, P("p")), *WEIGHTS)
    assert_same(got, WANT[0])


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sizes = jnp.array([1, 3, 2, 1])

    def f(*operands):
        return jaxmp.moe_mlp(*operands, activation="relu")

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("p"), out_specs=P("p"))

    def theirs(x, *weights):
        first = loop(x[:4], *(w[:2] for w in weights), (1, 3))
        return jnp.concatenate([first, loop(x[4:], *(w[2:] for w in weights), (2, 1))])

    assert_same(passes(lambda *operands: mapped(*operands, sizes), X, *WEIGHTS), passes(theirs, X, *WEIGHTS))


def test_weights_that_lie_otherwise():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"w_gate is sharded .*'p'.*, but w_up .*; use one sharding"),
    ):
        ours(X, jax.device_put(WEIGHTS[0], P("p")), *WEIGHTS[1:])
