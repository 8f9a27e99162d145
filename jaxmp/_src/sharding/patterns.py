"""Operand shardings to a pattern: which axes form the group, what each shard holds, what comes out.

A dimension's sharding is a tuple of axis names, slowest first. With rows of op(a) on R, its contraction on K,
columns of op(b) on C, and the result asked for as (R', C'):

    K = G,  R' = R + G          reduce_scatter over G
    K = G,  C' = C + G          the same, computed transposed
    K = G,  R' = R, C' = C      all_reduce over G
    R = R' + G,  G within C     all_gather of a's rows over G
    C = C' + G,  G within R     the same, computed transposed
    every matrix on (X, Y)      grid
    K of b = X within R, K of a = Y within C, X or Y may be (), R = R', C = C'
                                grid as well, in which b is gathered along k over X, and a over Y
    R = R', C = C'              local

`layouts` finds other shardings where no line fits.

Worked example: mesh (data=2, model=4), a P("data", "model"), b P("model", None), result P("data", None):
R = (data), K = (model), so all_reduce over model, in two groups, one per index of data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxmp._src.runtime.types import Shape
from jaxmp._src.spec.caller import operand_name
from jaxmp._src.spec.matmul_spec import Pattern, axes_text

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
# A matrix of a call: its name for people, its sharding or None, its global shape.
Sharded = tuple[str, Dims | None, Shape]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call does.

    `dimension` is the row dimension of a that is gathered or scattered; `a`, `b`, `out` are the shardings as the call
    takes and gives them.
    """

    pattern: Pattern
    row_axes: Dim = ()
    col_axes: Dim = ()
    is_transposed: bool = False
    dimension: int = 0
    a: Dims = ()
    b: Dims = ()
    out: Dims = ()

    @property
    def gathers_k(self) -> bool:
        """Whether an operand is gathered along k by ranks of one axis of a grid."""
        return self.pattern == Pattern.GRID and not (self.row_axes and self.col_axes)

    def outside_group(self, dim: Dim) -> Dim:
        """The axes of `dim` that are not the group's."""
        return tuple(axis for axis in dim if axis not in self.row_axes + self.col_axes)


LOCAL_PLAN = Plan(Pattern.LOCAL)


def to_dims(name: str, argument: str, spec: PartitionSpec, ndim: int, mesh: Mapping[str, int] | None) -> Dims:
    """A user's PartitionSpec as `as_dims`; raises where axes are not in the mesh or used twice."""
    if len(spec) > ndim:
        raise ValueError(f"{name}: the sharding of {argument}, {spec}, has {len(spec)} entries for {ndim} dimensions")
    used: set[str] = set()
    for entry in spec:
        if entry is not None and not isinstance(entry, str | tuple):
            raise ValueError(
                f"{name}: the sharding of {argument}, {spec}, may hold axis names, tuples of them and None"
            )
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if mesh is not None and axis not in mesh:
                raise ValueError(f"{name}: the sharding of {argument} names axis {axis!r}, the mesh has {tuple(mesh)}")
            if axis in used:
                raise ValueError(f"{name}: the sharding of {argument} uses axis {axis!r} for two dimensions")
            used.add(axis)
    return as_dims(name, argument, spec, ndim)


def as_dims(name: str, argument: str, spec: PartitionSpec, ndim: int) -> Dims:
    """A PartitionSpec as one tuple of axis names per dimension."""
    for kind in ("unreduced", "reduced"):
        if axes := getattr(spec, kind, None):
            raise NotImplementedError(
                f"{name}: the sharding of {argument}, {spec}, has {kind} axes {sorted(axes)}, which no call takes or "
                "gives; pass another (jax.sharding.reshard)"
            )
    dims: list[Dim] = [()] * ndim
    for i, entry in enumerate(spec):
        dims[i] = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return tuple(dims)


def check_dims(name: str, argument: str, dims: Dims, shape: Shape, mesh: Mapping[str, int]) -> None:
    """Raise where an axis is used twice, or axes do not divide the shape."""
    used = sum(dims, ())
    if len(set(used)) != len(used):
        axis = next(axis for axis in used if used.count(axis) > 1)
        raise ValueError(f"{name}: the sharding of {argument} uses axis {axis!r} for two dimensions")
    for i, (dim, extent) in enumerate(zip(dims, shape, strict=True)):
        size = math.prod(map(mesh.__getitem__, dim))
        if extent % size:
            is_number = isinstance(extent, int)
            remedy = f"pad it to {-(-extent // size) * size}" if is_number else f"export for an extent of {size} * n"
            raise ValueError(
                f"{name}: dimension {i} of {argument} has extent {extent}, which axis {axes_text(dim)} of size {size} "
                f"does not divide (global shape {tuple(shape)}); {remedy}, or shard it differently"
            )


def check_given(name: str, given: Sequence[Sharded], mesh: Mapping[str, int]) -> None:
    """`check_dims` of what a user, or the operands' types, said; a sharding that nobody gave is None."""
    for argument, dims, shape in given:
        if dims is not None:
            check_dims(name, argument, dims, shape, mesh)


def find_plan(
    a: Dims, b: Dims, out: Dims, transpose_a: bool, transpose_b: bool, *, gathers_k: bool = False
) -> Plan | None:
    """The pattern for operands as stored, or None where one call does not give this result of them; with `gathers_k`
    also a grid that gathers operands along k."""
    if len(a) == 2 and a == b == out and a[0] and a[1]:
        return Plan(Pattern.GRID, a[0], a[1], a=a, b=b, out=out)
    if gathers_k and (grid := _find_grid(a, b, out)):
        return grid
    *rows, k_a = (*a[:-2], a[-1], a[-2]) if transpose_a else a
    k_b, cols = (b[1], b[0]) if transpose_b else b
    if k_a and k_b and k_a != k_b:
        return None
    contracted = k_a or k_b
    rows, cols = _slice_replicated(rows, cols, out, contracted)
    lead, last = tuple(rows[:-1]), rows[-1]
    a = (*lead, contracted, last) if transpose_a else (*rows, contracted)
    b = (cols, contracted) if transpose_b else (contracted, cols)
    used = [sum(dims, ()) for dims in (a, b)]
    found = (_find_contracted if contracted else _find_gathered)(rows, cols, out, contracted)
    if found is None or any(len(set(axes)) != len(axes) for axes in used):
        return None
    return dataclasses.replace(found, a=a, b=b, out=out)


def default_result(name: str, rows: Dims, cols: Dims, contracted: Sequence[tuple[Dim, Dim]]) -> Dims:
    """The sharding of a result that was not asked for, as `lax.dot_general` has it: that of the free dimensions.

    `contracted` are the shardings of each contracted dimension in a and in b. Raises ValueError where the result is
    ambiguous.
    """
    a, b = operand_name(name, "a"), operand_name(name, "b")
    for k_a, k_b in contracted:
        if k_a and k_b:
            both = axes_text(k_a) if k_a == k_b else f"{axes_text(k_a)} in {a} and {axes_text(k_b)} in {b}"
            raise ValueError(
                f"{name}: the contraction is sharded over axis {both} and it is ambiguous how the result should be "
                f"sharded; pass out_sharding (without {axes_text(k_a)} to all-reduce, with it on the rows to "
                "reduce-scatter)"
            )
    shared = [axis for dim in rows for axis in dim if any(axis in other for other in cols)]
    if shared:
        raise ValueError(
            f"{name}: rows of {a} and columns of {b} are both sharded over axis {shared[0]!r}; pass out_sharding, "
            f"without {shared[0]!r} on the rows to gather {a}, or without it on the columns to gather {b}"
        )
    return (*rows, *cols)


def _find_grid(a: Dims, b: Dims, out: Dims) -> Plan | None:
    """The grid in which b or a, or both, are gathered along k by ranks that hold other rows, or columns; neither is
    stored transposed."""
    (*rows, k_a), (k_b, cols) = a, b
    if not (k_a or k_b) or (*rows, cols) != out or not set(k_b) <= set(sum(rows, ())) or not set(k_a) <= set(cols):
        return None
    return Plan(Pattern.GRID, k_b, k_a, a=a, b=b, out=out)


def _slice_replicated(rows: list[Dim], cols: Dim, out: Dims, contracted: Dim) -> tuple[list[Dim], Dim]:
    """Where the result is finer than an operand, each device takes its own part of it: no communication."""

    def finer(have: Dim, want: Dim, other: Dims) -> Dim:
        extra = want[len(have) :] if want[: len(have)] == have else ()
        taken = set(contracted).union(*other)
        return have if taken.intersection(extra) else have + extra

    used = [tuple(r for j, r in enumerate(rows) if j != i) for i in range(len(rows))]
    rows = [finer(dim, want, others) for dim, want, others in zip(rows, out[:-1], used, strict=True)]
    return rows, finer(cols, out[-1], ())


def _suffix(longer: Dim, shorter: Dim) -> Dim | None:
    """What `longer` adds behind `shorter`, or None."""
    return longer[len(shorter) :] if longer[: len(shorter)] == shorter else None


def _changed(rows: list[Dim], out: Dims) -> list[int]:
    return [i for i, (dim, want) in enumerate(zip(rows, out[:-1], strict=True)) if dim != want]


def _find_contracted(rows: list[Dim], cols: Dim, out: Dims, group: Dim) -> Plan | None:
    changed = _changed(rows, out)
    if not changed and cols == out[-1]:
        return Plan(Pattern.ALL_REDUCE, group)
    if len(changed) == 1 and cols == out[-1] and _suffix(out[changed[0]], rows[changed[0]]) == group:
        return Plan(Pattern.REDUCE_SCATTER, group, dimension=changed[0])
    if not changed and _suffix(out[-1], cols) == group:
        return Plan(Pattern.REDUCE_SCATTER, group, is_transposed=True)
    return None


def _find_gathered(rows: list[Dim], cols: Dim, out: Dims, _: Dim) -> Plan | None:
    changed = _changed(rows, out)
    if not changed and cols == out[-1]:
        return Plan(Pattern.LOCAL)
    if len(changed) == 1 and cols == out[-1]:
        group = _suffix(rows[changed[0]], out[changed[0]])
        if group and set(group) <= set(cols):
            return Plan(Pattern.ALL_GATHER, group, dimension=changed[0])
    if not changed:
        group = _suffix(cols, out[-1])
        if group and set(group) <= {axis for dim in rows for axis in dim}:
            return Plan(Pattern.ALL_GATHER, group, is_transposed=True)
    return None
