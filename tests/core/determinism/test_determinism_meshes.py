"""The level "topology" of docs/determinism.md, bitwise: results and gradients do not depend on the mesh.

Without these tests, a loss curve could change with the number of devices, by no more than rounding.
"""

import functools
import math
import re

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, testing
from jaxmp._src.core.primitive import primitives
from jaxmp._src.core.spec import epilogs, matmul_spec

pytestmark = pytest.mark.usefixtures("x64")
DTYPES = testing.DTYPES
LEVELS = testing.LEVELS
EXPLICIT = modes.BY_ID["explicit"]


SOME = {"only": ("all-gather", "reduce-scatter of columns", "all-reduce", "grid")}
MESHES = [
    *(("float32", 200, count, {}) for count in (1, 2, 4)),
    *((dtype, 200, 8, {} if dtype in ("float32", "bfloat16", "complex64") else SOME) for dtype in DTYPES),
    *(("float32", 40, 4, SOME | {"epilog": epilog}) for epilog in testing.EPILOGS[1:]),
    *(("bfloat16", 40, 4, SOME | {"epilog": epilog}) for epilog in (Epilog.RELU_BIAS, Epilog.GELU_AUX_BIAS)),
    ("float32", 40, 4, SOME | {"transpose": "TN"}),
    ("bfloat16", 40, 4, SOME | {"transpose": "NT"}),
    ("complex64", 40, 4, SOME | {"transpose": "TT"}),
    ("bfloat16", 200, 4, SOME | {"epilog": Epilog.GELU_AUX_BIAS, "implementation": "xla"}),
]


@pytest.mark.parametrize(("dtype", "k", "count", "options"), MESHES)
def test_bits_do_not_know_the_mesh(dtype, k, count, options):
    """Covers results and gradients of every pattern; k is cut inside the blocks that a bf16 kernel sums at once."""
    given = {"level": "topology", "implementation": "host", "dtype": dtype, "extents": (24, 40, k), "counts": [count]}
    assert testing.check_meshes(**given | options) >= 3


@pytest.mark.small("values")
@pytest.mark.parametrize(("count", "held"), [(2, 100), (4, 250), (8, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_inside_of_k_blocks_do_not_matter(dtype, count, held):
    """Each rank holds `held` of k, and 150 rows for the gradient in b; K blocks of 256 or 1024 do not end there."""
    testing.check_meshes("topology", "host", dtype, (150 * count, 16, held * count), [count], **SOME)


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
    """Rows fold out of several dimensions: ranks hold them interleaved, but they are summed in the global order."""
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


MLP = [testing.draw(i, shape, "float32") for i, shape in enumerate(((16, 24), (24, 40), (40,), (40, 24), (24,)))]


def pulled(layer, *operands):
    y, pullback = jax.vjp(layer, *operands)
    return y, *pullback(y)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_mlp_has_the_bits_of_one_device(activation):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    rows = P(("data", "model"), None)
    specs = rows, P(None, "model"), P("model"), P("model", None), P(None)
    layer = functools.partial(jaxmp.mlp, activation=activation, determinism="topology")
    with jax.set_mesh(mesh):
        placed = [cases.put(x, mesh, spec) for x, spec in zip(MLP, specs, strict=True)]
        got = jax.jit(functools.partial(pulled, functools.partial(layer, out_sharding=rows)))(*placed)
    jax.tree.map(testing.assert_bitwise_equal, got, jax.jit(functools.partial(pulled, layer))(*MLP))


@pytest.mark.parametrize("axis", ["x", None])
def test_a_mlp_in_shard_map_has_the_bits_of_one_device(axis):
    """With two dimensions, all gradients are equal; with three (interleaved rows), y and x's gradient."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    layer = functools.partial(jaxmp.mlp, activation="gelu", determinism="topology")
    named = functools.partial(layer, **({} if axis is None else {"axis_name": axis}))
    for shape, rows, kept in (((16, 24), P("x", None), 6), ((2, 8, 24), P(None, "x", None), 2)):
        operands = MLP[0].reshape(shape), *MLP[1:]
        specs = rows, P(None, axis), P(axis), P(axis, None), P(None)
        with jax.set_mesh(mesh):
            mapped = jax.shard_map(named, in_specs=specs, out_specs=rows)
            placed = [cases.put(x, mesh, spec) for x, spec in zip(operands, specs, strict=True)]
            got = jax.jit(functools.partial(pulled, mapped))(*placed)
        want = jax.jit(functools.partial(pulled, layer))(*operands)
        jax.tree.map(testing.assert_bitwise_equal, got[:kept], want[:kept])


def test_the_slope_of_a_gelu_is_the_librarys():
    """Alone, fused with its neighbours, and for every row count: XLA may contract its own slope, but not this one."""
    aux, t = testing.draw(0, (70, 33), "float32"), testing.draw(1, (70, 33), "float32")
    t[0, :3] = 0.0, -0.0, np.inf
    aux[0, :2] = 1.0  # the slope is positive here
    spec = matmul_spec.MatmulSpec(np.dtype("float32"), determinism="batch")
    slope = functools.partial(primitives.activation_grad, "gelu", spec=spec)
    want = np.asarray(jax.jit(slope)(aux, t))
    assert np.signbit(want[0, :2]).tolist() == [False, True]
    for m in (1, 2, 3, 17, 64):
        testing.assert_bitwise_equal(jax.jit(slope)(aux[:m], t[:m]), want[:m], f"m={m}")
    fused = jax.jit(lambda aux, t: slope(aux, (t * 3 + aux) - (t * 3 + aux) + t) * 1.0)(aux, t)
    assert np.isnan(fused[0, 2])
    testing.assert_bitwise_equal(np.asarray(fused)[1:], want[1:])
    calls = re.findall(r"custom_call @jaxmp_matmul\(.*?epilog = (\d+)", jax.jit(slope).lower(aux, t).as_text())
    assert calls == [str(int(Epilog.DGELU))]


OF_ACTIVATIONS = [epilog for epilog in testing.DERIVATIVES if epilogs.RULES[epilog].derivative]
# Shardings of a (m, 1), b (1, n) and d over a mesh of x and y; over an axis of one device every pattern has k = 1.
OVER_ONE_PRODUCT = {
    "local": ((2, 2), P(None, None), P(None, ("x", "y")), P(None, ("x", "y"))),
    "all-gather": ((1, 4), P("y", None), P(None, "y"), P(None, "y")),
    "reduce-scatter": ((1, 1), P(None, "y"), P("y", None), P("y", None)),
    "all-reduce": ((4, 1), P(None, "y"), P("y", "x"), P(None, "x")),
    "grid": ((1, 1), P("x", "y"), P("x", "y"), P("x", "y")),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
@pytest.mark.parametrize("epilog", OF_ACTIVATIONS, ids=lambda epilog: epilog.name)
def test_a_derivative_of_one_product_does_not_know_the_mesh(epilog, level):
    """cuBLASMp takes none over k = 1, so every rank of every pattern pads k in the same way, with signs of zeros."""
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


@pytest.mark.parametrize("mode", ["explicit", "partitioner", "shard_map"])
@pytest.mark.parametrize("case", cases.by_id([cases.BY_NAME[name] for name in ("local", "ag", "rs", "ar", "rs-data")]))
def test_every_way_to_call_gives_the_bits_of_one_device(case, mode):
    case, mode = case.replace(per_shard=(5, 3, 11)), modes.BY_ID[mode]
    a, b = case.values(np.random.default_rng(0))
    with mode.scope(case):
        placed = [mode.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)]
        d = mode.run(mode.product(case, determinism="topology"), *placed)
    testing.assert_bitwise_equal(d, jaxmp.matmul(a, b, determinism="topology"))


def test_gradients_under_the_partitioner_do_not_know_the_mesh():
    """XLA chooses the patterns; calls do every sum that XLA leaves to them, and the slope of gelu."""
    case = cases.BY_NAME["ar-data"].replace(per_shard=(5, 6, 12))
    mode = modes.BY_ID["partitioner"]
    m, n, _ = case.extents
    more = (testing.draw(i, shape, "float32") for i, shape in enumerate(((m, n), (n,))))
    operands = (*case.values(np.random.default_rng(0)), *more)

    def program(f, a, b, w, bias):
        d, pullback = jax.vjp(lambda a, b, bias: f(a, b, None, bias), a, b, bias)
        return d, pullback(w)

    options = {"determinism": "topology", "epilog": Epilog.GELU_BIAS}
    want = jax.jit(functools.partial(program, modes.without_mesh(case, **options)))(*operands)
    specs = (*case.stored, case.out, P(case.out[1]))
    placed = [mode.put(case, x, spec) for x, spec in zip(operands, specs, strict=True)]
    got = jax.jit(functools.partial(program, mode.product(case, **options)))(*placed)
    assert all(map(np.any, jax.tree.leaves(want)))
    jax.tree.map(testing.assert_bitwise_equal, got, want)


def test_xla_serves_gradients_with_a_bias():
    """XLA computes the sums over ranks that no call may complete there; sums of integers are exact."""
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
            assert np.any(want["w_in"])
            for name in shapes:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{loss.__name__} {name}")


def test_the_order_of_devices_does_not_matter():
    a, b = testing.draw(0, (8, 40), "float32"), testing.draw(1, (40, 8), "float32")
    want = jaxmp.matmul(a, b, determinism="topology")
    np.testing.assert_allclose(want, a @ b, atol=1e-4)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        mesh = jax.sharding.Mesh(np.asarray(jax.devices())[order], ("x",), axis_types=(AxisType.Auto,))
        shardings = {"in_shardings": (P(None, "x"), P("x", None)), "out_sharding": P("x", None), "mesh": mesh}
        testing.assert_bitwise_equal(jaxmp.matmul(a, b, determinism="topology", **shardings), want)


def test_what_cannot_keep_the_level_is_refused_by_name():
    """Refusals other than the epilogs that the table of products refuses (suite.py)."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    level = {"determinism": "topology"}

    def gradient(call, specs, out, check_vma=True):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
        return jax.grad(lambda a, b: jnp.sum(mapped(a, b)), (0, 1))(*[jnp.ones((8, 8), "float32")] * 2)

    with pytest.raises(NotImplementedError, match='"topology" has no gradients under shard_map with check_vma=False'):
        gradient(functools.partial(jaxmp.matmul, **level), (P("x"), P()), P("x"), check_vma=False)
    grid = functools.partial(jaxmp.block_matmul, axis_names=("x", "y"), **level)
    with pytest.raises(NotImplementedError, match="gradient of an operand of a 2-D grid that is the same along 'z'"):
        gradient(grid, (P(("z", "x"), "y"), P("x", "y")), P(("z", "x"), "y"))
    with pytest.raises(NotImplementedError, match='einsum: determinism="topology" is not available'):
        jaxmp.einsum("ij,jk->ik", jnp.ones((2, 3), "float32"), jnp.ones((3, 2), "float32"), **level)
    plane = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    cyclic = jaxmp.to_block_cyclic(jnp.ones((8, 8), "float32"), jaxmp.BlockCyclic((2, 2), (3, 3)), mesh=plane)
    with pytest.raises(NotImplementedError, match="determinism is not available for block-cyclic operands"):
        jaxmp.matmul(cyclic, cyclic, **level)


@pytest.mark.parametrize("name", ["ag", "rs"])
def test_gradients_of_mapped_products_do_not_know_the_mesh(name, rng):
    """Ranks hold part of each product's rows in the batch, but the rows are summed product by product."""
    case = cases.BY_NAME[name].replace(per_shard=(8, 5, 11))
    m, n, k = case.extents
    a, b, t = (testing.draw(i, shape, "float32") for i, shape in enumerate(((3, m, k), (k, n), (3, m, n))))

    def gradient(a, b, t, **options):
        product = functools.partial(jaxmp.matmul, determinism="topology", **options)
        return jax.grad(lambda b: jnp.sum(t * jax.vmap(product, (0, None))(a, b)))(b)

    mesh = case.jax_mesh(AxisType.Auto)
    where = {"in_shardings": case.stored, "out_sharding": case.out, "mesh": mesh}
    specs = P(None, *case.stored[0]), case.stored[1], P(None, *case.out)
    placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, t), specs, strict=True)]
    got, want = jax.jit(functools.partial(gradient, **where))(*placed), jax.jit(gradient)(a, b, t)
    testing.assert_bitwise_equal(np.asarray(got), np.asarray(want))
