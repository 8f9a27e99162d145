"""The "xla" implementation: the local product and `lax` collectives, all in the accumulator's type.

Across processes another implementation may compute the local product (`local_product`), and a barrier runs before the
first collective (`Processes`). On one machine the collectives may use memory that the processes share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.lowering import numerics
from jaxmp._src.core.lowering.process_collectives import SharedMemory
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.spec import low_precision, precisions, wire
from jaxmp._src.core.spec.extents import extents
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.runtime.types import Operands

if TYPE_CHECKING:
    from jaxmp._src.core.lowering.deferred import Chunks

# The scope of products that XLA partitions by itself, for `explain`.
SCOPE = "jaxmp_xla"
# (array, axes, dimension) -> array.
Gather = Callable[[jax.Array, tuple[str, ...], int], jax.Array]
# `local_product` of `matmul`.
LocalProduct = Callable[[jax.Array, jax.Array, MatmulSpec], jax.Array]
Barrier = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Processes:
    """How the processes of a call meet. `barrier(xs)` returns the operands of the first collective once all ranks have
    come. `memory`: collectives through shared memory, with barriers inside. `chunks`: computes the local product in
    chunks while XLA's collectives move other chunks."""

    barrier: Barrier
    memory: SharedMemory | None = None
    chunks: Chunks | None = None


def matmul(
    operands: Operands,
    spec: MatmulSpec,
    platform: str,
    local_product: LocalProduct | None = None,
    processes: Processes | None = None,
) -> Operands:
    """Returns the results by name from one device's shards. `local_product(a, b, spec)` returns op(a) @ op(b), without
    alpha, of the operands that one device has gathered, in the accumulator's type; by default XLA does. It is not
    called for block-cyclic shards, for fp8 and fp4 with scales, and for fp8 and fp4 between processes. `processes`:
    None if no barrier is needed. If an operand is empty, no collective or barrier runs before the epilog."""
    a, b = operands["a"], operands["b"]
    wide, is_mixed = low_precision.operand_type(a.dtype, b.dtype), low_precision.is_mixed(a.dtype, b.dtype)
    compute = precisions.compute_type(spec.precision, wide, platform)
    acc = precisions.summed_in(compute, wide)
    is_scaled = low_precision.is_scaled(wide)
    if spec.distributions or (is_scaled and (spec.scales.are_of_factors or processes)):
        local_product = None
    if 0 in (*a.shape, *b.shape):
        a, b = numerics.decoded(*low_precision.widened(a, b), operands, spec, acc)
        z = jnp.zeros(extents(spec, a.shape, b.shape).d, np.float32 if numerics.scales_sums(acc, spec) else acc)
        return numerics.apply_epilog(z, operands | {"a": a, "b": b}, spec)
    memory = processes.memory if processes else None
    memory = memory if memory and memory.sums(acc) else None  # all collectives of the call or none
    barrier = processes.barrier if processes and not memory else (lambda operands: operands)
    chunks = processes.chunks if processes and not memory and local_product else None
    all_gather, psum, psum_scatter = _collectives(memory, platform)
    sums = spec.contraction.sums and not spec.distributions
    gathers = spec.contraction.communicates and not sums
    if gathers and not chunks:  # only operands that move: for an argument of the program the barrier costs a copy
        one = None if spec.distributions else spec.contraction.gathered
        names = [*(one[0] if one else "ab"), *(name for name in ("scale_a", "scale_b") if name in operands)]
        operands = operands | {"a": a, "b": b}
        operands |= dict(zip(names, barrier([operands[name] for name in names]), strict=True))
        a, b = operands["a"], operands["b"]

    def computed(a: jax.Array, b: jax.Array, scales: Operands) -> tuple[jax.Array, jax.Array]:
        a, b = low_precision.widened(a, b)
        if local_product and a.dtype != np.bool_:
            return a, b
        return numerics.widened(*numerics.decoded(a, b, scales, spec, acc), platform, acc)

    def add(z: jax.Array) -> jax.Array:
        scattered = spec.contraction.scattered
        if scattered is None:
            return psum(z, spec.group.axes)
        return psum_scatter(z, spec.group.axes, scattered) if spec.group.nranks > 1 else z

    shards = computed(a, b, operands)
    of_sums = _scales_of_part(spec, operands, all_gather) if numerics.scales_sums(acc, spec) else operands
    own = of_sums | {"a": shards[0].astype(acc), "b": shards[1].astype(acc)}
    if chunks:
        z = chunks.gathered(a, b, barrier, all_gather) if gathers else chunks.summed(*shards, barrier, add)
        return numerics.apply_epilog(z, own, spec)
    if not is_mixed and (memory or platform != "cpu" or not _gathers_scales(spec, a, b)):
        a, b = _gather_operands(spec, *shards, all_gather)
    else:  # gather in the stored types, which have fewer bytes
        a, b = computed(*_gather_operands(spec, a, b, all_gather), _gather_scales(spec, operands, all_gather))
    z = local_product(a, b, spec) if local_product else numerics.dot_general(a, b, spec, compute, acc)
    if not gathers:
        (z,) = barrier([z])
    return numerics.apply_epilog(add(z) if sums else z, own, spec)


def _collectives(memory: SharedMemory | None, platform: str) -> tuple[Gather, Callable[..., jax.Array], Gather]:
    """Returns (all-gather, sum, reduce-scatter), through shared memory or XLA's."""
    if memory:
        return memory.all_gather, memory.psum, memory.psum_scatter
    all_gather = functools.partial(_all_gather, platform=platform)
    return all_gather, lax.psum, lambda x, axes, dim: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def collective(
    kind: str,
    x: jax.Array,
    axes: tuple[str, ...],
    dimensions: tuple[int, ...],
    *,
    platform: str,
    memory: SharedMemory | None = None,
) -> jax.Array:
    """Applies the collective `kind` (a name of lax, or "reduce_scatter") to `x` over `axes`, through `memory` if given,
    else by lax. `dimensions`: () for "psum" and "pmax", (split, joined) for "all_to_all", one for others."""
    all_gather, psum, psum_scatter = _collectives(memory, platform)
    if kind == "psum":
        return psum(x, axes)
    if kind == "pmax":
        largest: jax.Array = all_gather(x[None], axes, 0).max(0) if memory else lax.pmax(x, axes)
        return largest
    if kind == "all_to_all":
        split, joined = dimensions
        if memory:  # each rank reads all parts of all ranks and keeps its own
            parts = x.reshape(*x.shape[:split], lax.axis_size(axes), -1, *x.shape[split + 1 :])
            every = all_gather(parts, axes, joined + (joined >= split))
            return lax.squeeze(collectives.own_part(every, split, axes), (split,))
        return _all_to_all(x, axes, split, joined, platform)
    return (psum_scatter if kind == "reduce_scatter" else all_gather)(x, axes, *dimensions)


@collectives.unless_empty
def _all_gather(x: jax.Array, axes: tuple[str, ...], dimension: int, platform: str) -> jax.Array:
    return wire.moved(lambda x: collectives.gather(x, axes, dimension), x, platform)


@collectives.unless_empty
def _all_to_all(x: jax.Array, axes: tuple[str, ...], split: int, joined: int, platform: str) -> jax.Array:
    exchange = functools.partial(lax.all_to_all, axis_name=axes, split_axis=split, concat_axis=joined, tiled=True)
    return wire.moved(exchange, x, platform, lax.axis_size(axes))


def global_matmul(
    operands: Operands, spec: MatmulSpec, platform: str, out_sharding: Any, numbers: Any = None
) -> Operands:
    """Returns the results by name of a product of global arrays that XLA partitions. `out_sharding`: the sharding of d
    on explicit axes. `numbers`: dimension numbers of a product without an epilog."""
    a, b = low_precision.widened(operands["a"], operands["b"])
    compute = precisions.compute_type(spec.precision, a.dtype, platform)
    acc = precisions.summed_in(compute, a.dtype)
    a, b = numerics.widened(*numerics.decoded(a, b, operands, spec, acc), platform, acc)
    with jax.named_scope(SCOPE):
        z = numerics.dot_general(a, b, spec, compute, acc, numbers=numbers, out_sharding=out_sharding)
    return numerics.apply_epilog(z, operands, spec)


def gather_for_part(spec: MatmulSpec, operands: Operands, platform: str) -> Operands:
    """Returns the operands by name, with a, b and scales replaced by those parts that this rank's part of D needs: rows
    of op(a) and columns of op(b), each over all k. An all-to-all replaces a reduce-scatter."""
    a, b, product, axes = operands["a"], operands["b"], spec.contraction, spec.group.row_axes
    gather = functools.partial(_all_gather, platform=platform)
    if product.sums:
        k = product.a.index("k")
        a = _all_to_all(a, axes, 1 - k, k, platform) if product.scatters else gather(a, axes, k)
        b = gather(b, axes, product.b.index("k"))
    else:
        a, b = _gather_operands(spec, a, b, gather)
    return _scales_of_part(spec, operands, gather) | {"a": a, "b": b}


def _gathers_scales(spec: MatmulSpec, a: jax.Array, b: jax.Array) -> bool:
    """True if scales can be gathered with their operands: both are of the tensor, or one operand is gathered along one
    dimension and a shard of it has whole blocks there. A grid that gathers both operands needs scales of the tensor."""
    modes = dict(zip("ab", (spec.scales.a, spec.scales.b), strict=True))
    if all(map(low_precision.is_of_tensor, modes.values())):
        return True
    gathered = spec.contraction.gathered
    if gathered is None or spec.contraction.is_block_grid or spec.distributions:
        return False
    which, dimension = gathered
    extent = (a if which == "a" else b).shape[dimension]
    return modes[which] != low_precision.BLK128 or extent % low_precision.BLOCK[low_precision.BLK128] == 0


def _gather_scales(spec: MatmulSpec, operands: Operands, all_gather: Gather) -> Operands:
    """Returns the operands by name, with the scales of the gathered operand gathered too if they vary along it."""
    product = spec.contraction
    if product.gathered is None or spec.group.nranks == 1:
        return operands
    which, dimension = product.gathered
    name = f"scale_{which}"
    has_blocks = spec.scales.of(name) in low_precision.BLOCK
    has_rows = spec.scales.of(name) == low_precision.OUTER_VEC and getattr(product, which)[dimension] != "k"
    if not (has_blocks or has_rows):
        return operands
    return operands | {name: all_gather(operands[name], spec.group.axes, dimension if has_blocks else 0)}


def _scales_of_part(spec: MatmulSpec, operands: Operands, all_gather: Gather) -> Operands:
    """Returns the operands by name, with the scales that this rank's part of D needs. If D is scattered, slices scales
    per row of op(a) or per column of op(b). On a grid, gathers and slices such scales of an operand that is stored
    transposed. In both cases scales of blocks and of the tensor stay unchanged. Otherwise the same as
    `_gather_scales`."""
    product, (rows, cols) = spec.contraction, (spec.group.row_axes, spec.group.col_axes)
    # (name, axes to gather over, axes along which this rank takes its part)
    moved: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    if product.scattered is not None:
        moved = [(("scale_a", "scale_b")[product.scattered], (), rows)]
    elif product.is_block_grid:  # rows of a transposed operand are sharded over the grid's columns
        moved = [("scale_a", cols, rows)] * spec.transpose_a + [("scale_b", rows, cols)] * spec.transpose_b
    for name, have, want in moved:
        if spec.scales.of(name) == low_precision.OUTER_VEC:
            x = all_gather(operands[name], have, 0) if have else operands[name]
            operands = operands | {name: collectives.own_part(x, 0, want)}
    return operands if moved else _gather_scales(spec, operands, all_gather)


def _gather_operands(spec: MatmulSpec, a: jax.Array, b: jax.Array, all_gather: Gather) -> tuple[jax.Array, jax.Array]:
    """Returns (a, b), gathered as far as this rank's part of d needs it, but never along a k that ranks sum over."""
    if spec.distributions:
        return _gather_cyclic(spec, a, b, all_gather)
    if spec.group.nranks == 1:  # XLA would copy
        return a, b
    if spec.contraction.is_block_grid:
        a = _gather_stored(spec, a, None if spec.transpose_a else 0, all_gather)
        b = _gather_stored(spec, b, None if spec.transpose_b else 1, all_gather)
        # Rows of op(A) of a transposed a are sharded over the grid's columns, so this device's part is sliced here.
        a = collectives.own_part(a, 1, spec.group.row_axes) if spec.transpose_a else a
        b = collectives.own_part(b, 0, spec.group.col_axes) if spec.transpose_b else b
    elif gathered := spec.contraction.gathered:
        which, dimension = gathered
        x = a if which == "a" else b
        whole = all_gather(x, spec.group.axes, dimension)
        a, b = (whole, b) if which == "a" else (a, whole)
    return a, b


def _gather_cyclic(spec: MatmulSpec, a: jax.Array, b: jax.Array, all_gather: Gather) -> tuple[jax.Array, jax.Array]:
    """Returns (the rows of op(a), the columns of op(b)) for this device's part of d, over all k, from block-cyclic
    shards. An operand that is stored transposed stays transposed. Rows and columns are in the order of the part, with
    zeros as padding."""
    assert spec.distributions is not None
    whole_a, whole_b, d = spec.distributions
    kept = (1 if spec.transpose_a else 0, 0 if spec.transpose_b else 1)
    parts = []
    for x, matrix, own, dimension in ((a, whole_a, kept[0], 0), (b, whole_b, kept[1], 1)):
        x = _gather_stored(spec, x, None, all_gather)
        for i in range(2):
            order = matrix.layout.indices(matrix.shape, i).ravel()
            place = np.argsort(order, kind="stable")[: matrix.shape[i]]
            x = jnp.take(x, place, axis=i)
        mine = jnp.asarray(d.layout.indices(d.shape, dimension))[
            lax.axis_index((spec.group.row_axes, spec.group.col_axes)[dimension])
        ]
        parts.append(jnp.take(x, mine, axis=own, mode="fill", fill_value=0))  # padding is zeros
    return parts[0], parts[1]


def without_padding(spec: MatmulSpec, d: jax.Array) -> jax.Array:
    """Sets the padding of block-cyclic d (or c) to zero, because a part may be smaller than the largest one. Returns d
    itself if no part has padding."""
    assert spec.distributions is not None
    shape, layout = spec.distributions[2].shape, spec.distributions[2].layout
    if not any(n % (nb * p) for n, nb, p in zip(shape, layout.block, layout.grid, strict=True)):
        return d  # every process holds as much as the largest part
    for dimension, axes in enumerate((spec.group.row_axes, spec.group.col_axes)):
        held = jnp.asarray(layout.indices(shape, dimension) < shape[dimension])[lax.axis_index(axes)]
        d = jnp.where(lax.broadcast_in_dim(held, d.shape, (dimension,)), d, jnp.zeros_like(d))
    return d


def _gather_stored(spec: MatmulSpec, x: jax.Array, kept: int | None, all_gather: Gather) -> jax.Array:
    """Gathers every dimension but `kept` of an operand of a grid."""
    for dimension, axes in enumerate((spec.group.row_axes, spec.group.col_axes)):
        if dimension != kept:
            x = all_gather(x, axes, dimension)
    return x
