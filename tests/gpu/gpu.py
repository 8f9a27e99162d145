"""Shared helpers of the tests on a real GPU: `make test-gpu` and gpu_session.py run them.

Without a CUDA device or another requirement, tests are skipped with the reason. If JAXMP_REQUIRE_GPU is set they fail
instead, so that a machine that should have a GPU cannot pass by skipping.
"""

import os
from pathlib import Path

import pytest

from jaxmp._src.platform.runtime import native

ROOT = Path(__file__).resolve().parents[2]

# Several ranks on one GPU: NCCL 2.30's switch, without transports that need one GPU per rank, and with few blocks
# because the kernels of all ranks must be resident at once.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def missing(message: str) -> None:
    """Skips the test, or fails it if a GPU is required."""
    if os.environ.get("JAXMP_REQUIRE_GPU"):
        pytest.fail(message)
    pytest.skip(message)


def alone(case):
    """Returns the case on one device: each axis of its mesh has size one."""
    return case.replace(mesh=tuple((axis, 1) for axis, _ in case.mesh))


def among(case, nranks: int):
    """Returns a case of four devices on `nranks` devices: the last axis of two keeps its size."""
    sizes = {1: (nranks,), 2: (nranks // 2, 2)}[len(case.mesh)]
    return case.replace(mesh=tuple((axis, size) for (axis, _), size in zip(case.mesh, sizes, strict=True)))


@pytest.fixture
def cublasmp():
    """Opens cuBLASMp in this process, on its CUDA devices."""
    if not native.cuda_devices():
        missing("needs a CUDA device; start with JAX_PLATFORMS=cuda,cpu, as `make test-gpu` does")
    if why := native.why_no_cublasmp():
        missing(why)


@pytest.fixture
def conformance(cublasmp) -> Path:
    """Returns the executable of the conformance suite."""
    built = sorted(ROOT.glob("build/*/conformance"), key=lambda path: path.stat().st_mtime)
    if not built:
        missing("needs build/*/conformance; `make test-cpp` builds it")
    return built[-1]
