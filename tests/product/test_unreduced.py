"""Shardings with unreduced and reduced axes: types, values, gradients and refusals are jnp's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

UNREDUCED, REDUCED = P(None, None, unreduced={"x"}), P(None, None, reduced={"x"})
NN = (((1,), (0,)), ((), ()))


@pytest.fixture
def operands(rng):
    """Yields a and b with a sharded contraction, on a mesh of 2 x 2."""
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        a, b = (jnp.asarray(rng.integers(-2, 3, (8, 8)), jnp.float32) for _ in range(2))
        yield jax.device_put(a, P(None, "x")), jax.device_put(b, P("x", None))


def partial_sums(module, a, b):
    dot_general = lax.dot_general if module is jnp else jaxmp.dot_general
    half = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return {
        "matmul": module.matmul(a, b, out_sharding=UNREDUCED),
        "16 bits": module.matmul(*half, out_sharding=UNREDUCED),
        "einsum": module.einsum("ij,jk->ki", a, b, out_sharding=UNREDUCED),
        "one operand": module.einsum("ij->j", b, out_sharding=P(None, unreduced={"x"})),
        "one operand transposed": module.einsum("ijk->kj", b[:, None], out_sharding=P(None, None, unreduced={"x"})),
        "sum of terms": module.einsum("ij->j", module.matmul(a, b, out_sharding=UNREDUCED)),
        "dot_general": dot_general(a, b, NN, out_sharding=UNREDUCED),
        "then scattered": jax.sharding.reshard(module.matmul(a, b, out_sharding=UNREDUCED), P("x", None)),
        "reduced operand": module.matmul(jax.sharding.reshard(a, P("x", None)), jax.sharding.reshard(b, REDUCED)),
    }


def gradients(module, a, b):
    def of_sums(a, b):
        return jax.sharding.reshard(module.matmul(a, b, out_sharding=UNREDUCED), P("x", None)).sum()

    def of_reduced(a, b):
        rows = jax.sharding.reshard(a, P("x", None))
        return module.matmul(rows, jax.sharding.reshard(b, REDUCED)).sum()

    return [jax.grad(f, argnums=(0, 1))(a, b) for f in (of_sums, of_reduced)]


@pytest.mark.parametrize("program", [partial_sums, gradients])
def test_types_and_values_are_those_of_jnp(program, operands):
    """Compares the shards of each device, because the terms of a sum differ between devices."""
    want, got = (jax.jit(functools.partial(program, module))(*operands) for module in (jnp, jaxmp))
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jax.typeof(w) == jax.typeof(g)
        for one, other in zip(w.addressable_shards, g.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))


def scaled(x, w, alpha, beta):
    return jaxmp.matmul(x, w, x, alpha=alpha, beta=beta)


def of_shards(x, w, ws, bias):
    """Returns (JAX's product, jaxmp's, operands) by name: x varies over both axes, the others are reduced over both."""
    square, cube, relu = lax.square, lambda x: x * lax.square(x), jax.nn.relu
    of_relu, of_cube = (functools.partial(jaxmp.linear, activation=f) for f in ("relu", cube))
    one = lax.pcast(jnp.arange(16.0).reshape(4, 4), "x", to="reduced")
    batched = functools.partial(jnp.einsum, "bmk,bkn->bmn"), functools.partial(jaxmp.einsum, "bmk,bkn->bmn")
    chained = functools.partial(jnp.einsum, "mk,kn,np->mp"), functools.partial(jaxmp.einsum, "mk,kn,np->mp")
    return {
        "right": (jnp.matmul, jaxmp.matmul, x, w),
        "left": (jnp.matmul, jaxmp.matmul, w, x.T),
        "over one axis of two": (
            lambda x, w: x @ lax.pcast(lax.pcast(w, "x", to="varying"), "y", to="varying"),  # JAX casts all or nothing
            jaxmp.matmul,
            *(x, one),
        ),
        "left with rows of a batch": (jnp.matmul, jaxmp.matmul, ws, x.T),
        "vector": (jnp.matmul, jaxmp.matmul, x, bias),
        "batch": (*batched, jnp.stack([x, x]), ws),
        "three operands": (*chained, x, w, w),
        "bias": (lambda x, w, b: x @ w + b[None], jaxmp.linear, x, w, bias),
        "bias that varies": (lambda x, w, b: x @ w + b[None], jaxmp.linear, w, x.T, x[0, :2]),
        "epilog": (lambda x, w, b: relu(x @ w + b[None]), of_relu, x, w, bias),
        "function": (lambda x, w, b: cube(x @ w + b[None]), of_cube, x, w, bias),
        "scalars": (lambda x, w, alpha, beta: x @ w * alpha + x * beta, scaled, x, w, bias[0], bias[1]),
        "layers": (
            lambda x, w, b, v, c: relu(x @ w + b[None]) @ v + c[None],
            functools.partial(jaxmp.mlp, activation="relu"),
            *(x, w, bias, w, bias),
        ),
        "gated": (
            lambda x, w, v, u: (square(x @ w) * (x @ v)) @ u,
            functools.partial(jaxmp.gated_mlp, activation=square),
            *(x, w, w, w),
        ),
        "gather": (
            lambda x, w: lax.all_gather(x, "x", tiled=True) @ w,
            functools.partial(jaxmp.all_gather_matmul, axis_name="x"),
            *(x, w),
        ),
    }


def test_reduced_operands_of_a_shard_map(rng):
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    axes, types = ("x", "y"), ({}, {})

    def run(*operands):
        results = []
        for i in range(2):
            for name, case in of_shards(*operands).items():
                y, transpose = jax.vjp(case[i], *case[2:])
                found = [y, *transpose(y)]
                types[i][name] = list(map(jax.typeof, found))
                results += found
        return [of_one(x) for x in results]

    def of_one(x):
        """Returns each device's value, after summing x over its unreduced axes."""
        x = lax.psum(x, tuple(jax.typeof(x).manual_axis_type.unreduced))
        return lax.pcast(x, tuple({*axes} - jax.typeof(x).manual_axis_type.varying), to="varying")[None]

    specs = P(axes, None), *(P(*[None] * ndim, reduced=set(axes)) for ndim in (2, 3, 1))
    with jax.set_mesh(mesh):
        shapes = (8, 4), (4, 4), (2, 4, 4), (4,)
        given = [
            jax.device_put(jnp.asarray(rng.integers(-2, 3, shape), jnp.float32), spec)
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        results = jax.jit(jax.shard_map(run, in_specs=specs, out_specs=P(axes)))(*given)
    assert types[0] == types[1]
    for want, got in zip(results[: len(results) // 2], results[len(results) // 2 :], strict=True):
        np.testing.assert_array_equal(want, got)


def test_a_library_and_a_level_are_refused_by_name(operands):
    for options, what in (({"implementation": "host"}, "implementation='host'"), ({"determinism": "batch"}, "'batch'")):
        with pytest.raises(NotImplementedError, match=f"{what} is not available .* has unreduced or reduced axes"):
            jaxmp.matmul(*operands, out_sharding=UNREDUCED, **options)


def test_what_jnp_refuses(operands):
    a, b = operands
    terms = jax.jit(functools.partial(jnp.matmul, out_sharding=UNREDUCED))(a, b)
    whole = jax.sharding.reshard(a, P())
    for module in (jnp, jaxmp):
        with pytest.raises(Exception, match="unreduced axes should be equal to the contracting specs"):
            module.matmul(whole, whole, out_sharding=UNREDUCED)
        with pytest.raises(Exception, match="lhs or rhs passed to dot_general cannot be unreduced"):
            module.matmul(terms, whole)
