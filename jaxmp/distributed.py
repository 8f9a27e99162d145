"""Many processes: starting them, and what each of them sees when another is wrong, slow or dead."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jaxlib

from jaxmp._src.primitive.collectives import process_barrier_p
from jaxmp._src.primitive.primitives import batched_matmul_epilog_p, batched_matmul_p, matmul_epilog_p, matmul_p
from jaxmp._src.runtime import bootstrap, jax_compat
from jaxmp._src.runtime import native as native_lib
from jaxmp._src.runtime.config import add_xla_flag, config, parse_timeout
from jaxmp._src.runtime.peers import Peers

__all__ = ["DistributedError", "initialize", "shutdown"]

# JAX's own watch ends a process whose peer is gone, without an exception; ours speaks first.
_NO_HEARTBEAT = 10**6  # seconds
# What a process may take to end after a failure until the system ends it.
_GRACE = 10
_POLL = 0.05
# How often a wait for an array looks after the peers, and by how much a known failure may run ahead of the error.
_WATCH = 0.25
_SETTLES = 1.5
_NO_STORE = "rank 0 has ended, and JAX's coordination service with it"
_SILENT = "does not answer: it is stopped, or its machine or network is gone"


class DistributedError(RuntimeError):
    """A process of the job is missing, stuck, or runs another program; the message names it and the call."""


class _State:
    """This process's part in the job, from `initialize` to `shutdown`."""

    def __init__(self, process: int, nprocesses: int, timeout: float, interrupts: tuple[socket.socket, ...]):
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
    local_device_ids=None,
    initialization_timeout: int = 300,
    timeout: float | None = None,
) -> None:
    """Make this process one of a job; a thin layer over `jax.distributed.initialize`.

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
      timeout: seconds after which a process that has not come to a call is missing; JAXMP_TIMEOUT (60) by default.

    Raises:
      RuntimeError: called twice, or after the backend exists, or there is neither a launcher nor the arguments.
      ImportError: mpi4py is missing under mpiexec.
      ValueError: arguments that do not go together.
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
    if coordinator_address is None:
        found = bootstrap.detect(local_device_ids, initialization_timeout)
        coordinator_address, num_processes, process_id, local_device_ids = found
    assert num_processes is not None
    assert process_id is not None
    host, _, port = coordinator_address.rpartition(":")
    # gloo's time for a call that all have come to; without it half an hour.
    add_xla_flag("xla_cpu_collective_timeout_seconds", str(max(1, round(seconds))))
    if process_id != 0 and not jax_compat.uses_mutual_tls():
        proxy_port = native_lib.extension().start_coordinator_proxy(host.strip("[]"), port)
        coordinator_address = f"127.0.0.1:{proxy_port}"
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bootstrap.bind_address(host, port) if process_id == 0 else None,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=_NO_HEARTBEAT,
            shutdown_timeout_seconds=max(1, round(seconds)),
        )
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(
            f"initialize: rank {process_id} did not meet all {num_processes} processes at {host}:{port} within "
            f"{initialization_timeout} s; look for one that did not start ({error})"
        ) from error
    _state = _State(process_id, num_processes, seconds, _watch_interrupts())
    _set_hooks()
    jax_compat.require_devices(
        (matmul_p, matmul_epilog_p, batched_matmul_p, batched_matmul_epilog_p, process_barrier_p)
    )
    try:
        _join(_state, host, initialization_timeout)
    except DistributedError as error:
        _state.reason = str(error)
        raise


def _join(state: _State, host: str, timeout: int) -> None:
    """Meet the other processes, and connect this one's neighbours."""
    global _generation
    native, interrupts = native_lib.extension(), state.interrupts
    meet = functools.partial(bootstrap.meet, host, state.process, state.nprocesses, _generation, timeout, state.timeout)
    try:
        meeting = _on_waiter(meet, lambda: native.service_lost_for() >= 0 and f"initialize: {_NO_STORE}")
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"initialize: the processes did not all meet within {timeout} s ({error})") from error
    state.generation, _generation = _generation, _generation + 1
    state.peers = meeting.peers
    native_lib.start_barrier(
        state.process,
        state.nprocesses,
        state.timeout,
        config().compares_calls,
        interrupts[0].fileno() if interrupts else -1,
    )
    meeting.peers.start(native.wanted_processes, meeting.address_of, native.connect_peer, native.lose_peer)
    threading.Thread(target=_guard_main_thread, args=(state,), name="jaxmp-guard", daemon=True).start()
    neighbours = bootstrap.neighbours(state.process, state.nprocesses)
    native.want_processes(neighbours)
    missing = meeting.peers.wait_for(neighbours, _GRACE if meeting.refusal else timeout)
    if meeting.refusal or missing:
        raise DistributedError(f"initialize: {meeting.refusal or missing}")


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
    if not state.interrupts:
        return
    with contextlib.suppress(ValueError):  # not the main thread
        if (current := signal.set_wakeup_fd(-1)) not in (-1, state.interrupts[1].fileno()):
            signal.set_wakeup_fd(current)
    for end in state.interrupts:
        end.close()


# Errors ---------------------------------------------------------------------------------------------------------


def _set_hooks() -> None:
    """Once in a process: errors get their type, and the peers hear of an end with its reason."""
    global _are_hooks_set
    if _are_hooks_set:
        return
    _are_hooks_set = True
    jax_compat.translate_errors(_translated, _watched)
    previous = sys.excepthook

    def excepthook(kind, value, traceback):
        if _state is not None:
            message = f"{value}".partition("\n")[0]
            _state.reason = _state.reason or f"it raised {kind.__name__}: {message}"
            native_lib.extension().leave_barrier(_state.reason[:500])
        previous(kind, value, traceback)

    sys.excepthook = excepthook
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


def _why_transport_failed(native) -> str:
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
    silent = [f"rank {i} {_SILENT}" for i, peer in peers.items() if peer["silence"] > 3 * 1.5]
    return ", ".join(silent) or "the transport gave up, though every process answers"


# A wait that no end of a peer ends --------------------------------------------------------------------------------


class _Waiter(threading.Thread):
    """A thread that waits for arrays, so that the thread that asks for it can give up."""

    def __init__(self):
        super().__init__(name="jaxmp-wait", daemon=True)
        self.work: queue.SimpleQueue = queue.SimpleQueue()
        self.start()

    def run(self):
        while True:
            wait, done = self.work.get()
            try:
                done.put((wait(), None))
            except BaseException as error:  # handed on as it is
                done.put((None, error))
            del wait, done  # the array they hold


_idle_waiters: list[_Waiter] = []


def _on_waiter(wait: Callable[[], Any], why_not: Callable[[], str | Literal[False]]) -> Any:
    """`wait()` on a thread of its own, given up with a DistributedError once `why_not()` says why."""
    waiter = _idle_waiters.pop() if _idle_waiters else _Waiter()
    done: queue.SimpleQueue = queue.SimpleQueue()
    waiter.work.put((wait, done))
    while True:
        try:
            result, error = done.get(timeout=_WATCH)
            break
        except queue.Empty:
            if why := why_not():
                raise DistributedError(why) from None
    _idle_waiters.append(waiter)
    if error is not None:
        raise error
    return result


def _watched(wait: Callable[[], Any]) -> Any:
    """`wait()`, or a DistributedError where a peer is gone and the wait goes on.

    XLA opens the transport of a set of devices when its first collective runs, by way of rank 0's store: where a rank
    ends meanwhile, the others wait for half a minute, and for rank 0 without end. The same holds for collectives that
    are none of jaxmp's.
    """
    if (state := _state) is None:
        return wait()
    return _on_waiter(wait, _Watch(state, _SETTLES, state.timeout + _SETTLES).overdue)


class _Watch:
    """How long one wait has gone on, and what has gone wrong meanwhile.

    It is overdue `after_failure` seconds after a call has failed, and `after_loss` after a peer has gone, or fallen
    silent.
    """

    def __init__(self, state: _State, after_failure: float, after_loss: float):
        self._state, self._after_failure, self._after_loss = state, after_failure, after_loss
        self._started, self._failed = time.monotonic(), 0.0

    def overdue(self) -> str:
        """Why there is no use in waiting any longer, or ""."""
        native, now = native_lib.extension(), time.monotonic()
        waited = now - self._started
        if failure := native.barrier_failure():
            self._failed = self._failed or now
            return failure if min(now - self._failed, waited) > self._after_failure else ""
        for what, seconds in _troubles(native):
            if min(seconds, waited) > self._after_loss:
                call = native.last_call() or "a collective"
                return f"{call}: {what}; rank {self._state.process} has waited for {waited:.3g} s (JAXMP_TIMEOUT)"
        return ""


def _troubles(native) -> Iterator[tuple[str, float]]:
    """(what, for how many seconds) of every peer that is gone without a good end, or silent."""
    for i, peer in native.peers().items():
        if not peer["gone"]:
            yield f"rank {i} {_SILENT}", peer["silence"]
        elif not peer["is_clean"]:
            yield f"rank {i} {peer['gone']}", peer["gone_for"]
    if (seconds := native.service_lost_for()) >= 0:
        yield _NO_STORE, seconds


def _guard_main_thread(state: _State) -> None:
    """End the process, with the error, where the main thread is stuck within JAX because of a peer.

    JAX asks rank 0's store while it starts its backend, and runs short programs with XLA's own collectives as they are
    called. No exception can be raised into either.
    """
    own = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, jaxlib))
    main = threading.main_thread().ident
    patience = state.timeout + 2 * _SETTLES  # a wait for an array has given up by then
    watch, place = _Watch(state, patience, patience), None
    while _state is state:
        time.sleep(_WATCH)
        frame = sys._current_frames().get(main or 0)
        seen = frame and (frame.f_code, frame.f_lasti)
        is_in_jax = frame is not None and frame.f_code.co_filename.startswith(own)
        if not is_in_jax or seen != place:
            watch, place = _Watch(state, patience, patience), seen
        elif why := watch.overdue():
            print(f"jaxmp.DistributedError: rank {state.process}: {why}", file=sys.stderr, flush=True)
            native_lib.extension().leave_barrier(why[:500])
            os._exit(1)
        del frame


# The end --------------------------------------------------------------------------------------------------------


def _farewell(state: _State) -> str:
    """Leave with all others, for as long as they take; the reason why that is not possible, or "".

    A process knows its neighbours and the groups of its calls, so JAX's store says when all are here.
    """
    native = native_lib.extension()
    native.leave_barrier("")
    client, key = jax_compat.distributed_client(), f"jaxmp/{state.generation}/end"

    def why_not() -> str:
        for what, seconds in _troubles(native):
            if _SILENT not in what or seconds > state.timeout:
                return what
        return ""

    try:
        _on_waiter(lambda: client.wait_at_barrier(key, _NO_HEARTBEAT * 1000), why_not)
    except DistributedError as error:
        return str(error)
    except jax.errors.JaxRuntimeError as error:
        return f"the processes did not all leave ({error})"
    return ""


def _at_exit() -> None:
    """JAX's own end waits in a barrier for processes that may be gone, so a job that failed ends here."""
    global _state
    state, _state = _state, None
    if state is None:
        return
    failure = native_lib.extension().barrier_failure()
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
