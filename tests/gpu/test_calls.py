"""The custom call on one CUDA device: numbers, transforms, programs, and memory after ten thousand calls.

One rank uses cuBLASMp's local Matmul, with every epilog and type; the surrounding program is an ordinary one.
"""

import collections
import ctypes
import functools
import os
import re
import zlib

import cases
import drawn
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import suite
import test_transforms
from gpu import alone, cublasmp
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, testing
from jaxmp._src.core.lowering import fixed_shape
from jaxmp._src.platform.runtime import native

pytestmark = pytest.mark.usefixtures("cublasmp")
ask = functools.partial(jaxmp.matmul, implementation="cublasmp")
PATTERNS = ("local", "ag-data", "rs-data", "ar-data", "grid")


def trials():
    """Returns every epilog in every type of 16 and 32 bits, other types without, every pattern and transposition."""
    found = []
    for name in PATTERNS:
        case = alone(cases.BY_NAME[name]).replace(per_shard=(40, 48, 56))
        for dtype in ("float32", "bfloat16", "float16"):
            for epilog in suite.EPILOGS if name != "grid" else (Epilog.NONE,):
                transposition = "TN" if epilog in suite.OPERAND_SUMS else "NN"
                found.append(case.replace(dtype=dtype, epilog=epilog, transposition=transposition))
        found += [case.replace(dtype=dtype) for dtype in ("float64", "complex64", "complex128")]
        found += [case.replace(transposition=transposition, has_c=True) for transposition in cases.TRANSPOSITIONS]
    for case in found:
        scalars = {"alpha": 1.5, "beta": -0.5} if case.has_c else {}
        trial = suite.Trial(case, implementation="cublasmp", **scalars)
        if trial.is_possible():
            yield pytest.param(trial, id=trial.id)
    for batch in ("rows", "columns", "both"):
        case = alone(cases.BY_NAME["local"]).replace(per_shard=(40, 48, 56))
        trial = suite.Trial(case, implementation="cublasmp", batch=batch, has_remat=True)
        yield pytest.param(trial, id=trial.id)


@pytest.mark.parametrize("trial", list(trials()))
def test_numbers(trial):
    """Judges outputs and gradients by the componentwise bound."""
    rng = np.random.default_rng(zlib.crc32(trial.id.encode()))
    drawn.check_on(trial, ["integers" if trial.batch else "normal"], rng)


@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_element_is_in_its_place(name, transposition, rng):
    case = alone(cases.BY_NAME[name]).replace(per_shard=(24, 16, 32), transposition=transposition)
    mode = modes.BY_ID["explicit"]
    a, b = case.integers(rng)
    with mode.scope(case):
        operands = [mode.put(case, x, spec) for x, spec in zip((a, b), case.stored, strict=True)]
        got = mode.run(mode.product(case, implementation="cublasmp"), *operands)
    np.testing.assert_array_equal(np.asarray(got), np.matmul(*case.op(a, b)))


CASES = [alone(case).replace(per_shard=test_transforms.EXTENTS) for case in cases.MATRIX]


@pytest.mark.parametrize("transform", test_transforms.TRANSFORMS, ids=lambda transform: transform.__name__)
@pytest.mark.parametrize(("mode", "case"), modes.pairs(modes.MODES, CASES))
def test_transform(mode, case, transform):
    with mode.scope(case):
        program = functools.partial(transform, mode.product(case, implementation="cublasmp"))
        got = mode.run(program, test_transforms.placed(mode, case))
    expected = test_transforms.expected(transform, test_transforms.EXTENTS)
    test_transforms.judge_all(f"{mode.id} {case.name} {transform.__name__}", got, expected)


def test_float8():
    """Quantised numbers are exact; the product equals the product of the decoded numbers, rounded once."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(jnp.float8_e4m3fn) for shape in ((64, 128), (32, 128)))
    d = ask(jnp.asarray(a), jnp.asarray(b), transpose_b=True, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(np.asarray(d), a.astype(np.float32) @ b.astype(np.float32).T)


def test_a_product_over_nothing():
    d = ask(jnp.ones((8, 0)), jnp.ones((0, 16)), jnp.ones((8, 16)), beta=3.0)
    np.testing.assert_array_equal(np.asarray(d), np.full((8, 16), 3.0, np.float32))


# Lets an interrupted run continue (gpu_session.py).
SHARES = 54


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_promise_about_bits(share, monkeypatch):
    """Runs the checker's shorter list; its error names the first shape that breaks a promise."""
    if "JAXMP_FAKES" in os.environ:  # smaller calls, because the fakes run the padding kernels' threads one by one
        monkeypatch.setattr(testing, "SOME_ROWS", (1, 3))
        monkeypatch.setattr(fixed_shape, "ROWS", 128)
        monkeypatch.setattr(fixed_shape, "COLUMNS", 256)
    with jax.enable_x64(True):
        checks = list(testing.checks(is_quick=True, implementations=(testing.ON_GPUS,)))[share::SHARES]
        assert checks
        for check in checks:
            print(check.promise, check.subject, check.run(), "products equal")


# ---- programs


def layer(x, up, down, bias):
    h, _ = ask(x, up, epilog=Epilog.GELU_AUX_BIAS, epilog_inputs={"bias": bias})
    return ask(h, down)


def test_a_program_holds_our_calls_and_nothing_else():
    shapes = (32, 64), (64, 96), (96, 64), (96,)
    operands = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    rows = jaxmp.explain(layer)(*operands).rows
    assert [row.implementation for row in rows] == ["cublasmp"] * 2
    program = jax.jit(layer).lower(*operands).compile().as_text()
    calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', program))
    assert calls["jaxmp_matmul"] == 2
    assert not [name for name in calls if "cublas" in name]
    assert not re.search(r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|dot)\(", program)


def test_equal_calls_share_a_plan_and_repeated_ones_make_none():
    native.plan_cache_clear()
    a, b = jnp.ones((16, 24)), jnp.ones((24, 40))
    program = jax.jit(lambda a, b: ask(a, b) + ask(a * 2, b))
    jax.block_until_ready(program(a, b))
    made = native.plan_cache_info()
    assert made["misses"] == 1
    for _ in range(100):
        jax.block_until_ready(program(a, b))
    assert native.plan_cache_info() == made


def free_bytes() -> int:
    """Returns the free bytes on the first device, from the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    for status in (
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        driver.cuCtxSetCurrent(context),
        driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        driver.cuDevicePrimaryCtxRelease_v2(0),
    ):
        assert status == 0
    return free.value


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(0)
def test_ten_thousand_calls_leave_memory_as_it_was():
    """After a warm-up, device memory grows by less than an allocator's page, host memory by less than 1 KB a call."""
    a, b, c = (jnp.ones((256, 256), jnp.bfloat16) for _ in range(3))
    bias = jnp.ones(256, jnp.bfloat16)
    program = jax.jit(
        lambda a, b, c, bias: ask(a, b, c, beta=1.0, epilog=Epilog.RELU_AUX_BIAS, epilog_inputs={"bias": bias})
    )

    def run(times):
        for _ in range(times):
            result = program(a, b, c, bias)
        jax.block_until_ready(result)

    run(500)
    device, host = free_bytes(), resident_bytes()
    run(10_000)
    assert device - free_bytes() <= 2**21
    assert resident_bytes() - host <= 2**23


def test_shards_of_one_device_take_the_pattern_of_their_axis():
    """The library gets the pattern although the rank is alone."""
    mesh = jax.make_mesh((1,), ("y",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        a, b = (jax.device_put(jnp.ones((16, 16)), jax.NamedSharding(mesh, P(*spec))) for spec in (("y",), (None, "y")))
        (row,) = jaxmp.explain(functools.partial(ask, out_sharding=P(None, "y")))(a, b).rows
    assert (row.pattern, row.implementation) == ("all_gather", "cublasmp")
