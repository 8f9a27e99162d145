"""Experts split over devices: uneven groups against even ones, jaxmp's layers against slots of a capacity, and memory.
Times are by the clock and by the processor (all threads); other processes disturb the second less.
Times are by the clock and by the processor (all threads); other processes disturb the second less.
"""

import functools
import itertools
import json
import math
import sys
import time

import jax
import jax.numpy as jnp
from bench_matmul import operand
from bench_memory import in_child, peak
from bench_products import GROUPS, TYPES, groups
from common import interleaved, main
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means

import jaxmp
from jaxmp._src.core.ops.moe_mlp import layers

RANKS = (2, 4)
TOKENS, WIDTH, HIDDEN, EXPERTS = 4096, 512, 1024, 8
LARGEST = 0.7  # of the rows, in one group
CAPACITY = 1.25


def mesh_of(ranks):
    return jax.make_mesh((ranks,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:ranks])


def split(mesh, *operands):
    return [jax.device_put(x, NamedSharding(mesh, P("p"))) for x in operands]


def uneven(mesh, dtype):
    x, w = split(mesh, operand((TOKENS, WIDTH), dtype, None, 0), operand((EXPERTS, WIDTH, HIDDEN), dtype, None, 1))
    product = jax.jit(functools.partial(jaxmp.ragged_dot, out_sharding=P("p")))
    rest = math.floor((1 - LARGEST) * TOKENS / (EXPERTS - 1))
    sizes = {"even": [TOKENS // EXPERTS] * EXPERTS, "uneven": [TOKENS - (EXPERTS - 1) * rest] + [rest] * (EXPERTS - 1)}
    return {name: functools.partial(product, x, w, jnp.array(each)) for name, each in sizes.items()}


def with_capacity(mesh, dtype):
    """Sends tokens of random experts through two layers, dropless, and with slots that drop some tokens."""
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    x, up, down = split(mesh, *(operand(shape, dtype, None, i) for i, shape in enumerate(shapes)))
    (experts,) = split(mesh, jax.random.randint(jax.random.key(0), (TOKENS, 1), 0, EXPERTS))
    slots = math.ceil(CAPACITY * TOKENS / mesh.size / EXPERTS)

    def ours(x, up, down, experts):
        routes = {"experts": experts, "gates": jnp.ones(experts.shape, x.dtype)}
        return layers(x, {"w_gate": None, "w_up": up, "w_down": down}, routes, {}, "silu", out_sharding=P("p"))

    def of_slots(x, up, down, experts):
        chosen = jax.nn.one_hot(experts[:, 0], EXPERTS, dtype=jnp.int32)
        at = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1
        sent = jnp.zeros((EXPERTS, slots, WIDTH), x.dtype).at[experts[:, 0], at].set(x, mode="drop")
        there = functools.partial(lax.all_to_all, axis_name="p", split_axis=0, concat_axis=1, tiled=True)
        back = functools.partial(lax.all_to_all, axis_name="p", split_axis=1, concat_axis=0, tiled=True)
        h = jax.nn.silu(jnp.einsum("gsk,gkh->gsh", there(sent), up))
        y = back(jnp.einsum("gsh,ghn->gsn", h, down))
        return y.at[experts[:, 0], at].get(mode="fill", fill_value=0)

    theirs = jax.shard_map(of_slots, mesh=mesh, in_specs=P("p"), out_specs=P("p"))
    return {
        name: functools.partial(jax.jit(f), x, up, down, experts) for name, f in (("jaxmp", ours), ("slots", theirs))
    }


def compared(calls, seconds, ratio):
    """Milliseconds, and the `ratio` (of, over) of both kinds of time."""
    of, over = ratio
    row = {}
    for kind, clock in (("", time.perf_counter), (" of the processor", time.process_time)):
        times = interleaved(calls, seconds, clock=clock)
        row |= {f"{name} ms{kind}": 1e3 * times[name] for name in calls}
        row |= {f"{of} / {over}{kind}": times[of] / times[over]}
    return row


def measure(quick):
    seconds, found = 0.05 if quick else 1.0, {"uneven": [], "capacity": [], "grouped_memory": []}
    for dtype, ranks in itertools.product(TYPES, RANKS):
        mesh = mesh_of(ranks)
        with jax.set_mesh(mesh):
            row = {"type": dtype, "devices": ranks}
            found["uneven"].append(row | compared(uneven(mesh, dtype), seconds, ("uneven", "even")))
            found["capacity"].append(row | compared(with_capacity(mesh, dtype), seconds, ("slots", "jaxmp")))
    for number, dtype, is_gradient in itertools.product(range(1 if quick else len(GROUPS)), TYPES, (False, True)):
        ours, theirs = (in_child(name, number, dtype, is_gradient, script=__file__) for name in ("jaxmp", "lax"))
        row = {"m,k,n,groups": ",".join(map(str, GROUPS[number])), "type": dtype}
        row |= {"of": "gradient" if is_gradient else "product", "jaxmp MiB": ours / 2**20, "lax MiB": theirs / 2**20}
        found["grouped_memory"].append(row | {"jaxmp / lax": ours / theirs})
    ratios = {
        "uneven": (["devices", "type"], {"uneven / even of the processor": max}),
        "capacity": (["devices", "type"], {"slots / jaxmp of the processor": min}),
        "grouped_memory": (["of", "type"], {"jaxmp / lax": max}),
    }
    return {name: {"means": means(rows, *ratios[name]), "rows": rows} for name, rows in found.items()}


def child(name, number, dtype, is_gradient):
    call = groups(GROUPS[number], dtype, is_gradient=is_gradient)[name]
    jax.block_until_ready(call.args)
    print(json.dumps(peak(call)))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main(measure)
