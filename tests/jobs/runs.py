"""Runs that end early on one rank, and runs that overlap, drawn at random. Run by `ranks.py runs` on each rank. Each
schedule calls one program several times. Every step has its own operands, so each element of a result names its step.
In some steps one rank is interrupted, raises in a callback, or comes late; in some schedules two threads call the
program in turns, or several steps are dispatched before the first one is waited for. A step may fail with an error. A
result without an error has to be of its own step, and after each schedule two steps without a fault have to succeed on
every rank."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from shards import put

import jaxmp

M, LATE, SOON = 24, 0.3, 0.1
PROGRAMS = ("two", "chain", "loop", "gradient", "inner")
FAULTS = ("raise first", "raise between", "interrupt", "late", "none")


def draw(rng: random.Random, nprocesses: int) -> dict:
    """A schedule: the program, how its steps are called, and for each step (fault, rank)."""
    how = rng.choice(("steps", "steps", "steps", "ahead", "threads"))
    faults = FAULTS if how == "steps" else ("raise first", "raise between", "late", "none")
    steps = [(rng.choice((*faults, "none", "none")), rng.randrange(nprocesses)) for _ in range(rng.randint(3, 6))]
    program = rng.choice(PROGRAMS)
    if program == "loop":
        # XLA's own collectives run in a loop. They take one thread at a time, and a rank left there ends the job.
        steps = [(fault if fault in ("late", "none") else "late", rank) for fault, rank in steps]
        how = "steps" if how == "threads" else how
    return {"program": program, "how": how, "steps": steps}


class Callbacks:
    """The callbacks of this rank in each step of the schedule that is running."""

    def __init__(self, process: int) -> None:
        self.process, self.plan, self.running, self.interrupted = process, {}, None, None
        self.begun, self.timer = collections.defaultdict(threading.Event), threading.Timer(0, int)

    def on_interrupt(self, *_):
        if self.running == self.interrupted:  # not between steps, and not in the step after it
            raise KeyboardInterrupt

    def first(self, i, x):
        self.begun[int(i)].set()
        fault, rank = self.plan.get(int(i), ("none", 0))
        if fault == "raise first" and rank == self.process:
            raise OSError("a file cannot be read")
        if fault == "late" and rank == self.process:
            time.sleep(LATE)
        if fault == "interrupt":  # the interrupted rank waits in the call for one that is late
            if rank != self.process:
                time.sleep(LATE)
            elif self.interrupted != int(i):  # once, and not for each device
                self.interrupted = int(i)
                self.timer = threading.Timer(SOON, os.kill, (os.getpid(), signal.SIGINT))
                self.timer.start()
        return x

    def between(self, i, x):
        if self.plan.get(int(i)) == ("raise between", self.process):
            raise OSError("a file cannot be read")
        return x


def programs(mesh, callbacks: Callbacks):
    """By name: a function of a step's number, its operand and the identity matrix. All elements of the results are the
    step's number."""

    def through(callback, i, x):
        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), i, x)

    def multiply(x, b):
        return jaxmp.all_gather_matmul(x, b, "x")

    def rows(d, b):
        return jaxmp.matmul_reduce_scatter(d, b.T, "x")

    def two(i, x, b):
        x = through(callbacks.first, i, x)
        return multiply(x, b), multiply(through(callbacks.between, i, 2 * x), b) / 2

    def chain(i, x, b):
        d = multiply(through(callbacks.first, i, x), b)
        return multiply(through(callbacks.between, i, rows(d, b)), b)

    def loop(i, x, b):
        def body(x, j):
            x = lax.cond(j == 0, lambda x: through(callbacks.first, i, x), lambda x: x, x)
            x = lax.cond(j == 1, lambda x: through(callbacks.between, i, x), lambda x: x, x)
            return rows(multiply(x, b), b), None

        return multiply(lax.scan(body, x, jnp.arange(3))[0], b)

    def gradient(i, x, b):
        x = through(callbacks.first, i, x)
        return jax.grad(lambda x, b: multiply(x, b).sum(), argnums=1)(x, b) / M

    def inner(i, x, b):
        once = jax.jit(multiply)
        x = through(callbacks.first, i, x)
        return once(x, b) + 0 * once(through(callbacks.between, i, 2 * x), b)

    def compiled(local):
        specs = {"in_specs": (P(), P("x"), P(None, "x")), "out_specs": P(None, "x"), "check_vma": False}
        return jax.jit(jax.shard_map(local, mesh=mesh, **specs))

    return {f.__name__: compiled(f) for f in (two, chain, loop, gradient, inner)}


def main(initialize, process):
    asked = json.loads(os.environ.get("RUNS", "{}"))
    initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    callbacks = Callbacks(process)
    signal.signal(signal.SIGINT, callbacks.on_interrupt)
    functions = programs(mesh, callbacks)

    identity = put(mesh, np.eye(M, dtype=np.float32), P(None, "x"))
    numbers = itertools.count(1)
    wrong = told = good = 0

    def dispatch(name, i):
        return functions[name](np.int32(i), put(mesh, np.full((M, M), i, np.float32), P("x")), identity)

    def check(i, results):
        nonlocal wrong, good
        values = {v for d in jax.tree.leaves(results) for s in d.addressable_shards for v in np.unique(s.data).tolist()}
        good += 1
        if values != {i}:
            wrong += 1
            print(f"WRONG step {i}: {sorted(values)[:8]} in {drawn}")

    def step(name, i):
        nonlocal told
        try:
            callbacks.running = i
            results = dispatch(name, i)
            jax.block_until_ready(results)
            callbacks.running = None
            check(i, results)
        except (KeyboardInterrupt, ValueError, jax.errors.JaxRuntimeError) as error:
            callbacks.running = None
            told += 1
            print(f"step {i}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def ahead(name, steps):
        nonlocal told
        dispatched = []
        for i in steps:
            try:
                dispatched.append((i, dispatch(name, i)))
            except (ValueError, jax.errors.JaxRuntimeError):
                told += 1
        for i, results in dispatched:
            try:
                check(i, results)
            except (ValueError, jax.errors.JaxRuntimeError):
                told += 1

    def threads(name, steps):
        """Starts two threads; their calls begin in one order on every rank, and may overlap."""
        turn = threading.Condition()
        at = [0]

        def work(own):
            for place in own:
                with turn:
                    turn.wait_for(lambda place=place: at[0] == place)
                    running = threading.Thread(target=step, args=(name, steps[place]))
                    running.start()
                    callbacks.begun[steps[place]].wait()  # the run has begun, so it has its number
                    at[0] += 1
                    turn.notify_all()
                running.join()

        pair = [threading.Thread(target=work, args=(range(first, len(steps), 2),)) for first in (0, 1)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()

    first, count = asked.get("seed", 0), asked.get("schedules", 0)
    schedules = asked.get("given", []) + [draw(random.Random(first + i), jax.process_count()) for i in range(count)]
    for number, drawn in enumerate(schedules):
        print(f"schedule {number}: {drawn}")
        steps = [next(numbers) for _ in drawn["steps"]]
        callbacks.plan = dict(zip(steps, map(tuple, drawn["steps"]), strict=True))
        name = drawn["program"]
        if drawn["how"] == "steps":
            for i in steps:
                step(name, i)
        else:
            (ahead if drawn["how"] == "ahead" else threads)(name, steps)
        callbacks.timer.cancel()
        before = told
        for _ in range(2):
            step(name, next(numbers))
        if told != before:
            wrong += 1
            print(f"WRONG schedule {number}: the steps after it fail, {drawn}")
    print(f"RAN {len(schedules)} schedules, {good} steps; {told} steps raised errors, {wrong} are wrong")
    assert not wrong
