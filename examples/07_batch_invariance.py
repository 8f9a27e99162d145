"""Why `(inputs @ model)[0]` differs from `inputs[0] @ model`, and how determinism="batch" prevents it.

A matrix library chooses among several kernels by the number of rows, and each kernel sums in its own order. So the
answer to a request depends on the other requests of its batch. With determinism="batch" every element is summed in one
order: a row has the same bits alone, in a batch, at any position, and after recomputation, so exp(f(x) - f(x)) is
exactly one. In plain bfloat16 arithmetic it is not: XLA omits the rounding of one of the two copies of f(x).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_bitwise_equal

BATCH, REQUESTS, WIDTH, CLASSES = 1024, 64, 2001, 300
SCALE = 0.3
# Standard deviation of the entries of x and w. The largest scores are about 1000, where bfloat16 steps by 4 to 8.
SIZE = 5.0


def changed_rows(product, inputs, model):
    """How many of the first rows have other bits when computed alone than in the batch."""
    together = np.asarray(jax.jit(product)(inputs, model))[:REQUESTS]
    alone = jax.jit(lambda rows: [product(row, model) for row in rows])(np.split(inputs[:REQUESTS], REQUESTS))
    return sum(row.tobytes() != np.asarray(one).tobytes() for row, one in zip(together, alone, strict=True))


def best_of_softmax(score, x, w):
    """exp(f(x) - f(x)) for f(x) = max(score(x)): the largest term of a softmax in float32, which should be one."""
    highest = jnp.max(score(x, w), axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.max(jnp.exp(score(x, w).astype(jnp.float32) - highest), axis=-1)


def plain_score(x, w):
    return (x @ w) * jnp.asarray(SCALE, x.dtype)


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    inputs, model = (rng.normal(scale=SIZE, size=s).astype(np.float32) for s in ((BATCH, WIDTH), (WIDTH, CLASSES)))
    x, w = inputs[:REQUESTS].astype(jnp.bfloat16), model.astype(jnp.bfloat16)
    invariant = functools.partial(jaxmp.matmul, determinism="batch")

    changed = {}
    for name, product in {"jnp.matmul": jnp.matmul, "jaxmp": jaxmp.matmul, 'jaxmp, "batch"': invariant}.items():
        changed[name] = changed_rows(product, inputs, model)
        print(f"{name:16} {changed[name]:2} of {REQUESTS} rows change when computed alone")
    # Whether jnp.matmul's rows change depends on JAX's version and on the processor.
    assert changed["jnp.matmul"] or changed["jaxmp"]
    assert changed['jaxmp, "batch"'] == 0

    order = rng.permutation(BATCH)
    assert_bitwise_equal(jax.jit(invariant)(inputs[order], model), np.asarray(invariant(inputs, model))[order])
    print("rows keep their bits in another order")

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows, columns = P("x", None), P(None, "x")
    score = functools.partial(invariant, alpha=SCALE)
    sharded = functools.partial(score, in_shardings=(rows, columns), out_sharding=columns, mesh=mesh)
    placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, rows), (w, columns))]
    for name, f, operands in (
        ("jnp", plain_score, (x, w)),
        ("jaxmp", score, (x, w)),
        ("jaxmp, recomputed", jax.checkpoint(score), (x, w)),
        ("jaxmp, on 4 devices", sharded, placed),
    ):
        best = np.asarray(jax.jit(functools.partial(best_of_softmax, f))(*operands))
        print(f"{name:20} exp(f(x) - f(x)) is between {best.min():.3g} and {best.max():.3g}")
        if name == "jnp":
            assert best.min() < 1 < best.max()
        else:
            assert_bitwise_equal(best, np.ones(REQUESTS, np.float32))


if __name__ == "__main__":
    main()

# Launch: python examples/07_batch_invariance.py
