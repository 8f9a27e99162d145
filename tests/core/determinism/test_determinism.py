"""The levels of docs/determinism.md, bitwise.

Bounds would not show these faults: a row has other bits in a batch of two than in a batch of sixty-four, a loss curve
depends on the number of devices, exp(f(x) - f(x)) is not one, or an accumulator is a double. Each promise has a
control: a path without the promise breaks it.

These shapes go wrong most easily; `jaxmp selftest` is the long sweep. test_determinism_meshes.py covers the level
"topology", test_determinism_programs.py programs and `explain`.
"""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from cases import ACCUMULATORS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, testing

pytestmark = pytest.mark.usefixtures("x64")
DTYPES = testing.DTYPES
LEVELS = testing.LEVELS
EXPLICIT = modes.BY_ID["explicit"]
# Every count up to 70, and counts just below and above one and two tiles of rows.
ROWS = (*range(1, 71), 95, 96, 97, 127, 128, 129, 191, 192, 193, 256)


# "batch" ----------------------------------------------------------------------------------------------------------

EXTENTS = ((1, 1), (2, 40), (31, 8), (1025, 3), (4097, 16), (11008, 1))
ROW_CASES = [
    *((dtype, (65, 33), ROWS, Epilog.NONE) for dtype in DTYPES),
    *((dtype, extents, testing.SOME_ROWS, Epilog.NONE) for dtype, extents in zip(DTYPES, EXTENTS, strict=True)),
    *(("float32", (33, 17), testing.SOME_ROWS, epilog) for epilog in testing.EPILOGS[1:] + testing.DERIVATIVES),
    *(("bfloat16", (33, 17), testing.SOME_ROWS, epilog) for epilog in (Epilog.GELU_AUX_BIAS, Epilog.DGELU_BGRAD)),
    *(("float32", (1, 17), testing.SOME_ROWS, epilog) for epilog in testing.DERIVATIVES),
]


@pytest.mark.parametrize(("dtype", "extents", "counts", "epilog"), ROW_CASES)
def test_a_row_does_not_know_its_batch(dtype, extents, counts, epilog):
    """Tries every row count up to 70 and around the tiles' edges, at the front and at random places."""
    assert testing.check_rows("batch", "host", dtype, extents, counts, epilog=epilog) > len(counts)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_xla_gives_the_bits_of_host(dtype, level):
    testing.check_rows(level, "xla", dtype, (65, 33), testing.SOME_ROWS, epilog=Epilog.BIAS)
    a, b = testing.draw(0, (40, 301), dtype), testing.draw(1, (301, 24), dtype)
    host, xla = (jaxmp.matmul(a, b, determinism=level, implementation=name) for name in testing.IMPLEMENTATIONS)
    testing.assert_bitwise_equal(xla, host)


def test_columns_depend_on_their_column_of_b_alone():
    testing.check_columns("batch", "host", "float32", (300, 9), (*range(1, 34), 63, 64, 65, 128, 199, 200))


def test_a_mapped_batch_has_the_bits_of_its_members():
    """vmap folds a batch into rows or columns, or makes one call per member."""
    a, b = testing.draw(0, (5, 7, 65), "float32"), testing.draw(1, (5, 65, 9), "float32")
    product = functools.partial(jaxmp.matmul, determinism="batch")
    for axes in ((0, None), (None, 0), (0, 0)):
        given = [x if axis == 0 else x[0] for x, axis in zip((a, b), axes, strict=True)]
        members = [product(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True))) for i in range(5)]
        testing.assert_bitwise_equal(jax.jit(jax.vmap(product, axes))(*given), np.stack(members), str(axes))


def test_the_gradient_in_the_rows_keeps_the_level():
    a, b, t = (testing.draw(i, s, "float32") for i, s in enumerate(((70, 33), (33, 65), (70, 65))))

    def gradient(a, t):
        return jax.vjp(lambda a: jaxmp.linear(a, b, activation="gelu", determinism="batch"), a)[1](t)[0]

    whole = np.asarray(jax.jit(gradient)(a, t))
    assert np.any(whole)
    for m in (1, 2, 3, 7, 16, 33, 64, 69):
        testing.assert_bitwise_equal(jax.jit(gradient)(a[:m], t[:m]), whole[:m], f"m={m}")


# The order of a sum -----------------------------------------------------------------------------------------------


K_BLOCK = 256
NOT_BFLOAT16 = [dtype for dtype in DTYPES if dtype != "bfloat16"]


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", NOT_BFLOAT16)
def test_sums_are_made_in_the_written_order(dtype, rows):
    """Compares with numpy: products with 1 are exact, so each step is one addition. Sums of 256 k, then their sum."""
    accumulator = ACCUMULATORS[dtype]
    a = testing.draw(0, (rows, 2400), dtype)
    k_blocks = [a[:, at : at + K_BLOCK].astype(accumulator) for at in range(0, a.shape[1], K_BLOCK)]
    sums = [np.add.accumulate(block, axis=1)[:, -1] for block in k_blocks]
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
def test_rounding_errors_are_those_of_k_blocks(dtype, rows, level):
    """The error is within 256 + k / 256 roundings for numbers of one sign; one accumulator over all of k exceeds it."""
    k, accumulator = 65536, ACCUMULATORS[dtype]
    a, b = (np.full(shape, x).astype(jnp.dtype(dtype)) for shape, x in (((rows, k), 1.9), ((k, 20), 0.7)))
    got = np.asarray(jaxmp.matmul(a, b, determinism=level, preferred_element_type=accumulator))
    want = k * a[0, 0].astype(np.clongdouble) * b[0, 0].astype(np.clongdouble)
    allowed = K_BLOCK + k / K_BLOCK
    unit = bounds.unit_roundoff(accumulator) * abs(want)
    in_one = np.add.accumulate(a[0].astype(accumulator) * b[:, 0].astype(accumulator))[-1]
    blocked, one = (float(np.max(np.abs(x - want)) / unit) for x in (got, in_one))
    print(f"{dtype} {level}: off by {blocked:.0f} units of roundoff, one accumulator by {one:.0f}")
    assert blocked <= allowed < one


# Controls ---------------------------------------------------------------------------------------------------------


def test_the_checks_fail_where_nothing_is_promised():
    """In float64, few rows use another kernel than many, and the BLAS sums k in another order for another mesh."""

    def check():
        for k, n in ((301, 301), (65, 33), (33, 1000), (1000, 5)):
            testing.check_rows("run_to_run", "host", "float64", (k, n), (1, 2, 3, 7, 70))

    with pytest.raises(
        AssertionError, match=r"d of m=\d+ k=\d+ n=\d+ NONE, compared with the same rows among 70: \d+ of \d+ ele"
    ):
        check()
    with pytest.raises(AssertionError, match="elements differ"):
        testing.check_meshes("run_to_run", "host", "float32", (24, 40, 200), [8])


# jit = eager = recomputed -----------------------------------------------------------------------------------------


@pytest.mark.small("values", of=lambda case, epilog, level: (case, (epilog, level)))
@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
@pytest.mark.parametrize("epilog", [Epilog.NONE, Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX], ids=lambda e: e.name)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_every_way_to_run_gives_the_same_bits(case, epilog, level):
    """Runs eager, jit, remat, scan, compiled in advance and twice, with a cold cache and a warm one."""
    case, rng = case.replace(per_shard=(7, 5, 33)), np.random.default_rng(0)
    with EXPLICIT.scope(case):
        a, b = (EXPLICIT.put(case, x, s) for x, s in zip(case.values(rng), case.stored, strict=True))
        bias = EXPLICIT.put(case, cases.normal(rng, case.extents[1], case.dtype), P(case.out[1]))
        product = EXPLICIT.product(case, determinism=level, epilog=epilog)

        def f(a, b):
            return product(a, b, None, bias if "BIAS" in epilog.name else None)

        jitted = jax.jit(f)
        want = jax.tree.map(np.asarray, jitted(a, b))
        assert all(map(np.any, jax.tree.leaves(want))), "zeros have the same bits whatever computed them"
        scanned = jax.jit(lambda a, b: jax.lax.scan(lambda x, _: (x, f(a, b)), 0, None, length=2)[1])(a, b)
        ways = {
            "second run": jitted(a, b),
            "eager": f(a, b),
            "remat": jax.jit(jax.checkpoint(f))(a, b),
            "ahead of time": jitted.lower(a, b).compile()(a, b),
            **{f"step {i} of a scan": jax.tree.map(lambda x, i=i: np.asarray(x)[i], scanned) for i in range(2)},
        }
        jaxmp.plan_cache_clear()
        jax.clear_caches()
        ways["cold"] = jax.jit(f)(a, b)
        for way, got in ways.items():
            jax.tree.map(functools.partial(testing.assert_bitwise_equal, err_msg=way), got, want)


def end_of_softmax(f, g, a, b):
    """Returns exp(max f - max g), and f - g, in float32; f and g compute the same bfloat16 scores in two ways."""
    z = f(a, b).astype(jnp.float32)
    highest = jnp.max(g(a, b), axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.max(jnp.exp(z - highest), axis=-1), z - g(a, b).astype(jnp.float32)


@pytest.mark.parametrize("recomputed", [False, True], ids=["jit", "remat"])
@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
def test_a_softmax_ends_in_exactly_one(level, recomputed):
    """exp(f(x) - f(x)) is 1: both sides have the same bits, because no compiler contracts our arithmetic. In plain
    arithmetic it need not be, because XLA skips the rounding of one copy of f(x)."""
    case = cases.BY_NAME["rs"].replace(per_shard=(7, 5, 33), dtype="bfloat16")
    operands = case.values(np.random.default_rng(0))

    def plain(a, b):
        return (a @ b) * jnp.asarray(0.3, a.dtype)

    ones, zeros = jax.jit(functools.partial(end_of_softmax, plain, plain))(*operands)
    assert np.count_nonzero(np.asarray(ones) != 1) > ones.size / 2
    assert np.isfinite(zeros).all()
    with EXPLICIT.scope(case):
        a, b = (EXPLICIT.put(case, x, spec) for x, spec in zip(operands, case.stored, strict=True))
        product = EXPLICIT.product(case, determinism=level, alpha=0.3)
        f = jax.checkpoint(product) if recomputed else product
        ones, zeros = jax.jit(functools.partial(end_of_softmax, f, product))(a, b)
    testing.assert_bitwise_equal(ones, np.ones(ones.shape, ones.dtype))
    testing.assert_bitwise_equal(zeros, np.zeros(zeros.shape, zeros.dtype))
