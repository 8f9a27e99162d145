"""Products of groups of rows on a mesh: x (m, k), w (g, k, n) -> (m, n), where the groups lie along m.

The ranks of each mesh axis split one index. An operand that has it is used as it lies, or sliced, and any other one is
gathered. A split of k leaves partial sums, and one of g rows that one rank alone does not have as zeros: both are
summed, or reduce-scattered where the result is sharded so. Rows are split by shifting the bounds of the groups, and
groups by slicing them.

Where axes shard rows of x and groups of w, the CPU devices of one process read the rows where they lie: nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.contraction import moves
from jaxmp._src.contraction.contraction import Contraction, Dim, Dims, Layout
from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.lowering import process_barrier
from jaxmp._src.primitive import collectives
from jaxmp._src.primitive.grouped import GroupedSpec, grouped
from jaxmp._src.runtime.types import Operands, Shape
from jaxmp._src.sharding import meshes
from jaxmp._src.sharding.on_shards import Entry, Frame, on_shards
from jaxmp._src.spec.matmul_spec import accumulator

_CALLER = "ragged_dot"
SCOPE = "jaxmp_ragged_sum"  # in name stacks, where `explain` reads it
# By name: the indices of an array, and how it lies.
Arrays = Mapping[str, tuple[str, Dims | None]]
PRODUCT = Contraction("mk", "gkn", "mn", Layout(((), ()), ((), (), ()), ((), ())))


@dataclasses.dataclass(frozen=True)
class RaggedCall:
    """A call, hashable: its spec and, of global arrays on a mesh, its frame.

    `rows`, `groups`: the axes that split them, and `spec.experts` those that split both; `sums`: those over which
    results are summed whole; `scatters`: for each dimension of the result those over which they are reduce-scattered.
    """

    spec: GroupedSpec
    frame: Frame | None = None
    rows: Dim = ()
    groups: Dim = ()
    contracted: Dim = ()
    sums: Dim = ()
    scatters: Dims = ((), ())

    def __call__(self, operands: Operands) -> jax.Array:
        """The result of x and w as "a" and "b", "sizes" and, if groups do not begin with the first one, "offset"; with
        "bias" (groups, n) added to the rows of each group."""
        if self.frame is None:
            return self._on_shards(operands)["d"]
        result: jax.Array = on_shards(self.frame, self._on_shards, operands, _CALLER)["d"]
        return result

    def _on_shards(self, operands: Operands) -> dict[str, jax.Array]:
        x, w = operands["a"], operands["b"]
        m, g = (
            size * math.prod(map(lax.axis_size, axes))
            for size, axes in ((x.shape[0], self.rows), (w.shape[0], self.groups))
        )
        bounds = bounds_of(operands["sizes"], operands.get("offset"), m, g)
        if self.groups and not self.spec.experts:
            bounds = lax.dynamic_slice_in_dim(bounds, lax.axis_index(self.groups) * w.shape[0], w.shape[0] + 1)
        if self.rows:
            bounds = bounds - lax.axis_index(self.rows) * x.shape[0]
        spec = self.spec
        if self.contracted:  # partial sums are rounded when they are complete
            spec = dataclasses.replace(spec, out_dtype=accumulator(jnp.promote_types(x.dtype, w.dtype)))
        d = grouped(spec, x[None], w[None], bounds[None])[0]
        if "bias" in operands:  # a product of k = 1, in one of the terms
            bias, whole = operands["bias"][None, :, None], (*spec.whole[:2], 1, *spec.whole[3:]) if spec.whole else ()
            ones = jnp.ones((1, x.shape[0], 1), bias.dtype)
            ones = jnp.where(lax.axis_index(self.contracted) == 0, ones, 0) if self.contracted else ones
            d = d + grouped(dataclasses.replace(spec, whole=whole), ones, bias, bounds[None])[0]
        return {"d": self.summed(d)}

    def summed(self, d: jax.Array) -> jax.Array:
        """The result, of which the ranks have terms."""
        with jax.named_scope(SCOPE):
            d = collectives.psum(d, self.sums, source_line=_CALLER) if self.sums else d
            for axis, axes in enumerate(self.scatters):
                d = collectives.reduce_scatter(d, axes, axis=axis, source_line=_CALLER) if axes else d
        return d.astype(self.spec.out_dtype)


def bounds_of(sizes: jax.Array, offset: jax.Array | None, m: int, groups: int) -> jax.Array:
    """The first row of each group, and the end of the last one, for groups from `offset` on; sizes are clamped."""

    def add(a: jax.Array, b: jax.Array) -> jax.Array:  # sums of sizes that are too large would overflow
        return jnp.minimum(a + b, m)

    ends = lax.associative_scan(add, _within(sizes, m))
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    if offset is None:
        return bounds
    last = sizes.shape[0]
    return bounds[jnp.minimum(_within(offset, last) + jnp.arange(groups + 1, dtype=jnp.int32), last)]


def _within(x: jax.Array, most: int) -> jax.Array:
    """Integers of any type as int32 from 0 to `most`, which a narrow type may not have."""
    x = x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)
    return jnp.clip(x, 0, most).astype(jnp.int32)


# The plan ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def planned(spec: GroupedSpec, where: tuple[Any, bool], given: Contraction, shapes: tuple[Shape, Shape]) -> RaggedCall:
    """The call of global arrays that lie as `given`, on a mesh, whose axes are explicit or not."""
    (mesh, _), (m, k), (g, _, n) = where, *shapes
    is_w_larger = g * k * n > m * (k + n)
    experts = shared_axes(spec, mesh, given.layout)
    splits = {}
    for axis, role in given.roles.items():
        splits[axis] = _split(role.a, role.b, role.d, is_w_larger, keeps_k=spec.level.fixed_order)
    x, w, d = given.layout
    arrays: Arrays = {"a": ("mk", x), "b": ("gkn", w), "bias": ("gn", None)}
    spec = dataclasses.replace(spec, whole=(g, m, k, n))
    return split_call(spec, where, splits, {"m": m, "k": k, "g": g, "n": n}, arrays, d, "k", experts)


def split_call(
    spec: GroupedSpec,
    where: tuple[Any, bool],
    splits: Mapping[str, str],
    extents: Mapping[str, int],
    arrays: Arrays,
    d: Dims,
    contracted: str,
    experts: Dim,
) -> RaggedCall:
    """The call in which the ranks of each axis split this index, if their number divides its extent, and those of
    `experts` rows and groups.

    `contracted`: the index of the sums; `arrays`: indices of the operands by name, and how they lie, or None where they
    enter as they are split; `d`: how the result is to lie.
    """
    mesh, is_explicit = where
    lie = [*((indices, dims) for indices, dims in arrays.values() if dims is not None), ("mn", d)]
    axes: dict[str, Dim] = {}
    for index, extent in extents.items():
        found: Dim = ()
        dims_of = [dims[indices.index(index)] for indices, dims in lie if index in indices]
        for axis in dict.fromkeys(sum(dims_of, ())):
            splits_it = index in "mg" if axis in experts else splits.get(axis) == index
            if splits_it and extent % moves.size_of(mesh.shape, (*found, axis)) == 0:
                found = (*found, axis)
        axes[index] = found
    split = dict.fromkeys(sum(axes.values(), ()))
    check_order(spec, tuple(axis for axis in split if axis not in experts and mesh.shape[axis] > 1))
    rows, columns, partial = axes["m"], axes["n"], axes[contracted] + (() if experts else axes["g"])
    scatters = tuple(
        ()
        if extents[index] % moves.size_of(mesh.shape, axes[index] + (mine := tuple(a for a in dim if a in partial)))
        else mine
        for index, dim in zip("mn", d, strict=True)
    )
    entries = []
    for name, (indices, have) in arrays.items():
        want = tuple(axes[index] for index in indices)
        dims, gathers = (want, ()) if have is None else moves.entry(have, want, (tuple(axes.values()),))
        before = None if is_explicit or have is None else meshes.partition_spec(have)
        entries.append((name, Entry(meshes.partition_spec(dims), gathers, before)))
    out = (rows + scatters[0], columns + scatters[1])
    asked = None if out == d else meshes.partition_spec(d)
    frame = Frame(mesh, is_explicit, tuple(entries), (("d", meshes.partition_spec(out)),), asked)
    sums = tuple(axis for axis in partial if axis not in sum(scatters, ()))
    if experts:
        spec = dataclasses.replace(spec, experts=experts, mesh=tuple(mesh.shape.items()))
    return RaggedCall(spec, frame, rows, axes["g"], axes[contracted], sums, scatters)


def check_order(spec: GroupedSpec, axes: Dim) -> None:
    """Raise where sums over these axes, in gradients too, would be in XLA's order and may not."""
    if axes and spec.level.global_order:
        raise spec.level.mesh_refusal(
            f"is not available: XLA sums over {axes}, in an order of its own",
            "shard rows of x and matrices of w over these axes alone",
        )


def shared_axes(spec: GroupedSpec, mesh: Any, given: Layout) -> Dim:
    """The axes along which ranks multiply together: all that shard groups, which shard rows of x in the same order."""
    (rows, _), (groups, *_), _ = given
    if groups != tuple(axis for axis in rows if axis in groups):
        return ()
    known = mesh if isinstance(mesh, jax.sharding.Mesh) else jax_compat.ambient_mesh()
    is_host = jax_compat.default_platform() == "cpu" and spec.implementation != "xla"
    return groups if is_host and not process_barrier.why_apart(tuple(mesh.shape.items()), groups, lambda: known) else ()


def _split(x: str, w: str, d: str, is_w_larger: bool, *, keeps_k: bool) -> str:
    """The index that the ranks of an axis split, which shards x, w and the result along these, each or "".

    `keeps_k`: no sum is split.
    """
    if x == "m":
        if w == "n" and d:
            return d
        return w if w in ("n", "g") and is_w_larger else "m"
    if w in ("n", "g"):
        return w
    if "k" in (x, w) and not keeps_k:
        return "k"
    return d
