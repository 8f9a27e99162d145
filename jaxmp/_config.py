"""The process's configuration: the only reader of environment variables."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping

# variable: (what it does, default). docs and `Config` follow this table.
VARIABLES = {
    "JAXMP_LOG": ("comma-separated topics to log on stderr; the one topic so far is 'plan'", ""),
    "JAXMP_PLAN_CACHE_SIZE": ("plans kept for reuse; the least recently used go first", "512"),
    "JAXMP_BLAS": ("path of a BLAS library to use instead of scipy-openblas32's", ""),
    "JAXMP_MKL": ("'auto' uses MKL's 16-bit products where MKL is installed, 'off' never", "auto"),
    "JAXMP_HOST_PRECISION": (
        "a precision that no CPU computes (sums in 16 bits): 'strict' refuses it on \"host\", 'ignore' sums in float32",
        "strict",
    ),
}
_LOG_TOPICS = ("plan",)


@dataclasses.dataclass(frozen=True)
class Config:
    """What the variables of `VARIABLES` say, parsed and checked."""

    log: frozenset[str]
    plan_cache_size: int
    blas: str | None
    use_mkl: bool
    ignores_precision: bool


@functools.cache
def config() -> Config:
    """The configuration, read once when first needed."""
    return parse(os.environ)


def parse(environ: Mapping[str, str]) -> Config:
    """Parse `environ`; a value that means nothing is an error, never ignored."""

    def read(name: str) -> str:
        return environ.get(name, VARIABLES[name][1]).strip()

    log = frozenset(filter(None, (topic.strip() for topic in read("JAXMP_LOG").split(","))))
    if unknown := sorted(log.difference(_LOG_TOPICS)):
        raise ValueError(f"JAXMP_LOG takes {', '.join(_LOG_TOPICS)} but has {', '.join(unknown)}.")
    size = read("JAXMP_PLAN_CACHE_SIZE")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"JAXMP_PLAN_CACHE_SIZE must be a whole number of at least 1 but is {size!r}.")
    mkl = read("JAXMP_MKL")
    if mkl not in ("auto", "off"):
        raise ValueError(f"JAXMP_MKL must be 'auto' or 'off' but is {mkl!r}.")
    precision = read("JAXMP_HOST_PRECISION")
    if precision not in ("strict", "ignore"):
        raise ValueError(f"JAXMP_HOST_PRECISION must be 'strict' or 'ignore' but is {precision!r}.")
    return Config(log, int(size), read("JAXMP_BLAS") or None, mkl == "auto", precision == "ignore")
