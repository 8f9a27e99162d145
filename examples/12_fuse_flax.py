"""Train a Flax NNX model that has no line of jaxmp, with every product that communicates as a call of jaxmp.

The model is Megatron's block: columns of `up` and rows of `down` are sharded over the axis `model`, rows of x over both
axes between the blocks (sequence parallelism). `jaxmp.fuse` takes the loss as it is. `jaxmp.explain` then prints
what became of each product: all-gather + product + bias + gelu is one call, product + reduce-scatter another, and the
backward pass goes through gelu's derivative inside of a call.

The reference is the same loss without `fuse`: both curves have to agree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxmp

PIXELS, WIDTH, HIDDEN, DIGITS = 64, 64, 256, 10
BATCH, STEPS, LEARNING_RATE = 128, 60, 3e-3
ALL_ROWS, ROWS = P(("data", "model"), None), P("data", None)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, dot_general=functools.partial(scattered, ALL_ROWS))

    def __call__(self, x):
        h = jax.sharding.reshard(self.norm(x), ROWS)
        return x + self.down(nnx.gelu(self.up(h)))


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(PIXELS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.last = nnx.Linear(WIDTH, DIGITS, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def scattered(spec, *args, **options):
    """`lax.dot_general` with its result sharded as `spec`: a contraction over `model` is summed and scattered."""
    return jax.lax.dot_general(*args, **(options | {"out_sharding": spec}))


def place(mesh, path, x):
    """up's columns and down's rows over `model`; all else whole on every device."""
    names = {str(getattr(key, "key", key)) for key in path}
    spec = P()
    if "up" in names:
        spec = P(None, "model") if x.ndim == 2 else P("model")
    elif "down" in names and x.ndim == 2:
        spec = P("model", None)
    return jax.device_put(x, NamedSharding(mesh, spec))


def loss_of(graph, params, x, labels):
    logits = nnx.merge(graph, params)(x)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1))


def train(loss, params, batches):
    optimizer = optax.adamw(LEARNING_RATE)

    @jax.jit
    def step(params, state, x, labels):
        value, gradients = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for x, labels in batches:
        params, state, value = step(params, state, x, labels)
        losses.append(value)
    return params, np.array(losses)


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    digits = load_digits()
    split = train_test_split((digits.data / 16).astype(np.float32), np.eye(10, dtype=np.float32)[digits.target])
    x_train, x_test, labels_train, labels_test = split

    with jax.set_mesh(mesh):
        graph, params = nnx.split(nnx.eval_shape(lambda: Classifier(nnx.Rngs(0))))
        rng = np.random.default_rng(0)

        def initial(path, leaf):
            scale = leaf.shape[0] ** -0.5 if leaf.ndim == 2 else float("scale" in str(path))
            values = rng.normal(size=leaf.shape) * scale if leaf.ndim == 2 else np.full(leaf.shape, scale)
            return place(mesh, path, jnp.asarray(values, jnp.float32))

        params = jax.tree_util.tree_map_with_path(initial, params)
        order = np.random.default_rng(1).permutation(np.resize(np.arange(len(x_train)), BATCH * STEPS))
        rows = NamedSharding(mesh, ALL_ROWS)
        batches = [
            tuple(jax.device_put(values[i], rows) for values in (x_train, labels_train))
            for i in order.reshape(STEPS, BATCH)
        ]
        plain = functools.partial(loss_of, graph)
        fused = jaxmp.fuse(plain)
        jaxmp.explain(jax.grad(fused))(params, *batches[0])
        trained, losses = train(fused, params, batches)
        _, expected = train(plain, params, batches)
        count = len(x_test) // 4 * 4
        logits = nnx.merge(graph, trained)(jax.device_put(x_test[:count], rows))
        accuracy = np.mean(np.argmax(logits, -1) == np.argmax(labels_test[:count], -1))

    difference = np.max(np.abs(losses - expected))
    print(f"test accuracy {accuracy:.1%}; largest difference of the loss curves {difference:.1e}")
    assert accuracy > 0.9
    assert difference < 1e-3


if __name__ == "__main__":
    main()

# Launch: python examples/12_fuse_flax.py
