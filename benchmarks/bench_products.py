"""Products of other kinds: a matrix by its own transpose, groups of rows, and a few rows by narrow weights.

The contenders of groups are a loop of jaxmp's products of static sizes, and `lax.ragged_dot`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from bench_matmul import operand
from common import interleaved, main
from tables import means

import jaxmp

TYPES = ("float32", "bfloat16")
GRAM = 2048
GROUPS = [(1024, 512, 1024, 8), (2048, 1024, 1024, 32)]  # m, k, n, groups
WEIGHTS = ("int8", "int4")
ROWS, WIDTH = (1, 8, 64), 4096


def gram(dtype):
    x, y = (operand((GRAM, GRAM), dtype, None, seed) for seed in (0, 1))
    product = jax.jit(functools.partial(jaxmp.matmul, transpose_b=True))
    own = jax.jit(lambda x: jaxmp.matmul(x, x, transpose_b=True))
    return {"x x^T": functools.partial(own, x), "x y^T": functools.partial(product, x, y)}


def groups(shape, dtype, *, is_gradient):
    m, k, n, count = shape
    x, w, ct = (operand(s, dtype, None, i) for i, s in enumerate([(m, k), (count, k, n), (m, n)]))
    sizes = jnp.full(count, m // count)

    def loop(x, w, sizes):
        return jnp.concatenate([jaxmp.matmul(*each) for each in zip(jnp.split(x, count), w, strict=True)])

    def call(product):
        def gradient(x, w, ct):
            return jax.vjp(lambda x, w: product(x, w, sizes), x, w)[1](ct)

        return functools.partial(jax.jit(gradient if is_gradient else product), x, w, ct if is_gradient else sizes)

    return {"jaxmp": call(jaxmp.ragged_dot), "loop": call(loop), "lax": call(jax.lax.ragged_dot)}


def decode(rows, dtype):
    x, w = operand((rows, WIDTH), "bfloat16", None, 0), operand((WIDTH, WIDTH), dtype, None, 1)
    ours = functools.partial(jaxmp.matmul, preferred_element_type=jnp.bfloat16)
    return {
        "jaxmp": functools.partial(jax.jit(ours), x, w),
        "jnp": functools.partial(jax.jit(lambda x, w: x @ w.astype(x.dtype)), x, w),
    }


def measured(calls, seconds):
    return {f"{name} ms": 1e3 * time for name, time in interleaved(calls, seconds).items()}


def measure(quick):
    seconds = 0.05 if quick else 0.5
    found = {"gram": [], "groups": [], "decode": []}
    for dtype in TYPES:
        times = measured(gram(dtype), seconds)
        found["gram"].append({"type": dtype} | times | {"x x^T / x y^T": times["x x^T ms"] / times["x y^T ms"]})
    for shape, dtype, is_gradient in itertools.product(GROUPS[: 1 if quick else None], TYPES, (False, True)):
        times = measured(groups(shape, dtype, is_gradient=is_gradient), seconds)
        row = {"m,k,n,groups": ",".join(map(str, shape)), "type": dtype}
        row |= {"of": "gradient" if is_gradient else "product"} | times
        found["groups"].append(
            row | {f"{name} / jaxmp": times[f"{name} ms"] / times["jaxmp ms"] for name in ("loop", "lax")}
        )
    for dtype, rows in itertools.product(WEIGHTS, ROWS):
        times = measured(decode(rows, dtype), seconds)
        rate = WIDTH**2 * (0.5 if dtype == "int4" else 1) / times["jaxmp ms"] / 1e6
        row = {"weights": dtype, "rows": rows} | times | {"GB/s of weights": rate}
        found["decode"].append(row | {"jnp / jaxmp": times["jnp ms"] / times["jaxmp ms"]})
    ratios = {
        "gram": (["type"], {"x x^T / x y^T": max}),
        "groups": (["of", "type"], {"loop / jaxmp": min, "lax / jaxmp": min}),
        "decode": (["weights", "rows"], {"jnp / jaxmp": min, "GB/s of weights": min}),
    }
    return {name: {"means": means(rows, *ratios[name]), "rows": rows} for name, rows in found.items()}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(measure)
