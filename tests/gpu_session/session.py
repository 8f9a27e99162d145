"""One window of a session on a GPU machine: a list of tasks, in a time that is not exceeded.

    python tests/gpu_session/session.py 1 --site /tmp/jaxmp-gpu --out found [--have found-before] [--minutes 9]

The site is what `unpack.py` has installed. Every case is on disk, in OUT/windowN.jsonl, before the next one begins.
Call a window again, with --have naming what came of the earlier call, and it goes on where that one ended. Status 0:
all of it has passed; 1: something failed; 3: something is left to run.
"""

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import record
import windows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What the end of a window takes, whatever it stops in.
_RESERVE = 10.0
_TAIL = 4000


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where the libraries are: on the site of a bundle, or in the fakes of a rehearsal."""

    site: Path | None
    fakes: Path | None

    def conformance(self) -> Path:
        return self.site / "bin" / "conformance" if self.site else self.fakes.parent / "conformance"

    def environment(self) -> dict[str, str]:
        paths = [HERE, ROOT / "tests" / "process"]
        env = {
            "JAXMP_REQUIRE_GPU": "1",
            "JAX_PLATFORMS": "cuda,cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONUNBUFFERED": "1",
            "GPU_SESSION_CONFORMANCE": str(self.conformance()),
        }
        if self.fakes:
            # sitecustomize imports fake_gpus in every process.
            paths = [HERE / "rehearsal", ROOT / "tests" / "xla_gpu", *paths]
            env |= {"JAXMP_FAKES": str(self.fakes), "FAKE_CUDA_DEVICES": "2"}
            env["LD_LIBRARY_PATH"] = str(self.fakes / "right")
        else:
            # One NCCL in every process, the bundle's: JAX's plugin looks beside itself, where an older one may lie.
            env["LD_PRELOAD"] = str(self.site / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
            paths = [self.site, *paths]
            libraries = [str(folder) for root in sys.path for folder in sorted(Path(root).glob("nvidia/*/lib"))]
            kept = [folder for folder in libraries if not folder.endswith("/nccl/lib")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join([*kept, os.environ.get("LD_LIBRARY_PATH", "")]).strip(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        return os.environ | env


def run(task: windows.Task, env: dict[str, str], seconds: float, log) -> tuple[str, float, str]:
    """(status, seconds, the last that it said); at the end of its time it is killed, with all that it started."""
    started = time.monotonic()
    out = env["GPU_SESSION_OUT"]
    env = env | {name: value.replace(windows.OUT, out) for name, value in task.env} | {"GPU_SESSION_TASK": task.name}
    command = [part.replace(windows.OUT, out) for part in task.command]
    process = subprocess.Popen(
        [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )
    begun = log.tell()
    try:
        status = record.PASSED if process.wait(seconds) == 0 else record.FAILED
    except subprocess.TimeoutExpired:
        status = record.STOPPED if seconds < task.seconds else record.FAILED
    finally:
        # Also what a task that failed has left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if job := env.get("FAKE_CUDA_JOB"):  # sparse, but of a size that no copy of the folder ought to meet
            Path(job).unlink(missing_ok=True)
    with open(log.name, errors="replace") as text:
        text.seek(begun)
        return status, time.monotonic() - started, text.read()[-_TAIL:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("window", type=int, choices=sorted(windows.WINDOWS))
    parser.add_argument("--site", type=Path, help="what unpack.py has installed")
    parser.add_argument("--over-fakes", type=Path, help="instead of it, for a rehearsal: the folder of the fakes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--have", type=Path, help="the --out of an earlier call")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--quick", action="store_true", help="a few cases of each task, to see that they work")
    arguments = parser.parse_args()
    if (arguments.site is None) == (arguments.over_fakes is None):
        parser.error("one of --site and --over-fakes is needed")
    end = time.monotonic() + 60 * arguments.minutes - _RESERVE
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"GPU_SESSION_OUT": str(out), "GPU_SESSION_WINDOW": str(arguments.window)}
    if arguments.have and arguments.have.resolve() != out:
        for file in arguments.have.glob(f"window{arguments.window}*"):  # so that the next call needs this folder alone
            shutil.copy(file, out)
    machine = Machine(
        arguments.site and arguments.site.resolve(), arguments.over_fakes and arguments.over_fakes.resolve()
    )
    tasks = windows.tasks(arguments.window, is_quick=arguments.quick, is_rehearsal=machine.fakes is not None)
    with (out / f"window{arguments.window}.log").open("a") as log:
        return carry_out(tasks, machine.environment(), end, log)


def carry_out(tasks: list[windows.Task], env: dict[str, str], end: float, log) -> int:
    left = []
    for task in tasks:
        if record.ended(task.name) & {windows.WHOLE}:
            continue
        seconds = min(task.seconds, end - time.monotonic())
        if seconds < task.least:
            left.append(task.name)
            continue
        status, took, said = run(task, env, seconds, log)
        found = {} if status == record.PASSED else {"said": said}
        record.add(task.name, windows.WHOLE, status, seconds=round(took, 1), **found)
        print(f"{status:8} {took:6.1f} s  {task.name}", flush=True)
        left += [task.name] * (status == record.STOPPED)
    if left:
        print(f"left to run: {', '.join(left)}")
        return 3
    failed = sorted({line["task"] for line in record.lines() if line["status"] == record.FAILED})
    print(f"failed: {', '.join(failed)}" if failed else "everything has passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
