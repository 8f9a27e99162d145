"""Two and four ranks on one GPU, each a process: collective code runs on the real library. Also several GPUs.

NCCL 2.30 lets ranks share a device if NCCL_MULTI_RANK_GPU_ENABLE is set, so this needs only one GPU. Without these
tests, a rank of another process could take a wrong place.
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
    """Returns (statuses, logs) of all processes. Each has `ndevices` devices, or all share the first one if it is 0."""
    port = free_port()
    environment = os.environ | SHARING | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | knobs
    job = folder / "job"  # memory that the processes share over the fakes
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
        job.unlink(missing_ok=True)  # sparse, but too large for a copy of the folder
    return statuses, [log.read_text() for log in logs]


@pytest.mark.timeout(0)  # the processes have their own deadline
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
    """The watchdog names rank and call, long before XLA ends the process after 40 s."""
    statuses, (log, _) = run(tmp_path, "death", 2, JAXMP_TIMEOUT="8")
    assert statuses == [1, -signal.SIGKILL], log
    words = r"^jaxmp.DistributedError: rank 0 of 2 in group 0 \(device 0\) .* in the call \[.*"
    said = re.search(words, log, flags=re.M)
    assert said, log
    print(said[0])
