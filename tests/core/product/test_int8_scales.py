"""Products of int8 times scales of rows and columns. Without these tests, a scale could reach another row if an operand
is stored transposed, if ranks share the sums or if a batch folds; sums could be rounded before the last rank's sum; a
bias or an activation could be applied before the scales."""

import functools
import itertools

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from low_precision_cases import (
    F32,
    IMPLEMENTATIONS,
    PATTERNS,
    by_name,
    make_scale,
    powers,
    products_of,
    scaled,
    small,
    specs_of_scales,
)

import jaxmp
from jaxmp import Epilog, Scaling, testing
from jaxmp._src.core.spec.epilogs import RULES

KINDS = (("rows", "rows"), ("rows", "scalar"), ("none", "rows"), ("scalar", "scalar"))
WAYS = modes.pairs(modes.MODES, by_name("local", "ag", "rs", "ar", "grid", "ag-transposed", "rs-transposed"))


def drawn(case, kinds, rng):
    """Returns stored operands, their scales, and the product; scales are powers of two, so every step is exact."""
    (m, n, k), values = case.extents, functools.partial(rng.integers, -128, 128, dtype=np.int8)
    a, b = values((m, k)), values((k, n))
    scales = [make_scale(rng, kind, (rows, k)) for kind, rows in zip(kinds, (m, n), strict=True)]
    want = (scaled(a, scales[0]) @ scaled(b.T, scales[1]).T).astype(np.float32)
    stored = [np.ascontiguousarray(x.T) if t == "T" else x for x, t in zip((a, b), case.transposition, strict=True)]
    return *stored, *scales, want


@pytest.mark.parametrize("case", [*PATTERNS, *by_name("gather-a", "gather-b", "grid-2x4")], ids=lambda case: case.name)
def test_every_scale_reaches_its_row(case, rng):
    options = ({}, {"implementation": "xla"}, {"determinism": "topology"})
    options += ({"determinism": "batch", "implementation": "xla"},)
    calls, wanted = [], []
    for (i, transposition), (j, each) in itertools.product(enumerate(cases.TRANSPOSITIONS), enumerate(options)):
        if case.name == "grid-2x4" and "implementation" in each:  # only hostmp multiplies this
            continue
        for kinds in {KINDS[0], KINDS[(i + j) % len(KINDS)]}:
            stored = case.replace(transposition=transposition, per_shard=(3, 5, 7))
            *operands, want = drawn(stored, kinds, rng)
            calls.append((stored, operands, each))
            wanted.append((want, f"{stored.id} {kinds} {each}"))
    for d, (want, name) in zip(products_of(calls), wanted, strict=True):
        assert d.dtype == jnp.float32
        testing.assert_bitwise_equal(d, want, name)


@pytest.mark.small("values")
@pytest.mark.parametrize(("mode", "case"), WAYS)
def test_every_way_to_call(mode, case, rng):
    case = case.replace(transposition="NT", per_shard=(3, 5, 4))
    in_shard_map = mode.id.startswith("shard_map")
    a, b, s, t, want = drawn(case, KINDS[3 if in_shard_map else 0], rng)
    bias, c = small(rng, want.shape[1], np.float32), small(rng, want.shape, np.float32)
    want = np.maximum(2 * want - c + bias, 0)
    options = {"epilog": Epilog.RELU_BIAS, "alpha": 2.0, "beta": -1.0, "scaling": Scaling(a=s, b=t)}
    with mode.scope(case):
        product = mode.product(case, **options)
        specs = *case.stored, case.out, case.spec_of("bias")
        d = mode.run(product, *(mode.put(case, x, spec) for x, spec in zip((a, b, c, bias), specs, strict=True)))
    np.testing.assert_array_equal(d, want)


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numerics(implementation, out, rng):
    """Sums exceed float32's integers and no scaled product is exact; only scaling and storing may round."""
    a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((37, 3000), (3000, 21)))
    s, t = (rng.uniform(1e-4, 1e-3, rows).astype(np.float32) for rows in (37, 21))
    c, bias = (rng.standard_normal(shape).astype(out) for shape in ((37, 21), 21))
    d = jaxmp.matmul(
        a, b, c, alpha=0.7, beta=1.3, epilog=Epilog.BIAS, epilog_inputs={"bias": bias}, scaling=Scaling(a=s, b=t),
        preferred_element_type=out, implementation=implementation,
    )  # fmt: skip
    assert d.dtype == out
    terms = [0.7 * s[:, None].astype(float) * t * (a.astype(np.int64) @ b), 1.3 * c.astype(float), bias.astype(float)]
    terms[2] = np.broadcast_to(terms[2], d.shape)
    u, u_out = bounds.unit_roundoff("float32"), 0 if out == "float32" else bounds.unit_roundoff(out)
    bounds.judge(f"{implementation} {out}", d, sum(terms), 4 * u * sum(map(abs, terms)) + u_out * abs(sum(terms)))


@pytest.mark.parametrize("epilog", [epilog for epilog, row in RULES.items() if not row.gradient], ids=lambda e: e.name)
def test_epilogs_are_those_of_wide_operands(epilog, rng):
    case = cases.BY_NAME["local"].replace(mesh=(), per_shard=(9, 21, 4))
    a, b, s, t, _ = drawn(case.replace(a=P(None, None), b=P(None, None), out=P(None, None)), KINDS[0], rng)
    wide_a, wide_b = a * s[:, None], b * t
    _, aux = jaxmp.matmul(wide_a, wide_b, epilog=Epilog.GELU_AUX if "GELU" in epilog.name else Epilog.RELU_AUX)
    given = aux | {"bias": small(rng, 21, np.float32)}
    options = {"epilog": epilog, "epilog_inputs": {name: given[name] for name in RULES[epilog].inputs}}
    want = jaxmp.matmul(wide_a, wide_b, **options)
    for implementation in IMPLEMENTATIONS:
        got = jaxmp.matmul(a, b, scaling=Scaling(a=s, b=t), implementation=implementation, **options)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if implementation == "host" or "GELU" not in epilog.name:
                testing.assert_bitwise_equal(x, y)
            else:
                bounds.judge(epilog.name, x, y, 1e-6 * np.abs(y) + 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_nothing_to_multiply(shape, implementation):
    m, n, k = shape
    operands = np.ones((m, k), np.int8), np.ones((k, n), np.int8)
    scaling = Scaling(a=np.full(m, 2, np.float32), b=np.full(n, 3, np.float32))
    bias = {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": np.ones(n, np.float32)}}
    d = jaxmp.matmul(*operands, scaling=scaling, implementation=implementation, **bias)
    np.testing.assert_array_equal(d, np.ones((m, n), np.float32))


def test_gradients_are_those_of_decoded_operands(rng):
    case = cases.BY_NAME["rs"].replace(transposition="TN", per_shard=(2, 3, 5))
    m, n, _ = case.extents
    a, b, s, t, _ = drawn(case, KINDS[0], rng)
    a, b = a % 4, b % 4  # small, so that gradients are exact, too
    c, bias, w = small(rng, (m, n), np.float32), small(rng, n, np.float32), small(rng, (m, n), np.float32)
    mesh, options = case.jax_mesh(), {"beta": 2.0, "epilog": Epilog.RELU_BIAS}

    def ours(s, t, c, bias, a, b, w):
        given = {"scaling": Scaling(a=s, b=t), "epilog_inputs": {"bias": bias}, "out_sharding": case.out}
        d = jaxmp.matmul(a, b, c, **given, **case.transpose, **options)
        return jnp.sum(d * w)

    def plain(s, t, c, bias, a, b, w):
        z = (a.astype(np.float32) * s[None]).T @ (b.astype(np.float32) * t[None]) + 2 * c + bias[None]
        return jnp.sum(jax.nn.relu(z) * w)

    want = jax.grad(plain, (0, 1, 2, 3))(s, t, c, bias, a, b, w)
    with jax.set_mesh(mesh):
        specs = (*specs_of_scales(case, (s, t)), case.out, case.spec_of("bias"), *case.stored, case.out)
        placed = [cases.put(x, mesh, spec) for x, spec in zip((s, t, c, bias, a, b, w), specs, strict=True)]
        got = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(*placed)
        (of_a,) = jax.grad(ours, (4,), allow_int=True)(*placed)
    assert of_a.dtype == jax.dtypes.float0
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_vmap_folds_rows_with_their_scales(rng):
    x, w = rng.integers(-128, 128, (3, 5, 8), np.int8), rng.integers(-128, 128, (3, 8, 6), np.int8)
    s, t = powers(rng, (3, 5)), powers(rng, (3, 6))

    def product(x, w, s, t):
        return jaxmp.linear(x, w, scaling=Scaling(a=s, b=t))

    def want(x, w, s, t):
        return (x.astype(np.int32) @ w.astype(np.int32)).astype(np.float32) * s[:, None] * t[None]

    for axes in ((0, None, 0, None), (0, None, None, None), (0, 0, 0, 0), (None, 0, None, 0), (None, None, 0, None)):
        given = [v if axis == 0 else v[0] for v, axis in zip((x, w, s, t), axes, strict=True)]
        batched = jax.vmap(product, axes)
        np.testing.assert_array_equal(jax.jit(batched)(*given), jax.vmap(want, axes)(*map(jnp.asarray, given)))
        is_folded = axes[:2] == (0, None)
        assert is_folded <= ("scan" not in str(jax.make_jaxpr(batched)(*given)))
    d = jaxmp.matmul(x, w[0], scaling=Scaling(a=s, b=t[0]))  # leading dimensions
    np.testing.assert_array_equal(d, jax.vmap(want, (0, None, 0, None))(*map(jnp.asarray, (x, w[0], s, t[0]))))


def test_a_quantised_layer_is_one_call(rng, capsys):
    x, w = rng.integers(-128, 128, (6, 16), np.int8), rng.integers(-128, 128, (16, 8), np.int8)
    s, t, bias = powers(rng, (6,)), powers(rng, (8,)), small(rng, 8, jnp.bfloat16)
    layer = functools.partial(jaxmp.linear, preferred_element_type=jnp.bfloat16)
    z = (x.astype(np.int32) @ w.astype(np.int32)).astype(np.float32) * s[:, None] * t + bias.astype(np.float32)
    for activation, want in (("relu", np.maximum(z, 0)), ("silu", jax.nn.silu(jnp.asarray(z))), (None, z)):
        d = layer(x, w, bias, activation=activation, scaling=Scaling(a=s, b=t))
        np.testing.assert_array_equal(np.asarray(d), np.asarray(want, jnp.bfloat16))
    (row,) = jaxmp.explain(lambda s, t: layer(x, w, bias, activation="relu", scaling=Scaling(a=s, b=t)))(s, t).rows
    capsys.readouterr()
    assert row.dtypes == "int8 x int8 -> bfloat16, scales outer_vec_fp32 x outer_vec_fp32"
    assert (row.accumulator, row.epilog) == ("int32", "RELU_BIAS")


@pytest.mark.parametrize("name", ["ag", "rs", "ar-data", "grid", "ag-transposed", "rs-transposed"])
def test_bits_do_not_know_the_mesh(name, rng):
    """Scales, c and the bias need rounding; the integer sums are exact on any mesh."""
    case = cases.BY_NAME[name].replace(transposition="TN", per_shard=(5, 3, 40))
    a, b, _, _, want = drawn(case, KINDS[0], rng)
    s, t, c, bias = (rng.standard_normal(n).astype(np.float32) for n in (*want.shape, want.shape, want.shape[1]))

    def program(a, b, s, t, c, bias, **where):
        options = {"alpha": 0.7, "beta": 1.3, "epilog": Epilog.GELU_BIAS, "epilog_inputs": {"bias": bias}}
        options |= {"scaling": Scaling(a=s, b=t), "determinism": "topology", **F32}
        return jaxmp.matmul(a, b, c, **options, **case.transpose, **where)

    want, mesh = program(a, b, s, t, c, bias), case.jax_mesh()
    with jax.set_mesh(mesh):
        specs = (*case.stored, *specs_of_scales(case, (s, t)), case.out, case.spec_of("bias"))
        placed = [cases.put(x, mesh, spec) for x, spec in zip((a, b, s, t, c, bias), specs, strict=True)]
        for implementation in (None, "xla"):
            got = jax.jit(functools.partial(program, out_sharding=case.out, implementation=implementation))(*placed)
            testing.assert_bitwise_equal(got, want)
