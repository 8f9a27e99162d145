"""Jobs between machines, which are network namespaces here: each has its own network, name and /dev/shm. On one machine
every address of a process reaches all others, so what only works there passes every other test."""

import os
import subprocess
import time

import pytest
from job import TIMEOUT, Job

ADDRESSES = ("10.77.21.1", "10.77.21.2")
LINK = "veth0"


def has_namespaces():
    """Whether this process may make network namespaces."""
    commands = (["ip", "-V"], ["unshare", "-n", "-m", "-u", "-i", "-p", "-f", "true"])
    try:
        return os.getuid() == 0 and all(subprocess.run(each, capture_output=True).returncode == 0 for each in commands)
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="making network namespaces takes root, ip and unshare")


class Machines:
    """Two of them, joined by one link; the commands that start a process on each."""

    def __init__(self, folder):
        self.folder, self.names = folder, [f"jaxmp-{os.getpid()}-{side}" for side in "ab"]

    def start(self):
        for name in self.names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        a, b = self.names
        self._ip("link", "add", LINK, "netns", a, "type", "veth", "peer", "name", LINK, "netns", b)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            self._ip("-n", name, "link", "set", LINK, "up")

    def stop(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name])

    @staticmethod
    def _ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    def limit(self, rate):
        """The rate of the link in both directions."""
        for name in self.names:
            queue = f"qdisc replace dev {LINK} root tbf rate {rate} burst 32k limit 256k"
            subprocess.run(["tc", "-n", name, *queue.split()], check=True)

    def cut(self):
        """The link, so that what is sent is lost."""
        self._ip("-n", self.names[0], "link", "set", LINK, "down")

    def commands(self, own_address=None):
        """`own_address` is what each machine takes its own name for; None where it does not know it."""
        found = []
        for i, name in enumerate(self.names):
            hosts = self.folder / f"hosts.{i}"
            hosts.write_text("127.0.0.1 localhost\n" + (f"{own_address} machine{i}\n" if own_address else ""))
            enter = f"mount -t tmpfs none /dev/shm; mount --bind {hosts} /etc/hosts; hostname machine{i}"
            parts = ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc"]
            found.append(["ip", "netns", "exec", name, *parts, "sh", "-c", f'{enter}; exec "$@"', "sh"])
        return found


@pytest.fixture
def machines(tmp_path):
    found = Machines(tmp_path)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.mark.parametrize("own_address", ["127.0.1.1", None], ids=["of-loopback", "unknown"])
def test_a_machine_need_not_know_its_own_name(tmp_path, machines, own_address):
    env = {"all": {"HOST": ADDRESSES[0]}}
    job = Job(tmp_path, "fine", 2, env=env, machines=machines.commands(own_address))
    assert [rank.status for rank in job.wait(60)] == [0, 0], job.all_logs()


def test_a_caught_error_of_the_transport_ends_the_job(tmp_path, machines):
    """The time that the user gives it is too short for the link."""
    machines.limit("8mbit")
    env = {"all": {"HOST": ADDRESSES[0], "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=1"}}
    job = Job(tmp_path, "large-and-caught", 2, env=env, machines=machines.commands("127.0.1.1"))
    ranks = job.wait(60)
    assert [rank.status for rank in ranks] == [1, 1], job.all_logs()
    assert all("matmul at ranks.py" in rank.saw for rank in ranks), job.all_logs()


def test_a_slow_link_is_no_fault(tmp_path, machines):
    """The gather takes twice as long as a rank may be silent."""
    machines.limit("8mbit")
    job = Job(tmp_path, "large", 2, env={"all": {"HOST": ADDRESSES[0]}}, machines=machines.commands("127.0.1.1"))
    assert [rank.status for rank in job.wait(90)] == [0, 0], job.all_logs()


def test_a_link_that_is_cut_ends_both_sides(tmp_path, machines):
    machines.limit("8mbit")
    job = Job(tmp_path, "large", 2, env={"all": {"HOST": ADDRESSES[0]}}, machines=machines.commands("127.0.1.1"))
    job.wait_for(0, "GATHERS")
    time.sleep(3)
    machines.cut()
    begin = time.monotonic()
    ranks = job.wait(60)
    assert time.monotonic() - begin < TIMEOUT + 6, job.all_logs()
    assert [rank.status for rank in ranks] == [1, 1], job.all_logs()
    assert all(f"rank {1 - i} does not answer" in rank.saw for i, rank in enumerate(ranks)), job.all_logs()
