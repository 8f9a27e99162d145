"""Training steps of models that know nothing of jaxmp: as they are, through `jaxmp.fuse`, and written with jaxmp."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from common import Report, geometric_mean, interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp

MESHES = ((2, 2), (1, 4))  # data, model
WIDTHS = (512, 1024)
TYPES = ("float32", "bfloat16")
BLOCKS, ROWS, HEADS, KEYS = 2, 1024, 8, 4
X, ALL_ROWS, COLUMNS, CONTRACTED = P("data", None, None), P("data", "model", None), P(None, "model"), P("model", None)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def mlp_stack(x, blocks):
    """Blocks of two layers with gelu, rows of x over `model` between them (sequence parallelism)."""
    for w_in, w_out in blocks:
        h = jax.nn.gelu(jax.sharding.reshard(norm(x), X) @ w_in)
        x = x + jnp.matmul(h, w_out, out_sharding=ALL_ROWS)
    return x


def mlp_stack_by_hand(x, blocks):
    for w_in, w_out in blocks:
        x = x + jaxmp.mlp(norm(x), w_in, None, w_out, None, activation="gelu", out_sharding=ALL_ROWS)
    return x


def fsdp_stack(x, blocks):
    """Blocks of two layers whose weights are gathered ahead of their use."""
    for weights in blocks:
        w_in, w_out = (jax.sharding.reshard(w, P(None, None)) for w in weights)
        x = x + jax.nn.gelu(norm(x) @ w_in) @ w_out
    return x


def fsdp_stack_by_hand(x, blocks):
    for w_in, w_out in blocks:
        x = x + jaxmp.mlp(norm(x), w_in, None, w_out, None, activation="gelu", out_sharding=P(("data", "model")))
    return x


def transformer(x, blocks, einsum=jnp.einsum, gated=None):
    """Blocks of attention with grouped queries and of a gated layer."""
    for wq, wk, wv, wo, w_gate, w_up, w_down in blocks:
        h = norm(x)
        q, k, v = (einsum("bsd,dhk->bshk", h, w) for w in (wq, wk, wv))
        q = q.reshape(*q.shape[:2], KEYS, HEADS // KEYS, q.shape[-1], out_sharding=P("data", None, "model", None, None))
        weights = jax.nn.softmax(jnp.einsum("bqhgk,bshk->bhgqs", q, k) / q.shape[-1] ** 0.5)
        values = jnp.einsum("bhgqs,bshk->bqhgk", weights, v)
        values = values.reshape(*h.shape[:2], HEADS, -1, out_sharding=P("data", None, "model", None))
        x = x + einsum("bqhk,hkd->bqd", values, wo, out_sharding=X)
        h = norm(x)
        if gated is None:
            x = x + jnp.matmul(jax.nn.silu(h @ w_gate) * (h @ w_up), w_down, out_sharding=X)
        else:
            x = x + gated(h, w_gate, w_up, w_down, activation="silu", out_sharding=X)
    return x


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of (x, blocks), the same written with jaxmp, the sharding of x, and the shapes and shardings of a
    block's weights by the width."""

    plain: Callable
    by_hand: Callable
    x: P
    weights: Callable


def _layers(n):
    return ((n, 4 * n), COLUMNS), ((4 * n, n), CONTRACTED)


def _gathered(n):
    rows = P(("data", "model"), None)
    return ((n, 4 * n), rows), ((4 * n, n), rows)


def _transformer(n):
    size = n // HEADS
    heads = [((n, count, size), P(None, "model", None)) for count in (HEADS, KEYS, KEYS)]
    gated = [((n, 2 * n), COLUMNS)] * 2
    return *heads, ((HEADS, size, n), P("model", None, None)), *gated, ((2 * n, n), CONTRACTED)


MODELS = {
    "MLP, sequence parallel": Model(mlp_stack, mlp_stack_by_hand, ALL_ROWS, _layers),
    "MLP, FSDP": Model(fsdp_stack, fsdp_stack_by_hand, P(("data", "model"), None, None), _gathered),
    "transformer, TP": Model(
        transformer,
        functools.partial(transformer, einsum=jaxmp.einsum, gated=jaxmp.gated_mlp),
        X,
        _transformer,
    ),
}


def step(model, x, blocks):
    """The loss and the gradients of all weights."""
    return jax.value_and_grad(lambda blocks: jnp.mean(jnp.square(model(x, blocks)).astype(jnp.float32)))(blocks)


def case(sizes, name, dtype, width, seconds, rounds):
    mesh, model = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Explicit,) * 2), MODELS[name]
    with jax.set_mesh(mesh):

        def drawn(key, shape, spec, scale):
            x = jax.random.normal(jax.random.key(key), shape, jnp.float32) * scale
            return jax.device_put(x.astype(dtype), NamedSharding(mesh, spec))

        keys = itertools.count()
        x = drawn(next(keys), (4, ROWS // 4, width), model.x, 1)
        blocks = [
            [drawn(next(keys), shape, spec, shape[0] ** -0.5) for shape, spec in model.weights(width)]
            for _ in range(BLOCKS)
        ]
        functions = {"plain": model.plain, "fuse": jaxmp.fuse(model.plain), "by hand": model.by_hand}
        jitted = {who: jax.jit(functools.partial(step, f)) for who, f in functions.items()}
        traced = {}
        for who, f in jitted.items():
            started = time.perf_counter()
            f.trace(x, blocks)
            traced[who] = time.perf_counter() - started
        calls = {who: functools.partial(f, x, blocks) for who, f in jitted.items()}
        check(calls, dtype)
        times = interleaved(calls, seconds, rounds, wait=jax.block_until_ready)
        counted = jaxmp.explain(functools.partial(step, functions["fuse"]), quiet=True)(x, blocks)
    return {
        "mesh": sizes, "model": name, "type": dtype, "width": width, "seconds": times, "tracing": traced,
        "fused": counted.calls, "left": counted.left,
    }  # fmt: skip


def check(calls, dtype):
    """A fast wrong step is worth nothing: compare the contenders before they are timed."""
    unit = {"bfloat16": 2**-8, "float32": 2**-20}[dtype]
    want = jax.tree.leaves(calls["plain"]())
    for who in ("fuse", "by hand"):
        for g, w in zip(jax.tree.leaves(calls[who]()), want, strict=True):
            g, w = (jnp.asarray(jax.device_get(x), jnp.float32) for x in (g, w))
            error, bound = float(jnp.max(jnp.abs(g - w))), 32 * unit * float(jnp.max(jnp.abs(w)))
            assert error < bound, f"{who} differs by {error} from the plain model, more than {bound}"


def tables(cases):
    rows, means = [], []
    for c in cases:
        times = c["seconds"]
        ratios = [times["plain"] / times["fuse"], times["by hand"] / times["fuse"]]
        rows.append(
            [c["model"], "x".join(map(str, c["mesh"])), c["type"], c["width"]]
            + [f"{times[who] * 1e3:.1f}" for who in times]
            + [f"{ratio:.2f}" for ratio in ratios]
            + [f"{c['tracing']['fuse'] / c['tracing']['plain']:.2f}", f"{c['fused']} of {c['fused'] + c['left']}"]
        )
    for dtype in dict.fromkeys(c["type"] for c in cases):
        group = [c["seconds"] for c in cases if c["type"] == dtype]
        means.append(
            [dtype] + [f"{geometric_mean(t[who] / t['fuse'] for t in group):.2f}" for who in ("plain", "by hand")]
        )
    ratios = ["plain / fuse", "by hand / fuse"]
    columns = ["model", "mesh", "type", "width", "plain ms", "fuse ms", "by hand ms", *ratios, "tracing", "fused"]
    return [("Geometric means", ["type", *ratios], means), ("Rows", columns, rows)]


def measure(quick):
    widths = (64,) if quick else WIDTHS
    seconds, rounds = (0.1, (3, 9)) if quick else (0.5, (7, 21))
    grid = list(itertools.product(MESHES, MODELS, TYPES[:1] if quick else TYPES, widths))
    cases = [case(*each, seconds, rounds) for each in tqdm(grid, "fuse", disable=None)]
    prose = (
        f"The loss and the gradients of {BLOCKS} blocks on {ROWS} rows, on explicit meshes of data x model devices: a "
        "model in plain JAX, the same through `jaxmp.fuse`, and written with jaxmp's functions. Medians of interleaved "
        "rounds; ratios above 1 are in favour of `fuse`. *tracing*: time to trace, against the plain model. *fused*: "
        "products that became calls."
    )
    return Report("Fused models", prose, tables(cases), {"cases": cases})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    main(measure)
