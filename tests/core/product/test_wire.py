"""The width of collectives: data that only moves keeps its type. XLA:CPU widens bfloat16 to float32 and float8 to
float16 in collectives, so a gather of such operands between machines would take several times as long, with right
results. `implementation="xla"` uses the collectives of a job whose processes share no memory."""

import functools
import math
import re

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import modes
import numpy as np
import pytest
from compiled import COLLECTIVE
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from low_precision_cases import SCALE_MODES, place_scaled, sharded_call

from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.sharding import meshes

BITS = {"s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "f32": 32, "s32": 32}
WIDENED = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4"),
)
# XLA's partitioner also gathers results by itself.
CALLS = [
    *modes.pairs([modes.BY_ID[name] for name in ("explicit", "in_shardings", "shard_map")], cases.MATRIX),
    *modes.pairs([modes.BY_ID["partitioner"]], [case for case in cases.MATRIX if not case.gathers]),
]


def moved(program, *args):
    """Returns (bits of an element, elements of the result) of the collectives that only move data, and the results."""
    jitted = jax.jit(program)
    compiled = jitted.lower(*args).compile()
    found = re.findall(rf"= \(?(\w+)\[([\d,]*)\].*? {COLLECTIVE}", compiled.as_text())
    moves = [
        (BITS[name], math.prod(map(int, shape.split(","))))
        for name, shape, kind in found
        if kind not in ("all-reduce", "reduce-scatter")
    ]
    run = compiled if jax.__version_info__ >= (0, 11) else jitted  # JAX 0.10 gives a compiled program no 4-bit arrays
    return moves, run(*args)


def bits_of(dtype):
    return (ml_dtypes.iinfo if "int" in dtype else ml_dtypes.finfo)(dtype).bits


@pytest.mark.small("values", of=lambda mode, case, dtype: (mode, case.pattern, dtype))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("mode", "case"), CALLS)
def test_a_product_and_its_gradients(mode, case, dtype):
    case = case.replace(per_shard=(4, 4, 4), dtype=dtype)
    with mode.scope(case):
        a, b = (mode.put(case, x, s) for x, s in zip(case.values(np.random.default_rng(0)), case.stored, strict=True))
        product = mode.product(case, implementation="xla")

        def loss(a, b):
            return jnp.sum(product(a, b).astype(jnp.float32) ** 2)

        # XLA's partitioner itself moves what a gradient needs.
        found, _ = moved(product if mode.id == "partitioner" else jax.value_and_grad(loss, (0, 1)), a, b)
    assert {bits for bits, _ in found} <= {16}
    assert found or case.pattern in ("local", "all_reduce") or mode.id == "partitioner"


@pytest.mark.small("values")
@pytest.mark.parametrize("scales", [pytest.param(mode, id=mode.id) for mode in SCALE_MODES])
@pytest.mark.parametrize("case", cases.by_id([cases.BY_NAME["ag"], cases.BY_NAME["ag-transposed"]]))
def test_a_product_with_scales(case, scales):
    case = case.replace(per_shard=(scales.unit,) * 3, transposition="NT")
    m, n, k = case.extents
    rng, mesh = np.random.default_rng(0), case.jax_mesh()
    operands = [np.ones(shape, scales.dtype) for shape in ((m, k), (n, k))]
    beside = scales.scales(rng, (m, k), (n, k))

    def program(*given):
        return sharded_call(case, *given, AxisType.Explicit, implementation="xla", preferred_element_type="float32")

    with jax.set_mesh(mesh):
        found, _ = moved(program, *place_scaled(mesh, case, *operands, *beside))
    gathered = 1 if case.computes_transposed else 0
    scale = beside[gathered]
    total = operands[gathered].size * bits_of(scales.dtype.name)
    total += scale.nbytes * 8 if np.ndim(scale) else 0
    assert sum(bits * size for bits, size in found) == total


def forward_and_back(move, x):
    """Returns a linear function's result and its transpose of that result; for integers, x instead of the transpose."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return move(x), x
    y, pullback = jax.vjp(move, x)
    return y, *pullback(y)


RESHARDS = {
    "all-gather": (P("x", "y"), P(None, "y")),
    "all-gather-of-columns": (P("x", "y"), P("x", None)),
    "all-to-all": (P("x", None), P(None, "x")),
    "permute": (P("x", "y"), P("y", "x")),
    "slice": (P("x", None), P("x", "y")),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("is_explicit", [True, False])
@pytest.mark.parametrize("dtype", WIDENED)
def test_reshards_and_their_transposes(dtype, is_explicit):
    mesh = cases.BY_NAME["grid"].jax_mesh(AxisType.Explicit if is_explicit else AxisType.Auto)
    value = np.random.default_rng(0).integers(1, 4, (3, 8, 16)).astype(np.float32).astype(dtype)

    def program(xs):
        results = []
        for x, (have, want) in zip(xs, RESHARDS.values(), strict=True):
            move = functools.partial(meshes.reshard, mesh=mesh, have=have, want=want, is_explicit=is_explicit)
            results += forward_and_back(jax.vmap(move), x)
        return results

    with jax.set_mesh(mesh):
        found, results = moved(program, [cases.put(value, mesh, P(None, *have)) for have, _ in RESHARDS.values()])
        for y in results:
            np.testing.assert_array_equal(y, value)
    assert {bits for bits, _ in found} <= {max(bits_of(dtype), 8)}


@pytest.mark.parametrize("dtype", WIDENED)
def test_gathers_and_exchanges_in_shard_map_and_their_transposes(dtype):
    """The transpose of a gather sums in float32 and rounds once."""
    case = cases.BY_NAME["ag"]
    mesh, value = case.jax_mesh(), np.random.default_rng(0).integers(1, 4, (8, 16)).astype(np.float32).astype(dtype)

    def move(x):
        exchanged = collectives.all_to_all(x, ("y",), 1, 0)
        return collectives.all_gather(collectives.all_to_all(exchanged, ("y",), 0, 1), ("y",), axis=0)

    body = functools.partial(forward_and_back, move)
    with jax.set_mesh(mesh):
        x = cases.put(value, mesh, P("y"))
        program = jax.shard_map(body, mesh=mesh, in_specs=P("y"), out_specs=(P("y"), P("y")))
        found, (whole, ct) = moved(program, x)
    np.testing.assert_array_equal(whole, np.tile(value, (4, 1)))
    if "int" not in dtype:
        np.testing.assert_array_equal(ct, (4 * value.astype(np.float32)).astype(dtype))
    assert {bits for bits, _ in found} <= {max(bits_of(dtype), 8)}


def test_gpus_move_bfloat16_as_it_is():
    case = cases.BY_NAME["ag"]
    mesh = case.jax_mesh()

    def program(x):
        gather = jax.shard_map(lambda x: collectives.all_gather(x, ("y",), axis=0), in_specs=P("y"), out_specs=P("y"))
        return meshes.reshard(gather(x), mesh, P("y"), P(None, "y"), is_explicit=True)

    with jax.set_mesh(mesh):
        traced = jax.jit(program).trace(cases.put(np.ones((8, 16), jnp.bfloat16), mesh, P("y")))
        texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")}
    assert {name: "ui16" in text for name, text in texts.items()} == {"cuda": False, "cpu": True}
