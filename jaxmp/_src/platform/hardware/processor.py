"""The processor of this machine, as the system describes it."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# The instructions that matter for a product, by Linux's names on x86-64 and aarch64.
_INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2", "sme"),
)


@dataclasses.dataclass(frozen=True)
class Processor:
    """Name, number of cores that this process may use, and the instructions that matter for a product."""

    name: str
    cores: int
    instructions: tuple[str, ...]


@functools.cache
def processor() -> Processor:
    """Returns the processor of this machine, found once; without its instructions if the system is not Linux."""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        text = ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return parse(text, platform.processor() or platform.machine(), cores)


def parse(cpuinfo: str, name: str, cores: int) -> Processor:
    """Returns a processor of `cores` cores, with name and instructions from the text of /proc/cpuinfo. `name` is used
    if the text has no name (aarch64)."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Processor(fields.get("model name", name), cores, tuple(x for x in _INSTRUCTIONS if x in flags))
