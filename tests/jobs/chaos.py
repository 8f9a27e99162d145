"""Jobs with a fault at a random moment: `make chaos` (N=200: how many, SEED=1). Each job draws a model, forward or with
its gradient, 2 or 4 ranks (ARGS="--processes 16" sets their number), and a fault of one rank: killed or stopped at once
or some time into a step, late, raising, leaving early, or with other rows, k or dtype, in the first step or a later
one. A job passes if every other rank ends within JAXMP_TIMEOUT + 5 s of the fault, with status 1 and an error's cause
or a last line that names the victim, and the difference if there is one. If a rank is only late, all end with 0. Each
rank, `ranks.py chaos`, prints COME and the time before each step, FAULT and the time at the fault."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from job import TIMEOUT, Job
from shards import mesh_of, ones

import jaxmp

KINDS = ("kill", "kill", "stop", "late", "raise", "leave", "rows", "k", "dtype")
MODELS = ("gather", "reduce", "data", "grid")
WITHIN = TIMEOUT + 5
# The seconds of a job that starts on two busy processors.
DEADLINE = 120.0


def draw(rng: random.Random, nprocesses: int) -> dict:
    kind, model = rng.choice(KINDS), rng.choice(MODELS)
    few = 4 if model == "grid" else rng.choice((2, 4))  # a grid of two ranks would have groups of one
    nprocesses = nprocesses or few
    return {
        "kind": kind,
        "nprocesses": nprocesses,
        "victim": rng.randrange(nprocesses),
        "step": rng.choice((0, 0, 1, 2)),
        "model": model,
        "is_backward": model == "data" or rng.random() < 0.7,  # data parallelism communicates in the gradient alone
        # Within the first step the transport is opened, for some 50 ms.
        "memory": rng.choice(("on", "off")),
        "delay": rng.choice((0.0, rng.uniform(0, 0.15))) if kind in ("kill", "stop") else 0.0,
    }


def run(fault: dict, folder: Path) -> str:
    """Returns what was wrong with the job, with its logs, or ""."""
    env = {"CHAOS_FAULT": json.dumps(fault), "JAXMP_SHARED_MEMORY": fault["memory"]}
    job = Job(folder, "chaos", fault["nprocesses"], env={"all": env})
    victim = fault["victim"]
    try:
        ranks = job.wait(DEADLINE, stopped=(victim,) if fault["kind"] == "stop" else ())
    except AssertionError as error:
        return str(error)
    wrong = [text for i, rank in enumerate(ranks) for text in judge(fault, i, rank, ranks)]
    return "\n".join([*wrong, job.all_logs()]) if wrong else ""


def judge(fault: dict, i: int, rank, ranks) -> list[str]:
    kind, victim, steps = fault["kind"], fault["victim"], len(re.findall(r"^COME", rank.log, flags=re.M))
    is_different = kind in ("rows", "k", "dtype")
    if kind == "late":
        return [] if rank.status == 0 and "ENDED" in rank.log else [f"rank {i} ended with {rank.status}"]
    if i == victim and not is_different:
        return []
    if fault["delay"] and rank.status == 0 and "ENDED" in rank.log:
        return []  # the job was over before the timer
    # The last step may be over before the fault; then the end of the program says what it was.
    at_end = re.search(r"^jaxmp.(DistributedError: .*)$", rank.log, flags=re.M) if "ENDED" in rank.log else None
    saw = at_end[1] if at_end else rank.saw
    if rank.status != 1 or not saw.startswith("DistributedError: "):
        return [f"rank {i} ended with {rank.status} and saw {saw!r}"]
    wrong = []
    if not re.search(rf"\brank {victim}\b", saw.removeprefix(f"DistributedError: rank {i}: ")):
        wrong.append(f"rank {i} saw an error that does not name rank {victim}: {saw!r}")
    if at_end:
        return wrong
    # A gradient contracts over the rows, or has k columns.
    difference = "dtype=" if kind == "dtype" else r"\b[mnk]=|shape of a shard="
    if is_different and not re.search(difference, rank.saw):
        wrong.append(f"rank {i} saw an error that does not name the difference: {rank.saw!r}")
    begun = [float(t) for other in ranks for t in re.findall(r"^FAULT ([\d.]+)$", other.log, flags=re.M)]
    seen = rank.seconds + begun[0]
    if is_different:  # from when the last rank has come
        begun = [max(float(re.findall(r"^COME ([\d.]+)$", other.log, flags=re.M)[-1]) for other in ranks)]
    own = float(re.findall(r"^COME ([\d.]+)$", rank.log, flags=re.M)[-1]) if steps else 0.0
    after = seen - max(begun[0], own)
    if after > WITHIN:
        wrong.append(f"rank {i} saw it {after:.1f} s after the fault")
    return wrong


STEPS = 3


def main(initialize, process: int) -> None:
    fault = json.loads(os.environ["CHAOS_FAULT"])
    is_victim = fault["victim"] == process
    initialize()
    for step in range(STEPS):
        is_now = is_victim and step == fault["step"]
        # Compiled first, so that the time since the last COME is the delay until a fault is seen.
        run, operands = program(fault["model"], fault["is_backward"], fault["kind"] if is_now else "")
        compiled = run.lower(*operands).compile()
        if is_now:
            act(fault)
        print(f"COME {time.time():.3f}", flush=True)
        jax.block_until_ready(compiled(*operands))


def act(fault) -> None:
    """The victim's fault: now, or by a timer in the middle of the step that follows."""
    kind = fault["kind"]
    print(f"FAULT {time.time():.3f}", flush=True)
    if kind in ("kill", "stop"):
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind]
        if fault["delay"]:
            threading.Timer(fault["delay"], os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)
    elif kind == "late":
        time.sleep(float(os.environ["JAXMP_TIMEOUT"]) / 2)
    elif kind == "raise":
        raise ValueError("bad luck")
    elif kind == "leave":
        sys.exit(0)


def program(model: str, is_backward: bool, kind: str):
    """(a jitted step, its operands) of one of the models; `kind` is what the victim has otherwise: "rows", "k", ..."""
    ndevices = jax.device_count()
    dtype = "bfloat16" if kind == "dtype" else "float32"
    rows, k = (16 if kind == "rows" else 8) * ndevices, (16 if kind == "k" else 8) * ndevices
    shape, names = {"grid": ((2, ndevices // 2), ("d", "x"))}.get(model, ((ndevices,), ("x",)))
    mesh = mesh_of(shape, names)
    first, second, batch = {
        "gather": (P(None, "x"), P("x", None), P("x", None)),  # rows gathered, then scattered
        "reduce": (P(None, "x"), P("x", None), P(None, None)),  # a column-parallel and a row-parallel layer
        "data": (P(None, None), P(None, None), P("x", None)),  # the same weights everywhere: sums in the gradient
        "grid": (P(None, "x"), P("x", None), P("d", None)),  # both
    }[model]
    hidden = P(batch[0] if model in ("data", "grid") else None, first[1])

    width = 8 * ndevices
    stored = ((k, width), first), ((width,), P(first[1])), ((width, k), second), ((rows, k), batch)
    operands = [ones(mesh, shape, spec, dtype) for shape, spec in stored]

    def forward(up, bias, down, x):
        h = jaxmp.linear(x, up, bias, activation="relu", out_sharding=hidden)
        return jnp.sum(jaxmp.matmul(h, down, out_sharding=batch).astype(jnp.float32))

    return jax.jit(jax.grad(forward, argnums=(0, 1, 2, 3)) if is_backward else forward), operands


def start() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--processes", type=int, default=0, help="of each job, instead of 2 or 4")
    parser.add_argument("--seconds", type=float, default=3000.0, help="begin no further job after so many")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}: make chaos SEED={seed} N={options.jobs}", flush=True)
    rng, started, failed, done = random.Random(seed), time.monotonic(), 0, 0
    for number in range(options.jobs):
        if time.monotonic() - started > options.seconds:
            break
        fault, began = draw(rng, options.processes), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong = run(fault, Path(folder))
        done += 1
        failed += bool(wrong)
        verdict = "FAILED" if wrong else "ok"
        print(f"{number}: {verdict} in {time.monotonic() - began:.1f} s: {json.dumps(fault)}", flush=True)
        if wrong:
            print(wrong, flush=True)
    print(f"{done} jobs, {failed} failed, seed {seed}, {time.monotonic() - started:.0f} s")
    return 1 if failed or done < options.jobs else 0


if __name__ == "__main__":
    sys.exit(start())
