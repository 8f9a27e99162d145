"""Plans products of groups of rows on a mesh: x (m, k), w (g, k, n) -> (m, n), with the groups along m.

The ranks of each mesh axis split one index. An operand with this index is used as it is, or sliced, and any other
operand is gathered. A split of k leaves partial sums. A split of g leaves rows that are zeros on all ranks but one.
Both are summed, or reduce-scattered if the result is sharded over the axis. Rows are split by shifting the bounds of
the groups, and groups are split by slicing the bounds.

If axes shard both rows of x and groups of w, CPU devices of one process read the rows in place: nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.contraction.contraction import Contraction, Dim, Dims, Layout
from jaxmp._src.core.lowering import decide
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.primitive.grouped import GroupedSpec, grouped, type_of
from jaxmp._src.core.sharding.on_shards import Frame, frame, on_shards
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.core.spec.refusal import InvalidValue
from jaxmp._src.platform.runtime.types import Operands, Shape

_CALLER = "ragged_dot"
SCOPE = "jaxmp_ragged_sum"  # in name stacks, where `explain` reads it
# By name: the indices of an array, and its sharding; None if the array enters as the call splits it.
Arrays = Mapping[str, tuple[str, Dims | None]]
PRODUCT = Contraction("mk", "gkn", "mn", Layout(((), ()), ((), (), ()), ((), ())))


@dataclasses.dataclass(frozen=True)
class RaggedCall:
    """A hashable call: its spec and, for global arrays on a mesh, its frame.

    `rows`, `groups`, `contracted`: the axes that split each of them; `spec.experts` split rows and groups. `sums`: the
    axes that all-reduce the result. `scatters`: for each dimension of the result, the axes that reduce-scatter it.
    """

    spec: GroupedSpec
    frame: Frame | None = None
    rows: Dim = ()
    groups: Dim = ()
    contracted: Dim = ()
    sums: Dim = ()
    scatters: Dims = ((), ())

    def __call__(self, operands: Operands) -> jax.Array:
        """Returns the result of the global operands x ("a"), w ("b"), "sizes" and, if w does not begin with the first
        group, "offset"; without a frame, of shards. "bias" (groups, n) is added to the rows of each group."""
        if self.frame is None:
            return self._on_shards(operands)["d"]
        result: jax.Array = on_shards(self.frame, self._on_shards, operands, _CALLER)["d"]
        return result

    def _on_shards(self, operands: Operands) -> dict[str, jax.Array]:
        """Returns {"d": a device's shard of the result} from shards as the call splits them: product, bias, and sums
        over ranks. Gathers no operand."""
        x, w = operands["a"], operands["b"]
        m, g = (
            size * math.prod(map(lax.axis_size, axes))
            for size, axes in ((x.shape[0], self.rows), (w.shape[0], self.groups))
        )
        bounds = self._of_shard(bounds_of(operands["sizes"], operands.get("offset"), m, g)[None], x.shape[0])[0]
        spec = self._of_terms(x, w)
        d = grouped(spec, x[None], w[None], bounds[None])[0]
        if "bias" in operands:  # as a product with k = 1, in one term only
            bias, whole = operands["bias"][None, :, None], (*spec.whole[:2], 1, *spec.whole[3:]) if spec.whole else ()
            ones = jnp.ones((1, x.shape[0], 1), bias.dtype)
            ones = jnp.where(lax.axis_index(self.contracted) == 0, ones, 0) if self.contracted else ones
            d = d + grouped(dataclasses.replace(spec, whole=whole), ones, bias, bounds[None])[0]
        return {"d": self.summed(d)}

    def of_bounds(self, x: jax.Array, w: jax.Array, bounds: jax.Array) -> jax.Array:
        """Returns the result on a device's shards of the operands of `grouped`, from the bounds of all rows."""
        return self.summed(grouped(self._of_terms(x, w), x, w, self._of_shard(bounds, x.shape[1])))

    def _of_shard(self, bounds: jax.Array, m: int) -> jax.Array:
        """Converts bounds of all groups and rows to a shard's: m rows, and its groups (all for `spec.experts`)."""
        if self.groups and not self.spec.experts:
            g = (bounds.shape[1] - 1) // lax.axis_size(self.groups)
            bounds = lax.dynamic_slice_in_dim(bounds, lax.axis_index(self.groups) * g, g + 1, 1)
        return bounds - lax.axis_index(self.rows) * m if self.rows else bounds

    def _of_terms(self, x: jax.Array, w: jax.Array) -> GroupedSpec:
        """Returns the spec of a rank's product: if ranks split k, it has the accumulator's type until it is summed."""
        if not self.contracted:
            return self.spec
        return dataclasses.replace(self.spec, out_dtype=accumulator(type_of(x, w)))

    def summed(self, d: jax.Array) -> jax.Array:
        """Sums the ranks' terms `d` over `sums` and `scatters`, and rounds the result to `spec.out_dtype`."""
        with jax.named_scope(SCOPE):
            d = collectives.psum(d, self.sums, source_line=_CALLER) if self.sums else d
            for axis, axes in enumerate(self.scatters):
                d = collectives.reduce_scatter(d, axes, axis=axis, source_line=_CALLER) if axes else d
        return d.astype(self.spec.out_dtype)


def bounds_of(sizes: jax.Array, offset: jax.Array | None, m: int, groups: int) -> jax.Array:
    """Returns the first row of each group and the end of the last: of the `groups` groups from number `offset` on, or
    of all in `sizes` if `offset` is None. Groups that do not exist are empty. Sizes and their sums are clamped to
    0 ... m, and `offset` to 0 ... the number of groups."""
    # Clamped sums, because larger ones might overflow.
    ends: jax.Array = lax.associative_scan(lambda a, b: jnp.minimum(a + b, m), _within(sizes, m))
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    if offset is None:
        return bounds
    last = sizes.shape[0]
    return bounds[jnp.minimum(_within(offset, last) + jnp.arange(groups + 1, dtype=jnp.int32), last)]


def _within(x: jax.Array, most: int) -> jax.Array:
    """Returns integers of any type as int32, clamped to 0 ... `most`, which may be too large for a narrow type."""
    x = x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)
    return jnp.clip(x, 0, most).astype(jnp.int32)


# The plan ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def planned(spec: GroupedSpec, where: tuple[Any, bool], given: Contraction, shapes: tuple[Shape, Shape]) -> RaggedCall:
    """Plans the call of global arrays sharded as in `given`. `where`: the mesh, and whether its axes are explicit.
    `shapes`: of x and w. Raises as `_split_call` does."""
    (mesh, _), (m, k), (g, _, n), (x, w, d) = where, *shapes, given.layout
    keeps_k = spec.level.fixed_order and not {*x[1], *w[1]} <= {*given.unreduced}
    choose = functools.partial(_split, is_w_larger=g * k * n > m * (k + n), keeps_k=keeps_k)
    arrays: Arrays = {"a": ("mk", x), "b": ("gkn", w), "bias": ("gn", None), "d": ("mn", d)}
    spec = dataclasses.replace(spec, whole=(g, m, k, n), experts=shared_axes(spec, mesh, x[0], w[0]))
    return split_call(spec, where, choose, {"m": m, "k": k, "g": g, "n": n}, arrays, given.unreduced)


def split_call(
    spec: GroupedSpec,
    where: tuple[Any, bool],
    choose: Callable[..., str],
    extents: Mapping[str, int],
    arrays: Arrays,
    unreduced: Dim,
) -> RaggedCall:
    """Returns a call: the ranks of each axis split the index that `choose` returns, if the axis divides the index. The
    ranks of `spec.experts` split rows and groups. The sum over `unreduced` is deferred. Raises as `_split_call` does.

    `choose` has a parameter for each array with a sharding: the index along which an axis shards the array, or "".
    `arrays` has the operands by name, and the result last: the indices and the sharding of each array, or None for an
    array that enters as it is split.
    """
    sharded = [(indices, dims) for indices, dims in arrays.values() if dims is not None]
    call, axes, out = _split_call(spec, where[0].shape, choose, extents, sharded, unreduced)
    operands = tuple((name, have, tuple(axes[i] for i in indices)) for name, (indices, have) in [*arrays.items()][:-1])
    made = frame(where, operands, (tuple(axes.values()),), (("d", out),), sharded[-1][1], unreduced)
    return dataclasses.replace(call, frame=made)


def _split_call(
    spec: GroupedSpec,
    mesh: Mapping[str, int],
    choose: Callable[..., str],
    extents: Mapping[str, int],
    sharded: Sequence[tuple[str, Dims]],
    unreduced: Dim = (),
) -> tuple[RaggedCall, dict[str, Dim], Dims]:
    """Returns (the call of `split_call` without a frame, the axes that split each index, slowest first, the sharding of
    the result in the call). `sharded`: the indices and the sharding of each array, the result last. Raises as
    `check_order` does, except for `spec.experts` and axes of deferred sums. Raises ValueError if the call has no sum
    over an `unreduced` axis."""
    experts, (result, wanted) = spec.experts, sharded[-1]
    roles = [{axis: index for index, dim in zip(*each, strict=True) for axis in dim} for each in sharded]
    splits = {axis: choose(*(role.get(axis, "") for role in roles)) for axis in set().union(*roles)}
    axes: dict[str, Dim] = {}
    for index, extent in extents.items():
        axes[index] = ()
        for axis in dict.fromkeys(axis for role in roles for axis, i in role.items() if i == index):
            splits_it = index in "mg" if axis in experts else splits[axis] == index
            if splits_it and extent % moves.size_of(mesh, (*axes[index], axis)) == 0:
                axes[index] += (axis,)
    # A split of an index that the result does not have leaves terms: partial sums or, for g, zeros.
    terms = {i: tuple(axis for axis in dim if axis not in experts) for i, dim in axes.items() if i not in result}
    zeros = terms.pop("g", ())
    contracted: Dim = sum(terms.values(), ())
    partial = contracted + zeros
    alone = (*experts, *(axis for axis in contracted if axis in unreduced))
    split = dict.fromkeys(sum(axes.values(), ()))
    check_order(spec, tuple(axis for axis in split if axis not in alone and mesh[axis] > 1))
    if rest := tuple(axis for axis in unreduced if axis not in partial):
        raise InvalidValue(
            f"{{out_sharding}} is unreduced over {rest}, but the call has no sum over them; shard the contraction or "
            "the groups over them, or leave them out"
        )
    scatters = []
    for index, dim in zip(result, wanted, strict=True):
        mine = tuple(axis for axis in dim if axis in partial)
        scatters.append(() if extents[index] % moves.size_of(mesh, axes[index] + mine) else mine)
    out = tuple(axes[index] + mine for index, mine in zip(result, scatters, strict=True))
    sums = tuple(axis for axis in partial if axis not in (*sum(scatters, ()), *unreduced))
    of_indices = tuple((index, axes[index]) for index in "mkgn" if index in axes)
    spec = dataclasses.replace(spec, mesh=tuple(mesh.items()), splits=of_indices)
    return RaggedCall(spec, None, axes["m"], axes["g"], contracted, sums, tuple(scatters)), axes, out


def check_order(spec: GroupedSpec, axes: Dim) -> None:
    """Raises NotImplementedError at "topology" if `axes` is not empty: XLA would order sums over them."""
    if axes and spec.level.global_order:
        raise spec.level.mesh_refusal(
            f"is not available: XLA sums over {axes}, in an order of its own",
            "shard rows of x and matrices of w over these axes alone",
        )


def shared_axes(spec: GroupedSpec, mesh: Any, rows: Dim, groups: Dim) -> Dim:
    """Returns the axes along which ranks multiply together or exchange rows through shared memory: all axes that shard
    groups, if they shard rows in the same order, else ()."""
    are_ordered = groups == tuple(axis for axis in rows if axis in groups)
    return groups if groups and are_ordered and decide.shares_rows(spec, mesh, groups) else ()


def _split(x: str, w: str, d: str, is_w_larger: bool, *, keeps_k: bool) -> str:
    """Returns the index that the ranks of an axis split. `x`, `w`, `d`: the index along which it shards each, or ""."""
    if x == "m":
        if w == "n" and d:
            return d
        return w if w in ("n", "g") and is_w_larger else "m"
    if w in ("n", "g"):
        return w
    if "k" in (x, w) and not keeps_k:
        return "k"
    return d


# Under XLA's partitioner ----------------------------------------------------------------------------------------


def indices_of(spec: GroupedSpec, shapes: Sequence[Shape]) -> tuple[str, str, str, str]:
    """Returns the indices of grouped's operands and result, which have these shapes. "u" is a batch of one,
    "b" another batch. "e" is the index of the bounds, which no axis splits."""
    x, w, d = spec.indices
    x, w, e, d = (("u" if shape[0] == 1 else "b") + rest for shape, rest in zip(shapes, (x, w, "e", d), strict=True))
    return x, w, e, d


def placed(
    spec: GroupedSpec, mesh: Any, shapes: Sequence[Shape], dims: Sequence[Dims]
) -> tuple[RaggedCall, tuple[Dims, ...]]:
    """Plans the call of `grouped` with the shardings `dims` that XLA proposes for (x, w, bounds, result). Returns (the
    call without a frame, the shardings of these arrays in it). Raises as `_split_call` does."""
    indices = indices_of(spec, shapes)
    extents = {i: n for text, shape in zip(indices, shapes, strict=True) for i, n in zip(text, shape, strict=True)}
    extents = {"u": 1, "g": extents.pop("e") - 1} | extents
    arrays = [(text, dim) for text, dim in zip(indices, dims, strict=True) if "e" not in text]
    m, k, g, n = (extents[index] for index in "mkgn")

    def choose(x: str, w: str, d: str) -> str:
        if "b" in (x, w, d):
            return "b"
        if spec.is_contraction:
            return "m" if "m" in (x, w) else d if d and d in (x, w) else x or w or d
        return _split(x, w, d, g * k * n > m * (k + n), keeps_k=spec.level.fixed_order)

    of_rows = [dim[text.index("m")] for text, dim in arrays if "m" in text][: 1 + spec.is_contraction]
    of_groups = next(dim[text.index("g")] for text, dim in arrays if "g" in text)
    experts = shared_axes(spec, mesh, of_rows[0], of_groups) if of_rows[0] == of_rows[-1] else ()
    spec = dataclasses.replace(spec, whole=(g, m, k, n), experts=experts)
    call, axes, out = _split_call(spec, mesh.shape, choose, extents, arrays)
    axes |= {"e": ()}
    return call, (*(tuple(axes[index] for index in text) for text in indices[:-1]), out)
