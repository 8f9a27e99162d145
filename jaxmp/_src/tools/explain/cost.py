"""The bytes that a call moves; `explain` prints them."""

from __future__ import annotations

import math

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.extents import extents
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, accumulator
from jaxmp._src.platform.hardware.call_time import Transfer
from jaxmp._src.platform.runtime.types import ArrayType


def transfers(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> tuple[Transfer, ...]:
    """What one rank receives, and among which ranks.

    The host implementation, and any in a fixed order, read operands of peers where others move partial
    sums: each rank computes 1/P of the rows (or columns) from all ranks' shards, or gathers what its part of d needs.
    """
    call, mesh, p = spec.contraction, dict(spec.group.mesh), spec.group.nranks
    of_a, of_b = (math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
    if spec.distributions:
        return moves.in_grid(call, mesh, of_a, of_b)
    if call.sums and (implementation == "host" or spec.fixed_reduction_order):
        part, whole = (of_b, of_a) if call.scattered == 1 else (of_a, of_b)
        needed = part if call.is_reduced and implementation != "host" else part // p
        return (Transfer.over(mesh, spec.group.axes, (p - 1) * (needed + whole)),)
    rows, cols = extents(spec, a.shape, b.shape).d
    sums = rows * cols * accumulator(low_precision.operand_type(a.dtype, b.dtype)).itemsize
    return moves.in_call(call, mesh, of_a, of_b, sums)
