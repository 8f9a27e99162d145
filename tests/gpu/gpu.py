"""What the tests on a real GPU share: `make test-gpu` and gpu_session.py run them.

Without a CUDA device, or without what one of them needs beside it, they are skipped by name; with JAXMP_REQUIRE_GPU set
they fail instead, so that a machine which should have a GPU cannot pass by skipping.
"""

import os
from pathlib import Path

import pytest

from jaxmp._src.platform.runtime import native

ROOT = Path(__file__).resolve().parents[2]

# Several ranks on one GPU: NCCL 2.30's switch, without the transports that want a GPU for each rank, and with few
# blocks, since the kernels of all ranks have to be resident at once.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def missing(message: str) -> None:
    """Skip the test, or fail it where a GPU is required."""
    if os.environ.get("JAXMP_REQUIRE_GPU"):
        pytest.fail(message)
    pytest.skip(message)


def alone(case):
    """The case on one device: a mesh of its axes, each of one device."""
    return case.replace(mesh=tuple((axis, 1) for axis, _ in case.mesh))


def among(case, nranks: int):
    """A case of four devices on `nranks` of them: the last axis of two keeps its size."""
    sizes = {1: (nranks,), 2: (nranks // 2, 2)}[len(case.mesh)]
    return case.replace(mesh=tuple((axis, size) for (axis, _), size in zip(case.mesh, sizes, strict=True)))


@pytest.fixture
def cublasmp():
    """cuBLASMp, open in this process, on its CUDA devices."""
    if not native.cuda_devices():
        missing("needs a CUDA device; start with JAX_PLATFORMS=cuda,cpu, as `make test-gpu` does")
    if why := native.why_no_cublasmp():
        missing(why)


@pytest.fixture
def conformance(cublasmp) -> Path:
    """The executable of the conformance suite."""
    built = sorted(ROOT.glob("build/*/conformance"), key=lambda path: path.stat().st_mtime)
    if not built:
        missing("needs build/*/conformance; `make test-cpp` builds it")
    return built[-1]
