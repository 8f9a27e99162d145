"""Batches that both operands have, as heads and experts do: jaxmp's way, calls one by one, `lax.dot_general`.

The batch is sharded over the devices, or the rows of every product are gathered.
"""

import functools
import itertools

import jax
import numpy as np
from common import interleaved, main
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means

import jaxmp

RANKS = 4
NUMBERS = (((2,), (1,)), ((0,), (0,)))
SHARDED, GATHERED = (P("x"), P("x"), P("x")), (P(None, "x"), P(None, None, "x"), P(None, None, "x"))
# (what it is, batch x m x k x n, shardings of a, b and d)
CASES = [
    ("many small ones", (256, 16, 64, 16), SHARDED),
    ("heads: scores", (32, 128, 64, 128), SHARDED),
    ("heads: values", (32, 128, 128, 64), SHARDED),
    ("experts", (8, 128, 1024, 1024), SHARDED),
    ("experts, gathered", (4, 256, 1024, 1024), GATHERED),
]
TYPES = ("float32", "bfloat16")


def contenders(shape, shardings, dtype):
    batch, m, k, n = shape
    rng = np.random.default_rng(0)
    mesh = jax.sharding.get_mesh()
    a, b = (
        jax.device_put(rng.standard_normal(extents).astype(dtype), NamedSharding(mesh, spec))
        for extents, spec in zip(((batch, m, k), (batch, k, n)), shardings, strict=False)
    )
    product = functools.partial(jaxmp.dot_general, dimension_numbers=NUMBERS, out_sharding=shardings[2])
    plain = functools.partial(lax.dot_general, dimension_numbers=NUMBERS, out_sharding=shardings[2])
    calls = {"jaxmp": product, "one by one": functools.partial(product, implementation="host"), "XLA": plain}
    return {name: functools.partial(jax.jit(call), a, b) for name, call in calls.items()}


def measure(quick):
    jax.set_mesh(jax.make_mesh((RANKS,), ("x",), axis_types=(AxisType.Explicit,)))
    rows = []
    for (name, shape, shardings), dtype in itertools.product(CASES, TYPES):
        times = interleaved(contenders(shape, shardings, dtype), seconds=0.05 if quick else 1)
        types = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        row = {"case": name, "batch x m x k x n": "x".join(map(str, shape)), "types": types}
        row |= {contender: seconds * 1e6 for contender, seconds in times.items()}
        rows.append(row | {f"{name} / XLA": times["XLA"] / times[name] for name in ("jaxmp", "one by one")})
    ratios = {"jaxmp / XLA": min, "one by one / XLA": min}
    return {"batches": {"means": means(rows, ["types"], ratios), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    main(measure)
