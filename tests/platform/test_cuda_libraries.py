"""The libraries of the real cuBLASMp on machines without a GPU: finding, opening and joining them. Without these tests,
the process could contain a second NCCL, which cannot read the first one's communicators, or libraries of another
CUDA."""

import importlib
import logging
import sys
import types

import cases
import jax
import jax.export
import pytest

from jaxmp._src.platform.runtime import config as config_lib
from jaxmp._src.platform.runtime import cuda_libraries, native


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Returns `wheels("cu13", "nccl")`, which creates the files of these wheels only."""

    def lay_out(*names):
        folders = {"cu13": "cublasmp/cu13/lib", "cu12": "cublasmp/cu12/lib", "nccl": "nccl/lib"}
        for name in names:
            folder = tmp_path / "nvidia" / folders[name]
            folder.mkdir(parents=True)
            (folder / (cuda_libraries.NCCL if name == "nccl" else cuda_libraries.CUBLASMP)).write_bytes(b"")
        monkeypatch.setattr(cuda_libraries, "_wheel_roots", lambda: [tmp_path / "nvidia"])
        return tmp_path / "nvidia"

    monkeypatch.setattr(cuda_libraries, "_MAPS", str(tmp_path / "maps"))
    monkeypatch.setattr(cuda_libraries, "_plugins", lambda: ("cu13",))
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n7f02-7f03 rw-p 0 00:00 0\n")
    return lay_out


def load(tmp_path, *paths):
    """Pretends that the process has mapped these files, each twice."""
    lines = [f"7f00-7f01 r-xp 00000000 08:01 42 {path}\n" * 2 for path in paths]
    (tmp_path / "maps").write_text("".join(lines))


def test_libraries_are_found_in_wheels_or_by_the_loader(wheels, tmp_path, monkeypatch):
    wheels()
    found = cuda_libraries.find()
    assert (found.cublasmp, found.nccl) == ("libcublasmp.so.0", "libnccl.so.2")
    load(tmp_path, "/opt/libnccl.so.2")  # already loaded, and used if no wheel has one
    assert cuda_libraries.find().nccl == "/opt/libnccl.so.2"
    load(tmp_path)
    root = wheels("cu13", "nccl")
    found = cuda_libraries.find()
    assert found.cublasmp == str(root / "cublasmp/cu13/lib/libcublasmp.so.0")
    assert found.nccl == str(root / "nccl/lib/libnccl.so.2")
    assert found.driver == "libcuda.so.1"
    monkeypatch.setattr(cuda_libraries, "_MAPS", str(tmp_path / "absent"))  # a system without maps
    assert cuda_libraries.mapped_files("libnccl") == []
    monkeypatch.setattr(cuda_libraries, "_MAPS", "/proc/self/maps")
    assert any(".so" in path for path in cuda_libraries.mapped_files("lib"))


def test_wheels_share_the_folder_nvidia_on_the_import_path(tmp_path, monkeypatch):
    for place, folder in (("one", "cublasmp/cu13/lib"), ("two", "nccl/lib")):
        (tmp_path / place / "nvidia" / folder).mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / place)
    for name in [name for name in sys.modules if name == "nvidia" or name.startswith("nvidia.")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert {tmp_path / "one/nvidia", tmp_path / "two/nvidia"} <= set(cuda_libraries._wheel_roots())


def test_without_a_plugin_the_newer_of_both_cudas_is_used(wheels, monkeypatch):
    monkeypatch.setattr(cuda_libraries, "_plugins", lambda: ())
    wheels("cu12", "nccl")
    assert "/cu12/" in cuda_libraries.find().cublasmp
    wheels("cu13")
    assert "/cu13/" in cuda_libraries.find().cublasmp


def test_a_library_for_another_cuda_names_both_and_the_remedy(wheels):
    root = wheels("cu12", "nccl")
    with pytest.raises(RuntimeError) as caught:
        cuda_libraries.find()
    assert str(caught.value) == (
        f"cuBLASMp is installed for CUDA 12 ({root}/cublasmp/cu12/lib/libcublasmp.so.0), but JAX's plugin is for CUDA "
        "13; pip install 'jaxmp[cuda13]'"
    )


def test_the_nccl_in_the_process_may_be_the_wheels(wheels, tmp_path):
    """XLA has already opened the same file, perhaps by another name."""
    root = wheels("cu13", "nccl")
    (tmp_path / "libnccl.so.2.30.7").symlink_to(root / "nccl/lib/libnccl.so.2")
    load(tmp_path, tmp_path / "libnccl.so.2.30.7")
    assert cuda_libraries.find().nccl == str(root / "nccl/lib/libnccl.so.2")


def test_a_second_nccl_names_both_and_the_remedy(wheels, tmp_path):
    root = wheels("cu13", "nccl")
    other = tmp_path / "my system" / "libnccl.so.2"  # a blank in the path
    other.parent.mkdir()
    other.write_bytes(b"")
    load(tmp_path, other)
    with pytest.raises(RuntimeError) as caught:
        cuda_libraries.find()
    assert str(caught.value) == (
        f"this process has loaded NCCL from {other}, but cuBLASMp would use {root}/nccl/lib/libnccl.so.2, and one "
        f"process takes one NCCL; take {other.parent} off LD_LIBRARY_PATH and LD_PRELOAD, or uninstall what loads it"
    )


def test_two_nccls_in_the_process_are_named(wheels, tmp_path):
    wheels("cu13")
    load(tmp_path, "/a/libnccl.so.2", "/b/libnccl.so.2.29.7")
    with pytest.raises(RuntimeError, match=r"two NCCLs, /a/libnccl\.so\.2 and /b/libnccl\.so\.2\.29\.7; .*uninstall"):
        cuda_libraries.find()


def test_what_the_processes_of_a_job_compare(monkeypatch):
    versions = {"nvidia-cublasmp-cu13": "0.10.0.3695"}

    def version(name):
        try:
            return versions[name]
        except KeyError:
            raise cuda_libraries.importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(cuda_libraries.importlib.metadata, "version", version)
    for plugins, want in (
        (("cu13",), "nvidia-cublasmp-cu13-0.10.0.3695"),
        (("cu13", "cu12"), "nvidia-cublasmp-cu13-0.10.0.3695"),
        (("cu12",), "none"),
        ((), "none"),
    ):
        monkeypatch.setattr(cuda_libraries, "_plugins", lambda plugins=plugins: plugins)
        assert cuda_libraries.installed() == want


class FakeExtension:
    """A fake of the extension's functions for cuBLASMp, which records their calls."""

    def __init__(self, refusal=""):
        self.calls, self.refusal = [], refusal

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
    """Returns `opening(refusal)`: a fake extension in a process that has not loaded cuBLASMp yet."""

    def make(refusal=""):
        module = FakeExtension(refusal)
        monkeypatch.setattr(native, "extension", lambda: module)
        return module

    monkeypatch.setattr(native, "_why_no_cublasmp", None)
    wheels("cu13", "nccl")
    return make


def test_the_library_is_opened_once_with_the_configuration(opening, monkeypatch, caplog):
    module = opening()
    config = config_lib.parse({"JAXMP_TIMEOUT": "7", "NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    monkeypatch.setattr(native, "config", lambda: config)
    caplog.set_level(logging.DEBUG, "jaxmp.cublasmp")
    assert (native.why_no_cublasmp(), native.why_no_cublasmp()) == ("", "")
    found = cuda_libraries.find()
    *settings, load_call = module.calls
    assert settings == [
        ("set_cublasmp_log", True),
        ("set_timeout", 7.0),
        ("set_sharing", True),
        ("set_exchange", None),
        ("set_cuda_device_ids", {}),
    ]
    assert load_call == ("load_cublasmp", found.cublasmp, found.nccl, found.driver)
    assert native.cublasmp_log() == ["a line"]


def test_deadlines(opening, monkeypatch):
    """If devices wait 30 s for each other, XLA:GPU ends the process without naming the call, so our deadline is
    shorter unless the user asks for more. `initialize` takes precedence over the environment."""
    module = opening()
    monkeypatch.setattr(native, "config", lambda: config_lib.parse({}))
    native.why_no_cublasmp()
    assert ("set_timeout", 25) in module.calls
    assert config_lib.parse({"JAXMP_TIMEOUT": "60"}).gpu_timeout == config_lib.parse({}).timeout == 60
    monkeypatch.setattr(native, "gpu_timeout", 3.0)
    monkeypatch.setattr(native, "_why_no_cublasmp", None)
    native.why_no_cublasmp()
    assert ("set_timeout", 3.0) in module.calls


@pytest.mark.parametrize(("major", "count", "is_open"), [("cu12", 2, False), ("cu12", 1, True), ("cu13", 2, True)])
def test_cuda_12_serves_one_gpu_per_process(opening, monkeypatch, major, count, is_open):
    opening()
    monkeypatch.setattr(cuda_libraries, "find", lambda: cuda_libraries.Libraries("mp", "nccl", "cuda"))
    monkeypatch.setattr(cuda_libraries, "_plugins", lambda: (major,))
    gpu = types.SimpleNamespace(client=types.SimpleNamespace(devices=lambda: [gpu] * count), local_hardware_id=0, id=0)
    monkeypatch.setattr(native, "cuda_devices", lambda: [gpu])
    why = native.why_no_cublasmp()
    assert why == "" if is_open else why.startswith("cuBLASMp for CUDA 12 serves one GPU per process; start a process")


def test_why_it_cannot_be_opened_stays(opening, monkeypatch):
    module = opening(why := "libcuda.so.1 cannot be opened")
    assert (native.why_no_cublasmp(), native.why_no_cublasmp()) == (why, why)
    assert [call[0] for call in module.calls].count("load_cublasmp") == 1
    assert native.cublasmp_log() == []

    def refuse():
        raise RuntimeError("two NCCLs")

    monkeypatch.setattr(cuda_libraries, "find", refuse)
    monkeypatch.setattr(native, "_why_no_cublasmp", None)
    module.calls.clear()
    assert (native.why_no_cublasmp(), module.calls) == ("two NCCLs", [])


def test_a_machine_without_a_driver_is_told_so(wheels, monkeypatch):
    """The extension itself gives this answer."""
    cases.require("host")
    wheels()
    monkeypatch.setattr(native, "_why_no_cublasmp", None)
    monkeypatch.setattr(cuda_libraries, "DRIVER", "libcuda-absent.so.1")
    why = native.why_no_cublasmp()
    assert "the CUDA driver cannot be opened as libcuda-absent.so.1" in why
    assert "install NVIDIA's driver" in why
    assert native.cublasmp_info() == {}


@pytest.mark.parametrize(
    ("platforms", "want"),
    [("cpu", ["cpu", "CUDA"]), ("cpu cuda", ["cpu", "open", "CUDA"]), ("cuda", ["open", "CUDA"]), ("", [])],
)
def test_what_is_registered_and_opened_for_the_devices_there_are(platforms, want, monkeypatch):
    """Types are registered before targets; cuBLASMp is opened before CUDA's types, if there are CUDA devices."""
    done = []
    capsules = {name: (lambda name=name: {name: {}}) for name in ("types", "registrations")}
    capsules |= {f"cuda_{name}": (lambda name=name: {f"cuda_{name}": {}}) for name in ("types", "registrations")}
    monkeypatch.setattr(native, "extension", lambda: types.SimpleNamespace(**capsules))
    monkeypatch.setattr(native, "_is_registered", False)
    monkeypatch.setattr(native, "_devices", lambda platform: ["a device"] if platform in platforms.split() else [])
    monkeypatch.setattr(native, "why_no_cublasmp", lambda: done.append("open") or "")
    for name in ("register_ffi_type", "register_ffi_target"):
        monkeypatch.setattr(jax.ffi, name, lambda name, _, platform: done.append((name, platform)))
    native.register()
    native.register()
    expected = {
        "cpu": [("types", "cpu"), ("registrations", "cpu")],
        "open": ["open"],
        "CUDA": [("cuda_types", "CUDA"), ("cuda_registrations", "CUDA")],
    }
    assert done == [step for platform in want for step in expected[platform]]


class FakeStore:
    """A fake of JAX's store; waiting ends at once."""

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
    monkeypatch.setattr(native.jax_distributed, "distributed_client", lambda: store)
    assert native._exchange("nccl/y/0", b"\0id\xff", 5.0) == b"\0id\xff"
    assert store.values == {"nccl/y/0": b"\0id\xff"}
    assert native._exchange("nccl/y/0", None, 5.0) == b"\0id\xff"
    assert store.waits == [5000]
    with pytest.raises(TimeoutError, match=r"no process has published nccl/y/1 within 0\.25 s; a process of"):
        native._exchange("nccl/y/1", None, 0.25)
    monkeypatch.setattr(native.jax_distributed, "distributed_client", lambda: None)
    with pytest.raises(RuntimeError, match=r"no store is left for nccl/y/0: jax\.distributed\.shutdown\(\)"):
        native._exchange("nccl/y/0", None, 1.0)
