"""XLA's collectives around jaxmp's calls, each behind a process barrier.

XLA cannot interrupt a collective that crosses processes, and its transport ends the process where the ranks' messages
differ in size. So every process of the group has to be there, with an equal operand, before one of them enters.
`process_barrier_p` is that barrier: an identity, lowered to a wait where the group spreads over processes. The forward
call of a product has a barrier of its own, which compares the whole call (`process_barrier.Site`).

Transposing turns a collective into another one, and what ran after it runs before. So each collective stands between
two barriers, of which the second waits in the transposed program only:

    x -> barrier -> all_gather -> (barrier)         transposed: ct -> barrier -> psum_scatter -> (barrier)

Outside a job of several processes nothing is added to the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.runtime import jax_compat, native
from jaxmp._src.runtime.jax_compat import batching
from jaxmp._src.runtime.types import Operand, Tangent
from jaxmp._src.spec.options import Mesh

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


def all_gather(
    x: jax.Array, axes: tuple[str, ...], *, axis: int, to: str = "varying", source_line: str = ""
) -> jax.Array:
    """`lax.all_gather`, tiled."""

    def collective(x: jax.Array) -> jax.Array:
        if axis == 0:
            gathered: jax.Array = lax.all_gather(x, axes, axis=0, tiled=True, to=to)
            return gathered
        # XLA gathers along the slowest dimension: a later one it would transpose ahead of the gather as well.
        stacked: jax.Array = lax.all_gather(x, axes, axis=0, to=to)
        return jnp.moveaxis(stacked, 0, axis).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return _guarded(collective, "all_gather", x, axes, source_line)


def all_to_all(
    x: jax.Array, axes: tuple[str, ...], split_axis: int, concat_axis: int, *, source_line: str = ""
) -> jax.Array:
    """`lax.all_to_all`, tiled."""

    def collective(x: jax.Array) -> jax.Array:
        moved: jax.Array = lax.all_to_all(x, axes, split_axis, concat_axis, tiled=True)
        return moved

    return _guarded(collective, "all_to_all", x, axes, source_line)


def psum(x: jax.Array, axes: tuple[str, ...], *, source_line: str = "") -> jax.Array:
    """`lax.psum`."""
    return _guarded(lambda x: lax.psum(x, axes), "psum", x, axes, source_line)


def pmax(x: jax.Array, axes: tuple[str, ...], *, source_line: str = "") -> jax.Array:
    """`lax.pmax`."""
    return _guarded(lambda x: lax.pmax(x, axes), "pmax", x, axes, source_line)


def cast_varying(x: jax.Array, axes: Collection[str], *, source_line: str = "") -> jax.Array:
    """`x` with a type that varies over `axes` too: it moves nothing, but its transpose is a psum."""
    if reduced := tuple(sorted(jax_compat.reduced_axes(x) & frozenset(axes))):
        x = lax.pcast(x, reduced, to="varying")  # whose transpose moves nothing
    missing = tuple(axis for axis in sorted(axes) if axis not in jax_compat.varying_axes(x))
    if not missing:
        return x
    return _barrier(lax.pcast(x, missing, to="varying"), missing, "psum", source_line, is_active=False)


def cast_reduced(operands: Mapping[str, jax.Array], axes: Collection[str] = ()) -> dict[str, jax.Array]:
    """The operands of a call over `axes`, where each that is reduced over an axis varies over it if another does."""
    found = frozenset(axes).union(*map(jax_compat.varying_axes, operands.values()))
    return {name: cast_varying(x, found & jax_compat.reduced_axes(x)) for name, x in operands.items()}


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


def _guarded(
    collective: Callable[[jax.Array], jax.Array], operation: str, x: jax.Array, axes: tuple[str, ...], source_line: str
) -> jax.Array:
    x = _barrier(x, axes, operation, source_line, is_active=True)
    return _barrier(collective(x), axes, operation, source_line, is_active=False)


def _barrier(x: jax.Array, axes: tuple[str, ...], operation: str, source_line: str, *, is_active: bool) -> jax.Array:
    if not native.has_barrier():
        return x
    call = f"{operation} for {source_line or 'a matmul'}"
    mesh = jax_compat.mesh_axes()
    waited: jax.Array = process_barrier_p.bind(x, mesh=mesh, axes=tuple(axes), call=call, is_active=is_active)
    return waited
