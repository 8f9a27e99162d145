"""A gradient that a loop sums over devices in each iteration is found, with its weight and its loop, and no other sum.

A step whose weight has lost its tag computes the right values, and communicates once for each microbatch.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

import jaxmp

SPECS = {"up": P(None, "model"), "down": P("model", None)}
MODEL = [("all-reduce", "model")]  # the second layer's own sum


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=["explicit", "automatic"])
def arrays(request, mesh_of):
    """Returns a function that makes the type of an array on a mesh of data and model."""
    with jax.set_mesh(mesh := mesh_of({"data": 2, "model": 2}, request.param)):
        yield functools.partial(cases.typed, mesh)


def loss(module, w, x, **options):
    hidden = jax.nn.relu(module.matmul(x, w["up"]))
    return jnp.square(module.matmul(hidden, w["down"], **options)).mean()


def accumulated(module, w, xs, zeros, **options):
    def step(total, x):
        value, gradient = jax.value_and_grad(functools.partial(loss, module, **options))(w, x)
        return jax.tree.map(jnp.add, total, gradient), value

    return lax.scan(step, zeros, xs)


def untagged(module, w, xs, **options):
    return accumulated(module, w, xs, jax.tree.map(jnp.zeros_like, w), **options)


def tagged(module, w, xs, **options):
    zeros = {
        name: jnp.zeros(x.shape, x.dtype, out_sharding=SPECS[name].update(unreduced={"data"})) for name, x in w.items()
    }
    w = {name: reshard(x, SPECS[name].update(reduced={"data"})) for name, x in w.items()}
    terms, values = accumulated(module, w, xs, zeros, **options)
    return {name: reshard(x, SPECS[name]) for name, x in terms.items()}, values


@pytest.mark.parametrize("module", [jnp, jaxmp], ids=["jnp", "jaxmp"])
def test_a_sum_in_a_loop_names_the_weight_and_the_loop(arrays, module):
    w = {"up": arrays((16, 32), *SPECS["up"]), "down": arrays((32, 16), *SPECS["down"])}
    xs = arrays((4, 8, 16), None, "data", None)
    is_explicit = jax.sharding.get_abstract_mesh().axis_types[0] == AxisType.Explicit
    options = {"out_sharding": P("data", None)} if is_explicit else {}
    program = functools.partial(untagged, module, **options)
    rows = jaxmp.explain(program, compiled=True, quiet=True)(w, xs).collectives
    of_data = [row for row in rows if row.axes == ("data",) and not row.shape.endswith("[]")]
    assert {row.cause_kind for row in of_data} == {"gradient" if module is jnp else "jaxmp"}
    found = {row.remedy for row in of_data}
    assert len(found) == 2
    for name in w:
        (remedy,) = (each for each in found if each.startswith(f"tag w['{name}'] reduced over data"))
        assert remedy.endswith(
            f"sum once after the loop in test_lost_tags.py:{accumulated.__code__.co_firstlineno + 5}"
        )
    assert not any("tag" in row.remedy for row in rows if row.axes == ("model",))
    with pytest.raises(AssertionError, match=r"(?s)collectives in a loop.*all-reduce .* data .* 4\n.*tag"):
        jaxmp.assert_no_collectives(program, inside="loop", allowed=MODEL)(w, xs)
    step = functools.partial(tagged, module, out_sharding=P("data", None))
    if not is_explicit:
        step = jax.sharding.explicit_axes(step, in_sharding=(SPECS, P(None, "data", None)))
    jaxmp.assert_no_collectives(step, inside="loop", allowed=MODEL)(w, xs)


def of_layers(w, xs):
    def of_one(w, x):
        return jnp.square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]).mean()

    return lax.scan(lambda total, x: (total + jax.grad(of_one)(w, x) / 4, None), jnp.zeros_like(w), xs)[0]


def of_shards(w, xs):
    return jax.shard_map(of_layers, in_specs=(P(), P(None, "data")), out_specs=P())(w, xs)


def with_updates(w, xs):
    grad = jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w[0])).mean())
    return lax.scan(lambda w, x: (w - grad(w, x), None), w, xs)[0]


def with_norms(w, xs):
    grad = jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w[0])).mean())

    def step(total, x):
        g = grad(w, x)
        return total + g / jnp.linalg.norm(g), None

    return lax.scan(step, jnp.zeros_like(w), xs)[0]


@pytest.mark.parametrize("program", [of_layers, of_shards, with_updates, with_norms])
def test_only_sums_that_can_wait_are_named(arrays, program):
    w, xs = arrays((3, 16, 16)), arrays((4, 8, 16), None, "data", None)
    remedies = [row.remedy for row in jaxmp.explain(program, compiled=True, quiet=True)(w, xs).collectives]
    can_wait = program in (of_layers, of_shards)
    tags = [each.split(" (")[0] for each in remedies if each.startswith("tag")]
    assert tags == ["tag w reduced over data"] * can_wait


def test_inside_takes_only_a_loop():
    with pytest.raises(ValueError, match="inside must be \"loop\" or None, got 'scan'"):
        jaxmp.assert_no_collectives(abs, inside="scan")
