"""The list of seeded faults fits the sources: an entry whose text has moved would prove nothing (tests/mutations)."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutations"))

from faults import FAULTS  # noqa: E402


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_the_old_text_of_every_fault_occurs_once(file):
    source = (ROOT / file).read_text()
    wrong = {fault.id: source.count(fault.old) for fault in FAULTS if fault.file == file}
    assert {name: count for name, count in wrong.items() if count != 1} == {}


def test_every_fault_is_one_of_its_own():
    assert len(FAULTS) >= 60
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert [fault.id for fault in FAULTS if fault.old == fault.new] == []


def test_the_tests_that_faults_name_exist():
    folder = ROOT / "tests"
    named = {tuple(name.partition("::")[::2]) for fault in FAULTS for name in fault.first}
    paths = {name: folder / "cpp" / f"{name[4:]}.cc" if name.startswith("cpp:") else folder / name for name, _ in named}
    assert [path for path in paths.values() if not path.exists()] == []
    assert [test for name, test in named if test and f"def {test}(" not in paths[name].read_text()] == []
