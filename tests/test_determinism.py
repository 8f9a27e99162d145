"""The levels of docs/determinism.md, bit for bit.

Numbers within their bound would not show any of this: that a row has other bits in a batch of two than in a batch of
sixty-four, that a loss curve moves with the number of devices, that exp(f(x) - f(x)) is not one, or that an accumulator
became a double. Every promise here has a control, in which a path without it breaks it.

The long sweep is `make determinism`; these are the shapes that most easily go wrong.
"""

import functools
import itertools
import math
import re

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, _compat, _config, _epilog, _native, _primitive, _spec, testing

DTYPES = testing.DTYPES
LEVELS = testing.LEVELS
EXPLICIT = modes.BY_ID["explicit"]
# Both sides of one and two tiles of rows, beside every count up to 70.
SOME_LAYOUTS = ("all-gather", "reduce-scatter of columns", "all-reduce", "grid")
ROWS = (*range(1, 71), 95, 96, 97, 127, 128, 129, 191, 192, 193, 256)


@pytest.fixture(autouse=True)
def every_width():
    with jax.enable_x64(True):
        yield


# "batch" ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_its_batch(dtype):
    """Every row count up to 70 and around the tiles' edges, at the front and at random places."""
    cases.require("host")
    assert testing.check_rows("batch", "host", dtype, 65, 33, Epilog.NONE, ROWS) > len(ROWS)


@pytest.mark.parametrize(
    ("dtype", "epilog"),
    [
        *(("float32", epilog) for epilog in testing.EPILOGS[1:] + testing.DERIVATIVES),
        *(("bfloat16", epilog) for epilog in (Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS, Epilog.DGELU_BGRAD)),
    ],
)
def test_a_row_does_not_know_its_batch_under_any_epilog(dtype, epilog):
    cases.require("host")
    testing.check_rows("batch", "host", dtype, 33, 17, epilog, testing.SOME_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (2, 40), (31, 8), (1025, 3), (4097, 16), (11008, 1)])
def test_a_row_does_not_know_its_batch_for_any_k(dtype, k, n):
    cases.require("host")
    testing.check_rows("batch", "host", dtype, k, n, Epilog.NONE, (1, 2, 5, 16, 17, 47, 64, 65, 96))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_xla_gives_the_bits_of_host(dtype, level):
    cases.require("host")
    testing.check_rows(level, "xla", dtype, 65, 33, Epilog.BIAS, testing.SOME_ROWS)
    a, b = testing.draw(0, (40, 301), dtype), testing.draw(1, (301, 24), dtype)
    host, xla = (jaxmp.matmul(a, b, determinism=level, implementation=name) for name in testing.IMPLEMENTATIONS)
    testing.assert_bitwise_equal(xla, host)


def test_columns_depend_on_their_column_of_b_alone():
    cases.require("host")
    testing.check_columns("batch", "host", "float32", 300, 9, (*range(1, 34), 63, 64, 65, 128, 199, 200))


def test_a_mapped_batch_has_the_bits_of_its_members():
    """vmap folds a batch into rows or columns, or calls once for each member."""
    cases.require("host")
    a, b = testing.draw(0, (5, 7, 65), "float32"), testing.draw(1, (5, 65, 9), "float32")
    product = functools.partial(jaxmp.matmul, determinism="batch")
    for axes in ((0, None), (None, 0), (0, 0)):
        members = [
            product(*(x[i] if axis == 0 else x[0] for x, axis in zip((a, b), axes, strict=True))) for i in range(5)
        ]
        mapped = jax.jit(jax.vmap(product, axes))(
            *(x if axis == 0 else x[0] for x, axis in zip((a, b), axes, strict=True))
        )
        testing.assert_bitwise_equal(mapped, np.stack(members), str(axes))


def test_the_gradient_in_the_rows_keeps_the_level():
    cases.require("host")
    a, b, t = (testing.draw(i, s, "float32") for i, s in enumerate(((70, 33), (33, 65), (70, 65))))

    def gradient(a, t):
        return jax.vjp(lambda a: jaxmp.linear(a, b, activation="gelu", determinism="batch"), a)[1](t)[0]

    whole = np.asarray(jax.jit(gradient)(a, t))
    for m in (1, 2, 3, 7, 16, 33, 64, 69):
        testing.assert_bitwise_equal(jax.jit(gradient)(a[:m], t[:m]), whole[:m], f"m={m}")


# "topology" ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "count"), [*(("float32", count) for count in (1, 2, 4)), *((dtype, 8) for dtype in DTYPES)]
)
def test_bits_do_not_know_the_mesh(dtype, count):
    """Forward and gradients of every pattern; k is cut inside the blocks that a bf16 kernel sums at once."""
    cases.require("host")
    only = () if dtype in ("float32", "bfloat16", "complex64") else SOME_LAYOUTS
    assert testing.check_meshes("topology", "host", dtype, (24, 40, 200), Epilog.NONE, [count], only=only) >= 4


@pytest.mark.parametrize(("count", "held"), [(2, 100), (4, 250), (8, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_inside_of_panels_do_not_matter(dtype, count, held):
    """Each rank holds `held` of k, and for the gradient in b 150 rows, which panels of 256 and 1024 do not end with."""
    cases.require("host")
    testing.check_meshes(
        "topology", "host", dtype, (150 * count, 16, held * count), Epilog.NONE, [count], only=SOME_LAYOUTS
    )


@pytest.mark.parametrize("transpose", ["TN", "NT", "TT"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_bits_of_transposed_operands_do_not_know_the_mesh(dtype, transpose):
    cases.require("host")
    testing.check_meshes("topology", "host", dtype, (24, 40, 40), Epilog.NONE, [4], transpose, SOME_LAYOUTS)


@pytest.mark.parametrize(
    ("dtype", "epilog"),
    [
        *(("float32", epilog) for epilog in testing.EPILOGS[1:]),
        ("bfloat16", Epilog.RELU_BIAS),
        ("bfloat16", Epilog.GELU_AUX_BIAS),
    ],
)
def test_bits_of_every_epilog_do_not_know_the_mesh(dtype, epilog):
    cases.require("host")
    testing.check_meshes("topology", "host", dtype, (24, 40, 40), epilog, [4], only=SOME_LAYOUTS)


def test_bits_of_xla_do_not_know_the_mesh():
    cases.require("host")
    testing.check_meshes("topology", "xla", "bfloat16", (24, 40, 200), Epilog.GELU_AUX_BIAS, [4], only=SOME_LAYOUTS)


PANEL = 256
NOT_BFLOAT16 = [dtype for dtype in DTYPES if dtype != "bfloat16"]


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", NOT_BFLOAT16)
def test_sums_are_made_in_the_written_order(dtype, rows):
    """Against numpy: products with 1 are exact, so each step is one addition. A sum for every 256 k, then their sum."""
    cases.require("host")
    accumulator = ACCUMULATORS[dtype]
    a = testing.draw(0, (rows, 2400), dtype)
    panels = [a[:, at : at + PANEL].astype(accumulator) for at in range(0, a.shape[1], PANEL)]
    sums = [np.add.accumulate(panel, axis=1)[:, -1] for panel in panels]
    want = np.repeat(np.add.accumulate(sums)[-1][:, None], 24, axis=1)
    ones = np.ones((a.shape[1], 24), jnp.dtype(dtype))
    product = functools.partial(jaxmp.matmul, determinism="topology", preferred_element_type=accumulator)
    testing.assert_bitwise_equal(product(a, ones), want)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    shardings = {"in_shardings": (P(None, "x"), P("x", None)), "out_sharding": P(None, "x"), "mesh": mesh}
    testing.assert_bitwise_equal(product(a, ones, **shardings), want, "over 8 ranks")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_errors_are_those_of_panels(dtype, rows, level):
    """Within 256 + k / 256 roundings of numbers of one sign; one accumulator is off by 2,000 to 14,000, mostly."""
    cases.require("host")
    k, accumulator = 65536, ACCUMULATORS[dtype]
    a, b = (np.full(shape, x).astype(jnp.dtype(dtype)) for shape, x in (((rows, k), 1.9), ((k, 20), 0.7)))
    got = jaxmp.matmul(a, b, determinism=level, preferred_element_type=accumulator)
    product = a[0, 0].astype(np.clongdouble) * b[0, 0].astype(np.clongdouble)
    want = np.full(got.shape, k * product)
    allowed = (PANEL + k / PANEL) * bounds.unit_roundoff(accumulator) * np.abs(want)
    bounds.judge(f"{dtype} {level}", got, want, allowed)


LEADING = {
    # Shardings of a (batch, sequence, k), b and d, on a mesh of x and y.
    "sequence": (P(None, "x", None), P(None, None), P(None, "x", None)),
    "sequence over two axes": (P(None, ("y", "x"), None), P(None, None), P(None, ("y", "x"), None)),
    "batch": (P("x", None, None), P(None, None), P("x", None, None)),
    "batch and sequence": (P("y", "x", None), P(None, None), P("y", "x", None)),
    "gathered sequence": (P(None, "x", None), P(None, "x"), P(None, None, "x")),
    "gathered sequence of a batch": (P("y", "x", None), P(None, "x"), P("y", None, "x")),
    "scattered sequence": (P(None, None, "x"), P("x", None), P(None, "x", None)),
    "scattered sequence of a batch": (P("y", None, "x"), P("x", None), P("y", "x", None)),
    "scattered sequence, columns shared": (P(None, None, "x"), P("x", "y"), P(None, "x", "y")),
    "scattered batch": (P(None, "y", "x"), P("x", None), P("x", "y", None)),
    "gathered batch": (P("x", "y", None), P(None, "x"), P(None, "y", "x")),
    "gathered columns": (P(None, "x", None), P(None, "x"), P(None, "x", None)),
    "scattered columns": (P("y", None, "x"), P("x", None), P("y", None, "x")),
    "columns over two axes": (P("x", None, None), P(None, ("x", "y")), P(None, None, ("x", "y"))),
    "columns over two axes, reversed": (P("x", None, None), P(None, ("y", "x")), P(None, None, ("y", "x"))),
    "columns of whole rows": (P(None, None, None), P(None, ("y", "x")), P(None, None, ("y", "x"))),
}


@pytest.mark.parametrize("name", LEADING)
def test_gradients_of_leading_dimensions_do_not_know_the_mesh(name):
    """Rows fold out of several dimensions: ranks hold them interleaved, and yet they are summed in the global order."""
    cases.require("host")
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    specs = (*LEADING[name], P(LEADING[name][2][-1]))
    shapes = (4, 8, 40), (40, 24), (4, 8, 24), (24,)
    a, b, t, bias = (testing.draw(i, s, "float32") for i, s in enumerate(shapes))

    def program(shardings, a, b, t, bias):
        def layer(a, b, bias):
            return jaxmp.linear(a, b, bias, activation="gelu", determinism="topology", **shardings)

        d, pullback = jax.vjp(layer, a, b, bias)
        return dict(zip(("a", "b", "bias"), pullback(t), strict=True), d=d)

    want = jax.jit(functools.partial(program, {}))(a, b, t, bias)
    shardings = {"in_shardings": specs[:2], "out_sharding": specs[2], "mesh": mesh}
    placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, t, bias), specs, strict=True)]
    got = jax.jit(functools.partial(program, shardings))(*placed)
    for key in want:
        testing.assert_bitwise_equal(got[key], want[key], f"{name}: {key}")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_mlp_has_the_bits_of_one_device(activation):
    cases.require("host")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    shapes = (16, 24), (24, 40), (40,), (40, 24), (24,)
    operands = [testing.draw(i, shape, "float32") for i, shape in enumerate(shapes)]
    rows = P(("data", "model"), None)
    specs = rows, P(None, "model"), P("model"), P("model", None), P(None)

    def gradients(out, *operands):
        y, pullback = jax.vjp(
            lambda *args: jaxmp.mlp(*args, activation=activation, determinism="topology", out_sharding=out), *operands
        )
        return y, pullback(y)

    want = jax.jit(functools.partial(gradients, None))(*operands)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(gradients, rows))(
            *(cases.put(x, mesh, spec) for x, spec in zip(operands, specs, strict=True))
        )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        testing.assert_bitwise_equal(x, y)


def test_the_slope_of_a_gelu_is_the_librarys():
    """Alone, fused with its neighbours, and for every row count: XLA may contract its own, and not this one."""
    cases.require("host")
    aux, t = testing.draw(0, (70, 33), "float32"), testing.draw(1, (70, 33), "float32")
    t[0, :3] = 0.0, -0.0, np.inf
    spec = _spec.MatmulSpec(np.dtype("float32"), determinism="batch")
    slope = functools.partial(_primitive.activation_grad, "gelu", spec=spec)
    want = np.asarray(jax.jit(slope)(aux, t))
    for m in (1, 2, 3, 17, 64):
        testing.assert_bitwise_equal(jax.jit(slope)(aux[:m], t[:m]), want[:m], f"m={m}")
    fused = jax.jit(lambda aux, t: slope(aux, (t * 3 + aux) - (t * 3 + aux) + t) * 1.0)(aux, t)
    assert np.isnan(fused[0, 2])
    testing.assert_bitwise_equal(np.asarray(fused)[1:], want[1:])
    calls = re.findall(r"custom_call @jaxmp_matmul\(.*?epilog = (\d+)", jax.jit(slope).lower(aux, t).as_text())
    assert calls == [str(int(Epilog.DGELU))]


OF_ACTIVATIONS = [epilog for epilog in testing.DERIVATIVES if _epilog.rule(epilog).derivative]
# Of a (m, 1), b (1, n) and d over a mesh of x and y; over an axis of one device every pattern has k = 1.
OVER_ONE_PRODUCT = {
    "local": ((2, 2), P(None, None), P(None, ("x", "y")), P(None, ("x", "y"))),
    "all-gather": ((1, 4), P("y", None), P(None, "y"), P(None, "y")),
    "reduce-scatter": ((1, 1), P(None, "y"), P("y", None), P("y", None)),
    "all-reduce": ((4, 1), P(None, "y"), P("y", "x"), P(None, "x")),
    "grid": ((1, 1), P("x", "y"), P("x", "y"), P("x", "y")),
}


@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
@pytest.mark.parametrize("epilog", OF_ACTIVATIONS, ids=lambda epilog: epilog.name)
def test_a_derivative_of_one_product_does_not_know_the_mesh(epilog, level):
    """cuBLASMp takes none over k = 1, so k is padded: on every rank of every pattern alike, signs of zeros with it."""
    cases.require("host")
    m, n = 8, 512
    a, b, z = (testing.draw(i, shape, "float32") for i, shape in enumerate(((m, 1), (1, n), (m, n))))
    a[:2], b[0, :4] = [[0.0], [-0.0]], [0.0, -0.0, 1.0, -1.0]
    inputs = jax.tree.map(np.asarray, testing._aux_inputs(epilog, z))

    def product(a, b, inputs, **where):
        out = jaxmp.matmul(a, b, epilog=epilog, epilog_inputs=inputs, determinism=level, **where)
        return {"d": out[0], **out[1]} if isinstance(out, tuple) else {"d": out}

    want = jax.jit(product)(a, b, inputs)
    (text,) = re.findall(r"custom_call @jaxmp_matmul.*", jax.jit(product).lower(a, b, inputs).as_text())
    assert set(re.findall(r"\b(epilog|k) = (\d+)", text)) == {("epilog", str(int(epilog))), ("k", "2")}
    for name, (sizes, *specs) in OVER_ONE_PRODUCT.items():
        axes, devices = (AxisType.Explicit,) * 2, jax.devices()[: math.prod(sizes)]
        mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=axes, devices=devices)
        with jax.set_mesh(mesh):
            left, right = (cases.put(x, mesh, spec) for x, spec in zip((a, b), specs, strict=False))
            given = {key: cases.put(x, mesh, specs[2]) for key, x in inputs.items()}
            got = jax.jit(functools.partial(product, out_sharding=specs[2]))(left, right, given)
        for key in want:
            testing.assert_bitwise_equal(got[key], want[key], f"{name}: {key}")


@pytest.mark.parametrize("implementation", testing.IMPLEMENTATIONS)
@pytest.mark.parametrize("epilog", OF_ACTIVATIONS, ids=lambda epilog: epilog.name)
def test_a_row_of_a_derivative_of_one_product_does_not_know_its_batch(epilog, implementation):
    cases.require("host")
    for level in LEVELS:
        testing.check_rows(level, implementation, "float32", 1, 17, epilog, testing.SOME_ROWS)


@pytest.mark.parametrize("mode", ["explicit", "partitioner", "shard_map"])
@pytest.mark.parametrize("case", cases.by_id([cases.BY_NAME[name] for name in ("local", "ag", "rs", "ar", "rs-data")]))
def test_every_way_to_call_gives_the_bits_of_one_device(case, mode):
    cases.require("host")
    case, mode = case.replace(per_shard=(5, 3, 11)), modes.BY_ID[mode]
    a, b = case.values(np.random.default_rng(0))
    with mode.scope(case):
        placed = [mode.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)]
        d = mode.run(mode.product(case, determinism="topology"), *placed)
    testing.assert_bitwise_equal(d, jaxmp.matmul(a, b, determinism="topology"))


def test_gradients_under_the_partitioner_do_not_know_the_mesh():
    """XLA chooses the patterns; every sum it leaves to a call, and the slope of gelu with it."""
    cases.require("host")
    case = cases.BY_NAME["ar-data"].replace(per_shard=(5, 6, 12))
    mode = modes.BY_ID["partitioner"]
    m, n, _ = case.extents
    operands = (
        *case.values(np.random.default_rng(0)),
        testing.draw(0, (m, n), "float32"),
        testing.draw(1, (n,), "float32"),
    )

    def program(f, a, b, w, bias):
        d, pullback = jax.vjp(lambda a, b, bias: f(a, b, None, bias), a, b, bias)
        return d, pullback(w)

    options = {"determinism": "topology", "epilog": Epilog.GELU_BIAS}
    want = jax.jit(functools.partial(program, modes.without_mesh(case, **options)))(*operands)
    specs = (*case.stored, case.out, P(case.out[1]))
    placed = [mode.put(case, x, spec) for x, spec in zip(operands, specs, strict=True)]
    got = jax.jit(functools.partial(program, mode.product(case, **options)))(*placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        testing.assert_bitwise_equal(x, y)


def test_xla_serves_gradients_with_a_bias():
    """Sums over ranks that no call may complete there come as sums of their own; in integers they are exact."""
    cases.require("host")
    case = cases.BY_NAME["ag-data"]
    rng = np.random.default_rng(0)
    shapes = {"x": (8, 6), "w_in": (6, 4), "b_in": (4,), "w_out": (4, 6), "b_out": (6,)}
    specs = {"x": P(("x", "y"), None), "w_in": P(None, "y"), "b_in": P("y"), "w_out": P("y", None), "b_out": P()}
    operands = {name: rng.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}

    def of_mlp(operands, **options):
        out = {"hidden_sharding": P("x", "y"), "out_sharding": P(("x", "y"), None)}
        ins = (operands[name] for name in shapes)
        return jnp.sum(jaxmp.mlp(*ins, activation="relu", **out, **options) ** 2)

    def of_linear(operands, **options):
        x, w, bias = (operands[name] for name in ("x", "w_in", "b_in"))
        return jnp.sum(jaxmp.linear(x, w, bias, activation="relu", out_sharding=P("x", "y"), **options) ** 2)

    mesh = case.jax_mesh()
    with jax.set_mesh(mesh):
        placed = {name: cases.put(x, mesh, specs[name]) for name, x in operands.items()}
        for loss in (of_mlp, of_linear):
            options = {"determinism": "batch", "implementation": "xla"}
            got = jax.jit(jax.grad(functools.partial(loss, **options)))(placed)
            want = jax.jit(jax.grad(loss))(placed)
            for name in shapes:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{loss.__name__} {name}")


def test_the_order_of_devices_does_not_matter():
    cases.require("host")
    a, b = testing.draw(0, (8, 40), "float32"), testing.draw(1, (40, 8), "float32")
    want = jaxmp.matmul(a, b, determinism="topology")
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        mesh = jax.sharding.Mesh(np.asarray(jax.devices())[order], ("x",), axis_types=(AxisType.Auto,))
        shardings = {"in_shardings": (P(None, "x"), P("x", None)), "out_sharding": P("x", None), "mesh": mesh}
        testing.assert_bitwise_equal(jaxmp.matmul(a, b, determinism="topology", **shardings), want)


def test_what_cannot_keep_the_level_is_refused_by_name():
    cases.require("host")
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    level = {"determinism": "topology"}

    def gradient(call, specs, out, check_vma=True):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
        return jax.grad(lambda a, b: jnp.sum(mapped(a, b)), (0, 1))(
            jnp.ones((8, 8), "float32"), jnp.ones((8, 8), "float32")
        )

    with pytest.raises(NotImplementedError, match='"topology" has no gradients under shard_map with check_vma=False'):
        gradient(functools.partial(jaxmp.matmul, **level), (P("x"), P()), P("x"), check_vma=False)
    grid = functools.partial(jaxmp.block_matmul, axis_names=("x", "y"), **level)
    with pytest.raises(NotImplementedError, match="gradient of an operand of a 2-D grid that is the same along 'z'"):
        gradient(grid, (P(("z", "x"), "y"), P("x", "y")), P(("z", "x"), "y"))
    with pytest.raises(NotImplementedError, match='dot_general: determinism="topology" is not available'):
        jaxmp.einsum("ij,jk->ik", jnp.ones((2, 3), "float32"), jnp.ones((3, 2), "float32"), **level)
    plane = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    cyclic = jaxmp.to_block_cyclic(jnp.ones((8, 8), "float32"), jaxmp.BlockCyclic((2, 2), (3, 3)), mesh=plane)
    with pytest.raises(NotImplementedError, match="determinism is not available for block-cyclic operands"):
        jaxmp.matmul(cyclic, cyclic, **level)
    a, b = (cases.put(np.ones((8, 8), np.float32), plane, P("y", None)) for _ in range(2))
    mask = jnp.zeros((8, 16), jnp.uint8)
    sums = {"epilog": Epilog.DRELU_BGRAD, "epilog_inputs": {"relu_aux": mask}, "mesh": plane, **level}
    rows = {"in_shardings": (P("y", None), P()), "out_sharding": P("y", None)}
    with pytest.raises(NotImplementedError, match="has no epilog DRELU_BGRAD on rows that are sharded over 'y' beside"):
        jaxmp.matmul(a, b, **rows, **sums)
    columns = {"in_shardings": (P("y", None), P(None, "y")), "out_sharding": P("y", None)}
    with pytest.raises(NotImplementedError, match="no epilog DRELU_BGRAD where columns of the result are gathered"):
        jaxmp.matmul(a, b, **columns, **sums)
    gathered = {"in_shardings": (P(None, "y"), P("y", None)), "out_sharding": P("y", None), "implementation": "xla"}
    with pytest.raises(NotImplementedError, match="no epilog DRELU_BGRAD where operands are gathered and the rows of"):
        jaxmp.matmul(a, b, **gathered, **sums)
    turned = cases.BY_NAME["grid"].replace(dtype="complex64", transposition="TN", per_shard=(2, 2, 2))
    with EXPLICIT.scope(turned):
        a, b = (
            EXPLICIT.put(turned, x, s)
            for x, s in zip(turned.values(np.random.default_rng(0)), turned.stored, strict=True)
        )
        f = EXPLICIT.product(turned, **level)
        with pytest.raises(
            NotImplementedError, match="gradient of a complex a that is stored transposed on a 2-D grid"
        ):
            jax.grad(lambda a: jnp.real(jnp.sum(f(a, b))))(a)


# Controls --------------------------------------------------------------------------------------------------------


def test_the_checks_fail_where_nothing_is_promised():
    """The BLAS takes other kernels for few rows, and sums k in another order for another mesh."""
    cases.require("host")

    def check():
        for k, n in ((301, 301), (65, 33), (33, 1000), (1000, 5)):
            testing.check_rows("run_to_run", "host", "float32", k, n, Epilog.NONE, (1, 2, 3, 7, 70))

    with pytest.raises(
        AssertionError, match=r"d of m=\d+ k=\d+ n=\d+ NONE, beside the same rows among 70: \d+ of \d+ ele"
    ):
        check()
    with pytest.raises(AssertionError, match="elements differ"):
        testing.check_meshes("run_to_run", "host", "float32", (24, 40, 200), Epilog.NONE, [8])


def test_a_plain_product_knows_its_batch():
    """The question behind all this: `(inputs @ model)[0]` is not `inputs[0] @ model`."""
    found = {
        (k, n): testing.varying_row_counts("float32", k, n) for k, n in ((301, 301), (64, 64), (1000, 33), (33, 1000))
    }
    print(found)
    if not any(found.values()):
        pytest.skip(f"jnp.matmul is row-invariant here for every (k, n) of {list(found)}: this control shows nothing")


# jit = eager = recomputed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
@pytest.mark.parametrize(
    "case", cases.by_id([cases.BY_NAME[name] for name in ("local", "ag", "rs", "grid", "rs-swapped")])
)
def test_every_way_to_run_gives_the_same_bits(case, level):
    """Eager, jit, remat, scan; from a cold cache and a warm one."""
    cases.require("host")
    case = case.replace(per_shard=(7, 5, 33))
    with EXPLICIT.scope(case):
        a, b = (
            EXPLICIT.put(case, x, s) for x, s in zip(case.values(np.random.default_rng(0)), case.stored, strict=True)
        )
        f = EXPLICIT.product(case, determinism=level, epilog=Epilog.GELU)
        want = np.asarray(jax.jit(f)(a, b))
        ways = {
            "eager": f(a, b),
            "remat": jax.jit(jax.checkpoint(f))(a, b),
            "scan": np.asarray(
                jax.jit(lambda a, b: jax.lax.scan(lambda x, _: (x, f(a, b)), 0, None, length=2)[1])(a, b)
            )[1],
        }
        jaxmp.plan_cache_clear()
        jax.clear_caches()
        ways["cold"] = jax.jit(f)(a, b)
        for way, got in ways.items():
            testing.assert_bitwise_equal(got, want, way)


@pytest.mark.parametrize("recomputed", [False, True], ids=["jit", "remat"])
@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
def test_a_softmax_ends_in_exactly_one(level, recomputed):
    """exp(f(x) - f(x)) is 1: both sides are the same bits, for no compiler contracts or recomputes our arithmetic."""
    cases.require("host")
    case = cases.BY_NAME["rs"].replace(per_shard=(7, 5, 33))

    with EXPLICIT.scope(case):
        a, b = (
            EXPLICIT.put(case, x, s) for x, s in zip(case.values(np.random.default_rng(0)), case.stored, strict=True)
        )
        product = EXPLICIT.product(case, determinism=level, alpha=0.3)
        f = jax.checkpoint(product) if recomputed else product

        def program(a, b):
            z = f(a, b)
            return jnp.exp(jnp.max(z, axis=-1) - jnp.max(product(a, b), axis=-1)), f(a, b) - product(a, b)

        ones, zeros = jax.jit(program)(a, b)
    testing.assert_bitwise_equal(ones, np.ones(ones.shape, ones.dtype))
    testing.assert_bitwise_equal(zeros, np.zeros(zeros.shape, zeros.dtype))


# The key, explain, the accumulator ---------------------------------------------------------------------------------


def test_the_level_is_part_of_the_key():
    cases.require("host")
    a, b = jnp.ones((3, 5), "float32"), jnp.ones((5, 2), "float32")
    jaxmp.plan_cache_clear()
    jax.clear_caches()
    for misses, level in enumerate(("run_to_run", *LEVELS, "batch"), 1):
        jaxmp.matmul(a, b, determinism=level)
        assert jaxmp.plan_cache_info()["misses"] == min(misses, 3)


def test_an_unknown_level_is_refused():
    for call in (jaxmp.matmul, jaxmp.linear):
        with pytest.raises(
            ValueError, match=re.escape("determinism must be one of ('run_to_run', 'batch', 'topology'), got 'bits'")
        ):
            call(jnp.ones((3, 5), "float32"), jnp.ones((5, 2), "float32"), determinism="bits")


@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
def test_explain_names_the_level_and_what_keeps_it(level):
    cases.require("host")
    a, b = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    for implementation in testing.IMPLEMENTATIONS:
        explained = jaxmp.explain(functools.partial(jaxmp.matmul, determinism=level, implementation=implementation))(
            a, b
        )
        (row,) = explained.rows
        assert row.determinism == level
        assert ("sum over k in ascending order" in row.algorithm) == (level != "run_to_run")
        assert f" {level} " in str(explained)


def test_explain_counts_what_xla_gathers_for_the_level():
    cases.require("host")
    mesh = cases.BY_NAME["rs"].jax_mesh(AxisType.Auto)
    a, b = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    for out, moved in ((P("y", None), 3 * (64 * 8 // 4 + 8 * 16) * 4), (P(None, None), 3 * (64 * 8 + 8 * 16) * 4)):
        options = {"determinism": "batch", "implementation": "xla", "mesh": mesh, "out_sharding": out}
        call = functools.partial(jaxmp.matmul, in_shardings=(P(None, "y"), P("y", None)), **options)
        (row,) = jaxmp.explain(call)(a, b).rows
        assert row.bytes_moved == moved
        assert row.algorithm.startswith("each rank gathers what its part of d needs; ")


def test_explain_names_what_the_bits_cost_beside_the_calls():
    cases.require("host")
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    level = {"determinism": "topology", "mesh": mesh}
    a, b = jax.ShapeDtypeStruct((4, 8, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    columns = {"in_shardings": (P(None, None, "y"), P("y", None)), "out_sharding": P(None, None, "y")}
    *moved, row = jaxmp.explain(functools.partial(jaxmp.matmul, **columns, **level))(a, b).rows
    assert [(each.operation, each.bytes_moved) for each in moved] == [
        ("all_gather", 4 * 8 * 16 * 4),
        ("all_to_all", 16 * 16 * 4 // 2),
    ]
    assert all("lets the call apply its own epilog" in each.why for each in moved)
    assert (row.operation, row.pattern) == ("matmul", "local")

    sequence = functools.partial(
        jaxmp.matmul, in_shardings=(P(None, "x", None), P()), out_sharding=P(None, "x", None), **level
    )
    gradient = jax.grad(lambda b, a: jnp.sum(sequence(a, b)))
    *moved, row = jaxmp.explain(gradient)(b, a).rows
    assert [each.operation for each in moved] == ["all_gather"] * 2
    assert all("in the order of the global array" in each.why for each in moved)
    assert row.pattern == "all_reduce"


def test_another_platform_is_refused_by_name():
    cases.require("host")
    a, b = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((4, 4), "float32")
    f = jax.jit(functools.partial(jaxmp.matmul, determinism="batch"))
    with pytest.raises(
        NotImplementedError,
        match=r"determinism='batch' is not available on platform 'cuda' with implementation='xla' \(",
    ):
        f.trace(a, b).lower(lowering_platforms=("cuda",))


ACCUMULATORS = {name: "float32" if name in ("bfloat16", "float16") else name for name in DTYPES}
IN_STABLEHLO = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}
COMPUTE = {"float32": "32F", "float64": "64F", "complex64": "32F", "complex128": "64F"}
WIDTHS = [(dtype, is_wide) for dtype in DTYPES for is_wide in (False, True) if is_wide or dtype not in cases.NEEDS_X64]
CALLS = [
    *modes.pairs([modes.BY_ID["explicit"]], [cases.BY_NAME[name] for name in ("ar-data", "rs-swapped")]),
    *modes.pairs([modes.BY_ID[name] for name in ("shard_map", "partitioner")], [cases.BY_NAME["ar-data"]]),
    *modes.pairs([modes.BY_ID["no-mesh"]], [cases.BY_NAME["local"]]),
]


def inexact_types(jaxpr) -> set[str]:
    """Names of every floating type in a jaxpr and all it contains."""
    found = {v.aval.dtype for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")}
    found = {dtype.name for dtype in found if jnp.issubdtype(dtype, jnp.inexact)}
    return found.union(*(inexact_types(sub) for eqn in jaxpr.eqns for sub in _compat.subjaxprs(eqn.params)))


def tensor_types(text: str) -> set[str]:
    """Floating element types of the values of a StableHLO module; attributes of our calls are 64-bit numbers."""
    values = re.sub(r"backend_config = \{[^{}]*\}", "", text)
    return set(re.findall(r"tensor<(?:\d+x)*(b?f\d+|complex<f\d+>)>", values))


@pytest.mark.parametrize(("dtype", "is_wide"), WIDTHS, ids=lambda value: {False: "x32", True: "x64"}.get(value, value))
@pytest.mark.parametrize(("mode", "case"), CALLS)
def test_no_type_appears_but_the_operands_and_the_accumulators(mode, case, dtype, is_wide):
    """Python scalars under x64 are the classic way for a double to slip in; forward and gradients, at every level."""
    cases.require("host")
    case = case.replace(per_shard=(4, 4, 4), dtype=dtype)
    allowed = {dtype, ACCUMULATORS[dtype]}
    rng = np.random.default_rng(0)
    m, n, _ = case.extents
    arrays = (*case.values(rng), cases.normal(rng, (m, n), dtype), cases.normal(rng, (n,), dtype))
    with jax.enable_x64(is_wide), mode.scope(case):
        operands = [mode.put(case, x, s) for x, s in zip(arrays, (*case.stored, case.out, P(case.out[1])), strict=True)]
        for level in ("run_to_run", "topology"):
            epilog = Epilog.BIAS if dtype.startswith("complex") else Epilog.GELU_BIAS
            f = mode.product(case, alpha=0.3, beta=2, epilog=epilog, determinism=level)

            def gradients(*operands, f=f):
                d, pullback = jax.vjp(f, *operands)
                return pullback(d)

            for program in (f, gradients, jax.checkpoint(f)):
                traced = jax.jit(program).trace(*operands)
                text = traced.lower().as_text()
                assert inexact_types(traced.jaxpr.jaxpr) <= allowed
                assert tensor_types(text) <= {IN_STABLEHLO[name] for name in allowed}
                assert set(re.findall(r'compute = "(\w+)"', text)) <= {COMPUTE[ACCUMULATORS[dtype]]}


def test_a_double_that_slips_in_is_found():
    x = jnp.ones(3, "float32")
    traced = jax.jit(jax.checkpoint(lambda x: (x.astype("float64") * 2).astype("float32"))).trace(x)
    assert inexact_types(traced.jaxpr.jaxpr) == {"float32", "float64"}
    assert tensor_types(traced.lower().as_text()) == {"f32", "f64"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_explain_and_the_log_name_the_accumulator(dtype, capfd):
    cases.require("host")
    a, b = jax.ShapeDtypeStruct((4, 6), dtype), jax.ShapeDtypeStruct((6, 5), dtype)
    (row,) = jaxmp.explain(jaxmp.matmul)(a, b).rows
    assert row.accumulator == ACCUMULATORS[dtype]
    assert f" {ACCUMULATORS[dtype]} " in capfd.readouterr().out
    _native.extension().set_plan_log(True)
    try:
        jaxmp.plan_cache_clear()
        jax.jit(jaxmp.matmul).lower(a, b).compile()
    finally:
        _native.extension().set_plan_log("plan" in _config.config().log)
    assert f"compute={COMPUTE[ACCUMULATORS[dtype]]} " in capfd.readouterr().err


# The tools -------------------------------------------------------------------------------------------------------

NAN, OTHER_NAN = np.uint32([0x7FC00000, 0x7FC00001]).view(np.float32)
ULP = 2.000000238418579  # the next float32 above 2
WRONG = {
    "value": (
        np.float32([1, 2, 3]),
        np.float32([1, ULP, 3]),
        "x: 1 of 3 elements differ; the first at (1,): 2.0 (0x40000000) instead of 2.000000238418579 (0x40000001), "
        "1 ulp apart",
    ),
    "sign of zero": (
        np.float32([0.0]),
        np.float32([-0.0]),
        "the first at (0,): 0.0 (0x00000000) instead of -0.0 (0x80000000), 1 ulp apart",
    ),
    "payload": (np.float32([NAN]), np.float32([OTHER_NAN]), "nan (0x7fc00000) instead of nan (0x7fc00001)"),
    "across zero": (np.float32([1e-45]), np.float32([-1e-45]), "3 ulps apart"),
    "worst": (
        np.float64([1, 1]),
        np.float64([1 + 2**-52, 2]),
        "2 of 2 elements differ; the first at (0,): 1.0 (0x3ff0000000000000) instead of 1.0000000000000002 "
        "(0x3ff0000000000001), 1 ulp apart; the farthest apart at (1,): 1.0 (0x3ff0000000000000) instead of 2.0 "
        "(0x4000000000000000), 4503599627370496 ulps apart",
    ),
    "complex": (
        np.complex64([1 + 1j]),
        np.complex64([1 - 1j]),
        "(1+1j) (0x3f800000 0x3f800000) instead of (1-1j) (0x3f800000 0xbf800000)",
    ),
    "bfloat16": (
        np.ones(1, jnp.bfloat16),
        np.full(1, 1.0078125, jnp.bfloat16),
        "1.0 (0x3f80) instead of 1.0078125 (0x3f81), 1 ulp apart",
    ),
    "integers": (np.uint8([3]), np.uint8([5]), "3 (0x03) instead of 5 (0x05), 2 ulps apart"),
    "dtype": (np.float32([1]), np.float64([1]), "x: float32[1] instead of float64[1]"),
    "shape": (np.ones((2, 1)), np.ones(2), "x: float64[2, 1] instead of float64[2]"),
    "scalar": (np.float32(1), np.float32(2), "1 of 1 elements differ; the first at (): 1.0"),
}


@pytest.mark.parametrize(("actual", "expected", "message"), WRONG.values(), ids=WRONG.keys())
def test_unequal_bits_are_named(actual, expected, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        testing.assert_bitwise_equal(actual, expected, "x")


@pytest.mark.parametrize("dtype", [*DTYPES, "int32", "bool"])
def test_equal_bits_pass(dtype):
    x = np.asarray([0.0, -0.0, 1.5, 0.0, 0.0, 1.0]).astype(jnp.dtype(dtype))
    x[3:5] = (np.nan, np.inf) if jnp.issubdtype(dtype, jnp.inexact) else 0
    testing.assert_bitwise_equal(x, jnp.asarray(x))
    testing.assert_bitwise_equal(x[:0], x[:0])


def test_the_checker_ends_at_the_first_broken_promise(monkeypatch, capsys):
    cases.require("host")

    def broken(*_):
        testing.assert_bitwise_equal(np.float32(1), np.float32(2), "d of m=3")

    good = testing.Check("batch", "host float32 k=1", lambda: 7)
    monkeypatch.setattr(
        testing, "checks", lambda *_: [good, testing.Check("topology", "host float32 k=2", broken), good]
    )
    assert testing.run(is_quick=True) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith('BROKEN  "topology"  host float32 k=2: d of m=3: 1 of 1 elements differ')
    assert sum("products equal" in line for line in out) == 1
    monkeypatch.setattr(testing, "checks", lambda *_: [good])
    assert testing.run(is_quick=True) == 0
    assert "Every promise holds" in capsys.readouterr().out


def test_the_checker_takes_gpus_only_where_there_are_some(capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has GPUs: make test-gpu runs the checker on them")
    with pytest.raises(SystemExit):
        testing.main(["determinism", "--implementation", "cublasmp"])
    assert "cublasmp needs a CUDA device, but JAX's backend is cpu" in capsys.readouterr().err


def test_the_checker_checks_every_promise():
    found = list(testing.checks(is_quick=False))
    assert len(found) > len(list(testing.checks(is_quick=True))) > 40
    subjects = {(check.promise, *check.subject.split()[:2]) for check in found}
    assert subjects == set(itertools.product(LEVELS, testing.IMPLEMENTATIONS, DTYPES))
    on_gpus = list(testing.checks(is_quick=False, implementations=("cublasmp",)))
    assert {check.subject.split()[0] for check in on_gpus} == {"cublasmp"}
    assert {check.subject.split()[1] for check in on_gpus} == set(DTYPES)
    assert all(f" {epilog.name}" in " ".join(check.subject for check in on_gpus) for epilog in testing.EPILOGS)
    names = " ".join(check.subject for check in found)
    assert all(f" {epilog.name}" in names for epilog in testing.EPILOGS + testing.DERIVATIVES)
    assert " k=1 " in names
    assert " k=11008 " in names
