"""The start of a job of 1,000 ranks: `make test-python RUN=tests/jobs/start.py`. The ranks are threads of a process.
Each has its own client of JAX's coordination service, which is the real one, and asks it what `initialize` asks. 16
ranks are on one machine. Prints a row of docs/clusters.md: what a rank asks until it knows its neighbours, not counting
JAX's own requests, and the time. `ARGS="--missing 3 512 700"` leaves ranks out, and prints what the others say."""

from __future__ import annotations

import argparse
import os
import threading
import time
import types

from jax._src.lib import _jax
from job import free_port

from jaxmp._src.jobs import bootstrap
from jaxmp._src.jobs.watch import DistributedError
from jaxmp._src.platform.jax_internals import jax_distributed
from jaxmp._src.platform.runtime import native

HOST, PER_MACHINE, TIMEOUT, FOREVER = "127.0.0.1", 16, 60, 10**6
own = threading.local()


class Client:
    """A client of the service that counts its requests, and the bytes of their arguments and results."""

    def __init__(self, client):
        self.client, self.requests, self.nbytes = client, 0, 0

    def __getattr__(self, name):
        def request(*arguments, **options):
            found = getattr(self.client, name)(*arguments, **options)
            self.requests += 1
            self.nbytes += sum(len(x) for x in arguments if isinstance(x, str))
            self.nbytes += (
                sum(map(len, found or ())) if isinstance(found, str) else sum(len(k + v) for k, v in found or ())
            )
            return found

        return request


def share_arena(client, key, process):
    machine = f"{process // PER_MACHINE:036}"
    client.key_value_set(f"{key}memory/{machine}/{process}", "4026531836-4026531837-0 /proc/1234567/fd/89")
    return machine


class Rank(threading.Thread):
    def __init__(self, port, process, nprocesses):
        super().__init__(daemon=True)
        self.port, self.process, self.nprocesses = port, process, nprocesses
        self.connected = self.met = 0.0
        self.text = ""

    def run(self):
        options = {
            "init_timeout": FOREVER,
            "heartbeat_timeout": FOREVER,
            "missed_heartbeat_callback": lambda status: None,
        }
        client = _jax.get_distributed_runtime_client(
            f"{HOST}:{self.port}", self.process, use_compression=True, **options
        )
        self.client = own.client = Client(client)
        try:
            bootstrap.connect(TIMEOUT, HOST, self.port, "", self.nprocesses, self.process)
        except DistributedError as error:
            self.text, self.met = str(error), time.monotonic()
            return
        self.connected = time.monotonic()
        found = bootstrap.join_job(HOST, self.process, self.nprocesses, 600, reach=60)
        for peer in bootstrap.neighbours(self.process, self.nprocesses):
            found.address_of(peer)
        self.met = time.monotonic()


def initialize_distributed(*_):
    """Imitates the function of `jax_distributed`, without the state of a process."""
    try:
        own.client.client.connect()
    except RuntimeError:
        own.client.client.shutdown()


def start() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--missing", type=int, nargs="*", default=[])
    options = parser.parse_args()
    threading.stack_size(1 << 18)
    jax_distributed.distributed_client, jax_distributed.initialize_distributed = (
        (lambda: own.client),
        initialize_distributed,
    )
    native.extension = lambda: types.SimpleNamespace(share_arena=lambda *_: None)
    bootstrap._share_arena = share_arena
    port, n = free_port(), options.ranks
    lasting = {"heartbeat_timeout": FOREVER, "shutdown_timeout": 60}
    address = f"{HOST}:{port}"
    service = [_jax.get_distributed_runtime_service(address, n, cluster_register_timeout=TIMEOUT, **lasting)]
    jax_distributed.end_service = service.clear
    ranks = [Rank(port, i, n) for i in range(n) if i not in options.missing]
    began = time.monotonic()
    for rank in ranks:
        rank.start()
    while not all(rank.met for rank in ranks):
        time.sleep(0.05)
    connected, met = (max(getattr(rank, name) for rank in ranks) - began for name in ("connected", "met"))
    if options.missing:
        print(*{rank.text for rank in ranks}, f"(all ranks know it after {met:.1f} s)", sep="\n")
    else:
        requests, nbytes = (max(getattr(rank.client, name) for rank in ranks) for name in ("requests", "nbytes"))
        print("| Ranks | Requests of a rank | Bytes of a rank | JAX has connected all | All have met |")
        print(f"|---|---|---|---|---|\n| {n} | {requests} | {nbytes} | {connected:.1f} s | {met:.1f} s |", flush=True)
    os._exit(0)  # 1,000 clients would leave one by one


if __name__ == "__main__":
    start()
