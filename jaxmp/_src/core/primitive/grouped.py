"""Products of groups of rows: `grouped_p(x, w, bounds)` and its rules.

Group i has the rows [bounds[i], bounds[i + 1]) of x, clipped to the rows of x; bounds do not decrease.

    rows         x (m, k), w (g, k, n) -> (m, n): each row times the matrix of its group. Rows outside of all groups
                 are zero. A row depends only on its group.
    contraction  x (m, k), w (m, n) -> (g, k, n): x^T w of the rows of each group; zeros for an empty group.

Each mode gives the cotangents of the other (dd: cotangent of a result d of rows; c: cotangent of a contraction):

    rows         dx = rows(dd, w^T), dw = contraction(x, dd)
    contraction  dx = rows(w, c^T),  dw = rows(x, c)

All operands have a batch dimension in front, of extent 1 if the operand serves every index; `vmap` makes it larger.
Bounds are shifted where rows are split over devices, and sliced where groups are.

Ranks of the axes `experts` multiply together. Each rank has rows of all groups, given by its bounds, and the matrices
of its own groups: the first rank has the first groups. A contraction sums rows of all ranks, in the order of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxmp._src.core.primitive.collectives import Axes, cast_varying
from jaxmp._src.core.spec import levels, low_precision
from jaxmp._src.core.spec.levels import Determinism
from jaxmp._src.core.spec.matmul_spec import RESULT_TYPES, MatmulSpec, accumulator
from jaxmp._src.core.spec.options import GroupedImplementation, Parts
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Tangent

grouped_p = jax_compat.make_primitive("jaxmp_grouped", multiple_results=False)
# The same for global arrays, split by XLA's partitioner.
partitioned_grouped_p = jax_compat.make_primitive("jaxmp_partitioned_grouped", multiple_results=False)
GROUPED = (grouped_p, partitioned_grouped_p)


@dataclasses.dataclass(frozen=True, repr=False)
class GroupedSpec(Parts):
    """Describes a product of groups of rows.

    `is_transposed`: each matrix of w is stored (n, k). `whole`: (groups, m, k, n) of the global arrays, if the operands
    are shards. `experts`: the axes above. `mesh`: every mesh axis as (name, size). `splits`: for m, k, g and n the axes
    that split each, if jaxmp split them. `is_global`: the operands are global, and XLA's partitioner shards them.
    """

    out_dtype: np.dtype
    is_contraction: bool = False
    is_transposed: bool = False
    determinism: Determinism = "run_to_run"
    implementation: GroupedImplementation | None = None
    whole: tuple[int, ...] = ()
    experts: tuple[str, ...] = ()
    mesh: Axes = ()
    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_global: bool = False
    function: str = "ragged_dot"

    @property
    def level(self) -> levels.Level:
        """The level of determinism."""
        return levels.parse(self.determinism)

    @property
    def indices(self) -> tuple[str, str, str]:
        """The indices of x, w and the result as stored."""
        return ("mk", "mn", "gkn") if self.is_contraction else ("mk", "gnk" if self.is_transposed else "gkn", "mn")

    @property
    def nranks(self) -> int:
        """The number of ranks that multiply together."""
        return math.prod(size for axis, size in self.mesh if axis in self.experts)

    def swapped(self) -> GroupedSpec:
        """Returns the spec with k and n exchanged."""
        splits = tuple(({"k": "n", "n": "k"}.get(index, index), axes) for index, axes in self.splits)
        return dataclasses.replace(self, whole=(*self.whole[:2], *self.whole[:1:-1]), splits=splits)

    def rows(self, out_dtype: np.dtype, *, is_transposed: bool) -> GroupedSpec:
        """Returns the spec of a product of rows under the same options."""
        return dataclasses.replace(self, out_dtype=out_dtype, is_contraction=False, is_transposed=is_transposed)

    def contraction(self, out_dtype: np.dtype) -> GroupedSpec:
        """Returns the spec of a contraction under the same options."""
        return dataclasses.replace(self, out_dtype=out_dtype, is_contraction=True, is_transposed=False)


def grouped(spec: GroupedSpec, x: jax.Array, w: jax.Array, bounds: jax.Array) -> jax.Array:
    """Binds `grouped_p`, or `partitioned_grouped_p` if `spec.is_global`. Converts x and w to their common type first,
    but a product of rows takes a w of 8 bits or fewer next to a wide x as it is. Both have a batch dimension first."""
    dtype, is_decoded = type_of(x, w), not spec.is_contraction and low_precision.is_mixed(x.dtype, w.dtype)
    x = x if x.dtype == dtype else x.astype(dtype)
    w = w if w.dtype == dtype or is_decoded else w.astype(dtype)
    axes = frozenset().union(*map(jax_compat.varying_axes, (x, w, bounds)))
    primitive = partitioned_grouped_p if spec.is_global else grouped_p
    return primitive.bind(*(cast_varying(y, axes) for y in (x, w, bounds)), spec=spec)


def type_of(x: Any, w: Any) -> np.dtype:
    """Returns the common type of x and w in their product. A cotangent may have the type of sums, such as float32 with
    16-bit operands, also if the user's promotion rules are strict."""
    if low_precision.is_mixed(x.dtype, w.dtype):
        return low_precision.operand_type(x.dtype, w.dtype)
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(x.dtype, w.dtype))


def batch_product(a: jax.Array, b: jax.Array, spec: MatmulSpec) -> jax.Array:
    """Returns the 2-D op(a) @ op(b) of narrow types, without alpha, C and epilog; `vmap` makes it one call for a whole
    batch. The result has the accumulator's type, or a 16-bit `out_dtype` if nothing (alpha, C, an epilog, a sum over
    ranks) follows."""
    if spec.transpose_a and spec.transpose_b:
        return batch_product(b, a, spec.replace(transpose_a=False, transpose_b=False)).T
    if low_precision.is_scaled(a.dtype):
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # exact
    is_whole = spec.is_bilinear and spec.alpha == 1 and not spec.contraction.sums and spec.out_dtype.itemsize == 2
    out = spec.out_dtype if is_whole else accumulator(a.dtype)
    bounds = jnp.array([[0, a.shape[0]]], np.int32)
    if spec.transpose_a:
        return grouped(GroupedSpec(out, is_contraction=True, function=spec.function), a[None], b[None], bounds)[0, 0]
    of_rows = GroupedSpec(out, is_transposed=spec.transpose_b, function=spec.function)
    return grouped(of_rows, a[None], b[None, None], bounds)[0]


def batch_of(operands: Sequence[Any]) -> Any:
    """Returns the extent of the batch: an extent that is not 1, because 1 serves every index; 1 if all are."""
    return next((y.shape[0] for y in operands if y.shape[0] != 1), 1)


def abstract_eval(
    x: jax.core.ShapedArray, w: jax.core.ShapedArray, bounds: jax.core.ShapedArray, *, spec: GroupedSpec
) -> jax.core.ShapedArray:
    batch, n = batch_of((x, w, bounds)), w.shape[2] if spec.is_transposed else w.shape[-1]
    varying = jax_compat.varying_axes(x)
    if not spec.is_contraction:
        return jax_compat.with_shape(x, (batch, x.shape[1], n), spec.out_dtype, varying, w)
    shape = (batch, (bounds.shape[1] - 1) // spec.nranks, x.shape[2], n)
    return jax_compat.with_shape(jax_compat.with_first_dimension(x, 1), shape, spec.out_dtype, varying, w)


def jvp_rule(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: GroupedSpec
) -> tuple[jax.Array, Tangent]:
    """Differentiates in x and w, dd = dx w + x dw; bounds are integers."""
    x, w, bounds = primals
    tx, tw, _ = tangents
    d = grouped(spec, x, w, bounds)
    terms = [grouped(spec, tx, w, bounds)] if not isinstance(tx, ad.Zero) else []
    terms += [grouped(spec, x, tw, bounds)] if not isinstance(tw, ad.Zero) else []
    return d, sum(terms[1:], terms[0]) if terms else ad.Zero(jax.typeof(d).to_tangent_aval())


def transpose_rule(ct: Tangent, x: Any, w: Any, bounds: jax.Array, *, spec: GroupedSpec) -> list[Tangent | None]:
    """Returns the cotangents of x, w and bounds: None for an operand that is not linear, and `ad.Zero` if `ct` is zero.
    If the operand serves the whole batch, its cotangent is summed over the batch; raises NotImplementedError for this
    sum at "topology"."""
    of_x = ad.is_undefined_primal(x)
    aval: Any = (x if of_x else w).aval
    if isinstance(ct, ad.Zero):
        found: Tangent = ad.Zero(aval)
    elif of_x and spec.is_contraction:
        found = grouped(spec.swapped().rows(aval.dtype, is_transposed=True), w, ct, bounds)
    elif of_x:
        found = grouped(spec.swapped().rows(aval.dtype, is_transposed=not spec.is_transposed), ct, w, bounds)
    elif spec.is_contraction:
        found = grouped(spec.rows(aval.dtype, is_transposed=False), x, ct, bounds)
    else:
        left, right, spec = (ct, x, spec.swapped()) if spec.is_transposed else (x, ct, spec)
        out = aval.dtype if aval.dtype.name in RESULT_TYPES else accumulator(left.dtype)
        found = grouped(spec.contraction(out), left, right, bounds).astype(aval.dtype)
    if not isinstance(found, ad.Zero) and found.shape != aval.shape:  # the operand served the whole batch
        if spec.level.global_order:
            raise spec.level.mesh_refusal("is not available: XLA sums over a batch", "map by jax.lax.map")
        found = found.sum(0, keepdims=True)
    return [found, None, None] if of_x else [None, found, None]


def batch_rule(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, spec: GroupedSpec
) -> tuple[jax.Array, int]:
    """Folds the new batch and the batch of the operands into one."""
    pairs = [y[None] if dim is None else jnp.moveaxis(y, dim, 0) for y, dim in zip(operands, dims, strict=True)]
    outer, inner = (next((y.shape[i] for y in pairs if y.shape[i] != 1), 1) for i in (0, 1))
    folded = []
    for y in pairs:
        lead = (1, 1) if y.shape[:2] == (1, 1) else (outer, inner)
        folded.append(jnp.broadcast_to(y, (*lead, *y.shape[2:])).reshape(lead[0] * lead[1], *y.shape[2:]))
    d = grouped(spec, *folded)
    return d.reshape(outer, inner, *d.shape[1:]), 0
