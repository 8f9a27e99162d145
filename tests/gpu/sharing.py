"""One of several processes with GPUs: `python sharing.py SCENARIO RANK RANKS PORT DEVICES`, started by test_sharing.py.

products: products, gradients and epilogs like the tests of many processes on CPUs, but over cuBLASMp; over the fakes,
one case of each. apart: some of them. death: rank 1 is killed between two products.
"""

import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
IS_QUICK = "JAXMP_FAKES" in os.environ
if IS_QUICK:
    import fake_gpus
sys.path += [str(HERE), str(HERE.parent), str(HERE.parent / "jobs")]

import conftest  # applies the settings of every test
import jax

import jaxmp

scenario, (rank, nranks, port, ndevices) = sys.argv[1], map(int, sys.argv[2:])
seconds = None if scenario == "death" else 120  # JAXMP_TIMEOUT
own = [*range(rank * ndevices, (rank + 1) * ndevices)] or [0]
jaxmp.distributed.initialize(f"127.0.0.1:{port}", nranks, rank, local_device_ids=own, timeout=seconds)
nranks *= len(own)

import cases
import jax.numpy as jnp
import modes
import numpy as np
import products
from gpu import among
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmp import Epilog
from jaxmp._src.platform.runtime import native


def death():
    case = next(among(case, nranks) for case in products.FOUR if case.name == "ag-data")
    mode = modes.BY_ID["explicit"]
    with mode.scope(case):
        operands = products.operands(case, mode, *case.integers(np.random.default_rng(0)))
        product = jax.jit(mode.product(case, implementation="cublasmp"))
        jax.block_until_ready(product(*operands))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        jax.block_until_ready([product(*operands) for _ in range(3)])


def apart():
    """Runs all patterns but the grid with gradients, also of a constant, and a loop with one of XLA's collectives."""
    mode, rng = modes.BY_ID["explicit"], np.random.default_rng(0)
    for case in (among(case, nranks) for case in products.ONE_OF_EACH[:3]):
        products.placed(case, "explicit", implementation="cublasmp")
        a, b = case.integers(rng)
        t = cases.integers(rng, *case.extents[:2])
        with mode.scope(case):
            f = mode.product(case, implementation="cublasmp")
            gradients = jax.jit(jax.grad(lambda a, b, t=3.0, f=f: jnp.sum(t * f(a, b)), (0, 1)))
            placed, placed_t = products.operands(case, mode, a, b), cases.put(t, case.jax_mesh(), P(*case.out))
            for (da, db), ct in ((gradients(*placed, placed_t), t), (gradients(*placed), np.full_like(t, 3))):
                products.compare(da, ct @ b.T)
                products.compare(db, a.T @ ct)
    mesh = jax.make_mesh((nranks,), ("y",), axis_types=(AxisType.Explicit,))
    square = np.random.default_rng(3).integers(-3, 4, (8, 8)).astype(np.float32)

    @jax.jit
    def loop(x, w):
        def step(_, x):
            rows = jaxmp.matmul(x, w, out_sharding=P(None, "y"), implementation="cublasmp")
            return jax.sharding.reshard(rows, P("y", None)) + x  # an all-to-all

        return jax.lax.fori_loop(0, 2, step, x)

    with jax.set_mesh(mesh):
        got = loop(cases.put(square, mesh, P("y", None)), cases.put(square, mesh, P(None, "y")))
    want = square @ square + square
    products.compare(got, want @ square + want)


def microbatches():
    """Adds gradients of microbatches: products follow each other without waiting, next to XLA's collectives."""
    mesh, rng = jax.make_mesh((nranks,), ("y",), axis_types=(AxisType.Explicit,)), np.random.default_rng(0)
    xs, up, down = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((4, 64, 128), (128, 256), (256, 128)))

    def layer(weights, x):
        h = jaxmp.matmul(x, weights[0], out_sharding=P(None, "y"), implementation="cublasmp")
        return jaxmp.matmul(h, weights[1], out_sharding=P("y", None), implementation="cublasmp")

    @jax.jit
    def step(weights, xs):
        def add(total, x):
            loss, grads = jax.value_and_grad(lambda w: jnp.sum(layer(w, x)) + jnp.sum(layer(w, -2 * x)))(weights)
            return jax.tree.map(jnp.add, total, grads), loss

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), xs)

    with jax.set_mesh(mesh):
        weights = cases.put(up, mesh, P(None, "y")), cases.put(down, mesh, P("y", None))
        grads, losses = step(weights, cases.put(xs, mesh, P(None, "y", None)))
    ones = np.ones((64, 128), np.float32)
    products.compare(losses, -np.sum(xs @ up @ down, axis=(1, 2)))
    products.compare(grads[0], -np.sum([x.T @ (ones @ down.T) for x in xs], axis=0))
    products.compare(grads[1], -np.sum([(x @ up).T @ ones for x in xs], axis=0))


def everything():
    microbatches()
    # cuBLASMp multiplies contiguous shards on square grids only.
    found = [among(case, nranks) for case in products.FOUR if case.pattern != "grid" or nranks == 4]
    plain = [case for case in found if case.name in ("ag-data", "rs-data", "ar-data", "grid")]
    for case in plain if IS_QUICK else found:
        products.placed(case, "explicit", implementation="cublasmp")
    for case in plain[:1] if IS_QUICK else plain:
        for transposition in ("NT",) if IS_QUICK else ("NT", "TN", "TT"):
            products.placed(
                case.replace(transposition=transposition, per_shard=(8, 16, 24)), "explicit", implementation="cublasmp"
            )
        products.placed(case, "shard_map", implementation="cublasmp")
        products.placed(case, "explicit", implementation="xla")
        for dtype in ("bfloat16", "float16", "complex64")[: 1 if IS_QUICK else None]:
            products.rounded(case, dtype)
        products.transformed(case)
        products.empty(case)
        products.has_the_bits_of_one_device(case)
        if not IS_QUICK:
            # Rows and columns are at other places in a call than on one device, and in several calls
            # (lowering/fixed_shape).
            products.has_the_bits_of_one_device(case.replace(dtype="bfloat16"), per_shard=(300, 2200, 64))
        for epilog in (Epilog.BIAS, Epilog.RELU_AUX, Epilog.GELU_AUX_BIAS)[: 1 if IS_QUICK else None]:
            products.with_epilog(case, epilog)
    print("RAN", dict(products.RAN), flush=True)


assert jax.device_count() == nranks
assert native.why_no_cublasmp() == ""
{"products": everything, "apart": apart, "death": death}[scenario]()
