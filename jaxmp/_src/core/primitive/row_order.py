"""Sums over ranks in the order of the global array, so that the bits of gradients do not depend on the mesh.

The gradient of the weights contracts over the rows of D, and data parallelism shards the rows over several ranks. Its
call sums rank after rank. That is the order of the global array if every rank holds a contiguous part of the rows. It
is not if rows are folded from several dimensions and a later dimension is sharded:

    a (batch=2, sequence=4, k) on P(None, "x", None), two ranks: the global order of the rows is
    b0s0 b0s1 b0s2 b0s3 b1s0 b1s1 b1s2 b1s3, while rank 0 holds b0s0 b0s1 b1s0 b1s1 and rank 1 the others.

Then the rows are gathered and put in order, and each rank continues with its contiguous part of them.
"""

from __future__ import annotations

import math

import jax

from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.spec.matmul_spec import MatmulSpec

# The dimensions of a contraction, slowest first: (extent on each rank, axes that shard it).
Layout = tuple[tuple[int, tuple[str, ...]], ...]


def unfolded(spec: MatmulSpec, x: jax.Array, dimension: int) -> jax.Array:
    """Puts gathered rows in global order: (ranks, outer, rows) to (outer, ranks, rows) along `dimension`. Returns x if
    the spec asks for no global order, or if ranks or outer (`spec.order.outer_rows`) is 1."""
    if not spec.global_order or spec.order.outer_rows == 1 or spec.group.nranks == 1:
        return x
    shape = x.shape
    parts = (spec.group.nranks, spec.order.outer_rows, shape[dimension] // (spec.group.nranks * spec.order.outer_rows))
    x = x.reshape(*shape[:dimension], *parts, *shape[dimension + 1 :])
    return x.swapaxes(dimension, dimension + 1).reshape(shape)


def folded(spec: MatmulSpec, x: jax.Array) -> jax.Array:
    """Inverts `unfolded` for the rows of D: from the global order to the order of a call that gathers. Returns x if the
    call does not gather, or outer or ranks is 1."""
    if not spec.contraction.gathers or spec.order.outer_rows == 1 or spec.group.nranks == 1:
        return x
    parts = x.reshape(spec.order.outer_rows, spec.group.nranks, -1, x.shape[-1])
    return parts.swapaxes(0, 1).reshape(x.shape)


def rows_of_result(spec: MatmulSpec) -> Layout:
    """Returns the layout of D's rows in the global array: `spec.order.rows`, but a scatter splits one dimension over
    its ranks, and the rows of a grid are one dimension over its `row_axes`."""
    if spec.contraction.is_grid:
        return ((1, spec.group.row_axes),)
    if not spec.contraction.scatters or not spec.order.rows:
        return spec.order.rows
    p, rows, held, scattered = spec.group.nranks, list(spec.order.rows), 1, 0
    for i, (extent, _) in enumerate(rows):
        if held == spec.order.outer_rows and extent % p == 0:
            scattered = i
        held *= extent
    extent, axes = rows[scattered]
    rows[scattered] = (extent // p, (*axes, *spec.group.row_axes))
    return tuple(rows)


def summed_over(
    call: MatmulSpec, left: jax.Array, right: jax.Array, summed: tuple[str, ...], layout: Layout
) -> tuple[MatmulSpec, jax.Array, jax.Array]:
    """Returns (call, left, right) of the all-reduced product that sums the local product `call` over the mesh axes
    `summed`. In the global order, it sums over them in the order of `layout`. If ranks hold interleaved rows, left and
    right are gathered, and each rank slices its contiguous part of the rows. Otherwise left and right are unchanged."""
    if not call.global_order:
        return call.summed_over(summed), left, right
    layout = tuple((extent, tuple(axis for axis in axes if axis in summed)) for extent, axes in layout)
    known = tuple(axis for _, axes in layout for axis in axes)
    order = tuple(axis for axis in summed if axis not in known) + known
    if not _is_contiguous(layout):
        left = _contiguous(call, left, 0 if call.transpose_a else 1, order, layout)
        right = _contiguous(call, right, 1 if call.transpose_b else 0, order, layout)
    return call.summed_over(order), left, right


def _is_contiguous(layout: Layout) -> bool:
    """True if each rank holds one contiguous part of the contraction."""
    held = 1
    for extent, axes in layout:
        if axes and held > 1:
            return False
        held *= extent
    return True


def _contiguous(call: MatmulSpec, x: jax.Array, dimension: int, order: tuple[str, ...], layout: Layout) -> jax.Array:
    """Returns this rank's contiguous part of an array that the ranks of `order` hold interleaved along `dimension`."""
    with jax.named_scope("jaxmp_global_order"):
        x = collectives.all_gather(cast_varying(x, order), order, axis=dimension, source_line=call.source_line)
    shape, n = x.shape, len(layout)
    outer = math.prod(call.group.size((axis,)) for axis in order) // math.prod(
        call.group.size(axes) for _, axes in layout
    )
    parts = [outer, *(call.group.size(axes) for _, axes in layout), *(extent for extent, _ in layout)]
    x = x.reshape(*shape[:dimension], *parts, *shape[dimension + 1 :])
    interleaved = [0, *(i for pair in zip(range(1, n + 1), range(n + 1, 2 * n + 1), strict=True) for i in pair)]
    rest = range(dimension + len(parts), x.ndim)
    x = x.transpose(*range(dimension), *(dimension + i for i in interleaved), *rest).reshape(shape)
    return collectives.own_part(x, dimension, order)
