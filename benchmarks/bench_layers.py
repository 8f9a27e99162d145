"""Layers of models, forward and gradient: jaxmp's and plain `jax.numpy` under the same explicit shardings."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from common import interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means
from tqdm import tqdm

import jaxmp

MESHES = ((2, 2), (1, 4))  # data, model
ROWS, ALL_ROWS = P("data", None), P(("data", "model"), None)
TYPES = ("float32", "bfloat16")
SIZES = (1024, 2048)  # rows of x, features and hidden features


@dataclasses.dataclass(frozen=True)
class Layer:
    """Functions of (x, *weights, rows=) and the shardings of x and y, and of the weights."""

    ours: Callable[..., jax.Array]
    theirs: Callable[..., jax.Array]
    rows: P
    weights: tuple[P, ...]


def product(x, w, rows):
    return jaxmp.matmul(x, w, out_sharding=rows)


def jnp_product(x, w, rows):
    return jnp.matmul(x, w, out_sharding=rows)


def mlp(x, w_in, w_out, rows):
    return jaxmp.mlp(x, w_in, None, w_out, None, activation="gelu", out_sharding=rows)


def jnp_mlp(x, w_in, w_out, rows):
    hidden = jax.nn.gelu(jnp.matmul(x, w_in, out_sharding=P("data", "model")))
    return jnp.matmul(hidden, w_out, out_sharding=rows)


def gated(x, *weights, rows):
    return jaxmp.gated_mlp(x, *weights, activation="silu", out_sharding=rows)


def jnp_gated(x, w_gate, w_up, w_down, rows):
    x = jax.sharding.reshard(x, ROWS)
    return jnp.matmul(jax.nn.silu(x @ w_gate) * (x @ w_up), w_down, out_sharding=rows)


GATED = (P(None, "model"), P(None, "model"), P("model", None))
LAYERS = {
    "FSDP": Layer(product, jnp_product, ALL_ROWS, (P(("data", "model"), None),)),
    "MLP, FSDP + TP": Layer(mlp, jnp_mlp, ROWS, (P("data", "model"), P("model", "data"))),
    "gated, TP": Layer(gated, jnp_gated, ROWS, GATED),
    "gated, sequence parallel": Layer(gated, jnp_gated, ALL_ROWS, GATED),
}


def gradient(f, cotangent, *operands):
    """y and the gradients of all operands."""
    y, pull = jax.vjp(f, *operands)
    return y, pull(cotangent)


def case(sizes, name, dtype, n, seconds, rounds):
    mesh, layer = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Explicit,) * 2), LAYERS[name]
    with jax.set_mesh(mesh):
        specs = (layer.rows, *layer.weights, layer.rows)
        scales = (1, *(n**-0.5 for _ in layer.weights), 1)
        drawn = (
            jax.random.uniform(jax.random.key(i), (n, n), jnp.float32, -scale, scale).astype(dtype)
            for i, scale in enumerate(scales)
        )
        *operands, cotangent = (jax.device_put(x, NamedSharding(mesh, to)) for x, to in zip(drawn, specs, strict=True))
        contenders = {"jaxmp": layer.ours, "jnp": layer.theirs}
        calls = {}
        for who, function in contenders.items():
            f = functools.partial(function, rows=layer.rows)
            calls[f"{who}, forward"] = functools.partial(jax.jit(f), *operands)
            calls[f"{who}, gradient"] = functools.partial(jax.jit(functools.partial(gradient, f)), cotangent, *operands)
        check(calls, dtype)
        times = interleaved(calls, seconds, rounds, wait=jax.block_until_ready)
    row = {"layer": name, "mesh": "x".join(map(str, sizes)), "type": dtype, "n": n}
    row |= {f"{what} ms": seconds * 1e3 for what, seconds in times.items()}
    return row | {what: times[f"jnp, {what}"] / times[f"jaxmp, {what}"] for what in ("forward", "gradient")}


def check(calls, dtype):
    """A fast wrong layer is worth nothing: compare the contenders before they are timed."""
    unit = {"bfloat16": 2**-8, "float32": 2**-20}[dtype]
    for what in ("forward", "gradient"):
        got, want = (jax.tree.leaves(calls[f"{name}, {what}"]()) for name in ("jaxmp", "jnp"))
        for g, w in zip(got, want, strict=True):
            g, w = (jnp.asarray(jax.device_get(x), jnp.float32) for x in (g, w))
            error, bound = float(jnp.max(jnp.abs(g - w))), 16 * unit * float(jnp.max(jnp.abs(w)))
            assert error < bound, f"{what}: jaxmp differs by {error} from jnp, more than {bound}"


def measure(quick):
    grid = list(itertools.product(MESHES, LAYERS, TYPES, (256,) if quick else SIZES))
    seconds, rounds = (0.1, (3, 9)) if quick else (0.5, (7, 21))
    rows = [case(*each, seconds, rounds) for each in tqdm(grid, "layers", disable=None)]
    ratios = means(rows, ["layer", "type"], {"forward": min, "gradient": min})
    return {"layers": {"means": ratios, "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    main(measure)
