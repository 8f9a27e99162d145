"""The small suite covers what it leaves out: every pair, or every value, occurs in a case that it runs."""

import dataclasses
import itertools

import pytest
import selection


@dataclasses.dataclass(frozen=True)
class Plain:
    path: str
    name: str


@dataclasses.dataclass(frozen=True)
class Case(Plain):
    callspec: int
    originalname: str = "test_of_cases"


ROWS = list(itertools.product("abcd", range(6), ("x", "y", "z")))


def combinations(rows, strength):
    return {combination for row in rows for combination in itertools.combinations(list(enumerate(row)), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 30)])
def test_every_combination_is_covered_by_few_rows(strength, most):
    chosen = selection.covering(ROWS, strength)
    assert combinations([ROWS[i] for i in chosen], strength) == combinations(ROWS, strength)
    assert {1: 6, 2: 24}[strength] <= len(chosen) <= most


def test_combinations_that_no_row_has_are_not_asked_for():
    rows = [row for row in ROWS if row[0] != "a" or row[2] == "x"]
    chosen = [rows[i] for i in selection.covering(rows, 2)]
    assert combinations(chosen, 2) == combinations(rows, 2)


def test_the_selection_is_always_the_same():
    assert selection.covering(ROWS, 2) == selection.covering(list(ROWS), 2)
    assert selection.covering([], 2) == []
    assert selection.covering([("a",), ("b",), ("a",)], 2) == [0, 1]


def test_columns_may_be_named_and_need_no_hash():
    params = {"shape": [1, 2], "dtype": "float32"}
    assert selection.columns_of(params) == ("[1, 2]", "float32")
    assert selection.columns_of(params, lambda shape, dtype: (len(shape),)) == (2,)


@pytest.mark.small("values")
@pytest.mark.parametrize("right", range(3))
@pytest.mark.parametrize("left", range(2))
def test_cases_of_a_product(left, right):
    """A test with several cases; the next test finds fewer of them."""


def test_only_the_exhaustive_suite_runs_every_case(request):
    config = request.config
    if config.getoption("--share") or config.getoption("keyword") or any("[" in arg for arg in config.args):
        pytest.skip("a part of the tests was asked for")
    mine = [item for item in request.session.items if item.originalname == "test_cases_of_a_product"]
    assert len(mine) == (6 if config.getoption("--exhaustive") else 3)


def test_shares_add_up_to_every_case_and_every_test():
    tests = {Plain(path, f"test_{i}") for path in "ab" for i in range(3)}
    cases = {Case("a", f"test_of_cases[{i}]", i) for i in range(5)}
    items = sorted(tests | cases, key=lambda item: (item.path, item.name))
    shares = [selection.share(items, (i, 2), (i, 2)) for i in range(2)]
    assert shares[0] | shares[1] == tests | cases
    assert not shares[0] & shares[1]
    assert [(len(share & tests), len(share & cases)) for share in shares] == [(4, 3), (2, 2)]
    assert selection.share(items, (0, 5)) == tests | {Case("a", "test_of_cases[0]", 0)}
