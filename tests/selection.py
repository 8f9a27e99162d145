"""Which cases of a test the small suite runs.

Most tests have a case for every combination of parameters (pattern, transposition, type, epilog, mode), and compile a
program for each. A fault seldom needs more than two particular values, so `make test` runs from such a test

    @pytest.mark.small("pairs")    cases with every pair of values of two parameters that occurs in any case
    @pytest.mark.small("values")   cases with every value of every parameter

always the same cases; `pytest --exhaustive` runs every case. If the parameters are not the right columns, `of` is a
function of them that returns the columns as a tuple. tests/mutations measures the faults that the small suite still
notices.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Sequence

STRENGTH = {"values": 1, "pairs": 2}


def covering(rows: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Returns indices of rows that together have every combination of `strength` columns' values that `rows` has.

    Greedy: takes the row with the most new combinations, or the first of several.

    >>> covering([("a", 1), ("a", 2), ("b", 1), ("b", 2)], 1)
    [0, 3]
    """
    left = [_combinations(row, strength) for row in rows]
    missing = set().union(*left)
    chosen = []
    while missing:
        left = [combinations & missing for combinations in left]
        best = max(range(len(left)), key=lambda i: len(left[i]))
        missing -= left[best]
        chosen.append(best)
    return sorted(chosen)


def _combinations(row: tuple[Hashable, ...], strength: int) -> frozenset:
    columns = list(enumerate(row))
    return frozenset(itertools.combinations(columns, min(strength, len(columns))))


def columns_of(params: dict, of=None) -> tuple[Hashable, ...]:
    """Returns a case's parameter values, or the result of `of`; values without a hash become their repr."""
    values = tuple(params.values()) if of is None else of(**params)
    return tuple(value if isinstance(value, Hashable) else repr(value) for value in values)


def small(items: Sequence) -> set:
    """Returns the collected test items that the small suite runs."""
    kept, tests = set(), {}
    for item in items:
        if item.get_closest_marker("small") and hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
        else:
            kept.add(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("small")
        rows = [columns_of(item.callspec.params, mark.kwargs.get("of")) for item in cases]
        kept.update(cases[i] for i in covering(rows, STRENGTH[mark.args[0]]))
    return kept


def share(items: Sequence, cases: tuple[int, int], tests: tuple[int, int] = (0, 1)) -> set:
    """Returns the cases of each test whose number is I modulo N of `cases`, and the tests without cases of each file
    whose number is I modulo N of `tests`."""
    seen, kept = collections.Counter(), set()
    for item in items:
        has_cases = hasattr(item, "callspec")
        group = (item.path, getattr(item, "originalname", item.name) if has_cases else None)
        index, count = cases if has_cases else tests
        if seen[group] % count == index % count:
            kept.add(item)
        seen[group] += 1
    return kept
