"""Placement apart from rounding: small-integer operands, bitwise equality with numpy.

Every partial sum of small integers is exact in every accumulator, so here each element either comes from the right
place or is wrong. Without these tests a swapped group, a block of the wrong rank or a lost transposition could hide
in a tolerance; a second rounding of a 16-bit sum would as well, since the result is rounded exactly once.
"""

import contextlib
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxmp

CONJUGATIONS = tuple(itertools.product((False, True), repeat=2))
SHAPES_PER_DTYPE = {"float32": 4, "complex64": 2, "complex128": 2}


def precision_of(dtype):
    return jax.enable_x64(True) if dtype in cases.NEEDS_X64 else contextlib.nullcontext()


def some_of(options, start, count):
    """`count` of the options, in a circle from `start` on: neighbouring tests cover what one leaves out."""
    return [options[(start + i) % len(options)] for i in range(count)]


def variants(case, shapes, start=0):
    """The case in each shape; complex ones go through the pairs of conjugations as the shapes go by."""
    conjugations = some_of(CONJUGATIONS, start, len(shapes))
    for shape, conjugation in zip(shapes, conjugations, strict=True):
        is_complex = jnp.issubdtype(case.dtype, jnp.complexfloating)
        yield case.replace(per_shard=shape, conjugation=conjugation if is_complex else (False, False))


def multiply_all(todo, operands, implementation):
    """Every product of `todo` in one program, on a mesh with auto axes."""
    mesh = todo[0].jax_mesh(AxisType.Auto)

    def program(operands):
        return [
            jaxmp.matmul(
                a,
                b,
                **case.transpose,
                **case.conjugate,
                in_shardings=case.stored,
                out_sharding=case.out,
                mesh=mesh,
                implementation=implementation,
            )
            for case, (a, b) in zip(todo, operands, strict=True)
        ]

    placed = [
        tuple(cases.put(x, mesh, s) for x, s in zip(ab, c.stored, strict=True))
        for c, ab in zip(todo, operands, strict=True)
    ]
    return cases.quick_jit(program)(placed), mesh


def assert_equal_to_the_bit(got, want, name):
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    wrong = np.argwhere(got != want)
    assert not wrong.size, f"{name}: {len(wrong)} of {want.size} elements differ, first at {wrong[0]}:\n{got}\n{want}"
    # Complex zeros may carry either sign: conjugation negates an imaginary part that is 0.
    if not np.iscomplexobj(want):
        assert got.tobytes() == want.tobytes(), f"{name}: zeros differ in sign"


def check_placement(case, shapes, implementation, rng, start=0):
    cases.require(implementation)
    todo = list(variants(case, shapes, start))
    operands = [variant.integers(rng) for variant in todo]
    with precision_of(case.dtype):
        results, mesh = multiply_all(todo, operands, implementation)
        for variant, (a, b), d in zip(todo, operands, results, strict=True):
            left, right = variant.op(cases.wide(a), cases.wide(b))
            assert_equal_to_the_bit(d, (left @ right).astype(d.dtype), f"{variant.id} {variant.conjugation}")
            assert d.dtype == case.dtype
            asked = jax.sharding.NamedSharding(mesh, variant.out)
            # Nobody has anything of an empty result, and XLA calls it replicated.
            assert not d.size or d.sharding.is_equivalent_to(asked, 2), f"{variant.id}: came as {d.sharding}"


def check_some_shapes(case, transposition, dtype, implementation, rng):
    start = 2 * (cases.CASES.index(case) + cases.TRANSPOSITIONS.index(transposition))
    shapes = some_of(cases.SHAPES, start, SHAPES_PER_DTYPE.get(dtype, 1))
    check_placement(case.replace(transposition=transposition, dtype=dtype), shapes, implementation, rng, start)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id(cases.CASES))
def test_every_element_comes_from_its_place(case, transposition, dtype, rng):
    check_some_shapes(case, transposition, dtype, None, rng)


@pytest.mark.small("values", of=lambda case, transposition, dtype: ((case.pattern, transposition), case, dtype))
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_every_element_comes_from_its_place_xla(case, transposition, dtype, rng):
    check_some_shapes(case, transposition, dtype, "xla", rng)


@pytest.mark.parametrize("case", cases.by_id(cases.CASES))
def test_every_shape(case, rng):
    check_placement(case, cases.SHAPES, None, rng)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", cases.EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_empty_dimensions(case, shape, implementation, rng):
    for transposition in ("NN", "TT"):
        check_placement(case.replace(transposition=transposition), [shape], implementation, rng)


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_without_a_mesh(dtype, implementation, rng):
    cases.require(implementation)
    with precision_of(dtype):
        for transposition, shape in itertools.product(cases.TRANSPOSITIONS, cases.SHAPES[:6] + cases.EMPTY_SHAPES):
            case = cases.BY_NAME["local"].replace(mesh=(("x", 1), ("y", 1)), transposition=transposition, dtype=dtype)
            for variant in variants(case.replace(per_shard=shape), [shape]):
                a, b = variant.integers(rng)
                d = jaxmp.matmul(jnp.asarray(a), jnp.asarray(b), **variant.transpose, implementation=implementation)
                left, right = variant.op(cases.wide(a), cases.wide(b))
                assert_equal_to_the_bit(d, (left @ right).astype(d.dtype), variant.id)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_sixteen_bit_sums_are_rounded_once(case, dtype, implementation, rng):
    """Sums that need more bits than the result has: rounding a rank's part ahead of the sum would show."""
    cases.require(implementation)
    case = case.replace(per_shard=(3, 5, 64), dtype=dtype)
    a, b = (9 * x for x in case.integers(rng))
    results, _ = multiply_all([case], [(a, b)], implementation)
    want = cases.wide(a) @ cases.wide(b)
    assert np.abs(want).max() < 2**15, "the sums must stay exact in float32 and finite in float16"
    assert np.any(want.astype(dtype).astype(np.float64) != want), "the sums must need a rounding"
    assert_equal_to_the_bit(results[0], want.astype(dtype), case.id)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_a_wider_result_keeps_the_accumulator(case, dtype, implementation, rng):
    cases.require(implementation)
    case = case.replace(per_shard=(3, 5, 64), dtype=dtype)
    a, b = (9 * x for x in case.integers(rng))
    mesh = case.jax_mesh()
    with jax.set_mesh(mesh):
        operands = [cases.put(x, mesh, s) for x, s in zip((a, b), case.stored, strict=True)]
        d = jaxmp.matmul(
            *operands, out_sharding=case.out, preferred_element_type=jnp.float32, implementation=implementation
        )
    assert_equal_to_the_bit(d, (cases.wide(a) @ cases.wide(b)).astype(np.float32), case.id)


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_a_product_is_where_its_operands_are(axis_type, is_jitted, rng):
    """On meshes that no `jax.set_mesh` names, of one shape and of other devices, one after the other and back."""
    case = cases.BY_NAME["rs"].replace(per_shard=(2, 3, 4))
    cases.require(None)
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
