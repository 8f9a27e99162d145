"""The documents that name tests as their proof name tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [path for path in sorted((ROOT / "docs").glob("*.md")) if "::test_" in path.read_text()]


def functions_of(path):
    """Names of the test functions of a file, those in classes included."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_named_test_exists(document):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)", document.read_text())
    assert named
    missing = [
        f"{file}::{test}" for file, test in named if not (ROOT / file).exists() or test not in functions_of(ROOT / file)
    ]
    assert not missing


def test_parity_has_a_test_in_every_row():
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs" / "parity.md").read_text(), flags=re.M)
    rows = [row for row in rows if not set(row) <= set("-| ") and not row.rstrip().endswith("test")]
    assert rows
    assert [row for row in rows if "::test_" not in row] == []
