"""The table of products (drawn.py): every pair of layout, way to call, transposition, type, epilog, traced scalars,
implementation, level of determinism and batch. The oracle of suite.py judges each with its gradients. `JAXMP_FUZZ=n`
draws n more, from `JAXMP_FUZZ_SEED` on or from a new seed, which is printed. Every program has a number, and a failure
says how to draw it alone."""

import collections
import os
import random
import secrets
import zlib

import cases
import drawn
import jax
import numpy as np
import pytest
import suite
from suite import Trial

from jaxmp import Epilog

FUZZ = int(os.environ.get("JAXMP_FUZZ", "0"))
SEED = os.environ.get("JAXMP_FUZZ_SEED", "")
FAILURES = 20  # a run ends after this many
PROGRAMS_KEPT = 100


def rng_of(trial):
    return np.random.default_rng(zlib.crc32(trial.id.encode()))


@pytest.mark.parametrize("trial", drawn.table(), ids=lambda trial: trial.id)
def test_products(trial):
    """Runs on small integers, on random numbers, and on one kind of special values; the kinds alternate."""
    kinds = drawn.kinds_of(trial)
    special = kinds[2:]
    index = drawn.table().index(trial)
    drawn.check_on(trial, (*kinds[:2], special[index % len(special)]), rng_of(trial))


def test_the_table_has_everything():
    trials = drawn.table()
    assert {trial.epilog for trial in trials} == set(suite.EPILOGS) == set(cases.EPILOGS)
    assert {trial.case.name for trial in trials} == set(cases.BY_NAME)
    assert {trial.case.dtype for trial in trials} == set(cases.DTYPES)
    for name in ("implementation", "determinism", "mode", "traced", "batch", "is_aliased", "donated", "has_remat"):
        assert {getattr(trial, name) for trial in trials} == set(drawn.COLUMNS[name]), name
    assert {(trial.epilog, drawn.KIND[trial.case.name]) for trial in trials} >= {
        (epilog, kind) for epilog in suite.EPILOGS for kind in set(drawn.KIND.values())
    }
    for dimension in range(3):
        assert any(trial.case.per_shard[dimension] == 0 for trial in trials)
        assert any(trial.case.per_shard[dimension] in drawn.PRIMES for trial in trials)
    assert {kind for trial in trials for kind in drawn.kinds_of(trial)} == set(drawn.KINDS)


@pytest.mark.skipif(not FUZZ, reason="JAXMP_FUZZ draws products beyond the table")
def test_drawn_products(capsys):
    seed = number = int(SEED) if SEED else secrets.randbelow(10**9)
    failures, counts = [], collections.Counter()
    while counts["products"] < FUZZ and len(failures) < FAILURES:
        _, trial = drawn.draw(random.Random(number))
        try:
            counts += drawn.check_on(trial, drawn.kinds_of(trial), np.random.default_rng([number, 1]))
        except Exception as error:
            again = f"JAXMP_FUZZ=1 JAXMP_FUZZ_SEED={number}"
            failures.append(f"{trial.id}: {type(error).__name__}: {error}\n  again: {again}")
            with capsys.disabled():
                print(failures[-1], flush=True)
        number += 1
        if number % PROGRAMS_KEPT == 0:
            jax.clear_caches()
            capsys.readouterr()  # one line for each judged matrix
    with capsys.disabled():
        print(f"\n{number - seed} programs from SEED={seed}: {dict(sorted(counts.items()))}", flush=True)
    assert not failures, f"{len(failures)} products of SEED={seed}:\n" + "\n".join(failures)


@pytest.mark.parametrize("epilog", suite.OPERAND_SUMS, ids=lambda epilog: epilog.name)
def test_sums_beside_an_empty_result(epilog):
    """Under a level, operands are gathered for these sums even if the other operand is empty."""
    shape = (5, 0, 3) if epilog == Epilog.BGRADA else (0, 5, 3)
    for name in ("ag-data", "rs-data", "ar-data", "grid"):
        case = cases.BY_NAME[name].replace(per_shard=shape, epilog=epilog, transposition="TN")
        trial = Trial(case, implementation="xla", determinism="topology")
        drawn.check_on(trial, ["normal"], rng_of(trial))


# The judge itself: it must be able to say no.


def test_values_are_what_their_kind_says():
    trial = Trial(cases.BY_NAME["rs"].replace(per_shard=(5, 7, 65)))
    rng = np.random.default_rng(0)
    x = {kind: drawn.values(trial, kind, rng) for kind in drawn.KINDS}
    assert any(np.isnan(drawn.values(trial, "nan", rng)["a"]).any() for _ in range(9))
    assert any(np.isinf(drawn.values(trial, "infinite", rng)["a"]).any() for _ in range(9))
    assert (np.signbit(x["zeros"]["a"]) & (x["zeros"]["a"] == 0)).any()
    a = x["subnormal"]["a"]
    assert ((a != 0) & (np.abs(a) < np.finfo(np.float32).tiny)).any()
    with np.errstate(over="ignore"):
        assert np.isinf(x["overflowing"]["a"] @ x["overflowing"]["b"]).any()


@pytest.mark.parametrize("kind", ["integers", "normal", "nan", "infinite", "zeros", "overflowing"])
def test_the_judge_says_no(kind):
    trial = Trial(cases.BY_NAME["rs-data"].replace(per_shard=(5, 7, 9)))
    x = drawn.values(trial, kind, np.random.default_rng(3))
    if kind in ("nan", "infinite"):
        x["a"][1, 2] = np.nan if kind == "nan" else np.inf
    got = suite.compiled(trial)(x)
    drawn.check(trial, kind, x, got)
    d = np.array(got[0]["d"])
    place = tuple(np.argwhere(~np.isfinite(d))[0]) if kind in ("nan", "infinite", "overflowing") else (0, 0)
    for wrong in (0.0, np.inf, -np.inf, np.nan):
        bad = d.copy()
        bad[place] = wrong
        if bad.tobytes() == d.tobytes() or (np.isnan(bad[place]) and np.isnan(d[place])):
            continue
        bad = cases.put(bad, trial.case.jax_mesh(), trial.case.out)
        with pytest.raises(AssertionError, match=r"should not be|out of bounds|not equal"):
            drawn.check(trial, kind, x, ({"d": bad}, got[1]))


def test_the_judge_of_masks_sees_a_bit_beyond_the_last_column():
    trial = Trial(cases.BY_NAME["local"].replace(mesh=(("x", 1), ("y", 1)), per_shard=(2, 14, 2)))
    want = suite.Expected(np.full((2, 14), -1.0), np.zeros((2, 14)))
    mask = np.zeros((2, 16), np.uint8)
    suite.judge_mask(trial, mask, want, 1)
    mask[0, 1] = 1 << 6
    with pytest.raises(AssertionError, match="padding"):
        suite.judge_mask(trial, mask, want, 1)
