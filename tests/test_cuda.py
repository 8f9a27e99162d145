"""The way to the real cuBLASMp on machines without a GPU: finding it, choosing it, and the program that calls it.

Silently wrong without these: a second NCCL in the process, whose communicators are garbage to the first; a library of
another CUDA; a rank that chooses otherwise than its peers and leaves them waiting; attributes that only a GPU reads.
"""

import functools
import importlib
import re
import sys
import types

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, _choice, _compat, _config, _cuda, _native
from jaxmp._route import why_card_refuses
from jaxmp._spec import MatmulSpec, Pattern

# ---- finding the libraries


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Return `wheels("cu13", "nccl")`, which lays out the files of those wheels and nothing else."""

    def lay_out(*names):
        folders = {"cu13": "cublasmp/cu13/lib", "cu12": "cublasmp/cu12/lib", "nccl": "nccl/lib"}
        for name in names:
            folder = tmp_path / "nvidia" / folders[name]
            folder.mkdir(parents=True)
            (folder / (_cuda.NCCL if name == "nccl" else _cuda.CUBLASMP)).write_bytes(b"")
        monkeypatch.setattr(_cuda, "_wheel_roots", lambda: [tmp_path / "nvidia"])
        return tmp_path / "nvidia"

    monkeypatch.setattr(_cuda, "_MAPS", str(tmp_path / "maps"))
    monkeypatch.setattr(_cuda, "_plugins", lambda: ("cu13",))
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n7f02-7f03 rw-p 0 00:00 0\n")
    return lay_out


def load(tmp_path, *paths):
    """Pretend that the process has these files in its memory, each in two mappings."""
    lines = [f"7f00-7f01 r-xp 00000000 08:01 42 {path}\n" * 2 for path in paths]
    (tmp_path / "maps").write_text("".join(lines))


def test_the_wheels_are_found_where_they_put_their_files(wheels):
    root = wheels("cu13", "nccl")
    found = _cuda.find()
    assert found.cublasmp == str(root / "cublasmp/cu13/lib/libcublasmp.so.0")
    assert found.nccl == str(root / "nccl/lib/libnccl.so.2")
    assert found.driver == "libcuda.so.1"


def test_wheels_share_the_folder_nvidia_on_the_import_path(tmp_path, monkeypatch):
    for place, folder in (("one", "cublasmp/cu13/lib"), ("two", "nccl/lib")):
        (tmp_path / place / "nvidia" / folder).mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / place)
    for name in [name for name in sys.modules if name == "nvidia" or name.startswith("nvidia.")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert {tmp_path / "one/nvidia", tmp_path / "two/nvidia"} <= set(_cuda._wheel_roots())


def test_without_wheels_the_loader_looks(wheels):
    wheels()
    found = _cuda.find()
    assert (found.cublasmp, found.nccl) == ("libcublasmp.so.0", "libnccl.so.2")


def test_without_a_plugin_both_cudas_will_do_and_the_newer_is_taken(wheels, monkeypatch):
    monkeypatch.setattr(_cuda, "_plugins", lambda: ())
    wheels("cu12", "nccl")
    assert "/cu12/" in _cuda.find().cublasmp
    wheels("cu13")
    assert "/cu13/" in _cuda.find().cublasmp


def test_a_library_for_another_cuda_names_both_and_the_remedy(wheels):
    root = wheels("cu12", "nccl")
    with pytest.raises(RuntimeError) as caught:
        _cuda.find()
    assert str(caught.value) == (
        f"cuBLASMp is installed for CUDA 12 ({root}/cublasmp/cu12/lib/libcublasmp.so.0), but JAX's plugin is for CUDA "
        "13; pip install 'jaxmp[cuda13]'"
    )


def test_the_nccl_in_the_process_may_be_the_wheels(wheels, tmp_path):
    """XLA has opened the same file by then, perhaps by another name."""
    root = wheels("cu13", "nccl")
    (tmp_path / "libnccl.so.2.30.7").symlink_to(root / "nccl/lib/libnccl.so.2")
    load(tmp_path, tmp_path / "libnccl.so.2.30.7")
    assert _cuda.find().nccl == str(root / "nccl/lib/libnccl.so.2")


def test_a_second_nccl_names_both_and_the_remedy(wheels, tmp_path):
    root = wheels("cu13", "nccl")
    other = tmp_path / "my system" / "libnccl.so.2"  # a blank in the path
    other.parent.mkdir()
    other.write_bytes(b"")
    load(tmp_path, other)
    with pytest.raises(RuntimeError) as caught:
        _cuda.find()
    assert str(caught.value) == (
        f"this process has loaded NCCL from {other}, but cuBLASMp would use {root}/nccl/lib/libnccl.so.2, and one "
        f"process takes one NCCL; take {other.parent} off LD_LIBRARY_PATH and LD_PRELOAD, or uninstall what loads it"
    )


def test_two_nccls_in_the_process_are_named(wheels, tmp_path):
    wheels("cu13")
    load(tmp_path, "/a/libnccl.so.2", "/b/libnccl.so.2.29.7")
    with pytest.raises(RuntimeError, match=r"two NCCLs, /a/libnccl\.so\.2 and /b/libnccl\.so\.2\.29\.7; .*uninstall"):
        _cuda.find()


def test_an_nccl_that_is_loaded_serves_where_no_wheel_has_one(wheels, tmp_path):
    wheels("cu13")
    load(tmp_path, "/opt/libnccl.so.2")
    assert _cuda.find().nccl == "/opt/libnccl.so.2"


def test_a_system_without_maps_has_loaded_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(_cuda, "_MAPS", str(tmp_path / "absent"))
    assert _cuda.mapped_files("libnccl") == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_maps_of_this_process_are_read():
    assert any(path.endswith(".so") or ".so." in path for path in _cuda.mapped_files("lib"))


def test_what_the_processes_of_a_job_compare(monkeypatch):
    versions = {"nvidia-cublasmp-cu13": "0.10.0.3695"}

    def version(name):
        try:
            return versions[name]
        except KeyError:
            raise _cuda.importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(_cuda.importlib.metadata, "version", version)
    for plugins, want in (
        (("cu13",), "nvidia-cublasmp-cu13-0.10.0.3695"),
        (("cu13", "cu12"), "nvidia-cublasmp-cu13-0.10.0.3695"),
        (("cu12",), "none"),
        ((), "none"),
    ):
        monkeypatch.setattr(_cuda, "_plugins", lambda plugins=plugins: plugins)
        assert _cuda.installed() == want


# ---- opening them


class FakeExtension:
    """The extension's functions for cuBLASMp, which note their calls."""

    failure = ""

    def __init__(self, refusal=""):
        self.calls, self.refusal = [], refusal

    def cuda_failure(self):
        return self.failure

    def load_cublasmp(self, *paths):
        self.calls.append(("load_cublasmp", *paths))
        if self.refusal:
            raise RuntimeError(self.refusal)

    def cublasmp_log(self):
        return ["a line"]

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def opening(wheels, monkeypatch):
    """Return `opening(refusal)`, a fake extension in a process that has not asked for cuBLASMp yet."""

    def make(refusal=""):
        module = FakeExtension(refusal)
        monkeypatch.setattr(_native, "extension", lambda: module)
        return module

    monkeypatch.setattr(_native._compat, "translate_errors", lambda translate: None)
    monkeypatch.setattr(_native, "_why_no_cublasmp", None)
    wheels("cu13", "nccl")
    return make


def test_the_library_is_opened_once_with_the_configuration(opening, monkeypatch):
    module = opening()
    config = _config.parse({"JAXMP_LOG": "cublasmp", "JAXMP_TIMEOUT": "7"})
    monkeypatch.setattr(_native, "config", lambda: config)
    assert (_native.why_no_cublasmp(), _native.why_no_cublasmp()) == ("", "")
    found = _cuda.find()
    *settings, load_call = module.calls
    assert settings == [("set_cublasmp_log", True), ("set_timeout", 7.0), ("set_exchange", None)]
    assert load_call == ("load_cublasmp", found.cublasmp, found.nccl, found.driver)
    assert _native.cublasmp_log() == ["a line"]


def test_the_deadline_of_initialize_goes_before_that_of_the_environment(opening, monkeypatch):
    module = opening()
    monkeypatch.setattr(_native, "_timeout", 3.0)
    _native.why_no_cublasmp()
    assert ("set_timeout", 3.0) in module.calls


def test_why_it_cannot_be_opened_stays(opening):
    module = opening(why := "libcuda.so.1 cannot be opened")
    assert (_native.why_no_cublasmp(), _native.why_no_cublasmp()) == (why, why)
    assert [call[0] for call in module.calls].count("load_cublasmp") == 1
    assert _native.cublasmp_log() == []


def test_a_conflict_of_libraries_opens_none(opening, monkeypatch):
    module = opening()

    def refuse():
        raise RuntimeError("two NCCLs")

    monkeypatch.setattr(_cuda, "find", refuse)
    assert (_native.why_no_cublasmp(), module.calls) == ("two NCCLs", [])


def test_a_machine_without_a_driver_is_told_so(wheels, monkeypatch):
    """The extension's own answer."""
    cases.require("host")
    wheels()
    monkeypatch.setattr(_native, "_why_no_cublasmp", None)
    monkeypatch.setattr(_cuda, "DRIVER", "libcuda-absent.so.1")
    why = _native.why_no_cublasmp()
    assert "the CUDA driver cannot be opened as libcuda-absent.so.1" in why
    assert "install NVIDIA's driver" in why
    assert _native.cublasmp_info() == {}


@pytest.mark.parametrize(("platforms", "want"), [("cpu", ["cpu"]), ("cpu cuda", ["cpu", "CUDA"]), ("cuda", ["CUDA"])])
def test_the_call_is_registered_where_there_are_devices(platforms, want, monkeypatch):
    """Types ahead of the targets that use them, and the library open ahead of both."""
    done = []
    capsules = {name: (lambda name=name: {name: {}}) for name in ("types", "registrations")}
    capsules |= {f"cuda_{name}": (lambda name=name: {f"cuda_{name}": {}}) for name in ("types", "registrations")}
    monkeypatch.setattr(_native, "extension", lambda: types.SimpleNamespace(**capsules))
    monkeypatch.setattr(_native, "_is_registered", False)
    monkeypatch.setattr(_native, "_devices", lambda platform: ["a device"] if platform in platforms.split() else [])
    monkeypatch.setattr(_native, "why_no_cublasmp", lambda: done.append("open") or "")
    for name in ("register_ffi_type", "register_ffi_target"):
        monkeypatch.setattr(jax.ffi, name, lambda name, _, platform: done.append((name, platform)))
    _native.register()
    _native.register()
    expected = {
        "cpu": [("types", "cpu"), ("registrations", "cpu")],
        "CUDA": ["open", ("cuda_types", "CUDA"), ("cuda_registrations", "CUDA")],
    }
    assert done == [step for platform in want for step in expected[platform]]


def test_a_failed_launch_is_told_by_its_reason(opening, monkeypatch):
    """XLA says CUDA_ERROR_LAUNCH_FAILED; why the communicators were aborted is ours to say."""
    module = opening()
    error = jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED")
    assert _native._translated(error) is None
    module.failure = "matmul at train.py:41: rank 1 of 4 did not come within 60 s"
    assert (type(_native._translated(error)), str(_native._translated(error))) == (RuntimeError, module.failure)
    monkeypatch.setattr(jaxmp.distributed, "_state", object())
    translated = jaxmp.distributed._translated(error)
    assert (type(translated), str(translated)) == (jaxmp.distributed.DistributedError, module.failure)


# ---- ids between processes


class FakeStore:
    """JAX's store, whose waiting ends at once."""

    def __init__(self):
        self.values, self.waits = {}, []

    def key_value_set_bytes(self, key, value):
        assert key not in self.values, "JAX's store refuses a second value"
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key, milliseconds):
        self.waits.append(milliseconds)
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]


def test_ids_travel_through_the_store(monkeypatch):
    store = FakeStore()
    monkeypatch.setattr(_native._compat, "distributed_client", lambda: store)
    assert _native._exchange("nccl/y/0", b"\0id\xff", 5.0) == b"\0id\xff"
    assert store.values == {"nccl/y/0": b"\0id\xff"}
    assert _native._exchange("nccl/y/0", None, 5.0) == b"\0id\xff"
    assert store.waits == [5000]
    with pytest.raises(TimeoutError, match=r"nobody has published nccl/y/1 within 0\.25 s; a process of"):
        _native._exchange("nccl/y/1", None, 0.25)


def test_without_a_store_nothing_travels(monkeypatch):
    monkeypatch.setattr(_native._compat, "distributed_client", lambda: None)
    with pytest.raises(RuntimeError, match=r"no store is left for nccl/y/0: jax\.distributed\.shutdown\(\)"):
        _native._exchange("nccl/y/0", None, 1.0)


# ---- the rule


@pytest.fixture
def cards(monkeypatch):
    """Return `cards("9.0", "9.0")`, which gives this process CUDA devices of these compute capabilities."""
    cases.require("host")

    def plug_in(*capabilities, why=""):
        client = types.SimpleNamespace()
        devices = [types.SimpleNamespace(compute_capability=version, client=client) for version in capabilities]
        client.devices = lambda: devices
        monkeypatch.setattr(_native, "cuda_devices", lambda: devices[:1])
        monkeypatch.setattr(_native, "why_no_cublasmp", lambda: why)

    return plug_in


SPEC = MatmulSpec(np.dtype("float32"), Pattern.ALL_GATHER, (("y", 4),), ("y",))
GRID = MatmulSpec(np.dtype("float32"), Pattern.GRID, (("x", 2), ("y", 4)), ("x",), ("y",))
FLOATS = (np.dtype("float32"),) * 2
choose = functools.partial(_choice.choose_implementation, platform="cuda", nprocesses=1, operands=FLOATS)


def test_cublasmp_is_the_default_where_it_is_open(cards):
    cards("9.0")
    for spec in (SPEC, SPEC.replace(pattern=Pattern.LOCAL, mesh=(), row_axes=())):
        chosen = choose(spec)
        assert (chosen.implementation, chosen.why) == ("cublasmp", "CUDA devices, cuBLASMp is open")
        assert choose(spec, nprocesses=4) == chosen, "NCCL crosses processes"
    assert choose(SPEC.replace(implementation="cublasmp")) == _choice.Choice("cublasmp", "asked for")
    assert choose(SPEC.replace(implementation="xla")) == _choice.Choice("xla", "asked for")


def test_a_library_that_cannot_be_opened_leaves_xla_and_says_why(cards):
    cards("9.0", why="cuBLASMp is 0.8.0, jaxmp needs 0.10")
    assert choose(SPEC) == _choice.Choice("xla", "cuBLASMp is 0.8.0, jaxmp needs 0.10")
    with pytest.raises(RuntimeError, match=r'^implementation="cublasmp": cuBLASMp is 0\.8\.0, jaxmp needs 0\.10$'):
        choose(SPEC.replace(implementation="cublasmp"))


def test_without_a_gpu_the_library_is_called_only_where_asked_for(monkeypatch):
    cases.require("host")
    monkeypatch.setattr(_native, "cuda_devices", list)
    chosen = choose(SPEC)
    assert chosen.implementation == "xla"
    assert 'lowered without a GPU, where cuBLASMp cannot be looked for; pass implementation="cublasmp"' in chosen.why
    assert choose(SPEC.replace(implementation="cublasmp")).implementation == "cublasmp"


@pytest.mark.parametrize(
    ("spec", "operands", "why"),
    [
        pytest.param(GRID, FLOATS, "cuBLASMp multiplies contiguous shards on square grids only, not 2x4", id="grid"),
        pytest.param(
            SPEC.replace(precision="F16_F16_F16"),
            (np.dtype("float16"),) * 2,
            "precision=F16_F16_F16 sums in 16 bits, which jaxmp does not ask of cuBLASMp",
            id="narrow sum",
        ),
        pytest.param(SPEC, (np.dtype("int8"),) * 2, "no source says that cuBLASMp 0.10 multiplies int8", id="int8"),
        pytest.param(
            SPEC.replace(scale_a="vec32_ue8m0", scale_b="vec32_ue8m0"),
            (jnp.dtype("float8_e4m3fn"),) * 2,
            "MXFP8 needs compute capability 10.0 or later, this card has 9.0",
            id="card",
        ),
    ],
)
def test_what_cublasmp_does_not_compute_goes_to_xla_or_is_refused_by_name(cards, spec, operands, why):
    cards("10.0", "9.0")  # the least of them counts, so that all processes choose alike
    assert choose(spec, operands=operands) == _choice.Choice("xla", why)
    with pytest.raises(NotImplementedError, match=re.escape(f'"cublasmp": {why}; pass implementation=None or "xla"')):
        choose(spec.replace(implementation="cublasmp"), operands=operands)


def test_host_is_no_choice_on_cuda(cards):
    cards("9.0")
    with pytest.raises(NotImplementedError, match="serves the CPU devices of one process, not platform 'cuda'"):
        choose(SPEC.replace(implementation="host"))


FP8, FP4 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float4_e2m1fn")


@pytest.mark.parametrize(
    ("dtype", "mode", "lowest", "highest", "what"),
    [
        (FP8, "none", (8, 9), None, "float8_e4m3fn needs compute capability 8.9 or later"),
        (FP8, "scalar_fp32", (8, 9), None, "float8_e4m3fn needs compute capability 8.9 or later"),
        (FP8, "outer_vec_fp32", (9, 0), (9, 0), "scales of outer_vec_fp32 need compute capability 9.0"),
        (FP8, "vec128_fp32", (9, 0), (9, 0), "scales of vec128_fp32 need compute capability 9.0"),
        (FP8, "blk128x128_fp32", (9, 0), (9, 0), "scales of blk128x128_fp32 need compute capability 9.0"),
        (FP8, "vec32_ue8m0", (10, 0), None, "MXFP8 needs compute capability 10.0 or later"),
        (FP4, "vec16_ue4m3", (10, 0), None, "NVFP4 needs compute capability 10.0 or later"),
    ],
)
def test_what_a_card_does_not_multiply(dtype, mode, lowest, highest, what):
    """cublasmp.h 0.10, cublasMpMatmulMatrixScale_t."""
    spec = SPEC.replace(scale_a=mode, scale_b=mode)
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        is_fit = lowest <= capability <= (highest or capability)
        why = why_card_refuses(spec, (dtype, dtype), capability)
        assert why == ("" if is_fit else f"{what}, this card has {capability[0]}.{capability[1]}")
    assert why_card_refuses(spec, (dtype, dtype), None) == ""
    assert why_card_refuses(SPEC, FLOATS, (7, 5)) == ""


# ---- the program


def texts(f, *args, platform="cuda"):
    """The custom calls of jaxmp in the program that would run on `platform`, each as its line."""
    lines = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text().splitlines()
    return [line for line in lines if "@jaxmp_matmul" in line]


def number(line, name):
    return int(re.search(rf"\b{name} = (-?\d+)", line)[1])


@pytest.fixture
def sharded(mesh_of):
    """A mesh of four and operands of the three one-dimensional patterns."""
    mesh = mesh_of({"y": 4})

    def put(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        yield put


ask = functools.partial(jaxmp.matmul, implementation="cublasmp")


def test_a_program_for_cuda_calls_the_library(sharded):
    cases.require("host")
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    (line,) = texts(functools.partial(ask, out_sharding=P(None, "y"), epilog=Epilog.GELU), a, b)
    assert 'pattern = "all_gather"' in line
    assert [number(line, name) for name in "mnk"] == [12, 8, 16], "columns come first"
    assert number(line, "epilog") == 32
    assert 'determinism = "run_to_run"' in line
    assert "devices = dense<> " in line, "the program is for other devices than these"


def test_the_same_program_without_asking_is_xlas(sharded):
    cases.require("host")
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    assert not texts(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")), a, b)


def test_a_profile_says_that_cublasmp_multiplies(sharded):
    cases.require("host")
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    f = jax.jit(functools.partial(ask, out_sharding=P(None, "y")))
    text = f.trace(a, b).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "jaxmp all_gather 8x16x12 f32*f32->f32 run_to_run (cuBLASMp)/" in text


@pytest.fixture
def required(cards, monkeypatch):
    """In a process with CUDA devices, the primitives whose lowerings have come to serve some devices alone."""
    primitives = []
    cards("9.0")
    monkeypatch.setattr(_native, "register", lambda: None)
    monkeypatch.setattr(_compat, "require_devices", primitives.extend)
    return primitives


def test_what_runs_here_names_its_devices(sharded, required):
    """A communicator belongs to devices, so a program that is lowered for some serves no others."""
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    ids = ", ".join(str(device.id) for device in jax.devices()[:4])
    (line,) = texts(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")), a, b)
    assert f"devices = dense<[{ids}]>" in line
    assert {primitive.name for primitive in required} == {"jaxmp_matmul", "jaxmp_matmul_epilog"}


def test_meshes_of_one_shape_have_lowerings_of_their_own(cards, monkeypatch):
    """JAX would give the second mesh the program of the first, with the first one's communicator."""
    require_devices(8)
    cards("9.0")
    monkeypatch.setattr(_native, "register", lambda: None)
    dispatch = _compat._dispatch
    monkeypatch.setattr(dispatch, "prim_requires_devices_during_lowering", set())  # as in a process of its own
    product = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))
    for order in ([0, 1, 2, 3], [4, 5, 6, 7], [3, 2, 1, 0], [0, 1, 2, 3]):
        mesh = Mesh(np.array(jax.devices())[order], ("y",), axis_types=(AxisType.Explicit,))
        a, b = (
            jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
            for spec in (("y", None), (None, "y"))
        )
        with jax.set_mesh(mesh):
            text = product.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
        assert f"devices = dense<[{', '.join(map(str, order))}]>" in text


def test_one_rank_needs_no_devices(required):
    (line,) = texts(jaxmp.matmul, *(jax.ShapeDtypeStruct((4, 4), jnp.float32),) * 2)
    assert "devices = dense<> " in line
    assert not required


@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
def test_an_all_reduce_reaches_the_library_in_its_one_form(sharded, transposition):
    """TN in cuBLASMp's terms; what comes otherwise is copied, or scattered and gathered."""
    cases.require("host")
    ta, tb = (letter == "T" for letter in transposition)
    a = sharded((16, 8), "y", None) if ta else sharded((8, 16), None, "y")
    b = sharded((12, 16), None, "y") if tb else sharded((16, 12), "y", None)
    f = functools.partial(ask, out_sharding=P(None, None), transpose_a=ta, transpose_b=tb)
    (line,) = texts(f, a, b)
    assert ('pattern = "all_reduce"' in line) == ('trans_a = "T"' in line and 'trans_b = "N"' in line)
    assert 'pattern = "all_reduce"' in line or 'pattern = "reduce_scatter"' in line


def test_a_grid_has_its_epilog_beside_the_call(mesh_of):
    cases.require("host")
    mesh = mesh_of({"x": 2, "y": 2})
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    with jax.set_mesh(mesh):
        (line,) = texts(functools.partial(ask, out_sharding=P("x", "y"), epilog=Epilog.GELU), x, x)
    assert 'pattern = "grid"' in line
    assert number(line, "epilog") == 0


@pytest.mark.parametrize("shapes", [((8, 0), (0, 12)), ((0, 16), (16, 12))], ids=["k", "m"])
def test_nothing_to_multiply_is_no_call(shapes):
    cases.require("host")
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    assert not texts(ask, a, b)


def test_gradients_for_cuda_are_calls_of_the_library(sharded):
    cases.require("host")
    a, b = sharded((8, 16), None, "y"), sharded((16, 12), "y", None)

    def loss(a, b):
        return jnp.sum(ask(a, b, out_sharding=P("y", None)))

    lines = texts(jax.grad(loss, (0, 1)), a, b)
    assert sorted(re.search(r'pattern = "(\w+)"', line)[1] for line in lines) == ["all_gather", "local"]


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_program_for_cuda_is_exported(mesh_of, axis_type):
    cases.require("host")
    pytest.importorskip("flatbuffers")
    mesh = mesh_of({"y": 4}, axis_type)
    shardings = {"in_shardings": (P("y", None), P(None, "y"))} if axis_type == AxisType.Auto else {}
    f = functools.partial(ask, out_sharding=P(None, "y"), **shardings)
    a = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=NamedSharding(mesh, P("y", None)))
    b = jax.ShapeDtypeStruct((16, 12), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "y")))
    with jax.set_mesh(mesh):
        exported = jax.export.export(
            jax.jit(f), platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jaxmp_matmul")]
        )(a, b)
    again = jax.export.deserialize(exported.serialize())
    assert (again.platforms, again.nr_devices) == (("cuda",), 4)
    assert '"all_gather"' in again.mlir_module()


def test_one_export_serves_both_platforms(sharded):
    """Without asking: hostmp on CPUs, XLA's products on GPUs."""
    cases.require("host")
    pytest.importorskip("flatbuffers")
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    exported = jax.export.export(
        jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y"))),
        platforms=["cpu", "cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jaxmp_matmul")],
    )(a, b)
    module = exported.mlir_module()
    assert module.count("@jaxmp_matmul") == 1
    assert "stablehlo.all_gather" in module


# ---- explain


def test_explain_tells_what_cublasmp_will_be_asked(sharded, cards, monkeypatch):
    cards("9.0")
    monkeypatch.setattr(_native._compat, "default_platform", lambda: "cuda")
    monkeypatch.setattr(_native, "cublasmp_log", lambda: ["[cublasMpMatmul] Using AllGather + Matmul"])
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    explanation = jaxmp.explain(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))(a, b)
    (row,) = explanation.rows
    assert (row.implementation, row.why) == ("cublasmp", "CUDA devices, cuBLASMp is open")
    assert row.algorithm == "cublasmp AllGather + Matmul; workspace from its first run on"
    assert (row.workspace, row.bytes_moved) == (0, 3 * 2 * 16 * 4)
    assert explanation.logged == ("[cublasMpMatmul] Using AllGather + Matmul",)
    assert str(explanation).endswith("cuBLASMp logged: [cublasMpMatmul] Using AllGather + Matmul")


def test_explain_names_the_route_of_an_all_reduce(sharded, cards, monkeypatch):
    cards("9.0")
    monkeypatch.setattr(_native._compat, "default_platform", lambda: "cuda")
    a, b = sharded((8, 16), None, "y"), sharded((16, 12), "y", None)
    (row,) = jaxmp.explain(functools.partial(jaxmp.matmul, out_sharding=P(None, None)))(a, b).rows
    assert (row.implementation, row.workspace) == ("cublasmp", 0)
    assert row.algorithm.startswith("transposed_copy (cuBLASMp all-reduces with a stored (m, k) and b stored (n, k)")


def test_explain_says_why_cublasmp_is_not_used(sharded, cards, monkeypatch):
    cards("9.0", why="libcublasmp.so.0 cannot be opened")
    monkeypatch.setattr(_native._compat, "default_platform", lambda: "cuda")
    a, b = sharded((8, 16), None, "y"), sharded((16, 12), "y", None)
    (row,) = jaxmp.explain(functools.partial(jaxmp.matmul, out_sharding=P(None, None)))(a, b).rows
    assert (row.implementation, row.why) == ("xla", "libcublasmp.so.0 cannot be opened")
