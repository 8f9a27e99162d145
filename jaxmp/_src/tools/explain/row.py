"""One row of `explain`."""

from __future__ import annotations

import dataclasses
import math
import re

import jax.numpy as jnp

from jaxmp._src.core.contraction import contraction
from jaxmp._src.core.contraction.contraction import Dim, Layout
from jaxmp._src.platform.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One call, one product that is left to JAX or XLA, or one collective that jaxmp added, as every rank runs it.

    Attributes:
      operation: "matmul", "matmul+epilog" (with an epilog or c) or "ragged_dot"; for a product that `fuse` left to JAX
        its primitive; for a collective "all_gather", "all_to_all", "reduce_scatter", "all_reduce" or
        "collective_permute".
      count: how often the program runs it (the trip counts of enclosing scans, multiplied; each branch of a conditional
        counts as run). If both operands have a batch, also times its extent, both as one product and as one call per
        index.
      global_shapes, local_shapes: of a, b and d, as stored, of all groups together and per device; for a collective,
        the shape after it and the shape that a device has before it. Inside a shard_map with check_vma=False the global
        shapes are the shapes of one group's product.
      dtypes: "a x b -> d", the scale modes of a and b if they have scales, and gelu_aux's type if it is not d's.
      accumulator: the type of sums.
      determinism: the requested level: "run_to_run", "batch" or "topology".
      pattern: how the ranks of a group share the product, "all_gather", or "XLA's"; "-" for a collective, or a product
        left to JAX; groups: their number, size and axes.
      epilog: name of the epilog.
      implementation, why: the implementation and the rule that chose it.
      algorithm: the library's algorithm and kernel, if a plan can be made here.
      flops: floating-point operations of all groups together each time (2 m n k; a complex product counts 4 real ones).
      bytes_moved: bytes that one rank reads from its peers each time.
      workspace: bytes per rank; 0 for cuBLASMp, because its workspace is known only when the call first runs.
      compute: cuBLAS's compute type.
      comm, layout: the call's communication options and block-cyclic layouts; empty if it has none.
      extents, local_extents: (m, k, n) of the whole product, and of the shards of a and b that a device holds (rows of
        a, a's part of k, columns of b); empty for a collective.
      ndevices: number of devices that run it, in all groups together.
      transfers: the transfers that a rank receives if devices do not share memory. `bytes_moved` of "host" counts whole
        operands; a call over links moves only these transfers.
      processes: number of processes that meet at the call's barrier (docs/faults.md); 1 if there is none.
      chunks: number of chunks of a call between machines, so that its communication overlaps the product.
      mesh: every axis of the mesh as (name, size); the last axis varies fastest from device to device.
      placement: the axes that shard op(a) (m, k), op(b) (k, n) and d (m, n) in the call, each as (axes of its rows,
        axes of its columns); for an array with a matrix per group, (axes of the groups, axes of its columns). Empty for
        a collective, or if the mesh is unknown.
      line: the line of the program that calls it, "train.py:41". For a gradient, the line of the forward call; for a
        layer of Flax, Equinox or Haiku, the line that calls the layer.
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
    processes: int = 1
    chunks: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the ranks of a group."""
        return (*re.findall(r"'([^']+)'", self.groups),)

    @property
    def is_call(self) -> bool:
        """True for a product of jaxmp; False for a collective, and for a product that `fuse` leaves to JAX."""
        return bool(self.extents) and self.pattern != "-"

    @property
    def has_matrices(self) -> bool:
        """False for a `ragged_dot`, where an array has a matrix for each group; True for other operations."""
        return self.operation != "ragged_dot"

    @property
    def contraction(self) -> str:
        """The index that each axis splits, and its indices of op(a), op(b) and d: "mk,kn->mn  x: k (k k m)". "" for a
        `ragged_dot`, or without a `placement`."""
        return str(contraction.of_matrices(2, Layout(*self.placement))) if self.placement and self.has_matrices else ""

    def time(self, hardware: Hardware) -> CallTime | None:
        """Predicts the time of one run; None if extents are symbolic, if XLA partitions the product, or if the machine
        has no rate for a product's type. On devices that share a processor, the host implementation reads the operands
        of its peers in place. On other machines it counts as cuBLASMp, which overlaps its transfers."""
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
