"""The processor of this machine, as the system describes it."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# The instructions that matter to a product, as Linux names them on x86-64 and on aarch64.
_INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2", "sme"),
)


@dataclasses.dataclass(frozen=True)
class Processor:
    """Its name, the cores that this process may use, and those of its instructions that matter to a product."""

    name: str
    cores: int
    instructions: tuple[str, ...]


@functools.cache
def processor() -> Processor:
    """The processor of this machine; elsewhere than on Linux without its instructions."""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        text = ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return parse(text, platform.processor() or platform.machine(), cores)


def parse(cpuinfo: str, name: str, cores: int) -> Processor:
    """A processor from the text of /proc/cpuinfo, with `name` where that has none (aarch64)."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Processor(fields.get("model name", name), cores, tuple(x for x in _INSTRUCTIONS if x in flags))
