"""Profiles: every call is found, on every device, and the table and the timeline show the events."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.profile.profile import Event, Profile


def test_every_call_of_every_device_is_found(mesh_of, capsys):
    mesh = mesh_of({"x": 4}, AxisType.Explicit)
    x = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, P("x", None)))
    w = jax.device_put(jnp.ones((32, 8)), NamedSharding(mesh, P(None, "x")))
    v = jax.device_put(jnp.ones((8, 32)), NamedSharding(mesh, P("x", None)))

    def program(x, w, v, scale=1):
        y = jnp.sin(jaxmp.matmul(x, w, out_sharding=P(None, "x")))
        return scale * jaxmp.matmul(y, v, out_sharding=P("x", None))

    with jax.set_mesh(mesh):
        found = jaxmp.profile(program)(x, w, v)
    calls = {row.name.partition(" (")[0]: row.runs for row in found.calls[:-1]}
    names = "all_gather 16x32x8", "reduce_scatter 16x8x32"
    assert calls == {f"{name} f32*f32->f32 run_to_run": 4 for name in names}
    assert found.calls[-1].name == "other operations"
    assert {event.device for event in found.events if event.is_call} == {0, 1, 2, 3}
    assert sum(row.share for row in found.calls) == pytest.approx(1)
    assert min(event.start for event in found.events) == 0
    assert found.seconds == max(event.start + event.seconds for event in found.events)
    out = capsys.readouterr().out
    assert out.rstrip("\n") == str(found)
    assert sum(line.startswith("device ") for line in out.splitlines()) == 4
    assert repr(found).startswith("Profile(8 calls in ")


def test_calls_on_automatic_axes_are_found(mesh_of):
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    rows = NamedSharding(mesh, P("x"))
    x, w = jax.device_put((jnp.ones((8, 16)), jnp.ones((16, 4))), rows)
    matrices, sizes = jax.device_put(jnp.ones((4, 4, 6)), rows), jnp.full(4, 2)
    with jax.set_mesh(mesh):
        found = jaxmp.profile(jaxmp.fuse(lambda *args: jax.lax.ragged_dot(args[0] @ args[1], *args[2:])), quiet=True)(
            x, w, matrices, sizes
        )
    assert {row.name: row.runs for row in found.calls[:-1]} == {
        "grid 8x16x4 f32*f32->f32 run_to_run": 4,
        "ragged_dot 2x4x6 f32*f32->f32": 4,
    }


def test_a_jitted_gradient_in_a_loop_counts_each_run(capsys):

    @jax.jit
    def loss(w, x):
        def step(x, _):
            return jnp.tanh(jaxmp.matmul(x, w)), None

        return jax.lax.scan(step, x, length=3)[0].sum()

    found = jaxmp.profile(jax.grad(loss), quiet=True)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert sum(row.runs for row in found.calls if row.name.startswith("local 8x8x8")) == 9
    assert capsys.readouterr().out == ""


def test_products_of_groups_are_calls():
    sizes = jnp.array([3, 5])
    found = jaxmp.profile(jaxmp.ragged_dot, quiet=True)(jnp.ones((8, 4)), jnp.ones((2, 4, 6)), sizes)
    assert found.calls[0].name == "ragged_dot 8x4x6 of 2 float32*float32->float32 run_to_run"
    assert found.imbalance == 5 / 4
    assert "the largest group of rows has 1.2 times the rows of an average group" in str(found)
    assert Profile(EVENTS).imbalance is None


# The program takes 10 us; a column of the text is 10/72 of it.
EVENTS = (
    Event("call one", True, 0, 0.0, 5e-6),
    Event("add", False, 0, 5e-6, 5e-6),
    Event("call two", True, 1, 2e-6, 1e-6),
    Event("add", False, 1, 2.5e-6, 0.1e-6),
)


def test_the_table_sums_and_sorts():
    found = Profile(EVENTS)
    assert [(row.name, row.runs) for row in found.calls] == [("call one", 1), ("call two", 1), ("other operations", 2)]
    assert [row.share for row in found.calls] == pytest.approx([5 / 11.1, 1 / 11.1, 5.1 / 11.1])
    assert found.seconds == pytest.approx(10e-6)
    assert str(Profile(())) == "the profiler saw no operation"


def test_the_timeline_shows_when_and_what():
    *_, first, second, one, two, others = str(Profile(EVENTS)).splitlines()
    assert first == f"device 0   |{'A' * 37}{'.' * 35}|"
    assert second == f"device 1   |{' ' * 14}{'B' * 8}{' ' * 50}|"
    assert [one, two, others] == ["  A  call one", "  B  call two", "  .  other operations"]
    many = tuple(Event(f"call {i}", True, 0, i * 1e-6, 1e-6) for i in range(30))
    assert str(Profile(many)).splitlines()[-2] == "  *  call 29"


def test_arguments_that_are_no_arrays_stay_what_they_are():
    def layer(x, w, activation):
        return jaxmp.linear(x, w, activation=activation)

    for fn in (layer, jax.jit(layer, static_argnums=2), jax.jit(layer, static_argnames="activation")):
        found = jaxmp.profile(fn, quiet=True)(jnp.ones((8, 4)), jnp.ones((4, 8)), "relu")
        assert [row.runs for row in found.calls if row.name.startswith("local 8x4x8")] == [1]


def test_it_compiles_where_jit_is_disabled():
    with jax.disable_jit():
        found = jaxmp.profile(lambda a: jaxmp.matmul(jnp.sin(a), a), quiet=True)(jnp.ones((8, 8)))
    assert [row.runs for row in found.calls if row.name.startswith("local 8x8x8")] == [1]
