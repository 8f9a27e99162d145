"""Flax (NNX and Linen) and Equinox: their layers over `jaxmp.dot_general`, and jaxmp's layers against theirs. Without
these tests, a layer could pass an option that we ignore; a parameter could be initialised or stored differently, so
that a checkpoint gives another function; a gradient could be one rank's part; a layer could stop being one call."""

import importlib
import io
import sys

import bounds
import cases
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import calls_of, collectives_of, compiled_text, other_products_of
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp.equinox
import jaxmp.flax

MESH = cases.BY_NAME["local"]
ROWS, COLUMNS = P("x", "y"), P("x", None, "y")
BATCH, LENGTH, WIDTH, HIDDEN = 4, 6, 8, 16
IN, OUT, FEATURES = 6, 8, P("x", None)
KINDS = {"explicit": AxisType.Explicit, "bare jit": AxisType.Auto, "no mesh": None}
AXIS_TYPES = pytest.mark.parametrize("axis_type", KINDS.values(), ids=KINDS)


def judge(got, want, dtype="float32", roundings=256):
    """Asserts that `got` and `want` differ by no more than `roundings` roundings of the largest value. A small model is
    so well conditioned: its sums have some hundred terms no larger than the largest result."""
    for i, (g, w) in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        bounds.judge(f"leaf {i}", g, w, np.full(w.shape, roundings * bounds.unit_roundoff(dtype) * np.abs(w).max()))


class Mlp(nnx.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self, dot_general):
        layer = {"dot_general": dot_general, "rngs": nnx.Rngs(0), "bias_init": nnx.initializers.normal()}
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_metadata={"out_sharding": (None, "y")}, **layer)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_metadata={"out_sharding": ("y", None)}, **layer)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x, out_sharding=COLUMNS)), out_sharding=ROWS)


@nnx.jit
def loss_and_gradients(model, x):
    return nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2), argnums=(0, 1))(model, x)


def test_nnx(rng):
    mesh, x = MESH.jax_mesh(), rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    with jax.set_mesh(mesh):
        x = cases.put(x, mesh, ROWS)
        models = Mlp(jaxmp.dot_general), Mlp(jax.lax.dot_general)
        got, want = (jax.tree.leaves(loss_and_gradients(model, x)) for model in models)
    judge(got, want)
    assert all(g.sharding.is_equivalent_to(w.sharding, g.ndim) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("make", "shape", "spec", "calls"),
    [
        (lambda: Mlp(jaxmp.dot_general), (BATCH, LENGTH, WIDTH), ROWS, ["all_gather", "reduce_scatter"]),
        (lambda: of_nnx(jaxmp.flax.Linear, True, activation="gelu"), (4, IN), FEATURES, ["local"]),
    ],
)
def test_nnx_layers_are_the_fused_calls(make, shape, spec, calls):
    mesh = MESH.jax_mesh()
    with jax.set_mesh(mesh):
        graph, state = nnx.split(make())
        x = cases.put(np.ones(shape, np.float32), mesh, spec)
        text = compiled_text(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert calls_of(text) == calls
    assert not collectives_of(text)
    assert not other_products_of(text)


@pytest.mark.parametrize("kind", [nnx.Param, nnx.Variable])
def test_a_parameter_is_an_operand_as_it_is_to_jnp(kind, rng):
    x, w, bias = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((4, 6), (6, 6), (6,)))
    kept, bias_kept = kind(jnp.asarray(w)), kind(jnp.asarray(bias))
    for got, want in (
        (jaxmp.matmul(x, kept), x @ w),
        (jaxmp.linear(x, kept, bias_kept), x @ w + bias),
        (jaxmp.mlp(x, kept, bias_kept, kept, None, activation="relu"), np.maximum(x @ w + bias, 0) @ w),
        (jaxmp.einsum("ij,jk->ik", x, kept), x @ w),
    ):
        np.testing.assert_array_equal(got, want)


ACTIVATIONS = {None: lambda z: z, "relu": jax.nn.relu, "gelu_exact": lambda z: jax.nn.gelu(z, False)}
ACTIVATIONS["silu"] = jax.nn.silu


def of_nnx(layer, is_explicit, **options):
    metadata = {"kernel_metadata": {"out_sharding": (None, "y")}, "bias_metadata": {"out_sharding": ("y",)}}
    options |= metadata if is_explicit else {}
    return layer(IN, OUT, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
@AXIS_TYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.small("values")
def test_nnx_layer(activation, axis_type, dtype, rng):
    x, is_explicit = cases.normal(rng, (4, IN), "float32"), axis_type == AxisType.Explicit
    mesh = None if axis_type is None else MESH.jax_mesh(axis_type)

    def run(layer, act, **options):
        @nnx.jit
        def gradients(layer, x):
            def loss(layer, x):
                y = act(layer(x, out_sharding=ROWS if is_explicit else None))
                return jnp.sum(y.astype(jnp.float32) ** 2), y

            return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

        with jax.set_mesh(mesh) if mesh else jax.numpy_dtype_promotion("strict"):
            placed = cases.put(x, mesh, FEATURES) if mesh else jnp.asarray(x)
            return gradients(of_nnx(layer, is_explicit, dtype=dtype, **options), placed)

    got = run(jaxmp.flax.Linear, lambda y: y, activation=activation)
    want = run(nnx.Linear, lambda y: ACTIVATIONS[activation](y))
    judge(got, want, dtype or "float32", 32)


def test_nnx_parameters_are_those_of_the_plain_layer():
    for options in ({}, {"use_bias": False}, {"param_dtype": jnp.bfloat16}):
        ours = jaxmp.flax.Linear(IN, OUT, activation="silu", rngs=nnx.Rngs(3), **options)
        plain = nnx.Linear(IN, OUT, rngs=nnx.Rngs(3), **options)
        assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(plain))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(plain))
    nnx.update(ours, jax.tree.map(lambda x: 0 * x, nnx.state(plain)))
    assert not np.any(ours.kernel[...])


def test_nnx_takes_no_other_product():
    with pytest.raises(ValueError, match="dot_general is jaxmp's own"):
        jaxmp.flax.Linear(2, 3, dot_general=lambda *args, **options: None, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.small("values")
def test_equinox(activation, dtype, rng):
    plain = equinox.nn.Linear(IN, OUT, dtype=dtype, key=jax.random.key(1))
    ours = jaxmp.equinox.Linear(IN, OUT, dtype=dtype, activation=activation, key=jax.random.key(2))
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, plain)
    file.seek(0)
    ours = equinox.tree_deserialise_leaves(file, ours)
    x = jnp.asarray(cases.normal(rng, (4, IN), dtype))

    def gradients(layer, apply):
        loss = lambda layer, x: (jnp.sum((y := apply(layer, x)).astype(jnp.float32) ** 2), y)  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(layer, x))

    want = gradients(plain, lambda layer, x: ACTIVATIONS[activation](jax.vmap(layer)(x)))
    judge(gradients(ours, lambda layer, x: jax.vmap(layer)(x)), want, dtype, 32)
    judge(gradients(ours, lambda layer, x: layer(x)), want, dtype, 32)


def test_equinox_scalars_and_an_activation_that_learns():
    for sizes in (("scalar", 3), (3, "scalar"), ("scalar", "scalar")):
        has_bias = sizes[0] == "scalar"
        ours = jaxmp.equinox.Linear(*sizes, has_bias, activation="tanh", key=jax.random.key(4))
        plain = equinox.nn.Linear(*sizes, has_bias, key=jax.random.key(4))
        x = jnp.ones(() if sizes[0] == "scalar" else 3)
        judge(ours(x), jnp.tanh(plain(x)))
    with pytest.raises(ValueError, match="x must have scalar shape"):
        ours(jnp.ones(2))
    learns = equinox.nn.PReLU(0.5)
    ours = jaxmp.equinox.Linear(3, 4, activation=learns, key=jax.random.key(5))
    plain = equinox.nn.Linear(3, 4, key=jax.random.key(5))
    x = jnp.ones(3)
    got = equinox.filter_grad(lambda layer: layer(x).sum())(ours)
    want = equinox.filter_grad(lambda layers: layers[1](layers[0](x)).sum())((plain, learns))
    judge(got, want)


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"jaxmp.{library}")
    with pytest.raises(ImportError, match=f"jaxmp.{library} needs .* run `pip install '?{library}"):
        importlib.import_module(f"jaxmp.{library}")
