"""Programs for CUDA that are compiled without a GPU and run on a machine with one."""

import ast
import os
import pickle
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_calls import PATTERNS, integers, mesh_over

import jaxmp

# The facts that XLA needs about the card, an H200.
CARD = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  device_memory_size: 150000000000
}
"""
# In a process without a driver: the plugin is a compiler.
COMPILES = """
    import functools, pickle, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import serialize_executable, topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    import jaxmp
    card, patterns, to = pickle.load(sys.stdin.buffer)
    topology = topologies.get_topology_desc("h200", "cuda", target_config=card, topology="1x1x2")
    mesh = Mesh(np.array(topology.devices)[::-1], ("y",), axis_types=(AxisType.Explicit,))
    compiled = {}
    with jax.set_mesh(mesh):
        for name, (a, b, out) in patterns.items():
            a, b = (
                jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
                for shape, spec in (((24, 16), a), ((16, 32), b))
            )
            f = jax.jit(functools.partial(jaxmp.matmul, out_sharding=out, implementation="cublasmp"))
            program = f.lower(a, b).compile()
            assert "jaxmp_matmul" in program.as_text()
            compiled[name] = serialize_executable.serialize(program)
    assert not any(device.platform == "gpu" for device in jax.devices())
    pickle.dump(compiled, open(to, "wb"))
"""


# XLA compiles a product to a fusion, or with this flag to a call of cuBLAS.
EXPLAINS = """
    import pickle, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    import jaxmp
    card = pickle.load(sys.stdin.buffer)
    topology = topologies.get_topology_desc("h200", "cuda", target_config=card, topology="1x1x2")
    mesh = Mesh(np.array(topology.devices), ("y",), axis_types=(AxisType.Auto,))
    def products(x, w, y, v):
        return x @ w, y @ v
    with jax.set_mesh(mesh):
        types = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(None, axis)))
            for shape, axis in (((64, 512), "y"), ((512, 512), "y"), ((32, 512), None), ((512, 512), "y"))
        )
        explanation = jaxmp.explain(products, compiled=True, quiet=True)(*types)
    for row in explanation.rows:
        print([row.kind, row.axes, row.nbytes, row.count, row.shape, row.flops, row.cause_kind, row.is_hidden])
    assert max(each.nbytes for each in explanation.memory.largest) == 512 * 256 * 4, explanation
"""


# A training step whose weights are gathered and whose gradients are summed by XLA: most of that depends on no call.
SCHEDULES = """
    import pickle, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    import jaxmp
    card, loops = pickle.load(sys.stdin.buffer)
    topology = topologies.get_topology_desc("h200", "cuda", target_config=card, topology="1x1x2")
    mesh = Mesh(np.array(topology.devices), ("y",), axis_types=(AxisType.Explicit,))
    def layer(x, weights):
        up, down, gain = weights
        h = jaxmp.matmul(x, up, out_sharding=P(None, "y"), implementation="cublasmp")
        h = jaxmp.matmul(jnp.tanh(h), down, out_sharding=P("y", None), implementation="cublasmp")
        return h + jax.sharding.reshard(x * jax.sharding.reshard(gain, P(None, None)), P("y", None)), jnp.sum(h)
    def loss(weights, x):
        if loops:
            x, sums = jax.lax.scan(layer, x, weights)
            return jnp.sum(x) + jnp.sum(sums)
        for i in range(2):
            x, _ = layer(x, [w[i] for w in weights])
        return jnp.sum(x)
    n = 1024
    shapes = ((P(None, None, "y"), (2, n, n)), (P(None, "y", None), (2, n, n)), (P(None, None, "y"), (2, n, n)))
    with jax.set_mesh(mesh):
        *weights, x = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for spec, shape in (*shapes, (P("y", None), (n, n)))
        )
        print(jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text())
"""
COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|async)-?(start|done|)\("
)


def without_a_gpu(program, given, **knobs):
    """Returns the output of a process that has the plugin but no driver."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAXMP_FAKES", "FAKE_"))}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ""} | knobs
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, input=pickle.dumps(given), env=env, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


def test_a_program_is_compiled_without_a_gpu_and_runs_on_one(tmp_path):
    """Libraries are opened when the program runs, and it finds its place among the devices there."""
    patterns = PATTERNS | {"all_reduce": (P(None, "y"), P("y", None), P(None, None))}
    without_a_gpu(COMPILES, (CARD, patterns, tmp_path / "compiled"))
    compiled = pickle.loads((tmp_path / "compiled").read_bytes())
    jaxmp.register()
    a, b = integers((24, 16)), integers((16, 32), 1)
    # test_calls.py uses the same devices for another program that does not name its devices: a process has one
    # assignment of devices to such programs.
    mesh = mesh_over((1, 0))
    for name, (spec_a, spec_b, _) in patterns.items():
        program = serialize_executable.deserialize_and_load(*compiled[name], execution_devices=list(mesh.devices))
        given = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, spec_a), (b, spec_b)))
        np.testing.assert_array_equal(program(*given), a @ b)


@pytest.mark.parametrize("limit", [10**9, 0], ids=["loops", "cublas"])
def test_explain_reads_programs_for_gpus_without_one(limit):
    flags = f"{os.environ['XLA_FLAGS']} --xla_gpu_gemm_rewrite_size_threshold={limit}"
    rows = [ast.literal_eval(line) for line in without_a_gpu(EXPLAINS, CARD, XLA_FLAGS=flags).splitlines()]
    assert rows == [
        ["all-gather", ("y",), 64 * 256 * 4, 1, "f32[64,512]", 0, "product", True],
        ["dot", (), 0, 1, "f32[32,256]", 2 * 32 * 512 * 256, "product", False],
        ["dot", (), 0, 1, "f32[64,256]", 2 * 64 * 512 * 256, "product", False],
    ]


@pytest.mark.parametrize("loops", [False, True], ids=["unrolled", "scan"])
def test_no_collective_is_in_flight_across_a_call(loops):
    """Ranks could meet a collective and a call in different orders, and wait for each other. XLA's scheduler counts a
    call as one of its collectives. It captures no call into a graph, where a call would keep its workspace and number.
    """
    text = without_a_gpu(SCHEDULES, (CARD, loops))
    calls, collectives = judge_schedule(text)
    assert calls == text.count('"jaxmp_matmul"') - text.count('pattern = "local"')
    assert calls >= 4
    assert collectives >= 2


def judge_schedule(text):
    """Returns the numbers of calls between devices and of collectives; fails where two are in flight together."""
    calls = collectives = 0
    for computation in re.split(r"\n(?=\S)", text):
        in_flight = False
        for line in computation.splitlines()[1:]:
            is_call = '_xla_stream_annotation="collective"' in line
            found = re.search(r" call-(start|done)\(", line) if is_call else COLLECTIVE.search(line)
            if not found:
                continue
            assert in_flight == (found[1] == "done"), computation
            assert not computation.startswith("%command_buffer"), computation
            in_flight = found[1] == "start"
            calls += is_call and in_flight
            collectives += not is_call and found[1] != "done"
    return calls, collectives
