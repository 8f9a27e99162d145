"""Products of mixed types. Without these tests, a product of bfloat16 with int8, int4 or float8 weights could read them
wrongly, convert all of them first, or lose the wide operand's gradient. Small integers keep sums exact, so results are
compared bitwise."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision_cases import numbers

import jaxmp
from jaxmp._src.core.primitive.primitives import bind
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern

M, K, N = 5, 7, 9  # rows of 4-bit numbers that begin within a byte
BY_VECTORS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")  # kernels decode these by vectors


def product(a, b, **changes):
    """Binds the primitive on one device."""
    wide = low_precision.operand_type(a.dtype, b.dtype)
    return bind(MatmulSpec(**({"out_dtype": wide} | changes)), jnp.asarray(a), jnp.asarray(b))["d"]


def exact(a, b, out):
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(out)


def check_same(x, y):
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))


@pytest.mark.parametrize("wide", low_precision.WIDE)
def test_every_pair_on_either_side_is_exact(wide):
    operands = []
    pairs = [(wide, narrow) for narrow in low_precision.NARROW]
    for i, pair in enumerate((*pairs, *(pair[::-1] for pair in pairs))):
        transpose_a, transpose_b = bool(i % 2), bool(i // 2 % 2)
        a, b = numbers(1, (M, K), pair[0]), numbers(2, (K, N), pair[1])
        operands.append((a, b, a.T if transpose_a else a, b.T if transpose_b else b))

    @jax.jit
    def all_products(stored):
        results = []
        for i, (a, b) in enumerate(stored):
            flags = {"transpose_a": bool(i % 2), "transpose_b": bool(i // 2 % 2)}
            results.append([product(a, b, **flags), product(a, b, **flags, out_dtype=np.dtype("float32"))])
        return results

    for (a, b, *_), results in zip(operands, all_products([each[2:] for each in operands]), strict=True):
        for d in results:
            check_same(d, exact(a, b, d.dtype))


GROUPS = {
    Pattern.ALL_GATHER: (P("x"), P(None, "x"), P(None, "x")),
    Pattern.REDUCE_SCATTER: (P(None, "x"), P("x"), P("x")),
    Pattern.ALL_REDUCE: (P(None, "x"), P("x"), P()),
    Pattern.GRID: (P("x", "y"), P("x", "y"), P("x", "y")),
}


@pytest.mark.parametrize("pattern", GROUPS)
def test_shards_are_read_in_place(pattern):
    """On four devices, parts of 4-bit matrices begin within a byte; with any order of sums and with a fixed one."""
    names = ("x", "y") if pattern == Pattern.GRID else ("x",)
    mesh = jax.make_mesh((2, 2) if pattern == Pattern.GRID else (4,), names)
    group = Group(pattern, tuple(mesh.shape.items()), ("x",), names[1:])
    of_a, of_b, of_d = GROUPS[pattern]
    pairs = [("bfloat16", "int8"), ("int4", "bfloat16"), ("bfloat16", "int4"), ("float32", "float4_e2m1fn")]
    operands = [(numbers(1, (4, 12), x), numbers(2, (12, 4), y)) for x, y in pairs]

    def local(operands):
        specs = [
            MatmulSpec(low_precision.operand_type(a.dtype, b.dtype), group, determinism=level, is_typed=True)
            for level in ("run_to_run", "topology")
            for a, b in operands
        ]
        return [bind(spec, a, b)["d"] for spec, (a, b) in zip(specs, 2 * operands, strict=True)]

    where = NamedSharding(mesh, of_a), NamedSharding(mesh, of_b)
    placed = [tuple(map(jax.device_put, each, where)) for each in operands]
    call = jax.shard_map(local, mesh=mesh, in_specs=([(of_a, of_b)] * len(pairs),), out_specs=of_d)
    for d, (a, b) in zip(jax.jit(call)(placed), 2 * operands, strict=True):
        check_same(d, exact(a, b, d.dtype))


@pytest.mark.parametrize("wide", low_precision.WIDE)
def test_bits_are_those_of_the_wide_type(wide):
    values = np.random.default_rng(2).normal(size=(600, 43)).astype(np.float32)
    weights = [(3 * values).astype(jnp.dtype(narrow)) for narrow in BY_VECTORS]
    a = np.random.default_rng(1).normal(size=(40, 600)).astype(jnp.dtype(wide))
    options = {"determinism": "batch", "out_dtype": np.dtype("float32")}
    run = jax.jit(lambda a, weights: [product(a, b, **options) for b in weights])
    wanted = run(a, [b.astype(a.dtype) for b in weights])
    for rows in (1, 3, 17, 40):
        for d, each in zip(run(a[:rows], weights), wanted, strict=True):
            check_same(d, each[:rows])


@pytest.mark.parametrize("narrow", ["int8", "int4", "float8_e5m2"])
def test_public_functions_make_no_copy_of_weights(narrow):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    a, b = numbers(1, (8, 16), "bfloat16"), numbers(2, (16, 24), narrow)
    on_mesh = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, P(None, "x")), (b, P("x", None)))]
    options = {"preferred_element_type": "float32"}
    matmul = functools.partial(jaxmp.matmul, **options)
    contraction = (((1,), (0,)), ((), ()))
    dot_general = functools.partial(jaxmp.dot_general, dimension_numbers=contraction, out_sharding=P("x"), **options)
    fused = jaxmp.fuse(functools.partial(lax.dot_general, dimension_numbers=contraction, **options))
    with jax.set_mesh(mesh):
        calls = [(dot_general, on_mesh), (functools.partial(matmul, out_sharding=P()), on_mesh)]
        lowered = [jax.jit(run).lower(*operands) for run, operands in calls]
        results = [run(*operands) for run, operands in calls]
    lowered += [jax.jit(run).lower(a, b) for run in (matmul, fused)]
    for program in lowered:
        text = program.as_text() + program.compile().as_text()
        assert "jaxmp_matmul" in text
        assert not re.search(r"stablehlo.convert| convert\(", text)
    for d in [*results, matmul(a, b), jax.jit(fused)(a, b)]:
        check_same(d, exact(a, b, "float32"))
    as_float16 = jax.jit(functools.partial(jaxmp.matmul, preferred_element_type="float16"))  # JAX rounds both to it
    assert "stablehlo.convert" in as_float16.lower(a, b).as_text()


def test_a_rounding_precision_converts_ahead():
    """The host library rounds operands only if both have the same type."""
    a, b = numbers(1, (M, K), "float32"), numbers(2, (K, N), "int4")
    check_same(jax.jit(functools.partial(product, precision="TF32_TF32_F32"))(a, b), exact(a, b, "float32"))


@pytest.mark.parametrize("narrow", ["int8", "int4", "float8_e4m3fn"])
def test_gradient_of_the_wide_operand(narrow):
    """dA = dD @ B^T, again a mixed product; a float8 operand has a gradient of its own type."""
    a, b, ct = numbers(1, (M, K), "bfloat16"), numbers(2, (K, N), narrow), numbers(3, (M, N), "bfloat16")
    d, pull = jax.vjp(lambda a: product(a, b), a)
    check_same(d, exact(a, b, "bfloat16"))
    check_same(pull(ct)[0], exact(ct, b.T, "bfloat16"))
    d, pull = jax.vjp(lambda a: product(b.T, a, transpose_b=True), a)
    check_same(pull(ct.T)[0], exact(ct, b.T, "bfloat16"))
    _, moved = jax.jvp(lambda a: product(a, b), (a,), (a,))
    check_same(moved, exact(a, b, "bfloat16"))
    if narrow == "float8_e4m3fn":
        wanted = exact(a.T, ct, "float32").astype(narrow)
        check_same(jax.vjp(lambda b: product(a, b), b)[1](ct)[0], wanted)


def test_batches():
    """A batch of the wide operand folds; a batch of both operands is one call each, or XLA's product."""
    a, b = numbers(1, (3, M, K), "bfloat16"), numbers(2, (3, K, N), "int4")
    wanted = np.stack([exact(x, y, "bfloat16") for x, y in zip(a, b, strict=True)])
    check_same(jax.jit(jax.vmap(product))(a, b), wanted)
    check_same(jax.jit(jax.vmap(product, (0, None)))(a, b[0])[0], wanted[0])
    check_same(jax.jit(jax.vmap(product, (None, 0)))(a[0], b)[0], wanted[0])


@pytest.mark.parametrize("epilog", ["BIAS", "RELU_AUX_BIAS", "GELU_BIAS", "BGRADB"])
def test_epilogs_are_those_of_the_wide_type(epilog):
    epilog = Epilog[epilog]
    a, b = numbers(1, (8, 16), "bfloat16"), numbers(2, (16, 24), "int8")
    spec = MatmulSpec(np.dtype(jnp.bfloat16), alpha=2.0, beta=0.5, has_c=True, epilog=epilog)
    extra = {"c": numbers(3, (8, 24), "bfloat16")}
    if spec.rule.has_bias:
        extra["bias"] = numbers(4, (24,), "bfloat16")
    run = jax.jit(lambda a, b: bind(spec, a, b, extra))
    for x, y in zip(jax.tree.leaves(run(a, b)), jax.tree.leaves(run(a, b.astype("bfloat16"))), strict=True):
        check_same(x, y)
