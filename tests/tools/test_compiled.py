"""Every collective of a compiled program: its cause, line, bytes and count; and the program's memory."""

import functools
import re

import cases
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.explain import hlo, partitioned

F32 = 4


@pytest.fixture
def mesh(mesh_of):
    return mesh_of({"data": 2, "model": 2}, AxisType.Auto)


@pytest.fixture
def array(mesh):
    """Returns a function for types on the mesh: array((8, 16), "data") has its rows over data."""
    return functools.partial(cases.typed, mesh)


def compiled(fn, *args):
    return jaxmp.explain(fn, compiled=True, quiet=True)(*args)


def test_explicit_axes_have_their_reshards(mesh_of):
    with jax.set_mesh(mesh := mesh_of({"data": 2, "model": 2})):
        (row,) = compiled(lambda x: jax.sharding.reshard(x, P()) + 1, cases.typed(mesh, (8, 16), "data")).collectives
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


def test_the_largest_arrays_may_be_in_a_loop_or_in_its_carry():
    def carried(x, w):
        wide = jnp.sin(jnp.outer(x[:, 0], x))
        x, wide = jax.lax.fori_loop(0, 3, lambda _, c: (jnp.tanh(c[0] @ w), c[1] * 1.5), (x, wide))
        return (wide @ jnp.cos(jnp.outer(x[:, 0], x)).T).sum()

    def inside(x, w):
        def step(x, _):
            wide = jnp.tanh(jnp.outer(x[:, 0], x))
            return x + (wide @ jnp.sin(wide.T))[:, :1], None

        return jax.lax.scan(step, x, None, length=3)[0]

    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 64), (64, 64))]
    for fn in (carried, inside):
        sizes = [each.nbytes for each in compiled(fn, *types).memory.largest]
        assert [size for size in sizes if size > 64 * 64 * F32] == [16 * 16 * 64 * F32] * 2


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
    sharded = {"in_shardings": (P(None, "model"), P("model")), "out_sharding": P(), "mesh": mesh}
    by_xla = compiled(functools.partial(jaxmp.matmul, implementation="xla", **sharded), x, w)
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
  ROOT %sum = f32[16,16]{1,0} add(%dot, %done), metadata={op_name="jit(f)/add"}
}
"""


def test_the_text_of_asynchronous_programs_is_read():
    module = hlo.Module(ASYNCHRONOUS)
    ((computation, count),) = module.executed()
    start = computation.instructions["ag"]
    assert (count, start.kind, start.operands, start.nbytes) == (1, "all-gather", ("x",), 24 * 16 * F32)
    assert partitioned.groups_of(start, 4) == ((0, 2), (1, 3))
    assert partitioned.axes_of(partitioned.groups_of(start, 4), {"data": 2, "model": 2}) == ("data",)
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


FILES = ("/a/train.py", "/a/layers.py", "/lib/python3.13/site-packages/flax/nnx/module.py")
FUNCTIONS = ("step", "step.<locals>.norm", "Block.__call__", "main", "<module>")
# (file, function, line), and (location, the frame that calls it), numbered from 1.
LOCATIONS = ((1, 1, 10), (1, 1, 11), (1, 2, 5), (2, 3, 7), (3, 3, 99), (1, 5, 40), (1, 4, 30), (1, 4, 31))
FRAMES = ((1, 1), (2, 1), (3, 2), (3, 3), (5, 2), (4, 6), (5, 3), (4, 8), (3, 5), (6, 0), (8, 11), (6, 12))
FRAMES += ((7, 13), (4, 14))
TABLES = {
    "FileNames": [f'"{name}"' for name in FILES],
    "FunctionNames": [f'"{name}"' for name in FUNCTIONS],
    "FileLocations": [f"{{file_name_id={i} function_name_id={j} line={n} end_line={n}}}" for i, j, n in LOCATIONS],
    "StackFrames": [f"{{file_location_id={i}" + f" parent_frame_id={j}" * (j > 0) + "}" for i, j in FRAMES],
}


def text_of_frames():
    rows = {title: "".join(f"{i} {row}\n" for i, row in enumerate(table, 1)) for title, table in TABLES.items()}
    return "HloModule m\n\n" + "".join(f"{title}\n{text}\n" for title, text in rows.items()) + "\n"


@pytest.mark.parametrize(
    ("frame", "line"),
    {
        1: "train.py:10",
        3: "train.py:10 -> norm:5",
        4: "train.py:11 -> norm:5",
        6: "train.py:10 -> layers.py:7",  # the library's frame between them is omitted
        8: "train.py:11 -> layers.py:7",
        9: "train.py:11 -> norm:5",  # as JAX repeats frames
        14: "train.py:31 -> layers.py:7",  # main exported it at line 30 and calls it at line 31
        100: "",
    }.items(),
)
def test_callers_are_read_from_the_tables_of_frames(frame, line):
    each = hlo.Instruction("c", "add", "f32[2]{0}", (), (), f'metadata={{op_name="a/b" stack_frame_id={frame}}}', False)
    module = hlo.Module(text_of_frames())
    assert module.line(each) == line
    assert module.innermost(each) == line.rpartition(" -> ")[2].replace("norm", "train.py")
