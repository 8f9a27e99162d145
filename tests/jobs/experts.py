"""Products of groups of rows, with rows and matrices in several processes. Run by `ranks.py experts`. It finds silent
errors: a row that comes back to another's place, and a sum that misses a rank's rows."""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from shards import compare, put

import jaxmp

SHARES = os.environ["JAXMP_SHARED_MEMORY"] == "on"
M, K, GROUPS, N = 16, 4, 8, 8
SIZES = ((3, 0, 4, 0, 1, 5, 0, 1), (0, 0, 0, 16, 0, 0, 0, 0), (0,) * 8, (1, 2, 3, 1, 1, 1, 1, 99))


SPECS = (
    (P("data"), P("data"), P("data")),
    (P(("data", "x")), P(("data", "x")), P(("data", "x"))),
    (P(("x", "data")), P("data"), P(("x", "data"))),
    (P("x"), P("x", None, "data"), P("x", "data")),
)


def main(initialize, process):
    initialize()
    shape, ran = (jax.process_count(), jax.local_device_count()), 0
    for kind, is_told in ((AxisType.Explicit, True), (AxisType.Auto, True), (AxisType.Auto, False)):
        mesh = jax.make_mesh(shape, ("data", "x"), axis_types=(kind,) * 2)
        each = list(zip(SIZES, BODIES, strict=True))
        cases = itertools.product(SPECS, each) if kind == AxisType.Explicit else zip(SPECS, each, strict=True)
        for specs, (sizes, name) in cases:
            lowered = check(mesh, kind, is_told, specs, sizes, BODIES[name], f"{specs} {name}")
            # There and back, for d and for dx; there for both operands of dw.
            is_exchanged = SHARES and is_told and "data" in str(specs[1][0])
            assert name != "plain" or lowered.count("picks = 1 : i64") == (6 if is_exchanged else 0)
            ran += 1
        if SHARES and is_told:
            has_the_bits_of_one_device(mesh, kind)
            ran += 1
    print(f"RAN {ran} products of groups")


def in_loop(product, x, w):
    return lax.fori_loop(0, 2, lambda i, d: product(x, w) - 0 * d, jnp.zeros_like(product(x, w)))


BODIES = {
    "plain": lambda product, x, w: product(x, w),
    "loop": in_loop,
    "scan": lambda product, x, w: lax.scan(lambda _, x: (None, product(x, w)), None, jnp.stack([-x, x]))[1][1],
    "twice": lambda product, x, w: product(2 * x, w) - jax.vmap(product, (None, 0))(x, jnp.stack([-w, w]))[1],
}


def check(mesh, kind, is_told, specs, sizes, body, case):
    case = f"{kind} {is_told} {case}"
    rng = np.random.default_rng(sum(sizes))
    operands = [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((M, K), (GROUPS, K, N), (M, N))]
    options = {"group_sizes": np.array(sizes), "out_sharding": specs[2]}
    options |= {"in_shardings": specs[:2]} if kind == AxisType.Auto and is_told else {}
    with jax.set_mesh(mesh):
        placed = [put(mesh, y, spec) for y, spec in zip(operands, specs, strict=True)]
        ours = functools.partial(body, functools.partial(jaxmp.ragged_dot, **options))
        run = jax.jit(lambda x, w, ct: (ours(x, w), *(jax.vjp(ours, x, w)[1](ct))))
        for _ in range(2):
            compare_all(run(*placed), wanted(*operands, sizes), case)
        return run.lower(*placed).as_text()


def compare_all(got, want, case):
    for mine, whole in zip(got, want, strict=True):
        compare(mine, whole, case)


def has_the_bits_of_one_device(mesh, kind):
    """Checks that rows are summed in the order of the global array, independent of their process."""
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape).astype(np.float32) for shape in ((M, 300), (GROUPS, 300, N), (M, N))]
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=np.array((3, 0, 4, 0, 1, 5, 0, 1)), determinism="topology")

    def results(product, x, w, ct):
        return product(x, w), *jax.vjp(product, x, w)[1](ct)

    one = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1])
    with jax.default_device(jax.local_devices()[0]), jax.set_mesh(one):  # an earlier scenario may have set another
        want = jax.jit(functools.partial(results, ours))(*operands)
    spec = P(("data", "x"))
    options = {"in_shardings": (spec, spec)} if kind == AxisType.Auto else {}
    with jax.set_mesh(mesh):
        placed = [put(mesh, y, spec) for y in operands]
        got = jax.jit(functools.partial(results, functools.partial(ours, out_sharding=spec, **options)))(*placed)
    compare_all(got, want, f"{kind} bits")


def wanted(x, w, ct, sizes):
    ends = np.minimum(np.cumsum((0, *sizes)), M)
    d, dx, dw = np.zeros((M, N), "f"), np.zeros_like(x), np.zeros_like(w)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        rows = slice(begin, end)
        d[rows], dx[rows], dw[i] = x[rows] @ w[i], ct[rows] @ w[i].T, x[rows].T @ ct[rows]
    return d, dx, dw
