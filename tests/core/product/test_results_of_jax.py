"""Results have the value, the type, the weak type, the sharding and the committedness of JAX's. Without these tests,
the rest of a program could differ from JAX's. Operands are small integers, so values are bitwise equal."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


def fused(theirs):
    """Wraps a product with `fuse`, as users do if jaxmp has no such function."""
    return lambda *args, **options: jaxmp.fuse(functools.partial(theirs, **options))(*args)


OTHERS = {name: getattr(jnp, name) for name in ("dot", "vdot", "inner", "tensordot", "vecdot", "matvec")}
JAX = types.SimpleNamespace(matmul=jnp.matmul, einsum=jnp.einsum, dot_general=lax.dot_general, **OTHERS)
JAXMP = types.SimpleNamespace(
    matmul=jaxmp.matmul,
    einsum=jaxmp.einsum,
    dot_general=jaxmp.dot_general,
    **{name: fused(f) for name, f in OTHERS.items()},
)
NN = (((1,), (0,)), ((), ()))


def draw(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(shape).integers(-3, 4, shape), dtype)


def every_function(m):
    a, b, batch = draw(4, 6), draw(6, 4), draw(3, 6, 4)
    vectors = (a, b[:, 0]), (a[0], b), (a[0], b[:, 0])
    batches = (a, batch), (batch, a[:, 0]), (b[:, 0], batch), (batch, batch.mT), (batch[:, None], batch.mT)
    for pair in ((a, b), *vectors, *batches, (np.asarray(a), b), (a, np.asarray(b)), (np.asarray(a), np.asarray(b))):
        yield m.matmul(*pair)
    yield [m.dot(*pair) for pair in ((a, b), *vectors)]
    yield m.einsum("ij,jk->ki", a, b), m.einsum("ij,jk,kl->il", a, b, a), m.einsum("ij->j", a)
    yield m.einsum(a, [0, 1], b, [1, 2], [2, 0]), m.dot_general(batch, batch, (((1,), (1,)), ((0,), (0,))))
    yield m.vdot(a, b), m.inner(a, a), m.tensordot(a, b, axes=1), m.tensordot(a, b, axes=((0, 1), (1, 0)))
    yield m.vecdot(a, a), m.matvec(a, b[:, 0])


def committed(m):
    """Multiplies operands that are committed to a device with uncommitted ones."""
    a = draw(4, 4)
    there = jax.device_put(a, jax.devices()[1])
    for x, y in ((there, there), (there, a), (a, there), (np.asarray(a), there)):
        yield m.matmul(x, y), m.einsum("ij,jk->ik", x, y), m.dot(x, y), m.matmul(x, y[0]), m.dot_general(x, y, NN)
    with jax.default_device(jax.devices()[1]):
        yield m.matmul(a, a), m.matmul(jnp.ones((2, 2)), jnp.ones((2, 2)))


def placed(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    specs = ((8, 4), P("x", None)), ((4, 8), P(None, "y")), ((8, 4), P("y", None))
    return mesh, [jax.device_put(draw(*shape), NamedSharding(mesh, spec)) for shape, spec in specs]


def of_sharded_arrays(m, a, b):
    vector, square = draw(4), draw(4, 4)
    yield m.matmul(a, b), m.einsum("ij,jk->ik", a, b), m.dot(a, b), m.inner(a, vector), m.matmul(vector, b)
    yield m.einsum("ij,jk->ki", a, b), m.dot_general(b, a, (((0,), (1,)), ((), ()))), m.tensordot(a, b, axes=1)
    yield jax.jit(jax.grad(lambda a, b: jnp.sum(m.matmul(a, b) ** 2), (0, 1)))(a, b)
    yield jax.grad(lambda a, square: jnp.sum(m.matmul(a, square) ** 2), (0, 1))(a, square)


def explicit_axes(m):
    mesh, (a, b, c) = placed(AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield from of_sharded_arrays(m, a, b)
        for out in (P("x", "y"), P(None, None), P(("x", "y"), None)):
            yield m.matmul(a, b, out_sharding=out), m.einsum("ij,jk->ik", b, c, out_sharding=out)
            yield jax.jit(lambda b, c, out=out: m.dot_general(b, c, NN, out_sharding=out))(b, c)


def automatic_axes(m):
    mesh, (a, b, c) = placed(AxisType.Auto)
    yield from of_sharded_arrays(m, a, b)
    yield m.matmul(b, c), m.einsum("ij,jk->ik", a.T, c), m.vdot(a, a), m.matmul(b, draw(8, 8))
    yield jax.jit(lambda a: m.einsum("ij,kj->ki", a, np.ones((8, 4), np.float32)))(a)
    out = NamedSharding(mesh, P("x", None))
    yield jax.jit(lambda b, c: lax.with_sharding_constraint(m.matmul(b, c), out))(b, c)


def manual_axes(m):
    mesh, (a, b, _) = placed(AxisType.Auto)
    for check_vma in (True, False):

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma)
        def product(a, b):
            return lax.psum_scatter(m.matmul(lax.all_gather(a, "x", tiled=True), b), "x", tiled=True)

        yield jax.jit(jax.grad(lambda a, b, f=product: jnp.sum(f(a, b)), (0, 1)))(a, b)


def check(got, want):
    assert (got.dtype, got.shape, got.weak_type) == (want.dtype, want.shape, want.weak_type)
    assert got.committed == want.committed
    assert got.sharding.is_equivalent_to(want.sharding, want.ndim), (got.sharding, want.sharding)
    np.testing.assert_array_equal(got, want)


PROGRAMS = (every_function, committed, explicit_axes, automatic_axes, manual_axes)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_property_is_that_of_jax(program, standard_promotion):
    require_devices(4)
    jax.tree.map(check, *(list(program(module)) for module in (JAXMP, JAX)))
