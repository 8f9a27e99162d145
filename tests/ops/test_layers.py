"""jaxmp's layers for Flax NNX and Equinox against those of the libraries, followed by the activation.

What would be silently wrong without it: a parameter that starts or is stored otherwise, so that a checkpoint loads into
another function, an option of the plain layer that ours ignores, a layer that no longer is one call.
"""

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
from compiled import calls_of, collectives_of, other_products_of
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp.equinox
import jaxmp.flax
from jaxmp._src.spec import activations

MESH = cases.BY_NAME["ag-data"].replace(mesh=(("data", 2), ("model", 2)))
ROWS, COLUMNS = P("data", None), P("data", "model")
WIDTH, HIDDEN = 6, 8
ACTIVATIONS = [None, "relu", "gelu_exact", jax.nn.silu]


def applied(activation, z):
    found = activations.FUNCTIONS.get(activation, activation) if isinstance(activation, str) else activation
    return z if found is None else found(z)


def judge(got, want, dtype="float32"):
    for i, (g, w) in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        # Two roundings of every operation, in sums of some ten terms no larger than the largest result.
        bounds.judge(f"leaf {i}", g, w, np.full(w.shape, 32 * bounds.unit_roundoff(dtype) * np.abs(w).max()))


def of_nnx(layer, is_explicit, **options):
    metadata = {"kernel_metadata": {"out_sharding": (None, "model")}, "bias_metadata": {"out_sharding": ("model",)}}
    options |= metadata if is_explicit else {}
    return layer(WIDTH, HIDDEN, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto, None], ids=["explicit", "bare jit", "no mesh"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.small("pairs")
def test_nnx(activation, axis_type, dtype, rng):
    cases.require(None)
    x, is_explicit = cases.normal(rng, (4, WIDTH), "float32"), axis_type == AxisType.Explicit
    mesh = None if axis_type is None else MESH.jax_mesh(axis_type)

    def run(layer, act, **options):
        @nnx.jit
        def gradients(layer, x):
            def loss(layer, x):
                y = act(layer(x, out_sharding=COLUMNS if is_explicit else None))
                return jnp.sum(y.astype(jnp.float32) ** 2), y

            return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

        with jax.set_mesh(mesh) if mesh else jax.numpy_dtype_promotion("strict"):
            placed = cases.put(x, mesh, ROWS) if mesh else jnp.asarray(x)
            return gradients(of_nnx(layer, is_explicit, dtype=dtype, **options), placed)

    got = run(jaxmp.flax.Linear, lambda y: y, activation=activation)
    want = run(nnx.Linear, lambda y: applied(activation, y))
    judge(got, want, dtype or "float32")


def test_nnx_is_one_call():
    mesh = MESH.jax_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(of_nnx(jaxmp.flax.Linear, True, activation="gelu"))
        x = cases.put(np.ones((4, WIDTH), np.float32), mesh, ROWS)
        text = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile().as_text()
    assert calls_of(text) == ["local"]
    assert not collectives_of(text)
    assert not other_products_of(text)


def test_nnx_parameters_are_those_of_the_plain_layer():
    for options in ({}, {"use_bias": False}, {"param_dtype": jnp.bfloat16}):
        ours = jaxmp.flax.Linear(WIDTH, HIDDEN, activation="silu", rngs=nnx.Rngs(3), **options)
        plain = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(3), **options)
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
    """A vector, under vmap, and rows at once; a plain layer's leaves are loaded from a file first."""
    cases.require(None)
    plain = equinox.nn.Linear(WIDTH, HIDDEN, dtype=dtype, key=jax.random.key(1))
    ours = jaxmp.equinox.Linear(WIDTH, HIDDEN, dtype=dtype, activation=activation, key=jax.random.key(2))
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, plain)
    file.seek(0)
    ours = equinox.tree_deserialise_leaves(file, ours)
    x = jnp.asarray(cases.normal(rng, (4, WIDTH), dtype))

    def gradients(layer, apply):
        loss = lambda layer, x: (jnp.sum((y := apply(layer, x)).astype(jnp.float32) ** 2), y)  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(layer, x))

    want = gradients(plain, lambda layer, x: applied(activation, jax.vmap(layer)(x)))
    judge(gradients(ours, lambda layer, x: jax.vmap(layer)(x)), want, dtype)
    judge(gradients(ours, lambda layer, x: layer(x)), want, dtype)


def test_equinox_parameters_are_those_of_the_plain_layer():
    for options in ({}, {"use_bias": False}, {"dtype": jnp.bfloat16}):
        ours = jaxmp.equinox.Linear(WIDTH, HIDDEN, activation="silu", key=jax.random.key(3), **options)
        plain = equinox.nn.Linear(WIDTH, HIDDEN, key=jax.random.key(3), **options)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(plain))
        assert ours.activation == "silu"


def test_equinox_scalars_and_an_activation_that_learns():
    cases.require(None)
    for sizes in (("scalar", 3), (3, "scalar"), ("scalar", "scalar")):
        ours = jaxmp.equinox.Linear(*sizes, activation="tanh", key=jax.random.key(4))
        plain = equinox.nn.Linear(*sizes, key=jax.random.key(4))
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


def test_equinox_on_an_explicit_mesh():
    mesh = MESH.jax_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        layer = jaxmp.equinox.Linear(WIDTH, HIDDEN, activation="silu", key=jax.random.key(0))
        placed = equinox.tree_at(
            lambda layer: (layer.weight, layer.bias),
            layer,
            (cases.put(layer.weight, mesh, P("model", None)), cases.put(layer.bias, mesh, P("model"))),
        )
        x = jnp.ones((4, WIDTH))
        y = placed(cases.put(x, mesh, ROWS), out_sharding=COLUMNS)
    assert jax.typeof(y).sharding.spec == COLUMNS
    judge(y, layer(x))


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"jaxmp.{library}")
    with pytest.raises(ImportError, match=f"jaxmp.{library} needs .* run `pip install '?{library}"):
        importlib.import_module(f"jaxmp.{library}")
