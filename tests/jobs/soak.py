"""Many calls, watching memory and file descriptors: `make test-python RUN=tests/jobs/soak.py`. 100,000 small calls
and 1,000 large ones in one process of eight devices, then in two processes of two. Prints both numbers at the start and
at the end of each run, and fails where memory has grown by more than `BOUND` or the number of descriptors at all. A
leak of a kilobyte a call would be 100 MB. Each rank is run by `ranks.py soak`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from job import run as run_job

# Resident megabytes that allocators' own habits may add after the warm-up.
BOUND = 48
WARM_UP = 500


def usage() -> tuple[float, int]:
    """(resident megabytes, open descriptors) of this process."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd"))


def calls(extent: int):
    """A function that runs one product of each pattern with all its communication."""
    import jax
    from jax.sharding import PartitionSpec as P
    from shards import mesh_of, ones

    import jaxmp

    mesh = mesh_of()
    rows, cols = (ones(mesh, (extent, extent), spec) for spec in (P("x", None), P(None, "x")))
    gather = jax.jit(lambda rows, cols: jaxmp.matmul(rows, cols, out_sharding=P(None, "x")))
    scatter = jax.jit(lambda rows, cols: jaxmp.matmul(cols, rows, out_sharding=P("x", None)))
    reduce = jax.jit(lambda rows, cols: jaxmp.matmul(cols, rows, out_sharding=P(None, None)))

    def run():
        for product in (gather, scatter, reduce):
            product(rows, cols).block_until_ready()

    return run


def soak(what: str, extent: int, count: int) -> bool:
    run = calls(extent)
    for _ in range(min(WARM_UP, count) // 3 + 1):
        run()
    start, began = usage(), time.time()
    for _ in range(count // 3 + 1):
        run()
    end, seconds = usage(), time.time() - began
    is_flat = end[0] - start[0] <= BOUND and end[1] == start[1]
    print(
        f"SOAK {what}: {count} calls of {extent} x {extent} in {seconds:.0f} s; memory {start[0]:.1f} -> {end[0]:.1f} "
        f"MB, descriptors {start[1]} -> {end[1]}: {'flat' if is_flat else 'GROWN'}",
        flush=True,
    )
    return is_flat


def main(initialize, process: int) -> None:
    asked = json.loads(os.environ["SOAK"])
    if asked["processes"] > 1:
        initialize()
    what = f"process {process} of {asked['processes']}"
    assert all([soak(what, 16, asked["small"]), soak(what, asked["extent"], asked["large"])])


def start() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("small", 100_000), ("large", 1_000), ("extent", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options, failed = vars(parser.parse_args()), 0
    for nprocesses, ndevices in ((1, 8), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            env = {"all": {"SOAK": json.dumps(options | {"processes": nprocesses}), "JAXMP_TIMEOUT": "60"}}
            _, ranks = run_job(Path(folder), "soak", nprocesses, ndevices=ndevices, env=env, deadline=36_000)
        print(*(line for rank in ranks for line in rank.log.splitlines() if line.startswith("SOAK")), sep="\n")
        if any(rank.status for rank in ranks):
            failed = 1
            print(*(rank.log[-4000:] for rank in ranks), sep="\n---\n")
    return failed


if __name__ == "__main__":
    sys.exit(start())
