"""Checks of the shapes of what one device holds of a product."""

from __future__ import annotations

from jaxmp._src.runtime.types import Shape
from jaxmp._src.spec.matmul_spec import MatmulSpec, axes_text, extents
from jaxmp._src.spec.refusal import InvalidValue


def check_local_shapes(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, *, takes_transposed: bool = True) -> None:
    """Raise ValueError where local shards do not fit the pattern; `takes_transposed`: as in `Request`."""
    if spec.distributions:
        for argument, shape, matrix in (("a", a_shape, spec.distributions[0]), ("b", b_shape, spec.distributions[1])):
            if tuple(shape) != matrix.local_shape:
                raise InvalidValue(
                    f"{argument} must have shape {matrix.local_shape} on each device, the largest part of "
                    f"{matrix}, got {tuple(shape)}"
                )
        return
    rows, k_a, k_b, cols = extents(spec, a_shape, b_shape).local
    if spec.contraction.is_grid:
        nrow, ncol = spec.group.shape
        _check_grid(spec, rows, cols, nrow, ncol)
        k_a *= nrow if spec.transpose_a else ncol
        k_b *= ncol if spec.transpose_b else nrow
    if k_a != k_b:
        where = f"shapes {tuple(a_shape)}, {tuple(b_shape)}" + (" per device" if spec.group.nranks > 1 else "")
        hint = _transpose_hint(spec, a_shape, b_shape) if takes_transposed else _as_stored_hint(k_a, b_shape)
        raise InvalidValue(f"{{b}} has k={k_b} but {{a}} has k={k_a} ({where}); {hint}")
    p = spec.group.nranks
    if spec.contraction.scatters and rows % p:
        raise InvalidValue(
            f"{{a}} has {rows} rows, which the {p} ranks of axis "
            f"{axes_text(spec.group.row_axes)} do not divide (shape per device {tuple(a_shape)}); pad the "
            f"rows to a multiple of {p}"
        )


def _check_grid(spec: MatmulSpec, rows: int, cols: int, nrow: int, ncol: int) -> None:
    for what, extent, parts, is_moved in (
        ("rows", rows * ncol, nrow, spec.transpose_a),
        ("columns", cols * nrow, ncol, spec.transpose_b),
    ):
        if is_moved and extent % parts:
            raise InvalidValue(
                f"the result has {extent} {what}, which the {nrow}x{ncol} grid splits into {parts} parts; "
                f"pad them to a multiple of {parts}"
            )


def _as_stored_hint(k: int, b_shape: Shape) -> str:
    return "pass {b}.T if it is stored (n, k)" if b_shape[-1] == k else "the contracted extents must be equal"


def _transpose_hint(spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> str:
    k = extents(spec, a_shape, b_shape).local[1]
    if b_shape[-1] == k and not spec.transpose_b:
        return "pass transpose_b=True if {b} is stored (n, k)"
    if spec.transpose_b and b_shape[0] == k:
        return "pass transpose_b=False if {b} is stored (k, n)"
    if not spec.transpose_a and a_shape[0] in b_shape:
        return "pass transpose_a=True if {a} is stored (k, m)"
    return "the contracted extents must be equal"
