"""Two machines of one core each, joined by a link: jaxmp, `jax.numpy`, and the parts of a product alone.

The machines are network namespaces of this one, which takes root, ip, tc and unshare. All contenders take turns. Each
job first measures its machines and their link, as `jaxmp info --calibrate` does; "whole" is jaxmp without that.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from bench_matmul import PATTERNS, operand
from common import main
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means

import jaxmp
from jaxmp._src.platform.hardware import hardware
from jaxmp._src.platform.jax_internals import jax_distributed
from jaxmp._src.tools.cli import calibrate

NAMES, ADDRESSES, LINK, PORT = ("jaxmp-bench-a", "jaxmp-bench-b"), ("10.77.41.1", "10.77.41.2"), "veth0", 9999
RATES, SIZES, TYPES, ROUNDS = ("1gbit", "2500mbit", "10gbit"), (2048, 4096), ("float32", "bfloat16"), 9


def why_not():
    """Why no namespaces can be made here, or ""."""
    if os.getuid() != 0:
        return "network namespaces take root"
    for command in ("ip -V", "tc -V", "unshare -n -m -u -i -p -f true"):
        try:
            subprocess.run(command.split(), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"{command} fails ({error})"
    return "" if len(os.sched_getaffinity(0)) > 1 else "there is one core"


@contextlib.contextmanager
def machines(rate):
    """The commands that start a process on each of them."""

    def run(command):
        subprocess.run(command.split(), check=True)

    cores = sorted(os.sched_getaffinity(0))
    isolated = ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c"]
    shell = ['mount -t tmpfs none /dev/shm; exec "$@"', "sh"]
    try:
        for name in NAMES:
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
        run(f"ip link add {LINK} netns {NAMES[0]} type veth peer name {LINK} netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run(f"ip -n {name} addr add {address}/24 dev {LINK}")
            run(f"ip -n {name} link set {LINK} up")
            run(f"tc -n {name} qdisc add dev {LINK} root tbf rate {rate} burst 256k limit 4m")
        yield [
            ["taskset", "-c", str(core), "ip", "netns", "exec", name, *isolated, *shell]
            for name, core in zip(NAMES, cores, strict=False)
        ]
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name])


def child(process, sizes, rounds):
    """The rank of a job; the first one prints. Every rank runs the same calls in the same order."""
    jaxmp.distributed.initialize(f"{ADDRESSES[0]}:{PORT}", 2, process)
    measured = of_rank_0(process, json.dumps(calibrate.measure()))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    jax.set_mesh(mesh)
    token = operand((2,), "float32", NamedSharding(mesh, P("x")), 0)
    meet = jax.jit(jax.shard_map(lambda x: lax.psum(x, "x"), in_specs=P("x"), out_specs=P()))
    found = []
    for dtype in TYPES:
        for size in sizes:
            for pattern in PATTERNS:
                calls, chunks = contenders(mesh, pattern, size, dtype, measured)
                samples = {}
                for i in range(rounds + 1):
                    for name, call in calls.items():
                        meet(token).block_until_ready()
                        started = time.perf_counter()
                        call().block_until_ready()
                        if i:  # the first one compiles
                            samples.setdefault(name, []).append(time.perf_counter() - started)
                seconds = {name: statistics.median(each) for name, each in samples.items()}
                found.append({"pattern": pattern, "type": dtype, "size": size, "seconds": seconds, "chunks": chunks})
    if process == 0:
        print(json.dumps(found))


def of_rank_0(process, text):
    store = jax_distributed.distributed_client()
    if process == 0:
        store.key_value_set("measured", text)
    return store.blocking_key_value_get("measured", 600_000)


def contenders(mesh, pattern, size, dtype, measured):
    """(the product by jaxmp and by jax.numpy, one device's part of it, and the collective of it alone; into how many
    chunks jaxmp cuts it)."""
    spec_a, spec_b, spec_d = PATTERNS[pattern]
    a, b = (operand((size, size), dtype, NamedSharding(mesh, spec), i) for i, spec in enumerate((spec_a, spec_b)))
    narrow = jnp.uint16 if dtype == "bfloat16" else jnp.float32
    moves, spec = {
        "AG": (lambda x: lax.all_gather(x, "x", tiled=True), P(None, None)),
        "RS": (lambda x: lax.psum_scatter(x, "x", tiled=True), P("x", None)),
        "AR": (lambda x: lax.psum(x, "x"), P(None, None)),
    }[pattern]
    move = jax.jit(jax.shard_map(moves, in_specs=P("x", None), out_specs=spec, check_vma=False))
    # The rows of a; or a partial product of each rank, in the type that is summed.
    rows, moved = (size, narrow) if pattern == "AG" else (2 * size, jnp.float32)
    x = operand((rows, size), "float32", NamedSharding(mesh, P("x", None)), 0).astype(moved)
    local = [(size, size), (size, size // 2)] if pattern == "AG" else [(size, size // 2), (size // 2, size)]
    alone = jax.make_mesh((1,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.local_devices()[:1])
    with jax.set_mesh(alone):
        parts = [operand(shape, dtype, NamedSharding(alone, P(None, None)), i) for i, shape in enumerate(local)]
        product = jax.jit(jaxmp.matmul).lower(*parts).compile()
    ours = []
    for known in ("", measured):
        hardware.set_of_job(known)
        call = functools.partial(jaxmp.matmul, out_sharding=spec_d)
        ours.append(functools.partial(jax.jit(call).lower(a, b).compile(), a, b))
    (row,) = jaxmp.explain(functools.partial(jaxmp.matmul, out_sharding=spec_d), quiet=True)(a, b).rows
    return {
        "jaxmp": ours[1],
        "whole": ours[0],
        "jnp": functools.partial(jax.jit(functools.partial(jnp.matmul, out_sharding=spec_d)), a, b),
        "product": functools.partial(product, *parts),
        "collective": functools.partial(move, x),
    }, row.chunks


def in_job(rate, sizes, rounds):
    with machines(rate) as commands:
        ranks = [
            subprocess.Popen(
                [*command, sys.executable, __file__, "--child", json.dumps([i, sizes, rounds])], stdout=subprocess.PIPE
            )
            for i, command in enumerate(commands)
        ]
        printed = [each.communicate()[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise RuntimeError(f"the job at {rate} failed")
    return json.loads(printed[0].splitlines()[-1])


def measure(quick):
    if why := why_not():
        sys.exit(f"skipped: {why}")
    rows = []
    for rate in RATES[: 1 if quick else None]:
        for c in in_job(rate, (512,) if quick else SIZES, 3 if quick else ROUNDS):
            times = c["seconds"]
            row = {"pattern": c["pattern"], "link": rate, "m x k x n": f"{c['size']}^3", "types": c["type"]}
            row["chunks"] = c["chunks"]
            row |= {f"{name} ms": seconds * 1e3 for name, seconds in times.items()}
            row["jaxmp / longer part"] = times["jaxmp"] / max(times["product"], times["collective"])
            row["whole / jaxmp"] = times["whole"] / times["jaxmp"]
            rows.append(row | {"jnp / jaxmp": times["jnp"] / times["jaxmp"]})
    ratios = {"jnp / jaxmp": min, "whole / jaxmp": min}
    return {"hosts": {"means": means(rows, ["link", "types"], ratios, across="pattern"), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
