"""How a job begins and ends when nothing goes wrong, and what is refused at its beginning."""

import concurrent.futures
import errno
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import types

import pytest
from jaxlib import _jax
from job import free_port, run

import jaxmp
from jaxmp._src.jobs import bootstrap
from jaxmp._src.platform.jax_internals import jax_distributed
from jaxmp._src.platform.runtime import config, native


def test_a_good_job_ends_with_0_and_leaves_nothing(tmp_path):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    job, ranks = run(tmp_path, "fine", 4)
    assert [rank.status for rank in ranks] == [0] * 4, job.all_logs()
    assert not job.orphans()
    assert "LEFT" not in job.all_logs()
    assert {path.name for path in tmp_path.iterdir()} == {log.name for log in job.logs}
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not {name for name in after - before if "jax" in name.lower()}


def test_a_job_ends_in_order_where_no_thread_starts_at_the_end(tmp_path):
    job, ranks = run(tmp_path, "end-without-threads", 2)
    assert [(rank.status, rank.log) for rank in ranks] == [(0, "ENDED\n")] * 2, job.all_logs()


def test_all_ranks_go_by_what_rank_0_has_measured(tmp_path):
    """Otherwise one cuts a product into other chunks than another, and their collectives do not meet."""
    caches = {i: {"XDG_CACHE_HOME": str(tmp_path / f"cache{i}")} for i in range(2)}
    job, ranks = run(tmp_path, "calibrate", 2, ndevices=2, env=caches)
    assert [rank.status for rank in ranks] == [0] * 2, job.all_logs()
    tells = [json.loads(re.search(r"^TELLS (.*)$", rank.log, flags=re.M)[1] or "{}") for rank in ranks]
    assert tells[1] == {}
    told = tuple(tells[0][name] for name in ("network_bandwidth", "network_latency", "network_load", "node"))
    assert told[3] == 2
    assert min(told) > 0
    described = json.loads(ranks[0].log[ranks[0].log.index("{") : ranks[0].log.index("TELLS")])["job"]
    assert (described["processes"], described["rounds of a barrier"]) == (2, 1)
    for given, want in ((caches, told), (dict(enumerate(reversed(caches.values()))), None)):
        job, ranks = run(tmp_path, "told", 2, env=given)
        assert [f"TOLD {want}" in rank.log for rank in ranks] == [True] * 2, job.all_logs()


def test_all_ranks_that_do_not_come_are_named(monkeypatch):
    """JAX's service names two of them."""
    monkeypatch.setattr(bootstrap.jax_distributed, "end_service", lambda: None)
    count = functools.partial(bootstrap._absent, "127.0.0.1", free_port(), nhere=5, nprocesses=8)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        assert list(pool.map(count, (1, 2, 4, 6, 0))) == [["3", "5", "7"]] * 5


class Client:
    """A client of JAX's coordination service that counts its requests, and the bytes of their arguments and results."""

    def __init__(self, client):
        self.client, self.requests, self.nbytes = client, 0, 0

    def __getattr__(self, name):
        def request(*arguments, **options):
            found = getattr(self.client, name)(*arguments, **options)
            self.requests += 1
            self.nbytes += len(repr((arguments, found)))
            return found

        return request


def test_requests_at_the_start_grow_with_the_neighbours_alone(monkeypatch):
    """The ranks are threads with one client of JAX's service per thread, and 4 ranks are on one machine."""
    own, most = threading.local(), {}
    monkeypatch.setattr(jax_distributed, "distributed_client", lambda: own.client)
    monkeypatch.setattr(native, "extension", lambda: types.SimpleNamespace(share_arena=lambda *_: None))
    monkeypatch.setattr(native, "shared_processes", frozenset())

    def share_arena(client, key, process):
        client.key_value_set(f"{key}memory/{process // 4}/{process}", "4026531836-4026531837-0 /proc/1234567/fd/89")
        return f"{process // 4}"

    def start(address, nprocesses, process):
        own.client = Client(_jax.get_distributed_runtime_client(address, process, use_compression=True))
        own.client.client.connect()
        found = bootstrap.join_job("127.0.0.1", process, nprocesses, 60, reach=60)
        for peer in bootstrap.neighbours(process, nprocesses):
            found.address_of(peer)
        found.peers.close()
        return own.client

    monkeypatch.setattr(bootstrap, "_share_arena", share_arena)
    for nprocesses in (8, 32):
        address = f"127.0.0.1:{free_port()}"
        service = _jax.get_distributed_runtime_service(address, nprocesses)
        with concurrent.futures.ThreadPoolExecutor(nprocesses) as pool:
            clients = list(pool.map(functools.partial(start, address, nprocesses), range(nprocesses)))
            list(pool.map(lambda each: each.client.shutdown(), clients))
        service.shutdown()
        most[nprocesses] = [max(getattr(each, name) for each in clients) for name in ("requests", "nbytes")]
    (few, of_few), (many, of_many) = most.values()
    assert (few, many) == (9 + 3, 9 + 5)
    assert of_many < 1.2 * of_few


def test_strangers_at_the_start_are_no_peers(tmp_path):
    job, ranks = run(tmp_path, "strangers", 3)
    assert [rank.status for rank in ranks] == [0] * 3, job.all_logs()
    assert "REFUSED" in ranks[0].log, job.all_logs()
    for rank in ranks:
        assert "did not prove to be of this job" in rank.log
        assert int(re.search(r"^STRANGERS (\d+)$", rank.log, flags=re.M)[1]) >= 40, job.all_logs()


def test_a_rank_that_ends_late_is_waited_for_by_all(tmp_path):
    """JAX itself waits for JAXMP_TIMEOUT seconds at the end, and then ends the others with an error."""
    job, ranks = run(tmp_path, "late-end", 8)
    assert [rank.status for rank in ranks] == [0] * 8, job.all_logs()
    # 6 and 7 connect to rank 0, and may do it later.
    seen = set(map(int, re.search(r"^NEIGHBOURS ([\d ]+)$", ranks[0].log, flags=re.M)[1].split()))
    assert {1, 2, 4} <= seen <= {1, 2, 4, 6, 7}, job.all_logs()


@pytest.mark.parametrize(
    ("limits", "is_shared"),
    [
        ({"all": f"AS {20 << 30}"}, True),
        ({1: f"FSIZE {60 << 10}"}, False),
        ({"all": f"FSIZE {60 << 10}"}, False),
        ({1: f"FSIZE {1 << 20}"}, False),  # as a later block needs
    ],
    ids=["addresses", "one rank's files", "all ranks' files", "one rank's large files"],
)
def test_a_job_does_without_shared_memory_where_there_is_none(tmp_path, limits, is_shared):
    """Limits as schedulers set them: too few addresses for the whole machine's memory, no file of a block's size."""
    job, ranks = run(tmp_path, "limited", 2, env={rank: {"LIMIT": limit} for rank, limit in limits.items()})
    assert [rank.status for rank in ranks] == [0] * 2, job.all_logs()
    for rank in ranks:
        assert f"SHARES{' 0 1' if is_shared else ''}\n" in rank.log, job.all_logs()
        assert "KEEPS 0 MB" in rank.log, job.all_logs()  # of 4
    warned = [line for rank in ranks for line in rank.log.splitlines() if "shares no memory" in line]
    assert len(warned) == (not is_shared), job.all_logs()
    limited = 1 if 1 in limits else 0
    assert all(f"rank {limited} shares no memory" in line and "File too large" in line for line in warned)


def test_a_job_logs_who_joins_and_leaves_and_begins_once(tmp_path):
    env = {"JAXMP_LOG": "distributed", "NEXT_PORT": str(free_port())}
    job, ranks = run(tmp_path, "begin-again", 2, env={"all": env})
    for i, rank in enumerate(ranks):
        assert rank.status == 0, job.all_logs()
        assert "SECOND initialize: this process is part of a job already" in rank.log
        assert "AFTER initialize: JAX's backend exists already" in rank.log
        lines = [line for line in rank.log.splitlines() if line.startswith("jaxmp.distributed: rank")]
        assert re.fullmatch(rf"jaxmp.distributed: rank {i} of 2: joins the job at 127.0.0.1:\d+", lines[0])
        assert f"jaxmp.distributed: rank {i} of 2: has met the others" in lines, job.all_logs()
        assert f"jaxmp.distributed: rank {i}: leaves the job" in lines, job.all_logs()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("host:1", 2), ValueError, "without process_id; pass all three"),
        (("host", 2, 0), ValueError, "must be 'host:port', got 'host'"),
        (("host:1", 0, 0), ValueError, "num_processes must be at least 1, got 0"),
        (("host:1", 2, 2), ValueError, "from 0 to num_processes - 1 = 1, got 2"),
        (("host:1", 2, "0"), TypeError, "process_id must be an int, got '0'"),
        (("host:65536", 2, 0), ValueError, "must have a port from 1 to 65535, got 'host:65536'"),
        (("nobody.invalid:1", 2, 0), ValueError, "names the host 'nobody.invalid', which this machine does not know"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jaxmp.distributed.initialize(*arguments)


def test_a_port_in_use_is_refused():
    """JAX's coordination service would crash."""
    with (
        socket.create_server(("127.0.0.1", free_port())) as taken,
        pytest.raises(RuntimeError, match=r"rank 0 cannot listen at 127\.0\.0\.1:\d+ \(Address already in use\)"),
    ):
        jaxmp.distributed.initialize(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)


def test_a_proxy_of_http_is_not_between_the_processes(tmp_path):
    """Sites set http_proxy, and no_proxy only for the machines of a job. One process without shared memory is enough
    for none to use it."""
    env = {"HOST": "localhost", "http_proxy": "http://127.0.0.1:9", "no_proxy": "localhost"}
    job, ranks = run(tmp_path, "fine", 2, env={"all": env, 1: {"JAXMP_SHARED_MEMORY": "off"}})
    assert [rank.status for rank in ranks] == [0] * 2, job.all_logs()


@pytest.mark.parametrize("process", [0, 1])
def test_a_machine_without_a_network_is_named(monkeypatch, process):
    def connect(self, address):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)
    message = r"no route to 127\.0\.0\.1 \(Network is unreachable\); bring up its loopback interface, lo"
    with pytest.raises(RuntimeError, match=message):
        jaxmp.distributed.initialize(f"127.0.0.1:{free_port()}", 2, process)


def test_a_machine_with_a_loopback_name_is_reached(monkeypatch):
    """Debian's installer writes /etc/hosts so: the machine's own name stands for 127.0.1.1."""
    monkeypatch.setattr(bootstrap, "route_to", lambda host: "127.0.1.1" if host == "node1" else "192.168.7.1")
    assert bootstrap.bind_address("node1", free_port()) is None
    assert bootstrap._own_address("node1") == "192.168.7.1"


def test_what_is_missing_of_a_launcher_is_named():
    program = "import jaxmp; jaxmp.distributed.initialize()"
    # An mpi4py that is not there, whether or not it is installed.
    without = "import sys; sys.modules['mpi4py'] = None; " + program
    for text, variables, message in (
        (program, {}, "no launcher has started this process; start it with `mpiexec -n 4 python ...`"),
        (without, {"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi4py cannot be imported"),
        (program, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "which process this is (SLURM_"),
    ):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
        ran = subprocess.run(
            [sys.executable, "-c", text],
            env=clean | {"JAX_PLATFORMS": "cpu"} | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 1
        assert message in ran.stderr


def test_open_mpi_is_known_without_mpi4py(monkeypatch):
    """By the variables of its mpiexec before version 5, as JAX knows it."""
    for name, value in {"COMM_WORLD_RANK": "1", "COMM_WORLD_SIZE": "2", "COMM_WORLD_LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_{name}", value)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1314521088.0;tcp://127.0.0.1:34911")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    address, processes, process, _ = bootstrap.detect(None, 5)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert (processes, process) == (2, 1)


def test_launchers_are_known_by_what_they_set():
    assert config.launcher({}) is None
    assert config.launcher({"PMI_RANK": "1", "PMI_SIZE": "4"}) == ("mpi", 4)
    assert config.launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) == ("mpi", 2)
    assert config.launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}) == ("slurm", 3)
    assert config.launcher({"SLURM_NTASKS": "3"}) is None  # inside an allocation, but not started by srun


def test_xla_gives_up_collectives_without_their_ranks():
    """Ten times our deadline, on CPUs and on GPUs, where XLA would wait for the ranks of NCCL's for ever."""
    start = f"import os, jaxmp; jaxmp.distributed.initialize('127.0.0.1:{free_port()}', 1, 0, timeout=7)"
    program = f"{start}; print(os.environ['XLA_FLAGS'])"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # other tests set its deadlines
    ended = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False, timeout=100
    )
    for flag in ("xla_cpu_collective_timeout_seconds", "xla_gpu_nccl_termination_timeout_seconds"):
        assert f"--{flag}=70" in ended.stdout, ended.stderr
