"""`ragged_dot` in every sharding of x, w and the result on a mesh of 2 x 2 x 2: 46,656 of them. A plan says how
operands enter, what is gathered, which index the ranks of each axis split, what is summed and how the result leaves.
Each plan is checked against the laws of a product without compiling it: an operand arrives split like its indices, each
rank's terms are summed once, and the result has the stated sharding. An axis has one of twenty roles in a plan.
Programs that contain every pair of roles are compiled, with both cotangents, and compared exactly; `explain` has to
print what they move. Without these tests an axis could be summed twice if another axis gathers. `JAXMP_FUZZ=n` compiles
n shardings drawn from all instead, from `JAXMP_FUZZ_SEED` on."""

import collections
import functools
import itertools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers
from jax.sharding import AxisType, NamedSharding
from ragged import assert_same, integers, reference, shardings

import jaxmp
from jaxmp._src.core.contraction.contraction import Layout
from jaxmp._src.core.primitive.grouped import GroupedSpec
from jaxmp._src.core.sharding import ragged
from jaxmp._src.core.sharding.shardings import as_dims

AXES = {"p": 2, "q": 2, "r": 2}
KINDS = (AxisType.Explicit, AxisType.Auto)
EVERY = list(itertools.product(*(shardings(ndim, AXES) for ndim in (2, 3, 2))))
SPEC = GroupedSpec(np.dtype(np.float32))
COUNT, SEED = (int(os.environ.get(f"JAXMP_FUZZ{name}", "0")) for name in ("", "_SEED"))
SIZES = (1, 0, 2, 0, 0, 3, 1, 0)
TOGETHER = 12  # products in a program


def mesh_of(kind):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * 3, devices=jax.devices()[:8])


def layout_of(specs):
    return [as_dims("an array", spec, ndim) for spec, ndim in zip(specs, (2, 3, 2), strict=True)]


def extents_of(lie, is_least):
    """Returns extents: 8, or the least that the axes of each array divide; axes of two arrays together may not."""
    found = dict.fromkeys("mkgn", 1 if is_least else 8)
    for indices, dims in zip(("mk", "gkn", "mn"), lie, strict=True):
        for index, dim in zip(indices, dims, strict=True):
            found[index] = max(found[index], 2 ** len(dim))
    return found


def splits_of(call, arrays, contracted, result):
    """Checks a plan, and returns the axes that split each index. `arrays`: (indices, sharding in the
    product) of each operand; `result`: its indices, and its sharding when it leaves."""
    splits = dict(call.spec.splits) | {"u": (), "b": ()}
    owners = collections.Counter(sum(splits.values(), ()))
    assert all(n == 1 + (axis in call.spec.experts) for axis, n in owners.items())
    assert all(axis in splits["m"] and axis in splits["g"] for axis in call.spec.experts)
    for indices, dims in arrays:
        assert dims == tuple(splits[index] for index in indices), indices
    assert (call.rows, call.groups, call.contracted) == (splits["m"], splits["g"], terms_of(call, contracted[0]))
    terms = sum((terms_of(call, index) for index in contracted), ())
    indices, leaves = result
    assert collections.Counter(terms) == collections.Counter([*call.sums, *sum(call.scatters, ())])
    assert leaves == tuple(splits[i] + scatter for i, scatter in zip(indices, call.scatters, strict=True))
    return splits


def terms_of(call, index):
    """Returns the axes that split a sum over this index into terms."""
    return tuple(axis for axis in dict(call.spec.splits)[index] if axis not in call.spec.experts)


def roles_of(call, lie):
    """Checks the laws and returns the role of each axis, in any order."""
    frame, arrays, moved = call.frame, [], collections.defaultdict(list)
    for name, entry in frame.entries:
        indices = {"a": "mk", "b": "gkn", "bias": "gn"}[name]
        dims = list(as_dims("an operand", entry.spec, len(indices)))
        for gather in entry.gathers:
            i, axes = gather.dimension, gather.axes
            assert dims[i][-len(axes) :] == axes
            dims[i] = dims[i][: -len(axes)]
            for axis in axes:
                assert gather.varies == (axis in sum(dict(call.spec.splits).values(), ()))
                moved[axis].append(indices[i] + name)
        arrays.append((indices, tuple(dims)))
    leaves = as_dims("d", frame.out_spec, 2)
    splits = splits_of(call, arrays, "kg", ("mn", leaves))
    assert leaves == lie[2] if frame.asked is None else as_dims("d", frame.asked, 2) == lie[2]
    ends = dict.fromkeys(call.sums, "sum") | {a: i for i, dim in zip("mn", call.scatters, strict=True) for a in dim}
    return tuple(
        sorted(
            ("".join(i for i in "mkgn" if axis in splits[i]), ends.get(axis, ""), *moved.get(axis, ())) for axis in AXES
        )
    )


@functools.cache
def plans(count, is_least):
    """Returns a dict from roles to the first of `count` shardings that have these roles."""
    where, found = (mesh_of(AxisType.Explicit), True), {}
    for specs in random.Random(0).sample(EVERY, count):
        lie = layout_of(specs)
        m, k, g, n = extents_of(lie, is_least).values()
        given = ragged.PRODUCT.replace(Layout(*lie))
        call = ragged.planned.__wrapped__(SPEC, where, given, ((m, k), (g, k, n)))
        found.setdefault(roles_of(call, lie), specs)
    return found


def count_of(request):
    return len(EVERY) if request.config.getoption("--exhaustive") else 4000


@pytest.mark.parametrize("is_least", [False, True])
def test_laws_of_plans(request, is_least):
    found = plans(count_of(request), is_least)
    assert is_least or (len(set().union(*found)) == 20 and len(found) > 700)


@pytest.mark.parametrize("is_contraction", [False, True])
def test_laws_of_plans_under_xlas_partitioner(request, is_contraction):
    """XLA's partitioner proposes the sharding of the result."""
    spec, mesh = SPEC.contraction(SPEC.out_dtype) if is_contraction else SPEC, mesh_of(AxisType.Auto)
    for specs in random.Random(1).sample(EVERY, count_of(request)):
        lie = [((), *dims) for dims in layout_of(specs)]
        m, k, g, n = extents_of(layout_of(specs), False).values()
        x, matrices, rows = zip(((1, m, k), (1, g, k, n), (1, m, n)), lie, strict=True)
        order = (x, rows, matrices) if is_contraction else (x, matrices, rows)
        shapes, dims = zip(*order[:2], ((1, g + 1), ((), ())), order[2], strict=True)
        call, (*entered, _, leaves) = ragged.placed(spec, mesh, shapes, dims)
        *indices, _, of_d = ragged.indices_of(spec, shapes)
        splits_of(call, list(zip(indices, entered, strict=True)), "m" if is_contraction else "kg", (of_d, leaves))


def chosen(count):
    """Returns shardings that contain every pair of roles, or JAXMP_FUZZ random ones."""
    if COUNT:
        return random.Random(SEED).choices(EVERY, k=COUNT)
    seen, found = set(), []
    for roles, specs in plans(count, False).items():
        pairs = {*itertools.combinations(roles, 2)}
        if not pairs <= seen:
            seen |= pairs
            found.append(specs)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_and_cotangents(request, kind):
    operands = integers((8, 8)), integers((8, 8, 8), 1), integers((8, 8), 2)
    theirs = functools.partial(reference, sizes=SIZES)
    want = theirs(*operands[:2]), *jax.vjp(theirs, *operands[:2])[1](operands[2])
    mesh, cases = mesh_of(kind), chosen(count_of(request))
    if kind == AxisType.Auto and not COUNT:
        cases = cases[::5]  # the plans are the same

    def run(placed, cases):
        found = []
        for (x, w, ct), (of_x, of_w, of_d) in zip(placed, cases, strict=True):
            options = {"in_shardings": (of_x, of_w)} if kind == AxisType.Auto else {}
            ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(SIZES), out_sharding=of_d, **options)
            d, pull = jax.vjp(ours, x, w)
            found.append((d, *pull(ct)))
        return found

    with jax.set_mesh(mesh):
        for part in range(0, len(cases), TOGETHER):
            some = cases[part : part + TOGETHER]
            of = [[NamedSharding(mesh, spec) for spec in specs] for specs in some]
            placed = [jax.device_put([*operands], each) for each in of]
            _, compiled = transfers.check(functools.partial(run, cases=some), placed)
            results = iter(compiled(placed))
            for specs, got in zip(some, zip(results, results, results, strict=True), strict=True):
                try:
                    assert_same(got, want)
                except AssertionError as error:
                    raise AssertionError(str(specs)) from error
                of_x, of_w, of_d = specs
                for y, spec in zip(got, (of_d, of_x, of_w), strict=True):
                    assert kind == AxisType.Auto or y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
            jax.clear_caches()
