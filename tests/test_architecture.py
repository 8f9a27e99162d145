"""The rooms of docs/architecture.md, held to: who may use whom, and who alone may touch what.

Without these tests the layering would be a drawing: one convenient import upward and the validation,
the platforms or the environment are known everywhere. The checker is itself fed wrong edges below.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from jaxmp import _config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
EXTERNAL_INCLUDES = ("nanobind", "xla")


def allowed_edges(markdown, heading):
    """Room to the set of names it may use, from the table under `heading`."""
    section = re.split(r"^#+ ", markdown.split(heading, 1)[1], maxsplit=1, flags=re.M)[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): set(re.findall(r"`(\w+)`", row[2] if len(row) > 2 else "")) for row in rows}


def python_uses(source, package="jaxmp"):
    """Names used by a module: rooms of the package without its name, and other packages by theirs."""
    uses = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package if node.level else node.module
            inner = f"{package}.{node.module}" if node.level and node.module else base
            names = [f"{inner}.{alias.name}" for alias in node.names] if inner == package else [inner]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            uses.add(rest[0] if top == package and rest else top)
    return uses


def cpp_room(path):
    """`csrc/hostmp/blas.cc` belongs to `hostmp`, `csrc/plan_cache.h` to `plan_cache`."""
    parts = Path(path).with_suffix("").parts
    return parts[parts.index("csrc") + 1]


def cpp_uses(source):
    """Rooms and outside libraries that a file includes; the standard library is everybody's."""
    uses = set()
    for path in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, flags=re.M):
        top = path.split("/")[0]
        if top == "csrc":
            uses.add(cpp_room(path))
        elif top in EXTERNAL_INCLUDES:
            uses.add(top)
    return uses


def forbidden(room, uses, allowed, standard=()):
    """Complaints about `room`, empty where it keeps to its row."""
    if room not in allowed:
        return [f"{room} has no row in docs/architecture.md; add one that says what it may use"]
    extra = sorted(uses - allowed[room] - {room} - set(standard))
    return [f"{room} may not use {name}; docs/architecture.md allows {sorted(allowed[room])}" for name in extra]


def raw_collectives(source):
    """The collectives of `jax.lax` that a module calls by itself."""
    names = "psum|pmax|pmin|all_gather|psum_scatter|all_to_all|ppermute|pcast"
    return re.findall(rf"\blax\.({names})\(|\bsharding\.(reshard)\(", source)


def python_files():
    return sorted((ROOT / "jaxmp").glob("**/*.py"))


def cpp_files():
    return sorted([*(ROOT / "csrc").glob("**/*.h"), *(ROOT / "csrc").glob("**/*.cc")])


def room_of(path):
    return path.relative_to(ROOT / "jaxmp").parts[0].removesuffix(".py")


def test_python_rooms_keep_to_their_table():
    allowed = allowed_edges(DOCUMENT.read_text(), "### Python")
    complaints = []
    for path in python_files():
        complaints += forbidden(room_of(path), python_uses(path.read_text()), allowed, sys.stdlib_module_names)
    assert not complaints, "\n".join(complaints)


def test_cpp_rooms_keep_to_their_table():
    allowed = allowed_edges(DOCUMENT.read_text(), "### C++")
    complaints = []
    for path in cpp_files():
        complaints += forbidden(cpp_room(path.relative_to(ROOT)), cpp_uses(path.read_text()), allowed)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("heading", ["### Python", "### C++"])
def test_tables_have_no_cycle_and_name_files_that_exist(heading):
    allowed = allowed_edges(DOCUMENT.read_text(), heading)
    rooms = {room_of(p) for p in python_files()} if "Python" in heading else {cpp_room(p) for p in cpp_files()}
    assert set(allowed) == rooms
    settled = set()
    while len(settled) < len(allowed):
        ready = {room for room, uses in allowed.items() if room not in settled and uses & set(allowed) <= settled}
        assert ready, f"these rooms use each other in a circle: {sorted(set(allowed) - settled)}"
        settled |= ready


def attributes_of(module, source):
    """Dotted accesses such as `os.environ`, and names imported from `module`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_only_config_reads_the_environment_and_only_compat_uses_private_jax(path):
    source = path.read_text()
    if room_of(path) != "_config":
        assert not attributes_of("os", source) & {"environ", "getenv", "putenv"}
    if room_of(path) != "_compat":
        assert "jax._src" not in source
        assert not attributes_of("jax", source) & {"__version__", "__version_info__"}


@pytest.mark.parametrize("path", cpp_files(), ids=lambda path: str(path.relative_to(ROOT / "csrc")))
def test_the_core_reads_no_environment(path):
    assert "getenv" not in path.read_text()


def environment_variables():
    """Every JAXMP_* that something reads or sets: a string of Python, a getenv of C++, a setting of make or CMake."""
    found = set()
    others = [p for folder in ("tests", "benchmarks", "examples") for p in ROOT.glob(f"{folder}/**/*.py")]
    for path in [*python_files(), *others]:
        tree = ast.parse(path.read_text())
        if path.name == "_config.py":  # names those of the tests too, which it does not read
            (tree,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "parse")
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        found |= {s for s in strings if isinstance(s, str) and re.fullmatch(r"JAXMP_[A-Z_]+", s)}
    for path in ROOT.glob("tests/cpp/*"):
        found |= set(re.findall(r'(?:getenv|environment)\("(JAXMP_\w+)"\)', path.read_text()))
    settings = [(ROOT / name).read_text() for name in ("Makefile", ".ci/run")]
    settings += re.findall(r'ENVIRONMENT "([^"]*)"', (ROOT / "CMakeLists.txt").read_text())
    for text in settings:
        found |= set(re.findall(r"(?<!-D)\b(JAXMP_\w+)=", text))
    return found


def mentioned_variables():
    """Every JAXMP_* that documents, and the messages of C++, tell a user about."""
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md")]
    found = {name for path in documents for name in re.findall(r"\bJAXMP_[A-Z_]+\b", path.read_text())}
    for path in cpp_files():
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        texts = re.findall(r'"((?:[^"\\]|\\.)*)"', "\n".join(lines))
        found |= {name for text in texts for name in re.findall(r"\bJAXMP_[A-Z_]+\b", text)}
    return found


def test_every_environment_variable_is_known_and_in_the_readme_and_nothing_else_is():
    documented = set(re.findall(r"^\| `(JAXMP_\w+)", (ROOT / "README.md").read_text(), flags=re.M))
    assert documented == environment_variables()
    # What is not known is warned of as misspelt.
    assert documented == {*_config.VARIABLES, *_config.TEST_VARIABLES}
    assert mentioned_variables() <= documented


def test_settings_and_mentions_are_found():
    assert {"JAXMP_FUZZ", "JAXMP_FAKES", "JAXMP_BLAS", "JAXMP_REQUIRE_ABI"} <= environment_variables()
    assert "JAXMP_TIMEOUT" in mentioned_variables()


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_every_example_ends_with_its_launch_line(path):
    assert re.match(r"\d\d_\w+\.py$", path.name)
    launcher = "mpiexec -n 4 " if path.name.endswith("_processes.py") else ""
    assert path.read_text().rstrip().splitlines()[-1] == f"# Launch: {launcher}python examples/{path.name}"


# The checker itself: each of these is wrong, and has to be found.

TABLE = """
### Python (`jaxmp/`)
| Room | Job | May use |
|---|---|---|
| `_api` | calls | `_spec` `jax` |
| `_spec` | validates | |

### C++
"""


@pytest.mark.parametrize(
    "source",
    [
        "from jaxmp import _api",
        "from jaxmp._api import matmul",
        "import jaxmp._api",
        "from . import _api",
        "from ._api import matmul",
        "def late():\n    from jaxmp._api import matmul",
    ],
)
def test_an_import_upward_is_found(source):
    allowed = allowed_edges(TABLE, "### Python")
    assert allowed == {"_api": {"_spec", "jax"}, "_spec": set()}
    assert forbidden("_spec", python_uses(source), allowed) == [
        "_spec may not use _api; docs/architecture.md allows []"
    ]


def test_a_forbidden_package_and_an_unknown_room_are_found():
    allowed = allowed_edges(TABLE, "### Python")
    assert forbidden("_spec", python_uses("import jax.numpy as jnp"), allowed)
    assert forbidden("_helpers", set(), allowed)
    assert not forbidden("_api", python_uses("import os\nfrom jax import lax\nfrom . import _spec"), allowed, ["os"])


def test_a_forbidden_include_is_found():
    allowed = {"plan": {"problem"}, "hostmp": set()}
    assert cpp_room("csrc/hostmp/blas.cc") == "hostmp"
    assert cpp_uses('#include "csrc/problem.h"\n#include <vector>') == {"problem"}
    assert not forbidden("plan", {"problem"}, allowed)
    assert forbidden("plan", cpp_uses('#include "xla/ffi/api/ffi.h"'), allowed)
    assert forbidden("hostmp", cpp_uses('  #include "csrc/plan.h"'), allowed)


def test_reading_the_environment_is_found():
    assert attributes_of("os", "import os\nos.environ.get('X')") == {"environ"}
    assert attributes_of("os", "from os import getenv") == {"getenv"}


def test_collectives_stand_behind_a_barrier():
    """One that does not can hang a job, or end its processes. `_xla` and `_lowering` have the barrier of the call."""
    users = {room_of(path) for path in python_files() if raw_collectives(path.read_text())}
    assert users == {"_collectives", "_xla", "_lowering"}
    assert raw_collectives("lax.psum(x, axes)")
    assert not raw_collectives("_collectives.psum(x, axes)")
