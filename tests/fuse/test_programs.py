"""Programs that `jaxmp.fuse` enters, composes with, leaves alone and refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_alike
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.fuse import templates

pytestmark = pytest.mark.usefixtures("promotion_of_users")

X = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (6, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (4, 4)), jnp.float32)


def layer(x, w):
    return jax.nn.relu(x @ w)


def jaxmp_layer(x, w):
    """A function of the user with a name that begins as jaxmp's own functions do."""
    return layer(x, w)


def with_scan(x, w):
    return lax.scan(lambda c, s: (layer(c, w) * s, c.sum()), x, jnp.ones(3), reverse=True)


def with_while(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, layer(s[1], w)), (0, x))[1]


def with_cond(x, w):
    return lax.switch(jnp.int32(1), [lambda x: x, lambda x: layer(x, w), lambda x: -x], x)


PROGRAMS = {
    "jit": lambda x, w: jax.jit(jaxmp_layer)(jax.jit(layer)(x, w), w),
    "scan": with_scan,
    "while": with_while,
    "cond": with_cond,
    "remat": lambda x, w: jax.checkpoint(layer)(x, w),
    "policy": lambda x, w: jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(x, w),
    "vmap": lambda x, w: jax.vmap(lambda row: jax.nn.relu(row @ w))(x),
    "dict": lambda x, w: {"y": [layer(x, w)], "n": x.shape[0]},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_entered(name):
    """The product inside is fused; values and gradients keep bits and types. test_counted.py covers custom rules."""
    program = PROGRAMS[name]
    found = jaxmp.explain(jaxmp.fuse(program), quiet=True)(X, W)
    assert (found.calls > 0, found.left) == (True, 0), str(found)
    want, got = jax.jit(program)(X, W), jax.jit(jaxmp.fuse(program))(X, W)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    jax.tree.map(np.testing.assert_array_equal, want, got)
    if name == "while":  # has no reverse mode
        return

    def total(f):
        return lambda x, w: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(f(x, w)))

    want = jax.grad(total(program), (0, 1))(X, W)
    for f in (jax.grad(total(jaxmp.fuse(program)), (0, 1)), jaxmp.fuse(jax.grad(total(program), (0, 1)))):
        assert_alike(want, f(X, W))


def test_a_jitted_layer_is_rewritten_and_compiled_once():
    jitted = jax.jit(layer)

    def model(x, w):
        for _ in range(6):
            x = jitted(x, w)
        return x

    text = jax.jit(jaxmp.fuse(model)).lower(X, W).as_text()
    assert text.count("func.func private @layer") == 1
    assert text.count("call @layer") == 6


def test_a_policy_keeps_what_it_keeps_of_dot_general():
    """For checkpoint policies, jaxmp's products count as the dot_general that they replace."""

    for policy in (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.nothing_saveable):

        def model(x, w, policy=policy):
            return jax.checkpoint(lambda x, w: jnp.sin(layer(x, w)), policy=policy)(x, w)

        def total(x, w, f):
            return f(x, w).sum()

        plain, fused = (jax.value_and_grad(functools.partial(total, f=f), (0, 1)) for f in (model, jaxmp.fuse(model)))
        found = jaxmp.explain(fused, quiet=True)(X, W)
        assert found.calls + found.left == str(jax.make_jaxpr(plain)(X, W)).count("dot_general"), str(found)


def test_what_only_looks_like_a_pattern_keeps_its_value():
    def almost_relu(x, w):
        return jnp.maximum(x @ w, 1)

    def almost_gelu(x, w):
        z = x @ w
        return 0.5 * z * (1 + jnp.tanh(0.79 * (z + 0.05 * z**3)))

    def loses_infinity(x, w):
        return (1e38 * x) @ (1e38 * w) * 1e-30 * 1e-30

    def scatters_columns(x, w):
        return lax.psum_scatter(x @ w, "x", tiled=True, scatter_dimension=1)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs = {"in_specs": (P(None, "x"), P("x", None)), "out_specs": P(None, "x")}
    for model in (almost_relu, almost_gelu, loses_infinity, jax.shard_map(scatters_columns, mesh=mesh, **specs)):
        np.testing.assert_allclose(jaxmp.fuse(model)(X, W), model(X, W), rtol=1e-6, atol=1e-6)


def test_a_rounding_inside_a_pattern_is_kept(mesh_of):
    def quantizes(x, w):
        return lax.all_gather(x, "x", tiled=True).astype(jnp.float8_e4m3fn).astype(x.dtype) @ w

    def has_a_wide_hidden_layer(x, w):
        narrow = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jax.nn.relu(jnp.matmul(*narrow, preferred_element_type=jnp.float32)) @ w

    specs = {"in_specs": (P("x"), P()), "out_specs": P(), "check_vma": False}
    for model in (jax.shard_map(quantizes, mesh=mesh_of({"x": 4}, AxisType.Auto), **specs), has_a_wide_hidden_layer):
        x, w = jnp.sin(jnp.arange(32.0)).reshape(8, 4), jnp.cos(jnp.arange(16.0)).reshape(4, 4)
        np.testing.assert_allclose(jaxmp.fuse(model)(x, w), model(x, w), rtol=1e-6, atol=1e-6)


def test_a_relu_with_a_rule_of_its_own_keeps_it():
    through = jax.custom_jvp(jax.jit(lambda x: jnp.maximum(x, 0)))
    through.defjvp(lambda primals, tangents: (through(*primals), tangents[0]))

    def loss(w):
        return jnp.sum(through(X @ w))

    np.testing.assert_array_equal(jax.grad(jaxmp.fuse(loss))(W), jax.grad(loss)(W))


@pytest.mark.parametrize("is_layer", [False, True])
def test_the_slope_of_a_maximum_at_0_is_half(is_layer):
    """relu's is 0, so a layer of zeros would not train."""

    def loss(w):
        h = jnp.maximum(X @ w + w[0], 0)
        return jnp.sum(h @ W if is_layer else h)

    zeros = jnp.zeros_like(W)
    np.testing.assert_array_equal(jax.grad(jaxmp.fuse(loss))(zeros), jax.grad(loss)(zeros))
    assert jaxmp.explain(jaxmp.fuse(loss), quiet=True)(zeros).rows[0].epilog == "RELU_BIAS"


def test_no_tracer_leaks():
    with jax.checking_leaks():
        jax.jit(jaxmp.fuse(layer))(X, W)


@pytest.mark.parametrize("level", ["batch", "topology"])
def test_a_factor_of_a_transposed_product_on_automatic_axes(level, mesh_of):
    def scaled(x, w):
        return 2.5 * lax.dot_general(w, x, (((0,), (1,)), ((), ()))).T

    def both(f):
        return jax.value_and_grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))

    mesh = mesh_of({"x": 2}, AxisType.Auto)
    x, w = (jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in ((X, P("x")), (W, P(None, "x"))))
    fused = jaxmp.fuse(scaled, determinism=level)
    assert jaxmp.explain(fused, quiet=True)(x, w).calls == 1
    jax.tree.map(np.testing.assert_array_equal, jax.jit(both(fused))(x, w), both(scaled)(X, W))


def test_conjugated_operands_are_those_of_the_call():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-2, 3, (4, 4, 2)).astype(np.float32).view(np.complex64)[..., 0] for _ in range(2))
    models = {
        "conj(a).T @ b": (lambda a, b: jnp.matmul(jnp.conj(a).T, b, out_sharding=P()), P("x", None), P("x", None)),
        "a.conj() @ b": (lambda a, b: a.conj() @ b, P("x", None), P()),
        "a @ b.T.conj()": (lambda a, b: a @ b.T.conj(), P(), P("x", None)),
        "conj, of three dimensions": (lambda a, b: jnp.einsum("bmk,kn->bmn", a[None].conj(), b), P("x", None), P()),
    }
    with jax.set_mesh(mesh):
        for name, (model, *specs) in models.items():
            args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs, strict=True)]
            found = jaxmp.explain(jaxmp.fuse(model), quiet=True)(*args)
            assert (found.calls, found.left, found.collectives) == (1, 0, 0), str(found)
            text = str(jax.make_jaxpr(jaxmp.fuse(model))(*args))
            assert ("conj[" in text) == name.startswith("conj, "), text
            assert_alike(*(jax.jit(f)(*args) for f in (model, jaxmp.fuse(model))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_activations_are_found_by_their_primitive(dtype):
    """`fuse` looks for these primitives; it would miss an activation that a version of JAX writes differently."""
    z = jax.typeof(jnp.ones((2, 4), dtype))
    for activation in templates.ACTIVATIONS:
        jaxpr = templates.template_of(activation.function, (z,))
        readers = {eqn.primitive.name for eqn in jaxpr.eqns if jaxpr.invars[0] in eqn.invars}
        assert activation.reader in readers, (activation.name, readers)


def test_products_of_two_precisions_are_no_layers():
    """The second product alone is left to JAX, which is as fast; layers have one precision."""

    def model(x, w, precision):
        return jnp.dot(jax.nn.relu(jnp.dot(x, w, precision=precision)), w)

    models = [jaxmp.fuse(functools.partial(model, precision=each)) for each in (None, "highest")]
    assert [jaxmp.explain(each, quiet=True)(X, W).left for each in models] == [0, 1]


def test_of_two_products_that_are_added_one_takes_the_other():
    def model(x, w):
        return x @ w + x @ (2 * w)

    found = jaxmp.explain(jaxmp.fuse(model, determinism="batch"), quiet=True)(X, W)
    assert (found.calls, found.left) == (2, 0), str(found)
    fused = jax.jit(jaxmp.fuse(model, determinism="batch"))
    assert_alike(model(X, W), fused(X, W))
    assert_alike(*(jax.grad(lambda *args, f=f: f(*args).sum(), (0, 1))(X, W) for f in (model, fused)))
    text = str(jax.make_jaxpr(fused)(X, W))
    assert "has_c=True" in text or "beta=1.0" in text, text


@pytest.mark.parametrize("check_vma", [True, False])
def test_products_that_one_collective_sums_are_left_to_jax(check_vma, mesh_of):
    specs = {"in_specs": (P(None, "x"), P("x", None)), "out_specs": P(), "check_vma": check_vma}

    def summed(x, w):
        return lax.psum(x @ w + (2 * x) @ w, "x")

    with jax.set_mesh(mesh_of({"x": 4})):
        x, w = jax.device_put(jnp.ones((8, 16)), P(None, "x")), jax.device_put(jnp.ones((16, 8)), P("x", None))
        rows = jaxmp.explain(jaxmp.fuse(jax.shard_map(summed, **specs)), quiet=True)(x, w).rows
    assert all(" its psum at " in row.why and "there is an addition at " in row.why for row in rows)


def test_options():
    def model(x, w):
        return jax.nn.gelu(x @ w)

    def row_with(**options):
        (row,) = jaxmp.explain(jaxmp.fuse(model, **options), quiet=True)(X, W).rows
        return row

    assert row_with().epilog == "GELU"
    assert row_with(epilogs=False).operation == "dot_general"
    assert row_with(determinism="batch").determinism == "batch"
    assert row_with(implementation="xla").implementation == "xla"


def test_topology_gives_a_model_the_same_bits_on_every_mesh():
    rng = np.random.default_rng(2)
    arrays = {"x": (8, 6, 16), "wq": (16, 4, 8), "wo": (4, 8, 16), "w": (16, 32)}
    specs = {"x": P("data", None, None), "wq": P(None, "model", None)}
    specs |= {"wo": P("model", None, None), "w": P(None, "model")}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in arrays.items()}

    def model(x, wq, wo, w, of=lambda spec: None):
        q = jnp.einsum("bsd,dhk->bshk", x, wq)
        mixed = jax.nn.relu(jnp.einsum("bshk,bthk->bhst", q, q))
        values = jnp.einsum("bhst,bthk->bshk", mixed, q)
        return jax.nn.relu(jnp.einsum("bshk,hkd->bsd", values, wo, out_sharding=of(P("data", None, None))) @ w)

    def run(sizes):
        mesh = jax.make_mesh(
            sizes, ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: sizes[0] * sizes[1]]
        )
        with jax.set_mesh(mesh):
            placed = [jax.device_put(values[n], NamedSharding(mesh, specs[n])) for n in arrays]
            fused = jaxmp.fuse(functools.partial(model, of=lambda spec: spec), determinism="topology")
            y, pull = jax.jit(lambda *args: jax.vjp(fused, *args))(*placed)
            return [np.asarray(leaf) for leaf in (y, *jax.jit(pull)(y))]

    one = run((1, 1))
    for sizes in ((1, 2), (2, 1), (2, 2)):
        jax.tree.map(np.testing.assert_array_equal, one, run(sizes))


def _weights(narrow):
    """Returns a bfloat16 product with weights of a type that JAX does not promote bfloat16 with."""
    product = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    fn = lambda x, w: product(x, w, preferred_element_type=jnp.float32)  # noqa: E731
    return fn, (X.astype(jnp.bfloat16), jnp.abs(W).astype(narrow)), "run_to_run"


def _of_types(dtype):
    return jnp.matmul, tuple(jnp.abs(m).astype(dtype) for m in (X, W)), "run_to_run"


def _of_shapes(*shapes):
    return lambda x, w: jax.nn.relu(x @ w) + 1, tuple(map(jnp.ones, shapes)), "run_to_run"


# Functions, their arguments and a level of determinism.
KEPT = {
    **{narrow: _weights(narrow) for narrow in ("int8", "uint4", "float8_e4m3fn")},
    **{f"of {dtype}": _of_types(dtype) for dtype in ("int32", "bool", "uint8", "complex64", "float16")},
    "no rows": _of_shapes((0, 4), (4, 3)),
    "no contraction": _of_shapes((3, 0), (0, 4)),
    "one element": _of_shapes((1, 1), (1, 1)),
    "batch, vector": _of_shapes((2, 3, 4), (4,)),
    "vector, matrix": _of_shapes((4,), (4, 5)),
    "no array": (lambda w: jnp.arange(4.0) @ w + jnp.eye(4)[1] @ (w + jnp.zeros((4, 4)).T), (W,), "batch"),
    "no arguments": (lambda: jnp.ones(3), (), "run_to_run"),
    "a key": (lambda key: jax.random.normal(key, (2, 2)), (jax.random.key(0),), "run_to_run"),
    "a number": (lambda x, by: (x * by) @ W, (X, 3), "run_to_run"),
}


@pytest.mark.parametrize("name", KEPT)
def test_types_and_values_stay_what_they_are(name):
    fn, args, level = KEPT[name]
    want, got = fn(*args), jaxmp.fuse(fn, determinism=level)(*args)
    assert jax.typeof(want) == jax.typeof(got)
    np.testing.assert_array_equal(*(np.asarray(x, np.complex64) for x in (want, got)))
    if name in ("int8", "uint4", "float8_e4m3fn"):
        assert [row.operation for row in jaxmp.explain(jaxmp.fuse(fn), quiet=True)(*args).rows] == ["matmul"]
        x, w = args
        np.testing.assert_array_equal(*(jax.grad(lambda x, f=f: f(x, w).sum())(x) for f in (fn, jaxmp.fuse(fn))))


WEAK = {"float": jnp.full((4, 4), 2.0), "integer": jnp.full((4, 4), 2), "complex": jnp.full((4, 4), 2j)}
OTHERS = {"weak": WEAK["float"], "weak integer": WEAK["integer"]}
OTHERS |= {dtype: jnp.ones((4, 4), dtype) for dtype in ("float32", "bfloat16", "complex64")}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", WEAK)
def test_gradients_of_weakly_typed_operands_have_their_types(kind, other):
    def fn(a, b):
        return jax.nn.relu(a @ b)

    def gradient(f, *operands):
        y, pull = jax.vjp(f, *operands)
        return y, pull(jnp.ones_like(y))

    for operands in ((WEAK[kind], OTHERS[other]), (OTHERS[other], WEAK[kind])):
        want = jax.make_jaxpr(lambda *xs: gradient(fn, *xs))(*operands).out_avals
        for fused in (lambda *xs: gradient(jaxmp.fuse(fn), *xs), jaxmp.fuse(lambda *xs: gradient(fn, *xs))):
            assert jax.make_jaxpr(fused)(*operands).out_avals == want


def test_what_fn_refuses_is_still_refused():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions to have the same shape"):
        jaxmp.fuse(jnp.matmul)(X, X)


def test_an_eager_function_may_use_auto_axes(mesh_of):
    with jax.set_mesh(mesh_of({"x": 2})):
        x = jax.device_put(jnp.ones((6, 4)), P("x"))
        inner = jax.sharding.auto_axes(lambda x, w: jnp.sin(x) @ w)

        def program(x, w):
            return 2 * inner(x, w, out_sharding=P("x"))

        assert_alike(program(x, W), jaxmp.fuse(program)(x, W), rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "count"), [("dots_saveable", 6), ("dots_with_no_batch_dims_saveable", 6), ("nothing_saveable", 8)]
)
def test_a_policy_around_fuse_keeps_its_products(policy, count):
    def loss(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w)[0, 0]

    kept = jax.checkpoint(jaxmp.fuse(loss, determinism="batch"), policy=getattr(jax.checkpoint_policies, policy))
    rows = jaxmp.explain(jax.value_and_grad(kept, (0, 1)), quiet=True)(X, W).rows
    assert sum(row.count for row in rows) == count


def test_a_python_if_on_a_traced_value_names_what_it_reads():
    def choose(data, *, scale):
        return data["x"] if (data["x"] @ W).sum() * scale > 0 else W

    message = r"the function choose at .*test_programs\.py:\d+ for fuse.*the arguments data\['x'\] and scale"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=message):
        jax.jit(lambda x, s: jaxmp.fuse(choose)({"x": x}, scale=s))(X, 2.0)
