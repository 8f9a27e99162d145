"""Clients of the sciences and of reinforcement learning: solvers, samplers, searches, and models of sequences."""

from models import client
from programs import NO_EXPLICIT, SCIENCE_PLACES
from runs import randoms, tokens

STEP_LINE = "step = jax.jit(jaxmp.fuse(train_step))"
ONE_BATCH = "its program is over one batch"


def accumulating(steps=2):
    """Returns an optimizer that adds the gradients of two steps before it changes a parameter."""
    import optax

    return optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=steps)


@client("recurrentgemma", STEP_LINE, ("none", "automatic"), why_not="others were not tried")
def recurrentgemma(run):
    """Trains a recurrent and an attention block with rematerialisation; an update adds the gradients of two steps."""
    import jax
    import jax.numpy as jnp
    import optax
    from recurrentgemma import jax as rg

    kinds = rg.TemporalBlockType.RECURRENT, rg.TemporalBlockType.ATTENTION
    model = rg.Griffin(rg.GriffinConfig(32, 16, 48, 2, kinds, True, 4, 30.0))
    positions = jnp.tile(jnp.arange(8), (8, 1))

    def loss(params, inputs, labels):
        logits, _ = model.apply(params, inputs, positions, return_cache=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    batch = tokens(8, 8), tokens(8, 8, seed=1)
    params = model.init(jax.random.key(0), jnp.asarray(batch[0]), positions)
    return run.train(loss, params, batch, accumulating())


@client("brax", STEP_LINE)
def brax(run):
    """Trains by brax's loss of proximal policy optimization; an update adds the gradients of two steps."""
    import jax
    import jax.numpy as jnp
    from brax.training import types
    from brax.training.agents.ppo import losses, networks

    network = networks.make_ppo_networks(6, 2, policy_hidden_layer_sizes=(16, 16), value_hidden_layer_sizes=(16, 16))
    keys = jax.random.split(jax.random.key(0), 3)
    params = losses.PPONetworkParams(network.policy_network.init(keys[0]), network.value_network.init(keys[1]))

    def loss(params, observation, following, action, distribution, log_prob, reward):
        policy = {"raw_action": action, "log_prob": log_prob, "distribution_params": distribution}
        extras = {"policy_extras": policy, "state_extras": {"truncation": jnp.zeros_like(reward)}}
        data = types.Transition(observation, action, reward, jnp.ones_like(reward), following, extras)
        return losses.compute_ppo_loss(params, None, data, keys[2], network)[0]

    shapes = (8, 4, 6), (8, 4, 6), (8, 4, 2), (8, 4, 4), (8, 4), (8, 4)
    return run.train(loss, params, [randoms(*shape, seed=i) for i, shape in enumerate(shapes)], accumulating())


@client("blackjax", "step = jax.jit(jaxmp.fuse(step))", SCIENCE_PLACES, why_not=ONE_BATCH)
def blackjax(run):
    """Draws the weights of a network by Hamiltonian Monte Carlo."""
    import blackjax as bj
    import jax
    import jax.numpy as jnp

    def step(key, params, x, y):
        def log_density(params):
            error = jnp.tanh(x @ params["w1"]) @ params["w2"] - y
            return -(jnp.sum(error**2) + sum(jnp.sum(w**2) for w in params.values())) / 8

        sampler = bj.hmc(log_density, step_size=0.01, inverse_mass_matrix=jnp.ones(48), num_integration_steps=3)
        state, info = sampler.step(key, sampler.init(params))
        return state.position, info.acceptance_rate

    params = run.params({"w1": randoms(4, 8), "w2": randoms(8, 2, seed=1)})
    x, y = run.batch(randoms(16, 4, seed=2), randoms(16, 2, seed=3))
    step = jax.jit(run.fuse(step))
    for key in jax.random.split(jax.random.key(0), 100):
        params, rate = step(key, params, x, y)
        yield params, rate


@client("mctx", STEP_LINE, SCIENCE_PLACES[:2], why_not=ONE_BATCH)
def mctx(run):
    """Trains a policy towards what a tree search with its network finds (Gumbel MuZero)."""
    import jax
    import jax.numpy as jnp
    import mctx
    import optax

    params = {"dynamics": randoms(8, 16) / 3, "policy": randoms(16, 4, seed=1) / 4, "value": randoms(16, 2, seed=2) / 4}

    def predict(params, embedding, action):
        hidden = jnp.tanh(jnp.concatenate([embedding[:, :4], jax.nn.one_hot(action, 4)], axis=1) @ params["dynamics"])
        return hidden, hidden @ params["policy"], *jnp.tanh(hidden @ params["value"]).T

    def expand(params, _, action, embedding):
        hidden, logits, value, reward = predict(params, embedding, action)
        found = {"reward": reward, "discount": jnp.full_like(value, 0.9), "prior_logits": logits, "value": value}
        return mctx.RecurrentFnOutput(**found), hidden

    def loss(params, observation, _):
        start = jnp.zeros(observation.shape[0], jnp.int32)
        hidden, logits, value, _ = predict(params, observation, start)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=hidden)
        fixed = jax.lax.stop_gradient((params, root))
        found = mctx.gumbel_muzero_policy(fixed[0], jax.random.key(0), fixed[1], expand, num_simulations=4)
        return optax.softmax_cross_entropy(logits, found.action_weights).mean()

    return run.train(loss, params, (randoms(8, 4, seed=3), randoms(8, 1)))


@client("optimistix", STEP_LINE, SCIENCE_PLACES[:2], why_not=NO_EXPLICIT)
def optimistix(run):
    """Trains features through the solution of a least-squares fit; an update adds the gradients of two steps."""
    import jax.numpy as jnp
    import optimistix as optx

    def residual(w, rows):
        features, y = rows
        return features @ w - y, w / 10

    def loss(params, x, y):
        features = jnp.tanh(x @ params["w"])
        solver = optx.LevenbergMarquardt(rtol=1e-3, atol=1e-3)
        w = optx.least_squares(residual, solver, jnp.zeros((8, 2)), (features, y), max_steps=16, throw=False).value
        return jnp.mean((features @ w - y) ** 2)

    return run.train(loss, {"w": randoms(4, 8)}, (randoms(16, 4, seed=1), randoms(16, 2, seed=2)), accumulating())


@client("diffrax", STEP_LINE, SCIENCE_PLACES[:2], why_not=NO_EXPLICIT)
def diffrax(run):
    """Trains a neural differential equation; an update adds the gradients of two steps."""
    import diffrax as dfx
    import jax.numpy as jnp

    def field(t, y, params):
        return jnp.tanh(y @ params["in"]) @ params["out"]

    def loss(params, x, y):
        found = dfx.diffeqsolve(dfx.ODETerm(field), dfx.Heun(), 0.0, 1.0, 0.25, x, params, max_steps=8)
        return jnp.mean((found.ys[-1] - y) ** 2)

    params = {"in": randoms(4, 16) / 2, "out": randoms(16, 4, seed=1) / 4}
    return run.train(loss, params, (randoms(8, 4, seed=2), randoms(8, 4, seed=3)), accumulating())


@client("gpjax", STEP_LINE, ("none", "automatic"), why_not=ONE_BATCH)
def gpjax(run):
    """Trains a Gaussian process on its marginal likelihood."""
    import equinox as eqx
    import gpjax as gpx
    import jax.numpy as jnp

    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=gpx.kernels.RBF())
    model = prior * gpx.likelihoods.Gaussian()
    arrays, others = eqx.partition(model, eqx.is_array)

    def loss(arrays, x, y):
        return -gpx.objectives.conjugate_mll(eqx.combine(arrays, others), gpx.Dataset(X=x, y=y))

    x = randoms(16, 2)
    return run.train(loss, arrays, (x, jnp.sin(x[:, :1])))


@client("jax-md", STEP_LINE, ("none",), why_not="its graph is one system")
def jax_md(run):
    """Trains a graph network on forces, so the step has second derivatives."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax_md import energy, space

    displacement, _ = space.free()
    energy_of = energy.graph_network(displacement, 3.0, key=jax.random.key(0), n_recurrences=1, mlp_sizes=(8, 8))
    graph, params = nnx.split(energy_of.model)

    def loss(params, positions, forces):
        def energies(positions):
            return jnp.sum(jax.vmap(nnx.merge(graph, params))(positions))

        return jnp.mean((jax.grad(energies)(positions) + forces) ** 2)

    return run.train(loss, params, (randoms(4, 5, 3), randoms(4, 5, 3, seed=1)))
