"""`fuse` and `explain` on products of groups of rows, exactly, on small integers."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import assert_same, integers

import jaxmp

SIZES = jnp.array([3, 0, 4, 0])
NUMBERS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
explained = functools.partial(jaxmp.explain, quiet=True)


X, W = integers((8, 4), 0), integers((4, 4, 6), 1)


def model(x, w):
    return lax.ragged_dot(x, w, SIZES)


def gradients(fn):
    return jax.grad(lambda x, w: (fn(x, w) ** 2).sum(), (0, 1))


def products(fn, *operands):
    return [(r.operation, r.extents, r.flops) for r in explained(fn)(*operands).rows if r.extents]


def mesh_of(kind):
    return jax.make_mesh((2,), ("p",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize("fused", [jaxmp.fuse(gradients(model)), gradients(jaxmp.fuse(model))])
def test_derivatives(fused):
    assert_same(jax.jit(fused)(X, W), gradients(model)(X, W))
    extents = [(8, 4, 6), (4, 8, 6), (8, 6, 4)]
    assert sorted(products(fused, X, W)) == sorted(("ragged_dot", each, 2 * 8 * 4 * 6) for each in extents)


def test_a_batch():
    operands = integers((3, 8, 4), 0), integers((3, 4, 4, 6), 1), jnp.stack([SIZES, SIZES[::-1], SIZES // 2])
    batch = jax.vmap(lax.ragged_dot)
    assert_same(jaxmp.fuse(batch)(*operands), batch(*operands))
    assert products(jaxmp.fuse(batch), *operands) == [("ragged_dot", (8, 4, 6), 3 * 2 * 8 * 4 * 6)]


@pytest.mark.parametrize(
    ("of_x", "of_w", "of_d"),
    [(P("p"), P(), P("p")), (P("p"), P("p"), P("p")), (P(None, "p"), P(None, "p"), P("p")), (P(), P("p"), P())],
)
def test_explicit_axes(of_x, of_w, of_d):
    """JAX itself has no gradients of these."""
    want, mesh = model(X, W), mesh_of(AxisType.Explicit)

    def sharded(x, w):
        return lax.ragged_dot_general(x, w, SIZES, NUMBERS, out_sharding=of_d)

    wanted = gradients(model)(X, W)
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in ((X, of_x), (W, of_w)))
        fused = jaxmp.fuse(sharded)
        assert_same(jax.jit(fused)(x, w), want)
        assert_same(jax.jit(gradients(fused))(x, w), wanted)
        of_all = [("ragged_dot", each, 2 * 8 * 4 * 6) for each in ((8, 4, 6), (4, 8, 6), (8, 6, 4))]
        assert products(fused, x, w) == of_all[:1]  # for every sharding
        assert sorted(products(gradients(fused), x, w)) == sorted(of_all)


def test_inside_shard_map():
    specs = {"in_specs": (P("p"), P()), "out_specs": P("p")}
    sharded = jax.shard_map(model, mesh=mesh_of(AxisType.Auto), **specs)
    assert_same(jax.jit(jaxmp.fuse(sharded))(X, W), sharded(X, W))
    assert_same(jax.jit(jaxmp.fuse(gradients(sharded)))(X, W), gradients(sharded)(X, W))
    assert products(jaxmp.fuse(sharded), X, W) == [("ragged_dot", (4, 4, 6), 2 * 8 * 4 * 6)]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("of_x", "of_w"), [(P("p"), P("p")), (P("p"), P()), (P(), P(None, None, "p"))])
def test_automatic_axes(of_x, of_w, is_known):
    mesh = mesh_of(AxisType.Auto)
    placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in ((X, of_x), (W, of_w))]
    with jax.set_mesh(mesh) if is_known else contextlib.nullcontext():
        fused, step = jaxmp.fuse(model), gradients(jaxmp.fuse(model))
        assert_same(jax.jit(fused)(*placed), model(X, W))
        assert_same(jax.jit(step)(*placed), gradients(model)(X, W))
        shardings = {"out_shardings": tuple(y.sharding for y in placed)} if of_x == of_w else {}
        compiled = jax.jit(step, **shardings).lower(*placed).compile().as_text()
        assert compiled.count('custom_call_target="jaxmp_grouped"') == 3
        assert not shardings or "all-" not in compiled  # ranks read the matrices in place
        of_all = [("ragged_dot", each, 2 * 8 * 4 * 6) for each in ((8, 4, 6), (4, 8, 6), (8, 6, 4))]
        assert sorted(products(step, *placed)) == sorted(of_all)
    (row,) = explained(jax.jit(fused))(*placed).rows
    assert row.implementation == "host"
    assert row.pattern == ("experts" if of_x == of_w else "split")


def test_a_global_order_is_left_to_xla_on_automatic_axes():
    fused = jaxmp.fuse(model, determinism="topology", strict=False)
    warns = functools.partial(pytest.warns, RuntimeWarning, match="does not hold for the product")
    with jax.set_mesh(mesh_of(AxisType.Auto)), pytest.raises(NotImplementedError, match="strict=False"):
        jaxmp.fuse(model, determinism="topology")(X, W)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with warns():
            got = jax.jit(fused)(X, W)
        with warns():
            (row,) = explained(fused)(X, W).rows
    assert_same(got, model(X, W))
    assert row.operation == "ragged_dot_general"
    assert "its partitioner chooses the shardings" in row.why


@pytest.mark.parametrize("level", ["batch", "topology"])
def test_levels(level):
    fused = jaxmp.fuse(model, determinism=level)
    (row,) = explained(fused)(X, W).rows
    assert (row.operation, row.determinism) == ("ragged_dot", level)


def test_a_level_that_sums_of_groups_do_not_have():
    grad = jax.grad(lambda w: (model(X, w) ** 2).sum())
    with pytest.warns(RuntimeWarning, match='"topology".* does not hold for the product.*ragged_dot_general: '):
        assert_same(jaxmp.fuse(grad, determinism="topology", strict=False)(W), grad(W))


def test_what_jaxmp_refuses_stays():
    algorithm = lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32, lhs_component_count=2)
    fused = jaxmp.fuse(lambda x, w: lax.ragged_dot(x, w, SIZES, precision=algorithm))
    (row,) = explained(fused)(X, W).rows
    assert row.operation == "ragged_dot_general"
    assert "lhs_component_count=2" in row.why
    assert "pass one of F32_F32_F32, " in row.why
