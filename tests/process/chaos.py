"""Jobs with a fault at a random moment: `make chaos` (N=200: how many, SEED=1).

Each job draws a model, forward or with its gradient, 2 or 4 ranks, and a fault of one rank: killed or stopped at once
or some time into a step, late, raising, leaving early, or with other rows, k or dtype, in the first step or a later
one. A job passes if every other rank ends within JAXMP_TIMEOUT + 5 s of the fault, with status 1 and an error's cause
or a last line that names the victim, and the difference where there is one. Where somebody is late, all end with 0.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from job import TIMEOUT, Job

KINDS = ("kill", "kill", "stop", "late", "raise", "leave", "rows", "k", "dtype")
MODELS = ("gather", "reduce", "data", "grid")
WITHIN = TIMEOUT + 5
# Of a job that starts on two busy processors.
DEADLINE = 120.0


def draw(rng: random.Random) -> dict:
    kind, model = rng.choice(KINDS), rng.choice(MODELS)
    nprocesses = 4 if model == "grid" else rng.choice((2, 4))  # a grid of two ranks would have groups of one
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
    """What was wrong with the job, with its logs, or ""."""
    env = {"CHAOS_FAULT": json.dumps(fault), "JAXMP_SHARED_MEMORY": fault["memory"]}
    job = Job(folder, "chaos_rank", fault["nprocesses"], env={"all": env})
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=3000.0, help="begin no further job after so many")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}: make chaos SEED={seed} N={options.jobs}", flush=True)
    rng, started, failed, done = random.Random(seed), time.monotonic(), 0, 0
    for number in range(options.jobs):
        if time.monotonic() - started > options.seconds:
            break
        fault, began = draw(rng), time.monotonic()
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
    sys.exit(main())
