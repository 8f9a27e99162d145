"""Batches that both operands have: one product (XLA's, or ours for narrow types), unless separate calls are asked for
or faster. Values are small integers, so every result is exact. Without these tests, a loop could replace one product,
each index could need a collective, and operands without the batch could get wrong gradients."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers
from compiled import calls_of, collectives_of, compiled_text, other_products_of
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.core.lowering import backend
from jaxmp._src.core.lowering.backend import LARGE_IN_BATCH
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern

NUMBERS = (((2,), (1,)), ((0,), (0,)))
# Shardings of a (batch, m, k), b (batch, k, n) and d over the four devices of "x", and XLA's collectives.
PATTERNS = {
    "local": (P("x"), P("x"), P("x"), []),
    "all_gather": (P(None, "x"), P(None, None, "x"), P(None, None, "x"), ["all-gather"]),
    "reduce_scatter": (P(None, None, "x"), P(None, "x"), P(None, "x"), ["reduce-scatter"]),
    "all_reduce": (P(None, None, "x"), P(None, "x"), P(), ["all-reduce"]),
}
OVER_PATTERNS = pytest.mark.parametrize("pattern", PATTERNS)


def mesh_of(kind=AxisType.Explicit):
    return jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])


def product(pattern, **options):
    return functools.partial(jaxmp.dot_general, dimension_numbers=NUMBERS, out_sharding=PATTERNS[pattern][2], **options)


def operands(mesh, pattern, rng, dtype=np.float32):
    values = [cases.integers(rng, 8, 4, 12).astype(dtype), cases.integers(rng, 8, 12, 16).astype(dtype)]
    return values, [cases.put(x, mesh, spec) for x, spec in zip(values, PATTERNS[pattern][:2], strict=True)]


@OVER_PATTERNS
def test_one_product_and_one_collective(pattern, rng):
    with jax.set_mesh(mesh_of()):
        (a, b), placed = operands(mesh_of(), pattern, rng)
        f = product(pattern)
        (row,), compiled = transfers.check(f, *placed)
        np.testing.assert_array_equal(*compiled(*placed), a @ b)
    text = compiled.as_text()
    assert not calls_of(text)
    assert " while(" not in text
    assert collectives_of(text) == PATTERNS[pattern][3]
    assert (row.pattern, row.implementation) == (pattern, "xla")
    assert row.count == (2 if pattern == "local" else 8)
    assert "both operands have a batch" in row.why


@pytest.mark.parametrize("options", [{"implementation": "host"}, {"determinism": "batch"}], ids=str)
@OVER_PATTERNS
def test_what_is_asked_for_runs_call_by_call(pattern, options, rng):
    with jax.set_mesh(mesh_of()):
        (a, b), placed = operands(mesh_of(), pattern, rng)
        f = product(pattern, **options)
        _, compiled = transfers.check(f, *placed)
        np.testing.assert_array_equal(*compiled(*placed), a @ b)
    text = compiled.as_text()
    assert calls_of(text) == [pattern]
    assert not other_products_of(text)


@pytest.mark.small("values")
@pytest.mark.parametrize(
    "shape", [(3, 5, 7, 9), (4, 33, 65, 17), (0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)]
)
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float8_e5m2"])
def test_narrow_types_are_one_product_of_ours(dtype, shape, rng):
    batch, m, k, n = shape
    a, b = (rng.integers(-4, 5, extents) for extents in ((batch, m, k), (batch, k, n)))
    a, b = ((x * 32).astype(np.int8) if dtype == "int8" else x.astype(dtype) for x in (a, b))
    out, wide = (jnp.int32, np.int32) if dtype == "int8" else (jnp.float32, np.float64)
    turned = {(i, j): (a.swapaxes(1, 2) if i else a, b.swapaxes(1, 2) if j else b) for i in (0, 1) for j in (0, 1)}

    def program(turned):
        options = {"preferred_element_type": out}
        numbers = {(i, j): (((2 - i,), (1 + j,)), ((0,), (0,))) for i, j in turned}
        return [jaxmp.dot_general(*pair, dimension_numbers=numbers[ij], **options) for ij, pair in turned.items()]

    compiled = jax.jit(program).lower(turned).compile()
    for d in compiled(turned):
        np.testing.assert_array_equal(d, a.astype(wide) @ b.astype(wide))
    assert not other_products_of(compiled.as_text())


@pytest.mark.parametrize(("dtype", "is_shared"), [("bfloat16", True), ("float32", True), ("float32", False)])
def test_large_products_run_call_by_call_where_that_is_faster(dtype, is_shared):
    size = round((LARGE_IN_BATCH / 2) ** (1 / 3))
    assert 2 * size**3 == LARGE_IN_BATCH
    with jax.set_mesh(mesh_of()):
        for n, is_large in ((size, True), (size - 4, False)):
            specs = PATTERNS["all_gather" if is_shared else "local"]
            shapes = zip(((size, size), (size, n)), specs, strict=False)
            a, b = (cases.typed(mesh_of(), (4, *shape), *spec, dtype=dtype) for shape, spec in shapes)
            f = product("all_gather" if is_shared else "local")
            (row,) = jaxmp.explain(f)(a, b).rows
            calls = calls_of(compiled_text(f, a, b))
            is_host = is_large and is_shared
            assert row.implementation == ("host" if is_host else "host+xla" if dtype == "bfloat16" else "xla")
            assert bool(calls) == is_host


@pytest.mark.parametrize(
    ("dtype", "platform", "apart", "options", "want"),
    [
        ("float32", "cpu", "", {}, ("xla", True)),
        ("float32", "cpu", "they live in 2 processes", {}, ("host+xla", False)),
        ("float32", "cpu", "they live in 2 processes", {"implementation": "xla"}, ("xla", False)),
        ("bfloat16", "cpu", "", {}, ("host+xla", True)),
        ("float32", "cuda", "", {}, ("xla", True)),
        ("float32", "cuda", "they live in 2 processes", {}, ("xla", True)),
        ("float8_e4m3fn", "cuda", "they live in 2 processes", {}, ("cublasmp", False)),
        ("float32", "tpu", "they live in 2 processes", {}, ("xla", True)),
    ],
    ids=str,
)
def test_the_rule(dtype, platform, apart, options, want, monkeypatch):
    """Small batches, by platform and number of processes; the test pretends that the GPU library is present."""
    monkeypatch.setattr(backend.native, "cuda_devices", lambda: (0, 1))
    monkeypatch.setattr(backend.native, "why_no_cublasmp", lambda: "")
    monkeypatch.setattr(backend.native, "card_capability", lambda: (9, 0))
    spec = MatmulSpec(np.dtype("float32"), Group(Pattern.ALL_GATHER, (("x", 2),), ("x",)), transpose_b=True, **options)
    operands = (np.dtype(dtype), np.dtype(dtype))
    choice, is_one = backend.choose_for_batch(spec, platform, apart, operands, LARGE_IN_BATCH - 1)
    assert (choice.implementation, is_one) == want


def test_auto_axes_are_partitioned(rng):
    mesh = mesh_of(AxisType.Auto)
    (a, b), placed = operands(mesh, "local", rng)
    f = jax.jit(jax.vmap(jaxmp.matmul))
    d = f(*placed)
    np.testing.assert_array_equal(d, a @ b)
    assert d.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 3)
    (row,) = jaxmp.explain(f)(*placed).rows
    assert (row.count, row.implementation) == (8, "xla")
    assert "XLA partitions" in row.why
    assert jax.export.export(f)(*placed).out_avals[0].shape == (8, 4, 16)


def test_a_batch_on_an_explicit_axis_inside_shard_map(rng):
    """The batch's axis is not manual there, so XLA computes matmul; a function that names another axis is refused."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        a, b = (cases.put(cases.integers(rng, 4, 8, 8), mesh, spec) for spec in (P("x", "y"), P("x")))

        def product(multiply):
            return jax.vmap(jax.shard_map(multiply, in_specs=(P("y"), P()), out_specs=P("y")))

        np.testing.assert_array_equal(product(jaxmp.matmul)(a, b), np.matmul(a, b))
        with pytest.raises(ValueError, match="matmul_all_reduce: the enclosing shard_map is manual over"):
            product(functools.partial(jaxmp.matmul_all_reduce, axis_name="y"))(a, b)


def weighted(f):
    """Wraps f in a loss that gives the elements of f's result different weights."""

    def loss(*args):
        d = f(*args)
        return jnp.sum(d * (1 + jnp.arange(d.size, dtype=d.dtype).reshape(d.shape) % 3))

    return loss


def everything(args):
    return tuple(range(len(args)))


TRANSFORMS = {
    "forward": lambda f, args: f(*args),
    "grad": lambda f, args: jax.grad(weighted(f), everything(args))(*args),
    "jvp": lambda f, args: jax.jvp(f, args, args),
    "linearize": lambda f, args: jax.linearize(f, *args)[1](*args),
    "forward over reverse": lambda f, args: jax.jvp(jax.grad(weighted(f), everything(args)), args, args),
    "remat": lambda f, args: jax.grad(weighted(jax.checkpoint(f)), everything(args))(*args),
}


def all_of(f, args):
    """Returns the result of every transform of f, by name, from one program."""
    return jax.jit(lambda args: {name: transform(f, args) for name, transform in TRANSFORMS.items()})(args)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# The axes of an inner vmap (or None) and of an outer vmap.
AXES = {
    "both": (None, (0, 0)),
    "last": (None, (2, 1)),
    "both of both": ((0, 0), (0, 0)),
    "a of both": ((0, 0), (0, None)),
    "b of both": ((0, 0), (None, 0)),
    "rows of both": ((0, None), (0, 0)),
}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES.keys())
def test_transforms(axes, rng):
    inner, outer = axes
    a, b = cases.integers(rng, 2, 3, 4), cases.integers(rng, 2, 4, 3)
    f, g = jaxmp.matmul, jnp.matmul
    if inner:
        a, b = (x if axis is None else np.stack([x, x + 1]) for x, axis in zip((a, b), outer, strict=True))
        f, g = jax.vmap(f, inner), jax.vmap(g, inner)
    else:
        a, b = np.moveaxis(a, 0, outer[0]), np.moveaxis(b, 0, outer[1])
    args = jnp.asarray(a), jnp.asarray(b)
    assert_same(all_of(jax.vmap(f, outer), args), all_of(jax.vmap(g, outer), args))


@pytest.mark.parametrize("bias_axis", [0, None])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_transforms_of_layers(activation, bias_axis, rng):
    shapes = (3, 4, 5), (3, 5, 6), (6,) if bias_axis is None else (3, 6)
    args = tuple(jnp.asarray(cases.integers(rng, *shape)) for shape in shapes)

    def plain(x, w, bias):
        z = x @ w + bias[None]  # ranks are not promoted in these tests
        return jax.nn.relu(z) if activation else z

    ours = functools.partial(jaxmp.linear, activation=activation)
    f, g = (jax.vmap(layer, (0, 0, bias_axis)) for layer in (ours, plain))
    assert_same(all_of(f, args), all_of(g, args))


def test_no_products_and_products_of_nothing():
    product = jax.vmap(jaxmp.matmul)
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        a, b = jnp.ones(shape), jnp.ones((shape[0], shape[2], 5))
        np.testing.assert_array_equal(product(a, b), np.zeros((*shape[:2], 5)))
        da, db = jax.grad(lambda a, b: product(a, b).sum(), (0, 1))(a, b)
        assert (da.shape, db.shape) == (a.shape, b.shape)
    for shape in ((2, 3, 4, 0), (2, 3, 0, 4), (2, 0, 3, 4), (0, 2, 3, 4)):
        a, b = jnp.ones(shape), jnp.ones((*shape[:2], shape[3], 5))
        np.testing.assert_array_equal(jax.vmap(product)(a, b), np.zeros((*shape[:3], 5)))


def test_extents_that_are_not_known():
    m, batch = jax.export.symbolic_shape("m, batch")
    a, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((batch, m, 8), (batch, 8, 4)))
    exported = jax.export.export(jax.jit(jax.vmap(jaxmp.matmul)))(a, b)
    x, y = np.ones((3, 2, 8), "bfloat16"), np.ones((3, 8, 4), "bfloat16")
    np.testing.assert_array_equal(exported.call(x, y), np.full((3, 2, 4), 8))


def test_sums_of_16_bits_are_rounded_once(rng):
    """The sum is 4096 times 2^-9, plus 1; bfloat16 sums would lose the small terms."""
    a = jnp.ones((2, 1, 4097), "bfloat16")
    b = jnp.concatenate([jnp.full((2, 4096, 1), 2.0**-9), jnp.ones((2, 1, 1))], axis=1).astype("bfloat16")
    np.testing.assert_array_equal(jax.vmap(jaxmp.matmul)(a, b), np.full((2, 1, 1), 9.0))


def test_lax_has_the_same_program(rng):
    """The program has as many operations as with `lax.dot_general`, so nothing is copied."""
    a, b = cases.integers(rng, 4, 8, 8), cases.integers(rng, 4, 8, 8)
    ours, lax_s = (
        compiled_text(functools.partial(f, dimension_numbers=NUMBERS), a, b)
        for f in (jaxmp.dot_general, lax.dot_general)
    )
    assert ours.count(" = ") == lax_s.count(" = ")
