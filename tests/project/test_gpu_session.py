"""tests/gpu/gpu_session.py without a GPU: the time ends, work continues, cases end their process.

Without these tests, a session on a lent machine could lose its results, exceed its time, or run a case twice.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLOW = """
import os, subprocess, time

def test_first():
    print("a number")

def test_dies():
    os._exit(7)

def test_wrong():
    assert 1 == 2

def test_hangs():
    if not os.path.exists("go"):
        open("child", "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)

def test_last():
    pass
"""


def session(folder, minutes):
    """Runs a session on the tests above; returns (exit status, {case: status})."""
    (folder / "test_slow.py").write_text(SLOW)
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "gpu_session.py"), "--out", "found", f"--minutes={minutes}"]
    command += ["--only=tests", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "test_slow.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in (folder / "found" / "tests.jsonl").read_text().splitlines()]
    ended = [(line["case"].partition("::")[2], line) for line in lines if line["status"] != "started"]
    assert len(dict(ended)) == len(ended), "no case twice"
    return done.returncode, dict(ended)


def test_a_session_ends_in_time_and_goes_on_where_it_was(tmp_path):
    started = time.monotonic()
    status, ended = session(tmp_path, minutes=0.2)
    assert (status, time.monotonic() - started < 20) == (3, True)
    assert {case: line["status"] for case, line in ended.items()} == {
        "test_first": "passed",
        "test_dies": "failed",
        "test_wrong": "failed",
    }
    assert "a number" in ended["test_first"]["said"]
    assert ended["test_dies"]["why"] == "its process ended with status 7"
    assert "assert 1 == 2" in ended["test_wrong"]["why"]
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z", "what a test has started ends with the session"
    (tmp_path / "go").touch()
    status, ended = session(tmp_path, minutes=1)
    assert (status, ended["test_hangs"]["status"], ended["test_last"]["status"]) == (1, "passed", "passed")
