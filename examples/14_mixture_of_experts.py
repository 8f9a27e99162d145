"""Train a small transformer with a mixture of experts, expert- and data-parallel on a 2x2 mesh of CPU devices.

Each block has causal attention and `jaxmp.flax.MoE`: 8 experts; a token goes to the best 2. Windows of text
are sharded over `data` and `expert`, and each rank of `expert` holds half of the experts. No token is dropped, and
there is no buffer of a fixed capacity: calls of jaxmp read the tokens of all ranks in place.
The loss has the term that balances experts (Fedus et al., arXiv:2101.03961).

The text is the prose of Python's `help()` topics. The reference is the same model on one device: both curves of the
loss have to agree.
"""

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp.flax

WIDTH, HIDDEN, HEADS, BLOCKS = 32, 64, 2, 2
EXPERTS, TOP_K, BALANCE = 8, 2, 1e-2
BATCH, LENGTH, STEPS = 16, 32, 60
ROWS = P(("data", "expert"))


class Block(nnx.Module):
    def __init__(self, rngs, of_experts):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
        self.moe = jaxmp.flax.MoE(WIDTH, HIDDEN, **sizes, kernel_metadata=of_experts, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        x = x + self.out(attention(q, k, v))
        y, loss = self.moe(self.norms[1](x))
        return x + y, loss


def attention(q, k, v):
    """Causal attention of heads that share no parameters; a penalty on distance tells positions (ALiBi)."""
    mixed = []
    for i in range(HEADS):
        of_head = slice(i * WIDTH // HEADS, (i + 1) * WIDTH // HEADS)
        scores = jnp.einsum("bqd,bkd->bqk", q[..., of_head], k[..., of_head]) / np.sqrt(WIDTH // HEADS)
        distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        penalty = np.where(distance >= 0, -distance * 2.0 ** (-4 * i), -np.inf).astype(np.float32)
        mixed.append(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores + penalty[None]), v[..., of_head]))
    return jnp.concatenate(mixed, axis=-1)


class Model(nnx.Module):
    def __init__(self, vocabulary, rngs, of_experts):
        self.tokens = nnx.Param(0.1 * rngs.params.normal((vocabulary, WIDTH)))
        self.blocks = nnx.List([Block(rngs, of_experts) for _ in range(BLOCKS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        """Logits of what follows each of the tokens (batch, length), and the loss that balances experts."""
        x, losses = jax.nn.one_hot(tokens, self.tokens.shape[0]) @ self.tokens[...], []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.head(self.norm(x)), sum(losses)


def loss_of(model, tokens, targets):
    logits, balance = model(tokens)
    picked = jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, logits.shape[-1])
    loss = -picked.sum(-1).mean()
    return loss + BALANCE * balance, loss


@nnx.jit
def train_step(model, optimizer, tokens, targets):
    (_, loss), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, tokens, targets)
    optimizer.update(model, grads)
    return loss


def train(text, vocabulary, place, of_experts):
    """The losses of all steps, and the model."""
    model = Model(vocabulary, nnx.Rngs(0), of_experts)
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    rng, losses = np.random.default_rng(0), []
    for _ in range(STEPS):
        starts = rng.integers(0, len(text) - LENGTH, BATCH)
        windows = text[starts[:, None] + np.arange(LENGTH + 1)]
        losses.append(float(train_step(model, optimizer, place(windows[:, :-1]), place(windows[:, 1:]))))
    return np.array(losses), model


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    prose = "\n".join(pydoc_data.topics.topics.values())
    letters, text = np.unique(list(prose), return_inverse=True)
    text = text.astype(np.int32)

    expected, _ = train(text, len(letters), jnp.asarray, {})
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, ROWS)  # noqa: E731
        losses, model = train(text, len(letters), place, {"out_sharding": ("expert",)})
        weights = model.blocks[0].moe.up[...]
    print(
        f"experts of {weights.shape[1:]}: {weights.sharding.shard_shape(weights.shape)[0]} of {EXPERTS} on each device"
    )
    difference = np.max(np.abs(losses - expected))
    print(f"loss {losses[0]:.2f} to {losses[-5:].mean():.2f} nats per character")
    print(f"largest difference of the losses on one device and on 2x2: {difference:.1e}")
    assert losses[-5:].mean() < 0.8 * losses[0]
    assert difference < 1e-4


if __name__ == "__main__":
    main()

# Launch: python examples/14_mixture_of_experts.py
