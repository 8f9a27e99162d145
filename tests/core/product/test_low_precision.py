"""Products of fp8, fp4 and int8. Without these tests, a scale could be applied to a wrong row or block in one layout
only, a code could be decoded wrongly, and a sum of integers could be rounded."""

import functools
import itertools

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision_cases import (
    E4M3,
    E5M2,
    F32,
    IMPLEMENTATIONS,
    PATTERNS,
    SCALE_MODES,
    TN,
    by_name,
    make_scale,
    powers,
    products_of,
    saturated,
    scaled,
    small,
    specs_of_scales,
)

import jaxmp
from jaxmp import Scaling, quantize


def drawn(case, mode, rng, rows=None):
    """Returns the case for this mode, (stored operands, scales), and the product of the decoded operands."""
    case = case.replace(transposition="NT", per_shard=(rows or mode.unit, mode.unit, mode.unit))
    m, n, k = case.extents
    a, b = small(rng, (m, k), mode.dtype), small(rng, (n, k), mode.dtype)
    scale_a, scale_b = mode.scales(rng, a.shape, b.shape)
    return case, (a, b, scale_a, scale_b), (scaled(a, scale_a) @ scaled(b, scale_b).T).astype(np.float32)


def check_all(todo, axis_type, **options):
    """Checks products of one layout with scales of many modes."""
    results = products_of([(case, operands, options) for case, operands, _ in todo], axis_type)
    for d, (case, _, want) in zip(results, todo, strict=True):
        np.testing.assert_array_equal(d, want, err_msg=case.id)


@pytest.mark.parametrize("case", [*PATTERNS, *by_name("gather-a", "gather-b")], ids=lambda case: case.name)
def test_every_scale_reaches_its_block(case, rng):
    todo = [drawn(case, mode, rng) for mode in SCALE_MODES]
    # The oracle scales the same logical values; one pattern of each kind is enough for it.
    for implementation in IMPLEMENTATIONS if case.name in ("ag-data", "rs-transposed", "grid") else ("host",):
        check_all(todo, AxisType.Explicit, implementation=implementation, **F32)


@pytest.mark.parametrize("case", by_name("ag", "rs"), ids=lambda case: case.name)
@pytest.mark.parametrize("determinism", ["run_to_run", "topology"])
def test_few_rows_of_several_devices(determinism, case, rng):
    """Devices hold fewer rows than a block; the rows are multiplied together, each with its own device's scales."""
    todo = [drawn(case, mode, rng, 16) for mode in SCALE_MODES if mode.a == "vec128"]
    check_all(todo, AxisType.Explicit, determinism=determinism, **F32)


def call_in_shard_map(case, a, b, scale_a, scale_b, **options):
    in_specs = (*case.stored, *specs_of_scales(case, (scale_a, scale_b)))
    fn = modes.IN_SHARD_MAP[case.pattern](case)

    def body(a, b, scale_a, scale_b):
        return fn(a, b, scaling=Scaling(a=scale_a, b=scale_b), **case.transpose, **options)

    mapped = jax.shard_map(body, mesh=case.jax_mesh(AxisType.Auto), in_specs=in_specs, out_specs=case.out)
    return mapped(a, b, scale_a, scale_b)


@pytest.mark.parametrize("case", by_name("ag-data", "rs", "ar", "grid"), ids=lambda case: case.name)
def test_scales_in_shard_map_and_with_in_shardings(case, rng):
    todo = [drawn(case, SCALE_MODES[i], rng) for i in (1, 3, 5, 7)]
    check_all(todo, AxisType.Auto, **F32)
    program = lambda given: [call_in_shard_map(x[0], *y, **F32) for x, y in zip(todo, given, strict=True)]  # noqa: E731
    for d, (_, _, want) in zip(jax.jit(program)([x[1] for x in todo]), todo, strict=True):
        np.testing.assert_array_equal(d, want)


PLAIN = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


@pytest.mark.small("values", of=lambda out, dtype_a, dtype_b: (out, (dtype_a, dtype_b)))
@pytest.mark.parametrize(("dtype_a", "dtype_b"), PLAIN, ids=lambda t: t.name)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_combination_of_types(out, dtype_a, dtype_b, rng):
    a, b = small(rng, (16, 48), dtype_a), small(rng, (32, 48), dtype_b)
    if out == "float8_e5m2" and E5M2 not in (dtype_a, dtype_b):
        with pytest.raises(NotImplementedError, match="preferred_element_type float8_e5m2 is not available"):
            jaxmp.matmul(a, b, preferred_element_type=out, implementation="host", **TN)
        return
    dtype = np.dtype(jnp.dtype(out))
    want = saturated((scaled(a, None) @ scaled(b, None).T).astype(np.float32), dtype)
    for implementation in IMPLEMENTATIONS:
        d = jaxmp.matmul(a, b, preferred_element_type=out, implementation=implementation, **TN)
        assert d.dtype == dtype
        np.testing.assert_array_equal(np.asarray(d), want)


def test_partitioner_with_scales(rng):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    a, b = small(rng, (128, 512), E4M3), small(rng, (128, 512), E4M3)
    scale_a, scale_b = make_scale(rng, "mx", a.shape), make_scale(rng, "mx", b.shape)
    to = NamedSharding(mesh, P(None, "x"))
    out = NamedSharding(mesh, P())
    d = jax.jit(lambda a, b, s, t: jaxmp.matmul(a, b, scaling=Scaling(a=s, b=t), out_sharding=out, **TN, **F32))(
        *(jax.device_put(x, to) for x in (a, b, scale_a, scale_b))
    )
    np.testing.assert_array_equal(d, scaled(a, scale_a) @ scaled(b, scale_b).T)


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=str)
def test_partitioner_gathers_shards_that_units_do_not_divide(spec, rng):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    a, b = small(rng, (32, 32), E4M3), small(rng, (64, 32), E4M3)
    operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (a, b)]
    scaling = Scaling(a=jnp.float32(2), b=jnp.float32(4))
    d = jax.jit(lambda a, b: jaxmp.matmul(a, b, scaling=scaling, **TN, **F32))(*operands)
    np.testing.assert_array_equal(d, 8 * scaled(a, None) @ scaled(b, None).T)


def test_leading_dimensions(rng):
    case = by_name("rs")[0].replace(transposition="NT")
    mesh = case.jax_mesh(AxisType.Explicit)
    a, b = small(rng, (2, 64, 64), E4M3), small(rng, (32, 64), E4M3)
    scale_a, scale_b = powers(rng, (2, 64)), powers(rng, (32,))
    options = {"out_sharding": P(None, "y", None), **TN, **F32}
    specs = P(None, None, "y"), P(None, "y"), P(), P()
    with jax.set_mesh(mesh):
        placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, scale_a, scale_b), specs, strict=True)]
        d = jax.jit(lambda a, b, s, t: jaxmp.matmul(a, b, scaling=Scaling(a=s, b=t), **options))(*placed)
    want = np.einsum("bmk,nk->bmn", a.astype(np.float32) * scale_a[..., None], b.astype(np.float32) * scale_b[:, None])
    np.testing.assert_array_equal(d, want)


@pytest.mark.small("values")
@pytest.mark.parametrize("kind", ["scalar", "rows", "vec128", "mx", "nv"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_numerics(kind, out, rng):
    quantizers = {
        "scalar": quantize.tensor,
        "rows": quantize.rows,
        "vec128": quantize.vec128,
        "mx": quantize.mxfp8,
        "nv": quantize.nvfp4,
    }
    a, b = (rng.standard_normal((128, 384)).astype(np.float32) for _ in range(2))
    (a, scale_a), (b, scale_b) = quantizers[kind](jnp.asarray(a)), quantizers[kind](jnp.asarray(b))
    wide_a, wide_b = scaled(a, scale_a), scaled(b, scale_b)
    for implementation in IMPLEMENTATIONS:
        d = jaxmp.matmul(
            a, b, scaling=Scaling(a=scale_a, b=scale_b), implementation=implementation, preferred_element_type=out, **TN
        )
        name = f"{kind} {out} {implementation}"
        bounds.judge_product(name, d, wide_a, wide_b.T, operands=jnp.bfloat16, out=jnp.dtype(out))


def test_decoding_and_saturation_over_every_code():
    """Multiplies each code by 1: subnormal numbers, both zeros, NaN and infinities keep their meaning."""
    for dtype in (E4M3, E5M2):
        codes = np.arange(256, dtype=np.uint8).view(dtype).reshape(16, 16)
        one = np.eye(16).astype(E4M3)
        for implementation in IMPLEMENTATIONS:
            finite = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros((), dtype))
            d = jaxmp.matmul(finite, one, implementation=implementation, **TN, **F32)
            np.testing.assert_array_equal(d, finite.astype(np.float32))
            bad = jaxmp.matmul(codes, one, implementation=implementation, **TN, **F32)
            rows = ~np.isfinite(codes.astype(np.float32)).all(1)
            assert np.isnan(np.asarray(bad)[rows]).any(1).all()
    big = np.full((16, 16), 448, E4M3)
    for implementation, (dtype, most) in itertools.product(IMPLEMENTATIONS, ((E4M3, 448), (E5M2, 57344))):
        other = big.astype(dtype)
        d = jaxmp.matmul(big, other, implementation=implementation, preferred_element_type=dtype, **TN)
        np.testing.assert_array_equal(np.asarray(d).astype(np.float32), most)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_shards_of_extents_without_a_kernel(axis_type, mesh_of, rng):
    """Kernels take the extents of the whole operands, but not of a device's shards."""
    a, b, bias = (rng.integers(-2, 3, shape).astype(E4M3) for shape in ((16, 32), (16, 32), (16,)))
    want = a.astype(np.float32) @ b.astype(np.float32).T
    einsums = (functools.partial(m.einsum, "mk,nk->mn", preferred_element_type="float32") for m in (jaxmp, jnp))
    products = [next(einsums), jaxmp.fuse(next(einsums))]
    linear = functools.partial(jaxmp.linear, activation="relu", transpose_b=True)
    with jax.set_mesh(mesh_of({"x": 4}, axis_type)):
        for specs in ((P("x"), P(), P("x")), (P(), P("x"), P(None, "x")), (P(None, "x"), P(None, "x"), P("x"))):
            ab, out = [jax.device_put(x, spec) for x, spec in zip((a, b), specs[:2], strict=True)], specs[2]
            where = {"out_sharding": out} if axis_type == AxisType.Explicit else {}
            for product in products:
                np.testing.assert_array_equal(jax.jit(functools.partial(product, **where))(*ab), want)
            where = where or {"in_shardings": specs[:2], "out_sharding": out}
            for dtype in ("float32", "float16", E4M3):
                of_d = "bfloat16" if dtype == "float32" else "float16"
                layer = functools.partial(linear, preferred_element_type=dtype, **where)
                d = jax.jit(layer)(*ab, bias.astype(of_d))
                exact = np.maximum(want + bias.astype(np.float32), 0)
                assert d.dtype == dtype
                np.testing.assert_array_equal(np.asarray(d, np.float32), exact.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("m", "k"), [(0, 32), (16, 0)])
def test_empty_operands(m, k, implementation):
    a, b = np.zeros((m, k), E4M3), np.zeros((32, k), E4M3)
    d, more = jaxmp.matmul(
        a, b, scaling=Scaling(a=np.float32(2), result_amax=True), preferred_element_type=E4M3,
        implementation=implementation, **TN,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(d).astype(np.float32), np.zeros((m, 32)))
    assert float(more["result_amax"]) == 0
    integers = jaxmp.matmul(a.astype(np.int8), b.astype(np.int8), implementation=implementation, **TN)
    np.testing.assert_array_equal(integers, np.zeros((m, 32), np.int8))


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case.name)
def test_int8_is_exact(case, rng):
    calls, wanted = [], []
    for transposition, dtype in itertools.product(cases.TRANSPOSITIONS, ("int32", None)):
        each = case.replace(transposition=transposition, per_shard=(3, 5, 7))
        m, n, k = each.extents
        a, b = rng.integers(-128, 128, (m, k), np.int8), rng.integers(-128, 128, (k, n), np.int8)
        stored = [np.ascontiguousarray(x.T) if t == "T" else x for x, t in zip((a, b), transposition, strict=True)]
        for implementation in IMPLEMENTATIONS if transposition == "NN" else (None,):
            options = {"preferred_element_type": dtype, "implementation": implementation}
            calls.append((each, (*stored, None, None), options))
            wanted.append((a.astype(np.int32) @ b.astype(np.int32)).astype(dtype or np.int8))
    for got, want in zip(products_of(calls), wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_long_sums_and_overflow(implementation, rng):
    """Sums beyond 2^24 stay exact; sums beyond 2^31 wrap modulo 2^32, as in XLA."""
    a, b = rng.integers(-128, 128, (3, 5000), np.int8), np.full((5000, 2), -128, np.int8)
    c = rng.integers(-(2**31), 2**31, (3, 2), np.int32)
    want = 1000 * (a.astype(np.int64) @ b.astype(np.int64)) - 3 * c.astype(np.int64)
    d = jaxmp.matmul(a, b, c, alpha=1000, beta=-3, implementation=implementation)
    np.testing.assert_array_equal(d, want.astype(np.uint64).astype(np.uint32).view(np.int32))
    a, b = (rng.integers(100, 128, shape, np.int8) for shape in ((3, 5000), (5000, 2)))
    d = jaxmp.matmul(a, b, preferred_element_type="int32", implementation=implementation)
    np.testing.assert_array_equal(d, a.astype(np.int64) @ b.astype(np.int64))
