"""The calls and collectives in the passes of layers, and what the passes keep. Without these tests, x could travel
twice, a derivative could stay unfused, a hidden layer could be kept twice, and a product could be rounded before its
activation."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers
from compiled import collectives_of
from jax.sharding import PartitionSpec as P
from layer_cases import LAYOUTS, MESH, SHAPES, data, operands_of, place, specs_of

import jaxmp
from jaxmp import Scaling


def passes(layer, layout, dtype, rng, **options):
    """Returns (explain's rows of a gradient, the collectives of its compiled program)."""
    mesh, (specs, out) = MESH.jax_mesh(), specs_of(layer, layout)
    with jax.set_mesh(mesh):
        x = operands_of(place(mesh, data(layer, layout, rng, dtype), specs))
        f = functools.partial(getattr(jaxmp, layer), out_sharding=out, **options)
        gradient = jax.grad(lambda *operands: jnp.sum(f(*operands).astype(jnp.float32) ** 2), range(len(x)))
        rows, compiled = transfers.check(gradient, *x)
        return rows, collectives_of(compiled.as_text())


# Layout: the patterns of the forward pass, the pattern of the fused derivative, and the collectives outside the calls.
OF_MLP = {
    "tensor parallel": ({"local", "all_reduce"}, "local", ["all_reduce"]),
    "sequence parallel": ({"all_gather", "reduce_scatter"}, "all_gather", ["all_gather", "all_gather", "all_reduce"]),
}


@pytest.mark.parametrize("layout", OF_MLP)
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_the_backward_pass_of_an_mlp_is_fused(activation, layout, rng):
    rows, collectives = passes("mlp", layout, "float32", rng, activation=activation)
    forward, pattern, beside = OF_MLP[layout]
    calls = [row for row in rows if row.operation.startswith("matmul")]
    fused = f"D{activation.upper()}_BGRAD"
    assert [row.pattern for row in calls if row.epilog == fused] == [pattern] * (activation != "silu")
    assert [row.epilog for row in calls].count("BGRADB") == (1 if activation != "silu" else 2)
    assert {row.pattern for row in calls[:2]} == forward
    assert len(calls) == 6
    others = sorted(row.operation for row in rows if not row.operation.startswith("matmul"))
    if activation != "silu":
        assert others == beside == [name.replace("-", "_") for name in collectives]


# Layout: the collectives outside the calls, for x, the cotangent of y for w_down, and the gradient of x.
OF_GATED = {"tensor parallel": ["all-reduce"], "sequence parallel": ["all-gather", "all-gather", "reduce-scatter"]}


@pytest.mark.parametrize("layout", OF_GATED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x_travels_once(dtype, layout, rng):
    rows, collectives = passes("gated_mlp", layout, dtype, rng)
    calls = [row for row in rows if row.operation.startswith("matmul")]
    others = sorted(row.operation.replace("_", "-") for row in rows if not row.operation.startswith("matmul"))
    assert others == collectives == OF_GATED[layout]
    assert len(calls) == 9
    assert [row.epilog for row in calls].count("BGRADB") == 3


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", SHAPES)
def test_explain_says_what_every_layer_moves(layer, layout, dtype, implementation, rng):
    options = {"activation": "gelu"} if layer == "mlp" else {}
    passes(layer, layout, dtype, rng, implementation=implementation, **options)


# The number of hidden layers that reverse mode keeps.
KEPT = {"linear": 1, "gated_mlp": 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", KEPT)
def test_reverse_mode_keeps_each_preactivation_once(layer, dtype, rng):
    operands = [jnp.asarray(v, dtype) for v in operands_of(data(layer, "tensor parallel", rng))]
    operands[0] = operands[0][:5]
    _, pull = jax.vjp(functools.partial(getattr(jaxmp, layer), activation="silu"), *operands)
    kept = [leaf.dtype for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", None) == (5, 8)]
    assert kept == [dtype] * KEPT[layer]
    if layer == "linear":
        rows = jaxmp.explain(pull)(jnp.ones((5, 8), dtype)).rows
        assert {row.dtypes for row in rows} == {f"{dtype} x {dtype} -> {dtype}"}


def test_the_forward_pass_stores_no_aux(rng):
    operands = operands_of(data("mlp", "tensor parallel", rng))
    rows = jaxmp.explain(functools.partial(jaxmp.mlp, activation="gelu"))(*operands).rows
    assert [row.epilog for row in rows] == ["GELU_BIAS", "BIAS"]


def test_a_vector_eager_calls_and_jax_functions(rng):
    x, w = (cases.normal(rng, shape, "float32") for shape in ((5,), (5, 4)))
    for name, function in (("relu", jax.nn.relu), ("gelu", jax.nn.gelu), ("silu", jax.nn.silu), ("swish", jax.nn.silu)):
        got = [jaxmp.linear(x, w, activation=activation) for activation in (name, function)]
        np.testing.assert_array_equal(*got)
        np.testing.assert_allclose(got[0], function(x @ w), rtol=1e-5, atol=1e-6)
    epilogs = [jaxmp.explain(jaxmp.linear)(x, w, activation=f).rows[0].epilog for f in (jax.nn.relu, jax.nn.gelu)]
    assert epilogs == ["RELU", "GELU"]


def test_the_product_is_rounded_once():
    """The activation sees 1 + 2^-9, the unrounded sum; bfloat16 rounds it to 1."""
    x = jnp.asarray([[1.0, 2.0**-9]], jnp.bfloat16)
    y = jaxmp.linear(x, jnp.ones((2, 1), jnp.bfloat16), activation=lambda z: (z - 1) * 512)
    assert float(y[0, 0]) == 1.0
    with_bias = jaxmp.linear(x[:, :1], jnp.ones((1, 1), jnp.bfloat16), x[0, 1:], activation=lambda z: (z - 1) * 512)
    assert float(with_bias[0, 0]) == 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_may_learn(dtype, rng):
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


def test_low_precision_operands(rng):
    a, b = (jnp.asarray(rng.integers(-2, 3, (16, 16)), jnp.float8_e4m3fn) for _ in range(2))
    z = a.astype(jnp.float32) @ b.astype(jnp.float32).T
    options = {"transpose_b": True, "preferred_element_type": jnp.bfloat16, "scaling": Scaling()}
    y = jaxmp.linear(a, b, jnp.zeros(16, jnp.bfloat16), activation=jnp.square, **options)
    np.testing.assert_array_equal(y, jnp.square(z).astype(jnp.bfloat16))


def test_weights_that_lie_apart(rng):
    mesh, (specs, _) = MESH.jax_mesh(), specs_of("gated_mlp", "tensor parallel")
    with jax.set_mesh(mesh):
        x, w_gate, w_up, w_down, *_ = operands_of(place(mesh, data("gated_mlp", "tensor parallel", rng), specs))
        w_up = jax.sharding.reshard(w_up, P(None, None))
        with pytest.raises(ValueError, match=r"w_up is sharded .*, but w_gate .*use one sharding"):
            jaxmp.gated_mlp(x, w_gate, w_up, w_down, out_sharding=P("data", None))
