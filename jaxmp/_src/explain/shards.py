"""Where the shards of a row of `explain` lie: mesh axes, transfers of collectives, shapes per device."""

from __future__ import annotations

import math
from collections.abc import Collection

import jax

from jaxmp._src.spec.matmul_spec import MatmulSpec

# Mesh axes that share one dimension, slowest first.
Dim = tuple[str, ...]


def placement(spec: MatmulSpec, varying: tuple[Collection[str], Collection[str]]) -> tuple[tuple[Dim, Dim], ...]:
    """The axes of op(a), op(b) and d, rows and columns: those of the group by its pattern, and ahead of them those
    along which groups have other rows of a, or other columns of b."""
    product, names = spec.contraction, [name for name, _ in spec.group.mesh]
    of_a, of_b = (set(axes) - set(spec.group.axes) for axes in varying)
    rows, cols = (tuple(name for name in names if name in axes) for axes in (of_a - of_b, of_b - of_a))
    ahead = {"m": rows, "n": cols, "k": ()}
    a, b, d = (
        [(*ahead[index], *product.sharded(which, index)) for index in indices]
        for which, indices in (("a", "mk"), ("b", "kn"), ("d", "mn"))
    )
    return (a[0], a[1]), (b[0], b[1]), (d[0], d[1])


def mesh_size(aval: jax.core.ShapedArray) -> int:
    """The number of devices of an array's mesh."""
    mesh = aval.sharding.mesh
    return 1 if mesh.empty else math.prod(mesh.shape.values())


def local_shape(aval: jax.core.ShapedArray) -> tuple[int, ...]:
    """Shape per device; inside shard_map that is the type's own."""
    mesh = aval.sharding.mesh
    is_local = mesh.empty or mesh.manual_axes
    return tuple(aval.shape if is_local else aval.sharding.shard_shape(aval.shape))
