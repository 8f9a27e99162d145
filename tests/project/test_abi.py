"""Our declarations of cuBLASMp, of the CUDA driver and of NCCL against their own headers.

Without these tests, a changed number or parameter in a release would overwrite memory on a GPU.
A translation unit that includes ours and theirs checks every enumerator, attribute size and signature; wrong copies of
ours must not compile. Nothing is linked or run, and no GPU is needed, only the headers from three wheels (the last
one weighs 200 MB; without it NCCL's half is skipped), and for the programs in docs/reports a fourth:

    pip install --no-deps nvidia-cublasmp-cu13 nvidia-cuda-runtime nvidia-nccl-cu13 nvidia-cuda-crt

cublasmp.h takes two enumerations of cuBLAS's own header (its wheel weighs 400 MB). They are recorded here, so that
their numbers are compared everywhere; if nvidia-cublas is installed, the record is compared with it, too.
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
LOGGER = (
    "cublasMpLoggerSetCallback",
    "cublasMpLoggerSetFile",
    "cublasMpLoggerSetLevel",
)  # no table of the core has these

# The part of cublas_api.h and library_types.h that cublasmp/abi.h declares, with the numbers of CUDA 13 (nvidia-cublas
# 13.10.0.20, nvidia-cuda-runtime 13.5.37).
RECORDED = {
    "cublasOperation_t": {"CUBLAS_OP_N": 0, "CUBLAS_OP_T": 1, "CUBLAS_OP_C": 2},
    "cublasComputeType_t": {
        "CUBLAS_COMPUTE_32F": 68, "CUBLAS_COMPUTE_32F_PEDANTIC": 69, "CUBLAS_COMPUTE_64F": 70,
        "CUBLAS_COMPUTE_64F_PEDANTIC": 71, "CUBLAS_COMPUTE_32I": 72, "CUBLAS_COMPUTE_32F_FAST_16F": 74,
        "CUBLAS_COMPUTE_32F_FAST_16BF": 75, "CUBLAS_COMPUTE_32F_FAST_TF32": 77,
        "CUBLAS_COMPUTE_32F_EMULATED_16BFX9": 78, "CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT": 79,
    },
    "cudaDataType_t": {
        "CUDA_R_32F": 0, "CUDA_R_64F": 1, "CUDA_R_16F": 2, "CUDA_R_8I": 3, "CUDA_C_32F": 4, "CUDA_C_64F": 5,
        "CUDA_R_8U": 8, "CUDA_R_32I": 10, "CUDA_R_16BF": 14, "CUDA_R_8F_E4M3": 28, "CUDA_R_8F_E5M2": 29,
        "CUDA_R_4F_E2M1": 33,
    },
}  # fmt: skip
# The wheel and the header that each of these comes from.
SOURCES = {
    "cublasOperation_t": ("nvidia-cublas", "cublas_api.h"),
    "cublasComputeType_t": ("nvidia-cublas", "cublas_api.h"),
    "cudaDataType_t": ("nvidia-cuda-runtime", "library_types.h"),
}


def _recorded_enum(enum: str) -> str:
    numbers = ", ".join(f"{name} = {number}" for name, number in RECORDED[enum].items())
    return f"typedef enum {{ {numbers} }} {enum};"


# Declarations that the real headers include from wheels of 400 and 300 MB (types of cuBLAS, a pointer of NCCL), and
# types that nccl.h includes and we do not declare.
STUBS = {
    "CUBLASMP": {
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
    },
    "DRIVER": {},
    "NCCL": {
        "cuda_runtime.h": """
#pragma once
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
""",
        "cuda_fp16.h": "#pragma once\n",
    },
}
# Wheels, and the header in each; our header is compared with the first one.
WHEELS = {
    "CUBLASMP": [("nvidia-cublasmp-cu13", "cublasmp.h"), ("nvidia-cuda-runtime", "library_types.h")],
    "DRIVER": [("nvidia-cuda-runtime", "cuda.h")],
    "NCCL": [("nvidia-nccl-cu13", "nccl.h")],
}
# Our text; the prefix of its enumerations and types; types that another of our headers declares.
DECLARED = {"CUBLASMP": (OURS, "", ()), "DRIVER": (CUDA, "CU", ("CUstream_st",))}
DECLARED["NCCL"] = (CUDA, "nccl", ("CUstream_st", "ncclComm"))

# Replaces our types in signatures by the real header's types; everything else must match exactly.
CHECKER = """
#include <type_traits>
#include "csrc/cublasmp/abi.h"
#include "cuda_abi.h"
namespace ours = jaxmp::abi;
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


PACKAGES = ("nvidia-cublasmp-cu13", "nvidia-cuda-runtime", "nvidia-nccl-cu13", "nvidia-cuda-crt")


def _header(distribution: str, header: str) -> pathlib.Path:
    found = _find(distribution, header)
    if found is not None:
        return found
    message = f"no {header}; pip install --no-deps {' '.join(PACKAGES)}"
    if os.environ.get("JAXMP_REQUIRE_ABI"):
        pytest.fail(message)
    pytest.skip(message)


def _body(text: str, enum: str) -> str:
    """Returns the body of a C enumeration. Ours is `enum name : int { ... }`, theirs `typedef enum { ... } name;`, with
    or without a name after `enum`."""
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


def _enums(library: str) -> list[str]:
    text, prefix, _ = DECLARED[library]
    return re.findall(rf"^enum ({prefix}\w+) : int", text, flags=re.M)


def _functions(library: str) -> list[str]:
    if library == "CUBLASMP":
        return ["cublasMp" + f for f in re.findall(r"X\((\w+)\)", TABLE) if f != "function"]
    table = re.search(rf"#define JAXMP_{library}_FUNCTIONS\(X\)(.*?)\n\n", CUDA, flags=re.S)[1]
    return [("cu" if library == "DRIVER" else "nccl") + f for f in re.findall(r"X\((\w+)\)", table)]


def _attribute_types(header: str) -> dict[str, str]:
    """Returns the type of each attribute, from the comment before it in the header, such as `Type: int64_t.`"""
    enumerators = r"CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA.*?cublasMpMatmulDescriptorAttribute_t;"
    body = re.search(enumerators, header, re.S)
    start = header.rindex("typedef enum", 0, body.start())
    pattern = r"/\*\*(.*?)\*/\s*(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_\w+)"
    types = {}
    for comment, name in re.findall(pattern, header[start : body.end()], flags=re.S):
        types[name] = re.findall(r"Type:\s+((?:const )?\w+\*?)\s*\.", comment)[-1]
    return types


def _assertions(library: str, header: str):
    """Yields static assertions that compare our enumerators, sizes and signatures with the header's."""
    text, prefix, more = DECLARED[library]
    types = [*_enums(library), *re.findall(rf"^struct ({prefix}\w+)[;\s]", text, flags=re.M), *more]
    for name in dict.fromkeys(types):
        yield f"template <> struct Real<ours::{name}> {{ using type = ::{name}; }};"
    for name in (name for enum in _enums(library) for name in _enumerators(text, enum)):
        yield f'static_assert(int(::{name}) == int(ours::{name}), "{name}");'
    for name in (*_functions(library), *(LOGGER if library == "CUBLASMP" else ())):
        same = f"std::is_same_v<Real<decltype(ours::{name})>::type, decltype(::{name})>"
        yield f'static_assert({same}, "signature of {name}");'
    if library == "NCCL":
        yield 'static_assert(sizeof(ours::ncclUniqueId) == sizeof(::ncclUniqueId), "ncclUniqueId");'
    if library == "CUBLASMP":
        for name, kind in _attribute_types(header).items():
            yield f'static_assert(sizeof({kind}) == ours::AttributeSize(::{name}), "size of {name}");'
        for number in (-1, 29):
            yield f'static_assert(ours::AttributeSize({number}) == 0, "a number that is no attribute");'


@pytest.fixture
def compiler():
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def compile_beside(compiler, tmp_path):
    """Returns a function that compiles our headers together with a real one, and returns the compiler's result."""

    def run(library: str, ours: str = OURS, cuda: str = CUDA) -> subprocess.CompletedProcess:
        headers = [_header(*wheel) for wheel in WHEELS[library]]
        source = [f"#include <{headers[0].name}>", CHECKER, *_assertions(library, headers[0].read_text())]
        files = {"csrc/cublasmp/abi.h": ours, "cuda_abi.h": cuda, "abi.cc": "\n".join(source)}
        (tmp_path / "csrc" / "cublasmp").mkdir(parents=True, exist_ok=True)
        for name, text in (files | STUBS[library]).items():
            (tmp_path / name).write_text(text)
        flags = [f"-I{tmp_path}", *(f"-isystem{header.parent}" for header in headers)]
        command = [compiler, "-std=c++17", "-fsyntax-only", *flags, str(tmp_path / "abi.cc")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("library", WHEELS)
def test_ours_is_the_real_abi(compile_beside, library):
    result = compile_beside(library)
    assert result.returncode == 0, result.stderr


def test_reports_compile_with_the_real_headers(compiler, tmp_path):
    """The programs that show faults of cuBLASMp call it alone: no header of ours."""
    wheels = ("nvidia-cublasmp-cu13", "cublasmp.h"), ("nvidia-cuda-runtime", "cuda_runtime_api.h")
    headers = [_header(*wheel) for wheel in (*wheels, ("nvidia-nccl-cu13", "nccl.h"))]
    headers.append(_header("nvidia-cuda-crt", "host_defines.h").parent)
    numbers = dict.fromkeys(("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"), "#pragma once\n")
    for name, text in ({"cublas_v2.h": STUBS["CUBLASMP"]["cublas_v2.h"]} | numbers).items():
        (tmp_path / name).write_text(text)
    reports = sorted((ROOT / "docs" / "reports").glob("*.cc"))
    assert len(reports) == 7
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{tmp_path}", *(f"-isystem{header.parent}" for header in headers)]
    command = [compiler, "-std=c++17", "-fsyntax-only", *flags, *map(str, reports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


WRONG = [
    ("CUBLASMP", "EPILOGUE_GELU_AUX = 160", "EPILOGUE_GELU_AUX = 161", "EPILOGUE_GELU_AUX"),
    ("CUBLASMP", "CUDA_R_16BF = 14", "CUDA_R_16BF = 15", "CUDA_R_16BF"),
    ("CUBLASMP", "32F_FAST_TF32 = 77", "32F_FAST_TF32 = 76", "CUBLAS_COMPUTE_32F_FAST_TF32"),
    ("CUBLASMP", "CUBLAS_OP_C = 2", "CUBLAS_OP_C = 3", "CUBLAS_OP_C"),
    ("CUBLASMP", "return 4;", "return 8;", "size of CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA"),
    ("CUBLASMP", "GetVersion(int* version)", "GetVersion(int64_t* version)", "signature of cublasMpGetVersion"),
    ("CUBLASMP", "cublasMpNumroc(int64_t n,", "cublasMpNumroc(int32_t n,", "signature of cublasMpNumroc"),
    ("CUBLASMP", "Free(cublasMpGrid_t grid,", "Free(cublasMpHandle_t grid,", "signature of cublasMpFree"),
    ("DRIVER", "CUDA_ERROR_NOT_READY = 600", "CUDA_ERROR_NOT_READY = 601", "CUDA_ERROR_NOT_READY"),
    ("DRIVER", "CU_EVENT_DISABLE_TIMING = 2", "CU_EVENT_DISABLE_TIMING = 1", "CU_EVENT_DISABLE_TIMING"),
    ("DRIVER", "cuMemFree_v2(CUdeviceptr dptr)", "cuMemFree_v2(void* dptr)", "signature of cuMemFree_v2"),
    ("DRIVER", "cuEventQuery(CUevent hEvent)", "cuEventQuery(CUstream hEvent)", "signature of cuEventQuery"),
    ("NCCL", "ncclInt64 = 4", "ncclInt64 = 5", "ncclInt64"),
    ("NCCL", "char internal[128]", "char internal[64]", "ncclUniqueId"),
    ("NCCL", "ncclMemFree(void* ptr)", "ncclMemFree(void** ptr)", "signature of ncclMemFree"),
]  # fmt: skip


@pytest.mark.parametrize(("library", "right", "wrong", "complaint"), WRONG)
def test_a_wrong_declaration_is_found(compile_beside, library, right, wrong, complaint):
    name = "ours" if library == "CUBLASMP" else "cuda"
    text = DECLARED[library][0]
    assert right in text
    result = compile_beside(library, **{name: text.replace(right, wrong, 1)})
    assert result.returncode != 0
    assert complaint in result.stderr


def test_everything_is_compared():
    declared = re.findall(
        r"\b(cu[A-Z]\w+|nccl[A-Z]\w+)\(", re.sub(r"//[^\n]*", "", CUDA).split("namespace jaxmp::abi {")[1]
    )
    compared = _functions("DRIVER") + _functions("NCCL")
    assert sorted(declared) == sorted(compared)
    assert (len(compared), len(_functions("CUBLASMP"))) == (34, 20)
    header = _header(*WHEELS["CUBLASMP"][0]).read_text()
    attributes = _enumerators(header, "cublasMpMatmulDescriptorAttribute_t")
    assert sorted(_attribute_types(header)) == sorted(attributes)
    assert len(attributes) == 29
    for enum in _enums("CUBLASMP"):
        if enum.startswith("cublasMp"):  # of CUDA's and cuBLAS's enumerations we declare a part
            assert _enumerators(OURS, enum) == _enumerators(header, enum), enum


@pytest.mark.parametrize("runner", [".ci/run", ".github/workflows/tests.yml"])
def test_a_run_of_all_tests_installs_the_wheels(runner):
    assert set(PACKAGES) <= set((ROOT / runner).read_text().replace('"', " ").split())


@pytest.mark.parametrize("enum", RECORDED)
def test_numbers_of_cuda_and_cublas(enum):
    """The numbers equal the record, and the record equals an installed header."""
    assert _numbers(OURS, enum) == RECORDED[enum]
    distribution, header = SOURCES[enum]
    found = _find(distribution, header)
    if found is None:
        pytest.skip(f"no {header}; pip install --no-deps {distribution}")
    real = _numbers(found.read_text(), enum)
    assert {name: real.get(name) for name in RECORDED[enum]} == RECORDED[enum]
