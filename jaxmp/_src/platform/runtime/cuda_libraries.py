"""Finds the libraries of the real cuBLASMp, of NCCL and of the driver, without opening them.

Each is searched for in its wheel first and then left to the loader, which knows LD_LIBRARY_PATH and the system's
folders. The extension opens them and checks their versions.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

# The sonames. The wheels have only these files, without links that end in .so.
CUBLASMP, NCCL, DRIVER = "libcublasmp.so.0", "libnccl.so.2", "libcuda.so.1"
# By CUDA's major version: the folder of cuBLASMp's wheel under nvidia/. NCCL's two wheels share one folder.
_FOLDERS = {"cu13": "cublasmp/cu13/lib", "cu12": "cublasmp/cu12/lib"}
_NCCL_FOLDER = "nccl/lib"
_MAPS = "/proc/self/maps"


@dataclasses.dataclass(frozen=True)
class Libraries:
    """Paths of libraries, or names that the loader looks up."""

    cublasmp: str
    nccl: str
    driver: str


def find() -> Libraries:
    """Returns the libraries that this process would use.

    Raises:
      RuntimeError: cuBLASMp is installed only for another CUDA version than JAX's plugin, or this process has loaded
        two NCCLs, or another one than the one that cuBLASMp would use.
    """
    roots = _wheel_roots()
    return Libraries(_find_cublasmp(roots), _find_nccl(roots), DRIVER)


def installed() -> str:
    """Returns the wheel of cuBLASMp for JAX's CUDA version, "nvidia-cublasmp-cu13-0.10.0", or "none". It has to be
    equal in all processes of a job, because it decides the calls that they run."""
    for major in _plugins():
        name = f"nvidia-cublasmp-{major}"
        try:
            return f"{name}-{importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def _wheel_roots() -> list[Path]:
    """Returns the folders named nvidia on the import path, in its order. Several wheels share a folder."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _plugins() -> tuple[str, ...]:
    """Returns the CUDA versions of JAX's plugins, the newer one first."""
    return tuple(major for major in _FOLDERS if importlib.util.find_spec(f"jax_cuda{major[2:]}_plugin"))


def majors() -> tuple[str, ...]:
    """Returns the CUDA versions to look for: the versions of JAX's plugins, or all if it has no plugin."""
    return _plugins() or tuple(_FOLDERS)


def _find_cublasmp(roots: Iterable[Path]) -> str:
    """Returns the path in the wheel for JAX's CUDA version, or in any wheel if JAX has no CUDA plugin. Returns the
    soname without any wheel. Raises RuntimeError if there is only a wheel for another version. `roots`: the folders
    of `_wheel_roots`."""
    found = {major: _first_file(roots, folder, CUBLASMP) for major, folder in _FOLDERS.items()}
    for major in majors():
        if path := found[major]:
            return path
    others = [major for major, path in found.items() if path]
    if others:
        wanted = majors()[0]
        raise RuntimeError(
            f"cuBLASMp is installed for CUDA {others[0][2:]} ({found[others[0]]}), but JAX's plugin is for CUDA "
            f"{wanted[2:]}; pip install 'jaxmp[cuda{wanted[2:]}]'"
        )
    return CUBLASMP


def _find_nccl(roots: Iterable[Path]) -> str:
    """Returns the path in NCCL's wheel, else of the loaded NCCL, else the soname. Raises RuntimeError if this process
    has loaded two, or another than the wheel's."""
    wheel, loaded = _first_file(roots, _NCCL_FOLDER, NCCL), mapped_files("libnccl.so")
    if len(loaded) > 1:
        raise RuntimeError(
            f"this process has loaded two NCCLs, {loaded[0]} and {loaded[1]}; a communicator of one does not work "
            "in the other: take one of them off LD_LIBRARY_PATH and LD_PRELOAD, or uninstall it"
        )
    if loaded and wheel and os.path.realpath(loaded[0]) != os.path.realpath(wheel):
        raise RuntimeError(
            f"this process has loaded NCCL from {loaded[0]}, but cuBLASMp would use {wheel}, and one process takes one "
            f"NCCL; take {os.path.dirname(loaded[0])} off LD_LIBRARY_PATH and LD_PRELOAD, or uninstall what loads it"
        )
    return wheel or (loaded[0] if loaded else NCCL)


def _first_file(roots: Iterable[Path], folder: str, name: str) -> str:
    paths = (root / folder / name for root in roots)
    return next((str(path) for path in paths if path.is_file()), "")


def mapped_files(prefix: str) -> list[str]:
    """Returns the files mapped by this process with names that begin with `prefix`, sorted; [] without /proc."""
    try:
        lines = Path(_MAPS).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    # address permissions offset device inode path; the path may contain spaces
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if os.path.basename(path).startswith(prefix))
