"""Collectives around jaxmp's calls, with barriers in jobs of several processes.

XLA cannot interrupt a collective between processes, and its transport ends the process if the ranks' messages differ
in size. So all processes of the group have to arrive with equal operands before one of them enters. The forward call of
a product has a barrier that compares the whole call (`process_barrier.Site`).

In a job of several processes, a collective inside shard_map is `collective_p`. If the processes share memory, gathers,
sums and maxima communicate through it. Otherwise `collective_p` is XLA's collective after a barrier. Its transpose is
a `collective_p` too.

XLA reshards, after a "wait": an identity, lowered to a barrier if the group spans several processes. Transposition
reverses the order of operations. So a reshard stands between two identities, and the second one, "pass", waits only in
the transposed program:

    x -> wait -> reshard -> pass         transposed: ct -> wait -> reshard -> pass

In a single process nothing is added to the program, except for types that XLA:CPU would widen for the transfer. They
use `collective_p` and `reshard_p` there too, because their lowering moves integers of the same width.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.contraction.moves import WIDE, Narrow
from jaxmp._src.core.spec import wire
from jaxmp._src.core.spec.options import Mesh
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.jax_internals.jax_compat import batching
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import Operand, Operands, Tangent

F = TypeVar("F", bound=Callable[..., jax.Array])
Axes = tuple[tuple[str, int], ...]  # of a mesh, as (name, size)

# (x) -> x after the lax collective `kind` over `axis_name`: "all_gather", "all_gather_invariant" or "reduce_scatter"
# along the one dimension in `dimensions`, "all_to_all" from the first dimension to the second, "psum" or "pmax". Three
# kinds move nothing: "vary", the transpose of a psum, makes the type of x vary over the axes; "wait" is the barrier
# before a reshard, and "pass" its transpose. `mesh`: all mesh axes as (name, size). `caller`: the call that it belongs
# to, for messages, as "matmul at train.py:41". `narrow`: the types of a `narrow_gather`.
collective_p = jax_compat.make_primitive("jaxmp_collective", multiple_results=False)
_TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "vary": "psum",
    "psum": "vary",
    "wait": "pass",
    "pass": "wait",
}


def _collective_abstract_eval(
    x: jax.core.ShapedArray, *, kind: str, mesh: Axes, axis_name: Dim, dimensions: tuple[int, ...], **params: Any
) -> jax.core.ShapedArray:
    """Returns the type of the result: its shape, and the axes that it varies over."""
    shape, varying, sizes = list(x.shape), x.manual_axis_type.varying, dict(mesh)
    nranks = math.prod(sizes[axis] for axis in axis_name)
    if kind in ("reduce_scatter", "all_to_all"):
        shape[dimensions[0]] //= nranks
    if kind in ("all_gather", "all_gather_invariant", "all_to_all"):
        shape[dimensions[-1]] *= nranks
    if kind in ("all_gather_invariant", "psum", "pmax"):
        varying = varying - frozenset(axis_name)
    elif kind == "vary":
        varying = varying | frozenset(axis_name)
    result = jax_compat.with_shape(x, shape, x.dtype, varying)
    return result.update(manual_axis_type=x.manual_axis_type) if kind in ("wait", "pass") else result


def _collective_transpose(
    ct: jax.Array, x: Operand, *, kind: str, axis_name: tuple[str, ...], dimensions: tuple[int, ...], **params: Any
) -> list[Tangent]:
    """Returns the cotangent of x by the collective of `_TRANSPOSED`. A psum without check_vma has a psum instead, and a
    gather to a result that does not vary has the rank's own part of the cotangent."""
    if kind == "all_gather_invariant":
        return [own_part(ct, dimensions[0], axis_name)]
    # Without varying types, the cotangent of a psum's operand is the sum of the cotangents of all ranks.
    kind = "psum" if kind == "psum" and not jax_compat.is_vma_checked() else _TRANSPOSED[kind]
    return [collective_p.bind(ct, kind=kind, axis_name=axis_name, dimensions=dimensions[::-1], **params)]


def _collective_batch_rule(
    operands: Any, dims: Any, *, dimensions: tuple[int, ...], **params: Any
) -> tuple[jax.Array, int]:
    (x,), (batch,) = operands, dims
    moved = tuple(dimension + (batch <= dimension) for dimension in dimensions)
    return collective_p.bind(x, dimensions=moved, **params), batch


collective_p.def_abstract_eval(_collective_abstract_eval)
ad.deflinear2(collective_p, _collective_transpose)
batching.primitive_batchers[collective_p] = _collective_batch_rule

# (x) -> x: reshards a global array from `have` to `spec`.
reshard_p = jax_compat.make_primitive("jaxmp_reshard", multiple_results=False)


def _reshard_batch_rule(
    operands: Any, dims: Any, *, have: P, spec: P, is_explicit: bool, **params: Any
) -> tuple[jax.Array, int]:
    """Returns (the result, the number of its batch dimension, which is x's). This dimension is whole on explicit axes,
    and unconstrained on others."""
    (x,), (batch,) = operands, dims
    free = None if is_explicit else P.UNCONSTRAINED
    with_batch = []
    for each in (have, spec):
        dims = [*each, *[None] * (x.ndim - 1 - len(each))]
        with_batch.append(P(*dims[:batch], free, *dims[batch:]))
    have, spec = with_batch
    return reshard_p.bind(x, have=have, spec=spec, is_explicit=is_explicit, **params), batch


reshard_p.def_abstract_eval(
    lambda x, *, mesh, have, spec, is_explicit: jax_compat.with_sharding(x, mesh, spec) if is_explicit else x
)
ad.deflinear2(reshard_p, lambda ct, x, *, have, spec, **params: [reshard_p.bind(ct, have=spec, spec=have, **params)])
batching.primitive_batchers[reshard_p] = _reshard_batch_rule

# (x) -> x: whole on every device where XLA's partitioner would choose the sharding.
whole_p = jax_compat.make_primitive("jaxmp_whole", multiple_results=False)
whole_p.def_abstract_eval(lambda x: x)
ad.deflinear2(whole_p, lambda ct, x: [ct])
batching.primitive_batchers[whole_p] = lambda operands, dims: (whole_p.bind(*operands), dims[0])


def _is_ours(x: jax.Array) -> bool:
    """True if a collective of `x` has to be `collective_p`: in a job of processes, or if XLA:CPU widens its type."""
    return native.has_barrier or wire.is_widened(x.dtype)


def _collective(
    kind: str, x: jax.Array, axes: Dim, source_line: str, dimensions: tuple[int, ...] = (), narrow: Narrow = WIDE
) -> jax.Array:
    named = {"axis_name": tuple(axes), "dimensions": dimensions, "caller": source_line or "a matmul", "narrow": narrow}
    return collective_p.bind(x, kind=kind, mesh=jax_compat.mesh_axes(), **named)


def unless_empty(collective: F) -> F:
    """Wraps `collective(x, ...)` so that it returns zeros for an empty x, because XLA does not gather empty arrays."""

    @functools.wraps(collective)
    def moved(x: jax.Array, *args: Any, **params: Any) -> jax.Array:
        if x.size != 0:
            return collective(x, *args, **params)
        like: Any = jax.eval_shape(lambda x: collective(x, *args, **params), x)
        kind = like.manual_axis_type  # None without check_vma
        return cast_varying(jnp.zeros(like.shape, like.dtype), kind.varying if kind else ())

    return cast(F, moved)


@unless_empty
def all_gather(
    x: jax.Array, axes: Dim, *, axis: int, to: str = "varying", source_line: str = "", narrow: Narrow = WIDE
) -> jax.Array:
    """Returns the tiled `lax.all_gather` along `axis`, by `collective_p` if `_is_ours`. `to`: "varying" or "invarying",
    as in lax; "varying" without check_vma. `source_line`: the call to name in messages. `narrow` is only recorded."""
    to = to if jax_compat.is_vma_checked() else "varying"
    if _is_ours(x):
        kind = "all_gather" if to == "varying" else "all_gather_invariant"
        return _collective(kind, x, axes, source_line, (axis,), narrow)
    return gather(x, axes, axis, to)


def gather(x: jax.Array, axes: tuple[str, ...], axis: int, to: str = "varying") -> jax.Array:
    """Returns the tiled `lax.all_gather` along `axis` without a barrier: along dimension 0, which XLA does fastest, and
    transposed afterwards if `axis` is another one."""
    if axis == 0:
        return lax.all_gather(x, axes, axis=0, tiled=True, to=to)
    # XLA gathers along the slowest dimension; for a later one it would also transpose before the gather.
    stacked: jax.Array = lax.all_gather(x, axes, axis=0, to=to)
    shape = (*x.shape[:axis], stacked.shape[0] * x.shape[axis], *x.shape[axis + 1 :])
    return jnp.moveaxis(stacked, 0, axis).reshape(shape)


@jax.named_scope("jaxmp_narrow_gather")
def narrow_gather(axes: Dim, x: jax.Array, axis: int, source_line: str, to: str, *, narrow: Narrow) -> jax.Array:
    """Returns the tiled `lax.all_gather` of `x`, in its type. Each rank first rounds `x` to the type `narrow[0]`, by
    blocks with a scale, unless `narrow[0]` is None or there is a single rank. The gradient crosses in the type
    `narrow[1]`, unless this is None or `to` is "invarying"."""
    (dtype, of_gradient), nranks = narrow, lax.axis_size(axes)
    gathered = functools.partial(all_gather, axes=axes, to=to, source_line=source_line, narrow=narrow)

    def joined(parts: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(parts, 0, axis)
        return whole.reshape(*x.shape[:axis], nranks * x.shape[axis], *x.shape[axis + 1 :]).astype(x.dtype)

    def linear(t: jax.Array) -> jax.Array:
        if of_gradient is None or to != "varying":
            return gathered(t, axis=axis)
        copies = jnp.broadcast_to(t.astype(jnp.float32), (nranks, *t.shape)).astype(of_gradient)
        # The transpose sums the copies.
        return joined(all_to_all(copies, axes, 0, 0, source_line=source_line, narrow=narrow))

    @jax.custom_jvp
    def gather(x: jax.Array) -> jax.Array:
        if dtype is None or nranks == 1 or x.size == 0:
            return gathered(x, axis=axis)
        parts = wire.unpacked(gathered(wire.packed(x, dtype), axis=0), dtype).reshape(nranks, -1)
        return joined(parts[:, : x.size].reshape(nranks, *x.shape))

    gather.defjvp(lambda primals, tangents: (gather(*primals), linear(*tangents)))
    return gather(x)


@unless_empty
def all_to_all(
    x: jax.Array, axes: Dim, split_axis: int, concat_axis: int, *, source_line: str = "", narrow: Narrow = WIDE
) -> jax.Array:
    """Returns the tiled `lax.all_to_all`, by `collective_p` if `_is_ours`. `source_line`, `narrow`: see
    `all_gather`."""
    if _is_ours(x):
        return _collective("all_to_all", x, axes, source_line, (split_axis, concat_axis), narrow)
    return lax.all_to_all(x, axes, split_axis, concat_axis, tiled=True)


def psum(x: jax.Array, axes: tuple[str, ...], *, source_line: str = "") -> jax.Array:
    """Returns `lax.psum`; in a job of several processes by `collective_p`."""
    return _collective("psum", x, axes, source_line) if native.has_barrier else lax.psum(x, axes)


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], *, axis: int, source_line: str = "") -> jax.Array:
    """Returns a tiled `lax.psum_scatter` along `axis`, by `collective_p` if `_is_ours`. Transposes to an all-gather."""
    if _is_ours(x):
        return _collective("reduce_scatter", x, axes, source_line, (axis,))
    return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)


def pmax(x: jax.Array, axes: tuple[str, ...], *, source_line: str = "") -> jax.Array:
    """Returns `lax.pmax`; in a job of several processes by `collective_p`."""
    return _collective("pmax", x, axes, source_line) if native.has_barrier else lax.pmax(x, axes)


def cast_varying(x: jax.Array, axes: Collection[str], *, source_line: str = "") -> jax.Array:
    """Makes the type of `x` vary over `axes` too, which moves nothing. Returns `x` if it varies over all of them, and
    under check_vma=False. The transpose is a psum over the axes that are new and not reduced."""
    if reduced := tuple(sorted(jax_compat.reduced_axes(x) & frozenset(axes))):
        x = lax.pcast(x, reduced, to="varying")  # its transpose moves nothing
    missing = tuple(axis for axis in sorted(axes) if axis not in jax_compat.varying_axes(x))
    if not missing:
        return x
    # A value made during lowering has an empty mesh and is never transposed.
    if native.has_barrier and jax_compat.is_vma_checked() and not jax.typeof(x).sharding.mesh.empty:
        return _collective("vary", x, missing, source_line)
    return lax.pcast(x, missing, to="varying")


def cast_reduced(operands: Operands, axes: Collection[str] = ()) -> Operands:
    """Returns the operands by name. An operand that is reduced over an axis is made to vary over this axis, if the axis
    is in `axes` or any operand varies over it."""
    reduced = {name: jax.typeof(x).manual_axis_type.reduced for name, x in operands.items()}
    if not any(reduced.values()):
        return dict(operands)
    found = frozenset(axes).union(*map(jax_compat.varying_axes, operands.values()))
    return {name: cast_varying(x, found & reduced[name]) for name, x in operands.items()}


def reshard(x: jax.Array, mesh: Mesh, have: P, spec: P, *, is_explicit: bool) -> jax.Array:
    """Reshards a global array from `have` to `spec`, between barriers in a job of several processes. If each new shard
    is a part of the device's old one, only the transpose communicates, and only it waits. `is_explicit`: the axes of
    the mesh are explicit."""
    with jax.named_scope("jaxmp_reshard"):
        # A type without a mesh does not fix the sharding of the cotangent, which has to be the operand's.
        is_typed = is_explicit and not jax.typeof(x).sharding.mesh.empty
        x = x if is_typed else place(x, mesh, have, is_explicit=is_explicit)
        x = _global_barrier("pass" if _is_finer(have, spec) else "wait", x, mesh, have)
        if wire.is_widened(x.dtype) and not (have.reduced or have.unreduced):
            x = reshard_p.bind(x, mesh=mesh, have=have, spec=spec, is_explicit=is_explicit)
        else:
            x = place(x, mesh, spec, is_explicit=is_explicit)
        return _global_barrier("pass", x, mesh, spec)


def place(x: jax.Array, mesh: Mesh, spec: P, *, is_explicit: bool) -> jax.Array:
    """Has XLA shard a global array as `spec`, by `reshard` on explicit axes and by a constraint on others."""
    move: Callable[..., Any] = jax.sharding.reshard if is_explicit else lax.with_sharding_constraint
    return move(x, NamedSharding(mesh, spec))


def _is_finer(have: P, spec: P) -> bool:
    """True if every shard of `spec` is a part of the same device's shard of `have`."""
    entries = [[(x,) if isinstance(x, str) else tuple(x or ()) for x in each.partitions] for each in (have, spec)]
    return all(want[: len(dim)] == dim for dim, want in itertools.zip_longest(*entries, fillvalue=()))


def own_part(x: jax.Array, dimension: int, axes: tuple[str, ...]) -> jax.Array:
    """Slices this rank's part along `dimension` out of an array that every rank holds whole."""
    extent = x.shape[dimension] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * extent, extent, dimension)


def _global_barrier(kind: str, x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Adds a barrier ("wait" or "pass") of all devices of `mesh` to `x`, sharded as `spec`, in a job of processes."""
    if not native.has_barrier:
        return x
    wait = functools.partial(_collective, kind, axes=tuple(mesh.axis_names), source_line="")
    return jax.shard_map(lambda x: wait(x), mesh=mesh, in_specs=spec, out_specs=spec)(x)
