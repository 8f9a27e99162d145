"""The clients: models as people install them, with tiny sizes and random weights, and the line that fuses each. A
client is a generator of each step's results: a loss, and parameters or outputs. It imports its package when it runs,
because some packages set JAX's configuration on import."""

import dataclasses
import functools
from collections.abc import Callable

from runs import PLACES, randoms, tokens

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 8, 8, 32, 4, 32


@dataclasses.dataclass(frozen=True)
class Client:
    """`line`: what its user writes; `bound`: a step's allowed difference from plain, relative to the largest value."""

    run: Callable
    package: str
    line: str
    places: tuple[str, ...]
    bound: float
    why_not: str  # why not in the other places, or not with every JAX


CLIENTS = {}


def client(package, line, places=PLACES, bound=1e-4, why_not=""):
    def add(run):
        CLIENTS[run.__name__] = Client(run, package, line, places, bound, why_not)
        return run

    return add


def flax_block(**options):
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, decode=False)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, **options)
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x, decode=False):
            x = x + self.attention(x, decode=decode)
            return self.down(self.dropout(nnx.gelu(self.up(self.norm(x)))))

    return Block(nnx.Rngs(0))


FLAX_PLACES = ("none", "automatic", "explicit")
NO_SHARD_MAP = "the cache belongs to a batch"


@client("flax", "step = nnx.jit(jaxmp.fuse(train_step))")
def flax_nnx(run):
    import jax
    import optax
    from flax import nnx
    from jax.sharding import PartitionSpec as P

    is_mapped = run.place == "shard_map"
    model = flax_block(axis_name="data" if is_mapped else None)
    nnx.update(model, run.params(nnx.state(model)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def train_step(model, optimizer, x, y):
        def loss(model):
            value = optax.l2_loss(model(x), y).mean()
            return jax.lax.pmean(value, "data") if is_mapped else value

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    if is_mapped:
        specs = (P(), P(), P("data"), P("data"))
        train_step = nnx.shard_map(train_step, mesh=run.mesh, in_specs=specs, out_specs=P())
    step = nnx.jit(run.fuse(train_step))
    x, y = run.batch(randoms(BATCH, LENGTH, WIDTH), randoms(BATCH, LENGTH, WIDTH, seed=1))
    while True:
        yield step(model, optimizer, x, y), nnx.state(model, nnx.Param, nnx.BatchStat)


@client("flax", "decode = nnx.jit(jaxmp.fuse(decode))", FLAX_PLACES, why_not=NO_SHARD_MAP)
def flax_nnx_decoding(run):
    import jax
    from flax import nnx

    model = flax_block()
    nnx.update(model, run.params(nnx.state(model)))
    model.eval()
    model.attention.init_cache((BATCH, 64, WIDTH))
    caches = nnx.state(model, nnx.Cache)
    nnx.update(model, jax.tree.map(lambda x: run.batch(x)[0] if x.ndim else x, caches))
    decode = nnx.jit(run.fuse(lambda model, x: model(x, decode=True)))
    (x,) = run.batch(randoms(BATCH, 1, WIDTH))
    while True:
        yield decode(model, x), model.attention.cache_index[...]


@client("flax", "step = jax.jit(jaxmp.fuse(train_step))")
def flax_linen(run):
    import jax
    import optax
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            return nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(x)))

    model, x, y = Block(), randoms(BATCH, LENGTH, WIDTH), randoms(BATCH, LENGTH, WIDTH, seed=1)

    def loss(params, x, y):
        return optax.l2_loss(model.apply(params, x), y).mean()

    return run.train(loss, model.init(jax.random.key(0), x), (x, y))


@client("equinox", "step = eqx.filter_jit(jaxmp.fuse(train_step))")
def equinox(run):
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __call__(self, x):
            return jax.vmap(self.mlp)(x + self.attention(x, x, x))

    keys = jax.random.split(jax.random.key(0))
    block = Block(eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0]), eqx.nn.MLP(WIDTH, WIDTH, 64, 2, key=keys[1]))
    optimizer = optax.sgd(0.1, momentum=0.9)
    model = run.params(block)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def train_step(model, state, x, y):
        value, gradients = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    x, y = randoms(BATCH, LENGTH, WIDTH), randoms(BATCH, LENGTH, WIDTH, seed=1)
    if run.place == "shard_map":
        arrays, others = eqx.partition(model, eqx.is_array)
        yield from run.train(lambda arrays, x, y: loss(eqx.combine(arrays, others), x, y), arrays, (x, y))
    x, y = run.batch(x, y)
    step = eqx.filter_jit(run.fuse(train_step))
    while True:
        model, state, value = step(model, state, x, y)
        yield value, eqx.filter(model, eqx.is_array)


@client("dm-haiku", "step = jax.jit(jaxmp.fuse(train_step))")
def haiku(run):
    import haiku as hk
    import jax
    import jax.numpy as jnp

    def block(x):
        attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling())
        return hk.nets.MLP([64, WIDTH], activation=jax.nn.gelu)(x + attention(x, x, x))

    model, x, y = hk.transform(block), randoms(BATCH, LENGTH, WIDTH), randoms(BATCH, LENGTH, WIDTH, seed=1)

    def loss(params, x, y):
        return jnp.mean((model.apply(params, None, x) - y) ** 2)

    return run.train(loss, model.init(jax.random.key(0), x), (x, y))


@client(
    "haliax", "step = jax.jit(jaxmp.fuse(train_step))", ("none", "automatic", "shard_map"), why_not="no explicit axes"
)
def haliax(run):
    import haliax as hax
    import haliax.nn as hnn
    import jax

    rows, width, hidden = hax.Axis("rows", BATCH), hax.Axis("width", WIDTH), hax.Axis("hidden", 64)
    model = hnn.MLP.init(width, hidden, 2 * WIDTH, 2, key=jax.random.key(0))

    def loss(model, x, y):
        x, y = (hax.named(a, (rows.resize(a.shape[0]), axis)) for a, axis in ((x, width), (y, hidden)))
        return hax.mean((model(x) - y) ** 2).scalar()

    return run.train(loss, model, (randoms(BATCH, WIDTH), randoms(BATCH, 64)))


@client(
    "penzai", "step = jax.jit(jaxmp.fuse(train_step))", ("none", "automatic", "shard_map"), why_not="no explicit axes"
)
def penzai(run):
    import jax
    import jax.numpy as jnp
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llamalike

    config = llamalike.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=WIDTH,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=1,
        vocab_size=VOCABULARY,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = llamalike.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    model, variables = pz.unbind_params(model, freeze=True)

    def loss(variables, ids, labels):
        logits = pz.bind_variables(model, variables)(pz.nx.wrap(ids).tag("batch", "seq"))
        logits = jax.nn.log_softmax(logits.unwrap("batch", "seq", "vocabulary"))
        return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))

    return run.train(loss, variables, (tokens(BATCH, LENGTH), tokens(BATCH, LENGTH, seed=1)))


@client("optax", "step = jax.jit(jaxmp.fuse(train_step))", bound=1e-3)
def optax_muon(run):
    import jax
    import jax.numpy as jnp
    import optax

    params = [randoms(WIDTH, 64, seed=1) / 8, randoms(64, WIDTH, seed=2) / 8]

    def loss(params, x, y):
        return jnp.mean((jax.nn.relu(x @ params[0]) @ params[1] - y) ** 2)

    batch = randoms(BATCH, WIDTH), randoms(BATCH, WIDTH, seed=3)
    return run.train(loss, params, batch, optax.contrib.muon(1e-2))


@client("flash-attention-jax", "step = jax.jit(jaxmp.fuse(train_step))", ("none", "automatic"), why_not="its scans")
def flash_attention(run):
    import jax.numpy as jnp
    from flash_attention_jax import causal_flash_attention

    params = {name: randoms(WIDTH, WIDTH, seed=i) / 6 for i, name in enumerate("qkvo")}

    def loss(params, x, y):
        def heads(name):
            return jnp.moveaxis((x @ params[name]).reshape(*x.shape[:2], HEADS, -1), 1, 2)

        attended = causal_flash_attention(heads("q"), heads("k"), heads("v"))
        return jnp.mean((jnp.moveaxis(attended, 1, 2).reshape(x.shape) @ params["o"] - y) ** 2)

    return run.train(loss, params, (randoms(BATCH, LENGTH, WIDTH), randoms(BATCH, LENGTH, WIDTH, seed=9)))


def qwix_step(run, provider, is_training):
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    x, y = randoms(BATCH, WIDTH), randoms(BATCH, WIDTH, seed=1)
    graph, params = nnx.split(qwix.quantize_model(MLP(nnx.Rngs(0)), provider, x))
    if is_training:
        return run.train(lambda params, x, y: jnp.mean((nnx.merge(graph, params)(x) - y) ** 2), params, (x, y))
    return inference(run, lambda params, x: nnx.merge(graph, params)(x), params, x)


def inference(run, apply, params, x):
    import jax

    apply, params, (x,) = jax.jit(run.fuse(apply)), run.params(params), run.batch(x)
    while True:
        yield apply(params, x), params


QWIX_PLACES = ("none", "automatic")
NOT_QWIX = "qwix's rules of differentiation give no types of explicit axes or shard_map"
QWIX_LINE = "step = jax.jit(jaxmp.fuse(train_step))"


@client("qwix", QWIX_LINE, QWIX_PLACES, bound=2e-2, why_not=NOT_QWIX)
def qwix_training_int8(run):
    import qwix

    rules = [qwix.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")]
    return qwix_step(run, qwix.QtProvider(rules), is_training=True)


@client("qwix", QWIX_LINE, QWIX_PLACES, bound=5e-2, why_not=NOT_QWIX)
def qwix_training_fp8(run):
    import qwix

    rules = [qwix.QtRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2")]
    return qwix_step(run, qwix.QtProvider(rules), is_training=True)


@client("qwix", "apply = jax.jit(jaxmp.fuse(model))", FLAX_PLACES, bound=1e-2, why_not="inference is not mapped")
def qwix_inference_int8(run):
    import qwix

    return qwix_step(run, qwix.PtqProvider([qwix.QuantizationRule(weight_qtype="int8")]), is_training=False)


@client("qwix", "apply = jax.jit(jaxmp.fuse(model))", FLAX_PLACES, bound=1e-2, why_not="inference is not mapped")
def qwix_inference_fp8(run):
    import qwix

    rule = qwix.QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn")
    return qwix_step(run, qwix.PtqProvider([rule]), is_training=False)


@client("aqtp", QWIX_LINE, ("none", "automatic"), bound=2e-2, why_not="AQT's rounding knows no other axes")
def aqt(run):
    import jax
    import jax.numpy as jnp
    from aqt.jax.v2 import config
    from aqt.jax.v2.flax import aqt_flax
    from flax import linen as nn

    quantized = functools.partial(aqt_flax.AqtDotGeneral, config.fully_quantized(fwd_bits=8, bwd_bits=8))
    model = nn.Sequential(
        [nn.Dense(64, dot_general_cls=quantized), nn.relu, nn.Dense(WIDTH, dot_general_cls=quantized)]
    )
    x, y = randoms(BATCH, WIDTH), randoms(BATCH, WIDTH, seed=1)

    def loss(params, x, y):
        return jnp.mean((model.apply(params, x, rngs={"params": jax.random.key(1)}) - y) ** 2)

    return run.train(loss, model.init(jax.random.key(0), x), (x, y))
