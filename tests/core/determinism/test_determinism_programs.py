"""The levels of docs/determinism.md in programs: in the key of a plan, in `explain`, in the types of values.

Without these tests, a plan of one level could serve another, and a program of floats could contain a double.
"""

import functools
import logging
import re

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from cases import ACCUMULATORS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog, testing
from jaxmp._src.platform.jax_internals import jax_compat

pytestmark = pytest.mark.usefixtures("x64")
DTYPES = testing.DTYPES
LEVELS = testing.LEVELS


def test_the_level_is_part_of_the_key():
    a, b = jnp.ones((3, 5), "float32"), jnp.ones((5, 2), "float32")
    jaxmp.plan_cache_clear()
    jax.clear_caches()
    for misses, level in enumerate(("run_to_run", *LEVELS, "batch"), 1):
        jaxmp.matmul(a, b, determinism=level)
        assert jaxmp.plan_cache_info()["misses"] == min(misses, 3)


@pytest.mark.parametrize("level", ["run_to_run", *LEVELS])
def test_explain_names_the_level_and_what_keeps_it(level):
    a, b = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    for implementation in testing.IMPLEMENTATIONS:
        explained = jaxmp.explain(functools.partial(jaxmp.matmul, determinism=level, implementation=implementation))(
            a, b
        )
        (row,) = explained.rows
        assert row.determinism == level
        assert ("sum over k in ascending order" in row.algorithm) == (level != "run_to_run")
        assert (f" {level} " in str(explained)) == (level != "run_to_run")


def test_explain_counts_what_xla_gathers_for_the_level():
    mesh = cases.BY_NAME["rs"].jax_mesh(AxisType.Auto)
    a, b = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    for out, moved in ((P("y", None), 3 * (64 * 8 // 4 + 8 * 16) * 4), (P(None, None), 3 * (64 * 8 + 8 * 16) * 4)):
        options = {"determinism": "batch", "implementation": "xla", "mesh": mesh, "out_sharding": out}
        call = functools.partial(jaxmp.matmul, in_shardings=(P(None, "y"), P("y", None)), **options)
        (row,) = jaxmp.explain(call)(a, b).rows
        assert row.bytes_moved == moved
        assert row.algorithm.startswith("each rank gathers what its part of d needs; ")


def test_explain_names_what_the_bits_cost_beside_the_calls():
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    level = {"determinism": "topology", "mesh": mesh}
    a, b = jax.ShapeDtypeStruct((4, 8, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    columns = {"in_shardings": (P(None, None, "y"), P("y", None)), "out_sharding": P(None, None, "y")}
    *moved, row = jaxmp.explain(functools.partial(jaxmp.matmul, **columns, **level))(a, b).rows
    assert [(each.operation, each.bytes_moved) for each in moved] == [
        ("all_gather", 4 * 8 * 16 * 4),
        ("all_to_all", 16 * 16 * 4 // 2),
    ]
    assert all("lets the call apply its own epilog" in each.why for each in moved)
    assert (row.operation, row.pattern) == ("matmul", "local")

    sequence = functools.partial(
        jaxmp.matmul, in_shardings=(P(None, "x", None), P()), out_sharding=P(None, "x", None), **level
    )
    gradient = jax.grad(lambda b, a: jnp.sum(sequence(a, b)))
    *moved, row = jaxmp.explain(gradient)(b, a).rows
    assert [each.operation for each in moved] == ["all_gather"] * 2
    assert all("in the order of the global array" in each.why for each in moved)
    assert row.pattern == "all_reduce"


IN_STABLEHLO = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}
COMPUTE = {"float32": "32F", "float64": "64F", "complex64": "32F", "complex128": "64F"}
WIDTHS = [(dtype, is_wide) for dtype in DTYPES for is_wide in (False, True) if is_wide or dtype not in cases.NEEDS_X64]
CALLS = [
    *modes.pairs([modes.BY_ID["explicit"]], [cases.BY_NAME[name] for name in ("ar-data", "rs-transposed")]),
    *modes.pairs([modes.BY_ID[name] for name in ("shard_map", "partitioner")], [cases.BY_NAME["ar-data"]]),
    *modes.pairs([modes.BY_ID["no-mesh"]], [cases.BY_NAME["local"]]),
]


def inexact_types(jaxpr) -> set[str]:
    """Returns the names of all floating types in a jaxpr and in its inner jaxprs."""
    found = {v.aval.dtype for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")}
    found = {dtype.name for dtype in found if jnp.issubdtype(dtype, jnp.inexact)}
    return found.union(*(inexact_types(sub) for eqn in jaxpr.eqns for sub in jax_compat.subjaxprs(eqn.params)))


def tensor_types(text: str) -> set[str]:
    """Returns the floating element types in a StableHLO module, without our calls' attributes (64-bit)."""
    values = re.sub(r"backend_config = \{[^{}]*\}", "", text)
    return set(re.findall(r"tensor<(?:\d+x)*(b?f\d+|complex<f\d+>)>", values))


@pytest.mark.small("values", of=lambda mode, case, dtype, is_wide: ((mode, case), (dtype, is_wide)))
@pytest.mark.parametrize(("dtype", "is_wide"), WIDTHS, ids=lambda value: {False: "x32", True: "x64"}.get(value, value))
@pytest.mark.parametrize(("mode", "case"), CALLS)
def test_no_type_appears_but_the_operands_and_the_accumulators(mode, case, dtype, is_wide):
    """Under x64 a Python scalar easily becomes a double; checks forward and gradients, at every level."""
    case = case.replace(per_shard=(4, 4, 4), dtype=dtype)
    allowed = {dtype, ACCUMULATORS[dtype]}
    rng = np.random.default_rng(0)
    m, n, _ = case.extents
    arrays = (*case.values(rng), cases.normal(rng, (m, n), dtype), cases.normal(rng, (n,), dtype))
    with jax.enable_x64(is_wide), mode.scope(case):
        operands = [mode.put(case, x, s) for x, s in zip(arrays, (*case.stored, case.out, P(case.out[1])), strict=True)]
        for level in ("run_to_run", "topology"):
            epilog = Epilog.BIAS if dtype.startswith("complex") else Epilog.GELU_BIAS
            f = mode.product(case, alpha=0.3, beta=2, epilog=epilog, determinism=level)

            def gradients(*operands, f=f):
                d, pullback = jax.vjp(f, *operands)
                return pullback(d)

            for program in (f, gradients, jax.checkpoint(f)):
                traced = jax.jit(program).trace(*operands)
                text = traced.lower().as_text()
                assert inexact_types(traced.jaxpr.jaxpr) <= allowed
                assert tensor_types(text) <= {IN_STABLEHLO[name] for name in allowed}
                assert set(re.findall(r'compute = "(\w+)"', text)) <= {COMPUTE[ACCUMULATORS[dtype]]}


def test_a_double_that_slips_in_is_found():
    x = jnp.ones(3, "float32")
    traced = jax.jit(jax.checkpoint(lambda x: (x.astype("float64") * 2).astype("float32"))).trace(x)
    assert inexact_types(traced.jaxpr.jaxpr) == {"float32", "float64"}
    assert tensor_types(traced.lower().as_text()) == {"f32", "f64"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_explain_and_the_log_name_the_accumulator(dtype, capfd, caplog):
    a, b = jax.ShapeDtypeStruct((4, 6), dtype), jax.ShapeDtypeStruct((6, 5), dtype)
    (row,) = jaxmp.explain(jaxmp.matmul)(a, b).rows
    assert row.accumulator == ACCUMULATORS[dtype]
    short = ACCUMULATORS[dtype].replace("float", "f").replace("complex", "c")
    assert re.search(rf"\b{short}\b", capfd.readouterr().out)
    with caplog.at_level(logging.DEBUG, "jaxmp.plan"):
        jaxmp.plan_cache_clear()
        jax.jit(jaxmp.matmul).lower(a, b).compile()
    assert f"compute={COMPUTE[ACCUMULATORS[dtype]]} " in caplog.text
