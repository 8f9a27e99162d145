"""Integer mathematics of process grids and blocks; knows nothing of JAX or of dtypes."""

from __future__ import annotations

import dataclasses
import functools
import operator

import numpy as np

# cuBLASLt wants the leading dimension of a packed relu mask in multiples of this many bits.
RELU_AUX_BITS = 128


def round_up(x: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `x`."""
    return -(-x // multiple) * multiple


def relu_aux_bytes(n: int) -> int:
    """Bytes of packed relu mask per row of D: one bit per column, padded."""
    return round_up(n, RELU_AUX_BITS) // 8


def gelu_aux_ld(n: int) -> int:
    """Leading dimension in elements of the pre-activation buffer (cuBLASLt: a multiple of 8)."""
    return round_up(n, 8)


# Block-cyclic matrices -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockCyclic:
    """ScaLAPACK's two-dimensional block-cyclic distribution of a matrix.

    The matrix is cut into blocks of (mb, nb), the last of each row and column ragged. Block (i, j) belongs to process
    ((i + first[0]) % p, (j + first[1]) % q) of a p x q grid, and a process stores its blocks next to each other, in
    their order.

    Worked example, rows only: 10 rows with p=2, mb=3, first=0 are blocks 0 1 2 | 3 4 5 | 6 7 8 | 9; process 0 holds
    rows 0 1 2 6 7 8, process 1 rows 3 4 5 9.

    Args:
      grid: (p, q), processes along the rows and along the columns.
      block: (mb, nb), rows and columns of a block.
      first: the process with the first block; ScaLAPACK's (RSRC, CSRC).

    Raises:
      TypeError, ValueError: a field is not a pair of integers in its range.

    Source: Blackford et al., ScaLAPACK Users' Guide (1997), section 4.3.2 and array descriptors (MB, NB, RSRC, CSRC).

    >>> import jaxmp
    >>> jaxmp.BlockCyclic(grid=(2, 1), block=(3, 4)).local_shape((10, 4))
    (6, 4)
    """

    grid: tuple[int, int]
    block: tuple[int, int]
    first: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Makes each field a pair of ints. Raises TypeError or ValueError (class docstring)."""
        for field, least in (("grid", 1), ("block", 1), ("first", 0)):
            value = getattr(self, field)
            try:
                pair = tuple(operator.index(x) for x in value)
            except TypeError:
                raise TypeError(f"BlockCyclic: {field} must be a pair of integers, got {value!r}") from None
            if len(pair) != 2 or min(pair) < least:
                raise ValueError(f"BlockCyclic: {field} must be a pair of integers of at least {least}, got {value!r}")
            object.__setattr__(self, field, pair)
        if any(source >= extent for source, extent in zip(self.first, self.grid, strict=True)):
            raise ValueError(f"BlockCyclic: first={self.first} must be a process of the grid {self.grid}")

    def local_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of the largest part of a matrix of `shape` that a process holds: the first process's."""
        rows, cols = (
            n // (nb * nprocs) * nb + min(n % (nb * nprocs), nb)
            for n, nb, nprocs in zip(shape, self.block, self.grid, strict=True)
        )
        return rows, cols

    def indices(self, shape: tuple[int, int], dimension: int) -> np.ndarray:
        """Returns (processes along `dimension`, `local_shape(shape)[dimension]`) int32: the global index of each local
        row or column. Padding has the index `shape[dimension]`."""
        extent, nprocs = shape[dimension], self.grid[dimension]
        found = np.full((nprocs, self.local_shape(shape)[dimension]), extent, np.int32)
        owner = (np.arange(extent) // self.block[dimension] + self.first[dimension]) % nprocs
        for process in range(nprocs):
            held = np.flatnonzero(owner == process)
            found[process, : len(held)] = held
        return found


@dataclasses.dataclass(frozen=True)
class Distributed:
    """A stored matrix of global `shape` in a block-cyclic layout."""

    shape: tuple[int, int]
    layout: BlockCyclic

    @property
    def local_shape(self) -> tuple[int, int]:
        return self.layout.local_shape(self.shape)

    def __str__(self) -> str:
        (m, n), (mb, nb), (rsrc, csrc) = self.shape, self.layout.block, self.layout.first
        return f"{m}x{n} in {mb}x{nb} from ({rsrc}, {csrc})"


def contiguous(shape: tuple[int, int], grid: tuple[int, int]) -> BlockCyclic:
    """Returns the layout of one block per process, of sizes rounded up. If the grid divides `shape`, a `PartitionSpec`
    over the grid gives the same."""
    rows, cols = (max(1, -(-n // p)) for n, p in zip(shape, grid, strict=True))
    return BlockCyclic(grid, (rows, cols))


@functools.lru_cache(maxsize=256)
def exchange(
    shape: tuple[int, int], dimension: int, source: BlockCyclic, target: BlockCyclic
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (send, take) of the all-to-all of equal parts from layout `source` to `target` along `dimension`, over
    the grid's processes of that dimension; None if both layouts give every process the same indices in the same order.

    `send[s, t]`: the local indices, in process s, of what s sends to t, padded with the number of its local indices.
    `take[t]`: for each local index of process t, its position in the parts that t receives, concatenated by sender;
    padding is the length of the concatenation."""
    have, want = source.indices(shape, dimension), target.indices(shape, dimension)
    if np.array_equal(have, want):
        return None
    extent, nprocs = shape[dimension], len(have)
    owner, local = np.empty((2, extent), np.int64)
    owner[have[have < extent]], local[have[have < extent]] = np.nonzero(have < extent)
    held = [indices[indices < extent] for indices in want]
    parts = [[indices[owner[indices] == s] for indices in held] for s in range(nprocs)]
    width = max(len(part) for row in parts for part in row)
    send = np.full((nprocs, nprocs, width), have.shape[1], np.int32)
    position = np.full((nprocs, extent + 1), nprocs * width, np.int32)
    for s, row in enumerate(parts):
        for t, part in enumerate(row):
            send[s, t, : len(part)] = local[part]
            position[t, part] = s * width + np.arange(len(part))
    return send, np.take_along_axis(position, want, axis=1)
