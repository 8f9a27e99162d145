"""`explain` describes the compiled program: each number of its rows equals a count made by hand."""

import dataclasses
import functools

import cases
import jax
import jax.export
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import transfers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog
from jaxmp._src.platform.jax_internals import jax_compiled

EXPLICIT = modes.BY_ID["explicit"]


def abstract(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(mode, case, rng):
    return [mode.put(case, x, s) for x, s in zip(case.values(rng), case.stored, strict=True)]


def rows_of(mode, case, rng):
    with mode.scope(case):
        return jaxmp.explain(mode.product(case))(*operands(mode, case, rng)).rows


def whole(name, *extents):
    """Returns the case of this name with m, n and k of whole arrays."""
    case = cases.BY_NAME[name]
    return case.replace(per_shard=tuple(each // one for each, one in zip(extents, case.extents, strict=True)))


# Case: (groups, a, b, d per device, elements that one rank reads from its peers). m, n, k = 16, 8, 32 on a 2 x 2 mesh.
ROWS = {
    "local": ("1 rank", ((8, 32), (32, 4), (8, 4)), 0),
    "ag-data": ("2 x 2 ('y',)", ((4, 32), (32, 4), (8, 4)), 4 * 32),
    "rs-data": ("2 x 2 ('y',)", ((8, 16), (16, 8), (4, 8)), 4 * 16 + 16 * 8),
    "ar-data": ("2 x 2 ('y',)", ((8, 16), (16, 8), (8, 8)), None),
    "grid": ("1 x 4 ('x', 'y')", ((8, 16), (16, 4), (8, 4)), 8 * 16 + 16 * 4),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_numbers_of_its_call(name, dtype, rng):
    case = whole(name, 16, 8, 32).replace(dtype=dtype)
    (row,) = rows_of(EXPLICIT, case, rng)
    groups, per_device, moved = ROWS[name]
    assert (row.operation, row.count, row.pattern, row.groups) == ("matmul", 1, case.pattern, groups)
    assert (row.global_shapes, row.local_shapes) == (((16, 32), (32, 8), (16, 8)), per_device)
    assert (row.dtypes, row.accumulator, row.epilog) == (f"{dtype} x {dtype} -> {dtype}", "float32", "NONE")
    assert row.flops == 2 * 16 * 8 * 32
    if moved is not None:
        assert row.bytes_moved == moved * jnp.dtype(dtype).itemsize
    assert (row.implementation, row.why) == ("host", "CPU devices of one process")
    assert row.algorithm
    is_widened = dtype != "float32"
    assert (row.workspace > 0) == (is_widened or case.pattern in ("all_gather", "reduce_scatter", "grid"))


def test_transfers_name_the_ranks_and_how_far_they_lie_apart(mesh_of):
    """On a mesh of 2 x 4, with the last axis varying fastest; a is (16, 32) and b (32, 8)."""
    mesh = mesh_of({"y": 2, "x": 4})

    def transfers(a, b, d):
        x, w = (cases.typed(mesh, shape, *spec) for shape, spec in (((16, 32), a), ((32, 8), b)))
        with jax.set_mesh(mesh):
            (row,) = jaxmp.explain(lambda x, w: jaxmp.matmul(x, w, out_sharding=d), quiet=True)(x, w).rows
        return [(each.nbytes, each.nranks, each.stride) for each in row.transfers]

    tiles = P("y", "x")
    # Blocks of 8 x 8 of a from 3 ranks of the row, one of 16 x 2 of b from the other rank of the column.
    assert transfers(tiles, tiles, tiles) == [(3 * 8 * 8 * 4, 4, 1), (16 * 2 * 4, 2, 4)]
    # Rows of a from 3 neighbours; from the one rank that is 4 devices away; from all.
    assert transfers(P(("y", "x"), None), P(None, "x"), tiles) == [(3 * 2 * 32 * 4, 4, 1)]
    assert transfers(P(("x", "y"), None), P(None, "y"), P("x", "y")) == [(2 * 32 * 4, 2, 4)]
    assert transfers(P(("y", "x"), None), P(None, ("y", "x")), P(None, ("y", "x"))) == [(7 * 2 * 32 * 4, 8, 1)]
    # Three quarters of the partial sums of 8 x 8; twice that if every rank keeps the result.
    assert transfers(tiles, P("x", None), P(("y", "x"), None)) == [(3 * 8 * 8 * 4 // 4, 4, 1)]
    assert transfers(tiles, P("x", None), P("y", None)) == [(2 * 3 * 8 * 8 * 4 // 4, 4, 1)]
    assert transfers(P("y", None), P(None, "x"), tiles) == []


def test_the_shapes_of_a_gradient_are_those_of_whole_arrays(rng):
    with EXPLICIT.scope(case := whole("ag-data", 16, 8, 32)):
        f = EXPLICIT.product(case)
        gradient = jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1))
        rows = jaxmp.explain(gradient, quiet=True)(*operands(EXPLICIT, case, rng)).rows
    found = {row.global_shapes for row in rows if row.operation == "matmul"}
    # d = a b, and the gradients in b and in a.
    assert found == {((16, 32), (32, 8), (16, 8)), ((16, 32), (16, 8), (32, 8)), ((16, 8), (32, 8), (16, 32))}


def test_the_line_is_that_of_the_users_call(rng):
    x = abstract((4, 4))

    def program(a, b):
        c = jaxmp.matmul(a, b)
        return jaxmp.matmul(c, b).sum()

    line = program.__code__.co_firstlineno
    first, second = (f"test_explain.py:{line + i}" for i in (1, 2))
    assert [row.line for row in jaxmp.explain(program, quiet=True)(x, x).rows] == [first, second]
    rows = jaxmp.explain(jax.jit(jax.grad(program, 1)), quiet=True)(x, x).rows
    assert [row.line for row in rows] == [first, second, second, first]
    rows = jaxmp.explain(jax.shard_map(program, mesh=jax.make_mesh((1,), "x"), in_specs=P(), out_specs=P()))(x, x).rows
    assert [row.line for row in rows] == [first, second]
    (row,) = jaxmp.explain(jaxmp.linear, quiet=True)(x, x).rows
    assert row.line.startswith("test_explain.py:")


@pytest.mark.parametrize("implementation", ["xla", None])
def test_arguments_that_are_no_arrays_stay_what_they_are(implementation):
    options = {"alpha": 2.0, "epilog": jaxmp.Epilog.RELU, "implementation": implementation}
    (row,) = jaxmp.explain(jaxmp.matmul)(abstract((8, 16)), abstract((4, 16)), transpose_b=True, **options).rows
    assert (row.global_shapes, row.epilog) == (((8, 16), (4, 16), (8, 4)), "RELU")
    assert "traced" not in row.why


def test_a_sum_over_data_parallel_rows_has_its_reason(rng):
    case = cases.BY_NAME["ag-data"].replace(per_shard=(4, 4, 4))
    m, n, _ = case.extents
    with EXPLICIT.scope(case):
        aux = EXPLICIT.put(case, np.ones((m, n), np.float32), case.out)
        f = EXPLICIT.product(case, epilog=Epilog.DGELU_BGRAD)
        call, total = jaxmp.explain(lambda a, b, aux: f(a, b, gelu_aux=aux))(*operands(EXPLICIT, case, rng), aux).rows
    assert (call.epilog, call.pattern) == ("DGELU_BGRAD", "all_gather")
    assert total.operation == "all_reduce"
    assert total.why == "completes a bias gradient over axes that share its rows outside of the call"


def test_the_partitioner_is_named(rng):
    case = cases.BY_NAME["ar-data"].replace(per_shard=(4, 4, 4))
    (row,) = rows_of(modes.BY_ID["partitioner"], case, rng)
    m, n, k = case.extents
    assert (row.pattern, row.global_shapes) == ("all_reduce", ((m, k), (k, n), (m, n)))
    assert row.line.startswith("modes.py:")
    assert row.why == "CPU devices of one process; chosen by XLA's partitioner (auto axes, no in_shardings)"


def test_the_partitioner_of_a_gradient(rng):
    """Lists XLA's choice for each call: the documented price of giving no shardings."""
    mode, case = modes.BY_ID["partitioner"], cases.BY_NAME["rs-data"].replace(per_shard=(4, 4, 4))
    f = mode.product(case)
    rows = jaxmp.explain(jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1)))(*operands(mode, case, rng)).rows
    m, n, k = case.extents
    assert [row.extents for row in rows] == [(m, k, n), (k, m, n), (k, n, m)]  # the last computes the transpose
    assert "?" not in {row.pattern for row in rows}


@pytest.mark.parametrize(("ndevices", "patterns"), [(4, ["grid", "all_gather"]), (1, ["local", "local"])])
def test_xla_stops_once_shardings_are_settled(ndevices, patterns, mesh_of, monkeypatch):
    """XLA takes ten times as long to compile a step of two layers as JAX takes to lower it."""
    recompile, programs = jax_compiled.recompile, []
    monkeypatch.setattr(jax_compiled, "recompile", lambda *args: programs.append(recompile(*args)))
    mesh = mesh_of({"x": ndevices}, AxisType.Auto)
    x, w = (jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("x"))) for _ in range(2))

    def layers(x, w):
        def layer(x, _):
            return jaxmp.matmul(jnp.tanh(jaxmp.matmul(x, w)), w, transpose_b=True), None

        return jax.lax.scan(layer, x, length=3)[0]

    with jax.set_mesh(mesh):
        rows = jaxmp.explain(layers)(x, w).rows
    assert not programs
    assert [(row.pattern, row.count) for row in rows] == [(pattern, 3) for pattern in patterns]


def test_experts_of_xla_have_the_bytes_of_its_collectives(mesh_of):
    """XLA's experts gather matrices; other experts read rows."""
    with jax.set_mesh(mesh_of({"x": 4}, AxisType.Explicit)):
        x, w = (jax.device_put(jnp.ones(shape, "int32"), P("x")) for shape in ((32, 16), (8, 16, 24)))
        (row,), _ = transfers.check(lambda x, w: jaxmp.ragged_dot(x, w, jnp.full(8, 4)), x, w)
    assert (row.pattern, row.implementation) == ("experts", "xla")
    assert row.bytes_moved == 3 * 2 * 16 * 24 * 4


@pytest.mark.parametrize("activation", [None, jnp.sin])
def test_the_sums_of_a_gradient_have_rows(activation, mesh_of):
    """They are in the `jit` or `shard_map` of jaxmp's own, transposed, where JAX keeps no scope."""
    mesh = mesh_of({"x": 2})
    with jax.set_mesh(mesh):
        x, ct = (jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("x"))) for _ in range(2))
        w, sizes = jax.device_put(jnp.ones((2, 4, 4)), NamedSharding(mesh, P())), jnp.array([3, 5])
        product = functools.partial(jaxmp.ragged_dot, group_sizes=sizes, activation=activation)
        rows, _ = transfers.check(lambda x, w, ct: jax.vjp(product, x, w)[1](ct), x, w, ct)
    assert [row.operation for row in rows if not row.is_call] == ["all_reduce"]


def test_bare_jit_names_the_sums_inside_a_settled_call(mesh_of):
    mesh = mesh_of({"x": 2}, AxisType.Auto)
    x, w = (cases.put(np.ones(shape, "f4"), mesh, P(None, "x")) for shape in ((8, 4), (4, 4, 8)))
    with jax.set_mesh(mesh):
        rows, _ = transfers.check(lambda x, w: jaxmp.ragged_dot(x, w, jnp.full(4, 2)), x, w)
    assert [row.operation for row in rows] == ["ragged_dot", "all_reduce"]


def test_explain_refuses_what_the_program_refuses(mesh_of):
    """One device has nothing to split, so it keeps a level."""
    multiply = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.full(4, 2), determinism="topology")
    (row,) = jaxmp.explain(multiply)(jnp.ones((8, 4)), jnp.ones((4, 4, 8))).rows
    assert (row.implementation, row.pattern) == ("host", "local")
    mesh = mesh_of({"x": 2}, AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="because XLA's partitioner chooses"):
        jaxmp.explain(multiply)(cases.typed(mesh, (8, 4), "x"), cases.typed(mesh, (4, 4, 8), "x"))


def test_groups_of_rows_that_the_partitioner_splits_run_on_all_devices(mesh_of):
    x, w = cases.typed(mesh_of({"x": 4}, AxisType.Auto), (16, 8), "x"), abstract((2, 8, 4))
    (row,) = jaxmp.explain(jaxmp.ragged_dot)(x, w, abstract((2,), "int32")).rows
    assert (row.mesh, row.ndevices, row.local_extents) == ((("x", 4),), 4, (4, 8, 4))


def test_a_batch_of_narrow_types_is_a_product_of_groups():
    a, b = abstract((4, 8, 16), "bfloat16"), abstract((4, 16, 8), "bfloat16")
    multiply = jax.jit(jax.vmap(jaxmp.matmul))
    (row,) = jaxmp.explain(multiply)(a, b).rows
    assert (row.algorithm, row.workspace) == ("tiles of all groups, one for each index", 0)
    assert "jaxmp_grouped" in multiply.lower(a, b).compile().as_text()


def test_the_table_is_printed_and_returned(capsys):

    def program(a, b):
        return jax.lax.scan(lambda c, _: (jaxmp.matmul(c, b, epilog=Epilog.RELU), None), a, length=5)[0]

    explained = jaxmp.explain(program)
    assert repr(explained).startswith("<jaxmp.explain of program: call it with the arguments of program, ")
    explanation = explained(abstract((4, 4), "bfloat16"), abstract((4, 4), "bfloat16"))
    printed = capsys.readouterr().out
    assert printed == f"{explanation}\n"
    header, row, total, _, reason, *_ = printed.splitlines()
    assert header.split() == ["line", "operation", "pattern", "m", "x", "k", "x", "n", "dtypes", "Gflop"]
    assert row.split()[1:] == ["matmul+relu", "x5", "local", "4x4x4", "bf16", "(f32)", "1.28e-07"]
    assert total == "total: 5 calls, 6.4e-07 Gflop on all devices together"
    assert reason.startswith("host: CPU devices of one process")
    assert (explanation.calls, explanation.collectives, explanation.bytes_moved) == (5, 0, 0)
    assert "<td>matmul+relu x5</td>" in explanation._repr_html_()
    assert jaxmp.explain(jnp.sin, quiet=True)(1.0).rows == ()
    assert capsys.readouterr().out == ""
    jaxmp.explain(jnp.sin)(1.0)
    assert capsys.readouterr().out == "no jaxmp call in this program\n"


def test_symbolic_extents_are_multiplied_by_xla(mesh_of):
    m, k = jax.export.symbolic_shape("4*m, k")
    where = NamedSharding(mesh_of({"x": 4}), P("x", None))
    for sharding in (None, where):
        a, b = jax.ShapeDtypeStruct((m, k), np.float32, sharding=sharding), jax.ShapeDtypeStruct((k, 8), np.float32)
        (row,) = jaxmp.explain(jaxmp.matmul)(a, b).rows
        assert (row.implementation, row.pattern, row.flops) == ("xla", "local", 16 * m * k)
        assert row.why == "extents are symbolic, and a custom call takes numbers"


@pytest.mark.parametrize(
    ("asked", "why"), [(None, "CPU devices of one process"), ("host", "asked for"), ("xla", "asked for")]
)
def test_implementation_types_and_why(asked, why):
    for dtype, accumulator in (("bfloat16", "float32"), ("float16", "float32"), ("complex64", "complex64")):
        a, b = abstract((2, 3), dtype), abstract((3, 5), dtype)
        (row,) = jaxmp.explain(lambda a, b: jaxmp.matmul(a, b, implementation=asked))(a, b).rows
        assert (row.implementation, row.why) == (asked or "host", why)
        assert (row.dtypes, row.accumulator) == (f"{dtype} x {dtype} -> {dtype}", accumulator)
        assert row.flops == 2 * 2 * 3 * 5 * (4 if dtype == "complex64" else 1)


def test_rows_follow_the_program_without_unused_calls():

    def program(a, b):
        def step(carry, _):
            return jax.lax.scan(lambda c, _: (jaxmp.matmul(c, b), None), carry, length=3)[0], None

        jaxmp.matmul(a, a)
        c = jaxmp.matmul(jaxmp.matmul(a, b, epilog=Epilog.GELU), b, epilog=Epilog.RELU)
        jax.debug.print("{}", c[0, 0])
        return jax.lax.scan(step, c, length=5)[0]

    rows = jaxmp.explain(program)(abstract((4, 4)), abstract((4, 4))).rows
    assert [(row.epilog, row.count) for row in rows] == [("GELU", 1), ("RELU", 1), ("NONE", 15)]


def test_a_program_may_change_an_argument_in_place():

    def program(state, a):
        state[...] = jaxmp.matmul(a, state[...])

    state = jax.new_ref(jnp.ones((4, 4)))
    for compiled in (False, True):
        explanation = jaxmp.explain(program, compiled=compiled, quiet=True)(state, jnp.ones((4, 4)))
        rows = explanation.calls.rows if compiled else explanation.rows
        assert [row.operation for row in rows] == ["matmul"]


def test_under_fuse_messages_speak_of_the_users_product():
    """The user has called no function of jaxmp."""

    def layer(a, b):
        return jax.nn.relu(a @ b)

    fused, why = jaxmp.fuse(layer, implementation="cublasmp"), 'implementation="cublasmp" is not available'
    with pytest.raises(NotImplementedError, match=f"^fuse: dot_general: {why}"):
        jax.jit(fused)(jnp.ones((4, 8)), jnp.ones((8, 4)))
    line = f"test_explain.py:{layer.__code__.co_firstlineno + 1}"
    with pytest.raises(NotImplementedError, match=f"^fuse: dot_general at {line}: {why}"):
        jaxmp.explain(fused)(abstract((4, 8)), abstract((8, 4)))


@pytest.mark.parametrize(("processes", "cost"), [(8, "7 messages in 1 round"), (1000, "10 messages in 10 rounds")])
def test_the_messages_of_the_barrier_are_counted(processes, cost):
    """As the simulation counts them (docs/clusters.md)."""
    explanation = jaxmp.explain(jaxmp.matmul, quiet=True)(abstract((8, 16)), abstract((16, 4)))
    assert "processes" not in str(explanation)
    (row,) = explanation.rows
    told = str(dataclasses.replace(explanation, rows=(dataclasses.replace(row, processes=processes),)))
    assert f"before a call of {processes} processes each sends {cost}" in told
