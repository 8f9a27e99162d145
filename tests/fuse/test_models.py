"""Models that do not use jaxmp, through `jaxmp.fuse`. Without these tests, a rewrite could miss a product, use a wrong
operand, type or sharding, add a collective, or fuse nothing."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_gradient
from compiled import collectives_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

ROWS, ALL_ROWS = P("data", None, None), P("data", "model", None)
COLUMNS, CONTRACTED = P(None, "model"), P("model", None)
B, S, D, F = 4, 8, 16, 32


def mlp(x, w_in, b_in, w_out, b_out):
    """Applies two layers with biases, an activation and a residual."""
    h = jax.nn.relu(jnp.einsum("bsd,df->bsf", x, w_in) + b_in)
    return x + (jnp.einsum("bsf,fd->bsd", h, w_out, out_sharding=_of(ROWS)) + b_out)


def sequence_parallel(x, w_in, b_in, w_out, b_out):
    x = _reshard(x, ROWS)
    return jnp.matmul(jax.nn.gelu(x @ w_in + b_in), w_out, out_sharding=_of(ALL_ROWS)) * 2 + 0 * b_out


def gated(x, w_gate, b_in, w_down, b_out):
    h = jax.nn.silu(x @ w_gate) * (x @ (2 * w_gate))
    return x + jnp.matmul(h, w_down, out_sharding=_of(ROWS))


def attention(x, w_in, b_in, w_out, b_out):
    """Computes attention: heads are a dimension, each key serves two queries, the output contracts two dimensions."""
    wq = w_in.reshape(D, 4, 8, out_sharding=_of(P(None, "model", None)))
    wk = wq[:, ::2] if _MESH[0] is None else jax.lax.slice_in_dim(wq, 0, 4, axis=1)
    wo = w_out.reshape(4, 8, D, out_sharding=_of(P("model", None, None)))
    q, k = jnp.einsum("bsd,dhk->bshk", x, wq), jnp.einsum("bsd,dhk->bshk", x, wk)
    k = k if k.shape == q.shape else jnp.repeat(k, 2, axis=2)
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / 8)
    values = jnp.einsum("bhqs,bshk->bqhk", weights, k)
    return jnp.einsum("bqhk,hkd->bqd", values, wo, out_sharding=_of(ROWS))


def fsdp_layers(x, w_in, b_in, w_out, b_out):
    """Scans over layers with gathered weights and a checkpoint policy."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(x, weights):
        w_in, w_out = (_reshard(w, P(None, None)) for w in weights)
        return x + jax.nn.relu(x @ w_in) @ w_out, None

    stacked = jax.tree.map(lambda w: jnp.stack([w, w / 2]), (w_in, w_out))
    return jax.lax.scan(layer, x, stacked)[0]


# The mesh of the running test: None, or a mesh with explicit or auto axes.
_MESH = [None]


def _of(spec):
    return spec if _MESH[0] is not None and AxisType.Explicit in _MESH[0].axis_types else None


def _reshard(x, spec):
    return x if _of(spec) is None else jax.sharding.reshard(x, spec)


@dataclasses.dataclass(frozen=True)
class Model:
    """A function, the shardings of x and the weights, and (calls, products left, collectives) of the forward pass and
    of both passes on explicit axes."""

    function: Callable
    forward: tuple[int, int, int]
    both: tuple[int, int, int]
    x: P = ROWS
    w_in: P = COLUMNS
    w_out: P = CONTRACTED


MODELS = (
    Model(mlp, (2, 0, 0), (6, 0, 0)),
    Model(sequence_parallel, (2, 0, 0), (6, 0, 2), x=ALL_ROWS),
    Model(gated, (3, 0, 0), (9, 0, 0)),
    Model(attention, (3, 2, 0), (9, 6, 0)),
    Model(
        fsdp_layers,
        (4, 0, 0),
        (12, 0, 0),
        x=P(("data", "model"), None, None),
        w_in=P(("data", "model"), None),
        w_out=P(("data", "model"), None),
    ),
)
by_name = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.function.__name__)


def operands(model, mesh=None):
    """Small integers, so that relu's models give the same bits in any order of summation."""
    rng = np.random.default_rng(0)
    shapes = {"x": (B, S, D), "w_in": (D, F), "b_in": (F,), "w_out": (F, D), "b_out": (D,)}
    specs = {"x": model.x, "w_in": model.w_in, "b_in": P(*model.w_in[1:]), "w_out": model.w_out, "b_out": P(None)}
    arrays = {name: jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for name, shape in shapes.items()}
    if mesh is None:
        return list(arrays.values())
    return [jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()]


@pytest.fixture(params=["explicit", "auto", "none"])
def mesh(request):
    if request.param == "none":
        yield None
        return
    kind = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[request.param]
    _MESH[0] = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(_MESH[0]):
        yield _MESH[0]
    _MESH[0] = None


@by_name
def test_values_gradients_types_and_collectives(model, mesh):
    args = operands(model, mesh)
    plain = with_gradient(model.function)
    compiled = jax.jit(plain).lower(*args).compile()
    want = compiled(*args)
    for fused in (with_gradient(jaxmp.fuse(model.function)), jaxmp.fuse(plain)):
        program = jax.jit(fused).lower(*args).compile()
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(program(*args)), strict=True):
            assert (w.dtype, w.shape, w.aval.weak_type) == (g.dtype, g.shape, g.aval.weak_type)
            if _of(P()) is not None:
                assert jax.typeof(w).sharding == jax.typeof(g).sharding
            scale = np.abs(w).max() + 1
            exact = model.function in (mlp, fsdp_layers)
            np.testing.assert_array_less(np.abs(w - g) / scale, 1e-30 if exact else 2e-6)
        if _of(P()) is not None:
            # The gradient of a sequence-parallel weight gathers the rows again; JAX keeps the gathered rows.
            more = {"all-gather"} if model.function is sequence_parallel else set()
            assert {*collectives_of(program.as_text())} <= {*collectives_of(compiled.as_text())} | more


@by_name
@pytest.mark.parametrize("mesh", ["explicit"], indirect=True)
def test_what_is_fused(model, mesh):
    """`fuse(grad(f))` finds gelu's derivative after a product, and keeps gelu's argument instead of its parts."""
    args = operands(model, mesh)
    found = jaxmp.explain(jaxmp.fuse(model.function), quiet=True)(*args)
    assert (found.calls, found.left, found.collectives) == model.forward, str(found)
    found = jaxmp.explain(jaxmp.fuse(with_gradient(model.function)), quiet=True)(*args)
    assert (found.calls, found.left, found.collectives) == model.both, str(found)
    assert all(row.line.startswith("test_models.py:") for row in found.rows)
    assert all(row.why.startswith("not fused: ") for row in found.rows if row.operation == "dot_general")
    if model.function is sequence_parallel:
        epilogs = [row.epilog for row in found.rows if row.epilog not in ("", "NONE")]
        assert epilogs == ["GELU_AUX_BIAS", "BIAS", "DGELU"]
    found = jaxmp.explain(jaxmp.fuse(with_gradient(model.function), determinism="batch"), quiet=True)(*args)
    assert found.left == 0, str(found)
