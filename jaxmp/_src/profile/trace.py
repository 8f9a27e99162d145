"""One profiled run of a compiled program: what each device ran, and when."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxmp._src.runtime import native

# What is no call of jaxmp's.
OTHERS = "other operations"
# An instruction of a program's text with its name and metadata, and the range of jaxmp's in that.
_INSTRUCTION = re.compile(r'%?(\S+) = .*op_name="[^"]*?(jaxmp \w+ \d+x[^"/]+)/')
_TARGETS = (native.TARGET, native.GROUPED_TARGET, native.START_TARGET, native.COLLECT_TARGET)
_CALLS = tuple(f'custom_call_target="{target}"' for target in _TARGETS)
# Instructions that hold others, whose times are those of what they hold.
_HOLDERS = re.compile(r"(while|call|conditional)(\.\d+)?$")


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation that a device ran.

    Attributes:
      name: of a call the pattern, m x k x n, types, level and kernel; otherwise XLA's name of the operation.
      is_call: whether it is a call of jaxmp's.
      device: by its place among this process's devices.
      start, seconds: since the first event of the run, and how long.
    """

    name: str
    is_call: bool
    device: int
    start: float
    seconds: float


def ranges_of(program: str) -> dict[str, str]:
    """The ranges of jaxmp's calls by the instructions of a compiled program's text."""
    found = {}
    for line in program.splitlines():
        if any(call in line for call in _CALLS) and (match := _INSTRUCTION.search(line.strip().removeprefix("ROOT "))):
            found[match[1]] = match[2].removeprefix("jaxmp ")
    return found


def run(compiled: Any, call: Callable[[], Any]) -> tuple[Event, ...]:
    """What the devices did in `call()`, which runs the program `compiled` once or more, by start."""
    ranges = ranges_of(compiled.as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("profile: JAX's profiler has written nothing")
        events = list(_events(jax.profiler.ProfileData.from_file(str(files[0])), ranges))
    first = min((event.start for event in events), default=0.0)
    events = [dataclasses.replace(event, start=event.start - first) for event in events]
    return tuple(sorted(events, key=lambda event: (event.start, event.device)))


def _events(profile: Any, ranges: dict[str, str]) -> Iterator[Event]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a type of jaxlib's has no module
        for plane in profile.planes:
            found = re.search(r"/device:\w+:(\d+)", plane.name)
            of_plane = found[1] if found else "0"
            for line in plane.lines:
                for event in line.events:
                    stats: dict[str, Any] = {
                        name: value for name, value in event.stats if name in ("hlo_op", "device_ordinal")
                    }
                    if "hlo_op" not in stats or _HOLDERS.match(event.name):
                        continue
                    device = int(stats.get("device_ordinal") or of_plane)
                    name = ranges.get(event.name)
                    yield Event(
                        name or event.name, name is not None, device, event.start_ns * 1e-9, event.duration_ns * 1e-9
                    )
