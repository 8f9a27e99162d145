"""Two and four ranks on one GPU, each a process: the collective code meets the real library.

NCCL 2.30 lets ranks share a device where NCCL_MULTI_RANK_GPU_ENABLE is set; nobody has to have several GPUs for this.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import SHARING, cublasmp
from job import free_port

pytestmark = pytest.mark.usefixtures("cublasmp")
HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(0)  # the processes have a deadline
@pytest.mark.parametrize("nranks", [2, 4])
def test_processes_that_share_a_gpu(nranks, tmp_path):
    port = free_port()
    environment = os.environ | SHARING | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    logs = [tmp_path / f"{rank}.log" for rank in range(nranks)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, "-u", str(HERE / "sharing.py"), str(rank), str(nranks), str(port)]
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
    try:
        statuses = [process.wait(900) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    text = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
    assert statuses == [0] * nranks, text
    ran = {line for log in logs for line in log.read_text().splitlines() if line.startswith("RAN")}
    assert len(ran) == 1, text
    print(ran.pop())
