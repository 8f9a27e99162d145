"""Bodies of `jax.shard_map` that do not use jaxmp, through `jaxmp.fuse`. Without these tests, a call could gather, sum
or scatter along a wrong dimension, give a transposed result, or be missed."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_gradient
from compiled import collectives_of
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.fuse import gathers

pytestmark = pytest.mark.usefixtures("promotion_of_users")

DATA, BOTH, ACROSS = P("data"), P("data", "model"), P(None, "data")
gather = functools.partial(lax.all_gather, tiled=True)
scatter = functools.partial(lax.psum_scatter, tiled=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A body, the shapes and specs of its arguments, and the spec of its result. `forward`, `gradient`: the pattern of
    each call that `fuse` makes, "-" for a product that stays; the gradient is taken within the same body."""

    name: str
    body: Callable
    shapes: tuple
    specs: tuple
    out: P = DATA
    forward: str = "grid"
    gradient: str = "grid reduce_scatter grid"


def fsdp_mlp(x, w_in, bias, w_out):
    h = jax.nn.relu(x @ gather(w_in, "data", axis=0) + bias)
    return h @ gather(w_out, "data", axis=1)


def fsdp_with_tensor_parallelism(x, w_in, w_out):
    """Columns, then rows of the weights over `model`, each gathered over `data`."""
    h = jax.nn.relu(x @ gather(w_in, "data", axis=0))
    return lax.psum(h @ gather(w_out, "data", axis=1), "model")


def heads(x, wq, wo):
    q = jnp.einsum("bsd,dhk->bshk", x, gather(wq, "data", axis=0))
    return jnp.einsum("bshk,hkd->bsd", q, gather(wo, "data", axis=2))


def shared_rows(x, w):
    """Computes three products of rows that are gathered once."""
    rows = gather(x, "model", axis=1)
    return rows @ w + (rows @ (2 * w)) * (rows @ w[::-1])


X, W, T = (8, 12), (12, 16), (16, 12)
CASES = (
    Case("k", lambda x, w: x @ gather(w, "data", axis=0), (X, W), (DATA, DATA)),
    Case("columns", lambda x, w: x @ gather(w, "data", axis=1), (X, W), (DATA, ACROSS)),
    Case("stored (n, k), rows", lambda x, w: x @ gather(w, "data", axis=0).T, (X, T), (DATA, DATA)),
    Case("stored (n, k), columns", lambda x, w: x @ gather(w, "data", axis=1).T, (X, T), (DATA, ACROSS)),
    Case("result transposed", lambda x, w: (gather(x, "data") @ w).T, ((8, 8), (8, 16)), (DATA, ACROSS), DATA,
         "grid", "grid grid reduce_scatter"),
    Case("k of x", lambda x, w: gather(x, "model", axis=1) @ w, (X, W), (BOTH, P(None, "model")), BOTH,
         "grid", "- all_reduce grid"),
    Case("k of x, stored (n, k)", lambda x, w: jax.nn.relu(gather(x, "model", axis=1) @ w.T + 1), (X, T),
         (BOTH, P("model")), BOTH, "grid", "- all_reduce grid"),
    Case("mlp", fsdp_mlp, (X, W, (16,), (16, 12)), (DATA, DATA, P(), ACROSS), DATA,
         "grid grid", "grid grid reduce_scatter grid reduce_scatter grid"),
    Case("mlp, remat", jax.checkpoint(fsdp_mlp), (X, W, (16,), (16, 12)), (DATA, DATA, P(), ACROSS), DATA,
         "grid grid", "grid grid grid reduce_scatter grid reduce_scatter grid"),
    Case("with TP, sums", fsdp_with_tensor_parallelism, ((64, 12), W, (16, 12)), (DATA, BOTH, P("model", "data")), DATA,
         "grid all_reduce", "- all_reduce reduce_scatter - reduce_scatter all_reduce"),
    Case("with TP, gathers", fsdp_with_tensor_parallelism, ((4, 32), (32, 64), (64, 32)),
         (DATA, BOTH, P("model", "data")), DATA, "grid grid", "grid grid reduce_scatter grid reduce_scatter grid"),
    Case("heads", heads, ((4, 6, 12), (12, 4, 5), (4, 5, 12)), (DATA, DATA, P(None, None, "data")), DATA,
         "grid grid", "grid grid reduce_scatter grid reduce_scatter grid"),
    Case("scattered rows", lambda x, w: scatter(x.T @ w, "data", scatter_dimension=0), (X, (8, 16)), (DATA, DATA), DATA,
         "reduce_scatter", "reduce_scatter grid grid"),
    Case("scattered columns", lambda x, w, b: jax.nn.relu(scatter(x @ w, "model", scatter_dimension=1) + b),
         (X, W, (16,)), (BOTH, P("model"), P("model")), BOTH, "reduce_scatter", "reduce_scatter all_reduce -"),
    Case("scattered columns, stored (n, k)", lambda x, w: 2 * scatter(x @ w.T, "model", scatter_dimension=1), (X, T),
         (BOTH, P(None, "model")), BOTH, "grid", "reduce_scatter all_reduce -"),
    Case("factors before a scatter", lambda x, w: scatter(-(x.T @ w) * np.float32(2) / 4, "data"), (X, (8, 16)),
         (DATA, DATA), DATA, "reduce_scatter", "reduce_scatter - -"),
    Case("factors around a sum", lambda x, w: 3 * lax.psum((x @ (3 * w)).T / 8 / 3, "model"), (X, W),
         (BOTH, P("model")), P(None, "data"), "all_reduce", "all_reduce all_reduce -"),
    Case("rows between others", shared_rows, ((4, 6, 12), W), (BOTH, P(None, "model")), P("data", None, "model"),
         "all_gather all_gather all_gather", "- - - all_reduce - all_reduce - all_reduce -"),
    Case("two gathers", lambda x, w: gather(x, "model") @ gather(w, "data"), (X, W),
         (P(("data", "model")), BOTH), BOTH),
    Case("relu, and its argument", lambda x, w: (lambda z: jax.nn.relu(z) + z)(gather(x, "model") @ w), (X, W),
         (P("model"), P(None, "model")), P(None, "model"), "all_gather", "all_gather grid reduce_scatter"),
    Case("untiled", lambda x, w: x @ lax.all_gather(w, "data").reshape(W), (X, W), (DATA, DATA), DATA, "-", "- - -"),
    Case("needed elsewhere", lambda x, w: (lambda g: x @ g + g.sum())(gather(w, "data")), (X, W), (DATA, DATA), DATA,
         "-", "- - -"),
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def mapped(case, mesh, *, gradient=False):
    body, out = (with_gradient(case.body), (case.out, case.specs)) if gradient else (case.body, case.out)
    return jax.shard_map(body, mesh=mesh, in_specs=case.specs, out_specs=out)


def operands(case):
    """Small integers, so that every sum is exact."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in case.shapes]


def patterns(explanation):
    assert not explanation.collectives, str(explanation)
    return " ".join(row.pattern for row in explanation.rows)


@pytest.mark.filterwarnings("ignore:fuse. the bits of these operations")  # a psum that no product takes in
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_fused(case, mesh):
    for gradient, expected in ((False, case.forward), (True, case.gradient)):
        found = jaxmp.explain(jaxmp.fuse(mapped(case, mesh, gradient=gradient)), quiet=True)(*operands(case))
        assert patterns(found) == expected, str(found)
    found = jaxmp.explain(jaxmp.fuse(mapped(case, mesh), determinism="topology"), quiet=True)(*operands(case))
    assert found.left == 0, str(found)


@pytest.mark.parametrize("where", ["gradient in the body", "grad(fuse)", "fuse(grad)"])
def test_values_gradients_and_collectives(where, mesh):
    args = [operands(case) for case in CASES]

    def program(inner, outer):
        functions = []
        for case in CASES:
            f = inner(mapped(case, mesh, gradient=where == "gradient in the body"))
            functions.append(outer(f if where == "gradient in the body" else with_gradient(f)))
        return jax.jit(lambda args: [f(*each) for f, each in zip(functions, args, strict=True)]).lower(args).compile()

    def same(f):
        return f

    plain = program(same, same)
    fused = program(jaxmp.fuse, same) if where == "grad(fuse)" else program(same, jaxmp.fuse)
    for case, want, got in zip(CASES, plain(args), fused(args), strict=True):
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert jax.typeof(w) == jax.typeof(g), case.name
            assert w.sharding == g.sharding, case.name
            np.testing.assert_array_equal(w, g, err_msg=case.name)
    if where != "grad(fuse)":  # grad(fuse) gathers again what the forward pass gathered
        ours, of_jax = (Counter(collectives_of(each.as_text())) for each in (fused, plain))
        assert ours < of_jax


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x, w: gather(x, "model")[:4] @ w, "its all_gather at {} there is a slice at {}"),
        (lambda x, w: (2 * gather(x, "model")) @ w, "its all_gather at {} there is a factor at {}"),
        (lambda x, w: jnp.roll(gather(x, "model"), 1, 0) @ w, "its all_gather at {} there is a roll at {}"),
        (lambda x, w: gather(jnp.tanh(gather(x, "model")), "model")[:8] @ w, "its all_gather at {} there is a slice"),
        (lambda x, w: lax.psum((x @ w)[:4], "model"), "its psum at {} there is a slice at {}"),
        (lambda x, w: lax.psum(jnp.where(x[:, :1] > 0, x @ w, 0), "model"), "its psum at {} there is a mask at {}"),
        (lambda x, w: lax.psum(x @ w * jnp.inf, "model"), "its psum at {} there is a factor at {}"),
        (lambda x, w: lax.psum((x @ w) * w[:1], "model"), "its psum at {} there is a factor at {}"),
        (lambda x, w: lax.psum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) + 0, "data"), "there is an addition"),
    ],
)
def test_what_stands_between_product_and_collective_is_named(body, said, mesh):
    case = Case("", body, ((16, 12), (12, 16)), (P("model"), P()), P(), "", "")
    function = jax.shard_map(body, mesh=mesh, in_specs=case.specs, out_specs=P(), check_vma=False)
    (row,) = jaxmp.explain(jaxmp.fuse(function), quiet=True)(*operands(case)).rows
    line = f"test_shard_maps.py:{body.__code__.co_firstlineno}"
    assert said.format(line, line) in row.why
    assert row.why.endswith(", so the product is local")


def test_factors_of_16_bits_neither_overflow_nor_underflow(mesh):
    """Without the factor, the product is infinite or zero in float16."""

    def body(x, w, small):
        return lax.psum(x @ w / 64, "model"), lax.psum(small @ w * 64, "model")

    specs = (P(None, "model"), P("model"), P(None, "model"))
    plain = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
    args = [jnp.full(shape, value, jnp.float16) for shape, value in (((8, 16), 5e4), ((16, 8), 0.2), ((8, 16), 6e-8))]
    args[1] = args[1].at[:, ::2].set(1e-2)
    assert [row.pattern for row in jaxmp.explain(jaxmp.fuse(plain), quiet=True)(*args).rows] == ["all_reduce"] * 2
    large, small = jaxmp.fuse(plain)(*args)
    assert np.isfinite(large).all()
    assert (np.asarray(small) > 0).all()
    assert np.isinf(plain(*args)[0]).any()
    assert not np.asarray(plain(*args)[1]).all()


def test_a_gelu_whose_argument_is_read_too_keeps_it(mesh):
    def body(x, w):
        z = gather(x, "model") @ w
        return jax.nn.gelu(z) + z

    case = Case("", body, (X, W), (P("model"), P(None, "model")), P(None, "model"), "", "")
    plain, args = mapped(case, mesh), operands(case)
    (row,) = jaxmp.explain(jaxmp.fuse(plain), quiet=True)(*args).rows
    assert row.epilog == "GELU_AUX"
    np.testing.assert_allclose(jaxmp.fuse(plain)(*args), plain(*args), rtol=1e-5, atol=1e-5)


def test_an_operand_that_others_read_transposed(mesh):
    def body(x, w):
        t = (2 * x).T
        return t.sum() + lax.dot_general(t, gather(w, "data"), (((0,), (0,)), ((), ())))

    case = Case("", body, (X, W), (DATA, DATA), DATA, "", "")
    args = operands(case)
    for f in (lambda f: f, with_gradient):
        plain, fused = f(mapped(case, mesh)), f(jaxmp.fuse(mapped(case, mesh)))
        assert jaxmp.explain(fused, quiet=True)(*args).left == 0
        jax.tree.map(np.testing.assert_array_equal, fused(*args), plain(*args))


@pytest.mark.parametrize(("extent", "is_in_calls"), [(8192, True), (64, False)])
def test_a_shared_gather_is_where_it_takes_less_time(extent, is_in_calls, mesh, monkeypatch):
    """On a machine with overlapping calls, large products hide three gathers; small products wait for them."""
    machine = jaxmp.advise(8, 8, 8, 1, hardware="h200-8", quiet=True).hardware
    monkeypatch.setattr(gathers, "reads_in_place", lambda implementation: False)
    monkeypatch.setattr(gathers, "overlapping_machine", lambda implementation: machine)

    def body(x, wq, wk, wv):
        rows = gather(x, "model")
        return rows @ wq, rows @ wk, rows @ wv

    columns = P(None, "model")
    function = jax.shard_map(body, mesh=mesh, in_specs=(P("model"), *[columns] * 3), out_specs=(columns,) * 3)
    x = jax.ShapeDtypeStruct((extent, extent), jnp.bfloat16)
    rows = jaxmp.explain(jaxmp.fuse(function), quiet=True)(x, x, x, x).rows
    if is_in_calls:
        assert [row.pattern for row in rows] == ["all_gather"] * 3
        assert all("gathers in its call what other products gather too" in row.why for row in rows)
    else:  # local 16-bit products are calls, too
        assert [row.pattern for row in rows] == ["local"] * 3
        assert all("is gathered before it, once for several products" in row.why for row in rows)


def test_a_shared_gather_stays_if_calls_hide_nothing(mesh):
    """CPUs of several processes, and XLA's products, hide no gather."""

    def body(x, w):
        whole = gather(w, "data")
        return x @ whole + (2 * x) @ whole * ((3 * x) @ whole)

    case = Case("", body, (X, W), (DATA, DATA), DATA, "", "")
    found = jaxmp.explain(jaxmp.fuse(mapped(case, mesh), implementation="xla"), quiet=True)(*operands(case))
    assert {row.operation for row in found.rows} == {"dot_general"}
    assert all("one gather for all, with local products, takes less time" in row.why for row in found.rows)


PAIRS = {
    "all_gather": (lambda p, x, w: x @ p.all_gather_start(w, "data", tiled=True).done(), (DATA, DATA), DATA, "grid"),
    "rows": (
        lambda p, x, w: p.all_gather_start(x, "data", tiled=True).done() @ w,
        (DATA, ACROSS),
        ACROSS,
        "all_gather",
    ),
    "psum": (lambda p, x, w: p.psum_start(x @ w, "data").done(), (ACROSS, DATA), P(), "all_reduce"),
    "psum_scatter": (
        lambda p, x, w: p.psum_scatter_start(x @ w / 4, "data", tiled=True).done(),
        (ACROSS, DATA),
        DATA,
        "reduce_scatter",
    ),
    "used by others": (
        lambda p, x, w: (lambda g: x @ g + g.sum())(p.all_gather_start(w, "data", tiled=True).done()),
        (DATA, DATA),
        DATA,
        "-",
    ),
    "in a loop": (
        lambda p, x, w: lax.scan(
            lambda x, _: (x @ p.all_gather_start(w, "data", tiled=True).done() / 4, None), x, None, 2
        )[0],
        (DATA, DATA),
        DATA,
        "grid",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_collectives_of_two_operations_become_calls(name, mesh):
    """A start and a done. A pair that no call takes in stays a pair."""
    body, specs, out, pattern = PAIRS[name]
    parallel = pytest.importorskip("jax._src.lax.parallel")
    if not hasattr(parallel, "all_gather_start"):
        pytest.skip("this JAX has no asynchronous collectives")
    args = operands(Case("", body, ((16, 16), (16, 16)), specs))
    plain = jax.shard_map(functools.partial(body, parallel), mesh=mesh, in_specs=specs, out_specs=out)
    explanation = jaxmp.explain(jaxmp.fuse(plain), quiet=True)(*args)
    assert patterns(explanation) == pattern
    np.testing.assert_array_equal(jax.jit(jaxmp.fuse(plain))(*args), jax.jit(plain)(*args))
    is_left = "all_gather_start" in str(jax.make_jaxpr(jaxmp.fuse(plain))(*args))
    assert is_left == (pattern == "-")
