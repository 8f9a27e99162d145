"""Run a client fused and plain, step by step at each place, and print the results as JSON, a line per place. `python
run_client.py NAME [--times N]`. Exits with 1 if a step differs from plain by more than the client's bound."""

import argparse
import itertools
import json
import statistics
import sys
import time
import warnings

import jax
import numpy as np
import programs  # noqa: F401  adds its clients
import sciences  # noqa: F401  adds its clients
import trainers  # noqa: F401  adds its clients
from counting import counting
from models import CLIENTS
from runs import DEVICES, STEPS, Run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CLIENTS)
    parser.add_argument("--places", nargs="*")
    parser.add_argument("--times", type=int, default=0, help="time this many further steps of both, in turn")
    arguments = parser.parse_args()
    client = CLIENTS[arguments.name]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    warnings.filterwarnings("error", message="fuse: leaves the program")
    failed = False
    for place in arguments.places or client.places:
        seen = compare(client, place, arguments.times)
        print("RESULT", json.dumps({"place": place} | seen), flush=True)
        failed |= seen["error"] > client.bound
    sys.exit(failed)


def compare(client, place, times):
    """Returns the largest difference of any step, the counts of products, and the ratio of the times of a step."""
    runs = [Run(place, is_fused) for is_fused in (False, True)]
    error = 0.0
    with runs[0].scope(), counting() as count:
        plain, fused = (client.run(run) for run in runs)
        for one, other in itertools.islice(zip(plain, fused, strict=False), STEPS):
            error = max(error, difference(one, other))
        seconds = [(timed(plain), timed(fused)) for _ in range(times)]
        seconds = [pair for pair in seconds if None not in pair]  # some clients end on their own
    if not count.calls:
        error = float("inf")
    ratio = statistics.median(a for a, _ in seconds) / statistics.median(b for _, b in seconds) if seconds else None
    return {"error": error, "calls": count.calls, "met": count.met, "left": count.left, "speed": ratio}


def difference(one, other):
    """Returns the largest difference, relative to the largest value of each array."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max((relative(np.asarray(a), np.asarray(b)) for a, b in pairs), default=0.0)


def relative(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not np.issubdtype(a.dtype, np.number):
        return 0.0 if np.array_equal(a, b) else float("inf")
    wide = [x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b)]
    if not (np.isfinite(wide[0]).all() and np.isfinite(wide[1]).all()):
        return float("inf")
    return float(np.max(np.abs(wide[0] - wide[1]), initial=0) / max(np.max(np.abs(wide[0]), initial=0), 1e-3))


def timed(steps):
    """Returns the seconds of the next step, or None if there is none."""
    start = time.perf_counter()
    results = jax.block_until_ready(next(steps, None))
    return None if results is None else time.perf_counter() - start


if __name__ == "__main__":
    main()
