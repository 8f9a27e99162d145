"""Predicts the time of a call or a collective on a machine: its roofline, and the part of communication that is hidden.

If P ranks fetch operands of their peers while they multiply, the call has P parts: the first needs no peer, and each
later one takes the longer of its product and its transfer. With C seconds of work and L of transfers

    seconds = launch + latency + C / P + max(C (P - 1) / P, L)

and launch + latency + C + L if nothing overlaps. Between machines a call may be cut into n chunks, so that one chunk is
multiplied while another is sent (`best_chunks`). C is the longer of arithmetic and memory traffic (Williams, Waterman,
Patterson, "Roofline", CACM 52(4), 2009). On devices that share a processor C is their sum, because a core that copies
operands into blocks for its cache does not multiply then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from jaxmp._src.platform.hardware.hardware import Hardware

# A larger buffer is new in each call, because glibc returns it to the system (mallopt(3), M_MMAP_THRESHOLD).
_KEPT = 2**25


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A transfer of `nbytes` to each of `nranks` ranks, which are every `stride`-th device of the machine.

    `axes`: the mesh axes of these ranks. `kind`: the collective that moves it if XLA does, such as "all_gather".
    """

    nbytes: int
    nranks: int
    stride: int = 1
    axes: tuple[str, ...] = ()
    kind: str = ""

    @staticmethod
    def over(mesh: Mapping[str, int], axes: str | Collection[str], nbytes: int, kind: str = "") -> Transfer:
        """Builds the transfer of a collective over these axes of a mesh; the last axis of the mesh varies fastest."""
        names = (axes,) if isinstance(axes, str) else axes
        last = max((i for i, name in enumerate(mesh) if name in names), default=len(mesh) - 1)
        stride = math.prod(list(mesh.values())[last + 1 :])
        nranks = math.prod(size for name, size in mesh.items() if name in names)
        return Transfer(nbytes, nranks, stride, (*names,), kind)


@dataclasses.dataclass(frozen=True)
class CallTime:
    """The predicted time of one call, in seconds.

    Attributes:
      compute, memory, link: the arithmetic, the memory traffic and the transfers, each alone.
      overhead: the launch, and the latencies of the communication.
      exposed: the part of the transfers that the product does not hide.
      total: the whole call.
    """

    compute: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    overhead: float = 0.0
    exposed: float = 0.0
    total: float = 0.0

    @property
    def bound(self) -> str:
        """The longest part: "compute", "memory", "link" or "overhead"."""
        return max(("compute", "memory", "link", "overhead"), key=lambda part: float(getattr(self, part)))


def call_time(
    hardware: Hardware,
    *,
    flops: float = 0.0,
    kind: str = "",
    ndevices: int,
    nbytes: float = 0.0,
    transfers: Sequence[Transfer] = (),
    is_fused: bool = False,
    chunks: int = 1,
    implementation: str = "",
) -> CallTime:
    """Predicts the time of a call.

    Args:
      flops: operations of all devices together, in the type `kind` (`Hardware.rates`; ValueError if it is not there).
      ndevices: the number of devices that share the operations.
      nbytes: bytes of operands and result that one device reads and writes.
      transfers: the transfers that each rank receives; transfers of 0 bytes or of one rank take no time.
      is_fused: the transfers overlap the product, in as many parts as the most ranks of a transfer.
      chunks: the number of chunks that it is cut into for overlap; above 1, `is_fused` does not count.
      implementation: "xla" if XLA multiplies (`Hardware.xla_rates`).
    """
    together = ndevices if hardware.is_shared else 1  # devices that share a rate
    compute = flops * together / ndevices / hardware.rate(kind, implementation) if flops else 0.0
    traffic = nbytes * together / hardware.memory_bandwidth
    moved = [each for each in transfers if each.nbytes and each.nranks > 1]
    link = sum(_link_seconds(hardware, each, together) for each in moved)
    overhead = hardware.launch + sum(_latency(hardware, each) for each in moved)
    work = compute + traffic if hardware.is_shared else max(compute, traffic)
    parts = max((each.nranks for each in transfers), default=1)
    exposed = max(work / parts + max(work * (parts - 1) / parts, link) - work, 0.0) if is_fused else link
    exposed = _in_chunks(work, link, hardware.network_load, chunks) - work if chunks > 1 else exposed
    return CallTime(compute, traffic, link, overhead, exposed, overhead + work + exposed)


def best_chunks(
    hardware: Hardware,
    possible: Sequence[int],
    *,
    flops: float,
    kind: str,
    nbytes: float,
    transfers: Sequence[Transfer],
    ndevices: int,
    sums: Sequence[int] = (),
) -> int:
    """Returns the best of the `possible` numbers of chunks for a product between machines, or 1 to leave it whole.

    With C seconds of work and L of transfers, which include n latencies and keep the processor busy for u L, n chunks
    take

        copies + (C + L) / n + max(C + u L, L) (n - 1) / n

    and the whole, with one latency, takes C + L. Each buffer above 32 MiB per chunk adds the time for new memory to
    both. A product is cut only if that saves more than a tenth.

    Args:
      flops, nbytes: operations of one device in the type `kind` (ValueError if it is not in `Hardware.rates`), and
        bytes that it copies because of chunks.
      transfers: the transfers that it receives.
      ndevices: the number of devices that share a processor and a link.
      sums: bytes of each buffer of the whole product's sums.
    """
    latency = hardware.launch + hardware.network_latency
    work = ndevices * flops / hardware.rate(kind)
    link = ndevices * sum(each.nbytes for each in transfers) / hardware.network_bandwidth
    copies = ndevices * 2 * nbytes / hardware.memory_bandwidth

    def seconds(n: int) -> float:
        new = ndevices * sum(each for each in sums if each > n * _KEPT) / hardware.new_memory_bandwidth
        return new + copies * (n > 1) + _in_chunks(work, link + n * latency, hardware.network_load, n)

    best = min(possible, key=seconds, default=1)
    return best if best > 1 and seconds(best) < 0.9 * seconds(1) else 1


def _in_chunks(work: float, link: float, load: float, n: int) -> float:
    return (work + link) / n + max(work + load * link, link) * (n - 1) / n


def _in_node(hardware: Hardware, transfer: Transfer) -> int:
    """Returns the number of the transfer's ranks that share a node, at least 1."""
    return max(1, min(transfer.nranks, hardware.node // transfer.stride))


def _link_seconds(hardware: Hardware, transfer: Transfer, together: int) -> float:
    """Returns the longer of two times, without latencies: of a rank's link within its node, and of the network between
    nodes. The transfer must have several ranks. Ranks of one node receive the same data. It enters the node once, over
    the network of all ranks together, as in NCCL's rings and trees. `together`: the number of devices that share one
    link."""
    members = _in_node(hardware, transfer)
    within = transfer.nbytes * together / hardware.link_bandwidth if members > 1 else 0.0
    from_outside = transfer.nbytes * (transfer.nranks - members) / (transfer.nranks - 1)
    return max(within, from_outside / members / hardware.network_bandwidth)


def _latency(hardware: Hardware, transfer: Transfer) -> float:
    """Returns the latency of a tree's steps within and between nodes, the fewest that any algorithm takes."""
    members = _in_node(hardware, transfer)
    nodes = -(-transfer.nranks // members)
    return math.ceil(math.log2(members)) * hardware.latency + math.ceil(math.log2(nodes)) * hardware.network_latency


def kind_of(dtype: str, compute: str = "") -> str:
    """Returns the name of the rate (`hardware.RATES`) of a type under a cuBLAS compute type: "tf32" if `compute` is
    TF32, and "bfloat16" if it computes float32 in 16 bits. Otherwise the type itself, without its variant ("float8");
    the real type of complex numbers; "int8" for bool and uint8; "float32" for other integers. int2 and int4 are
    returned as they are, without a rate."""
    if "TF32" in compute:
        return "tf32"
    if dtype in ("float32", "complex64") and compute.endswith(("FAST_16BF", "FAST_16F")):
        return "bfloat16"
    if dtype.startswith(("float8", "float4")):
        return dtype[:6]
    rated_as = {"complex64": "float32", "complex128": "float64", "bool": "int8", "uint8": "int8"}
    return rated_as.get(dtype, "float32" if dtype.startswith(("int1", "int3", "int6", "uint")) else dtype)
