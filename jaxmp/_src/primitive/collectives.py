"""Collectives around jaxmp's calls, and what they are in a job of several processes.

XLA cannot interrupt a collective that crosses processes, and its transport ends the process where the ranks' messages
differ in size. So every process of the group has to be there, with an equal operand, before one of them enters. The
forward call of a product has a barrier of its own, which compares the whole call (`process_barrier.Site`).

In a job, a gather, a sum and a maximum inside shard_map are `process_collective_p`. It communicates through memory that
the processes share, where each call of the program meets its like on every rank. Where they share none, it is XLA's
collective behind a barrier. Its transpose is another one.

All-to-alls and reshards are XLA's, behind `process_barrier_p`: an identity, lowered to a wait where the group spreads
over processes. What ran after a collective runs ahead of it in the transposed program. So each stands between two
barriers, and the second waits in the transposed program only:

    x -> barrier -> all_to_all -> (barrier)         transposed: ct -> barrier -> all_to_all -> (barrier)

Outside a job of several processes nothing is added to the program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.jax_internals.jax_compat import batching
from jaxmp._src.runtime import native
from jaxmp._src.runtime.types import Operand, Tangent
from jaxmp._src.spec.options import Mesh

Axes = tuple[tuple[str, int], ...]  # of a mesh, as (name, size)

# (x) -> x. `mesh` are all mesh axes as (name, size), `axes` those of the group; `call` says for people what the barrier
# is ahead of, "all_gather for matmul at train.py:41"; a barrier that is not `is_active` waits only when transposed.
process_barrier_p = jax_compat.make_primitive("jaxmp_process_barrier", multiple_results=False)
process_barrier_p.def_abstract_eval(lambda x, **_: x)
batching.primitive_batchers[process_barrier_p] = lambda operands, dims, **params: (
    process_barrier_p.bind(*operands, **params),
    dims[0],
)


def _transpose(ct: Tangent, x: Operand, *, is_active: bool, **params: Any) -> list[Tangent]:
    return [process_barrier_p.bind(ct, is_active=not is_active, **params)]


ad.deflinear2(process_barrier_p, _transpose)

# (x) -> x after the collective `kind` of lax over `axis_name`, along `dimension`: "all_gather", "all_gather_invariant",
# "reduce_scatter", "psum", "pmax"; or "vary", the transpose of a psum, which makes the type of x vary over the axes and
# moves nothing. `caller` says for people what it belongs to, "matmul at train.py:41".
process_collective_p = jax_compat.make_primitive("jaxmp_process_collective", multiple_results=False)
_TRANSPOSED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "vary": "psum", "psum": "vary"}


def _collective_abstract_eval(
    x: jax.core.ShapedArray, *, kind: str, mesh: Axes, axis_name: tuple[str, ...], dimension: int, caller: str
) -> jax.core.ShapedArray:
    shape, varying, sizes = list(x.shape), x.manual_axis_type.varying, dict(mesh)
    nranks = math.prod(sizes[axis] for axis in axis_name)
    if kind.startswith("all_gather"):
        shape[dimension] *= nranks
    elif kind == "reduce_scatter":
        shape[dimension] //= nranks
    if kind in ("all_gather_invariant", "psum", "pmax"):
        varying = varying - frozenset(axis_name)
    elif kind == "vary":
        varying = varying | frozenset(axis_name)
    return jax_compat.with_shape(x, shape, x.dtype, varying)


def _collective_transpose(
    ct: jax.Array, x: Operand, *, kind: str, axis_name: tuple[str, ...], dimension: int, **params: Any
) -> list[Tangent]:
    if kind == "all_gather_invariant":
        return [own_part(ct, dimension, axis_name)]
    # Where types do not vary, what a psum sums has the sum of the cotangents of all ranks.
    kind = "psum" if kind == "psum" and not jax_compat.is_vma_checked() else _TRANSPOSED[kind]
    return [process_collective_p.bind(ct, kind=kind, axis_name=axis_name, dimension=dimension, **params)]


def _collective_batch_rule(operands: Any, dims: Any, *, dimension: int, **params: Any) -> tuple[jax.Array, int]:
    (x,), (batch,) = operands, dims
    return process_collective_p.bind(x, dimension=dimension + (batch <= dimension), **params), batch


process_collective_p.def_abstract_eval(_collective_abstract_eval)
ad.deflinear2(process_collective_p, _collective_transpose)
batching.primitive_batchers[process_collective_p] = _collective_batch_rule


def _between_processes(
    kind: str, x: jax.Array, axes: tuple[str, ...], source_line: str, dimension: int = 0
) -> jax.Array:
    mesh, caller = jax_compat.mesh_axes(), source_line or "a matmul"
    result: jax.Array = process_collective_p.bind(
        x, kind=kind, mesh=mesh, axis_name=tuple(axes), dimension=dimension, caller=caller
    )
    return result


def all_gather(
    x: jax.Array, axes: tuple[str, ...], *, axis: int, to: str = "varying", source_line: str = ""
) -> jax.Array:
    """`lax.all_gather`, tiled. Where types do not vary, `to` makes no difference."""
    to = to if jax_compat.is_vma_checked() else "varying"
    if native.has_barrier():
        kind = "all_gather" if to == "varying" else "all_gather_invariant"
        return _between_processes(kind, x, axes, source_line, axis)
    if axis == 0:
        gathered: jax.Array = lax.all_gather(x, axes, axis=0, tiled=True, to=to)
        return gathered
    # XLA gathers along the slowest dimension: a later one it would transpose ahead of the gather as well.
    stacked: jax.Array = lax.all_gather(x, axes, axis=0, to=to)
    return jnp.moveaxis(stacked, 0, axis).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def all_to_all(
    x: jax.Array, axes: tuple[str, ...], split_axis: int, concat_axis: int, *, source_line: str = ""
) -> jax.Array:
    """`lax.all_to_all`, tiled."""
    x = _barrier(x, axes, "all_to_all", source_line, is_active=True)
    moved: jax.Array = lax.all_to_all(x, axes, split_axis, concat_axis, tiled=True)
    return _barrier(moved, axes, "all_to_all", source_line, is_active=False)


def psum(x: jax.Array, axes: tuple[str, ...], *, source_line: str = "") -> jax.Array:
    """`lax.psum`."""
    total: jax.Array = _between_processes("psum", x, axes, source_line) if native.has_barrier() else lax.psum(x, axes)
    return total


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], *, axis: int, source_line: str = "") -> jax.Array:
    """`lax.psum_scatter`, tiled."""
    if native.has_barrier():
        return _between_processes("reduce_scatter", x, axes, source_line, axis)
    part: jax.Array = lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)
    return part


def pmax(x: jax.Array, axes: tuple[str, ...], *, source_line: str = "") -> jax.Array:
    """`lax.pmax`."""
    most: jax.Array = _between_processes("pmax", x, axes, source_line) if native.has_barrier() else lax.pmax(x, axes)
    return most


def cast_varying(x: jax.Array, axes: Collection[str], *, source_line: str = "") -> jax.Array:
    """`x` with a type that varies over `axes` too: it moves nothing, but its transpose is a psum."""
    if reduced := tuple(sorted(jax_compat.reduced_axes(x) & frozenset(axes))):
        x = lax.pcast(x, reduced, to="varying")  # whose transpose moves nothing
    missing = tuple(axis for axis in sorted(axes) if axis not in jax_compat.varying_axes(x))
    if not missing:
        return x
    if native.has_barrier() and jax_compat.is_vma_checked():
        return _between_processes("vary", x, missing, source_line)
    cast: jax.Array = lax.pcast(x, missing, to="varying")
    return cast


def cast_reduced(operands: Mapping[str, jax.Array], axes: Collection[str] = ()) -> dict[str, jax.Array]:
    """The operands of a call over `axes`, where each that is reduced over an axis varies over it if another does."""
    reduced = {name: jax.typeof(x).manual_axis_type.reduced for name, x in operands.items()}
    if not any(reduced.values()):
        return dict(operands)
    found = frozenset(axes).union(*map(jax_compat.varying_axes, operands.values()))
    return {name: cast_varying(x, found & reduced[name]) for name, x in operands.items()}


def reshard(x: jax.Array, mesh: Mesh, have: P, spec: P, *, is_explicit: bool) -> jax.Array:
    """A global array that is sharded as `have`, sharded as `spec`.

    Where each device takes a part of what it has, only the transpose communicates.
    """
    move: Callable[..., Any] = jax.sharding.reshard if is_explicit else lax.with_sharding_constraint
    with jax.named_scope("jaxmp_reshard"):
        # A type without a mesh says nothing of the cotangent, which is to lie as the operand does.
        is_typed = is_explicit and not jax.typeof(x).sharding.mesh.empty
        x = x if is_typed else move(x, NamedSharding(mesh, have))
        x = _global_barrier(x, mesh, have, is_active=not _is_finer(have, spec))
        return _global_barrier(move(x, NamedSharding(mesh, spec)), mesh, spec, is_active=False)


def _is_finer(have: P, spec: P) -> bool:
    """Whether a shard of `spec` is a part of one of `have`."""
    entries = [[(x,) if isinstance(x, str) else tuple(x or ()) for x in each] for each in (have, spec)]
    return all(want[: len(dim)] == dim for dim, want in itertools.zip_longest(*entries, fillvalue=()))


def own_part(x: jax.Array, dimension: int, axes: tuple[str, ...]) -> jax.Array:
    """This rank's part of what it holds whole."""
    extent = x.shape[dimension] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * extent, extent, dimension)


def _global_barrier(x: jax.Array, mesh: Mesh, spec: P, *, is_active: bool) -> jax.Array:
    """The barrier of all devices of `mesh`, on a global array that is sharded as `spec`."""
    if not native.has_barrier():
        return x
    axes = tuple(mesh.axis_names)

    def local(x: jax.Array) -> jax.Array:
        return _barrier(x, axes, "reshard", "", is_active=is_active)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _barrier(x: jax.Array, axes: tuple[str, ...], operation: str, source_line: str, *, is_active: bool) -> jax.Array:
    if not native.has_barrier():
        return x
    call = f"{operation} for {source_line or 'a matmul'}"
    mesh = jax_compat.mesh_axes()
    waited: jax.Array = process_barrier_p.bind(x, mesh=mesh, axes=tuple(axes), call=call, is_active=is_active)
    return waited
