"""The processor of this machine, as the system describes it."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Processor:
    """The processor's name, and the number of cores that this process may use."""

    name: str
    cores: int


@functools.cache
def processor() -> Processor:
    """Returns the processor of this machine, found once."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)  # not on aarch64
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processor(named[1].strip() if named else platform.processor() or platform.machine(), cores)
