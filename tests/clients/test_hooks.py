"""A layer that takes its product as an argument computes the same with jaxmp's, and the product is jaxmp's."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

# Other packages have warnings of their own.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("promotion_of_users")]
X = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)


def check(apply, plain, calls, *arrays):
    """Asserts that `apply` computes what `plain` does, also in gradients, with this many calls of jaxmp forward."""
    assert jaxmp.explain(apply, quiet=True)(*arrays).calls == calls
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), apply(*arrays), plain(*arrays))
    gradients = [jax.grad(lambda *arrays, f=f: jnp.sum(jnp.sin(f(*arrays))))(*arrays) for f in (apply, plain)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *gradients)


def of_flax(module):
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return (lambda params, x: nnx.merge(graph, params, rest)(x)), params


NNX = {
    "Linear": (1, lambda m, rngs, **o: m.Linear(16, 24, rngs=rngs, **o), {"dot_general": jaxmp.dot_general}),
    "LinearGeneral": (1, lambda m, rngs, **o: m.LinearGeneral(16, (4, 6), rngs=rngs, **o),
        {"dot_general": jaxmp.dot_general}),
    "Einsum": (1, lambda m, rngs, **o: m.Einsum("bti,ij->btj", (16, 24), rngs=rngs, **o), {"einsum_op": jaxmp.einsum}),
    "MultiHeadAttention": (4, lambda m, rngs, **o: m.MultiHeadAttention(4, 16, decode=False, rngs=rngs, **o),
        {"qkv_dot_general": jaxmp.dot_general, "out_dot_general": jaxmp.dot_general}),
}  # fmt: skip


@pytest.mark.parametrize("name", NNX)
def test_flax_nnx_takes_it(name):
    from flax import nnx

    calls, make, options = NNX[name]
    apply, params = of_flax(make(nnx, nnx.Rngs(0), **options))
    plain, _ = of_flax(make(nnx, nnx.Rngs(0)))
    check(apply, plain, calls, params, X)


@pytest.mark.parametrize(
    "options",
    [{"dot_general": jaxmp.dot_general}, {"dot_general_cls": lambda: jaxmp.dot_general}, {"dot_general_cls": None}],
    ids=["function", "factory", "class"],
)
def test_flax_linen_takes_it(options):
    from flax import linen

    import jaxmp.flax

    options = options if any(options.values()) else {"dot_general_cls": jaxmp.flax.DotGeneral}
    plain = linen.Dense(24)
    params = plain.init(jax.random.key(0), X)
    check(linen.Dense(24, **options).apply, plain.apply, 1, params, X)


def test_haliax_takes_it():
    hax = pytest.importorskip("haliax")

    axes = hax.Axis("in", 16), hax.Axis("out", 24)
    options = {"": {}, "jaxmp": {"dot_general": jax.tree_util.Partial(jaxmp.dot_general)}}
    layers = {name: hax.nn.Linear.init(*axes, key=jax.random.key(0), **o) for name, o in options.items()}
    rows = hax.Axis("rows", 32)
    apply, plain = (lambda layer, x: layer(hax.named(x, (rows, axes[0]))).array for _ in range(2))
    check(lambda x: apply(layers["jaxmp"], x), lambda x: plain(layers[""], x), 1, X.reshape(32, 16))


def test_aqt_takes_it():
    pytest.importorskip("aqt")
    from aqt.jax.v2 import config

    w = np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32)
    plain, ours = (config.fully_quantized(fwd_bits=8, bwd_bits=8, use_stochastic_rounding=False) for _ in range(2))
    ours.fwd.dot_general = ours.dlhs.dot_general = ours.drhs.dot_general = jaxmp.dot_general
    dimensions = ((1,), (0,)), ((), ())
    check(
        lambda x, w: ours(x, w, dimensions),
        lambda x, w: plain(x, w, dimensions),
        1,
        jnp.asarray(X.reshape(32, 16)),
        jnp.asarray(w),
    )


def test_qwix_takes_it():
    qwix = pytest.importorskip("qwix")
    from flax import nnx

    class Provider(qwix.QuantizationProvider):
        def get_intercept_map(self):
            return super().get_intercept_map() | {"jax.lax.dot_general": jaxmp.dot_general}

    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    apply, params = of_flax(qwix.quantize_model(model, Provider([]), X))
    plain, _ = of_flax(model)
    check(apply, plain, 1, params, X)


@pytest.mark.skipif(not importlib.util.find_spec("maxtext"), reason="MaxText needs Python 3.12")
def test_maxtext_takes_it():
    from flax import nnx
    from maxtext.layers import linears, quantizations

    import jaxmp.flax

    class Quantization(quantizations.Quantization):
        needs_apply_rngs, quant_mode = False, None

        def dot_general_cls(self, mesh_axes=()):
            return jaxmp.flax.DotGeneral

    layers = [linears.DenseGeneral(16, 24, quant=quant, rngs=nnx.Rngs(0)) for quant in (Quantization(), None)]
    (apply, params), (plain, _) = map(of_flax, layers)
    check(apply, plain, 1, params, X)
