"""Why is `(inputs @ model)[0]` not `inputs[0] @ model`, and what "batch" does about it.

A matrix library has several kernels and takes another one for few rows, and another kernel sums in another order. So an
answer depends on who else asked at the same time. With determinism="batch" every element is one sum in one order: a row
has the same bits alone, among others, at any place, and after any recomputation, so exp(f(x) - f(x)) is exactly one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_bitwise_equal

REQUESTS, WIDTH, CLASSES = 64, 301, 300
# Scores of this size lie a whole number apart: one unit in the last place, and exp(f(x) - f(x)) would be e or 1 / e.
SIZE = 3e3


def changed_rows(product, inputs, model):
    """How many rows have other bits alone than in the batch."""
    together = np.asarray(jax.jit(product)(inputs, model))
    alone = jax.jit(lambda rows: [product(row, model) for row in rows])(np.split(inputs, len(inputs)))
    return sum(row.tobytes() != np.asarray(one).tobytes() for row, one in zip(together, alone, strict=True))


def best_of_softmax(score, x, w):
    """exp(f(x) - f(x)) for f(x) = max(score(x)): the largest term of a softmax, which is one."""
    scores = score(x, w)
    return jnp.max(jnp.exp(scores - jnp.max(score(x, w), axis=-1, keepdims=True)), axis=-1)


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    inputs, model = (rng.normal(scale=SIZE, size=s).astype(np.float32) for s in ((REQUESTS, WIDTH), (WIDTH, CLASSES)))
    invariant = functools.partial(jaxmp.matmul, determinism="batch")

    for name, product in {"jnp.matmul": jnp.matmul, "jaxmp": jaxmp.matmul, 'jaxmp, "batch"': invariant}.items():
        changed = changed_rows(product, inputs, model)
        print(f"{name:16} {changed:2} of {REQUESTS} rows change when they are computed alone")
    assert changed == 0

    order = rng.permutation(REQUESTS)
    assert_bitwise_equal(jax.jit(invariant)(inputs[order], model), np.asarray(invariant(inputs, model))[order])
    print("in another order the rows keep their bits")

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows, columns = P("x", None), P(None, "x")
    sharded = functools.partial(invariant, alpha=0.3, in_shardings=(rows, columns), out_sharding=columns, mesh=mesh)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((inputs, rows), (model, columns))]
    score = functools.partial(invariant, alpha=0.3)
    for name, program, operands in (
        ("jnp", functools.partial(best_of_softmax, lambda x, w: 0.3 * (x @ w)), (inputs, model)),
        ("jaxmp", functools.partial(best_of_softmax, score), (inputs, model)),
        ("jaxmp, recomputed", functools.partial(best_of_softmax, jax.checkpoint(score)), (inputs, model)),
        ("jaxmp, on 4 devices", functools.partial(best_of_softmax, sharded), placed),
    ):
        best = np.asarray(jax.jit(program)(*operands))
        print(f"{name:20} exp(f(x) - f(x)) lies between {best.min()} and {best.max()}")
        if name != "jnp":
            assert_bitwise_equal(best, np.ones(REQUESTS, np.float32))


if __name__ == "__main__":
    main()

# Launch: python examples/07_batch_invariance.py
