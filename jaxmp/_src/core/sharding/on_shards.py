"""Runs a function on shards of global arrays: reshards operands, gathers inside `shard_map`, reshards the result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.contraction.contraction import Dim, Dims
from jaxmp._src.core.contraction.moves import Gather, Narrow
from jaxmp._src.core.primitive.collectives import narrow_gather
from jaxmp._src.core.primitive.primitives import dots_saveable
from jaxmp._src.core.sharding import meshes, shardings
from jaxmp._src.core.sharding.shard_local import gathered
from jaxmp._src.platform.runtime.types import Operands


class Entry(NamedTuple):
    """How an operand enters `shard_map`, what gathers it there, and its sharding before (None: its type has it)."""

    spec: P = P()
    gathers: tuple[Gather, ...] = ()
    have: P | None = None

    def axes(self, *, varies: bool = False) -> frozenset[str]:
        """Returns the axes that shard the operand as it enters; `varies`: without axes of gathers that do not vary."""
        dims = shardings.as_dims("an operand", self.spec, len(self.spec))
        same = (gather.axes for gather in self.gathers if varies and not gather.varies)
        return frozenset(sum(dims, ())).difference(*same)


@dataclasses.dataclass(frozen=True)
class Frame:
    """The `shard_map` around a function, hashable: the mesh, and by name how operands enter and results leave.

    `asked`: the sharding that the caller wants for the result "d", if d leaves `shard_map` in a different one.
    """

    mesh: Any
    is_explicit: bool
    entries: tuple[tuple[str, Entry], ...]
    outs: tuple[tuple[str, P], ...]
    asked: P | None = None

    @property
    def out_spec(self) -> P:
        """The sharding of d when it leaves `shard_map`."""
        return dict(self.outs)["d"]

    def with_narrow_b(self, types: Narrow) -> Frame:
        """Returns the frame of a call that gathers b in these types (of b and of its gradient)."""
        b = dict(self.entries)["b"]
        b = b._replace(gathers=tuple(gather._replace(narrow=types) for gather in b.gathers))
        return dataclasses.replace(self, entries=tuple((dict(self.entries) | {"b": b}).items()))


@functools.lru_cache(maxsize=4096)
def frame(
    where: tuple[Any, bool],
    arrays: tuple[tuple[str, Dims | None, Dims], ...],
    layout: tuple[Dims, ...] | None,
    outs: tuple[tuple[str, Dims], ...],
    asked: Dims,
    unreduced: Dim,
    *,
    summed: tuple[str, ...] = (),
) -> Frame:
    """Returns a call's frame. `arrays`: (name, sharding before, sharding inside). `outs`: the results, d first.
    `asked`: the sharding of d that the caller wants. `unreduced`: the axes of d's deferred sum. `layout`: the shardings
    of the call's arrays inside. With it, arrays with a sharding before may be gathered inside. All other arrays
    enter in the sharding inside. All ranks that gather an array in `summed` compute the same from it."""
    (mesh, is_explicit), spec, entries = where, meshes.partition_spec, []
    for name, have, want in arrays:
        dims, gathers = (want, ()) if have is None or layout is None else moves.entry(have, want, layout)
        gathers = tuple(gather._replace(varies=False) for gather in gathers) if name in summed else gathers
        entries.append((name, Entry(spec(dims), gathers, None if is_explicit or have is None else spec(have))))
    results = tuple((name, spec(dims, unreduced if name == "d" else ())) for name, dims in outs)
    wanted = None if outs[0][1] == asked else spec(asked, unreduced)
    return Frame(mesh, is_explicit, tuple(entries), results, wanted)


def on_shards(
    frame: Frame, body: Callable[[Operands], dict[str, Any]], operands: Operands, source_line: str
) -> dict[str, Any]:
    """Runs `body` on each device's shards and returns its results by name, d in the requested sharding. An operand
    without an entry in the frame is replicated."""
    known = dict(frame.entries)
    entries = {name: known.get(name, Entry()) for name in operands}
    placed, copied, terms = _placed(frame, entries, operands), {}, _ordered(frame, frame.out_spec.unreduced)
    for name, x in placed.items():
        if frame.is_explicit and (axes := _ordered(frame, meshes.type_spec(x).reduced)):
            placed[name], copied[name] = _in_copies(x, frame.mesh, axes), axes
    of_shards = on_gathered(body, {name: entry.gathers for name, entry in entries.items()}, source_line)

    def run(operands: Operands) -> dict[str, Any]:
        results = of_shards({name: x[0] if name in copied else x for name, x in operands.items()})
        return results | {"d": results["d"][None]} if terms else results

    specs = {
        name: P(copied[name], *entry.spec.partitions) if name in copied else entry.spec
        for name, entry in entries.items()
    }
    outs = dict(frame.outs) | ({"d": P(terms, *frame.out_spec.partitions)} if terms else {})
    results: dict[str, Any] = jax.shard_map(run, mesh=frame.mesh, in_specs=(specs,), out_specs=outs)(placed)
    if terms:
        where = NamedSharding(jax.typeof(results["d"]).sharding.mesh, frame.out_spec)
        results["d"] = lax.reduce_sum(results["d"], (0,), out_sharding=where)
    if frame.asked is None:
        return results
    d = meshes.reshard(results["d"], frame.mesh, frame.out_spec, frame.asked, is_explicit=frame.is_explicit)
    return results | {"d": d}


def _placed(frame: Frame, entries: Mapping[str, Entry], operands: Operands) -> Operands:
    """Returns the operands, resharded as they enter; they stay reduced over axes along which other operands differ."""
    varying = frozenset().union(*(entry.axes(varies=True) for entry in entries.values()))
    placed = {}
    for name, x in operands.items():
        entry = entries[name]
        have, want = jax.typeof(x).sharding.spec if frame.is_explicit else entry.have, entry.spec
        if have is not None and have.reduced:
            want = want.update(reduced=have.reduced & varying - entry.axes())
        if have is not None and have != want:
            have = meshes.type_spec(x) if frame.is_explicit else have
            x = meshes.reshard(x, frame.mesh, have, want, is_explicit=frame.is_explicit)
        placed[name] = x
    return placed


def _ordered(frame: Frame, axes: Collection[str]) -> Dim:
    return tuple(axis for axis in frame.mesh.axis_names if axis in axes)


def _in_copies(x: jax.Array, mesh: Any, axes: Dim) -> jax.Array:
    """Returns a copy of `x` for each rank of its reduced `axes`, along a new first dimension sharded over `axes`.
    Nothing moves.

    The copies' cotangents become the terms of x's cotangent, which is unreduced. JAX (0.10 to 0.12) does not `vmap` a
    shard_map with reduced or unreduced types.
    """
    kind = jax.typeof(x).sharding
    where, shape = NamedSharding(kind.mesh, P(axes, *kind.spec.partitions)), (moves.size_of(mesh.shape, axes), *x.shape)
    copies: jax.Array = lax.broadcast_in_dim(x, shape, tuple(range(1, x.ndim + 1)), out_sharding=where)
    return copies


def on_gathered(
    body: Callable[[Operands], dict[str, Any]], gathers: dict[str, tuple[Gather, ...]], source_line: str
) -> Callable[[Operands], dict[str, Any]]:
    """Wraps `body` so that it receives gathered operands; returns `body` itself if there are no `gathers`. The backward
    pass gathers again, instead of keeping the gathered operands."""
    if not any(gathers.values()):
        return body

    def of_shards(operands: Operands) -> dict[str, Any]:
        whole = dict(operands)
        for name, each in gathers.items():
            for gather in each:
                to = "varying" if gather.varies else "invarying"
                take = functools.partial(narrow_gather, narrow=gather.narrow) if any(gather.narrow) else gathered
                whole[name] = take(gather.axes, whole[name], gather.dimension, source_line, to)
        return body(whole)

    # There is no barrier, so XLA may still keep a gathered operand if the program has no loop over layers.
    return jax.checkpoint(of_shards, prevent_cse=False, policy=dots_saveable)
