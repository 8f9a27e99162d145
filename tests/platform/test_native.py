"""The extension as Python sees it: loading, versions, registration, plans and their counters. Without these tests, a
stale extension could read new attributes, different calls could share a plan, and an import could start JAX's backend
before `jax.distributed.initialize`."""

import concurrent.futures
import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import subprocess
import sys
import types

import cases
import jax
import numpy as np
import pytest

import jaxmp
from jaxmp._src.platform.runtime import config as config_lib
from jaxmp._src.platform.runtime import logs, native


@pytest.fixture
def extension():
    """Returns the loaded extension, with an empty plan cache."""
    cases.require("host")
    native.plan_cache_clear()
    return native.extension()


def test_the_package_and_the_extension_are_of_one_version(extension):
    assert jaxmp.__version__ == importlib.metadata.version("jaxmp") == extension.version()


def attributes(pattern="local", m=4, n=5, k=6, mesh=(), **changes):
    """Returns the FFI attributes of a float32 call."""
    without = ["dtype_c", "dtype_bias", "dtype_aux", "d_out_scale_mode", "communication_dtype"]
    without += [f"scale_mode_{of}" for of in ("a", "b", "c", "d", "aux")]
    empty = ("axes_col", "devices", "layout_a", "layout_b", "layout_d")
    numbers = {"m": m, "n": n, "k": k} | dict.fromkeys(("amax_d", "amax_aux", "epilog", "comm_sm_count"), 0)
    call = {
        **{"pattern": pattern, "compute": "32F", "determinism": "run_to_run", "algorithm": "default"},
        **dict.fromkeys(("trans_a", "trans_b"), "N"),
        **dict.fromkeys(("dtype_a", "dtype_b", "dtype_d"), "f32"),
        **dict.fromkeys(without, "none"),
        **{name: np.int64(number) for name, number in numbers.items()},
        **{"alpha": np.array([1.0, 0.0]), "beta": np.array([0.0, 0.0])},
        **{"mesh_shape": np.array(mesh, np.int64), "axes_row": np.arange(len(mesh), dtype=np.int64)},
        **{name: np.array([], np.int64) for name in empty},
    }
    return {**call, **changes}


def custom_call(a, b, **changes):
    """Computes row-major `a @ b` with the bare custom call."""
    native.register()
    (m, k), n = a.shape, b.shape[1]
    call = attributes(**{"m": n, "n": m, "k": k, **changes})
    with jax.enable_x64(True):
        return jax.ffi.ffi_call(native.TARGET, jax.ShapeDtypeStruct((m, n), a.dtype))(b, a, **call)


IMPORT = """
import sys, jaxmp
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert "jaxmp._jaxmp" not in sys.modules
jaxmp._src.platform.runtime.native.blas_info()
"""


def test_import_loads_nothing_and_names_a_misspelt_variable(extension):
    """The import alone warns, at its own line. A missing BLAS is named."""
    env = os.environ | {f"JAXMP_{'TIMOUT'}": "5", "JAXMP_TIMEOUT": "5", "JAXMP_BLAS": "/nowhere/libblas.so"}
    ran = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, timeout=120)
    assert re.findall(r"(\S+): UserWarning: .* variable (\w+)", ran.stderr) == [("<string>:2", f"JAXMP_{'TIMOUT'}")]
    assert ran.returncode == 1
    assert "/nowhere/libblas.so" in ran.stderr.splitlines()[-1]


def test_the_systems_openblas_serves_without_scipys(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert native._blas_path() == "libopenblas.so.0"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libopenblas.so.0").touch()
    assert native._blas_path() == str(tmp_path / "lib" / "libopenblas.so.0")


def fake_module(**values):
    known = {"abi_version": native.ABI_VERSION, "version": "9.9.9", "jaxlib_version": "0.10.2", **values}
    return types.SimpleNamespace(**{name: (lambda value=value: value) for name, value in known.items()})


def test_other_versions_name_both_and_the_remedy():
    with pytest.raises(ImportError) as caught:
        native._check_versions(fake_module(abi_version=1))
    assert str(caught.value) == (
        f"jaxmp's Python files need extension ABI {native.ABI_VERSION} but jaxmp._jaxmp (jaxmp 9.9.9) has ABI 1; "
        "reinstall jaxmp so that both come from one version."
    )
    with pytest.raises(ImportError, match=r"FFI headers of jaxlib 99\.1\.2 but jaxlib .* is installed; upgrade jaxlib"):
        native._check_versions(fake_module(jaxlib_version="99.1.2"))
    assert native._release("0.9.9") < native._release("0.10.2") < native._release("0.12.0.1")
    assert native._release("0.10.2.dev20260101") == (0, 10, 2)


def test_a_missing_extension_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setitem(sys.modules, "jaxmp._jaxmp", None)
    with pytest.raises(ImportError, match=r'extension cannot be loaded.*pass implementation="xla"') as caught:
        native.extension()
    assert f"imported {os.path.dirname(jaxmp.__file__)}. If jaxmp is installed elsewhere, " in str(caught.value)


PRODUCTS = """
import hashlib, jax, numpy as np, jaxmp
from jaxmp._src.platform.runtime import native
rng = np.random.default_rng(0)
print(native.blas_info()["instruction set"])
for dtype in ("float32", "float16", "complex64"):
    a, b = (rng.normal(size=shape).astype(dtype) for shape in ((37, 300), (300, 29)))
    print(hashlib.sha1(np.asarray(jaxmp.matmul(a, b, determinism="batch", implementation="host"))).hexdigest())
"""


@functools.cache
def products_with(instruction_set):
    """Returns (stderr, instruction set, digests of float32, float16 and complex64) of a separate process."""
    env = {**os.environ, "JAXMP_ISA": instruction_set, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PRODUCTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    return (done.stderr, *done.stdout.split())


@pytest.mark.parametrize("name", config_lib.INSTRUCTION_SETS)
def test_an_instruction_set_is_used_or_refused_by_name(name, extension):
    error, *found = products_with(name)
    if f"JAXMP_ISA is '{name}', but this processor has no \"{name}\"" in error:
        pytest.skip(f"this processor has no {name}")
    assert found[0] == name, error
    # All instruction sets but "portable" have a fused multiply-add, and sum in one order under a level.
    _, _, *best = products_with("")
    assert len(best) == 3
    assert (found[1:] == best) == (name != "portable" or products_with("")[1] == "portable")


def test_the_processors_instruction_set_and_the_blas_are_named(extension):
    assert products_with("")[1] in config_lib.INSTRUCTION_SETS
    info, dtypes = native.blas_info(), ("f32", "f64", "c64", "c128", "bf16", "f16", "s8")
    assert set(info) == {"library", "config", "instruction set", *dtypes}
    assert "openblas" in info["library"]
    assert all(info[dtype] for dtype in dtypes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JAXMP_LOG", "plan,plans", "JAXMP_LOG takes plan, backend, distributed, cublasmp but has plans."),
        ("JAXMP_PLAN_CACHE_SIZE", "0", "JAXMP_PLAN_CACHE_SIZE must be a whole number of at least 1 but is '0'."),
        ("JAXMP_PLAN_CACHE_SIZE", "many", "JAXMP_PLAN_CACHE_SIZE must be a whole number of at least 1 but is 'many'."),
        (
            "JAXMP_ISA",
            "sse",
            "JAXMP_ISA must be one of 'amx', 'avx512_bf16', 'avx512_vnni', 'avx512', 'avx_vnni', 'avx2', "
            "'neon_dotprod', 'neon', 'portable' but is 'sse'.",
        ),
    ],
)
def test_a_variable_that_means_nothing_is_an_error(name, value, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        config_lib.parse({name: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("end", "advice"),
    [
        ("_TIMOUT", "did you mean JAXMP_TIMEOUT?"),
        ("LOG", "did you mean JAXMP_LOG?"),
        ("_log", "did you mean JAXMP_LOG?"),
        ("_FUZ", "did you mean JAXMP_FUZZ?"),
        ("_NUMBER_OF_GREEN_THINGS", "there are JAXMP_AGREEMENT, JAXMP_BLAS, JAXMP_ISA, "),
    ],
)
def test_a_misspelt_variable_is_named_once(end, advice, monkeypatch):
    name = f"JAXMP{end}"
    monkeypatch.setattr(config_lib, "_named", set())
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=re.escape(f"no environment variable {name}, so it has no effect; {advice}")):
        config_lib.config.__wrapped__()
    config_lib.config.__wrapped__()  # warnings are errors here


def test_known_variables_are_not_warned_of(monkeypatch):
    monkeypatch.setattr(config_lib, "_named", set())
    for name in (*config_lib.VARIABLES, *config_lib.TEST_VARIABLES):
        monkeypatch.setenv(name, config_lib.VARIABLES.get(name, ("", ""))[1])
    config_lib.config.__wrapped__()


def test_plan_cache_counts_hits_and_misses(extension):
    native.describe_plan(attributes())
    native.describe_plan(attributes())
    native.describe_plan(attributes(k=7))
    info = native.plan_cache_info()
    assert info == {"hits": 1, "misses": 2, "size": 2, "capacity": config_lib.config().plan_cache_size}
    native.plan_cache_clear()
    assert native.plan_cache_info() == {"hits": 0, "misses": 0, "size": 0, "capacity": info["capacity"]}
    extension.set_plan_cache_capacity(2)
    try:
        for k in (1, 2, 3):
            native.describe_plan(attributes(k=k))
        assert native.plan_cache_info()["size"] == 2
    finally:
        extension.set_plan_cache_capacity(info["capacity"])


@pytest.mark.parametrize(
    ("pattern", "algorithm"),
    [
        ("all_gather", "AllGather + Matmul"),
        ("reduce_scatter", "Matmul + ReduceScatter"),
        ("all_reduce", "Matmul + AllReduce"),
    ],
)
def test_describe_plan(extension, pattern, algorithm):
    plan = native.describe_plan(attributes(pattern, m=8, n=4, k=12, mesh=(4,)))
    assert plan["nranks"] == 4
    assert plan["algorithm"] == algorithm
    assert plan["kernel"] in native.kernel_of("f32")
    assert len(plan["device_workspace"]) == len(plan["host_workspace"]) == 4
    assert len(set(plan["device_workspace"])) == len(set(plan["host_workspace"])) == 1  # shards have equal sizes


NVFP4 = {"dtype_a": "f4e2m1", "dtype_b": "f4e2m1", "scale_mode_a": "vec16_ue4m3", "scale_mode_b": "vec16_ue4m3"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": np.array([1.0])}, r"attribute alpha must be float64\[2\]"),
        ({"m": 64, "n": 128, "k": 128, "trans_a": "T", **NVFP4}, r"columns of A \(m\) must be a multiple of 128"),
    ],
)
def test_a_refused_plan_says_why(extension, changes, message):
    with pytest.raises(ValueError, match=message):
        native.describe_plan(attributes(**changes))
    assert native.plan_cache_info()["size"] == 0


def test_a_plan_miss_is_logged_on_one_line(extension, caplog):
    with caplog.at_level(logging.DEBUG, "jaxmp.plan"):
        native.describe_plan(attributes(m=11))
        native.describe_plan(attributes(m=11))
        with pytest.raises(ValueError, match="needs m to be a multiple of 4"):
            native.describe_plan(attributes(pattern="all_gather", mesh=(4,), m=6))
    native.describe_plan(attributes(m=13))
    with caplog.at_level(logging.DEBUG, "jaxmp.plan"):  # XLA compiles on threads without Python's lock
        a, b = jax.ShapeDtypeStruct((7, 5), "float32"), jax.ShapeDtypeStruct((5, 3), "float32")
        jax.jit(functools.partial(jaxmp.matmul, implementation="host")).lower(a, b).compile()
    record, refused, of_xla = caplog.records
    assert "m=7 n=3 k=5" in of_xla.message or "m=3 n=7 k=5" in of_xla.message
    assert (record.name, record.levelname) == ("jaxmp.plan", "DEBUG")
    assert "needs m to be a multiple of 4, got m=6" in refused.message
    assert re.fullmatch(r"\d+ us, hostmp, .*pattern=local m=11 n=5 k=6.*", record.message)


def test_a_handler_that_raises_does_not_fail_the_call(extension, monkeypatch):
    monkeypatch.setattr(native, "_is_logging_plans", False)  # so other code sets no other log
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: unraisable.append(str(raised.object)))

    def raises(line):
        raise ArithmeticError(line)

    extension.set_plan_log(raises)
    try:
        assert native.describe_plan(attributes(m=17))["nranks"] == 1
    finally:
        extension.set_plan_log(None)

    assert "jaxmp's log of plans" in str(unraisable)


def test_the_backend_of_a_call_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.DEBUG, "jaxmp.backend"):
        jaxmp.explain(jaxmp.matmul, quiet=True)(*(jax.ShapeDtypeStruct((4, 4), "float32") for _ in "ab"))
    said = "local of shards float32[4, 4] x float32[4, 4]: host, CPU devices of one process; direct"
    assert {record.message for record in caplog.records} == {said}


@pytest.mark.parametrize("has_own_handler", [False, True])
def test_jaxmp_log_is_a_shortcut(has_own_handler, monkeypatch, capsys):
    """Lines go to stderr, or to the program's handler."""
    monkeypatch.setattr(logs, "config", lambda: config_lib.parse({"JAXMP_LOG": "backend, plan"}))
    taken, own = [], logging.Handler()
    own.emit = lambda record: taken.append(record.getMessage())
    parent, named = logging.getLogger("jaxmp"), [logging.getLogger(f"jaxmp.{topic}") for topic in ("backend", "plan")]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(parent, "handlers", [own] if has_own_handler else [])
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in named]
    try:
        logs.set_up.__wrapped__()
        assert all(each.isEnabledFor(logging.DEBUG) for each in named)
        assert not logging.getLogger("jaxmp.cublasmp").isEnabledFor(logging.DEBUG)
        assert named[0].propagate == has_own_handler  # or a later handler would print the line twice
        named[0].debug("who computes")
    finally:
        for each, level, propagate, handlers in before:
            each.setLevel(level)
            each.propagate, each.handlers = propagate, handlers
    assert taken == (["who computes"] if has_own_handler else [])
    assert capsys.readouterr().err == ("" if has_own_handler else "jaxmp.backend: who computes\n")


def on_threads(count, run):
    """Calls `run(i)` on `count` threads; an exception is raised here."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def test_many_threads_register_and_run_one_executable_at_once(extension, rng):
    on_threads(8, lambda i: native.register())
    a = rng.integers(-4, 5, (8, 200, 100)).astype(np.float32)
    b = rng.integers(-4, 5, (100, 300)).astype(np.float32)
    product = jax.jit(custom_call)
    np.testing.assert_array_equal(custom_call(a[0], b), a[0] @ b)  # eagerly

    def run(i):
        for _ in range(20):
            result = np.asarray(product(a[i], b))
        np.testing.assert_array_equal(result, a[i] @ b)

    on_threads(len(a), run)


def test_the_call_itself_checks_its_buffers(extension):
    a, b = np.ones((7, 6), np.float32), np.ones((6, 5), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a must hold 36 elements of f32 .* local shape \(6, 5\)"):
        custom_call(a, b, m=6)
