"""Refusals of block-cyclic matrices: without these an element could land in another place than the layout says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_block_cyclic import lay, mesh_over

import jaxmp
from jaxmp import BlockCyclic


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        (((2, 2), (2,)), ValueError, "BlockCyclic: block must be a pair of integers of at least 1, got (2,)"),
        (((2, 2), (0, 1)), ValueError, "BlockCyclic: block must be a pair of integers of at least 1, got (0, 1)"),
        (((2, 0), (1, 1)), ValueError, "BlockCyclic: grid must be a pair of integers of at least 1, got (2, 0)"),
        (((2, 2), (1.5, 1)), TypeError, "BlockCyclic: block must be a pair of integers, got (1.5, 1)"),
        ((2, (1, 1)), TypeError, "BlockCyclic: grid must be a pair of integers, got 2"),
        (((2, 2), (1, 1), (2, 0)), ValueError, "BlockCyclic: first=(2, 0) must be a process of the grid (2, 2)"),
        (((2, 2), (1, 1), (-1, 0)), ValueError, "BlockCyclic: first must be a pair of integers of at least 0"),
    ],
)
def test_wrong_layouts(arguments, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        BlockCyclic(*arguments)


X = np.ones((4, 6), np.float32)
SQUARE = BlockCyclic((2, 2), (2, 3))


@pytest.mark.parametrize(
    ("x", "layout", "options", "exception", "message"),
    [
        (X, (2, 2), {}, TypeError, "to_block_cyclic: layout must be a jaxmp.BlockCyclic, got tuple"),
        ([[1.0]], SQUARE, {}, TypeError, "to_block_cyclic: x must be an array, got list"),
        (X[0], SQUARE, {}, ValueError, "to_block_cyclic: x must have 2 dimensions, got 1 (shape (6,))"),
        (X, SQUARE, {"mesh": None}, ValueError, "to_block_cyclic: there is no mesh; pass mesh="),
        (X, SQUARE, {"axes": "xy"}, ValueError, "axes must be a pair, the mesh axes of the process rows"),
        (X, SQUARE, {"axes": ("x", "z")}, ValueError, "axis 'z' is not in the mesh, which has ('x', 'y')"),
        (X, SQUARE, {"axes": ("x", "x")}, ValueError, "axis names ('x', 'x') repeat"),
        (X, BlockCyclic((2, 4), (1, 1)), {}, ValueError, "layout has the grid (2, 4) but the mesh axes (('x',), ('y',)) have (2, 2)"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out(x, layout, options, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        jaxmp.to_block_cyclic(x, layout, **{"mesh": mesh_over((2, 2)), **options})


def test_another_grid_and_what_is_not_block_cyclic():
    laid = lay(X, SQUARE, mesh_over((2, 2)))
    with pytest.raises(ValueError, match=re.escape("x lies on a (2, 2) grid but layout has (1, 4)")):
        jaxmp.to_block_cyclic(laid, BlockCyclic((1, 4), (2, 3)))
    with pytest.raises(
        TypeError, match=re.escape("from_block_cyclic: x must be a jaxmp.BlockCyclicArray, got ndarray")
    ):
        jaxmp.from_block_cyclic(X)


def test_layouts_inside_of_shard_map():
    mesh = mesh_over((2, 2))
    with pytest.raises(
        ValueError, match="to_block_cyclic: takes global arrays, so it cannot be called inside shard_map"
    ):
        jax.shard_map(lambda x: lay(x, SQUARE, mesh).data, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))(X)


RELU = {"epilog": jaxmp.Epilog.RELU}
OPERANDS = {
    "a": lambda: lay(X, SQUARE, mesh_over((2, 2))),
    "b": lambda: lay(X.T, BlockCyclic((2, 2), (3, 2)), mesh_over((2, 2))),
    "other k": lambda: lay(X, BlockCyclic((2, 2), (3, 2)), mesh_over((2, 2))),
    "other blocks": lambda: lay(X.T, BlockCyclic((2, 2), (2, 2)), mesh_over((2, 2))),
    "other mesh": lambda: lay(X.T, BlockCyclic((1, 4), (3, 2)), mesh_over((1, 4))),
    "integers": lambda: lay(X.T.astype(np.int32), BlockCyclic((2, 2), (3, 2)), mesh_over((2, 2))),
    "array": lambda: jnp.asarray(X.T),
}

WRONG_PRODUCTS = [
    ("a", "array", {}, TypeError, "matmul: b must be a jaxmp.BlockCyclicArray as the other operands are, got"),
    ("array", "a", {}, TypeError, "matmul: a must be a jaxmp.BlockCyclicArray as the other operands are"),
    ("a", "other k", {}, ValueError, "matmul: b has k=4 but a has k=6 (global shapes (4, 6), (4, 6))"),
    ("a", "other blocks", {}, ValueError, "matmul: along k, a has blocks of 3 but b has 2; they must be equal: lay b out in blocks of 3, or a in blocks of 2"),
    ("a", "other mesh", {}, ValueError, "matmul: a lies on axes (('x',), ('y',)) of mesh {'x': 2, 'y': 2} but b on"),
    ("a", "b", {"out_sharding": P("x", "y")}, TypeError, "matmul: out_sharding must be a jaxmp.BlockCyclic, got P"),
    ("a", "b", {"out_sharding": BlockCyclic((2, 2), (4, 2))}, ValueError, "matmul: along m, a has blocks of 2 but the result has 4; they must be equal"),
    ("a", "b", {"out_sharding": BlockCyclic((2, 2), (2, 5))}, ValueError, "matmul: along n, b has blocks of 2 but the result has 5"),
    ("a", "b", {"out_sharding": BlockCyclic((4, 1), (2, 2))}, ValueError, "matmul: out_sharding has the grid (4, 1) but a lies on (2, 2)"),
    ("a", "b", RELU, NotImplementedError, "matmul: epilog is not available for block-cyclic operands; leave it out"),
    ("a", "b", {"in_shardings": (P(), P())}, NotImplementedError, "matmul: in_shardings is not available for block-cyclic operands"),
    ("a", "b", {"beta": 1.0}, ValueError, "matmul: beta=1.0 was given without c"),
    ("a", "b", {"conjugate_a": True}, TypeError, "matmul: conjugate_a=True needs a complex operand"),
    ("a", "b", {"comm": jaxmp.CommOptions(algorithm="split_p2p")}, ValueError, "matmul: comm.algorithm='split_p2p' needs the pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "options", "exception", "message"), WRONG_PRODUCTS)
def test_products_that_do_not_fit(a, b, options, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        jaxmp.matmul(OPERANDS[a](), OPERANDS[b](), **options)


def test_a_c_in_another_layout():
    a, b = OPERANDS["a"](), OPERANDS["b"]()
    c = lay(np.ones((4, 4), np.float32), BlockCyclic((2, 2), (2, 2), (1, 0)), a.mesh)
    with pytest.raises(
        ValueError,
        match=re.escape("matmul: c has the layout BlockCyclic(grid=(2, 2), block=(2, 2), first=(1, 0)) but the result"),
    ):
        jaxmp.matmul(a, b, c, beta=1.0, out_sharding=BlockCyclic((2, 2), (2, 2)))


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_a_block_cyclic_matrix_is_no_array(convert):
    """NumPy would make an array of one object of it."""
    a = OPERANDS["a"]()
    with pytest.raises(TypeError, match=r"BlockCyclicArray: is no array as it lies; take jaxmp\.from_block_cyclic"):
        convert(a)
    with pytest.raises(TypeError, match="einsum: a must be an array, got BlockCyclicArray"):
        jaxmp.einsum("ij,jk->ik", a, a)
