"""Waits that end when a peer is gone, whatever XLA makes of it.

XLA opens the transport of a set of devices when its first collective runs, by way of rank 0's store: where a rank ends
meanwhile, the others wait for half a minute, and for rank 0 without end. The same holds for collectives that are none
of jaxmp's. So a thread waits, and whoever asked it to gives up. docs/faults.md says after how long.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib

from jaxmp._src.runtime import native

NO_STORE = "rank 0 has ended, and JAX's coordination service with it"
SILENT = "does not answer: it is stopped, or its machine or network is gone"
# How often a wait looks after the peers, in seconds.
_PERIOD = 0.25
# Seconds for which shared memory is kept for the next call: new pages cost about as much as copying to them.
_KEPT = 2.0
# By how much a failure, or a deadline, may run ahead of the error that says more.
_SETTLES = 1.5


class DistributedError(RuntimeError):
    """A process of the job is missing, stuck, or runs another program; the message names it and the call."""


DistributedError.__module__ = "jaxmp.distributed"  # where users find it


# The result of a wait and None, or None and the error.
_Outcome = queue.SimpleQueue[tuple[Any, BaseException | None]]


class _Waiter(threading.Thread):
    """A thread that waits, so that the thread that asks for it can give up."""

    def __init__(self) -> None:
        super().__init__(name="jaxmp-wait", daemon=True)
        self.work: queue.SimpleQueue[tuple[Callable[[], Any], _Outcome]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            wait, done = self.work.get()
            try:
                done.put((wait(), None))
            except BaseException as error:  # handed on as it is
                done.put((None, error))
            del wait, done  # the array they hold


_idle: queue.SimpleQueue[_Waiter] = queue.SimpleQueue()


def on_waiter(wait: Callable[[], Any], why_not: Callable[[], str]) -> Any:
    """`wait()` on a thread of its own, given up with a DistributedError once `why_not()` says why."""
    try:
        waiter = _idle.get_nowait()
    except queue.Empty:
        waiter = _Waiter()
    done: _Outcome = queue.SimpleQueue()
    waiter.work.put((wait, done))
    while True:
        try:
            result, error = done.get(timeout=_PERIOD)
            break
        except queue.Empty:
            if why := why_not():
                raise DistributedError(why) from None
    _idle.put(waiter)
    if error is not None:
        raise error
    return result


def wait_for(wait: Callable[[], Any], process: int, timeout: float) -> Any:
    """`wait()`, or a DistributedError where a peer of rank `process` has been gone or silent for `timeout` seconds."""
    return on_waiter(wait, _Watch(process, _SETTLES, timeout + _SETTLES).overdue)


class _Watch:
    """How long one wait has gone on, and what has gone wrong meanwhile.

    It is overdue `after_failure` seconds after a call has failed, and `after_loss` after a peer has gone, or fallen
    silent.
    """

    def __init__(self, process: int, after_failure: float, after_loss: float) -> None:
        self._process, self._after_failure, self._after_loss = process, after_failure, after_loss
        self._started, self._failed = time.monotonic(), 0.0

    def overdue(self) -> str:
        """Why there is no use in waiting any longer, or ""."""
        module, now = native.extension(), time.monotonic()
        waited = now - self._started
        if failure := module.barrier_failure():
            self._failed = self._failed or now
            return str(failure) if min(now - self._failed, waited) > self._after_failure else ""
        for what, seconds in troubles():
            if min(seconds, waited) > self._after_loss:
                call = module.last_call() or "a collective"
                return f"{call}: {what}; rank {self._process} has waited for {waited:.3g} s (JAXMP_TIMEOUT)"
        return ""


def troubles() -> Iterator[tuple[str, float]]:
    """(what, for how many seconds) of every peer that is gone without a good end, or silent."""
    module = native.extension()
    for i, peer in module.peers().items():
        if not peer["gone"]:
            yield f"rank {i} {SILENT}", peer["silence"]
        elif not peer["is_clean"]:
            yield f"rank {i} {peer['gone']}", peer["gone_for"]
    if (seconds := module.service_lost_for()) >= 0:
        yield NO_STORE, seconds


def guard_main_thread(process: int, timeout: float, is_member: Callable[[], bool]) -> None:
    """End the process, with the error, where the main thread is stuck within JAX because of a peer; for as long as
    `is_member()`, so on a thread of its own, which gives unused memory back too.

    JAX asks rank 0's store while it starts its backend, and runs short programs with XLA's own collectives as they are
    called. No exception can be raised into either.
    """
    own = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, jaxlib))
    main = threading.main_thread().ident
    limit = timeout + 2 * _SETTLES  # a wait for an array has given up by then
    watch, place = _Watch(process, limit, limit), None
    while is_member():
        time.sleep(_PERIOD)
        native.extension().trim_arenas(_KEPT)
        frame = sys._current_frames().get(main or 0)
        seen = frame and (frame.f_code, frame.f_lasti)
        is_in_jax = frame is not None and frame.f_code.co_filename.startswith(own)
        if not is_in_jax or seen != place:
            watch, place = _Watch(process, limit, limit), seen
        elif why := watch.overdue():
            print(f"jaxmp.DistributedError: rank {process}: {why}", file=sys.stderr, flush=True)
            native.extension().leave_barrier(why[:500])
            os._exit(1)
        del frame
