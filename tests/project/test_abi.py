"""Our declarations of cuBLASMp, of the CUDA driver and of NCCL against their own headers.

Without these a number or a parameter that changed in a release would be found on a GPU, as memory that is overwritten.
A translation unit that includes ours and theirs asserts every enumerator, attribute size and signature; wrong copies of
ours must not compile. Nothing is linked or run, and no GPU is needed, only the headers out of three wheels (the last
one weighs 200 MB; without it NCCL's half is skipped):

    pip install --no-deps nvidia-cublasmp-cu13 nvidia-cuda-runtime nvidia-nccl-cu13

Of cuBLAS's own header, whose wheel weighs 400 MB, cublasmp.h takes two enumerations. They are recorded here, so that
their numbers are compared everywhere; where nvidia-cublas is installed too, the record is compared with it.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OURS = (ROOT / "csrc" / "cublasmp" / "abi.h").read_text()
TABLE = (ROOT / "csrc" / "cublasmp" / "api_table.h").read_text()
CUDA = (ROOT / "csrc" / "cuda" / "abi.h").read_text()
LOGGER = ("LoggerSetCallback", "LoggerSetFile", "LoggerSetLevel")  # cuBLASMp's own, which no table of the core holds

# What cublasmp/abi.h declares of cublas_api.h and library_types.h, with the numbers of CUDA 13 (nvidia-cublas
# 13.10.0.20, nvidia-cuda-runtime 13.5.37).
RECORDED = {
    "cublasOperation_t": {"CUBLAS_OP_N": 0, "CUBLAS_OP_T": 1, "CUBLAS_OP_C": 2},
    "cublasComputeType_t": {
        "CUBLAS_COMPUTE_32F": 68,
        "CUBLAS_COMPUTE_32F_PEDANTIC": 69,
        "CUBLAS_COMPUTE_64F": 70,
        "CUBLAS_COMPUTE_64F_PEDANTIC": 71,
        "CUBLAS_COMPUTE_32I": 72,
        "CUBLAS_COMPUTE_32F_FAST_16F": 74,
        "CUBLAS_COMPUTE_32F_FAST_16BF": 75,
        "CUBLAS_COMPUTE_32F_FAST_TF32": 77,
        "CUBLAS_COMPUTE_32F_EMULATED_16BFX9": 78,
        "CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT": 79,
    },
    "cudaDataType_t": {
        "CUDA_R_32F": 0,
        "CUDA_R_64F": 1,
        "CUDA_R_16F": 2,
        "CUDA_R_8I": 3,
        "CUDA_C_32F": 4,
        "CUDA_C_64F": 5,
        "CUDA_R_8U": 8,
        "CUDA_R_32I": 10,
        "CUDA_R_16BF": 14,
        "CUDA_R_8F_E4M3": 28,
        "CUDA_R_8F_E5M2": 29,
        "CUDA_R_4F_E2M1": 33,
    },
}
# The wheel and the header in it that each of these comes from.
SOURCES = {
    "cublasOperation_t": ("nvidia-cublas", "cublas_api.h"),
    "cublasComputeType_t": ("nvidia-cublas", "cublas_api.h"),
    "cudaDataType_t": ("nvidia-cuda-runtime", "library_types.h"),
}


def _recorded_enum(enum: str) -> str:
    numbers = ", ".join(f"{name} = {number}" for name, number in RECORDED[enum].items())
    return f"typedef enum {{ {numbers} }} {enum};"


# cublasmp.h includes these two, whose wheels weigh 400 and 300 MB. From the first it takes types alone; from the second
# one opaque pointer.
STUBS = {
    "cublas_v2.h": f"""
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <library_types.h>
typedef struct CUstream_st* cudaStream_t;
{_recorded_enum("cublasOperation_t")}
{_recorded_enum("cublasComputeType_t")}
typedef enum {{ CUBLAS_SIDE_STUB }} cublasSideMode_t;
typedef enum {{ CUBLAS_FILL_STUB }} cublasFillMode_t;
typedef enum {{ CUBLAS_DIAG_STUB }} cublasDiagType_t;
""",
    "nccl.h": "#pragma once\ntypedef struct ncclComm* ncclComm_t;\n",
}
# nccl.h includes these for the types of cuBLAS's and of its own device side, which we do not declare.
NCCL_STUBS = {
    "cuda_runtime.h": """
#pragma once
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
""",
    "cuda_fp16.h": "#pragma once\n",
}

# Rewrites our types, wherever they stand in a signature, into those of the real header; all else must match as it is.
CHECKER = """
template <typename T> struct Real { using type = T; };
template <typename T> struct Real<T*> { using type = typename Real<T>::type*; };
template <typename T> struct Real<const T> { using type = const typename Real<T>::type; };
template <typename R, typename... Args> struct Real<R(Args...)> {
  using type = typename Real<R>::type(typename Real<Args>::type...);
};
"""


def _find(distribution: str, header: str) -> pathlib.Path | None:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((pathlib.Path(file.locate()) for file in files if file.name == header), None)


def _include_dir(distribution: str, header: str) -> pathlib.Path:
    found = _find(distribution, header)
    if found is not None:
        return found.parent
    message = f"no {header}; pip install --no-deps nvidia-cublasmp-cu13 nvidia-cuda-runtime nvidia-nccl-cu13"
    if os.environ.get("JAXMP_REQUIRE_ABI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="module")
def real_header() -> pathlib.Path:
    return _include_dir("nvidia-cublasmp-cu13", "cublasmp.h") / "cublasmp.h"


@pytest.fixture(scope="module")
def includes(real_header, tmp_path_factory) -> list[pathlib.Path]:
    """Include folders of the real headers, and of stubs for those that are not installed."""
    cuda = _include_dir("nvidia-cuda-runtime", "library_types.h")
    stubs = tmp_path_factory.mktemp("stubs")
    for name, text in STUBS.items():
        (stubs / name).write_text(text)
    return [real_header.parent, stubs, cuda]


def _body(text: str, enum: str) -> str:
    """What is in a C enumeration: ours is `enum name : int { ... }`, theirs `typedef enum { ... } name;`, with a name
    behind `enum` or without."""
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    ours = re.search(rf"enum {enum} : int {{(.*?)}};", bare, flags=re.S)
    theirs = re.search(rf"typedef enum\s*{{([^{{}}]*)}} {enum};|typedef enum {enum}\s*{{([^{{}}]*)}}", bare, flags=re.S)
    found = ours or theirs
    assert found, f"no enumeration {enum}"
    return next(group for group in found.groups() if group is not None)


def _enumerators(text: str, enum: str) -> list[str]:
    return re.findall(r"^\s*(\w+)", _body(text, enum).replace(",", "\n"), flags=re.M)


def _numbers(text: str, enum: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)\s*=\s*(-?\d+)", _body(text, enum))}


def _our_enums() -> list[str]:
    return re.findall(r"^enum (\w+) : int", OURS, flags=re.M)


def _enumerator_assertions() -> list[str]:
    names = [name for enum in _our_enums() for name in _enumerators(OURS, enum)]
    return [_equal(name) for name in names]


def _equal(name: str) -> str:
    return f'static_assert(int(::{name}) == int(ours::{name}), "{name}");'


def _attribute_types(header: str) -> dict[str, str]:
    """The type of each attribute: the header tells it in the comment before the attribute, as `Type: int64_t.`"""
    enumerators = r"CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA.*?cublasMpMatmulDescriptorAttribute_t;"
    body = re.search(enumerators, header, re.S)
    start = header.rindex("typedef enum", 0, body.start())
    pattern = r"/\*\*(.*?)\*/\s*(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_\w+)"
    types = {}
    for comment, name in re.findall(pattern, header[start : body.end()], flags=re.S):
        types[name] = re.findall(r"Type:\s+((?:const )?\w+\*?)\s*\.", comment)[-1]
    return types


def _attribute_assertions(header: str) -> list[str]:
    return [
        f'static_assert(sizeof({kind}) == ours::AttributeSize(::{name}), "size of {name}");'
        for name, kind in _attribute_types(header).items()
    ]


def _functions() -> list[str]:
    return [name for name in re.findall(r"X\((\w+)\)", TABLE) if name != "function"]


def _signature(name: str) -> str:
    return (
        f'static_assert(std::is_same_v<Real<decltype(ours::{name})>::type, decltype(::{name})>, "signature of {name}");'
    )


def _signature_assertions() -> list[str]:
    opaque = re.findall(r"^struct (\w+);", OURS, flags=re.M)
    maps = [f"template <> struct Real<ours::{t}> {{ using type = ::{t}; }};" for t in opaque + _our_enums()]
    return [CHECKER, *maps, *(_signature(f"cublasMp{f}") for f in (*_functions(), *LOGGER))]


def _source(header: str) -> str:
    lines = [
        "#include <type_traits>",
        "#include <cublasmp.h>",
        '#include "cublasmp_abi.h"',
        "namespace ours = jaxmp::abi;",
        *_enumerator_assertions(),
        *_attribute_assertions(header),
        *_signature_assertions(),
        "static_assert(ours::AttributeSize(-1) == 0 && ours::AttributeSize(29) == 0, "
        '"numbers that are no attributes");',
    ]
    return "\n".join(lines)


def _compile(compiler, includes, folder, ours, source, cuda=CUDA) -> subprocess.CompletedProcess:
    (folder / "csrc" / "cublasmp").mkdir(parents=True, exist_ok=True)
    for name, text in {"cublasmp_abi.h": ours, "csrc/cublasmp/abi.h": ours, "cuda_abi.h": cuda}.items():
        (folder / name).write_text(text)
    (folder / "abi.cc").write_text(source)
    flags = [f"-I{folder}", *(f"-isystem{path}" for path in includes)]
    command = [compiler, "-std=c++17", "-fsyntax-only", *flags, str(folder / "abi.cc")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def compile_with(compiler, includes, real_header, tmp_path):
    source = _source(real_header.read_text())
    return lambda ours: _compile(compiler, includes, tmp_path, ours, source)


def test_ours_is_the_real_abi(compile_with):
    result = compile_with(OURS)
    assert result.returncode == 0, result.stderr


def test_everything_is_compared(real_header):
    header = real_header.read_text()
    attributes = _enumerators(header, "cublasMpMatmulDescriptorAttribute_t")
    assert sorted(_attribute_types(header)) == sorted(attributes)
    assert len(attributes) == 29
    assert len(_functions()) == 23
    for enum in _our_enums():
        if enum.startswith("cublasMp"):  # of CUDA's and cuBLAS's we declare what we use
            assert _enumerators(OURS, enum) == _enumerators(header, enum), enum


@pytest.mark.parametrize("enum", RECORDED)
def test_numbers_of_cuda_and_cublas(enum):
    assert _numbers(OURS, enum) == RECORDED[enum]


@pytest.mark.parametrize("enum", RECORDED)
def test_the_record_is_what_an_installed_header_says(enum):
    distribution, header = SOURCES[enum]
    found = _find(distribution, header)
    if found is None:
        pytest.skip(f"no {header}; pip install --no-deps {distribution}")
    real = _numbers(found.read_text(), enum)
    assert {name: real.get(name) for name in RECORDED[enum]} == RECORDED[enum]


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("CUBLASMP_MATMUL_EPILOGUE_GELU_AUX = 160", "CUBLASMP_MATMUL_EPILOGUE_GELU_AUX = 161", "EPILOGUE_GELU_AUX"),
        ("CUDA_R_16BF = 14", "CUDA_R_16BF = 15", "CUDA_R_16BF"),
        ("CUBLAS_COMPUTE_32F_FAST_TF32 = 77", "CUBLAS_COMPUTE_32F_FAST_TF32 = 76", "CUBLAS_COMPUTE_32F_FAST_TF32"),
        ("CUBLAS_OP_C = 2", "CUBLAS_OP_C = 3", "CUBLAS_OP_C"),
        ("return 4;", "return 8;", "size of CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA"),
        (
            "cublasMpGetVersion(int* version)",
            "cublasMpGetVersion(int64_t* version)",
            "signature of cublasMpGetVersion",
        ),
        ("cublasMpNumroc(int64_t n,", "cublasMpNumroc(int32_t n,", "signature of cublasMpNumroc"),
        ("cublasMpFree(cublasMpGrid_t grid,", "cublasMpFree(cublasMpHandle_t grid,", "signature of cublasMpFree"),
    ],
)
def test_a_wrong_declaration_is_found(compile_with, right, wrong, complaint):
    assert right in OURS
    result = compile_with(OURS.replace(right, wrong, 1))
    assert result.returncode != 0
    assert complaint in result.stderr


def _cuda_functions(library: str) -> list[str]:
    """Of JAXMP_DRIVER_FUNCTIONS or JAXMP_NCCL_FUNCTIONS."""
    table = re.search(rf"#define JAXMP_{library}_FUNCTIONS\(X\)(.*?)\n\n", CUDA, flags=re.S)[1]
    return re.findall(r"X\((\w+)\)", table)


def _cuda_source(library: str, header: str, prefix: str) -> str:
    """Assertions about the driver's or NCCL's part of cuda/abi.h."""
    text = re.sub(r"//[^\n]*", "", CUDA)
    enums = [e for e in re.findall(r"^enum (\w+) : int", text, flags=re.M) if e.startswith(prefix)]
    types = [*enums, *(s for s in re.findall(r"^struct (\w+)[;\s]", text, flags=re.M) if s.startswith(prefix))]
    types += ["ncclComm"] if library == "NCCL" else []
    names = [name for enum in enums for name in _enumerators(text, enum)]
    return "\n".join(
        [
            "#include <type_traits>",
            f"#include <{header}>",
            '#include "cuda_abi.h"',
            "namespace ours = jaxmp::abi;",
            CHECKER,
            "template <> struct Real<ours::CUstream_st> { using type = ::CUstream_st; };",
            *(f"template <> struct Real<ours::{t}> {{ using type = ::{t}; }};" for t in types),
            *map(_equal, names),
            *(f'static_assert(sizeof(ours::{t}) == sizeof(::{t}), "{t}");' for t in types if t == "ncclUniqueId"),
            *(_signature(("cu" if library == "DRIVER" else "nccl") + f) for f in _cuda_functions(library)),
        ]
    )


@pytest.fixture
def compile_cuda(compiler, tmp_path):
    """Compiles a cuda/abi.h beside the real cuda.h ("DRIVER"), or beside the real nccl.h ("NCCL")."""

    def compile_beside(library: str, cuda: str) -> subprocess.CompletedProcess:
        if library == "DRIVER":
            folder, source = _include_dir("nvidia-cuda-runtime", "cuda.h"), _cuda_source("DRIVER", "cuda.h", "CU")
        else:
            folder, source = _include_dir("nvidia-nccl-cu13", "nccl.h"), _cuda_source("NCCL", "nccl.h", "nccl")
            for name, text in NCCL_STUBS.items():
                (tmp_path / name).write_text(text)
        return _compile(compiler, [folder], tmp_path, OURS, source, cuda)

    return compile_beside


@pytest.mark.parametrize("library", ["DRIVER", "NCCL"])
def test_ours_is_the_real_cuda_abi(compile_cuda, library):
    result = compile_cuda(library, CUDA)
    assert result.returncode == 0, result.stderr


def test_every_cuda_declaration_is_compared():
    text = re.sub(r"//[^\n]*", "", CUDA)
    declared = re.findall(r"\b(cu[A-Z]\w+|nccl[A-Z]\w+)\(", text.split("namespace jaxmp::abi {", 1)[1])
    compared = ["cu" + f for f in _cuda_functions("DRIVER")] + ["nccl" + f for f in _cuda_functions("NCCL")]
    assert sorted(declared) == sorted(compared)
    assert len(compared) == 34


@pytest.mark.parametrize(
    ("library", "right", "wrong", "complaint"),
    [
        ("DRIVER", "CUDA_ERROR_NOT_READY = 600", "CUDA_ERROR_NOT_READY = 601", "CUDA_ERROR_NOT_READY"),
        ("DRIVER", "CU_EVENT_DISABLE_TIMING = 2", "CU_EVENT_DISABLE_TIMING = 1", "CU_EVENT_DISABLE_TIMING"),
        ("DRIVER", "cuMemFree_v2(CUdeviceptr dptr)", "cuMemFree_v2(void* dptr)", "signature of cuMemFree_v2"),
        ("DRIVER", "cuEventQuery(CUevent hEvent)", "cuEventQuery(CUstream hEvent)", "signature of cuEventQuery"),
        ("NCCL", "ncclInt64 = 4", "ncclInt64 = 5", "ncclInt64"),
        ("NCCL", "char internal[128]", "char internal[64]", "ncclUniqueId"),
        ("NCCL", "ncclMemFree(void* ptr)", "ncclMemFree(void** ptr)", "signature of ncclMemFree"),
    ],
)
def test_a_wrong_cuda_declaration_is_found(compile_cuda, library, right, wrong, complaint):
    assert right in CUDA
    result = compile_cuda(library, CUDA.replace(right, wrong, 1))
    assert result.returncode != 0
    assert complaint in result.stderr
