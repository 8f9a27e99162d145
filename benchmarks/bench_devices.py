"""Many CPU devices in one process: the time of a product and of compiling it, jaxmp and `jax.numpy`.

Each number of devices has a process of its own, as a user's program has.
"""

import functools
import json
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
from bench_matmul import PATTERNS, label_of_types, operand
from common import compile_seconds, interleaved, main
from jax.sharding import AxisType, NamedSharding
from tables import means
from tqdm import tqdm

import jaxmp

DEVICES = (16, 64, 128)
SIZE = 2048
TYPES = ("float32", "bfloat16")
FUNCTIONS = {"jaxmp": jaxmp.matmul, "jnp": jnp.matmul}


def child(ndevices, size, dtype, quick):
    """Print the times of each pattern, in one process with this many devices."""
    jax.config.update("jax_num_cpu_devices", ndevices)
    mesh = jax.make_mesh((ndevices,), ("x",), axis_types=(AxisType.Explicit,))
    found = {}
    for pattern, (spec_a, spec_b, spec_d) in PATTERNS.items():
        a, b = (operand((size, size), dtype, NamedSharding(mesh, spec), i) for i, spec in enumerate((spec_a, spec_b)))
        to = NamedSharding(mesh, spec_d)
        compiling, calls = {name: [] for name in FUNCTIONS}, {}
        for _ in range(2 if quick else 4):
            for name, function in FUNCTIONS.items():
                parts, call = compile_seconds(functools.partial(function, out_sharding=to), (a, b))
                compiling[name].append(sum(parts))
                calls[name] = functools.partial(call, a, b)
        ours, theirs = (jnp.asarray(jax.device_get(calls[name]()), jnp.float32) for name in FUNCTIONS)
        assert float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs))) < 2e-2
        found[pattern] = {
            "seconds": interleaved(calls, *((0.3, (3, 5)) if quick else (1.5, (9, 31)))),
            # The first of each is the first use in this process.
            "compile": {name: statistics.median(samples[1:]) for name, samples in compiling.items()},
        }
    print(json.dumps(found))


def in_child(*arguments):
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


def measure(quick):
    grid = [(ndevices, dtype) for dtype in TYPES for ndevices in (DEVICES[:1] if quick else DEVICES)]
    rows = []
    for ndevices, dtype in tqdm(grid, "devices", disable=None):
        for pattern, found in in_child(ndevices, 512 if quick else SIZE, dtype, quick).items():
            run, compiled = found["seconds"], found["compile"]
            row = {"pattern": pattern, "types": label_of_types((dtype, dtype)), "devices": ndevices}
            row |= {f"{name} ms": run[name] * 1e3 for name in FUNCTIONS}
            row |= {"jaxmp / jnp": run["jaxmp"] / run["jnp"]}
            row |= {f"{name} compile": compiled[name] for name in FUNCTIONS}
            rows.append(row | {"to compile": compiled["jaxmp"] / compiled["jnp"]})
    ratios = {"jaxmp / jnp": max, "to compile": max}
    return {"devices": {"means": means(rows, ["types"], ratios, across="pattern"), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
