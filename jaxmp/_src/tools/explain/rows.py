"""Builds the rows of `explain` from a jaxpr: how each product of a program will be computed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.lowering import decide, forms, process_barrier, xla_matmul
from jaxmp._src.core.lowering.process_barrier import MeshAxes
from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.primitive.collectives import collective_p, reshard_p
from jaxmp._src.core.primitive.grouped import GROUPED, GroupedSpec
from jaxmp._src.core.primitive.primitives import MATMULS, activated_matmul_p, is_own_jit, of_one_index
from jaxmp._src.core.sharding import ragged, shardings
from jaxmp._src.core.sharding.partitioner import Settled
from jaxmp._src.core.spec import epilogs, levels, low_precision, precisions, wire
from jaxmp._src.core.spec.extents import extents
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, accumulator
from jaxmp._src.core.spec.refusal import naming
from jaxmp._src.core.validation.comm_options import comm_options_text
from jaxmp._src.fuse import derivatives, reasons
from jaxmp._src.fuse.graph import PRODUCTS, dimension_numbers
from jaxmp._src.platform.hardware.call_time import Transfer
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering
from jaxmp._src.platform.runtime.types import is_symbolic
from jaxmp._src.tools.explain import shards
from jaxmp._src.tools.explain.table import Row

# The primitive of `jax.lax.with_sharding_constraint`.
_CONSTRAINT = "sharding_constraint"
# Why a collective runs next to the calls, by primitive.
_COMMUNICATES = {
    "all_gather": "the product contracts over gathered rows; cuBLASMp cannot fuse that gather",
    "reshard": "brings an operand, its gradient or a result to the sharding that the call, or its caller, wants",
    _CONSTRAINT: "brings an operand or a result to the sharding that the call, or its caller, wants",
    "pmax": "takes the largest absolute value of all ranks (result_amax, gelu_aux_amax); cuBLASMp does so for one "
    "rank only",
    "psum": "sums the cotangents of an operand that is the same on several ranks",
    "all_to_all": "brings all of k to each rank",
    "reduce_scatter": "sums the cotangents of an operand that was gathered before its call",
    "all_gather_invariant": "the shardings ask for it; with the other operand whole, the ranks compute the same",
}
# The same by scope, which is more precise.
_SCOPES = {
    "jaxmp_narrow_gather": "gathers b in the type of comm.weights, or exchanges its gradient in the type of "
    "comm.gradients",
    bias_grad.SCOPE: "completes a bias gradient over axes that share its rows outside of the call",
    ragged.SCOPE: "completes sums of products of groups, over k or over ranks that have other groups, or gathers their "
    "cotangents",
    "jaxmp_gather_rows": _COMMUNICATES["all_gather"],
    "jaxmp_shared_operand": "one operand of two products: gathered once, its cotangents summed once",
    "jaxmp_whole_operands": "lets the call apply its own epilog to gathered or scattered columns, to keep the bits",
    "jaxmp_global_order": "puts interleaved rows of the ranks in the order of the global array, to keep the bits",
    "jaxmp_all_gather": "gathers an operand before the call, which no pattern does with these shardings",
}
_OWN_SCOPES = {*_SCOPES, "jaxmp_reshard", "jaxmp_amax"}
# The pattern of a call under auto axes until the partitioner chooses it.
UNSETTLED = "?"
UNSETTLED_BATCH = "? of a batch"


def rows_of(
    jaxpr: jax_compat.Jaxpr,
    line: str = "",
    count: int = 1,
    scopes: tuple[str, ...] = (),
    *,
    is_ours: bool = False,
    dims: tuple[Dim, ...] = (),
    terms: Mapping[int, Collection[str]] = MappingProxyType({}),
) -> Iterator[Row]:
    """Yields the rows of `jaxpr`, which runs `count` times, and of the jaxprs in it: products of jaxmp, products that
    `fuse` left to JAX or jaxmp to XLA, and collectives that jaxmp added and that move data. A call on automatic axes
    has the pattern `UNSETTLED` until the partitioner chooses one, or `UNSETTLED_BATCH` if it is a batch that XLA may
    compute. Scans multiply `count` by their lengths; other loops count once.

    `line`: the user's line that calls the jaxpr. `is_ours`: the jaxpr may be in JAX's cache from a call at another
    line, so the lines of its equations are not used. `scopes`: the name stacks around the jaxpr. `dims`: the dimensions
    of the enclosing shard_map that several axes shard. `terms`: the axes of deferred sums, by the `id` of each result
    of the jaxpr that is a term of such a sum.
    """
    terms = shards.terms_of_sums(jaxpr, terms)
    gathered: dict[int, frozenset[str]] = {}
    constraints: dict[int, Any] = {id(eqn.outvars[0]): eqn for eqn in jaxpr.eqns if eqn.primitive.name == _CONSTRAINT}
    for eqn in jaxpr.eqns:
        avals: list[Any] = [v.aval for v in eqn.invars]
        names = (*scopes, str(eqn.source_info.name_stack), str(eqn.params.get("name", "")))
        here = line if is_ours else jax_compat.traced_line(eqn) or line
        _follow_gathers(eqn, gathered)
        varying = [jax_compat.varying_axes(v.aval) - gathered.get(id(v), frozenset()) for v in eqn.invars]
        axes = " and ".join(axis for v in eqn.outvars[:1] for axis in sorted(terms.get(id(v), ())))
        later = [f"the sum over {axes} is deferred (unreduced)"] * bool(axes)
        if eqn.primitive in MATMULS or eqn.primitive is activated_matmul_p:
            spec, b = eqn.params["spec"], 1 if eqn.primitive in MATMULS else -1
            times = count * math.prod(avals[0].shape[: spec.batch])
            row = matmul_row(spec, avals[0], avals[b], here, times, varying=(varying[0], varying[b]), dims=dims)
            is_of_xla = spec.batch and not spec.asked_of_library
            notes = [] if is_of_xla else [*later, *reasons.notes_in(names)]
            is_open = spec.is_unsettled and not is_symbolic(*avals)
            yield _noted(row, notes, (UNSETTLED_BATCH if is_of_xla else UNSETTLED) if is_open else "")
        elif eqn.primitive in GROUPED:
            spec = eqn.params["spec"]
            row = grouped_row(spec, [*avals, eqn.outvars[0].aval], here, count)
            why = decide.why_xla(spec.implementation, spec.level, decide.here(), is_global=True)
            yield _noted(row, later, UNSETTLED if spec.is_global and not why and not is_symbolic(*avals) else "")
        elif _collective_name(eqn) in _COMMUNICATES and (is_ours or _is_own_scope(names)):
            aval: Any = eqn.outvars[0].aval
            constraint = constraints.get(id(eqn.invars[0]))
            yield from _communication_row(eqn, here, count, names, aval.sharding.mesh, constraint)
        elif eqn.primitive.name == "dot_general" and any(xla_matmul.SCOPE in name for name in names):
            yield _row_of_xla(eqn, here, count)
        elif eqn.primitive.name in PRODUCTS and any(reasons.SCOPE in name for name in names):
            yield _row_of_xla(eqn, here, count, reasons.reason_in(names))
        else:
            inner = count * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else count
            is_ours_too = is_ours or is_own_jit(eqn)
            known = shards.sharded_dims(eqn) or dims
            with jax_lowering.body_of(eqn.primitive):
                for sub in (*jax_compat.subjaxprs(eqn.params), *derivatives.lowered(eqn)):
                    pairs = zip(sub.outvars, eqn.outvars, strict=False)
                    ends = {id(end): terms[id(v)] for end, v in pairs if id(v) in terms}
                    yield from list(rows_of(sub, here, inner, names, is_ours=is_ours_too, dims=known, terms=ends))


def settled_row(one: Settled, line: str, count: int) -> Iterator[Row]:
    """Yields the row of `one`, an equation in a call that XLA's partitioner has settled; nothing if the equation
    neither multiplies nor moves data."""
    eqn, scopes, types = one.eqn, (str(one.eqn.source_info.name_stack),), [v.aval for v in one.eqn.invars]
    if eqn.primitive in GROUPED:
        yield grouped_row(eqn.params["spec"], [*types, eqn.outvars[0].aval], line, count)
    elif eqn.primitive in MATMULS:
        varying, note = (one.varying[0], one.varying[1]), "chosen by XLA's partitioner (auto axes, no in_shardings)"
        row = matmul_row(eqn.params["spec"], types[0], types[1], line, count, varying=varying, dims=one.dims)
        yield _noted(row, [note], "")
    elif _collective_name(eqn) in _COMMUNICATES:
        yield from _communication_row(eqn, line, count, scopes, one.mesh)


def _noted(row: Row, notes: Sequence[str], pattern: str) -> Row:
    """Returns `row` with `notes` after its reason, and with this pattern unless it is ""."""
    return dataclasses.replace(row, why="; ".join([row.why, *notes]), pattern=pattern or row.pattern)


def _is_own_scope(names: tuple[str, ...]) -> bool:
    """True if one of these name stacks has a scope in which jaxmp moves data. All other scopes are users'."""
    return not _OWN_SCOPES.isdisjoint(re.split("[/()]", "/".join(names)))


def _collective_name(eqn: Any) -> str:
    """Returns the name of an equation's primitive; for jaxmp's own the name of the lax collective that it is."""
    if eqn.primitive is reshard_p:
        return "reshard" if eqn.params["is_explicit"] else _CONSTRAINT
    name = str(eqn.params["kind"] if eqn.primitive is collective_p else eqn.primitive.name)
    return "psum" if name == "psum_invariant" else name


def _follow_gathers(eqn: Any, gathered: dict[int, frozenset[str]]) -> None:
    """Adds to `gathered`, by the `id` of each result of `eqn`, the axes along which `eqn` or equations before it
    gathered the value. Devices along them hold the same value, even if its type varies over them. Adds nothing for an
    equation with several operands or an inner jaxpr, unless it is a gather."""
    if _collective_name(eqn).startswith("all_gather") and "axis_name" in eqn.params:  # not for its end, all_gather_done
        axes = eqn.params["axis_name"]
        new = frozenset((axes,) if isinstance(axes, str) else axes)
    elif len(eqn.invars) == 1 and not any(jax_compat.subjaxprs(eqn.params)):
        new = frozenset()
    else:
        return
    for result in eqn.outvars:
        gathered[id(result)] = gathered.get(id(eqn.invars[0]), frozenset()) | new


def matmul_row(
    spec: MatmulSpec, a: Any, b: Any, line: str, count: int, *, varying: shards.Varying, dims: tuple[Dim, ...]
) -> Row:
    """Returns the row of a product of one device's shards, with the types `a` and `b`. In a batch, it is the row of one
    index. `count` is used as it is. `varying`: the axes along which a, and along which b, differs between ranks.
    `dims`: the dimensions of the enclosing shard_map that several axes shard. A call that XLA has yet to settle counts
    as local."""
    spec = spec.settled()
    with naming(spec.function + f" at {line}" * bool(line)):
        where = decide.here(spec.group.mesh, spec.group.axes)
        decision = decide.product(spec, a, b, where)
    a, b = of_one_index(spec, a, b)
    call, found, group = decision.call, extents(spec, a.shape, b.shape), spec.group
    traced = f"{' and '.join(spec.traced)} traced, so scaling, c and epilog follow the call" if spec.traced else ""
    m, n, k = found.m, found.n, found.k
    out = np.dtype(spec.out_dtype)
    is_complex = np.issubdtype(out, np.complexfloating)
    operand = low_precision.operand_type(a.dtype, b.dtype)
    compute = precisions.compute_type(spec.precision, operand, where.platform)
    # If operands are gathered, every rank computes an all-reduced product.
    is_repeated = isinstance(call, forms.Gathered) and spec.contraction.is_reduced
    copies = group.ngroups * (group.nranks if is_repeated else 1)
    rows, cols = outside = shards.outside(spec, varying)
    whole_m, whole_n = group.size(rows) * m, group.size(cols) * n
    return Row(
        operation="matmul" if spec.epilog == epilogs.Epilog.NONE and not spec.has_c else "matmul+epilog",
        count=count,
        pattern=spec.contraction.pattern.value,
        groups=f"{group.ngroups} x {group.nranks} {group.axes}" if group.nranks > 1 else "1 rank",
        global_shapes=(
            (k, whole_m) if spec.transpose_a else (whole_m, k),
            (whole_n, k) if spec.transpose_b else (k, whole_n),
            (whole_m, whole_n),
        ),
        local_shapes=(tuple(a.shape), tuple(b.shape), found.d),
        dtypes=f"{a.dtype.name} x {b.dtype.name} -> {out.name}{_scales(spec)}",
        accumulator=precisions.summed_in(compute, operand).name,
        **spec.level.option,
        epilog=spec.epilog.name,
        **_decided(decision, group.mesh, group.axes, traced),
        flops=2 * m * n * k * (4 if is_complex else 1) * copies,
        compute=compute,
        comm=comm_options_text(spec),
        layout="{} @ {} -> {}".format(*spec.distributions) if spec.distributions else "",
        line=line,
        extents=(whole_m, k, whole_n),
        local_extents=(*a.shape[:: -1 if spec.transpose_a else 1], b.shape[0 if spec.transpose_b else 1]),
        ndevices=group.ngroups * group.nranks,
        placement=shards.placement(spec, outside, dims),
        chunks=1 if call is None else forms.chunks_of(call),
    )


def _decided(decision: decide.Decision, mesh: MeshAxes, axes: Dim, note: str = "") -> dict[str, Any]:
    """Returns the fields of a row that a decision about a call over these axes gives. `note`: what its reason adds."""
    algorithm, workspace = decision.facts()
    return {
        "implementation": decision.implementation,
        "why": f"{decision.why}; {note}" if note else decision.why,
        "algorithm": algorithm,
        "workspace": workspace,
        "bytes_moved": sum(each.nbytes for each in decision.transfers),
        "transfers": decision.links,
        "mesh": mesh,
        "processes": process_barrier.met_processes(mesh, axes),
    }


def grouped_row(spec: GroupedSpec, avals: Sequence[Any], line: str, count: int) -> Row:
    """Returns the row of a product of groups of rows (`ragged_dot`). `avals`: the types of x, w, bounds and the result.
    `flops` counts all rows, also rows outside of the groups; on a mesh, of all devices together."""
    x, w, bounds, d = avals
    with naming(spec.function + f" at {line}" * bool(line)):
        decision = decide.grouped(spec, avals, decide.here(spec.mesh, spec.experts))
    groups, (_, m, k), n, ndevices = (bounds.shape[1] - 1) // spec.nranks, x.shape, d.shape[-1], shards.mesh_size(x)
    whole, repeats = spec.whole or (groups, m, k, n), 1 if spec.whole or not x.sharding.mesh.manual_axes else ndevices
    *global_shapes, whole_extents = shards.grouped_sizes(spec, *whole)
    *local_shapes, local_extents = shards.grouped_sizes(spec, groups, m, k, n)
    return Row(
        operation="ragged_dot",
        count=count,
        pattern="experts" if spec.experts else "split" if spec.whole else "local",
        groups=f"{whole[0]} of rows" + (f", on {spec.nranks} ranks over {spec.experts}" if spec.experts else ""),
        global_shapes=tuple(global_shapes),
        local_shapes=tuple(local_shapes),
        dtypes=f"{x.dtype.name} x {w.dtype.name} -> {d.dtype.name}",
        accumulator=accumulator(x.dtype).name,
        **spec.level.option,
        epilog="NONE",
        **_decided(decision, spec.mesh, spec.experts),
        flops=2 * math.prod(whole[1:]) * d.shape[0] * (4 if jax.numpy.iscomplexobj(d) else 1) * repeats,
        line=line,
        extents=whole_extents,
        local_extents=local_extents,
        ndevices=math.prod(dict(spec.mesh).values()) if spec.mesh else ndevices,
        placement=shards.grouped_placement(spec),
    )


def _scales(spec: MatmulSpec) -> str:
    scales = f", scales {spec.scales.a} x {spec.scales.b}" if spec.scales.are_of_factors else ""
    return scales if spec.aux_dtype in (None, spec.out_dtype) else f"{scales}, gelu_aux {np.dtype(spec.aux_dtype).name}"


def _row_of_xla(eqn: Any, line: str, count: int, left: str = "") -> Row:
    """Returns the row of a product that JAX computes. If `fuse` has left it, `left` is the reason, and the pattern is
    "-". Otherwise XLA partitions a `dot_general` of global arrays, and the pattern is "XLA's"."""
    a, b, d = (v.aval for v in (*eqn.invars[:2], *eqn.outvars))
    (contracted, of_k), (batch, of_batch), groups = dimension_numbers(eqn)
    k, batches = (math.prod(a.shape[i] for i in dims) for dims in (contracted, batch))
    rows = math.prod(n for i, n in enumerate(a.shape) if i not in contracted and i not in batch)
    cols = math.prod(n for i, n in enumerate(b.shape) if i not in (*of_k, *of_batch, *groups))
    name = eqn.primitive.name.removesuffix("_wrapper")
    algorithm = "jax.nn.scaled_matmul" if name == "scaled_matmul" else f"lax.{name}"
    why = "XLA partitions a product where no call can run on the shards (docs/matmul.md)"
    return Row(
        operation=name if left else "matmul",
        count=count,
        pattern="-" if left else "XLA's",
        groups="",
        global_shapes=tuple(tuple(x.shape) for x in (a, b, d)),
        local_shapes=tuple(shards.local_shape(x) for x in (a, b, d)),
        dtypes=f"{a.dtype.name} x {b.dtype.name} -> {d.dtype.name}",
        accumulator=d.dtype.name,
        **levels.ANY_ORDER.option,
        epilog="NONE",
        implementation="xla",
        why=f"not fused: {left}" if left else why,
        algorithm=algorithm if left else f"{algorithm}, and collectives as XLA chooses them",
        flops=2 * rows * k * cols * batches * (4 if jax.numpy.iscomplexobj(d) else 1),
        line=line,
        extents=(rows, k, cols),
        ndevices=max(shards.mesh_size(x) for x in (a, b, d)),
    )


def _communication_row(
    eqn: Any, line: str, count: int, scopes: tuple[str, ...], over: Any, constraint: Any = None
) -> Iterator[Row]:
    """Yields the row of a collective over the mesh `over`, or none if a device receives nothing. Its scope in
    `_SCOPES`, or else its kind in `_COMMUNICATES`, gives the reason. If the result's mesh has automatic axes, XLA
    decides what moves. Then only reshards of jaxmp have a row, and constraints right after another one,
    `constraint`."""
    x, name = eqn.invars[0].aval, _collective_name(eqn)
    if name != _CONSTRAINT and AxisType.Auto in eqn.outvars[0].aval.sharding.mesh.axis_types:
        return  # XLA's partitioner decides what moves
    mesh, algorithm = over.shape, f"lax.{name}"
    local, result = (shards.local_shape(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    if name in ("reshard", _CONSTRAINT):
        algorithm = "jax.sharding.reshard"
        found = shards.resharding(eqn, constraint)
        if found is None:
            return
        have, want = found
        with naming("explain"):
            before, after = (shardings.as_dims("x", sharding.spec, x.ndim) for sharding in (have, want))
        local = tuple(have.shard_shape(x.shape)) if not have.mesh.empty else tuple(x.shape)
        moved, operation = moves.received(x.shape, before, after, mesh), moves.kind_of(before, after, mesh)
        axes = tuple(dict.fromkeys(itertools.chain(*(sorted({*a} ^ {*b}) for a, b in zip(before, after, strict=True)))))
        if operation == "collective_permute":  # a device that receives anything receives its whole shard
            axes = moves.permuted(before, after, mesh)
            moved = math.prod(local) if axes else 0
    else:
        axes = eqn.params.get("axis_name") or eqn.params.get("axes") or ()
        axes = (axes,) if isinstance(axes, str) else axes
        p, held, made = math.prod(mesh.get(axis, 1) for axis in axes), math.prod(local), math.prod(result)
        operation, moved = {
            "psum": ("all_reduce", 2 * held * (p - 1) // p),
            "pmax": ("all_reduce", 2 * held * (p - 1) // p),
            "all_to_all": ("all_to_all", held * (p - 1) // p),
            "reduce_scatter": ("reduce_scatter", held - made),
        }.get(name, ("all_gather", made - held))
    if moved <= 0:
        return
    is_sum = operation in ("all_reduce", "reduce_scatter")
    is_widened = is_sum and jax_compat.default_platform() == "cpu" and wire.is_widened(x.dtype)
    nbytes = moved * (4 if is_widened else x.dtype.itemsize)
    path, is_of_gather = "/".join(scopes), name == "reduce_scatter"
    scoped = [why for scope, why in _SCOPES.items() if scope in path and (scope == ragged.SCOPE or not is_of_gather)]
    yield Row(
        operation=operation,
        count=count,
        pattern="-",
        groups=str(axes),
        global_shapes=(tuple(eqn.outvars[0].aval.shape),),
        local_shapes=(local,),
        dtypes=x.dtype.name,
        accumulator=x.dtype.name if is_sum else "",
        implementation="xla",
        why=scoped[0] if scoped else _COMMUNICATES[name],
        algorithm=algorithm,
        bytes_moved=nbytes,
        line=line,
        ndevices=math.prod(mesh.values()),
        transfers=(Transfer.over(mesh, axes, nbytes, operation),),
    )
