"""Training steps of models that know nothing of jaxmp: as they are, through `jaxmp.fuse`, and written with jaxmp."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from common import interleaved, main
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means
from tqdm import tqdm

import jaxmp
import jaxmp.equinox
import jaxmp.flax

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
    """Runs blocks of two layers; their weights are gathered before each use."""
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


def auto_stack(x, blocks):
    """The first stack on automatic axes, where XLA's partitioner places what no constraint does."""
    for w_in, w_out in blocks:
        h = jax.nn.gelu(lax.with_sharding_constraint(norm(x), X) @ w_in)
        x = x + lax.with_sharding_constraint(h @ w_out, ALL_ROWS)
    return x


def auto_stack_by_hand(x, blocks):
    options = {"in_shardings": (ALL_ROWS, COLUMNS, CONTRACTED), "out_sharding": ALL_ROWS}
    for w_in, w_out in blocks:
        x = x + jaxmp.mlp(norm(x), w_in, None, w_out, None, activation="gelu", **options)
    return x


INTO, OUT_OF = P("data", "model"), P("model", "data")


def mapped(body):
    """The body of a `shard_map` with FSDP over `data` and tensor parallelism over `model`."""

    def run(x, blocks):
        specs = (X, [[INTO, OUT_OF] for _ in blocks])
        return jax.shard_map(body, in_specs=specs, out_specs=X)(x, blocks)

    return run


@mapped
def mapped_stack(x, blocks):
    for w_in, w_out in blocks:
        h = jax.nn.gelu(norm(x) @ lax.all_gather(w_in, "data", axis=0, tiled=True))
        x = x + lax.psum(h @ lax.all_gather(w_out, "data", axis=1, tiled=True), "model")
    return x


@mapped
def mapped_stack_by_hand(x, blocks):
    for w_in, w_out in blocks:
        rows = norm(x).reshape(-1, x.shape[-1])
        h = jaxmp.block_matmul(rows, w_in, ("data", ()), epilog=jaxmp.Epilog.GELU)
        y = jaxmp.matmul_all_reduce(h, lax.all_gather(w_out, "data", axis=1, tiled=True), "model")
        x = x + y.reshape(x.shape)
    return x


class FlaxLinear(nnx.Linear):
    """Flax's own layer and gelu."""

    def __init__(self, *args, activation=None, **options):
        super().__init__(*args, **options)
        self.activation = activation

    def __call__(self, x, out_sharding=None):
        y = super().__call__(x, out_sharding=out_sharding)
        return nnx.gelu(y) if self.activation == "gelu" else y


class FlaxBlock(nnx.Module):
    """Two layers, rows of x over `model` between blocks."""

    def __init__(self, linear, width, dtype, rngs):
        options = {"rngs": rngs, "param_dtype": dtype, "dtype": dtype}
        self.up = linear(width, 4 * width, activation="gelu", **options)
        self.down = linear(4 * width, width, **options)

    def __call__(self, x):
        h = self.up(jax.sharding.reshard(norm(x), X))
        return x + self.down(h, out_sharding=ALL_ROWS)


def flax_stack(linear, x, blocks):
    abstract = nnx.eval_shape(lambda: FlaxBlock(linear, x.shape[-1], x.dtype, nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    for weights in blocks:
        x = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), weights))(x)
    return x


def _flax_weights(n):
    """In the order of a state: bias and kernel of `down`, then of `up`."""
    return ((n,), P()), ((4 * n, n), CONTRACTED), ((4 * n,), P("model")), ((n, 4 * n), COLUMNS)


def equinox_stack(x, blocks):
    """Runs Equinox's layers: they take one row, so they are vmapped; weights, (out, in), are gathered first (FSDP)."""
    for w_in, b_in, w_out, b_out in blocks:
        up, down = (_equinox_layer(eqx.nn.Linear, *map(_whole, pair)) for pair in ((w_in, b_in), (w_out, b_out)))
        h = jax.nn.gelu(jax.vmap(jax.vmap(up))(norm(x)))
        x = x + jax.vmap(jax.vmap(down))(h)
    return x


def equinox_stack_by_hand(x, blocks):
    for w_in, b_in, w_out, b_out in blocks:
        up = _equinox_layer(jaxmp.equinox.Linear, w_in, b_in, activation="gelu")
        down = _equinox_layer(jaxmp.equinox.Linear, w_out, b_out)
        rows = P(("data", "model"), None, None)
        x = x + down(up(norm(x), out_sharding=rows), out_sharding=rows)
    return x


def _whole(w):
    return jax.sharding.reshard(w, P())


def _equinox_layer(linear, weight, bias, **options):
    columns, rows = weight.shape
    abstract = eqx.filter_eval_shape(functools.partial(linear, rows, columns, **options), key=jax.random.key(0))
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), abstract, (weight, bias))


def _equinox_weights(n):
    rows = P(("data", "model"), None)
    return ((4 * n, n), rows), ((4 * n,), P()), ((n, 4 * n), rows), ((n,), P())


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of (x, blocks), the same written with jaxmp, the sharding of x, the shapes and shardings of a block's
    weights by the width, and the type of the mesh's axes."""

    plain: Callable
    by_hand: Callable
    x: P
    weights: Callable
    axes: AxisType = AxisType.Explicit


def _layers(n):
    return ((n, 4 * n), COLUMNS), ((4 * n, n), CONTRACTED)


def _gathered(n):
    rows = P(("data", "model"), None)
    return ((n, 4 * n), rows), ((4 * n, n), rows)


def _both(n):
    return ((n, 4 * n), INTO), ((4 * n, n), OUT_OF)


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
    "MLP, automatic axes": Model(auto_stack, auto_stack_by_hand, ALL_ROWS, _layers, AxisType.Auto),
    "MLP, shard_map, FSDP + TP": Model(mapped_stack, mapped_stack_by_hand, X, _both, AxisType.Auto),
    "MLP of Flax NNX, sequence parallel": Model(
        functools.partial(flax_stack, FlaxLinear),
        functools.partial(flax_stack, jaxmp.flax.Linear),
        ALL_ROWS,
        _flax_weights,
    ),
    "MLP of Equinox, FSDP": Model(
        equinox_stack, equinox_stack_by_hand, P(("data", "model"), None, None), _equinox_weights
    ),
}


def step(model, x, blocks):
    """The loss and the gradients of all weights."""
    return jax.value_and_grad(lambda blocks: jnp.mean(jnp.square(model(x, blocks)).astype(jnp.float32)))(blocks)


def trace_seconds(functions, *arguments):
    """Returns seconds of tracing a step of each, from empty caches; of the processor, because one thread traces."""
    samples = {who: [] for who in functions}
    for _ in range(3):
        for who, f in functions.items():
            jax.clear_caches()
            jaxmp.plan_cache_clear()
            started = time.process_time()
            jax.jit(functools.partial(step, f)).trace(*arguments)
            samples[who].append(time.process_time() - started)
    return {who: statistics.median(each) for who, each in samples.items()}


def case(sizes, name, dtype, width, seconds, rounds):
    model = MODELS[name]
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(model.axes,) * 2)
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
        traced = trace_seconds(functions, x, blocks)
        calls = {who: functools.partial(jax.jit(functools.partial(step, f)), x, blocks) for who, f in functions.items()}
        check(calls, dtype)
        times = interleaved(calls, seconds, rounds, wait=jax.block_until_ready)
        counted = jaxmp.explain(functools.partial(step, functions["fuse"]), quiet=True)(x, blocks)
    row = {"model": name, "mesh": "x".join(map(str, sizes)), "type": dtype, "width": width}
    row |= {f"{who} ms": each * 1e3 for who, each in times.items()}
    row |= {f"{who} / fuse": times[who] / times["fuse"] for who in ("plain", "by hand")}
    row |= {"tracing": traced["fuse"] / traced["plain"], "tracing by hand": traced["by hand"] / traced["plain"]}
    return row | {"fused": f"{counted.calls} of {counted.calls + counted.left}"}


def check(calls, dtype):
    """A fast wrong step is worth nothing: compare the contenders before they are timed."""
    unit = {"bfloat16": 2**-8, "float32": 2**-20}[dtype]
    want = jax.tree.leaves(calls["plain"]())
    for who in ("fuse", "by hand"):
        for g, w in zip(jax.tree.leaves(calls[who]()), want, strict=True):
            g, w = (jnp.asarray(jax.device_get(x), jnp.float32) for x in (g, w))
            error, bound = float(jnp.max(jnp.abs(g - w))), 32 * unit * float(jnp.max(jnp.abs(w)))
            assert error < bound, f"{who} differs by {error} from the plain model, more than {bound}"


def measure(quick):
    widths = (64,) if quick else WIDTHS
    seconds, rounds = (0.1, (3, 9)) if quick else (0.5, (7, 21))
    grid = list(itertools.product(MESHES[:1] if quick else MESHES, MODELS, TYPES[:1] if quick else TYPES, widths))
    rows = [case(*each, seconds, rounds) for each in tqdm(grid, "fuse", disable=None)]
    ratios = {"plain / fuse": min, "by hand / fuse": min, "tracing": max, "tracing by hand": max}
    return {"fuse": {"means": means(rows, ["type"], ratios), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    main(measure)
