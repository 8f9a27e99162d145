"""Activations that XLA applies to a product: values, derivatives, and what reverse mode keeps of them.

What would be silently wrong without it: a product that is rounded ahead of its activation, a derivative of another
function, cotangents in products of a wider type, a learned parameter of an activation without a gradient.
"""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Scaling
from jaxmp._src.spec import activations

LAYOUT = (P("data", None), P(None, "model"), P("model"), P("data", "model"))  # x, w, bias, y
NAMES = ("x", "w", "bias")
ACTIVATIONS = [name for name in activations.FUNCTIONS if name not in ("relu", "swish")]


def mesh_of(kind):
    cases.require(None)
    return cases.BY_NAME["ag-data"].replace(mesh=(("data", 2), ("model", 2))).jax_mesh(kind)


def data(rng, dtype):
    shapes = {"x": (6, 10), "w": (10, 8), "bias": (8,)}
    values = {name: cases.normal(rng, shape, dtype) for name, shape in shapes.items()}
    return values | {f"t_{name}": cases.normal(rng, shapes[name], dtype) for name in NAMES}


def program(f, x):
    """The value, the tangent, and the gradients of a weighted sum of the squares."""
    operands = [x[name] for name in NAMES]
    y, t = jax.jvp(f, operands, [x[f"t_{name}"] for name in NAMES])
    return y, t, jax.grad(lambda *operands: jnp.sum(f(*operands) ** 2), range(3))(*operands)


def judge(name, activation, got, x, dtype, program=program):
    wide = {key: cases.wide(value) for key, value in x.items()}
    with jax.enable_x64(True):
        want = jax.jit(functools.partial(program, functools.partial(reference.linear, activation=activation)))(wide)
        majorant = functools.partial(reference.linear, activation=activation, is_majorant=True)
        major = jax.jit(functools.partial(program, majorant))({key: np.abs(value) for key, value in wide.items()})
    u = bounds.unit_roundoff(dtype)
    for i, (g, w, m) in enumerate(zip(*map(jax.tree.leaves, (got, want, major)), strict=True)):
        assert g.dtype == dtype
        bounds.judge(f"{name}[{i}]", g, np.asarray(w), bounds.PROGRAM * u * np.asarray(m))


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_derivatives(activation, dtype, rng):
    mesh, x = mesh_of(AxisType.Explicit), data(rng, dtype)
    f = functools.partial(jaxmp.linear, activation=activation)
    specs = dict(zip(NAMES, LAYOUT, strict=False))
    with jax.set_mesh(mesh):
        placed = {name: cases.put(value, mesh, specs[name.removeprefix("t_")]) for name, value in x.items()}
        got = jax.jit(functools.partial(program, f))(placed)
    assert jax.typeof(got[0]).sharding.spec == LAYOUT[-1]
    judge(activation, activation, got, x, dtype)


def on_shards(mesh):
    body = functools.partial(jaxmp.linear, activation="silu")
    return jax.shard_map(body, mesh=mesh, in_specs=LAYOUT[:3], out_specs=LAYOUT[3])


def in_shardings(mesh):
    return functools.partial(
        jaxmp.linear, activation="silu", in_shardings=LAYOUT[:2], out_sharding=LAYOUT[3], mesh=mesh
    )


def partitioner(mesh):
    return functools.partial(jaxmp.linear, activation="silu")


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [on_shards, in_shardings, partitioner])
def test_other_modes(mode, dtype, rng):
    mesh, x = mesh_of(AxisType.Auto), data(rng, dtype)
    specs = dict(zip(NAMES, LAYOUT, strict=False))
    placed = {name: cases.put(value, mesh, specs[name.removeprefix("t_")]) for name, value in x.items()}
    got = jax.jit(functools.partial(program, mode(mesh)))(placed)
    judge(mode.__name__, "silu", got, x, dtype)


def further(f, x):
    """Per-example gradients, rematerialized, and second derivatives, forward over reverse."""
    first, w, bias = (x[name] for name in NAMES)
    f = jax.checkpoint(f)
    each = jax.vmap(jax.grad(lambda bias, x: jnp.sum(f(x[None], w, bias) ** 2)), (None, 0))(bias, first)
    return each, jax.hessian(lambda bias: jnp.sum(f(first, w, bias) ** 2))(bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_further_transforms(dtype, rng):
    cases.require(None)
    x = data(rng, dtype)
    got = jax.jit(functools.partial(further, functools.partial(jaxmp.linear, activation="silu")))(x)
    judge("further", "silu", got, x, dtype, further)


def test_a_vector_eager_calls_and_jax_functions(rng):
    """By name, and by the function of JAX of that name; relu and gelu in either case as an epilog."""
    cases.require(None)
    x, w = (cases.normal(rng, shape, "float32") for shape in ((5,), (5, 4)))
    for name, function in (("relu", jax.nn.relu), ("gelu", jax.nn.gelu), ("silu", jax.nn.silu), ("swish", jax.nn.silu)):
        got = [jaxmp.linear(x, w, activation=activation) for activation in (name, function)]
        np.testing.assert_array_equal(*got)
        np.testing.assert_allclose(got[0], function(x @ w), rtol=1e-5, atol=1e-6)
    epilogs = [jaxmp.explain(jaxmp.linear)(x, w, activation=f).rows[0].epilog for f in (jax.nn.relu, jax.nn.gelu)]
    assert epilogs == ["RELU", "GELU"]


def test_the_product_is_rounded_once():
    """With 1 + 2^-9, which bfloat16 rounds to 1: the activation sees it as it was summed."""
    cases.require(None)
    x = jnp.asarray([[1.0, 2.0**-9]], jnp.bfloat16)
    y = jaxmp.linear(x, jnp.ones((2, 1), jnp.bfloat16), activation=lambda z: (z - 1) * 512)
    assert float(y[0, 0]) == 1.0
    with_bias = jaxmp.linear(x[:, :1], jnp.ones((1, 1), jnp.bfloat16), x[0, 1:], activation=lambda z: (z - 1) * 512)
    assert float(with_bias[0, 0]) == 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_may_learn(dtype, rng):
    """A parameter that an activation closes over has a gradient, eager and compiled, and is never remembered."""
    cases.require(None)
    x, w = (jnp.asarray(rng.integers(-3, 4, shape), dtype) for shape in ((4, 3), (3, 5)))

    def loss(layer, slope):
        leaky = lambda z: jnp.where(z > 0, z, slope * z)  # noqa: E731
        return jnp.sum(layer(x, w, leaky).astype(jnp.float32))

    def jnp_layer(x, w, activation):
        return activation((x @ w).astype(jnp.float32)).astype(dtype)

    ours = functools.partial(loss, lambda x, w, f: jaxmp.linear(x, w, activation=f))
    for slope in (jnp.float32(0.5), jnp.float32(2)):
        want = jax.value_and_grad(functools.partial(loss, jnp_layer))(slope)
        for run in (lambda f: f, jax.jit):
            np.testing.assert_array_equal(run(jax.value_and_grad(ours))(slope), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reverse_mode_keeps_one_preactivation(dtype):
    cases.require(None)
    x, w = jnp.ones((6, 10), dtype), jnp.ones((10, 8), dtype)
    _, pull = jax.vjp(functools.partial(jaxmp.linear, activation="silu"), x, w)
    kept = [leaf.dtype for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", None) == (6, 8)]
    assert kept == [dtype]
    rows = jaxmp.explain(pull)(jnp.ones((6, 8), dtype)).rows
    assert [row.dtypes for row in rows] == [f"{dtype} x {dtype} -> {dtype}"] * 2


def test_low_precision_operands(rng):
    cases.require(None)
    a, b = (jnp.asarray(rng.integers(-2, 3, (16, 16)), jnp.float8_e4m3fn) for _ in range(2))
    z = a.astype(jnp.float32) @ b.astype(jnp.float32).T
    options = {"transpose_b": True, "preferred_element_type": jnp.bfloat16, "scaling": Scaling()}
    y = jaxmp.linear(a, b, jnp.zeros(16, jnp.bfloat16), activation=jnp.square, **options)
    np.testing.assert_array_equal(y, jnp.square(z).astype(jnp.bfloat16))


ERRORS = {
    "name": ({"activation": "elu"}, ValueError, "linear: activation must be one of relu, gelu, silu, swish,"),
    "type": ({"activation": 3}, ValueError, "or a function of an array, got 3"),
    "shape": ({"activation": lambda z: z.sum(0)}, ValueError, "activation must be elementwise"),
    "level": ({"activation": "silu", "determinism": "batch"}, NotImplementedError, "with determinism='batch' activ"),
    "integers": ({"activation": "silu", "dtype": jnp.int8}, NotImplementedError, "a result of int32 activation is"),
}


@pytest.mark.parametrize(("options", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_input(options, error, message):
    cases.require(None)
    dtype = options.get("dtype", jnp.float32)
    options = {name: value for name, value in options.items() if name != "dtype"}
    if dtype == jnp.int8:
        options |= {"transpose_b": True}
    with pytest.raises(error) as caught:
        jaxmp.linear(jnp.ones((16, 16), dtype), jnp.ones((16, 16), dtype), **options)
    assert message in str(caught.value)
