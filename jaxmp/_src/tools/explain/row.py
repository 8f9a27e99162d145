"""What `explain` says of one call."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from jaxmp._src.core.contraction import contraction
from jaxmp._src.core.contraction.contraction import Dim, Layout
from jaxmp._src.platform.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One call, or one collective that jaxmp added, as every rank runs it.

    Attributes:
      operation: "matmul", "matmul+epilog", "ragged_dot", or for what runs next to the calls "all_gather", "all_to_all",
        "reduce_scatter", "all_reduce", "collective_permute".
      count: how often the program runs it (the trip counts of enclosing scans, multiplied); of a batch that both
        operands have, also its extent, whether it is one product or one call per index.
      global_shapes, local_shapes: of a, b and d, as stored, all groups together, and per device; of a collective, what
        a device has after it and ahead of it. Inside a shard_map with check_vma=False the global shapes are those of
        one group's product.
      dtypes: "a x b -> d", the scale modes of a and b where they have scales, and gelu_aux's type where it is not d's.
      accumulator: the type in which products are summed.
      determinism: the level asked for: "run_to_run", "batch" or "topology".
      pattern: how the ranks of a group share the product; groups: their number, size and axes.
      epilog: name of the epilog.
      implementation, why: which implementation serves it and the rule that chose it.
      algorithm: the library's algorithm and kernel, where a plan can be made here.
      flops: floating-point operations of all groups together each time (2 m n k; a complex product counts 4 real ones).
      bytes_moved: bytes that one rank reads from its peers each time.
      workspace: bytes per rank; 0 for cuBLASMp, which is asked when the call first runs.
      compute: cuBLAS's compute type.
      comm, layout: the call's communication options and block-cyclic layouts, empty where it has none.
      extents, local_extents: (m, k, n) of the whole product, and of the shards of a and b that a device holds (rows of
        a, a's part of k, columns of b); empty for a collective.
      ndevices: how many devices run it, all groups together.
      transfers: what a rank receives, by the axes over which it does, where devices have memories of their own: of
        `bytes_moved`, which on "host" counts whole operands, the part that a call over links moves.
      chunks: into how many the call is cut between machines, so that its communication overlaps the product.
      mesh: every axis of the mesh as (name, size), of which the last varies fastest from device to device.
      placement: the axes that shard op(a) (m, k), op(b) (k, n) and d (m, n), each as (of its rows, of its columns), as
        the call computes them; empty for a collective, and where the mesh is not known. Of a matrix for each group,
        as (of the groups, of its columns).
      line: the line of the program that calls it, "train.py:41": for a gradient, that of the call whose gradient it is;
        for a layer of Flax, Equinox or Haiku, the line that calls the layer.
    """

    operation: str
    count: int
    pattern: str
    groups: str
    global_shapes: tuple[tuple[int, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    dtypes: str
    accumulator: str = ""
    determinism: str = ""
    epilog: str = ""
    implementation: str
    why: str
    algorithm: str
    flops: int = 0
    bytes_moved: int = 0
    workspace: int = 0
    compute: str = ""
    comm: str = ""
    layout: str = ""
    line: str = ""
    extents: tuple[int, ...] = ()
    local_extents: tuple[int, ...] = ()
    ndevices: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    placement: tuple[tuple[Dim, Dim], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    chunks: int = 1

    @property
    def has_matrices(self) -> bool:
        """Whether a, b and d are matrices, not one for each group."""
        return self.operation != "ragged_dot"

    @property
    def contraction(self) -> str:
        """What each mesh axis splits, and along which index it shards op(a), op(b) and d: "mk,kn->mn  x: k (k k m)"."""
        return str(contraction.of_matrices(2, Layout(*self.placement))) if self.placement and self.has_matrices else ""

    def time(self, hardware: Hardware) -> CallTime | None:
        """The predicted time of one run; None where extents are symbols, where XLA partitions as it likes, and for a
        type that the machine has no rate for.

        On a machine of its own memories a call of the host implementation counts as one of cuBLASMp, which overlaps its
        transfers. On devices that share a processor it reads the operands of its peers in place.
        """
        if not isinstance(self.flops, int) or (self.pattern == "XLA's" and self.ndevices > 1):
            return None
        types = self.dtypes.split(",")[0].replace(" -> ", " x ").split(" x ")
        kind = kind_of(types[0], self.compute)
        if self.flops and kind not in hardware.rates:
            return None
        held = sum(math.prod(shape) * jnp.dtype(x).itemsize for shape, x in zip(self.local_shapes, types, strict=False))
        transfers = () if hardware.is_shared and self.implementation == "host" else self.transfers
        return call_time(
            hardware,
            flops=self.flops,
            kind=kind,
            ndevices=self.ndevices,
            nbytes=held + sum(each.nbytes for each in transfers),
            transfers=transfers,
            is_fused=self.implementation in ("host", "cublasmp"),
            chunks=self.chunks,
            implementation=self.implementation,
        )
