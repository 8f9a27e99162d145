"""Training in 16 and 32 processes with a fault: `make test-python RUN=tests/jobs/many.py`. Each job has one device
per process, a mesh of data x model, and 20 steps of two dense layers. In the middle of them nothing happens, or rank 5
is killed, is stopped, or calls a product with another alpha. Prints a row of docs/clusters.md for each job, and fails
if a live rank does not name rank 5. `ARGS="16 --machines 8"`, as root, places the processes on as many network
namespaces, and also cuts the machine of rank 5 off the network. Each rank is run by `ranks.py many`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from job import Job
from machines import LINK, Machines

STEPS, VICTIM, TIMEOUT = 20, 5, 20
FAULTS = ("none", "killed", "stopped", "different", "cut off")


def main(initialize, process: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxmp
    from jaxmp._src.jobs.peers import Peers
    from jaxmp._src.platform.runtime import native

    start_peers, connections = Peers.start, []

    def start(self, wanted, address_of, connect, lose):
        def keep(peer, fd):
            connections.append(os.dup(fd))
            connect(peer, fd)

        start_peers(self, wanted, address_of, keep, lose)

    Peers.start = start
    began = time.time()
    initialize()
    met = time.time()
    mesh = jax.make_mesh((jax.device_count() // 4, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    jax.set_mesh(mesh)

    def ones(shape, spec):
        value = np.full(shape, 0.01, np.float32)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: value[index])

    def loss(weights, x, alpha):
        hidden = jaxmp.matmul(x, weights[0], out_sharding=P("data", "model"))
        return jnp.mean(jaxmp.matmul(hidden, weights[1], alpha=alpha, out_sharding=P("data", None)) ** 2)

    @jax.jit(static_argnums=2)
    def step(weights, x, alpha):
        value, gradients = jax.value_and_grad(loss)(weights, x, alpha)
        return value, jax.tree.map(lambda w, g: w - g, weights, gradients)

    weights = ones((32, 64), P(None, "model")), ones((64, 32), P("model", None))
    x, alpha, times = ones((64, 32), P("data", None)), 1.0, []
    for i in range(STEPS):
        if i == STEPS // 2 and process == VICTIM and os.environ["FAULT"] != "none":
            print(f"FAULT {time.time():.3f}")
            if os.environ["FAULT"] == "different":
                alpha = 2.0
            elif os.environ["FAULT"] == "cut off":
                subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
            else:
                os.kill(os.getpid(), signal.SIGKILL if os.environ["FAULT"] == "killed" else signal.SIGSTOP)
        if i == 1:
            before = sent(connections)
        since = time.time()
        value, weights = step(weights, x, alpha)
        float(value)
        times.append(time.time() - since)
    messages = (sent(connections) - before) / (STEPS - 1)
    memory = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024
    numbers = met - began, times[0], 1000 * sorted(times)[STEPS // 2], len(native.extension().peers()), messages, memory
    print("MANY", *(f"{number:.0f}" for number in numbers))


def sent(connections: list[int]) -> int:
    """Returns how many segments with data this process has sent on sockets: each holds one message, or a few."""
    total = 0
    for descriptor in connections:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            known = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        total += struct.unpack_from("I", known, 156)[0]  # tcpi_data_segs_out of linux/tcp.h
    return total


def run(nprocesses: int, nmachines: int, fault: str):
    """Returns the ranks of a job, and the ranks that the fault concerns."""
    each = nprocesses // nmachines
    first = VICTIM // each * each
    victims = set(range(first, first + each)) if fault == "cut off" else {VICTIM}
    env = {"FAULT": fault, "JAXMP_TIMEOUT": str(TIMEOUT)}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, commands = Path(name), None
        if nmachines > 1:
            machines = stack.enter_context(Machines(folder, nmachines))
            env["HOST"] = machines.addresses[0]
            commands = [command for command in machines.commands("127.0.1.1") for _ in range(each)]
        job = Job(folder, "many", nprocesses, env={"all": env}, machines=commands)
        return job.wait(400, stopped=(VICTIM,) if fault == "stopped" else ()), victims


def start() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--machines", type=int, default=1)
    options, failed = parser.parse_args(), 0
    names = (
        "Ranks",
        "Fault",
        "`initialize`",
        "First step",
        "A step",
        "Sockets of a rank",
        "Messages of a rank and step",
    )
    print(f"| {' | '.join(names)} | Memory of a rank | Named after |")
    print("|---" * (len(names) + 2) + "|")
    for nprocesses in options.ranks:
        for fault in FAULTS if options.machines > 1 else FAULTS[:-1]:
            ranks, victims = run(nprocesses, options.machines, fault)
            if fault == "none":
                found = [re.search(r"^MANY ([\d ]+)$", rank.log, flags=re.M)[1] for rank in ranks]
                most = [max(numbers) for numbers in zip(*(map(int, each.split()) for each in found), strict=True)]
                row = "{} s | {} s | {} ms | {} | {} | {} MiB |".format(*most)
            else:
                live = [i for i in range(nprocesses) if fault == "cut off" or i != VICTIM]
                for i in live:
                    named = set(map(int, re.findall(r"\brank (\d+) ", ranks[i].saw)))
                    if not (named - victims if i in victims else named & victims):
                        failed += 1
                        print(f"rank {i} saw {ranks[i].saw!r}", file=sys.stderr)
                row = f"| | | | | | {max(ranks[i].seconds or 0 for i in live):.1f} s"
            place = f"{nprocesses} on {options.machines} machines" if options.machines > 1 else nprocesses
            print(f"| {place} | {fault} | {row} |", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(start())
