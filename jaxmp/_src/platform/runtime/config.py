"""The configuration of the process. Only this module reads and sets environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# variable: (what it does, default). docs and `Config` follow this table.
VARIABLES = {
    "JAXMP_LOG": (
        "comma-separated topics, logged by Python's `logging` as jaxmp.<topic>, on stderr unless it is configured: "
        "'plan' every plan that is made, 'backend' what computes each call and why, 'distributed' what becomes of the "
        "processes of a job, 'cublasmp' what the library says, which `explain` shows too",
        "",
    ),
    "JAXMP_PLAN_CACHE_SIZE": ("plans kept for reuse; the least recently used go first", "512"),
    "JAXMP_BLAS": ("path of a BLAS library to use instead of scipy-openblas32's", ""),
    "JAXMP_ISA": (
        "the instruction set of the host's own kernels, 'amx', 'avx512_bf16', 'avx512_vnni', 'avx512', 'avx_vnni', "
        "'avx2', 'neon_dotprod', 'neon' or 'portable', instead of the fastest one of the processor",
        "",
    ),
    "JAXMP_TIMEOUT": (
        "seconds after which a process that has not come to a call is missing; on GPUs 25 by default",
        "60",
    ),
    "JAXMP_SHARED_MEMORY": (
        "'on' lets the processes of one machine communicate through memory that they share, 'off' does not",
        "on",
    ),
    "JAXMP_AGREEMENT": ("'on' compares the calls of the processes before running them, 'off' does not", "on"),
}
# Variables of the tests. The package does not read them, but does not warn of them either.
TEST_VARIABLES = (
    "JAXMP_FUZZ",
    "JAXMP_FUZZ_SEED",
    "JAXMP_REQUIRE_DEVICES",
    "JAXMP_REQUIRE_GPU",
    "JAXMP_REQUIRE_ABI",
    "JAXMP_CUDA_WHEELS",
    "JAXMP_FAKES",
)
# From the most to the least capable; csrc/hostmp/cpu/features.cc finds which of them a processor has.
INSTRUCTION_SETS = (
    "amx",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx_vnni",
    "avx2",
    "neon_dotprod",
    "neon",
    "portable",
)
LOG_TOPICS = ("plan", "backend", "distributed", "cublasmp")
# Variables that launchers set in the processes that they start: (rank, size).
_LAUNCHERS = {
    "mpi": (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    "slurm": (("SLURM_PROCID", "SLURM_NTASKS"),),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The parsed and checked values of `VARIABLES` and of one variable of NCCL. `gpu_timeout`: JAXMP_TIMEOUT if set."""

    log: frozenset[str]
    plan_cache_size: int
    blas: str | None
    timeout: float = 60.0
    compares_calls: bool = True
    gpu_timeout: float = 25.0
    instruction_set: str | None = None
    shares_memory: bool = True
    ranks_share_gpus: bool = False


@functools.cache
def config() -> Config:
    """Returns the configuration; the first call reads it (`parse`) and warns of unknown variables."""
    warn_of_unknown()
    return parse(os.environ)


def parse(environ: Mapping[str, str]) -> Config:
    """Parses `environ`, with defaults for missing variables. Raises ValueError for an invalid value, also for an empty
    one if the default is not empty."""

    def read(name: str) -> str:
        return environ.get(name, VARIABLES[name][1]).strip()

    def is_on(name: str) -> bool:
        if (value := read(name)) not in ("on", "off"):
            raise ValueError(f"{name} must be 'on' or 'off' but is {value!r}.")
        return value == "on"

    log = frozenset(filter(None, (topic.strip() for topic in read("JAXMP_LOG").split(","))))
    if unknown := sorted(log.difference(LOG_TOPICS)):
        raise ValueError(f"JAXMP_LOG takes {', '.join(LOG_TOPICS)} but has {', '.join(unknown)}.")
    size = read("JAXMP_PLAN_CACHE_SIZE")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"JAXMP_PLAN_CACHE_SIZE must be a whole number of at least 1 but is {size!r}.")
    instruction_set = read("JAXMP_ISA")
    if instruction_set and instruction_set not in INSTRUCTION_SETS:
        sets = ", ".join(map(repr, INSTRUCTION_SETS))
        raise ValueError(f"JAXMP_ISA must be one of {sets} but is {instruction_set!r}.")
    timeout = parse_timeout("JAXMP_TIMEOUT", read("JAXMP_TIMEOUT"))
    return Config(
        log,
        int(size),
        read("JAXMP_BLAS") or None,
        timeout,
        is_on("JAXMP_AGREEMENT"),
        # XLA:GPU ends a process if its devices wait for each other for 30 s before a program or 40 s in its first
        # collective (xla_gpu_executable_terminate_timeout and
        # xla_gpu_first_collective_call_terminate_timeout_seconds). The error that names the call has to come first.
        timeout if "JAXMP_TIMEOUT" in environ else Config.gpu_timeout,
        instruction_set or None,
        is_on("JAXMP_SHARED_MEMORY"),
        environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") not in ("", "0"),
    )


def cache_folder() -> Path:
    """Returns the folder of jaxmp's measurements (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmp"


def of_child(**settings: str) -> dict[str, str]:
    """Returns the environment of a process that this one starts, with these settings."""
    return os.environ | settings


def environment() -> dict[str, str]:
    """Returns the environment variables that concern jaxmp, JAX and XLA, for reports of problems."""
    prefixes = ("JAXMP", "JAX_", "XLA_", "OPENBLAS_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


_named: set[str] = set()


def warn_of_unknown(stacklevel: int = 2) -> None:
    """Warns once of each unknown variable that begins with JAXMP, because a misspelt one has no effect."""
    known = (*VARIABLES, *TEST_VARIABLES)
    for name in sorted(name for name in os.environ if name.upper().startswith("JAXMP")):
        if name in known or name in _named:
            continue
        _named.add(name)
        close = difflib.get_close_matches(name.upper(), known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(VARIABLES))}."
        warnings.warn(f"jaxmp has no environment variable {name}, so it has no effect; {advice}", stacklevel=stacklevel)


def parse_timeout(name: str, value: Any) -> float:
    """Returns `value` as a float, in seconds. Raises ValueError about `name` unless it is positive and finite."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{name} must be a positive number of seconds but is {value!r}.")
    return seconds


def launcher(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Returns ("mpi" or "slurm", number of processes, which may be 1) from a launcher's variables; MPI comes first.
    Returns None if no launcher has set both a rank and a whole number of processes."""
    environ = os.environ if environ is None else environ
    for name, variables in _LAUNCHERS.items():
        for rank, size in variables:
            if rank in environ and environ.get(size, "").isdecimal():
                return name, int(environ[size])
    return None


def is_open_mpi_4() -> bool:
    """True if Open MPI before version 5 started this process, so that JAX knows the address of rank 0."""
    return "OMPI_MCA_orte_hnp_uri" in os.environ


def add_xla_flag(name: str, value: str) -> None:
    """Adds a flag to XLA_FLAGS unless the flag is there. XLA reads them once, when its first backend starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{name}" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


@contextlib.contextmanager
def loopback_without_proxy() -> Iterator[None]:
    """A context with no_grpc_proxy set if there is an HTTP proxy, so that gRPC connects to 127.0.0.1 directly."""
    name = "no_grpc_proxy"  # gRPC reads it instead of no_proxy
    before = os.environ.get(name)
    if any(os.environ.get(proxy) for proxy in ("grpc_proxy", "https_proxy", "http_proxy")):
        os.environ[name] = f"{os.environ.get('no_proxy', '') if before is None else before},127.0.0.1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
