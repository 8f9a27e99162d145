"""The cost of determinism: "batch" and "topology" against "run_to_run", in one run.

The same product on the same shards at the three levels, in turns. "run_to_run" is the BLAS; the other two are our own
kernels, which sum every element in one order.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
from bench_matmul import PATTERNS, label_of_shape, operand
from common import interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means
from tqdm import tqdm

import jaxmp

LEVELS = ("run_to_run", "batch", "topology")
TYPES = ("float32", "bfloat16")
RANKS = (1, 2, 4)
LARGE = [(n, n, n) for n in (512, 1024, 2048)]  # m, k, n
SMALL = [(m, kn, kn) for m, kn in itertools.product((1, 8, 64), (1024, 4096))]


def patterns_of(ranks, shape):
    """Names of the patterns that this many ranks can share: on one there is none, and ranks have to divide the rows."""
    if ranks == 1:
        return ("local",)
    return tuple(name for name in PATTERNS if name == "AR" or shape[0] % ranks == 0)


def contenders(pattern, ranks, shape, dtype):
    """Level to a call without arguments."""
    m, k, n = shape
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:ranks])
    *in_specs, out_spec = PATTERNS.get(pattern, (P(), P(), P()))
    shardings = [NamedSharding(mesh, spec) for spec in in_specs]
    a, b = (operand(s, dtype, to, i) for i, (s, to) in enumerate(zip(((m, k), (k, n)), shardings, strict=True)))
    to = NamedSharding(mesh, out_spec)
    return {
        level: functools.partial(jax.jit(functools.partial(jaxmp.matmul, out_sharding=to, determinism=level)), a, b)
        for level in LEVELS
    }


def check(calls, shape, dtype):
    """A fast wrong product is worth nothing."""
    results = {level: jnp.asarray(jax.device_get(call()), jnp.float32) for level, call in calls.items()}
    bound = 8 * {"bfloat16": 2**-8, "float32": 2**-20}[dtype] * shape[1] ** 0.5
    for level, result in results.items():
        error = float(jnp.max(jnp.abs(result - results["run_to_run"])))
        assert error < bound, f"{level} differs by {error} from run_to_run, more than {bound}"


def case(pattern, ranks, shape, dtype, seconds, rounds):
    calls = contenders(pattern, ranks, shape, dtype)
    with contextlib.redirect_stdout(None):
        check(calls, shape, dtype)
    times = interleaved(calls, seconds, rounds)
    sizes = "512 and above" if shape in LARGE else "1, 8 and 64 rows"
    row = {"pattern": pattern, "devices": ranks, "m x k x n": label_of_shape(shape), "type": dtype, "sizes": sizes}
    row |= {f"{level} ms": times[level] * 1e3 for level in LEVELS}
    return row | {level: times[level] / times["run_to_run"] for level in LEVELS[1:]}


def measure(quick):
    shapes = [(512, 512, 512), (8, 1024, 1024)] if quick else LARGE + SMALL
    grid = [
        (pattern, ranks, shape, dtype)
        for dtype, shape, ranks in itertools.product(TYPES, shapes, RANKS)
        for pattern in patterns_of(ranks, shape)
    ]
    seconds, rounds = (0.1, (5, 15)) if quick else (0.5, (9, 41))
    rows = [case(*each, seconds, rounds) for each in tqdm(grid, "determinism", disable=None)]
    costs = means(rows, ["type", "sizes"], dict.fromkeys(LEVELS[1:], max))
    return {"determinism": {"means": costs, "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    main(measure)
