"""Lines are named as users see them: by file, and in a notebook by the number before the cell. The tests do not depend
on IPython; a module with its documented `format_code_name` stands for it."""

import inspect
import sys
import types

import equinox
import jax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.platform.jax_internals.source_lines import is_of_library, line_name

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


@pytest.mark.parametrize(
    ("file", "is_library"),
    {
        "/venv/lib/python3.12/site-packages/flax/nnx/nn/linear.py": True,
        "/usr/lib/python3/dist-packages/equinox/nn/_linear.py": True,
        r"C:\venv\Lib\site-packages\optax\_src\update.py": True,
        "/venv/lib/python3.12/site-packages/models/flax/layers.py": False,
        "/home/me/flax/train.py": False,
    }.items(),
)
def test_files_of_libraries(file, is_library):
    assert is_of_library(file) == is_library


def test_layers_of_flax_and_equinox_have_the_line_of_their_call():
    graph, params = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    layer = equinox.nn.Linear(8, 8, key=jax.random.key(0))

    def program(params, layer, x):
        y = nnx.merge(graph, params)(x)
        return jax.vmap(layer)(y)

    first = inspect.getsourcelines(program)[1]
    rows = jaxmp.explain(jaxmp.fuse(program), quiet=True)(params, layer, jax.ShapeDtypeStruct((4, 8), "float32")).rows
    assert [row.line for row in rows] == [f"test_source_lines.py:{first + 1}", f"test_source_lines.py:{first + 2}"]


def test_a_cell_has_the_number_that_ipython_knows(monkeypatch):
    of_ipython(monkeypatch, {KERNEL: ("Cell", "In[5]")})
    names = [line_name(file, 2) for file in (KERNEL, "/tmp/ipykernel_123/789.py", "train.py")]
    assert names == ["cell 5:2", "cell:2", "train.py:2"]
    cell = {}
    exec(compile("import jaxmp\ndef program(x):\n    return jaxmp.matmul(x, x)\n", KERNEL, "exec"), cell)
    (row,) = jaxmp.explain(cell["program"], quiet=True)(jax.ShapeDtypeStruct((4, 4), "float32")).rows
    assert row.line == "cell 5:3"
    sys.modules["IPython"].get_ipython = lambda: None  # outside a shell
    assert line_name(KERNEL, 2) == "cell:2"
