"""Shardings with unreduced and reduced axes: what `jnp` gives, in types, values and gradients, and what it refuses."""

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
    """a and b whose contraction is sharded, and both whole."""
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
    """Of each device, since the terms of a sum differ between devices."""
    want, got = (jax.jit(functools.partial(program, module))(*operands) for module in (jnp, jaxmp))
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jax.typeof(w) == jax.typeof(g)
        for one, other in zip(w.addressable_shards, g.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))


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
