"""Operands that a grid gathers along k: fully sharded weights, and features that are sharded along k. Integer results
are bitwise equal: on hostmp, in the forms that cuBLASMp takes, and with XLA's collectives."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog
from jaxmp._src.core.lowering import backend
from jaxmp._src.core.lowering.backend import Capabilities

# Shardings of a (s, m, k), b (k, n) and the result over x * y = 2 * 2 devices; the rows and columns of the grid.
LAYOUTS = {
    "weights": (P(("x", "y")), P(("x", "y")), P(("x", "y")), (4, 1)),
    "weights beside tensor parallelism": (P(None, "x"), P("x", "y"), P(None, "x", "y"), (2, 1)),
    "features": (P(None, None, ("y", "x")), P(None, ("y", "x")), P(None, None, ("y", "x")), (1, 4)),
    "features beside data parallelism": (P("x", None, "y"), P(None, "y"), P("x", None, "y"), (1, 2)),
    "both": (P(None, "x", "y"), P("x", "y"), P(None, "x", "y"), (2, 2)),
}


@pytest.fixture(params=["hostmp", "cuBLASMp's forms", "xla"])
def implementation(request, monkeypatch):
    if request.param == "cuBLASMp's forms":
        monkeypatch.setattr(backend, "capabilities_of", lambda library: Capabilities())
    jax.clear_caches()  # the form is chosen at lowering
    yield "xla" if request.param == "xla" else None
    jax.clear_caches()


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients(layout, implementation, mesh, rng):
    spec_a, spec_b, out, grid = LAYOUTS[layout]
    n = 64 if layout.startswith("features") else 8  # the smaller operand is gathered
    values = [cases.integers(rng, *shape) for shape in ((4, 8, 16), (16, n), (4, 8, n), (n,))]
    specs = spec_a, spec_b, out, P(out[2] if len(out) > 2 else None)
    a, b, c, bias = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(values, specs, strict=True))

    def ours(a, b, c, bias):
        epilog = {"epilog": Epilog.RELU_BIAS, "epilog_inputs": {"bias": bias}}
        return jaxmp.matmul(a, b, c, beta=2.0, out_sharding=out, implementation=implementation, **epilog)

    def theirs(a, b, c, bias):
        return jax.nn.relu(jnp.matmul(a, b, out_sharding=out) + 2 * c + bias[None, None])

    def with_gradients(f):
        def both(*operands):
            d, pull = jax.vjp(f, *operands)
            return d, pull(jnp.sign(d))

        return jax.jit(both)

    found, wanted = (jax.tree.leaves(with_gradients(f)(a, b, c, bias)) for f in (ours, theirs))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    if implementation is None and backend.capabilities_of("host").grid_any_shape:
        rows = jaxmp.explain(lambda *operands: jax.vjp(ours, *operands)[1](c))(a, b, c, bias).rows
        patterns = [row.pattern for row in rows if row.operation.startswith("matmul")]
        assert patterns == ["grid"] * 3
        assert not [row for row in rows if row.operation == "all_gather"]
        assert f"1 x {np.prod(grid)} " in rows[0].groups or f"2 x {np.prod(grid)} " in rows[0].groups


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_is_planned_alike_with_dimension_numbers(layout, mesh, rng):
    spec_a, spec_b, out, _ = LAYOUTS[layout]
    n = 64 if layout.startswith("features") else 8
    values = [rng.integers(-128, 128, shape).astype(np.int8) for shape in ((4, 8, 16), (16, n))]
    a, b = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(values, (spec_a, spec_b), strict=True))
    options = {"preferred_element_type": jnp.int32, "out_sharding": out}
    products = (
        functools.partial(jaxmp.matmul, **options),
        lambda a, b: jaxmp.dot_general(a, b, (((2,), (0,)), ((), ())), **options),
    )
    for product in products:
        np.testing.assert_array_equal(jax.jit(product)(a, b), values[0].astype(np.int32) @ values[1].astype(np.int32))
    rows = [jaxmp.explain(product, quiet=True)(a, b).rows for product in products]
    assert [row.pattern for row in rows[0]] == [row.pattern for row in rows[1]]
    assert rows[0][0].pattern == "grid"


def test_a_grid_is_used_if_it_costs_no_more_than_moving_rows(mesh):
    def patterns(rows):
        a, b = (cases.typed(mesh, shape, "x") for shape in ((rows, 1024), (1024, 1024)))
        f = functools.partial(jaxmp.matmul, out_sharding=P("x"))
        return [row.pattern for row in jaxmp.explain(f)(a, b).rows if row.operation == "matmul"]

    assert patterns(2048) == ["grid"]
    assert patterns(2) == ["reduce_scatter"]


@pytest.mark.parametrize("determinism", ["batch", "topology"])
def test_an_order_of_sums_of_its_own_gathers_ahead_of_the_call(determinism, mesh, rng):
    a, b = (jax.device_put(cases.integers(rng, 8, 8), NamedSharding(mesh, P("x"))) for _ in range(2))
    f = functools.partial(jaxmp.matmul, out_sharding=P("x"), determinism=determinism)
    assert "grid" not in {row.pattern for row in jaxmp.explain(f)(a, b).rows}
    np.testing.assert_array_equal(jax.jit(f)(a, b), np.asarray(a) @ np.asarray(b))


@pytest.mark.parametrize(
    ("specs", "out"),
    [
        ((P("x"), P("x", "y")), P("x", "y")),  # a grid gathers b
        ((P("x", "y"), P("y", "x")), P("x")),  # b is gathered before the call
        ((P("y"), P(("x", "y"))), P("y")),
    ],
)
@pytest.mark.parametrize("product", [jaxmp.matmul, functools.partial(jaxmp.einsum, "mk,kn->mn")])
def test_no_gathered_operand_is_kept_for_the_backward_pass(product, specs, out, mesh):
    a, b = (jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, spec)) for spec in specs)
    _, pull = jax.vjp(functools.partial(product, out_sharding=out), a, b)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(pull) if x.ndim)
    assert held <= sum(x.addressable_shards[0].data.nbytes for x in (a, b))
