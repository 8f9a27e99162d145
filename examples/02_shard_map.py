"""Products on local shards inside shard_map, with gradients: all-gather, reduce-scatter, all-reduce and a 2-D grid.

First a transformer's feed-forward block on four devices, in two layouts. Sequence-parallel: rows are sharded outside
the block, gathered by its first product and scattered by its second. Replicated: one all-reduce at the end.
Then C = A @ B with every matrix split into blocks on a 2x2 mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

TOKENS, WIDTH, HIDDEN = 64, 48, 192


def sequence_parallel(x, up, down):
    h = jaxmp.all_gather_matmul(x, up, "x", epilog=jaxmp.Epilog.GELU)  # (m/4, k), (k, n/4) -> (m, n/4)
    return jaxmp.matmul_reduce_scatter(h, down, "x")  # (m, n/4), (n/4, k) -> (m/4, k)


def replicated(x, up, down):
    h = jaxmp.linear(x, up, activation="gelu")  # (m, k), (k, n/4) -> (m, n/4): no communication
    return jaxmp.matmul_all_reduce(h, down, "x")  # (m, n/4), (n/4, k) -> (m, k)


def expected(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def check(what, got, want, tolerance=1e-5):
    error = np.max(np.abs(np.asarray(got) - np.asarray(want))) / np.max(np.abs(want))
    print(f"{what:40} relative error {error:.1e}")
    assert error < tolerance, f"{what}: {error} is above {tolerance}"


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    x, up, down = (rng.normal(size=s).astype(np.float32) for s in ((TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))

    line = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    weights = (P(None, "x"), P("x", None))
    for block, rows in ((sequence_parallel, P("x", None)), (replicated, P(None, None))):
        mapped = jax.jit(jax.shard_map(block, mesh=line, in_specs=(rows, *weights), out_specs=rows))
        check(block.__name__, mapped(x, up, down), expected(x, up, down))
        gradients = jax.jit(jax.grad(lambda *args, f=mapped: jnp.sum(f(*args) ** 2), argnums=(0, 1, 2)))
        wanted = jax.grad(lambda *args: jnp.sum(expected(*args) ** 2), argnums=(0, 1, 2))(x, up, down)
        for name, got, want in zip(("x", "up", "down"), gradients(x, up, down), wanted, strict=True):
            check(f"{block.__name__}, gradient of {name}", got, want)

    square = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    blocks = functools.partial(jaxmp.block_matmul, axis_names=("x", "y"))
    tiles = P("x", "y")
    blocks = jax.jit(jax.shard_map(blocks, mesh=square, in_specs=(tiles, tiles), out_specs=tiles))
    check("block_matmul on 2x2", blocks(x, up), x @ up)


if __name__ == "__main__":
    main()

# Launch: python examples/02_shard_map.py
