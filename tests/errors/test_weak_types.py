"""Weak types, and types of 64 bits where they are off: results and cotangents have JAX's."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

NN = (((1,), (0,)), ((), ()))


@pytest.fixture(autouse=True)
def on_host():
    cases.require("host")


def weak(dtype=jnp.float32, shape=(8, 8)):
    x = lax.full(shape, 1.0 if jnp.issubdtype(dtype, jnp.floating) else 1)
    return x if x.dtype == dtype else jax.jit(lambda: lax.full(shape, 1).astype(dtype) * 1)()


def type_of(x):
    return x.dtype.name, x.weak_type


# Functions of two arrays and a module's products.
PRODUCTS = {
    "matmul": lambda m, a, b: m.matmul(a, b),
    "float32": lambda m, a, b: m.matmul(a, b, preferred_element_type="float32"),
    "vectors": lambda m, a, b: m.matmul(a[0], b[:, 0]),
    "batches": lambda m, a, b: m.matmul(jnp.stack([a, a]), jnp.stack([b, b])),
    "einsum": lambda m, a, b: m.einsum("ij,jk->ki", a, b),
    "transpose": lambda m, a, b: m.einsum("ij->ji", a),
    "sum": lambda m, a, b: m.einsum("ij->j", a, preferred_element_type="bfloat16"),
    "sums": lambda m, a, b: m.einsum("ij,kl->il", a, b),
    "three": lambda m, a, b: m.einsum("ij,jk,kl->il", a, b, a),
    "numbers": lambda m, a, b: m.einsum(",ij->ij", 2.0, a),
    "dot_general": lambda m, a, b: (jaxmp if m is jaxmp else lax).dot_general(a, b, NN),
    "dot_general to bfloat16": lambda m, a, b: (jaxmp if m is jaxmp else lax).dot_general(
        a, b, NN, preferred_element_type="bfloat16"
    ),
    "linear": lambda m, a, b: jaxmp.linear(a, b) if m is jaxmp else a @ b,
    "bias": lambda m, a, b: jaxmp.linear(a, b, b[0]) if m is jaxmp else a @ b + b[:1],
    "bias of bfloat16": lambda m, a, b: (
        jaxmp.linear(a, b, b[0].astype("bfloat16")) if m is jaxmp else a @ b + b[:1].astype("bfloat16")
    ),
    "fuse": lambda m, a, b: jaxmp.fuse(lambda a, b: (a @ b, a @ a * 2.0))(a, b)[0] if m is jaxmp else a @ b,
}
OPERANDS = {
    "weak": (True, True),
    "first": (True, False),
    "second": (False, True),
    "with bfloat16": (True, jnp.bfloat16),
    "with int8": (True, jnp.int8),
}


def operand(kind):
    return weak() if kind is True else jnp.ones((8, 8), kind or jnp.float32)


def test_results_and_cotangents_are_as_weak_as_those_of_jax(standard_promotion):
    def types(module):
        found = {}

        def trace(a, b, name, which):
            f = functools.partial(PRODUCTS[name], module)
            d, backward = jax.vjp(lambda a: f(a, b), a)
            mapped = jax.vmap(f)(jnp.stack([a, a]), jnp.stack([b, b]))
            tangent = jax.jvp(lambda a: f(a, b), (a,), (a,))[1]
            found[name, which] = [type_of(x) for x in (f(a, b), jax.jit(f)(a, b), mapped, d, tangent, *backward(d))]

        for which, kinds in OPERANDS.items():
            for name in PRODUCTS:
                if name != "bias of bfloat16" or kinds == (True, True):  # none narrows a strongly typed product
                    jax.eval_shape(functools.partial(trace, name=name, which=which), *map(operand, kinds))
        return found

    assert types(jaxmp) == types(jnp)


def test_values_and_types_of_eager_calls():
    a, h = weak(), jnp.ones((8, 8), jnp.bfloat16)
    for name in ("matmul", "einsum", "dot_general", "linear", "fuse"):
        for d in (PRODUCTS[name](jaxmp, a, a), PRODUCTS[name](jaxmp, a, a)):  # also from the cache of eager calls
            assert type_of(d) == ("float32", True)
            np.testing.assert_array_equal(d, np.full((8, 8), 8.0))
            assert (d * h).dtype == jnp.bfloat16
    fused = jaxmp.fuse(lambda a, h: (a @ a) * h)
    assert fused(a, h).dtype == jax.jit(fused)(a, h).dtype == jnp.bfloat16


def test_on_meshes():
    require_devices(4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        a, b = (_weakened(jax.device_put(jnp.ones((8, 8)), spec)) for spec in SPECS)
        for out in (P(None, None), P("x", None)):
            f = functools.partial(jaxmp.matmul, out_sharding=out)
            gradients = jax.grad(lambda a, b, f=f: f(a, b).sum(), (0, 1))(a, b)
            for d in (f(a, b), jax.jit(f)(a, b), *gradients):
                assert type_of(d) == ("float32", True)
        by_jaxmp = functools.partial(jaxmp.matmul_reduce_scatter, axis_name="x")
        for local in (by_jaxmp, lambda a, b: lax.psum_scatter(a @ b, "x", tiled=True)):
            d = jax.jit(jax.shard_map(local, in_specs=SPECS, out_specs=P("x", None)))(a, b)
            assert type_of(d) == ("float32", True)


SPECS = (P(None, "x"), P("x", None))


def _weakened(x):
    return jax.jit(lambda x: jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None))(
        x
    )


def test_a_weak_integer_does_not_become_narrower():
    """As in `jnp.matmul`, which promotes int32 to int16, and has no such product."""
    a, b = jnp.ones((2, 2), jnp.int16), jnp.full((2, 2), 1)
    for multiply in (jaxmp.matmul, functools.partial(jaxmp.einsum, "ij,jk")):
        with pytest.raises(
            NotImplementedError, match=r"operands of dtype int16 \(a int16, b int32\) are not supported"
        ):
            multiply(a, b)
        with pytest.raises(TypeError):
            jnp.matmul(a, b)


# Types of 64 bits --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["allow", "error", "warn"])
def explicit_x64(request):
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", request.param)
    yield request.param
    jax.config.update("jax_explicit_x64_dtypes", before)


@pytest.mark.parametrize("wide", ["float64", "complex128"])
def test_explicit_types_of_64_bits(explicit_x64, wide):
    a = jnp.ones((3, 3))
    for name in ("matmul", "vectors", "einsum", "transpose", "three", "dot_general", "linear"):
        for module in (jnp, jaxmp):
            multiply = functools.partial(WITH_PREFERRED[name], module, a, wide)
            if explicit_x64 == "error":
                with pytest.raises(ValueError, match=f"Explicitly requested dtype {wide}"):
                    multiply()
                continue
            if explicit_x64 == "warn":
                jax.clear_caches()
                with pytest.warns(UserWarning, match=f"Explicitly requested dtype {wide}"):
                    d = multiply()
            else:
                d = multiply()
            is_wide = explicit_x64 == "allow"
            assert d.dtype == (wide if is_wide else {"float64": "float32", "complex128": "complex64"}[wide]), name
            np.testing.assert_array_equal(d, np.full(d.shape, {"three": 9, "transpose": 1}.get(name, 3)))


WITH_PREFERRED = {
    "matmul": lambda m, a, wide: m.matmul(a, a, preferred_element_type=wide),
    "vectors": lambda m, a, wide: m.matmul(a[0], a, preferred_element_type=wide),
    "einsum": lambda m, a, wide: m.einsum("ij,jk", a, a, preferred_element_type=wide),
    "transpose": lambda m, a, wide: m.einsum("ij->ji", a, preferred_element_type=wide),
    "three": lambda m, a, wide: m.einsum("ij,jk,kl", a, a, a, preferred_element_type=wide),
    "dot_general": lambda m, a, wide: (jaxmp if m is jaxmp else lax).dot_general(a, a, NN, preferred_element_type=wide),
    "linear": lambda m, a, wide: (jaxmp.linear if m is jaxmp else m.matmul)(a, a, preferred_element_type=wide),
}
