"""`einsum` takes what `jnp.einsum` takes and gives exactly its results, on small integers. Without these tests, a sum
over an index of only one operand, a diagonal of a sharded operand, or the type of a result could be wrong."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import assert_same

import jaxmp


def test_int8_in_each_result_type(rng):
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((4, 6), (6, 8)))  # sums beyond 16 bits
    for dtype in (None, jnp.int8, jnp.int16, jnp.int32, jnp.float32):
        given = {"preferred_element_type": dtype}
        assert_same(jaxmp.einsum("ij,jk->ki", a, b, **given), jnp.einsum("ij,jk->ki", a, b, **given))
        assert_same(jaxmp.matmul(a, b[:, 0], **given), jnp.matmul(a, b[:, 0], **given))


def test_operands_and_lists_of_indices_in_turn(rng):
    a, b = cases.integers(rng, 2, 4, 6), cases.integers(rng, 6, 8)
    for given in ((a, [..., 1], b, [1, 2]), (a, [0, 3, 1], b, [1, 2], [2, 0, 3]), (a, [2, 1, 0], (0, 1))):
        assert_same(jaxmp.einsum(*given), jnp.einsum(*given))


def test_the_order_of_products_may_be_given(rng):
    given = "ij,jk,kl,l->i", *(cases.integers(rng, *shape) for shape in ((2, 4), (4, 6), (6, 8), (8,)))
    want = jnp.einsum(*given)
    for optimize in ("auto", "greedy", "optimal", True, False, [(2, 3), (0, 2), (0, 1)], ((0, 1), (0, 2), (0, 1))):
        assert_same(jaxmp.einsum(*given, optimize=optimize), want)
    for optimize in (opt_einsum.DynamicProgramming(), [(-1, 0), (0, 1), (1, 0)]):
        assert_same(jaxmp.einsum(*given, optimize=optimize), jnp.einsum(*given, optimize=optimize))
    path = jnp.einsum_path(*given)[0]
    assert_same(jaxmp.einsum(*given, optimize=path), want)
    with pytest.raises(ValueError, match=r"optimize must be a strategy of opt_einsum, .*got 'typo'"):
        jaxmp.einsum(*given, optimize="typo")
    with pytest.raises(ValueError, match="optimize must "):
        jaxmp.einsum(*given, optimize=[(0, 1)])
    for wrong in ([(0, 1, 2), (0, 1)], [(0, 7)], ["typo"], [("a", 1)]):
        with pytest.raises(ValueError, match="optimize must "):
            jaxmp.einsum(*given, optimize=wrong)
    for wrong in ([], [(0, 0), (0, 1), (0, 1)]):  # jnp takes these and means something else
        with pytest.raises(ValueError, match="optimize must have 3 pairs for 4 operands"):
            jaxmp.einsum(*given, optimize=wrong)
    for wrong in (3, [0, 1]):
        with pytest.raises(TypeError, match=r"einsum: optimize must be a strategy of opt_einsum, .*, got "):
            jaxmp.einsum(*given, optimize=wrong)


def test_a_number_is_an_operand(rng, standard_promotion):
    a = cases.integers(rng, 4, 6).astype(jnp.bfloat16)
    assert_same(jaxmp.einsum("ij,->ji", a, 2.0), jnp.einsum("ij,->ji", a, 2.0))


THREE = "ij,jk,kl->il"
LAST_X, LAST_Y = P(None, "x"), P(None, "y")
# On a mesh of 2 x 2: subscripts, (shape, sharding) of each operand, and the result's sharding, asked for or not.
PLACED = {
    "diagonal on one axis": ("iij,jk->ik", [((4, 4, 6), P("x")), ((6, 8), LAST_Y)], None, P("x", "y")),
    "diagonal on the other": ("iij,jk->ik", [((4, 4, 6), LAST_X), ((6, 8), P())], None, P("x", None)),
    "diagonal ahead of a sum": ("iij,jk->ik", [((4, 4, 6), P(None, None, "x")), ((6, 8), P("x"))], P(), P(None, None)),
    "sum over an axis": ("ij,kl->il", [((4, 6), P("x", "y")), ((6, 8), P())], None, P("x", None)),
    "three": (THREE, [((4, 6), P("x")), ((6, 8), P()), ((8, 6), LAST_Y)], None, P("x", "y")),
    "the last reduced": (THREE, [((2, 6), P()), ((6, 8), LAST_X), ((8, 90), P("x"))], P("y"), P("y", None)),
    "the first reduced": (THREE, [((4, 6), LAST_X), ((6, 2), P("x")), ((2, 90), LAST_Y)], LAST_Y, LAST_Y),
    "the first scattered": (THREE, [((4, 6), LAST_X), ((6, 2), P("x")), ((2, 90), P())], P("x"), P("x", None)),
    "each reduced": (THREE, [((4, 6), LAST_X), ((6, 2), P("x", "y")), ((2, 90), P("y"))], P(), P(None, None)),
    "one axis twice": (THREE, [((4, 6), P("x")), ((6, 2), LAST_X), ((2, 90), P("x"))], P("x"), P("x", None)),
    "one": ("ij->ji", [((4, 6), P("x"))], P("y", "x"), P("y", "x")),
}  # fmt: skip


@pytest.mark.parametrize(("subscripts", "given", "asked", "want"), PLACED.values(), ids=PLACED)
def test_shardings(subscripts, given, asked, want, mesh_of, rng):
    mesh = mesh_of({"x": 2, "y": 2})
    operands = [cases.integers(rng, *shape) for shape, _ in given]
    with jax.set_mesh(mesh):
        placed = [cases.put(x, mesh, spec) for x, (_, spec) in zip(operands, given, strict=True)]
        got = jaxmp.einsum(subscripts, *placed, out_sharding=asked)
    assert got.sharding.spec == want
    np.testing.assert_array_equal(got, np.einsum(subscripts, *operands))


def test_in_shardings_follow_their_indices(mesh_of, rng):
    mesh = mesh_of({"x": 2, "y": 2}, AxisType.Auto)
    a, b = cases.integers(rng, 4, 4, 1, 6), cases.integers(rng, 8, 6, 3)
    options = {"in_shardings": (P(None, None, None, "x"), P("y", "x")), "out_sharding": P("y"), "mesh": mesh}
    got = jaxmp.einsum("iicj,kjc->ki", a, b, **options)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)
    np.testing.assert_array_equal(got, np.einsum("iij,kjc->ki", a[:, :, 0], b))


def test_one_operand_on_an_automatic_mesh(mesh_of, rng):
    mesh, x = mesh_of({"x": 2, "y": 2}, AxisType.Auto), cases.integers(rng, 4, 6)
    got = jaxmp.einsum("ij->ji", x, out_sharding=P("x"), mesh=mesh, preferred_element_type=jnp.float32)
    assert got.sharding.spec == P("x")
    np.testing.assert_array_equal(got, x.T)


def test_a_product_on_the_way_that_is_ambiguous_is_named(mesh_of, rng):
    mesh = mesh_of({"x": 2, "y": 2})
    operands = [cases.integers(rng, *shape) for shape in ((4, 6), (6, 8), (8, 2))]
    with jax.set_mesh(mesh):
        a, b, c = (cases.put(x, mesh, s) for x, s in zip(operands, (P(), P(None, "y"), P("y")), strict=True))
        with pytest.raises(
            ValueError, match=r"'y' and it is ambiguous.* \(this is the product 'jk,kl->jl' of operands"
        ):
            jaxmp.einsum("ij,jk,kl->il", a, b, c)
    with pytest.raises(ValueError, match="einsum: in_shardings takes two operands, got 3; write one call for each"):
        jaxmp.einsum("ij,jk,kl->il", *operands, in_shardings=(P(), P()), mesh=mesh)
