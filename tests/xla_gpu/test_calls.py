"""Programs on real XLA:GPU over a fake driver (`make test-xla-gpu`): how XLA starts, places and runs our call.

Silently wrong without these: a device that takes another one's place in the mesh, work that every run puts on a device,
memory that is copied where it was donated. The products are hostmp's, so their values prove the placement and nothing
of cuBLASMp; kernels of XLA's do not run, so every program here is calls, copies and nothing else.
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
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

PATTERNS = {
    "all_gather": (P("y", None), P(None, "y"), P(None, "y")),
    "reduce_scatter": (P(None, "y"), P("y", None), P("y", None)),
    "all_reduce": (P(None, "y"), P(None, "y"), P(None, None)),  # b stored (n, k), as cuBLASMp wants it
    "local": (P("y", None), P(None, None), P("y", None)),
}
# Work of XLA's own behind every program of one call.
XLAS = ["EventRecord", "EventRecord", "StreamWaitEvent"]


def mesh_over(order):
    return Mesh(np.array(jax.devices())[list(order)], ("y",), axis_types=(AxisType.Explicit,))


@functools.cache
def integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def operands(name, mesh):
    """(product, its operands, the right result) of a pattern."""
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


def test_one_program_of_several_calls():
    mesh = mesh_over(range(4))
    a, b = integers((24, 16)), integers((16, 32), 1)

    def layer(x, w, v):
        hidden = jaxmp.matmul(x, w, out_sharding=P(None, "y"), epilog=Epilog.RELU)
        return jaxmp.matmul(hidden, v, out_sharding=P("y", None))

    with jax.set_mesh(mesh):
        given = put(a, mesh, P("y", None)), put(b, mesh, P(None, "y")), put(b.T.copy(), mesh, P("y", None))
        np.testing.assert_array_equal(jax.jit(layer)(*given), np.maximum(a @ b, 0) @ b.T)


def test_a_gradient_is_a_call():
    mesh = mesh_over(range(4))
    a, b, t = integers((24, 16)), integers((16, 32), 1), integers((24, 32), 2)

    def pulled_back(x, w, t):
        return jax.vjp(lambda x: jaxmp.matmul(x, w, out_sharding=P("y", None)), x)[1](t)[0]

    with jax.set_mesh(mesh):
        given = put(a, mesh, P(None, "y")), put(b, mesh, P("y", None)), put(t, mesh, P("y", None))
        np.testing.assert_array_equal(jax.jit(pulled_back)(*given), t @ b.T)


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
    """Of ours, beside the library's work: a kernel, a copy or a memset at every run would stand here."""
    mesh = mesh_over(range(4))
    with jax.set_mesh(mesh):
        product, given, _ = operands(name, mesh)
        compiled = jax.jit(product)
        jax.block_until_ready([compiled(*given), compiled(*given)])
        time.sleep(0.1)  # what XLA does behind a run, it does on threads of its own
        for device in range(4):
            fake_gpus.driver_calls(device)
        jax.block_until_ready(compiled(*given))
        time.sleep(0.1)
        ours = [] if name == "local" else ["EventRecord"] * 2
        for device in range(4):
            calls = [call for call in fake_gpus.driver_calls(device) if call != "StreamSynchronize"]
            assert sorted(calls) == sorted(ours + XLAS)


def test_a_program_writes_no_position(tmp_path):
    """The ids of its devices say where each stands."""
    mesh = mesh_over(range(4))
    with jax.set_mesh(mesh):
        product, given, _ = operands("all_gather", mesh)
        text = jax.jit(product).lower(*given).compile().as_text()
    assert "jaxmp_matmul" in text
    assert "partition-id" not in text


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


def run_apart(program: str) -> str:
    """What a process of its own prints: an abort holds for the process."""
    env = os.environ | {"JAXMP_TIMEOUT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    text = "import fake_gpus\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_a_rank_that_stays_away_is_an_error_that_names_the_call():
    said = run_apart("""
        import ctypes, functools, os, sys
        import jax, numpy as np, jaxmp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((2,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
        x = np.ones((8, 8), np.float32)
        with jax.set_mesh(mesh):
            x, w = (jax.device_put(x, NamedSharding(mesh, s)) for s in (P("y", None), P(None, "y")))
            ctypes.CDLL("libcublasmp.so.0").fake_cublasmp_fail(b"GridCreate", 1, 6)
            try:
                jax.block_until_ready(jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))(x, w))
            except Exception as error:
                print(type(error).__name__, error, flush=True)
        os._exit(0)
    """)
    assert "has waited 1 s on the host for its peers in the call [pattern=all_gather" in said


def test_kernels_are_refused_and_not_passed_over():
    """A result that nobody computed must not go on: why every program here is without kernels."""
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.asarray(integers((4,)))))
