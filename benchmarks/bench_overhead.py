"""Time of the smallest calls, where most of what differs is the way to the product: a 64x64 one under `jit` and without
it, and eager calls by size and kind."""

import functools

import jax
import jax.numpy as jnp
from common import Report, interleaved, main

import jaxmp

SIZES = (64, 128, 256, 512)


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
    prose = "Microseconds per call, waiting for each result; float32, one device. The first table is of 64x64 matrices."
    tables = [
        ("", ["call", "µs", "to jnp", "ratio"], rows),
        ("Eager calls; the kinds are of 64x64 matrices", ["product", "jaxmp µs", "jnp µs", "ratio"], eager_rows),
    ]
    return Report("Overhead of a call", prose, tables, {"microseconds": micros, "eager": pairs})


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
    main(measure)
