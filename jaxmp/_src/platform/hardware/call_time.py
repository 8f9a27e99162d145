"""How long one call, or one collective, takes on a machine: its roofline, and what of its communication is hidden.

A call whose P ranks fetch the operands of their peers while they multiply works in P parts: the first needs no peer,
and each later one takes the longer of its product and of its transfer. With C seconds of work and L of transfers

    seconds = launch + latency + C / P + max(C (P - 1) / P, L)

and launch + latency + C + L where nothing overlaps. Between machines a call may be cut into n chunks, of which one is
multiplied while another is sent (`best_chunks`). C is the longer of arithmetic and memory traffic (Williams,
Waterman, Patterson, "Roofline", CACM 52(4), 2009). On devices that share a processor C is their sum, for a core that
copies operands into blocks for its cache does not multiply meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from jaxmp._src.platform.hardware.hardware import Hardware

# A larger buffer is new at each call, for glibc gives it back to the system (mallopt(3), M_MMAP_THRESHOLD).
_KEPT = 2**25


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What each of `nranks` ranks receives: `nbytes`, from ranks that are every `stride`-th device of the machine.

    `axes`: the mesh axes of these ranks; `kind`: the collective that moves it where XLA does, "all_gather".
    """

    nbytes: int
    nranks: int
    stride: int = 1
    axes: tuple[str, ...] = ()
    kind: str = ""

    @staticmethod
    def over(mesh: Mapping[str, int], axes: str | Collection[str], nbytes: int, kind: str = "") -> Transfer:
        """What a rank receives in a collective over these axes of a mesh, whose last axis varies fastest."""
        names = (axes,) if isinstance(axes, str) else axes
        last = max((i for i, name in enumerate(mesh) if name in names), default=len(mesh) - 1)
        stride = math.prod(list(mesh.values())[last + 1 :])
        nranks = math.prod(size for name, size in mesh.items() if name in names)
        return Transfer(nbytes, nranks, stride, (*names,), kind)


@dataclasses.dataclass(frozen=True)
class CallTime:
    """The predicted time of one call, in seconds.

    Attributes:
      compute, memory, link: of its arithmetic, of its traffic to memory and of its transfers, each alone.
      overhead: of launching it, and of the steps of its communication.
      exposed: of the transfers, what the product does not hide.
      total: of all.
    """

    compute: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    overhead: float = 0.0
    exposed: float = 0.0
    total: float = 0.0

    @property
    def bound(self) -> str:
        """Which of the parts is the longest: "compute", "memory", "link" or "overhead"."""
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
    """The time of a call.

    Args:
      flops: operations of all devices together, in the type `kind` (`Hardware.rates`).
      ndevices: how many devices share them.
      nbytes: bytes of operands and result that one device reads and writes.
      transfers: what each rank receives.
      is_fused: whether the transfers overlap the product.
      chunks: into how many it is cut, so that they do.
      implementation: "xla" if XLA multiplies.
    """
    together = ndevices if hardware.is_shared else 1  # devices that one rate is of
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
    """The number, of those that are possible, of chunks into which to cut a product between machines, or 1 for none.

    With C seconds of work, and L of transfers, n latencies among them, which keep the processor busy for u L, n chunks
    take

        copies + (C + L) / n + max(C + u L, L) (n - 1) / n

    and the whole, with one latency, takes C + L. To both is added the time of memory that is new at each call. Nothing
    is cut for less than a tenth.

    Args:
      flops, nbytes: operations of one device, and bytes that chunks have it copy.
      transfers: what it receives.
      ndevices: how many devices share a processor and a link.
      sums: bytes of each buffer of the whole for what is summed.
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
    """How many ranks of the group share a node."""
    return max(1, min(transfer.nranks, hardware.node // transfer.stride))


def _link_seconds(hardware: Hardware, transfer: Transfer, together: int) -> float:
    """The longer of what a rank's link carries, and of what comes into its node.

    Ranks of one node receive the same, so it enters the node once, by the network of all of them together, as in
    NCCL's rings and trees.
    """
    members = _in_node(hardware, transfer)
    within = transfer.nbytes * together / hardware.link_bandwidth if members > 1 else 0.0
    from_outside = transfer.nbytes * (transfer.nranks - members) / (transfer.nranks - 1)
    return max(within, from_outside / members / hardware.network_bandwidth)


def _latency(hardware: Hardware, transfer: Transfer) -> float:
    """Steps of a tree: the least that any algorithm takes."""
    members = _in_node(hardware, transfer)
    nodes = -(-transfer.nranks // members)
    return math.ceil(math.log2(members)) * hardware.latency + math.ceil(math.log2(nodes)) * hardware.network_latency


def kind_of(dtype: str, compute: str = "") -> str:
    """The name of a type's rate: "float8" for every float8, "float32" for complex64; `compute` is cuBLAS's type."""
    if "TF32" in compute:
        return "tf32"
    if dtype in ("float32", "complex64") and compute.endswith(("FAST_16BF", "FAST_16F")):
        return "bfloat16"
    if dtype.startswith(("float8", "float4")):
        return dtype[:6]
    alike = {"complex64": "float32", "complex128": "float64", "bool": "int8", "uint8": "int8"}
    return alike.get(dtype, "float32" if dtype.startswith(("int1", "int3", "int6", "uint")) else dtype)
