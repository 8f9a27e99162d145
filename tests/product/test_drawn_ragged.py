"""Products of groups of rows drawn at random: sizes, types, meshes of up to three axes, shardings, and transformations.

Values, tangents, cotangents and second derivatives are those of a loop of `jnp` products. Operands are small integers,
so results are equal to the bit. `JAXMP_FUZZ=n` draws n products instead of a few, from `JAXMP_FUZZ_SEED` on.
"""

import functools
import math
import os
import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from ragged import assert_same, integers, reference, shardings

import jaxmp

MESHES = ({}, {"x": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 1, "y": 4}, {"x": 8})
WAYS = ("vjp", "second order", "vmap", "jvp", "scan", "remat", "eager", "transposed twice")
COUNT = int(os.environ.get("JAXMP_FUZZ", "0")) or 2 * len(WAYS)
SEED = int(os.environ.get("JAXMP_FUZZ_SEED", "0"))


def draw(rng, axes):
    """(m, k, groups, n), sizes, the first group, and the shardings of x, w and the result."""
    specs = [rng.choice(shardings(ndim, axes)) for ndim in (2, 3, 2)]
    split = {
        letter
        for letters, spec in zip(("mk", "gkn", "mn"), specs, strict=True)
        for letter, dim in zip(letters, spec, strict=True)
        if dim
    }
    m, k, groups, n = (8 * rng.choice((1, 2)) if letter in split else rng.choice((1, 2, 3, 8)) for letter in "mkgn")
    first = rng.choice((0, 0, 1, 3))
    sizes = [rng.choice((-1, 0, 0, 1, 2, m // 2, m)) for _ in range(groups + first)]
    return (m, k, groups, n), sizes, first, specs


def results_of(way, product, x, w, moved, ct):
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
    dtype = "float32" if way == "second order" else rng.choice(("float32", "complex64"))
    x, w, ct, tx, tw = (
        jnp.sign(integers(shape, seed)).astype(dtype)
        for seed, shape in enumerate(((m, k), (groups, k, n), (m, n), (m, k), (groups, k, n)))
    )
    listed = jnp.array(sizes, rng.choice(("int32", "int8")))
    offset = jnp.array(first) if first else None
    level = rng.choice(("run_to_run", "run_to_run", "batch"))
    theirs = functools.partial(results_of, way, functools.partial(reference, sizes=sizes, first=first))
    want = jax.jit(theirs)(x, w, (tx, tw), ct)
    options = {"group_sizes": listed, "group_offset": offset, "determinism": level}
    case = f"{way}, {axes} {kind}, {(m, k, groups, n)}, {sizes} from {first}, {dtype}, {level}, {of_x} {of_w} {of_d}"
    run = functools.partial(results_of, way)
    run = run if way == "eager" else functools.partial(jax.jit, static_argnums=0)(run)
    if not axes:
        got = run(Product(**options), x, w, (tx, tw), ct)
    else:
        is_told = kind == AxisType.Auto and rng.choice((True, False))
        is_asked = kind == AxisType.Explicit or is_told or rng.choice((True, False))
        options |= ({"out_sharding": of_d} if is_asked else {}) | ({"in_shardings": (of_x, of_w)} if is_told else {})
        devices = jax.devices()[: math.prod(axes.values())]
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(y, NamedSharding(mesh, spec))
                for y, spec in zip((x, w, ct, tx, tw), (of_x, of_w, of_d, of_x, of_w), strict=True)
            ]
            x, w, ct, tx, tw = placed
            got = run(Product(**options), x, w, (tx, tw), ct)
    try:
        assert_same(got, want)
    except AssertionError as error:
        raise AssertionError(case) from error
    if number % 20 == 19:
        jax.clear_caches()


class Product:
    """`jaxmp.ragged_dot` with options, which `jax.jit` takes for a static argument."""

    def __init__(self, **options):
        self.options = options

    def __call__(self, x, w):
        return jaxmp.ragged_dot(x, w, **self.options)
