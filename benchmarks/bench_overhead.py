"""Time of the smallest calls, where most of what differs is the way to the product: a 64x64 one under `jit` and without
it, eager calls by size and kind, and what a product over several devices cannot go below."""

import functools
import itertools

import jax
import jax.numpy as jnp
from common import interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means

import jaxmp

SIZES = (64, 128, 256, 512)
SHARDED_TYPES = ("float32", "bfloat16")
SHARDED_SIZES = (256, 512)
RANKS = (2, 4)


def one_size(module, n):
    a, b = operands(n)
    return functools.partial(module.matmul, a, b)


def operands(n):
    return [jax.random.uniform(jax.random.key(i), (n, n)) for i in range(2)]


def kinds(module):
    a, b = operands(64)
    batches = [jnp.stack([x] * 4) for x in (a, b)]
    dot_general = jax.lax.dot_general if module is jnp else jaxmp.dot_general
    return {
        "matrix by vector": functools.partial(module.matmul, a, b[0]),
        "4 matrices": functools.partial(module.matmul, *batches),
        'einsum "ij,jk->ki"': functools.partial(module.einsum, "ij,jk->ki", a, b),
        "dot_general": functools.partial(dot_general, a, b, (((0,), (0,)), ((), ()))),
    }


def gathered_product(ranks, n, dtype):
    """x + 1 and an all-gather product of n x n matrices, on the same devices."""
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:ranks])
    rows, columns = NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P(None, "x"))
    a, b = (jax.device_put(x.astype(dtype), to) for x, to in zip(operands(n), (rows, columns), strict=True))
    product = jax.jit(functools.partial(jaxmp.matmul, implementation="host", out_sharding=columns))
    return functools.partial(jax.jit(lambda x: x + 1), a), functools.partial(product, a, b)


def meeting(quick):
    """Where the time of a product over several devices goes, in microseconds.

    "x + 1": this program on as many devices, which XLA takes to start one; "ranks meet": what a product of 16 x 16
    matrices takes beyond it; "work": the product on one device, which has all processors, without its start; "rest":
    what remains of "all". "at best" is the share of one device's rate if ranks met in no time and nothing remained.
    """
    rows = []
    for dtype in SHARDED_TYPES:
        calls = {}
        for ranks in (1, *RANKS):
            calls["add", ranks], calls["product", ranks, 16] = gathered_product(ranks, 16, dtype)
            calls |= {("product", ranks, n): gathered_product(ranks, n, dtype)[1] for n in SHARDED_SIZES}
        found = times_of(calls, quick)
        for n, ranks in itertools.product(SHARDED_SIZES, RANKS):
            add, small = found["add", ranks], found["product", ranks, 16]
            alone, whole = found["product", 1, n], found["product", ranks, n]
            work = alone - found["product", 1, 16]
            row = {"product": f"{n}^3", "type": dtype, "devices": ranks, "x + 1": add, "ranks meet": small - add}
            row |= {"work": work, "rest": whole - small - work, "all": whole, "one device": alone}
            rows.append(row | {"of one device": alone / whole, "at best": alone / (add + work)})
    return {"means": means(rows, ["type", "product"], {"of one device": min, "at best": min}), "rows": rows}


def overhead(quick):
    a, b = operands(64)
    calls = {
        "jaxmp": functools.partial(jax.jit(jaxmp.matmul), a, b),
        "jaxmp, host": functools.partial(jax.jit(functools.partial(jaxmp.matmul, implementation="host")), a, b),
        "jnp": functools.partial(jax.jit(jnp.matmul), a, b),
        "jaxmp, eager": functools.partial(jaxmp.matmul, a, b),
        "jnp, eager": functools.partial(jnp.matmul, a, b),
    }
    rows = []
    for name, micros in (found := times_of(calls, quick)).items():
        jnps = found["jnp, eager" if name.endswith("eager") else "jnp"]
        rows.append({"call": name, "µs": micros, "to jnp": micros - jnps, "to jnp's": micros / jnps})
    return {
        "means": [{row["call"]: row["to jnp's"] for row in rows if not row["call"].startswith("jnp")}],
        "rows": rows,
    }


def eager(quick):
    calls = {f"{n}x{n}x{n}": [one_size(module, n) for module in (jaxmp, jnp)] for n in SIZES}
    calls |= {kind: [call, kinds(jnp)[kind]] for kind, call in kinds(jaxmp).items()}
    rows = []
    for name, both in calls.items():
        micros = times_of(dict(zip(("jaxmp", "jnp"), both, strict=True)), quick)
        row = {"product": name, **{f"{who} µs": each for who, each in micros.items()}}
        rows.append(row | {"jaxmp / jnp": micros["jaxmp"] / micros["jnp"]})
    return {"means": means(rows, [], {"jaxmp / jnp": max}), "rows": rows}


def measure(quick):
    return {"overhead": overhead(quick), "eager": eager(quick), "meeting": meeting(quick)}


def times_of(calls, quick):
    """Microseconds of each call. Turns of many: one is not much longer than reading the clock."""
    turns = {name: functools.partial(many, call) for name, call in calls.items()}
    times = interleaved(turns, seconds=0.5 if quick else 4, rounds=(15, 301), wait=lambda result: None)
    return {name: seconds / MANY * 1e6 for name, seconds in times.items()}


MANY = 50


def many(call):
    for _ in range(MANY):
        call().block_until_ready()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    main(measure)
