"""Many calls, watching memory and file descriptors: `make test-python RUN=tests/process/soak.py`.

100,000 small calls and 1,000 large ones in one process of eight devices, then in two processes of two. Prints both
numbers at the start and at the end of each run, and fails where memory has grown by more than `BOUND` or the number of
descriptors at all. A leak of a kilobyte a call would be 100 MB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from job import free_port

# Resident megabytes that allocators' own habits may add after the warm-up.
BOUND = 48
WARM_UP = 500


def usage() -> tuple[float, int]:
    """(resident megabytes, open descriptors) of this process."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd"))


def calls(extent: int):
    """A function that runs one product of each pattern with all its communication, and how many calls that is."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxmp

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Explicit,))
    jax.set_mesh(mesh)

    def ones(spec):
        shape = (extent, extent)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda i: np.ones(shape, np.float32)[i])

    rows, cols = ones(P("x", None)), ones(P(None, "x"))

    @jax.jit
    def gather(rows, cols):
        return jaxmp.matmul(rows, cols, out_sharding=P(None, "x"))

    @jax.jit
    def scatter(rows, cols):
        return jaxmp.matmul(cols, rows, out_sharding=P("x", None))

    @jax.jit
    def reduce(rows, cols):
        return jaxmp.matmul(cols, rows, out_sharding=P(None, None))

    products = (gather, scatter, reduce)

    def run():
        for product in products:
            product(rows, cols).block_until_ready()

    return run, len(products)


def soak(what: str, extent: int, count: int) -> bool:
    run, each = calls(extent)
    for _ in range(min(WARM_UP, count) // each + 1):
        run()
    start, began = usage(), time.time()
    for _ in range(count // each + 1):
        run()
    end, seconds = usage(), time.time() - began
    is_flat = end[0] - start[0] <= BOUND and end[1] == start[1]
    print(
        f"{what}: {count} calls of {extent} x {extent} in {seconds:.0f} s; memory {start[0]:.1f} -> {end[0]:.1f} MB, "
        f"descriptors {start[1]} -> {end[1]}: {'flat' if is_flat else 'GROWN'}",
        flush=True,
    )
    return is_flat


def rank(options) -> int:
    """One process of the run."""
    import jaxmp

    if options.processes > 1:
        address = f"127.0.0.1:{options.port}"
        jaxmp.distributed.initialize(address, options.processes, options.process)
    what = f"process {options.process} of {options.processes}"
    is_flat = [soak(what, 16, options.small), soak(what, options.large_extent, options.large)]
    return 0 if all(is_flat) else 1


def start(options, processes: int, devices: int) -> bool:
    """Whether all processes of one run stayed flat."""
    port = free_port()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    counts = [f"--small={options.small}", f"--large={options.large}", f"--large-extent={options.large_extent}"]
    command = [sys.executable, __file__, *counts, f"--processes={processes}", f"--port={port}"]
    started = [subprocess.Popen([*command, f"--process={i}"], env=environment) for i in range(processes)]
    statuses = [process.wait() for process in started]
    return not any(statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=1_000)
    parser.add_argument("--large-extent", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--process", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.process is not None:
        return rank(options)
    runs = [start(options, 1, 8), start(options, 2, 2)]
    return 0 if all(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
