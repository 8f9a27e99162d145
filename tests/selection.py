"""Which cases of a test the small suite runs.

Most tests take every case of a product of parameters (pattern, transposition, type, epilog, mode), and compile a
program for each. A fault seldom needs more than two of them to coincide, so `make test` runs of such a test

    @pytest.mark.small("pairs")    cases in which every pair of values of two parameters occurs that occurs at all
    @pytest.mark.small("values")   cases in which every value of every parameter occurs

always the same ones; `pytest --exhaustive` runs every case. `of` names the columns where the test's
parameters are not the right ones: a function of them that returns a tuple. What the small suite still notices is
measured in tests/mutations.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Sequence

STRENGTH = {"values": 1, "pairs": 2}


def covering(rows: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Indices of rows in which every combination of `strength` columns' values occurs that occurs in `rows` at all.

    Greedy: always the row with the most new combinations, the first of several.

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
    """A case's values: those of its parameters, or what `of` makes of them; by what they print as without a hash."""
    values = tuple(params.values()) if of is None else of(**params)
    return tuple(value if isinstance(value, Hashable) else repr(value) for value in values)


def small(items: Sequence) -> set:
    """The test items that the small suite runs, of all that were collected."""
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


def share(items: Sequence, index: int, count: int) -> set:
    """Of the cases of each test those whose number is `index` modulo `count`, and all tests that have none."""
    seen, kept = collections.Counter(), set()
    for item in items:
        test = (item.path, getattr(item, "originalname", item.name))
        if not hasattr(item, "callspec") or seen[test] % count == index % count:
            kept.add(item)
        seen[test] += 1
    return kept
