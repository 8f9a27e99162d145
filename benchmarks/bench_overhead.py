"""Time of the smallest call: a 64x64 product on one device, where all that differs is the way to the product."""

import functools

import jax
import jax.numpy as jnp
from common import Report, interleaved, main

import jaxmp


def measure(quick):
    a, b = (jax.random.uniform(jax.random.key(i), (64, 64)) for i in range(2))
    calls = {
        "jaxmp": functools.partial(jax.jit(jaxmp.matmul), a, b),
        "jaxmp, host": functools.partial(jax.jit(functools.partial(jaxmp.matmul, implementation="host")), a, b),
        "jnp": functools.partial(jax.jit(jnp.matmul), a, b),
        "jaxmp, eager": functools.partial(jaxmp.matmul, a, b),
        "jnp, eager": functools.partial(jnp.matmul, a, b),
    }
    # Turns of a hundred calls: one is not much longer than reading the clock.
    turns = {name: functools.partial(hundred, call) for name, call in calls.items()}
    times = interleaved(turns, seconds=0.5 if quick else 4, rounds=(15, 301), wait=lambda result: None)
    micros = {name: seconds * 1e4 for name, seconds in times.items()}
    jnps = {name: micros["jnp, eager" if name.endswith("eager") else "jnp"] for name in micros}
    rows = [
        [name, f"{value:.1f}", f"{value - jnps[name]:+.1f}", f"{value / jnps[name]:.2f}"]
        for name, value in micros.items()
    ]
    prose = "Microseconds per call, under `jit` and without, waiting for each result; float32, one device."
    table = ("", ["call", "µs", "to jnp", "ratio"], rows)
    return Report("Overhead of a call", prose, [table], {"microseconds": micros})


def hundred(call):
    for _ in range(100):
        call().block_until_ready()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(measure)
