"""The row of `explain` for a product of groups of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.lowering import process_barrier
from jaxmp._src.core.primitive.grouped import GroupedSpec
from jaxmp._src.core.spec.matmul_spec import INTEGERS, accumulator
from jaxmp._src.platform.hardware.call_time import Transfer
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.explain import shards
from jaxmp._src.tools.explain.row import Row


def grouped_row(spec: GroupedSpec, avals: Sequence[Any], line: str = "", count: int = 1) -> Row:
    """The row of operands and a result of these types.

    Its operations are those of all rows, whichever groups they are in; on a mesh those of all devices together. What
    experts read of other ranks is what they do where the rows of each rank are evenly those of all experts.
    """
    x, w, bounds, d = avals
    (_, m, k), n, ndevices, nranks = x.shape, d.shape[-1], shards.mesh_size(x), spec.nranks
    groups = (bounds.shape[1] - 1) // nranks
    whole_groups, whole_m, whole_k, whole_n = spec.whole or (groups, m, k, n)
    repeats = 1 if spec.whole or not x.sharding.mesh.manual_axes else ndevices
    is_cpu = jax_compat.default_platform() == "cpu"
    is_left = spec.is_global and spec.level.global_order
    is_host = is_cpu and not is_left and spec.may_be_host and x.dtype.name not in INTEGERS
    given = spec.implementation
    by = getattr(given, "__name__", "a function") if callable(given) else "XLA"
    apart = process_barrier.why_apart(spec.mesh, spec.experts, jax_compat.ambient_mesh) if spec.experts else ""
    beside = w if spec.is_contraction else d  # as x, read, or written, on other ranks
    moved = x.shape[0] * m * (k * x.dtype.itemsize + n * beside.dtype.itemsize) * (nranks - 1) // nranks
    shares = not apart or (process_barrier.may_exchange(spec.mesh, jax_compat.ambient_mesh()) and x.shape[0] == 1)
    gathers = bool(spec.experts) and not (is_host and shares)
    if gathers:
        matrices, dtype = (d.shape, accumulator(x.dtype)) if spec.is_contraction else (w.shape, w.dtype)
        moved = math.prod(matrices) * dtype.itemsize * (nranks - 1)
    whole, local = (_shapes(spec, *each) for each in ((whole_groups, whole_m, whole_k, whole_n), (groups, m, k, n)))
    return Row(
        operation="ragged_dot",
        count=count,
        pattern="experts" if spec.experts else "split" if spec.whole else "local",
        groups=f"{whole_groups} of rows" + (f", on {nranks} ranks over {spec.experts}" if spec.experts else ""),
        global_shapes=whole,
        local_shapes=local,
        dtypes=f"{x.dtype.name} x {w.dtype.name} -> {d.dtype.name}",
        accumulator=accumulator(x.dtype).name,
        **spec.level.option,
        epilog="NONE",
        implementation="host" if is_host else "xla" if by == "XLA" else by,
        why=_why(spec, by, is_host=is_host, gathers=gathers, apart=apart, is_left=is_left),
        algorithm="tiles of all groups" if is_host else "lax.ragged_dot_general" if by == "XLA" else by,
        flops=2 * whole_m * whole_k * whole_n * d.shape[0] * (4 if jnp.iscomplexobj(d) else 1) * repeats,
        bytes_moved=moved,
        line=line,
        extents=_extents(spec, whole_m, whole_k, whole_n),
        local_extents=_extents(spec, m, k, n),
        ndevices=ndevices,
        mesh=spec.mesh,
        placement=_placement(spec),
        transfers=(Transfer.over(dict(spec.mesh), spec.experts, moved),) if moved else (),
    )


def _why(spec: GroupedSpec, by: str, *, is_host: bool, gathers: bool, apart: str, is_left: bool) -> str:
    """Who multiplies, and what moves."""
    what = "sums over ranks the matrices of all groups" if spec.is_contraction else "gathers the matrices of all groups"
    beside = f"; each rank {what}" * gathers
    if not is_host:
        where = "where its partitioner chooses the shardings" if is_left else "here"
        return f"{by} multiplies groups of rows {where}{beside}"
    if gathers:
        return f"CPU devices multiply groups of rows{beside}, for {apart}"
    if not spec.experts:
        return "CPU devices multiply groups of rows, each those that it has"
    if apart:
        return f"CPU devices exchange the rows of their groups, for {apart}"
    return "CPU devices of one process read the rows of their groups where they lie"


def _placement(spec: GroupedSpec) -> tuple[tuple[Dim, Dim], ...]:
    """The axes that shard x, w and the result; of matrices those of groups and of columns."""
    if not spec.splits:
        return ()
    axes = dict(spec.splits)
    rows, matrices = (axes["m"], axes["n"]), (axes["g"], axes["n"])
    return ((axes["m"], axes["k"]), *((rows, matrices) if spec.is_contraction else (matrices, rows)))


def _extents(spec: GroupedSpec, m: int, k: int, n: int) -> tuple[int, int, int]:
    return (k, m, n) if spec.is_contraction else (m, k, n)


def _shapes(spec: GroupedSpec, groups: int, m: int, k: int, n: int) -> tuple[tuple[int, ...], ...]:
    if spec.is_contraction:
        return (m, k), (m, n), (groups, k, n)
    return (m, k), (groups, n, k) if spec.is_transposed else (groups, k, n), (m, n)
