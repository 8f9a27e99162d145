"""`ragged_dot_general` against `lax.ragged_dot_general`, exactly, on small integers. Without these tests, dimensions
could be folded or restored in another order than lax's, and sizes could be taken for another index of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ragged import assert_same, integers

import jaxmp


def numbers(contract, batch, ragged, group=()):
    return lax.RaggedDotDimensionNumbers((contract, batch), [ragged], group)


NO_BATCH = ((), ())
MATRICES = numbers(((1,), (1,)), NO_BATCH, 0, [0])
# (shapes of lhs and rhs, dimension numbers, the extents of the indices that may have sizes of their own)
CASES = {
    "rows": ((6, 3), (4, 3, 5), MATRICES, ()),
    "rows, transposed": ((6, 3), (4, 5, 3), numbers(((1,), (2,)), NO_BATCH, 0, [0]), ()),
    "rows of a batch": ((2, 6, 3), (2, 4, 3, 5), numbers(((2,), (2,)), ((0,), (0,)), 1, [1]), (2,)),
    "rows among others": ((3, 6, 2, 3), (4, 3, 5, 2), numbers(((3,), (1,)), NO_BATCH, 1, [0]), (3,)),
    "both": ((3, 2, 6, 3), (4, 2, 3, 5), numbers(((3,), (2,)), ((1,), (1,)), 2, [0]), (2, 3)),
    "contracted": ((6, 3), (6, 5), numbers(((0,), (0,)), NO_BATCH, 0), ()),
    "contracted among others": ((2, 6, 3, 2), (2, 3, 5, 6), numbers(((1, 2), (3, 1)), ((0,), (0,)), 1), (2,)),
    "contracted behind another": ((2, 3, 6, 2), (2, 3, 5, 6), numbers(((1, 2), (1, 3)), ((0,), (0,)), 2), (2, 3)),
    "no columns": ((2, 6, 3), (2, 6, 0), numbers(((1,), (1,)), ((0,), (0,)), 1), (2,)),
    "nothing contracted": ((6, 0), (4, 0, 5), numbers(((1,), (1,)), NO_BATCH, 0, [0]), ()),
    "batch": ((3, 6, 2), (3, 2, 4), numbers(((2,), (1,)), ((0,), (0,)), 0), ()),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("per_index", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_modes(case, per_index, implementation):
    of_lhs, of_rhs, given, lead = CASES[case]
    x, w = integers(of_lhs, 0), integers(of_rhs, 1)
    sizes = jnp.asarray(np.random.default_rng(2).integers(0, 3, (*(lead if per_index else ()), 4)))
    got = jaxmp.ragged_dot_general(x, w, sizes, given, implementation=implementation)
    assert_same(got, lax.ragged_dot_general(x, w, sizes, given))
    if implementation is None and (ct := integers(got.shape, 3)).size:
        pull = jax.vjp(lambda x, w: jaxmp.ragged_dot_general(x, w, sizes, given), x, w)[1]
        # lax has no cotangents for two modes; each is tested as the transpose of the tangents, which lax can compute.
        moved = integers(of_lhs, 4), integers(of_rhs, 5)
        for mine, move, operands in zip(pull(ct), moved, ((moved[0], w), (x, moved[1])), strict=True):
            assert (mine * move).sum() == (ct * lax.ragged_dot_general(*operands, sizes, given)).sum()


def test_sharded_arrays_take_the_numbers_of_ragged_dot():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w, sizes = jax.device_put(integers((6, 3), 0), P("p")), integers((2, 3, 5), 1), jnp.array([2, 3])
        d = jaxmp.ragged_dot_general(x, w, sizes, MATRICES, out_sharding=P("p"))
        assert_same(d, jaxmp.ragged_dot(x, w, sizes, out_sharding=P("p")))
        with pytest.raises(NotImplementedError, match=r"^ragged_dot_general: .* only; call inside a shard_map"):
            jaxmp.ragged_dot_general(x, x, sizes, numbers(((0,), (0,)), NO_BATCH, 0))
