"""Show the machine, the installation, and which implementation computes a product; --json for bug reports."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp import distributed
from jaxmp._src.core.lowering import backend, process_barrier
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern
from jaxmp._src.platform.hardware import calibration
from jaxmp._src.platform.hardware.processor import processor
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import config, cuda_libraries, native
from jaxmp._src.tools.cli import calibrate
from jaxmp._src.tools.cli.output import CommandError, Result, make_cpu_devices, table

_PACKAGES = (
    *("jaxmp", "jax", "jaxlib", "numpy", "ml_dtypes", "scipy-openblas32", "opt_einsum"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cublasmp-cu12", "nvidia-cublasmp-cu13"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "mpi4py", "flax", "equinox"),
)
_TYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "float8_e4m3fn", "int8")
# The number of CPU devices for measuring links.
_CALIBRATED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calibrate", action="store_true", help='measure this machine\'s rates for hardware="this"')
    parser.add_argument("--job", action="store_true", help="join the job that mpiexec or srun starts, and describe it")


def run(options: argparse.Namespace) -> Result:
    """Returns `facts`. --calibrate measures this machine and stores the rates first. --job and --calibrate join a job
    of several processes if there is one; only its first process stores, and the others have no text. Raises
    CommandError for --job outside of a job."""
    found = config.launcher() if options.job or options.calibrate else None
    if options.job and not found:
        raise CommandError("--job needs a job of processes; start one: mpiexec -n 4 jaxmp info --job, or srun")
    if found and found[1] > 1:
        distributed.initialize()
    elif options.calibrate:
        make_cpu_devices(_CALIBRATED)
    is_first = jax.process_index() == 0
    if options.calibrate:
        measured = calibrate.measure()
        if is_first:
            calibration.save(measured)
    sections, lines = facts(), list[str]()
    for title, section in sections.items() if is_first else ():
        lines += [title, *table((f"  {name}", _text(value)) for name, value in section.items())]
    return Result("\n".join(lines), sections)


def facts() -> dict[str, dict[str, Any]]:
    """Returns everything that `info` prints, by section; plain values for JSON. In a job of several processes
    there is also "job", and all processes call this."""
    choices = {name: _choice(name) for name in _TYPES}
    available = {name: _choice("float32", name) for name in ("host", "cublasmp", "xla")}
    job = {"job": _job()} if jax.process_count() > 1 else {}
    return job | {
        "versions": _versions(),
        "processor": dataclasses.asdict(processor()),
        "host implementation": _host(),
        "devices": _devices(),
        "libraries": _libraries(),
        "implementation of a product": {name: f"{who or 'none'}: {why}" for name, (who, why) in choices.items()},
        "available implementations": {name: "yes" if who else f"no: {why}" for name, (who, why) in available.items()},
        "calibration": _calibration(),
        "environment": config.environment(),
    }


def _versions() -> dict[str, Any]:
    """Returns versions of Python, the system and each installed package of `_PACKAGES`, and Python's path."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"executable": sys.executable}


def _host() -> dict[str, Any]:
    """Returns the BLAS, instruction set and kernels of "host", or only "unavailable": why "host" cannot be used."""
    try:
        info = native.blas_info()
    except (ImportError, ValueError) as error:
        return {"unavailable": str(error)}
    names = {"library": "BLAS", "config": "configuration", "instruction set": "instruction set"}
    return {names.get(name, f"kernel for {name}"): value for name, value in info.items()}


def _devices() -> dict[str, Any]:
    """Returns JAX's platform, a text that counts the devices by kind, and the number of processes."""
    kinds = collections.Counter(device.device_kind for device in jax.devices())
    return {
        "platform": jax.default_backend(),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "processes": jax.process_count(),
    }


def _job() -> dict[str, Any]:
    """Describes the job of this process, and times a small call of all devices. All processes call this."""
    n = jax.process_count()
    messages, rounds = process_barrier.cost(n)
    return {
        "processes": n,
        "processes that share memory with this one": len(native.shared_processes),
        "connections of this process": sum(not peer["gone"] for peer in native.extension().peers().values()),
        "rounds of a barrier": rounds,
        "messages of a process for a call of all": messages,
        "time of a small call of all": f"{calibrate.time_of_small_call() * 1e6:.0f} us",
    }


def _libraries() -> dict[str, Any]:
    """Returns where cuBLASMp and what it needs would be opened, or why not. With a CUDA device it also opens them."""
    try:
        paths = dataclasses.asdict(cuda_libraries.find())
    except RuntimeError as error:
        return {"cublasmp": f"cannot be used: {error}"}
    found = {name: path if "/" in path else f"{path}, left to the loader" for name, path in paths.items()}
    if native.cuda_devices():
        why = native.why_no_cublasmp()
        return found | native.cublasmp_info() | {"opened": "yes" if not why else f"no: {why}"}
    return found | {"opened": "no: JAX has no CUDA device", "wheel": cuda_libraries.installed()}


def _calibration() -> dict[str, Any]:
    """Returns what `hardware="this"` has, and its file. The only value says so if nothing is measured, or if the
    machine has changed since."""
    found = calibration.load()
    if found is None:
        return {"rates of this machine": "not measured; jaxmp info --calibrate does"}
    return found | {"file": str(calibration.path())}


def _choice(dtype: str, implementation: str | None = None) -> tuple[str, str]:
    """Returns (the implementation of an all-gather product of 2 devices, why). If none takes it, returns ("", the
    error). `implementation`: the one asked for, instead of the rule's choice."""
    operand = jnp.dtype(dtype)
    out = {"int8": "int32", "float8_e4m3fn": "bfloat16"}.get(dtype, dtype)
    group = Group(Pattern.ALL_GATHER, (("x", 2),), ("x",))
    spec = MatmulSpec(jnp.dtype(out), group, implementation=implementation)
    try:
        found = backend.choose_implementation(spec, jax_compat.default_platform(), "", (operand, operand))
    except (ImportError, NotImplementedError, RuntimeError) as error:
        return "", str(error)
    return found.implementation, found.why


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
