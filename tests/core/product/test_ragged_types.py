"""`ragged_dot` of every pair of types against `lax.ragged_dot`, exactly, on small integers. Without these tests, a
result could have another type than with lax, and a narrow operand could be read wrongly."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import low_precision_cases
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import reference

import jaxmp
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.matmul_spec import RESULT_TYPES

TYPES = tuple(dict.fromkeys((*RESULT_TYPES, *low_precision.NARROW)))
SIZES = jnp.array([1, 2])


def numbers(seed, shape, dtype):
    return jnp.asarray(low_precision_cases.numbers(seed, shape, dtype, most=1))


def described(f, *operands):
    """Returns (type, whether it is weak) of each result, or None if f refuses the operands."""
    try:
        results = jax.eval_shape(f, *operands)
    except (TypeError, NotImplementedError):
        return None
    return [(x.dtype, x.weak_type) for x in jax.tree.leaves(results)]


def derivatives(f, x, w, ct):
    if not all(jnp.issubdtype(y.dtype, jnp.inexact) for y in (x, w, ct)):
        return f(x, w)
    d, pull = jax.vjp(f, x, w)
    return d, *pull(ct)


@pytest.mark.small("values")
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("of_w", TYPES[7:] + TYPES[:7])  # rotated, so that few pairs have two equal types
@pytest.mark.parametrize("of_x", TYPES)
def test_pairs(of_x, of_w, standard_promotion, x64):
    x, w = numbers(1, (4, 3), of_x), numbers(2, (2, 3, 3), of_w)
    another = TYPES[(TYPES.index(of_x) + TYPES.index(of_w)) % len(TYPES)]
    for preferred in (None, *TYPES):
        options = {"group_sizes": SIZES, "preferred_element_type": preferred}
        theirs, ours = (functools.partial(f, **options) for f in (lax.ragged_dot, jaxmp.ragged_dot))
        if (wanted := described(theirs, x, w)) is None:
            continue
        assert described(ours, x, w) == wanted, preferred
        if preferred not in (None, another):
            continue
        fused = jaxmp.fuse(theirs)
        assert "ragged_dot_general[" not in str(jax.make_jaxpr(fused)(x, w))
        ct = numbers(3, (4, 3), wanted[0][0].name)
        try:
            want = jax.jit(functools.partial(derivatives, theirs))(x, w, ct)
        except (TypeError, jax.errors.JaxRuntimeError):  # lax lacks some gradients, XLA some results of 4 bits
            continue
        for f in (ours, fused):
            got = jax.jit(functools.partial(derivatives, f))(x, w, ct)
            for i, (mine, their) in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
                assert (mine.dtype, mine.weak_type) == (their.dtype, their.weak_type)
                mine, their = (np.asarray(y).astype(complex) for y in (mine, their))
                # lax fills x with zeros, and cotangents, which float8_e8m0fnu does not have.
                if "e8m0" not in of_x + of_w * (i > 0) and not np.isnan(their).all():
                    np.testing.assert_array_equal(mine, their)


@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "int32")], ids=str)
def test_weak_types(kinds, standard_promotion):
    for are_weak in itertools.product((False, True), repeat=3):
        x, w, sizes = (
            jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak)
            for shape, dtype, is_weak in zip(((4, 3), (2, 3, 3), (2,)), (*kinds, "int32"), are_weak, strict=True)
        )

        def both(f, x, w, sizes):
            of_operands = tuple(i for i, y in enumerate((x, w)) if jnp.issubdtype(y.dtype, jnp.inexact))
            return f(x, w, sizes), jax.grad(lambda x, w: f(x, w, sizes).sum(), of_operands)(x, w)

        mine, theirs = (described(functools.partial(both, f), x, w, sizes) for f in (jaxmp.ragged_dot, lax.ragged_dot))
        assert mine == theirs, are_weak


@pytest.mark.parametrize("narrow", ["int8", "int4", "float8_e5m2"])
def test_a_narrow_matrix_is_decoded_in_the_call(narrow):
    rng, sizes = np.random.default_rng(0), jnp.array([30, 0, 3])
    x = jnp.asarray(rng.normal(size=(40, 301)), jnp.bfloat16)
    w = jnp.asarray(3 * rng.normal(size=(3, 301, 33)), jnp.float32).astype(narrow)
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=sizes, determinism="batch")
    lowered = jax.jit(ours).lower(x, w)
    assert not re.search(r"stablehlo.convert.*bf16| convert\(", lowered.as_text() + lowered.compile().as_text())
    np.testing.assert_array_equal(ours(x, w), ours(x, w.astype(x.dtype)))
    few = jaxmp.ragged_dot(x[31:32], w, jnp.array([0, 0, 1]), determinism="batch")
    np.testing.assert_array_equal(few, ours(x, w)[31:32])


@pytest.mark.parametrize("pair", [("int8", "int8"), ("float8_e4m3fn", "float8_e5m2"), ("bfloat16", "int8")], ids=str)
def test_scales(pair):
    x, w, sizes = numbers(1, (4, 3), pair[0]), numbers(2, (2, 3, 5), pair[1]), jnp.array([1, 2])
    rows, columns = (jnp.exp2(jnp.abs(numbers(seed, shape, "float32"))) for seed, shape in ((3, (4,)), (4, (2, 5))))
    wide = [y.astype(jnp.float32) for y in (x, w)]
    for of_x, of_w in ((rows, columns), (rows, columns[:, 0]), (None, jnp.float32(3)), (jnp.float32(2), None)):
        scale = [jnp.float32(1) if y is None else y for y in (of_x, of_w)]
        whole = jnp.broadcast_to(scale[1] if scale[1].ndim != 1 else scale[1][:, None], columns.shape)
        of_rows = scale[0] if scale[0].ndim == 0 else scale[0][:, None]
        want = reference(wide[0] * of_rows, wide[1] * whole[:, None], sizes)
        for options in ({}, {"preferred_element_type": "bfloat16"}):
            got = jaxmp.ragged_dot(x, w, sizes, scaling=jaxmp.Scaling(a=of_x, b=of_w), **options)
            np.testing.assert_array_equal(got, want.astype(got.dtype))
    bias = columns - 4
    whole = reference(wide[0] * rows[:, None], wide[1] * columns[:, None], sizes) + reference(
        jnp.ones((4, 1)), bias[:, None], sizes
    )
    got = jaxmp.ragged_dot(x, w, sizes, bias=bias, activation="relu", scaling=jaxmp.Scaling(a=rows, b=columns))
    np.testing.assert_array_equal(got, jax.nn.relu(whole))
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(y, NamedSharding(mesh, P("p"))) for y in (x, w))
        got = jaxmp.ragged_dot(x, w, sizes, scaling=jaxmp.Scaling(a=rows, b=columns))
    np.testing.assert_array_equal(got, reference(wide[0] * rows[:, None], wide[1] * columns[:, None], sizes))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_rows_behind_the_groups_are_zero_for_any_scale(value):
    x, w, sizes = numbers(1, (4, 4), "int8"), numbers(2, (2, 4, 5), "int8"), jnp.array([1, 1])
    of_x, of_w = jnp.array([2, 3, value, value], jnp.float32), jnp.ones((2, 5), jnp.float32)

    def ours(of_x, of_w, offset=None):
        return jaxmp.ragged_dot(x, w, sizes, offset, scaling=jaxmp.Scaling(a=of_x, b=of_w))

    want = reference(x.astype("float32"), w.astype("float32"), sizes) * jnp.array([[2.0], [3.0], [0.0], [0.0]])
    of_blocks = jnp.ones((2, 2, 5), jnp.float32)
    for scale in (of_w, of_w[:, 0], of_w[0, 0], of_blocks):
        np.testing.assert_array_equal(ours(of_x, scale), want)
    for scales in ((jnp.float32(value), None), (None, jnp.float32(value))):
        np.testing.assert_array_equal(ours(*scales)[2:], 0)
        np.testing.assert_array_equal(ours(*scales, offset=1)[:1], 0)
    ct_x, ct_w = jax.grad(lambda *y: ours(*y).sum(), (0, 1))(of_x, of_w)
    np.testing.assert_array_equal(ct_x[2:], 0)
    assert jnp.isfinite(jnp.append(ct_x, ct_w)).all()
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w, of_x = (jax.device_put(y, NamedSharding(mesh, P("p"))) for y in (x, w, of_x))
        np.testing.assert_array_equal(jax.jit(ours)(of_x, of_w), want)


@pytest.mark.parametrize("pair", [("int8", "int8"), ("float32", "int4"), ("bfloat16", "uint8")], ids=str)
def test_scales_of_blocks(pair):
    x, w, sizes = numbers(1, (4, 12), pair[0]), numbers(2, (2, 12, 5), pair[1]), jnp.array([1, 2])
    scale, bias = jnp.exp2(numbers(3, (2, 4, 5), "float32")), numbers(4, (2, 5), "float32")

    def ours(x, scale, w=w):
        options = {"bias": bias, "activation": jnp.abs, "scaling": jaxmp.Scaling(b=scale)}
        return jaxmp.ragged_dot(x, w, sizes, preferred_element_type="float32", **options)

    def theirs(x, scale):
        whole = w.astype("float32") * jnp.repeat(scale, 3, axis=1)
        added = reference(jnp.ones((4, 1)), bias[:, None], sizes)
        return jnp.abs(reference(x.astype("float32"), whole, sizes) + added)

    np.testing.assert_array_equal(jax.jit(ours)(x, scale), theirs(x, scale))
    of_floats = (0, 1) if x.dtype != "int8" else 1
    gradients = [jax.jit(jax.grad(lambda *y, f=f: (f(*y) ** 2).sum(), of_floats))(x, scale) for f in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    want = theirs(x, scale)
    with jax.set_mesh(mesh):
        got = ours(*(jax.device_put(y, NamedSharding(mesh, P("p"))) for y in (x, scale, w)))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(NotImplementedError, match=r"^ragged_dot: .*scales of blocks, because XLA would add them"):
        jaxmp.ragged_dot(x, w, sizes, determinism="batch", scaling=jaxmp.Scaling(b=scale))
    with pytest.raises(ValueError, match=r"scaling.b must be float32 of shape .*\(2, 1, 5\), got float32 \(2, 5, 5\)"):
        jaxmp.ragged_dot(x, w, sizes, scaling=jaxmp.Scaling(b=jnp.ones((2, 5, 5))))
