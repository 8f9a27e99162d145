"""`sparse.sparsify` and `roofline` handle jaxmp's products like JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import roofline, sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp


def test_sparse_operands(rng):
    dense = rng.integers(-2, 3, (6, 4)).astype(np.float32) * (rng.random((6, 4)) < 0.4)
    w = rng.integers(-2, 3, (4, 5)).astype(np.float32)
    x, batch = sparse.BCOO.fromdense(dense), sparse.BCOO.fromdense(np.stack([dense, 2 * dense]), n_batch=1)
    batched = "bij,bjk->bki"
    for given, product in (
        ((x, w), jaxmp.matmul),
        ((w.T, x.T), jax.jit(jaxmp.matmul)),
        ((x, w[:, 0]), jaxmp.matmul),
        ((batch, np.stack([w, w])), functools.partial(jaxmp.einsum, batched)),
    ):
        want = np.einsum(batched, batch.todense(), [w, w]) if given[0] is batch else None
        whole = [each.todense() if isinstance(each, sparse.BCOO) else each for each in given]
        np.testing.assert_array_equal(sparse.sparsify(product)(*given), whole[0] @ whole[1] if want is None else want)
    linear = sparse.sparsify(jaxmp.linear)(x, w, np.ones(5, np.float32))
    np.testing.assert_array_equal(linear, dense @ w + 1)
    both = sparse.sparsify(jaxmp.matmul)(x.T, x)
    assert isinstance(both, sparse.BCOO)
    np.testing.assert_array_equal(both.todense(), dense.T @ dense)


PATTERNS = {
    "local": (jnp.matmul, jaxmp.matmul, P("x", None), P(None, None), P("x", None)),
    "all-gather": (
        lambda a, b: lax.all_gather(a, "x", tiled=True) @ b,
        functools.partial(jaxmp.all_gather_matmul, axis_name="x"),
        *(P("x", None), P(None, "x"), P(None, "x")),
    ),
    "all-reduce": (
        lambda a, b: lax.psum(a @ b, "x"),
        functools.partial(jaxmp.matmul_all_reduce, axis_name="x"),
        *(P(None, "x"), P("x", None), P(None, None)),
    ),
}


@pytest.mark.parametrize(("plain", "call", "a", "b", "out"), PATTERNS.values(), ids=PATTERNS)
def test_rooflines(plain, call, a, b, out, mesh_of):
    mesh, x = mesh_of({"x": 2}, AxisType.Auto), jnp.ones((8, 8))
    want, got = (roofline.roofline(f, mesh=mesh, in_specs=(a, b), out_specs=out)(x, x)[1] for f in (plain, call))
    assert (got.flops, got.hbm_bytes, got.ici_bytes) == (want.flops, want.hbm_bytes, want.ici_bytes)
    assert got.flops == 2 * 8**3 // 2


def test_the_roofline_of_a_gradient_has_its_gather_in_any_type(mesh_of):
    """The gather of bfloat16 is a primitive of jaxmp."""
    mesh, specs = mesh_of({"x": 2}, AxisType.Auto), (P("x", None), P(None, "x"))

    def gradient(a, b):
        product = functools.partial(jaxmp.all_gather_matmul, axis_name="x")
        return jax.grad(lambda b: jnp.sum(product(a, b).astype(jnp.float32)))(b)

    moved = [
        roofline.roofline(gradient, mesh=mesh, in_specs=specs, out_specs=specs[1])(x, x)[1].ici_bytes["x"]
        for x in (jnp.ones((8, 8), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    ]
    assert moved == [8 * 8 // 2 * 4, 8 * 8 // 2 * 2]
