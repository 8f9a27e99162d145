"""Layers (`linear`, `mlp`, `gated_mlp`): values and derivatives on every kind of mesh, and the calls of their passes.
Without these tests, a product could be rounded before its activation, the gate's cotangent could be swapped with the
other one, a hidden bias's gradient could miss rows of other ranks, a second derivative could ignore that the first
depends on z, and x could travel twice."""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import ALL, LAYOUTS, MESH, SHAPES, data, operands_of, place, specs_of

import jaxmp
from jaxmp._src.core.spec import activations

# Transforms of a layer f at values x.


def gradient_of(f, x):
    operands = operands_of(x)
    return jax.grad(lambda *operands: jnp.sum(x["ct"] * f(*operands) ** 2), range(len(operands)))


def first_order(f, x):
    """Returns the value, the tangent, and every gradient of a weighted sum of squares."""
    y, t = jax.jvp(f, operands_of(x), operands_of(x, "t_"))
    return y, t, gradient_of(f, x)(*operands_of(x))


def second_order(f, x):
    """Returns forward over reverse, forward over forward, and the Hessian in the bias of the first product."""
    tangents = operands_of(x, "t_")
    where = 2 if len(tangents) <= 5 else 4
    before, after = operands_of(x)[:where], operands_of(x)[where + 1 :]
    hessian = jax.jacfwd(jax.jacfwd(lambda b: jnp.sum(x["ct"] * f(*before, b, *after) ** 2)))(operands_of(x)[where])
    twice = jax.jvp(lambda *operands: jax.jvp(f, [*operands], tangents), operands_of(x), tangents)
    return jax.jvp(gradient_of(f, x), operands_of(x), tangents), twice, hessian


def rematerialized(f, x):
    """Returns gradients, and gradients for each example of a batch, with the layer rematerialized."""
    f = jax.checkpoint(f)
    first, *rest = operands_of(x)
    each = jax.vmap(jax.grad(lambda b, x: jnp.sum(f(x, *rest[:-1], b) ** 2)), (None, 0))
    return gradient_of(f, x)(first, *rest), each(rest[-1], jnp.stack([first, 2 * first]))


def scanned(f, x):
    def loss(*operands):
        first, *weights = operands
        total, _ = jax.lax.scan(lambda y, x: (y + f(x, *weights), None), x["ct"], jnp.stack([first, first]))
        return jnp.sum(total**2)

    return jax.grad(loss, range(len(operands_of(x))))(*operands_of(x))


TRANSFORMS = (first_order, second_order, rematerialized, scanned)
MODES = ("explicit", "in_shardings", "partitioner", "shard_map", "shard_map-unchecked")


def call(mode, layer, mesh, layout, **options):
    """Returns a function of the layer's operands that calls it in this way."""
    f = functools.partial(getattr(jaxmp, layer), **options)
    specs, y = specs_of(layer, layout)
    if mode == "explicit":
        return functools.partial(f, out_sharding=y)
    if mode == "partitioner":
        return functools.partial(f, out_sharding=NamedSharding(mesh, y))
    if mode == "in_shardings":
        given = tuple(spec for name, spec in specs.items() if name in ("x", "w", "w_in", "w_out", "w_gate", "w_down"))
        return functools.partial(f, in_shardings=given, out_sharding=y, mesh=mesh)
    f = f if layer == "linear" else functools.partial(f, axis_name="model")
    in_specs = tuple(spec for name, spec in specs.items() if name != "ct")
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=y, check_vma=mode == "shard_map")


def expected(layer, transform, x, **options):
    """Returns the transform's result in float64, and its majorant."""
    wide = {name: cases.wide(v) for name, v in x.items()}
    absolute = {name: np.abs(v) for name, v in wide.items()}
    f = functools.partial(getattr(reference, layer), **options)
    major = functools.partial(f, is_majorant=True)
    with jax.enable_x64(True):
        return jax.jit(lambda x, size: (transform(f, x), transform(major, size)))(wide, absolute)


def judge(name, got, want, major, dtype="float32"):
    for i, (g, w, m) in enumerate(zip(*map(jax.tree.leaves, (got, want, major)), strict=True)):
        assert g.dtype == dtype
        allowed = bounds.PROGRAM * bounds.unit_roundoff(dtype) * np.asarray(m)
        bounds.judge(f"{name}[{i}]", g, np.asarray(w), allowed)


def columns(layer, layout, mode, transform, activation, dtype):
    """Returns the combinations that the small suite covers: pairs with the layer and with each transform."""
    of_layer = (layer, layout), (layer, mode), (layer, transform), (layer, activation)
    return *of_layer, (layout, transform), (activation, dtype)


ACTIVATIONS = ("relu", "gelu", "gelu_exact", "silu", "tanh", "sigmoid")
COMBINATIONS = [
    (layer, layout, mode, transform, activation, dtype)
    for layer in SHAPES
    for layout in LAYOUTS
    for mode in MODES
    # Inside shard_map, mlp and gated_mlp gather and scatter rows over the named axis, and linear is local.
    if mode == "explicit" or (mode == "in_shardings") or layout in ("tensor parallel", "sequence parallel")
    if not mode.startswith("shard_map") or (layer == "linear") == (layout == "tensor parallel")
    for transform in TRANSFORMS
    for activation in ACTIVATIONS
    for dtype in ("float32", "bfloat16")
    # Inside shard_map with check_vma, JAX 0.12's erf has no derivative, also in plain JAX.
    if not (activation == "gelu_exact" and mode == "shard_map")
    # The bound says nothing about second derivatives with bfloat16's roundings.
    if dtype == "float32" or transform is first_order
]


@pytest.mark.small("values", of=columns)
@pytest.mark.parametrize(("layer", "layout", "mode", "transform", "activation", "dtype"), COMBINATIONS)
def test_values_and_derivatives(layer, layout, mode, transform, activation, dtype, rng):
    mesh = MESH.jax_mesh(AxisType.Explicit if mode == "explicit" else AxisType.Auto)
    x, (specs, _) = data(layer, layout, rng, dtype), specs_of(layer, layout)
    f = call(mode, layer, mesh, layout, activation=activation)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(transform, f))(place(mesh, x, specs))
    judge(f"{layer} {layout} {mode}", got, *expected(layer, transform, x, activation=activation), dtype)


def integers(rng, shape, dtype):
    return rng.integers(-2, 3, shape).astype(dtype)


def without(f, missing):
    """Wraps f so that it receives None for the operands with these indices."""
    return lambda *operands, **options: f(*(None if i in missing else x for i, x in enumerate(operands)), **options)


@pytest.mark.parametrize(
    ("layer", "missing"),
    [*(("mlp", biases) for biases in ((2, 4), (4,), (2,))), *(("gated_mlp", x) for x in ((4, 5, 6), (5,), (4, 6)))],
)
def test_any_bias_may_be_missing(layer, missing, rng):
    mesh, x = MESH.jax_mesh(), data(layer, "sequence parallel", rng, "float32", integers)
    specs, _ = specs_of(layer, "sequence parallel")

    def of(f, **options):
        return functools.partial(first_order, functools.partial(without(f, missing), activation="relu", **options))

    with jax.set_mesh(mesh):
        got = jax.jit(of(getattr(jaxmp, layer), out_sharding=specs["ct"]))(place(mesh, x, specs))
    jax.tree.map(np.testing.assert_array_equal, got, of(getattr(reference, layer))(x))


# Layouts with a hidden_sharding: x, the first weights, the last weights, the hidden layer, y. In the first three the
# products cannot share an x.
HIDDEN = {
    "contraction": (P(None, "model"), P("model", None), P(None, None), P(None, None), P(None, None)),
    "grid": (P("data", "model"), P("data", "model"), P("model", None), P("data", "model"), P("data", None)),
    "gathered": (P("model", None), P(None, None), P(None, None), P(None, None), P(None, None)),
    "FSDP": (P(ALL, None), P("model", None), P("model", None), P(ALL, None), P(ALL, None)),
}


@pytest.mark.parametrize("layout", HIDDEN)
def test_hidden_sharding(layout, rng, monkeypatch):
    rows, columns, down, hidden, out = HIDDEN[layout]
    monkeypatch.setitem(LAYOUTS, "hidden", (rows, columns, P(hidden[-1]), down, P(None), out))
    mesh = MESH.jax_mesh()
    for layer in ("mlp", "gated_mlp") if layout == "contraction" else ("gated_mlp",):
        x, (specs, _) = data(layer, "hidden", rng, "float32", integers), specs_of(layer, "hidden")
        options = {"hidden_sharding": hidden, "out_sharding": out, "activation": "relu"}
        with jax.set_mesh(mesh):
            placed = place(mesh, x, specs)
            got = jax.jit(functools.partial(first_order, functools.partial(getattr(jaxmp, layer), **options)))(placed)
            if layer == "mlp":
                with pytest.raises(ValueError, match=r"contraction of x @ w_in is sharded over .*pass hidden_sharding"):
                    jaxmp.mlp(*operands_of(placed), activation="gelu")
        want = first_order(functools.partial(getattr(reference, layer), activation="relu"), x)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_types_without_a_mesh(dtype, implementation, rng):
    x = data("mlp", "tensor parallel", rng, dtype)
    with jax.enable_x64(dtype == "float64"):
        f = functools.partial(jaxmp.mlp, activation="gelu", implementation=implementation)
        got = jax.jit(functools.partial(first_order, f))({name: jnp.asarray(v) for name, v in x.items()})
    judge(f"{dtype} {implementation}", got, *expected("mlp", first_order, x, activation="gelu"), dtype)


def test_gated_layers_without_a_mesh(rng, standard_promotion):
    x, *rest = operands_of(data("gated_mlp", "tensor parallel", rng, "float32", integers))
    for rows in (x, x.astype(jnp.bfloat16), x[:0]):
        got = jaxmp.gated_mlp(rows, *rest, activation=None)
        np.testing.assert_array_equal(got, reference.gated_mlp(rows.astype(jnp.float32), *rest, activation=None))
        assert got.dtype == jnp.float32
    narrow = [y.astype(jnp.bfloat16) for y in (x, *rest[:3])]
    assert jaxmp.gated_mlp(*narrow, b_up=rest[4]).dtype == jnp.float32  # a bias widens the hidden layer
    for activation in ("relu", None):  # for a vector
        got = jaxmp.gated_mlp(x[0], *rest, activation=activation)
        np.testing.assert_array_equal(got, reference.gated_mlp(x, *rest, activation=activation)[0])
    narrow = [y.astype(jnp.int8) for y in rest[:3]]
    for rows, weights in ((x, narrow), (x[0], narrow), (x.astype(jnp.int8), rest[:3])):
        got = jaxmp.gated_mlp(rows, *weights, *rest[3:], activation="relu")
        np.testing.assert_array_equal(got, reference.gated_mlp(rows.astype(jnp.float32), *rest, activation="relu"))
    leaky = lambda slope: lambda z: jnp.where(z > 0, z, slope * z)  # noqa: E731
    gradients = [
        jax.grad(lambda slope, f=f: f(x, *rest, activation=leaky(slope)).sum())(2.0)
        for f in (jaxmp.gated_mlp, reference.gated_mlp)
    ]
    np.testing.assert_array_equal(*gradients)


def test_layers_of_a_vector(rng):
    mesh, x = MESH.jax_mesh(), data("mlp", "sequence parallel", rng, "float32", integers)
    rows, w_in, b_in, w_out, b_out = operands_of(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(w_in, P(None, "model")), b_in, jax.device_put(w_out, P("model", None)), b_out
        layer = functools.partial(jaxmp.mlp, activation="relu", out_sharding=P(None), hidden_sharding=P("model"))
        got = jax.jit(jax.value_and_grad(lambda v: layer(v, *placed).sum()))(jnp.asarray(rows[0]))
    plain = functools.partial(reference.mlp, activation="relu")
    want = jax.value_and_grad(lambda v: plain(v[None], w_in, b_in, w_out, b_out).sum())(jnp.asarray(rows[0]))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def _strong(z):
    return z * jnp.float32(2)


@pytest.mark.small("values")
@pytest.mark.parametrize("activation", [*activations.FUNCTIONS, jax.nn.gelu, jax.nn.softplus, _strong])
@pytest.mark.parametrize("has_bias", [False, True])
def test_activations_of_weak_products_are_weak_as_in_jax(activation, has_bias, standard_promotion):
    """jax.nn.gelu of a weakly typed array has a strong type."""
    x, w = jnp.full((2, 4), 2), jnp.full((4, 4), 0.5)
    bias = w[0] if has_bias else None
    f = {"gelu": jax.nn.gelu}.get(activation) or activations.FUNCTIONS.get(activation, activation)
    h = f(x @ w + bias[None] if has_bias else x @ w)
    assert jax.typeof(jaxmp.linear(x, w, bias, activation=activation)) == jax.typeof(h)
