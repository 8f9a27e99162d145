"""The same bits whichever process comes last, also where numbers are subnormal.

A process that waits for the others resumes on another thread than one that comes last. If only one of the two takes
subnormal numbers as zero, as XLA does, the same call has other bits from run to run.
"""

import pytest
from job import run


@pytest.mark.parametrize(("nprocesses", "ndevices"), [(2, 1), (2, 2)], ids=["2x1", "2x2"])
def test_bits_do_not_depend_on_who_comes_last(tmp_path, nprocesses, ndevices):
    job, ranks = run(tmp_path, "float-state", nprocesses, ndevices=ndevices, deadline=120)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
    for rank in ranks:
        lines = [line.split()[1:] for line in rank.log.splitlines() if line.startswith("BITS")]
        assert len(lines) == 6, rank.log
        for name, *bits in lines:
            assert len(set(bits)) == 1, f"{name}: {bits}\n{job.all_logs()}"
