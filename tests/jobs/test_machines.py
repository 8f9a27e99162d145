"""Jobs between machines, which are network namespaces here: each has its own network, name and /dev/shm. On one machine
every address of a process reaches all others, so what only works there passes every other test."""

import time

import pytest
from job import TIMEOUT, Job
from machines import Machines, has_namespaces

pytestmark = pytest.mark.skipif(
    not has_namespaces(), reason="making network namespaces takes root, ip, nsenter and unshare"
)


@pytest.fixture
def machines(tmp_path):
    with Machines(tmp_path) as found:
        yield found


@pytest.mark.parametrize("own_address", ["127.0.1.1", None], ids=["of-loopback", "unknown"])
def test_a_machine_need_not_know_its_own_name(tmp_path, machines, own_address):
    env = {"all": {"HOST": machines.addresses[0]}}
    job = Job(tmp_path, "fine", 2, env=env, machines=machines.commands(own_address))
    assert [rank.status for rank in job.wait(60)] == [0, 0], job.all_logs()


def test_a_caught_error_of_the_transport_ends_the_job(tmp_path, machines):
    """The time that the user gives it is too short for the link."""
    machines.limit("8mbit")
    env = {"all": {"HOST": machines.addresses[0], "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=1"}}
    job = Job(tmp_path, "large-and-caught", 2, env=env, machines=machines.commands("127.0.1.1"))
    ranks = job.wait(60)
    assert [rank.status for rank in ranks] == [1, 1], job.all_logs()
    assert all("matmul at ranks.py" in rank.saw for rank in ranks), job.all_logs()


def test_a_slow_link_is_no_fault(tmp_path, machines):
    """The gather takes twice as long as a rank may be silent."""
    machines.limit("8mbit")
    job = Job(
        tmp_path, "large", 2, env={"all": {"HOST": machines.addresses[0]}}, machines=machines.commands("127.0.1.1")
    )
    assert [rank.status for rank in job.wait(90)] == [0, 0], job.all_logs()


def test_a_link_that_is_cut_ends_both_sides(tmp_path, machines):
    machines.limit("8mbit")
    job = Job(
        tmp_path, "large", 2, env={"all": {"HOST": machines.addresses[0]}}, machines=machines.commands("127.0.1.1")
    )
    job.wait_for(0, "GATHERS")
    time.sleep(3)
    machines.cut()
    begin = time.monotonic()
    ranks = job.wait(60)
    assert time.monotonic() - begin < TIMEOUT + 6, job.all_logs()
    assert [rank.status for rank in ranks] == [1, 1], job.all_logs()
    assert all(f"rank {1 - i} does not answer" in rank.saw for i, rank in enumerate(ranks)), job.all_logs()
