"""`profile`: how long the calls of a program take, and when each device runs what."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmp._src.core.validation.operand_checks import check_function
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native
from jaxmp._src.tools.explain.arrays import split_arrays
from jaxmp._src.tools.profile import timeline, trace
from jaxmp._src.tools.profile.trace import OTHERS, Event


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
    """A profile of the devices while a program ran: `str` gives a table and a timeline, notebooks show a picture.

    A device that waits for its peers within a call is busy with the call. So where devices share few cores, the times
    of calls include waiting.

    Attributes:
      events: every operation of every device.
      seconds: from the first event to the end of the last.
      calls: the seconds of each kind of call, the longest first, and the seconds of everything else at the end.
      svg: the timeline as the text of an SVG file.
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
            found.setdefault(event.name if event.is_call else OTHERS, []).append(event)
        total = sum(event.seconds for event in self.events)
        rows = []
        for name, events in found.items():
            seconds = sum(event.seconds for event in events)
            rows.append(CallTimes(name, len(events), seconds, seconds / total if total else 0.0))
        return tuple(sorted(rows, key=lambda row: (row.name == OTHERS, -row.seconds)))

    @property
    def svg(self) -> str:
        return timeline.svg_of(self.events, self.seconds)

    def __str__(self) -> str:
        if not self.events:
            return "the profiler saw no operation"
        lines = [f"{self.seconds * 1e6:.0f} us; times are summed over devices", "   runs        us  share  call"]
        lines += [f"  {row.runs:5} {row.seconds * 1e6:9.0f}  {row.share:5.0%}  {row.name}" for row in self.calls]
        if self.imbalance is not None:
            lines.append(f"the largest group of rows has {self.imbalance:.1f} times the rows of an average group")
        return "\n".join([*lines, "", *timeline.text_of(self.events, self.seconds)])

    def __repr__(self) -> str:
        calls = sum(row.runs for row in self.calls if row.name != OTHERS)
        return f"Profile({calls} calls in {self.seconds * 1e6:.0f} us)"

    def _repr_svg_(self) -> str:
        return self.svg


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
      A function of the same arguments that returns a `Profile`: `.calls`, `.events`, `.seconds` and `.svg`.

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
            events = trace.run(compiled, lambda: jitted(*args, **kwargs))
            largest, mean = native.take_group_rows() if has_groups else (0.0, 0.0)
            found = Profile(events, largest / mean if mean else None)
        if not quiet:
            print(found)
        return found

    return profiled
