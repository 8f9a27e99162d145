"""Every sharding of a product that one call computes on a mesh of one or two axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmp._src.advise.reference import factors
from jaxmp._src.contraction import contraction, planner
from jaxmp._src.contraction.contraction import Dims, Layout
from jaxmp._src.explain import cost
from jaxmp._src.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.sharding import shardings
from jaxmp._src.spec.matmul_spec import Group, MatmulSpec, accumulator

# Name, and shardings of a (m, k), b (k, n) and d (m, n) on a mesh of (y, x), or of x alone. The y-th part of the rows
# is a group of its own, except on the grid.
_ROWS = (
    ("rows in groups, columns", P("y", None), P(None, "x"), P("y", "x")),
    ("all-gather", P(("y", "x"), None), P(None, "x"), P("y", "x")),
    ("all-gather of columns", P(("y", "x"), None), P(None, "x"), P(("y", "x"), None)),
    ("reduce-scatter", P("y", "x"), P("x", None), P(("y", "x"), None)),
    ("reduce-scatter of columns", P("y", "x"), P("x", None), P("y", "x")),
    ("all-reduce", P("y", "x"), P("x", None), P("y", None)),
    ("grid", P("y", "x"), P("y", "x"), P("y", "x")),
)
_LINE = (
    ("gathers weights (FSDP)", P("x", None), P("x", None), P("x", None)),
    ("local rows", P("x", None), P(None, None), P("x", None)),
    ("local columns", P(None, None), P(None, "x"), P(None, "x")),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One sharding: its name, mesh, shardings, pattern, bytes that a device holds of a, b and d, bytes that its call
    reads and writes of them, and its transfers."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    shardings: tuple[P, P, P]
    pattern: str
    held: int
    traffic: int
    transfers: tuple[Transfer, ...]


def candidates(m: int, k: int, n: int, devices: int, dtype: np.dtype, out: np.dtype) -> Iterator[Candidate]:
    """Those whose axes divide the extents, in no order."""
    for name, *specs in _LINE:
        yield from candidate(name, (("x", devices),), tuple(specs), (m, k, n), dtype, out)
    for size in factors(devices):
        if size == 1 and devices > 1:  # x does nothing: the local products above
            continue
        for name, *specs in _ROWS:
            if size == devices and name in ("grid", "rows in groups, columns"):  # no y: not a grid, or local columns
                continue
            mesh = (("y", devices // size), ("x", size))
            yield from candidate(name, mesh, tuple(specs), (m, k, n), dtype, out)


def time_of(hardware: Hardware, each: Candidate, flops: int, devices: int, dtype: np.dtype) -> CallTime:
    """The predicted time of a candidate, whose operations are `flops` on all devices together."""
    transfers = () if hardware.is_shared else each.transfers  # read in place, as `explain` counts them
    return call_time(
        hardware,
        flops=flops,
        kind=kind_of(dtype.name),
        ndevices=devices,
        nbytes=each.traffic + sum(transfer.nbytes for transfer in transfers),
        transfers=transfers,
        is_fused=True,
    )


def flops_of(m: int, k: int, n: int, dtype: np.dtype) -> int:
    """Operations of a product; a complex one counts 4 real ones."""
    return 2 * m * k * n * (4 if np.issubdtype(dtype, np.complexfloating) else 1)


def candidate(
    name: str,
    mesh: tuple[tuple[str, int], ...],
    specs: tuple[P, ...],
    extents: tuple[int, int, int],
    dtype: np.dtype,
    out: np.dtype,
    dtype_b: np.dtype | None = None,
) -> Iterator[Candidate]:
    """The candidate, or nothing where an axis does not divide an extent. `dtype_b` is b's type, if not that of a."""
    (m, k, n), sizes = extents, dict(mesh)
    mesh = tuple((axis, size) for axis, size in mesh if size > 1)
    specs = tuple(_without_ones(spec, sizes) for spec in specs)
    of_a, of_b, of_d = dims = [shardings.as_dims("operand", spec, 2) for spec in specs]
    shapes = [_shard(shape, dim, sizes) for shape, dim in zip(((m, k), (k, n), (m, n)), dims, strict=True)]
    given = contraction.of_matrices(2, Layout(of_a, of_b, of_d))
    itemsizes = dtype.itemsize, dtype.itemsize, out.itemsize, accumulator(dtype).itemsize
    terms = planner.Terms(tuple(zip("mkn", extents, strict=True)), mesh, itemsizes, keeps_result=True, gathers_k=True)
    plan = planner.as_given(given, gathers_k=True)
    # Where a gather along k costs more than other ways, operands are moved.
    if None in shapes or plan is None or (plan.gathers_k and planner.cheapest(given, terms) != given):
        return
    a, b, d = (shape for shape in shapes if shape is not None)
    spec = MatmulSpec(out, Group(plan.pattern, mesh, plan.row_axes, plan.col_axes))
    other = dtype if dtype_b is None else dtype_b
    left, right = jax.ShapeDtypeStruct(a, dtype), jax.ShapeDtypeStruct(b, other)
    if plan.is_transposed:  # the call computes the transpose
        left, right = jax.ShapeDtypeStruct(b[::-1], other), jax.ShapeDtypeStruct(a[::-1], dtype)
    moved = cost.transfers(spec, left, right, "cublasmp")
    held = math.prod(a) * dtype.itemsize + math.prod(b) * other.itemsize + math.prod(d) * out.itemsize
    # A transposed call leaves the rounding of its result to what transposes that.
    wider = math.prod(d) * (accumulator(dtype).itemsize - out.itemsize) if plan.is_transposed else 0
    yield Candidate(name, mesh, (specs[0], specs[1], specs[2]), plan.pattern.value, held, held + wider, moved)


def _without_ones(spec: P, sizes: dict[str, int]) -> P:
    """A sharding without the axes of size 1."""
    kept = [tuple(axis for axis in _names(entry) if sizes[axis] > 1) for entry in spec]
    return P(*(names[0] if len(names) == 1 else names or None for names in kept))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _shard(shape: tuple[int, int], dims: Dims, sizes: dict[str, int]) -> tuple[int, int] | None:
    """The shape of a shard, or None where axes do not divide it."""
    counts = [math.prod(sizes[axis] for axis in dim) for dim in dims]
    if any(extent % count for extent, count in zip(shape, counts, strict=True)):
        return None
    return shape[0] // counts[0], shape[1] // counts[1]
