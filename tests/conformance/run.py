"""Run the conformance suite on hostmp and on cuBLASMp, and compare them.

    python tests/conformance/run.py --binary build/cpp/conformance --ranks 1,2,4 --out build/conformance

The libraries are found as jaxmp finds them, or named (--cublasmp, --nccl, --driver). With --processes each rank is a
process of its own, which several ranks on one GPU need. After a crash or a hang the other cases run in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import compare

# Exit statuses of `conformance` (main.cc).
_HUNG, _BROKEN = 3, 4
# More crashes than this say that something is wrong as a whole.
_MOST_RESTARTS = 60
# Seconds for the other ranks to end after the first one.
_GRACE = 10.0


class NotStartedError(RuntimeError):
    """The suite could not begin: a library, a device or a communicator is missing."""


def run_suite(
    binary: Path,
    ranks: int,
    options: list[str],
    *,
    emulator: Sequence[str] = (),
    processes: bool = False,
    seconds: int = 60,
    env=None,
):
    """Returns the lines of all cases on one library, and lines of our own for cases that crashed or hung."""
    lines: list[dict] = []
    after: list[str] = []
    for _ in range(_MOST_RESTARTS):
        commands = [*emulator, str(binary), "--ranks", str(ranks), "--seconds", str(seconds), *options, *after]
        with tempfile.TemporaryDirectory() as folder:
            rank_options = [["--rank", str(i), "--id", f"{folder}/id"] for i in range(ranks)] if processes else [[]]
            ended = _run_together([commands + rank_option for rank_option in rank_options], Path(folder), env)
        found = [line for _, output, _ in ended for line in output]
        lines += [line for line in found if "case" in line]
        if all(status in (0, 1) for status, _, _ in ended):
            return lines
        last = next((line["begins"] for line in reversed(found) if "begins" in line), None)
        errors = "\n".join(error for _, _, error in ended).strip()
        if last is None:
            raise NotStartedError(errors or f"conformance ended with {[status for status, _, _ in ended]}")
        lines += _lines_of_the_end(lines, last, ranks, ended, errors)
        after = ["--after", last]
    raise RuntimeError(f"the library ended {_MOST_RESTARTS} times, last in {last}: {errors}")


def _run_together(commands: list[list[str]], folder: Path, env) -> list[tuple[int, list[dict], str]]:
    """Returns (status, lines, errors) of each command; once one has failed, the others have a moment to end."""
    outputs = [(folder / f"out{i}", folder / f"err{i}") for i in range(len(commands))]
    running = []
    for command, (out, err) in zip(commands, outputs, strict=True):
        with out.open("wb") as to, err.open("wb") as errors:
            running.append(subprocess.Popen(command, stdout=to, stderr=errors, env=env))
    deadline = None
    while any(process.poll() is None for process in running):
        if deadline is None and any(process.poll() not in (None, 0, 1) for process in running):
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.02)
    return [
        (process.returncode, _parse(out.read_text(errors="replace")), err.read_text(errors="replace"))
        for process, (out, err) in zip(running, outputs, strict=True)
    ]


def _parse(text: str) -> list[dict]:
    """Parses the lines of JSON; the last may be cut off by a crash."""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def _lines_of_the_end(lines: list[dict], case: str, ranks: int, ended, errors: str) -> list[dict]:
    """Returns a line for each rank that has none for the case that ended the library."""
    have = {line["rank"] for line in lines if line["case"] == case and line["ranks"] == ranks}
    failed = [status for status, _, _ in ended if status not in (0, 1)]
    status = next((status for status in failed if status != -signal.SIGKILL), failed[0])  # SIGKILL may be ours
    stage = "hang" if status == _HUNG else "run" if status == _BROKEN else "crash"
    why = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    about = {"case": case, "ranks": ranks, "library": "", "capability": "", "stage": stage, "status": None}
    last_words = errors.splitlines()[-1] if errors else ""
    rest = {"error": f"{why} {last_words}".strip(), "workspace": 0, "intact": True, "expected": False, "results": {}}
    return [about | rest | {"rank": rank} for rank in range(ranks) if rank not in have]


def _libraries(arguments) -> list[str]:
    if arguments.cublasmp:
        paths = {"cublasmp": arguments.cublasmp, "nccl": arguments.nccl, "driver": arguments.driver}
    else:
        from jaxmp._src.platform.runtime import cuda_libraries

        found = cuda_libraries.find()
        paths = {"cublasmp": found.cublasmp, "nccl": found.nccl, "driver": found.driver}
    return [text for name, path in paths.items() for text in (f"--{name}", path)]


def environment() -> dict[str, str]:
    """Returns our environment, set so that the loader finds the libraries of all wheels. cuBLASMp looks for cuBLAS in
    its own folder, and another folder of the import path may have it; JAX's plugin loads it first in Python."""
    from jaxmp._src.platform.runtime import cuda_libraries

    roots = cuda_libraries._wheel_roots()
    folders = [folder for root in roots for folder in sorted({*root.glob("*/lib"), *root.glob("*/*/lib")})]
    have = os.environ.get("LD_LIBRARY_PATH")
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *([have] if have else [])])}


def _blas() -> str:
    if os.environ.get("JAXMP_BLAS"):
        return os.environ["JAXMP_BLAS"]
    from jaxmp._src.platform.runtime import native

    return native._blas_path()


def compare_libraries(arguments, ranks: int) -> tuple[str, bool]:
    """Runs both with this many ranks. Returns (what to print, True if there is a fault)."""
    share = ["--share", arguments.share] if arguments.share else []
    share += ["--only", arguments.only] if arguments.only else []
    emulator = list(filter(None, arguments.emulator.split(";")))
    host = run_suite(arguments.binary, ranks, ["--library", "host", "--blas", _blas(), *share], emulator=emulator)
    faults = ["--faults", "yes"] if arguments.faults else []
    options = ["--library", "cublasmp", *_libraries(arguments), *share, *faults]
    other = run_suite(
        arguments.binary,
        ranks,
        options,
        emulator=emulator,
        processes=arguments.processes and ranks > 1,
        seconds=arguments.seconds,
        env=None if arguments.cublasmp else environment(),
    )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, lines in (("host", host), ("cublasmp", other)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (arguments.out / f"{name}-{ranks}.jsonl").write_text(text)
    differences = compare.compare(host, other)
    text, is_bad = compare.report(differences, compare.known(arguments.known), is_whole=not share)
    cases = len({line["case"] for line in host})
    return f"{cases} cases on {ranks} ranks\n{text}", is_bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, required=True, help="the executable `conformance`, which CMake builds")
    parser.add_argument("--emulator", default="", help="what runs it, where it is another architecture's; CMake's list")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, as in 1,2,4")
    parser.add_argument("--cublasmp", help="its library; by default as jaxmp finds it")
    parser.add_argument("--nccl", default="libnccl.so.2")
    parser.add_argument("--driver", default="libcuda.so.1")
    parser.add_argument("--processes", action="store_true", help="each rank in a process of its own")
    parser.add_argument("--share", help="I/N: every N-th case")
    parser.add_argument("--only", help="the cases with this in their name")
    parser.add_argument("--faults", action="store_true", help="also ask cuBLASMp what it is known to get wrong")
    parser.add_argument("--seconds", type=int, default=60, help="after which a case counts as stuck")
    parser.add_argument("--known", type=Path, help="faults that are known, for compare.py")
    parser.add_argument("--out", type=Path, help="folder for the lines of both libraries")
    arguments = parser.parse_args()
    is_bad = False
    for ranks in map(int, arguments.ranks.split(",")):
        text, is_worse = compare_libraries(arguments, ranks)
        print(text)
        is_bad = is_bad or is_worse
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
