"""Builds the mesh for the shardings that XLA proposes: the program's mesh, with axes split if shardings use parts.

A reshape of (64, k) over 8 devices of "data" to (4, 16, k) shards the first dimension in 4 and the second in 2. The
mesh ("data:(1)4", "data:(4)2") of the same devices has an axis for each. The names are Shardy's: the size of the axis
before this part, and the size of the part. A position is the index of a device in the mesh's order of devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from jaxmp._src.core.contraction.contraction import Dim, Dims
from jaxmp._src.core.contraction.moves import size_of
from jaxmp._src.core.spec.options import Mesh
from jaxmp._src.platform.jax_internals.jax_partitioner import Global
from jaxmp._src.platform.runtime.types import Shape

# Mesh positions that divide a dimension: (the distance between them, the distance after which they repeat).
Run = tuple[int, int]


def factored(mesh: Mesh, arrays: Sequence[Global]) -> tuple[Mesh, list[Dims]]:
    """Returns (the mesh, with axes split as the shardings of the arrays require; the axes that shard each array).

    An array counts as whole if no axes express its sharding: it is on one device, or it would split an axis in a way
    that does not fit the splits for a larger array. A dimension has only the first axes that divide its extent.
    """
    cuts: Collection[int] = _ends(mesh.shape)
    runs: list[list[list[Run]]] = [[[]] * len(x.shape) for x in arrays]
    for i in sorted(range(len(arrays)), key=lambda i: -math.prod(arrays[i].shape)):
        tiles = arrays[i].tiles
        if tiles is None or tiles.size != mesh.size:
            continue
        wanted = _runs(tiles)
        ends = sorted({*cuts}.union(*itertools.chain(*wanted)))
        if ends[-1] == mesh.size and all(end % cut == 0 for cut, end in itertools.pairwise(ends)):
            axes = _split(mesh.shape, ends)
            if np.array_equal(_tiles(_dims(wanted, axes), axes, tiles.shape), np.sort(tiles)):
                cuts, runs[i] = ends, wanted
    axes = _split(mesh.shape, cuts)
    found = [_dividing(_dims(each, axes), x.shape, axes) for each, x in zip(runs, arrays, strict=True)]
    return _mesh_of(mesh, axes), found


def _ends(axes: Mapping[str, int]) -> list[int]:
    """Returns the product of all sizes, of all but the first, of all but the first two, and so on to 1."""
    return [*itertools.accumulate([*axes.values()][::-1], int.__mul__, initial=1)][::-1]


def _runs(tiles: np.ndarray) -> list[list[Run]]:
    """Returns the runs that may divide each dimension, slowest first: (distance between positions, distance after which
    they repeat). `tiles`: an array of the positions that hold each tile, along the last dimension."""
    first = tiles.min(-1)
    return [_runs_of(np.moveaxis(first, i, -1).reshape(-1, n)[0].tolist()) for i, n in enumerate(first.shape)]


def _runs_of(positions: Sequence[int]) -> list[Run]:
    """Returns the runs of one dimension, slowest first. `positions`: the first position of each of its tiles. If no
    runs give these positions, the result is meaningless, and `factored` finds that the tiles differ."""
    runs: list[Run] = []
    step = 1
    while step < len(positions):
        distance, count = max(positions[step], 1), 2
        while step * count < len(positions) and positions[step * count] == distance * count:
            count += 1
        runs.insert(0, (distance, distance * count))
        step *= count
    return runs


def _split(mesh: Mapping[str, int], cuts: Collection[int]) -> dict[str, int]:
    """Returns the axes of a mesh, each split at the `cuts` within it. Cuts are strides in the mesh's order of devices.

    `cuts` has the strides at both ends of each axis that is split, and each cut divides the next larger one. With
    {"data": 8} and cuts 1, 2, 8 the axes are data:(1)4 of 4 and data:(4)2 of 2.
    """
    axes: dict[str, int] = {}
    end = math.prod(mesh.values())
    for name, size in mesh.items():
        ends = sorted((cut for cut in cuts if end // size <= cut <= end), reverse=True)
        parts = {f"{name}:({end // high}){high // low}": high // low for high, low in itertools.pairwise(ends)}
        axes |= parts if len(parts) > 1 else {name: size}
        end //= size
    return axes


def _dims(runs: Sequence[Sequence[Run]], axes: Mapping[str, int]) -> Dims:
    """Returns the axes that divide each dimension, from the dimension's runs."""
    steps = [(name, step) for (name, size), step in zip(axes.items(), _ends(axes)[1:], strict=True) if size > 1]
    return tuple(tuple(name for low, high in dim for name, step in steps if low <= step < high) for dim in runs)


def _tiles(dims: Dims, axes: Mapping[str, int], shape: Shape) -> np.ndarray:
    """Returns, in this shape, the sorted positions that hold each tile of an array with the sharding `dims`."""
    names, sharded = [*axes], sum(dims, ())
    order = [names.index(name) for name in (*sharded, *(name for name in names if name not in sharded))]
    positions = np.arange(math.prod(axes.values())).reshape(*axes.values())
    return np.sort(positions.transpose(order).reshape(shape))


def _dividing(dims: Dims, shape: Shape, axes: Mapping[str, int]) -> Dims:
    """Returns for each dimension the longest beginning of its axes that divides its extent. XLA pads for others, and a
    call must not see padding."""

    def first(dim: Dim, extent: int) -> Dim:
        return next(dim[:i] for i in range(len(dim), -1, -1) if extent % size_of(axes, dim[:i]) == 0)

    return tuple(map(first, dims, shape))


def _mesh_of(mesh: Mesh, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the same devices with these axes."""
    if isinstance(mesh, jax.sharding.Mesh):
        return jax.sharding.Mesh(mesh.devices.reshape(*axes.values()), tuple(axes))
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
