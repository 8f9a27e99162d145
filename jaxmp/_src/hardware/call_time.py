"""How long one call, or one collective, takes on a machine: its roofline, and what of its communication is hidden.

A call whose P ranks fetch the operands of their peers while they multiply works in P parts: the first needs no peer,
and each later one takes the longer of its product and of its transfer. With C seconds of work and L of transfers

    seconds = launch + latency + C / P + max(C (P - 1) / P, L)

and launch + latency + C + L where nothing overlaps. C is the longer of arithmetic and memory traffic (Williams,
Waterman, Patterson, "Roofline", CACM 52(4), 2009). On devices that share a processor C is their sum, for a core that
copies operands into blocks for its cache does not multiply meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxmp._src.hardware.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What each of `nranks` ranks receives: `nbytes`, from ranks that are every `stride`-th device of the machine."""

    nbytes: int
    nranks: int
    stride: int = 1


def transfer_over(mesh: Any, axes: str | Collection[str], nbytes: int) -> Transfer:
    """What a rank receives in a collective over these axes of a mesh."""
    names = [name for name in mesh.shape if name in ((axes,) if isinstance(axes, str) else axes)]
    sizes = list(mesh.shape.items())
    last = max((list(mesh.shape).index(name) for name in names), default=len(sizes) - 1)
    stride = math.prod(size for _, size in sizes[last + 1 :])
    return Transfer(nbytes, math.prod(mesh.shape[name] for name in names), stride)


@dataclasses.dataclass(frozen=True)
class CallTime:
    """The predicted time of one call, in seconds.

    Attributes:
      compute, memory, link: of its arithmetic, of its traffic to memory and of its transfers, each alone.
      overhead: of launching it, and of the steps of its communication.
      exposed: of the transfers, what the product does not hide.
      is_shared: whether arithmetic and traffic take turns, as on devices that share a processor.
      total: of all.
    """

    compute: float
    memory: float
    link: float
    overhead: float
    exposed: float
    is_shared: bool = False

    @property
    def total(self) -> float:
        return self.overhead + _work(self.compute, self.memory, self.is_shared) + self.exposed

    @property
    def bound(self) -> str:
        """Which of the parts is the longest: "compute", "memory", "link" or "overhead"."""
        parts = {"compute": self.compute, "memory": self.memory, "link": self.link, "overhead": self.overhead}
        return max(parts, key=lambda name: parts[name])

    @property
    def utilisation(self) -> float:
        """The share of the time in which the machine computes at its rate; 0 for a collective."""
        return self.compute / self.total if self.total else 0.0


def call_time(
    hardware: Hardware,
    *,
    flops: float,
    kind: str,
    ndevices: int,
    nbytes: float,
    transfers: Sequence[Transfer],
    is_fused: bool,
    implementation: str = "",
) -> CallTime:
    """The time of a call.

    Args:
      flops: operations of all devices together, in the type `kind` (`Hardware.rates`).
      ndevices: how many devices share them.
      nbytes: bytes of operands and result that one device reads and writes.
      transfers: what each rank receives.
      is_fused: whether the transfers overlap the product.
      implementation: "xla" if XLA multiplies.
    """
    share = 1 if hardware.is_shared else ndevices
    compute = flops / share / hardware.rate(kind, implementation) if flops else 0.0
    traffic = nbytes * (ndevices if hardware.is_shared else 1) / hardware.memory_bandwidth
    link = sum(_link_seconds(hardware, each, ndevices) for each in transfers)
    overhead = hardware.launch + sum(_latency(hardware, each) for each in transfers)
    work, parts = _work(compute, traffic, hardware.is_shared), max((each.nranks for each in transfers), default=1)
    exposed = max(work / parts + max(work * (parts - 1) / parts, link) - work, 0.0) if is_fused else link
    return CallTime(compute, traffic, link, overhead, exposed, hardware.is_shared)


def _work(compute: float, traffic: float, is_shared: bool) -> float:
    return compute + traffic if is_shared else max(compute, traffic)


def _in_node(hardware: Hardware, transfer: Transfer) -> int:
    """How many ranks of the group share a node."""
    return max(1, min(transfer.nranks, hardware.node // transfer.stride))


def _link_seconds(hardware: Hardware, transfer: Transfer, ndevices: int) -> float:
    """The longer of what a rank's link carries, and of what comes into its node.

    Ranks of one node receive the same, so it enters the node once, by the network of all of them together, as in
    NCCL's rings and trees.
    """
    if transfer.nranks == 1 or not transfer.nbytes:
        return 0.0
    together = ndevices if hardware.is_shared else 1
    members = _in_node(hardware, transfer)
    within = transfer.nbytes * together / hardware.link_bandwidth if members > 1 else 0.0
    from_outside = transfer.nbytes * (transfer.nranks - members) / (transfer.nranks - 1)
    return max(within, from_outside / members / hardware.network_bandwidth)


def _latency(hardware: Hardware, transfer: Transfer) -> float:
    """Steps of a tree: the least that any algorithm takes."""
    if transfer.nranks == 1 or not transfer.nbytes:
        return 0.0
    members = _in_node(hardware, transfer)
    nodes = -(-transfer.nranks // members)
    return math.ceil(math.log2(members)) * hardware.latency + math.ceil(math.log2(nodes)) * hardware.network_latency


def kind_of(dtype: str, compute: str = "") -> str:
    """The name of a type's rate: "float8" for every float8, "float32" for complex64; `compute` is cuBLAS's type."""
    if "TF32" in compute:
        return "tf32"
    if dtype in ("float32", "complex64") and compute.endswith(("FAST_16BF", "FAST_16F")):
        return "bfloat16"
    alike = {"complex64": "float32", "complex128": "float64", "bool": "int8", "uint8": "int8"}
    for prefix in ("float8", "float4"):
        if dtype.startswith(prefix):
            return prefix
    return alike.get(dtype, "float32" if dtype.startswith(("int1", "int3", "int6", "uint")) else dtype)
