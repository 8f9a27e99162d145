"""Two processes on fake GPUs, as a job of several processes on one machine has them (process.py).

Silently wrong without these: a rank of another process that takes another one's place. What a process leaves that dies,
tests/gpu/test_sharing.py tests.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job import free_port

HERE = Path(__file__).resolve().parent


def run(folder, ndevices: int) -> list[tuple[int, str]]:
    """(status, what it printed) of both processes."""
    env = os.environ | {
        "FAKE_CUDA_JOB": str(folder / "job"),
        "FAKE_CUDA_DEVICES": str(2 * ndevices),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-u", str(HERE / "process.py")]
    port, logs, running = free_port(), [folder / f"{rank}.log" for rank in range(2)], []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                given = [*command, str(rank), str(port), str(ndevices)]
                running.append(subprocess.Popen(given, env=env, stdout=out, stderr=subprocess.STDOUT))
        statuses = [process.wait(100) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
        (folder / "job").unlink(missing_ok=True)  # sparse, but of a size that no copy of the folder ought to meet
    return list(zip(statuses, [log.read_text() for log in logs], strict=True))


@pytest.mark.parametrize("ndevices", [1, 2])
def test_products_and_gradients(ndevices, tmp_path):
    for status, said in run(tmp_path, ndevices):
        ran = re.findall(r"^RAN (\w+)$", said, flags=re.M)
        assert (status, ran) == (0, ["all_gather", "reduce_scatter", "all_reduce", "loop"]), said
