"""fp8, fp4 and int8: without these a scale could be applied to another row or block than it belongs to, on one layout
only; a result could overflow instead of saturating; an amax could be one rank's; and a wrong transposition, shape or
type could pass unseen.

Placement is tested by small integers and scales that are powers of two, of which every sum is exact; numerics by the
bound of `bounds`, with float64 products of the decoded operands.
"""

import dataclasses
import functools
import itertools

import bounds
import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import modes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, Scales, quantize, testing

E4M3, E5M2, FP4, E8M0 = (
    np.dtype(t)
    for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu)
)
TN = {"transpose_b": True}
F32 = {"preferred_element_type": jnp.float32}
IMPLEMENTATIONS = ("host", "xla")


def by_name(*names):
    return [case for case in cases.CASES if case.name in names]


def small(rng, shape, dtype):
    """Non-zero integers up to 3, which every narrow type holds."""
    return (rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def powers(rng, shape, dtype=np.float32):
    return np.exp2(rng.integers(-2, 3, shape)).astype(dtype)


# Scales ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mode:
    """A pair of scale modes: how a's and b's scales look for an operand of shape (rows, k), and the operands' type."""

    id: str
    a: str
    b: str
    dtype: np.dtype = E4M3
    unit: int = 16  # of m, n and k on each device

    def scales(self, rng, a_shape, b_shape):
        return [make_scale(rng, kind, shape) for kind, shape in ((self.a, a_shape), (self.b, b_shape))]


def make_scale(rng, kind, shape):
    rows, k = shape
    if kind == "none":
        return None
    shapes = {"scalar": (), "rows": (rows,), "vec128": (rows, k // 128), "blk128": (-(-rows // 128), k // 128)}
    if kind == "mx":
        return powers(rng, (rows, k // 32), E8M0)
    if kind == "nv":
        return powers(rng, (rows, k // 16), E4M3)
    return powers(rng, shapes[kind])


def scaled(x, scale):
    """x times its scales in float64, by the definition of each mode."""
    wide = np.asarray(x).astype(np.float64)
    if scale is None:
        return wide
    scale = np.asarray(scale).astype(np.float64)
    if scale.ndim == 1:
        return wide * scale[:, None]
    if scale.ndim == 2:
        row_block, col_block = -(-x.shape[0] // scale.shape[0]), x.shape[1] // scale.shape[1]
        row_block = 128 if row_block > 1 else 1
        scale = np.repeat(np.repeat(scale, row_block, 0)[: x.shape[0]], col_block, 1)
    return wide * scale


SCALE_MODES = [
    Mode("none", "none", "none"),
    Mode("scalar", "scalar", "scalar"),
    Mode("scalar-of-a", "scalar", "none"),
    Mode("rows", "rows", "rows"),
    Mode("vec128", "vec128", "vec128", unit=128),
    Mode("vec128-blk128", "vec128", "blk128", unit=128),
    Mode("blk128-vec128", "blk128", "vec128", unit=128),
    Mode("mxfp8", "mx", "mx", unit=128),
    Mode("nvfp4", "nv", "nv", FP4, 128),
]


def spec_of_scale(scale, spec):
    """How a scale is sharded beside an operand that is sharded so."""
    return P(*tuple(spec)[: np.ndim(scale)])


def call_sharded(case, a, b, scale_a, scale_b, axis_type, **options):
    mesh = case.jax_mesh(axis_type)
    spec_a, spec_b = case.stored
    placed = [cases.put(a, mesh, spec_a), cases.put(b, mesh, spec_b)]
    placed += [
        None if scale is None else cases.put(scale, mesh, spec_of_scale(scale, spec))
        for scale, spec in ((scale_a, spec_a), (scale_b, spec_b))
    ]
    flags = case.transpose | options
    if axis_type == AxisType.Auto:
        flags |= {"in_shardings": case.stored, "mesh": mesh}

    @jax.jit
    def program(a, b, scale_a, scale_b):
        return jaxmp.matmul(a, b, scales=Scales(a=scale_a, b=scale_b), out_sharding=case.out, **flags)

    with jax.set_mesh(mesh):
        return program(*placed)


def call_in_shard_map(case, a, b, scale_a, scale_b, **options):
    spec_a, spec_b = case.stored
    given = [(scale_a, spec_a), (scale_b, spec_b)]
    in_specs = (spec_a, spec_b, *(P() if scale is None else spec_of_scale(scale, spec) for scale, spec in given))
    fn = modes.IN_SHARD_MAP[case.pattern](case)

    def body(a, b, scale_a, scale_b):
        return fn(a, b, scales=Scales(a=scale_a, b=scale_b), **case.transpose, **options)

    mapped = jax.shard_map(body, mesh=case.jax_mesh(AxisType.Auto), in_specs=in_specs, out_specs=case.out)
    return jax.jit(mapped)(a, b, scale_a, scale_b)


PATTERNS = by_name("local", "ag", "ag-data", "ag-swapped", "rs", "rs-data", "rs-swapped", "ar", "ar-data", "grid")


@pytest.mark.parametrize("case", [*PATTERNS, *by_name("gather-a", "gather-b")], ids=lambda case: case.name)
@pytest.mark.parametrize("mode", SCALE_MODES, ids=lambda mode: mode.id)
def test_every_scale_reaches_its_block(mode, case, rng):
    case = case.replace(transposition="NT", per_shard=(mode.unit,) * 3)
    m, n, k = case.extents
    a, b = small(rng, (m, k), mode.dtype), small(rng, (n, k), mode.dtype)
    scale_a, scale_b = mode.scales(rng, a.shape, b.shape)
    want = (scaled(a, scale_a) @ scaled(b, scale_b).T).astype(np.float32)
    # The oracle computes from the same logical scales; one pattern of each kind is enough for it.
    implementations = IMPLEMENTATIONS if case.name in ("ag", "rs-swapped", "grid") else ("host",)
    for implementation in implementations:
        d = call_sharded(case, a, b, scale_a, scale_b, AxisType.Explicit, implementation=implementation, **F32)
        np.testing.assert_array_equal(d, want)


@pytest.mark.parametrize("case", by_name("ag-data", "rs", "ar", "grid"), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [SCALE_MODES[i] for i in (1, 3, 5, 7)], ids=lambda mode: mode.id)
def test_scales_in_shard_map_and_with_in_shardings(mode, case, rng):
    case = case.replace(transposition="NT", per_shard=(mode.unit,) * 3)
    m, n, k = case.extents
    a, b = small(rng, (m, k), mode.dtype), small(rng, (n, k), mode.dtype)
    scale_a, scale_b = mode.scales(rng, a.shape, b.shape)
    want = (scaled(a, scale_a) @ scaled(b, scale_b).T).astype(np.float32)
    np.testing.assert_array_equal(call_in_shard_map(case, a, b, scale_a, scale_b, **F32), want)
    np.testing.assert_array_equal(call_sharded(case, a, b, scale_a, scale_b, AxisType.Auto, **F32), want)


PLAIN = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


@pytest.mark.parametrize(("dtype_a", "dtype_b"), PLAIN, ids=lambda t: t.name)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_combination_of_types(out, dtype_a, dtype_b, rng):
    a, b = small(rng, (16, 48), dtype_a), small(rng, (32, 48), dtype_b)
    if out == "float8_e5m2" and E5M2 not in (dtype_a, dtype_b):
        with pytest.raises(NotImplementedError, match="preferred_element_type float8_e5m2 is not available"):
            jaxmp.matmul(a, b, preferred_element_type=out, **TN)
        return
    dtype = np.dtype(jnp.dtype(out))
    want = saturated((scaled(a, None) @ scaled(b, None).T).astype(np.float32), dtype)
    for implementation in IMPLEMENTATIONS:
        d = jaxmp.matmul(a, b, preferred_element_type=out, implementation=implementation, **TN)
        assert d.dtype == dtype
        np.testing.assert_array_equal(np.asarray(d), want)


@pytest.mark.parametrize(("mode", "case"), modes.pairs(modes.MODES, by_name("local", "ag", "rs", "ar", "grid")))
def test_every_way_to_call(mode, case, rng):
    dtype_a, dtype_b = PLAIN[cases.CASES.index(case) % len(PLAIN)]
    case = case.replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), dtype_a), small(rng, (n, k), dtype_b)
    with mode.scope(case):
        spec_a, spec_b = case.stored
        d = mode.run(mode.product(case, **F32), mode.put(case, a, spec_a), mode.put(case, b, spec_b))
    np.testing.assert_array_equal(d, scaled(a, None).astype(np.float32) @ scaled(b, None).astype(np.float32).T)


def test_partitioner_with_scales(rng):
    """A bare jit over auto axes: XLA hands over the shardings of the operands, and the scales follow."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    a, b = small(rng, (128, 512), E4M3), small(rng, (128, 512), E4M3)
    scale_a, scale_b = make_scale(rng, "mx", a.shape), make_scale(rng, "mx", b.shape)
    to = NamedSharding(mesh, P(None, "x"))
    out = NamedSharding(mesh, P())
    d = jax.jit(lambda a, b, s, t: jaxmp.matmul(a, b, scales=Scales(a=s, b=t), out_sharding=out, **TN, **F32))(
        *(jax.device_put(x, to) for x in (a, b, scale_a, scale_b))
    )
    np.testing.assert_array_equal(d, scaled(a, scale_a) @ scaled(b, scale_b).T)


def test_partitioner_with_a_float8_aux(rng):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    a, b = small(rng, (64, 64), E4M3), small(rng, (32, 64), E4M3)
    rows = NamedSharding(mesh, P("x", None))
    options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX, "aux_dtype": E4M3, "aux_amax": True}
    _, more = jax.jit(lambda a, b: jaxmp.matmul(a, b, scales=Scales(aux=jnp.float32(0.5)), **options, **TN))(
        jax.device_put(a, rows), jax.device_put(b, NamedSharding(mesh, P()))
    )
    z = scaled(a, None) @ scaled(b, None).T
    np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), saturated((z / 2).astype(np.float32), E4M3))
    assert float(more["gelu_aux_amax"]) == np.abs(z).max()


def test_leading_dimensions(rng):
    case = by_name("rs")[0].replace(transposition="NT")
    mesh = case.jax_mesh(AxisType.Explicit)
    a, b = small(rng, (2, 64, 64), E4M3), small(rng, (32, 64), E4M3)
    scale_a, scale_b = powers(rng, (2, 64)), powers(rng, (32,))
    with jax.set_mesh(mesh):
        placed = [
            cases.put(x, mesh, P(*spec))
            for x, spec in ((a, (None, None, "y")), (b, (None, "y")), (scale_a, ()), (scale_b, ()))
        ]
        d = jax.jit(
            lambda a, b, s, t: jaxmp.matmul(a, b, scales=Scales(a=s, b=t), out_sharding=P(None, "y", None), **TN, **F32)
        )(*placed)
    want = np.einsum("bmk,nk->bmn", a.astype(np.float32) * scale_a[..., None], b.astype(np.float32) * scale_b[:, None])
    np.testing.assert_array_equal(d, want)


# Results --------------------------------------------------------------------------------------------------------


def saturated(x, dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype)


@pytest.mark.parametrize(
    ("case", "implementation"), [*((case, "host") for case in PATTERNS), *((case, "xla") for case in PATTERNS[1::3])]
)
def test_float8_result_and_the_global_amax(case, implementation, rng):
    """d saturates; amax is the largest value of all ranks, ahead of d's scale."""
    case = case.replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)
    a[-1], b[-1] = 3, 3  # the largest value is on the last rank, and beyond 448
    want = scaled(a, None) @ scaled(b, None).T * 4
    spec_a, spec_b = case.stored
    mesh = case.jax_mesh(AxisType.Explicit)

    @jax.jit
    def program(a, b, scale, scale_d):
        scales = Scales(a=scale, b=scale, d=scale_d)
        options = {"out_sharding": case.out, "result_amax": True, "implementation": implementation}
        return jaxmp.matmul(a, b, scales=scales, preferred_element_type=E4M3, **TN, **options)

    with jax.set_mesh(mesh):
        two = cases.put(np.float32(2), mesh, P())
        d, more = program(cases.put(a, mesh, spec_a), cases.put(b, mesh, spec_b), two, two)
    assert d.dtype == E4M3
    np.testing.assert_array_equal(np.asarray(d), saturated(2 * want, E4M3))
    assert np.abs(2 * want).max() > 448
    assert more["result_amax"].shape == ()
    assert float(more["result_amax"]) == np.abs(want).max()


def test_amax_in_shard_map_is_that_of_the_group(rng):
    case = by_name("rs-data")[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)

    def body(a, b):
        d, more = jaxmp.matmul_reduce_scatter(a, b, "y", preferred_element_type=E4M3, result_amax=True, **TN)
        return d, more["result_amax"][None]

    spec_a, spec_b = case.stored
    mapped = jax.shard_map(
        body, mesh=case.jax_mesh(AxisType.Auto), in_specs=(spec_a, spec_b), out_specs=(case.out, P("x"))
    )
    _, amax = jax.jit(mapped)(a, b)
    halves = np.abs(scaled(a, None) @ scaled(b, None).T).reshape(2, -1)
    np.testing.assert_array_equal(amax, halves.max(1))


@pytest.mark.parametrize("name", ["ag", "rs", "ar", "ag-swapped"])
@pytest.mark.parametrize("kind", ["mx", "nv"])
def test_block_scaled_results(kind, name, rng):
    """d and the scales of its blocks, bit for bit alike on "host" and "xla", and within a block's rounding of d."""
    case = by_name(name)[0].replace(transposition="NT", per_shard=(128, 128, 128))
    m, n, k = case.extents
    dtype = E4M3 if kind == "mx" else FP4
    a, b = small(rng, (m, k), dtype), small(rng, (n, k), dtype)
    scale_a, scale_b = make_scale(rng, kind, a.shape), make_scale(rng, kind, b.shape)
    want = scaled(a, scale_a) @ scaled(b, scale_b).T
    got = {}
    for implementation in IMPLEMENTATIONS:
        options = {"preferred_element_type": dtype, "implementation": implementation, "alpha": 0.125}
        d, more = call_sharded(case, a, b, scale_a, scale_b, AxisType.Explicit, **options)
        got[implementation] = np.asarray(d), np.asarray(more["d_out_scale"])
    for host, xla in zip(got["host"], got["xla"], strict=True):
        np.testing.assert_array_equal(host, xla)
    stored, scales = got["host"]
    assert scales.dtype == (E8M0 if kind == "mx" else E4M3)
    size = 32 if kind == "mx" else 16
    assert scales.shape == (m, n // size)
    amax = np.abs(want * 0.125).reshape(m, -1, size).max(-1)
    # Half a unit of the largest binade of the type, and what the scale's own rounding adds.
    most = float(ml_dtypes.finfo(dtype).max)
    allowed = np.repeat(amax * (2 * 16 / most if kind == "mx" else (1 / most + 0.0625)), size, axis=1) + 1e-6
    bounds.judge(f"{kind} blocks", scaled(stored, scales), want * 0.125, allowed)


@pytest.mark.parametrize("kind", ["scalar", "rows", "vec128", "mx", "nv"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_numerics(kind, out, rng):
    """Random operands: what decoding, scaling and storing may round, and no more."""
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
            a, b, scales=Scales(a=scale_a, b=scale_b), implementation=implementation, preferred_element_type=out, **TN
        )
        name = f"{kind} {out} {implementation}"
        bounds.judge_product(name, d, wide_a, wide_b.T, operands=jnp.bfloat16, out=jnp.dtype(out))


EPILOGS = [Epilog.BIAS, Epilog.RELU, Epilog.RELU_BIAS, Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("epilog", EPILOGS, ids=lambda e: e.name)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float8_e4m3fn"])
def test_epilogs_and_c(out, epilog, implementation, rng):
    side = {"float32": jnp.bfloat16, "float8_e4m3fn": jnp.float16}.get(out, jnp.dtype(out))
    c_dtype = jnp.float32 if out == "float32" else side
    a, b = small(rng, (32, 64), E4M3), small(rng, (48, 64), E4M3)
    c, bias = jnp.asarray(small(rng, (32, 48), np.float32), c_dtype), jnp.asarray(small(rng, 48, np.float32), side)
    row = {} if epilog == Epilog.RELU else {"epilog_inputs": {"bias": bias}}
    d = jaxmp.matmul(
        a, b, c, alpha=0.25, beta=0.5, epilog=epilog, preferred_element_type=out, implementation=implementation,
        scales=Scales(a=jnp.float32(2), c=jnp.float32(2)), **TN, **row,
    )  # fmt: skip
    d, aux = d if isinstance(d, tuple) else (d, {})
    z = 0.5 * scaled(a, None) @ scaled(b, None).T + np.asarray(c).astype(np.float64)
    z = z + (np.asarray(bias).astype(np.float64) if row else 0)
    if epilog == Epilog.GELU_AUX_BIAS:
        judge_gelu(d, z, out)
        # Sums of small integers are exact; of a float8 result the aux has the type of c.
        want = z.astype(np.float32).astype(side if out == "float8_e4m3fn" else jnp.dtype(out))
        assert aux["gelu_aux"].dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(aux["gelu_aux"]), want)
        return
    want = z if epilog == Epilog.BIAS else np.maximum(z, 0)
    np.testing.assert_array_equal(np.asarray(d), saturated(want.astype(np.float32), np.dtype(jnp.dtype(out))))


def judge_gelu(d, z, out):
    """d against gelu of the exact z, rounded to a type whose smallest numbers are not normal, and saturated."""
    want = z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2
    want = np.clip(want, -float(jnp.finfo(out).max), float(jnp.finfo(out).max))
    finest = float(jnp.finfo(out).smallest_subnormal) / 2
    bounds.judge("gelu", d, want, 8 * (bounds.unit_roundoff(out) * np.abs(want) + 2.0**-24 * (1 + np.abs(z))) + finest)


@pytest.mark.parametrize(
    ("case", "implementation"), [*((case, "host") for case in PATTERNS), *((case, "xla") for case in PATTERNS[1::3])]
)
def test_float8_aux_and_its_global_amax(case, implementation, rng):
    """gelu_aux is z times its own scale, saturated; the amax is the largest |z| of all ranks, ahead of that scale."""
    case = case.replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)
    a[-1], b[-1] = 3, -3  # the largest value is on the last rank, and scaled it is beyond 448
    z = scaled(a, None) @ scaled(b, None).T / 8
    spec_a, spec_b = case.stored
    mesh = case.jax_mesh(AxisType.Explicit)

    @jax.jit
    def program(a, b, scale, scale_aux):
        return jaxmp.matmul(
            a, b, alpha=0.5, scales=Scales(a=scale, d=scale, aux=scale_aux), preferred_element_type=E4M3,
            epilog=Epilog.GELU_AUX, aux_dtype=jnp.float8_e4m3fn, aux_amax=True, result_amax=True,
            out_sharding=case.out, implementation=implementation, **TN,
        )  # fmt: skip

    with jax.set_mesh(mesh):
        scalars = (cases.put(np.float32(x), mesh, P()) for x in (0.25, 64))
        d, more = program(cases.put(a, mesh, spec_a), cases.put(b, mesh, spec_b), *scalars)
    assert set(more) == {"gelu_aux", "gelu_aux_amax", "result_amax"}
    assert more["gelu_aux"].dtype == E4M3
    assert np.abs(64 * z).max() > 448
    np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), saturated((64 * z).astype(np.float32), E4M3))
    assert more["gelu_aux_amax"].shape == ()
    assert float(more["gelu_aux_amax"]) == np.abs(z).max() == -z.min()
    assert d.dtype == E4M3
    assert float(more["result_amax"]) < float(more["gelu_aux_amax"])  # that of gelu, which lets no -z through
    for x in more["gelu_aux"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(x.data), np.asarray(more["gelu_aux"])[x.index])


@pytest.mark.parametrize("c_dtype", [None, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_gelu_aux_of_a_float8_result_has_the_type_of_c(out, c_dtype, rng):
    a, b = small(rng, (32, 64), E4M3), small(rng, (48, 64), E5M2)
    c = None if c_dtype is None else jnp.asarray(small(rng, (32, 48), np.float32), c_dtype)
    z = scaled(a, None) @ scaled(b, None).T / 8 + (0 if c is None else np.asarray(c).astype(np.float64))
    for implementation in IMPLEMENTATIONS:
        options = {"preferred_element_type": out, "implementation": implementation, "epilog": Epilog.GELU_AUX}
        options |= {} if c is None else {"c": c, "beta": 1.0}
        d, more = jaxmp.matmul(a, b, alpha=0.125, **options, **TN)
        judge_gelu(d, z, out)
        np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), z.astype(c_dtype or np.float16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gelu_aux_beside_a_block_scaled_result(implementation, rng):
    a, b = small(rng, (128, 128), E4M3), small(rng, (256, 128), E4M3)
    scale_a, scale_b = make_scale(rng, "mx", a.shape), make_scale(rng, "mx", b.shape)
    z = scaled(a, scale_a) @ scaled(b, scale_b).T / 8
    d, more = jaxmp.matmul(
        a, b, alpha=0.125, scales=Scales(a=scale_a, b=scale_b), preferred_element_type=E4M3,
        epilog=Epilog.GELU_AUX, implementation=implementation, **TN,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), z.astype(np.float16))
    want = z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2
    amax = np.repeat(np.abs(want).reshape(128, -1, 32).max(-1), 32, axis=1)
    bounds.judge("blocks", scaled(d, more["d_out_scale"]), want, amax * (2 * 16 / 448) + 2.0**-20)


def test_float8_aux_in_shard_map_under_vmap_and_of_nothing(rng):
    case = by_name("rs-data")[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)
    options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX, "aux_dtype": E4M3, "aux_amax": True}

    def body(a, b):
        d, more = jaxmp.matmul_reduce_scatter(a, b, "y", **options, **TN)
        return d, more["gelu_aux_amax"][None]

    mapped = jax.shard_map(body, mesh=case.jax_mesh(AxisType.Auto), in_specs=case.stored, out_specs=(case.out, P("x")))
    halves = np.abs(scaled(a, None) @ scaled(b, None).T).reshape(2, -1)
    np.testing.assert_array_equal(jax.jit(mapped)(a, b)[1], halves.max(1))

    rows = a.reshape(2, m // 2, k)
    d, more = jax.jit(jax.vmap(lambda a: jaxmp.matmul(a, b, **options, **TN)))(rows)
    np.testing.assert_array_equal(more["gelu_aux_amax"], halves.max(1))
    each = [jaxmp.matmul(x, b, **options, **TN) for x in rows]
    for i, (d_of_row, more_of_row) in enumerate(each):
        np.testing.assert_array_equal(np.asarray(d[i]), np.asarray(d_of_row))
        np.testing.assert_array_equal(np.asarray(more["gelu_aux"][i]), np.asarray(more_of_row["gelu_aux"]))

    for shape in ((0, 32), (16, 0)):
        for implementation in IMPLEMENTATIONS:
            empty = np.zeros(shape, E4M3), np.zeros((32, shape[1]), E4M3)
            d, more = jaxmp.matmul(*empty, implementation=implementation, **options, **TN)
            assert more["gelu_aux"].shape == d.shape == (shape[0], 32)
            assert float(more["gelu_aux_amax"]) == 0


@pytest.mark.parametrize("aux_dtype", [None, E4M3])
def test_gradients_through_gelu_aux(aux_dtype, rng):
    """Its rounding counts as nothing: d and gelu_aux have the derivatives of gelu(z) and of z times its scale."""
    a, b = small(rng, (16, 32), E4M3), small(rng, (32, 32), E4M3)
    weights = [powers(rng, (16, 32)) for _ in range(2)]
    scale_of_aux = jnp.float32(0.5) if aux_dtype else jnp.float32(1)

    def ours(s, t):
        scales = Scales(a=s, aux=t if aux_dtype else None)
        options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX, "aux_dtype": aux_dtype}
        d, more = jaxmp.matmul(a, b, alpha=2.0**-5, scales=scales, **options, **TN)
        return sum(jnp.sum(x.astype(jnp.float32) * w) for x, w in zip((d, more["gelu_aux"]), weights, strict=True))

    def plain(s, t):
        z = 2.0**-5 * (s * a.astype(jnp.float32)) @ b.astype(jnp.float32).T
        return jnp.sum(jax.nn.gelu(z) * weights[0]) + jnp.sum(z * t * weights[1])

    got = jax.grad(ours, (0, 1))(jnp.float32(0.5), scale_of_aux)
    want = jax.grad(plain, (0, 1))(jnp.float32(0.5), scale_of_aux)
    size = float(sum(np.abs(w).sum() for w in weights)) * 32 * 9 * 2.0**-5
    for name, g, w in zip(("scale of a", "scale of the aux"), got, want, strict=True):
        if aux_dtype or name == "scale of a":
            # Sums over all elements, of cotangents that were cast to float8: their powers of two stay.
            bounds.judge(name, g, w, 8 * bounds.unit_roundoff("float32") * size)


def test_explain_names_the_type_of_the_aux(rng, capsys):
    a, b = small(rng, (16, 32), E4M3), small(rng, (32, 32), E4M3)
    options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX, "aux_dtype": E4M3}
    (row,) = jaxmp.explain(lambda a, b: jaxmp.matmul(a, b, **options, **TN))(a, b).rows
    assert row.dtypes == "float8_e4m3fn x float8_e4m3fn -> float8_e4m3fn"
    options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX}
    (row,) = jaxmp.explain(lambda a, b: jaxmp.matmul(a, b, **options, **TN))(a, b).rows
    assert row.dtypes == "float8_e4m3fn x float8_e4m3fn -> float8_e4m3fn, gelu_aux float16"
    capsys.readouterr()


def test_decoding_and_saturation_over_every_code():
    """Each code times 1, through the call: subnormal numbers, both zeros, NaN and infinities keep their meaning."""
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("m", "k"), [(0, 32), (16, 0)])
def test_empty_operands(m, k, implementation):
    a, b = np.zeros((m, k), E4M3), np.zeros((32, k), E4M3)
    d, more = jaxmp.matmul(
        a, b, scales=Scales(a=np.float32(2)), preferred_element_type=E4M3, result_amax=True,
        implementation=implementation, **TN,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(d).astype(np.float32), np.zeros((m, 32)))
    assert float(more["result_amax"]) == 0
    integers = jaxmp.matmul(a.astype(np.int8), b.astype(np.int8), implementation=implementation, **TN)
    np.testing.assert_array_equal(integers, np.zeros((m, 32), np.int32))


# int8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case.name)
@pytest.mark.parametrize("transposition", ["NN", "TN", "NT", "TT"])
def test_int8_is_exact(transposition, case, rng):
    case = case.replace(transposition=transposition, per_shard=(3, 5, 7))
    m, n, k = case.extents
    a, b = rng.integers(-128, 128, (m, k), np.int8), rng.integers(-128, 128, (k, n), np.int8)
    want = a.astype(np.int32) @ b.astype(np.int32)
    stored = [np.ascontiguousarray(x.T) if t == "T" else x for x, t in zip((a, b), transposition, strict=True)]
    mesh = case.jax_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = [cases.put(x, mesh, spec) for x, spec in zip(stored, case.stored, strict=True)]
        for implementation in IMPLEMENTATIONS if transposition == "NN" else ("host",):
            d = jaxmp.matmul(*placed, out_sharding=case.out, implementation=implementation, **case.transpose)
            assert d.dtype == jnp.int32
            np.testing.assert_array_equal(d, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_long_sums_and_overflow(implementation, rng):
    """Beyond 2^24 sums stay exact; beyond 2^31 they go on modulo 2^32, as XLA's do."""
    a, b = rng.integers(-128, 128, (3, 5000), np.int8), np.full((5000, 2), -128, np.int8)
    c = rng.integers(-(2**31), 2**31, (3, 2), np.int32)
    want = 1000 * (a.astype(np.int64) @ b.astype(np.int64)) - 3 * c.astype(np.int64)
    d = jaxmp.matmul(a, b, c, alpha=1000, beta=-3, implementation=implementation)
    np.testing.assert_array_equal(d, want.astype(np.uint64).astype(np.uint32).view(np.int32))


# Transformations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["local", "ag", "rs", "ar", "ag-swapped", "rs-swapped", "gather-a", "gather-b"])
def test_gradients(name, out, rng):
    """Against the same product of decoded operands: of a and b in their own type, of c, the bias and the scales."""
    case = by_name(name)[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)
    weight = small(rng, (m, n), np.float32)
    mesh = case.jax_mesh(AxisType.Explicit)

    def ours(a, b, s, t, weight):
        scales = Scales(a=s, b=t)
        d = jaxmp.matmul(a, b, scales=scales, out_sharding=case.out, preferred_element_type=out, **TN)
        return jnp.sum(d.astype(jnp.float32) * weight)

    def plain(a, b, s, t, weight):
        return jnp.sum((a.astype(jnp.float32) * s) @ (b.astype(jnp.float32) * t).T * weight)

    s, t = np.float32(0.5), np.float32(0.25)
    with jax.set_mesh(mesh):
        specs = (*case.stored, P(), P(), case.out)
        placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, s, t, weight), specs, strict=True)]
        got = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(*placed)
    want = jax.grad(plain, (0, 1, 2, 3))(a, b, s, t, weight)
    for x, g, w in zip((a, b, s, t), got, want, strict=True):
        assert g.dtype == x.dtype
        # Small integers times powers of two: exact until the cast to the operand's type.
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def test_derivatives_take_no_hint_that_is_not_theirs(rng):
    """Partial sums of a bfloat16 result may travel in bfloat16, those of its float32 derivatives may not."""
    case = by_name("rs")[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)

    def loss(s, **hint):
        where = {"in_shardings": case.stored, "out_sharding": case.out, "mesh": case.jax_mesh(AxisType.Auto)}
        d = jaxmp.matmul(a, b, scales=Scales(a=s), preferred_element_type=jnp.bfloat16, **TN, **where, **hint)
        return jnp.sum(d.astype(jnp.float32))

    at = (jnp.float32(0.5),), (jnp.float32(1),)
    hinted = jax.jvp(lambda s: loss(s, communication_dtype=jnp.bfloat16), *at)
    assert hinted == jax.jvp(loss, *at)


def test_gradients_of_c_bias_and_block_scaled_operands(rng):
    a, b = small(rng, (128, 128), E4M3), small(rng, (128, 128), E4M3)
    scale = make_scale(rng, "mx", a.shape)
    rows = powers(rng, (128,))
    c, bias = small(rng, (128, 128), np.float32), small(rng, 128, ml_dtypes.bfloat16)

    def of_blocks(a, c, bias):
        inputs = {"epilog_inputs": {"bias": bias}, "epilog": Epilog.RELU_BIAS}
        return jnp.sum(jaxmp.matmul(a, b, c, beta=2.0, scales=Scales(a=scale, b=scale), **inputs, **TN, **F32))

    def of_rows(rows):
        return jnp.sum(jaxmp.matmul(a, b, scales=Scales(a=rows, b=rows), **TN, **F32))

    full = np.repeat(scale.astype(np.float32), 32, axis=1)

    def plain(a, c, bias):
        z = (a.astype(jnp.float32) * full) @ scaled(b, scale).astype(np.float32).T
        return jnp.sum(jax.nn.relu(z + 2.0 * c + bias.astype(jnp.float32)[None]))

    for g, w in zip(jax.grad(of_blocks, (0, 1, 2))(a, c, bias), jax.grad(plain, (0, 1, 2))(a, c, bias), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g).astype(np.float32), np.asarray(w).astype(np.float32))
    wide = a.astype(np.float32), b.astype(np.float32)
    want = jax.grad(lambda rows: jnp.sum((wide[0] * rows[:, None]) @ (wide[1] * rows[:, None]).T))(rows)
    bounds.judge("rows", jax.grad(of_rows)(rows), want, 1e-5 * np.abs(want) + 1e-2)


def test_vmap(rng):
    a, b = small(rng, (3, 128, 128), E4M3), small(rng, (128, 128), E4M3)
    scale_a, scale_b = powers(rng, (3,)), powers(rng, (128, 4), E8M0)
    blocks = powers(rng, (3, 128, 4), E8M0)

    def with_scalar(a, s):
        options = {"preferred_element_type": E4M3, "result_amax": True, "alpha": 2.0**-6}
        return jaxmp.matmul(a, b, scales=Scales(a=s), **TN, **options)

    d, more = jax.jit(jax.vmap(with_scalar))(a, scale_a)
    each = [with_scalar(x, s) for x, s in zip(a, scale_a, strict=True)]
    np.testing.assert_array_equal(np.asarray(d), np.stack([np.asarray(x) for x, _ in each]))
    np.testing.assert_array_equal(more["result_amax"], np.stack([y["result_amax"] for _, y in each]))
    got = jax.vmap(lambda a, s: jaxmp.matmul(a, b, scales=Scales(a=s, b=scale_b), **TN, **F32))(a, blocks)
    want = np.stack([scaled(x, s) @ scaled(b, scale_b).T for x, s in zip(a, blocks, strict=True)])
    np.testing.assert_array_equal(got, want)


def test_linear_and_explain(rng, capsys):
    x, w = small(rng, (32, 64), E4M3), small(rng, (48, 64), E4M3)
    bias = small(rng, 48, ml_dtypes.bfloat16)

    def layer(x, w, bias, s):
        return jaxmp.linear(
            x, w, bias, activation="relu", transpose_b=True, scales=Scales(a=s), preferred_element_type=jnp.bfloat16
        )

    d = layer(x, w, bias, jnp.float32(0.5))
    want = np.maximum(scaled(x, None) @ scaled(w, None).T / 2 + bias.astype(np.float64), 0)
    np.testing.assert_array_equal(np.asarray(d).astype(np.float64), want)
    (row,) = jaxmp.explain(layer)(x, w, bias, jnp.float32(0.5)).rows
    capsys.readouterr()
    assert row.dtypes == "float8_e4m3fn x float8_e4m3fn -> bfloat16, scales scalar_fp32 x none"
    assert row.accumulator == "float32"


def test_explain_names_the_maximum(rng, capsys):
    case = by_name("rs")[0].replace(transposition="NT", per_shard=(16, 16, 16))
    mesh = case.jax_mesh(AxisType.Auto)
    m, n, k = case.extents

    def program(a, b):
        options = {"in_shardings": case.stored, "out_sharding": case.out, "mesh": mesh, "result_amax": True}
        return jaxmp.matmul(a, b, preferred_element_type=E4M3, **TN, **options)

    rows = jaxmp.explain(program)(small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)).rows
    capsys.readouterr()
    assert [row.operation for row in rows] == ["matmul", "all_reduce"]
    assert "largest absolute value of every rank (result_amax, gelu_aux_amax)" in rows[1].why


# Levels of determinism ------------------------------------------------------------------------------------------


def drawn(rng, mode, m, n, k):
    """Operands and scales of which no sum is exact."""
    a, b = (rng.standard_normal(shape).astype(mode.dtype) for shape in ((m, k), (n, k)))
    return a, b, *mode.scales(rng, a.shape, b.shape)


@pytest.mark.parametrize("case", by_name("ag", "rs", "ar-data", "grid"), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", SCALE_MODES, ids=lambda mode: mode.id)
@pytest.mark.parametrize("is_deep", [False, True], ids=["", "deep"])
def test_bits_do_not_know_the_mesh(is_deep, mode, case, rng):
    """Ranks that hold no whole block of the processor's instructions among them, and cuts within a panel; of several."""
    k = 5 * 128 if is_deep else 144 if mode.unit == 16 else mode.unit
    case = case.replace(transposition="NT", per_shard=(mode.unit, mode.unit, k))
    a, b, scale_a, scale_b = drawn(rng, mode, *case.extents)
    options = {"determinism": "topology", **F32}
    want = jaxmp.matmul(a, b, scales=Scales(a=scale_a, b=scale_b), **options, **TN)
    testing.assert_bitwise_equal(call_sharded(case, a, b, scale_a, scale_b, AxisType.Explicit, **options), want)
    bounds.judge_product(mode.id, want, scaled(a, scale_a), scaled(b, scale_b).T, operands=jnp.bfloat16, out="float32")


@pytest.mark.parametrize("mode", SCALE_MODES, ids=lambda mode: mode.id)
def test_a_row_does_not_know_its_batch(mode, rng):
    """k of more than one panel of the decoding, which is 1024 deep."""
    unit = 128 if mode.a == "blk128" else mode.unit
    a, b, scale_a, scale_b = drawn(rng, mode, 3 * unit, mode.unit, 1152)
    options = {"determinism": "batch", **F32}
    whole = np.asarray(jaxmp.matmul(a, b, scales=Scales(a=scale_a, b=scale_b), **options, **TN))
    for at in (0, unit, 2 * unit):
        rows = slice(at, at + unit)
        block = rows if mode.a != "blk128" else slice(at // 128, at // 128 + 1)
        part = scale_a if np.ndim(scale_a) == 0 else scale_a[block]
        d = jaxmp.matmul(a[rows], b, scales=Scales(a=part, b=scale_b), **options, **TN)
        testing.assert_bitwise_equal(d, whole[rows])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["ag", "rs", "ar", "grid", "ag-swapped", "rs-swapped"])
def test_bits_of_float8_results_and_gradients_do_not_know_the_mesh(name, implementation, rng):
    """On "xla" too, with scales of whole tensors; the epilog, the largest values and c with it."""
    case = by_name(name)[0].replace(transposition="NT", per_shard=(16, 16, 48))
    m, n, k = case.extents
    a, b = (rng.standard_normal(shape).astype(E4M3) for shape in ((m, k), (n, k)))
    c, w = rng.standard_normal((m, n)).astype(np.float16), rng.standard_normal((m, n)).astype(np.float32)

    def program(a, b, c, w, **where):
        def outputs(a, b, c):
            return jaxmp.matmul(
                a, b, c, alpha=0.7, beta=1.3, scales=Scales(a=jnp.float32(0.3), d=jnp.float32(5)), result_amax=True,
                epilog=Epilog.GELU_AUX, preferred_element_type=E4M3, determinism="topology", **where, **TN,
            )  # fmt: skip

        def loss(a, b, c):
            return jnp.sum(outputs(a, b, c)[0].astype(jnp.float32) * w)

        return outputs(a, b, c), jax.grad(loss, (0, 1, 2))(a, b, c)

    want = jax.jit(program)(a, b, c, w)
    mesh = case.jax_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = (*case.stored, case.out, case.out)
        placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, c, w), specs, strict=True)]
        where = {"out_sharding": case.out, "implementation": implementation}
        got = jax.jit(functools.partial(program, **where))(*placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        testing.assert_bitwise_equal(x, y)


def test_levels_refuse_what_would_be_gathered_with_its_scales(rng):
    rows = SCALE_MODES[3]
    for name, message in (
        (
            "rs-swapped",
            "has scales of whole tensors only where columns of the result are gathered or scattered over 'y'",
        ),
        ("rs", 'has scales of whole tensors only with implementation="xla" over 4 ranks'),
    ):
        case = by_name(name)[0].replace(transposition="NT", per_shard=(16, 16, 16))
        operands = drawn(rng, rows, *case.extents)
        with pytest.raises(NotImplementedError, match=f"{message}; got scales.a of outer_vec_fp32"):
            call_sharded(case, *operands, AxisType.Explicit, determinism="batch", implementation="xla", **F32)

    def loss(scale, level):
        d = jaxmp.matmul(A8, B8, scales=Scales(b=scale), determinism=level, **F32, **TN)
        return jnp.sum(d)

    assert float(jax.grad(loss)(jnp.float32(1), "batch")) == 0
    with pytest.raises(NotImplementedError, match=r'determinism="topology" has no derivative in scales\.b, which XLA'):
        jax.grad(loss)(jnp.float32(1), "topology")


# scaled_matmul and quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 128, 128, 128), (3, 5, 7, 64), (1, 1, 1, 32), (2, 16, 130, 96)])
@pytest.mark.parametrize("kind", ["mx", "nv", "plain"])
def test_scaled_matmul(kind, shape, rng):
    batch, m, n, k = shape
    dtype, size, scale_dtype = {"mx": (E4M3, 32, E8M0), "nv": (FP4, 16, E4M3), "plain": (np.float32, 32, np.float32)}[
        kind
    ]
    lhs, rhs = small(rng, (batch, m, k), dtype), small(rng, (batch, n, k), dtype)
    scales = [powers(rng, (batch, rows, k // size), scale_dtype) for rows in (m, n)]
    wide = [
        x.astype(np.float32) * np.repeat(scale.astype(np.float32), size, axis=-1)
        for x, scale in zip((lhs, rhs), scales, strict=True)
    ]
    out = jaxmp.scaled_matmul(lhs, rhs, *scales)
    np.testing.assert_array_equal(out, np.einsum("bmk,bnk->bmn", *wide))
    assert jaxmp.scaled_matmul(lhs, rhs, *scales, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16


def test_mlp_refuses():
    x, w = np.zeros((16, 16), E4M3), np.zeros((16, 16), np.float32)
    with pytest.raises(NotImplementedError, match=r"mlp: x has dtype float8_e4m3fn; .*call jaxmp.matmul twice"):
        jaxmp.mlp(x, w, None, w, None, activation="relu")


def test_scaled_matmul_refuses_shapes():
    x, scale = np.zeros((1, 4, 64), E4M3), np.zeros((1, 4, 2), E8M0)
    with pytest.raises(ValueError, match=r"3 dimensions.*lhs \(4, 64\)"):
        jaxmp.scaled_matmul(x[0], x, scale, scale)
    with pytest.raises(ValueError, match=r"equal batch and k.*rhs \(1, 4, 32\)"):
        jaxmp.scaled_matmul(x, x[..., :32], scale, scale)
    with pytest.raises(ValueError, match="rows of their operand"):
        jaxmp.scaled_matmul(x, x, scale[:, :2], scale)
    with pytest.raises(ValueError, match="divides k"):
        jaxmp.scaled_matmul(x, x, scale[..., :0], scale[..., :0])


def test_mxfp8_is_what_the_specification_says(rng):
    """The scale is the power of two at or above amax / 448, and each element is divided by it and rounded once."""
    x = (rng.standard_normal((64, 256)) * np.exp2(rng.integers(-20, 20, (64, 1)))).astype(np.float32)
    x[0, :32] = 0
    x[1, :32] = 448 * 4  # a power of two exactly
    q, scale = quantize.mxfp8(jnp.asarray(x))
    amax = np.abs(x).reshape(64, 8, 32).max(-1)
    with np.errstate(divide="ignore"):
        exponent = np.where(amax == 0, -127, np.ceil(np.log2((amax / np.float32(448)).astype(np.float64))))
    np.testing.assert_array_equal(np.asarray(scale).view(np.uint8), (exponent + 127).astype(np.uint8))
    scaled_x = x.astype(np.float64) / np.repeat(np.exp2(exponent), 32, 1)
    np.testing.assert_array_equal(np.asarray(q), scaled_x.astype(np.float32).astype(E4M3))


def test_nvfp4(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x[0, :16] = 0
    one = quantize.nvfp4_global_scale(quantize.amax(jnp.asarray(x)))
    q, scale = quantize.nvfp4(jnp.asarray(x), global_scale=one)
    y = x / np.float32(one)
    want = (np.abs(y).reshape(64, 16, 16).max(-1) / np.float32(6)).astype(E4M3)
    np.testing.assert_array_equal(np.asarray(scale), want)
    wide = np.repeat(want.astype(np.float32), 16, 1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.asarray(q), saturated(np.where(wide == 0, 0, y / wide), FP4))
    assert float(np.asarray(scale).astype(np.float32).max()) == 448


@pytest.mark.parametrize("name", ["tensor", "rows", "vec128", "blk128", "mxfp8"])
def test_quantizers_invert(name, rng):
    x = rng.standard_normal((200, 256)).astype(np.float32)
    q, scale = getattr(quantize, name)(jnp.asarray(x))
    back = quantize.dequantize(q, scale)
    np.testing.assert_array_equal(back, (scaled(q, scale)).astype(np.float32))
    np.testing.assert_array_equal(quantize.expand(scale, q) * q.astype(jnp.float32), back)
    largest_scale = np.asarray(quantize.expand(scale, q)).astype(np.float64)
    bounds.judge(name, back, x, 2.0**-4 * np.abs(x) + largest_scale * 2.0**-10)


def test_delayed_scaling():
    history = jnp.zeros(3)
    assert float(quantize.delayed_scale(history)) == 1
    for amax in (448.0, 896.0, 1.0):
        history = quantize.update_history(history, jnp.float32(amax))
    assert history.tolist() == [1.0, 896.0, 448.0]
    assert float(quantize.delayed_scale(history)) == 2
    assert float(quantize.delayed_scale(history, margin=1)) == 4
    history = quantize.update_history(history, jnp.float32(np.inf))
    assert float(quantize.delayed_scale(history)) == 1


def test_swizzle_and_packing(rng):
    scale = rng.integers(1, 255, (200, 7)).astype(np.uint8)
    flat = np.asarray(quantize.swizzle(jnp.asarray(scale)))
    assert flat.shape == (256 * 8,)
    for row, block in itertools.product(range(200), range(7)):
        assert flat[quantize.scale_offset(row, block, 7)] == scale[row, block]
    assert np.count_nonzero(flat) == scale.size  # the padding is zero
    np.testing.assert_array_equal(quantize.unswizzle(jnp.asarray(flat), 200, 7, jnp.uint8), scale)
    with pytest.raises(ValueError, match=r"take 2048 bytes.*got shape \(8,\)"):
        quantize.unswizzle(jnp.zeros(8, jnp.uint8), 200, 7)
    q = small(rng, (3, 8), FP4)
    packed = np.asarray(quantize.pack_fp4(jnp.asarray(q)))
    np.testing.assert_array_equal(packed, q.view(np.uint8)[:, ::2] | q.view(np.uint8)[:, 1::2] << 4)
    np.testing.assert_array_equal(np.asarray(quantize.unpack_fp4(packed)), q)


# Bad input ------------------------------------------------------------------------------------------------------

A8, B8 = np.zeros((32, 64), E4M3), np.zeros((48, 64), E4M3)
BIG = np.zeros((128, 256), E4M3)
A4 = np.zeros((128, 128), FP4)
ONE = np.float32(1)
MX, NV = np.ones((128, 8), E8M0), np.ones((128, 8), E4M3)

WRONG = {
    "b not transposed": ((A8, np.zeros((64, 48), E4M3)), {"transpose_b": False, **F32}, ValueError, "pass transpose_a=False and transpose_b=True, got transpose_a=False and transpose_b=False"),
    "a transposed": ((A8.T.copy(), B8), {"transpose_a": True, **F32}, ValueError, "a stored (m, k) and b stored (n, k)"),
    "no result type": ((A8, B8), {}, TypeError, "operands of float8_e4m3fn and float8_e4m3fn need preferred_element_type; available: bfloat16, float16, float32, float8_e4m3fn"),
    "e5m2 twice": ((A8.astype(E5M2), B8.astype(E5M2)), F32, NotImplementedError, "float8_e5m2 not with itself"),
    "float8 with bfloat16": ((A8, B8.astype(ml_dtypes.bfloat16)), F32, NotImplementedError, "a is float8_e4m3fn and b is bfloat16"),
    "d scale of float16": ((A8, B8), {"preferred_element_type": np.float16, "scales": Scales(d=ONE)}, ValueError, "scales.d scales a result of float8"),
    "an int8 result": ((A8, B8), {"preferred_element_type": np.int8}, NotImplementedError, "preferred_element_type int8 is not available for float8_e4m3fn"),
    "k": ((A8[:, :24], B8[:, :24]), F32, ValueError, "k must be a multiple of 16 on each device for float8_e4m3fn, got 24; pad it to 32"),
    "m": ((A8[:20], B8), F32, ValueError, "m must be a multiple of 16 on each device for float8_e4m3fn, got 20"),
    "n of MXFP8": ((BIG, BIG[:64]), {"scales": Scales(a=MX, b=MX[:64]), **F32}, ValueError, "n must be a multiple of 128 on each device for float8_e4m3fn with scales of vec32_ue8m0, got 64"),
    "fp4 without scales": ((A4, A4), F32, ValueError, "scales.a is missing; float4_e2m1fn operands need one a block of 16, shape (128, 8) of float8_e4m3fn"),
    "shape of a scale": ((A8, B8), {"scales": Scales(a=np.ones(31, np.float32)), **F32}, ValueError, "scales.a has shape (31,) and dtype float32; an operand of shape (32, 64) and dtype float8_e4m3fn takes () of float32, (32,) of float32, (32, 2) of float8_e8m0fnu, no scale of blocks of 128, which do not divide its k=64"),
    "dtype of a scale": ((A8, B8), {"scales": Scales(b=np.float16(1)), **F32}, ValueError, "scales.b has shape () and dtype float16"),
    "block that does not divide": ((A8[:, :48], B8[:, :48]), {"scales": Scales(a=np.ones((32, 1), E8M0)), **F32}, ValueError, "an operand of shape (32, 48) and dtype float8_e4m3fn takes () of float32, (32,) of float32, no scale of blocks of 32 or 128, which do not divide its k=48"),
    "two modes": ((BIG, BIG), {"scales": Scales(a=MX, b=ONE), **F32}, NotImplementedError, "scales.a is vec32_ue8m0 and scales.b is scalar_fp32, which do not go together"),
    "blocks of both": ((BIG, BIG), {"scales": Scales(a=np.ones((1, 2), np.float32), b=np.ones((1, 2), np.float32)), **F32}, NotImplementedError, "(rows, k/128) with (rows, k/128) or (rows/128, k/128)"),
    "rows and fp8": ((A8, B8), {"scales": Scales(a=np.ones(32, np.float32), b=np.ones(48, np.float32)), "preferred_element_type": E4M3}, NotImplementedError, "with scales of outer_vec_fp32 the result must be bfloat16, float16 or float32, got float8_e4m3fn"),
    "c scale of blocks": ((BIG, BIG, np.zeros((128, 128), np.float32)), {"beta": 1.0, "scales": Scales(a=MX, b=MX, c=ONE), **F32}, ValueError, "scales.c goes with tensor-wide scales only"),
    "d scale of blocks": ((BIG, BIG), {"scales": Scales(a=MX, b=MX, d=ONE), "preferred_element_type": E4M3}, ValueError, "drop it, blocks get their own"),
    "shape of scales.d": ((A8, B8), {"scales": Scales(d=np.ones(2, np.float32)), "preferred_element_type": E4M3}, ValueError, "scales.d must be a float32 scalar of shape (), got shape (2,) of float32"),
    "no Scales": ((A8, B8), {"scales": (ONE, ONE), **F32}, TypeError, "scales must be a jaxmp.Scales, got tuple"),
    "amax of bfloat16": ((A8, B8), {"result_amax": True, **F32}, NotImplementedError, "result_amax is taken of a float8 result with tensor-wide scales; the result is float32"),
    "scales of float32": ((A8.astype(np.float32), B8.astype(np.float32)), {"scales": Scales(a=ONE)}, TypeError, "scales goes with float8 and float4 operands, a has dtype float32; drop it"),
    "scales of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"scales": Scales(a=ONE)}, TypeError, "scales, result_amax, aux_dtype, aux_amax go with float8 and float4 operands, a has dtype int8; drop them"),
    "GELU": ((A8, B8), {"epilog": Epilog.GELU, **F32}, NotImplementedError, "epilog GELU is not available for float8_e4m3fn operands and a result of float32; available: NONE, BIAS, RELU, RELU_BIAS, RELU_AUX, RELU_AUX_BIAS, DRELU, GELU_AUX, GELU_AUX_BIAS"),
    "GELU_AUX and fp4": ((A4, A4), {"epilog": Epilog.GELU_AUX, "preferred_element_type": FP4}, NotImplementedError, "epilog GELU_AUX is not available for float4_e2m1fn operands and a result of float4_e2m1fn"),
    "aux of another type": ((A8, B8), {"epilog": Epilog.GELU_AUX, "aux_dtype": np.float16, **F32}, NotImplementedError, "aux_dtype float16 is not available for epilog GELU_AUX with float8_e4m3fn and float8_e4m3fn operands, c of float32 and a result of float32; available: float32 (float8_e4m3fn goes with GELU_AUX,"),
    "fp8 aux of fp8 and bf16 c": ((A8, B8, np.zeros((32, 48), ml_dtypes.bfloat16)), {"beta": 1.0, "epilog": Epilog.GELU_AUX, "aux_dtype": E4M3, "preferred_element_type": E4M3}, NotImplementedError, "c of bfloat16 and a result of float8_e4m3fn; available: bfloat16 ("),
    "fp8 aux of e5m2": ((A8, B8.astype(E5M2)), {"epilog": Epilog.GELU_AUX, "aux_dtype": E4M3, "preferred_element_type": E4M3}, NotImplementedError, "with float8_e4m3fn and float8_e5m2 operands, c of float16 and a result of float8_e4m3fn; available: float16 ("),
    "fp8 aux with a bias": ((A8, B8), {"epilog": Epilog.GELU_AUX_BIAS, "epilog_inputs": {"bias": np.zeros(48, np.float16)}, "aux_dtype": E4M3, "preferred_element_type": E4M3}, NotImplementedError, "not available for epilog GELU_AUX_BIAS"),
    "fp8 aux of blocks": ((BIG, BIG), {"epilog": Epilog.GELU_AUX, "aux_dtype": E4M3, "scales": Scales(a=MX, b=MX), "preferred_element_type": E4M3}, NotImplementedError, "available: float16 (float8_e4m3fn goes with GELU_AUX, operands and a result of float8_e4m3fn, tensor-wide scales"),
    "aux scale of float16": ((A8, B8), {"epilog": Epilog.GELU_AUX, "scales": Scales(aux=ONE), "preferred_element_type": E4M3}, ValueError, "scales.aux is of a gelu_aux of float8, but it is float16 here; drop it, or pass aux_dtype=jnp.float8_e4m3fn"),
    "aux amax of float32": ((A8, B8), {"epilog": Epilog.GELU_AUX, "aux_amax": True, **F32}, ValueError, "aux_amax is of a gelu_aux of float8, but it is float32 here"),
    "aux without GELU": ((A8, B8), {"epilog": Epilog.RELU_AUX, "aux_dtype": E4M3, "preferred_element_type": E4M3}, ValueError, "aux_dtype is of gelu_aux, but epilog RELU_AUX has none; drop it, or take GELU_AUX or GELU_AUX_BIAS"),
    "shape of scales.aux": ((A8, B8), {"epilog": Epilog.GELU_AUX, "aux_dtype": E4M3, "scales": Scales(aux=np.ones(2, np.float32)), "preferred_element_type": E4M3}, ValueError, "scales.aux must be a float32 scalar of shape (), got shape (2,) of float32"),
    "aux_dtype of float32": ((A8.astype(np.float32), B8.astype(np.float32)), {"epilog": Epilog.GELU_AUX, "aux_dtype": E4M3}, TypeError, "aux_dtype goes with float8 and float4 operands, a has dtype float32; drop it"),
    "bias of float32": ((A8, B8), {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": np.zeros(48, np.float32)}, **F32}, TypeError, "bias has dtype float32"),
    "c beside fp8": ((A8, B8, np.zeros((32, 48), np.float32)), {"beta": 1.0, "preferred_element_type": E4M3}, TypeError, "c has dtype float32 but a result of float8_e4m3fn takes c in float16 or bfloat16"),
    "RELU of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"epilog": Epilog.RELU}, NotImplementedError, "epilog RELU is not available for int8 operands and a result of int32; available: NONE"),
    "alpha of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"alpha": 0.5}, TypeError, "alpha=0.5 is not an integer but the result has dtype int32"),
    "range of alpha of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"alpha": 2.0**31}, ValueError, "alpha=2147483648.0 does not fit int32, the type of the result"),
    "int8 to float32": ((A8.astype(np.int8), B8.astype(np.int8)), F32, NotImplementedError, "preferred_element_type float32 is not available for int8 and int8 operands; available: int32"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "message"), WRONG.values(), ids=list(WRONG))
def test_errors(args, options, error, message):
    with pytest.raises(error) as caught:
        jaxmp.matmul(*args, **(TN | options))
    assert message in str(caught.value)
