"""Time of the smallest calls, where most of what differs is the way to the product: a 64x64 one under `jit` and without
it, eager calls by size and kind, and what a product over several devices cannot go below."""

import functools
import itertools

import jax
import jax.numpy as jnp
from common import Report, interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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


def sharded(quick):
    """Microseconds by type, ranks and size: of x + 1, of a product of 16 x 16 matrices, and of larger ones."""
    found = {}
    for dtype in SHARDED_TYPES:
        calls = {}
        for ranks in (1, *RANKS):
            calls["add", ranks], calls["product", ranks, 16] = gathered_product(ranks, 16, dtype)
            calls |= {("product", ranks, n): gathered_product(ranks, n, dtype)[1] for n in SHARDED_SIZES}
        found |= {(dtype, *key): value for key, value in times_of(calls, quick).items()}
    rows = []
    for dtype, n, ranks in itertools.product(SHARDED_TYPES, SHARDED_SIZES, RANKS):
        add, small = found[dtype, "add", ranks], found[dtype, "product", ranks, 16]
        alone, whole = found[dtype, "product", 1, n], found[dtype, "product", ranks, n]
        work = alone - found[dtype, "product", 1, 16]
        values = [add, small - add, work, whole - small - work, whole, alone]
        shares = [alone / whole, alone / (add + work)]
        rows.append([f"{n}^3", dtype, ranks, *(f"{v:.0f}" for v in values), *(f"{v:.2f}" for v in shares)])
    columns = ["product", "type", "devices", "x + 1", "ranks meet", "work", "rest", "all", "one device", "/ limit"]
    return [*columns, "at best"], rows, [[*key, value] for key, value in found.items()]


def measure(quick):
    a, b = operands(64)
    calls = {
        "jaxmp": functools.partial(jax.jit(jaxmp.matmul), a, b),
        "jaxmp, host": functools.partial(jax.jit(functools.partial(jaxmp.matmul, implementation="host")), a, b),
        "jnp": functools.partial(jax.jit(jnp.matmul), a, b),
        "jaxmp, eager": functools.partial(jaxmp.matmul, a, b),
        "jnp, eager": functools.partial(jnp.matmul, a, b),
    }
    micros = times_of(calls, quick)
    jnps = {name: micros["jnp, eager" if name.endswith("eager") else "jnp"] for name in micros}
    rows = [
        [name, f"{value:.1f}", f"{value - jnps[name]:+.1f}", f"{value / jnps[name]:.2f}"]
        for name, value in micros.items()
    ]
    eager = {f"{n}x{n}x{n}": [one_size(module, n) for module in (jaxmp, jnp)] for n in SIZES}
    eager |= {kind: [call, kinds(jnp)[kind]] for kind, call in kinds(jaxmp).items()}
    pairs = {name: times_of(dict(zip(("jaxmp", "jnp"), both, strict=True)), quick) for name, both in eager.items()}
    eager_rows = [
        [name, f"{t['jaxmp']:.1f}", f"{t['jnp']:.1f}", f"{t['jaxmp'] / t['jnp']:.2f}"] for name, t in pairs.items()
    ]
    sharded_columns, sharded_rows, sharded_micros = sharded(quick)
    prose = (
        "Microseconds per call, waiting for each result; float32 and one device but for the last table. The first "
        "table is of 64x64 matrices. The last one is of a product with gathered rows. *x + 1*: this program on as many "
        "devices, whose time XLA takes to start one; *ranks meet*: what a product of 16x16 matrices takes beyond it; "
        "*work*: the product on one device, which has all processors, without its start; *rest*: what remains of "
        "*all*; */ limit*: the time of one device over that of all; *at best*: the same if ranks met in no time and "
        "nothing remained."
    )
    tables = [
        ("", ["call", "µs", "to jnp", "ratio"], rows),
        ("Eager calls; the kinds are of 64x64 matrices", ["product", "jaxmp µs", "jnp µs", "ratio"], eager_rows),
        ("Where the time of a product over several devices goes", sharded_columns, sharded_rows),
    ]
    data = {"microseconds": micros, "eager": pairs, "sharded": sharded_micros}
    return Report("Overhead of a call", prose, tables, data)


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
