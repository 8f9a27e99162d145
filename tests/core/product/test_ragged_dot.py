"""`ragged_dot` against a loop of `jnp` products, `ragged_dot_general` against lax, exactly, on small integers.
Without these tests, rows could meet another group's matrix, weights of a group without rows could reach the result, and
dimensions could be folded or restored in another order than lax's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ragged import activated, assert_same, derivatives, integers, reference, with_bias

import jaxmp

SIZES = {
    "empty groups": (0, 5, 0, 1),
    "too large": (3, 9, 4, 1),
    "far too large": (2**31 - 1,) * 4,
    "negative": (-3, 4, -1, 2),
}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("kind", SIZES)
def test_sizes(kind, implementation):
    x, w, sizes = integers((8, 3)), integers((4, 3, 5), 1), SIZES[kind]
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), implementation=implementation)
    want = derivatives(lambda x, w: reference(x, w, sizes), x, w)
    assert_same(derivatives(ours, x, w), want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_types_of_sizes(dtype, x64):
    x, w, sizes = integers((300, 2)), integers((3, 2, 2), 1), np.array([100, 50, np.iinfo(dtype).max], dtype)
    ours = jaxmp.ragged_dot(x, w, jnp.array(sizes), jnp.zeros((), dtype))
    assert_same(ours, reference(x, w, np.minimum(sizes.astype(np.uint64), 300)))


BATCHES = [(0, None, None), (None, 0, None), (None, None, 0), (1, 2, None), (1, None, 0), (None, 2, 0), (0, 0, 0)]


@pytest.mark.parametrize("axes", BATCHES)
def test_vmap(axes):
    """Maps cotangents, and takes the cotangents of a map."""
    stored = [s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(((6, 3), (2, 3, 5)), axes[:2], strict=True)]
    x, w = map(integers, stored, (0, 1))
    sizes = jnp.array([[1, 4], [0, 6], [2, 2]] if axes[2] == 0 else [1, 4])

    def looped(f, *operands):
        parts = [
            f(*(y if a is None else jnp.take(y, i, a) for y, a in zip(operands, axes, strict=True))) for i in range(3)
        ]
        return jax.tree.map(lambda *each: jnp.stack(each), *parts)

    def cotangents(product, x, w, sizes):
        d, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return d, *pull(d)

    def of_sum(product):
        return jax.grad(lambda x, w: (product(x, w, sizes) ** 2).sum(), (0, 1))(x, w)

    mapped = jax.vmap(functools.partial(cotangents, jaxmp.ragged_dot), axes)(x, w, sizes)
    assert_same(mapped, looped(functools.partial(cotangents, reference), x, w, sizes))
    assert_same(of_sum(jax.vmap(jaxmp.ragged_dot, axes)), of_sum(functools.partial(looped, reference)))


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_weights_of_a_group_without_rows_reach_nothing(value):
    x, w = integers((6, 4)), integers((3, 4, 5), 1)
    bad, sizes = w.at[1].set(value), jnp.array([3, 0, 2])
    assert_same(jaxmp.ragged_dot(x, bad, sizes), reference(x, w, (3, 0, 2)))
    dx, dw = jax.grad(lambda x, w: jaxmp.ragged_dot(x, w, sizes).sum(), (0, 1))(x, bad)
    assert_same((dx, dw), jax.grad(lambda x, w: reference(x, w, (3, 0, 2)).sum(), (0, 1))(x, w))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64])
def test_bits_of_a_row_are_those_of_the_row_alone(dtype, x64):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(70, 300)), dtype), jnp.asarray(rng.normal(size=(3, 300, 40)), dtype)
    product = functools.partial(jaxmp.ragged_dot, determinism="batch")
    many = product(x, w, jnp.array([9, 0, 60]))
    for row, group in ((0, 0), (8, 0), (9, 2), (40, 2), (68, 2)):
        sizes = jnp.zeros(3, jnp.int32).at[group].set(1)
        assert_same(product(x[row : row + 1], w, sizes), many[row : row + 1])
    assert_same(product(x, w, jnp.array([9, 0, 31]))[:40], many[:40])
    assert_same(jaxmp.matmul(x[9:69], w[2], determinism="batch"), many[9:69])
    # The same rows at another place among other rows; also the gradient in x.
    moved = jnp.concatenate([2 * x[20:33], x[9:40], x[:9]])
    assert_same(product(moved, w, jnp.array([0, 13, 31]))[13:44], many[9:40])
    ct = jnp.asarray(rng.normal(size=many.shape), dtype)
    dx = jax.vjp(lambda x: product(x, w, jnp.array([9, 0, 60])), x)[1](ct)[0]
    alone = jax.vjp(lambda x: product(x, w, jnp.array([0, 0, 1])), x[40:41])[1](ct[40:41])[0]
    assert_same(alone, dx[40:41])


@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounding(dtype, preferred):
    rng = np.random.default_rng(1)
    x, w = jnp.asarray(rng.normal(size=(300, 513)), dtype), jnp.asarray(rng.normal(size=(4, 513, 260)), dtype)
    sizes = [100, 0, 150, 50]
    d = jaxmp.ragged_dot(x, w, jnp.array(sizes), preferred_element_type=preferred)
    assert d.dtype == (preferred or dtype)
    wide = [np.asarray(y, np.float64) for y in (x, w)]
    at = np.cumsum([0, *sizes])
    parts = [(wide[0][at[i] : at[i + 1]], wide[1][i]) for i in range(4)]
    want = np.concatenate([a @ b for a, b in parts])
    size = np.concatenate([abs(a) @ abs(b) for a, b in parts])
    units = np.finfo(np.float32).eps, float(jnp.finfo(d.dtype).eps)
    assert (abs(np.asarray(d, np.float64) - want) <= 8 * units[0] * size + units[1] * abs(want)).all()


def test_it_is_kept_by_a_policy_exported_and_printed():
    x, w, sizes = integers((6, 4)), integers((2, 4, 4), 1), jnp.array([2, 3])
    product = functools.partial(jaxmp.ragged_dot, w=w, group_sizes=sizes)
    kept = jax.checkpoint(lambda x: product(product(x)).sum(), policy=jaxmp.dots_saveable)
    assert_same(jax.grad(kept)(x), jax.grad(lambda x: reference(reference(x, w, (2, 3)), w, (2, 3)).sum())(x))
    check = jax.export.DisabledSafetyCheck.custom_call("jaxmp_grouped")
    exported = jax.export.deserialize(jax.export.export(jax.jit(product), disabled_checks=[check])(x).serialize())
    assert_same(exported.call(x), product(x))
    assert "is_contraction" not in str(jax.make_jaxpr(product)(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bias_and_activation(dtype):
    x, w, sizes = integers((8, 3), 0, dtype), integers((4, 3, 5), 1, dtype), (3, 0, 4, 0)
    bias, ct = integers((4, 5), 2, dtype), integers((8, 5), 3, dtype)
    ours = functools.partial(activated, sizes=jnp.array(sizes))
    theirs = functools.partial(with_bias, sizes=sizes)
    assert_same(ours(x, w, bias), theirs(x, w, bias))
    assert_same(jax.vjp(ours, x, w, bias)[1](ct), jax.vjp(theirs, x, w, bias)[1](ct))
    many = jax.vmap(ours, (0, None, 0))(jnp.stack([x, 2 * x]), w, jnp.stack([bias, -bias]))
    assert_same(many, jnp.stack([theirs(x, w, bias), theirs(2 * x, w, -bias)]))
    assert_same(ours(x, w, bias, determinism="batch"), theirs(x, w, bias))


def test_activations_of_a_product_that_is_rounded_once():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((30, 64), (2, 64, 16)))
    sizes = jnp.array([10, 15])
    for activation in ("silu", jnp.tanh):
        d = jaxmp.ragged_dot(x, w, sizes, activation=activation)
        wide = jaxmp.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        assert_same(d, (jax.nn.silu if activation == "silu" else activation)(wide).astype(jnp.bfloat16))


def test_gpus_multiply_at_full_precision():
    gradient = jax.grad(lambda x, w: jaxmp.ragged_dot(x, w, jnp.array([3, 5])).sum(), (0, 1))
    lowered = jax.jit(gradient).trace(integers((8, 3)), integers((2, 3, 5))).lower(lowering_platforms=("cuda",))
    products = [line for line in lowered.as_text().splitlines() if '"chlo.ragged_dot"' in line]
    assert len(products) == 2
    assert all("[#chlo<precision HIGHEST>, #chlo<precision HIGHEST>]" in line for line in products)


def test_a_function_multiplies_rows_and_derivatives():
    """Like a kernel of tokamax on GPUs, it gets the arguments of `lax.ragged_dot_general`, with sums in float32."""
    calls = []

    def kernel(lhs, rhs, sizes, numbers, *, preferred_element_type):
        calls.append((tuple(numbers.lhs_ragged_dimensions), preferred_element_type))
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=preferred_element_type)

    x, w, sizes = integers((8, 3)), integers((4, 3, 5), 1), SIZES["too large"]
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), implementation=kernel)
    assert_same(derivatives(ours, x, w), derivatives(lambda x, w: reference(x, w, sizes), x, w))
    assert len(calls) >= 3  # the product and both cotangents
    assert set(calls) == {((0,), np.dtype("float32"))}
    (row,) = jaxmp.explain(ours)(x, w).rows
    assert (row.implementation, row.algorithm) == ("kernel", "kernel")
    with pytest.raises(NotImplementedError, match="a function is asked for"):
        jax.jit(functools.partial(ours, determinism="batch"))(x, w)


def test_experts_take_a_function():
    calls = []

    def kernel(*operands, **options):
        calls.append(options)
        return lax.ragged_dot_general(*operands, **options)

    x, w, down = integers((6, 3)), integers((2, 3, 4), 1), integers((2, 4, 3), 2)
    given = (x, w, w, down, jnp.array([2, 3]))
    got = jaxmp.moe_mlp(*given, activation="relu", implementation=kernel)
    assert_same(got, jaxmp.moe_mlp(*given, activation="relu"))
    assert len(calls) >= 2  # equal products are lowered once


def numbers(contract, batch, ragged, group=()):
    return lax.RaggedDotDimensionNumbers((contract, batch), [ragged], group)


NO_BATCH = ((), ())
MATRICES = numbers(((1,), (1,)), NO_BATCH, 0, [0])
# (shapes of lhs and rhs, dimension numbers, the extents of the indices that may have sizes of their own)
CASES = {
    "rows": ((6, 3), (4, 3, 5), MATRICES, ()),
    "rows, transposed": ((6, 3), (4, 5, 3), numbers(((1,), (2,)), NO_BATCH, 0, [0]), ()),
    "rows of a batch": ((2, 6, 3), (2, 4, 3, 5), numbers(((2,), (2,)), ((0,), (0,)), 1, [1]), (2,)),
    "rows among others": ((3, 6, 2, 3), (4, 3, 5, 2), numbers(((3,), (1,)), NO_BATCH, 1, [0]), (3,)),
    "both": ((3, 2, 6, 3), (4, 2, 3, 5), numbers(((3,), (2,)), ((1,), (1,)), 2, [0]), (2, 3)),
    "contracted": ((6, 3), (6, 5), numbers(((0,), (0,)), NO_BATCH, 0), ()),
    "contracted among others": ((2, 6, 3, 2), (2, 3, 5, 6), numbers(((1, 2), (3, 1)), ((0,), (0,)), 1), (2,)),
    "contracted behind another": ((2, 3, 6, 2), (2, 3, 5, 6), numbers(((1, 2), (1, 3)), ((0,), (0,)), 2), (2, 3)),
    "no columns": ((2, 6, 3), (2, 6, 0), numbers(((1,), (1,)), ((0,), (0,)), 1), (2,)),
    "nothing contracted": ((6, 0), (4, 0, 5), numbers(((1,), (1,)), NO_BATCH, 0, [0]), ()),
    "batch": ((3, 6, 2), (3, 2, 4), numbers(((2,), (1,)), ((0,), (0,)), 0), ()),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("per_index", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_modes_of_the_general_form(case, per_index, implementation):
    of_lhs, of_rhs, given, lead = CASES[case]
    x, w = integers(of_lhs, 0), integers(of_rhs, 1)
    sizes = jnp.asarray(np.random.default_rng(2).integers(0, 3, (*(lead if per_index else ()), 4)))
    got = jaxmp.ragged_dot_general(x, w, sizes, given, implementation=implementation)
    assert_same(got, lax.ragged_dot_general(x, w, sizes, given))
    if implementation is None and (ct := integers(got.shape, 3)).size:
        pull = jax.vjp(lambda x, w: jaxmp.ragged_dot_general(x, w, sizes, given), x, w)[1]
        # lax has no cotangents for two modes; each is tested as the transpose of the tangents, which lax can compute.
        moved = integers(of_lhs, 4), integers(of_rhs, 5)
        for mine, move, operands in zip(pull(ct), moved, ((moved[0], w), (x, moved[1])), strict=True):
            assert (mine * move).sum() == (ct * lax.ragged_dot_general(*operands, sizes, given)).sum()


def test_sharded_arrays_take_the_numbers_of_ragged_dot():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w, sizes = jax.device_put(integers((6, 3), 0), P("p")), integers((2, 3, 5), 1), jnp.array([2, 3])
        d = jaxmp.ragged_dot_general(x, w, sizes, MATRICES, out_sharding=P("p"))
        assert_same(d, jaxmp.ragged_dot(x, w, sizes, out_sharding=P("p")))
        with pytest.raises(NotImplementedError, match=r"^ragged_dot_general: .* only; call inside a shard_map"):
            jaxmp.ragged_dot_general(x, x, sizes, numbers(((0,), (0,)), NO_BATCH, 0))
