"""The numerics suite over its table, and nvmath's own cases with our bound; test_drawn.py draws more."""

import zlib

import cases
import numpy as np
import pytest
import suite
from suite import Trial

from jaxmp import Epilog

PATTERNS = ("local", "ag-data", "rs-data", "ar-data", "grid", "ag-transposed", "rs-transposed", "gather-b")


def rng_of(trial):
    return np.random.default_rng(zlib.crc32(trial.id.encode()))


def trials(products):
    return [pytest.param(trial, id=trial.id) for trial in products if trial.is_possible()]


def transposition_of(epilog):
    return "TN" if epilog in suite.OPERAND_SUMS else "NN"


# Every epilog on every pattern, with C; on both implementations.
EVERY_EPILOG = [
    Trial(
        cases.BY_NAME[name].replace(
            per_shard=(5, 7, 9), epilog=epilog, has_c=True, transposition=transposition_of(epilog)
        ),
        alpha=1.5,
        beta=-0.5,
        implementation=implementation,
    )
    for name in PATTERNS
    for epilog in suite.EPILOGS
    for implementation in cases.IMPLEMENTATIONS
]

# Every type with every epilog that it has, on the patterns that communicate.
EVERY_TYPE = [
    Trial(
        cases.BY_NAME[name].replace(
            per_shard=(4, 6, 33), epilog=epilog, dtype=dtype, transposition=transposition_of(epilog)
        )
    )
    for name in ("ag", "rs", "ar")
    for dtype in cases.DTYPES
    if dtype != "float32"
    for epilog in suite.EPILOGS
]

# Tall, wide, thin, ragged, k = 1.
EVERY_SHAPE = [
    Trial(cases.BY_NAME[name].replace(per_shard=shape, epilog=epilog, transposition=transposition_of(epilog)))
    for name in ("ag", "rs", "ar", "grid")
    for shape in ((1, 1, 1), (1, 130, 3), (130, 1, 3), (3, 5, 1), (129, 17, 2), (2, 3, 517))
    for epilog in (Epilog.NONE, Epilog.GELU_AUX_BIAS, Epilog.DRELU_BGRAD, Epilog.BGRADB)
]

# tests/nvmath_tests/distributed/test_matmul.py of nvmath 0.9: its extents, transpositions, scalars and epilogs, on its
# layouts (AG, RS; AR without epilog in TN) and number of processes. Extents there are global.
NVMATH_EXTENTS = ((64, 64, 64), (128, 96, 64), (64, 128, 64), (64, 32, 48), (84, 32, 48))
NVMATH_EPILOGS = tuple(e for e in suite.EPILOGS if e not in (Epilog.DRELU, Epilog.DRELU_BGRAD))


def with_extents(case, extents):
    unit = case.replace(per_shard=(1, 1, 1)).extents
    per_shard = tuple(-(-extent // parts) for extent, parts in zip(extents, unit, strict=True))
    return case.replace(per_shard=per_shard)


NVMATH = [
    Trial(
        with_extents(cases.BY_NAME[name].replace(transposition=transposition, epilog=epilog), extents),
        alpha=0.8 if extents[0] == 64 else 1.0,
        beta=0.5 if extents[1] == 96 else None,
    )
    for i, extents in enumerate(NVMATH_EXTENTS)
    for j, transposition in enumerate(cases.TRANSPOSITIONS)
    for e, epilog in enumerate(NVMATH_EPILOGS)
    # Each pair of (extents, transposition), (extents, epilog) and (transposition, epilog) on each layout once or more.
    for name in (("ag", "rs")[(i + j + e) % 2],)
] + [
    Trial(with_extents(cases.BY_NAME["ar"].replace(transposition="TN"), extents), beta=beta)
    for extents in NVMATH_EXTENTS
    for beta in (None, 0.8)
]


# The levels of determinism beyond the default, on every pattern: an epilog that is kept, and one that is kept on some
# layouts and refused on others. What they promise of the bits is in test_determinism*.py.
LEVELS = [
    Trial(
        cases.BY_NAME[name].replace(per_shard=(5, 7, 9), epilog=epilog, has_c=True, dtype=dtype),
        alpha=1.5,
        beta=-0.5,
        implementation=implementation,
        determinism=level,
    )
    for level in suite.DETERMINISM[1:]
    for i, name in enumerate(PATTERNS)
    for epilog, dtype in ((Epilog.GELU_AUX_BIAS, ("float32", "bfloat16")[i % 2]), (Epilog.DRELU_BGRAD, "float32"))
    for implementation in cases.IMPLEMENTATIONS[i % 2 :: 2]
] + [
    Trial(cases.BY_NAME["grid"].replace(per_shard=(3, 2, 5), dtype="complex64", transposition=t), determinism=level)
    for level in suite.DETERMINISM[1:]
    for t in ("TN", "NT")
]


# Nothing along one dimension or two, on every pattern: XLA partitions no body whose operands are all empty.
EMPTY = ((0, 3, 2), (2, 0, 3), (3, 2, 0), (0, 2, 0), (2, 0, 0), (0, 0, 2), (0, 0, 0))


@pytest.mark.parametrize("name", PATTERNS)
def test_empty_products(name):
    """Every epilog with one of the shapes, which is another on the next pattern, by one implementation in turn."""
    for i, epilog in enumerate(suite.EPILOGS, len(EMPTY) - 1 + PATTERNS.index(name)):
        case = cases.BY_NAME[name].replace(epilog=epilog, transposition=transposition_of(epilog))
        trial = Trial(case.replace(per_shard=EMPTY[i % len(EMPTY)]), implementation=cases.IMPLEMENTATIONS[i % 2])
        suite.check(trial, rng_of(trial))


@pytest.mark.parametrize("epilog", suite.OPERAND_SUMS, ids=lambda epilog: epilog.name)
def test_sums_beside_an_empty_result(epilog):
    """With a level of determinism operands are gathered for them, also where the other operand is empty."""
    shape = (5, 0, 3) if epilog == Epilog.BGRADA else (0, 5, 3)
    for name in ("ag-data", "rs-data", "ar-data", "grid"):
        case = cases.BY_NAME[name].replace(per_shard=shape, epilog=epilog, transposition="TN")
        trial = Trial(case, implementation="xla", determinism="topology")
        suite.check(trial, rng_of(trial))


@pytest.mark.small("pairs", of=lambda trial: (trial.case.name, trial.epilog, trial.determinism, trial.implementation))
@pytest.mark.parametrize("trial", trials(LEVELS))
def test_every_level_of_determinism(trial):
    suite.check(trial, rng_of(trial))


@pytest.mark.small("pairs", of=lambda trial: (trial.case.name, trial.epilog, trial.implementation))
@pytest.mark.parametrize("trial", trials(EVERY_EPILOG))
def test_every_epilog_on_every_pattern(trial):
    suite.check(trial, rng_of(trial))


@pytest.mark.small("pairs", of=lambda trial: (trial.case.name, trial.epilog, trial.case.dtype))
@pytest.mark.parametrize("trial", trials(EVERY_TYPE))
def test_every_type(trial):
    suite.check(trial, rng_of(trial))


@pytest.mark.small("pairs", of=lambda trial: (trial.case.name, trial.epilog, trial.case.per_shard))
@pytest.mark.parametrize("trial", trials(EVERY_SHAPE))
def test_every_shape(trial):
    suite.check(trial, rng_of(trial))


@pytest.mark.small(
    "pairs", of=lambda trial: (trial.case.name, trial.epilog, trial.case.extents, trial.case.transposition)
)
@pytest.mark.parametrize("trial", trials(NVMATH))
def test_what_nvmath_tests(trial):
    suite.check(trial, rng_of(trial))


# The judge itself: it must be able to say no.


def test_the_suite_notices_a_lost_rank(monkeypatch):
    trial = Trial(cases.BY_NAME["rs"].replace(per_shard=(5, 7, 9)))
    run = suite.run

    def with_a_lost_rank(trial, x):
        lost = x | {"a": x["a"].copy()}
        lost["a"][:, :9] = 0
        return run(trial, lost)

    monkeypatch.setattr(suite, "run", with_a_lost_rank)
    with pytest.raises(AssertionError, match="out of bounds"):
        suite.check(trial, rng_of(trial))


def test_the_suite_notices_a_bias_that_is_added_twice(monkeypatch):
    trial = Trial(cases.BY_NAME["ar"].replace(per_shard=(5, 7, 9), epilog=Epilog.GELU_AUX_BIAS))
    run = suite.run
    monkeypatch.setattr(suite, "run", lambda trial, x: run(trial, x | {"bias": 2 * x["bias"]}))
    with pytest.raises(AssertionError, match="out of bounds"):
        suite.check(trial, rng_of(trial))
