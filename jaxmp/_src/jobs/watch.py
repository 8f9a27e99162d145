"""Waits that end when a peer is gone, and a watch that ends the process if JAX waits for such a peer.

XLA opens the transport of a set of devices when its first collective runs, through rank 0's store. If a rank ends
meanwhile, the others wait for half a minute, and for rank 0 forever. The same holds for collectives outside jaxmp.
docs/faults.md says after how long such a wait ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib

from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native

NO_STORE = "rank 0 has ended, and JAX's coordination service with it"
SILENT = "does not answer: it is stopped, or its machine or network is gone"
# How often a wait checks the peers, in seconds.
_PERIOD = 0.25
# Seconds that shared memory is kept for the next call: new pages cost about as much as copying to them.
_KEPT = 2.0
# Seconds that a failure, or a deadline, may come before the error that says more.
_SETTLES = 1.5


class DistributedError(RuntimeError):
    """A process of the job is missing, stuck, or runs another program; the message names it and the call."""


DistributedError.__module__ = "jaxmp.distributed"  # where users find it


def idle_thread() -> Callable[[Callable[[], None]], None]:
    """Starts a thread that runs one task and ends; returns the function that gives it the task. Such a thread can run a
    task at the end of the process, when Python 3.12 starts none."""
    tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    threading.Thread(target=lambda: tasks.get()(), name="jaxmp-wait", daemon=True).start()
    return tasks.put


def on_waiter(
    wait: Callable[[], Any], why_not: Callable[[], str], thread: Callable[[Callable[[], None]], None] | None = None
) -> Any:
    """Returns `wait()`, run on a new thread or on `thread` (from `idle_thread()`), or raises what it raises. Asks
    `why_not()` every `_PERIOD` meanwhile. If the answer is not "", raises DistributedError with it, and `wait()` goes
    on."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((wait(), None))
        except BaseException as error:  # passed on unchanged
            done.put((None, error))

    (thread or idle_thread())(run)
    while True:
        try:
            result, error = done.get(timeout=_PERIOD)
            break
        except queue.Empty:
            if why := why_not():
                raise DistributedError(why) from None
    if error is not None:
        raise error
    return result


def troubles() -> Iterator[tuple[str, float]]:
    """Yields (trouble, for how many seconds): for each peer its silence, even of 0 seconds, or its end in a failure, or
    nothing if it has left properly; then the loss of rank 0's store."""
    module = native.extension()
    for i, peer in module.peers().items():
        if not peer["gone"]:
            yield f"rank {i} {SILENT}", peer["silence"]
        elif not peer["is_clean"]:
            yield f"rank {i} {peer['gone']}", peer["gone_for"]
    if (seconds := module.service_lost_for()) >= 0:
        yield NO_STORE, seconds


def guard_main_thread(process: int, timeout: float, is_member: Callable[[], bool]) -> None:
    """Ends the process, with the reason, if its main thread waits for JAX because of a peer. Blocks while
    `is_member()`, so the caller needs another thread for it. Also gives unused memory back. The main thread must have
    stood at one instruction for longer than `timeout`, and a trouble (`troubles`) or the barrier's failure must have
    lasted as long. Both times are `_SETTLES` for a failure that no call reports. No exception can be raised into such a
    wait: for rank 0's store while JAX starts or XLA opens a transport, or inside a collective of XLA."""
    main, limit = threading.main_thread().ident, timeout + _SETTLES
    place, since, failed = None, 0.0, 0.0
    while is_member():
        time.sleep(_PERIOD)
        module, now = native.extension(), time.monotonic()
        module.trim_memory(_KEPT)
        failure = module.barrier_failure()
        failed = failed or (now if failure else 0.0)
        frame = sys._current_frames().get(main or 0)
        seen = frame and (frame.f_code, frame.f_lasti)
        if seen != place:
            place, since = seen, now
        waited = now - since
        call = module.last_call() or "a collective"
        reasons = [
            f"{call}: {what}; rank {process} has waited for {waited:.3g} s (JAXMP_TIMEOUT)"
            for what, seconds in troubles()  # asks for signs of life, so each time
            if min(seconds, waited) > limit
        ]
        # A late failure comes from no call: the collective is already waiting.
        if failure and min(now - failed, waited) > (_SETTLES if module.late_failure() else limit):
            reasons = [failure]
        if reasons and _waits_for_jax(frame):
            end_process(process, reasons[0])
        del frame


def _waits_for_jax(frame: types.FrameType | None) -> bool:
    """True if `frame` is in the code of jax or jaxlib, or if any live array is not computed yet: a thread that stands
    still may wait for it."""
    own = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, jaxlib))
    if frame is not None and frame.f_code.co_filename.startswith(own):
        return True
    return jax_compat.backend_exists() and not all(x.is_deleted() or x.is_ready() for x in jax.live_arrays())


def end_process(process: int, reason: str, is_told: bool = False) -> None:
    """Ends this process, rank `process` of a failed job, at once with status 1 and without exit handlers; never
    returns. Sends the reason (500 characters of it) to the peers. Prints it to stderr, unless `is_told`."""
    if not is_told:
        print(f"jaxmp.DistributedError: rank {process}: {reason}", file=sys.stderr)
    native.extension().leave_barrier(reason[:500])
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
