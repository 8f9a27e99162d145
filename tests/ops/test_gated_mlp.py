"""Gated layers: their values and derivatives on every kind of mesh, and that x travels once for both products.

What would be silently wrong without it: the gate's cotangent in the place of the other's, a hidden layer that is
rounded ahead of its activation, a gradient of x that misses one product or is gathered and summed twice.
"""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from compiled import collectives_of, compiled_text
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

MESH = (("data", 2), ("model", 2))
ALL = ("data", "model")
NAMES = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
# Layout: the operands, y.
WEIGHTS = (P(None, "model"), P(None, "model"), P("model", None), P("model"), P("model"), P(None))
WHOLE = (P(None, None), P(None, None), P(None, None), P(None), P(None), P(None))
LAYOUTS = {
    "tensor parallel": (P("data", None), *WEIGHTS, P("data", None)),
    "sequence parallel": (P(ALL, None), *WEIGHTS, P(ALL, None)),
    "replicated weights": (P("data", None), *WHOLE, P("data", None)),
    "batch of sequences": (P("data", "model", None), *WEIGHTS, P("data", "model", None)),
    "FSDP over one axis": (
        *(P(ALL, None), P("model", None), P("model", None), P("model", None)),
        *(P(None), P(None), P(None), P(ALL, None)),
    ),
    "FSDP and tensor parallel": (
        *(P("data", None), P("data", "model"), P("data", "model"), P("model", "data")),
        *(P("model"), P("model"), P("data"), P("data", None)),
    ),
}


def data(rng, lead, dtype="float32", draw=cases.normal):
    shapes = {"x": (*lead, 6), "w_gate": (6, 8), "w_up": (6, 8), "w_down": (8, 4)}
    shapes |= {"b_gate": (8,), "b_up": (8,), "b_down": (4,)}
    values = {name: draw(rng, shape, dtype) for name, shape in shapes.items()}
    values |= {f"t_{name}": draw(rng, shape, dtype) for name, shape in shapes.items()}
    return values | {"w": draw(rng, (*lead, 4), dtype)}


def small_integers(rng, shape, dtype):
    return rng.integers(-2, 3, shape).astype(dtype)


def operands_of(x):
    return tuple(x[name] for name in NAMES)


def program(f, x):
    """The value, the tangent, and every gradient."""
    operands = operands_of(x)
    y, t = jax.jvp(f, operands, tuple(x[f"t_{name}"] for name in NAMES))
    return y, t, jax.grad(lambda *operands: jnp.sum(x["w"] * f(*operands)), range(7))(*operands)


def further(f, x):
    """Rematerialized gradients of a batch, and second derivatives, forward over reverse."""
    first, *weights = operands_of(x)
    f = jax.checkpoint(f)
    gradient = jax.grad(lambda b, x: jnp.sum(f(x, *weights[:3], b, *weights[4:]) ** 2))
    tangents = tuple(x[f"t_{name}"] for name in NAMES)
    second = jax.grad(lambda *operands: jnp.sum(x["w"] * f(*operands)), range(7))
    return jax.vmap(gradient, (None, 0))(weights[3], jnp.stack([first, 2 * first])), jax.jvp(
        second, operands_of(x), tangents
    )


def judge(name, got, x, dtype="float32", activation="silu", program=program):
    wide = {key: cases.wide(value) for key, value in x.items()}
    with jax.enable_x64(True):
        want = jax.jit(functools.partial(program, functools.partial(reference.gated_mlp, activation=activation)))(wide)
        f = functools.partial(reference.gated_mlp, activation=activation, is_majorant=True)
        major = jax.jit(functools.partial(program, f))({key: np.abs(value) for key, value in wide.items()})
    u = bounds.unit_roundoff(dtype)
    for i, (g, w, m) in enumerate(zip(*map(jax.tree.leaves, (got, want, major)), strict=True)):
        assert g.dtype == dtype
        bounds.judge(f"{name}[{i}]", g, np.asarray(w), bounds.PROGRAM * u * np.asarray(m))


def mesh_of(kind):
    cases.require(None)
    return cases.BY_NAME["ag-data"].replace(mesh=MESH).jax_mesh(kind)


def place(mesh, x, layout):
    *ins, out = layout
    specs = dict(zip(NAMES, ins, strict=True)) | {"w": out}
    return {name: cases.put(value, mesh, specs[name.removeprefix("t_")]) for name, value in x.items()}


def lead_of(layout):
    return (8,) if len(layout[0]) == 2 else (4, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_integers_on_explicit_axes(layout, dtype, rng):
    """With a relu, bit for bit as jnp computes it in float32, on any mesh; what exceeds 8 bits is rounded once."""
    mesh, specs = mesh_of(AxisType.Explicit), LAYOUTS[layout]
    x = data(rng, lead_of(specs), "float32", small_integers)
    f = functools.partial(jaxmp.gated_mlp, activation="relu", out_sharding=specs[-1])
    given = {name: jnp.asarray(value, dtype) for name, value in x.items()}
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(program, f))(place(mesh, given, specs))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, specs[-1]), got[0].ndim)
    if dtype == "bfloat16":
        judge(layout, got, given, dtype, "relu")
        return
    want = program(functools.partial(reference.gated_mlp, activation="relu"), x)
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["tensor parallel", "sequence parallel"])
@pytest.mark.parametrize("transform", [program, further], ids=lambda transform: transform.__name__)
def test_derivatives_on_explicit_axes(transform, layout, dtype, rng):
    mesh, specs = mesh_of(AxisType.Explicit), LAYOUTS[layout]
    x = data(rng, lead_of(specs), dtype)
    f = functools.partial(jaxmp.gated_mlp, out_sharding=specs[-1])
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(transform, f))(place(mesh, x, specs))
    judge(layout, got, x, dtype, program=transform)


def in_shardings(mesh, specs):
    return functools.partial(
        jaxmp.gated_mlp, in_shardings=(specs[0], specs[1], specs[3]), out_sharding=specs[-1], mesh=mesh
    )


def partitioner(mesh, specs):
    return functools.partial(jaxmp.gated_mlp, out_sharding=NamedSharding(mesh, specs[-1]))


def on_shards(mesh, specs, check_vma=True):
    body = functools.partial(jaxmp.gated_mlp, axis_name="model")
    return jax.shard_map(body, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1], check_vma=check_vma)


MODES = {
    "in_shardings": in_shardings,
    "partitioner": partitioner,
    "shard_map": on_shards,
    "shard_map-unchecked": functools.partial(on_shards, check_vma=False),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("mode", "layout"),
    [*((mode, "sequence parallel") for mode in MODES), ("in_shardings", "FSDP and tensor parallel")],
)
def test_other_modes(mode, layout, dtype, rng):
    mesh, specs = mesh_of(AxisType.Auto), LAYOUTS[layout]
    x = data(rng, lead_of(specs), dtype)
    got = jax.jit(functools.partial(program, MODES[mode](mesh, specs)))(place(mesh, x, specs))
    judge(mode, got, x, dtype)


@pytest.mark.parametrize("present", [(False, False, False), (True, False, True), (False, True, False)])
def test_any_bias_may_be_missing(present, rng):
    mesh, specs = mesh_of(AxisType.Explicit), LAYOUTS["sequence parallel"]
    x = data(rng, lead_of(specs), "float32", small_integers)

    def without(f):
        def layer(*operands):
            biases = (b if has else None for b, has in zip(operands[4:], present, strict=True))
            return f(*operands[:4], *biases, activation="relu")

        return layer

    with jax.set_mesh(mesh):
        f = without(functools.partial(jaxmp.gated_mlp, out_sharding=specs[-1]))
        got = jax.jit(functools.partial(program, f))(place(mesh, x, specs))
    for g, w in zip(*map(jax.tree.leaves, (got, program(without(reference.gated_mlp), x))), strict=True):
        np.testing.assert_array_equal(g, w)


# With a hidden_sharding: x, both weights and w_down, the hidden layer, y. The products of the first three cannot share
# an x.
HIDDEN = {
    "contraction": ((P(None, "model"), P("model", None), P(None, None)), P(None, None), P(None, None)),
    "grid": ((P("data", "model"), P("data", "model"), P("model", None)), P("data", "model"), P("data", None)),
    "gathered": ((P("model", None), P(None, None), P(None, None)), P(None, None), P(None, None)),
    "FSDP": ((P(ALL, None), P("model", None), P("model", None)), P(ALL, None), P(ALL, None)),
}


@pytest.mark.parametrize("layout", HIDDEN)
def test_hidden_sharding(layout, rng):
    mesh, ((rows, columns, down), hidden, out) = mesh_of(AxisType.Explicit), HIDDEN[layout]
    bias = P(hidden[-1])
    specs = (rows, columns, columns, down, bias, bias, P(None), out)
    x = data(rng, (8,), "float32", small_integers)
    f = functools.partial(jaxmp.gated_mlp, activation="relu", hidden_sharding=hidden, out_sharding=out)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(program, f))(place(mesh, x, specs))
    want = program(functools.partial(reference.gated_mlp, activation="relu"), x)
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(g, w)


def test_without_a_mesh(rng, standard_promotion):
    """Eager; operands of two types as jnp promotes them; an empty batch; no activation, and one that learns."""
    cases.require(None)
    x, *rest = operands_of(data(rng, (5,), "float32", small_integers))
    for rows in (x, x.astype(jnp.bfloat16), x[:0]):
        got = jaxmp.gated_mlp(rows, *rest, activation=None)
        np.testing.assert_array_equal(got, reference.gated_mlp(rows.astype(jnp.float32), *rest, activation=None))
        assert got.dtype == jnp.float32
    leaky = lambda slope: lambda z: jnp.where(z > 0, z, slope * z)  # noqa: E731
    gradients = [
        jax.grad(lambda slope, f=f: f(x, *rest, activation=leaky(slope)).sum())(2.0)
        for f in (jaxmp.gated_mlp, reference.gated_mlp)
    ]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x_travels_once(dtype, rng):
    """Of a gradient: every collective beside the calls, in the trace and in the compiled program."""
    mesh = mesh_of(AxisType.Explicit)
    beside = {
        # The gradient of x.
        "tensor parallel": ({"all_reduce": 1}, {"all-reduce": 1}),
        # x, and the cotangent of y for w_down; the gradient of x.
        "sequence parallel": ({"all_gather": 2, "reduce_scatter": 1}, {"all-gather": 2, "reduce-scatter": 1}),
    }
    for layout, (want, compiled) in beside.items():
        specs = LAYOUTS[layout]
        with jax.set_mesh(mesh):
            x = place(mesh, data(rng, lead_of(specs), dtype), specs)
            f = functools.partial(jaxmp.gated_mlp, out_sharding=specs[-1])
            gradient = jax.grad(lambda *operands, f=f: jnp.sum(f(*operands).astype(jnp.float32) ** 2), range(7))
            rows = jaxmp.explain(gradient)(*operands_of(x)).rows
            text = compiled_text(gradient, *operands_of(x))
        others = [row.operation for row in rows if not row.operation.startswith("matmul")]
        assert {name: others.count(name) for name in others} == want
        found = collectives_of(text)
        assert {name: found.count(name) for name in found} == compiled
        assert sum(row.operation.startswith("matmul") for row in rows) == 9
        assert [row.epilog for row in rows].count("BGRADB") == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reverse_mode_keeps_three_hidden_layers(dtype, rng):
    """Both products, and the hidden layer, of which the gradient of w_down is made."""
    cases.require(None)
    operands = [jnp.asarray(value, dtype) for value in operands_of(data(rng, (5,)))]
    _, pull = jax.vjp(jaxmp.gated_mlp, *operands)
    kept = [leaf.dtype for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", None) == (5, 8)]
    assert kept == [dtype] * 3


ERRORS = {
    "activation": ({"activation": "elu"}, ValueError, "gated_mlp: activation must be one of relu, gelu, silu"),
    "axis outside": ({"axis_name": "model"}, ValueError, "gated_mlp: works on the shards inside shard_map"),
    "level": ({"determinism": "batch"}, NotImplementedError, 'gated_mlp: determinism must be "run_to_run"'),
    "pair of shardings": ({"in_shardings": (P(), P())}, ValueError, "gated_mlp: in_shardings must be a triple"),
    "gate": ({"w_gate": (5, 8)}, ValueError, "gated_mlp (x @ w_gate): w_gate has k=5 but x has k=6"),
    "up": ({"w_up": (5, 8)}, ValueError, "gated_mlp (x @ w_up): w_up has k=5 but x has k=6"),
    "widths": ({"w_up": (6, 9)}, ValueError, "gated_mlp: w_up must have w_gate's shape (6, 8), got (6, 9)"),
    "down": ({"w_down": (7, 4)}, ValueError, "gated_mlp (hidden @ w_down): w_down has k=7 but hidden has k=8"),
    "vector": ({"x": (6,)}, ValueError, "gated_mlp: x must have at least 2 dimensions, got 1"),
}


@pytest.mark.parametrize(("change", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_input(change, error, message):
    cases.require(None)
    shapes = {"x": (5, 6), "w_gate": (6, 8), "w_up": (6, 8), "w_down": (8, 4)}
    options = {name: value for name, value in change.items() if name not in shapes}
    with pytest.raises(error) as caught:
        jaxmp.gated_mlp(*(jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()), **options)
    assert message in str(caught.value)


def test_weights_that_lie_apart(rng):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w_gate, w_up, w_down, *_ = operands_of(place(mesh, data(rng, (8,)), LAYOUTS["tensor parallel"]))
        w_up = jax.sharding.reshard(w_up, P(None, None))
        with pytest.raises(ValueError, match=r"w_up is sharded .*, but w_gate .*shard them alike"):
            jaxmp.gated_mlp(x, w_gate, w_up, w_down, out_sharding=P("data", None))
