"""The same bits for any arrival order of processes: products with subnormal operands, then arithmetic on them. Run by
`ranks.py float_state`. XLA's threads take subnormal numbers as zero. A process that waits for the other resumes on a
thread of ours, the last one continues on XLA's; each is last in every second run, and every run has to give the same
bits."""

from __future__ import annotations

import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from shards import mesh_of, put

import jaxmp

RUNS = 6
AHEAD = 0.4  # seconds between the arrivals of the two processes
TINY, LARGE = 1e-40, 1e30  # their product is an ordinary number, or 0


def main(initialize, process):
    initialize()
    rank = jax.process_index()
    mesh = mesh_of()
    for name, (program, shapes, specs) in programs().items():
        placed = [put(mesh, draw(i, shape), specs[i]) for i, shape in enumerate(shapes)]
        run = jax.jit(program)
        jax.block_until_ready(run(*placed))
        seen = []
        for last in range(RUNS):
            # Both are here: the product before has been waited for. So one of them now waits in the call.
            if last % 2 == rank:
                time.sleep(AHEAD)
            seen.append(digest(run(*placed)))
        assert len(set(seen)) == 1, f"{name}: {seen}"
        print("BITS", name)


def programs():
    """Returns programs with arithmetic after a call that shows the bits of a subnormal number."""
    left, right = P(None, "x"), P("x", None)
    small, large = ((8, 16), (16, 8)), ((96, 256), (256, 64))
    return {
        "product": (lambda a, b: jaxmp.matmul(a, b, out_sharding=P(None, None)), small, (left, right)),
        "scatter": (lambda a, b: jaxmp.matmul(a, b, out_sharding=P(None, "x")), large, (left, right)),
        "gather": (lambda a, b: jaxmp.matmul(a, b, out_sharding=P("x", None)), large, (right, P(None, None))),
        "behind": (behind, small, (left, right)),
        "twice": (lambda a, b: behind(a, b) + behind(a + a, b), small, (left, right)),
        "loop": (loop, small, (left, right)),
    }


def behind(a, b):
    """Arithmetic on the operands that can only run when the product has come."""
    d = jaxmp.matmul(a, b, out_sharding=P(None, None))
    one = 1 + 0 * jnp.sum(d)
    return d + jnp.sum((a * one) * jnp.float32(LARGE)) + jnp.sum((b * one) * jnp.float32(TINY))


def loop(a, b):
    return jax.lax.fori_loop(0, 3, lambda i, d: d + behind(a, b + jnp.float32(i)), jnp.zeros((8, 8)))


def draw(seed, shape):
    """The first operand's numbers are subnormal, the second's are large: nothing else is there to hide a product."""
    return (np.random.default_rng(seed).integers(1, 8, shape) * (TINY if seed == 0 else LARGE)).astype(np.float32)


def digest(out):
    parts = [np.asarray(shard.data).tobytes() for shard in out.addressable_shards]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
