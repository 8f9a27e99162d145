"""The part of one rank in a test: `python ranks.py SCENARIO PROCESS NPROCESSES PORT`. A scenario is a key of SCENARIOS
or a module of this folder; several in one job, which begins once, are joined by "+". A rank prints FAULT and the time
when it goes wrong, SAW, the time and the error's cause when it catches one, and ENDED."""

from __future__ import annotations

import atexit
import code
import contextlib
import functools
import importlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from job import TIMEOUT
from shards import mesh_of, ones

import jaxmp

SCENARIO, PROCESS, NPROCESSES, PORT = sys.argv[1], *map(int, sys.argv[2:5])
VICTIM = 0 if SCENARIO.endswith(("-of-rank-0", "opening", "backend", "joining")) else NPROCESSES - 1
IS_VICTIM = VICTIM == PROCESS


def initialize(port=PORT, **options):
    jaxmp.distributed.initialize(f"{os.environ.get('HOST', '127.0.0.1')}:{port}", NPROCESSES, PROCESS, **options)


def cut_all():
    """Cuts every product over gloo into as many chunks as it has, at any cost."""
    deferred, hardware = jaxmp._src.core.lowering.deferred, jaxmp._src.platform.hardware.hardware
    machine = hardware.Hardware("a test", dict.fromkeys(hardware.RATES, 1.0), memory_bandwidth=1.0, link_bandwidth=1.0)
    hardware.of_job = lambda: machine
    deferred.best_chunks = lambda machine, possible, **_: max(possible, default=1)


if os.environ.get("CHUNKS"):
    cut_all()
if "+" in SCENARIO:
    initialize = functools.cache(initialize)


def fault():
    print(f"FAULT {time.time():.3f}")


def operands(mesh, m=48, n=8, k=48, dtype="float32"):
    return ones(mesh, (m, k), P(None, "x"), dtype), ones(mesh, (k, n), P("x", None), dtype)


@jax.jit
def product(a, b):
    return jaxmp.matmul(a, b, out_sharding=P(None, None))  # THE CALL


@jax.jit
def step(a, b):
    """A product that gathers rows, and its gradients: one scatters rows, the other gathers rows outside its call."""

    def loss(a, b):
        d = jaxmp.matmul(a, b, out_sharding=P(None, "x"))  # THE STEP
        return jnp.sum(d.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(a, b)


def step_operands(mesh, m=48, k=48, dtype="float32"):
    return ones(mesh, (m, k), P("x", None), dtype), ones(mesh, (k, 24), P(None, "x"), dtype)


def check(d, want):
    for shard in d.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.full(shard.data.shape, want))


def around_a_call(before=None, after=None):
    """Two good calls, the victim's `before` or `after`, and calls until something is seen."""
    initialize()
    a, b = operands(mesh_of())
    check(product(a, b), 48)
    if IS_VICTIM and before:
        before()
    check(product(a, b), 48)
    if IS_VICTIM and after:
        after()
    for _ in range(3):
        check(product(a, b), 48)


def catch_the_error():
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        around_a_call(before=send(signal.SIGKILL))


def first_step(fault):
    """Nothing has run yet: no collective, and so no transport."""
    initialize()
    a, b = step_operands(mesh_of())
    Path(f"ready.{PROCESS}").touch()
    if IS_VICTIM:
        while len(list(Path.cwd().glob("ready.*"))) < NPROCESSES:  # no rank is still starting its backend
            time.sleep(0.01)
        fault()
    jax.block_until_ready(step(a, b))


def send(number):
    def now():
        fault()
        os.kill(os.getpid(), number)

    return now


def during_a_call(number):
    """The victim gets its signal half-way through a run of large products."""
    initialize()
    a, b = operands(mesh_of(), 2048, 1024, 64 * NPROCESSES)
    check(product(a, b), 64 * NPROCESSES)
    until_the_fault(number, product, a, b)


def until_the_fault(number, call, *operands):
    call(*operands).block_until_ready()
    if IS_VICTIM:
        threading.Timer(0.3, send(number)).start()
    end = time.time() + 30
    while time.time() < end:
        call(*operands).block_until_ready()


def during_a_gather(number):
    """The same, of rows that are gathered in chunks, which are multiplied meanwhile."""
    initialize()
    a, b = step_operands(mesh_of(), 1024 * NPROCESSES, 512)
    rows = jax.jit(lambda a, b: jaxmp.matmul(a, b, out_sharding=P(None, "x")))  # THE ROWS
    lowered = rows.lower(a, b)
    assert "jaxmp_start_product" in lowered.as_text()
    assert " copy(%param" not in lowered.compile().as_text()  # the barrier waits with neither operand
    (row,) = jaxmp.explain(rows, quiet=True)(a, b).rows
    assert row.chunks > 1
    assert f" in {row.chunks} chunks" in row.algorithm
    until_the_fault(number, rows, a, b)


def gather_much():
    """8 MB from each of two ranks."""
    initialize()
    a, b = step_operands(mesh_of(), 2048, 2048)
    print("GATHERS")
    jax.block_until_ready(jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "x")))(a, b))


def catch_the_transport():
    """Prints what XLA's collective raises, caught by a program that asks for its cause."""
    try:
        gather_much()
    except jax.errors.JaxRuntimeError as error:
        print(f"SAW {time.time():.3f} {jaxmp.distributed.cause(error)}")


def raise_error():
    fault()
    raise ValueError("bad luck")


def leave_early():
    fault()
    sys.exit(0)


def wait_in_a_sum(before):
    """Two good steps, each with a collective of XLA's own first; the victim runs `before` before the next."""
    initialize()
    a, b = operands(mesh_of())
    total = jax.jit(jnp.sum)
    for i in range(3):
        if i == 2 and IS_VICTIM:
            before()
        check(product(a / total(a) * 48**2, b), 48)


def be_slow():
    time.sleep(1.6 * float(os.environ["JAXMP_TIMEOUT"]) / 2)


def dies_while_the_transport_opens():
    """Rank 0, with JAX's store, ends once all have passed the barrier of the first product, before its collective."""
    initialize()
    a, b = operands(mesh_of(), 2048, 1024, 2048 * NPROCESSES)
    if PROCESS == 0:
        native = jaxmp._src.platform.runtime.native.extension()

        def watch():
            while not native.last_call():
                time.sleep(0.0001)
            send(signal.SIGKILL)()

        threading.Thread(target=watch, daemon=True).start()
    product(a, b).block_until_ready()


def calibrate():
    """The command that measures a job, by small products, and what the next job is told."""
    cli, hardware = importlib.import_module("jaxmp._src.tools.cli.main").info, jaxmp._src.platform.hardware
    measures, timed = cli.calibrate, cli.calibrate.interleaved
    measures._LARGE, measures._STREAM = 32, 2**12
    measures.interleaved = lambda calls, **options: timed(calls, **options | {"seconds": 1e-4, "rounds": (1, 1)})
    start = functools.partial(jaxmp.distributed.initialize, f"127.0.0.1:{PORT}", NPROCESSES, PROCESS)
    cli.config.launcher, cli.distributed.initialize = (lambda: ("a test", NPROCESSES)), start
    assert importlib.import_module("jaxmp._src.tools.cli.main").main(["info", "--calibrate", "--json"]) == 0
    assert hardware.hardware.of_job() is None  # when it began
    print("TELLS", hardware.calibration.for_job())


def told():
    initialize()
    machine = jaxmp._src.platform.hardware.hardware.of_job()
    print("TOLD", machine and (machine.network_bandwidth, machine.network_latency, machine.network_load, machine.node))


def dies_while_backends_start():
    """Rank 0 ends at once; the others start their backends, and JAX asks rank 0's store."""
    initialize()
    if PROCESS == 0:
        send(signal.SIGKILL)()
    product(*operands(mesh_of()))


def dies_while_all_join():
    """Rank 0 ends when JAX's part has begun, and jaxmp's has not."""
    if PROCESS == 0:
        jaxmp._src.jobs.bootstrap.join_job = lambda *args, **_: send(signal.SIGKILL)()
    initialize()


def stopped_behind_another():
    """Rank 0 is stopped, rank 2 is late as if it waited for rank 0, and rank 3 waits for rank 2 in a call."""
    initialize()
    check(product(*operands(mesh_of())), 48)
    if PROCESS == 0:
        send(signal.SIGSTOP)()
    if PROCESS != 3:
        time.sleep(60)
    fault()
    half = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[2:])
    with jax.set_mesh(half):
        check(product(*operands(half)), 48)


def one_never_starts():
    if not IS_VICTIM:
        fault()
        initialize(initialization_timeout=3)


def strangers_at_the_start():
    """Before a rank answers anybody, strangers wait at its port, silent and loud."""
    start, kept = jaxmp._src.jobs.bootstrap.Peers.start, []

    def start_late(self, *args):
        for number in range(80):
            stranger = socket.create_connection((self.host, self.port))
            stranger.sendall(b"" if number % 2 else b"hello" * 20)
            kept.append(stranger)
        start(self, *args)

    jaxmp._src.jobs.bootstrap.Peers.start = start_late
    initialize()
    check(product(*operands(mesh_of())), 48)
    if PROCESS == 0:  # JAX's service listens at the address that was given, and at no other one of this machine
        socket.create_connection(("127.0.0.1", PORT)).close()
        try:
            socket.create_connection(("127.0.0.2", PORT)).close()
        except ConnectionRefusedError:
            print("REFUSED")
    print("STRANGERS", jaxmp.distributed._job.peers.strangers)


def disagree(build, wrong):
    """`build(**wrong)` on the victim, `build()` on the others."""
    initialize()
    mesh_of()
    fault()
    check_ready = build(**(wrong if IS_VICTIM else {}))
    jax.block_until_ready(check_ready)


def call_with(k=48, dtype="float32", **options):
    a, b = operands(jax.sharding.get_mesh(), k=k, dtype=dtype)
    return jax.jit(lambda a, b: jaxmp.matmul(a, b, out_sharding=P(None, None), **options))(a, b)


def rounded_with(weights="int8", gradients="bfloat16"):
    """The columns of b are gathered, rounded."""
    a, b = step_operands(jax.sharding.get_mesh())
    comm = jaxmp.CommOptions(weights=weights, gradients=gradients)
    return jax.jit(lambda a, b: jaxmp.matmul(a, b, out_sharding=P("x", None), comm=comm))(a, b)


def step_with(**options):
    return step(*step_operands(jax.sharding.get_mesh(), **options))


def call_on_mesh(shape=(4,), names=("x",)):
    mesh = mesh_of(shape, names)
    a, b = operands(mesh)
    return jax.jit(lambda a, b: jaxmp.matmul(a, b, out_sharding=P(None, None)))(a, b)


def call_program(is_other=False):
    a, b = operands(jax.sharding.get_mesh())

    def one(a, b):
        return jaxmp.matmul(a, b, out_sharding=P(None, None))

    def another(a, b):
        return jaxmp.matmul(a, b, out_sharding=P("x", None))

    return jax.jit(another if is_other else one)(a, b)


def one_program_under_two_names():
    """The victim's function has another name and other lines, and is called eagerly in the end."""
    initialize()
    a, b = step_operands(mesh_of())

    def multiply(a, b):
        return jaxmp.matmul(a, b, out_sharding=P(None, "x"))

    def timed(*args):
        return jaxmp.matmul(*args, out_sharding=P(None, "x"))

    f = timed if IS_VICTIM else multiply

    def pull(a, b, ct):
        return jax.vjp(lambda a: f(a, b), a)[1](ct)[0]

    check(jax.jit(f)(a, b), 48)
    d = f(a, b) if IS_VICTIM else jax.jit(f)(a, b)
    check(d, 48)
    check(jax.jit(pull)(a, b, d), 24 * 48)


def other_version():
    if IS_VICTIM:
        jaxmp._src.jobs.bootstrap._versions = lambda: ("9.9.9", jax.__version__, "none")
    fault()
    initialize()


def other_count():
    fault()
    jaxmp.distributed.initialize(f"127.0.0.1:{PORT}", NPROCESSES + IS_VICTIM, PROCESS)


def begin_again():
    """A second call, a call after shutdown, a call after the backend exists."""
    initialize()
    try:
        initialize()
    except RuntimeError as error:
        print("SECOND", error)
    jaxmp.distributed.shutdown()
    initialize(int(os.environ["NEXT_PORT"]), timeout=5)
    check(product(*operands(mesh_of())), 48)
    try:
        jax.jit(product)(*operands(mesh_of()))  # nothing waits for it
    finally:
        jaxmp.distributed.shutdown()
    try:
        initialize()
    except RuntimeError as error:
        print("AFTER", error)


def end_ahead_of_the_result():
    """One rank starts a call, after other work, and ends without waiting for it; the others wait."""
    initialize()
    a, b = operands(mesh_of())
    check(product(a, b), 48)
    with jax.set_mesh(jax.make_mesh((1,), ("own",), devices=jax.local_devices())):
        x = jnp.ones((1024, 1024))
        work = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y @ y), x)).lower(x).compile()
    if PROCESS == 0:
        work(x)
    d = product(a, b)
    if PROCESS != 0:
        check(d, 48)


def end_without_threads():
    """Imitates CPython 3.12, which starts no thread once a process ends."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    atexit.register(setattr, threading.Thread, "start", refuse)  # runs before jaxmp's own
    around_a_call()


def end_late():
    """One rank ends long after the others, which are not all connected with it."""
    initialize()
    print("NEIGHBOURS", *sorted(jaxmp._src.platform.runtime.native.extension().peers()))
    # No rank may hear of an end before that.
    jaxmp._src.platform.jax_internals.jax_distributed.distributed_client().wait_at_barrier("seen", 60_000)
    if PROCESS == 3:
        time.sleep(1.5 * float(os.environ["JAXMP_TIMEOUT"]))


def wait_for_a_signal():
    """The victim computes nothing and sleeps; the others wait for it in a call."""
    initialize()
    a, b = operands(mesh_of())
    check(product(a, b), 48)
    print("READY")
    if IS_VICTIM:
        time.sleep(60)
    fault()
    check(product(a, b), 48)


def catch_an_interrupt():
    """Rank 0 gets a signal while it waits for a call to which rank 1 comes later, catches it and goes on."""
    initialize()
    a, b = operands(mesh_of())
    check(product(a, b), 48)
    total = jax.jit(lambda a, b: jaxmp.matmul(a, b, out_sharding=P()).sum())
    wait = {"block_until_ready": jax.block_until_ready, "asarray": np.asarray, "float": float}[os.environ["WAIT"]]
    wait(total(a, b))
    print("READY")
    if PROCESS == 0:
        fault()
    else:
        time.sleep(3)
    caught = None
    try:
        wait(total(a, b))
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
        caught = type(error).__name__
        time.sleep(0.01)  # a second exception would come here
    if caught:
        print("CAUGHT", caught)
    check(product(a, b), 48)


def catch_an_interrupt_of_shutdown():
    """Rank 0 gets a signal while it waits for rank 1 to leave, catches it and leaves again."""
    initialize()
    if PROCESS == 0:
        threading.Timer(0.5, send(signal.SIGINT)).start()
        with contextlib.suppress(KeyboardInterrupt):
            jaxmp.distributed.shutdown()
        jaxmp.distributed.shutdown()
    time.sleep(2)


def many_groups_and_loops():
    """Sub-meshes, two groups of a mesh, loops, and independent calls on one line, which must not be mixed up."""
    initialize()
    halves = [jax.devices()[:2], jax.devices()[2:]]
    mesh = mesh_of((2, 2), ("x", "y"))
    for axis in ("x", "y"):
        a, b = ones(mesh, (8, 16), P(None, axis)), ones(mesh, (16, 4), P(axis, None))

        @jax.jit
        def many(a, b):
            products = [jaxmp.matmul(a, b * i, out_sharding=P(None, None)) for i in (1, 2, 3)]
            looped = jax.lax.fori_loop(
                0, 3, lambda i, d: d + jaxmp.matmul(a, b, out_sharding=P(None, None)), jnp.zeros((8, 4))
            )
            return sum(products) + looped

        for _ in range(5):
            check(many(a, b), 16 * 9)
    mine = halves[0] if PROCESS < 2 else halves[1]
    half = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=mine)
    with jax.set_mesh(half):
        for _ in range(3 + PROCESS // 2):  # the halves do not count together
            check(product(*operands(half)), 48)
    check(product(*operands(mesh_of())), 48)


def raise_without_an_end():
    """Uncaught exceptions that do not end the rank: at a prompt, printed by a library."""
    initialize()
    a, b = operands(mesh_of())
    if IS_VICTIM:
        code.InteractiveConsole().push("misspelt")
        try:
            raise ValueError("printed")
        except ValueError:
            sys.excepthook(*sys.exc_info())
    check(product(a, b), 48)


def fork_a_child_that_raises():
    """A child of the victim is interrupted while its parent waits in a call for the others."""
    initialize()
    a, b = operands(mesh_of())
    check(product(a, b), 48)
    if not IS_VICTIM:
        time.sleep(1.5)
    elif os.fork() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    check(product(a, b), 48)
    if IS_VICTIM:
        print("CHILD", os.waitstatus_to_exitcode(os.wait()[1]))
        if os.fork() == 0:
            sys.exit(3)
        print("CHILD", os.waitstatus_to_exitcode(os.wait()[1]))


def leave_a_child():
    """The victim is killed; a child of it lives on, with its sockets."""
    initialize()
    a, b = operands(mesh_of())
    check(product(a, b), 48)
    if IS_VICTIM:
        if os.fork() == 0:
            time.sleep(TIMEOUT)
            os._exit(0)
        send(signal.SIGKILL)()
    check(product(a, b), 48)


def share_under_a_limit():
    """A rank that has LIMIT, "AS 1000", is kept to so many bytes; with LATER_LIMIT once it has met the others."""

    def keep_to(limit):
        if limit in os.environ:
            name, most = os.environ[limit].split()
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(most),) * 2)

    keep_to("LIMIT")
    native = jaxmp._src.platform.runtime.native
    initialize()
    keep_to("LATER_LIMIT")
    print("SHARES", *sorted(native.shared_processes))
    mesh = mesh_of()
    check(product(*operands(mesh)), 48)
    fault()
    check(product(*operands(mesh, 1 << 17)), 48)
    end = time.time() + 10
    while native.extension().arena_use()["touched"] >= 1 << 20 and time.time() < end:
        time.sleep(0.1)
    print("KEEPS", native.extension().arena_use()["touched"] >> 20, "MB")


def of_signals(name, number):
    """Scenarios that send the victim a signal."""
    before, first = lambda: around_a_call(before=send(number)), lambda: first_step(send(number))
    return {
        f"{name}-before": before,
        f"{name}-of-rank-0": before,
        f"{name}-during": lambda: during_a_call(number),
        f"{name}-during-chunks": lambda: during_a_call(number),
        f"{name}-during-gathers": lambda: during_a_gather(number),
        f"{name}-after": lambda: around_a_call(after=send(number)),
        f"first-{name}": first,
        f"first-{name}-of-rank-0": first,
    }


SCENARIOS = {
    "fine": lambda: around_a_call(),
    **of_signals("killed", signal.SIGKILL),
    **of_signals("stopped", signal.SIGSTOP),
    "calibrate": calibrate,
    "told": told,
    "large": gather_much,
    "large-and-caught": catch_the_transport,
    "killed-and-caught": catch_the_error,
    "stopped-behind": stopped_behind_another,
    "raised": lambda: around_a_call(before=raise_error),
    "left": lambda: around_a_call(before=leave_early),
    "left-a-sum": lambda: wait_in_a_sum(leave_early),
    "slow": lambda: around_a_call(before=be_slow),
    "shape": lambda: disagree(call_with, {"k": 96}),
    "dtype": lambda: disagree(call_with, {"dtype": "bfloat16"}),
    "epilog": lambda: disagree(call_with, {"epilog": jaxmp.Epilog.RELU}),
    "alpha": lambda: disagree(call_with, {"alpha": 2.0}),
    "rounded-weights": lambda: disagree(rounded_with, {"weights": "float8_e4m3fn"}),
    "rounded-gradients": lambda: disagree(rounded_with, {"gradients": None}),
    "mesh": lambda: disagree(call_on_mesh, {"shape": (2, 2), "names": ("x", "y")}),
    "program": lambda: disagree(call_program, {"is_other": True}),
    "two-names": one_program_under_two_names,
    "first-raised": lambda: first_step(raise_error),
    "step-rows": lambda: disagree(step_with, {"m": 96}),
    "opening": dies_while_the_transport_opens,
    "backend": dies_while_backends_start,
    "joining": dies_while_all_join,
    "absent": one_never_starts,
    "absent-of-rank-0": one_never_starts,
    "strangers": strangers_at_the_start,
    "version": other_version,
    "count": other_count,
    "begin-again": begin_again,
    "early-end": end_ahead_of_the_result,
    "end-without-threads": end_without_threads,
    "late-end": end_late,
    "signal": wait_for_a_signal,
    "signal-and-caught": catch_an_interrupt,
    "signal-in-shutdown": catch_an_interrupt_of_shutdown,
    "groups": many_groups_and_loops,
    "raised-and-went-on": raise_without_an_end,
    "limited": share_under_a_limit,
    "forked": fork_a_child_that_raises,
    "killed-with-a-child": leave_a_child,
}


def main():
    # A shell has what it runs in the background ignore interrupts, and so would the tests that it started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name in SCENARIO.split("+"):
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users have them
                if name in SCENARIOS:
                    SCENARIOS[name]()
                else:
                    importlib.import_module(name).main(initialize, PROCESS)
    except Exception as error:
        seen = jaxmp.distributed.cause(error) or error
        if not isinstance(seen, ValueError):
            print(f"SAW {time.time():.3f} {type(seen).__name__}: {seen}")
        raise
    print("ENDED")


if __name__ == "__main__":
    main()
