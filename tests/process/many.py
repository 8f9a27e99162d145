"""Training in 16 and 32 processes with a fault: `make test-python RUN=tests/process/many.py`. Each job has one device
per process, a mesh of data x model, and 20 steps of two dense layers. In the middle of them nothing happens, or rank 5
is killed, is stopped, or calls a product with another alpha. Prints a row of docs/clusters.md for each job, and fails
if a rank does not name rank 5. Each rank is run by `ranks.py many`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from job import run as run_job

STEPS, VICTIM, TIMEOUT = 20, 5, 20
FAULTS = ("none", "killed", "stopped", "different")


def main(initialize, process: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxmp
    from jaxmp._src.platform.runtime import native

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
            else:
                os.kill(os.getpid(), signal.SIGKILL if os.environ["FAULT"] == "killed" else signal.SIGSTOP)
        start = time.time()
        value, weights = step(weights, x, alpha)
        float(value)
        times.append(time.time() - start)
    memory = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024
    numbers = met - began, times[0], 1000 * sorted(times)[STEPS // 2], len(native.extension().peers()), memory
    print("MANY", *(f"{number:.0f}" for number in numbers))


def start() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[16, 32])
    failed = 0
    print("| Ranks | Fault | `initialize` | First step | A step | Sockets of a rank | Memory of a rank | Named after |")
    print("|---|---|---|---|---|---|---|---|")
    for nprocesses in parser.parse_args().ranks:
        for fault in FAULTS:
            env = {"all": {"FAULT": fault, "JAXMP_TIMEOUT": str(TIMEOUT)}}
            with tempfile.TemporaryDirectory() as folder:
                stopped = (VICTIM,) if fault == "stopped" else ()
                _, ranks = run_job(Path(folder), "many", nprocesses, env=env, deadline=400, stopped=stopped)
            found = [re.search(r"^MANY ([\d ]+)$", rank.log, flags=re.M) for rank in ranks]
            others = [rank for i, rank in enumerate(ranks) if i != VICTIM]
            if fault == "none":
                most = [max(numbers) for numbers in zip(*(map(int, each[1].split()) for each in found), strict=True)]
                row = "{} s | {} s | {} ms | {} | {} MiB |".format(*most)
            else:
                failed += any(f"rank {VICTIM} " not in rank.saw for rank in others)
                row = f"| | | | | {max(rank.seconds for rank in others):.1f} s"
            print(f"| {nprocesses} | {fault} | {row} |", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(start())
