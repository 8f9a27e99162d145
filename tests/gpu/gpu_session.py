"""Runs tests/gpu and the benchmark on a GPU machine that is lent for some minutes, and keeps every finished case.

    python tests/gpu/gpu_session.py --out found [--minutes 9] [--only tests|bench] [arguments of pytest]

A finished case is written to OUT/tests.jsonl or OUT/bench.json before the next one begins. Another call with the same
--out runs the remaining cases. A case that ends its process has failed, and the others still run. Status 0: all passed;
1: a case failed; 3: cases are left to run.

The file is also a plugin of pytest (`-p gpu_session`).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BENCH = HERE.parents[1] / "benchmarks" / "bench_gpu.py"
LEFT = 3
SETTINGS = {"JAXMP_REQUIRE_GPU": "1", "JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def lines(file: Path) -> list[dict]:
    """Returns the cases in a file; skips lines that are not JSON, such as a last line that is cut off."""
    found = []
    for text in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


def add(file: Path, case: str, status: str, **found) -> None:
    """Appends a line and syncs it to disk."""
    with file.open("a") as out:
        out.write(json.dumps({"case": case, "status": status} | found) + "\n")
        out.flush()
        os.fsync(out.fileno())


def run(command: list[str], end: float) -> int | None:
    """Returns the exit status, or None if the time is over; ends all processes that the command has started."""
    env = os.environ | SETTINGS
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), env.get("PYTHONPATH"))))
    process = subprocess.Popen([sys.executable, *command], env=env, start_new_session=True)
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_tests(file: Path, arguments: list[str], end: float) -> int:
    """Runs pytest until no case is left; the rest goes on if a test ends its process (watchdog, time limit)."""
    command = ["-P", "-m", "pytest", "-p", "gpu_session", f"--record={file}"]
    command += ["--timeout=300", "--timeout-method=thread", "-p", "no:benchmark"]  # this plugin warns under xdist
    while True:
        seen = len(lines(file))
        status = run([*command, f"--seen={seen}", *arguments], end)
        if status is None:
            return LEFT
        new = lines(file)[seen:]
        ended = {line["case"] for line in new if line["status"] != "started"}
        open_cases = [line["case"] for line in new if line["case"] not in ended]
        for case in open_cases:
            add(file, case, "failed", why=f"its process ended with status {status}")
        if not open_cases:
            failed = [line["case"] for line in lines(file) if line["status"] == "failed"]
            print("".join(f"failed: {case}\n" for case in failed), end="", flush=True)
            return int(bool(failed) or status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED))


def run_bench(file: Path, arguments: list[str], end: float) -> int:
    fakes = ["-m", "fake_gpus"] if "JAXMP_FAKES" in os.environ else []
    status = run([*fakes, str(BENCH), "--resume", f"--json={file}", *arguments], end)
    return LEFT if status is None else int(status != 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="which are not exceeded")
    parser.add_argument("--only", choices=("tests", "bench"))
    parser.add_argument("--bench", default="", help="arguments of bench_gpu.py, as one")
    arguments, for_pytest = parser.parse_known_args()
    end = time.monotonic() + 60 * arguments.minutes
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    statuses = []
    if arguments.only != "bench":
        is_some = any(Path(argument.partition("::")[0]).exists() for argument in for_pytest)
        statuses.append(run_tests(out / "tests.jsonl", [*for_pytest, *([] if is_some else [str(HERE)])], end))
    if arguments.only != "tests":
        statuses.append(run_bench(out / "bench.json", arguments.bench.split(), end))
    return max(statuses)


# ---- the plugin


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="the file of cases")
    parser.addoption("--seen", type=int, help="leave out the cases that have ended in so many of its lines")


@pytest.hookimpl(trylast=True)  # after --share, which counts all cases
def pytest_collection_modifyitems(config, items):
    seen = lines(config.getoption("--record"))[: config.getoption("--seen")]
    ended = {line["case"] for line in seen if line["status"] != "started"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ended])
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # under pytest-xdist the first process records all cases
        config.pluginmanager.register(_Recorder(config.getoption("--record")))


class _Recorder:
    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logstart(self, nodeid):
        add(self.file, nodeid, "started")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            why = {"why": str(report.longrepr)[-4000:]} if report.outcome != "passed" else {}
            said = report.capstdout[-2000:]
            add(self.file, report.nodeid, report.outcome, seconds=round(report.duration, 3), said=said, **why)


if __name__ == "__main__":
    sys.exit(main())
