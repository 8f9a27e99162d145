"""The functions with seeded faults exist, and the tests that the faults name exist (tests/mutations)."""

import functools
import importlib
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "mutations"))

from faults import CPP, FAULTS, PYTHON  # noqa: E402


@pytest.mark.parametrize("fault", PYTHON.values(), ids=list(PYTHON))
def test_the_function_of_a_fault_exists(fault):
    functools.reduce(getattr, fault.name.split("."), importlib.import_module(fault.module))


def test_the_tests_of_faults_exist():
    cmake = (TESTS.parent / "CMakeLists.txt").read_text()  # includes the C++ tests without a file
    tests = {test for fault in FAULTS.values() for test in fault.tests}
    named = {test.partition("::")[::2] for test in tests if f"add_cpp_test({test[4:]} " not in cmake}
    paths = {name: TESTS / (f"cpp/{name[4:]}.cc" if name.startswith("cpp:") else name) for name, _ in named}
    assert [path for path in paths.values() if not path.exists()] == []
    assert [test for name, test in named if test and f"def {test}(" not in paths[name].read_text()] == []
    source = (TESTS / "mutations" / "faults.cc").read_text()
    assert [name for name in CPP if f"defined(FAULT_{name})" not in source] == []
