"""The same products, gradients and epilogs as in one process, on four devices of several: none may come out elsewhere.

A wrong rank order in a gather across processes would give a plausible matrix with its blocks exchanged.
"""

import pytest
from job import run


@pytest.mark.parametrize(("nprocesses", "ndevices"), [(4, 1), (2, 2)], ids=["4x1", "2x2"])
def test_every_pattern_transform_and_epilog(tmp_path, nprocesses, ndevices):
    job, ranks = run(tmp_path, "products", nprocesses, ndevices=ndevices, deadline=300)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
    counts = [line for rank in ranks for line in rank.log.splitlines() if line.startswith("RAN")]
    assert len(counts) == nprocesses
    assert len(set(counts)) == 1
    print(counts[0])


@pytest.mark.parametrize(("nprocesses", "ndevices"), [(2, 2), (2, 1)], ids=["2x2", "2x1"])
def test_an_audit_across_processes(tmp_path, nprocesses, ndevices):
    job, ranks = run(tmp_path, "audit", nprocesses, ndevices=ndevices, deadline=300)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
