"""What `fn` changes in place, and what it takes and returns beside arrays, through `jaxmp.fuse`.

Without these a fused train step could leave a model, an optimizer or a list as it was, and training stand still; or put
a traced array where an array belongs.
"""

import collections
import contextvars
import dataclasses
import functools
from typing import NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
    """Equal containers, values and types of arrays; other leaves are the same objects, or equal."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if isinstance(w, jax.Array):
            assert not isinstance(g, jax.core.Tracer)
            assert jax.typeof(w) == jax.typeof(g)
            np.testing.assert_allclose(w, g, rtol=1e-5, atol=1e-6)
        else:
            assert type(w) is type(g)
            assert w is g or np.all(w == g)


# Objects of Python ------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Record:
    last: object = None
    calls: int = 0


class Slots:
    __slots__ = ("empty", "last")


class Counted:
    last = None


class Marked(tuple):
    """A tuple with attributes."""


class Watched(list):
    """A list that counts what is put into it."""

    count = 0

    def __setitem__(self, i, x):
        self.count += 1
        super().__setitem__(i, x)


def waiting(y):
    """A generator, which keeps y while it waits."""
    kept = (y, 1)
    yield y
    yield y * kept[0]


GLOBAL = {}
CONTEXT = contextvars.ContextVar("kept")
IN_A_TUPLE = contextvars.ContextVar("kept in a tuple")


def change(state, y):
    """Everything in which a function may keep y: lists, attributes, closures and others. What is callable shows it."""
    state.setdefault("list", [0]).append(y)
    state["nested"] = [{"y": y}, collections.defaultdict(list)]
    state["nested"][1]["y"] += [y, 2 * y]
    state["tuple"] = (y, Pair(1, (y, [y, (y,)])))
    state["deque"] = functools.partial(list, collections.deque([y, (y,)]))
    state["partial"] = functools.partial(lambda x: x, y)
    record = state.setdefault("record", Record())
    record.last, record.calls = y, record.calls + 1
    state["attributes"] = vars(record)
    slots = Slots()
    slots.last = (y,)
    state["slots"] = lambda: slots.last
    Counted.last = y
    state["class"] = lambda: Counted.last
    state["default"] = lambda kept=y: kept
    GLOBAL["y"] = state["global"] = [y]
    state["slice"] = lambda kept=[slice(y, (y, 1)), slice(y)]: [(x.start, x.stop) for x in kept]
    state["method"] = y.sum
    generator = waiting(y)
    next(generator)
    state["generator"] = lambda: next(generator)
    error = ValueError(y)
    state["error"] = lambda: error.args
    watched, marked = Watched([y]), Marked((y,))
    marked.first = y
    state["watched"] = lambda: (list(watched), watched.count)
    state["marked"] = lambda marked=marked: (tuple(marked), marked.first)
    CONTEXT.set(y)
    IN_A_TUPLE.set((y, 1))
    state["context"] = lambda: (CONTEXT.get(), IN_A_TUPLE.get())
    cached = functools.lru_cache(maxsize=2)(lambda n: (n * y, [y]))
    state["cache"] = lambda: cached(1)
    cached(1)

    def set_it(value):
        nonlocal kept
        kept = value

    kept = None
    set_it(y)
    state["closure"] = lambda: kept


def changed(f, transform):
    """What `f` leaves in an object after two calls, and what it returns: with functions called."""
    state = {}

    def program(x):
        y = x @ W
        change(state, y)
        return jnp.sum(y), state["tuple"], state["list"]

    run = f(program)
    results = [transform(run, X), transform(run, 2 * X)]
    assert transform is not called or all(result[2] is state["list"] for result in results)
    functions = {name: x() for name, x in state.items() if callable(x)}
    data = {name: x for name, x in state.items() if not callable(x) and name != "record"}
    return results, functions, dict(data, calls=state["record"].calls), GLOBAL["y"]


def called(f, x):
    return f(x)


def test_what_fn_changes_in_place_changes_as_without_fuse():
    assert_same(changed(same, called), changed(jaxmp.fuse, called))


def through_a_list(wrap, x):
    """What `fn` put into a list, read by the transformation around the call."""
    kept = []
    wrap(lambda: kept.append({"y": (jax.nn.relu(x @ W),)}))()
    return jnp.sum(kept[0]["y"][0] * x)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.grad,
        jax.vmap,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        jaxmp.fuse,
    ],
    ids=["jit", "grad", "vmap", "jit grad", "jvp", "fuse"],
)
def test_what_fn_changes_takes_part_in_transformations(transform):
    want, got = (transform(functools.partial(through_a_list, wrap))(X) for wrap in (same, jaxmp.fuse))
    assert_same(want, got)


def test_a_list_in_a_scan_of_remat_layers():
    def layers(wrap, x):
        return jax.lax.scan(jax.checkpoint(lambda c, w: (c + through_a_list(wrap, c * w), None)), x, jnp.stack([W, X]))[
            0
        ]

    gradients = [jax.jit(jax.grad(lambda x, wrap=wrap: jnp.sum(layers(wrap, x))))(X) for wrap in (same, jaxmp.fuse)]
    assert_same(*gradients)


def test_references_change_and_are_returned():
    def program(ref, x):
        ref[...] += x @ W
        read = ref[...]
        ref[0, 0] = 7.0
        return read, jax.new_ref(read)

    def run(f):
        ref = jax.new_ref(jnp.zeros((4, 4)))
        read, made = f(program)(ref, X)
        made[1, 1] = 0.0
        again = jax.jit(lambda x: f(program)(ref, x)[0])(X)
        return read, made[...], again, ref[...]

    assert_same(run(same), run(jaxmp.fuse))


def test_what_has_changed_where_fn_raises():
    kept = []

    def program(x):
        kept.append(x @ W)
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        jaxmp.fuse(program)(X)
    assert_same([X @ W], kept)


# What is no array -------------------------------------------------------------------------------------------------


def test_arguments_and_results_that_are_no_arrays_stay_what_they_are():
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
        assert (
            text
            == "[ShapedArray(float32[], weak_type=True), ShapedArray(int32[], weak_type=True), ShapedArray(int32[3])]"
        )


def test_results_that_are_no_pytrees():
    def program(x):
        kept = [x @ W]
        kept.append(kept)
        return {1: kept, "two": x @ W}

    want, got = (f(program)(X) for f in (same, jaxmp.fuse))
    assert_same([want[1][0], want["two"]], [got[1][0], got["two"]])
    assert got[1][1] is got[1]


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 gives such a result the mesh of another")
def test_a_number_of_one_device_has_no_mesh(mesh_of):
    """Whatever the same program was given before: JAX finds compiled primitives by where their operands lie."""

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


def test_reports_count_what_fn_changes_and_take_any_argument():
    def program(state, x, dtype):
        state["kept"] = x @ W
        return same, (x @ W).astype(dtype)

    for f in (same, jaxmp.fuse):
        rows = jaxmp.explain(f(program), quiet=True)({"kept": X}, X, np.float32).rows
        assert len(rows) == (2 if f is jaxmp.fuse else 0)
    assert not jaxmp.audit(program, {"kept": X}, X, np.float32, batch_argnums=1, quiet=True).outputs


# Flax NNX ---------------------------------------------------------------------------------------------------------


class Model(nnx.Module):
    """A product, a running mean, a dropout and a count of calls."""

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
    """Losses, and the state of the model and of the optimizer."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses = [step(model, optimizer, X) for _ in range(2)]
    return losses, state_of(model), state_of(optimizer)


@functools.cache
def trained_plainly():
    return trained(nnx.jit(train_step))


def state_of(module):
    """The arrays of a module; of keys the numbers."""
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


def test_a_module_of_flax_that_fn_closes_over_changes():
    class Outer(nnx.Module):
        def __init__(self, rngs, f):
            self.inner, self.f = Model(rngs), f

        def __call__(self, x):
            return self.f(self.inner)(x) + self.f(lambda x: self.inner(x))(x)

    def run(f):
        outer = Outer(nnx.Rngs(0), f)
        results = [nnx.jit(Outer.__call__)(outer, X), outer(X)]
        made = f(lambda: Model(nnx.Rngs(1)))()
        made(X)
        assert f(lambda model: model)(made) is made
        return results, state_of(outer), state_of(made)

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


# Equinox ----------------------------------------------------------------------------------------------------------


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
