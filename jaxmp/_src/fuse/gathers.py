"""Decides which gathers become part of a call, so that the gathered array is never materialised.

A gather stays if an operation other than a product reads it, if no call can do it, or if the collective after its
products moves more bytes (a call does one or the other). If several products read a gather, each call repeats it. That
costs nothing if calls read other ranks' shards in place. Otherwise the cost model (docs/cost.md) compares it with one
gather before local products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.lowering import decide
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.spec.low_precision import NARROW
from jaxmp._src.core.spec.options import Implementation
from jaxmp._src.fuse.graph import PASSES, RESULT, Graph
from jaxmp._src.fuse.operands import Operand, axes_of_type, is_explicit, operand_of
from jaxmp._src.fuse.products import collective_after
from jaxmp._src.platform.hardware.call_time import Transfer, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import MACHINES, Hardware
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing


def choose(
    graph: Graph, dots: Sequence[int], implementation: Implementation | None
) -> tuple[frozenset[int], dict[int, str]]:
    """Chooses which gathers become part of the calls of the products `dots` (indices), the gather with most bytes
    first. A call takes in at most one all_gather, and any number of reshards. Returns (the indices of these gathers, by
    the index of each product with a gather before it: "again" if calls of others repeat one of its gathers, else why a
    gather stays). The reason is a key of `reasons.REASONS`; it means nothing if all these gathers are in calls."""
    readers: dict[int, list[int]] = {}
    why: dict[int, str] = {}
    for dot in dots:
        for i in _gathers_ahead(graph, dot):
            readers.setdefault(i, []).append(dot)
            why[dot] = "gather"
    taken: set[int] = set()
    again: set[int] = set()
    busy: set[int] = set()  # products with a call that gathers by name already
    for i in sorted((i for i in readers if _is_gather(graph.equations[i])), key=lambda i: -_received(graph, i)):
        reason = _why_stays(graph, i, readers[i], busy, implementation)
        if reason:
            refused = {dot for dot in readers[i] if not _takes(_operand_after(graph, dot, i)[0])}
            why |= {dot: "gather" if dot in refused or reason == "gather" else reason for dot in readers[i]}
            continue
        taken.add(i)
        again |= set(readers[i]) if len(readers[i]) > 1 else set()
        busy |= set(readers[i]) if graph.equations[i].primitive.name != "reshard" else set()
    return frozenset(taken), why | dict.fromkeys(again, "again")


def _gathers_ahead(graph: Graph, dot: int) -> list[int]:
    """Returns the indices of the gathers before a product, with at most casts, transposes, conj, pvary and reshapes
    between. Every all_gather counts, but a reshard only if it is a gather that a call can do."""
    found = []
    for v in graph.equations[dot].invars:
        while (eqn := graph.made_by(v)) is not None and eqn.primitive.name in (*PASSES, "reshape"):
            v = eqn.invars[0]
        if eqn is not None and (eqn.primitive.name == "all_gather" or _is_gather(eqn)):
            found.append(graph.producer[v])
    return found


def _is_gather(eqn: Any) -> bool:
    """True for a tiled all_gather over whole axes, and for a reshard on explicit axes that only takes axes away from
    dimensions. False if the operand is a literal."""
    if eqn.primitive.name == "reshard":
        if jax_tracing.is_literal(eqn.invars[0]) or not all(is_explicit(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return False
        have, want = (axes_of_type(v.aval) for v in (*eqn.invars, *eqn.outvars))
        return have != want and all(set(w) <= set(h) for h, w in zip(have, want, strict=True))
    if eqn.primitive.name != "all_gather" or jax_tracing.is_literal(eqn.invars[0]):
        return False
    return bool(eqn.params["tiled"]) and eqn.params.get("axis_index_groups") is None


def _why_stays(graph: Graph, i: int, dots: Sequence[int], busy: set[int], implementation: Implementation | None) -> str:
    """Returns why gather `i` before the products `dots` stays, or "" if calls do it. "gather": only reshapes read it.
    "shared": several products read it, and one gather is faster. "gathered": any other reason. `busy`: products that
    take in an all_gather already."""
    ends = _ends(graph, graph.equations[i].outvars[0])
    if all(end != RESULT and graph.equations[end].primitive.name == "reshape" for end in ends):
        return "gather"
    if not set(dots).issuperset(ends) or busy.intersection(dots):
        return "gathered"
    if not all(_takes(_operand_after(graph, dot, i)[0]) for dot in dots):
        return "gathered"
    if graph.equations[i].primitive.name != "reshard" and _received(graph, i) < sum(
        _summed(graph, dot) for dot in dots
    ):
        return "gathered"
    if len(dots) > 1 and not _is_faster_in_calls(graph, i, dots, implementation):
        return "shared"
    return ""


def _ends(graph: Graph, v: Any) -> list[int]:
    """Returns the indices of a value's readers, RESULT for the program's result. Instead of a reader in PASSES (casts,
    transposes, ...) it has the readers of that one's result."""
    ends: list[int] = []
    for i in graph.readers(v):
        if i != RESULT and graph.equations[i].primitive.name in PASSES:
            ends += _ends(graph, graph.equations[i].outvars[0])
        else:
            ends.append(i)
    return ends


def _operand_after(graph: Graph, dot: int, gather: int) -> tuple[Operand | None, Operand]:
    """Returns (the operand of a product that reads `gather`, the other operand). Returns (None, lhs) if both read it,
    or if neither reads it through operations that a call can do."""
    eqn: Any = graph.equations[dot]
    contract, batch = eqn.params["dimension_numbers"]
    sides = [
        operand_of(graph, v, contract[side], batch[side], frozenset((gather,))) for side, v in enumerate(eqn.invars)
    ]
    found = [gather in operand.equations for operand in sides]
    if all(found) or not any(found):
        return None, sides[0]
    return sides[found.index(True)], sides[found.index(False)]


def _takes(operand: Operand | None) -> bool:
    """True if a call can gather this operand: always after a reshard; after an all_gather if the operand folds into a
    matrix so that the gathered dimension is rows, columns or k. False for None."""
    if operand is None or operand.gather is None:
        return operand is not None
    return operand.is_flat and operand.folds(operand.gather.dimension)


def _received(graph: Graph, i: int) -> int:
    """Returns the bytes that a rank receives in a gather."""
    eqn: Any = graph.equations[i]
    x, y = eqn.invars[0].aval, eqn.outvars[0].aval
    received: int = math.prod(y.shape) - math.prod(x.shape)
    if eqn.primitive.name == "reshard":
        received = moves.received(x.shape, axes_of_type(x), axes_of_type(y), y.sharding.mesh.shape)
    return received * int(x.dtype.itemsize)


def _summed(graph: Graph, dot: int) -> int:
    """Returns the bytes that a rank receives in the sum after a product that its call could do, in a ring
    (docs/cost.md); 0 if there is none."""
    eqn = collective_after(graph, dot)
    if eqn is None:
        return 0
    x = eqn.invars[0].aval
    axes = eqn.params["axis_name"] if eqn.primitive.name == "reduce_scatter" else eqn.params["axes"]
    p = math.prod(size for axis, size in jax_compat.mesh_axes() if axis in axes)
    whole: int = math.prod(x.shape) * x.dtype.itemsize * (p - 1) // p
    return whole if eqn.primitive.name == "reduce_scatter" else 2 * whole


def is_narrow(eqn: Any) -> bool:
    """True for a gather (`_is_gather`) of numbers of 8 bits or fewer, which XLA might convert before it gathers."""
    return _is_gather(eqn) and eqn.invars[0].aval.dtype.name in NARROW


def gather_narrow(eqn: Any, x: jax.Array) -> jax.Array:
    """Returns the result of a gather of `x` that `is_narrow`, by a collective of jaxmp."""
    if eqn.primitive.name == "reshard":
        want = eqn.outvars[0].aval.sharding
        return collectives.reshard(x, want.mesh, jax.typeof(x).sharding.spec, want.spec, is_explicit=True)
    axes = eqn.params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return collectives.all_gather(x, axes, axis=eqn.params["all_gather_dimension"])


# Once or in each call --------------------------------------------------------------------------------------------


def reads_in_place(implementation: Implementation | None) -> bool:
    """True if calls read other ranks' shards in place: CPU devices of one process, without XLA's implementation."""
    return decide.here().platform == "cpu" and jax.process_count() == 1 and implementation != "xla"


def overlapping_machine(implementation: Implementation | None) -> Hardware | None:
    """Returns the data sheet of the GPU on CUDA platforms, where calls overlap their transfers; an unknown GPU gets the
    H100's. Returns None on other platforms and with XLA's implementation."""
    if decide.here().platform not in ("cuda", "gpu") or implementation == "xla":
        return None
    kind = jax.devices()[0].device_kind.lower()
    return next((machine for name, machine in MACHINES.items() if name.split("-")[0] in kind), MACHINES["h100-8"])


def _is_faster_in_calls(graph: Graph, i: int, dots: Sequence[int], implementation: Implementation | None) -> bool:
    """True if the products `dots` take less time when each call gathers `i` than after one gather, by the cost model.
    Always True if calls read shards in place. Otherwise False on other devices than GPUs, with XLA's implementation,
    and for an unknown mesh or rate."""
    if reads_in_place(implementation):
        return True
    machine = overlapping_machine(implementation)
    eqn: Any = graph.equations[i]
    mesh = eqn.outvars[0].aval.sharding.mesh
    if machine is None or mesh.empty:
        return False
    ndevices = math.prod(mesh.shape.values())
    if eqn.primitive.name == "reshard":
        have, want = (axes_of_type(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
        axes = tuple(axis for h, w in zip(have, want, strict=True) for axis in h if axis not in w)
        share = 1
    else:
        axes, share = eqn.params["axis_name"], ndevices
    transfer = Transfer.over(mesh.shape, axes, _received(graph, i))
    products = [(_work(graph, dot, share, ndevices), _hides(graph, dot, i)) for dot in dots]
    if not {work["kind"] for work, _ in products} <= set(machine.rates):
        return False
    time = functools.partial(call_time, machine, ndevices=ndevices)
    in_calls = sum(time(transfers=(transfer,), is_fused=hides, **work).total for work, hides in products)
    return in_calls < time(transfers=(transfer,)).total + sum(time(**work).total for work, _ in products)


def _work(graph: Graph, dot: int, share: int, ndevices: int) -> dict[str, Any]:
    """Returns the arguments of `call_time` that describe a product's work. `share`: 1 for the shapes of global arrays,
    `ndevices` for the shapes of shards."""
    eqn: Any = graph.equations[dot]
    a, b, d = (v.aval for v in (*eqn.invars, *eqn.outvars))
    k = math.prod(a.shape[i] for i in eqn.params["dimension_numbers"][0][0])
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in (a, b, d)) * share // ndevices
    return {"flops": 2 * math.prod(d.shape) * k * share, "kind": kind_of(a.dtype.name), "nbytes": nbytes}


def _hides(graph: Graph, dot: int, gather: int) -> bool:
    """True if a call on GPUs multiplies while it gathers: after a reshard, or along a free dimension. False if the
    other operand is stored with rows first, because the call then gathers before a local product."""
    gathered, other = _operand_after(graph, dot, gather)
    if gathered is None or other.has_rows_first:
        return False
    return gathered.gather is None or gathered.gather.dimension in gathered.free
