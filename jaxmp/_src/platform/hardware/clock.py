"""Measures functions in turns, so that a slow moment of the machine affects all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    seconds: float = 0.5,
    rounds: tuple[int, int] = (7, 31),
    wait: Callable[[Any], Any] = jax.block_until_ready,
    clock: Callable[[], float] = time.perf_counter,
    turn: float = 1e-3,
) -> dict[str, float]:
    """Returns seconds per call of each contender, the median of its rounds, after two calls each that do not count.
    Every turn lasts at least `turn` seconds, so that the clock and the dispatch matter little; with 0 it is one call.
    The rounds last about `seconds` per contender; their number is limited by `rounds` (least, most). Processes that
    have to make equally many calls need turn=0 and equal limits. The order rotates, because a contender that follows a
    large product has a cold cache. `clock`: may count the CPU time of the process in all its threads, which other
    processes disturb less."""
    names = list(contenders)
    for name in names:
        wait(contenders[name]())
    once = {name: _turn(contenders[name], 1, wait, clock) for name in names}
    calls = {name: max(1, math.ceil(turn / once[name])) for name in names}
    count = min(max(rounds[0], math.ceil(seconds / max(once[n] * calls[n] for n in names))), rounds[1])
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(count):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            samples[name].append(_turn(contenders[name], calls[name], wait, clock))
    return {name: statistics.median(samples[name]) for name in names}


def _turn(call: Callable[[], Any], times: int, wait: Callable[[Any], Any], clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(times):
        wait(call())
    return (clock() - started) / times
