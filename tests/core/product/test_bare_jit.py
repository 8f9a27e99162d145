"""Programs under a bare `jit` on automatic axes, in layouts that give the partitioner unusual calls."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

M, K, N = 16, 32, 512
# Shardings of a, b and the result: ranks share columns of the result, which are scattered or gathered.
SCATTERED = P(None, "x"), P("x", "y"), P("y", "x")
GATHERED = P("x", None), P(None, "x"), P("x", None)


def traced_alpha(a, b, c, scale, determinism):
    return jaxmp.matmul(a, b, c, alpha=scale, beta=scale, determinism=determinism)


def gradient(a, b, c, scale, determinism):
    def loss(a, b):
        bias = {"bias": c[0]}
        return (jaxmp.matmul(a, b, epilog=Epilog.RELU_BIAS, epilog_inputs=bias, determinism=determinism) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(a, b)


def derivative_and_sums(a, b, c, scale, determinism):
    _, aux = jaxmp.matmul(a, b, epilog=Epilog.RELU_AUX, determinism=determinism)
    d, more = jaxmp.matmul(a, b, epilog=Epilog.DRELU_BGRAD, epilog_inputs=aux, determinism=determinism)
    return d, more["drelu_bgrad"]


@pytest.mark.parametrize("shardings", [SCATTERED, GATHERED], ids=["scattered", "gathered"])
@pytest.mark.parametrize(
    ("program", "determinism"),
    [
        (traced_alpha, "run_to_run"),
        (gradient, "run_to_run"),
        (gradient, "batch"),
        (derivative_and_sums, "batch"),
        (derivative_and_sums, "topology"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_results_are_those_of_one_device(program, determinism, shardings, rng):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    a, b, c = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    of_a, of_b, of_d = (NamedSharding(mesh, spec) for spec in shardings)

    def constrained(*operands):
        results = program(*operands, determinism)
        first, *rest = results if isinstance(results, tuple) else (results,)
        where = of_a if first.shape == a.shape else of_d
        return jax.lax.with_sharding_constraint(first, where), *rest

    scale = jnp.float32(2)
    want = jax.tree.leaves(jax.jit(program, static_argnums=4)(a, b, c, scale, determinism))
    got = jax.jit(constrained)(jax.device_put(a, of_a), jax.device_put(b, of_b), c, scale)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def microbatches(multiply, x, w):
    """Sums the gradients of a loss over four parts of the batch."""

    def of_one(w, x):
        return jnp.square(multiply(x, w)).sum()

    parts = x.reshape(4, x.shape[0] // 4, -1)
    return jax.lax.scan(lambda total, x: (total + jax.grad(of_one)(w, x), None), jnp.zeros_like(w), parts)[0]


def half_of_each(multiply, x, w):
    """Multiplies rows that are sums over the first of two row dimensions."""
    return multiply(x.reshape(2, -1, x.shape[1]).sum(0), w)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("determinism", ["run_to_run", "topology"])
@pytest.mark.parametrize("program", [microbatches, half_of_each])
@pytest.mark.parametrize("ndevices", [8, 6])
def test_parts_of_an_axis_shard_the_operands(program, determinism, ndevices, mesh_of, rng):
    mesh = mesh_of({"data": ndevices}, AxisType.Auto)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8 * ndevices, 12), (12, 16)))
    multiply = functools.partial(jaxmp.matmul, determinism=determinism)
    want = jax.jit(functools.partial(program, jnp.matmul))(x, w)
    step = jax.jit(functools.partial(program, multiply))
    got = step(jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(w, NamedSharding(mesh, P())))
    np.testing.assert_array_equal(got, want)


def attention(x, w, experts):
    """Computes attention with six query heads and two key heads from the columns of x @ w."""
    heads = (x @ w).reshape(*x.shape[:2], 2, 5, 4)
    queries, keys, values = heads[..., :3, :], heads[..., 3, :], heads[..., 4, :]
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, keys)
    return jnp.einsum("bhgqk,bkhd->bqhgd", scores, values).reshape(*x.shape[:2], 24) @ w[:24]


def mixture(x, w, experts):
    """Applies experts to microbatches of tokens that are cut from sequences."""
    sizes = jnp.array([5, 0, 3, 4])
    parts = x.reshape(4, 12, -1)
    return jax.lax.map(lambda x: jax.lax.ragged_dot(x, experts, sizes), parts), x.swapaxes(0, 1).reshape(48, -1) @ w.T


@pytest.mark.small("values")
@pytest.mark.parametrize("sizes", [{"x": 8}, {"x": 2, "y": 4}, {"x": 6}], ids=str)
@pytest.mark.parametrize("program", [attention, mixture])
def test_reshaped_models_have_exact_gradients(program, sizes, mesh_of, rng):
    mesh = mesh_of(sizes, AxisType.Auto)
    shapes = (24, 2, 40) if program is mixture else (2, 6, 40), (40, 40), (4, 40, 24)
    arrays = [rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes]
    specs = P("x" if program is mixture else None), P(None, "x" if 40 % mesh.size == 0 else None), P()
    placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(arrays, specs, strict=True)]

    def loss(*arrays):
        return sum(jnp.sum(y) for y in jax.tree.leaves(program(*arrays)))

    gradient = jax.grad(loss, (0, 1, 2))
    got = jax.jit(jaxmp.fuse(gradient))(*placed)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(gradient)(*arrays))


@contextlib.contextmanager
def without_shardy():
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has no other partitioner")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize("determinism", ["run_to_run", "topology"])
def test_gspmd_is_told_the_same(determinism, mesh_of, rng):
    """XLA also falls back to GSPMD if a program calls a function that was exported without Shardy."""
    mesh = mesh_of({"x": 2, "y": 2}, AxisType.Auto)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 12), (12, 16)))
    placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in ((x, P("x", "y")), (w, P("y")))]

    def loss(multiply, before, x, w):
        return jnp.square(multiply(before(x), w)).sum()

    of_jax, of_jaxmp = (
        functools.partial(jax.value_and_grad(loss, (2, 3)), multiply)
        for multiply in (jnp.matmul, functools.partial(jaxmp.matmul, determinism=determinism))
    )
    with without_shardy():
        old = jax.export.export(jax.jit(jnp.negative))(placed[0])
        got = jax.jit(functools.partial(of_jaxmp, jnp.negative))(*placed)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(functools.partial(of_jax, jnp.negative))(x, w))
    forward = jax.jit(functools.partial(loss, functools.partial(jaxmp.matmul, determinism=determinism), old.call))
    np.testing.assert_array_equal(forward(*placed), got[0])


def doubled(x, callback=jax.pure_callback):
    return callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def hosted(x):
    return doubled(x)


hosted.defvjp(lambda x: (doubled(x), None), lambda _, ct: (doubled(ct),))


@pytest.mark.parametrize("callback", [jax.pure_callback, functools.partial(io_callback, ordered=True)])
def test_results_of_callbacks_are_operands(callback, mesh_of, rng):
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 16), (16, 12)))
    placed = jax.device_put(x, NamedSharding(mesh, P("x"))), jax.device_put(w, NamedSharding(mesh, P(None, "x")))

    def products(multiply, x, w):
        gradient = jax.grad(lambda x: multiply(hosted(x), w).sum())(x)
        return multiply(doubled(x, callback), w), multiply(x, doubled(w, callback)), gradient

    got = jax.jit(functools.partial(products, jaxmp.matmul))(*placed)
    for y, want in zip(got, (2 * x @ w, 2 * x @ w, np.broadcast_to(2 * w.sum(1), x.shape)), strict=True):
        np.testing.assert_array_equal(np.asarray(y), want)


def test_callbacks_inside_shard_map_are_operands(mesh_of, rng):
    """JAX gives such a result a type without a mesh."""
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 16), (16, 12)))

    def product(x, w):
        return jaxmp.all_gather_matmul(doubled(x), w, axis_name="x")

    run = jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x"))
    np.testing.assert_array_equal(jax.jit(run)(x, w), 2 * x @ w)


def test_arrays_of_two_meshes_are_multiplied(mesh_of, rng):
    one, other = mesh_of({"x": 8}, AxisType.Auto), mesh_of({"y": 2, "z": 4}, AxisType.Auto)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((16, 8), (8, 12)))

    def step(x, w):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(other, P("z", "y")))
        return jaxmp.matmul(x, w, determinism="topology")

    np.testing.assert_array_equal(jax.jit(step)(jax.device_put(x, NamedSharding(one, P("x"))), w), x @ w)


def test_a_product_is_typed_on_the_mesh_of_its_operands(mesh_of):
    """If the operands are on two meshes, the result's type has no mesh, as in JAX."""
    meshes = mesh_of({"x": 4}, AxisType.Auto), mesh_of({"y": 2, "z": 2}, AxisType.Auto)
    of_one, of_other = (jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P())) for mesh in meshes)
    of_none = jax.ShapeDtypeStruct((8, 8), np.float32)
    for types in ((of_one, of_none), (of_none, of_one), (of_one, of_other), (of_none, of_none)):
        (got,), (want,) = (jax.make_jaxpr(multiply)(*types).out_avals for multiply in (jaxmp.matmul, jnp.matmul))
        assert got == want, types


def test_an_abstract_mesh_alone_is_enough(mesh_of, rng):
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((16, 8), (8, 12)))
    whole, rows = (NamedSharding(mesh.abstract_mesh, spec) for spec in (P(), P("x")))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in ((x, rows), (w, whole))]
    checks = [jax.export.DisabledSafetyCheck.custom_call("jaxmp_partitioned_matmul")]
    exported = jax.export.export(jax.jit(jaxmp.matmul), platforms=["cpu"], disabled_checks=checks)(*types)
    placed = [jax.device_put(x, NamedSharding(mesh, s.spec)) for x, s in ((x, rows), (w, whole))]
    np.testing.assert_array_equal(jax.jit(exported.call)(*placed), x @ w)
