"""State through `jaxmp.fuse`: pytrees and Flax NNX objects are arguments, and are returned or changed. State that
leaves a function in another way raises an error, as under `jax.checkpoint`. Without these tests, a fused train step
could leave a model or an optimizer unchanged."""

import functools

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors as nnx_errors
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

X = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (4, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (4, 4)), jnp.float32)


def same(f):
    return f


def assert_same(want, got):
    """Asserts equal containers, and equal values and types of arrays; other leaves must be identical or equal."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if isinstance(w, jax.Array):
            assert not isinstance(g, jax.core.Tracer)
            assert jax.typeof(w) == jax.typeof(g)
            np.testing.assert_allclose(w, g, rtol=1e-5, atol=1e-6)
        else:
            assert type(w) is type(g)
            assert w is g or np.all(w == g)


def through_a_list(wrap, x):
    """Reads, after the call, a value that `fn` put into a list."""
    kept = []
    wrap(lambda: kept.append(jax.nn.relu(x @ W)))()
    return jnp.sum(kept[0] * x)


def through_a_scan(x):
    layer = jax.checkpoint(lambda c, w: (c + through_a_list(jaxmp.fuse, c * w), None))
    return jnp.sum(jax.lax.scan(layer, x, jnp.stack([W, X]))[0])


@pytest.mark.parametrize(
    "program",
    [
        through_a_list,
        lambda wrap, x: jaxmp.fuse(functools.partial(through_a_list, wrap))(x),
        lambda _, x: jax.jit(jax.grad(through_a_scan))(x),
    ],
    ids=["eager", "fuse", "jit, grad, scan"],
)
def test_a_value_left_in_a_list_raises_at_its_use(program):
    with pytest.raises(jax.errors.UnexpectedTracerError, match="traced for fuse"):
        program(jaxmp.fuse, X)


def test_each_call_runs_the_side_effects_of_fn_once():
    calls = []
    fused = jaxmp.fuse(lambda x: (calls.append(1), x @ W)[1])
    for count in (1, 2):
        assert_same(X @ W, fused(X))
        assert len(calls) == count


def test_lists_and_dicts_of_arguments_are_copies():
    given = {"x": X, "layers": [W]}

    def program(state):
        state["layers"].append(2 * state.pop("x") @ W)
        return state

    assert_same({"layers": [W, 2 * X @ W]}, jaxmp.fuse(program)(given))
    assert_same({"x": X, "layers": [W]}, given)


def test_references_change():
    def program(ref, x):
        ref[...] += x @ W
        read = ref[...]
        ref[0, 0] = 7.0
        return read

    def run(f):
        ref, closed = jax.new_ref(jnp.zeros((4, 4))), jax.new_ref(jnp.zeros((4, 4)))
        read = f(program)(ref, X), f(lambda x: program(closed, x))(X)
        again = jax.jit(lambda x: f(program)(ref, x))(X)
        return read, again, ref[...], closed[...]

    assert_same(run(same), run(jaxmp.fuse))


def test_errors_of_fn_pass():
    def program(x):
        raise ValueError(f"of the user, {(x @ W).shape}")

    with pytest.raises(ValueError, match="of the user"):
        jaxmp.fuse(program)(X)


def test_arguments_and_results_that_are_no_arrays_are_unchanged():
    def program(x, dtype, *, name):
        numbers = (2, 2.5, np.float32(2), np.arange(3), jnp.asarray(2.5), jnp.asarray(np.arange(3)), jax.jit(same)(3.0))
        return (x @ W).astype(dtype), {"dtype": dtype, name: jnp.tanh, "none": None}, numbers, x

    options = {"dtype": np.float16, "name": "f"}
    want, got = (f(program)(X, **options) for f in (same, jaxmp.fuse))
    assert_same(want, got)
    assert got[-1] is X
    assert_same(program(X, jnp.bfloat16, name="g"), jaxmp.fuse(program)(X, jnp.bfloat16, name="g"))
    for f in (same, jaxmp.fuse):
        text = str(jax.make_jaxpr(f(lambda: (jnp.asarray(2.5), 3, np.arange(3))))().out_avals)
        of = "float32[], weak_type=True", "int32[], weak_type=True", "int32[3]"
        assert text == f"[{', '.join(f'ShapedArray({each})' for each in of)}]"


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 gives such a result the mesh of another")
def test_a_number_of_one_device_has_no_mesh(mesh_of):
    """JAX finds compiled primitives by their operands' shardings, so an earlier call on a mesh must have no effect."""

    def gradient(x):
        return jax.value_and_grad(lambda x: jnp.mean(x**2))(x)

    placed = jax.device_put(X, NamedSharding(mesh_of({"x": 4}, AxisType.Auto), P("x")))
    for x in (placed, X):
        assert_same(gradient(x), jaxmp.fuse(gradient)(x))


def test_without_jit_fn_runs_as_it_is():
    def program(x):
        return x @ W if x.sum() > -1e3 else float(x.sum())

    with jax.disable_jit():
        assert_same(program(X), jaxmp.fuse(program)(X))
        assert jaxmp.explain(jaxmp.fuse(lambda x: jax.nn.relu(x @ W)), quiet=True)(X).calls == 1


def test_scalars_that_change_compile_nothing_anew():
    fused = jaxmp.fuse(lambda x, step: x @ W * step)
    fused(X, jnp.float32(0))
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr(jax.stages.Lowered, "compile", lambda *args, **kwargs: compiled.append(args))
        for step in range(1, 3):
            assert_same(X @ W * step, fused(X, jnp.float32(step)))
    assert not compiled


def test_reports_take_any_argument():
    def program(state, x, dtype):
        state["kept"] = x @ W
        return same, state, (x @ W).astype(dtype)

    for f in (same, jaxmp.fuse):
        rows = jaxmp.explain(f(program), quiet=True)({"kept": X}, X, np.float32).rows
        assert len(rows) == (2 if f is jaxmp.fuse else 0)
    assert not jaxmp.audit(program, batch_argnums=1, quiet=True)({"kept": X}, X, np.float32).outputs


class Model(nnx.Module):
    """Has a product, a running mean, a dropout and a count of calls."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(4))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        y = self.linear(x)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * y.mean(0)
        self.calls += 1
        return self.dropout(nnx.relu(y - self.mean[...]))


def loss_of(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def train_step(model, optimizer, x, loss_of=loss_of):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def trained(step):
    """Returns losses, and the state of the model and of the optimizer."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses = [step(model, optimizer, X) for _ in range(2)]
    return losses, state_of(model), state_of(optimizer)


@functools.cache
def trained_plainly():
    return trained(nnx.jit(train_step))


def state_of(module):
    """Returns the arrays of a module; for random keys, their data."""
    leaves = jax.tree.leaves(nnx.state(module))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


STEPS = {
    "nnx.jit(fuse(step))": lambda f: nnx.jit(f(train_step)),
    "fuse(nnx.jit(step))": lambda f: f(nnx.jit(train_step)),
    "the gradient of fuse(loss)": lambda f: functools.partial(train_step, loss_of=f(loss_of)),
    "fuse of fuse": lambda f: nnx.jit(f(functools.partial(train_step, loss_of=f(loss_of)))),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_train_step_of_flax_trains(name):
    got = trained(STEPS[name](jaxmp.fuse))
    assert got[0][0] != got[0][1]
    assert_same(trained_plainly(), got)


class Outer(nnx.Module):
    """Fuses an inner layer, which is an argument or closed over."""

    def __init__(self, wrap, *, is_argument):
        self.inner, self.wrap, self.is_argument = Model(nnx.Rngs(0)), wrap, is_argument

    def __call__(self, x):
        if self.is_argument:
            return self.wrap(lambda model, *, x: model(x))(self.inner, x=x)
        return self.wrap(lambda x: self.inner(x))(x)


def test_a_layer_of_flax_fuses_a_part_of_itself():
    def run(f):
        outer = Outer(f, is_argument=True)
        gradients = nnx.grad(lambda outer, x: jnp.sum(outer(x)))(outer, X)
        return nnx.jit(Outer.__call__)(outer, X), outer(X), jax.tree.leaves(gradients), state_of(outer)

    assert_same(run(same), run(jaxmp.fuse))


@pytest.mark.parametrize("run", [Outer.__call__, nnx.jit(Outer.__call__), jaxmp.fuse(Outer.__call__)])
def test_a_changed_module_that_fn_closes_over_raises(run):
    outer = Outer(jaxmp.fuse, is_argument=False)
    before = state_of(outer)
    with pytest.raises(nnx_errors.TraceContextError) as raised:
        run(outer, X)
    assert [note.startswith("jaxmp.fuse: pass a module") for note in raised.value.__notes__].count(True) == 1
    assert_same(before, state_of(outer))
    outer.inner.mean[...] = jnp.ones(4)  # reading is allowed
    assert_same(X @ outer.inner.linear.kernel[...], jaxmp.fuse(lambda x: x @ outer.inner.linear.kernel[...])(X))


def test_modules_of_flax_that_share_state_are_made_and_returned():
    def run(f):
        made = f(lambda: Model(nnx.Rngs(1)))()
        assert f(lambda model: model)(made) is made
        other = Model(nnx.Rngs(2))
        other.linear = made.linear

        def change(models, *, scale):
            models[0].linear.kernel[...] *= scale
            models[0].added = nnx.Param(models[1].linear(X))
            return models[1], models[1](X)

        returned, y = f(change)([made, other], scale=X[0, 0])
        assert returned is other
        assert other.linear is made.linear
        return y, state_of(made), state_of(other), other.calls

    assert_same(run(same), run(jaxmp.fuse))


def test_caches_metrics_and_transforms_of_flax():
    def run(f):
        attention = nnx.MultiHeadAttention(2, 4, 4, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((1, 3, 4))
        metric = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        stack = nnx.vmap(Model, in_axes=0, out_axes=0)(nnx.Rngs(0).split(2))

        def decode(attention, metric, x):
            y = attention(x)
            metric.update(loss=jnp.mean(y), logits=y[0], labels=jnp.zeros(1, jnp.int32))
            return y

        def layers(stack, x):
            layer = nnx.remat(lambda model, x: model(x))
            return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, x)

        decoded = nnx.jit(f(decode))
        results = decoded(attention, metric, X[None, :1]), decoded(attention, metric, X[None, 1:2]), f(layers)(stack, X)
        return results, metric.compute(), state_of(attention), state_of(stack)

    assert_same(run(same), run(jaxmp.fuse))


def equinox_step(model, x, loss_of=lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2)):
    loss, gradients = equinox.filter_value_and_grad(loss_of)(model, x)
    return equinox.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradients)), loss


@pytest.mark.parametrize(
    "wrap", [lambda f: equinox.filter_jit(jaxmp.fuse(f)), lambda f: jaxmp.fuse(equinox.filter_jit(f))]
)
def test_a_train_step_of_equinox_returns_the_model(wrap):
    def run(step):
        model, losses = equinox.nn.MLP(4, 2, 4, 1, key=jax.random.key(0)), []
        for _ in range(2):
            model, loss = step(model, X)
            losses.append(loss)
        return model, losses

    assert_same(run(equinox.filter_jit(equinox_step)), run(wrap(equinox_step)))


def test_state_of_equinox():
    class Normed(equinox.Module):
        linear: equinox.nn.Linear
        norm: equinox.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def run(f):
        def make():
            return Normed(equinox.nn.Linear(4, 3, key=jax.random.key(0)), equinox.nn.BatchNorm(3, "rows", mode="batch"))

        model, state = equinox.nn.make_with_state(make)()

        def rows(model, state, x):
            return jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(x, state)

        y, state = equinox.filter_jit(f(rows))(model, state, X)
        return y, f(rows)(model, state, X)[0]

    assert_same(run(same), run(jaxmp.fuse))


def test_a_module_of_another_trace_may_be_read():
    model, x = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    fused = jax.jit(jaxmp.fuse(lambda model, x: model(x)), static_argnums=0)
    np.testing.assert_allclose(fused(model, x), model(x), rtol=1e-6)


def test_what_flax_has_split_before_stays_split():
    """A program may fuse every function that Flax gives to `jax.jit`."""
    jit, x = jax.jit, jnp.ones((2, 8))

    @functools.wraps(jit)
    def fused_jit(fn, **options):
        return jit(jaxmp.fuse(fn), **options)

    def step(model, x):
        model.count[...] += 1
        return model(x)

    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    model.count = nnx.Variable(jnp.zeros(()))
    want = model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", fused_jit)
        make, train = nnx.jit(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(1))), nnx.jit(step)
        made = make()
        np.testing.assert_allclose(train(model, x), want, rtol=1e-6)
    assert float(model.count[...]) == 1
    assert made.kernel.shape == (8, 4)
