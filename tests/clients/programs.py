"""Clients that accumulate gradients, serve, or solve equations."""

import functools

from models import client
from runs import randoms

SCIENCE_PLACES = ("none", "automatic", "explicit")
NO_EXPLICIT = "on explicit axes JAX refuses its sums over rows"


@client("optax", "step = jax.jit(jaxmp.fuse(train_step))", SCIENCE_PLACES, why_not="its loop is over one batch")
def optax_microbatches(run):
    """Trains a gated layer; a step adds the gradients of four microbatches in a scan."""
    import jax
    import jax.numpy as jnp

    def loss(params, x, y):
        hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    def accumulated(params, xs, ys):
        def add(sums, batch):
            value, gradients = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, sums, (value, gradients)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        return jax.lax.scan(add, zeros, (xs, ys))[0]

    def train_step(params, xs, ys):
        value, gradients = accumulated(params, xs, ys)
        return value / 4, jax.tree.map(lambda w, g: w - 0.02 * g, params, gradients)

    params = run.params({"gate": randoms(16, 32) / 4, "up": randoms(16, 32, seed=1) / 4, "down": randoms(32, 16) / 6})
    xs, ys = (
        run.put(a, jax.sharding.PartitionSpec(None, "data")) for a in (randoms(4, 8, 16), randoms(4, 8, 16, seed=5))
    )
    step = jax.jit(run.fuse(train_step), donate_argnums=0)
    while True:
        value, params = step(params, xs, ys)
        yield value, jax.tree.map(jax.numpy.copy, params)


@client("flax", "decode = jax.jit(jaxmp.fuse(decode), donate_argnums=1)", SCIENCE_PLACES, why_not="the cache is whole")
def flax_serving(run):
    """Decodes with Flax Linen: the cache is donated to each step, and the next token is the step's own."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Dense(16)(jax.nn.one_hot(tokens, 32))  # on explicit axes JAX refuses Embed's gather
            x = x + nn.MultiHeadDotProductAttention(4, decode=True)(nn.LayerNorm()(x))
            return nn.Dense(32)(x + nn.Dense(16)(nn.gelu(nn.Dense(32)(x))))

    model = Decoder()
    whole = model.init(jax.random.key(0), jnp.zeros((8, 16), jnp.int32))
    params, cache = run.params(whole["params"]), whole["cache"]
    cache = jax.tree.map(lambda x: run.batch(x)[0] if x.ndim else x, cache)

    @functools.partial(jax.jit, donate_argnums=1)
    @run.fuse
    def decode(params, cache, tokens):
        logits, changed = model.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return changed["cache"], jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), logits

    (tokens,) = run.batch(jnp.ones((8, 1), jnp.int32))
    while True:
        cache, tokens, logits = decode(params, cache, tokens)
        yield tokens, logits


@client("lineax", "step = jax.jit(jaxmp.fuse(train_step))", SCIENCE_PLACES[:2], why_not=NO_EXPLICIT)
def lineax(run):
    """Trains features for a ridge regression; the gradient goes through the Cholesky and the CG solver."""
    import jax.numpy as jnp
    import lineax as lx

    def loss(params, x, y):
        features = jnp.tanh(x @ params["w"])
        gram = features.T @ features + jnp.eye(8)
        spd = lx.MatrixLinearOperator(gram, lx.positive_semidefinite_tag)
        found = lx.linear_solve(spd, features.T @ y[:, 0], lx.Cholesky()).value
        other = lx.linear_solve(spd, features.T @ y[:, 1], lx.CG(rtol=1e-5, atol=1e-5)).value
        return jnp.mean((features @ jnp.stack([found, other], axis=1) - y) ** 2)

    return run.train(loss, {"w": randoms(4, 8)}, (randoms(16, 4, seed=1), randoms(16, 2, seed=2)))


@client(
    "numpyro",
    "update = jax.jit(jaxmp.fuse(svi.update))",
    SCIENCE_PLACES,
    why_not="its update has no axis to average over",
)
def numpyro(run):
    """Infers a Bayesian network by stochastic variational inference, with Adam."""
    import jax
    import jax.numpy as jnp
    import numpyro as npr
    from numpyro import distributions as dist

    def model(x, y):
        w1 = npr.sample("w1", dist.Normal(jnp.zeros((4, 8)), 1.0).to_event(2))
        w2 = npr.sample("w2", dist.Normal(jnp.zeros((8, 2)), 1.0).to_event(2))
        npr.sample("y", dist.Normal(jax.nn.relu(x @ w1) @ w2, 0.1).to_event(2), obs=y)

    guide = npr.infer.autoguide.AutoNormal(model)
    svi = npr.infer.SVI(model, guide, npr.optim.Adam(0.01), npr.infer.Trace_ELBO())
    x, y = run.batch(randoms(16, 4), randoms(16, 2, seed=1))
    state = svi.init(jax.random.key(0), x, y)
    update = jax.jit(run.fuse(svi.update))
    while True:
        state, value = update(state, x, y)
        yield value, svi.get_params(state)
