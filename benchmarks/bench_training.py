"""Whole training steps by `fuse` at a level: which have the bits of one device on each mesh, and what it costs.

Each program of `programs` trains five steps on one device, on meshes of two, four and eight devices, and on four
devices of two processes. Parameters, the state of model and optimizer, and losses are compared bit for bit. Plain JAX
on the same meshes is the control. Then both run further steps in turns.
"""

import dataclasses
import functools
import hashlib
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
from common import interleaved, main
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import geometric_mean
from tqdm import tqdm

import jaxmp

STEPS, SEED = 5, 7
# Extents of the axes of each mesh. `data` shards the batch, `full` the batch and all parameters, `tensor` heads and the
# larger dimension of matrices, `expert` the experts.
MESHES = {
    "data 2": {"data": 2},
    "tensor 4": {"tensor": 4},
    "full 8": {"full": 8},
    "data 2, expert 4": {"data": 2, "expert": 4},
}
PROCESSES = {"data": 2, "tensor": 2}  # devices of a process are along `tensor`
QUICK = ("Linen batch statistics", "two towers")
TYPES = {"float32": "f32", "bfloat16": "bf16"}
KINDS = ("level", "plain")
CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}


@dataclasses.dataclass(frozen=True)
class Program:
    """A row of the table; `micro` microbatches make one step."""

    name: str
    model: Callable
    dtype: str
    optimizer: str
    micro: int = 1


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "momentum": optax.sgd(1e-1, momentum=0.9, nesterov=True),
}
PROGRAMS = (
    Program("NNX transformer", programs.nnx_gpt, "float32", "adamw"),
    Program("NNX transformer, 2 microbatches", programs.nnx_gpt, "float32", "adamw, clipped", 2),
    Program("NNX transformer, 4 microbatches", programs.nnx_gpt, "bfloat16", "adamw, clipped", 4),
    Program("Linen transformer, tied", programs.linen_gpt, "float32", "adamw, clipped"),
    Program("Linen transformer, tied, dropout", functools.partial(programs.linen_gpt, dropout=0.1), "bfloat16", "muon"),
    Program("Linen batch statistics", programs.linen_batch_norm, "float32", "momentum"),
    Program("Equinox MLP", programs.eqx_mlp, "float32", "adafactor"),
    Program("Equinox transformer", programs.eqx_transformer, "float32", "adamw"),
    Program("ViT", programs.vit, "float32", "adamw, clipped"),
    Program("DiT", programs.dit, "bfloat16", "adamw"),
    Program("T5", programs.t5, "float32", "adafactor"),
    Program("MoE", programs.moe, "float32", "adamw, clipped"),
    Program("Mamba", programs.mamba, "float32", "muon"),
    Program("S5", programs.s5, "float32", "adamw"),
    Program("scanned transformer", programs.llama, "bfloat16", "adamw, clipped"),
    Program("two towers", programs.clip, "float32", "adamw"),
)


def meshes_of(program):
    return [name for name, sizes in MESHES.items() if "expert" not in sizes or program.name == "MoE"]


def step_of(program, loss):
    """Returns a training step: (parameters, state, state of the optimizer, key), batch to the same and the loss."""
    optimizer = OPTIMIZERS[program.optimizer]
    gradients = jax.value_and_grad(loss, has_aux=True)

    def accumulated(params, state, batches, key):
        def one(carry, batch):
            state, key, total, sums = carry
            key, now = jax.random.split(key)
            (value, state), grads = gradients(params, state, batch, now)
            return (state, key, total + value, jax.tree.map(jnp.add, sums, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        (state, _, total, sums), _ = lax.scan(one, (state, key, jnp.float32(0), zeros), batches)
        return (total / program.micro, state), jax.tree.map(lambda g: g / program.micro, sums)

    def step(carry, batch):
        params, state, moments, key = carry
        key, now = jax.random.split(key)
        (value, state), grads = (gradients if program.micro == 1 else accumulated)(params, state, batch, now)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), state, moments, key), value

    return step, optimizer


def spec_of(shape, sizes):
    """Returns the sharding of a parameter, by its shape."""

    def over(axis, dims):
        fit = [i for i in dims if shape[i] > 1 and shape[i] % sizes[axis] == 0]
        return P(*(axis if i == fit[0] else None for i in range(len(shape)))) if fit else P()

    if "full" in sizes:
        return over("full", range(len(shape)))
    if "expert" in sizes and len(shape) == 3:
        return over("expert", [0])
    if "tensor" in sizes and len(shape) > 1:
        heads = [i for i, n in enumerate(shape) if n == programs.HEADS and len(shape) == 3]
        return over("tensor", heads or sorted(range(len(shape)), key=lambda i: (-shape[i], -i)))
    return P()


@functools.cache
def started(program):
    """Returns the step, plain and at the level, its carry and its batch, on the host. Each is traced once."""
    params, state, loss, batch = program.model(jnp.dtype(program.dtype))
    step, optimizer = step_of(program, loss)
    params, state = jax.tree.map(np.asarray, (params, state))
    if program.micro > 1:
        # A microbatch has as many rows as the largest mesh has devices.
        copies = max(1, 8 * program.micro // len(jax.tree.leaves(batch)[0]))
        batch = jax.tree.map(lambda x: np.concatenate([x] * copies).reshape(program.micro, -1, *x.shape[1:]), batch)
    moments = jax.tree.map(np.asarray, jax.jit(optimizer.init)(params))
    steps = {"plain": step, "level": jaxmp.fuse(step, determinism="topology")}
    return steps, (params, state, moments, np.asarray(jax.random.PRNGKey(SEED))), batch


def placed(program, sizes):
    """Returns the step under `jit`, plain and at the level, with its carry and its batch on this mesh."""
    steps, carry, batch = started(program)
    if not sizes:
        return {name: jax.jit(step) for name, step in steps.items()}, carry, batch
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    rows = next((axis for axis in ("data", "full") if axis in sizes), None)
    of_batch = NamedSharding(mesh, P(None, rows) if program.micro > 1 else P(rows))
    of_carry = jax.tree.map(lambda x: NamedSharding(mesh, spec_of(x.shape, sizes)), carry)

    def put(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    steps = {name: jax.jit(step, out_shardings=(of_carry, NamedSharding(mesh, P()))) for name, step in steps.items()}
    return steps, jax.tree.map(put, carry, of_carry), jax.tree.map(lambda x: put(x, of_batch), batch)


def trained(step, carry, batch):
    """Returns by its name the digest of each array after the steps, and of each loss."""
    losses = []
    for _ in range(STEPS):
        carry, loss = step(carry, batch)
        losses.append(loss)
    assert np.isfinite(losses[-1].addressable_data(0)), "the training diverges"
    arrays = multihost_utils.process_allgather((carry, losses), tiled=True)
    named = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for path, x in named}


def compared(found, want):
    """Returns "equal", or how many arrays differ."""
    count = sum(found[name] != want[name] for name in want)
    return f"{count} of {len(want)} differ" if count else "equal"


def on_meshes(program, meshes, timing):
    """Returns a row for each mesh of devices of this process, and what one device has."""
    want = {kind: trained(step, *rest) for steps, *rest in [placed(program, {})] for kind, step in steps.items()}
    rows = []
    for name in meshes:
        steps, *rest = placed(program, MESHES[name])
        row = {"program": program.name, "mesh": name}
        row |= {kind: compared(trained(step, *rest), want[kind]) for kind, step in steps.items()}
        calls = {kind: functools.partial(step, *rest) for kind, step in steps.items()}
        for clock, now in CLOCKS.items():
            seconds = interleaved(calls, *timing, clock=now)
            row[f"plain {clock} ms"] = seconds["plain"] * 1e3
            row[f"{clock} / plain"] = seconds["level"] / seconds["plain"]
        rows.append(row)
    return rows, want


def child(port, process, names):
    """One process of a job; the first one prints what the programs have after their steps."""
    jaxmp.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    for program in PROGRAMS:
        if program.name in names:
            steps, *rest = placed(program, PROCESSES)
            found = {kind: trained(step, *rest) for kind, step in steps.items()}
            if process == 0:
                print(json.dumps([program.name, found]), flush=True)


def in_processes(names):
    """Returns for each program what it has after its steps on four devices of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, __file__, "--child", json.dumps([port, i, names])] for i in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a job of two processes failed")
    return dict(json.loads(line) for line in printed[0].splitlines() if line.startswith(b'["'))


def rows_of(program, meshes, timing, elsewhere):
    """Returns the rows of a program; `elsewhere`: what the job of two processes has."""
    rows, want = on_meshes(program, meshes, timing)
    if elsewhere:
        kinds = {kind: compared(elsewhere[kind], want[kind]) for kind in want}
        rows.append(dict.fromkeys(rows[0], "") | {"program": program.name, "mesh": "2 processes"} | kinds)
    return rows


def summary(rows):
    """Returns a row for each program, and one for all of them, which counts programs of equal bits."""
    groups = {about: [row for row in rows if row["program"] == about.name] for about in PROGRAMS}
    groups = {about: group for about, group in groups.items() if group}
    equal = {
        kind: {about: [row[kind] == "equal" for row in group] for about, group in groups.items()} for kind in KINDS
    }
    lines = [
        {"program": about.name, "type": TYPES[about.dtype], "optimizer": about.optimizer}
        | {f"equal, {kind}": count(equal[kind][about]) for kind in KINDS}
        | costs(group)
        for about, group in groups.items()
    ]
    total = {f"equal, {kind}": count(map(all, equal[kind].values())) for kind in KINDS}
    return [*lines, {"program": "all", "type": "", "optimizer": ""} | total | costs(rows)]


def count(flags):
    flags = list(flags)
    return f"{sum(flags)} of {len(flags)}"


def costs(rows):
    """Returns the geometric mean and the worst of each ratio."""
    ratios = {f"{clock} / plain": [row[f"{clock} / plain"] for row in rows] for clock in CLOCKS}
    timed = {name: [value for value in values if value] for name, values in ratios.items()}
    return {name: [geometric_mean(values), max(values)] for name, values in timed.items()}


def measure(quick):
    chosen = [program for program in PROGRAMS if not quick or program.name in QUICK]
    timing = (0.1, (3, 5)) if quick else (0.3, (7, 15))
    elsewhere = {} if quick else in_processes([program.name for program in chosen])
    rows = [
        row
        for program in tqdm(chosen, "training", disable=None)
        for row in rows_of(program, meshes_of(program)[: 2 if quick else None], timing, elsewhere.get(program.name))
    ]
    return {"training": {"means": summary(rows), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    is_child = sys.argv[1:2] == ["--child"]
    jax.config.update("jax_num_cpu_devices", 2 if is_child else 8)
    if is_child:
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
