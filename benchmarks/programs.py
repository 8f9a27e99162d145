"""Models of Flax, Equinox and plain JAX in small sizes, for `bench_training`.

A model is a function of a type that returns its parameters, its other state, its loss and its batch. The loss maps
(parameters, state, batch, key) to the value and the next state. Nothing here knows of jaxmp or of a mesh.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY, EXPERTS = 16, 32, 128, 4, 512, 128, 8
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(VOCABULARY, size=(BATCH, LENGTH), dtype=np.int32)
IMAGES = RNG.normal(size=(BATCH, 8, 8, 3)).astype(np.float32)
ROWS = tuple(RNG.normal(size=(2, BATCH, WIDTH)).astype(np.float32))
LABELS = RNG.integers(10, size=BATCH, dtype=np.int32)


def weights(**shapes):
    rng = np.random.default_rng(1)
    scales = {name: np.float32(np.sqrt(shape[-2] if len(shape) > 1 else 1)) for name, shape in shapes.items()}
    return {name: rng.normal(size=shape).astype(np.float32) / scales[name] for name, shape in shapes.items()}


def of_type(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype or x.dtype), tree)


def of_class(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token(logits, tokens):
    return of_class(logits[:, :-1].astype(jnp.float32), tokens[:, 1:])


def rms_norm(x, gain):
    return (x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)) * gain


def layer_norm(x):
    return (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-6)


def attention(q, k, v, bias=0.0):
    """Softmax attention written by hand, over (batch, length, width)."""
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype) + bias
    weights = jax.nn.softmax(logits.astype(jnp.float32), -1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


def joined(one, two):
    """Joins two steps h -> a h + b."""
    return two[0] * one[0], two[0] * one[1] + two[1]


def causal(dtype=jnp.float32):
    return jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), 0, -1e9).astype(dtype)


def stateless(params, value, batch, dtype=None):
    """Returns a model without other state; `value` has the parameters in `dtype`."""

    def loss(params, state, batch, key):
        return value(of_type(params, dtype), batch, key), state

    return params, (), loss, batch


def of_linen(model, batch, value):
    """Returns a model of Flax Linen; `value` is a function of logits and labels."""

    def loss(params, state, batch, key):
        variables, rngs = {"params": params} | state, {"dropout": key}
        logits, state = model.apply(variables, batch[0], rngs=rngs, mutable=list(state))
        return value(logits.astype(jnp.float32), batch[-1]), state

    variables = model.init(jax.random.key(0), batch[0])
    return variables.pop("params"), variables, loss, batch


def nnx_gpt(dtype):
    """A transformer of Flax NNX: LayerNorm, attention, dropout, learned positions, an output layer of its own."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            options = {"rngs": rngs, "dtype": dtype}
            self.embed, self.positions = (nnx.Embed(n, WIDTH, **options) for n in (VOCABULARY, LENGTH))
            self.norms = nnx.List(nnx.LayerNorm(WIDTH, **options) for _ in range(3))
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **options)
            self.up, self.down = nnx.Linear(WIDTH, HIDDEN, **options), nnx.Linear(HIDDEN, WIDTH, **options)
            self.dropout, self.head = nnx.Dropout(0.1), nnx.Linear(WIDTH, VOCABULARY, **options)

        def __call__(self, tokens, rngs):
            x = self.embed(tokens) + self.positions(jnp.arange(LENGTH))
            y = self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
            x = x + self.dropout(y, rngs=rngs)
            x = x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))), rngs=rngs)
            return self.head(self.norms[2](x))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, state, tokens, key):
        return next_token(nnx.merge(graph, params, state)(tokens, nnx.Rngs(dropout=key)), tokens), state

    return params, rest, loss, TOKENS


def linen_gpt(dtype, dropout=0.0):
    """A transformer of Flax Linen: RMSNorm, attention, tied embeddings."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            embed = linen.Embed(VOCABULARY, WIDTH, dtype=dtype)
            x, drop = embed(tokens), linen.Dropout(dropout, deterministic=not dropout)
            y = linen.RMSNorm(dtype=dtype)(x)
            x = x + drop(linen.SelfAttention(HEADS, dtype=dtype)(y, mask=linen.make_causal_mask(tokens)))
            y = linen.RMSNorm(dtype=dtype)(x)
            x = x + drop(linen.Dense(WIDTH, dtype=dtype)(linen.silu(linen.Dense(HIDDEN, dtype=dtype)(y))))
            return embed.attend(linen.RMSNorm(dtype=dtype)(x))

    return of_linen(Model(), (TOKENS,), next_token)


def linen_batch_norm(dtype):
    """A classifier of Flax Linen with batch statistics."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(HIDDEN, dtype=dtype)(x.reshape(len(x), -1))
            x = linen.relu(linen.BatchNorm(use_running_average=False, dtype=dtype)(x))
            return linen.Dense(10, dtype=dtype)(x)

    return of_linen(Model(), (IMAGES, LABELS), of_class)


def eqx_mlp(dtype):
    """An MLP of Equinox after a norm, mapped over the batch, with a loss of squares."""
    model = [eqx.nn.LayerNorm(WIDTH), eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 2, jax.nn.silu, key=jax.random.key(0))]
    params, static = eqx.partition(model, eqx.is_array)

    def value(params, batch, key):
        norm, mlp = eqx.combine(params, static)
        return jnp.mean(jnp.sum((jax.vmap(lambda x: mlp(norm(x)))(batch[0]) - batch[1]) ** 2, -1))

    return stateless(params, value, ROWS)


def eqx_transformer(dtype):
    """A transformer of Equinox, mapped over the batch, with a key for each row's dropout."""
    keys = jax.random.split(jax.random.key(0), 5)
    model = {
        "embed": eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=0.1, key=keys[1]),
        "norms": [eqx.nn.RMSNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)],
        "mlp": eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=keys[2]),
        "head": eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3]),
    }
    params, static = eqx.partition(model, eqx.is_array)

    def logits(params, tokens, key):
        m = eqx.combine(params, static)
        x = jax.vmap(m["embed"])(tokens)
        y = jax.vmap(m["norms"][0])(x)
        x = x + m["attention"](y, y, y, mask=jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), key=key)
        return jax.vmap(lambda x: m["head"](x + m["mlp"](m["norms"][1](x))))(x)

    def value(params, tokens, key):
        return next_token(jax.vmap(logits, (None, 0, 0))(params, tokens, jax.random.split(key, len(tokens))), tokens)

    return stateless(params, value, TOKENS, dtype)


def vit(dtype):
    """A vision transformer of Flax Linen: a convolution makes the patches, and a class token is read."""

    def smooth(logits, labels):
        return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)).mean()

    class Model(linen.Module):
        @linen.compact
        def __call__(self, images):
            x = linen.Conv(WIDTH, (2, 2), (2, 2), dtype=dtype)(images).reshape(len(images), -1, WIDTH)
            token = self.param("token", linen.initializers.normal(0.02), (1, 1, WIDTH)).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, WIDTH)), x], 1)
            x = x + self.param("positions", linen.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
            x = x + linen.SelfAttention(HEADS, dtype=dtype)(linen.LayerNorm(dtype=dtype)(x))
            y = linen.gelu(linen.Dense(HIDDEN, dtype=dtype)(linen.LayerNorm(dtype=dtype)(x)))
            return linen.Dense(10, dtype=dtype)((x + linen.Dense(WIDTH, dtype=dtype)(y))[:, 0])

    return of_linen(Model(), (IMAGES, LABELS), smooth)


def dit(dtype):
    """A diffusion transformer: modulated norms, embeddings of time and label, noise that the step draws."""
    shapes = {"patch": (12, WIDTH), "time": (WIDTH, WIDTH), "label": (10, WIDTH), "modulate": (WIDTH, 6 * WIDTH)}
    shapes |= {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = weights(**shapes, end=(WIDTH, 12))

    def value(p, batch, key):
        (images, labels), keys = batch, jax.random.split(key)
        patches = images.reshape(-1, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, 12)
        noise, time = jax.random.normal(keys[0], patches.shape), jax.random.uniform(keys[1], (len(images), 1))
        noisy = jnp.cos(time * np.pi / 2)[..., None] * patches + jnp.sin(time * np.pi / 2)[..., None] * noise
        angles = 1000 * time * jnp.exp(-np.log(10000) * jnp.arange(WIDTH // 2) / (WIDTH // 2))
        of_time = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(dtype) @ p["time"]
        given = jax.nn.silu(jax.nn.silu(of_time) + p["label"][labels])
        shifts = jnp.split((given @ p["modulate"])[:, None], 6, -1)
        x = noisy.astype(dtype) @ p["patch"]
        q, k, v = jnp.split((layer_norm(x) * (1 + shifts[0]) + shifts[1]) @ p["qkv"], 3, -1)
        x = x + shifts[2] * (attention(q, k, v) @ p["out"])
        x = x + shifts[3] * (jax.nn.gelu((layer_norm(x) * (1 + shifts[4]) + shifts[5]) @ p["up"]) @ p["down"])
        return jnp.mean(((layer_norm(x) @ p["end"]).astype(jnp.float32) - noise) ** 2)

    return stateless(params, value, (IMAGES, LABELS), dtype)


def t5(dtype):
    """An encoder and a decoder with relative positions, RMSNorm, gated gelu, cross-attention and tied embeddings."""
    shapes = {"embed": (VOCABULARY, WIDTH), "bias": (8, HEADS)}
    for side in ("encoder", "decoder", "cross"):
        shapes |= {f"{side} {name}": (WIDTH, WIDTH) for name in "qkvo"} | {f"{side} gain": (WIDTH,)}
        shapes |= {f"{side} {name}": (WIDTH, HIDDEN) for name in ("gate", "up")} | {f"{side} down": (HIDDEN, WIDTH)}
    distances = np.clip(np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None], -4, 3) + 4

    def attend(p, side, x, memory, bias):
        q = rms_norm(x, p[f"{side} gain"]) @ p[f"{side} q"]
        k, v = (memory @ p[f"{side} {name}"] for name in "kv")
        return x + attention(q, k, v, bias) @ p[f"{side} o"]

    def feed(p, side, x):
        y = rms_norm(x, p[f"{side} gain"])
        return x + (jax.nn.gelu(y @ p[f"{side} gate"]) * (y @ p[f"{side} up"])) @ p[f"{side} down"]

    def value(p, tokens, key):
        bias = p["bias"][distances].transpose(2, 0, 1)
        x, y = p["embed"][tokens], p["embed"][tokens[:, ::-1]]
        memory = feed(p, "encoder", attend(p, "encoder", y, y, bias))
        x = attend(p, "decoder", x, x, bias + causal(dtype))
        x = feed(p, "cross", attend(p, "cross", x, memory, jnp.zeros((), dtype)))
        return next_token(x @ p["embed"].T / np.sqrt(WIDTH).astype(dtype), tokens)

    return stateless(weights(**shapes), value, TOKENS, dtype)


def moe(dtype):
    """A mixture of experts: two experts for each token, with a capacity, and a loss that balances them."""
    shapes = {"embed": (VOCABULARY, WIDTH), "router": (WIDTH, EXPERTS), "head": (WIDTH, VOCABULARY)}
    params = weights(**shapes, up=(EXPERTS, WIDTH, HIDDEN), down=(EXPERTS, HIDDEN, WIDTH))

    def value(p, tokens, key):
        x = rms_norm(p["embed"][tokens], jnp.ones((), dtype))
        gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), -1)
        chosen, experts = lax.top_k(gates, 2)
        chosen = chosen / chosen.sum(-1, keepdims=True)
        masks = jax.nn.one_hot(experts, EXPERTS)  # batch, length, 2, experts
        flat = masks.reshape(len(tokens), -1, EXPERTS)
        places = (jnp.cumsum(flat, 1) * flat - 1).reshape(masks.shape)
        slots = jax.nn.one_hot(places, 6) * masks[..., None]
        dispatch, combine = (x.sum(2).astype(dtype) for x in (slots, slots * chosen[..., None, None]))
        y = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        y = jnp.einsum("ebcf,efd->ebcd", jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", y, p["up"])), p["down"])
        x = x + jnp.einsum("bsec,ebcd->bsd", combine, y)
        balance = EXPERTS * jnp.sum(masks.mean((0, 1, 2)) * gates.mean((0, 1)))
        return next_token(x @ p["head"], tokens) + 0.01 * balance

    return stateless(params, value, TOKENS, dtype)


def mamba(dtype):
    """A selective state space model: a causal convolution of each channel and an associative scan."""
    shapes = {"embed": (VOCABULARY, WIDTH), "in": (WIDTH, 2 * HIDDEN), "kernel": (4, HIDDEN), "step": (HIDDEN, HIDDEN)}
    params = weights(**shapes, b=(HIDDEN, 4), c=(HIDDEN, 4), a=(HIDDEN, 4), out=(HIDDEN, WIDTH), gain=(WIDTH,))

    def value(p, tokens, key):
        x = p["embed"][tokens]
        u, gate = jnp.split(rms_norm(x, p["gain"]) @ p["in"], 2, -1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = jax.nn.silu(sum(p["kernel"][i] * padded[:, i : i + LENGTH] for i in range(4)))
        dt = jax.nn.softplus(u @ p["step"])[..., None]
        decay, inputs = jnp.exp(-dt * jnp.exp(p["a"])), dt * (u @ p["b"])[..., None, :] * u[..., None]
        _, h = lax.associative_scan(joined, (decay, inputs), axis=1)
        y = (h * (u @ p["c"])[..., None, :]).sum(-1) + u
        return next_token((x + (y * jax.nn.silu(gate)) @ p["out"]) @ p["embed"].T, tokens)

    return stateless(params, value, TOKENS, dtype)


def s5(dtype):
    """A layer of S5: a diagonal complex state and an associative scan, with gelu and a pooled classifier."""
    params = weights(inputs=(12, WIDTH), b=(2, WIDTH, HIDDEN), c=(2, HIDDEN, WIDTH), step=(HIDDEN,), real=(HIDDEN,))
    params |= weights(imaginary=(HIDDEN,), d=(WIDTH,), head=(WIDTH, 10))

    def value(p, batch, key):
        images, labels = batch
        x = images.reshape(len(images), 16, 12) @ p["inputs"]
        poles = -jnp.exp(p["real"]) + 1j * p["imaginary"]
        decay, b, c = jnp.exp(poles * jnp.exp(p["step"])), lax.complex(*p["b"]), lax.complex(*p["c"])
        inputs = (x.astype(jnp.complex64) @ b) * ((decay - 1) / poles)
        _, h = lax.associative_scan(joined, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)
        y = layer_norm(x + jax.nn.gelu((h @ c).real + x * p["d"]))
        return of_class(y.mean(1) @ p["head"], labels)

    return stateless(params, value, (IMAGES, LABELS), dtype)


def llama(dtype):
    """Two layers by `lax.scan` and `jax.checkpoint`, all of it in `dtype`: rotary positions, a gated layer."""
    layer = dict.fromkeys("qkvo", (2, WIDTH, WIDTH)) | {"gate": (2, WIDTH, HIDDEN), "up": (2, WIDTH, HIDDEN)}
    layers = weights(**layer, down=(2, HIDDEN, WIDTH)) | {"gains": np.ones((2, 2, WIDTH), np.float32)}
    params = of_type({"layers": layers} | weights(embed=(VOCABULARY, WIDTH), head=(WIDTH, VOCABULARY)), dtype)
    angles = np.arange(LENGTH)[:, None] * 100.0 ** -np.linspace(0, 1, WIDTH // HEADS // 2)

    def rotate(x):
        one, two = jnp.split(x.reshape(*x.shape[:2], HEADS, -1), 2, -1)
        cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (np.cos, np.sin))
        return jnp.concatenate([one * cos - two * sin, one * sin + two * cos], -1).reshape(x.shape)

    @jax.checkpoint
    def block(x, p):
        y = rms_norm(x, p["gains"][0])
        q, k, v = (y @ p[name] for name in "qkv")
        x = x + attention(rotate(q), rotate(k), v, causal(dtype)) @ p["o"]
        y = rms_norm(x, p["gains"][1])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def value(p, tokens, key):
        x, _ = lax.scan(block, p["embed"][tokens], p["layers"])
        return next_token(x @ p["head"], tokens)

    return stateless(params, value, TOKENS, dtype)


def clip(dtype):
    """Two towers and a contrastive loss: normalised rows, a learned temperature, logsumexp along both dimensions."""
    params = weights(image=(192, HIDDEN), text=(VOCABULARY, HIDDEN), up=(HIDDEN, WIDTH), down=(HIDDEN, WIDTH))
    params["scale"] = np.float32(1)

    def value(p, batch, key):
        images, tokens = batch
        one = jax.nn.gelu(images.reshape(len(images), -1).astype(dtype) @ p["image"]) @ p["up"]
        two = p["text"][tokens].mean(1) @ p["down"]
        one, two = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (one, two))
        logits = (jnp.exp(p["scale"]) * one @ two.T).astype(jnp.float32)
        losses = [jax.nn.logsumexp(logits, axis) - jnp.diagonal(logits) for axis in (0, 1)]
        return sum(losses).mean() / 2

    return stateless(params, value, (IMAGES, TOKENS), dtype)
