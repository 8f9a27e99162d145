"""The session on a GPU machine, without one: time that ends, work that goes on, libraries that are cut to one card.

Without these a window could lose what it has found, run over its time, or measure a case twice.
"""

import hashlib
import json
import lzma
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import bundle
import pytest
import record
import session
import unpack
import windows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The folder that a window writes."""
    monkeypatch.setenv("GPU_SESSION_OUT", str(tmp_path))
    monkeypatch.setenv("GPU_SESSION_WINDOW", "1")
    return tmp_path


def program(folder, name, text, **options):
    """A task that runs these lines."""
    file = folder / f"{name}.py"
    file.write_text(
        f"import sys, time\nsys.path.append({str(ROOT / 'tests' / 'gpu_session')!r})\nimport record\n{text}\n"
    )
    return windows.Task(name, (str(file),), **options)


def carry_out(folder, tasks, seconds):
    with (folder / "log").open("a") as log:
        return session.carry_out(tasks, dict(os.environ), time.monotonic() + seconds, log)


def of(task):
    return {line["case"]: line["status"] for line in record.lines() if line["task"] == task}


SLOW = """
for case in ("first", "second", "third"):
    if case in record.ended("slow"):
        continue
    record.add("slow", case, record.PASSED)
    time.sleep(0.2 if "first" in record.ended("slow") and case != "first" else 60)
"""


def test_a_window_ends_in_time_and_goes_on_where_it_was(found):
    """The first call is stopped behind its first case; the second one begins with the next."""
    tasks = [
        program(found, "quick", "print('nothing')", least=0.1),
        program(found, "slow", SLOW, seconds=100, least=0.1),
    ]
    started = time.monotonic()
    assert carry_out(found, tasks, 2.0) == 3
    assert time.monotonic() - started < 6
    assert of("quick") == {windows.WHOLE: "passed"}
    assert of("slow") == {"first": "passed", windows.WHOLE: "stopped"}
    assert carry_out(found, tasks, 30.0) == 0
    assert [line["case"] for line in record.lines() if line["task"] == "quick"] == [windows.WHOLE], "ran once"
    assert of("slow") == dict.fromkeys(("first", "second", "third", windows.WHOLE), "passed")


def test_a_task_is_not_begun_where_no_time_is_left_for_it(found):
    assert carry_out(found, [program(found, "late", "", least=5.0)], 1.0) == 3
    assert not record.lines()


def test_a_task_that_hangs_or_fails_does_not_keep_the_others(found):
    tasks = [
        program(found, "hangs", "time.sleep(60)", seconds=1.0, least=0.1),
        program(found, "dies", "print('a reason', flush=True); sys.exit(7)"),
        program(found, "works", ""),
    ]
    assert carry_out(found, tasks, 30.0) == 1
    assert (of("hangs"), of("dies"), of("works")) == tuple(
        {windows.WHOLE: status} for status in ("failed", "failed", "passed")
    )
    (line,) = (line for line in record.lines() if line["task"] == "dies")
    assert "a reason" in line["said"]


def test_what_a_task_has_started_ends_with_it(found):
    """Ranks that wait for each other would hold the GPU of the next task."""
    child = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    assert carry_out(found, [program(found, "leaves", child)], 30.0) == 0
    pid = int((found / "log").read_text())
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_line_that_was_cut_off_is_left_out(found):
    record.add("task", "whole", record.PASSED)
    with record.path(found, 1).open("a") as file:
        file.write('{"task": "task", "case": "cut o')
    assert [line["case"] for line in record.lines()] == ["whole"]


def test_every_test_that_has_ended_is_recorded_and_left_out(found):
    file = found / "test_some.py"
    file.write_text("def test_right():\n    print('a number')\n\n\ndef test_wrong():\n    assert 1 == 2\n")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "gpu_session"), "GPU_SESSION_TASK": "tests"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "recorded_tests", "-p", "no:cacheprovider", str(file)]
    first = subprocess.run(command, env=env, cwd=found, capture_output=True, text=True)
    assert "1 failed, 1 passed" in first.stdout
    assert {case.rpartition("::")[2]: status for case, status in of("tests").items()} == {
        "test_right": "passed",
        "test_wrong": "failed",
    }
    assert "a number" in str(record.lines())
    again = subprocess.run(command, env=env, cwd=found, capture_output=True, text=True)
    assert (again.returncode, "2 deselected" in again.stdout) == (0, True), again.stdout


# ---- the bundle


def entry(kind, architecture, code):
    header = struct.pack("<HHIQ", kind, 257, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\1") + code


def test_code_for_other_cards_is_blanked_and_nothing_moves():
    keep, drop, text = b"\x90" * 48, b"\x80" * 32, b"ptx " * 8
    entries = entry(2, 80, drop) + entry(2, 90, keep) + entry(1, 90, text)
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    stray = struct.pack("<I", 0xBA55ED50) + b"no container"
    library = b"\x7fELF" + stray + container + b"the end"
    slim = bundle.keep_architecture(library, 90)
    assert slim == library.replace(drop, bytes(32)).replace(text, bytes(32))
    with pytest.raises(SystemExit, match="no machine code for architecture 70"):
        bundle.keep_architecture(library, 70)


def test_parts_hold_everything_once_and_no_more_than_they_may(tmp_path):
    files = []
    for i, size in enumerate((30, 10, 25, 5, 29)):
        files.append(tmp_path / str(i))
        files[-1].write_bytes(bytes(size))
    parts = bundle.into_parts(files, 60)
    assert sorted(file for part in parts for file in part) == files
    assert [sum(file.stat().st_size for file in part) for part in parts] == [59, 40]
    with pytest.raises(SystemExit, match="more than a part may have"):
        bundle.into_parts(files, 20)


def test_a_bundle_is_whole_once_its_last_part_has_come(tmp_path, monkeypatch):
    files = {"libnccl.so.2.xz": lzma.compress(b"nccl"), "conformance.xz": lzma.compress(b"binary")}
    contents = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    for number, (name, data) in enumerate(files.items(), 1):
        part = tmp_path / f"part{number}"
        part.mkdir()
        (part / name).write_bytes(data)
        (part / "contents.json").write_text(json.dumps(contents))
    monkeypatch.setattr(unpack.subprocess, "run", lambda *args, **options: None)  # no wheels here
    site = tmp_path / "site"
    for number, expected in ((1, 1), (2, 0)):
        monkeypatch.setattr(unpack, "HERE", tmp_path / f"part{number}")
        monkeypatch.setattr(sys, "argv", ["unpack.py", "--site", str(site)])
        assert unpack.main() == expected
    assert (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").read_bytes() == b"nccl"
    assert (site / "bin" / "conformance").read_bytes() == b"binary"


def test_every_window_fits_into_its_time():
    assert sorted(windows.WINDOWS) == [1, 2, 3, 4]
    for number in windows.WINDOWS:
        tasks = windows.tasks(number, is_quick=False, is_rehearsal=False)
        assert len({task.name for task in tasks}) == len(tasks)
        assert all(task.least < 60 * 9 - 10 for task in tasks)
        assert all(Path(argument).is_file() for task in tasks for argument in task.command if argument.endswith(".py"))
