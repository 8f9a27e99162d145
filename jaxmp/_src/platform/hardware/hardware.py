"""Machines by name: the rates that bound a product on them, from data sheets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmp._src.platform.hardware import calibration

# The names of rates: element types without their variants, and float32 rounded to TF32.
RATES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "float4", "int8")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The rates of a machine, for `jaxmp.explain(fn, hardware=...)` and `jaxmp.advise`.

    Predictions from a data sheet are limits: no call is faster, and most are slower. Predictions from a measured
    machine, `hardware="this"` after `jaxmp info --calibrate`, are estimates.

    Attributes:
      name: the name in reports.
      rates: operations per second of one device by type: "float64", "float32", "tf32" (float32 rounded to TF32),
        "bfloat16", "float16", "float8", "float4", "int8"; without sparsity. A complex product counts 4 real ones.
      memory_bandwidth: bytes per second of one device's memory.
      new_memory_bandwidth: bytes per second that one device writes to memory that is new to the process.
      memory: bytes of one device's memory.
      link_bandwidth: bytes per second that one device receives from others of its node, while it sends as many.
      node: number of devices in a node.
      network_bandwidth: bytes per second that one device receives from other nodes.
      network_load: the part of the processor that this takes, between 0 and 1.
      latency, network_latency: seconds of one step of communication within a node, and between nodes.
      launch: seconds that a call of any size takes.
      is_shared: the devices are parts of one processor, and a rate counts all of them together.
      xla_rates: rates of XLA's products, for types where they are slower than `rates`.
      source: the origin of the numbers.

    Raises: ValueError if a rate has an unknown name, or a number is not positive; latencies, launch and network_load
      may be 0.

    >>> import jaxmp
    >>> mine = jaxmp.Hardware("mine", {"float32": 1e13}, memory_bandwidth=1e12, link_bandwidth=1e11)
    >>> advice = jaxmp.advise(512, 512, 512, 4, hardware=mine, dtype="float32", quiet=True)
    >>> f"{advice.best.seconds * 1e6:.1f} us, bound by {advice.best.time.bound}"
    '6.7 us, bound by compute'
    """

    name: str
    rates: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    memory: float = float("inf")
    node: int = 1 << 30
    network_bandwidth: float = float("inf")
    latency: float = 0.0
    network_latency: float = 0.0
    launch: float = 0.0
    is_shared: bool = False
    xla_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""
    network_load: float = 0.0
    new_memory_bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if unknown := sorted({*self.rates, *self.xla_rates} - set(RATES)):
            raise ValueError(f"Hardware: rates has {', '.join(unknown)}; it takes {', '.join(RATES)}")
        rates = [(f"rates[{name!r}]", rate) for each in (self.rates, self.xla_rates) for name, rate in each.items()]
        names = ("memory_bandwidth", "link_bandwidth", "memory", "node", "network_bandwidth", "new_memory_bandwidth")
        for name, value in [*rates, *((name, getattr(self, name)) for name in names)]:
            if not value > 0:
                raise ValueError(f"Hardware: {name} must be positive, got {value!r}")
        for name in ("latency", "network_latency", "launch", "network_load"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Hardware: {name} must not be negative, got {getattr(self, name)!r}")

    def rate(self, kind: str, implementation: str = "") -> float:
        """Returns operations per second in the type `kind`. With `implementation` "xla" `xla_rates` come first. Raises
        ValueError if the machine has no rate for it."""
        rates = {**self.rates, **self.xla_rates} if implementation == "xla" else self.rates
        if kind not in rates:
            raise ValueError(f"{self.name} has no rate for {kind}, only for {', '.join(self.rates)}")
        return rates[kind]


def _nvidia(name: str, teraflops: Sequence[float], source: str, **rates: Any) -> Hardware:
    """Builds a machine of NVIDIA from its data sheet. `teraflops`: in the order of `RATES`, 0 for no rate. Latencies
    are NCCL's tuning constants (src/graph/tuning.cc, hwLat, ring with the Simple protocol). The network has 400 Gb/s
    per GPU: one ConnectX-7 (DGX H100/H200 and GB200 NVL72 system documentation)."""
    of_types = {kind: rate * 1e12 for kind, rate in zip(RATES, teraflops, strict=True) if rate}
    rates |= {"network_bandwidth": 400e9 / 8, "latency": 3.4e-6, "network_latency": 14e-6}
    return Hardware(name, of_types, source=source, **rates)


# Data sheets give NVLink's bandwidth for both directions together, and most rates "with sparsity". Both are halved.
_HOPPER = (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 0, 1978.9)
_H100 = "NVIDIA H100 Tensor Core GPU data sheet and architecture white paper, SXM5; DGX H100 data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM; DGX H200 data sheet"
# The data sheet describes the rack of 72 GPUs: 180 PFLOPS of BF16, for example.
_NVL72 = (40, 80, 1250, 2500, 2500, 5000, 10000, 5000)
_GB200 = "NVIDIA GB200 NVL72 data sheet, per GPU"
MACHINES = {
    machine.name: machine
    for machine in (
        _nvidia("h100-8", _HOPPER, _H100, memory=80e9, memory_bandwidth=3.35e12, link_bandwidth=450e9, node=8),
        _nvidia("h200-8", _HOPPER, _H200, memory=141e9, memory_bandwidth=4.8e12, link_bandwidth=450e9, node=8),
        _nvidia("gb200-nvl72", _NVL72, _GB200, memory=186e9, memory_bandwidth=8e12, link_bandwidth=900e9, node=72),
    )
}


_of_job: Hardware | None = None


def set_of_job(fields: str) -> None:
    """Sets the machine that `of_job` returns, from its fields as JSON; "" for none."""
    global _of_job
    _of_job = Hardware(**json.loads(fields)) if fields else None


def of_job() -> Hardware | None:
    """Returns the machine for decisions in every process of this job, as rank 0 has measured it; None outside a job,
    and if rank 0 has not measured its network."""
    return _of_job


def hardware_of(function: str, hardware: Any) -> Hardware:
    """Returns the machine that a user names or describes; "this" is the measured one. `function`: for messages.

    Raises:
      TypeError: neither a name nor a Hardware.
      ValueError: no machine has this name, or "this" has not been calibrated.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"{function}: hardware must be a name or a jaxmp.Hardware, got {type(hardware).__name__}")
    if hardware == "this":
        measured = calibration.load()
        if measured is None:
            raise ValueError(f'{function}: hardware "this" has not been measured yet; run jaxmp info --calibrate once')
        return Hardware(**measured)
    if hardware not in MACHINES:
        names = ", ".join(map(repr, ("this", *MACHINES)))
        raise ValueError(f"{function}: hardware must be one of {names}, or a jaxmp.Hardware; got {hardware!r}")
    return MACHINES[hardware]
