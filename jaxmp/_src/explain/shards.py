"""Where the shards of a row of `explain` lie: mesh axes, transfers of collectives, shapes per device."""

from __future__ import annotations

import math
from collections.abc import Collection

import jax

from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern

# Mesh axes that share one dimension, slowest first.
Dim = tuple[str, ...]


def placement(spec: MatmulSpec, varying: tuple[Collection[str], Collection[str]]) -> tuple[tuple[Dim, Dim], ...]:
    """The axes of op(a), op(b) and d, rows and columns: those of the group by its pattern, and ahead of them those
    along which groups have other rows of a, or other columns of b."""
    group, names = spec.group, [name for name, _ in spec.group.mesh]
    of_a, of_b = (set(axes) - set(group.axes) for axes in varying)
    rows, cols = (tuple(name for name in names if name in axes) for axes in (of_a - of_b, of_b - of_a))
    axes = group.axes
    if group.pattern == Pattern.ALL_GATHER:
        return ((*rows, *axes), ()), ((), (*cols, *axes)), (rows, (*cols, *axes))
    if group.pattern == Pattern.REDUCE_SCATTER:
        return (rows, axes), (axes, cols), ((*rows, *axes), cols)
    if group.pattern == Pattern.ALL_REDUCE:
        return (rows, axes), (axes, cols), (rows, cols)
    if group.pattern == Pattern.GRID:
        of_rows, of_cols = (*rows, *group.row_axes), (*cols, *group.col_axes)
        stored = (group.row_axes, of_cols), (of_rows, group.col_axes)
        a = stored[0][::-1] if spec.transpose_a else (of_rows, group.col_axes)
        b = stored[1][::-1] if spec.transpose_b else (group.row_axes, of_cols)
        return a, b, (of_rows, of_cols)
    return (rows, ()), ((), cols), (rows, cols)


def mesh_size(aval: jax.core.ShapedArray) -> int:
    """The number of devices of an array's mesh."""
    mesh = aval.sharding.mesh
    return 1 if mesh.empty else math.prod(mesh.shape.values())


def local_shape(aval: jax.core.ShapedArray) -> tuple[int, ...]:
    """Shape per device; inside shard_map that is the type's own."""
    mesh = aval.sharding.mesh
    is_local = mesh.empty or mesh.manual_axes
    return tuple(aval.shape if is_local else aval.sharding.shard_shape(aval.shape))
