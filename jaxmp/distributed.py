"""Many processes: starting them, and what each of them sees when another is wrong, slow or dead."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time

import jax

from jaxmp import _compat, _meeting, _native
from jaxmp._collectives import process_barrier_p
from jaxmp._config import add_xla_flag, config, parse_timeout
from jaxmp._primitive import batched_matmul_epilog_p, batched_matmul_p, matmul_epilog_p, matmul_p

__all__ = ["DistributedError", "initialize", "shutdown"]

# JAX's own watch ends a process whose peer is gone, without an exception; ours speaks first.
_NO_HEARTBEAT = 10**6
# What a process may take to end after a failure until the system ends it.
_GRACE = 10
_POLL = 0.05
_SILENT = "does not answer: it is stopped, or its machine or network is gone"


class DistributedError(RuntimeError):
    """A process of the job is missing, stuck, or runs another program; the message names it and the call."""


class _State:
    """This process's part in the job, from `initialize` to `shutdown`."""

    def __init__(self, process: int, nprocesses: int, timeout: float, interrupts: tuple[socket.socket, ...]):
        self.process, self.nprocesses, self.timeout, self.interrupts = process, nprocesses, timeout, interrupts
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
    global _state, _generation
    _meeting.check_arguments(coordinator_address, num_processes, process_id)
    _check_moment()
    seconds = config().timeout if timeout is None else parse_timeout("initialize: timeout", timeout)
    if coordinator_address is None:
        found = _meeting.detect(local_device_ids, initialization_timeout)
        coordinator_address, num_processes, process_id, local_device_ids = found
    assert num_processes is not None
    assert process_id is not None
    host, _, port = coordinator_address.rpartition(":")
    # gloo's time for a call that all have come to; without it half an hour.
    add_xla_flag("xla_cpu_collective_timeout_seconds", str(max(1, round(seconds))))
    if process_id != 0 and not _compat.uses_mutual_tls():
        relay = _native.extension().start_relay(host.strip("[]"), port)
        coordinator_address = f"127.0.0.1:{relay}"
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=_NO_HEARTBEAT,
            shutdown_timeout_seconds=max(1, round(seconds)),
        )
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(
            f"initialize: rank {process_id} did not meet all {num_processes} processes at {host}:{port} within "
            f"{initialization_timeout} s; look for one that did not start ({error})"
        ) from error
    sockets, versions = _meeting.connect(host, process_id, num_processes, _generation, initialization_timeout)
    _generation += 1
    interrupts = _watch_interrupts()
    _state = _State(process_id, num_processes, seconds, interrupts)
    fds = [-1 if s is None else s.detach() for s in sockets]
    _native.start_roll_call(
        process_id, fds, seconds, config().compares_calls, interrupts[0].fileno() if interrupts else -1
    )
    _compat.require_devices((matmul_p, matmul_epilog_p, batched_matmul_p, batched_matmul_epilog_p, process_barrier_p))
    _set_hooks()
    _check_versions(_state, versions)


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
    reason = _state.reason or _native.extension().roll_call_failure() or _farewell(_state)
    _close_interrupts(_state)
    if reason:
        _native.extension().leave_roll_call(reason)
        _native.stop_roll_call()
        _compat.abandon_distributed()
        _state = None
        raise DistributedError(f"shutdown: {reason}")
    _native.stop_roll_call()
    _state = None
    jax.distributed.shutdown()


def _check_moment() -> None:
    if _state is not None or _compat.distributed_client() is not None:
        raise RuntimeError("initialize: this process is part of a job already; call it once, or shutdown() in between")
    if _compat.backend_exists():
        raise RuntimeError(
            "initialize: JAX's backend exists already; call this ahead of jax.devices, jnp.ones and all that computes"
        )


def _check_versions(state: _State, versions) -> None:
    for name, values in zip(("jaxmp", "jax", "cuBLASMp"), zip(*versions, strict=True), strict=True):
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            state.reason = (
                f"initialize: rank {other} has {name} {values[other]}, rank 0 has {values[0]}; "
                "install the same on every machine"
            )
            raise DistributedError(state.reason)


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


def _close_interrupts(state: _State) -> None:
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
    _compat.translate_errors(_translated)
    previous = sys.excepthook

    def excepthook(kind, value, traceback):
        if _state is not None:
            message = f"{value}".partition("\n")[0]
            _state.reason = _state.reason or f"it raised {kind.__name__}: {message}"
            _native.extension().leave_roll_call(_state.reason[:500])
        previous(kind, value, traceback)

    sys.excepthook = excepthook
    atexit.register(_at_exit)


def _translated(error: Exception) -> Exception | None:
    """The DistributedError behind an error of XLA, if that is what it is."""
    if _state is None:
        return None
    text, native = str(error), _native.extension()
    if failure := native.cuda_failure():
        return DistributedError(failure)
    ours = re.search(r"jaxmp\.DistributedError: (.*)", text)
    if ours:
        failure = native.roll_call_failure()
        return DistributedError(failure if failure and failure in text else ours[1])
    if "gloo" not in text.lower():
        return None
    return DistributedError(f"{native.last_call() or 'a collective'}: {_why_transport_failed(native)} ({text})")


def _why_transport_failed(native) -> str:
    """Who is to blame for a collective that failed half-way: a peer whose end is about to be known, or a silent one."""
    deadline = time.monotonic() + 1
    while True:
        peers = native.peers()
        gone = [f"rank {i} {peer['gone']}" for i, peer in enumerate(peers) if peer["gone"]]
        if gone:
            return ", ".join(gone)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    assert _state is not None
    silent = [
        f"rank {i} {_SILENT}" for i, peer in enumerate(peers) if i != _state.process and peer["silence"] > 3 * 1.5
    ]
    return ", ".join(silent) or "the transport gave up, though every process answers"


# The end --------------------------------------------------------------------------------------------------------


def _farewell(state: _State) -> str:
    """Leave with all others; the reason why that is not possible, or ""."""
    native = _native.extension()
    native.leave_roll_call("")
    while True:
        peers = [(i, peer) for i, peer in enumerate(native.peers()) if i != state.process]
        for i, peer in peers:
            if peer["gone"] and not peer["is_clean"]:
                return f"rank {i} {peer['gone']}"
            if not peer["gone"] and peer["silence"] > state.timeout:
                return f"rank {i} {_SILENT}"
        if all(peer["gone"] for _, peer in peers):
            return ""
        time.sleep(_POLL)


def _at_exit() -> None:
    """JAX's own end waits in a barrier for processes that may be gone, so a job that failed ends here."""
    global _state
    state, _state = _state, None
    if state is None:
        return
    failure = _native.extension().roll_call_failure()
    try:
        reason = state.reason or failure or _farewell(state)
    except KeyboardInterrupt:
        reason = "it was interrupted"
    _close_interrupts(state)
    if not reason:
        _native.stop_roll_call()
        return
    if not state.reason:
        print(f"jaxmp.DistributedError: rank {state.process}: {reason}", file=sys.stderr)
    _native.extension().leave_roll_call(reason[:500])
    if hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_GRACE)
    _compat.abandon_distributed()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
