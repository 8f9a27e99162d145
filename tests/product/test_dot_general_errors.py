"""Refusals of `dot_general` and `einsum`: without these dimension numbers, subscripts or shardings that do not fit could
give a product of something else.
"""

import functools
import re

import cases
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_dot_general import MESH, numbers_of

import jaxmp

A, B = np.zeros((4, 6, 8), np.float32), np.zeros((8, 6, 2), np.float32)
PLAIN = (((2,), (0,)), ((), ()))

WRONG = {
    "lhs is no array": (([[1.0]], B, PLAIN), TypeError, "dot_general: lhs must be an array, got list"),
    "no pair of pairs": ((A, B, ((2,), (0,))), ValueError, "dot_general: dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), got ((2,), (0,))"),
    "numbers of contracted dimensions": ((A, B, (((2, 1), (0,)), ((), ()))), ValueError, "dot_general: dimension_numbers name 2 contracting dimensions of lhs, (2, 1), but 1 of rhs, (0,)"),
    "numbers of batch dimensions": ((A, B, (((2,), (0,)), ((1,), ()))), ValueError, "dot_general: dimension_numbers name 1 batch dimensions of lhs, (1,), but 0 of rhs, ()"),
    "contracted extents": ((A, B, (((2,), (1,)), ((), ()))), ValueError, "dot_general: contracting dimension 2 of lhs has extent 8 but dimension 1 of rhs 6 (shapes (4, 6, 8), (8, 6, 2))"),
    "batch extents": ((A, B, (((2,), (0,)), ((0,), (1,)))), ValueError, "dot_general: batch dimension 0 of lhs has extent 4 but dimension 1 of rhs 6 (shapes (4, 6, 8), (8, 6, 2))"),
    "out of range": ((A, B, (((3,), (0,)), ((), ()))), ValueError, "dot_general: dimension_numbers name dimension 3 of lhs, which has 3 (shape (4, 6, 8))"),
    "used twice": ((A, B, (((1,), (1,)), ((1,), (1,)))), ValueError, "dot_general: dimension_numbers use a dimension of lhs twice, (1,) and (1,)"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "exception", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_argument(arguments, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        jaxmp.dot_general(*arguments)


WRONG_EINSUM = {
    "no text": ((0, A, B), TypeError, "einsum: subscripts must be a string such as 'ij,jk->ik', got int"),
    "b is no array": (("ij,jk->ik", A, [1.0]), TypeError, "einsum: b must be an array, got list"),
    "one operand": (("abc->abc", A, B), ValueError, "einsum: subscripts 'abc->abc' are not valid"),
    "numbers of indices": (("ab,bc->ac", A, B), ValueError, "einsum: subscripts 'ab,bc->ac' give a 2 indices, but it has 3 dimensions (shape (4, 6, 8))"),
    "diagonal": (("aac,cde->ade", A, B), ValueError, "einsum: index 'a' has extent 4 in a but 6 in a (shapes (4, 6, 8), (8, 6, 2))"),
    "extents": (("abc,bde->acde", A, B), ValueError, "einsum: index 'b' has extent 6 in a but 8 in b (shapes (4, 6, 8), (8, 6, 2))"),
    "extents of three": (("abc,cde,a->bde", A, B, A[0, 0]), ValueError, "einsum: index 'a' has extent 4 in operands[0] but 8 in operands[2]"),
    "the third is no array": (("abc,cde,a->bde", A, B, None), TypeError, "einsum: operands[2] must be an array, got NoneType"),
    "lists of indices": ((A, [0, 1], B, [1, 2]), ValueError, "einsum: subscripts [[0, 1], [1, 2]] give a 2 indices, but it has 3 dimensions"),
    "unknown index of the result": (("abc,cde->abz", A, B), ValueError, "einsum: subscripts 'abc,cde->abz' are not valid: Output character 'z'"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "exception", "message"), WRONG_EINSUM.values(), ids=WRONG_EINSUM.keys())
def test_wrong_einsum(arguments, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        jaxmp.einsum(*arguments)


# id: (subscripts, specs of lhs, rhs and the result, message)
WRONG_SHARDINGS = {
    "contraction without out_sharding": ("bsd,dhk->bshk", P(None, None, "x"), P("x"), None, "dot_general: the contraction is sharded over axis 'x' and it is ambiguous how the result should be sharded; pass out_sharding"),
    "contractions disagree": ("bsd,dhk->bshk", P(None, None, "x"), P("y"), None, "dot_general: the contraction is sharded over axis 'x' in lhs and 'y' in rhs and it is ambiguous how the result should be sharded"),
    "batches disagree": ("bmk,bkn->bmn", P("x"), P("y"), None, "dot_general: batch dimension 0 of lhs is sharded over 'x' but dimension 0 of rhs over 'y'; pass out_sharding, or reshard one of them"),
    "rows and columns on one axis": ("bsd,dhk->bshk", P(None, "x"), P(None, None, "x"), None, "dot_general: rows of lhs and columns of rhs are both sharded over axis 'x'"),
    "not divided": ("bsd,dhk->bshk", P(), P(), P(None, None, None, ("x", "y")), "dot_general: dimension 3 of the result has extent 2, which axis ('x', 'y') of size 4 does not divide"),
}  # fmt: skip


@pytest.mark.parametrize(("subscripts", "lhs", "rhs", "out", "message"), WRONG_SHARDINGS.values(), ids=WRONG_SHARDINGS)
def test_wrong_sharding(subscripts, lhs, rhs, out, message):
    extents = {"k": 2} if "h" in subscripts else {}
    a, b = (np.zeros([extents.get(x, 4) for x in side], np.float32) for side in subscripts.split("->")[0].split(","))
    mesh = MESH.jax_mesh()
    numbers, _ = numbers_of(subscripts)
    a, b = cases.put(a, mesh, lhs), cases.put(b, mesh, rhs)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(message)):
        jaxmp.dot_general(a, b, numbers, out_sharding=out)


def test_out_sharding_inside_shard_map():
    mesh = MESH.jax_mesh(AxisType.Auto)
    body = functools.partial(jaxmp.dot_general, dimension_numbers=PLAIN, out_sharding=P())
    with pytest.raises(ValueError, match="dot_general: out_sharding was given inside shard_map, where operands are"):
        jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P())(A, B)
