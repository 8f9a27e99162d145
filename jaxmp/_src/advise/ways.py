"""The ways to run a product on a mesh: every call of the planner's that fits it, with its time on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxmp._src.contraction import planner
from jaxmp._src.contraction.contraction import Contraction
from jaxmp._src.contraction.moves import in_call, size_of
from jaxmp._src.hardware.call_time import CallTime, call_time, kind_of
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.matmul_spec import accumulator

Mesh = tuple[tuple[str, int], ...]


class Way(NamedTuple):
    """A call; its time; the bytes of a, b and d that a device holds; those that it receives in the call; and how often
    it runs: once for each index of a batch that a device has."""

    call: Contraction
    time: CallTime
    memory: int
    bytes_moved: int
    runs: int


def ways(
    product: Contraction,
    extents: Mapping[str, int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    mesh: Mesh,
    hardware: Hardware,
) -> Iterator[Way]:
    """The ways to run a product of operands and a result of these types, each axis in a role of its own."""
    dtype, sizes, batch = dtypes[0], dict(mesh), product.batch
    itemsizes = (dtypes[0].itemsize, dtypes[1].itemsize, dtypes[2].itemsize, accumulator(dtype).itemsize)
    is_plain = not batch and product.is_stored_in_order
    gathers_k = is_plain and not low_precision.is_low_precision(dtype)
    terms = planner.Terms(tuple(extents.items()), mesh, itemsizes, keeps_result=False, gathers_k=gathers_k)
    flops = 2 * math.prod(extents.values()) * (4 if np.issubdtype(dtype, np.complexfloating) else 1)
    devices = size_of(sizes, tuple(sizes))
    for call in planner.layouts(product, terms):
        runs = math.prod(extents[i] // size_of(sizes, call.sharded("d", i)) for i in batch)
        held = planner.local_bytes(call, terms)
        a, b, d, sums = (nbytes // (runs or 1) for nbytes in held)
        transfers = in_call(call, sizes, a, b, sums)
        moved = () if hardware.is_shared else transfers  # read in place, as `explain` counts them
        time = call_time(
            hardware,
            # Devices with one role for all of d, and those with other indices of a batch, compute a product each.
            flops=flops // (runs or 1) * (devices // size_of(sizes, tuple(call.roles))),
            kind=kind_of(dtype.name),
            ndevices=devices,
            nbytes=a + b + d + sum(each.nbytes for each in moved),
            transfers=moved,
            is_fused=True,
        )
        yield Way(call, time, sum(held[:3]), sum(each.nbytes for each in transfers), runs)
