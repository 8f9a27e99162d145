"""Programs on real XLA:GPU over a fake driver (`make test-xla-gpu`): how XLA starts, places and runs our call.

Without these tests, a device could take a wrong place in the mesh, each run could put extra work on a device, and
donated memory could be copied. hostmp computes the products, the CPU runs XLA's kernels (bin/ptxas), and a fake NCCL
XLA's collectives, so values prove the placement only, and nothing about the libraries.
"""

import ctypes
import functools
import os
import subprocess
import sys
import textwrap
import time

import fake_gpus
import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

PATTERNS = {
    "all_gather": (P("y", None), P(None, "y"), P(None, "y")),
    "reduce_scatter": (P(None, "y"), P("y", None), P("y", None)),
    "all_reduce": (P(None, "y"), P(None, "y"), P(None, None)),  # b stored (n, k), as cuBLASMp wants it
    "local": (P("y", None), P(None, None), P("y", None)),
}
# XLA's own work after every program of one call.
XLAS = ["EventRecord", "EventRecord", "StreamWaitEvent"]
# XLA's own work around a call between devices: its stream of collectives waits for the main one, and the other way.
CHANGES_OF_STREAM = ["EventRecord", "StreamWaitEvent"] * 2


def mesh_over(order):
    return Mesh(np.array(jax.devices())[list(order)], ("y",), axis_types=(AxisType.Explicit,))


@functools.cache
def integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def operands(name, mesh):
    """Returns (product, its operands, the right result) of a pattern."""
    a, b = integers((24, 16)), integers((16, 32), 1)
    spec_a, spec_b, out = PATTERNS[name]
    is_stored_nk = name == "all_reduce"
    product = functools.partial(jaxmp.matmul, out_sharding=out, transpose_b=is_stored_nk)
    return product, (put(a, mesh, spec_a), put(b.T.copy() if is_stored_nk else b, mesh, spec_b)), a @ b


def test_xla_has_the_fake_devices():
    devices = jax.devices()
    assert (jax.default_backend(), len(devices)) == ("gpu", fake_gpus.DEVICE_COUNT)
    assert {device.compute_capability for device in devices} == {"9.0"}


@pytest.mark.parametrize("order", [(0,), (0, 1), (0, 1, 2, 3), (3, 2, 1, 0), (2, 0), (1, 3)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_on_every_mesh(name, order):
    mesh = mesh_over(order)
    with jax.set_mesh(mesh):
        product, given, expected = operands(name, mesh)
        compiled = jax.jit(product)
        for _ in range(3):
            np.testing.assert_array_equal(compiled(*given), expected)
        np.testing.assert_array_equal(product(*given), expected)  # eagerly
    assert "Matmul" in fake_gpus.cublasmp_calls(order[0])


def test_groups_and_square_grids():
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    a, b = integers((24, 16)), integers((16, 32), 1)
    with jax.set_mesh(mesh):
        groups = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P("x", "y")))
        np.testing.assert_array_equal(groups(put(a, mesh, P("x", None)), put(b, mesh, P(None, "y"))), a @ b)
        gathered = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P("x", "y")))
        np.testing.assert_array_equal(gathered(put(a, mesh, P(("x", "y"), None)), put(b, mesh, P(None, "y"))), a @ b)
        grid = put(a, mesh, P("x", "y")), put(b, mesh, P("x", "y"))
        np.testing.assert_array_equal(groups(*grid), a @ b)


@pytest.mark.parametrize("transposition", ["NN", "NT", "TN", "TT"])
def test_an_all_reduce_with_c_is_right(transposition):
    """The library never receives C (test_cuda.py), because no source says if it adds C before or after the sum."""
    mesh = mesh_over(range(4))
    a, b, c = integers((24, 16)), integers((16, 32), 1), integers((24, 32), 2)
    ta, tb = (letter == "T" for letter in transposition)

    @jax.jit
    def product(x, w, c):
        return jaxmp.matmul(x, w, c=c, beta=2.0, transpose_a=ta, transpose_b=tb, out_sharding=P(None, None))

    with jax.set_mesh(mesh):
        x = put(a.T.copy(), mesh, P("y", None)) if ta else put(a, mesh, P(None, "y"))
        w = put(b.T.copy(), mesh, P(None, "y")) if tb else put(b, mesh, P("y", None))
        d = product(x, w, put(c, mesh, P(None, None)))
    for shard in d.addressable_shards:
        np.testing.assert_array_equal(shard.data, a @ b + 2 * c)


def test_loops_with_xlas_collectives_in_between():
    """One thread per device launches our calls and XLA's collectives in program order."""
    mesh = mesh_over(range(4))
    a, b = integers((8, 8)) / 4, integers((8, 8), 1) / 4

    def step(x, w):
        rows = jaxmp.matmul(x, w, out_sharding=P(None, "y"))  # gathers the rows of x
        return jax.sharding.reshard(rows, P("y", None)) + x

    with jax.set_mesh(mesh):
        x, w = put(a, mesh, P("y", None)), put(b, mesh, P(None, "y"))
        counted = jax.jit(lambda x, w: jax.lax.fori_loop(0, 4, lambda _, x: step(x, w), x))
        scanned = jax.jit(lambda x, w: jax.lax.scan(lambda x, _: (step(x, w), None), x, length=4)[0])
        expected = a.astype(np.float64)
        for _ in range(4):
            expected = expected @ b + expected
        for program in (counted, scanned):
            np.testing.assert_allclose(program(x, w), expected, rtol=1e-5)


def test_a_batch_is_a_call_for_each_index():
    mesh = mesh_over(range(4))
    a, b = integers((3, 24, 16)), integers((3, 16, 32), 1)
    with jax.set_mesh(mesh):
        product = jax.vmap(functools.partial(jaxmp.matmul, out_sharding=P(None, "y"), implementation="cublasmp"))
        given = put(a, mesh, P(None, "y", None)), put(b, mesh, P(None, None, "y"))
        np.testing.assert_array_equal(jax.jit(product)(*given), a @ b)


def test_an_exported_program_reads_its_position():
    """The exported program does not name the devices it runs on."""
    mesh = mesh_over((1, 0))
    with jax.set_mesh(mesh):
        product, given, expected = operands("all_gather", mesh)
        check = jax.export.DisabledSafetyCheck.custom_call("jaxmp_matmul")
        exported = jax.export.export(jax.jit(product), platforms=["cuda"], disabled_checks=[check])(*given)
        again = jax.export.deserialize(exported.serialize())
        assert "devices = dense<> " in again.mlir_module()
        np.testing.assert_array_equal(jax.jit(again.call)(*given), expected)


def test_a_donated_c_is_updated_in_place():
    mesh = mesh_over(range(4))
    a, b, c = integers((24, 16)), integers((16, 32), 1), integers((24, 32), 2)

    @functools.partial(jax.jit, donate_argnums=2)
    def update(x, w, c):
        return jaxmp.matmul(x, w, c=c, beta=1.0, out_sharding=P(None, "y"))

    with jax.set_mesh(mesh):
        given = put(a, mesh, P("y", None)), put(b, mesh, P(None, "y")), put(c, mesh, P(None, "y"))
        before = [shard.data.unsafe_buffer_pointer() for shard in given[2].addressable_shards]
        d = update(*given)
        np.testing.assert_array_equal(d, a @ b + c)
        assert [shard.data.unsafe_buffer_pointer() for shard in d.addressable_shards] == before
        assert given[2].is_deleted()


@pytest.mark.parametrize("name", PATTERNS)
def test_a_run_puts_two_events_on_the_device_or_nothing(name):
    """The library's work is not counted: another kernel, copy or memset in each run would show here.

    The program computes no position, because it contains the ids of its devices.
    """
    mesh = mesh_over(range(4))
    with jax.set_mesh(mesh):
        product, given, _ = operands(name, mesh)
        compiled = jax.jit(product).lower(*given).compile()
        assert "partition-id" not in compiled.as_text()
        jax.block_until_ready([compiled(*given), compiled(*given)])
        time.sleep(0.1)  # XLA does its work after a run on other threads
        for device in range(4):
            fake_gpus.driver_calls(device)
        jax.block_until_ready(compiled(*given))
        time.sleep(0.1)
        ours = [] if name == "local" else ["EventRecord"] * 2 + CHANGES_OF_STREAM
        for device in range(4):
            calls = [call for call in fake_gpus.driver_calls(device) if call != "StreamSynchronize"]
            assert sorted(calls) == sorted(ours + XLAS)


def test_dispatch_does_not_wait_for_the_device():
    mesh = mesh_over(range(2))
    a = np.ones((512, 512), np.float32)
    with jax.set_mesh(mesh):
        x, w = put(a, mesh, P("y", None)), put(a, mesh, P(None, "y"))
        f = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))
        jax.block_until_ready(f(x, w))
        start = time.monotonic()
        last = [f(x, w) for _ in range(30)]
        dispatched = time.monotonic() - start
        jax.block_until_ready(last)
        whole = time.monotonic() - start
    assert dispatched < whole / 2, f"{dispatched:.3f} s of {whole:.3f} s"


def test_a_thousand_calls_keep_the_memory():
    mesh = mesh_over(range(4))
    library = ctypes.CDLL("libcuda.so.1")
    with jax.set_mesh(mesh):
        product, given, expected = operands("all_gather", mesh)
        compiled = jax.jit(product)
        for _ in range(20):
            d = compiled(*given)
        jax.block_until_ready(d)
        before = library.fake_cuda_allocations()
        for _ in range(1000):
            d = compiled(*given)
        np.testing.assert_array_equal(d, expected)
        assert library.fake_cuda_allocations() == before


def test_a_failed_call_is_the_users_error():
    mesh = mesh_over(range(1))
    library = ctypes.CDLL("libcublasmp.so.0")
    with jax.set_mesh(mesh):
        product, given, expected = operands("local", mesh)
        compiled = jax.jit(product)
        compiled(*given)
        library.fake_cublasmp_fail(b"Matmul", 0, 7)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxmp: cublasmp Matmul: \[cublasMpMatmul\] a cause"):
            jax.block_until_ready(compiled(*given))
        np.testing.assert_array_equal(compiled(*given), expected)


def run_apart(program: str, **knobs: str) -> str:
    """Returns the output of a separate process."""
    env = os.environ | {"JAXMP_TIMEOUT": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | knobs
    text = "import fake_gpus\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("call", "runs_before", "waited"),
    [("GridCreate", 0, "4 s on the host"), ("Matmul", 1, "1 s on the device")],
    ids=["host", "device"],
)
def test_a_rank_that_stays_away_ends_the_process_with_the_call(call, runs_before, waited):
    """Rank 1 fails before the call that rank 0 waits in; a call's first run has four times the deadline."""
    said = run_apart(f"""
        import ctypes, functools
        import jax, numpy as np, jaxmp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((2,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
        x = np.ones((8, 8), np.float32)
        with jax.set_mesh(mesh):
            x, w = (jax.device_put(x, NamedSharding(mesh, s)) for s in (P("y", None), P(None, "y")))
            f = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))
            for _ in range({runs_before}):
                jax.block_until_ready(f(x, w))
            ctypes.CDLL("libcublasmp.so.0").fake_cublasmp_fail(b"{call}", 1, 6)
            jax.block_until_ready(f(x, w))
    """)
    assert f"has waited {waited} for its peers in the call [pattern=all_gather" in said


def test_ids_of_devices_are_not_their_ordinals():
    """A process with some of the devices counts them from 0."""
    said = run_apart("""
        import functools, os
        import jax, numpy as np
        jax.config.update("jax_cuda_visible_devices", "1,3")
        import jaxmp
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
        assert [(d.id, d.local_hardware_id) for d in jax.devices()] == [(0, 1), (1, 3)], jax.devices()
        x = np.arange(64, dtype=np.float32).reshape(8, 8) % 5
        mesh = Mesh(np.array(jax.devices())[[1, 0]], ("y",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            a, b = (jax.device_put(x, NamedSharding(mesh, s)) for s in (P("y", None), P(None, "y")))
            d = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))(a, b)
            np.testing.assert_array_equal(d, x @ x)
        print("right", flush=True)
        os._exit(0)
    """)
    assert said.rstrip().endswith("right"), said
