"""A transformer with weights sharded over both axes of a 2x2 mesh, in plain JAX, Flax NNX and Equinox.

FSDP and tensor parallelism together: activations are sharded over `data` by batch and over `model` by heads or hidden
columns, and every weight over both, so that no device holds a whole one:

    qkv, up      w (width, hidden) on P("data", "model")    the rows are gathered over `data` in the product, a grid
    out, down    w (hidden, width) on P("model", "data")    columns are gathered first; it is all-reduced over `model`

`out_sharding` is the sharding of a result, and the types of x and w have theirs; jaxmp finds the rest, for the
gradients too. `jaxmp.explain` prints all of it for one product.

The model is written three times, and each is trained twice: with jaxmp's layers, and with the library's own on jnp's
products. Both loss curves have to agree.
"""

import functools
import pydoc_data.topics
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp
import jaxmp.equinox
import jaxmp.flax

WIDTH, HEADS, HIDDEN, LAYERS = 64, 4, 256, 2
BATCH, LENGTH, STEPS = 8, 32, 20
LEARNING_RATE = 3e-3

ROWS = P("data", None, None)  # batch, sequence, features
COLUMNS = P("data", None, "model")
INTO, OUT_OF = P("data", "model"), P("model", "data")  # weights (in, out) into and out of what `model` shards


def attention(qkv):
    """Causal attention; each device has whole sequences of its heads, so nothing is communicated."""
    shape = (*qkv.shape[:2], HEADS, 3 * WIDTH // HEADS)
    q, k, v = jnp.split(jnp.reshape(qkv, shape, out_sharding=P("data", None, "model", None)), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(LENGTH, dtype=bool), scores, -np.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return jnp.reshape(mixed, (*qkv.shape[:2], WIDTH), out_sharding=COLUMNS)


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def embedded(table, tokens):
    positions = np.exp(1j * np.arange(LENGTH)[:, None] / 100 ** np.linspace(0, 1, WIDTH // 2))
    places = np.concatenate([positions.real, positions.imag], axis=1).astype(np.float32)
    return table.at[tokens].get(out_sharding=ROWS) + 0.1 * places


# Plain JAX ---------------------------------------------------------------------------------------------------------


def plain_model(linear, vocabulary):
    """(parameters, function of them and tokens); `linear(x, w, bias, activation=, out_sharding=)` is the layer."""
    rng = np.random.default_rng(0)

    def layer(rows, columns, spec, bias):
        w = rng.normal(size=(rows, columns)).astype(np.float32) / np.sqrt(rows)
        return jax.device_put((w, np.zeros(columns, np.float32)), (sharding(spec), sharding(bias)))

    def block():
        return {
            "qkv": layer(WIDTH, 3 * WIDTH, INTO, P("model")),
            "out": layer(WIDTH, WIDTH, OUT_OF, P()),
            "up": layer(WIDTH, HIDDEN, INTO, P("model")),
            "down": layer(HIDDEN, WIDTH, OUT_OF, P()),
        }

    params = {
        "tokens": jax.device_put(0.5 * rng.normal(size=(vocabulary, WIDTH)).astype(np.float32), sharding(P())),
        "blocks": [block() for _ in range(LAYERS)],
        "head": layer(WIDTH, vocabulary, P("data", None), P()),
    }

    def apply(params, tokens):
        x = embedded(params["tokens"], tokens)
        for each in params["blocks"]:
            qkv = linear(normalized(x), *each["qkv"], out_sharding=COLUMNS)
            x = x + linear(attention(qkv), *each["out"], out_sharding=ROWS)
            hidden = linear(normalized(x), *each["up"], activation="gelu", out_sharding=COLUMNS)
            x = x + linear(hidden, *each["down"], out_sharding=ROWS)
        return linear(normalized(x), *params["head"], out_sharding=ROWS)

    return params, apply


def jnp_linear(x, w, bias, activation=None, out_sharding=None):
    y = jnp.matmul(x, w, out_sharding=out_sharding) + bias
    return jax.nn.gelu(y) if activation == "gelu" else y


# Flax NNX ----------------------------------------------------------------------------------------------------------


class FlaxLinear(nnx.Linear):
    """Flax's own layer and an activation."""

    def __init__(self, *args, activation=None, **options):
        super().__init__(*args, **options)
        self.activation = activation

    def __call__(self, x, out_sharding=None):
        y = super().__call__(x, out_sharding=out_sharding)
        return jax.nn.gelu(y) if self.activation == "gelu" else y


class FlaxModel(nnx.Module):
    def __init__(self, linear, vocabulary, rngs):
        def layer(rows, columns, spec, bias, activation=None):
            metadata = {"kernel_metadata": {"out_sharding": spec}, "bias_metadata": {"out_sharding": bias}}
            return linear(rows, columns, activation=activation, rngs=rngs, **metadata)

        def block():
            return nnx.Dict(
                qkv=layer(WIDTH, 3 * WIDTH, INTO, P("model")),
                out=layer(WIDTH, WIDTH, OUT_OF, P()),
                up=layer(WIDTH, HIDDEN, INTO, P("model"), "gelu"),
                down=layer(HIDDEN, WIDTH, OUT_OF, P()),
            )

        self.tokens = nnx.Param(0.5 * rngs.params.normal((vocabulary, WIDTH)))
        self.blocks = nnx.List([block() for _ in range(LAYERS)])
        self.head = layer(WIDTH, vocabulary, P("data", None), P())

    def __call__(self, tokens):
        x = embedded(self.tokens[...], tokens)
        for each in self.blocks:
            x = x + each.out(attention(each.qkv(normalized(x), out_sharding=COLUMNS)), out_sharding=ROWS)
            x = x + each.down(each.up(normalized(x), out_sharding=COLUMNS), out_sharding=ROWS)
        return self.head(normalized(x), out_sharding=ROWS)


def flax_model(linear, vocabulary):
    graph, params = nnx.split(FlaxModel(linear, vocabulary, nnx.Rngs(0)))
    return params, lambda params, tokens: nnx.merge(graph, params)(tokens)


# Equinox -----------------------------------------------------------------------------------------------------------


class EquinoxLinear(eqx.nn.Linear):
    """Equinox's own parameters, jnp's product, and an activation."""

    activation: str | None = eqx.field(static=True)

    def __init__(self, *args, activation=None, **options):
        super().__init__(*args, **options)
        self.activation = activation

    def __call__(self, x, *, out_sharding=None, key=None):
        return jnp_linear(x, self.weight.T, self.bias, self.activation, out_sharding)


class EquinoxModel(eqx.Module):
    tokens: jax.Array
    blocks: list
    head: eqx.Module

    def __init__(self, linear, vocabulary, key):
        keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

        def layer(columns, rows, spec, bias, activation=None):
            made = linear(columns, rows, activation=activation, key=next(keys))
            specs = sharding(P(*reversed(spec))), sharding(bias)  # the weight is (out, in)
            return eqx.tree_at(lambda m: (m.weight, m.bias), made, jax.device_put((made.weight, made.bias), specs))

        def block():
            return {
                "qkv": layer(WIDTH, 3 * WIDTH, INTO, P("model")),
                "out": layer(WIDTH, WIDTH, OUT_OF, P()),
                "up": layer(WIDTH, HIDDEN, INTO, P("model"), "gelu"),
                "down": layer(HIDDEN, WIDTH, OUT_OF, P()),
            }

        self.tokens = 0.5 * jax.random.normal(next(keys), (vocabulary, WIDTH))
        self.blocks = [block() for _ in range(LAYERS)]
        self.head = layer(WIDTH, vocabulary, P("data", None), P())

    def __call__(self, tokens):
        x = embedded(self.tokens, tokens)
        for each in self.blocks:
            x = x + each["out"](attention(each["qkv"](normalized(x), out_sharding=COLUMNS)), out_sharding=ROWS)
            x = x + each["down"](each["up"](normalized(x), out_sharding=COLUMNS), out_sharding=ROWS)
        return self.head(normalized(x), out_sharding=ROWS)


def equinox_model(linear, vocabulary):
    params, rest = eqx.partition(EquinoxModel(linear, vocabulary, jax.random.key(0)), eqx.is_array)
    return params, lambda params, tokens: eqx.combine(params, rest)(tokens)


# Training ----------------------------------------------------------------------------------------------------------


def sharding(spec):
    return NamedSharding(jax.sharding.get_mesh(), spec)


def train(params, apply, text, name):
    """The loss of every step."""

    def loss_of(params, tokens, targets):
        logits = apply(params, tokens)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, logits.shape[-1]), axis=-1))

    optimizer = optax.adam(LEARNING_RATE)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, targets):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    rng, losses = np.random.default_rng(0), []
    for _ in tqdm(range(STEPS), desc=name, unit="step", file=sys.stdout):
        starts = rng.integers(0, len(text) - LENGTH, BATCH)
        windows = text[starts[:, None] + np.arange(LENGTH + 1)]
        tokens, targets = (jax.device_put(x, P("data", None)) for x in (windows[:, :-1], windows[:, 1:]))
        params, state, loss = step(params, state, tokens, targets)
        # Wait for each step: XLA's own CPU collectives can block when many steps are in flight on few cores.
        losses.append(float(loss))
    return np.array(losses)


MODELS = {
    "plain JAX": (plain_model, jaxmp.linear, jnp_linear),
    "Flax NNX": (flax_model, jaxmp.flax.Linear, FlaxLinear),
    "Equinox": (equinox_model, jaxmp.equinox.Linear, EquinoxLinear),
}


def explain_product():
    """Explains how ranks share a product and its gradient's products, and what else they communicate."""
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), np.float32, sharding=sharding(ROWS))
    w = jax.ShapeDtypeStruct((WIDTH, HIDDEN), np.float32, sharding=sharding(INTO))
    gradient = jax.value_and_grad(lambda x, w: jnp.sum(jaxmp.matmul(x, w, out_sharding=COLUMNS) ** 2), (0, 1))
    rows = jaxmp.explain(gradient)(x, w).rows
    return [row.pattern if row.operation.startswith("matmul") else row.operation for row in rows]


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    prose = "\n".join(pydoc_data.topics.topics.values())
    letters, text = np.unique(list(prose), return_inverse=True)
    text, vocabulary = text.astype(np.int32), -(-len(letters) // 4) * 4
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        # The all-reduce sums the gradient of x, which is the same on all devices of `model`.
        assert explain_product() == ["grid", "grid", "grid", "all_reduce"]
        for name, (model, ours, theirs) in MODELS.items():
            losses = train(*model(ours, vocabulary), text, f"{name}, jaxmp")
            expected = train(*model(theirs, vocabulary), text, f"{name}, jnp  ")
            difference = np.max(np.abs(losses - expected))
            print(f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f}, largest difference {difference:.1e}")
            assert losses[-1] < 0.8 * losses[0]
            assert difference < 1e-3


if __name__ == "__main__":
    main()

# Launch: python examples/09_fsdp_tp_transformer.py
