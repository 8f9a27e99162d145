"""Jobs of many processes: how to start them, and what each process sees when another is wrong, slow or dead."""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._src.core.primitive.collectives import collective_p
from jaxmp._src.core.primitive.grouped import partitioned_grouped_p
from jaxmp._src.core.primitive.primitives import MATMULS
from jaxmp._src.jobs import bootstrap, watch
from jaxmp._src.jobs.peers import Peers
from jaxmp._src.jobs.watch import DistributedError
from jaxmp._src.platform.hardware import calibration, hardware
from jaxmp._src.platform.jax_internals import jax_compat, jax_distributed, jax_lowering
from jaxmp._src.platform.runtime import logs
from jaxmp._src.platform.runtime import native as native_lib
from jaxmp._src.platform.runtime.config import add_xla_flag, config, loopback_without_proxy, parse_timeout

__all__ = ["DistributedError", "cause", "initialize", "shutdown"]

# JAX's own watch ends a process without an exception if a peer is gone. Ours raises before it.
_NO_HEARTBEAT = 10**6  # seconds; of other waits of JAX's too
# A collective of XLA's that all ranks have come to ends after this many times `timeout`, though all of them answer.
# Without XLA's flag that is half an hour, and on GPUs never; a link may be slow.
_TRANSFER = 10
# Seconds to meet the neighbours if the job cannot run.
_GRACE = 10
_INTERRUPTED = "it was interrupted"
_POLL = 0.05
_LOOPBACK = "127.0.0.1"


class _Job:
    """This process's part of a job, from `initialize` to `shutdown` or the end of the process."""

    def __init__(self, process: int, nprocesses: int, timeout: float) -> None:
        self.process, self.nprocesses, self.timeout = process, nprocesses, timeout
        self.peers: Peers | None = None  # until it has met them
        self.failure = ""  # of `initialize` or `shutdown`
        self.at_end = watch.idle_thread()

    def close(self) -> None:
        """Closes the sockets on which peers connect, ends the idle thread, and drops the rates shared by rank 0."""
        hardware.set_of_job("")
        self.at_end(lambda: None)
        if self.peers is not None:
            self.peers.close()


_job: _Job | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 300,
    timeout: float | None = None,
) -> None:
    """Makes this process a member of a job, by `jax.distributed.initialize`.

    Every process calls it, before anything that starts JAX's backend. Without arguments the launcher provides them:
    mpiexec (through mpi4py; `pip install 'jaxmp[mpi]'` brings both) or SLURM's srun. Without a launcher pass the first
    three arguments. It also sets XLA flags that end a collective after 10 times `timeout` (unless the user has set
    them), and starts threads that watch peers. After a DistributedError the process belongs to a failed job: it cannot
    initialize again, and ends with status 1.

    From then on, a call over several processes first waits until all of them have come to it with an equal call. If a
    process does not come within `timeout`, has ended, or came with another call, then waiting for the result raises an
    error of JAX's type with our message, in every process of the group; `cause` turns it into a `DistributedError`. See
    docs/faults.md.

    Args:
      coordinator_address: "host:port" of process 0, which opens that port.
      num_processes, process_id: the number of processes, and the rank of this one.
      local_device_ids: as in `jax.distributed.initialize`.
      initialization_timeout: seconds to wait for all processes to call this.
      timeout: seconds after which a process that has not come to a call is missing; by default JAXMP_TIMEOUT, or 60
        seconds (25 on GPUs).

    Raises:
      RuntimeError: called twice, or after the backend exists, or there is neither a launcher nor the arguments, or
        the launcher's variables are incomplete, or rank 0 cannot listen at the coordinator's address, or the machine
        has no network.
      ImportError: mpi4py is missing under mpiexec, unless mpiexec is Open MPI's before version 5.
      TypeError: num_processes or process_id is not an int.
      ValueError: arguments that contradict each other, a timeout that is not positive, or a host that cannot be
        resolved.
      DistributedError: processes are missing, or run other versions of jaxmp or JAX.

    >>> import jaxmp
    >>> jaxmp.distributed.initialize("127.0.0.1:9999", 1, 1)
    Traceback (most recent call last):
    ValueError: initialize: process_id must be from 0 to num_processes - 1 = 0, got 1
    """
    global _job
    bootstrap.check_arguments(coordinator_address, num_processes, process_id)
    _check_moment()
    seconds = config().timeout if timeout is None else parse_timeout("initialize: timeout", timeout)
    native_lib.gpu_timeout = None if timeout is None else seconds
    if coordinator_address is None:
        found = bootstrap.detect(local_device_ids, initialization_timeout)
        coordinator_address, num_processes, process_id, local_device_ids = found
    assert coordinator_address is not None
    assert num_processes is not None
    assert process_id is not None
    logger = logs.logger("distributed")
    host, _, port = coordinator_address.rpartition(":")
    for flag in ("xla_cpu_collective_timeout_seconds", "xla_gpu_nccl_termination_timeout_seconds"):
        add_xla_flag(flag, str(max(1, round(_TRANSFER * seconds))))
    bind_address = bootstrap.bind_address(host, int(port)) if process_id == 0 else None
    if process_id != 0 and not jax_distributed.uses_mutual_tls():
        bootstrap.route_to(_LOOPBACK)
        proxy_port = native_lib.extension().start_coordinator_proxy(host.strip("[]"), port)
        coordinator_address = f"{_LOOPBACK}:{proxy_port}"
    connect = functools.partial(
        bootstrap.connect,
        initialization_timeout,
        host,
        int(port),
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
        initialization_timeout=_NO_HEARTBEAT,  # at its end JAX would abort
        heartbeat_timeout_seconds=_NO_HEARTBEAT,
        # All have met in jaxmp's last barrier, so this only waits for slow processes.
        shutdown_timeout_seconds=max(60, round(seconds)),
    )
    _job = _Job(process_id, num_processes, seconds)
    jax_lowering.require_devices([*MATMULS, partitioned_grouped_p, collective_p])
    logger.info("rank %d of %d: joins the job at %s", process_id, num_processes, coordinator_address)
    try:
        deadline = time.monotonic() + 1.1 * initialization_timeout + 3  # if rank 0 does not say who is missing
        missing = (
            f"initialize: rank {process_id} did not meet all {num_processes} processes at {host}:{port} within "
            f"{initialization_timeout} s; look for one that did not start"
        )
        with loopback_without_proxy():
            watch.on_waiter(connect, lambda: missing if time.monotonic() > deadline else "")
        _join(_job, host, initialization_timeout)
    except DistributedError as error:
        _job.failure = str(error)
        logger.error("rank %d: %s", process_id, error)
        raise
    except Exception:  # JAX refuses, and nothing has begun
        _job.close()
        _job = None
        raise
    except KeyboardInterrupt:
        _job.failure = _INTERRUPTED
        raise
    logger.info("rank %d of %d: has met the others", process_id, num_processes)


def _join(job: _Job, host: str, timeout: int) -> None:
    """Meets the other processes, starts the barrier and the threads that watch peers, and connects to the neighbours of
    this process. `host`: the coordinator's. `timeout`: seconds for each wait. Raises DistributedError if processes are
    missing. Raises it also if the job is refused, for example for different versions, but first connects to the
    neighbours, so that the error reaches them."""
    native = native_lib.extension()
    join = functools.partial(
        bootstrap.join_job, host, job.process, job.nprocesses, timeout, reach=job.timeout, tells=calibration.for_job()
    )
    try:
        membership = watch.on_waiter(
            join, lambda: f"initialize: {watch.NO_STORE}" if native.service_lost_for() >= 0 else ""
        )
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"initialize: the processes did not all meet within {timeout} s ({error})") from error
    job.peers = membership.peers
    hardware.set_of_job(membership.told)
    jax_distributed.let_gloo_listen_at(membership.peers.host)
    native_lib.start_barrier(job.process, job.nprocesses, job.timeout)
    membership.peers.start(native.wanted_processes, membership.address_of, native.connect_peer, native.lose_peer)
    guard = functools.partial(
        watch.guard_main_thread, job.process, job.timeout, lambda: _job is job and not job.failure
    )
    threading.Thread(target=guard, name="jaxmp-guard", daemon=True).start()
    neighbours = bootstrap.neighbours(job.process, job.nprocesses)
    native.want_processes(neighbours)
    missing = membership.peers.wait_for(neighbours, _GRACE if membership.refusal else timeout)
    if membership.refusal or missing:
        raise DistributedError(f"initialize: {membership.refusal or missing}")


def shutdown() -> None:
    """Leaves the job, if any, and its collectives: waits for the others to leave it too, then ends JAX's part.

    After an error JAX's part does not end, and this process cannot initialize again: the job counts as failed.
    At the end of a program this happens by itself. JAX cannot be initialized again while a backend exists; after
    `jax.extend.backend.clear_backends()` it can, at another port: rank 0 may still be closing the last one.

    Raises:
      DistributedError: a process has ended without leaving, or does not answer, or the job has failed before.

    >>> import jaxmp
    >>> jaxmp.distributed.shutdown()  # nothing to leave: does nothing
    """
    global _job
    if _job is None:
        return
    native = native_lib.extension()
    reason = _job.failure or native.barrier_failure() or _farewell(_job)
    logs.logger("distributed").info("rank %d: leaves the job%s", _job.process, f", for {reason}" if reason else "")
    _job.close()
    if reason:
        _job.failure = reason
        native.leave_barrier(reason)
        native_lib.stop_barrier()
        raise DistributedError(f"shutdown: {reason}")
    native_lib.stop_barrier()
    _job = None
    jax.distributed.shutdown()


def cause(error: BaseException) -> DistributedError | None:
    """Returns the failure of another rank that made JAX raise `error`; None for errors with other causes.

    A DistributedError is returned itself. A program that is already running fails in JAX, with an error of JAX's type.
    Most such errors hold our message. An error of Gloo, the transport between CPUs, does not. In a job, `cause` then
    asks the peers which rank failed (up to a second), marks the job as failed, and returns a DistributedError even if
    every process answers. Without a job it returns None.

    >>> import jax, jaxmp
    >>> try:
    ...     raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: jaxmp.DistributedError: matmul at train.py:41: ...")
    ... except jax.errors.JaxRuntimeError as error:
    ...     jaxmp.distributed.cause(error)
    DistributedError('matmul at train.py:41: ...')
    """
    if isinstance(error, DistributedError):
        return error
    if ours := re.search(r"jaxmp\.DistributedError: (.*)", str(error)):
        return DistributedError(ours[1])
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    if _job is None or "gloo" not in str(error).lower():
        return None
    native = native_lib.extension()
    why = _why_transport_failed(native, is_large=_job.nprocesses > 5)
    why = native.barrier_failure() or f"{native.last_call() or 'a collective'}: {why} ({error})"
    _job.failure = _job.failure or why
    return DistributedError(why)


def _why_transport_failed(native: Any, is_large: bool) -> str:
    """Returns which peers have ended, else which are silent, else that every process answers; for messages.

    Waits up to a second for the first peer that has ended; in a large job for the first that has ended in a failure,
    because ranks of other groups may have ended well before. Omits peers that ended because of another rank; if all
    did, returns the first.
    """
    deadline, gone = time.monotonic() + 1, dict[int, Any]()
    while all(is_large and peer["is_clean"] for peer in gone.values()) and time.monotonic() < deadline:
        time.sleep(_POLL)
        gone = {i: peer for i, peer in native.peers().items() if peer["gone"]}
    if not gone:
        gone = {i: {"gone": watch.SILENT} for i, peer in native.peers().items() if peer["silence"] > 3 * 1.5}
    ends = [f"rank {i} {peer['gone']}" for i, peer in gone.items()]
    roots = [who for who in ends if ": rank " not in who]  # the others ended because of these
    return ", ".join(roots or ends[:1]) or "the transport gave up, though every process answers"


def _check_moment() -> None:
    """Raises RuntimeError if this process is in a job (also one of JAX alone), or has started JAX's backend."""
    if _job is not None or jax_distributed.distributed_client() is not None:
        raise RuntimeError("initialize: this process is part of a job already; call it once, or shutdown() in between")
    if jax_compat.backend_exists():
        raise RuntimeError(
            "initialize: JAX's backend exists already; call this before jax.devices, jnp.ones and any computation"
        )


# The end --------------------------------------------------------------------------------------------------------


def _farewell(job: _Job) -> str:
    """Leaves together with all others, however long they take; returns why that is not possible, or "".

    The reason is the barrier's failure, a peer that has ended in a failure or is silent for `job.timeout`, or an error
    of JAX. A process knows its neighbours and the groups of its calls, so JAX's store says when all are here. First
    completes the work that this process has dispatched, because others wait for this work.
    """
    native, client = native_lib.extension(), jax_distributed.distributed_client()

    def why_not() -> str:
        for what, seconds in watch.troubles():
            if watch.SILENT not in what or seconds > job.timeout:
                return what
        return ""

    try:
        jax.block_until_ready(jax_compat.after_dispatched_programs())
        if failure := native.barrier_failure():
            return str(failure)
        native.leave_barrier("")
        jax_distributed.close_gloo()
        watch.on_waiter(lambda: client.wait_at_barrier("jaxmp/end", _NO_HEARTBEAT * 1000), why_not, job.at_end)
    except (DistributedError, jax.errors.JaxRuntimeError) as error:
        return str(cause(error) or f"the processes did not all leave ({error})")
    except KeyboardInterrupt:
        job.failure = _INTERRUPTED
        raise
    return ""


def _uncaught() -> BaseException | None:
    """Returns the exception that ends this process, or None; None also for SystemExit.

    The interpreter keeps the last uncaught exception. If it has ended the program, its outermost frame has no caller.
    At a prompt, and if a library prints an exception, the program goes on.
    """
    error, traceback = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if traceback is None or traceback.tb_frame.f_back is not None or hasattr(sys, "ps1"):
        return None
    return error


def _forget() -> None:
    """Drops the job and JAX's part of the job in a forked child, and closes the child's copies of the sockets. Does
    nothing without a job."""
    global _job
    job, _job = _job, None
    if job is None:
        return
    if job.peers is not None:
        job.peers.forget()
    jax_distributed.forget_distributed()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end_threads() -> None:
    """Waits for the threads that call the extension, after `_at_exit`. Python aborts a process that ends while a thread
    is in such a call."""
    for thread in threading.enumerate():
        if thread.name in ("jaxmp-guard", "jaxmp-want"):
            thread.join(_GRACE)


@atexit.register
def _at_exit() -> None:
    """Leaves the job, if any, at the end of the program. If the job has failed, leaving fails or is interrupted, or an
    exception ends the program, prints the reason (unless the traceback shows it), tells the peers, and ends the process
    with status 1: JAX's own exit would wait in a barrier for processes that may be gone."""
    global _job
    if _job is None:
        return
    native, error = native_lib.extension(), _uncaught()
    if error is None:
        said = ""
        try:
            reason = _job.failure or native.barrier_failure() or _farewell(_job)
        except KeyboardInterrupt:
            reason = _INTERRUPTED
        # It waits for processes that wait for it.
        if told := re.match(rf"(rank \d+) has ended: (.*?): .*\brank {_job.process} has ended\b", reason):
            reason = f"it ended while {told[1]} waited for it: {told[2]}"
    elif found := cause(error):
        reason, said = str(found), str(error)
    else:
        reason = said = f"it raised {type(error).__name__}: {error}".partition("\n")[0]
    if reason:
        watch.end_process(_job.process, reason, is_told=reason in said)
    jax_compat.forget_failed_effects()
    _job.close()
    _job = None
    native_lib.stop_barrier()
