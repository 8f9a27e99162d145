"""Every sharding that jnp takes: the same result, in the same sharding, and so for the gradients.

The cases are generated: every sharding of each operand, and every one that the result may be asked for in. Operands are
small integers, so that results are equal to the bit whatever the order of sums.
"""

import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

MESHES = {
    "2x2": {"x": 2, "y": 2},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
    "1x4": {"x": 1, "y": 4},
}
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


def shardings(ndim, axes):
    """Every sharding of an array, the axes of a dimension in the order of the mesh."""
    found = []
    for where in itertools.product(range(-1, ndim), repeat=len(axes)):
        dims = (tuple(axis for axis, at in zip(axes, where, strict=True) if at == i) for i in range(ndim))
        found.append(P(*(dim[0] if len(dim) == 1 else dim or None for dim in dims)))
    return found


def triples(mesh, subscripts, count):
    """(sharding of the operands, of the result or None) of a product: all of them, or `count` at random."""
    inputs, output = subscripts.split("->")
    options = [shardings(len(side), tuple(MESHES[mesh])) for side in inputs.split(",")]
    options.append([None, *shardings(len(output), tuple(MESHES[mesh]))])
    total = math.prod(map(len, options))
    chosen = range(total) if count is None or count >= total else random.Random(0).sample(range(total), count)
    return [
        tuple(x[i] for x, i in zip(options, np.unravel_index(i, [*map(len, options)]), strict=True)) for i in chosen
    ]


def product(library, subscripts):
    """The product by a function of the library that has one for it."""
    if subscripts in ("mk,kn->mn", "smk,kn->smn"):
        return lambda a, b, out: library.matmul(a, b, out_sharding=out)
    return lambda a, b, out: library.einsum(subscripts, a, b, out_sharding=out)


def integers(shape, seed):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def operands(subscripts, extents):
    return [integers([extents[x] for x in side], i) for i, side in enumerate(subscripts.split("->")[0].split(","))]


def result_type(f, mesh, arrays, specs, out):
    """The type of a product, or the error."""
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    try:
        return jax.eval_shape(lambda a, b: f(a, b, out), *types)
    except Exception as error:
        return error


def taken(mesh_name, mesh, name, count):
    """The triples that jnp takes."""
    subscripts, extents = PRODUCTS[name]
    arrays = operands(subscripts, extents)
    theirs = product(jnp, subscripts)
    for *specs, out in triples(mesh_name, subscripts, count):
        if not isinstance(result_type(theirs, mesh, arrays, specs, out), Exception):
            yield specs, out


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_types_are_those_of_jnp(request, mesh_name, name):
    """Where jnp takes shardings, jaxmp takes them and the result's type is equal; where it refuses, jaxmp names why."""
    count = 5000 if request.config.getoption("--exhaustive") else 250
    subscripts, extents = PRODUCTS[name]
    arrays = operands(subscripts, extents)
    mesh = make_mesh(mesh_name)
    ours, theirs = product(jaxmp, subscripts), product(jnp, subscripts)
    seen = set()
    with jax.set_mesh(mesh):
        for *specs, out in triples(mesh_name, subscripts, count):
            want, got = (result_type(f, mesh, arrays, specs, out) for f in (theirs, ours))
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


def run(program, mesh, arrays, todo):
    """What one compiled program makes of every case of `todo`, on operands that are sharded so."""
    placed = [
        [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)] for specs, _ in todo
    ]
    return placed, jax.jit(program)(placed)


def value_and_gradients(f, todo):
    """The results of every case, and the gradients of the sum of squares."""

    def program(placed):
        def one(a, b, out):
            def loss(a, b):
                d = f(a, b, out)
                return (d * d).sum(), d

            (_, d), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(a, b)
            return d, *gradients

        return [one(a, b, out) for (a, b), (_, out) in zip(placed, todo, strict=True)]

    return program


def expected(subscripts, arrays):
    a, b = (x.astype(np.float64) for x in arrays)
    inputs, output = subscripts.split("->")
    left, right = inputs.split(",")
    d = np.einsum(subscripts, a, b)
    return d, np.einsum(f"{output},{right}->{left}", 2 * d, b), np.einsum(f"{left},{output}->{right}", a, 2 * d)


CHUNK = 12
CHUNKS = 16


@pytest.mark.small("pairs", of=lambda name, mesh_name, chunk: ((name, mesh_name), name))
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(name, mesh_name, chunk):
    subscripts, extents = PRODUCTS[name]
    arrays = operands(subscripts, extents)
    mesh = make_mesh(mesh_name)
    with jax.set_mesh(mesh):
        todo = list(taken(mesh_name, mesh, name, 2 * CHUNK * CHUNKS))[chunk * CHUNK : (chunk + 1) * CHUNK]
        placed, results = run(value_and_gradients(product(jaxmp, subscripts), todo), mesh, arrays, todo)
    want = expected(subscripts, arrays)
    for (specs, out), given, (d, *gradients) in zip(todo, placed, results, strict=True):
        for x, y in zip((d, *gradients), want, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=str((specs, out)))
        if out is not None:
            assert d.sharding.is_equivalent_to(NamedSharding(mesh, out), d.ndim), (specs, out)
        for x, g in zip(given, gradients, strict=True):
            assert g.sharding.is_equivalent_to(x.sharding, x.ndim), (specs, out)


def test_axes_that_do_not_divide_a_dimension_do_not_split_it():
    """Two axes of two devices each could split the two rows, if rows were four."""
    mesh = make_mesh("2x2")
    with jax.set_mesh(mesh):
        a = jax.device_put(np.arange(16, dtype=np.float32).reshape(2, 8), NamedSharding(mesh, P("x", None)))
        b = jnp.ones((8, 8), out_sharding=P(None, None))
        d = jaxmp.matmul(a, b, out_sharding=P("y", None))
        assert d.sharding.spec == P("y", None)
        np.testing.assert_array_equal(d, jnp.matmul(a, b, out_sharding=P("y", None)))


@pytest.mark.small("values")
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_in_shardings_on_automatic_axes(name, mesh_name):
    subscripts, extents = PRODUCTS[name]
    arrays, mesh = operands(subscripts, extents), make_mesh(mesh_name, AxisType.Auto)
    with jax.set_mesh(make_mesh(mesh_name)):
        todo = list(taken(mesh_name, make_mesh(mesh_name), name, 200))[:CHUNK]
    function = (
        jaxmp.matmul if name in ("matmul", "rows of two dimensions") else functools.partial(jaxmp.einsum, subscripts)
    )

    def program(placed):
        results = []
        for (a, b), (specs, out) in zip(placed, todo, strict=True):
            f = functools.partial(function, in_shardings=tuple(specs), out_sharding=out, mesh=mesh)
            results.append(value_and_gradients(lambda a, b, _, f=f: f(a, b), [(specs, out)])([(a, b)])[0])
        return results

    _, results = run(program, mesh, arrays, todo)
    for (specs, out), got in zip(todo, results, strict=True):
        for x, y in zip(got, expected(subscripts, arrays), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=str((specs, out)))
        if out is not None:
            assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, out), got[0].ndim), (specs, out)


@pytest.mark.parametrize("how", ["eager", "scan", "vmap"])
def test_other_ways_to_run(how):
    """The same eagerly, in a scan and under vmap, for some of the shardings that need an operand to move."""
    mesh = make_mesh("2x2")
    arrays = operands(*PRODUCTS["matmul"])
    d, *gradients = expected("mk,kn->mn", arrays)
    cases = [
        ((P("x", None), P("x", None)), P("x", None)),
        ((P("x", "y"), P(("x", "y"), None)), P(("x", "y"), None)),
        ((P(None, "x"), P("y", None)), P("y", "x")),
    ]
    with jax.set_mesh(mesh):
        for specs, out in cases:
            a, b = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True))

            def f(a, b, out=out):
                return jaxmp.matmul(a, b, out_sharding=out)

            def loss(a, b, f=f):
                return (f(a, b) ** 2).sum()

            if how == "eager":
                np.testing.assert_array_equal(f(a, b), d)
                found = jax.grad(loss, argnums=(0, 1))(a, b)
            elif how == "scan":

                def summed(a, b, loss=loss):
                    return jax.lax.scan(lambda carry, _: (carry + loss(a, b), None), 0.0, length=2)[0]

                found = [g / 2 for g in jax.jit(jax.grad(summed, argnums=(0, 1)))(a, b)]
            else:
                stacked = jnp.stack([a, a])
                np.testing.assert_array_equal(jax.jit(jax.vmap(f, in_axes=(0, None)))(stacked, b)[1], d)
                found = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None)))(stacked, b)
                found = [g[1] for g in found]
            for x, y in zip(found, gradients, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=str((specs, out)))


# vmap over explicit axes, meshes of two kinds of axes, and a shard_map over some axes -----------------------------

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
X, W = integers((8, 8, 16), 2), integers((16, 24), 3)


def check_against_jnp(program, *args):
    """`program(library)` is a function of args; both libraries give equal values in equal shardings."""
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


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("spec", [P("x", "y"), P("x", None, "y"), P("x")])
def test_vmap_over_an_explicit_axis(name, spec):
    mesh = make_mesh("2x2")
    x, w = jax.device_put(X, NamedSharding(mesh, spec)), jax.device_put(W, NamedSharding(mesh, P(None, "y")))
    with jax.set_mesh(mesh):
        for out in (P(None, "y"), P("y", None)):
            check_against_jnp(
                lambda library, out=out: BATCHED[name](lambda x, w: library.matmul(x, w, out_sharding=out)), x, w
            )


@pytest.mark.parametrize(
    ("spec_x", "spec_w", "out"),
    [(P("x"), P(), None), (P("x"), P(), P(None, None, "x")), (P(None, None, "x"), P("x"), P("x")), (P(), P(), None)],
)
def test_a_mesh_of_explicit_and_automatic_axes(spec_x, spec_w, out):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO), devices=jax.devices()[:4])
    x, w = (jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in ((X, spec_x), (W, spec_w)))
    with jax.set_mesh(mesh):
        for apply in (lambda f: f, gradients_of):
            check_against_jnp(
                lambda library, apply=apply: apply(lambda x, w: library.matmul(x, w, out_sharding=out)), x, w
            )
            check_against_jnp(
                lambda library, apply=apply: apply(lambda x, w: library.einsum("smk,kn->snm", x, w)), x, w
            ) if out is None else None
        for dtype in (jnp.bool_, jnp.int32):
            check_against_jnp(
                lambda library: lambda x, w: library.matmul(x, w, out_sharding=out),
                *(each.astype(dtype) for each in (x, w)),
            )


@pytest.mark.parametrize("kinds", [(AUTO,) * 3, (EXPLICIT,) * 3, (AUTO, EXPLICIT, EXPLICIT), (AUTO, EXPLICIT, AUTO)])
def test_a_shard_map_that_is_manual_over_some_axes(kinds):
    mesh = jax.make_mesh((2, 2, 2), ("stage", "x", "y"), axis_types=kinds)
    spec_x = P("stage", "x" if kinds[1] == EXPLICIT else None)
    spec_w = P(None, "y" if kinds[2] == EXPLICIT else None)

    def program(library, apply):
        @functools.partial(jax.shard_map, in_specs=(P("stage"), P()), out_specs=P("stage"), axis_names={"stage"})
        def stage(x, w):
            return library.matmul(x, w)

        return apply(stage)

    with jax.set_mesh(mesh):
        x, w = (jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in ((X, spec_x), (W, spec_w)))
        for apply in (lambda f: f, gradients_of):
            check_against_jnp(functools.partial(program, apply=apply), x, w)
