"""Checks of the shapes of what one device holds of a product."""

from __future__ import annotations

from jaxmp._src.runtime.types import Shape
from jaxmp._src.spec.caller import Caller, operand_name
from jaxmp._src.spec.matmul_spec import MatmulSpec, axes_text, extents


def check_local_shapes(name: str, spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> None:
    """Raise ValueError where local shards do not fit the pattern."""
    if spec.distributions:
        for argument, shape, matrix in (("a", a_shape, spec.distributions[0]), ("b", b_shape, spec.distributions[1])):
            if tuple(shape) != matrix.local_shape:
                raise ValueError(
                    f"{name}: {argument} must have shape {matrix.local_shape} on each device, the largest part of "
                    f"{matrix}, got {tuple(shape)}"
                )
        return
    rows, k_a, k_b, cols = extents(spec, a_shape, b_shape).local
    if spec.contraction.is_grid:
        nrow, ncol = spec.group.shape
        _check_grid(name, spec, rows, cols, nrow, ncol)
        k_a *= nrow if spec.transpose_a else ncol
        k_b *= ncol if spec.transpose_b else nrow
    if k_a != k_b:
        where = f"shapes {tuple(a_shape)}, {tuple(b_shape)}" + (" per device" if spec.group.nranks > 1 else "")
        raise ValueError(
            f"{name}: {operand_name(name, 'b')} has k={k_b} but {operand_name(name, 'a')} has k={k_a} ({where}); "
            f"{_transpose_hint(name, spec, a_shape, b_shape)}"
        )
    p = spec.group.nranks
    if spec.contraction.scatters and rows % p:
        raise ValueError(
            f"{name}: {operand_name(name, 'a')} has {rows} rows, which the {p} ranks of axis "
            f"{axes_text(spec.group.row_axes)} do not divide (shape per device {tuple(a_shape)}); pad the "
            f"rows to a multiple of {p}"
        )


def _check_grid(name: str, spec: MatmulSpec, rows: int, cols: int, nrow: int, ncol: int) -> None:
    for what, extent, parts, is_moved in (
        ("rows", rows * ncol, nrow, spec.transpose_a),
        ("columns", cols * nrow, ncol, spec.transpose_b),
    ):
        if is_moved and extent % parts:
            raise ValueError(
                f"{name}: the result has {extent} {what}, which the {nrow}x{ncol} grid splits into {parts} parts; "
                f"pad them to a multiple of {parts}"
            )


def _transpose_hint(name: str, spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> str:
    a, b = operand_name(name, "a"), operand_name(name, "b")
    k = extents(spec, a_shape, b_shape).local[1]
    if isinstance(name, Caller) and not name.takes_transposed:
        return f"pass {b}.T if it is stored (n, k)" if b_shape[-1] == k else "the contracted extents must be equal"
    if b_shape[-1] == k and not spec.transpose_b:
        return f"pass transpose_b=True if {b} is stored (n, k)"
    if spec.transpose_b and b_shape[0] == k:
        return f"pass transpose_b=False if {b} is stored (k, n)"
    if not spec.transpose_a and a_shape[0] in b_shape:
        return f"pass transpose_a=True if {a} is stored (k, m)"
    return "the contracted extents must be equal"
