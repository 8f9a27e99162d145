"""A body on the shards of global arrays: what moves ahead of it, what it gathers, what moves behind it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.contraction.contraction import Contraction, Dims, Layout
from jaxmp._src.core.contraction.moves import Gather
from jaxmp._src.core.primitive.primitives import dots_saveable
from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.sharding.shard_local import gathered
from jaxmp._src.platform.runtime.types import Operands


class Entry(NamedTuple):
    """How an operand enters shard_map, how it is gathered there, and how it lies ahead, if its type does not tell."""

    spec: P = P()
    gathers: tuple[Gather, ...] = ()
    have: P | None = None


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where a body runs, hashable: the mesh, how its operands enter, by name, and how its results leave, by name.

    `asked` is the sharding that the result "d" is to have, where it leaves in another one.
    """

    mesh: Any
    is_explicit: bool
    entries: tuple[tuple[str, Entry], ...]
    outs: tuple[tuple[str, P], ...]
    asked: P | None = None

    @property
    def out_spec(self) -> P:
        """The sharding in which d leaves."""
        return dict(self.outs)["d"]


@functools.lru_cache(maxsize=4096)
def frame_of(
    where: tuple[Any, bool],
    given: Layout,
    plan: Contraction,
    beside: tuple[tuple[str, Dims], ...] = (),
    results: tuple[tuple[str, Dims], ...] = (),
    *,
    gathers_inside: bool,
) -> Frame:
    """The frame of a planned call, whose arrays lie and are to lie as `given`.

    `where`: the mesh, and whether its axes are explicit. `beside`, `results`: how the operands after a and b enter, and
    the results after d leave. `gathers_inside`: a and b may be gathered inside shard_map, whose transpose is a
    reduce-scatter.
    """
    arrays = (
        ("a", given.a, plan.layout.a),
        ("b", given.b, plan.layout.b),
        *((name, None, dims) for name, dims in beside),
    )
    gathered = plan.layout if gathers_inside else None
    # The sums of an operand are the same on all ranks that gather it, and so is its type.
    summed = [name for name in "ab" if f"bgrad{name}" in dict(results)]
    return frame(where, arrays, gathered, (("d", plan.layout.d), *results), given.d, summed=summed)


def frame(
    where: tuple[Any, bool],
    arrays: Iterable[tuple[str, Dims | None, Dims]],
    layout: Iterable[Dims] | None,
    outs: tuple[tuple[str, Dims], ...],
    asked: Dims,
    *,
    summed: Collection[str] = (),
) -> Frame:
    """The frame of a call in `layout`, which takes arrays sharded as (name, before, inside) and gives `outs`.

    An array that is None before enters as it is inside. Without a layout nothing is gathered inside. The result "d" is
    to be sharded as `asked`.
    """
    (mesh, is_explicit), spec, entries = where, meshes.partition_spec, []
    for name, have, want in arrays:
        dims, gathers = (want, ()) if have is None or layout is None else moves.entry(have, want, layout)
        gathers = tuple(gather._replace(varies=False) for gather in gathers) if name in summed else gathers
        entries.append((name, Entry(spec(dims), gathers, None if is_explicit or have is None else spec(have))))
    results = tuple((name, spec(dims)) for name, dims in outs)
    return Frame(mesh, is_explicit, tuple(entries), results, None if outs[0][1] == asked else spec(asked))


def on_shards(
    frame: Frame, body: Callable[[Operands], dict[str, Any]], operands: Operands, source_line: str
) -> dict[str, Any]:
    """The results of a body of one device's shards."""
    known = dict(frame.entries)
    entries = {name: known.get(name, Entry()) for name in operands}
    placed = {}
    for name, x in operands.items():
        entry = entries[name]
        have = jax.typeof(x).sharding.spec if frame.is_explicit else entry.have
        if have is not None and have != entry.spec:
            have = meshes.type_spec(x) if frame.is_explicit else have
            x = meshes.reshard(x, frame.mesh, have, entry.spec, is_explicit=frame.is_explicit)
        placed[name] = x
    specs = {name: entry.spec for name, entry in entries.items()}
    of_shards = on_gathered(body, {name: entry.gathers for name, entry in entries.items()}, source_line)
    run = jax.shard_map(of_shards, mesh=frame.mesh, in_specs=(specs,), out_specs=dict(frame.outs))
    results: dict[str, Any] = run(placed)
    if frame.asked is None:
        return results
    d = meshes.reshard(results["d"], frame.mesh, frame.out_spec, frame.asked, is_explicit=frame.is_explicit)
    return results | {"d": d}


def on_gathered(
    body: Callable[[Operands], dict[str, Any]], gathers: dict[str, tuple[Gather, ...]], source_line: str
) -> Callable[[Operands], dict[str, Any]]:
    """`body` of operands of which some are gathered ahead of its calls; backward passes gather those again, so that
    none is kept for them."""
    if not any(gathers.values()):
        return body

    def of_shards(operands: Operands) -> dict[str, Any]:
        whole = dict(operands)
        for name, each in gathers.items():
            for gather in each:
                to = "varying" if gather.varies else "invarying"
                whole[name] = gathered(gather.axes, whole[name], gather.dimension, source_line, to)
        return body(whole)

    # Without a barrier in the way XLA may still keep one, within a program that does not loop over layers.
    return jax.checkpoint(of_shards, prevent_cse=False, policy=dots_saveable)
