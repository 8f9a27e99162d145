"""Gradients of four microbatches on data x model: summed over data in each of them, or once, by weights tagged reduced.

In one process, in two processes, and (as root) on two machines joined by a link of 1 Gbit/s, which are network
namespaces of `bench_hosts`. In the last two the data axis is between the processes and the model axis inside each.
Programs of jaxmp and `jax.numpy`, on explicit and automatic axes, take turns.
"""

import contextlib
import functools
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time

import bench_hosts
import jax
import jax.numpy as jnp
import numpy as np
from bench_matmul import operand
from common import main
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from tables import means
from tqdm import tqdm

import jaxmp
from jaxmp._src.platform.hardware import hardware
from jaxmp._src.tools.cli import calibrate

MICROBATCHES, ROUNDS, RATE = 4, 9, "1gbit"
TOKENS, WIDTH, HIDDEN = 128, 1024, 4096
SPECS = {"up": P(None, "model"), "down": P("model", None)}
ROWS, BATCHES = P("data", None), P(None, "data", None)
AXES = {"explicit": AxisType.Explicit, "automatic": AxisType.Auto}
MODULES = {"jaxmp": jaxmp, "jnp": jnp}


def loss(module, w, x, out):
    hidden = jax.nn.relu(module.matmul(x, w["up"]))
    return jnp.square(module.matmul(hidden, w["down"], **out) - x).mean()


def accumulated(module, w, batches, zeros, out):
    """Returns the gradient of the sum of the losses of all microbatches."""

    def of_one(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(functools.partial(loss, module))(w, x, out)), None

    return lax.scan(of_one, zeros, batches)[0]


def untagged(module, axes, w, batches):
    out = {"out_sharding": ROWS} if axes == "explicit" else {}
    return accumulated(module, w, batches, jax.tree.map(jnp.zeros_like, w), out)


def tagged(module, axes, w, batches):
    """Returns the same; the terms of the sum over data wait until the end."""
    if axes == "automatic":
        of_explicit = functools.partial(tagged, module, "explicit")
        return jax.sharding.explicit_axes(of_explicit, in_sharding=(SPECS, BATCHES))(w, batches)
    weights = {name: reshard(x, SPECS[name].update(reduced={"data"})) for name, x in w.items()}
    zeros = {
        name: jnp.zeros(x.shape, x.dtype, out_sharding=SPECS[name].update(unreduced={"data"})) for name, x in w.items()
    }
    terms = accumulated(module, weights, batches, zeros, {"out_sharding": ROWS})
    return {name: reshard(x, SPECS[name]) for name, x in terms.items()}


def times(scale, rounds):
    """Returns seconds and bytes over the data axis of each program: {axes: {module: {"untagged": (s, bytes), ...}}}."""
    found = {}
    for axes, module in itertools.product(AXES, MODULES):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AXES[axes],) * 2)
        jax.set_mesh(mesh)
        width, hidden = WIDTH // scale, HIDDEN // scale
        shapes = {"up": (width, hidden), "down": (hidden, width)}
        w = {name: operand(shape, "float32", NamedSharding(mesh, SPECS[name]), 0) for name, shape in shapes.items()}
        batches = operand((MICROBATCHES, TOKENS, width), "float32", NamedSharding(mesh, BATCHES), 1)
        programs, moved, samples = {}, {}, {}
        for f in (untagged, tagged):
            program = jax.jit(functools.partial(f, MODULES[module], axes))
            by_axes = jaxmp.explain(program, compiled=True, quiet=True)(w, batches).bytes_by(lambda row: row.axes)
            moved[f.__name__] = sum(nbytes for axes, nbytes in by_axes.items() if "data" in axes)
            programs[f.__name__] = functools.partial(program.lower(w, batches).compile(), w, batches)
        results = [jax.tree.leaves(call()) for call in programs.values()]
        for one, other in zip(*results, strict=True):
            one, other = (np.asarray(x.addressable_data(0)) for x in (one, other))
            assert np.max(np.abs(one - other)) < 1e-4 * np.max(np.abs(one))
        for _, (name, call) in itertools.product(range(rounds), programs.items()):
            started = time.perf_counter()
            jax.block_until_ready(call())
            samples.setdefault(name, []).append(time.perf_counter() - started)
        seconds = {name: statistics.median(each) for name, each in samples.items()}
        found.setdefault(axes, {})[module] = {name: (seconds[name], moved[name]) for name in programs}
    return found


def child(address, process, scale, rounds):
    jaxmp.distributed.initialize(address, 2, process)
    hardware.set_of_job(bench_hosts.of_rank_0(process, json.dumps(calibrate.measure())))
    found = times(scale, rounds)
    if process == 0:
        print(json.dumps(found))


def in_job(address, commands, scale, rounds):
    ranks = [
        subprocess.Popen(
            [*command, sys.executable, __file__, "--child", json.dumps([address, i, scale, rounds])],
            stdout=subprocess.PIPE,
        )
        for i, command in enumerate(commands)
    ]
    printed = [each.communicate()[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise RuntimeError(f"the job at {address} failed")
    return json.loads(printed[0].splitlines()[-1])


def on_machines(scale, rounds):
    with bench_hosts.machines(RATE) as commands:
        return in_job(f"{bench_hosts.ADDRESSES[0]}:{bench_hosts.PORT}", commands, scale, rounds)


def in_processes(scale, rounds):
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return in_job(f"127.0.0.1:{port}", [[], []], scale, rounds)


def in_one(scale, rounds):
    jax.config.update("jax_num_cpu_devices", 4)
    return times(scale, rounds)


def measure(quick):
    places = {"1 process": in_one, "2 processes": in_processes}
    if why := bench_hosts.why_not():
        print(f"no machines: {why}", file=sys.stderr)
    else:
        places["2 machines, 1 Gbit/s"] = on_machines
    rows = []
    for place, run in tqdm(places.items(), "microbatches", disable=None):
        found = run(*((8, 3) if quick else (1, ROUNDS)))
        for axes, module in itertools.product(AXES, MODULES):
            (before, bytes_before), (after, bytes_after) = (found[axes][module][f] for f in ("untagged", "tagged"))
            row = {"place": place, "by": module, "axes": axes, "MB over data": bytes_before / 1e6}
            row |= {"tagged MB": bytes_after / 1e6, "ms": before * 1e3, "tagged ms": after * 1e3}
            rows.append(row | {"bytes": bytes_before / bytes_after, "time": after / before})
    return {"microbatches": {"means": means(rows, ["place", "by"], {"time": max, "bytes": min}), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1:2] == ["--child"]:
        jax.config.update("jax_num_cpu_devices", 2)
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
