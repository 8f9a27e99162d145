"""Every collective of a compiled program: its cause, line, bytes and count; and the program's memory."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.explain import hlo, partitioned

F32 = 4
SHARDED = {"in_shardings": (P(None, "model"), P("model")), "out_sharding": P()}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def array(mesh):
    """Returns a function for types on the mesh: array((8, 16), "data") has its rows over data."""

    def of(shape, *spec, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    return of


def compiled(fn, *args):
    return jaxmp.explain(fn, compiled=True, quiet=True)(*args)


def scan_with_constraint(x, w):
    def body(carry, _):
        return jax.lax.with_sharding_constraint(jnp.tanh(carry @ w), P("model")), None

    return jax.lax.scan(body, x, None, length=5)[0]


# (name, function, arguments as (shape, spec...), a row: kind, axes, cause)
CASES = [
    ("contracted", lambda x, w: x @ w, [((8, 16), None, "model"), ((16, 32),)], ("all-gather", "model", "product")),
    ("both", lambda x, w: x @ w, [((8, 16), "model", None), ((16, 32), None, "model")],
     ("collective-permute", "data model", "product")),
    ("row-parallel", lambda x, w: x @ w, [((8, 16), None, "model"), ((16, 32), "model", None)],
     ("all-reduce", "model", "product")),
    ("constraint", lambda x: jax.lax.with_sharding_constraint(x * 2, P()) + 1, [((8, 16), "data")],
     ("all-gather", "data", "constraint")),
    ("two-shardings", lambda x, y: (x + y) @ y.T, [((8, 16), "data"), ((8, 16), "model")],
     ("all-gather", "data", "elementwise")),
    ("lookup", lambda table: table[jnp.arange(8) * 3], [((64, 16), "model")], ("all-reduce", "model", "whole")),
    ("norm", lambda x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)), [((8, 16), None, "model")],
     ("all-reduce", "model", "reduction")),
    ("carry", scan_with_constraint, [((8, 16), "data"), ((16, 16),)], ("collective-permute", "data model", "carry")),
    ("weights-gradient", jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)),
     [((16, 32), None, "model"), ((8, 16), "data")], ("all-reduce", "data", "gradient")),
    ("bias-gradient", jax.grad(lambda b, x: jnp.sum(jnp.tanh(x + b[None]))), [((16,),), ((8, 16), "data")],
     ("all-reduce", "data", "gradient")),
    ("sort", lambda x: jnp.sort(x, 1), [((8, 16), None, "model")], ("all-to-all", "model", "whole")),
    ("cumsum", lambda x: jnp.cumsum(x, 0), [((8, 16), "data")], ("all-gather", "data", "whole")),
    ("reshape", lambda x: x.reshape(-1)[3:80] + 1, [((6, 16), None, "model")], ("all-gather", "model", "reshape")),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_collective_has_its_cause_and_line(fn, args, expected, array, mesh):
    with jax.set_mesh(mesh):
        explanation = compiled(fn, *(array(*arg) for arg in args))
    found = [(row.kind, " ".join(row.axes), row.cause_kind) for row in explanation.collectives]
    assert expected in found, f"{explanation}"
    assert all(row.line.startswith("test_compiled.py:") for row in explanation.collectives)
    assert all(len(line) <= 80 for line in str(explanation).splitlines())
    assert "<table>" in explanation._repr_html_()


CONSTRAINT = r"with_sharding_constraint in test_compiled\.py:\d+"


def constrained_norm(x):
    x = jax.lax.with_sharding_constraint(jnp.tanh(x), P(None, "model"))
    return x / jnp.mean(x * x, -1, keepdims=True)


def momentum(w, m, x):
    return w - m, 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def slices_of_a_reshape(x):
    return jax.lax.scan(lambda carry, part: (carry + part.sum(), None), 0.0, x.reshape(4, 2, 16))[0]


def layers(ps, x):
    for p in ps:
        x = jnp.tanh(x @ p["in"]) @ p["out"]
    return x


def decode(cache, x, w):
    return jax.lax.dynamic_update_slice(cache, x @ w, (3, 0))


def scaled(x, settings):
    return (x * settings["scale"]) @ settings["w"]


# (function, arguments like in CASES or containers of them, words in a cause)
ORIGINS = [
    (constrained_norm, [((8, 16),)], rf"^this sum reduces dimension 1 of .* \(from {CONSTRAINT}\), which model"),
    (
        lambda b, x, w: jnp.tanh(b + x) @ w,  # XLA chooses b's sharding, so b is no origin
        [jax.ShapeDtypeStruct((1, 16), "float32"), ((8, 16), None, "model"), ((16, 32), None, "model")],
        r"sums dimension 1 of the result of tanh .* \(from dimension 1 of x\) and keeps .* of w, but model",
    ),
    (lambda x, w: x @ w, [((8, 16), None, "model"), ((16, 32),)],
     "sums dimension 1 of x, which model shards, with dimension 0 of w, which is whole"),
    (momentum, [((16, 32), None, "model"), ((16, 32), "model"), ((8, 16), "data")],
     r"^the gradient.s product has model on dimension 1 \(to meet dimension 0 of m in test_compiled.py:\d+\), but"),
    (slices_of_a_reshape, [((8, 16), "data")],
     r"^the scan wants dimension 0 of the result of reshape \(test_compiled.py:\d+\) \(from dimension 0 of x\)"),
    (layers, [[{"in": ((16, 32), None, "model"), "out": ((32, 16), "model")}] * 2, ((8, 16),)],
     r"from dimension 1 of ps\[1\]\['in'\]\) and dimension 0 of ps\[1\]\['out'\]"),
    (decode, [((8, 16), "model"), ((1, 16),), ((16, 16), None, "model")],
     "dimension 0 of cache whole, .*; model shards dimension 1 of the result of dot_general .*dimension 1 of w"),
    (scaled, [((8, 16),), {"scale": 2.0, "w": ((16, 4), "model")}],
     r"dimension 0 of settings\['w'\], which model shards"),
    (lambda x: jnp.fft.fft(x, axis=0).real, [((8, 16), "data")],
     "^fft wants dimension 0 of x whole, but data shards it$"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "words"), ORIGINS, ids=range(len(ORIGINS)))
def test_a_cause_names_the_array_or_constraint_where_it_begins(fn, args, words, array, mesh):
    def typed(arg):
        return array(*arg) if isinstance(arg, tuple) else arg

    args = jax.tree.map(typed, args, is_leaf=lambda arg: isinstance(arg, tuple))
    with jax.set_mesh(mesh):
        collectives = compiled(fn, *args).collectives
    assert any(re.search(words, row.cause) for row in collectives), collectives
    assert not any(row.cause_kind in ("carry", "unplaced") for row in collectives)


def test_specs_of_exported_functions_and_shard_maps_are_causes(array, mesh):
    rows, cols = (NamedSharding(mesh, P(*spec)) for spec in (("model",), (None, "model")))
    program = jax.jit(jnp.tanh, in_shardings=rows, out_shardings=rows)
    exported = jax.export.export(program)(jax.ShapeDtypeStruct((8, 16), "float32"))
    causes = [row.cause for row in compiled(lambda w: exported.call(w), array((8, 16), *cols.spec)).collectives]
    asks = "in_shardings of the exported function have model on dimension 0, but model shards dimension 1 of w"
    assert causes == [asks]
    whole = jax.shard_map(lambda x: x.sum(0), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (row,) = compiled(lambda x: whole(x * 2), array((8, 16), "data")).collectives
    assert row.cause.startswith("in_specs of shard_map have data on no dimension, but data shards dimension 0")


def test_layers_that_one_line_makes_share_a_row_of_the_table(array):
    ps = [{"in": array((16, 32), None, "model"), "out": array((32, 16), "model")}] * 3
    explanation = compiled(layers, ps, array((8, 16)))
    assert len({row.cause for row in explanation.collectives}) == 3
    assert "ps[*]['out']" in str(explanation)
    assert str(explanation).count("all-reduce  ") == 1


def test_a_result_that_is_wanted_whole_names_out_shardings(array, mesh):
    product = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P()))
    (row,) = compiled(product, array((8, 16)), array((16, 32), None, "model")).collectives
    assert (row.kind, row.cause_kind, row.nbytes) == ("all-gather", "out_shardings", 8 * 16 * F32)


def test_a_collective_that_the_program_writes_is_named_so(array, mesh):
    summed = jax.shard_map(lambda x: jax.lax.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P())
    (row,) = compiled(summed, array((8, 16), "model")).collectives
    assert (row.cause_kind, row.cause) == ("written", "the program runs jax.lax.psum (or pmean)")


def test_explicit_axes_have_their_reshards(mesh):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=mesh.devices.flat)
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        (row,) = compiled(lambda x: jax.sharding.reshard(x, P()) + 1, x).collectives
    assert (row.kind, row.axes, row.cause_kind) == ("all-gather", ("data",), "constraint")
    assert row.cause.startswith("reshard has")


def test_collectives_of_a_loop_are_counted(array):
    def loop(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=5)[0]

    def until(x, w):
        return jax.lax.while_loop(lambda carry: carry.sum() < 9, lambda carry: jnp.tanh(carry @ w), x)

    types = array((8, 16), None, "model"), array((16, 16), None, "model")
    explanation = compiled(loop, *types)
    assert {row.count for row in explanation.collectives} == {5}
    assert explanation.bytes_moved == 5 * sum(row.nbytes for row in explanation.collectives) > 0
    assert sum(explanation.bytes_by(lambda row: row.kind).values()) == explanation.bytes_moved
    assert None in {row.count for row in compiled(until, *types).collectives}


def step(w, v, x):
    def loss(w, v):
        return jnp.mean((jnp.tanh(x @ w) @ v) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, (w, v), jax.grad(loss, (0, 1))(w, v))


def test_bytes_are_those_of_the_program_and_memory_that_of_xla(array):
    jitted = jax.jit(step, donate_argnums=0)
    types = array((64, 128), None, "model"), array((128, 64), "model"), array((32, 64), "data")
    explanation, program = compiled(jitted, *types), jitted.lower(*types).compile()
    # Every collective of this program is an all-reduce over two devices: each receives all its bytes once.
    text = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program.as_text())
    extents = [dims for result in text for dims in re.findall(r"f32\[([\d,]*)\]", result)]
    sizes = [jnp.prod(jnp.array([int(n) for n in dims.split(",") if n])) for dims in extents]
    assert explanation.bytes_moved == sum(map(int, sizes)) * F32 > 0
    stats, memory = program.memory_analysis(), explanation.memory
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert memory.peak == held - stats.alias_size_in_bytes
    assert memory.donatable == 128 * 64 // 2 * F32  # v, which is not donated
    assert memory.largest[0].nbytes == 2 * 64 * 64 * F32  # both gradients, which one all-reduce sums
    small = jaxmp.Hardware("small", {"float32": 1e12}, memory_bandwidth=1e11, link_bandwidth=1e10, memory=1000)
    assert "does not fit small by" in str(jaxmp.explain(jitted, compiled=True, quiet=True, hardware=small)(*types))


def test_memory_that_checkpoint_would_save_is_counted(array):
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x.sum()

    types = array((16, 16)), array((256, 16), "data")
    saved = compiled(jax.grad(loss), *types).memory.saved_for_gradient
    assert 3 * 128 * 16 * F32 <= saved <= 5 * 128 * 16 * F32


def test_calls_of_jaxmp_stand_beside_the_collectives(array, mesh):
    x, w = array((8, 16), None, "model"), array((16, 32), "model")
    explanation = compiled(jaxmp.fuse(lambda x, w: jnp.tanh(x @ w).sum(0)), x, w)
    assert explanation.calls.calls == 1
    assert explanation.calls.rows[0].pattern == "all_reduce"
    assert explanation.bytes_hidden == explanation.calls.bytes_in_calls > 0
    (row,) = explanation.collectives
    assert (row.kind, row.axes, row.line) == ("jaxmp all-reduce", ("model",), explanation.calls.rows[0].line)
    assert row.cause.startswith("this product sums dimension 1 of x and dimension 0 of w, which model shards, and its")
    assert explanation.bytes_moved == row.nbytes
    assert row.is_needed
    assert "the call reads as much" in row.remedy  # as for a sharded result
    rows = NamedSharding(mesh, P("model"))
    scattered = compiled(lambda x, w: jax.lax.with_sharding_constraint(jaxmp.fuse(jnp.matmul)(x, w), rows), x, w)
    assert [each.kind for each in scattered.collectives] == ["jaxmp reduce-scatter"]
    assert scattered.bytes_moved == row.nbytes
    assert "1.15 kB of it are operands of other devices that calls read in place" in str(scattered)
    jaxmp.assert_no_collectives(jaxmp.fuse(lambda x, w: jnp.tanh(x @ w).sum(0)))(x, w)
    by_xla = compiled(functools.partial(jaxmp.matmul, implementation="xla", mesh=mesh, **SHARDED), x, w)
    (row,) = by_xla.collectives
    assert (row.cause_kind, by_xla.bytes_moved, by_xla.bytes_hidden) == ("jaxmp", row.nbytes, 0)  # counted once
    assert row.cause.startswith("this product sums dimension 1 of a and dimension 0 of b, which model shards")


def test_assert_no_collectives_fails_with_the_table(array):
    x, w = array((8, 16), "data"), array((16, 32))
    assert not jaxmp.assert_no_collectives(lambda x, w: x @ w)(x, w).collectives
    mean = jaxmp.assert_no_collectives(lambda x: x.mean())
    with pytest.raises(AssertionError, match=r"(?s)assert_no_collectives.*test_compiled.py:\d+ .*all-reduce .* data"):
        mean(x)
    for allowed in (["all-reduce"], [("all-reduce", "data")]):
        jaxmp.assert_no_collectives(lambda x: x.mean(), allowed=allowed)(x)
    with pytest.raises(AssertionError):
        jaxmp.assert_no_collectives(lambda x: x.mean(), allowed=[("all-reduce", "model"), "all-gather"])(x)
    with pytest.raises(ValueError, match="allowed has 'allreduce'; it takes all-gather"):
        jaxmp.assert_no_collectives(lambda x: x, allowed=["allreduce"])


def test_a_hit_of_the_compilation_cache_hides_no_cause(array, mesh, tmp_path):
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    from jax.experimental.compilation_cache import compilation_cache

    jitted = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 3, NamedSharding(mesh, P())) + 1)
    x = array((8, 16), "data")
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jitted.lower(x).compile()
        entries = sorted(tmp_path.iterdir())
        assert entries
        assert [compiled(jitted, x).collectives[0].cause_kind for _ in range(2)] == ["constraint"] * 2
        assert sorted(tmp_path.iterdir()) == entries
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


# XLA's text for GPUs: collectives in two halves, groups as an iota, a type for each operand, calls of cuBLAS.
ASYNCHRONOUS = """HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8,16], w: f32[16,16]) -> f32[16,16] {
  %x = f32[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %w = f32[16,16]{1,0} parameter(1), metadata={op_name="w"}
  %ag = (f32[8,16]{1,0}, f32[16,16]{1,0}) all-gather-start(f32[8,16]{1,0} %x), replica_groups=[2,2]<=[2,2]T(1,0)
  %dot = f32[16,16]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gemm = (f32[16,16]{1,0}, s8[4194304]{0}) custom-call(%w, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %done = f32[16,16]{1,0} all-gather-done(%ag)
  ROOT %sum = f32[16,16]{1,0} add(%dot, %done), metadata={op_name="jit(f)/add" source_file="/a/train.py" source_line=7}
}
"""


def test_the_text_of_asynchronous_programs_is_read():
    module = hlo.Module(ASYNCHRONOUS)
    ((computation, count),) = module.executed()
    start = computation.instructions["ag"]
    assert (count, start.kind, start.operands, start.nbytes) == (1, "all-gather", ("x",), 24 * 16 * F32)
    assert partitioned.groups_of(start, 4) == ((0, 2), (1, 3))
    assert partitioned.axes_of(partitioned.groups_of(start, 4), {"data": 2, "model": 2}) == ("data",)
    assert module.line(computation.root) == "train.py:7"
    gemm = computation.instructions["gemm"]
    assert [each.name for each in computation.instructions.values() if each.is_product] == ["dot", "gemm"]
    assert start.results == gemm.results == [("f32", (16, 16))]
    assert (start.held, gemm.held, gemm.summed) == (16 * 16 * F32, 16 * 16 * F32, (1,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("source_target_pairs={{0,0},{1,3},{3,1}}", ((1, 3), (3, 1))),
    ],
)
def test_groups_of_devices_are_read(text, expected):
    each = hlo.Instruction("c", "all-gather", "f32[2]{0}", (), (), text, False)
    assert partitioned.groups_of(each, 4) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh['data'=2,'model'=2], [{'model'}, {}]", (("model",), ())),
        ("devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate", ((), ("model",))),
        ("devices=[4,1]0,1,2,3", (("data", "model"), ())),
        ("replicated", ()),
    ],
)
def test_shardings_are_read(text, expected):
    assert partitioned.sharded(text, {"data": 2, "model": 2}) == expected
