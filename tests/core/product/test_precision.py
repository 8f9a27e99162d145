"""The meaning of `precision`: a GPU may round operands; a CPU multiplies operands as they are in any case."""

import contextlib
import functools
import re

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxmp
from jaxmp import CommOptions
from jaxmp._src.core.lowering import ffi_call, process_barrier
from jaxmp._src.core.spec import matmul_spec, precisions
from jaxmp._src.platform.jax_internals import jax_compat

EXPLICIT = modes.BY_ID["explicit"]
ROUNDING = ("TF32_TF32_F32", "BF16_BF16_F32", "F16_F16_F32")
FULL = ("F32_F32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "32F_PEDANTIC")
SINGLES = ("float32", "complex64")


def multiply(case, a, b, options):
    """Returns the products with each of the options, from one program."""
    products = [EXPLICIT.product(case, **each) for each in options]
    with EXPLICIT.scope(case):
        placed = [EXPLICIT.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)]
        return EXPLICIT.run(lambda a, b: [product(a, b) for product in products], *placed)


PRECISIONS = {
    **dict.fromkeys(SINGLES, (*ROUNDING, *FULL, "32F_EMULATED_16BFX9", *lax.Precision, "highest", (None, "high"))),
    **dict.fromkeys(("float64", "complex128"), (None, "F64_F64_F64", "64F", "64F_PEDANTIC", "64F_EMULATED_FIXEDPOINT")),
    "float16": ("F16_F16_F16", "16F"),
    "bfloat16": ("BF16_BF16_BF16",),
}


@pytest.mark.small("values", of=lambda name, dtype, implementation: (name, (dtype, implementation)))
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", ["ag-data", "rs-data", "grid"])
def test_every_precision_is_as_exact_as_the_accumulator(name, dtype, implementation, rng):
    """A CPU sums in float32 even if the preset names a 16-bit type for sums."""
    case = cases.BY_NAME[name].replace(dtype=dtype, per_shard=(9, 7, 531), transposition="TN")
    a, b = case.values(rng)
    left, right = case.op(cases.wide(a), cases.wide(b))
    c = bounds.PRODUCT * (2 if dtype in cases.NEEDS_X64 else 1)
    with jax.enable_x64(dtype in cases.NEEDS_X64):
        options = [{"precision": precision, "implementation": implementation} for precision in PRECISIONS[dtype]]
        results = multiply(case, a, b, options)
    for precision, d in zip(PRECISIONS[dtype], results, strict=True):
        assert d.dtype == dtype
        bounds.judge_product(f"{case.id} {precision}", d, left, right, operands=dtype, c=c)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_presets_round_no_sixteen_bit_operand(dtype, rng):
    """These operands are exact in TF32 and float32, so all presets that take them give the same bits as None."""
    case = cases.BY_NAME["ag-data"].replace(dtype=dtype, per_shard=(9, 7, 301))
    taken = [None, *(precision for precision in (*ROUNDING, *FULL) if dtype in precisions._TABLE[precision])]
    other = "F16_F16_F32" if dtype == "bfloat16" else "BF16_BF16_F32"
    assert set(taken) == {None, *ROUNDING, *FULL} - {other}
    want, *results = multiply(case, *case.values(rng), [{"precision": precision} for precision in taken])
    for precision, d in zip(taken[1:], results, strict=True):
        assert np.asarray(d).tobytes() == np.asarray(want).tobytes(), precision


@pytest.mark.parametrize("name", ["ag-data", "rs-data", "ar-data", "grid"])
def test_gradients_have_the_precision_of_the_product(name, rng):
    case = cases.BY_NAME[name].replace(per_shard=(5, 7, 33))
    with EXPLICIT.scope(case):
        f = EXPLICIT.product(case, precision="TF32_TF32_F32")
        operands = [EXPLICIT.put(case, x, s) for x, s in zip(case.values(rng), case.stored, strict=True)]
        text = str(jax.make_jaxpr(jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1)))(*operands))
    assert text.count("precision='TF32_TF32_F32'") == text.count("spec=MatmulSpec(") >= 3


def test_every_preset_of_jax_has_a_row():
    assert {preset.name for preset in lax.DotAlgorithmPreset} <= set(precisions._TABLE)


def test_no_precision_is_narrower_than_its_name():
    """A request for float32 sums is kept; only presets that name a narrower type round to it or sum in it."""
    seen = set()
    for asked, row in precisions._PRESETS.items():
        for operand, name in row.items():
            is_narrow = name in precisions.SUMMED_IN
            rounding = name.partition("_FAST_")[2]
            if rounding:
                assert {"TF32": "TF32", "16BF": "BF16", "16F": "F16"}[rounding] == asked.split("_")[0]
                assert operand in SINGLES
            assert not is_narrow or asked.endswith(("F16_F16_F16", "BF16_BF16_BF16"))
            seen |= {rounding, is_narrow}
    assert seen == {"", "TF32", "16BF", "16F", True, False}


def test_explain_names_compute_type_and_accumulator(monkeypatch):
    a, b = jnp.ones((4, 8)), jnp.ones((8, 4))

    def rows(dtype, **options):
        return jaxmp.explain(lambda a, b: jaxmp.matmul(a.astype(dtype), b.astype(dtype), **options))(a, b).rows[0]

    for dtype, precision in (("float32", "TF32_TF32_F32"), ("float16", "F16_F16_F16"), ("float16", None)):
        row = rows(dtype, precision=precision)
        assert (row.compute, row.accumulator, row.implementation) == ("32F", "float32", "host")
    monkeypatch.setattr(jax_compat, "default_platform", lambda: "cuda")
    row = rows("float16", precision="F16_F16_F16")
    assert (row.compute, row.accumulator, row.implementation) == ("16F", "float16", "xla")
    text = str(jaxmp.explain(lambda a, b: jaxmp.matmul(a, b, precision="BF16_BF16_F32"))(a, b))
    assert "compute type 32F_FAST_16BF" in text


def test_a_library_is_given_the_compute_type():
    """16-bit sums are the exception, because no library has them."""
    wanted = {"TF32_TF32_F32": "32F_FAST_TF32", "BF16_BF16_F32": "32F_FAST_16BF"}
    wanted |= {"F16_F16_F16": "32F", "DEFAULT": "32F"}
    for precision, want in wanted.items():
        operand = jax.ShapeDtypeStruct((4, 4), "float16" if precision == "F16_F16_F16" else "float32")
        spec = matmul_spec.MatmulSpec(operand.dtype, precision=precision)
        assert ffi_call.call_attributes(spec, operand, operand)["compute"] == want


def test_presets_convert_operands_and_results_as_jax_does(standard_promotion):
    """Operands are converted to the preset's type, which may round them, and sums to the result's type."""
    presets = ("F16_F16_F16", "BF16_BF16_F32", "F32_F32_F32", "BF16_BF16_F32_X3", "F64_F64_F64")
    dtypes = ("float16", "bfloat16", "float32", "float64", "int32", "int8", "float8_e4m3fn")
    a, b = jnp.full((3, 4), 3.0), jnp.ones((4, 3))

    def run(matmul):
        return [
            matmul(a.astype(x), b.astype(y), precision=preset, preferred_element_type=out)
            for preset in presets
            for x, y in ((x, y) for x in dtypes for y in (x, "float16"))
            for out in ("float32", "float16", "float64")
        ]

    with jax.enable_x64(True):
        results = [jax.jit(functools.partial(run, module.matmul))() for module in (jaxmp, jnp)]
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    x, ones = jnp.full((3, 4), 1 + 2**-9, jnp.float16), b.astype(jnp.float16)  # bfloat16 does not hold this number
    for precision, want in ((None, 4 + 2**-7), ("BF16_BF16_F32", 4)):
        d = jaxmp.matmul(x, ones, precision=precision, preferred_element_type="float32")
        np.testing.assert_array_equal(d, np.full((3, 3), want, np.float32))


def test_algorithms_are_the_presets_that_they_spell_out():
    assert {precisions.preset(algorithm).name for algorithm in precisions._ALGORITHMS} == {
        name
        for name in lax.DotAlgorithmPreset.__members__
        if name != "DEFAULT" and not name.startswith(("ANY", "TF32"))
    }
    x, ones = jnp.full((3, 4), 1 + 2**-9, jnp.float16), jnp.ones((4, 3), jnp.float16)
    algorithm = lax.DotAlgorithm(jnp.bfloat16, "bfloat16", np.float32)
    products = (
        lambda **options: jaxmp.matmul(x, ones, **options),
        lambda **options: jaxmp.einsum("ij,jk", x, ones, **options),
        lambda **options: jaxmp.dot_general(x, ones, (((1,), (0,)), ((), ())), **options),
        lambda **options: jaxmp.linear(x, ones, **options),
        lambda **options: jaxmp.ragged_dot(x, ones[None], jnp.array([3]), **options),
    )
    for product in products:
        d = product(precision=algorithm, preferred_element_type="float32")
        np.testing.assert_array_equal(d, np.full((3, 3), 4, np.float32))


COMM = {
    "ag-data": [CommOptions(algorithm="split_p2p"), CommOptions(algorithm="no_overlap"), CommOptions(sm_count=8)],
    "rs-data": [CommOptions(algorithm="split_multicast", dtype=jnp.float32, sm_count=16)],
    "ar-data": [CommOptions(algorithm="fused"), CommOptions(dtype="bfloat16")],
    "rs-transposed": [CommOptions(dtype="bfloat16")],
    "grid": [CommOptions(sm_count=2, algorithm="no_overlap")],
}


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "comm"), [(n, x) for n, all_of in COMM.items() for x in all_of])
def test_communication_options_change_no_bit(name, comm, implementation, rng):
    columns = 4 if comm.algorithm == "fused" else 5  # cuBLASMp fuses multiples of 16 bytes, here of float32
    case = cases.BY_NAME[name].replace(per_shard=(3, columns, 7), dtype="bfloat16")
    a, b = case.values(rng)
    placed = [EXPLICIT.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)]

    def results(comm):
        f = EXPLICIT.product(case, implementation=implementation, comm=comm)
        return jax.jit(lambda a, b: (f(a, b), jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(a, b)))(*placed)

    with EXPLICIT.scope(case):
        for got, want in zip(*(jax.tree.leaves(results(x)) for x in (comm, None)), strict=True):
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_explain_names_the_communication_options():
    case = cases.BY_NAME["rs-data"].replace(per_shard=(3, 5, 7))
    comm = CommOptions(algorithm="split_p2p", dtype="float32", sm_count=4)
    placed = [jax.ShapeDtypeStruct(s, "float32") for s in (case.extents[::2], case.extents[:0:-1])]
    explanation = jaxmp.explain(modes.with_in_shardings(case, comm=comm))(*placed)
    assert explanation.rows[0].comm == "comm.dtype=float32, comm.algorithm=split_p2p, comm.sm_count=4"
    assert "communication comm.dtype=float32, comm.algorithm=split_p2p" in str(explanation)


def test_processes_agree_on_the_communication_options():
    comm = CommOptions("float32", "split_p2p")
    spec = matmul_spec.MatmulSpec(np.dtype("float32"), comm=comm)
    operands = (jax.ShapeDtypeStruct((4, 4), "float32"),) * 2
    agreed = process_barrier.fields(spec, *operands)
    assert {name: x for name, x in agreed.items() if name.startswith("comm.")} == {
        "comm.dtype": "float32",
        "comm.algorithm": "split_p2p",
        "comm.sm_count": None,
        "comm.weights": None,
        "comm.gradients": None,
    }


WRONG_COMM = [
    ("rs-data", CommOptions(algorithm="nvls"), ValueError, "matmul: comm.algorithm must be None or one of default, split_p2p, "),
    ("rs-data", CommOptions(algorithm="fused"), ValueError, "comm.algorithm='fused' needs the pattern all_reduce, but this call is reduce_scatter; drop it"),
    ("ar-data", CommOptions(algorithm="fused"), ValueError, "matmul: comm.algorithm='fused' needs rows of the result that are a multiple of 16 bytes of the communicated float32, a multiple of 4 columns, got 5; pad b, or drop it"),
    ("ar-data", CommOptions(algorithm="atomic_multicast"), ValueError, "comm.algorithm='atomic_multicast' needs the pattern reduce_scatter, but this call is all_reduce"),
    ("ag-data", CommOptions(algorithm="split_multicast"), ValueError, "comm.algorithm='split_multicast' needs the pattern reduce_scatter or all_reduce, but this call is all_gather"),
    ("local", CommOptions(algorithm="split_p2p"), ValueError, "needs the pattern all_gather or reduce_scatter or all_reduce, but this call is local"),
    ("grid", CommOptions(dtype="float32"), ValueError, "comm.dtype=float32 applies to partial sums, so the pattern must be reduce_scatter or all_reduce, but this call is grid"),
    ("rs-data", CommOptions(dtype="bfloat16"), ValueError, "comm.dtype must be no smaller than the result's float32 and no larger than float32, the type of the sums, got bfloat16"),
    ("rs-data", CommOptions(dtype="complex64"), ValueError, "got complex64"),
    ("rs-data", CommOptions(dtype="int32"), ValueError, "got int32"),
    ("rs-data", CommOptions(sm_count=0), ValueError, "comm.sm_count must be at least 1, the number of multiprocessors that communicate, got 0"),
    ("rs-data", CommOptions(sm_count=1.5), TypeError, "comm.sm_count must be an integer, got float"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "comm", "exception", "message"), WRONG_COMM)
def test_communication_options_that_the_call_does_not_take(name, comm, exception, message, rng):
    case = cases.BY_NAME[name].replace(per_shard=(3, 5, 7))
    with pytest.raises(exception, match=re.escape(message)):
        modes.with_in_shardings(case, comm=comm)(*case.values(rng))


@pytest.mark.parametrize("comm", [CommOptions(algorithm="split_p2p"), CommOptions(dtype="float32")])
def test_communication_options_ahead_of_a_pattern(comm):
    a, b = jnp.ones((4, 4)), jnp.ones((4, 4))
    message = "XLA's partitioner has not chosen a pattern yet; pass in_shardings, out_sharding and a mesh"
    with pytest.raises(ValueError, match=message):
        jaxmp.matmul(a, b, comm=comm)
    with jax.set_mesh(cases.BY_NAME["rs"].jax_mesh(AxisType.Auto)), pytest.raises(ValueError, match=message):
        jaxmp.matmul(a, b, comm=comm)


def test_communication_options_of_functions_that_name_an_axis():
    case = cases.BY_NAME["ag"].replace(per_shard=(3, 5, 7))
    with pytest.raises(ValueError, match=r"all_gather_matmul: comm\.algorithm='fused' needs the pattern all_reduce"):
        modes.in_shard_map(case, comm=CommOptions(algorithm="fused"))(*case.values(np.random.default_rng(0)))


def test_hostmp_agrees_on_every_algorithm_of_every_pattern(rng):
    """hostmp runs everything that Python accepts."""
    served = 0
    for name in ("local", "ag", "rs", "ar", "grid"):
        case = cases.BY_NAME[name].replace(per_shard=(2, 4, 2))
        a, b = case.integers(rng)
        taken = []
        for algorithm in jaxmp._src.core.validation.comm_options.ALGORITHMS:
            comm = CommOptions(algorithm=algorithm)
            with contextlib.suppress(ValueError):
                jax.eval_shape(modes.with_in_shardings(case, comm=comm), a, b)
                taken.append({"comm": comm})
        for d in multiply(case, a, b, taken):
            np.testing.assert_array_equal(np.asarray(d), a @ b)
        served += len(taken)
    assert served == 2 * 5 + 3 + 2 + 3 + 1 + 1
