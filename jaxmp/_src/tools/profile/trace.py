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

from jaxmp._src.platform.runtime import native

# Everything that is not a call of jaxmp.
OTHERS = "other operations"
# A call in a program's text: its name, and the range of jaxmp's in its metadata.
_INSTRUCTION = re.compile(r"(?:ROOT )?%?(\S+) = ")
_RANGE = re.compile(r'op_name="[^"]*?jaxmp (\w+ \d+x[^"/]+)/')
_TARGETS = (native.TARGET, native.GROUPED_TARGET, native.START_TARGET, native.COLLECT_TARGET)
_CALLS = tuple(f'custom_call_target="{target}"' for target in _TARGETS)
# Instructions that contain others, and so include their times.
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
    """Returns a name for each jaxmp call in a compiled program's text, by the call's instruction. The name is the range
    that jaxmp put around the call, or `_described` if XLA has dropped the range."""
    found = {}
    for line in map(str.strip, program.splitlines()):
        if any(call in line for call in _CALLS) and (match := _INSTRUCTION.match(line)):
            named = _RANGE.search(line)
            found[match[1]] = named[1] if named else _described(line)
    return found


def _described(line: str) -> str:
    """Returns "<pattern> <m>x<k>x<n> <types> <level>" for a call's line, from its attributes. The result has a and b as
    in jaxmp; the attributes have them swapped, because libraries are column-major. A `ragged_dot` has no such
    attributes: returns "ragged_dot <m>x<k>x<n> <types>"."""
    of = dict(re.findall(r'(\w+) = "?([\w.]+)', line))
    if "pattern" in of:
        types = f"{of['dtype_b']}*{of['dtype_a']}->{of['dtype_d']}"
        return f"{of['pattern']} {of['n']}x{of['k']}x{of['m']} {types} {of['determinism']}"
    d, x, w = re.findall(r"(\w+)\[([\d,]*)\]", line)[:3]
    (_, m, k), n = x[1].split(","), d[1].rpartition(",")[2]
    return f"ragged_dot {m}x{k}x{n} {x[0]}*{w[0]}->{d[0]}"


def run(compiled: Any, call: Callable[[], Any]) -> tuple[Event, ...]:
    """Runs `call()`, which runs the program `compiled`, under JAX's profiler, and waits for the results. Returns the
    operations, sorted by start and device, with the first start as 0; () if there are none. Leaves out loops, branches
    and calls, because the operations in them are there. Raises RuntimeError if the profiler writes nothing, or another
    profile is being taken."""
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
    """Yields XLA's operations in a profile, without loops, branches and calls. Starts are on the profiler's clock.
    `ranges`, from `ranges_of`, name the jaxmp calls; other operations keep XLA's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a type of jaxlib's has no module
        for plane in profile.planes:
            found = re.search(r"/device:\w+:(\d+)", plane.name)
            of_plane = found[1] if found else "0"
            for line in plane.lines:
                for event in line.events:
                    stats: dict[str, Any] = dict(event.stats)
                    if "hlo_op" not in stats or _HOLDERS.match(event.name):
                        continue
                    device = int(stats.get("device_ordinal") or of_plane)
                    name = ranges.get(event.name)
                    yield Event(
                        name or event.name, name is not None, device, event.start_ns * 1e-9, event.duration_ns * 1e-9
                    )
