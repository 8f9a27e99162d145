"""Two layers as one function: its value, its derivatives, and what its backward pass is made of.

What would be silently wrong without it: a cotangent multiplied by the derivative of the wrong element (rows are
gathered in another order than they are scattered), a hidden bias whose gradient misses the rows of other ranks, a
second derivative that forgets that the first depends on z.
"""

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

import jaxmp

MESH = (("data", 2), ("model", 2))
NAMES = ("x", "w_in", "b_in", "w_out", "b_out")
# Layout: (x, w_in, b_in, w_out, b_out), y.
WEIGHTS = (P(None, "model"), P("model"), P("model", None), P(None))
LAYOUTS = {
    "tensor parallel": (P("data", None), *WEIGHTS, P("data", None)),
    "sequence parallel": (P(("data", "model"), None), *WEIGHTS, P(("data", "model"), None)),
    "fully sharded weights": (
        P("data", None),
        P("data", None),
        P(None),
        P("data", None),
        P(None),
        P("data", None),
    ),
    "FSDP and tensor parallel": (
        P("data", None),
        P("data", "model"),
        P("model"),
        P("model", "data"),
        P(None),
        P("data", None),
    ),
    "replicated weights": (P("data", None), P(None, None), P(None), P(None, None), P(None), P("data", None)),
    "batch of sequences": (P("data", "model", None), *WEIGHTS, P("data", "model", None)),
}


def data(rng, lead, dtype="float32"):
    shapes = {"x": (*lead, 6), "w_in": (6, 8), "b_in": (8,), "w_out": (8, 4), "b_out": (4,)}
    values = {name: cases.normal(rng, shape, dtype) for name, shape in shapes.items()}
    tangents = {f"t_{name}": cases.normal(rng, shape, dtype) for name, shape in shapes.items()}
    return values | tangents | {"w": cases.normal(rng, (*lead, 4), dtype)}


def operands_of(x):
    return tuple(x[name] for name in NAMES)


def loss_of(f, x):
    return lambda *operands: jnp.sum(x["w"] * f(*operands) ** 2)


def forward(f, x):
    return f(*operands_of(x))


def grad(f, x):
    return jax.grad(loss_of(f, x), range(5))(*operands_of(x))


def jvp(f, x):
    return jax.jvp(f, operands_of(x), tuple(x[f"t_{name}"] for name in NAMES))


def forward_over_reverse(f, x):
    tangents = tuple(x[f"t_{name}"] for name in NAMES)
    return jax.jvp(jax.grad(loss_of(f, x), range(5)), operands_of(x), tangents)


def hessian(f, x):
    first, w_in, b_in, *rest = operands_of(x)
    return jax.hessian(lambda b: loss_of(f, x)(first, w_in, b, *rest))(b_in)


def remat(f, x):
    return jax.grad(loss_of(jax.checkpoint(f), x), range(5))(*operands_of(x))


def vmap(f, x):
    """Per-example gradients of the hidden bias: one per batch element, though rows fold."""
    first, w_in, b_in, *rest = operands_of(x)
    gradient = jax.grad(lambda b, x: jnp.sum(f(x, w_in, b, *rest) ** 2))
    return jax.vmap(gradient, (None, 0))(b_in, jnp.stack([first, 2 * first]))


def scan(f, x):
    def loss(*operands):
        first, *weights = operands
        total, _ = jax.lax.scan(lambda y, x: (y + f(x, *weights), None), x["w"], jnp.stack([first, first]))
        return jnp.sum(total**2)

    return jax.grad(loss, range(5))(*operands_of(x))


TRANSFORMS = (forward, grad, jvp, forward_over_reverse, hessian, remat, vmap, scan)


def expected(transform, activation, x):
    """What the transform gives in float64, and its majorant."""
    wide = {name: cases.wide(v) for name, v in x.items()}
    absolute = {name: np.abs(v) for name, v in wide.items()}
    results = []
    with jax.enable_x64(True):
        for f, values in ((reference.mlp, wide), (functools.partial(reference.mlp, is_majorant=True), absolute)):
            program = functools.partial(transform, functools.partial(f, activation=activation))
            results.append([np.asarray(v) for v in jax.tree.leaves(jax.jit(program)(values))])
    return results


def judge_all(name, got, want, major, dtype="float32"):
    u = bounds.unit_roundoff(dtype)
    for i, (g, w, m) in enumerate(zip(jax.tree.leaves(got), want, major, strict=True)):
        assert g.dtype == dtype
        bounds.judge(f"{name}[{i}]", g, w, bounds.PROGRAM * u * m)


def mesh_of(kind):
    cases.require(None)
    return cases.BY_NAME["ag-data"].replace(mesh=MESH).jax_mesh(kind)


def place(mesh, x, layout):
    *ins, out = layout
    specs = dict(zip(NAMES, ins, strict=True)) | {"w": out}
    return {name: cases.put(v, mesh, specs[name.removeprefix("t_")]) for name, v in x.items()}


def lead_of(layout):
    if len(layout[0]) == 3:
        return (4, 8)
    return (64,) if "data" in layout[1] else (8,)  # sharded weights are gathered where there are more rows


@pytest.mark.small("pairs")
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("layout", ["tensor parallel", "sequence parallel"])
def test_transforms_on_explicit_axes(layout, transform, activation, rng):
    mesh, specs = mesh_of(AxisType.Explicit), LAYOUTS[layout]
    x = data(rng, lead_of(specs))
    f = functools.partial(jaxmp.mlp, activation=activation, out_sharding=specs[-1])
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(transform, f))(place(mesh, x, specs))
    judge_all(f"{layout} {activation} {transform.__name__}", got, *expected(transform, activation, x))


@pytest.mark.parametrize("transform", [grad, jvp], ids=lambda transform: transform.__name__)
@pytest.mark.parametrize(
    "layout", ["replicated weights", "batch of sequences", "fully sharded weights", "FSDP and tensor parallel"]
)
def test_further_layouts(layout, transform, rng):
    mesh, specs = mesh_of(AxisType.Explicit), LAYOUTS[layout]
    x = data(rng, lead_of(specs))
    f = functools.partial(jaxmp.mlp, activation="gelu", out_sharding=specs[-1])
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(transform, f))(place(mesh, x, specs))
    judge_all(f"{layout} {transform.__name__}", got, *expected(transform, "gelu", x))


def in_shardings(mesh, specs, activation):
    return functools.partial(
        jaxmp.mlp, activation=activation, in_shardings=(specs[0], specs[1], specs[3]), out_sharding=specs[-1], mesh=mesh
    )


def partitioner(mesh, specs, activation):
    return functools.partial(jaxmp.mlp, activation=activation, out_sharding=NamedSharding(mesh, specs[-1]))


def on_shards(mesh, specs, activation, check_vma=True):
    def body(*operands):
        return jaxmp.mlp(*operands, activation=activation, axis_name="model")

    return jax.shard_map(body, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1], check_vma=check_vma)


MODES = {
    "in_shardings": in_shardings,
    "partitioner": partitioner,
    "shard_map": on_shards,
    "shard_map-unchecked": functools.partial(on_shards, check_vma=False),
}


@pytest.mark.parametrize("transform", [grad, jvp], ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_other_modes(mode, transform, rng):
    mesh, specs = mesh_of(AxisType.Auto), LAYOUTS["sequence parallel"]
    x = data(rng, lead_of(specs))
    got = jax.jit(functools.partial(transform, MODES[mode](mesh, specs, "gelu")))(place(mesh, x, specs))
    judge_all(f"{mode} {transform.__name__}", got, *expected(transform, "gelu", x))


@pytest.mark.parametrize("layout", ["tensor parallel", "sequence parallel"])
def test_an_activation_of_xla(layout, rng):
    """The same patterns with an activation that no epilog has, and a bias gradient out of a product still."""
    mesh, specs = mesh_of(AxisType.Explicit), LAYOUTS[layout]
    x = data(rng, lead_of(specs))
    f = functools.partial(jaxmp.mlp, activation="silu", out_sharding=specs[-1])
    with jax.set_mesh(mesh):
        placed = place(mesh, x, specs)
        for transform in (grad, jvp):
            got = jax.jit(functools.partial(transform, f))(placed)
            judge_all(f"{layout} {transform.__name__}", got, *expected(transform, "silu", x))
        rows = rows_of(functools.partial(grad, f), placed)
    assert [row.epilog for row in rows].count("BGRADB") == 2
    assert sum(row.operation.startswith("matmul") for row in rows) == 6


@pytest.mark.parametrize("mode", MODES)
def test_an_activation_of_xla_in_other_modes(mode, rng):
    mesh, specs = mesh_of(AxisType.Auto), LAYOUTS["sequence parallel"]
    x = data(rng, lead_of(specs))
    got = jax.jit(functools.partial(grad, MODES[mode](mesh, specs, "silu")))(place(mesh, x, specs))
    judge_all(mode, got, *expected(grad, "silu", x))


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_types_without_a_mesh(dtype, implementation, rng):
    cases.require(implementation)
    x = data(rng, (5,), dtype)
    with jax.enable_x64(dtype == "float64"):
        f = functools.partial(jaxmp.mlp, activation="gelu", implementation=implementation)
        got = jax.jit(functools.partial(grad, f))({name: jnp.asarray(v) for name, v in x.items()})
    judge_all(f"{dtype} {implementation}", got, *expected(grad, "gelu", x), dtype=dtype)


@pytest.mark.parametrize("present", [(False, False), (True, False), (False, True)])
def test_either_bias_may_be_missing(present, rng):
    cases.require(None)
    x = {name: jnp.asarray(v) for name, v in data(rng, (5,)).items()}

    def without(f):
        def program(first, w_in, b_in, w_out, b_out):
            return f(first, w_in, b_in if present[0] else None, w_out, b_out if present[1] else None)

        return program

    got = jax.grad(loss_of(without(functools.partial(jaxmp.mlp, activation="gelu")), x), range(5))(*operands_of(x))
    with jax.enable_x64(True):
        wide = {name: cases.wide(v) for name, v in x.items()}
        want = grad(without(functools.partial(reference.mlp, activation="gelu")), wide)
        major = grad(
            without(functools.partial(reference.mlp, activation="gelu", is_majorant=True)),
            {k: np.abs(v) for k, v in wide.items()},
        )
    judge_all("missing bias", got, [np.asarray(v) for v in want], [np.asarray(v) for v in major])


def rows_of(program, *args):
    return jaxmp.explain(program)(*args).rows


@pytest.mark.parametrize(("activation", "epilog"), [("gelu", "DGELU_BGRAD"), ("relu", "DRELU_BGRAD")])
def test_the_backward_pass_is_fused(activation, epilog, rng):
    """Per layout: the calls of a gradient, and every collective beside them."""
    mesh = mesh_of(AxisType.Explicit)
    forms = {
        "tensor parallel": ({"local", "all_reduce"}, "local", {"all_reduce": 1}),
        "sequence parallel": ({"all_gather", "reduce_scatter"}, "all_gather", {"all_reduce": 1, "all_gather": 2}),
    }
    for layout, (forward_patterns, pattern, beside) in forms.items():
        specs = LAYOUTS[layout]
        with jax.set_mesh(mesh):
            x = place(mesh, data(rng, lead_of(specs)), specs)
            f = functools.partial(jaxmp.mlp, activation=activation, out_sharding=specs[-1])
            rows = rows_of(functools.partial(grad, f), x)
        calls = [row for row in rows if row.operation.startswith("matmul")]
        assert [row.pattern for row in calls if row.epilog == epilog] == [pattern]
        assert [row.epilog for row in calls].count("BGRADB") == 1
        assert {row.pattern for row in calls[:2]} == forward_patterns
        assert len(calls) == 6
        others = [row.operation for row in rows if not row.operation.startswith("matmul")]
        assert {name: others.count(name) for name in others} == beside


def test_the_forward_pass_stores_no_aux(rng):
    cases.require(None)
    x = {name: jnp.asarray(v) for name, v in data(rng, (5,)).items()}
    rows = rows_of(functools.partial(jaxmp.mlp, activation="gelu"), *operands_of(x))
    assert [row.epilog for row in rows] == ["GELU_BIAS", "BIAS"]


ERRORS = {
    "activation": ({"activation": "elu"}, ValueError, "mlp: activation must be one of relu, gelu, silu"),
    "no activation": ({"activation": None}, ValueError, "mlp: activation must be a name or a function, got None"),
    "determinism": ({"activation": "silu", "determinism": "batch"}, NotImplementedError, "mlp (x @ w_in): with determ"),
    "axis outside": ({"axis_name": "model"}, ValueError, "mlp: works on the shards inside shard_map"),
    "unknown option": ({"alpha": 2.0}, TypeError, "mlp() got an unexpected keyword argument 'alpha'"),
    "pair of shardings": ({"in_shardings": (P(), P())}, ValueError, "mlp: in_shardings must be a triple"),
    "first product": ({"w_in": (5, 8)}, ValueError, "mlp (x @ w_in): w_in has k=5 but x has k=6"),
    "transposed": ({"w_in": (8, 6)}, ValueError, "pass w_in.T if it is stored (n, k)"),
    "second product": ({"w_out": (7, 4)}, ValueError, "mlp (hidden @ w_out): w_out has k=7 but hidden has k=8"),
    "hidden bias": ({"b_in": (4,)}, ValueError, "mlp (x @ w_in): b_in must have shape (8,)"),
    "vector": ({"x": (6,)}, ValueError, "mlp: x must have at least 2 dimensions, got 1"),
}


@pytest.mark.parametrize(("change", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_input(change, error, message, rng):
    cases.require(None)
    shapes = {"x": (5, 6), "w_in": (6, 8), "b_in": (8,), "w_out": (8, 4), "b_out": (4,)}
    shapes |= {name: shape for name, shape in change.items() if name in shapes}
    options = {"activation": "gelu"} | {name: value for name, value in change.items() if name not in shapes}
    with pytest.raises(error) as caught:
        jaxmp.mlp(*(jnp.zeros(shapes[name]) for name in NAMES), **options)
    assert message in str(caught.value)


def test_a_sharded_contraction_asks_for_the_hidden_sharding(rng):
    mesh = mesh_of(AxisType.Explicit)
    specs = (P(None, "model"), P("model", None), P(None), P(None, None), P(None), P(None, None))
    x = data(rng, (8,))
    with jax.set_mesh(mesh):
        placed = place(mesh, x, specs)
        with pytest.raises(ValueError, match=r"contraction of x @ w_in is sharded over .*pass hidden_sharding"):
            jaxmp.mlp(*operands_of(placed), activation="gelu")
        f = functools.partial(jaxmp.mlp, activation="gelu", hidden_sharding=P(None, None), out_sharding=specs[-1])
        got = jax.jit(functools.partial(grad, f))(placed)
    judge_all("sharded contraction", got, *expected(grad, "gelu", x))
