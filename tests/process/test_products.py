"""The same products, gradients and epilogs as in one process, on four devices of several: none may come out elsewhere.

A wrong rank order in a gather across processes would give a plausible matrix with its blocks exchanged.
"""

import json

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


@pytest.mark.parametrize(
    ("nprocesses", "ndevices", "memory"), [(4, 1, "on"), (2, 2, "on"), (4, 1, "off")], ids=["4x1", "2x2", "4x1-gloo"]
)
def test_collectives_go_through_shared_memory_unless_it_is_off(tmp_path, nprocesses, ndevices, memory):
    env = {"all": {"JAXMP_SHARED_MEMORY": memory}}
    job, ranks = run(tmp_path, "memory", nprocesses, ndevices=ndevices, env=env, deadline=120)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
    assert all("RAN" in rank.log for rank in ranks)


@pytest.mark.parametrize(("nprocesses", "ndevices"), [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_calls_in_any_order_get_their_own_operands(tmp_path, nprocesses, ndevices):
    """Without a number for each call, 93 of 100 steps of four microbatches were wrong in silence."""
    asked = {"seed": 40, "programs": 8}
    env = {"all": {"SCHEDULES": json.dumps(asked), "JAXMP_TIMEOUT": "60"}}
    job, ranks = run(tmp_path, "schedules", nprocesses, ndevices=ndevices, env=env, deadline=300)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
    assert all("RAN 8 programs, 0 results are wrong" in rank.log for rank in ranks)


def test_gradients_of_branches_beside_other_products(tmp_path):
    """Over gloo, gathers of weight gradients met in the order in which XLA started them, another one on each rank: some
    40 results were wrong in silence."""
    drawn = {"inputs": [["inner", "cond"], ["cond"], ["inner", "cond"]], "axes": "explicit", "grad": True, "mesh": "x"}
    asked = {"given": [drawn] * 4, "runs": 6, "microseconds": 5000}
    env = {"all": {"SCHEDULES": json.dumps(asked), "JAXMP_TIMEOUT": "60"}}
    job, ranks = run(tmp_path, "schedules", 2, env=env, deadline=300)
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()
    assert all("RAN 4 programs, 0 results are wrong" in rank.log for rank in ranks)


def test_one_process_without_shared_memory_is_enough_for_none_to_use_it(tmp_path):
    env = {1: {"JAXMP_SHARED_MEMORY": "off"}, "all": {}}
    job, ranks = run(tmp_path, "fine", 2, env=env)
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()


@pytest.mark.parametrize(("nprocesses", "ndevices"), [(2, 2), (2, 1)], ids=["2x2", "2x1"])
def test_an_audit_across_processes(tmp_path, nprocesses, ndevices):
    job, ranks = run(tmp_path, "audit", nprocesses, ndevices=ndevices, deadline=300)
    assert [rank.status for rank in ranks] == [0] * nprocesses, job.all_logs()
