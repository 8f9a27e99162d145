"""Block-cyclic matrices: the place of each element, and products. The oracle deals elements out one by one. Operands
are small integers, so products and gradients are exact and compared bitwise. Padding must be zero because a program may
sum over it."""

import contextlib
import itertools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import BlockCyclic
from jaxmp._src.core.spec import process_grid

GRIDS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4))
DTYPES = ("float32", "float64", "bfloat16", "complex64")


def mesh_over(grid, axis_type=AxisType.Auto):
    case = cases.Case("any", "grid", (("x", grid[0]), ("y", grid[1])), P(), P(), P())
    return case.jax_mesh(axis_type)


def dealt(x, layout, padding=0):
    """Returns what `BlockCyclicArray.data` must hold, dealt out element by element."""
    hands = []
    for n, nb, p, first in zip(x.shape, layout.block, layout.grid, layout.first, strict=True):
        hand = [[] for _ in range(p)]
        for i in range(n):
            hand[(i // nb + first) % p].append(i)
        hands.append(hand)
    rows, cols = (max(map(len, hand)) for hand in hands)
    data = np.full((layout.grid[0] * rows, layout.grid[1] * cols), padding, x.dtype)
    for (i, own_rows), (j, own_cols) in itertools.product(*map(enumerate, hands)):
        if own_rows and own_cols:
            part = x[np.ix_(own_rows, own_cols)]
            data[i * rows : i * rows + part.shape[0], j * cols : j * cols + part.shape[1]] = part
    return data


def small(rng, shape, dtype="float32"):
    return cases.small_integers(rng, shape, dtype)


def lay(x, layout, mesh, **options):
    return jaxmp.to_block_cyclic(x, layout, mesh=mesh, **options)


def place(x, layout, mesh):
    """Builds the array by hand, with NaN in the padding, which no product may read."""
    data = jax.device_put(dealt(x, layout, np.nan), NamedSharding(mesh, P("x", "y")))
    return jaxmp.BlockCyclicArray(data, x.shape, layout, mesh, ("x", "y"))


def whole(x):
    return np.asarray(jaxmp.from_block_cyclic(x))


def assert_holds(got, want):
    """Asserts that a BlockCyclicArray is bitwise equal to `want`, with zero padding and the right sharding."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(got.data), dealt(want, got.layout))
    assert got.data.sharding.is_equivalent_to(NamedSharding(got.mesh, P(*got.axes)), 2)


# (shape, block, whether the first block is on another process): even, ragged, few blocks, single elements.
SHAPES = (
    ((8, 16), (2, 2), False),
    ((10, 13), (3, 2), True),
    ((1, 3), (2, 1), True),
    ((5, 2), (7, 9), True),
    ((24, 7), (4, 3), False),
)


def a_first(grid, is_elsewhere):
    return (grid[0] - 1, grid[1] // 2) if is_elsewhere else (0, 0)


@pytest.mark.small("values")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_there_and_back(grid, axis_type, rng):
    mesh = mesh_over(grid, axis_type)
    dtypes = ("float32", "bfloat16", "int32", "complex64", "uint8")
    xs = [rng.integers(1, 9, shape).astype(jnp.dtype(dtype)) for (shape, *_), dtype in zip(SHAPES, dtypes, strict=True)]

    def program(xs):
        results = []
        for x, (_, block, is_elsewhere) in zip(xs, SHAPES, strict=True):
            laid = lay(x, BlockCyclic(grid, block, a_first(grid, is_elsewhere)), mesh)
            relaid = jaxmp.to_block_cyclic(laid, BlockCyclic(grid, block[::-1]))
            results.append((laid, relaid, jaxmp.from_block_cyclic(laid)))
        return results

    with jax.set_mesh(mesh):
        results = jax.jit(program)(xs)
    with pytest.raises(ValueError, match="use from_block_cyclic to bring it to others"):
        jaxmp.to_block_cyclic(results[0][0], results[0][0].layout, mesh=jax.make_mesh((1,), ("z",)))
    for x, (laid, relaid, back) in zip(xs, results, strict=True):
        assert_holds(laid, x)
        assert_holds(relaid, x)
        np.testing.assert_array_equal(np.asarray(back), x)


def test_a_sharded_matrix_moves_by_all_to_all_alone(rng):
    mesh, layout = mesh_over((2, 4)), BlockCyclic((2, 4), (3, 2), (1, 1))
    x = jax.device_put(small(rng, (12, 16)), NamedSharding(mesh, P("x", "y")))
    there = jax.jit(lambda x: lay(x, layout, mesh))
    back = jax.jit(jaxmp.from_block_cyclic)
    for compiled in (there.lower(x).compile(), back.lower(there(x)).compile()):
        text = compiled.as_text()
        assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 2
        assert not re.search(r"all-gather|all-reduce|collective-permute", text)


def test_on_axes_of_a_larger_mesh(rng):
    mesh = cases.BY_NAME["grid-two-axes"].jax_mesh(AxisType.Auto)
    x = small(rng, (10, 7))
    for axes, grid in (((("x", "y"), "z"), (4, 2)), (("z", "x"), (2, 2)), (("y", ("z", "x")), (2, 4))):
        laid = lay(x, BlockCyclic(grid, (2, 3), (1, 0)), mesh, axes=axes)
        assert_holds(laid, x)
        square = jaxmp.matmul(laid, laid, transpose_a=True, out_sharding=BlockCyclic(grid, (3, 3)))
        np.testing.assert_array_equal(whole(square), x.T @ x)


def test_permutations_are_their_own_transposes(rng):
    mesh, layout = mesh_over((2, 2)), BlockCyclic((2, 2), (3, 2), (1, 0))
    x, t = small(rng, (7, 5)), small(rng, (7, 5))
    _, pull = jax.vjp(lambda x: lay(x, layout, mesh), x)
    np.testing.assert_array_equal(np.asarray(pull(lay(t, layout, mesh))[0]), t)
    _, pull = jax.vjp(jaxmp.from_block_cyclic, lay(x, layout, mesh))
    assert_holds(pull(jnp.asarray(t))[0], t)


def test_exchanges_are_no_wider_than_they_need():
    """From contiguous halves to blocks of 2, each process keeps half of its elements and sends the other half."""
    source, target = process_grid.contiguous((16, 1), (2, 1)), BlockCyclic((2, 1), (2, 1))
    send, _ = process_grid.exchange((16, 1), 0, source, target)
    assert send.shape == (2, 2, 4)
    assert send[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert process_grid.exchange((16, 1), 1, source, target) is None


def operand_layouts(grid, transposition, blocks, is_elsewhere):
    """Returns layouts of the stored a and b with the given blocks along m, n and k."""
    mb, nb, kb = blocks
    first = a_first(grid, is_elsewhere)
    a = BlockCyclic(grid, (mb, kb) if transposition[0] == "N" else (kb, mb), first)
    b = BlockCyclic(grid, (kb, nb) if transposition[1] == "N" else (nb, kb), (*first[:1], 0))
    return a, b


# (m, n, k), blocks along them, whether the first block is on another process.
PRODUCTS = (((8, 16, 8), (2, 2, 2), False), ((13, 11, 17), (3, 5, 2), True), ((1, 2, 3), (4, 4, 4), True))


@pytest.mark.small("values", of=lambda grid, dtype, implementation: (grid, (dtype, implementation)))
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_element_of_a_product(grid, dtype, implementation, rng):
    mesh = mesh_over(grid)
    is_complex = dtype == "complex64"
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        todo, operands = [], []
        products = PRODUCTS if dtype == "float32" else PRODUCTS[1:2]
        for transposition, (extents, blocks, is_elsewhere) in itertools.product(cases.TRANSPOSITIONS, products):
            m, n, k = extents
            flags = {"transpose_a": transposition[0] == "T", "transpose_b": transposition[1] == "T"}
            flags |= {"conjugate_a": is_complex, "conjugate_b": is_complex and k % 2 == 0}
            x, y = small(rng, (m, k), dtype), small(rng, (k, n), dtype)
            a, b = (z.T.copy() if t == "T" else z for z, t in zip((x, y), transposition, strict=True))
            layouts = operand_layouts(grid, transposition, blocks, is_elsewhere)
            operands.append(tuple(place(z, layout, mesh) for z, layout in zip((a, b), layouts, strict=True)))
            todo.append((x, y, flags))

        def program(operands):
            return [
                jaxmp.matmul(a, b, **flags, implementation=implementation)
                for (a, b), (_, _, flags) in zip(operands, todo, strict=True)
            ]

        for d, (x, y, flags) in zip(jax.jit(program)(operands), todo, strict=True):
            x = np.conj(x) if flags["conjugate_a"] else x
            y = np.conj(y) if flags["conjugate_b"] else y
            assert_holds(d, (cases.wide(x) @ cases.wide(y)).astype(d.dtype))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_c_alpha_and_beta(implementation, rng):
    grid = (2, 2)
    mesh = mesh_over(grid)
    x, y, z = small(rng, (7, 9)), small(rng, (9, 8)), small(rng, (7, 8))
    a, b = place(x, BlockCyclic(grid, (2, 4)), mesh), place(y, BlockCyclic(grid, (4, 3), (1, 1)), mesh)
    c = place(z, BlockCyclic(grid, (2, 3), (1, 0)), mesh)
    d = jaxmp.matmul(a, b, c, alpha=2.0, beta=-3.0, implementation=implementation)
    assert d.layout == c.layout
    assert_holds(d, 2 * (x @ y) - 3 * z)
    no_c = place(np.full_like(z, np.nan), c.layout, mesh)
    nothing = jaxmp.matmul(a, b, no_c, beta=0.0, implementation=implementation)
    assert_holds(nothing, x @ y)


def test_a_layout_that_was_asked_for_and_a_wider_type(rng):
    grid = (2, 1)
    mesh = mesh_over(grid)
    x, y = small(rng, (7, 9), "bfloat16"), small(rng, (9, 8), "bfloat16")
    a, b = place(x, BlockCyclic(grid, (2, 4)), mesh), place(y, BlockCyclic(grid, (4, 3)), mesh)
    asked = BlockCyclic(grid, (2, 3), (1, 0))
    d = jaxmp.matmul(a, b, out_sharding=asked, preferred_element_type=jnp.float32)
    assert d.layout == asked
    assert_holds(d, x.astype(np.float32) @ y.astype(np.float32))
    assert_holds(a @ b, (x.astype(np.float32) @ y.astype(np.float32)).astype(x.dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_empty_products(m, n, k):
    grid = (2, 2)
    mesh = mesh_over(grid)
    layout = BlockCyclic(grid, (2, 2))
    a, b = lay(np.ones((m, k), np.float32), layout, mesh), lay(np.ones((k, n), np.float32), layout, mesh)
    np.testing.assert_array_equal(whole(a @ b), np.zeros((m, n)))
    c = lay(np.ones((m, n), np.float32), layout, mesh)
    np.testing.assert_array_equal(whole(jaxmp.matmul(a, b, c, beta=2.0)), np.full((m, n), 2.0 * (k == 0)))


@pytest.mark.small("values")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
def test_gradients_are_block_cyclic_products(transposition, implementation, axis_type, rng):
    grid = (2, 4)
    mesh = mesh_over(grid, axis_type)
    x, y, z, w = (small(rng, shape) for shape in ((7, 9), (9, 8), (7, 8), (7, 8)))
    a, b = (v.T.copy() if t == "T" else v for v, t in zip((x, y), transposition, strict=True))
    layouts = operand_layouts(grid, transposition, (2, 3, 4), True)
    with jax.set_mesh(mesh):
        a, b = (place(v, layout, mesh) for v, layout in zip((a, b), layouts, strict=True))
        c = place(z, BlockCyclic(grid, (2, 3), (0, 2)), mesh)
        weights = jax.device_put(dealt(w, c.layout), c.data.sharding)
        flags = {"transpose_a": transposition[0] == "T", "transpose_b": transposition[1] == "T"}

        def loss(a, b, c):
            d = jaxmp.matmul(a, b, c, alpha=2.0, beta=3.0, **flags, implementation=implementation)
            return jnp.sum(d.data * weights)

        da, db, dc = jax.jit(jax.grad(loss, (0, 1, 2)))(a, b, c)
    assert (da.layout, db.layout, dc.layout) == (*layouts, c.layout)
    for got, want, t in ((da, 2 * w @ y.T, transposition[0]), (db, 2 * x.T @ w, transposition[1]), (dc, 3 * w, "N")):
        assert_holds(got, np.ascontiguousarray(want.T) if t == "T" else want)


def test_vmap_is_one_call_each(rng):
    grid = (2, 2)
    mesh = mesh_over(grid)
    layouts = BlockCyclic(grid, (2, 3)), BlockCyclic(grid, (3, 2), (1, 1))
    x, y = small(rng, (3, 5, 7)), small(rng, (7, 4))
    d = jax.vmap(lambda x: jaxmp.from_block_cyclic(lay(x, layouts[0], mesh) @ lay(y, layouts[1], mesh)))(x)
    np.testing.assert_array_equal(np.asarray(d), x @ y)


def test_explain_shows_the_layouts():
    mesh, layout = mesh_over((2, 2)), BlockCyclic((2, 2), (2, 2), (1, 0))
    a = lay(np.ones((5, 5), np.float32), layout, mesh)
    explanation = jaxmp.explain(lambda a: jaxmp.matmul(a, a, implementation="host"))(a)
    (row,) = explanation.rows
    assert (row.pattern, row.implementation) == ("grid", "host")
    assert row.layout == "5x5 in 2x2 from (1, 0) @ 5x5 in 2x2 from (1, 0) -> 5x5 in 2x2 from (1, 0)"
    assert f"block-cyclic {row.layout}" in str(explanation)
    assert row.local_shapes == ((3, 3), (3, 3), (3, 3))
    assert row.flops == 2 * 5**3


def test_the_program_holds_one_call_and_no_collective(rng):
    mesh, layout = mesh_over((2, 4)), BlockCyclic((2, 4), (2, 2))
    a = lay(small(rng, (9, 9)), layout, mesh)
    text = jax.jit(lambda a: a @ a).lower(a).compile().as_text()
    assert text.count('custom_call_target="jaxmp_matmul"') == 1
    assert not re.search(r"all-to-all|all-gather|all-reduce|collective-permute", text)
