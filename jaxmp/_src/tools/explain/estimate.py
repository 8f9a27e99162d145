"""The predicted time of a row of `explain` on a machine."""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxmp._src.platform.hardware.call_time import CallTime, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.tools.explain.row import Row


def estimate(row: Row, hardware: Hardware) -> CallTime | None:
    """The time of one run of a row; None where extents are symbols, where XLA partitions as it likes, and for a type of
    which the machine has no rate.

    On a machine of its own memories a call of the host implementation is taken for one of cuBLASMp, which overlaps its
    transfers. On devices that share a processor that implementation reads the operands of its peers in place, so what
    it receives is counted where it lies.
    """
    if not isinstance(row.flops, int) or (row.pattern == "XLA's" and row.ndevices > 1):
        return None
    types = row.dtypes.split(",")[0].replace(" -> ", " x ").split(" x ")
    kind = kind_of(types[0], row.compute)
    if row.flops and kind not in hardware.rates:
        return None
    held = sum(math.prod(shape) * jnp.dtype(x).itemsize for shape, x in zip(row.local_shapes, types, strict=False))
    transfers = () if hardware.is_shared and row.implementation == "host" else row.transfers
    return call_time(
        hardware,
        flops=row.flops,
        kind=kind,
        ndevices=row.ndevices,
        nbytes=held + sum(each.nbytes for each in transfers),
        transfers=transfers,
        is_fused=row.implementation in ("host", "cublasmp"),
        chunks=row.chunks,
        implementation=row.implementation,
    )
