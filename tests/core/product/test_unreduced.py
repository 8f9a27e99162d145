"""Shardings with unreduced and reduced axes: types, values, gradients and refusals are jnp's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.testing import assert_bitwise_equal

UNREDUCED, REDUCED = P(None, None, unreduced={"x"}), P(None, None, reduced={"x"})
NN = (((1,), (0,)), ((), ()))


@pytest.fixture
def operands(rng):
    """Yields a and b with a sharded contraction, on a mesh of 2 x 2."""
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        a, b = (jnp.asarray(rng.integers(-2, 3, (8, 8)), jnp.float32) for _ in range(2))
        yield jax.device_put(a, P(None, "x")), jax.device_put(b, P("x", None))


def partial_sums(module, a, b):
    dot_general = lax.dot_general if module is jnp else jaxmp.dot_general
    return {
        "matmul": module.matmul(a, b, out_sharding=UNREDUCED),
        "one operand": module.einsum("ij->j", b, out_sharding=P(None, unreduced={"x"})),
        "one operand transposed": module.einsum("ijk->kj", b[:, None], out_sharding=P(None, None, unreduced={"x"})),
        "sum of terms": module.einsum("ij->j", module.matmul(a, b, out_sharding=UNREDUCED)),
        "dot_general": dot_general(a, b, NN, out_sharding=UNREDUCED),
    }


def test_types_and_values_are_those_of_jnp(operands):
    """Compares the shards of each device, because the terms of a sum differ between devices."""
    want, got = (jax.jit(functools.partial(partial_sums, module))(*operands) for module in (jnp, jaxmp))
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jax.typeof(w) == jax.typeof(g)
        for one, other in zip(w.addressable_shards, g.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))


def scaled(x, w, alpha, beta):
    return jaxmp.matmul(x, w, x, alpha=alpha, beta=beta)


def of_shards(x, w, ws, bias):
    """Returns (JAX's product, jaxmp's, operands) by name: x varies over both axes, the others are reduced over both."""
    square, cube, relu = lax.square, lambda x: x * lax.square(x), jax.nn.relu
    of_relu, of_cube = (functools.partial(jaxmp.linear, activation=f) for f in ("relu", cube))
    one = lax.pcast(jnp.arange(16.0).reshape(4, 4), "x", to="reduced")
    batched = functools.partial(jnp.einsum, "bmk,bkn->bmn"), functools.partial(jaxmp.einsum, "bmk,bkn->bmn")
    chained = functools.partial(jnp.einsum, "mk,kn,np->mp"), functools.partial(jaxmp.einsum, "mk,kn,np->mp")
    return {
        "right": (jnp.matmul, jaxmp.matmul, x, w),
        "left": (jnp.matmul, jaxmp.matmul, w, x.T),
        "over one axis of two": (
            lambda x, w: x @ lax.pcast(lax.pcast(w, "x", to="varying"), "y", to="varying"),  # JAX casts all or nothing
            jaxmp.matmul,
            *(x, one),
        ),
        "left with rows of a batch": (jnp.matmul, jaxmp.matmul, ws, x.T),
        "vector": (jnp.matmul, jaxmp.matmul, x, bias),
        "batch": (*batched, jnp.stack([x, x]), ws),
        "three operands": (*chained, x, w, w),
        "bias": (lambda x, w, b: x @ w + b[None], jaxmp.linear, x, w, bias),
        "bias that varies": (lambda x, w, b: x @ w + b[None], jaxmp.linear, w, x.T, x[0, :2]),
        "epilog": (lambda x, w, b: relu(x @ w + b[None]), of_relu, x, w, bias),
        "function": (lambda x, w, b: cube(x @ w + b[None]), of_cube, x, w, bias),
        "scalars": (lambda x, w, alpha, beta: x @ w * alpha + x * beta, scaled, x, w, bias[0], bias[1]),
        "layers": (
            lambda x, w, b, v, c: relu(x @ w + b[None]) @ v + c[None],
            functools.partial(jaxmp.mlp, activation="relu"),
            *(x, w, bias, w, bias),
        ),
        "gated": (
            lambda x, w, v, u: (square(x @ w) * (x @ v)) @ u,
            functools.partial(jaxmp.gated_mlp, activation=square),
            *(x, w, w, w),
        ),
        "gather": (
            lambda x, w: lax.all_gather(x, "x", tiled=True) @ w,
            functools.partial(jaxmp.all_gather_matmul, axis_name="x"),
            *(x, w),
        ),
    }


def test_reduced_operands_of_a_shard_map(rng):
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    axes, types = ("x", "y"), ({}, {})

    def run(*operands):
        results = []
        for i in range(2):
            for name, case in of_shards(*operands).items():
                y, transpose = jax.vjp(case[i], *case[2:])
                found = [y, *transpose(y)]
                types[i][name] = list(map(jax.typeof, found))
                results += found
        return [of_one(x) for x in results]

    def of_one(x):
        """Returns each device's value, after summing x over its unreduced axes."""
        x = lax.psum(x, tuple(jax.typeof(x).manual_axis_type.unreduced))
        return lax.pcast(x, tuple({*axes} - jax.typeof(x).manual_axis_type.varying), to="varying")[None]

    specs = P(axes, None), *(P(*[None] * ndim, reduced=set(axes)) for ndim in (2, 3, 1))
    with jax.set_mesh(mesh):
        shapes = (8, 4), (4, 4), (2, 4, 4), (4,)
        given = [
            jax.device_put(jnp.asarray(rng.integers(-2, 3, shape), jnp.float32), spec)
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        results = jax.jit(jax.shard_map(run, in_specs=specs, out_specs=P(axes)))(*given)
    assert types[0] == types[1]
    half = len(results) // 2
    jax.tree.map(np.testing.assert_array_equal, results[:half], results[half:])


@pytest.mark.parametrize("options", [{"determinism": "batch"}, {"determinism": "topology"}, {"implementation": "host"}])
def test_a_term_has_the_bits_of_one_devices_product(options, operands, rng):
    a, b = (jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(2))
    product = functools.partial(jaxmp.matmul, **options)

    def terms(a, b):
        cut = jax.sharding.reshard(a, P(None, "x")), jax.sharding.reshard(b, P("x", None))
        rows, w = jax.sharding.reshard(a, P("x", None)), jax.sharding.reshard(b, REDUCED)
        d = product(*cut, out_sharding=UNREDUCED)
        return d, jax.grad(lambda w: (product(rows, w) * jax.sharding.reshard(b, P("x", None))).sum())(w)

    held = [[np.asarray(shard.data) for shard in x.addressable_shards] for x in jax.jit(terms)(a, b)]
    a, b = map(np.asarray, (a, b))
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])):
        for i in range(2):  # of x; each device holds its own term
            part = slice(4 * i, 4 * i + 4)
            assert_bitwise_equal(held[0][2 * i], np.asarray(product(a[:, part], b[part])))
            assert_bitwise_equal(held[1][2 * i], np.asarray(product(a[part], b[part], transpose_a=True)))


def of_microbatches(module, w, xs):
    """Returns w's gradient, accumulated over microbatches and summed over data-parallel ranks once."""
    w = jax.sharding.reshard(w, P(None, "y", reduced={"x"}))

    def step(total, x):
        x = jax.sharding.reshard(x, P("x", None))
        return total + jax.grad(lambda w: jnp.square(module.matmul(x, w)).sum())(w), None

    zeros = jnp.zeros(w.shape, w.dtype, out_sharding=P(None, "y", unreduced={"x"}))
    return jax.sharding.reshard(lax.scan(step, zeros, xs)[0], P(None, "y"))


def test_gradients_of_microbatches_are_summed_once(operands):
    a, b = operands
    given = b, jnp.stack([jax.sharding.reshard(a, P())] * 4)
    programs = [functools.partial(of_microbatches, jaxmp), jaxmp.fuse(functools.partial(of_microbatches, jnp))]
    want = jax.jit(functools.partial(of_microbatches, jnp))(*given)
    for program in programs:
        compiled = jax.jit(program).lower(*given).compile()
        np.testing.assert_array_equal(compiled(*given), want)
        rows = jaxmp.explain(program, quiet=True)(*given).rows
        assert {(row.pattern, row.count) for row in rows if row.operation == "matmul"} == {("local", 4)}
        assert ["the sum over x is deferred" in row.why for row in rows if row.operation == "matmul"] == [False, True]
        sums = [line for line in compiled.as_text().splitlines() if "all-reduce(" in line or "reduce-scatter(" in line]
        assert len(sums) == 1
        assert "while" not in sums[0]


def of_experts(x, w):
    w = jax.sharding.reshard(w, P(None, None, None, reduced={"x"}))
    return jax.grad(lambda w: jaxmp.ragged_dot(x, w, jnp.array([3, 5])).sum())(w)


def test_explain_names_the_axes_of_a_deferred_sum(operands):
    a, b = operands
    rows = jaxmp.explain(lambda: jaxmp.matmul(a, b, alpha=0.5, out_sharding=UNREDUCED), quiet=True)().rows
    experts = jax.sharding.reshard(jnp.stack([b, b]), P())
    rows += jaxmp.explain(of_experts, quiet=True)(jax.sharding.reshard(a, P("x")), experts).rows
    assert ["the sum over x is deferred" in row.why for row in rows] == [True, True]


def test_functions_that_need_the_sum_refuse_to_defer_it(operands):
    a, b = operands
    cube = lambda x: x * x * x  # noqa: E731
    bias = {"epilog": jaxmp.Epilog.BIAS, "epilog_inputs": {"bias": jnp.zeros(8)}}
    grouped = functools.partial(jaxmp.ragged_dot, a, b.reshape(1, 8, 8), jnp.array([8]), out_sharding=UNREDUCED)
    for call, what in (
        (lambda: jaxmp.matmul(a, b, out_sharding=UNREDUCED, **bias), "bias is not available"),
        (lambda: jaxmp.matmul(a, b, a, beta=1.0, out_sharding=UNREDUCED), "c is not available"),
        (lambda: jaxmp.linear(a, b, activation="relu", out_sharding=UNREDUCED), "epilog RELU is not available"),
        (lambda: jaxmp.linear(a, b, activation=cube, out_sharding=UNREDUCED), "the sum is needed"),
        (lambda: grouped(activation="relu"), "the sum is needed"),
        (lambda: grouped(scaling=jaxmp.Scaling()), "scaling is not available .* scale the sum"),
        (lambda: jaxmp.gated_mlp(a, b, b, a, hidden_sharding=UNREDUCED), "hidden_sharding .* the sum is needed"),
    ):
        with pytest.raises(NotImplementedError, match=what):
            call()


def of_groups(w, x, v, out):
    """Returns products of groups and their gradients. The ranks of x split the contraction, the groups or the hidden
    features if a sum is deferred over x."""
    cut = jax.sharding.reshard if out.unreduced else lambda x, spec: x
    sizes, bias = jnp.array([3, 4]), x[:2]
    products = {
        "contraction": lambda w: (cut(x, P(None, "x")), cut(w, P(None, "x")), sizes),
        "groups": lambda w: (x, cut(w, P("x")), sizes),
    }
    found = {}
    for options in ({}, {"determinism": "batch"}):
        for name, operands in products.items():
            run = functools.partial(jaxmp.ragged_dot, bias=bias, out_sharding=out, **options)
            found[f"{name} {options}"] = run, operands
    weights = {"hidden": (P(None, None, "x"), P(None, "x")), "experts": (P("x"), P("x"))}
    layers = functools.partial(jaxmp.moe_mlp, b_down=bias, activation="relu", out_sharding=out)
    for name, (into, out_of) in weights.items():
        found[name] = layers, lambda w, into=into, out_of=out_of: (x, *[cut(w, into)] * 2, cut(w, out_of), sizes)

    def loss(w, run, operands):
        d = run(*operands(w))
        return (jax.sharding.reshard(d, P()) * v).sum(), d

    return {name: jax.grad(loss, has_aux=True)(w, *each) for name, each in found.items()}


def test_groups_defer_the_sum_of_their_terms(operands):
    x, v = (jax.sharding.reshard(y, P()) for y in operands)
    w = jnp.stack([v, 2 * v])
    want = jax.jit(functools.partial(of_groups, out=P()))(w, x, v)
    for name, (gradient, d) in jax.jit(functools.partial(of_groups, out=UNREDUCED))(w, x, v).items():
        assert jax.typeof(d).sharding.spec.unreduced == {"x"}
        np.testing.assert_array_equal(jax.sharding.reshard(d, P()), want[name][1], name)
        np.testing.assert_array_equal(gradient, want[name][0], name)
    rows = jaxmp.explain(functools.partial(of_groups, out=UNREDUCED), quiet=True)(w, x, v).rows
    assert sum("the sum over x is deferred" in row.why for row in rows) == 2 * len(want)  # products and biases
    with pytest.raises(ValueError, match=r"is unreduced over \('x',\), but the call has no sum over them"):
        jaxmp.ragged_dot(x, w, jnp.array([3, 5]), out_sharding=UNREDUCED)


def test_a_gradient_that_jnp_refuses_is_summed_or_padded(operands):
    """The operand's axis splits nothing, splits its contraction, or splits the rows with another axis."""
    a, b = (jax.sharding.reshard(x, P()) for x in operands)

    def loss(module, a, b, out):
        return (module.matmul(a, b, out_sharding=out) * jax.sharding.reshard(b, out)).sum()

    of_b = [jax.jit(functools.partial(jax.grad(loss, 2), module), static_argnums=2) for module in (jnp, jaxmp)]
    want = of_b[0](a, b, P())
    for rows, out in ((P(), P()), (P(None, "x"), P()), (P("x"), P()), (P(("x", "y")), P(("x", "y"))), (P("y"), P("y"))):
        got = of_b[1](jax.sharding.reshard(a, rows), jax.sharding.reshard(b, REDUCED), out)
        assert jax.typeof(got).sharding.spec.unreduced == {"x"}
        np.testing.assert_array_equal(jax.sharding.reshard(got, P()), want)


def test_what_jnp_refuses(operands):
    a, b = operands
    terms = jax.jit(functools.partial(jnp.matmul, out_sharding=UNREDUCED))(a, b)
    whole = jax.sharding.reshard(a, P())
    for module in (jnp, jaxmp):
        with pytest.raises(Exception, match="unreduced axes should be equal to the contracting specs"):
            module.matmul(whole, whole, out_sharding=UNREDUCED)
        with pytest.raises(Exception, match=r"(lhs or rhs passed to dot_general|matmul: a) cannot be unreduced"):
            module.matmul(terms, whole)
