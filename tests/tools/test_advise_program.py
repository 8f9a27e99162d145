"""Plans for a function: against `explain` of the program with their shardings, and against plain data parallelism.
Without these tests, advice could move more than shardings written by hand, state other bytes than the compiled program
moves, or confuse dimensions."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.advise.dimensions import Dimensions
from jaxmp._src.tools.advise.recipes import recipes

H100 = jaxmp.advise(8, 8, 8, 1, hardware="h100-8", quiet=True).hardware
D, HIDDEN, HEADS, EXPERTS, VOCABULARY = 32, 64, 4, 4, 48


@pytest.fixture(autouse=True)
def quick(promotion_of_users):
    """Turns off LLVM's optimizations, which do not affect collectives."""
    jax.config.update("jax_disable_most_optimizations", True)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def trained(loss):
    """Returns a step of gradient descent."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def layer(p, x):
    return jax.nn.gelu(x @ p["w1"] + p["b1"]) @ p["w2"]


def mlp(p, x, y):
    return jnp.mean((layer(p, x) - y) ** 2)


def attention(p, x):
    q, k, v = (jnp.einsum("btd,dhf->bthf", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhf,bkhf->bhqk", q, k))
    return jnp.einsum("bqhf,hfd->bqd", jnp.einsum("bhqk,bkhf->bqhf", weights, v), p["o"])


def transformer(p, tokens):
    x = p["embedding"][tokens[:, :-1]]
    x, _ = lax.scan(lambda x, p: (x + layer(p, x + attention(p, x)), None), x, p["layers"])
    logits = jax.nn.log_softmax(x @ p["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def moe(p, x, y):
    gates = jax.nn.softmax(x @ p["router"])
    hidden = jax.nn.gelu(jnp.einsum("nd,edh->enh", x, p["w1"]))
    return jnp.mean((jnp.einsum("enh,ehd,ne->nd", hidden, p["w2"], gates) - y) ** 2)


LAYER = {"w1": array(D, HIDDEN), "b1": array(HIDDEN), "w2": array(HIDDEN, D)}
HEAD = array(D, HEADS, D // HEADS)
LAYERS = LAYER | {"q": HEAD, "k": HEAD, "v": HEAD, "o": array(HEADS, D // HEADS, D)}
PROGRAMS = {
    "mlp": (mlp, LAYER, (array(64, D), array(64, D))),
    "transformer": (
        transformer,
        {"embedding": array(VOCABULARY, D), "layers": {k: array(2, *x.shape) for k, x in LAYERS.items()}},
        (array(16, 17, dtype="int32"),),
    ),
    "moe": (
        moe,
        {"router": array(D, EXPERTS), "w1": array(EXPERTS, D, HIDDEN), "w2": array(EXPERTS, HIDDEN, D)},
        (array(64, D), array(64, D)),
    ),
}


def advice_of(fn, *arguments, devices=4, **options):
    return jaxmp.advise(fn, devices=devices, quiet=True, **options)(*arguments)


def explained(fn, arguments, specs, mesh):
    placed = jax.tree.map(lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)), arguments, specs)
    with jax.set_mesh(mesh):
        return jaxmp.explain(fn, compiled=True, quiet=True)(*placed)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_plan_moves_no_more_than_data_parallelism(name, mesh_of):
    loss, params, batch = PROGRAMS[name]
    arguments, step = (params, *batch), trained(loss)
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    with jax.set_mesh(mesh) if name == "transformer" else contextlib.nullcontext():  # fewer plans take less time
        advice = advice_of(step, *arguments)
    by_hand = jax.tree.map(lambda _: P(), params), *(P("x") for _ in batch)
    data = explained(step, arguments, by_hand, mesh).bytes_moved
    best = advice.best
    assert best.bytes_moved <= data > 0
    assert data in [plan.bytes_moved for plan in advice.choices if plan.name == "data"]
    found = explained(step, arguments, best.arguments, mesh_of(dict(best.mesh), AxisType.Auto))
    assert (best.bytes_moved, best.memory) == (found.bytes_moved, found.memory.peak)
    for few in ([plan for plan in advice.choices if len(plan.mesh) == axes] for axes in (1, 2)):
        assert [plan.seconds for plan in few] == sorted(plan.seconds for plan in few)
    assert best.seconds <= min(plan.seconds * (1.1 if len(plan.mesh) > 1 else 1) for plan in advice.choices)
    names = {plan.name for plan in advice.choices}
    assert names >= {"data", "fully sharded", "tensor"}
    assert ({"data x tensor", "fully sharded x tensor"} <= names) == (name != "transformer")
    assert ("expert" in names) == (name != "mlp")  # heads come first, like experts
    assert advice.remarks == ()


def specs_of(fn, *arguments, devices=4):
    """Returns the shardings of the arguments for each recipe with one axis, by name."""
    leaves, tree = jax.tree.flatten(arguments)
    nparameters = len(jax.tree.leaves(arguments[0]))
    dimensions = Dimensions(jax.make_jaxpr(fn)(*arguments).jaxpr)
    found = recipes(dimensions, leaves, nparameters if nparameters > 1 else 0, devices, ())
    return {name: jax.tree.unflatten(tree, specs) for name, mesh, specs in found if len(mesh) == 1}


def test_tensor_parallelism_shards_columns_then_rows():
    for name, wanted in {
        "mlp": {"w1": P(None, "x"), "b1": P("x"), "w2": P("x", None)},
        "moe": {"router": P(), "w1": P(None, None, "x"), "w2": P(None, "x", None)},
        "transformer": {
            "embedding": P("x", None),
            "layers": {name: P(None, None, "x", None) for name in "qkv"}
            | {"o": P(None, "x", None, None), "w1": P(None, None, "x"), "b1": P(None, "x"), "w2": P(None, "x", None)},
        },
    }.items():
        loss, params, batch = PROGRAMS[name]
        assert specs_of(trained(loss), params, *batch)["tensor"] == (wanted, *(P() for _ in batch))


def test_square_layers_in_turn_have_columns_and_rows():
    def program(p, x):
        for q, k, v, o in p["layers"]:
            q, k, v = ((x @ w).reshape(*x.shape[:2], 4, -1) for w in (q, k, v))
            x = x + jnp.einsum("bqhf,bkhf,bkhg->bqhg", q, k, v).reshape(x.shape) @ o
        return x @ p["head"]

    found = specs_of(program, {"layers": [[array(16, 16)] * 4] * 2, "head": array(16, 64)}, array(8, 5, 16))
    column = P(None, "x")
    assert found["tensor"][0] == {"layers": [[column] * 3 + [P("x", None)]] * 2, "head": column}


def test_the_shardings_of_a_plan_run(mesh_of, rng):
    params = {"in": rng.integers(-2, 3, (64, 128)), "out": rng.integers(-2, 3, (128, 64))}
    params = jax.tree.map(lambda w: jnp.asarray(w, "float32"), params)
    x = jnp.asarray(rng.integers(-2, 3, (16, 64)), "float32")

    def program(params, x, *, scale):
        return jaxmp.matmul(jax.nn.relu(jaxmp.matmul(x, params["in"])) * scale, params["out"])

    advice = jaxmp.advise(program, devices=8, quiet=True)(params, x, scale=2.0)
    wanted = program(params, x, scale=2.0)
    assert len(advice.choices) > 4
    for plan in advice.choices:
        assert plan.keywords == {"scale": None}
        mesh = mesh_of(dict(plan.mesh), AxisType.Auto)
        where = jax.tree.map(lambda spec, mesh=mesh: NamedSharding(mesh, spec), plan.arguments)
        placed = jax.device_put((params, x), where)
        np.testing.assert_array_equal(jax.jit(program)(*placed, scale=2.0), wanted)


def test_calls_of_jaxmp_and_products_of_jax_have_one_plan():
    arguments = array(4, 8, 128), array(128, 64), array(64, 128)
    of_jax = specs_of(lambda x, w, v: jax.nn.relu(x @ w) @ v, *arguments)
    advice = advice_of(lambda x, w, v: jaxmp.matmul(jaxmp.linear(x, w, activation="relu"), v), *arguments)
    assert {plan.name: plan.arguments for plan in advice.choices if len(plan.mesh) == 1} == of_jax
    moved = {plan.name: plan.bytes_moved for plan in advice.choices}
    assert 0 == moved["data"] < min(moved["sequence"], moved["tensor"], moved["fully sharded"])
    assert {step.pattern for plan in advice.choices for step in plan.products} >= {"local", "all_reduce"}
    assert all(step.line.startswith("test_advise_program.py:") for step in advice.best.products)


def test_more_devices_than_exist_and_one():
    def step(p, x):
        return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(p)["w"], jaxmp.matmul(x, p["w"])

    params, x = {"w": array(64, 7), "b": array(7)}, array(64, 64)
    for devices in (8, 32):
        data, *_ = (plan for plan in advice_of(step, params, x, devices=devices).choices if plan.name == "data")
        assert dict(data.mesh) == {"x": devices}
        assert data.bytes_moved == 2 * (devices - 1) * 4 * 64 * 7 // devices
    (alone,) = advice_of(step, params, x, devices=1).choices
    assert (alone.name, alone.bytes_moved) == ("whole", 0)


def test_a_plan_that_does_not_fit_comes_last():
    loss, params, batch = PROGRAMS["mlp"]
    small = dataclasses.replace(H100, name="small", memory=45e3)
    advice = advice_of(trained(loss), params, *batch, hardware=small)
    assert {plan.fits for plan in advice.choices} == {True, False}
    assert all(plan.fits == (plan.memory <= small.memory) for plan in advice.choices)
    keys = [not plan.fits for plan in advice.choices]
    assert keys == sorted(keys)
    assert "does not fit" in str(advice)
    assert advice.best.fits


def test_plans_use_the_axes_of_the_mesh_that_is_set(mesh_of):
    """The function's sharding constraints hold; plans that fail to trace are left out, and named."""
    arguments = array(64, 128), array(128, 256), array(256, 64)

    def program(x, w, v):
        return reshard(jaxmp.matmul(x, reshard(w, P(None, "y")), out_sharding=P("x", "y")), P("x", None)) @ v

    with jax.set_mesh(mesh_of({"x": 2, "y": 4}, AxisType.Explicit)):
        advice = advice_of(program, *arguments, devices=8)
        with pytest.raises(ValueError, match="devices is 4, but the mesh that is set has 8"):
            advice_of(program, *arguments)
    assert all(plan.mesh == (("x", 2), ("y", 4)) for plan in advice.choices)
    assert ("data", P(("x", "y"), None)) in [(plan.name, plan.arguments[0]) for plan in advice.choices]
    assert any(remark.startswith("left out: ") for remark in advice.remarks)
    with jax.set_mesh(mesh_of({"x": 4}, AxisType.Explicit)):
        advice = advice_of(lambda x: x @ x.T, arguments[0])  # JAX refuses rows and columns over one axis
    assert [plan.name for plan in advice.choices] == ["whole"]
    assert advice.remarks[0].startswith("left out: data (x=4), which raises ")
    with pytest.raises(ZeroDivisionError):
        advice_of(lambda x, w: x @ w / (1 // 0), *arguments[:2])


@pytest.mark.parametrize(
    ("fn", "arguments", "wanted"),
    [
        (lambda x, w: x @ w, (array(8, 16), array(16, 32)), (P("x", None), P())),
        (lambda w, x: x @ w, (array(16, 32), array(8, 16)), (P(), P("x", None))),
        (lambda table, tokens: table[tokens] @ table.T, (array(64, 16), array(8, 4, dtype="int32")),
         (P(), P("x", None))),
        (lambda p, tokens: p["e"][tokens] + p["b"],
         ({"e": array(64, 16), "b": array(16)}, array(64, dtype="int32")), ({"e": P(), "b": P()}, P("x"))),
        (lambda p, key, x: x @ p["w"] + jax.random.normal(key, (32,)) + p["b"],
         ({"w": array(16, 32), "b": array(32)}, array(2, dtype="uint32"), array(8, 16)),
         ({"w": P(), "b": P()}, P(), P("x", None))),
        (lambda p, state, x: (p["w"] + state["w"]).T @ x.T * p["b"][:, None],
         ({"w": array(16, 32), "b": array(32)}, {"w": array(16, 32)}, array(8, 16)),
         ({"w": P(), "b": P()}, {"w": P()}, P("x", None))),
        (lambda p, cache, x: jnp.einsum("ltbd,bd->lbt", cache, x @ p["w"]) * p["c"],
         ({"w": array(16, 16), "c": array()}, array(2, 4, 8, 16), array(8, 16)),
         ({"w": P(), "c": P()}, P(None, None, "x", None), P("x", None))),
    ],
    ids=["first", "second", "tokens", "as many tokens", "key", "state", "cache"],
)  # fmt: skip
def test_the_batch_is_found(fn, arguments, wanted):
    assert specs_of(fn, *arguments)["data"] == wanted


# Functions of x, (64, 128), with result y. For the product of y with an argument w: the dimension of x for each
# dimension of y.
FOLLOWED = {
    "a transpose": (lambda x: x.T, (1, 0)),
    "a bias": (lambda x: x + jnp.arange(128, dtype="float32")[None], (0, 1)),
    "a softmax": (jax.nn.softmax, (0, 1)),
    "a gelu, jitted": (jax.jit(jax.nn.gelu), (0, 1)),
    "custom rules and remat": (jax.checkpoint(lambda x: jax.nn.silu(jax.nn.relu(x))), (0, 1)),
    "split dimensions": (lambda x: x.reshape(8, 8, 16, 8), (0, None, 1, None)),
    "rows and columns folded": (lambda x: x.reshape(64 * 128), (0,)),
    "dimensions of 1": (lambda x: x[:, None].reshape(1, 64, 1, 128), (None, 0, None, 1)),
    "a slice": (lambda x: x[:32], (None, 1)),
    "halves": (lambda x: jnp.split(x, 2, axis=1)[1], (0, None)),
    "joined halves": (lambda x: jnp.concatenate([x[:, 64:], -x[:, :64]], axis=1), (0, None)),
    "repeats": (lambda x: jnp.broadcast_to(x[:, None], (64, 4, 128)), (0, None, 1)),
    "a sum": (lambda x: x.sum(0), (1,)),
    "a lookup": (lambda x: x[jnp.arange(64)], (None, 1)),
    "a loop": (lambda x: lax.fori_loop(0, 3, lambda _, x: x * 2, x), (0, 1)),
    "a while loop": (lambda x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x * 2, x), (0, 1)),
    "a branch": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (0, 1)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_dimension_is_followed_through_operations(name):
    fn, dims = FOLLOWED[name]
    shape = jax.eval_shape(fn, array(64, 128)).shape
    *batch, summed = range(len(shape))
    numbers = ((summed,), (summed,)), (batch, batch)
    program = jax.make_jaxpr(lambda x, w: lax.dot_general(fn(x), w, numbers))
    found = Dimensions(program(array(64, 128), array(*shape)).jaxpr)
    x, w = found.arguments
    assert tuple(x.index(dim) if dim in x else None for dim in w) == dims


def test_products_name_the_features_that_they_sum():
    def program(x, w, v):
        return jnp.einsum("bij,bjk->bik", x, w) @ v

    found = Dimensions(jax.make_jaxpr(program)(array(2, 8, 16), array(2, 16, 32), array(32, 4)).jaxpr)
    x, w, v = found.arguments
    assert (x[0], x[2], w[2]) == (w[0], w[1], v[0])
    assert len({*x, *w, *v}) == 5
    assert (found.summed(0b11), found.summed(0b111), found.summed(0b100)) == ({x[2]}, {x[2], v[0]}, set())


def test_a_group_of_rows_is_a_product_too():
    def program(p, x, sizes):
        return jnp.sum(jaxmp.ragged_dot(x, p["w"], sizes) @ p["v"])

    params = {"w": array(8, 16, 32), "v": array(32, 16)}
    plans = specs_of(program, params, array(64, 16), array(8, dtype="int32"))
    assert plans["expert"][0] == {"w": P("x", None, None), "v": P()}
    assert plans["tensor"][0] == {"w": P(None, None, "x"), "v": P("x", None)}
    assert plans["data"] == ({"w": P(), "v": P()}, P("x", None), P())


def test_types_without_a_rate_are_named():
    no_float64 = jaxmp.Hardware("mine", {"float32": 1e12}, 1e12, 1e9)
    with jax.enable_x64(True):
        advice = advice_of(lambda x, w: x @ w, *[array(8, 8, dtype="float64")] * 2, hardware=no_float64)
    assert advice.remarks == ("products of float64 have no rate on this machine, and no time here",)
    assert advice.best.seconds == 0


def test_the_tables_show_the_plans_and_the_arguments(capsys):
    """Independent collectives wait once, for example the sums of all gradients under data parallelism."""
    loss, params, batch = PROGRAMS["mlp"]
    advice = jaxmp.advise(trained(loss), devices=4)(params, *batch)
    out = capsys.readouterr().out
    assert out.rstrip("\n") == str(advice)
    for plan in advice.choices:
        assert f"\n{plan.name}  " in out
    assert "\n[0]['w1'] " in out
    assert "MB received" in out
    assert advice.best.name in repr(advice)
    assert "<table" in advice._repr_html_()
    data = next(plan for plan in advice.choices if plan.name == "data")
    assert len(data.explanation.collectives) == 4
    (step,) = (step for step in data.steps if step.operation == "all-reduce")
    assert step.nbytes == data.bytes_moved
    assert step.time.overhead == pytest.approx(2 * H100.latency)
