"""Lines are named as a user sees them: by file, and in a notebook by the number in front of the cell.

IPython is no dependency of the tests, so a module with its documented `format_code_name` takes its place.
"""

import sys
import types

import jax
import pytest

import jaxmp
from jaxmp._src.runtime.source_lines import line_name

KERNEL = "/tmp/ipykernel_123/456.py"


def of_ipython(monkeypatch, named):
    compiler = types.SimpleNamespace(format_code_name=lambda file: named.get(file))
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", module)


@pytest.fixture(autouse=True)
def without_ipython(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)


@pytest.mark.parametrize(
    ("file", "name"),
    {
        "/home/me/train.py": "train.py:2",
        "/home/me/ipykernel_notes/456.py": "456.py:2",
        KERNEL: "cell:2",
        r"C:\Temp\ipykernel_123\456.py": "cell:2",
        "<ipython-input-7-0123abcd>": "cell 7:2",
        "<stdin>": "<stdin>:2",
    }.items(),
)
def test_the_name_of_a_line(file, name):
    assert line_name(file, 2) == name


def test_a_cell_has_the_number_that_ipython_knows(monkeypatch):
    of_ipython(monkeypatch, {KERNEL: ("Cell", "In[5]")})
    assert line_name(KERNEL, 2) == "cell 5:2"
    assert line_name("/tmp/ipykernel_123/789.py", 2) == "cell:2"
    assert line_name("train.py", 2) == "train.py:2"


def test_outside_of_a_shell_ipython_has_none(monkeypatch):
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert line_name(KERNEL, 2) == "cell:2"


def test_explain_in_a_cell(monkeypatch):
    of_ipython(monkeypatch, {KERNEL: ("Cell", "In[5]")})
    cell = {}
    exec(compile("import jaxmp\ndef program(x):\n    return jaxmp.matmul(x, x)\n", KERNEL, "exec"), cell)
    (row,) = jaxmp.explain(cell["program"], quiet=True)(jax.ShapeDtypeStruct((4, 4), "float32")).rows
    assert row.line == "cell 5:3"
