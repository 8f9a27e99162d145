"""Shardings that jnp takes give the same types in jaxmp; meshes with two kinds of axes; vmap over an axis. The cases
are generated: all shardings of each operand, and all that may be asked of the result. test_drawn_contractions.py checks
values and cotangents. Operands are small integers, so results are bitwise equal."""

import functools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import integers, shardings

import jaxmp
from jaxmp._src.core.sharding import meshes

MESHES = {"2x2": {"x": 2, "y": 2}, "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2}, "1x4": {"x": 1, "y": 4}}
PRODUCTS = {
    "matmul": ("mk,kn->mn", {"m": 8, "k": 16, "n": 24}),
    "rows of two dimensions": ("smk,kn->smn", {"s": 8, "m": 8, "k": 16, "n": 8}),
    "batch": ("bmk,bkn->bmn", {"b": 8, "m": 8, "k": 16, "n": 8}),
    "heads": ("smd,dhk->shmk", {"s": 8, "m": 8, "d": 8, "h": 8, "k": 8}),
}


def make_mesh(name, kind=AxisType.Explicit):
    sizes = MESHES[name]
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def triples(mesh, subscripts, count):
    """Returns (sharding of each operand..., of the result or None) of a product: all of them, or `count` at random."""
    inputs, output = subscripts.split("->")
    options = [shardings(len(side), tuple(MESHES[mesh])) for side in inputs.split(",")]
    options.append([None, *shardings(len(output), tuple(MESHES[mesh]))])
    total = math.prod(map(len, options))
    chosen = range(total) if count is None or count >= total else random.Random(0).sample(range(total), count)
    places = (np.unravel_index(i, [*map(len, options)]) for i in chosen)
    return [tuple(x[i] for x, i in zip(options, place, strict=True)) for place in places]


def product(library, subscripts):
    """Returns the product as the library's `matmul` if it has that form, else as `einsum`."""
    if subscripts in ("mk,kn->mn", "smk,kn->smn"):
        return lambda a, b, out: library.matmul(a, b, out_sharding=out)
    return lambda a, b, out: library.einsum(subscripts, a, b, out_sharding=out)


def operands(subscripts, extents):
    return [integers([extents[x] for x in side], i) for i, side in enumerate(subscripts.split("->")[0].split(","))]


def result_types(f, mesh, arrays, chosen):
    """Returns the type or the error of each product, from a single trace to save time."""
    found = []

    def trace(lhs, rhs):
        for a, b, (*_, out) in zip(lhs, rhs, chosen, strict=True):
            try:
                found.append(jax.typeof(f(a, b, out)))
            except Exception as error:
                found.append(error)

    types = [
        [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[i])) for specs in chosen]
        for i, x in enumerate(arrays)
    ]
    jax.eval_shape(trace, *types)
    return found


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_types_are_those_of_jnp(request, mesh_name, name):
    count = 5000 if request.config.getoption("--exhaustive") else 250
    subscripts, extents = PRODUCTS[name]
    arrays = operands(subscripts, extents)
    mesh, chosen = make_mesh(mesh_name), triples(mesh_name, subscripts, count)
    seen = set()
    with jax.set_mesh(mesh):
        of_jnp, ours = (result_types(product(library, subscripts), mesh, arrays, chosen) for library in (jnp, jaxmp))
        for (*specs, out), want, got in zip(chosen, of_jnp, ours, strict=True):
            seen.add(isinstance(want, Exception))
            if not isinstance(want, Exception):
                assert not isinstance(got, Exception), (specs, out, got)
                assert got.sharding == want.sharding, (specs, out)
            elif isinstance(got, Exception):
                assert isinstance(got, ValueError), (specs, out, got)
                assert "pass out_sharding" in str(got), (specs, out, got)
            else:  # one operand of a batch may be whole
                assert name == "batch", (specs, out, want)
                assert "batch" in str(want), (specs, out, want)
    assert seen == {True, False}


EVERY = [*shardings(2, ("x", "y")), P(("y", "x"), None), P(None, ("y", "x"))]


@pytest.mark.parametrize("have", EVERY, ids=str)
def test_moves_between_all_shardings_on_axes_of_unequal_sizes(have):
    """XLA aborts if some of these moves are done in one step."""
    mesh = jax.make_mesh((2, 3), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:6])
    x = np.asarray(integers((12, 12)))
    move = functools.partial(meshes.reshard, mesh=mesh, have=have, is_explicit=True)
    with jax.set_mesh(mesh):
        there = jax.device_put(x, NamedSharding(mesh, have))
        moved = jax.jit(lambda x: [move(x, want=want) for want in EVERY])(there)
        for got, want in zip(moved, EVERY, strict=True):
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, want), 2)
            np.testing.assert_array_equal(np.asarray(got), x)


def test_axes_that_do_not_divide_a_dimension_do_not_split_it():
    """The two rows can be split over one axis of two devices; two such axes would need four rows."""
    mesh = make_mesh("2x2")
    with jax.set_mesh(mesh):
        a = jax.device_put(np.arange(16, dtype=np.float32).reshape(2, 8), NamedSharding(mesh, P("x", None)))
        b = jnp.ones((8, 8), out_sharding=P(None, None))
        d = jaxmp.matmul(a, b, out_sharding=P("y", None))
        assert d.sharding.spec == P("y", None)
        np.testing.assert_array_equal(d, jnp.matmul(a, b, out_sharding=P("y", None)))


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
X, W = integers((8, 8, 16), 2), integers((16, 24), 3)


def check_against_jnp(program, *args):
    """Asserts that `program(library)`, a function of `args`, has equal values and shardings with jaxmp and with jnp."""
    ours, theirs = (jax.jit(program(library))(*args) for library in (jaxmp, jnp))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def gradients_of(f):
    return jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))


BATCHED = {
    "forward": lambda f: jax.vmap(f, in_axes=(0, None)),
    "per-example gradients": lambda f: jax.vmap(gradients_of(f), in_axes=(0, None)),
    "gradient of a batch": lambda f: gradients_of(jax.vmap(f, in_axes=(0, None))),
}


@pytest.mark.small("values")
@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("spec", [P("x", "y"), P("x", None, "y"), P("x")])
def test_vmap_over_an_explicit_axis(name, spec):
    mesh = make_mesh("2x2")
    x, w = jax.device_put(X, NamedSharding(mesh, spec)), jax.device_put(W, NamedSharding(mesh, P(None, "y")))

    def program(library):
        products = [functools.partial(library.matmul, out_sharding=out) for out in (P(None, "y"), P("y", None))]
        if spec != P("x", "y"):  # else rows are over "y", like the columns of w
            layer = jaxmp.linear if library is jaxmp else lambda x, w, activation: activation(x @ w)
            products.append(functools.partial(layer, activation=jax.nn.relu))
        return lambda x, w: [BATCHED[name](product)(x, w) for product in products]

    with jax.set_mesh(mesh):
        check_against_jnp(program, x, w)


@pytest.mark.parametrize(
    ("spec_x", "spec_w", "out"),
    [(P("x"), P(), None), (P("x"), P(), P(None, None, "x")), (P(None, None, "x"), P("x"), P("x")), (P(), P(), None)],
)
def test_a_mesh_of_explicit_and_automatic_axes(spec_x, spec_w, out):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO), devices=jax.devices()[:4])
    x, w = (jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in ((X, spec_x), (W, spec_w)))

    def program(library):
        product = functools.partial(library.matmul, out_sharding=out)
        products = [product] if out is not None else [product, functools.partial(library.einsum, "smk,kn->snm")]

        def run(x, w):
            narrow = [product(x.astype(dtype), w.astype(dtype)) for dtype in (jnp.bool_, jnp.int32)]
            return [(f(x, w), gradients_of(f)(x, w)) for f in products], narrow

        return run

    with jax.set_mesh(mesh):
        check_against_jnp(program, x, w)


@pytest.mark.parametrize("kinds", [(AUTO,) * 3, (EXPLICIT,) * 3, (AUTO, EXPLICIT, EXPLICIT), (AUTO, EXPLICIT, AUTO)])
def test_a_shard_map_that_is_manual_over_some_axes(kinds):
    mesh = jax.make_mesh((2, 2, 2), ("stage", "x", "y"), axis_types=kinds)
    spec_x = P("stage", "x" if kinds[1] == EXPLICIT else None)
    spec_w = P(None, "y" if kinds[2] == EXPLICIT else None)

    def program(library):
        @functools.partial(jax.shard_map, in_specs=(P("stage"), P()), out_specs=P("stage"), axis_names={"stage"})
        def stage(x, w):
            return library.matmul(x, w)

        return lambda x, w: (stage(x, w), gradients_of(stage)(x, w))

    with jax.set_mesh(mesh):
        x, w = (jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in ((X, spec_x), (W, spec_w)))
        check_against_jnp(program, x, w)
