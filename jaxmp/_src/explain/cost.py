"""The bytes that a call moves; `explain` prints them."""

from __future__ import annotations

import math

from jaxmp._src.hardware.call_time import Transfer
from jaxmp._src.runtime.types import ArrayType
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.matmul_spec import MatmulSpec, accumulator, extents


def bytes_moved(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> int:
    """Bytes that one rank reads from its peers' memory, by the pattern's own minimum."""
    return sum(each.nbytes for each in transfers(spec, a, b, implementation))


def transfers(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> tuple[Transfer, ...]:
    """What one rank receives, and among which ranks.

    AG: the other ranks' rows. RS and AR by partial sums (ring): (P-1)/P of D in the accumulator's type, twice for AR.
    The host implementation reads the operands of its peers instead. A grid: the blocks of its row and its column.
    """
    group, product = spec.group, spec.contraction
    if product.is_block_grid or spec.distributions:
        sides = ((a, group.col_axes), (b, group.row_axes))
        found = ((_nbytes(x) * (group.size(axes) - 1), axes) for x, axes in sides)
        return tuple(Transfer(nbytes, group.size(axes), _stride(spec, axes)) for nbytes, axes in found if nbytes)
    if not product.communicates:
        return ()
    if product.gathered:
        nbytes = (group.nranks - 1) * _nbytes(a if product.gathered[0] == "a" else b)
    else:
        nbytes = _bytes_of_sums(spec, a, b, implementation)
    return (Transfer(nbytes, group.nranks, _stride(spec, group.axes)),)


def _nbytes(x: ArrayType) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _stride(spec: MatmulSpec, axes: tuple[str, ...]) -> int:
    """By how many devices neighbours along these axes lie apart, in a mesh whose last axis varies fastest."""
    names = [name for name, _ in spec.group.mesh]
    last = max((names.index(axis) for axis in axes), default=0)
    return math.prod(size for _, size in spec.group.mesh[last + 1 :])


def _bytes_of_sums(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> int:
    """Bytes that one rank receives where the group sums what its ranks have multiplied."""
    p, product = spec.group.nranks, spec.contraction
    rows, cols = extents(spec, a.shape, b.shape).d
    # Of which each rank needs its own part, and all.
    part, whole = (_nbytes(x) for x in ((b, a) if product.scattered == 1 else (a, b)))
    if implementation == "host":
        # Each rank computes 1/P of the rows from all ranks' shards.
        return (p - 1) * (part // p + whole)
    if spec.fixed_reduction_order:
        return (p - 1) * (part // (1 if product.is_reduced else p) + whole)
    sums = accumulator(low_precision.operand_type(a.dtype, b.dtype))
    full = rows * cols * (1 if product.is_reduced else p) * sums.itemsize
    return full * (p - 1) // p * (2 if product.is_reduced else 1)
