"""The code in the README and the docstrings is what users run first; where it fails, nothing else gets a chance."""

import doctest
import importlib
import inspect
import pkgutil
import pydoc
import re
import runpy
import tomllib
from pathlib import Path

import documents
import pytest

import jaxmp
from jaxmp._src.explain import rows
from jaxmp._src.fuse import rewrite

ROOT = Path(__file__).resolve().parents[2]
MODULES = ["distributed", "quantize", "testing"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


# What the fragments of a page assume.
BEFORE = {
    "determinism": "import numpy as np\nactual = expected = np.ones(2)",
    "fuse": """
import jax, jaxmp
params, batch = jax.numpy.ones((8, 8), "bfloat16"), jax.numpy.ones((4, 8), "bfloat16")
def train_step(params, batch): return batch @ params
""",
}
# Pages of Python sessions run as doctests; architecture and others have no Python.
SESSIONS = ["matmul"]
PAGES = [
    page for page in DOCUMENTS if documents.blocks(page) and page.stem not in SESSIONS and page.name != "CHANGELOG.md"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path):
    printed = documents.run(page, tmp_path, BEFORE.get(page.stem, ""))
    if page.name == "README.md":
        assert "all_gather" in printed


def test_the_pages_with_code_are_found():
    assert {"README", "quickstart", "cookbook", "from-jnp", "performance"} <= {page.stem for page in PAGES}


PUBLIC = [jaxmp, *(importlib.import_module(f"jaxmp.{name}") for name in MODULES)]
ALL_MODULES = sorted(
    module.name for module in pkgutil.walk_packages(jaxmp.__path__, "jaxmp.") if "._jaxmp" not in module.name
)


@pytest.mark.parametrize("name", ALL_MODULES)
def test_the_examples_of_the_docstrings_run(name, standard_promotion):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("name", SESSIONS)
def test_the_sessions_of_a_page_run(name, standard_promotion):
    assert documents.run_doctests(ROOT / "docs" / f"{name}.md") > 10


FUNCTIONS = {name: value for name, value in vars(jaxmp).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", [name for name, value in FUNCTIONS.items() if inspect.signature(value).parameters])
def test_every_public_function_that_takes_arguments_has_an_example(name):
    assert ">>>" in inspect.getdoc(getattr(jaxmp, name))


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_function_says_what_it_returns(module):
    """To mypy --strict a function without any annotation is untyped, and each call of it an error."""
    functions = {name: f for name in module.__all__ if inspect.isfunction(f := getattr(module, name))}
    assert functions
    assert not [name for name, f in functions.items() if inspect.signature(f).return_annotation is inspect._empty]


def test_the_public_names_are_ours():
    """What `dir` offers has to be meant for users, and no module that an import left behind."""
    names = {name: value for name, value in vars(jaxmp).items() if not name.startswith("_")}
    assert not [name for name, x in names.items() if inspect.ismodule(x) and not x.__name__.startswith("jaxmp")]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_dir_and_help_show_the_public_names_alone(module):
    assert set(dir(module)) - {"__version__"} == set(module.__all__)
    assert list(module.__all__) == sorted(module.__all__)
    text = pydoc.plain(pydoc.render_doc(module))
    shown = set(re.findall(r"^    (?:class )?(\w+)\(", text, flags=re.M))
    assert shown
    assert shown <= set(module.__all__)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_a_docstring_is_one_screen(module):
    for name in module.__all__:
        lines = (inspect.getdoc(getattr(module, name)) or "").splitlines()
        assert 0 < len(lines) <= 45, f"{name} has {len(lines)} lines"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
        if not target.startswith(("api/", "pictures/")):  # `make docs` writes these, and fails where one is missing
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_tables_of_the_benchmarks_are_those_of_their_json():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    assert (ROOT / "docs" / "benchmarks.md").read_text() == tables["page"](), "python benchmarks/run.py --page"


def test_a_source_distribution_has_what_its_tests_read():
    """The tests go along with the sources, and these tests read documents."""
    exclude = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["sdist"]["exclude"]
    read = {path.relative_to(ROOT).parts[0] for path in [*DOCUMENTS, ROOT / "tests", ROOT / "Makefile"]}
    assert not read & set(exclude)


def test_every_promise_about_bits_names_tests_that_exist():
    """A promise is as good as the test that proves it, and a test as the promise that it is known to prove."""
    lines = (ROOT / "docs" / "determinism.md").read_text().split("## Which test proves it")[1].splitlines()
    lines = [line for line in lines if line.startswith("|")][2:]
    assert lines
    for row in lines:
        named = re.findall(r"`(tests/[\w/]+\.\w+)(?:::(\w+))?`", row)
        assert named, row
        for path, name in named:
            assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
    named = set(re.findall(r"test_determinism\w*\.py::(\w+)", "\n".join(lines)))
    files = (ROOT / "tests").glob("test_determinism*.py")
    tests = {name for path in files for name in re.findall(r"\ndef (test_\w+)\(", path.read_text())}
    of_tools = re.compile("explain|key|unknown_level|slips_in")
    assert not [name for name in tests - named if not of_tools.search(name)]


def test_the_commands_that_documents_name_are_those_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.M))
    text = "\n".join(path.read_text() for path in [ROOT / "CONTRIBUTING.md", *DOCUMENTS] if path.stem != "CHANGELOG")
    named = set(re.findall(r"`make ([a-z-]+)", text))
    assert named
    assert named <= targets


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_files_that_a_document_names_exist(name):
    """`folder/module` of jaxmp/_src, or a path of the repository."""
    named = set(re.findall(r"`((?:[\w.]+/)+\w+(?:\.\w+)?)`", (ROOT / name).read_text()))
    assert named
    folders = (ROOT, ROOT / "jaxmp/_src")
    missing = {path for path in named if not any((f / path).exists() or (f / f"{path}.py").exists() for f in folders)}
    assert missing <= {"build/docs"}, missing


def test_every_row_of_the_faults_names_a_test_that_exists():
    document = (ROOT / "docs" / "faults.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / "process").glob("test_*.py"))
    table = document.split("## What each rank sees")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert lines
    assert not [line for line in lines if not re.search(r"`test_\w+`", line)]
    for name in re.findall(r"`(test_\w+)`", document):
        assert f"def {name}(" in tests, f"docs/faults.md names {name}"


def test_every_reason_of_explain_is_in_the_documents():
    """In docs/fuse.md why a product stays JAX's, in docs/troubleshooting.md why a collective runs beside the calls."""
    stays = (ROOT / "docs" / "fuse.md").read_text()
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert [reason for reason in rewrite.REASONS.values() if f"*{reason}" not in stays] == []
    beside = (*rewrite.NOTES.values(), *rows._COMMUNICATES.values(), *rows._SCOPES.values())
    assert [reason for reason in beside if f"*{reason}*" not in page] == []


def test_every_public_name_has_a_page_of_the_api():
    """`make docs` makes a page of each name that docs/api.md lists."""
    listed, module = set(), ""
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
        elif re.fullmatch(r"   [\w.]+", line):
            listed.add(f"{module}.{line.strip()}")
    names = {f"{m.__name__}.{name}" for m in PUBLIC for name in m.__all__ if not inspect.ismodule(getattr(m, name))}
    names |= {"jaxmp.flax.DotGeneral", "jaxmp.flax.Linear", "jaxmp.equinox.Linear"}
    assert listed == names - {"jaxmp.distributed.DistributedError"}  # which is jaxmp.DistributedError
