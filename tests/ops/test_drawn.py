"""Products drawn at random (drawn.py), each compiled once and run on several sets of values.

`JAXMP_FUZZ=n` runs n products instead of a few hundred, from `JAXMP_FUZZ_SEED` on or from a new seed, which it prints
(`JAXMP_FUZZ=20000 make test-python ARGS="-k drawn_products --timeout=0"`). Every program has a number of its own, and a
failure says how to draw it alone.
"""

import os
import secrets

import cases
import drawn
import jax
import numpy as np
import pytest

FUZZ = int(os.environ.get("JAXMP_FUZZ", "0"))
SEED = os.environ.get("JAXMP_FUZZ_SEED", "")
VALUES = len(drawn.KINDS)
FAILURES = 20  # after which a run ends
PROGRAMS_KEPT = 100


def test_drawn_products(capsys):
    cases.require(None)
    count = FUZZ or 96 * VALUES
    seed = int(SEED) if SEED else secrets.randbelow(10**9) if FUZZ else 0
    tally, number = drawn.Tally(), seed
    with capsys.disabled():
        if FUZZ:
            print(f"\n{count} products from SEED={seed}", flush=True)
    while tally.counts["products"] < count and len(tally.failures) < FAILURES:
        try:
            drawn.check_number(number, min(VALUES, count - tally.counts["products"]), tally)
        except Exception as error:
            tally.failures.append(
                f"{type(error).__name__}: {error}\n  again: JAXMP_FUZZ={VALUES} JAXMP_FUZZ_SEED={number}"
            )
            with capsys.disabled():
                print(f"{drawn.draw(number).id}: {tally.failures[-1]}", flush=True)
        number += 1
        if number % PROGRAMS_KEPT == 0:
            jax.clear_caches()
            capsys.readouterr()  # a line for each matrix that was judged
    with capsys.disabled():
        if FUZZ:
            print(f"{number - seed} programs: {tally}", flush=True)
    assert not tally.failures, f"{len(tally.failures)} products of SEED={seed}:\n" + "\n".join(tally.failures)


def test_few_numbers_draw_everything():
    """Whatever the docstring of drawn.py names is among the products that every run of the tests draws."""
    products = [drawn.draw(number) for number in range(96)]
    trials = [product.trial for product in products]
    assert {trial.epilog for trial in trials} == set(drawn.suite.EPILOGS)
    assert {trial.case.pattern for trial in trials} == {case.pattern for case in cases.CASES}
    assert {trial.case.dtype for trial in trials} == set(cases.DTYPES)
    assert {trial.case.transposition for trial in trials} == set(cases.TRANSPOSITIONS)
    assert {trial.determinism for trial in trials} == set(drawn.suite.DETERMINISM)
    assert {product.batch for product in products} == {"", "rows", "both"}
    assert {product.donated for product in products} == {"", "c", "everything"}
    assert any(product.is_aliased for product in products)
    for dimension in range(3):
        assert any(trial.case.per_shard[dimension] == 0 for trial in trials)
        assert any(trial.case.per_shard[dimension] in drawn.PRIMES for trial in trials)
    assert {kind for product in products for kind in drawn.kinds_of(product)} == set(drawn.KINDS)


def test_values_are_what_their_kind_says():
    product = next(
        p
        for p in map(drawn.draw, range(1000))
        if p.trial.case.dtype == "float32"
        and "overflowing" in drawn.kinds_of(p)
        and min(p.trial.case.extents) > 4
        and not p.is_aliased
    )
    rng = np.random.default_rng(0)
    x = {kind: drawn.values(product, kind, rng) for kind in drawn.KINDS}
    assert any(np.isnan(v).any() for v in x["nan"].values() if v.dtype == np.float32)
    assert any(np.isinf(v).any() for v in x["infinite"].values() if v.dtype == np.float32)
    assert (np.signbit(x["zeros"]["a"]) & (x["zeros"]["a"] == 0)).any()
    a = x["subnormal"]["a"]
    assert ((a != 0) & (np.abs(a) < np.finfo(np.float32).tiny)).any()
    with np.errstate(over="ignore"):
        wide = np.matmul(*product.trial.case.op(*(drawn._part(product, x["overflowing"], 0)[name] for name in "ab")))
    assert np.isinf(wide).any()


@pytest.mark.parametrize("kind", ["nan", "infinite", "zeros", "overflowing"])
def test_the_judge_says_no(kind):
    """To one element that is finite where it should not be, or the other way round."""
    cases.require(None)
    trial = drawn.Trial(cases.BY_NAME["rs-data"].replace(per_shard=(5, 7, 9)))
    product = drawn.Product(0, trial)
    rng = np.random.default_rng(3)
    x = drawn.values(product, kind, rng)
    if kind in ("nan", "infinite"):
        x["a"][1, 2] = np.nan if kind == "nan" else np.inf
    got = drawn.compile_product(product, x)(x)
    drawn.check(product, kind, x, got)
    d = np.array(got[0]["d"])
    place = tuple(np.argwhere(~np.isfinite(d))[0]) if kind in ("nan", "infinite", "overflowing") else (0, 0)
    for wrong in (0.0, np.inf, -np.inf, np.nan):
        bad = d.copy()
        bad[place] = wrong
        if bad.tobytes() == d.tobytes() or (np.isnan(bad[place]) and np.isnan(d[place])):
            continue
        bad = cases.put(bad, trial.case.jax_mesh(), trial.case.out)
        with pytest.raises(AssertionError, match=r"should not be|out of bounds"):
            drawn.check(product, kind, x, ({"d": bad}, got[1]))
