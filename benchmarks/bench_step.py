"""A user's training step: two transformer blocks with sequence parallelism in shard_map, jaxmp's calls and lax's.

Blocks of pre-norm attention and GELU layers; forward, backward and update. Of each step also the time to trace and to
compile it, from empty caches.
"""

import functools
import itertools
import statistics

import jax
import jax.numpy as jnp
from bench_matmul import label_of_types
from common import compile_seconds, interleaved, main
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import means
from tqdm import tqdm

import jaxmp

BLOCKS, WIDTH, HIDDEN, HEAD = 2, 512, 2048, 64
SEQUENCES, LENGTH = 4, 256
RANKS = (2, 4)
TYPES = ("float32", "bfloat16")
# The shape and sharding of each parameter of a block.
PARAMETERS = {
    "scale_attention": ((WIDTH,), P()),
    "qkv": ((WIDTH, 3 * WIDTH), P(None, "x")),
    "out": ((WIDTH, WIDTH), P("x", None)),
    "scale_mlp": ((WIDTH,), P()),
    "w_in": ((WIDTH, HIDDEN), P(None, "x")),
    "b_in": ((HIDDEN,), P("x")),
    "w_out": ((HIDDEN, WIDTH), P("x", None)),
    "b_out": ((WIDTH,), P()),
}


class Lax:
    """The products with lax's collectives around them."""

    @staticmethod
    def gathered(x, w):
        return lax.all_gather(x, "x", tiled=True) @ w

    @staticmethod
    def scattered(x, w):
        return lax.psum_scatter(x @ w, "x", tiled=True)

    @classmethod
    def mlp(cls, x, p):
        hidden = jax.nn.gelu(cls.gathered(x, p["w_in"]) + p["b_in"])
        return cls.scattered(hidden, p["w_out"]) + p["b_out"]


class Jaxmp:
    """The same with jaxmp's functions for shard_map."""

    @staticmethod
    def gathered(x, w):
        return jaxmp.all_gather_matmul(x, w, "x")

    @staticmethod
    def scattered(x, w):
        return jaxmp.matmul_reduce_scatter(x, w, "x")

    @staticmethod
    def mlp(x, p):
        return jaxmp.mlp(x, p["w_in"], p["b_in"], p["w_out"], p["b_out"], activation="gelu", axis_name="x")


CONTENDERS = {"jaxmp": Jaxmp, "lax": Lax}


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def attention(products, x, p):
    qkv = products.gathered(norm(x, p["scale_attention"]), p["qkv"])
    q, k, v = jnp.moveaxis(qkv.reshape(SEQUENCES, LENGTH, -1, 3, HEAD), 3, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / HEAD**0.5
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return products.scattered(mixed.reshape(SEQUENCES * LENGTH, -1), p["out"])


def step(products, mesh, params, x):
    specs = [{name: spec for name, (_, spec) in PARAMETERS.items()}] * BLOCKS

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("x", None)), out_specs=P("x", None))
    def forward(params, x):
        for p in params:
            x = x + attention(products, x, p)
            x = x + products.mlp(norm(x, p["scale_mlp"]), p)
        return x

    def loss(params):
        return jnp.mean(forward(params, x).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g.astype(p.dtype), params, grads)


def arguments(mesh, dtype):
    def draw(seed, shape, spec, scale):
        values = scale * jax.random.normal(jax.random.key(seed), shape)
        return jax.device_put(values.astype(dtype), NamedSharding(mesh, spec))

    params = [
        {
            name: draw(100 * block + i, shape, spec, 0.02 if len(shape) == 2 else 1.0)
            for i, (name, (shape, spec)) in enumerate(PARAMETERS.items())
        }
        for block in range(BLOCKS)
    ]
    return params, draw(7, (SEQUENCES * LENGTH, WIDTH), P("x", None), 1.0)


def check(calls, dtype):
    """A fast wrong step is worth nothing: the losses and the parameters are compared before they are timed."""
    ours, theirs = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), calls[name]()) for name in CONTENDERS)
    bound = {"float32": 1e-4, "bfloat16": 3e-2}[dtype]
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        error = float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other)))
        assert error < bound, f"a step differs from lax's by {error}, more than {bound}"


def case(dtype, ranks, quick):
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    operands = arguments(mesh, dtype)
    compiling = {name: [] for name in CONTENDERS}
    for _ in range(2 if quick else 4):
        for name, products in CONTENDERS.items():
            compiling[name].append(compile_seconds(functools.partial(step, products, mesh), operands)[0])
    calls = {
        name: functools.partial(jax.jit(functools.partial(step, products, mesh)), *operands)
        for name, products in CONTENDERS.items()
    }
    check(calls, dtype)
    seconds = interleaved(calls, *((0.5, (3, 5)) if quick else (4.0, (15, 61))))
    # The first of each is the first use in this process.
    compiled = {name: sum(map(statistics.median, zip(*s[1:], strict=True))) for name, s in compiling.items()}
    row = {"types": label_of_types((dtype, dtype)), "devices": ranks}
    row |= {f"{name} ms": each * 1e3 for name, each in seconds.items()}
    row |= {"lax / jaxmp": seconds["lax"] / seconds["jaxmp"]}
    row |= {f"{name} compile": each for name, each in compiled.items()}
    return row | {"compile": compiled["jaxmp"] / compiled["lax"]}


def measure(quick):
    grid = list(itertools.product(TYPES, RANKS))
    rows = [case(dtype, ranks, quick) for dtype, ranks in tqdm(grid, "step", disable=None)]
    return {"step": {"means": means(rows, ["types"], {"lax / jaxmp": min, "compile": max}), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    main(measure)
