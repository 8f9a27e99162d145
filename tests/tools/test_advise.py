"""The ranking of shardings: against `explain`, against bounds from the literature, and its order. Without these tests,
advice could state other bytes than the call moves, or call a grid optimal that is not."""

import itertools

import cases
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmp
from jaxmp._src.tools.advise.advise import lower_bound

F32 = np.dtype("float32")
ALL = jaxmp.advise(64, 32, 128, 8, dtype=F32, quiet=True).choices


@pytest.mark.parametrize("choice", ALL, ids=lambda c: f"{c.splits} {dict(c.mesh)}".replace(" ", "-"))
def test_a_choice_is_one_call_and_takes_what_explain_says(choice, mesh_of):
    mesh = mesh_of(dict(choice.mesh), AxisType.Explicit)
    a = cases.typed(mesh, (64, 32), *choice.a)
    b = cases.typed(mesh, (32, 128), *choice.b)
    with jax.set_mesh(mesh):
        explained = jaxmp.explain(lambda a, b: jaxmp.matmul(a, b, out_sharding=choice.d), quiet=True, hardware="h100-8")
        found = explained(a, b)
    (row,) = found.rows
    assert (row.pattern, row.ndevices) == (choice.pattern, 8)
    assert sum(each.nbytes for each in row.transfers) == choice.bytes_moved
    assert sum(4 * np.prod(shape) for shape in row.local_shapes) == choice.memory
    assert found.seconds == pytest.approx(choice.seconds, rel=1e-9)


def test_every_pattern_is_among_the_choices():
    assert {c.pattern for c in ALL} == {"local", "all_gather", "reduce_scatter", "all_reduce", "grid"}
    assert all(np.prod([size for _, size in c.mesh]) == 8 for c in ALL)
    assert len({(c.mesh, c.a, c.b, c.d) for c in ALL}) == len(ALL)
    assert "mk,kn->mn  x: n (m n n)" in {c.splits for c in ALL}


# The literature's bound, against what a grid of (pm, pn, pk) devices receives: a device holds 1/pn of its block of a
# and 1/pm of its block of b, and keeps 1/pk of its block of d.
SHAPES = [(64, 64, 64), (4096, 64, 64), (64, 4096, 64), (64, 64, 4096), (512, 64, 512), (1000, 10, 300), (8, 8, 8)]


def communicated(m, k, n, grid):
    pm, pn, pk = grid
    a, b, d = m * k / (pm * pk), k * n / (pk * pn), m * n / (pm * pn)
    return a * (1 - 1 / pn) + b * (1 - 1 / pm) + d * (1 - 1 / pk)


@pytest.mark.parametrize(("shape", "devices"), list(itertools.product(SHAPES, (1, 2, 8, 64, 512))))
def test_no_grid_is_below_the_bound(shape, devices):
    bound = lower_bound(*shape, devices, float("inf"))
    for pm, pn in itertools.product(range(1, devices + 1), repeat=2):
        if devices % (pm * pn) == 0:
            assert communicated(*shape, (pm, pn, devices // pm // pn)) >= bound * (1 - 1e-9) - 1e-9
    if devices == 1:
        assert bound == 0


@pytest.mark.parametrize(("shape", "devices", "grid"), [
    ((64, 64, 64), 64, (4, 4, 4)),  # three dimensions
    ((512, 8, 512), 64, (8, 8, 1)),  # two
    ((4096, 8, 8), 8, (8, 1, 1)),  # one
    ((8, 4096, 8), 8, (1, 1, 8)),
])  # fmt: skip
def test_the_bound_is_attained_in_each_of_its_three_cases(shape, devices, grid):
    assert communicated(*shape, grid) == pytest.approx(lower_bound(*shape, devices, float("inf")))
    assert lower_bound(64, 64, 64, 64, 50) > lower_bound(64, 64, 64, 64, float("inf"))


def test_shardings_of_one_copy_keep_to_the_bound():
    """If operands start as several copies, the remaining moves have no lower bound."""
    advice = jaxmp.advise(4096, 2048, 1024, 64, dtype="float32", quiet=True)
    one_copy = 4 * (4096 * 2048 + 2048 * 1024 + 4096 * 1024) // 64
    of_one_copy = [c for c in advice.choices if c.memory == one_copy]
    assert {c.pattern for c in of_one_copy} >= {"all_gather", "reduce_scatter", "grid"}
    assert all(c.bytes_moved >= advice.lower_bound > 0 for c in of_one_copy)


def test_a_hundred_thousand_devices():
    """98,280 has the most divisors of all numbers below 100,000 with several primes."""
    devices = 98280
    advice = jaxmp.advise(2 * devices, devices, devices, devices, hardware="gb200-nvl72", quiet=True)
    assert len(advice.choices) > 100
    assert {np.prod([size for _, size in c.mesh]) for c in advice.choices} == {devices}


def test_the_table_has_each_pattern_and_the_bound(capsys):
    advice = jaxmp.advise(64, 32, 128, 8)
    out = capsys.readouterr().out
    assert out.rstrip("\n") == str(advice)
    for pattern in {c.pattern for c in advice.choices}:
        assert f"\n{pattern}  " in out
    assert sum(line.startswith("local  ") for line in out.splitlines()) < sum(c.pattern == "local" for c in ALL)
    assert "some device receives at least " in out
    assert "data sheet" in out
    assert repr(advice).startswith("Advice(64x32x128 bfloat16 on 8 devices of h100-8: ")


def test_choices_are_in_order_and_efficient_ones_are_not_beaten():
    small = jaxmp.Hardware("small", {"bfloat16": 1e12}, 1e12, 1e9, memory=1e6)
    for arguments, options in (((8192, 8192, 8192, 64), {}), ((1024, 1024, 1024, 16), {"hardware": small})):
        advice = jaxmp.advise(*arguments, quiet=True, **options)
        keys = [(not c.fits, c.seconds, c.memory) for c in advice.choices]
        assert keys == sorted(keys)
        for i, c in enumerate(advice.choices):
            as_good = [x for x in advice.choices if x.memory <= c.memory and x.seconds <= c.seconds and x is not c]
            # The first of equal choices is efficient.
            beaten = any((x.memory, x.seconds) != (c.memory, c.seconds) or x in advice.choices[:i] for x in as_good)
            assert c.is_efficient != beaten or not c.fits
        assert advice.best is advice.choices[0]
    assert {c.fits for c in advice.choices} == {True, False}
    assert all((c.memory <= 1e6) == c.fits for c in advice.choices)
    assert "does not fit" in str(advice)
