"""The compiled extension: loaded on first use, checked, and registered with XLA.

Importing this module loads nothing. XLA's CPU client registers pending FFI targets before the types that they use,
which fails. So registration waits until a lowering needs it, because the client exists by then.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._src.platform.jax_internals import jax_compat, jax_distributed, jax_lowering
from jaxmp._src.platform.runtime import cuda_libraries, logs
from jaxmp._src.platform.runtime.config import config

TARGET = "jaxmp_matmul"
GROUPED_TARGET = "jaxmp_grouped"
START_TARGET = "jaxmp_start_product"
COLLECT_TARGET = "jaxmp_collect_product"
BARRIER_TARGET = "jaxmp_process_barrier"
COLLECTIVE_TARGET = "jaxmp_process_collective"
# The version of the interface between this package and its extension: attributes, operands, functions.
ABI_VERSION = 18

_lock = threading.RLock()
_loaded: Any = None
_is_registered = False
# True if this process and the others of its job watch each other.
has_barrier = False
# The processes that communicate through shared memory, including this one; empty if this one shares none.
shared_processes: frozenset[int] = frozenset()
# Seconds that a rank on a GPU waits for its peers, set before cuBLASMp is opened; None: as configured.
gpu_timeout: float | None = None
_why_no_cublasmp: str | None = None
_is_logging_plans = False


def register() -> None:
    """Registers jaxmp's custom calls with XLA; further calls do nothing.

    Compiling a program that uses jaxmp does this automatically. Call it in a process that only runs programs compiled
    elsewhere (`jax.export.deserialize`, a deserialised executable), before it runs them. It starts JAX's backend, so
    call `jax.distributed.initialize` and similar functions first. If the process has CUDA devices, it opens cuBLASMp
    too; if that fails, the calls on these devices fail with the reason. A process without CUDA devices can compile
    programs for machines that have them. In a job, compiling an exported program then raises NotImplementedError if its
    ranks share calls within one process, but its CPU devices belong to several. Raises ImportError or ValueError if the
    compiled extension cannot be loaded.

    >>> import jaxmp
    >>> jaxmp.register()
    """
    global _is_registered
    with _lock:
        if _is_registered:
            _follow_plan_log(_loaded)
            return
        module = extension()
        if jax.process_count() > 1:
            jax_lowering.check_exported_programs()
        has_cpu, has_cuda = bool(_devices("cpu")), bool(cuda_devices())
        if has_cpu:  # a lowering for another platform may come first
            _register_on("cpu", module.types(), module.registrations())
        if has_cuda:
            why_no_cublasmp()
        if has_cuda or has_cpu:  # JAX's CUDA plugin, if there is one, has started: it may compile without a device
            _register_on("CUDA", module.cuda_types(), module.cuda_registrations())
        # With neither, the program is exported, not run here.
        _is_registered = has_cpu or has_cuda


def _register_on(platform: str, types: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    for name, capsules in types.items():
        jax.ffi.register_ffi_type(name, capsules, platform=platform)
    for name, capsules in targets.items():
        jax.ffi.register_ffi_target(name, capsules, platform=platform)


def cuda_devices() -> list[Any]:
    """Returns this process's CUDA devices; starts JAX's backend."""
    return _devices("cuda")


def has_cuda_devices() -> bool:
    """True if this process has CUDA devices; False if its backend has not started."""
    return jax_compat.backend_exists() and bool(cuda_devices())


def card_capability() -> tuple[int, int] | None:
    """Returns the job's lowest compute capability, (9, 0); None if this process has no CUDA device. Starts JAX."""
    if not cuda_devices():
        return None
    everywhere = cuda_devices()[0].client.devices()
    versions = [device.compute_capability.split(".") for device in everywhere]
    return min((int(major), int(minor)) for major, minor in versions)


def _devices(platform: str) -> list[Any]:
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # no client for the platform
        return []


def why_no_cublasmp() -> str:
    """Configures and opens the real cuBLASMp, once. Returns why this process cannot use it, or "" if it is open."""
    global _why_no_cublasmp
    with _lock:
        if _why_no_cublasmp is None:
            _why_no_cublasmp = _open_cublasmp()
        return _why_no_cublasmp


def _open_cublasmp() -> str:
    """Passes the configuration and the devices to the extension, and opens the libraries; returns why not, or ""."""
    module = extension()
    try:
        libraries = cuda_libraries.find()
    except RuntimeError as error:
        return str(error)
    everywhere = cuda_devices()[0].client.devices() if cuda_devices() else []  # equal on all processes
    if len(everywhere) > jax.process_count() and cuda_libraries.majors()[0] == "cu12":
        return "cuBLASMp for CUDA 12 serves one GPU per process; start a process for each, or install 'jaxmp[cuda13]'"
    module.set_cublasmp_log(logs.logger("cublasmp").isEnabledFor(logging.DEBUG))
    module.set_timeout(config().gpu_timeout if gpu_timeout is None else gpu_timeout)
    module.set_sharing(config().ranks_share_gpus)
    module.set_exchange(_exchange if jax.process_count() > 1 else None)
    module.set_cuda_device_ids({device.local_hardware_id: device.id for device in cuda_devices()})
    try:
        module.load_cublasmp(libraries.cublasmp, libraries.nccl, libraries.driver)
    except RuntimeError as error:
        return str(error)
    return ""


def cublasmp_info() -> dict[str, str]:
    """Returns paths and versions of cuBLASMp, NCCL and the driver; empty before they are open."""
    return dict(extension().cublasmp_info())


def cublasmp_log() -> list[str]:
    """Returns and logs cuBLASMp's log lines since the last call, if its topic was on when the library was opened."""
    lines = list(extension().cublasmp_log()) if _why_no_cublasmp == "" else []
    for line in lines:
        logs.logger("cublasmp").debug("%s", line)
    return lines


def describe_plan(attributes: Mapping[str, Any], library: str = "host") -> dict[str, Any]:
    """Returns the plan of the call with these FFI attributes on `library`, "host" or "cublasmp". The keys are
    "library", "algorithm", "nranks", "kernel", and "device_workspace" and "host_workspace", lists of bytes per rank. On
    "cublasmp", the kernel and the lists are empty. The plan cache keeps a plan of "host".

    Raises ValueError with the library's reason if it refuses the call.
    """
    plain = {name: v if isinstance(v, str) else np.asarray(v).tolist() for name, v in attributes.items()}
    return dict(extension().describe_plan(plain, library))


def capabilities(library: str = "host") -> dict[str, bool]:
    """Returns for each kind of call beyond cuBLASMp's documented ones if the library ("host", "cublasmp") takes it."""
    return dict(extension().capabilities() if library == "host" else extension().cublasmp_capabilities())


def start_barrier(process: int, nprocesses: int, timeout: float) -> None:
    """Starts to watch the other processes of the job, over sockets that `jobs.peers` opens, and sets `has_barrier`. JAX
    then lowers each call apart (`lower_each_call`)."""
    global has_barrier
    jax_lowering.lower_each_call(BARRIER_TARGET)
    extension().start_barrier(process, nprocesses, timeout)
    has_barrier = True


def stop_barrier() -> None:
    """Closes the barrier's sockets, and records that there is no barrier and no shared memory.

    Calls that still wait fail.
    """
    global has_barrier, shared_processes
    extension().stop_barrier()
    has_barrier, shared_processes = False, frozenset()


def _exchange(key: str, value: bytes | None, timeout: float) -> bytes:
    """Publishes `value` under `key` in JAX's store and returns it; if it is None, waits for another process's value.
    Processes exchange NCCL ids this way. Raises TimeoutError after `timeout` seconds, and RuntimeError after
    `jax.distributed.shutdown()`."""
    client = jax_distributed.distributed_client()
    if client is None:
        raise RuntimeError(f"no store is left for {key}: jax.distributed.shutdown() came before a call's first run")
    if value is not None:
        client.key_value_set_bytes(key, value)
        return value
    try:
        return bytes(client.blocking_key_value_get_bytes(key, max(1, round(timeout * 1000))))
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"no process has published {key} within {timeout:g} s; a process of the group has ended, is stuck, or runs "
            f"another program ({error})"
        ) from error


def plan_cache_info() -> dict[str, int]:
    """Returns counters of the plan cache: hits, misses, size, capacity."""
    return dict(extension().plan_cache_info())


def plan_cache_clear() -> None:
    """Drops all cached plans and zeroes the counters; calls that are already compiled keep their plans."""
    extension().plan_cache_clear()


def take_group_rows() -> tuple[float, float]:
    """Returns rows of the (largest, mean) group, summed over hostmp's products of groups since this was last asked."""
    largest, mean = extension().take_group_rows()
    return largest, mean


def blas_info() -> dict[str, str]:
    """Returns the BLAS library, the kernel for each dtype, and the instruction set of our own kernels."""
    return dict(extension().blas_info())


@functools.cache
def kernel_of(dtype: str) -> str:
    """Returns the name of the host's kernel for a type, for messages; "decoded to bf16" for a type without a kernel.
    `dtype`: as named in the custom call."""
    return blas_info().get(dtype, "decoded to bf16")


def extension() -> Any:
    """Returns the extension module; the first call loads and configures it. Raises ImportError if the extension is
    missing or does not fit jaxmp or jaxlib, and as `_blas_path` does. Raises ValueError if the BLAS library cannot be
    used, or if this processor lacks the instruction set of JAXMP_ISA."""
    global _loaded
    with _lock:
        if _loaded is None:
            module = _import_extension()
            _check_versions(module)
            _limit_instruction_set(module)
            module.load_blas(_blas_path())
            module.set_plan_cache_capacity(config().plan_cache_size)
            _loaded = module
        _follow_plan_log(_loaded)
        return _loaded


def _follow_plan_log(module: Any) -> None:
    """Turns the log of plans on or off, as the level of its logger says."""
    global _is_logging_plans
    if (wanted := logs.logger("plan").isEnabledFor(logging.DEBUG)) != _is_logging_plans:
        module.set_plan_log(logs.logger("plan").debug if wanted else None)
        _is_logging_plans = wanted


def _import_extension() -> Any:
    try:
        return importlib.import_module("jaxmp._jaxmp")
    except ImportError as error:
        message = (
            f"jaxmp's compiled extension cannot be loaded ({error}); install jaxmp from its wheel or build it "
            'with "pip install ." in the source tree, or pass implementation="xla" to do without it.'
        )
        if isinstance(error, ModuleNotFoundError):  # as in a clone after `pip install .`
            folder = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
            message += f" Python has imported {folder}. If jaxmp is installed elsewhere, start Python in another folder"
            message += ' or as "python -P".'
        raise ImportError(message) from error


def _check_versions(module: Any) -> None:
    """Raises ImportError if the extension has another ABI, or was built with a newer jaxlib than is installed."""
    if module.abi_version() != ABI_VERSION:
        raise ImportError(
            f"jaxmp's Python files need extension ABI {ABI_VERSION} but jaxmp._jaxmp (jaxmp {module.version()}) "
            f"has ABI {module.abi_version()}; reinstall jaxmp so that both come from one version."
        )
    built_with, installed = module.jaxlib_version(), importlib.metadata.version("jaxlib")
    if _release(installed) < _release(built_with):
        raise ImportError(
            f"jaxmp's extension was built with the FFI headers of jaxlib {built_with} but jaxlib {installed} is "
            f"installed; upgrade jaxlib, or reinstall jaxmp from its wheel."
        )


def _limit_instruction_set(module: Any) -> None:
    if name := config().instruction_set:
        try:
            module.limit_instruction_set(name)
        except ValueError as error:
            raise ValueError(f"JAXMP_ISA is {name!r}, but {error}.") from None


def _release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (0, 10, 2) for "0.10.2.dev5"."""
    return tuple(int(part) for part in itertools.takewhile(str.isdecimal, version.split(".")))


def _blas_path() -> str:
    """Returns JAXMP_BLAS, else the path of the library of scipy-openblas32. Without that package, returns the path of
    libopenblas.so.0 in the Python environment, or only this name if the environment has no such file. Raises
    ImportError if the package has no library."""
    if config().blas:
        return str(config().blas)
    if importlib.util.find_spec("scipy_openblas32") is None:  # left out by a distribution, which has an OpenBLAS
        in_environment = os.path.join(sys.prefix, "lib", "libopenblas.so.0")
        return in_environment if os.path.exists(in_environment) else "libopenblas.so.0"
    directory = importlib.import_module("scipy_openblas32").get_lib_dir()
    found = sorted(p for suffix in ("so", "dylib") for p in glob.glob(os.path.join(directory, f"*openblas*.{suffix}")))
    if not found:
        raise ImportError(
            f"scipy-openblas32 is installed but {directory} holds no library; reinstall it, or set JAXMP_BLAS."
        )
    return found[0]
