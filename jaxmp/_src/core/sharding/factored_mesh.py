"""The mesh for what XLA's partitioner proposes: the program's, with an axis split where shardings take parts of it.

A reshape of (64, k) over 8 devices of "data" to (4, 16, k) shards the first dimension in 4 and the second in 2. The
mesh ("data:(1)4", "data:(4)2") of the same devices has an axis for each. Shardy names them so: by the size of what
comes before in the axis, and their own.
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

# Positions in the mesh that divide a dimension: how far apart they are, and where equal ones begin anew.
Run = tuple[int, int]


def factored(mesh: Mesh, arrays: Sequence[Global]) -> tuple[Mesh, list[Dims]]:
    """The mesh with axes split as far as the shardings of the arrays ask for it, and the axes that shard each array.

    An array counts as whole where no axes express its sharding: on one device, or in parts that do not fit the parts
    of a larger array.
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
    """The number of positions of all axes, without the first, without the first two and so on, down to 1."""
    return [*itertools.accumulate([*axes.values()][::-1], int.__mul__, initial=1)][::-1]


def _runs(tiles: np.ndarray) -> list[list[Run]]:
    """For each dimension the runs that may divide it, slowest first."""
    first = tiles.min(-1)
    return [_runs_of(np.moveaxis(first, i, -1).reshape(-1, n)[0].tolist()) for i, n in enumerate(first.shape)]


def _runs_of(positions: Sequence[int]) -> list[Run]:
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
    """The axes of a mesh, split where positions in it are multiples of the cuts."""
    axes: dict[str, int] = {}
    end = math.prod(mesh.values())
    for name, size in mesh.items():
        ends = sorted((cut for cut in cuts if end // size <= cut <= end), reverse=True)
        parts = {f"{name}:({end // high}){high // low}": high // low for high, low in itertools.pairwise(ends)}
        axes |= parts if len(parts) > 1 else {name: size}
        end //= size
    return axes


def _dims(runs: Sequence[Sequence[Run]], axes: Mapping[str, int]) -> Dims:
    """The axes of each dimension that these runs divide."""
    steps = [(name, step) for (name, size), step in zip(axes.items(), _ends(axes)[1:], strict=True) if size > 1]
    return tuple(tuple(name for low, high in dim for name, step in steps if low <= step < high) for dim in runs)


def _tiles(dims: Dims, axes: Mapping[str, int], shape: Shape) -> np.ndarray:
    """The sorted positions that hold each tile, in this shape, of an array that axes shard so."""
    names, sharded = [*axes], sum(dims, ())
    order = [names.index(name) for name in (*sharded, *(name for name in names if name not in sharded))]
    positions = np.arange(math.prod(axes.values())).reshape(*axes.values())
    return np.sort(positions.transpose(order).reshape(shape))


def _dividing(dims: Dims, shape: Shape, axes: Mapping[str, int]) -> Dims:
    """The first axes of each dimension that divide it: XLA pads others, and a call must not see the padding."""

    def first(dim: Dim, extent: int) -> Dim:
        return next(dim[:i] for i in range(len(dim), -1, -1) if extent % size_of(axes, dim[:i]) == 0)

    return tuple(map(first, dims, shape))


def _mesh_of(mesh: Mesh, axes: Mapping[str, int]) -> Mesh:
    """The devices of a mesh with these axes."""
    if isinstance(mesh, jax.sharding.Mesh):
        return jax.sharding.Mesh(mesh.devices.reshape(*axes.values()), tuple(axes))
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
