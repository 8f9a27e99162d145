"""Products that cannot be calls: `fuse` raises an error under a level; otherwise only the smallest part stays JAX's."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_alike
from compiled import collectives_of
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.fuse import control_flow

X = jnp.asarray(np.arange(-64, 64).reshape(8, 16) % 5 - 2, jnp.float32)
W = jnp.asarray(np.arange(-128, 128).reshape(16, 16) % 7 - 3, jnp.float32)
EXPLICIT = AxisType.Explicit


def explained(fn, *args):
    return jaxmp.explain(fn, quiet=True)(*args)


def scores(q, k):
    """Has one product that "topology" refuses because ranks share d, and one that it accepts."""
    s = jnp.einsum("bqd,bkd->bqk", q, k, out_sharding=P())
    return s + jnp.einsum("bqd,de->bqe", q, jnp.ones((16, 8)), out_sharding=P())


def line(fn, i):
    return rf"test_kept_levels\.py:{fn.__code__.co_firstlineno + i}"


def sharded():
    return jax.device_put(jnp.ones((2, 8, 16)), P(None, None, "x"))


def test_a_level_that_a_product_cannot_keep_is_an_error(mesh_of):
    message = rf'fuse: determinism="topology" does not hold for the product at {line(scores, 2)}: jaxmp '
    message += r"refuses it: ranks share the contraction of a batch.* Pass strict=False to leave these to JAX"
    with jax.set_mesh(mesh_of({"x": 4})), pytest.raises(NotImplementedError, match=message):
        jaxmp.fuse(scores, determinism="topology")(sharded(), sharded())


def test_without_strict_only_such_products_stay_with_a_warning(mesh_of):
    message = f'fuse: determinism="topology" does not hold for the product at {line(scores, 2)}: jaxmp refuses it: '
    with jax.set_mesh(mesh_of({"x": 4})):
        x = sharded()
        fused = jaxmp.fuse(scores, determinism="topology", strict=False)
        with pytest.warns(RuntimeWarning, match=message + "ranks share the contraction of a batch"):
            rows = explained(fused, x, x).rows
        assert [row.operation for row in rows] == ["dot_general", "matmul+epilog"]
        assert rows[0].why.startswith("not fused: jaxmp refuses these operands, shardings or options: ranks share the ")
        assert explained(jaxmp.fuse(scores), x, x).rows[0].pattern == "all_reduce"


def test_the_error_names_each_product_within_loops_and_rules():
    algorithm = lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32, lhs_component_count=2)

    @jax.custom_jvp
    def square(w):
        return jnp.matmul(w, w, precision=algorithm)

    square.defjvps(lambda t, _, w: 2 * t)

    def program(x, w):
        ws = lax.scan(lambda c, _: (jnp.matmul(c, w, precision=algorithm), None), w, None, length=2)[0]
        return jnp.sum(x @ (ws + square(w)))

    fused = jaxmp.fuse(program, determinism="batch")
    lines = line(program, 1), line(square.__wrapped__, 2)
    with pytest.raises(NotImplementedError, match=r"product at {}: .*; the product at {}: ".format(*lines)):
        jax.jit(fused)(X, W)


@pytest.mark.parametrize("given", ["run_to_run", "batch", "topology"])
def test_a_call_of_the_program_has_the_level_or_is_refused(given):
    def program(x, w):
        return lax.scan(lambda c, _: (c + jaxmp.matmul(x, w, determinism=given).sum(), None), 0.0, length=2)[0]

    fused = jax.jit(jax.grad(jaxmp.fuse(program, determinism="topology"), 1))
    if given == "topology":
        np.testing.assert_allclose(fused(X, W), jax.grad(program, 1)(X, W), rtol=1e-5)
    else:
        with pytest.raises(NotImplementedError, match=f'{line(program, 1)}: the program calls .*{given}.*="topology"'):
            fused(X, W)


def test_a_product_stays_a_call_if_the_level_refuses_its_epilog(monkeypatch):
    def refuse(*args, **options):
        if options["activation"]:
            raise AttributeError("unforeseen")
        return jaxmp.linear(*args, **options)

    monkeypatch.setattr("jaxmp._src.fuse.emit.linear", refuse)
    fused = jaxmp.fuse(lambda x, w: jax.nn.gelu(x @ w), determinism="batch")
    want = jax.nn.gelu(X @ W)
    with pytest.warns(RuntimeWarning, match="jaxmp.fuse fails on a part of the program.*unforeseen.*report it"):
        got = fused(X, W)
    np.testing.assert_allclose(got, want, rtol=1e-6)


LITERALS = {
    "linear form": lambda p, w: jax.grad(lambda q: jnp.dot(p.sum(0), q))(p.sum(0)),
    "quadratic form": lambda p, w: jax.grad(lambda q: q @ w @ q)(p.sum(0)),
    "square": lambda p, w: jax.grad(lambda r: r @ r)(p.sum(0)),
    "scalar of einsum": lambda p, w: jnp.einsum(",i->i", 2.0, p.sum(0)),
    "each sample": lambda p, w: jax.vmap(jax.grad(lambda q, x: jnp.dot(x, q)), (None, 0))(p.sum(0), p),
    "a loop": lambda p, w: lax.scan(lambda c, x: (c + jnp.dot(2.0, x), jnp.dot(3.0, x)), p.sum(0), p)[1],
    "both": lambda p, w: lax.dot_general(jnp.float32(2), 3.0, (((), ()), ((), ()))) * p,
}


@pytest.mark.parametrize("kind", [None, AxisType.Auto, EXPLICIT], ids=str)
@pytest.mark.parametrize("name", LITERALS)
def test_a_number_may_be_an_operand_of_a_product(mesh_of, name, kind):
    """For example the cotangent 1.0 of a scalar."""

    def check(x, w):
        want = jax.jit(LITERALS[name])(x, w)
        for level in ("run_to_run", "topology"):
            assert_alike(want, jax.jit(jaxmp.fuse(LITERALS[name], determinism=level))(x, w))

    if kind is None:
        check(X, W)
        return
    with jax.set_mesh(mesh_of({"x": 2}, kind)):
        spec = P(None, "x") if name == "a loop" else P("x")
        check(jax.device_put(X, spec if kind is EXPLICIT else None), W)


def test_the_gradient_of_an_unreduced_sum(mesh_of):
    def loss(a, b):
        d = jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", None, unreduced={"y"}))
        return jnp.sin(jax.sharding.reshard(d, P("x", None))).sum()

    with jax.set_mesh(mesh_of({"x": 2, "y": 2})):
        args = jax.device_put(X, P("x", "y")), jax.device_put(W, P("y", None))
        want = jax.jit(jax.grad(loss, (0, 1)))(*args)
        for fused in (jaxmp.fuse(jax.grad(loss, (0, 1))), jax.grad(jaxmp.fuse(loss), (0, 1))):
            assert_alike(want, jax.jit(fused)(*args), rtol=1e-5, atol=1e-5)


def test_a_scan_over_a_symbolic_extent_is_rewritten():
    def program(x, w):
        return lax.scan(lambda c, row: (c + jnp.sum(row[None] @ w), jax.nn.relu(row[None] @ w)), jnp.float32(0), x)

    (b,) = jax.export.symbolic_shape("b")
    args = jax.ShapeDtypeStruct((b, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    checks = [jax.export.DisabledSafetyCheck.custom_call("jaxmp_matmul")]
    for level in ("run_to_run", "batch"):
        exported = jax.export.export(jax.jit(jaxmp.fuse(program, determinism=level)), disabled_checks=checks)(*args)
        assert_alike(program(X, W), exported.call(X, W))
    assert "jaxmp_matmul" in exported.mlir_module()


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_the_result_of_a_callback_is_multiplied_in_a_shard_map(mesh_of, collective):
    """JAX's type of this result has no mesh."""

    def called(x):
        return jax.pure_callback(lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def body(x, w):
        if collective == "gather":
            return called(lax.all_gather(x, "x", tiled=True)) @ w
        return lax.psum_scatter(called(x) @ w, "x", tiled=True)

    specs = ((P("x"), P(None, "x")), P(None, "x")) if collective == "gather" else ((P(None, "x"), P("x")), P("x"))
    with jax.set_mesh(mesh_of({"x": 4})):
        args = [jax.device_put(y, spec) for y, spec in zip((X, W), specs[0], strict=True)]
        fused = jax.jit(jaxmp.fuse(jax.shard_map(body, in_specs=specs[0], out_specs=specs[1])))
        np.testing.assert_array_equal(fused(*args), 2 * X @ W)


def fail(*args, **kwargs):
    raise AttributeError("unforeseen")


def two(x, w):
    first = jax.nn.relu(x @ w)
    return jax.nn.relu(first @ w.T)


FAULTS = {
    "product": ("products.product_at", 2),
    "layers": ("layers.find_layers", 2),
    "gathers": ("gathers.choose", 2),
    "pairs": ("loops.find_pairs", 2),
    "call": ("emit.call", 1),
    "decoder": ("weights._of_narrow", 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_jaxmp_leaves_the_smallest_part(monkeypatch, name):
    path, ncalls = FAULTS[name]
    module, function = path.split(".")
    module = importlib.import_module(f"jaxmp._src.fuse.{module}").__dict__
    original, count = module[function], iter(range(10))

    def fail_sometimes(*args, **kwargs):
        is_now = name in ("layers", "gathers", "pairs", "decoder") or next(count) == 1
        return (fail if is_now else original)(*args, **kwargs)

    monkeypatch.setitem(module, function, fail_sometimes)
    message = r"jaxmp.fuse fails on a part of the program .*unforeseen.*, at (test_kept_levels|an unknown).*report it"
    with pytest.warns(RuntimeWarning, match=message):
        rows = explained(jaxmp.fuse(two, epilogs=name == "layers"), X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)).rows
    assert [row.operation.split("+")[0] for row in rows].count("matmul") == ncalls, rows


def test_a_fault_within_a_loop_leaves_the_loop(monkeypatch):
    def program(x, w):
        return lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, None, length=2)[0], jax.nn.relu(x @ w)

    monkeypatch.setitem(control_flow._RULES, "scan", fail)
    with pytest.warns(RuntimeWarning, match="unforeseen"):
        rows = explained(jaxmp.fuse(program), X, W).rows
    assert sorted(row.operation for row in rows) == ["dot_general", "matmul+epilog"]


def test_effects_are_not_repeated_after_a_fault(monkeypatch):
    @jax.jit
    def printed(x, w):
        jax.debug.print("{}", x.sum())
        return x @ w

    monkeypatch.setitem(control_flow._RULES, "jit", fail)
    with pytest.raises(AttributeError, match="unforeseen"):
        jaxmp.fuse(printed)(X, W)


def test_an_error_of_a_users_rule_is_raised_alone():
    @jax.custom_vjp
    def wrong(x):
        return x @ x

    def fail(*_):
        raise ValueError("of the user")

    wrong.defvjp(lambda x: (x @ x, x), fail)
    with pytest.raises(ValueError, match="of the user"):
        jax.grad(lambda x: jaxmp.fuse(lambda x: jnp.sum(wrong(x)))(x))(W)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jaxmp.fuse(lambda x, w: x @ w, determinism="batch")(X * jnp.inf, W)


def test_an_eager_level_makes_no_nan_of_its_own():
    with jax.debug_nans(True):
        jaxmp.fuse(lambda x, w: jnp.exp(x @ w) / 3, determinism="batch")(X, W)


def test_heads_stay_sharded_on_automatic_axes(mesh_of):
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    x, *weights = (jax.device_put(X, NamedSharding(mesh, spec)) for spec in (P(), *[P(None, "x")] * 2))
    weights = [jnp.concatenate([w, w]) for w in weights]

    def program(q, k, x, einsum=jnp.einsum):
        def scores(q, k):
            return einsum("bqgd,bkgd->bgqk", *((x @ w).reshape(2, 4, 4, 4) for w in (q, k)))

        return scores(q, k), jax.grad(lambda q, k: (scores(q, k) ** 2).sum(), (0, 1))(q, k)

    def found(fn):
        compiled = jax.jit(fn).lower(*weights, x).compile()
        return jax.tree.map(lambda x: x.spec, compiled.output_shardings), collectives_of(compiled.as_text())

    with jax.set_mesh(mesh):
        heads = P(None, "x")
        assert (plain := found(program)) == ((heads, (heads, heads)), [])
        for level in ("run_to_run", "batch", "topology"):
            assert found(jaxmp.fuse(program, determinism=level)) == plain, level
        assert found(functools.partial(program, einsum=jaxmp.einsum)) == plain


def test_a_result_that_is_a_constant_has_a_derivative():
    def program(x, w):
        return jnp.sin(x @ w), jnp.asarray(3), jnp.asarray(2.5)

    (plain, of_plain), (ours, of_ours) = (
        jax.jvp(f, (X, W), (X, W)) for f in (program, jaxmp.fuse(program, determinism="batch"))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, plain)
    assert [t.dtype for t in of_ours] == [t.dtype for t in of_plain]
    np.testing.assert_allclose(of_ours[0], of_plain[0], rtol=1e-4, atol=1e-4)


def test_a_loop_that_vmap_stops_for_each_example_keeps_the_level():
    def doubled(x):
        return lax.while_loop(lambda y: jnp.max(y) < 100, lambda y: y @ jnp.diag(jnp.full(16, 2.0)), x)

    rows = 1.0 + jnp.arange(64.0).reshape(4, 16)
    fused = jaxmp.fuse(jax.vmap(doubled), determinism="batch")
    assert explained(fused, rows).calls
    np.testing.assert_array_equal(jax.jit(fused)(rows), jax.vmap(doubled)(rows))


@functools.cache
def solve_of_others():
    """Returns a primitive as other libraries make them: JAX sees its name, and its implementation at lowering."""

    def implementation(a, b, *, steps):
        return lax.fori_loop(0, steps, lambda _, x: b - a @ x, b)

    def derivative(primals, tangents, *, steps):
        moved = tangents[0] if isinstance(tangents[1], ad.Zero) else tangents[1]
        return primitive.bind(*primals, steps=steps), moved

    primitive = Primitive("solve")
    primitive.def_impl(implementation)
    primitive.def_abstract_eval(lambda a, b, *, steps: jax.core.ShapedArray(b.shape, b.dtype))
    ad.primitive_jvps[primitive] = derivative
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False))
    return lambda a, b: primitive.bind(a, b, steps=2)


def test_a_primitive_of_another_library_keeps_the_level():
    """Its products are calls too, and it keeps its own derivative, here the identity."""
    solve, (a, b) = solve_of_others(), (W, X.T)
    fused = jaxmp.fuse(solve, determinism="batch")
    assert [row.operation for row in explained(fused, a, b).rows] == ["matmul"]
    np.testing.assert_array_equal(jax.jit(fused)(a, b), jax.jit(solve)(a, b))
    np.testing.assert_array_equal(jax.jvp(lambda b: fused(a, b), (b,), (b,))[1], b)
    assert not explained(jaxmp.fuse(solve), a, b).rows  # without a level it stays
