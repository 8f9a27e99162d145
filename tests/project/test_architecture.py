"""The layers of docs/architecture.md: which C++ folder may include which, and which modules may use what.

Without these tests, one convenient upward include would let every layer see the validation, the platforms or the
environment. import-linter checks Python's imports (`make lint`). Wrong edges below test the checker itself.
"""

import ast
import re
from pathlib import Path

import pytest

from jaxmp._src.platform.runtime import config

ROOT = Path(__file__).resolve().parents[2]
# The folders of hostmp, from bottom to top: each may include the folders before it, `base` and `cublasmp`.
HOSTMP = ["cpu", "numeric", "kernels", "gemm", "handles", "tiling", "validate", "exec", "api"]
_AROUND = ("plan", "cuda", "barrier", "shared_memory")
# The folders of csrc, and what each may include in addition to itself and the standard library.
INCLUDES = {
    "base": set(),
    "cublasmp": {"base"},
    **{
        f"hostmp/{name}": {"base", "cublasmp", *(f"hostmp/{below}" for below in HOSTMP[:i])}
        for i, name in enumerate(HOSTMP)
    },
    "plan": {"base", "cublasmp", "hostmp/handles"},
    "barrier": {"base"},
    "shared_memory": {"base", "barrier"},
    "cuda": {"base", "cublasmp", "plan"},
    "ffi": {"base", "cublasmp", "hostmp/handles", *_AROUND, "xla"},
    "python": {"base", "cublasmp", "hostmp/cpu", "hostmp/gemm", "hostmp/handles", *_AROUND, "ffi", "nanobind"},
}


def folder_of(path):
    """Returns the folder of csrc that contains a file: "hostmp/gemm" for `csrc/hostmp/gemm/cblas.cc`."""
    parts = Path(path).parts
    return "/".join(parts[parts.index("csrc") + 1 : -1])


def included(source):
    """Returns the folders of csrc and the outside libraries that a file includes."""
    paths = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, flags=re.M)
    return {
        folder_of(path) if path.startswith("csrc/") else path.split("/")[0]
        for path in paths
        if path.startswith(("csrc/", "xla/", "nanobind/"))
    }


def forbidden(folder, source):
    """Returns what a file of `folder` includes although it may not."""
    return sorted(included(source) - INCLUDES[folder] - {folder})


def raw_collectives(source):
    """Returns the collectives of `jax.lax` and the reshards that a module calls directly."""
    names = "psum|pmax|pmin|all_gather|psum_scatter|all_to_all|ppermute|pcast"
    return re.findall(rf"\blax\.({names})\(|\bsharding\.(reshard)\(", source)


def python_files():
    return sorted((ROOT / "jaxmp").glob("**/*.py"))


def cpp_files():
    return sorted([*(ROOT / "csrc").glob("**/*.h"), *(ROOT / "csrc").glob("**/*.cc")])


@pytest.mark.parametrize("folder", sorted({folder_of(path.relative_to(ROOT)) for path in cpp_files()}))
def test_folders_include_what_is_below_them(folder):
    for path in (ROOT / "csrc" / folder).glob("*.*"):
        assert not forbidden(folder, path.read_text()), path
        assert "getenv" not in path.read_text(), path


def attributes_of(module, source):
    """Returns the attributes in dotted accesses such as `os.environ`, and the names imported from `module`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_one_module_reads_the_environment_one_folder_private_jax(path):
    source = path.read_text()
    if path.stem != "config":
        assert not attributes_of("os", source) & {"environ", "getenv", "putenv"}
    if path.parent.name != "jax_internals":
        assert "jax._src" not in source
        assert not attributes_of("jax", source) & {"__version__", "__version_info__"}


def environment_variables():
    """Returns every JAXMP_* that is read or set: a string of Python, a getenv of C++, a setting of make or CMake."""
    found = set()
    others = [p for folder in ("tests", "benchmarks", "examples") for p in ROOT.glob(f"{folder}/**/*.py")]
    for path in [*python_files(), *others]:
        tree = ast.parse(path.read_text())
        if path.name == "config.py":  # it names the tests' variables, too, without reading them
            (tree,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "parse")
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        found |= {s for s in strings if isinstance(s, str) and re.fullmatch(r"JAXMP_[A-Z_]+", s)}
    for path in ROOT.glob("tests/cpp/**/*.*"):
        found |= set(re.findall(r'(?:getenv|environment)\("(JAXMP_\w+)"\)', path.read_text()))
    settings = [(ROOT / name).read_text() for name in ("Makefile", ".ci/run")]
    settings += re.findall(r'ENVIRONMENT "([^"]*)"', (ROOT / "CMakeLists.txt").read_text())
    for text in settings:
        found |= set(re.findall(r"(?<!-D)\b(JAXMP_\w+)=", text))
    return found


def mentioned_variables():
    """Returns every JAXMP_* that documents and messages of C++ mention."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    found = {name for path in documents for name in re.findall(r"\bJAXMP_[A-Z_]+\b", path.read_text())}
    for path in cpp_files():
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        texts = re.findall(r'"((?:[^"\\]|\\.)*)"', "\n".join(lines))
        found |= {name for text in texts for name in re.findall(r"\bJAXMP_[A-Z_]+\b", text)}
    return found


def test_exactly_the_known_environment_variables_are_documented():
    """docs/tools.md documents the users' variables, CONTRIBUTING.md the tests'."""
    tables = (ROOT / "docs" / "tools.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    first_cells = re.findall(r"^\| (`JAXMP_[^|]*)\|", tables, flags=re.M)
    documented = set(re.findall(r"JAXMP_\w+", " ".join(first_cells)))
    assert documented == environment_variables()
    # Unknown variables cause a warning about a misspelt name.
    assert documented == {*config.VARIABLES, *config.TEST_VARIABLES}
    assert mentioned_variables() <= documented


# Tests call what users call. These import jaxmp._src, for values that no public function shows or parts to replace.
PRIVATE = {
    "core/errors": "test_errors test_refusals",
    "fuse": "test_kept_levels test_loops test_programs test_shard_maps",
    "tools": "test_advise test_advise_program test_audit test_audit_together test_compiled test_cli "
    "test_draw test_explain test_hardware test_profile test_source_lines",
    "jobs": "memory ranks schedules test_peers test_start_and_end",
    "project": "test_architecture test_conformance",
    "platform": "test_cuda_libraries test_native",
    "gpu": "gpu sharing test_calls test_library test_sharing",
}


@pytest.mark.parametrize("folder", PRIVATE)
def test_tests_that_reach_into_private_modules_are_listed(folder):
    files = (ROOT / "tests" / folder).glob("*.py")
    assert {path.stem for path in files if "jaxmp._src" in path.read_text()} == set(PRIVATE[folder].split())


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_every_example_ends_with_its_launch_line(path):
    assert re.match(r"\d\d_\w+\.py$", path.name)
    launcher = "mpiexec -n 4 " if path.name.endswith("_processes.py") else ""
    assert path.read_text().rstrip().splitlines()[-1] == f"# Launch: {launcher}python examples/{path.name}"


# Tests of the checker: each of these is wrong and must be found.


def test_a_forbidden_include_is_found():
    assert folder_of("csrc/hostmp/gemm/cblas.cc") == "hostmp/gemm"
    assert included('#include "csrc/base/status.h"\n#include <vector>') == {"base"}
    assert not forbidden("plan", '#include "csrc/base/status.h"')
    assert forbidden("plan", '#include "xla/ffi/api/ffi.h"') == ["xla"]
    assert forbidden("hostmp/api", '  #include "csrc/plan/plan.h"') == ["plan"]
    assert forbidden("hostmp/gemm", '#include "csrc/hostmp/exec/epilog.h"') == ["hostmp/exec"]


def test_collectives_stand_behind_a_barrier():
    """Otherwise a collective can hang a job or end its processes. The call's barrier covers `xla_matmul` and
    `process_collectives`; `calibrate` times XLA's collectives in one process."""
    users = {path.stem for path in python_files() if raw_collectives(path.read_text())}
    assert users == {"collectives", "xla_matmul", "process_collectives", "accept", "calibrate"}
    assert raw_collectives("lax.psum(x, axes)")
    assert not raw_collectives("collectives.psum(x, axes)")
