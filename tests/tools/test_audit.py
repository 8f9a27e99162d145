"""`audit` finds real differences only. Differences with known line, size and number are planted, and found after every
operation that moves a batch or a mesh; programs without a difference give an empty table."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.audit import bits, operations
from jaxmp._src.tools.audit.variation import Variation

audit = functools.partial(jaxmp.audit, quiet=True)


def planted(x):
    """Returns x, one unit in the last place higher unless the batch has 8 rows."""

    def add(x):
        return np.nextafter(x, np.float32(np.inf)) if x.shape[0] != 8 else x

    return jax.pure_callback(add, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


PLANT = f"test_audit.py:{planted.__code__.co_firstlineno + 6}"


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def audit_meshes(mesh, program, *arrays):
    with jax.set_mesh(mesh):
        return audit(program, vary="mesh")(*arrays)


# Batches ---------------------------------------------------------------------------------------------------------


def test_a_planted_difference_has_its_numbers(rng):
    x = normal(rng, 8, 6)
    x[0, 0] = 1
    found = audit(lambda x: jnp.cos(planted(jnp.sin(x))), vary="batch")(np.arcsin(np.clip(x, 0.5, 1)))
    (row,) = found.rows
    assert (row.line, row.operation, row.kind) == (PLANT, "pure_callback", "elementwise")
    assert (row.shapes, row.dtypes) == (((8, 6), (8, 6)), ("float32", "float32"))
    assert (found.reference, row.variants) == ("8 rows", ("1 row", "4 rows", "11 rows"))
    assert (row.count, row.runs) == (3, 3)
    difference = row.difference
    assert (difference.differing, difference.elements, difference.ulps) == (6, 6, 1)
    assert 2.0**-25 <= difference.absolute <= 2.0**-23
    assert found.compared == 3
    assert {output.name for output in found.outputs} == {""}


def layers(x, w):
    """Joins, splits, swaps and repeats dimensions; has loops and calls."""
    y = jnp.reshape(x, (-1, 4)) @ w  # (n * 3, 4)
    y = jnp.swapaxes(jnp.reshape(y, x.shape), 0, 1)  # (3, n, 4)
    y = jnp.concatenate([y, y], axis=1)[:, : x.shape[0]]
    y = jax.lax.scan(lambda c, row: (c + row, c * row), y[0], y, reverse=True)[1]
    _, y = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, y))
    y = jax.lax.cond(w[0, 0] > -100, jnp.sin, jnp.cos, y)
    y = jax.checkpoint(jax.jit(jnp.sin))(y) + jax.lax.map(jnp.sin, y)
    return jnp.moveaxis(y, 1, 0) * jnp.argmax(y[:, :, 0], axis=0).astype(y.dtype)[:, None, None]


def test_rows_are_followed_through_a_program(rng):
    """Finds a difference before and one after the layers, and no other except XLA's own products."""
    found = audit(lambda x, w: planted(layers(planted(x), w)), batch_argnums=0)(normal(rng, 8, 3, 4), normal(rng, 4, 4))
    (row,) = (row for row in found.rows if row.kind != "product")
    assert (row.line, row.count, row.runs) == (PLANT, 6, 6)
    assert not found.uncompared


def test_every_culprit_is_listed(rng):
    """Finds a culprit after another one, and one in each step of a loop."""

    def program(x):
        y = jnp.sin(planted(x))
        return jax.lax.scan(lambda c, _: (jnp.cos(planted(c) + y), None), y, length=4)[0]

    rows = audit(program)(normal(rng, 8, 5)).rows
    assert [(row.line, row.count, row.runs) for row in rows] == [(PLANT, 15, 15)]  # 3 variants x (1 + 4)


MIXING = {
    "batch norm": (lambda x: x - jnp.mean(x, axis=0, keepdims=True), "reduce_sum"),
    "reversed": (lambda x: x[::-1] * 2.0, "rev"),
    "sorted twice": (lambda x: jnp.sort(jnp.sort(x, axis=0), axis=0), "sort"),
    "every second": (lambda x: jnp.roll(x, 2, axis=0) * 1.0, "concatenate"),
    "by a number": (lambda x: x[(3 * jnp.arange(x.shape[0]) + 1) % x.shape[0]], "gather"),
    "running": (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
    "of each other": (lambda x: x @ x.T, "dot_general"),
    "noise": (lambda x: x + jax.random.bits(jax.random.key(0), x.shape).astype(np.float32), "add"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_named_and_is_no_culprit(name, rng):
    program, operation = MIXING[name]
    found = audit(program)(normal(rng, 7, 5))
    assert not found.rows
    assert not found.outputs
    assert operation in {one.operation for one in found.uncompared}
    assert {one.line.split(":")[0] for one in found.uncompared} == {"test_audit.py"}


def test_what_only_names_its_rows_is_compared(rng):
    """Covers rows that are picked by their number, as in losses, and constants of the batch's size."""

    def program(x, labels):
        picked = x[jnp.arange(x.shape[0]), labels] + jnp.zeros(x.shape[0])
        return planted(picked) / x.shape[0]

    found = audit(program)(normal(rng, 8, 5), np.arange(8, dtype=np.int32) % 5)
    assert [row.line for row in found.rows] == [PLANT]
    assert not [one for one in found.uncompared if one.operation == "gather"]


def test_products_that_keep_rows_are_not_named(rng):
    x, w, sizes = normal(rng, 8, 301), normal(rng, 1, 301, 30), np.array([1000])
    for product, operands in ((jaxmp.matmul, (x, w[0])), (jaxmp.ragged_dot, (x, w, sizes))):
        found = audit(functools.partial(product, determinism="batch"), batch_argnums=0)(*operands)
        assert (found.rows, found.uncompared, found.outputs, found.compared) == ((), (), (), 1)
    (eqn,) = (eqn for eqn in jax.make_jaxpr(jaxmp.ragged_dot)(x, w, sizes).eqns if operations.our_equation(eqn))
    assert (operations.name_of(eqn), operations.kind_of(eqn)) == ("jaxmp_partitioned_grouped (run_to_run)", "product")


def test_the_batch_is_found_or_named(rng):
    w, x, labels = {"w": normal(rng, 1, 5), "b": normal(rng, 3)}, normal(rng, 8, 5), np.ones(8, np.float32)

    def program(w, x, labels):
        return planted(x * w["w"]) * labels[:, None]

    by_default = audit(program)(w, x, labels)
    assert [row.line for row in by_default.rows] == [PLANT]
    assert by_default == audit(program, batch_argnums=(1, 2))(w, x, labels)
    with pytest.raises(ValueError, match=r"fn takes 5 rows but not 1 in the arguments \(1,\); pass batch_argnums="):
        audit(lambda x, w: x @ w)(x, normal(rng, 5, 3))


def test_a_sharded_batch_stays_sharded(mesh_of, rng):
    mesh = mesh_of({"x": 4})
    with jax.set_mesh(mesh):
        found = audit(lambda x: jnp.cos(jnp.sin(x)))(put(mesh, normal(rng, 8, 6), "x"))
    assert found.variants == ("4 rows", "20 rows")
    assert not found.rows


def test_arguments_are_taken_as_jax_takes_them(rng):
    """Covers a NumPy float64, a donated array, a static argument, and values other than arrays."""
    step = jax.jit(lambda x, power, unused: planted(x) ** power, donate_argnums=0, static_argnums=1)
    (row,) = audit(step, batch_argnums=0)(rng.standard_normal((8, 3)), 2, {"name": None, "rate": 1.0}).rows
    assert (row.line, row.dtypes) == (PLANT, ("float32", "float32"))


def test_a_run_with_several_outputs_counts_once(rng):
    def program(x):
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
        return jax.pure_callback(lambda x: (x, np.asarray(x).sum(1) + (len(x) != 8)), shapes, x)

    (row,) = audit(program)(normal(rng, 8, 3)).rows
    assert (row.shapes, row.count, row.runs) == (((8, 3), (8,)), 3, 3)


def test_random_keys_are_values_too(rng):
    keys = jax.random.split(jax.random.key(0), 8)
    draw = jax.vmap(lambda key: jax.random.bits(key, (3,)))
    found = audit(lambda keys: planted(draw(keys).astype(np.float32)))(keys)
    assert [row.line for row in found.rows] == [PLANT]
    assert not found.uncompared


# Meshes ----------------------------------------------------------------------------------------------------------


def sums(x):
    """Sums over the sharded dimension; sums of other sharded arrays depend on it."""
    y = jnp.sin(jnp.sum(x, axis=1, keepdims=True) * x)
    return jnp.sum(jnp.cos(y), axis=1)


def test_sums_over_shards_are_named_and_nothing_else(mesh_of, rng):
    mesh = mesh_of({"x": 4})
    found = audit_meshes(mesh, sums, put(mesh, normal(rng, 8, 4096), None, "x"))
    assert (found.reference, found.variants) == ("x=1", ("x=2", "x=4"))
    assert {row.operation for row in found.rows} == {"reduce_sum"}
    first, second = (f"test_audit.py:{sums.__code__.co_firstlineno + i}" for i in (2, 3))
    assert [row.line for row in found.rows] == [first, second]
    assert {row.kind for row in found.rows} == {"sum"}
    assert [one.differing for one in found.trials] == [0]
    assert 'tried on this program: jaxmp.fuse(fn, determinism="topology"): 0 of 1 outputs differ then' in str(found)
    assert [output.variant for output in found.outputs] == ["x=2", "x=4"]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_elementwise_programs_name_nothing(kind, mesh_of, rng):
    mesh = mesh_of({"x": 2, "y": 2}, kind)
    x, y = put(mesh, normal(rng, 8, 64), "x", "y"), put(mesh, normal(rng, 8, 64))
    found = audit_meshes(mesh, lambda x, y: jax.nn.gelu(x) * y, x, y)
    assert (found.reference, found.variants) == ("1 device (x=1 x y=1)", ("4 devices (x=2 x y=2)",))
    assert (found.rows, found.outputs, found.uncompared) == ((), (), ())
    assert found.compared > 5


def test_random_keys_stay_keys_on_each_mesh(mesh_of, rng):
    mesh = mesh_of({"x": 2})
    key, x = put(mesh, jax.random.key(0, impl="rbg")), put(mesh, normal(rng, 8, 4), "x")
    found = audit_meshes(mesh, lambda key, x: x + jax.random.key_data(key)[0].astype(x.dtype), key, x)
    assert (found.rows, found.outputs) == ((), ())


def test_products_are_settled_by_their_level(mesh_of, rng):
    """JAX's products, and jaxmp's without a level, are named; with a level they are not, nor gradients.

    The BLAS multiplies complex numbers on every processor; hostmp's own kernels sum real numbers in one order.
    """
    mesh = mesh_of({"x": 4})
    a, b = (put(mesh, normal(rng, 64, 2000) + 1j * normal(rng, 64, 2000), None, "x") for _ in "ab")

    def of(product, **options):
        def loss(a, b):
            return jax.sharding.reshard(product(a, b, out_sharding=P("x", None), **options), P()).real.sum()

        return audit(jax.grad(loss, (0, 1)) if options else product_of(product), vary="mesh")(a, b)

    def product_of(product):
        return lambda a, b: product(a, b, out_sharding=P("x", None))

    with jax.set_mesh(mesh):
        plain = of(lambda a, b, **options: jnp.matmul(a, b.T, **options))
        multiply = functools.partial(jaxmp.matmul, transpose_b=True)
        ours, level = of(multiply), of(multiply, determinism="topology")
    for found, name in ((plain, "dot_general"), (ours, "jaxmp_matmul (run_to_run)")):
        (row,) = found.rows
        assert (row.operation, row.kind) == (name, "product")
        # `fuse` refuses a call of jaxmp without the level.
        (trial,) = found.trials
        assert trial.remedy.startswith('jaxmp.fuse(fn, determinism="topology")')
        assert ("pass determinism=" in trial.remedy, trial.differing) == (found is ours, int(found is ours))
        assert ("remedies for each kind of operation" in str(found)) == (found is ours)
    assert (level.rows, level.outputs) == ((), ())
    assert level.compared > 3


def test_a_program_that_is_another_on_each_mesh_is_named(mesh_of, rng):
    """These equations run on one mesh only; a change by them is reported where both programs meet again."""
    mesh = mesh_of({"x": 2})

    def program(x, change):
        if jax.sharding.get_abstract_mesh().size == 2:
            x = (x + 1.0) - 1.0 if change else jax.sharding.reshard(x, P())
        return jnp.sin(x * 2.0)

    x = put(mesh, normal(rng, 8, 16), "x")
    (row,), moved = audit_meshes(mesh, program, x, True).rows, audit_meshes(mesh, program, x, False)
    assert (row.operation, row.kind, row.difference.elements) == ("sub", "other equations", 128)
    assert (moved.rows, moved.outputs) == ((), ())


def sequence_parallel(mesh, rng, ndim=3):
    """Returns (weights, x) with a sharded sequence; folded into rows, the order differs on each mesh."""
    weights = put(mesh, normal(rng, 24, 32), None, "x"), put(mesh, normal(rng, 32, 24), "x", None)
    return weights, put(mesh, normal(rng, *(2,) * (ndim - 3), 4, 8, 24), *(None,) * (ndim - 2), "x", None)


def loss_of_linear(weights, x, **options):
    y = jaxmp.linear(x, weights[0], out_sharding=P(*(None,) * (x.ndim - 1), "x"), **options)
    return jnp.sum(jax.sharding.reshard(y, P()) ** 2)


def loss_of_layers(weights, x, **options):
    up, down = weights

    def layer(x, _):
        return jaxmp.mlp(x, up, None, down, None, out_sharding=jax.typeof(x).sharding.spec, **options), None

    return jnp.sum(jax.sharding.reshard(jax.lax.scan(layer, x, length=2)[0], P()))


@pytest.mark.parametrize(
    ("loss", "activation", "ndim"),
    [(loss_of_layers, "gelu", 3), (loss_of_layers, "relu", 4), (loss_of_linear, "relu", 4)],
)
def test_what_devices_keep_for_a_gradient_may_lie_in_their_order(loss, activation, ndim, mesh_of, rng):
    mesh = mesh_of({"x": 4})
    program = functools.partial(loss, activation=activation, determinism="topology")
    found = audit_meshes(mesh, jax.grad(program, (0, 1)), *sequence_parallel(mesh, rng, ndim))
    assert (found.rows, found.uncompared, found.outputs) == ((), (), ())


def test_gradients_summed_in_the_order_of_devices_are_named(mesh_of, rng):
    """The gradient is reported by its difference, not by the order of its rows. Forward, small integers are exact."""
    mesh = mesh_of({"x": 4})
    program = jax.grad(functools.partial(loss_of_linear, activation="gelu"))
    found = audit_meshes(mesh, program, *jax.tree.map(jnp.round, sequence_parallel(mesh, rng)))
    (row,) = found.rows
    assert (row.kind, row.variants) == ("product", ("x=2", "x=4"))
    assert row.shapes[-1] == (24, 32)
    assert row.difference.absolute < 1e-3
    assert {output.name for output in found.outputs} >= {"[0]"}
    assert not found.uncompared


def test_a_difference_in_device_order_has_its_numbers(mesh_of, rng):
    """Sums over devices; each device keeps its part of the sequence."""
    mesh = mesh_of({"x": 4})

    def local(x, w):
        y = jax.lax.psum_scatter(x @ w, "x", scatter_dimension=1, tiled=True)
        rows = jnp.reshape(y, (-1, y.shape[-1]))
        return jnp.reshape(jnp.sin(rows) * jnp.cos(rows), y.shape)

    def loss(x, w):
        specs = (P(None, None, "x"), P("x", None))
        return jnp.sum(jax.sharding.reshard(jax.shard_map(local, in_specs=specs, out_specs=P(None, "x"))(x, w), P()))

    x, w = put(mesh, normal(rng, 4, 8, 512), None, None, "x"), put(mesh, normal(rng, 512, 24) / 16, "x", None)
    (row,) = audit_meshes(mesh, jax.grad(loss), x, w).rows
    assert (row.operation, row.kind) == ("shard_map", "whole")
    assert 0 < row.difference.absolute < 1e-4


def test_shards_that_should_be_copies_are_compared(mesh_of):
    """Each device makes the sum itself; the first device alone would not show the difference."""
    mesh = mesh_of({"x": 2})

    def program(x):
        def local(x):
            return x + jnp.where(jax.lax.axis_index("x") == 1, jnp.float32(2.0**-23), jnp.float32(0))

        return jax.shard_map(local, in_specs=P(), out_specs=P(), check_vma=False)(x)

    (row,) = audit_meshes(mesh, program, put(mesh, np.ones(4, np.float32))).rows
    assert (row.operation, row.kind) == ("shard_map", "whole")
    assert (row.difference.ulps, row.difference.elements) == (1, 4)


# Bits ------------------------------------------------------------------------------------------------------------

TINY = np.float32(2.0**-149)
# Case: (type, actual, expected, elements that differ, units in the last place, absolute difference).
DIFFERENCES = {
    "equal": ("float32", [1, -0.0, np.nan, np.inf], [1, -0.0, np.nan, np.inf], 0, 0, 0),
    "one unit": ("float32", [1, 1 + 2.0**-23], [1, 1], 1, 1, 2.0**-23),
    "zeros": ("float32", [0.0], [-0.0], 1, 1, 0),
    "across zero": ("float32", [TINY], [-TINY], 1, 3, 2 * float(TINY)),
    "float64": ("float64", [-1e300], [1e300], 1, 2 * int(np.float64(1e300).view(np.int64)) + 1, 2e300),
    "bfloat16": (jnp.bfloat16, [256, 3], [258, 3], 1, 1, 2),
    "fp8": (jnp.float8_e4m3fn, [1, 1.25], [1, 1], 1, 2, 0.25),
    "complex": ("complex64", [1 + 2j], [1 + 5j], 1, 0xA00000, 3),
    "integers": ("int32", [2**31 - 1], [-(2**31)], 1, 2**32 - 1, 2.0**32 - 1),
    "bools": ("bool", [True, False], [False, False], 1, 1, 1),
    "NaN": ("float32", [np.nan, 1], [1, 1], 1, 0, np.inf),
    "infinities": ("float32", [np.inf, 1], [-np.inf, 1], 1, 4278190081, np.inf),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_have_their_numbers(name):
    dtype, actual, expected, differing, ulps, absolute = DIFFERENCES[name]
    found = bits.difference(np.array(actual).astype(dtype), np.array(expected).astype(dtype))
    if not differing:
        assert found is None
        return
    assert (found.differing, found.elements, found.absolute) == (differing, len(actual), absolute)
    assert found.ulps == ulps


def test_every_copy_is_looked_at(mesh_of):
    mesh = mesh_of({"x": 2})
    shards = [jax.device_put(np.array([value], np.float32), device) for value, device in zip((1, 2), mesh.devices)]  # noqa: B905
    copies = jax.make_array_from_single_device_arrays((1,), NamedSharding(mesh, P()), shards)
    assert bits.difference(copies, np.ones(1, np.float32)).absolute == 1


def test_another_order_is_told_from_other_values(rng):
    x = rng.standard_normal((6, 4)).astype(np.float32)
    x[0, :2] = -0.0, np.nan
    moved, varied = x[::-1].copy(), Variation("4 devices")
    assert varied.is_reordered(moved, x)
    assert varied.is_reordered(np.concatenate([moved, x]).reshape(8, 6), x)  # two copies
    assert not varied.is_reordered(moved[:5], x)
    assert not varied.is_reordered(np.abs(moved), x)  # the sign of zero differs
    moved[0, 0] = np.nextafter(moved[0, 0], np.float32(9))
    assert not varied.is_reordered(moved, x)
    x, moved = x[1:], moved[:5]
    least = varied.least_difference(moved, x)
    assert (least.differing, least.ulps) == (1, 1)
    assert varied.least_difference(np.nextafter(x, np.float32(9)), x) is None  # already in the same order


# Errors and texts ------------------------------------------------------------------------------------------------

X = np.ones((8, 2), np.float32)


def test_arrays_are_arguments_and_known(mesh_of):
    with pytest.raises(TypeError, match="call it outside of jit"):
        jax.jit(lambda x: audit(jnp.sin)(x).compared)(X)
    x = put(mesh := mesh_of({"x": 2}), X, "x")
    with pytest.raises(ValueError, match=r"cannot be traced on the mesh \{'x': 1\}; it has to take every array"):
        audit_meshes(mesh, lambda y: x + y, x)


def test_the_old_form_warns_and_keywords_are_arguments(rng):
    x, w = normal(rng, 8, 3), normal(rng, 3, 3)

    def program(w, *, x, scale=1.0):
        return jnp.sin(x * scale)

    new = audit(program)(w, x=x, scale=2.0)
    assert (new.compared, new.reference) == (2, "8 rows")
    with pytest.warns(DeprecationWarning, match=re.escape("write audit(fn)(*args)")) as warned:
        old = audit(lambda x: program(w, x=x, scale=2.0), x)
    assert warned[0].filename == __file__
    assert old == new


def test_the_table_is_printed_and_returned(capsys, rng):
    found = jaxmp.audit(lambda x: planted(x) - jnp.mean(x, axis=0, keepdims=True))(normal(rng, 8, 5))
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    header, row, total, _, *notes = printed.splitlines()
    assert header.split()[:4] == ["line", "operation", "shapes", "type"]
    assert row.split()[:5] == [PLANT, "pure_callback", "8x5", "->", "8x5"]
    assert total == f"total: 1 of {found.compared} operations differ; 8 rows compared with 1 row, 4 rows, 11 rows"
    assert row.split()[-1] == "elementwise"
    assert notes[0].startswith("not compared, its result mixes the rows of the batch: reduce_sum test_audit.py:")
    assert "<td>8x5 -&gt; 8x5</td>" in found._repr_html_()
    none = audit(jnp.sin)(X)
    assert capsys.readouterr().out == ""
    assert str(none).startswith("total: 0 of 1 operations differ; 8 rows compared with 1 row, 4 rows, 11 rows\n\n")
    output = jaxmp._src.tools.audit.report.Output("[0]", "4 rows", found.rows[0].difference)
    text = str(jaxmp.Audit(**{**vars(none), "outputs": (output,)}))
    assert "whole program: [0] differs, by up to 1 ulp (" in text
    assert "no operation alone does, and no group was found" in text
