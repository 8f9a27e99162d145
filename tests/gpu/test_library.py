"""The real library against hostmp, case by case: this tells how far tests on a CPU hold on a GPU."""

import os
import subprocess
import sys

import pytest
from gpu import ROOT, SHARING, conformance, cublasmp

from jaxmp._src.platform.runtime import native

pytestmark = pytest.mark.usefixtures("cublasmp")


def test_the_library_is_the_one_that_was_written_for():
    info = native.cublasmp_info()
    print(info)
    assert info["cublasmp_version"].startswith("0.10.")
    assert tuple(map(int, info["nccl_version"].split(".")[:2])) >= (2, 30)


SHARES = 16  # lets an interrupted run continue (gpu_session.py)


@pytest.mark.timeout(0)  # hanging cases have their own deadline
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_does_what_hostmp_does(conformance, ranks, share):
    """Several ranks are separate processes, which share the available GPUs."""
    command = [sys.executable, str(ROOT / "tests/conformance/run.py"), "--binary", str(conformance)]
    command += ["--ranks", str(ranks), "--share", f"{share}/{SHARES}"]
    command += ["--out", str(ROOT / f"build/conformance/{share}")]
    command += ["--processes", "--known", str(ROOT / "tests/conformance/known_of_cublasmp.txt")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= SHARING if ranks > 1 else {}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
