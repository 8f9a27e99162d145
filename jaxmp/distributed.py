"""Many processes: starting them, and what each of them sees when another is wrong, slow or dead."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp._src.primitive.collectives import process_barrier_p
from jaxmp._src.primitive.primitives import matmul_p
from jaxmp._src.runtime import bootstrap, jax_compat, jax_lowering, logs, watch
from jaxmp._src.runtime import native as native_lib
from jaxmp._src.runtime.config import add_xla_flag, config, loopback_without_proxy, parse_timeout
from jaxmp._src.runtime.peers import Peers
from jaxmp._src.runtime.watch import DistributedError

__all__ = ["DistributedError", "initialize", "shutdown"]


def __dir__() -> list[str]:
    return list(__all__)


# JAX's own watch ends a process whose peer is gone, without an exception; ours speaks first.
_NO_HEARTBEAT = 10**6  # seconds; of other waits of JAX's too
# What a process may take to end after a failure until the system ends it.
_GRACE = 10
_POLL = 0.05
_LOOPBACK = "127.0.0.1"


class _State:
    """This process's part in the job, from `initialize` to `shutdown`."""

    def __init__(self, process: int, nprocesses: int, timeout: float, interrupts: tuple[socket.socket, ...]) -> None:
        self.process, self.nprocesses, self.timeout, self.interrupts = process, nprocesses, timeout, interrupts
        self.peers: Peers | None = None  # until it has met them
        self.generation = 0
        self.reason = ""  # why this process cannot end well


_state: _State | None = None
_generation = 0
_are_hooks_set = False


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 300,
    timeout: float | None = None,
) -> None:
    """Make this process one of a job, by `jax.distributed.initialize`.

    Every process calls it, ahead of anything that starts JAX's backend. Without arguments the launcher says who is who:
    mpiexec (through mpi4py; `pip install 'jaxmp[mpi]'` brings both) or SLURM's srun. Without a launcher pass the first
    three arguments.

    From then on a call whose ranks spread over processes first waits until all of them have come to it with an equal
    call. Where one does not come within `timeout`, has ended, or came with another call, every process of the group
    gets a `DistributedError` from waiting for the result. See docs/faults.md.

    Args:
      coordinator_address: "host:port" of process 0, where it opens that port.
      num_processes, process_id: how many, and which of them this is.
      local_device_ids: as in `jax.distributed.initialize`.
      initialization_timeout: seconds to wait for all processes to call this.
      timeout: seconds after which a process that has not come to a call is missing; JAXMP_TIMEOUT by default.

    Raises:
      RuntimeError: called twice, or after the backend exists, or there is neither a launcher nor the arguments, or
        the launcher's variables are incomplete, or rank 0 cannot listen at the coordinator's address, or the machine
        has no network.
      ImportError: mpi4py is missing under mpiexec.
      ValueError: arguments that do not go together, or a host that cannot be resolved.
      DistributedError: processes are missing, or run other versions of jaxmp or JAX.

    >>> import jaxmp
    >>> jaxmp.distributed.initialize("127.0.0.1:9999", 1, 1)
    Traceback (most recent call last):
    ValueError: initialize: process_id must be from 0 to num_processes - 1 = 0, got 1
    """
    global _state
    bootstrap.check_arguments(coordinator_address, num_processes, process_id)
    _check_moment()
    seconds = config().timeout if timeout is None else parse_timeout("initialize: timeout", timeout)
    native_lib.set_gpu_timeout(None if timeout is None else seconds)
    if coordinator_address is None:
        found = bootstrap.detect(local_device_ids, initialization_timeout)
        coordinator_address, num_processes, process_id, local_device_ids = found
    assert coordinator_address is not None
    assert num_processes is not None
    assert process_id is not None
    logger = logs.logger("distributed")
    host, _, port = coordinator_address.rpartition(":")
    # gloo's time for a call that all have come to; without it half an hour.
    add_xla_flag("xla_cpu_collective_timeout_seconds", str(max(1, round(seconds))))
    bind_address = bootstrap.bind_address(host, int(port)) if process_id == 0 else None
    if process_id != 0 and not jax_compat.uses_mutual_tls():
        bootstrap.route_to(_LOOPBACK)
        proxy_port = native_lib.extension().start_coordinator_proxy(host.strip("[]"), port)
        coordinator_address = f"{_LOOPBACK}:{proxy_port}"
    connect = functools.partial(
        jax.distributed.initialize,
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
        initialization_timeout=_NO_HEARTBEAT,  # at its end JAX would abort
        heartbeat_timeout_seconds=_NO_HEARTBEAT,
        shutdown_timeout_seconds=max(1, round(seconds)),
    )
    _state = _State(process_id, num_processes, seconds, _watch_interrupts())
    _set_hooks()
    jax_lowering.require_devices([matmul_p, process_barrier_p])
    logger.info("rank %d of %d: joins the job at %s", process_id, num_processes, coordinator_address)
    try:
        deadline = time.monotonic() + initialization_timeout
        missing = (
            f"initialize: rank {process_id} did not meet all {num_processes} processes at {host}:{port} within "
            f"{initialization_timeout} s; look for one that did not start"
        )
        with loopback_without_proxy():
            watch.on_waiter(connect, lambda: missing if time.monotonic() > deadline else "")
        _join(_state, host, initialization_timeout)
    except DistributedError as error:
        _state.reason = str(error)
        logger.error("rank %d: %s", process_id, error)
        raise
    except Exception:  # JAX refuses, and nothing has begun
        _close(_state)
        _state = None
        raise
    logger.info("rank %d of %d: has met the others", process_id, num_processes)


def _join(state: _State, host: str, timeout: int) -> None:
    """Meet the other processes, and connect this one's neighbours."""
    global _generation
    native, interrupts = native_lib.extension(), state.interrupts
    join = functools.partial(
        bootstrap.join_job, host, state.process, state.nprocesses, _generation, timeout, state.timeout
    )
    try:
        membership = watch.on_waiter(
            join, lambda: f"initialize: {watch.NO_STORE}" if native.service_lost_for() >= 0 else ""
        )
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"initialize: the processes did not all meet within {timeout} s ({error})") from error
    state.generation, _generation = _generation, _generation + 1
    state.peers = membership.peers
    native_lib.start_barrier(
        state.process,
        state.nprocesses,
        state.timeout,
        interrupts[0].fileno() if interrupts else -1,
    )
    membership.peers.start(native.wanted_processes, membership.address_of, native.connect_peer, native.lose_peer)
    guard = functools.partial(watch.guard_main_thread, state.process, state.timeout, lambda: _state is state)
    threading.Thread(target=guard, name="jaxmp-guard", daemon=True).start()
    neighbours = bootstrap.neighbours(state.process, state.nprocesses)
    native.want_processes(neighbours)
    missing = membership.peers.wait_for(neighbours, _GRACE if membership.refusal else timeout)
    if membership.refusal or missing:
        raise DistributedError(f"initialize: {membership.refusal or missing}")


def shutdown() -> None:
    """Leave the job: wait for the others to leave it too, then end JAX's part.

    At the end of a program this happens by itself. JAX cannot be initialized again while a backend exists; after
    `jax.extend.backend.clear_backends()` it can.

    Raises:
      DistributedError: a process has ended without leaving, or does not answer.

    >>> import jaxmp
    >>> jaxmp.distributed.shutdown()  # nothing to leave: does nothing
    """
    global _state
    if _state is None:
        return
    reason = _state.reason or native_lib.extension().barrier_failure() or _farewell(_state)
    logs.logger("distributed").info("rank %d: leaves the job%s", _state.process, f", for {reason}" if reason else "")
    _close(_state)
    if reason:
        native_lib.extension().leave_barrier(reason)
        native_lib.stop_barrier()
        jax_compat.abandon_distributed()
        _state = None
        raise DistributedError(f"shutdown: {reason}")
    native_lib.stop_barrier()
    _state = None
    jax.distributed.shutdown()


def _check_moment() -> None:
    if _state is not None or jax_compat.distributed_client() is not None:
        raise RuntimeError("initialize: this process is part of a job already; call it once, or shutdown() in between")
    if jax_compat.backend_exists():
        raise RuntimeError(
            "initialize: JAX's backend exists already; call this ahead of jax.devices, jnp.ones and all that computes"
        )


# Interrupts -----------------------------------------------------------------------------------------------------


def _watch_interrupts() -> tuple[socket.socket, ...]:
    """A pair of sockets over which Python tells at once of a signal, while its handler has to wait for Python code."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if previous != -1:  # somebody else's, an event loop perhaps
        signal.set_wakeup_fd(previous)
        reader.close()
        writer.close()
        return ()
    return reader, writer


def _close(state: _State) -> None:
    """Listen no more, to peers and to signals."""
    if state.peers is not None:
        state.peers.close()
    _ignore_interrupts(state)


def _ignore_interrupts(state: _State) -> None:
    if not state.interrupts:
        return
    with contextlib.suppress(ValueError):  # not the main thread
        if (current := signal.set_wakeup_fd(-1)) not in (-1, state.interrupts[1].fileno()):
            signal.set_wakeup_fd(current)
    for end in state.interrupts:
        end.close()


# Errors ---------------------------------------------------------------------------------------------------------


def _set_hooks() -> None:
    """Once in a process: errors get their type, the end has its reason, and a forked child is no part of the job."""
    global _are_hooks_set
    if _are_hooks_set:
        return
    _are_hooks_set = True
    jax_compat.translate_errors(_translated, _watched)
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_at_exit)


def _translated(error: Exception) -> Exception | None:
    """The DistributedError behind an error of XLA, if that is what it is."""
    if _state is None:
        return None
    text, native = str(error), native_lib.extension()
    if failure := native.cuda_failure():
        return DistributedError(failure)
    ours = re.search(r"jaxmp\.DistributedError: (.*)", text)
    if ours:
        failure = native.barrier_failure()
        return DistributedError(failure if failure and failure in text else ours[1])
    if "gloo" not in text.lower():
        return None
    return DistributedError(f"{native.last_call() or 'a collective'}: {_why_transport_failed(native)} ({text})")


def _watched(wait: Callable[[], Any]) -> Any:
    """`wait()`, or a DistributedError where a peer is gone and the wait goes on."""
    if (state := _state) is None:
        return wait()
    return watch.wait_for(wait, state.process, state.timeout)


def _why_transport_failed(native: Any) -> str:
    """Who is to blame for a collective that failed half-way: a peer whose end is about to be known, or a silent one."""
    deadline = time.monotonic() + 1
    while True:
        peers = native.peers()
        gone = [f"rank {i} {peer['gone']}" for i, peer in peers.items() if peer["gone"]]
        if gone:
            return ", ".join(gone)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    silent = [f"rank {i} {watch.SILENT}" for i, peer in peers.items() if peer["silence"] > 3 * 1.5]
    return ", ".join(silent) or "the transport gave up, though every process answers"


# The end --------------------------------------------------------------------------------------------------------


def _farewell(state: _State) -> str:
    """Leave with all others, for as long as they take; the reason why that is not possible, or "".

    A process knows its neighbours and the groups of its calls, so JAX's store says when all are here. It first does
    what it has dispatched, for which others wait.
    """
    native = native_lib.extension()
    try:
        for array in jax_compat.after_dispatched_programs():
            watch.wait_for(array.block_until_ready, state.process, state.timeout)
    except DistributedError as error:
        return str(error)
    if failure := native.barrier_failure():
        return str(failure)
    native.leave_barrier("")
    client, key = jax_compat.distributed_client(), f"jaxmp/{state.generation}/end"

    def why_not() -> str:
        for what, seconds in watch.troubles():
            if watch.SILENT not in what or seconds > state.timeout:
                return what
        return ""

    try:
        watch.on_waiter(lambda: client.wait_at_barrier(key, _NO_HEARTBEAT * 1000), why_not)
    except DistributedError as error:
        return str(error)
    except jax.errors.JaxRuntimeError as error:
        return f"the processes did not all leave ({error})"
    return ""


def _uncaught() -> str:
    """The exception that ends this process, "it raised ValueError: ..."; "" where none does.

    The interpreter keeps the last one that nobody caught. Where that has ended the program, nothing had called its
    outermost frame; at a prompt, and where a library prints an exception, the program goes on.
    """
    error, traceback = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if error is None or traceback is None or traceback.tb_frame.f_back is not None or hasattr(sys, "ps1"):
        return ""
    message = f"{error}".partition("\n")[0]
    return f"it raised {type(error).__name__}: {message}"


def _forget() -> None:
    """In a forked child: close what it has inherited of the job, without a word to anybody."""
    global _state
    state, _state = _state, None
    if state is None:
        return
    if state.peers is not None:
        state.peers.forget()
    _ignore_interrupts(state)
    jax_compat.abandon_distributed()


def _at_exit() -> None:
    """JAX's own end waits in a barrier for processes that may be gone, so a job that failed ends here."""
    global _state
    state, _state = _state, None
    if state is None:
        return
    failure = native_lib.extension().barrier_failure()
    state.reason = state.reason or _uncaught()
    try:
        reason = state.reason or failure or _farewell(state)
    except KeyboardInterrupt:
        reason = "it was interrupted"
    _close(state)
    if not reason:
        native_lib.stop_barrier()
        return
    if not state.reason:
        print(f"jaxmp.DistributedError: rank {state.process}: {reason}", file=sys.stderr)
    native_lib.extension().leave_barrier(reason[:500])
    if hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_GRACE)
    jax_compat.abandon_distributed()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
