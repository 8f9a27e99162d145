"""Numerics beyond the table (test_table.py): long contractions, results wider than operands, types of operands and
scalars, and the devices of a product. These tests would show a wrong accumulator, a narrowed partial sum, or a scalar
that widens the result."""

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxmp
from jaxmp import Epilog

EXPLICIT = modes.BY_ID["explicit"]


def placed(case, *arrays):
    return [EXPLICIT.put(case, x, s) for x, s in zip(arrays, (*case.stored, case.out, case.out), strict=False)]


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_a_wider_result_and_its_gradients_are_rounded_once(case, dtype, implementation, rng):
    """Integer operands give sums that a float32 result holds; gradients have the operands' type."""
    case = case.replace(per_shard=(3, 5, 64), dtype=dtype)
    a, b = (9 * x for x in case.integers(rng))
    w = rng.integers(-3, 4, case.extents[:2]).astype(np.float32)
    with EXPLICIT.scope(case):
        f = EXPLICIT.product(case, preferred_element_type=jnp.float32, implementation=implementation)
        program = lambda a, b, w: (f(a, b), *jax.vjp(f, a, b)[1](w))  # noqa: E731
        results = EXPLICIT.run(program, *placed(case, a, b, w))
    a, b = cases.wide(a), cases.wide(b)
    for got, want, kind in zip(results, (a @ b, w @ b.T, a.T @ w), ("float32", dtype, dtype), strict=True):
        assert got.dtype == kind
        np.testing.assert_array_equal(got, want.astype(jnp.dtype(kind)))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_python_scalars_do_not_promote(dtype, implementation, rng):
    with jax.enable_x64(dtype in cases.NEEDS_X64):
        a, b, c = (jnp.asarray(cases.normal(rng, (4, 4), dtype)) for _ in range(3))
        for alpha, beta in ((2, 3), (0.5, 0.25), (np.float64(0.5), np.int32(2))):
            d = jaxmp.matmul(a, b, c, alpha=alpha, beta=beta, implementation=implementation)
            assert d.dtype == dtype
            wide = [cases.wide(x) for x in (a, b, c)]
            want = alpha * (wide[0] @ wide[1]) + beta * wide[2]
            size = alpha * np.abs(wide[0]) @ np.abs(wide[1]) + beta * np.abs(wide[2])
            allowed = 8 * bounds.unit_roundoff(dtype) * size
            bounds.judge(f"{dtype} {alpha} {beta}", d, want, allowed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_scalars_of_any_type_leave_that_of_the_result(dtype, rng):
    case = cases.BY_NAME["rs-data"].replace(per_shard=(3, 5, 2), dtype=dtype)
    a, b = case.integers(rng)
    c = rng.integers(-3, 4, case.extents[:2]).astype(a.dtype)
    with EXPLICIT.scope(case):
        x = placed(case, a, b, c)
        want = EXPLICIT.run(EXPLICIT.product(case, alpha=2, beta=-3), *x)
        f = jax.jit(lambda alpha, beta, *x: EXPLICIT.product(case, alpha=alpha, beta=beta)(*x))
        for scalar_type in (jnp.float32, jnp.int32, jnp.bfloat16):
            got = f(jnp.asarray(2, scalar_type), jnp.asarray(-3, scalar_type), *x)
            assert (got.dtype, got.sharding) == (want.dtype, want.sharding)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_scalars_are_rounded_as_the_accumulator_the_result_once(rng):
    """With bfloat16 operands, alpha stays float32, and so does the product that it scales."""
    a, b = (rng.standard_normal((32, 32)).astype(jnp.bfloat16) for _ in range(2))
    alpha = np.float32(1 + 2**-12)
    d = jax.jit(lambda a, b, alpha: jaxmp.matmul(a, b, alpha=alpha))(a, b, alpha)
    assert d.dtype == jnp.bfloat16
    a, b = cases.wide(a), cases.wide(b)
    want = float(alpha) * (a @ b)
    allowed = 1.001 * bounds.unit_roundoff("bfloat16") * np.abs(want)
    allowed += bounds.PRODUCT * bounds.unit_roundoff("float32") * (np.abs(a) @ np.abs(b))
    bounds.judge("bfloat16", d, want, allowed)


@pytest.mark.parametrize("case", cases.by_id([cases.BY_NAME[name] for name in ("local", "ag-data", "ar-data", "rs")]))
def test_vmap_and_scan_over_scalars(case, rng):
    case = case.replace(per_shard=(4, 4, 4))
    a, b = case.integers(rng)
    scalars = np.arange(1.0, 4.0, dtype=np.float32)
    with EXPLICIT.scope(case):
        x = placed(case, a, b, a @ b, a @ b)

        def scaled(alpha):
            return EXPLICIT.product(case, alpha=alpha, beta=alpha)(*x[:3])

        got = jax.jit(jax.vmap(scaled))(scalars)
        total, _ = jax.jit(lambda s: jax.lax.scan(lambda c, alpha: (c + scaled(alpha), None), x[3], s))(scalars)
        slopes = jax.jit(jax.vmap(jax.grad(lambda alpha: jnp.sum(scaled(alpha)))))(scalars)
    want = 2 * np.asarray(a @ b)
    np.testing.assert_array_equal(np.asarray(got), scalars[:, None, None] * want)
    np.testing.assert_array_equal(np.asarray(total), a @ b + 6 * want)
    np.testing.assert_array_equal(np.asarray(slopes), np.full(3, want.sum()))


def test_explain_says_what_a_traced_scalar_changes():
    a, alpha = jax.ShapeDtypeStruct((4, 4), "bfloat16"), jax.ShapeDtypeStruct((), "float32")
    (row,) = jaxmp.explain(lambda a, alpha: jaxmp.matmul(a, a, alpha=alpha, epilog=Epilog.GELU))(a, alpha).rows
    assert row.why.endswith("; alpha traced, so scaling, c and epilog follow the call")
    assert row.dtypes == "bfloat16 x bfloat16 -> float32"
    (row,) = jaxmp.explain(lambda a: jaxmp.matmul(a, a, alpha=2.0, epilog=Epilog.GELU))(a).rows
    assert (row.why, row.epilog) == ("CPU devices of one process", "GELU"), "a number stays in the call"


@pytest.mark.small("values")
@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["rs", "ar", "grid"])
def test_a_product_is_where_its_operands_are(name, axis_type, is_jitted, rng):
    """No `jax.set_mesh` sets the meshes; they have one shape but other devices, and are used in turn and again."""
    case = cases.BY_NAME[name].replace(per_shard=(2, 3, 4))
    axes, out = dict(case.mesh), case.out if axis_type == AxisType.Explicit else None

    def product_and_gradients(a, b):
        d, transposed = jax.vjp(lambda a, b: jaxmp.matmul(a, b, out_sharding=out), a, b)
        return d, *transposed(d)

    program = jax.jit(product_and_gradients) if is_jitted else product_and_gradients
    devices = jax.devices()[:8]
    for order in (devices, devices[::-1], devices[2:] + devices[:2], devices):
        mesh = Mesh(np.array(order[: case.ndevices]).reshape(*axes.values()), axes, axis_types=(axis_type,) * len(axes))
        a, b = case.integers(rng)
        results = program(*(cases.put(x, mesh, spec) for x, spec in zip((a, b), case.stored, strict=True)))
        d = a @ b
        for result, want in zip(results, (d, d @ b.T, a.T @ d), strict=True):
            assert list(result.sharding.mesh.devices.flat) == list(mesh.devices.flat)
            for shard in result.addressable_shards:
                np.testing.assert_array_equal(shard.data, want[shard.index])
