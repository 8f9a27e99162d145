"""`profile`: how long the calls of a program take, and when each device runs what."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import string
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmp._src.core.validation.operand_checks import check_function
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native
from jaxmp._src.tools.explain.explain import split_arrays
from jaxmp._src.tools.explain.hlo import Instruction, Module

_COLUMNS = 72  # of the timeline
# Everything that is not a call of jaxmp.
_OTHERS = "other operations"
_TARGETS = (native.TARGET, native.GROUPED_TARGET, native.START_TARGET, native.COLLECT_TARGET)
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


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """One kind of call in a profile.

    Attributes:
      name: pattern, m x k x n, types, level and kernel; or "other operations", all that is not jaxmp's.
      runs: how often devices ran it, all together.
      seconds: summed over devices and runs.
      share: of all seconds of the profile.
    """

    name: str
    runs: int
    seconds: float
    share: float


@dataclasses.dataclass(frozen=True, repr=False)
class Profile:
    """A profile of the devices while a program ran: `str` gives a table and a timeline.

    A device that waits for its peers within a call is busy with the call. So where devices share few cores, the times
    of calls include waiting.

    Attributes:
      events: every operation of every device.
      seconds: from the first event to the end of the last.
      calls: the seconds of each kind of call, the longest first, and the seconds of everything else at the end.
      imbalance: how unevenly rows are divided among groups (`ragged_dot`): the rows of the largest group over the mean
        of all groups. None without such products on CPU devices.
    """

    events: tuple[Event, ...]
    imbalance: float | None = None

    @property
    def seconds(self) -> float:
        return max((event.start + event.seconds for event in self.events), default=0.0)

    @functools.cached_property
    def calls(self) -> tuple[CallTimes, ...]:
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.name if event.is_call else _OTHERS, []).append(event)
        total = sum(event.seconds for event in self.events)
        rows = []
        for name, events in found.items():
            seconds = sum(event.seconds for event in events)
            rows.append(CallTimes(name, len(events), seconds, seconds / total if total else 0.0))
        return tuple(sorted(rows, key=lambda row: (row.name == _OTHERS, -row.seconds)))

    def __str__(self) -> str:
        if not self.events:
            return "the profiler saw no operation"
        lines = [f"{self.seconds * 1e6:.0f} us; times are summed over devices", "   runs        us  share  call"]
        lines += [f"  {row.runs:5} {row.seconds * 1e6:9.0f}  {row.share:5.0%}  {row.name}" for row in self.calls]
        if self.imbalance is not None:
            lines.append(f"the largest group of rows has {self.imbalance:.1f} times the rows of an average group")
        return "\n".join([*lines, "", *self._timeline()])

    def __repr__(self) -> str:
        calls = sum(row.runs for row in self.calls if row.name != _OTHERS)
        return f"Profile({calls} calls in {self.seconds * 1e6:.0f} us)"

    def _timeline(self) -> list[str]:
        """Returns a row for each device, and a legend. A letter is a kind of call, "*" any kind after the 26th, "."
        another operation, and a blank nothing. If several share a column, a call is shown before other operations, and
        then the longest."""
        names = dict.fromkeys(event.name for event in self.events if event.is_call)
        marks = dict(zip(names, itertools.chain(string.ascii_uppercase, itertools.repeat("*")), strict=False))
        rows: dict[int, list[tuple[bool, float, str]]] = {}
        total = self.seconds or 1.0
        for event in self.events:
            row = rows.setdefault(event.device, [(False, 0.0, " ")] * _COLUMNS)
            ends = event.start, event.start + event.seconds
            first, last = (min(int(_COLUMNS * time / total), _COLUMNS - 1) for time in ends)
            for i in range(first, last + 1):
                row[i] = max(row[i], (event.is_call, event.seconds, marks.get(event.name, ".")))
        lines = [f"device {device:<3} |{''.join(mark for *_, mark in rows[device])}|" for device in sorted(rows)]
        return [*lines, *(f"  {mark}  {name}" for name, mark in marks.items()), "  .  other operations"]


@public
def profile(fn: Callable[..., Any], *, quiet: bool = False) -> Callable[..., Profile]:
    """Run `fn` once under JAX's profiler, and print how long each of its jaxmp calls took and when devices ran what.

    `profile(fn)(*args, **kwargs)` compiles `fn`, runs it once to warm up, and once more under the profiler. Arguments
    that are donated are spent by the first run, so donate none. In a job of several processes,
    every process calls it.

    Args:
      fn: a function of arrays, jitted or not. Its other arguments stay as they are.
      quiet: whether to return without printing.

    Returns:
      A function of the same arguments that returns a `Profile`: `.calls`, `.events` and `.seconds`.

    Raises: TypeError where `fn` is no function; RuntimeError where the profiler writes nothing, or another profile is
    being taken; and what `fn` raises.

    >>> import jax.numpy as jnp, jaxmp
    >>> found = jaxmp.profile(jaxmp.matmul, quiet=True)(jnp.ones((64, 32)), jnp.ones((32, 16)))
    >>> found.calls[0].name.split(" (")[0], found.calls[0].runs
    ('local 64x32x16 f32*f32->f32 run_to_run', 1)
    """
    check_function("profile", fn)

    @jax_compat.hides_frames
    def profiled(*args: Any, **kwargs: Any) -> Profile:
        jitted: Any = fn
        if not hasattr(fn, "lower"):
            args, kwargs, fn_of_arrays = split_arrays(fn, args, kwargs)
            jitted = jax.jit(fn_of_arrays)
        with jax.disable_jit(False):  # which the user may have turned on, and JAX compiles nothing under it
            compiled = jitted.lower(*args, **kwargs).compile()
            jax.block_until_ready(jitted(*args, **kwargs))
            has_groups = native.GROUPED_TARGET in compiled.as_text()
            if has_groups:
                native.take_group_rows()
            events = _run(compiled, lambda: jitted(*args, **kwargs))
            largest, mean = native.take_group_rows() if has_groups else (0.0, 0.0)
            found = Profile(events, largest / mean if mean else None)
        if not quiet:
            print(found)
        return found

    return profiled


def _run(compiled: Any, call: Callable[[], Any]) -> tuple[Event, ...]:
    """Runs `call()`, which runs the program `compiled`, under JAX's profiler, and waits for the results. Returns the
    operations, sorted by start and device, with the first start as 0; () if there are none. Leaves out loops, branches
    and calls, because the operations in them are there. Raises RuntimeError if the profiler writes nothing, or another
    profile is being taken."""
    ranges = _ranges_of(compiled.as_text())
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
    `ranges`, from `_ranges_of`, name the jaxmp calls; other operations keep XLA's name."""
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


def _ranges_of(program: str) -> dict[str, str]:
    """Returns a name for each jaxmp call in a compiled program's text, by the call's instruction. The name is the range
    that jaxmp put around the call, or `_described` if XLA has dropped the range."""
    found = {}
    for computation, each in Module(program).places():
        if each.attribute("custom_call_target").strip('"') in _TARGETS:
            named = re.search(r"jaxmp (\w+ \d+x[^/]+)/", each.op_name)
            found[each.name] = named[1] if named else _described(each, computation.operands(each))
    return found


def _described(call: Instruction, operands: Sequence[Instruction]) -> str:
    """Returns "<pattern> <m>x<k>x<n> <types> <level>" for a call, from its attributes. The result has a and b as in
    jaxmp; the attributes have them swapped, because libraries are column-major. A `ragged_dot` has no such attributes:
    returns "ragged_dot <m>x<k>x<n> <types>"."""
    of = dict(re.findall(r'(\w+) = "?([\w.]+)', call.attributes))
    if "pattern" in of:
        types = f"{of['dtype_b']}*{of['dtype_a']}->{of['dtype_d']}"
        return f"{of['pattern']} {of['n']}x{of['k']}x{of['m']} {types} {of['determinism']}"
    (d, (*_, n)), (x, (_, m, k)), (w, _) = (each.shapes[0] for each in (call, *operands[:2]))
    return f"ragged_dot {m}x{k}x{n} {x}*{w}->{d}"
