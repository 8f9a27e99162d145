"""Integer mathematics of process grids and blocks; knows nothing of JAX or of dtypes."""

from __future__ import annotations

from collections.abc import Sequence

# cuBLASLt wants the leading dimension of a packed relu mask in multiples of this many bits.
RELU_AUX_BITS = 128


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `x`."""
    return -(-x // multiple) * multiple


def numroc(n: int, nb: int, iproc: int, isrc: int, nprocs: int) -> int:
    """Number of rows or columns that process `iproc` holds (ScaLAPACK's NUMROC).

    Worked example: n=10 in blocks of nb=3 over nprocs=2 from isrc=0 are blocks of 3, 3, 3, 1;
    process 0 holds the first and third (6), process 1 the second and fourth (4).
    """
    distance = (nprocs + iproc - isrc) % nprocs
    full_blocks = n // nb
    local = (full_blocks // nprocs) * nb
    extra = full_blocks % nprocs
    if distance < extra:
        return local + nb
    if distance == extra:
        return local + n % nb
    return local


def local_to_global(i: int, nb: int, iproc: int, isrc: int, nprocs: int) -> int:
    """Global index of local index `i` (0-based) of process `iproc`; the inverse of a cyclic deal."""
    distance = (nprocs + iproc - isrc) % nprocs
    return ((i // nb) * nprocs + distance) * nb + i % nb


def flatten_index(coordinates: Sequence[int], shape: Sequence[int]) -> int:
    """Row-major index of `coordinates` in a box of `shape`."""
    index = 0
    for coordinate, extent in zip(coordinates, shape, strict=True):
        index = index * extent + coordinate
    return index


def unflatten_index(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Coordinates in a box of `shape` of the row-major `index`."""
    coordinates = []
    for extent in reversed(shape):
        index, coordinate = divmod(index, extent)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def relu_aux_bytes(n: int) -> int:
    """Bytes of packed relu mask per row of D: one bit per column, padded."""
    return round_up(n, RELU_AUX_BITS) // 8


def gelu_aux_ld(n: int) -> int:
    """Leading dimension in elements of the pre-activation buffer (cuBLASLt: a multiple of 8)."""
    return round_up(n, 8)
