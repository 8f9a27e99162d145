"""`ragged_dot` on meshes against a loop of `jnp` products, exactly, on small integers. Without these tests, ranks of an
axis could count a group from the wrong row, and a partial sum or a bias could be added twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import activated, assert_same, derivatives, integers, reference, with_bias

import jaxmp

BIAS_SPECS = [
    (P("p"), P(), P(), P("p")),
    (P(), P("p"), P("p"), P("p")),
    (P(None, "p"), P(None, "p"), P(None, "p"), P()),
    (P(), P(None, None, "p"), P(), P(None, "p")),
    (P("p"), P("p"), P("p"), P()),
    (P("p"), P("p"), P("p"), P("p")),
]


@pytest.mark.parametrize("specs", BIAS_SPECS, ids=str)
def test_bias_on_a_mesh(specs):
    x, w, bias, ct = integers((8, 4)), integers((4, 4, 8), 1), integers((4, 8), 2), integers((8, 8), 3)
    theirs = functools.partial(with_bias, sizes=(3, 0, 4, 0))
    want = theirs(x, w, bias), *jax.vjp(theirs, x, w, bias)[1](ct)
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w, bias, ct = jax.device_put((x, w, bias, ct), tuple(NamedSharding(mesh, spec) for spec in specs))
        ours = functools.partial(activated, sizes=jnp.array([3, 0, 4, 0]), out_sharding=specs[3])
        got = jax.jit(lambda *operands: (ours(*operands), *jax.vjp(ours, *operands)[1](ct)))(x, w, bias)
    assert_same(got, want)


CUBE = [
    (P(None, ("p", "q", "r")), P("q", ("r", "p"), None), P("p")),
    (P(("q", "p"), "r"), P("r", None, ("p", "q")), P("q", ("r", "p"))),
    (P("r"), P(("p", "q"), "r"), P(("r", "q", "p"))),
    (P(("q", "p")), P("p"), P(("q", "p"))),  # experts
]


@pytest.mark.parametrize("specs", CUBE, ids=str)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_axes_in_any_order(specs, implementation):
    """A permutation moves shards along the axes that change places, not along an axis that keeps its place."""
    mesh = jax.make_mesh((2, 2, 2), ("p", "q", "r"), axis_types=(AxisType.Explicit,) * 3)
    operands = [integers(shape, i) for i, shape in enumerate(((16, 8), (8, 8, 16), (16, 16)))]
    sizes = (3, 0, 2, 5, 0, 1, 4, 0)

    def passes(f, x, w, ct):
        return f(x, w), *jax.vjp(f, x, w)[1](ct)

    want = passes(functools.partial(reference, sizes=sizes), *operands)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(operands, specs, strict=True)]
        options = {"group_sizes": jnp.array(sizes), "out_sharding": specs[2], "implementation": implementation}
        f = functools.partial(passes, functools.partial(jaxmp.ragged_dot, **options))
        assert_same(transfers.check(f, *placed)[1](*placed), want)


@pytest.mark.parametrize(
    "specs", [(P(None, "p"), P(None, "p"), P("p")), (P("p"), P("p"), P("p")), (P(), P(None, "p"), P())]
)
def test_a_level_on_a_mesh(specs):
    """No device adds sums of other devices, so the bits do not change."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 600), (4, 600, 8)))
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array([3, 0, 4, 0]), determinism="batch")
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert_same(ours(x, w, mesh=mesh, in_shardings=specs[:2], out_sharding=specs[2]), ours(x, w))


def test_the_transpose_of_a_scatter_moves_bfloat16_as_it_is():
    """XLA's own all-gather on CPUs would convert to float32."""
    mesh = jax.make_mesh((2, 2), ("p", "q"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        kinds = ((8, 4), P("q")), ((4, 4, 8), P("p")), ((8, 8), P("q", "p"))
        x, w, ct = (jax.device_put(integers(shape, 0, jnp.bfloat16), NamedSharding(mesh, s)) for shape, s in kinds)
        ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array((3, 0, 4, 0)), implementation="xla")
        ours = functools.partial(ours, out_sharding=P("q", "p"))
        rows, _ = transfers.check(lambda x, w, ct: jax.vjp(ours, x, w)[1](ct), x, w, ct)
    assert "all_gather" in [row.operation for row in rows]


@pytest.mark.parametrize("of_w", [P("p"), P()], ids=str)
def test_it_is_local_inside_shard_map(of_w):
    """Gradients of replicated weights are summed."""
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, sizes = integers((8, 4)), integers((4, 4, 5), 1), ((1, 2), (0, 4)) if of_w == P("p") else ((1, 0, 2, 0),) * 2

    def ours(x, w):
        specs = {"in_specs": (P("p"), of_w, P("p")), "out_specs": P("p")}
        return jax.shard_map(jaxmp.ragged_dot, mesh=mesh, **specs)(x, w, jnp.array(sizes).reshape(-1))

    def theirs(x, w):
        halves = (w[:2], w[2:]) if of_w == P("p") else (w, w)
        return jnp.concatenate([reference(x[4 * i : 4 * i + 4], halves[i], sizes[i]) for i in range(2)])

    assert_same(derivatives(ours, x, w), derivatives(theirs, x, w))


X, W, S = jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.array([2, 3])

MESH_ERRORS = {
    "k is sharded twice": (P(None, "p"), P(None, "p"), None, "ambiguous.*pass out_sharding"),
    "rows and columns": (P("p"), P(None, None, "p"), None, "rows of x and columns of w are both sharded over axis 'p'"),
    "extent": (P(), P(), P(None, "p"), "dimension 1 of the result has extent 5"),
}


@pytest.mark.parametrize("case", MESH_ERRORS)
def test_errors_of_shardings(case):
    of_x, of_w, of_d, message = MESH_ERRORS[case]
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w = W if "extent" in case else jnp.ones((2, 4, 6))
    with pytest.raises(ValueError, match=f"^ragged_dot: .*{message}"):
        jaxmp.ragged_dot(X, w, S, mesh=mesh, in_shardings=(of_x, of_w), out_sharding=of_d)


@pytest.mark.parametrize("specs", [(P("p"), P()), (P(), P("p")), (P(), P(None, None, "p"))])
def test_an_order_that_is_xlas_is_refused(specs):
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"mesh": mesh, "determinism": "topology", "in_shardings": specs, "out_sharding": P()}
    with pytest.raises(NotImplementedError, match=r'^ragged_dot: determinism="topology" is not available: XLA sums'):
        jaxmp.ragged_dot(X, jnp.ones((2, 4, 6)), S, **options)
    ours = functools.partial(jaxmp.ragged_dot, determinism="topology")
    with pytest.raises(NotImplementedError, match=r"^ragged_dot: .*is not available: XLA sums over \('p',\)"):
        jax.shard_map(ours, mesh=mesh, in_specs=P(), out_specs=P())(X, W, S)
    with pytest.raises(NotImplementedError, match=r"^ragged_dot: .*is not available: XLA sums over a batch"):
        jax.grad(lambda w: jax.vmap(ours, (0, None, None))(jnp.stack([X, X]), w, S).sum())(W)
