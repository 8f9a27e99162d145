"""`ragged_dot` if ranks hold rows of any group and some matrices, against a loop of `jnp` products, exactly. Without
these tests, rows could meet another rank's matrix, sums could miss a rank's rows, and calls of different ranks could
mix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ragged import assert_same, derivatives, integers, reference

import jaxmp

M, K, N, GROUPS = 32, 5, 7, 8
SIZES = {
    "even": (4,) * 8,
    "uneven": (3, 0, 4, 1, 0, 11, 0, 2),
    "one has all": (0, 0, 0, 0, 0, 32, 0, 0),
    "no rows": (0,) * 8,
    "too large": (3, 9, 40, 1, 2, 0, 0, 5),
}


def mesh_of(ndevices, kind=AxisType.Explicit):
    return jax.make_mesh((ndevices,), ("p",), axis_types=(kind,), devices=jax.devices()[:ndevices])


def sharded(mesh, *arrays):
    return [jax.device_put(y, NamedSharding(mesh, P("p"))) for y in arrays]


def of(kind, ndevices, sizes, **options):
    """Returns (the mesh, the product) on axes of this kind."""
    mesh = mesh_of(ndevices, kind)
    if kind == AxisType.Auto:
        options |= {"mesh": mesh, "in_shardings": (P("p"), P("p")), "out_sharding": P("p")}
    return mesh, functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), **options)


def operands():
    return integers((M, K)), integers((GROUPS, K, N), 1)


@pytest.mark.small("values")
@pytest.mark.parametrize(("ndevices", "kind"), [(2, AxisType.Auto), (4, AxisType.Explicit)], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_derivatives(case, ndevices, kind):
    x, w = operands()
    mesh, ours = of(kind, ndevices, SIZES[case])
    with jax.set_mesh(mesh):
        shards = sharded(mesh, x, w)
        _, compiled = transfers.check(functools.partial(derivatives, ours), *shards)
        got = compiled(*shards)
    assert_same(got, derivatives(functools.partial(reference, sizes=SIZES[case]), x, w))


@pytest.mark.parametrize(
    ("kind", "of_w"),
    [(AxisType.Auto, P("p")), *((AxisType.Explicit, spec) for spec in (P("p"), P(None, "p"), P(None, None, "p")))],
    ids=str,
)
def test_explain_says_what_integers_of_xla_move(kind, of_w):
    """On automatic axes XLA's partitioner splits the call."""
    x, w, mesh = integers((M, 4), 0, np.int32), integers((GROUPS, 4, 8), 1, np.int32), mesh_of(4, kind)
    out = {"out_sharding": P("p")} if kind == AxisType.Explicit else {}
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(y, NamedSharding(mesh, s)) for y, s in ((x, P("p")), (w, of_w)))
        transfers.check(functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(SIZES["even"]), **out), x, w)


def test_calls_in_loops_and_in_flight_do_not_mix():
    (x, w), sizes = operands(), SIZES["uneven"]
    w = w[:, :, :K]
    mesh, ours = of(AxisType.Explicit, 4, sizes)
    inner = jax.jit(ours)

    def model(product, x, w):
        def layer(x, _):
            return jax.checkpoint(lambda x: jnp.sign(product(x, w)) + x)(x), None

        x, _ = jax.lax.scan(layer, x, None, 3)
        return product(x, w) - product(-x, w)

    theirs, cts = functools.partial(model, lambda x, w: reference(x, w, sizes)), [integers((M, K), i) for i in range(4)]
    with jax.set_mesh(mesh):
        run = jax.jit(jax.vjp(functools.partial(model, inner), *sharded(mesh, x, w))[1])
        step = jax.jit(functools.partial(model, inner))
        flying = [(step(*sharded(mesh, ct, w)), run(*sharded(mesh, ct))) for ct in cts]
    for ct, (d, grads) in zip(cts, flying, strict=True):
        assert_same(d, theirs(ct, w))
        assert_same(grads, jax.vjp(theirs, x, w)[1](ct))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_know_the_mesh(dtype):
    """This includes sums over rows: they follow the order of the global array."""
    rng, sizes = np.random.default_rng(0), (90, 0, 301, 9)
    x, w, ct = (jnp.asarray(rng.normal(size=s), dtype) for s in ((400, 300), (4, 300, 24), (400, 24)))
    found = []
    for ndevices in (1, 2, 4):
        mesh, ours = of(AxisType.Auto, ndevices, sizes, determinism="topology")
        with jax.set_mesh(mesh):
            d, pull = jax.vjp(jax.jit(ours), *sharded(mesh, x, w))
            found.append((d, *pull(*sharded(mesh, ct))))
    for each in found[1:]:
        assert_same(each, found[0])


@pytest.mark.parametrize("has_bias", [False, True])
def test_bits_of_layers_do_not_know_the_mesh(has_bias):
    rng, found = np.random.default_rng(0), []
    shapes = (400, 300), (4, 300, 24), (4, 300, 24), (4, 24, 40), (400, 40)
    *operands, ct = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    options = {"activation": "relu", "determinism": "topology", "group_sizes": jnp.array((90, 0, 301, 9))}
    for name, width in (("b_gate", 24), ("b_up", 24), ("b_down", 40)) if has_bias else ():
        options[name] = jnp.asarray(rng.normal(size=(4, width)), jnp.float32)
    for ndevices in (1, 2, 4):
        mesh = jax.make_mesh((ndevices,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ndevices])
        ours = functools.partial(jaxmp.moe_mlp, in_shardings=(P("p"),) * 3, out_sharding=P("p"), **options)
        with jax.set_mesh(mesh):
            d, pull = jax.vjp(jax.jit(ours), *sharded(mesh, *operands))
            found.append((d, *pull(*sharded(mesh, ct))))
    for each in found[1:]:
        assert_same(each, found[0])
    refused = pytest.raises(NotImplementedError, match=r"^moe_mlp: .*is not available: XLA sums over \('p',\)")
    with jax.set_mesh(mesh), refused:
        jax.jit(functools.partial(ours, in_shardings=(P("p"), P(), P())))(*operands)


def test_nothing_moves_beside_the_calls():
    mesh, ours = of(AxisType.Explicit, 4, SIZES["uneven"])
    with jax.set_mesh(mesh):
        shards = sharded(mesh, *operands())

        def grads(x, w):
            return jax.grad(lambda x, w: (ours(x, w) ** 2).sum(), (0, 1))(x, w)

        rows = jaxmp.explain(grads, quiet=True)(*shards).rows
        text = jax.jit(grads).lower(*shards).compile().as_text()
    # The program expects 6 of each rank's 8 rows to belong to experts of other ranks.
    assert [(row.operation, row.pattern) for row in rows] == [("ragged_dot", "experts")] * 3
    assert [row.bytes_moved for row in rows] == [6 * (K + N) * 4] * 3
    assert text.count('custom_call_target="jaxmp_grouped"') == 3
    assert not any(f" {name}(" in text for name in ("all-gather", "reduce-scatter", "all-to-all"))


def test_xla_gathers_matrices(monkeypatch):
    mesh, ours = of(AxisType.Explicit, 2, SIZES["uneven"])
    with jax.set_mesh(mesh):
        shards = sharded(mesh, *operands())
        exported = jax.export.export(jax.jit(lambda x, w: jax.vjp(ours, x, w)[1](ours(x, w))), platforms=["tpu"])
        text = exported(*shards).mlir_module()
    assert "all_gather" in text
    assert "reduce_scatter" in text
    assert "jaxmp_grouped" not in text
