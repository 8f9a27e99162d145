"""The mixtures of experts of `jaxmp.flax` and `jaxmp.equinox` against a loop over tokens and experts. Without these
tests, a token could reach a wrong expert, gates could belong to another expert, and a gradient could be one rank's
part."""

import functools

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp.equinox
import jaxmp.flax

WIDTH, HIDDEN, EXPERTS, TOKENS = 6, 8, 4, 8
NAMES = ("router", "gate", "up", "down")


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in zip(NAMES, shapes, strict=True)}


def dense(params, x, top_k, scores, normalize):
    """Applies every expert to every token; the gates of experts that are not chosen are zero."""
    tokens = x.reshape(-1, WIDTH)
    logits = tokens @ params["router"]
    each = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    least = jnp.sort(each, axis=-1)[:, -top_k][:, None]
    chosen = each >= least
    gates = jnp.where(chosen, each, 0)
    gates = gates / gates.sum(-1, keepdims=True) if normalize else gates
    h = jax.nn.silu(jnp.einsum("tk,gkh->gth", tokens, params["gate"])) * jnp.einsum("tk,gkh->gth", tokens, params["up"])
    y = jnp.einsum("tg,gth,ghn->tn", gates, h, params["down"])
    part = (each / each.sum(-1, keepdims=True)).mean(0)
    return y.reshape(x.shape), EXPERTS * (chosen.mean(0) / top_k * part).sum()


def of_flax(params, x, **options):
    graph, state = nnx.split(jaxmp.flax.MoE(WIDTH, HIDDEN, num_experts=EXPERTS, rngs=nnx.Rngs(0), **options))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(x)


def of_equinox(params, x, **options):
    layer = jaxmp.equinox.MoE(WIDTH, HIDDEN, num_experts=EXPERTS, key=jax.random.key(0), **options)
    return equinox.tree_at(lambda m: [getattr(m, name) for name in NAMES], layer, [params[name] for name in NAMES])(x)


def passes(f, params, x):
    """Returns value and gradients: (total, (y, loss)), and the gradients in params and x."""

    def total(params, x):
        y, loss = f(params, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum() + 3 * loss, (y, loss)

    return jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)


def judge(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=2e-4)


X = jnp.asarray(np.random.default_rng(1).normal(size=(2, TOKENS // 2, WIDTH)), jnp.float32)
LAYERS = {"flax": of_flax, "equinox": of_equinox}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "options",
    [{"top_k": 2}, {"top_k": 1, "normalize": False}, {"top_k": 3, "scores": "sigmoid"}],
    ids=["Mixtral", "Switch", "DeepSeek"],
)
def test_published_forms(layer, options):
    theirs = functools.partial(dense, **({"scores": "softmax", "normalize": True} | options))
    both = functools.partial(LAYERS[layer], **options), theirs
    judge(*(jax.jit(functools.partial(passes, f))(params_of(), X) for f in both))


@pytest.mark.parametrize("layer", LAYERS)
def test_bits_of_a_token_are_those_of_the_token_alone(layer):
    ours = functools.partial(LAYERS[layer], top_k=2, activation="relu", determinism="batch")
    run, x = jax.jit(lambda x: ours(params_of(), x)[0]), jnp.concatenate([X.reshape(-1, WIDTH)] * 9)
    many = run(x)
    for i in (0, 5, 40):
        np.testing.assert_array_equal(run(x[i : i + 1]), many[i : i + 1])


SPECS = {
    "experts and data": (P("data"), P("expert")),
    "experts, tokens over both": (P(("data", "expert")), P("expert")),
    "hidden features": (P("data"), P(None, None, "expert")),
    "weights gathered": (P("data"), P("data")),
    "sequences": (P("data", "expert"), P("expert")),  # a device's tokens are not contiguous
    "sequences over the experts' axis": (P(None, "expert"), P("expert")),
    "sequences and features": (P("data", None, "expert"), P("expert")),
}


@functools.cache
def of_mixtral(shape):
    theirs = functools.partial(dense, top_k=2, scores="softmax", normalize=True)
    return jax.jit(functools.partial(passes, theirs))(params_of(), X.reshape(shape))


@pytest.mark.parametrize("specs", SPECS)
def test_meshes(specs):
    of_x, of_w = SPECS[specs]
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = X.reshape((4, TOKENS // 4, WIDTH) if "sequences" in specs else (TOKENS, WIDTH))
    of_down = P(None, "expert") if specs == "hidden features" else of_w
    with jax.set_mesh(mesh):
        where = {"router": P(), "gate": of_w, "up": of_w, "down": of_down}
        params = {name: jax.device_put(x, NamedSharding(mesh, where[name])) for name, x in params_of().items()}
        x = jax.device_put(x, NamedSharding(mesh, of_x))
        got = jax.jit(functools.partial(passes, functools.partial(of_equinox, top_k=2)))(params, x)
        for name, gradient in got[1][0].items():
            assert gradient.sharding.is_equivalent_to(params[name].sharding, gradient.ndim)
        assert got[0][1][0].sharding.is_equivalent_to(x.sharding, x.ndim)
    judge(got, of_mixtral(x.shape))


def test_parameters_of_flax_lie_as_asked():
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        metadata = {"kernel_metadata": {"out_sharding": ("expert",)}}
        layer = jaxmp.flax.MoE(WIDTH, HIDDEN, num_experts=EXPERTS, top_k=2, rngs=nnx.Rngs(0), **metadata)
        assert jax.typeof(layer.up[...]).sharding.spec[0] == "expert"
        assert layer(X)[0].shape == X.shape


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_scores_that_underflow_have_finite_gates(layer, scores):
    """The gates equal the formula's limit: for large negative logits sigmoids are exponentials, and gates a softmax."""
    params, x = params_of(), jnp.asarray(np.random.default_rng(3).uniform(1, 2, (TOKENS, WIDTH)), jnp.float32)
    params["router"] = -jnp.abs(params["router"]) * 200 - 100
    want, _ = dense(params, x, 2, "softmax", True)

    def loss(params, x):
        y, balance = LAYERS[layer](params, x, top_k=2, scores=scores)
        return (y**2).sum() + balance, y

    gradients, y = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    assert all(jnp.isfinite(each).all() for each in jax.tree.leaves(gradients))


@pytest.mark.parametrize("layer", LAYERS)
def test_no_tokens(layer):
    got = passes(functools.partial(LAYERS[layer], top_k=2), params_of(), X[:0])
    judge(got, jax.tree.map(jnp.zeros_like, got))


def test_more_experts_than_there_are():
    with pytest.raises(ValueError, match=r"^jaxmp\.equinox\.MoE: top_k must be an integer from 1 to the 4 experts"):
        of_equinox(params_of(), X, top_k=5)
