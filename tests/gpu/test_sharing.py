"""Two and four ranks on one GPU, each a process: the collective code meets the real library. And GPUs of their own.

NCCL 2.30 lets ranks share a device where NCCL_MULTI_RANK_GPU_ENABLE is set; nobody has to have several GPUs for this.
Silently wrong without these: a rank of another process that takes another one's place.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import SHARING, cublasmp
from job import free_port

from jaxmp._src.platform.runtime import native

pytestmark = pytest.mark.usefixtures("cublasmp")
HERE = Path(__file__).resolve().parent


def run(folder, scenario, nranks, *, ndevices=0, **knobs):
    """(statuses, logs) of all processes, each with as many devices of its own, or with 0 the first for all."""
    port = free_port()
    environment = os.environ | SHARING | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | knobs
    job = folder / "job"  # the memory that processes share over the fakes
    logs = [folder / f"{rank}.log" for rank in range(nranks)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, "-u", str(HERE / "sharing.py"), scenario]
            command += map(str, (rank, nranks, port, ndevices))
            env = environment | {"FAKE_CUDA_JOB": str(job)}
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env))
    try:
        statuses = [process.wait(900) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
        job.unlink(missing_ok=True)  # sparse, but of a size that no copy of the folder ought to meet
    return statuses, [log.read_text() for log in logs]


@pytest.mark.timeout(0)  # the processes have a deadline
@pytest.mark.parametrize("nranks", [2, 4])
def test_processes_that_share_a_gpu(nranks, tmp_path):
    statuses, logs = run(tmp_path, "products", nranks)
    text = "\n---\n".join(log[-3000:] for log in logs)
    assert statuses == [0] * nranks, text
    ran = {line for log in logs for line in log.splitlines() if line.startswith("RAN")}
    assert len(ran) == 1, text
    print(ran.pop())


@pytest.mark.timeout(0)
@pytest.mark.parametrize("ndevices", [1, 2])
def test_processes_with_gpus_of_their_own(ndevices, tmp_path):
    if "JAXMP_FAKES" not in os.environ and len(native.cuda_devices()) < 2 * ndevices:
        pytest.skip("needs GPUs for both")
    statuses, logs = run(tmp_path, "apart", 2, ndevices=ndevices, FAKE_CUDA_DEVICES=str(2 * ndevices))
    assert statuses == [0, 0], "\n---\n".join(log[-3000:] for log in logs)


def test_a_process_that_dies_ends_the_other_with_the_reason(tmp_path):
    """The watchdog's last words, with rank and call; long ahead of the 40 s after which XLA ends the process."""
    statuses, (log, _) = run(tmp_path, "death", 2, JAXMP_TIMEOUT="8")
    assert statuses == [1, -signal.SIGKILL], log
    words = r"^jaxmp.DistributedError: rank 0 of 2 in group 0 \(device 0\) .* in the call \[.*"
    said = re.search(words, log, flags=re.M)
    assert said, log
    print(said[0])
