"""Gated layers, forward and gradient: `jaxmp.gated_mlp` and plain `jax.numpy` under the same explicit shardings."""

import functools
import itertools

import jax
import jax.numpy as jnp
from common import Report, geometric_mean, interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp

MESHES = ((2, 2), (1, 4))  # data, model
# Rows of x and of y. Weights have their hidden dimension on `model`.
LAYOUTS = {"tensor parallel": P("data", None), "sequence parallel": P(("data", "model"), None)}
WEIGHTS = (P(None, "model"), P(None, "model"), P("model", None))
TYPES = ("float32", "bfloat16")
SIZES = (1024, 2048)  # rows of x, features and hidden features alike


def ours(x, *weights, rows):
    return jaxmp.gated_mlp(x, *weights, activation="silu", out_sharding=rows)


def theirs(x, w_gate, w_up, w_down, rows):
    x = jax.sharding.reshard(x, P("data", None))
    return jnp.matmul(jax.nn.silu(x @ w_gate) * (x @ w_up), w_down, out_sharding=rows)


def gradient(layer, cotangent, *operands):
    """y and the gradients of all operands."""
    y, pull = jax.vjp(layer, *operands)
    return y, pull(cotangent)


def case(sizes, layout, dtype, n, seconds, rounds):
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rows = LAYOUTS[layout]
    with jax.set_mesh(mesh):
        scales, specs = (1, n**-0.5, n**-0.5, n**-0.5, 1), (rows, *WEIGHTS, rows)
        drawn = (
            jax.random.uniform(jax.random.key(i), (n, n), jnp.float32, -scale, scale).astype(dtype)
            for i, scale in enumerate(scales)
        )
        *operands, cotangent = (jax.device_put(x, NamedSharding(mesh, to)) for x, to in zip(drawn, specs, strict=True))
        layers = {"jaxmp": functools.partial(ours, rows=rows), "jnp": functools.partial(theirs, rows=rows)}
        calls = {}
        for name, layer in layers.items():
            calls[f"{name}, forward"] = functools.partial(jax.jit(layer), *operands)
            calls[f"{name}, gradient"] = functools.partial(
                jax.jit(functools.partial(gradient, layer)), cotangent, *operands
            )
        check(calls, dtype)
        times = interleaved(calls, seconds, rounds, wait=jax.block_until_ready)
    ratios = {what: times[f"jnp, {what}"] / times[f"jaxmp, {what}"] for what in ("forward", "gradient")}
    return {"mesh": sizes, "layout": layout, "type": dtype, "n": n, "seconds": times, "ratios": ratios}


def check(calls, dtype):
    """A fast wrong layer is worth nothing: compare the contenders before they are timed."""
    unit = {"bfloat16": 2**-8, "float32": 2**-20}[dtype]
    for what in ("forward", "gradient"):
        got, want = (jax.tree.leaves(calls[f"{name}, {what}"]()) for name in ("jaxmp", "jnp"))
        for g, w in zip(got, want, strict=True):
            g, w = (jnp.asarray(jax.device_get(x), jnp.float32) for x in (g, w))
            error, bound = float(jnp.max(jnp.abs(g - w))), 16 * unit * float(jnp.max(jnp.abs(w)))
            assert error < bound, f"{what}: jaxmp differs by {error} from jnp, more than {bound}"


def tables(cases):
    names = [f"{name}, {what}" for what in ("forward", "gradient") for name in ("jaxmp", "jnp")]
    rows = [
        [c["layout"], "x".join(map(str, c["mesh"])), c["type"], c["n"]]
        + [f"{c['seconds'][name] * 1e3:.1f}" for name in names]
        + [f"{ratio:.2f}" for ratio in c["ratios"].values()]
        for c in cases
    ]
    means = []
    for dtype in TYPES:
        group = [c["ratios"] for c in cases if c["type"] == dtype]
        if group:
            means.append([dtype, *(f"{geometric_mean(r[what] for r in group):.2f}" for what in group[0])])
    columns = ["layout", "mesh", "type", "n", *(f"{name} ms" for name in names)]
    ratios = ["jnp / jaxmp, forward", "jnp / jaxmp, gradient"]
    return [("Geometric means", ["type", *ratios], means), ("Rows", [*columns, *ratios], rows)]


def measure(quick):
    grid = list(itertools.product(MESHES, LAYOUTS, TYPES, (256,) if quick else SIZES))
    seconds, rounds = (0.1, (3, 9)) if quick else (0.5, (7, 21))
    cases = [case(*each, seconds, rounds) for each in tqdm(grid, "gated layers", disable=None)]
    prose = (
        '`jaxmp.gated_mlp` with "silu" and the same layer in `jax.numpy`, under explicit shardings over data x model '
        "devices; x and the weights are n x n. *gradient*: value and all gradients. Medians of interleaved rounds; "
        "ratios above 1 are in favour of jaxmp."
    )
    return Report("Gated layers", prose, tables(cases), {"cases": cases})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    main(measure)
