"""The public functions take what `jnp.matmul` takes: NumPy arrays, arrays without a mesh, empty and weakly typed ones.
Without these tests, operands outside the current mesh could crash XLA's partitioner, a vector's sharding could be taken
for a matrix's, and empty batches, which a training loop meets at the end of its data, could fail in a gradient only."""

import functools
import re

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

CALLS = {
    "matmul": lambda x, w, bias: jaxmp.matmul(x, w, out_sharding=P("x", None)),
    "linear": lambda x, w, bias: jaxmp.linear(x, w, bias, out_sharding=P(None, "x")),
    "einsum": lambda x, w, bias: jaxmp.einsum("ij,jk->ik", x, w),
    "mlp": lambda x, w, bias: jaxmp.mlp(x, w, bias, w, bias, activation="relu", out_sharding=P("x", None)),
    "jit": lambda x, w, bias: jax.jit(lambda: jaxmp.matmul(x, w, out_sharding=P("x", None)))(),
    "grad": lambda x, w, bias: jax.grad(lambda w: jaxmp.linear(x, w, bias, out_sharding=P("x")).sum())(w),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", CALLS)
def test_operands_without_a_mesh_are_whole_on_the_explicit_mesh(name, make, mesh_of, rng):
    arrays = x, w, bias = cases.integers(rng, 8, 8), cases.integers(rng, 8, 8), cases.integers(rng, 8)
    made = [make(array) for array in arrays]
    with jax.set_mesh(mesh_of({"x": 4})):
        got = CALLS[name](*made)
    z = x @ w + bias
    want = {"linear": z, "mlp": np.maximum(z, 0) @ w + bias, "grad": np.repeat(x.sum(0)[:, None], 8, 1)}
    np.testing.assert_array_equal(got, want.get(name, x @ w))
    assert len(got.devices()) == 4


@pytest.mark.parametrize("how", ["mesh", "out_sharding"])
def test_an_explicit_mesh_that_only_the_call_names(how, mesh_of, rng):
    x, w, mesh = cases.integers(rng, 8, 8), cases.integers(rng, 8, 8), mesh_of({"x": 4})
    spec = P(None, "x")
    given = {"mesh": {"mesh": mesh, "out_sharding": spec}, "out_sharding": {"out_sharding": NamedSharding(mesh, spec)}}
    got = jaxmp.matmul(x, w, **given[how])
    np.testing.assert_array_equal(got, x @ w)
    assert got.sharding.spec == spec


def test_numpy_arrays_have_the_types_that_jax_gives_them():
    """With 64-bit types off (JAX's default), np.ones is float32 to every function of JAX."""
    a, b, c, bias = np.ones((2, 3)), np.ones((3, 4)), np.ones((2, 4)), np.ones(4)
    with jax.numpy_dtype_promotion("standard"):
        d = jaxmp.matmul(a, b, c, beta=1.0, epilog=Epilog.BIAS, epilog_inputs={"bias": bias})
        y = jaxmp.linear(jnp.ones((2, 3)), jnp.ones((3, 4)), bias, activation="relu")
    assert (d.dtype, float(d[0, 0]), y.dtype, float(y[0, 0])) == (jnp.float32, 5.0, jnp.float32, 4.0)


@pytest.mark.parametrize(("a_shape", "b_shape", "transposed"), [((4, 6), (2, 6, 8), "b"), ((2, 4, 6), (2, 6, 8), "ab")])
def test_batches_that_are_stored_transposed(a_shape, b_shape, transposed, rng):
    a, b = cases.integers(rng, *a_shape), cases.integers(rng, *b_shape)
    flags = {f"transpose_{name}": True for name in transposed}
    stored = (np.swapaxes(x, -1, -2) if name in transposed else x for name, x in (("a", a), ("b", b)))
    got, want = jaxmp.matmul(*stored, **flags), jnp.matmul(a, b)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got, want)


INTEGERS = {"int32": 1000, "uint8": 100, "bool": 2}
WAYS = {
    "all-reduce": (P(None, "x"), P("x", None), P(None, None)),
    "reduce-scatter": (P(None, "x"), P("x", None), P("x", None)),
    "all-gather": (P("x", None), P(None, "x"), P(None, "x")),
    "grid": (P("x", "y"), P("x", "y"), P("x", "y")),
}


@pytest.mark.small("values", of=lambda dtype, **specs: (dtype, str(specs)))
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("a_spec", "b_spec", "out"), WAYS.values(), ids=WAYS)
def test_integers_are_summed_over_devices_modulo_their_type(a_spec, b_spec, out, dtype, mesh_of, rng):
    mesh = mesh_of({"x": 2, "y": 2})
    a, b = (rng.integers(0, INTEGERS[dtype], shape).astype(dtype) for shape in ((4, 8), (8, 6)))
    with jax.set_mesh(mesh):
        got = jaxmp.matmul(cases.put(a, mesh, a_spec), cases.put(b, mesh, b_spec), out_sharding=out)
    np.testing.assert_array_equal(got, a @ b)
    assert got.dtype == dtype


def test_integers_with_all_that_they_take(rng):
    a, b, c, bias = (rng.integers(-9, 9, shape).astype(np.int32) for shape in ((3, 4, 6), (6, 8), (3, 4, 8), (8,)))
    options = {"alpha": 3, "beta": -2, "epilog": Epilog.RELU_BIAS, "epilog_inputs": {"bias": bias}}
    want = np.maximum(3 * (a @ b) - 2 * c + bias, 0)
    for level in ("run_to_run", "topology"):  # integer sums are exact in any order
        np.testing.assert_array_equal(jaxmp.matmul(a, b, c, determinism=level, **options), want)
    np.testing.assert_array_equal(jax.vmap(jaxmp.matmul, (0, None))(a, b), a @ b)
    np.testing.assert_array_equal(jax.vmap(jaxmp.matmul)(a, np.stack([b] * 3)), a @ b)
    wide = jaxmp.matmul(a.astype(np.int16), b.astype(np.int16), preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(wide, a @ b)
    slope = jax.grad(lambda x: x * jaxmp.matmul(a * x.astype(np.int32), b).sum().astype(x.dtype))
    assert float(slope(np.float32(2))) == 2 * (a @ b).sum()
    (row,) = jaxmp.explain(jaxmp.matmul)(a, b).rows
    assert (row.implementation, row.why) == ("xla", "only XLA multiplies int32")
    with pytest.raises(NotImplementedError, match="implementation='host': only XLA multiplies int32; pass impl"):
        jaxmp.matmul(a, b, implementation="host")


@pytest.mark.parametrize("what", ["bias", "c"])
def test_what_is_added_widens_a_result_of_16_bits(what, rng, standard_promotion):
    """The type is that of `jnp.matmul(a, b) + bias`, with a single rounding."""
    a, b, added = cases.integers(rng, 4, 6), cases.integers(rng, 6, 8), cases.integers(rng, 4, 8) + np.float32(1 / 1024)
    narrow = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if what == "bias":
        added = added[0]
        got, grad = jax.value_and_grad(lambda bias: jaxmp.linear(*narrow, bias).sum())(added)
        np.testing.assert_array_equal(grad, np.full(8, 4.0))
        got = jaxmp.linear(*narrow, added)
    else:
        got = jaxmp.matmul(*narrow, added, beta=1.0)
    assert got.dtype == (narrow[0] @ narrow[1] + added).dtype == np.float32
    np.testing.assert_array_equal(got, a @ b + added)


VECTORS = {
    "columns": ((None,), (None, "x"), ("x",)),
    "reduce-scatter": (("x",), ("x", None), ("x",)),
    "all-reduce": (("x",), ("x", None), (None,)),
}


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize(("x_spec", "w_spec", "out"), VECTORS.values(), ids=VECTORS)
def test_the_sharding_of_a_vector_is_of_one_dimension(x_spec, w_spec, out, axis_type, mesh_of, rng):
    mesh, x, w = mesh_of({"x": 4}, axis_type), cases.integers(rng, 8), cases.integers(rng, 8, 16)
    shardings = NamedSharding(mesh, P(*x_spec)), NamedSharding(mesh, P(*w_spec))
    options = {} if axis_type == AxisType.Explicit else {"in_shardings": shardings}
    x_there, w_there = (jax.device_put(array, sharding) for array, sharding in zip((x, w), shardings, strict=True))
    y = jaxmp.linear(x_there, w_there, out_sharding=NamedSharding(mesh, P(*out)), **options)
    np.testing.assert_array_equal(y, x @ w)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(*out)), 1)


def test_automatic_axes_within_explicit_ones(mesh_of, rng):
    """The compiler requests the shards' program while the explicit mesh is still set."""
    mesh, x, w, bias = mesh_of({"x": 4}), cases.integers(rng, 8, 8), cases.integers(rng, 8, 8), cases.integers(rng, 8)

    def layer(x, w, bias):
        return jaxmp.linear(x, w, bias, activation="relu")

    with jax.set_mesh(mesh):
        program = jax.sharding.auto_axes(layer, out_sharding=P(None, "x"))
        x_there, w_there = cases.put(x, mesh, P("x", None)), cases.put(w, mesh, P(None, "x"))
        got, grad = jax.jit(jax.value_and_grad(lambda *x: program(*x).sum()))(x_there, w_there, bias)
    assert float(got) == np.maximum(x @ w + bias, 0).sum()
    np.testing.assert_array_equal(grad, (x @ w + bias > 0) @ w.T)


EMPTY = {"no rows": (0, 8, 8), "no columns": (8, 8, 0), "no contraction": (8, 0, 8)}


@pytest.mark.small("pairs")
@pytest.mark.parametrize("lead", [(), (2,), (0,)], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("name", ["ag", "rs", "ar", "local"])
def test_empty_products_and_their_gradients(name, m, k, n, lead):
    case, ahead = cases.BY_NAME[name], (None,) * len(lead)
    specs = P(*ahead, *case.a), case.b, P(*ahead, *case.out)
    with jax.set_mesh(case.jax_mesh()):
        shapes = (*lead, m, k), (k, n), (*lead, m, n)
        pairs = zip(shapes, specs, strict=True)
        a, b, c = (cases.put(np.ones(shape, np.float32), case.jax_mesh(), spec) for shape, spec in pairs)
        f = functools.partial(jaxmp.matmul, beta=2.0, epilog=Epilog.RELU, out_sharding=specs[2])
        grads = jax.jit(jax.grad(lambda *x: f(*x).sum(), (0, 1, 2)))(a, b, c)
        results = (f(a, b, c), c, 2.0), *zip(grads, (a, b, c), (0.0, 0.0, 2.0), strict=True)
    for got, like, each in results:
        assert got.shape == like.shape
        if got.size:  # JAX cannot fetch an empty sharded array
            np.testing.assert_array_equal(got, np.full(like.shape, each))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("product", [jaxmp.all_gather_matmul, jaxmp.matmul_reduce_scatter])
def test_gradients_of_an_empty_batch_in_shard_map(product, check_vma, mesh_of):
    with jax.set_mesh(mesh_of({"x": 4}, AxisType.Auto)):
        specs = {"in_specs": P(), "out_specs": P(None, "x"), "check_vma": check_vma}
        f = jax.shard_map(functools.partial(product, axis_name="x"), **specs)
        grads = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))(jnp.ones((0, 4, 4)), jnp.ones((4, 4)))
    assert grads[0].shape == (0, 4, 4)
    np.testing.assert_array_equal(grads[1], np.zeros((4, 4)))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_mapped_gradients_without_columns(activation):
    loss = functools.partial(lambda activation, x, w: jaxmp.linear(x, w, activation=activation).sum(), activation)
    assert jax.vmap(jax.grad(loss), (0, None))(jnp.ones((3, 2, 6)), jnp.ones((6, 0))).shape == (3, 2, 6)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("batch", "k"), [(0, 6), (3, 0), (0, 0)])
def test_mapped_weights_of_no_extent(batch, k, transpose_b):
    w = jnp.ones((batch, 5, k) if transpose_b else (batch, k, 5))
    product = functools.partial(jaxmp.matmul, transpose_b=transpose_b)
    np.testing.assert_array_equal(jax.vmap(product, (None, 0))(jnp.ones((4, k)), w), np.zeros((batch, 4, 5)))


ASKED = pytest.mark.parametrize(
    ("asked", "options"),
    [("implementation='host'", {"implementation": "host"}), ("determinism='batch'", {"determinism": "batch"})],
)


@ASKED
def test_long_rows_say_what_needs_short_ones(asked, options):
    a, b = jax.ShapeDtypeStruct((8, 2**31), np.float32), jax.ShapeDtypeStruct((2**31, 4), np.float32)
    message = (
        f"matmul: {asked} is not available here: hostmp counts in 32 bits, and the group's product has m=8, n=4, "
        "k=2147483648; shard the operands further"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.jit(functools.partial(jaxmp.matmul, **options)).lower(a, b)


@ASKED
@pytest.mark.parametrize("axis_type", [None, AxisType.Auto])
def test_an_export_for_any_extent_says_what_needs_numbers(mesh_of, axis_type, asked, options):
    """Without these options XLA multiplies (tests/core/product/test_restart.py)."""
    where = axis_type and NamedSharding(mesh_of({"x": 4}, axis_type), P("x", None))
    (n,) = jax.export.symbolic_shape("4 * n")
    shapes = jax.ShapeDtypeStruct((n, 8), np.float32, sharding=where), jax.ShapeDtypeStruct((8, 8), np.float32)
    message = f"matmul: {asked} takes numbers for extents, got operands of (4*n, 8) and (8, 8); export for numbers"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.export.export(jax.jit(functools.partial(jaxmp.matmul, **options)))(*shapes)


def test_an_export_for_any_extent_shards_multiples(mesh_of):
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    options = {"in_shardings": (P("x", None), P(None, "x")), "out_sharding": P(None, "x"), "mesh": mesh}
    call = jax.jit(lambda a, b: jaxmp.matmul(a, b, implementation="xla", **options))
    b = np.ones((8, 8), np.float32)

    def export(extent):
        (m,) = jax.export.symbolic_shape(extent)
        return jax.export.export(call)(jax.ShapeDtypeStruct((m, 8), np.float32), b)

    message = "a has extent n, which axis 'x' of size 4 does not divide (global shape (n, 8)); "
    message += "export for an extent of 4 * n"
    with pytest.raises(ValueError, match=re.escape(message)):
        export("n")
    assert export("4 * n").out_avals[0].shape[1] == 8
