"""Random products: how they are drawn, the table that contains every pair of values, and the numbers they run on.

`draw` makes a trial (suite.py): layout, way to call, transposition, type, extents (primes, ones and zeros among them),
scalars as numbers or operands, C, epilog, implementation, level of determinism, a batch, aliased or donated operands,
rematerialization. `table` draws until every possible pair of values of the columns in PAIRS has occurred, and every
value of every column. Each trial is compiled once and runs on several sets of numbers: small integers, from the normal
distribution, with zeros of both signs, with NaN, with infinities, with subnormals, and so large that sums overflow. The
oracle of suite.py judges every output and gradient: small integers bitwise, a NaN must be a NaN, an infinity that
infinity, and everything else within the bound. XLA:CPU flushes subnormals to zero, so there the smallest normal number
is allowed in addition. float16's subnormals are normal numbers of its accumulator: such a result is rounded to a
multiple of the smallest one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import random

import cases
import jax.numpy as jnp
import modes
import numpy as np
import suite
from suite import Expected, Trial

from jaxmp import Epilog

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 61, 127)
KINDS = ("integers", "normal", "zeros", "nan", "infinite", "subnormal", "overflowing")
_SUMS_OF_D = (Epilog.DRELU_BGRAD, Epilog.DGELU_BGRAD)
KIND = {
    case.name: case.pattern + "-transposed" * case.computes_transposed + (case.gathers and f"-gathers-{case.gathers}")
    for case in cases.CASES
}
COLUMNS = {
    "layout": tuple(cases.BY_NAME),
    "mode": ("explicit", *modes.BY_ID),
    "transposition": cases.TRANSPOSITIONS,
    "conjugation": tuple(itertools.product((False, True), repeat=2)),
    "dtype": cases.DTYPES,
    "epilog": suite.EPILOGS,
    "alpha": (1.0, 0.5, -1.25),
    "beta": (None, None, 1.0, -0.75, 2.0, 0.0),
    "traced": ((), (), ("alpha",), ("beta",), ("alpha", "beta")),
    "implementation": cases.IMPLEMENTATIONS,
    "determinism": ("run_to_run", *suite.DETERMINISM),  # half of them are the default
    "batch": ("", "", "", "rows", "columns", "both", "c", "bias", "aux"),
    "is_aliased": (False, False, True),
    "donated": ("", "", "c", "everything"),
    "has_remat": (False, False, True),
    "empty": ("", "", "", "", "", "m", "n", "k", "mk", "mnk"),
}
# Every pair of values of these columns is in the table; "kind" is a layout's kind, and "way" a mode, eager or not.
PAIRS = ("kind", "way", "transposition", "dtype", "epilog", "traced", "implementation", "determinism", "batch")
MORE_PAIRS = (
    ("layout", "transposition"),
    ("mode", "kind"),
    ("conjugation", "transposition"),
    ("conjugation", "kind"),
    ("conjugation", "epilog"),
    ("empty", "epilog"),
    ("beta", "epilog"),
)


def draw(rng: random.Random, tries: int = 10**6, **fixed) -> tuple[dict, Trial] | None:
    """Returns (a row of values by column, `fixed` ones included, and its trial), or None after `tries` failures."""
    options = {name: [value for value in values if _fits(fixed, name, value)] for name, values in COLUMNS.items()}
    for _ in range(tries):
        row = {name: rng.choice(values) for name, values in options.items()} | fixed
        if _is_possible(row):
            row |= {"kind": KIND[row["layout"]], "way": row["mode"].removesuffix("-eager")}
            return row, _trial(rng, row)
    return None


def _fits(fixed, name: str, value) -> bool:
    """True if a layout or a mode fits the given kind or way."""
    kind, way = fixed.get("kind"), fixed.get("way")
    return {"layout": not kind or KIND.get(value) == kind, "mode": not way or str(value).startswith(way)}.get(
        name, True
    )


def _is_possible(row: dict) -> bool:
    case, mode, has_level = cases.BY_NAME[row["layout"]], modes.BY_ID[row["mode"]], row["determinism"] != "run_to_run"
    is_complex, traced, beta = row["dtype"].startswith("complex"), row["traced"], row["beta"]
    return (
        mode.serves(case)
        and suite.is_possible(row["epilog"], row["transposition"], is_complex, row["conjugation"])
        and not (has_level and (traced or row["mode"] != "explicit"))
        and not (traced and row["epilog"] in suite.SUMS)  # alpha and beta must be numbers there
        and ("beta" not in traced or bool(beta))
        and not (row["donated"] == "c" and (beta is None or traced))
        # XLA aborts on some empty arrays of gradients that are not compiled as a whole.
        and (mode.is_jitted or not (row["batch"] or row["donated"] or row["has_remat"] or row["empty"]))
        and not (row["empty"] and row["mode"].startswith("shard_map"))  # XLA partitions no empty body
        and not (row["is_aliased"] and (row["batch"] or mode.axis_type is None))
    )


def _trial(rng: random.Random, row: dict) -> Trial:
    case = cases.BY_NAME[row["layout"]].replace(
        **{name: row[name] for name in ("transposition", "conjugation", "dtype", "epilog")},
        has_c=row["beta"] is not None,
    )
    is_aliased = row["is_aliased"] and case.stored[0] == case.stored[1]
    case = case.replace(per_shard=_extents(rng, case, row["empty"], is_aliased))
    names = ("alpha", "beta", "implementation", "determinism", "mode", "traced", "batch", "donated", "has_remat")
    return Trial(case, is_aliased=is_aliased, **{name: row[name] for name in names})


def _extents(rng: random.Random, case, empty: str, is_aliased: bool) -> tuple[int, int, int]:
    """Returns random extents per shard; aliased operands get equal shapes."""

    def extent(name):
        if name in empty:
            return 0
        return rng.choice(PRIMES) if rng.random() < 0.5 else rng.choice((*range(1, 10), 16, 31, 64, 65, 130))

    m, n, k = map(extent, "mnk")
    if not is_aliased:
        return m, n, k
    parts = case.replace(per_shard=(1, 1, 1)).extents
    whole = m * math.lcm(*parts)
    same = tuple(whole // part for part in parts)
    # a a^T and a^T a take any k; a a needs a square a.
    return (same[0], same[1], k) if case.transposition in ("NT", "TN") else same


def _cells(row: dict) -> frozenset:
    """Returns the pairs of values and single values that a row covers."""
    pairs = [*itertools.combinations(PAIRS, 2), *MORE_PAIRS]
    return frozenset(tuple((name, row[name]) for name in names) for names in (*pairs, *((name,) for name in COLUMNS)))


@functools.cache
def table(candidates: int = 8) -> tuple[Trial, ...]:
    """Returns a fixed table of trials with every possible pair: repeatedly takes the best of some random rows."""
    rng = random.Random(0)
    values = COLUMNS | {"kind": KIND.values(), "way": [mode.removesuffix("-eager") for mode in modes.BY_ID]}
    names = (*itertools.combinations(PAIRS, 2), *MORE_PAIRS, *((name,) for name in COLUMNS))
    missing = dict.fromkeys(
        tuple(zip(each, chosen, strict=True)) for each in names for chosen in itertools.product(*map(values.get, each))
    )
    trials = []
    while missing:
        wanted = next(iter(missing))
        missing.pop(wanted)
        rows = [row for row in [draw(rng, 2000, **dict(wanted))] if row]
        rows += [draw(rng, **dict(wanted)) for _ in range(candidates) if rows]
        if rows:
            row, trial = max(rows, key=lambda found: len(_cells(found[0]) & missing.keys()))
            for cell in _cells(row):
                missing.pop(cell, None)
            trials.append(trial)
    return tuple(trials)


def kinds_of(trial: Trial) -> tuple[str, ...]:
    """Returns the kinds of values that the product runs on, in order, without kinds that do not fit it."""
    left_out = set()
    if trial.is_aliased:
        left_out.add("subnormal")  # products of subnormals with each other are 0
    if trial.case.dtype not in ("float32", "bfloat16", "float16") or trial.epilog in _SUMS_OF_D:
        left_out.add("overflowing")  # float64 overflows in the oracle, too; signs mix
    if trial.batch in ("c", "bias", "aux") or trial.traced:
        left_out |= {"nan", "infinite", "overflowing"}  # cotangents may be summed before their product
    if suite.FORWARD.get(trial.epilog) == "gelu" and trial.alpha < 0:
        left_out.add("overflowing")  # gelu(-inf) is NaN in jax.nn.gelu
    return tuple(kind for kind in KINDS if kind not in left_out)


def values(trial: Trial, kind: str, rng) -> dict[str, np.ndarray]:
    """Returns stored operands and weights of the loss; a batch is the first dimension."""
    examples = [_example(trial, kind, rng) for _ in range(suite.BATCH if trial.batch else 1)]

    def stacked(name):
        return np.stack([x[name] for x in examples]) if trial.has_batch(name) else examples[0][name]

    return {name: stacked(name) for name in examples[0]}


def _example(trial: Trial, kind: str, rng) -> dict[str, np.ndarray]:
    x = suite.draw(trial, rng)
    if kind == "integers":
        _make_integers(trial, x, rng)
    dtype, inputs = trial.case.dtype, [x[name] for name in ("a", "b", "c", "bias", "gelu_aux") if name in x]
    if kind == "zeros":
        for v in inputs:
            v[rng.random(v.shape) < 0.5] *= np.zeros((), dtype)  # keeps the sign
    elif kind in ("nan", "infinite"):
        for v in inputs:
            if v.size and rng.random() < 0.5:
                places = rng.integers(v.size, size=rng.integers(1, 4))
                special = np.nan if kind == "nan" else rng.choice((-np.inf, np.inf), places.shape)
                v.ravel()[places] = np.broadcast_to(special, places.shape).astype(dtype)
    elif kind == "subnormal":
        _make_subnormal(trial, x, rng)
    elif kind == "overflowing":
        _make_overflowing(trial, x, rng)
    return x | {"b": x["a"]} if trial.is_aliased else x


def _make_integers(trial: Trial, x: dict[str, np.ndarray], rng) -> None:
    """Makes operands integers with exact partial sums in every accumulator; C is NaN, and not read, if beta is 0."""
    for name, v in x.items():
        if name not in ("relu_aux", "alpha", "beta"):
            # Larger integers in 16 bits: their sums need rounding, so a rounded partial sum shows.
            size = 9 if name == "a" and v.dtype.itemsize == 2 else 1
            v[...] = size * cases.small_integers(rng, v.shape, v.dtype)
    if trial.beta == 0:
        x["c"][...] = np.nan


def is_exact(trial: Trial, kind: str) -> bool:
    """True if only stored results are rounded."""
    return kind == "integers" and "gelu" not in (suite.FORWARD.get(trial.epilog), suite.BACKWARD.get(trial.epilog))


def _make_subnormal(trial: Trial, x: dict[str, np.ndarray], rng) -> None:
    """Makes some rows of op(a) subnormal, and all values so small that no sum with these rows is normal. So any flush
    changes a result by at most the smallest normal number."""
    case, tiny = trial.case, float(jnp.finfo(trial.case.dtype).tiny)
    (m, n, k), dtype = case.extents, jnp.dtype(trial.case.dtype)
    summed = max(m, 1) if trial.epilog in _SUMS_OF_D else 1

    def scale(v, factor):
        v[...] = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) * factor).astype(dtype)

    a = x["a"].T if case.transposition[0] == "T" else x["a"]
    rows = rng.random(m) < 0.7
    a[rows] = (tiny / (summed * max(k, 1)) * rng.random((np.count_nonzero(rows), k))).astype(dtype)
    scale(x["b"], 1 / (8 * max(k, 1)))
    for name in x:
        if name.startswith("w_"):
            scale(x[name], 1 / (64 * max(m, n, 1)))
    if rng.random() < 0.5:
        for name in ("c", "bias"):
            if name in x:
                scale(x[name], tiny / (16 * summed))


def _make_overflowing(trial: Trial, x: dict[str, np.ndarray], rng) -> None:
    """Makes a and b positive with few bits, so that the order of sums does not matter; some rows overflow. All rows are
    within a factor of four: with few large terms among many, the bound would be too small."""
    case, dtype = trial.case, jnp.dtype(trial.case.dtype)
    largest, of_b = (16, 5) if dtype == jnp.float16 else (128, 61)
    of_a = largest - of_b - int(np.log2(4 * max(case.extents[2], 1)))  # k products of 4 on average
    a = x["a"].T if case.transposition[0] == "T" else x["a"]
    a[...] = (rng.integers(1, 4, a.shape) * 2.0 ** (of_a + rng.integers(-1, 2, (a.shape[0], 1)))).astype(dtype)
    x["b"][...] = (rng.integers(1, 4, x["b"].shape) * 2.0**of_b).astype(dtype)


def allowed_beside(trial: Trial, kind: str) -> float:
    """Returns the error that a flushed or rounded subnormal may cause."""
    if trial.case.dtype == "float16":
        return float(jnp.finfo(trial.case.dtype).smallest_subnormal)
    return float(jnp.finfo(trial.case.dtype).tiny) if kind == "subnormal" else 0.0


def check(trial: Trial, kind: str, x, got) -> None:
    """Judges the results of a trial on values of a kind."""
    absolute = allowed_beside(trial, kind)

    def oracle(trial, x):
        with np.errstate(all="ignore"):
            underflow = absolute if trial.case.dtype == "float16" else 0.0
            found = suite.expected(trial, x, absolute, underflow)
        if kind != "overflowing":
            return found
        return tuple({n: _overflowed(trial, n, v) for n, v in each.items()} for each in found)

    suite.check_results(trial, x, got, oracle, absolute, is_exact(trial, kind))


def _overflowed(trial: Trial, name: str, want: Expected) -> Expected:
    """Turns overflowing values into infinities; close to the type's largest number (1 %), both are right."""
    if name == "relu_aux":
        return want
    most = float(jnp.finfo(suite.scalar_type(trial.case.dtype) if name in trial.traced else trial.case.dtype).max)
    value = np.where(np.abs(want.value) > 1.01 * most, np.copysign(np.inf, want.value), want.value)
    return dataclasses.replace(
        want, value=value, may_overflow=want.may_overflow | (want.scale * max(1, 1 / abs(trial.alpha)) > 0.99 * most)
    )


def check_on(trial: Trial, kinds, rng) -> collections.Counter:
    """Judges a trial on values of each kind; counts results and refusals."""
    cases.require(trial.implementation)
    run, count = suite.compiled(trial), collections.Counter()
    for kind in kinds:
        x = values(trial, kind, rng)
        try:
            got = run(x)
        except NotImplementedError as error:
            if not is_refusal(trial, str(error)):
                raise
            return collections.Counter(["programs refused"])
        # Under vmap an epilog's sums are separate operations, which are refused in other cases; an empty product has
        # none; some refusals concern gradients.
        may_pass = trial.batch or 0 in trial.case.extents or trial.donated == "c"
        assert may_pass or not trial.refusal(), f"{trial.id}: is not refused"
        check(trial, kind, x, got)
        count.update(["products", f"of {kind} values", f"of {trial.case.dtype}", f"of pattern {trial.case.pattern}"])
    return count


def is_refusal(trial: Trial, message: str) -> bool:
    """True if docs/determinism.md has this message for this product."""
    has_sums = trial.determinism == "topology" and trial.epilog in suite.SUMS
    if has_sums and trial.batch and f"has no epilog {trial.epilog.name} under vmap" in message:
        return True
    # An empty sum has its epilog outside a call, on each device's rows.
    if has_sums and not trial.case.extents[2] and f"has no epilog {trial.epilog.name} on rows that are" in message:
        return True
    return bool(trial.refusal()) and trial.refusal() in message
