"""Users first run the code in the README and the docstrings; if it fails, they try nothing else."""

import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import tomllib
from pathlib import Path

import documents
import pytest

import jaxmp

ROOT = Path(__file__).resolve().parents[2]
MODULES = ["distributed", "quantize", "testing"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


# Code that the fragments of a page assume.
BEFORE = {
    "determinism": "import numpy as np\nactual = expected = np.ones(2)",
    "fuse": """
import jax, jaxmp
params, batch = jax.numpy.ones((8, 8), "bfloat16"), jax.numpy.ones((4, 8), "bfloat16")
def train_step(params, batch): return batch @ params
""",
}
# Pages of Python sessions run as doctests; architecture and other pages have no Python.
SESSIONS = ["epilogs", "experts", "low-precision", "matmul"]
PAGES = [
    page for page in DOCUMENTS if documents.blocks(page) and page.stem not in SESSIONS and page.name != "CHANGELOG.md"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path):
    printed = documents.run(page, tmp_path, BEFORE.get(page.stem, ""))
    if page.name == "README.md":
        assert "all_gather" in printed
    if page.name == "quickstart.md":
        (shown,) = documents.blocks(page, "text")
        of_processor = r"\(.*\); workspace of .* MB"  # the kernel
        assert re.sub(of_processor, "", shown) in re.sub(of_processor, "", printed)


def test_code_fits_the_column_of_a_page():
    lines = [line for page in DOCUMENTS for block in documents.blocks(page) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


PUBLIC = [jaxmp, *(importlib.import_module(f"jaxmp.{name}") for name in MODULES)]
ALL_MODULES = sorted(
    module.name for module in pkgutil.walk_packages(jaxmp.__path__, "jaxmp.") if "._jaxmp" not in module.name
)


@pytest.mark.parametrize("name", ALL_MODULES)
def test_the_examples_of_the_docstrings_run(name, standard_promotion):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("name", SESSIONS)
def test_the_sessions_of_a_page_run(name, promotion_of_users):
    assert documents.run_doctests(ROOT / "docs" / f"{name}.md") > 2


FOLDERS = [ROOT / name for name in (".", "docs", "docs/notebooks", "docs/reports", "packaging")]
LINKED = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))


def _anchors(page):
    """Returns the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
        if not target.startswith(("api/", "pictures/")):  # `make docs` writes these, and fails if one is missing
            page = document.parent / target if target else document
            assert page.exists(), f"{document.name} links to {target}"
            assert not anchor or anchor in _anchors(page), f"{document.name} links to {target}#{anchor}"


def test_the_extras_that_are_named_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    files = [*LINKED, ROOT / "Makefile", ROOT / "pyproject.toml"]
    text = "\n".join(path.read_text() for path in files if path.stem != "CHANGELOG")
    named = {extra for group in re.findall(r"['\"](?:\.|jaxmp)\[([\w,]+)\]", text) for extra in group.split(",")}
    assert len(named) > 5
    assert named | set(project["tool"]["cibuildwheel"].get("test-extras", ())) <= set(extras)


def test_the_tables_of_the_benchmarks_are_those_of_their_json():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    for path in tables["PAGES"]:
        assert path.read_text() == tables["page"](path), "python benchmarks/run.py --page"
    results = tables["load"]()
    worst = min(
        row[ratio]
        for name, ratio in (("matmul", "jaxmp / XLA"), ("layers", "forward"), ("layers", "gradient"))
        for sections in results.values()
        for row in sections.get(name, {"rows": ()})["rows"]
    )
    eager = [row for sections in results.values() for row in sections.get("eager", {"rows": ()})["rows"]]
    vector = max(row["jaxmp / jnp"] for row in eager if row["product"] == "matrix by vector")
    readme = (ROOT / "README.md").read_text()
    assert f"the lowest ratio is {worst:.2f}:" in readme
    assert f"with vectors, which take up to {vector:.1f} times" in readme


def test_a_source_distribution_has_what_its_tests_read():
    """The sdist contains the tests, and these tests read documents."""
    exclude = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["sdist"]["exclude"]
    read = {path.relative_to(ROOT).parts[0] for path in [*DOCUMENTS, ROOT / "tests", ROOT / "Makefile"]}
    assert not read & set(exclude)


def test_documents_name_only_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.M))
    text = "\n".join(path.read_text() for path in [ROOT / "CONTRIBUTING.md", *DOCUMENTS] if path.stem != "CHANGELOG")
    named = set(re.findall(r"`make ([a-z-]+)", text))
    assert named
    assert named <= targets


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_files_that_a_document_names_exist(name):
    """A name is `folder/module` in a folder of jaxmp/_src, or a path of the repository."""
    named = set(re.findall(r"`((?:[\w.]+/)+\w+(?:\.\w+)?)`", (ROOT / name).read_text()))
    assert named
    folders = (ROOT, ROOT / "jaxmp/_src", *(ROOT / "jaxmp/_src").iterdir())
    missing = {path for path in named if not any((f / path).exists() or (f / f"{path}.py").exists() for f in folders)}
    assert missing <= {"build/docs"}, missing


def test_every_public_name_has_a_page_of_the_api():
    """`make docs` makes a page for each name that docs/api.md lists."""
    listed, module = set(), ""
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
        elif re.fullmatch(r"   [\w.]+", line):
            listed.add(f"{module}.{line.strip()}")
    names = {f"{m.__name__}.{name}" for m in PUBLIC for name in m.__all__ if not inspect.ismodule(getattr(m, name))}
    names |= {f"jaxmp.flax.{name}" for name in ("DotGeneral", "Linear", "MoE")}
    names |= {f"jaxmp.equinox.{name}" for name in ("Linear", "MoE")}
    assert listed == names - {"jaxmp.distributed.DistributedError"}  # alias: jaxmp.DistributedError


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_sorted(module):
    assert list(module.__all__) == sorted(module.__all__)


# Pages with a table of promises, and the start of the table; each row names tests that prove it.
PROVEN = {"determinism": "## Which test proves it", "parity": "#", "faults": "## What each rank sees"}


@pytest.mark.parametrize("name", PROVEN)
def test_every_promise_names_tests_that_exist(name):
    """A test is `tests/folder/file.py::test_name`; in faults `test_name` of tests/jobs, optionally with a case."""
    text = (ROOT / "docs" / f"{name}.md").read_text()
    table = text[text.index(PROVEN[name]) :].split("\n## ")[0] if name == "faults" else text[text.index(PROVEN[name]) :]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not re.search(r"\| test \|$", line, re.I)]
    assert rows
    assert [row for row in rows if not re.search(r"\btest_\w+|`tests/", row)] == []
    for path, test in re.findall(r"`(tests/[\w/]+\.\w+)(?:::(\w+))?", text):
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
    faults = "\n".join(path.read_text() for path in (ROOT / "tests" / "jobs").glob("test_*.py"))
    for test, case in re.findall(r"`(test_\w+)(?:\[([\w-]+)\])?`", text):
        assert f"def {test}(" in faults, test
        assert not case or f'"{case}": ' in faults, case
