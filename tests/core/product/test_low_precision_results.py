"""Further results of fp8 and fp4 products. Without these tests, a result could overflow instead of saturating, an amax
could be one rank's, and a gelu_aux could have a wrong type or scale."""

import bounds
import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import suite
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision_cases import (
    E4M3,
    E5M2,
    E8M0,
    FP4,
    IMPLEMENTATIONS,
    PATTERNS,
    TN,
    by_name,
    make_scale,
    products_of,
    saturated,
    scaled,
    small,
)

import jaxmp
from jaxmp import Epilog, Scaling

# All patterns on "host", and some on its oracle, "xla".
BOTH = [*((case, "host") for case in PATTERNS), *((case, "xla") for case in by_name("ag-data", "rs-data", "ar"))]


@pytest.mark.small("values", of=lambda case, implementation: (case.pattern, case.computes_transposed, implementation))
@pytest.mark.parametrize(("case", "implementation"), BOTH)
def test_float8_results_and_their_global_amax(case, implementation, rng):
    """d and gelu_aux saturate; an amax is the largest value of all ranks before a scale is applied to it."""
    case = case.replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)
    a[-1], b[-1] = 3, -3  # the largest value is on the last rank, and beyond 448
    z = scaled(a, None) @ scaled(b, None).T
    mesh = case.jax_mesh(AxisType.Explicit)
    options = {"preferred_element_type": E4M3, "out_sharding": case.out, "implementation": implementation, **TN}

    @jax.jit
    def program(a, b, two, scale_aux):
        scaling = Scaling(a=two, b=two, d=two, result_amax=True)
        of_gelu = Scaling(a=two, d=two, aux=scale_aux, aux_dtype=E4M3, aux_amax=True, result_amax=True)
        gelu = jaxmp.matmul(a, b, alpha=1 / 16, epilog=Epilog.GELU_AUX, scaling=of_gelu, **options)
        return jaxmp.matmul(a, b, scaling=scaling, **options), gelu

    with jax.set_mesh(mesh):
        specs = (*case.stored, P(), P())
        arrays = (a, b, np.float32(2), np.float32(64))
        (d, more), (y, aux) = program(*(cases.put(x, mesh, spec) for x, spec in zip(arrays, specs, strict=True)))
    assert d.dtype == y.dtype == aux["gelu_aux"].dtype == E4M3
    np.testing.assert_array_equal(np.asarray(d), saturated((8 * z).astype(np.float32), E4M3))
    np.testing.assert_array_equal(np.asarray(aux["gelu_aux"]), saturated((8 * z).astype(np.float32), E4M3))
    assert np.abs(8 * z).max() > 448
    suite.check_replicas("gelu_aux", aux["gelu_aux"])
    assert set(aux) == {"gelu_aux", "gelu_aux_amax", "result_amax"}
    assert more["result_amax"].shape == aux["gelu_aux_amax"].shape == ()
    assert float(more["result_amax"]) == np.abs(4 * z).max()
    assert float(aux["gelu_aux_amax"]) == np.abs(z / 8).max() == -z.min() / 8
    assert float(aux["result_amax"]) < float(aux["gelu_aux_amax"])  # gelu suppresses the negative value


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FP4], ids=lambda dtype: np.dtype(dtype).name)
def test_gelu_of_a_layer(dtype, rng):
    """The epilog's aux is not returned; other layers return the same further results."""
    a, b = small(rng, (128, 128), dtype), small(rng, (128, 128), FP4 if dtype == FP4 else E4M3)
    scale = np.full((128, 8), 1 / 4, E4M3) if dtype == FP4 else np.float32(1 / 4)
    bias = jnp.asarray(small(rng, 128, np.float32), jnp.bfloat16)
    z = a.astype(np.float32) @ b.astype(np.float32).T / 16

    def layer(bias, activation=jax.nn.gelu, **options):
        options = {"scaling": Scaling(a=scale, b=scale), "preferred_element_type": "float32"} | options
        return jaxmp.linear(a, b, bias, activation=activation, transpose_b=True, **options)

    for level in ("run_to_run", "topology"):
        np.testing.assert_allclose(layer(None, determinism=level), jax.nn.gelu(z), rtol=1e-5, atol=1e-5)
    want = jax.grad(lambda bias: jax.nn.gelu(z + bias.astype("float32")[None]).sum())(bias)
    np.testing.assert_array_equal(jax.grad(lambda bias: layer(bias).sum())(bias), want)
    if dtype == E4M3:
        _, more = layer(None, scaling=Scaling(result_amax=True), preferred_element_type=E4M3)
        assert list(more) == ["result_amax"]


def test_amax_in_shard_map_is_that_of_the_group(rng):
    case = by_name("rs-data")[0].replace(transposition="NT", per_shard=(16, 16, 16))
    m, n, k = case.extents
    a, b = small(rng, (m, k), E4M3), small(rng, (n, k), E4M3)

    def body(a, b):
        scaling = Scaling(result_amax=True)
        d, more = jaxmp.matmul_reduce_scatter(a, b, "y", preferred_element_type=E4M3, scaling=scaling, **TN)
        return d, more["result_amax"][None]

    specs = {"in_specs": case.stored, "out_specs": (case.out, P("x"))}
    mapped = jax.shard_map(body, mesh=case.jax_mesh(AxisType.Auto), **specs)
    _, amax = jax.jit(mapped)(a, b)
    halves = np.abs(scaled(a, None) @ scaled(b, None).T).reshape(2, -1)
    np.testing.assert_array_equal(amax, halves.max(1))
    assert [row.operation for row in jaxmp.explain(mapped, quiet=True)(a, b).rows] == ["matmul", "all_reduce"]


@pytest.mark.small("values")
@pytest.mark.parametrize("name", ["ag", "rs", "ar", "ag-transposed"])
@pytest.mark.parametrize("kind", ["mx", "nv"])
def test_block_scaled_results(kind, name, rng):
    case = by_name(name)[0].replace(transposition="NT", per_shard=(128, 128, 128))
    m, n, k = case.extents
    dtype = E4M3 if kind == "mx" else FP4
    a, b = small(rng, (m, k), dtype), small(rng, (n, k), dtype)
    scale_a, scale_b = make_scale(rng, kind, a.shape), make_scale(rng, kind, b.shape)
    want = scaled(a, scale_a) @ scaled(b, scale_b).T
    got = {}
    for implementation in IMPLEMENTATIONS:
        options = {"preferred_element_type": dtype, "implementation": implementation, "alpha": 0.125}
        ((d, more),) = products_of([(case, (a, b, scale_a, scale_b), options)])
        suite.check_replicas(implementation, more["d_out_scale"])
        got[implementation] = np.asarray(d), np.asarray(more["d_out_scale"])
    jax.tree.map(np.testing.assert_array_equal, got["host"], got["xla"])
    stored, scales = got["host"]
    assert scales.dtype == (E8M0 if kind == "mx" else E4M3)
    size = 32 if kind == "mx" else 16
    assert scales.shape == (m, n // size)
    amax = np.abs(want * 0.125).reshape(m, -1, size).max(-1)
    # Half a unit of the type's largest binade, plus the rounding of the scale.
    most = float(ml_dtypes.finfo(dtype).max)
    allowed = np.repeat(amax * (2 * 16 / most if kind == "mx" else (1 / most + 0.0625)), size, axis=1) + 1e-6
    bounds.judge(f"{kind} blocks", scaled(stored, scales), want * 0.125, allowed)


EPILOGS = [Epilog.BIAS, Epilog.RELU, Epilog.RELU_BIAS, Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS]


@pytest.mark.small("values", of=lambda out, epilog, implementation: (out, (epilog, implementation)))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("epilog", EPILOGS, ids=lambda e: e.name)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float8_e4m3fn"])
def test_epilogs_and_c(out, epilog, implementation, rng):
    side = {"float32": jnp.bfloat16, "float8_e4m3fn": jnp.float16}.get(out, jnp.dtype(out))
    c_dtype = jnp.float32 if out == "float32" else side
    a, b = small(rng, (32, 64), E4M3), small(rng, (48, 64), E4M3)
    c, bias = jnp.asarray(small(rng, (32, 48), np.float32), c_dtype), jnp.asarray(small(rng, 48, np.float32), side)
    row = {} if epilog == Epilog.RELU else {"epilog_inputs": {"bias": bias}}
    d = jaxmp.matmul(
        a, b, c, alpha=0.25, beta=0.5, epilog=epilog, preferred_element_type=out, implementation=implementation,
        scaling=Scaling(a=jnp.float32(2), c=jnp.float32(2)), **TN, **row,
    )  # fmt: skip
    d, aux = d if isinstance(d, tuple) else (d, {})
    z = 0.5 * scaled(a, None) @ scaled(b, None).T + np.asarray(c).astype(np.float64)
    z = z + (np.asarray(bias).astype(np.float64) if row else 0)
    if epilog == Epilog.GELU_AUX_BIAS:
        judge_gelu(d, z, out)
        # Sums of small integers are exact; if the result is float8, the aux has the type of c.
        want = z.astype(np.float32).astype(side if out == "float8_e4m3fn" else jnp.dtype(out))
        assert aux["gelu_aux"].dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(aux["gelu_aux"]), want)
        return
    want = z if epilog == Epilog.BIAS else np.maximum(z, 0)
    np.testing.assert_array_equal(np.asarray(d), saturated(want.astype(np.float32), np.dtype(jnp.dtype(out))))


def judge_gelu(d, z, out):
    """Judges d against gelu of the exact z, rounded to a type with subnormal numbers, and saturated."""
    want = z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2
    want = np.clip(want, -float(jnp.finfo(out).max), float(jnp.finfo(out).max))
    finest = float(jnp.finfo(out).smallest_subnormal) / 2
    bounds.judge("gelu", d, want, 8 * (bounds.unit_roundoff(out) * np.abs(want) + 2.0**-24 * (1 + np.abs(z))) + finest)


@pytest.mark.parametrize("c_dtype", [None, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_gelu_aux_of_a_float8_result_has_the_type_of_c(out, c_dtype, rng):
    a, b = small(rng, (32, 64), E4M3), small(rng, (48, 64), E5M2)
    c = None if c_dtype is None else jnp.asarray(small(rng, (32, 48), np.float32), c_dtype)
    z = scaled(a, None) @ scaled(b, None).T / 8 + (0 if c is None else np.asarray(c).astype(np.float64))
    for implementation in IMPLEMENTATIONS:
        options = {"preferred_element_type": out, "implementation": implementation, "epilog": Epilog.GELU_AUX}
        options |= {} if c is None else {"c": c, "beta": 1.0}
        d, more = jaxmp.matmul(a, b, alpha=0.125, **options, **TN)
        judge_gelu(d, z, out)
        np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), z.astype(c_dtype or np.float16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gelu_aux_beside_a_block_scaled_result(implementation, rng):
    a, b = small(rng, (128, 128), E4M3), small(rng, (256, 128), E4M3)
    scale_a, scale_b = make_scale(rng, "mx", a.shape), make_scale(rng, "mx", b.shape)
    z = scaled(a, scale_a) @ scaled(b, scale_b).T / 8
    d, more = jaxmp.matmul(
        a, b, alpha=0.125, scaling=Scaling(a=scale_a, b=scale_b), preferred_element_type=E4M3,
        epilog=Epilog.GELU_AUX, implementation=implementation, **TN,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), z.astype(np.float16))
    want = z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2
    amax = np.repeat(np.abs(want).reshape(128, -1, 32).max(-1), 32, axis=1)
    bounds.judge("blocks", scaled(d, more["d_out_scale"]), want, amax * (2 * 16 / 448) + 2.0**-20)


def test_partitioner_with_a_float8_aux(rng):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    a, b = small(rng, (64, 64), E4M3), small(rng, (32, 64), E4M3)
    rows = NamedSharding(mesh, P("x", None))
    options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX}
    options |= {"scaling": Scaling(aux=jnp.float32(0.5), aux_dtype=E4M3, aux_amax=True)}
    _, more = jax.jit(lambda a, b: jaxmp.matmul(a, b, **options, **TN))(
        jax.device_put(a, rows), jax.device_put(b, NamedSharding(mesh, P()))
    )
    z = scaled(a, None) @ scaled(b, None).T
    np.testing.assert_array_equal(np.asarray(more["gelu_aux"]), saturated((z / 2).astype(np.float32), E4M3))
    assert float(more["gelu_aux_amax"]) == np.abs(z).max()


def test_float8_aux_under_vmap(rng):
    a, b = small(rng, (2, 32, 64), E4M3), small(rng, (64, 64), E4M3)
    options = {"preferred_element_type": E4M3, "epilog": Epilog.GELU_AUX, **TN}
    options |= {"scaling": Scaling(aux_dtype=E4M3, aux_amax=True)}
    d, more = jax.jit(jax.vmap(lambda a: jaxmp.matmul(a, b, **options)))(a)
    for i, x in enumerate(a):
        d_of_row, more_of_row = jaxmp.matmul(x, b, **options)
        np.testing.assert_array_equal(np.asarray(d[i]), np.asarray(d_of_row))
        np.testing.assert_array_equal(np.asarray(more["gelu_aux"][i]), np.asarray(more_of_row["gelu_aux"]))
        assert more["gelu_aux_amax"][i] == np.abs(scaled(x, None) @ scaled(b, None).T).max()
