"""Programs that hang if a collective call blocks the thread it runs on. A handler that waits for its peers works in
every small test and deadlocks in real programs. XLA:CPU runs independent operations of each device in any order, so two
devices can wait in different calls, and their threads are then missing from XLA's own collectives. Each program runs in
its own process with a deadline, because a hang cannot be caught from inside."""

import os
import subprocess
import sys

import pytest

DEADLINE = 300  # seconds; the programs take a few

# Sixteen independent calls of all three patterns, between XLA's own collectives, after chains of different lengths. 256
# x 256 floats are too large for XLA to run the program on one thread.
INDEPENDENT_CALLS = """
import jax, numpy as np
from jax import lax, numpy as jnp
from jax.sharding import PartitionSpec as P
import jaxmp

devices, runs, size = {devices}, {runs}, 256
mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
patterns = (jaxmp.matmul_all_reduce, jaxmp.matmul_reduce_scatter, jaxmp.all_gather_matmul)

def body(x, w):
    results = []
    for i in range(16):
        xi = x * (1 + i)
        for _ in range(i * 7 % 4):
            xi = jnp.tanh(xi)
        y = patterns[i % 3](xi, w, "x", implementation="host")
        y = lax.psum(jnp.tanh(y), "x") if i % 2 else y
        results.append(y[:1])
    return tuple(results)

program = jax.jit(
    jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=(P("x"),) * 16, check_vma=False)
)
rng = np.random.default_rng(0)
x = rng.standard_normal((devices * size, size), np.float32)
w = rng.standard_normal((devices * size, size), np.float32)
first = [np.asarray(y) for y in program(x, w)]
for run in range(runs):
    for y, expected in zip(program(x, w), first, strict=True):
        np.testing.assert_array_equal(np.asarray(y), expected)
print("done")
"""

# One executable with calls in a loop, run by several Python threads at once: iterations and runs must not mix.
CONCURRENT_RUNS = """
import threading
import jax, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
import jaxmp

devices, size = {devices}, 128
mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

def body(x, w):
    def step(carry, _):
        return jaxmp.matmul_all_reduce(carry, w, "x", implementation="host") / size, None
    return lax.scan(step, x, None, length=5)[0]

program = jax.jit(
    jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=False)
)
rng = np.random.default_rng(0)
w = rng.standard_normal((devices * size, size), np.float32)
xs = [rng.standard_normal((devices * size, size), np.float32) for _ in range(4)]
expected = [np.asarray(program(x, w)) for x in xs]
differences = []

def run(x, y):
    for _ in range(25):
        if not np.array_equal(np.asarray(program(x, w)), y):
            differences.append(x)

threads = [threading.Thread(target=run, args=arguments) for arguments in zip(xs, expected, strict=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not differences, len(differences)
print("done")
"""


def run_program(program, devices):
    """Runs the program on this many CPU devices; fails with its output if it fails or exceeds the deadline."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment)
    except subprocess.TimeoutExpired as hang:
        pytest.fail(f"no end after {DEADLINE} s on {devices} devices\n{hang.stdout}\n{hang.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.small("values", of=lambda devices: (devices > 2,))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_independent_calls_between_collectives(devices):
    run_program(INDEPENDENT_CALLS.format(devices=devices, runs=200), devices)


@pytest.mark.parametrize("devices", [2, 4])
def test_threads_running_one_program(devices):
    run_program(CONCURRENT_RUNS.format(devices=devices), devices)
