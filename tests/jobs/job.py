"""Real processes for a test: a free port, a log per rank, a deadline that kills, and every log in a failure."""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Tests never wait for the default of 60 s.
TIMEOUT = 4.0
# The last line of the log when jaxmp ends a process.
ENDED_WITH = r"^jaxmp\.(DistributedError: rank \d+: .*)$"


@dataclasses.dataclass
class Rank:
    """How one process ended: its status (negative: a signal), its log, and seconds from the fault to what it saw."""

    status: int
    log: str
    seconds: float | None = None

    @property
    def saw(self) -> str:
        """The type and the message of what the program caught, or else of what its process ended with, or ""."""
        found = re.search(r"^SAW [\d.]+ (.*)$", self.log, flags=re.M) or re.search(ENDED_WITH, self.log, flags=re.M)
        return found[1] if found else ""


class Job:
    """The processes of one scenario of `ranks.py`; `machines` are the commands that start one on each of them."""

    def __init__(self, folder: Path, scenario: str, nprocesses: int, *, ndevices: int = 1, env=None, machines=None):
        self.scenario, self.folder = scenario, folder
        self.port = free_port()
        base = {name: value for name, value in os.environ.items() if not name.startswith(("JAXMP_", "PMI_", "OMPI_"))}
        base |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={ndevices}",
            "JAXMP_TIMEOUT": str(TIMEOUT),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
            # Two processors and four ranks: more threads of BLAS would only wait for each other.
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.processes, self.logs = [], []
        for process in range(nprocesses):
            log = folder / f"{scenario}.{process}.log"
            own = (env or {}).get(process, {}) | (env or {}).get("all", {})
            with log.open("w") as stream:
                command = [sys.executable, "-u", str(HERE / "ranks.py"), scenario, str(process), str(nprocesses)]
                started = subprocess.Popen(
                    [*(machines[process] if machines else ()), *command, str(self.port)],
                    env=base | own,
                    cwd=folder,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(started)
            self.logs.append(log)

    def wait(self, deadline: float = 60.0, *, stopped: tuple[int, ...] = ()) -> list[Rank]:
        """Waits for every rank's end; ranks in `stopped` are killed when the others have ended."""
        end = time.monotonic() + deadline
        late = []
        try:
            for i, process in enumerate(self.processes):
                if i not in stopped:
                    try:
                        process.wait(max(0.1, end - time.monotonic()))
                    except subprocess.TimeoutExpired:
                        late.append(i)
        finally:
            self.kill()
        assert not late, f"ranks {late} were still running after {deadline} s\n{self.all_logs()}"
        logs = [log.read_text() for log in self.logs]
        faults = [float(t) for log in logs for t in re.findall(r"^FAULT ([\d.]+)$", log, flags=re.M)]
        ranks = []
        for process, path, log in zip(self.processes, self.logs, logs, strict=True):
            seen = [float(t) for t in re.findall(r"^SAW ([\d.]+) ", log, flags=re.M)]
            if not seen and re.search(ENDED_WITH, log, flags=re.M):
                seen = [path.stat().st_mtime]
            ranks.append(Rank(process.returncode, log, seen[0] - faults[0] if seen and faults else None))
        return ranks

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for(self, rank: int, text: str, deadline: float = 40.0) -> None:
        end = time.monotonic() + deadline
        while text not in self.logs[rank].read_text():
            assert time.monotonic() < end, f"rank {rank} never wrote {text!r}\n{self.all_logs()}"
            assert self.processes[rank].poll() is None, f"rank {rank} ended early\n{self.all_logs()}"
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # ends a stopped one too
            process.wait()

    def orphans(self) -> list[int]:
        """Returns sessions of ranks that still have processes; each rank led its own session."""
        left = []
        for process in self.processes:
            try:
                os.killpg(process.pid, 0)
                left.append(process.pid)
            except ProcessLookupError:
                continue
        return left

    def all_logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self.logs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(folder, scenario, nprocesses, *, ndevices=1, env=None, deadline=60.0, stopped=()):
    """(job, its ranks) of a scenario that needs nothing from outside."""
    job = Job(folder, scenario, nprocesses, ndevices=ndevices, env=env)
    return job, job.wait(deadline, stopped=stopped)


@atexit.register
def print_threads() -> None:
    """Runs after jaxmp's handlers in a rank, which imports this module before jaxmp."""
    if left := {thread.name for thread in threading.enumerate()} & {"jaxmp-guard", "jaxmp-want"}:
        print("LEFT", *left)


SIGINT, SIGCONT = signal.SIGINT, signal.SIGCONT
