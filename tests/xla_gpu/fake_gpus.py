"""Fake GPUs for JAX's unmodified CUDA plugin: `make test-xla-gpu` imports this before JAX (`pytest -p fake_gpus`).

The libraries of tests/fakes are opened under the names of the real ones, so XLA and jaxmp get the fakes: XLA the
driver, NVML and the runtime; jaxmp the driver, NCCL and cuBLASMp. JAXMP_FAKES is the folder where CMake puts them.
"""

import ctypes
import importlib.util
import os
import runpy
import sys
from pathlib import Path

DEVICE_COUNT = int(os.environ.setdefault("FAKE_CUDA_DEVICES", "4"))

# Missing in the fakes: virtual memory, graphs, and NVIDIA's libraries that compile, link or time kernels.
_XLA_FLAGS = (
    "--xla_gpu_experimental_vmm_disabled=true",
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_libnvjitlink=false",
    "--xla_gpu_enable_libnvptxcompiler=false",
    "--xla_gpu_enable_command_buffer=",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_gemm_rewrite_size_threshold=1000000000",  # XLA's own products are loops, which the fakes can run
)
_HERE = Path(__file__).parent
_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13", "libnccl.so.2", "libcublasmp.so.0")


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    assert folders, f"{package} is not installed; run make test-xla-gpu"
    return Path(folders[0])


def _start() -> None:
    flags = (*_XLA_FLAGS, f"--xla_gpu_cuda_data_dir={_folder('nvidia') / 'cu13'}", os.environ.get("XLA_FLAGS", ""))
    os.environ |= {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # cuDNN and other libraries are absent
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": " ".join(flags),
        "PATH": os.pathsep.join(map(str, (_HERE / "bin", Path(sys.executable).parent, os.environ["PATH"]))),  # ptxas
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
    }
    if "JAXMP_BLAS" not in os.environ:  # the fake cuBLASMp multiplies with this
        os.environ["JAXMP_BLAS"] = str(next((_folder("scipy_openblas32") / "lib").glob("*openblas*.so")))
    for name in _LIBRARIES:
        ctypes.CDLL(f"{os.environ['JAXMP_FAKES']}/right/{name}", mode=ctypes.RTLD_GLOBAL)
    # JAX looks for /dev/nvidia0 before it loads the plugin, and there is none.
    from jax._src import hardware_utils

    hardware_utils._NVIDIA_GPU_DEVICES.append("/proc/self")


def driver_calls(device: int) -> list[str]:
    """Returns the calls on a device's streams, and waits for them, since the last query."""
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_cuda_log.restype = ctypes.c_char_p
    return library.fake_cuda_log(device).decode().split()


def cublasmp_calls(device: int) -> list[str]:
    """Returns the calls of cuBLASMp on a device since the last query."""
    library = ctypes.CDLL("libcublasmp.so.0")
    library.fake_cublasmp_log.restype = ctypes.c_char_p
    return library.fake_cublasmp_log(device).decode().split()


_start()
if __name__ == "__main__":  # python -m fake_gpus PROGRAM [ARGUMENTS]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
