"""Peak memory of a sharded product, beyond its operands: what stays after compiling and what running takes.

Each contender runs in a process of its own, since a peak never falls. Linux counts it (VmHWM in /proc); XLA's
own estimate would not see what a custom call allocates.
"""

import ctypes
import gc
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from bench_matmul import PATTERNS, contenders, label_of_types
from common import main
from tables import means
from tqdm import tqdm

RANKS = 4
SHAPE = (512, 4096, 11008)
TYPES = [("float32", "float32"), ("bfloat16", "bfloat16")]


# glibc gives memory back as soon as it is freed, instead of keeping it for the next allocation.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def status(field):
    """Bytes from /proc/self/status."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def trim():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def child(name, pattern, shape, types):
    """Print the bytes that one contender adds to the process, at their peak."""
    calls, _ = contenders(pattern, RANKS, shape, types)
    jax.block_until_ready([call.args for call in calls.values()])  # operands still being made would count as peak
    print(json.dumps(peak(calls[name])))


def peak(call):
    """The bytes that compiling and running add to the process, of a jitted function with its arguments."""
    trim()
    before = status("VmRSS")
    compiled = call.func.lower(*call.args).compile()
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # so that the peak excludes compiling
    for _ in range(3):
        jax.block_until_ready(compiled(*call.args))
    return status("VmHWM") - before


def in_child(*arguments, script=__file__):
    command = [sys.executable, script, "--child", json.dumps(arguments)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ALLOCATOR)
    return int(ran.stdout.split()[-1])


def measure(quick):
    shape = (512, 1024, 2048) if quick else SHAPE
    rows = []
    for types, pattern in tqdm(list(itertools.product(TYPES, PATTERNS)), "memory", disable=None):
        result = shape[0] * shape[2] * jnp.dtype(types[1]).itemsize
        ours, theirs = (in_child(name, pattern, shape, types) for name in ("jaxmp", "xla"))
        sizes = {"size of D": result / 2**20, "jaxmp": ours / 2**20, "XLA": theirs / 2**20}
        rows.append({"pattern": pattern, "types": label_of_types(types), **sizes, "jaxmp / XLA": ours / theirs})
    return {"memory": {"means": means(rows, ["types"], {"jaxmp / XLA": max}, across="pattern"), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
