"""The same log-probabilities for a request in any batch, and on any number of devices that share the model.

A decoder of Flax NNX serves 64 requests, one token of each at a time with a cache of keys and values, half of them
greedily and half by sampling. It does so alone, in batches of 8 and of 64, on 1, 2 and 4 devices (tensor parallelism).
vLLM has a test of this kind for its batch invariance. Plain JAX fails it: its products sum in another order for another
batch or another number of devices. `jaxmp.fuse(serve, determinism="topology")` passes it, to the bit, from the same
model; `"batch"` does on one device. `make test-clients` runs every batch on every number of devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

REQUESTS, PROMPT, LENGTH = 64, 6, 16
WIDTH, HEADS, HIDDEN, VOCABULARY, BLOCKS = 72, 4, 320, 48, 2
BATCHES, DEVICES = (1, 8, 64), (1, 2, 4)

# The shapes of a device decide whether XLA uses these kernels, which have another exp.
NO_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, token):
        x = self.embed(token)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def serve(graph, params, caches, prompts, keys, is_greedy):
    """Returns the tokens of each request and the log-probabilities of the tokens that the model chose."""

    def step(carry, position):
        token, caches = carry
        model = nnx.merge(graph, params, caches)
        # Each device has all logits, so that none sums over others.
        logits = jax.lax.with_sharding_constraint(model(token)[:, 0], P())
        scores = jax.nn.log_softmax(logits)
        noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, position), (VOCABULARY,)))(keys)
        chosen = jnp.argmax(scores + jnp.where(is_greedy[:, None], 0, noise), axis=-1)
        is_given = position + 1 < PROMPT
        given = prompts[:, jnp.minimum(position + 1, PROMPT - 1)]
        token = jnp.where(is_given, given, chosen)
        score = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
        return (token[:, None], nnx.state(model, nnx.Cache)), (token, score)

    _, (tokens, scores) = jax.lax.scan(step, (prompts[:, :1], caches), jnp.arange(LENGTH - 1))
    return tokens.T, scores.T


def spec_of(path, x):
    """Columns of what goes into heads, hidden features and the vocabulary, and rows of what comes out."""
    names = {str(getattr(key, "key", key)) for key in path}
    if names & {"query", "key", "value"}:
        return P(None, "model", None) if x.ndim == 3 else P("model", None)
    if names & {"up", "head"}:
        return P(None, "model") if x.ndim == 2 else P("model")
    if names & {"out", "down"} and x.ndim > 1:
        return P("model", *[None] * (x.ndim - 1))
    return P()


def answers(fuse, batch, devices, order):
    """The tokens and log-probabilities of every request, served in this order in batches of this size."""
    model = Decoder(nnx.Rngs(0))
    for block in model.blocks:
        block.attention.init_cache((batch, LENGTH, WIDTH))
    graph, params, caches = nnx.split(model, nnx.Param, nnx.Cache)
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    params = jax.tree_util.tree_map_with_path(
        lambda p, x: jax.device_put(x, NamedSharding(mesh, spec_of(p, x))), params
    )
    requests = np.arange(REQUESTS)
    prompts = np.random.default_rng(0).integers(VOCABULARY, size=(REQUESTS, PROMPT), dtype=np.int32)
    keys = jax.random.split(jax.random.key(1), REQUESTS)
    found = {}
    with jax.set_mesh(mesh):
        run = jax.jit(fuse(functools.partial(serve, graph)), compiler_options=NO_YNNPACK)
        for some in np.split(requests[order], REQUESTS // batch):
            tokens, scores = run(params, caches, prompts[some], keys[some], some % 2 == 0)
            found |= dict(zip(some.tolist(), zip(np.asarray(tokens), np.asarray(scores), strict=True), strict=True))
    return [np.stack(part) for part in zip(*(found[request] for request in range(REQUESTS)), strict=True)]


def changed(fuse, pairs):
    """For each (batch, devices): how many requests get another token or log-probability than in a batch of all."""
    expected, found = answers(fuse, REQUESTS, 1, np.arange(REQUESTS)), {}
    for batch, devices in pairs:
        others = answers(fuse, batch, devices, np.random.default_rng(batch).permutation(REQUESTS))
        bits = [a.view(np.uint32) != b.view(np.uint32) for a, b in zip(expected, others, strict=True)]
        found[batch, devices] = int(np.any(bits[0] | bits[1], axis=-1).sum())
    return found


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    pairs = tuple(zip(BATCHES, DEVICES, strict=True))
    plain, kept = changed(lambda f: f, pairs), changed(functools.partial(jaxmp.fuse, determinism="topology"), pairs)
    for batch, devices in pairs:
        counts = f"plain JAX {plain[batch, devices]:2}, jaxmp {kept[batch, devices]}"
        print(f"batch {batch:2}, {devices} devices: requests that change, of {REQUESTS}: {counts}")
    assert any(plain.values())
    assert not any(kept.values())


if __name__ == "__main__":
    main()

# Launch: python examples/13_serving.py
