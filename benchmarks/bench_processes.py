"""Jobs of many processes on one machine, one CPU device each: jaxmp and `jax.numpy` over XLA's gloo collectives."""

import functools
import json
import socket
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from bench_matmul import PATTERNS, label_of_types, operand
from common import main
from jax.sharding import AxisType, NamedSharding
from tables import means
from tqdm import tqdm

import jaxmp

PROCESSES = (2, 4, 8)
SIZES = (1024, 2048, 4096)
TYPES = ("float32", "bfloat16")
FUNCTIONS = {"jaxmp": jaxmp.matmul, "jnp": jnp.matmul}
WORK = 4e10  # operations of the rounds of one contender, so that small products have more rounds


def child(port, nprocesses, process, sizes, rounds):
    """The rank of a job; the first one prints. Every rank runs the same calls in the same order."""
    jaxmp.distributed.initialize(f"127.0.0.1:{port}", nprocesses, process)
    mesh = jax.make_mesh((nprocesses,), ("x",), axis_types=(AxisType.Explicit,))
    found = []
    for dtype in TYPES:
        for size in sizes:
            count = int(min(max(rounds[0], WORK / size**3 / 2), rounds[1]))
            for pattern, (spec_a, spec_b, spec_d) in PATTERNS.items():
                shardings = (NamedSharding(mesh, spec) for spec in (spec_a, spec_b))
                a, b = (operand((size, size), dtype, to, seed) for seed, to in enumerate(shardings))
                to = NamedSharding(mesh, spec_d)
                calls = {
                    name: functools.partial(jax.jit(functools.partial(function, out_sharding=to)), a, b)
                    for name, function in FUNCTIONS.items()
                }
                ours, theirs = (calls[name]().addressable_data(0).astype(jnp.float32) for name in FUNCTIONS)
                assert float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs))) < 2e-2
                samples = {name: [] for name in FUNCTIONS}
                for i in range(count):
                    for name in list(FUNCTIONS)[:: 1 if i % 2 else -1]:
                        started = time.perf_counter()
                        calls[name]().block_until_ready()
                        samples[name].append(time.perf_counter() - started)
                seconds = {name: statistics.median(each) for name, each in samples.items()}
                found.append({"type": dtype, "size": size, "pattern": pattern, "seconds": seconds})
    if process == 0:
        print(json.dumps(found))


def in_job(nprocesses, sizes, rounds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--child"]
    ranks = [
        subprocess.Popen([*command, json.dumps([port, nprocesses, i, sizes, rounds])], stdout=subprocess.PIPE)
        for i in range(nprocesses)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a job of {nprocesses} processes failed")
    return json.loads(printed[0].splitlines()[-1])


def measure(quick):
    sizes, rounds = ((256,), (3, 3)) if quick else (SIZES, (5, 31))
    rows = []
    for nprocesses in tqdm(PROCESSES[:1] if quick else PROCESSES, "processes", disable=None):
        for c in in_job(nprocesses, sizes, rounds):
            ours, theirs = c["seconds"]["jaxmp"], c["seconds"]["jnp"]
            row = {"pattern": c["pattern"], "processes": nprocesses, "m x k x n": f"{c['size']}^3"}
            row |= {"types": label_of_types((c["type"],) * 2), "jaxmp ms": ours * 1e3, "jnp ms": theirs * 1e3}
            rows.append(row | {"jnp / jaxmp": theirs / ours})
    return {"processes": {"means": means(rows, ["types"], {"jnp / jaxmp": min}, across="pattern"), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
