"""Gradients of loops through `jaxmp.fuse`: an epilog of the backward scan reads the aux of the forward one. Without
these tests it could read another step's aux, lose other results of the loops, or fail if a call is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.fuse import emit

# float64 separates gelu's rounding from a wrong step.
pytestmark = pytest.mark.usefixtures("promotion_of_users", "x64")

LAYERS, ROWS, WIDTH, HIDDEN = 3, 8, 4, 8
SPECS = (P(("data", "model"), None), P(None, None, "model"), P(None, "model", None), P(None, "model"))


def step_of(activation, *, reverse=False, is_sharded=False):
    """Returns the value and gradients of a loop over layers that also returns a sum of each step's rows."""

    def loss(x, w_in, w_out, bias):
        def layer(x, weights):
            w_in, w_out, bias = weights
            rows = jax.sharding.reshard(x, P("data", None)) if is_sharded else x
            spec = SPECS[0] if is_sharded else None
            return x + jnp.matmul(activation(rows @ w_in + bias), w_out, out_sharding=spec), x.sum()

        y, sums = lax.scan(layer, x, (w_in, w_out, bias), reverse=reverse)
        return jnp.sum(y * y) + jnp.sum(sums * jnp.arange(1.0, LAYERS + 1))

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def operands(mesh=None):
    """Small integers, so that relu's sums are exact."""
    rng = np.random.default_rng(0)
    shapes = ((ROWS, WIDTH), (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (LAYERS, HIDDEN))
    arrays = [rng.integers(-1, 2, shape).astype(np.float64) for shape in shapes]
    if mesh is None:
        return [jnp.asarray(x) for x in arrays]
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, SPECS, strict=True)]


def check(function, args, *, is_exact):
    want, got = jax.jit(function)(*args), jax.jit(jaxmp.fuse(function))(*args)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jax.typeof(w) == jax.typeof(g)
        np.testing.assert_array_less(np.abs(w - g) / (np.abs(w).max() + 1), 1e-30 if is_exact else 1e-13)


def stacked(function, args):
    """Returns the number of arrays that the forward scan stacks, for its caller and for the backward scan."""
    scans = [eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "scan"]
    return sum(v.aval.shape[:2] == (LAYERS, ROWS) for v in scans[0].outvars)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["no mesh", "explicit"])
def test_the_backward_scan_reads_the_aux_of_the_forward_one(is_sharded):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh) if is_sharded else jax.numpy_rank_promotion("allow"):
        args, function = operands(mesh if is_sharded else None), step_of(jax.nn.gelu, is_sharded=is_sharded)
        found = jaxmp.explain(jaxmp.fuse(function), quiet=True)(*args)
        epilogs = [row.epilog for row in found.rows if row.epilog not in ("", "NONE")]
        assert epilogs == ["GELU_AUX_BIAS", "DGELU"], str(found)
        # x, the activation and the aux, without the inputs of JAX's gelu derivative.
        assert stacked(jaxmp.fuse(function), args) == 3
        check(function, args, is_exact=False)


def test_reversed_loops_and_activations_that_are_read_twice():
    args = operands()
    check(step_of(jax.nn.gelu, reverse=True), args, is_exact=False)
    for activation in (lambda z: jax.nn.gelu(z) + z, jax.nn.relu):
        function = step_of(activation)
        assert stacked(jaxmp.fuse(function), args) == stacked(function, args)
        check(function, args, is_exact=False)


def flat(x, w_in, w_out, bias):
    """Returns the value and the gradients of one layer without a loop."""
    return jax.value_and_grad(lambda x, w: jnp.sum((jax.nn.gelu(x @ w + bias[0]) @ w_out[0]) ** 2), (0, 1))(x, w_in[0])


@pytest.mark.parametrize("refused", ["call", "gradient"])
@pytest.mark.parametrize("function", [step_of(jax.nn.gelu), flat], ids=["loop", "layer"])
def test_a_program_is_unchanged_if_one_of_two_calls_is_refused(refused, function, monkeypatch):
    def refuse(*args, **kwargs):
        raise NotAvailable("refused")

    monkeypatch.setattr(emit, refused, refuse)
    check(function, operands(), is_exact=False)


ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jnp.tanh}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("spec", [P(None, "model"), P("model", None), P("data", "model")], ids=str)
def test_on_automatic_axes_gradients_lie_where_jax_puts_them(name, spec, mesh_of):
    """If rows and columns of a weight's gradient compete for an axis, XLA decides by the order of the operands and by
    the contraction. Tests one weight for all steps and one for each."""
    mesh = mesh_of({"data": 2, "model": 2}, AxisType.Auto)

    def loss(w, ws, x):
        x = lax.scan(lambda x, _: (ACTIVATIONS[name](x @ w), None), x, None, length=LAYERS)[0]
        return jnp.sum(lax.scan(lambda x, w: (ACTIVATIONS[name](x @ w), None), x, ws)[0] ** 2)

    shardings = [NamedSharding(mesh, each) for each in (spec, P(None, *spec), P("data", None))]
    arrays = [jnp.full(shape, 0.1) for shape in ((8, 8), (LAYERS, 8, 8), (16, 8))]
    args = [jax.device_put(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]
    want = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    for f in (jaxmp.fuse(jax.grad(loss, (0, 1, 2))), jax.grad(jaxmp.fuse(loss), (0, 1, 2))):
        for w, g in zip(want, jax.jit(f)(*args), strict=True):
            assert w.sharding.is_equivalent_to(g.sharding, w.ndim), (w.sharding.spec, g.sharding.spec)
            np.testing.assert_allclose(w, g, rtol=1e-6)
