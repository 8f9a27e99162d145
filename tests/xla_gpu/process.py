"""One of two processes on fake GPUs: `python process.py RANK PORT DEVICES`, started by test_processes.py.

Each has DEVICES of the machine's, and all of them make one mesh.
"""

import functools
import sys

import fake_gpus  # noqa: F401  ahead of JAX
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

PATTERNS = {
    "all_gather": (P("y", None), P(None, "y"), P(None, "y")),
    "reduce_scatter": (P(None, "y"), P("y", None), P("y", None)),
    "all_reduce": (P(None, "y"), P("y", None), P(None, None)),
}


def integers(shape, seed):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


A, B, T = integers((24, 16), 0), integers((16, 32), 1), integers((24, 32), 2)


def put(x, mesh, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])


def compare(got, want):
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, want[shard.index])


def product(name, mesh):
    """(product, its operands) of a pattern."""
    spec_a, spec_b, out = PATTERNS[name]
    f = functools.partial(jaxmp.matmul, out_sharding=out, implementation="cublasmp")
    return f, (put(A, mesh, spec_a), put(B, mesh, spec_b))


def products(mesh):
    """Every pattern, and its gradients; a loop with a collective of XLA's in it."""
    for name in PATTERNS:
        f, given = product(name, mesh)
        compiled = jax.jit(f)
        for _ in range(3):
            compare(compiled(*given), A @ B)
        gradient = jax.jit(jax.grad(lambda a, b, t, f=f: jnp.sum(t * f(a, b)), (0, 1)))
        da, db = gradient(*given, put(T, mesh, PATTERNS[name][2]))
        compare(da, T @ B.T)
        compare(db, A.T @ T)
        print("RAN", name, flush=True)
    square = integers((8, 8), 3)

    @jax.jit
    def loop(x, w):
        def step(_, x):
            rows = jaxmp.matmul(x, w, out_sharding=P(None, "y"), implementation="cublasmp")
            return jax.sharding.reshard(rows, P("y", None)) + x  # an all-to-all of XLA's

        return jax.lax.fori_loop(0, 2, step, x)

    want = square @ square + square
    compare(loop(put(square, mesh, P("y", None)), put(square, mesh, P(None, "y"))), want @ square + want)
    print("RAN loop", flush=True)


def main():
    rank, port, ndevices = map(int, sys.argv[1:])
    own = range(rank * ndevices, (rank + 1) * ndevices)
    jaxmp.distributed.initialize(f"127.0.0.1:{port}", 2, rank, local_device_ids=list(own))
    assert (jax.local_device_count(), jax.device_count()) == (ndevices, 2 * ndevices)
    mesh = jax.make_mesh((2 * ndevices,), ("y",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        products(mesh)


main()
