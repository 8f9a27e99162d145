"""Whole training steps have the same bits on one device and on four.

Without these tests, XLA could sum over a sharded dimension in another order, divide by a root in another way, or round
a product and a sum once, in one program and not in the other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("promotion_of_users")

V, D, H, B, S = 24, 32, 64, 8, 16
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, V, (B, S))


def weight(*shape):
    return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def norm(x, gain):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def language_model(p, tokens):
    """Has a tied embedding, norms by division, softmax attention, a gated layer in bfloat16, and a cross-entropy."""
    of_tokens = jax.typeof(tokens).sharding
    of_x = NamedSharding(of_tokens.mesh, P(*of_tokens.spec, None)) if any(of_tokens.spec) else None  # on explicit axes
    x = p["embed"].at[tokens].get(out_sharding=of_x)
    y = norm(x, p["gain"])
    q, k, v = (y @ p[name] for name in ("q", "k", "v"))
    x = x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(D)) @ v
    y = norm(x, p["gain"]).astype(jnp.bfloat16)
    up, down = p["up"].astype(jnp.bfloat16), p["down"].astype(jnp.bfloat16)
    x = x + ((jax.nn.silu(y @ up) * (y @ up)) @ down).astype(jnp.float32)
    of_next = jnp.take_along_axis(jax.nn.log_softmax(x @ p["embed"].T), jnp.roll(tokens, -1, 1)[..., None], -1)
    return -of_next.mean()


def step(p, moment, tokens):
    """Clips by the global norm and divides by the root of the second moment."""
    loss, grads = jax.value_and_grad(language_model)(p, tokens)
    scale = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(scale, 1.0), grads)
    moment = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g, moment, grads)
    return jax.tree.map(lambda w, g, m: w - 0.1 * g / (jnp.sqrt(m) + 1e-3), p, grads, moment), moment, loss


PARAMS = {"embed": weight(V, D), "gain": np.ones(D, np.float32), "up": weight(D, H), "down": weight(H, D)}
PARAMS |= {name: weight(D, D) for name in ("q", "k", "v")}
TENSOR = {"up": P(None, "x"), "down": P("x"), "q": P(None, "x"), "k": P(None, "x"), "v": P(None, "x")}


def trained(jitted, put):
    p, tokens = put
    moment, losses = jax.tree.map(jnp.zeros_like, p), []
    for _ in range(2):
        p, moment, loss = jitted(p, moment, tokens)
        losses.append(loss)
    return p, moment, losses


def on_four(mesh_of, kind):
    """Returns the parameters and tokens on four devices, which divide the matrices ("tensor"), or the tokens, also with
    all parameters ("full") or on explicit axes ("explicit")."""
    mesh = mesh_of({"x": 4}, AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    of_kind = {"tensor": TENSOR, "full": dict.fromkeys(PARAMS, P("x"))}.get(kind, {})
    put = {name: jax.device_put(w, NamedSharding(mesh, of_kind.get(name, P()))) for name, w in PARAMS.items()}
    return put, jax.device_put(TOKENS, NamedSharding(mesh, P() if kind == "tensor" else P("x")))


def test_a_training_step_does_not_know_the_mesh(mesh_of):
    fused = jax.jit(jaxmp.fuse(step, determinism="topology"))
    want = trained(fused, (PARAMS, TOKENS))
    for kind in ("data", "tensor", "full", "explicit"):
        got = trained(fused, on_four(mesh_of, kind))
        jax.tree.map(assert_bitwise_equal, got, want)
    plain = trained(jax.jit(step), (PARAMS, TOKENS))
    # Later losses depend on the signs of small gradients.
    np.testing.assert_allclose(want[2][0], plain[2][0], rtol=1e-4)


def test_a_training_step_of_plain_jax_knows_the_mesh(mesh_of):
    plain = jax.jit(step)
    want, got = trained(plain, (PARAMS, TOKENS)), trained(plain, on_four(mesh_of, "data"))
    with pytest.raises(AssertionError):
        jax.tree.map(assert_bitwise_equal, got, want)


SUMS = {
    "rows": lambda x: x.sum((0, 1)),
    "middle": lambda x: x.sum(1),
    "columns": lambda x: x.mean(-1),
    "all": lambda x: (x / x.sum()).std(),
    "cumulated": lambda x: jnp.cumsum(x, 0),
    "multiplied": lambda x: x.prod(1),
    "mapped": jax.vmap(lambda x: lax.pmean(x, "i"), 1, None, axis_name="i"),
    "scattered": lambda x: jax.ops.segment_sum(x, np.arange(8) % 3, 4),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sums_have_values_types_and_bits_of_one_device(mesh_of, axis_type):
    is_auto = axis_type is AxisType.Auto  # JAX refuses the others on explicit axes

    def program(x):
        return [f(x) for name, f in SUMS.items() if name not in ("scattered", "cumulated", "mapped") or is_auto]

    x = rng.uniform(size=(8, 4, 40)).astype(np.float32)
    fused = jax.jit(jaxmp.fuse(program, determinism="topology"))
    want = fused(x)
    with jax.set_mesh(mesh_of({"x": 2, "y": 2}, axis_type)):
        put = jax.device_put(x, P("x", "y"))
        got, plain = fused(put), jax.jit(program)(put)
    for g, w, p in zip(got, want, plain, strict=True):
        assert_bitwise_equal(g, w)
        assert jax.typeof(g) == jax.typeof(p)
        np.testing.assert_allclose(g, p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_operations_on_whole_operands_have_bits_of_one_device(mesh_of, axis_type):
    def pooled(x):
        return jnp.sum(jnp.sin(lax.reduce_window(x, -np.inf, lax.max, (3, 3), (1, 1), "SAME")))

    def program(x, images):
        pair = lax.reduce((x, x), (np.float32(0), np.float32(1)), lambda a, b: (b[0] + a[0], a[1] * b[1]), (0,))
        windows = lax.reduce_window(images, np.float32(0), lax.add, (1, 2, 2), (1, 2, 2), "VALID")
        return jax.grad(pooled)(x), windows, *pair

    given = [rng.uniform(size=shape).astype(np.float32) for shape in ((16, 24), (8, 16, 64))]
    fused = jax.jit(jaxmp.fuse(program, determinism="topology"))
    want = fused(*given)
    with jax.set_mesh(mesh_of({"x": 4}, axis_type)):
        jax.tree.map(assert_bitwise_equal, fused(*jax.device_put(given, P("x"))), want)


def test_a_scatter_at_a_level_can_be_mapped_and_differentiated():
    def total(x):
        return (jax.ops.segment_sum(x, np.arange(8) % 3, 4) ** 2).sum()

    x = jnp.asarray(rng.integers(-3, 4, (2, 8, 5)), jnp.float32)
    fused = jaxmp.fuse(total, determinism="topology")
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(fused)))(x), jax.vmap(jax.grad(total))(x))


def test_a_scatter_at_a_level_can_be_exported(mesh_of):
    x = rng.uniform(size=(8, 5)).astype(np.float32)
    fused = jax.jit(jaxmp.fuse(lambda x: jax.ops.segment_sum(x, np.arange(8) % 3, 4), determinism="topology"))
    put = jax.device_put(x, NamedSharding(mesh_of({"x": 4}, AxisType.Auto), P("x")))
    exported = jax.export.deserialize(jax.export.export(fused)(put).serialize())
    assert_bitwise_equal(jax.jit(exported.call)(put), fused(x))


def small(x, w):
    y = x @ w["kernel"] + w["bias"]
    return jnp.mean((y / jnp.linalg.norm(y, axis=-1, keepdims=True) * jnp.exp(y)) ** 2)


W = {"kernel": weight(40, 16), "bias": np.ones(16, np.float32)}
X = rng.normal(size=(64, 40)).astype(np.float32)


def penalty(f, x, w):
    """Is the size of a gradient, so that its gradient is a second derivative."""
    return sum(jnp.sum(g * g) for g in jax.tree.leaves(jax.grad(f, (0, 1))(x, w)))


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_of_a_fused_loss_do_not_know_the_mesh(mesh_of, order):
    fused = jaxmp.fuse(small, determinism="topology")
    derivative = jax.jit(jax.grad(fused if order == 1 else functools.partial(penalty, fused), (0, 1)))
    mesh = mesh_of({"x": 2, "y": 4}, AxisType.Auto)
    specs = {"kernel": P(None, "y"), "bias": P("y")}
    put = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in W.items()}
    got = derivative(jax.device_put(X, NamedSharding(mesh, P("x"))), put)
    jax.tree.map(assert_bitwise_equal, got, derivative(X, W))


DERIVATIVES = {
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w,)),
    "hessian": jax.hessian,
    "remat": lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)),
    "scan": lambda f: jax.grad(lambda w: jax.lax.scan(lambda c, _: (c + f(c), None), w, length=2)[0].sum()),
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_at_a_level_are_those_of_jax(name):
    def f(w):
        return jnp.sum(jnp.tanh(X[:, :3] @ w) / jnp.sqrt(jnp.mean(w * w)))

    w = jnp.arange(1.0, 4.0)
    want = DERIVATIVES[name](f)(w)
    got = jax.jit(DERIVATIVES[name](jaxmp.fuse(f, determinism="topology")))(w)
    for g, p in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, p, rtol=1e-4, atol=1e-4)


def test_explain_lists_the_calls_of_tangents_at_a_level():
    fused = jaxmp.fuse(lambda w: jnp.tanh(X @ w).sum(), determinism="topology")
    rows = jaxmp.explain(lambda w: jax.jvp(fused, (w,), (w,)), quiet=True)(jnp.ones((40, 3))).rows
    assert sum(row.count for row in rows) == 6  # a product and two calls of a sum, each with its tangent


def test_functions_do_not_know_the_extent_of_a_row():
    """XLA has scalar loops for rows of 4, and vector loops for rows of 16."""

    def functions(x):
        return [f(x) for f in (jnp.exp, jnp.log, jnp.log1p, jnp.tanh, jax.lax.rsqrt, jax.nn.sigmoid)]

    fused = jax.jit(jaxmp.fuse(functions, determinism="topology"))
    x = rng.uniform(0.1, 3, (256, 16)).astype(np.float32)
    for whole, part in zip(fused(x), fused(x[:, :4]), strict=True):
        assert_bitwise_equal(whole[:, :4], part)


def test_an_addition_and_scales_may_be_sharded_in_another_way(mesh_of):
    def program(x, w, c, q, s, t):
        sums = jnp.matmul(q, q.T, preferred_element_type=jnp.int32, out_sharding=jax.typeof(x).sharding)
        return x @ w + c, sums.astype(jnp.float32) * s * t

    x, w, c = (rng.normal(size=(16, 16)).astype(jnp.bfloat16) for _ in range(3))
    q, s, t = rng.integers(-99, 99, (16, 16), np.int8), *rng.uniform(size=(2, 16, 1)).astype(np.float32)
    fused = jax.jit(jaxmp.fuse(program, determinism="topology"))
    want = fused(x, w, c, q, s, t.T)
    with jax.set_mesh(mesh_of({"x": 4})):
        jax.tree.map(assert_bitwise_equal, fused(jax.device_put(x, P("x")), w, c, q, s, t.T), want)


def test_a_batch_of_one_is_divided_by_a_number_like_others():
    fused = jax.jit(jaxmp.fuse(lambda x, y: x / y, determinism="batch"))
    x, y = rng.uniform(1, 2, 16).astype(np.float32), np.float32(3.7)
    assert_bitwise_equal(np.concatenate([fused(row, y) for row in np.split(x, 16)]), fused(x, y))


def of_complex_numbers(x, y):
    scanned = jax.lax.associative_scan(lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (x, y))[1]
    return (jnp.exp(x * y) - 1) / x + scanned * jnp.abs(y) + x**-3


def test_complex_numbers_do_not_know_the_mesh(mesh_of):
    """XLA rounds a product of complex numbers in two ways: in vector loops and in scalar loops."""
    x, y = (rng.normal(size=(2, 8)) + 1j * rng.normal(size=(2, 8))).astype(np.complex64)
    of_grad = jax.grad(lambda *args: jnp.sum(of_complex_numbers(*args).real), (0, 1))
    fused = jax.jit(jaxmp.fuse(lambda *args: (of_complex_numbers(*args), of_grad(*args)), determinism="topology"))
    sharding = NamedSharding(mesh_of({"x": 8}, AxisType.Auto), P("x"))
    want = fused(x, y)
    jax.tree.map(assert_bitwise_equal, fused(*jax.device_put((x, y), sharding)), want)
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=1e-4), want[0], of_complex_numbers(x, y))


def test_complex_numbers_keep_infinities_and_nan():
    x = np.array([1, 0, 1j, np.inf, complex(np.inf, np.nan), 1e38 + 1e38j, 89, -np.inf, 1e-40], np.complex64)

    def functions(x):
        return [x / 0, 1j / x, x / x[::-1], jnp.exp(x), jnp.abs(x)]

    for got, want in zip(jax.jit(jaxmp.fuse(functions, determinism="topology"))(x), jax.jit(functions)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


PATCHES = {  # images, windows, strides and dimensions
    "patches": ((8, 6, 12, 3), (2, 3, 3, 16), (2, 3), ("NHWC", "HWIO", "NHWC")),
    "channels first": ((8, 3, 8, 8), (16, 3, 4, 4), (4, 4), ("NCHW", "OIHW", "NCHW")),
    "1 x 1": ((8, 4, 4, 16), (1, 1, 16, 8), (1, 1), ("NHWC", "HWIO", "NHWC")),
    "one window": ((8, 4, 4, 16), (4, 4, 16, 8), (1, 1), ("NHWC", "HWIO", "NHWC")),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", PATCHES)
def test_convolutions_of_patches_are_products(mesh_of, name, axis_type):
    """XLA sums a gradient of a convolution in other orders on a mesh."""
    of_x, of_w, strides, dims = PATCHES[name]

    def both(x, w):
        def loss(x, w):
            y = lax.conv_general_dilated(x, w, strides, "VALID", dimension_numbers=dims)
            return jnp.sum(y * y), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, *grads

    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (of_x, of_w))
    fused = jax.jit(jaxmp.fuse(both, determinism="topology"))
    want = fused(x, w)
    with jax.set_mesh(mesh_of({"x": 4}, axis_type)):
        put = jax.device_put(x, P("x")), jax.device_put(w, P())
        got, plain = fused(*put), jax.jit(both)(*put)
    for g, f, p in zip(got, want, plain, strict=True):
        assert_bitwise_equal(g, f)
        assert jax.typeof(g) == jax.typeof(p)
        np.testing.assert_allclose(g, p, rtol=1e-5, atol=1e-4)


CONVOLUTIONS = {  # options of convolutions that are no products
    "overlap": {"window_strides": (1, 1), "padding": "VALID"},
    "gaps": {"window_strides": (3, 3), "padding": "VALID"},
    "padding": {"window_strides": (2, 2), "padding": ((2, 0), (0, 2))},
    "groups": {"window_strides": (2, 2), "padding": "VALID", "feature_group_count": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_other_convolutions_stay_with_xla_and_are_named(name):
    x, w = jnp.ones((2, 4, 6, 6)), jnp.ones((4, 2 if name == "groups" else 4, 2, 2))

    def program(x, w):
        return lax.conv_general_dilated(x, w, **CONVOLUTIONS[name])

    with pytest.warns(RuntimeWarning, match=r"conv_general_dilated at test_held_bits\.py:\d+ \(shard no dimension"):
        got = jaxmp.fuse(program, determinism="topology")(x, w)
    np.testing.assert_array_equal(got, program(x, w))


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "psum_scatter_start"])
def test_sums_that_stay_with_xla_are_named(mesh_of, name):
    if not hasattr(lax, name):
        pytest.skip("JAX 0.10 has no collectives in two parts")
    options = {"tiled": True} if "scatter" in name else {}

    def total(x):
        found = getattr(lax, name)(x, "x", **options)
        return found.done() if name.endswith("start") else found

    f = jax.shard_map(
        total, mesh=mesh_of({"x": 4}, AxisType.Auto), in_specs=P("x"), out_specs=P("x" if options else None)
    )
    with pytest.warns(RuntimeWarning, match=r"at test_held_bits\.py:\d+ \(let a product"):
        jax.eval_shape(jaxmp.fuse(f, determinism="topology"), jnp.ones((16, 4)))
