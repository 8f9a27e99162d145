"""Products of groups drawn at random: modes, sizes, types, meshes of up to three axes, shardings, and transformations.
Values, tangents, cotangents and second derivatives must equal a loop of `jnp` products. Operands are small integers, so
results are bitwise equal. `JAXMP_FUZZ=n` draws n products instead of a few, starting at `JAXMP_FUZZ_SEED`."""

import functools
import math
import os
import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from ragged import CONTRACTED, assert_same, contraction, integers, reference, shardings

import jaxmp

MESHES = ({}, {"x": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 1, "y": 4}, {"x": 8})
WAYS = ("vjp", "second order", "vmap", "jvp", "scan", "remat", "eager", "transposed twice")
# The types of x and w, the requested type, and the type of the result.
TYPES = (
    ("float32", "float32", None, "float32"),
    ("complex64", "complex64", None, "complex64"),
    ("bfloat16", "bfloat16", None, "bfloat16"),
    ("float16", "float16", "float32", "float32"),
    ("float16", "bfloat16", None, "bfloat16"),
    ("bfloat16", "float8_e4m3fn", None, "bfloat16"),
    ("float8_e5m2", "float8_e4m3fn", "float32", "float32"),
    ("bfloat16", "int8", None, "bfloat16"),
    ("float32", "int4", None, "float32"),
    ("int8", "int8", "int32", "int32"),
    ("int16", "uint8", None, "int16"),
)
EXTENTS = {"g": (1, 2, 3, 8), **dict.fromkeys("mkn", (0, 1, 2, 3, 8, 33, 130))}
COUNT = int(os.environ.get("JAXMP_FUZZ", "0")) or 3 * len(WAYS)
SEED = int(os.environ.get("JAXMP_FUZZ_SEED", "0"))


def draw(rng, axes):
    """Returns (m, k, groups, n), sizes, the first group, and the shardings of x, w and the result."""
    specs = [rng.choice(shardings(ndim, axes)) for ndim in (2, 3, 2)]
    split = {
        letter
        for letters, spec in zip(("mk", "gkn", "mn"), specs, strict=True)
        for letter, dim in zip(letters, spec, strict=True)
        if dim
    }
    m, k, groups, n = (8 * rng.choice((1, 2)) if letter in split else rng.choice(EXTENTS[letter]) for letter in "mkgn")
    first = rng.choice((0, 0, 1, 3))
    sizes = [rng.choice((-1, 0, 0, 1, 2, m // 2, m)) for _ in range(groups + first)]
    return (m, k, groups, n), sizes, first, specs


def results_of(way, product, x, w, ct, *moved):
    if way == "value":
        return product(x, w)
    if way == "jvp":
        return jax.jvp(product, (x, w), moved)
    if way == "vmap":
        stacked = jnp.stack([x, -x]), jnp.stack([w, 2 * w])
        return jax.vmap(lambda x, w: jax.vjp(product, x, w)[1](ct))(*stacked)
    if way == "remat":
        product = jax.checkpoint(product)

    def pulled(x, w):
        return jax.vjp(product, x, w)[1](ct)

    if way == "second order":
        return jax.grad(lambda x, w: sum((y * y).sum() for y in pulled(x, w)), (0, 1))(x, w)
    if way == "transposed twice":
        return jax.vjp(pulled, x, w)[1](moved)
    if way == "scan":
        return jax.lax.scan(lambda _, __: (None, pulled(x, w)), None, length=2)[1]
    return product(x, w), *pulled(x, w)


@pytest.mark.parametrize("number", range(COUNT))
def test_drawn_products_of_groups(number):
    rng = random.Random(1_000_003 * SEED + number)
    way, axes = WAYS[number % len(WAYS)], rng.choice(MESHES)
    (m, k, groups, n), sizes, first, (of_x, of_w, of_d) = draw(rng, [*axes])
    kind = rng.choice((AxisType.Explicit, AxisType.Auto)) if axes else None
    of_rows, of_matrices = ((m, n), of_d), ((groups, k, n), of_w)
    # On explicit axes only products with ragged rows are drawn.
    is_contraction = kind != AxisType.Explicit and rng.random() < 0.3
    of_rhs, of_result = (of_rows, of_matrices) if is_contraction else (of_matrices, of_rows)
    of_x_type, of_w_type, preferred, out = TYPES[0] if way == "second order" else rng.choice(TYPES)
    are_real = all(jnp.issubdtype(each, jnp.inexact) for each in (of_x_type, of_w_type))
    way = way if are_real else "value"
    drawn = ((m, k), of_x_type, of_x), (of_rhs[0], of_w_type, of_rhs[1]), (of_result[0], out, of_result[1])
    every = enumerate((*drawn, *drawn[:2]))
    operands = [jnp.sign(integers(shape, seed)).astype(dtype) for seed, (shape, dtype, _) in every]
    listed = jnp.array(sizes[first:] if is_contraction else sizes, rng.choice(("int32", "int8")))
    offset = jnp.array(first) if first and not is_contraction else None
    level = rng.choice(("run_to_run", "run_to_run", "batch"))
    wide = "complex64" if out == "complex64" else "float32"

    def plain(x, w):
        x, w = x.astype(wide), w.astype(wide)
        if is_contraction:
            return contraction(x, w, sizes[first:]).astype(out)
        return reference(x, w, sizes, first).astype(out)

    want = jax.jit(functools.partial(results_of, way, plain))(*operands)
    options = {"determinism": level, "preferred_element_type": preferred}
    case = f"{way}, {axes} {kind}, {drawn}, {sizes} from {first}, {level}"

    def ours(x, w):
        if is_contraction:
            return jaxmp.ragged_dot_general(x, w, listed, CONTRACTED, **options)
        return jaxmp.ragged_dot(x, w, listed, offset, **options)

    run = functools.partial(results_of, way, ours)
    run = run if way == "eager" else jax.jit(run)
    if not axes:
        got = run(*operands)
    else:
        is_told = kind == AxisType.Auto and not is_contraction and rng.choice((True, False))
        is_asked = kind == AxisType.Explicit or is_told or rng.choice((True, False))
        options |= {"out_sharding": of_result[1]} if is_asked else {}
        options |= {"in_shardings": (of_x, of_w)} if is_told else {}
        devices = jax.devices()[: math.prod(axes.values())]
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)
        with jax.set_mesh(mesh):
            specs = [spec for *_, spec in (*drawn, *drawn[:2])]
            placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(operands, specs, strict=True)]
            got = run(*placed)
    try:
        assert_same(got, want)
    except AssertionError as error:
        raise AssertionError(case) from error
    if number % 20 == 19:
        jax.clear_caches()
