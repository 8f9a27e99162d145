"""The same products, gradients, epilogs and bits as in one process, on devices of several: nothing comes out elsewhere.
A wrong rank order in a gather across processes would give a plausible matrix with its blocks exchanged."""

import json
import os

import pytest
from job import run

# Over gloo, gathers of weight gradients met in the order in which XLA started them, which differed between ranks: some
# 40 results were wrong in silence.
BRANCHES = {"inputs": [["inner", "cond"], ["cond"], ["inner", "cond"]], "axes": "explicit", "grad": True, "mesh": "x"}
# Without a number for each call, 93 of 100 steps of four microbatches were wrong in silence.
FUZZ = int(os.environ.get("JAXMP_FUZZ", "0"))  # with it, every job draws so many programs
DRAWN = {"seed": int(os.environ.get("JAXMP_FUZZ_SEED") or 40), "programs": FUZZ or 8}
# Gradients in a scan gather within a process, next to an independent loop and tower.
BESIDE_LOOPS = {
    "inputs": [["towers"], ["loop"], ["scan", "remat"]],
    "axes": "explicit",
    "grad": True,
    "mesh": "data and x",
}
# While a loop counted as started before its collectives had, those after it exchanged data with those inside.
BODIES = {"inputs": [["towers"], ["inner"], ["loop"], ["cond"]], "axes": "explicit", "grad": False, "mesh": "x"}
AUTO = {"axes": "auto", "grad": True}
# By processes x devices of each: the scenarios of one job, and the programs that schedules.py runs.
JOBS = {
    "4x1": ("memory+products+schedules+groups+experts", DRAWN),
    "2x2": ("order+memory+products+experts+schedules+two-names+float_state+audited", DRAWN | {"given": [BESIDE_LOOPS]}),
    "2x1": (
        "order+experts+schedules+two-names+float_state+audited",
        {"given": [BRANCHES] * 4, "runs": 6, "microseconds": 5000},
    ),
    "4x1 over gloo": ("memory+schedules", {"given": [BODIES, BODIES | AUTO], "runs": 10}),
    "2x2 over gloo": ("order+memory+experts+schedules", {"given": [BESIDE_LOOPS, BESIDE_LOOPS | AUTO], "runs": 10}),
    # Each product is multiplied in chunks after its collectives.
    "4x1 over gloo in chunks": ("products+schedules", {"given": [BODIES, BODIES | AUTO], "runs": 10}),
    "2x2 over gloo in chunks": ("order+schedules", {"given": [BESIDE_LOOPS, BESIDE_LOOPS | AUTO], "runs": 10}),
}


@pytest.mark.timeout(0)  # the job has a deadline
@pytest.mark.parametrize("name", JOBS)
def test_every_pattern_transform_and_epilog(name, tmp_path):
    scenarios, programs = JOBS[name]
    nprocesses, ndevices = map(int, name.split()[0].split("x"))
    programs |= DRAWN if FUZZ else {}
    env = {"SCHEDULES": json.dumps(programs), "JAXMP_TIMEOUT": "60"}
    env |= {"JAXMP_SHARED_MEMORY": "off" if "gloo" in name else "on", **({"CHUNKS": "1"} if "chunks" in name else {})}
    options = {"ndevices": ndevices, "env": {"all": env}, "deadline": 1200 + 10 * FUZZ}
    job, ranks = run(tmp_path, scenarios, nprocesses, **options)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
    counts = [[line for line in rank.log.splitlines() if line.startswith("RAN")] for rank in ranks]
    assert all(lines == counts[0] for lines in counts)
    assert len(counts[0]) == sum(
        each in scenarios for each in ("order", "memory", "products", "experts", "schedules", "audited")
    )
    print(*counts[0], sep="\n")
