"""Train a small character-level GPT, written with Flax NNX, data- and sequence-parallel on a 2x2 mesh of CPU devices.

Every projection is a Flax layer with `dot_general=jaxmp.dot_general`. Between the blocks activations are sharded over
the batch and the sequence. A column-parallel layer gathers the sequence while it multiplies; a row-parallel layer
scatters its sum over the sequence. So each block is four calls:

    qkv, up      x (data, model, :)  @  w (:, model)  ->  (data, :, model)     gathers along the sequence
    out, down    x (data, :, model)  @  w (model, :)  ->  (data, model, :)     scatters along the sequence

The text is the prose of Python's `help()` topics, some 700 kB that ship with every Python. Parameters are float32,
activations and products bfloat16. The reference is the same model with `dot_general=jax.lax.dot_general`.
"""

import pydoc_data.topics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp

WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, LENGTH, STEPS = 8, 128, 300
LEARNING_RATE = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=10, decay_steps=STEPS, end_value=1e-4)
COMPARED = 20  # steps of both runs

ROWS = P("data", "model", None)  # batch, sequence, features
COLUMNS = P("data", None, "model")
HEADED = P("data", None, "model", None)  # batch, sequence, heads, features of a head


class Block(nnx.Module):
    def __init__(self, rngs, **layer):
        size = WIDTH // HEADS
        by_column, by_row = {"out_sharding": (None, "model")}, {"out_sharding": ("model", None)}
        heads = {"out_sharding": (None, "model", None)}, {"out_sharding": ("model", None, None)}
        self.qkv = nnx.LinearGeneral(WIDTH, (HEADS, 3 * size), kernel_metadata=heads[0], rngs=rngs, **layer)
        self.out = nnx.LinearGeneral((HEADS, size), WIDTH, axis=(-2, -1), kernel_metadata=heads[1], rngs=rngs, **layer)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_metadata=by_column, rngs=rngs, **layer)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_metadata=by_row, rngs=rngs, **layer)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(self.norms[0](x), out_sharding=HEADED), 3, axis=-1)
        x = x + self.out(attention(q, k, v), out_sharding=ROWS)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x), out_sharding=COLUMNS)), out_sharding=ROWS)


def attention(q, k, v):
    """Causal attention; each device has whole sequences of its heads, so nothing is communicated.

    Positions enter as a penalty on distance, with a slope of its own in each head (ALiBi, arXiv:2108.12409).
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / np.sqrt(q.shape[-1])
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    penalty = 2.0 ** (1 - 2 * np.arange(HEADS))[:, None, None] * distance
    scores = jnp.where(distance >= 0, scores - penalty.astype(np.float32), -np.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


class GPT(nnx.Module):
    def __init__(self, vocabulary, dot_general, rngs):
        layer = {"use_bias": False, "dtype": jnp.bfloat16, "dot_general": dot_general}
        self.tokens = nnx.Param(0.02 * rngs.params.normal((vocabulary, WIDTH)))
        self.blocks = nnx.List([Block(rngs, **layer) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocabulary, rngs=rngs, **layer)

    def __call__(self, tokens):
        """Logits (batch, length, vocabulary) of what follows each of the tokens (batch, length)."""
        x = self.tokens[...].at[tokens].get(out_sharding=ROWS).astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), out_sharding=ROWS).astype(jnp.float32)


def loss_of(model, tokens, targets):
    logits = model(tokens)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, logits.shape[-1]), axis=-1))


@nnx.jit
def train_step(model, optimizer, tokens, targets):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens, targets)
    optimizer.update(model, grads)
    return loss


def train(dot_general, text, vocabulary, steps, name):
    """Return the model, the loss of every step and the plan cache's misses in the first and after it."""
    model = GPT(vocabulary, dot_general, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)
    rng, losses, misses = np.random.default_rng(0), [], [jaxmp.plan_cache_info()["misses"]]
    progress = tqdm(range(steps), desc=name, unit="step", file=sys.stdout)
    for i in progress:
        starts = rng.integers(0, len(text) - LENGTH, BATCH)
        windows = text[starts[:, None] + np.arange(LENGTH + 1)]
        tokens, targets = (jax.device_put(x, P("data", "model")) for x in (windows[:, :-1], windows[:, 1:]))
        # Wait for each step: XLA's own CPU collectives can block when many steps are in flight on few cores.
        losses.append(float(train_step(model, optimizer, tokens, targets)))
        misses.append(jaxmp.plan_cache_info()["misses"])
        if i == 0:  # the step that compiles
            started = time.perf_counter()
        else:
            speed = i * BATCH * LENGTH / (time.perf_counter() - started)
            progress.set_postfix(loss=f"{losses[-1]:.2f}", tokens_per_second=f"{speed:.0f}")
    return model, np.array(losses), (misses[1] - misses[0], misses[-1] - misses[1])


def sample(model, prompt):
    """Continue `prompt`, up to the model's length, once for each sequence of a batch of two."""
    rng, apply = np.random.default_rng(0), nnx.jit(lambda model, tokens: model(tokens))
    tokens = np.zeros((2, LENGTH), np.int32)
    tokens[:, : len(prompt)] = prompt
    for i in range(len(prompt), LENGTH):
        logits = np.asarray(apply(model, jax.device_put(tokens, P("data", "model"))))[:, i - 1]
        # The largest of logits with Gumbel noise is a draw from their softmax; 0.7 is the temperature.
        tokens[:, i] = np.argmax(logits / 0.7 + rng.gumbel(size=logits.shape), axis=-1)
    return tokens


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    prose = "\n".join(pydoc_data.topics.topics.values())
    letters, text = np.unique(list(prose), return_inverse=True)
    text = text.astype(np.int32)
    print(f"{len(text)} characters, {len(letters)} different ones")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        _, expected, _ = train(jax.lax.dot_general, text, len(letters), COMPARED, "lax  ")
        model, losses, (first_misses, late_misses) = train(jaxmp.dot_general, text, len(letters), STEPS, "jaxmp")
        for line in sample(model, text[:16]):
            print("   ", repr("".join(letters[line])))

    # Both runs round every activation to bfloat16, in products that sum in another order. So either knows its loss, a
    # mean of log-probabilities made of such numbers, to no better than u = 2^-8 of its value.
    allowed = 2 * 2**-8 * expected
    difference = np.abs(losses[:COMPARED] - expected)
    final = losses[-20:].mean()
    print(f"loss {losses[0]:.2f} to {final:.2f} nats per character")
    print(f"plan cache misses after the first step: {late_misses}")
    used = np.max(difference / allowed)
    print(f"largest difference of the first {COMPARED} losses: {difference.max():.1e}, {used:.0%} of the bound")
    assert final < 2.0
    assert first_misses > 0  # the products did run through plans
    assert late_misses == 0
    assert np.all(difference <= allowed)


if __name__ == "__main__":
    main()

# Launch: python examples/04_char_gpt.py
