"""Drawings: each block against the devices on which JAX puts it. Without these tests, a drawing could show a block on a
wrong device."""

import xml.etree.ElementTree as ET

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.draw.blocks import label, matrices, shown

F32 = np.dtype("float32")
SHAPES = (64, 32), (32, 128), (64, 128)


def drawing_of(mesh, specs, shapes=SHAPES, **options):
    operands = [cases.typed(mesh, shape, *spec) for shape, spec in zip(shapes[:2], specs[:2], strict=True)]
    with jax.set_mesh(mesh):
        return jaxmp.draw(lambda a, b: jaxmp.matmul(a, b, out_sharding=specs[2], **options))(*operands)


def holders(mesh, spec, shape):
    """Returns JAX's devices of each block, by the block's first row and column."""
    found = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        start = tuple(part.start or 0 for part in index)
        found.setdefault(start, []).append(list(mesh.devices.flat).index(device))
    return {start: tuple(sorted(devices)) for start, devices in found.items()}


def drawn_holders(matrix):
    """Returns the same as `holders` does, from a drawing."""
    size = tuple(extent // count for extent, count in zip(matrix.shape, matrix.grid, strict=True))
    return {(i * size[0], j * size[1]): devices for (i, j), devices in matrix.blocks.items()}


@pytest.mark.parametrize(
    "choice",
    jaxmp.advise(64, 32, 128, 8, dtype=F32, quiet=True).choices,
    ids=lambda c: f"{c.splits} {dict(c.mesh)}".replace(" ", "-"),
)
def test_blocks_lie_where_jax_puts_them(choice, mesh_of):
    mesh, specs = mesh_of(dict(choice.mesh), AxisType.Explicit), (choice.a, choice.b, choice.d)
    (row,) = drawing_of(mesh, specs).rows
    expected = [holders(mesh, spec, shape) for spec, shape in zip(specs, SHAPES, strict=True)]
    if row.extents == (128, 32, 64):  # the call computes the transpose
        a, b, d = ({start[::-1]: devices for start, devices in each.items()} for each in expected)
        expected = [b, a, d]
    assert list(map(drawn_holders, matrices(row))) == expected


@pytest.mark.parametrize(
    ("a", "b"),
    [(P("x"), P(None, "y")), (P("x", "y"), P("y")), (P(("y", "x")), P()), (P(None, "x"), P("x", "y"))],
    ids=str,
)
def test_blocks_on_automatic_axes_lie_where_jax_puts_them(a, b, mesh_of):
    mesh = mesh_of({"x": 2, "y": 4}, AxisType.Auto)
    operands = [cases.typed(mesh, shape, *spec) for shape, spec in zip(SHAPES, (a, b), strict=False)]
    with jax.set_mesh(mesh):
        (row,) = jaxmp.draw(jaxmp.fuse(jnp.matmul))(*operands).rows
    for matrix, spec, shape in zip(matrices(row), (a, b), SHAPES, strict=False):
        assert drawn_holders(matrix) == holders(mesh, spec, shape), matrix.name


@pytest.mark.parametrize("dim", [("x", "y"), ("y", "x")], ids="-".join)
def test_axes_of_one_grid_dimension_come_in_any_order(dim, mesh_of):
    mesh, specs = mesh_of({"x": 2, "y": 2}, AxisType.Explicit), (P(None, "y"), P(None, dim), P(None, dim))
    (row,) = drawing_of(mesh, specs).rows
    parts = {"x": "x: n (- n n)  y: n (k n n)", "y": "y: n (k n n)  x: n (- n n)"}
    assert row.contraction == f"mk,kn->mn  {parts[dim[0]]}"
    for matrix, spec, shape in zip(matrices(row), specs, SHAPES, strict=True):
        assert drawn_holders(matrix) == holders(mesh, spec, shape), matrix.name


MESHES = {"line": {"x": 4}, "square": {"y": 2, "x": 2}}
ROWS, COLS, TILES = P("x", None), P(None, "x"), P("y", "x")
RECEIVED = {
    "local": ("line", (ROWS, P(None, None), ROWS), {}, "nothing moves"),
    "all_gather": ("line", (ROWS, COLS, COLS), {"A": {(1, 0), (2, 0), (3, 0)}}, "blocks of A in brackets"),
    "reduce_scatter": ("line", (COLS, ROWS, ROWS), {}, "each keeps its block of D"),
    "all_reduce": ("line", (COLS, ROWS, P(None, None)), {}, "summed for every device"),
    "grid": ("square", (TILES,) * 3, {"A": {(0, 1)}, "B": {(1, 0)}}, "blocks of A and B in brackets"),
    "all_gather in groups": (
        "square", (P(("y", "x"), None), COLS, TILES), {"A": {(1, 0)}}, "blocks of A in brackets",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECEIVED)
def test_what_the_first_device_receives(name, mesh_of):
    mesh, specs, received, sentence = RECEIVED[name]
    drawing = drawing_of(mesh_of(MESHES[mesh], AxisType.Explicit), specs)
    found = {matrix.name: set(matrix.received) for matrix in matrices(drawing.rows[0]) if matrix.received}
    assert found == received
    assert sentence in str(drawing)
    assert str(drawing).count("[") == sum(map(len, received.values()))
    root = ET.fromstring(drawing.svg)
    rectangles = root.findall("{*}rect")
    assert len(rectangles) == sum(len(matrix.blocks) for matrix in matrices(drawing.rows[0]))
    assert sum("stroke-dasharray" in each.attrib for each in rectangles) == sum(map(len, received.values()))
    for side, start in (("width", "x"), ("height", "y")):
        ends = [float(each.attrib[start]) + float(each.attrib[side]) for each in rectangles]
        assert max(ends) <= float(root.attrib[side])
    texts = [each.text for each in root.findall("{*}text")]
    assert any(text.startswith("test_draw.py:") and "-> float32" in text for text in texts)
    assert drawing._repr_svg_() == drawing.svg


def test_a_transposed_operand_is_drawn_as_it_is_multiplied(mesh_of):
    mesh = mesh_of({"x": 4}, AxisType.Explicit)
    shapes = (32, 64), (32, 128)
    (row,) = drawing_of(mesh, (COLS, COLS, COLS), shapes, transpose_a=True).rows
    a, b, d = matrices(row)
    assert (a.shape, b.shape, d.shape) == ((64, 32), (32, 128), (64, 128))
    assert (a.grid, b.grid, d.grid) == ((4, 1), (1, 4), (1, 4))


def test_equal_calls_are_drawn_once_and_gradients_too():
    def loss(x, w):
        return sum(jaxmp.matmul(x, w).sum() for _ in range(3))

    x = jax.ShapeDtypeStruct((4, 4), F32)
    (row,) = jaxmp.draw(loss)(x, x).rows
    assert row.count == 3
    assert str(jaxmp.draw(loss)(x, x)).endswith(", 3 times\n  (one device holds everything)")
    assert len(jaxmp.draw(jax.grad(loss))(x, x).rows) >= 1
    assert str(jaxmp.draw(jnp.sin)(x)) == "no jaxmp call in this program"
    ET.fromstring(jaxmp.draw(jnp.sin)(x).svg)


def test_many_blocks_and_devices_are_left_out(mesh_of):
    drawing = drawing_of(mesh_of({"x": 8}, AxisType.Explicit), (ROWS, COLS, COLS))
    assert "..." in str(drawing)
    assert (shown(8, 6), shown(6, 6)) == ([0, 1, 2, 3, None, 7], [0, 1, 2, 3, 4, 5])
    some = ((3,), (0, 1), (0, 1, 2), (0, 2, 4, 6), range(8), (0, 2, 4, 6, 7))
    assert [label(devices, 8) for devices in some] == ["3", "0 1", "0-2", "0 2 4 6", "all", "0 2 ... 7"]


@pytest.mark.parametrize(("of_x", "of_w", "of_d"), [(P("p"), P("p"), P("p")), (P(), P("p", None, "q"), P(None, "q"))])
def test_groups_lie_where_jax_puts_them(of_x, of_w, of_d, mesh_of):
    mesh = mesh_of({"p": 2, "q": 2}, AxisType.Explicit)
    x, w = cases.typed(mesh, (8, 4), *of_x), cases.typed(mesh, (4, 4, 6), *of_w)

    def product(x, w):
        return jaxmp.ragged_dot(x, w, jnp.array([3, 0, 4, 0]), out_sharding=of_d)

    with jax.set_mesh(mesh):
        drawing = jaxmp.draw(jax.grad(lambda w, x: (product(x, w) ** 2).sum()))(w, x)
    forward, backward = map(matrices, drawing.rows)
    assert [(each.name, each.shape) for each in forward] == [("A", (8, 4)), ("B of groups", (4, 6)), ("D", (8, 6))]
    assert [(each.name, each.shape) for each in backward] == [("A", (8, 4)), ("B", (8, 6)), ("D of groups", (4, 6))]
    groups = holders(mesh, P(of_w[0], *of_w[2:]), (4, 6))
    assert drawn_holders(forward[1]) == drawn_holders(backward[2]) == groups
    assert drawn_holders(forward[0]) == holders(mesh, of_x, (8, 4))
    assert ("reads the rows of other devices in place" in str(drawing)) == (of_x == of_w)
    assert ET.fromstring(drawing.svg).tag.endswith("svg")
