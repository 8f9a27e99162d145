"""Which of m, n and k each dimension of an operand or result covers, and the extents computed from shard shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxmp._src.core.contraction.contraction import Contraction
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.process_grid import Distributed, relu_aux_bytes
from jaxmp._src.core.spec.refusal import InvalidOperands, InvalidValue
from jaxmp._src.platform.runtime.types import Shape

if TYPE_CHECKING:
    from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec


class Span(NamedTuple):
    """One dimension of an array, in extents of the product: each element stands for `size` elements of m, n or k."""

    dim: str
    size: int = 1


_M, _N, _K = map(Span, "mnk")
# By name; `spans` has a, b and their scales. A relu mask is packed into bytes. Scalars have no dimension.
SPANS = {
    "c": (_M, _N),
    "bias": (_N,),
    "d": (_M, _N),
    "relu_aux": (_M, Span("n", 8)),
    "gelu_aux": (_M, _N),
    "drelu_bgrad": (_N,),
    "dgelu_bgrad": (_N,),
    "bgrada": (_M,),
    "bgradb": (_N,),
    "d_out_scale": (_M, Span("n", 16)),  # MXFP8: 32
}


def spans(spec: MatmulSpec, name: str) -> tuple[Span, ...]:
    """Returns what each dimension of the operand or result `name` covers, in the stored order (for a and b as the flags
    say), without batch dimensions. A scale of rows has one dimension, a scale of blocks two; a scalar, also a scale of
    the whole tensor, has none."""
    if name == "a":
        return (_K, _M) if spec.transpose_a else (_M, _K)
    if name == "b":
        return (_N, _K) if spec.transpose_b else (_K, _N)
    if name not in ("scale_a", "scale_b"):
        return SPANS.get(name, ())
    mode, outer = spec.scales.of(name), "m" if name == "scale_a" else "n"
    if low_precision.is_of_tensor(mode):
        return ()
    if mode == low_precision.OUTER_VEC:
        return (Span(outer),)
    block = low_precision.BLOCK[mode]
    return Span(outer, block if mode == low_precision.BLK128 else 1), Span("k", block)


@dataclasses.dataclass(frozen=True)
class Extents:
    """Extents of one call. `m`, `n`, `k`: the product that one communicator computes. `d`: the rows and columns of each
    rank's result. `local`: (rows of op(A), k of op(A), k of op(B), columns of op(B)) of each rank's operands."""

    m: int
    n: int
    k: int
    d: tuple[int, int]
    local: tuple[int, int, int, int]


def extents(spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> Extents:
    """Computes the extents of a call from the local shapes of the stored A and B."""
    return _extents(spec.contraction, spec.group, tuple(a_shape), tuple(b_shape), spec.distributions)


@functools.lru_cache(maxsize=4096)
def _extents(
    product: Contraction,
    group: Group,
    a_shape: Shape,
    b_shape: Shape,
    distributions: tuple[Distributed, Distributed, Distributed] | None,
) -> Extents:
    """Computes `extents`; for block-cyclic shards m, n, k and d follow from the `distributions` alone."""
    held = [dict(zip(indices, shape, strict=True)) for indices, shape in ((product.a, a_shape), (product.b, b_shape))]
    local = held[0]["m"], held[0]["k"], held[1]["k"], held[1]["n"]
    if distributions:
        a, _, whole = distributions
        return Extents(*whole.shape, a.shape[product.a.index("k")], whole.local_shape, local)
    (rows, k, _, cols), size, sharded = local, group.size, product.sharded
    m, n, k = rows * size(sharded("a", "m")), cols * size(sharded("b", "n")), k * size(sharded("a", "k"))
    return Extents(m, n, k, (_of_output(product, group, "m", rows), _of_output(product, group, "n", cols)), local)


def _of_output(product: Contraction, group: Group, index: str, extent: int) -> int:
    """Returns the extent along "m" or "n" of a rank's d, if the operand that has this index has `extent` there."""
    of_operand, of_d = (group.size(product.sharded(x, index)) for x in ("a" if index == "m" else "b", "d"))
    return extent if of_operand == of_d else extent * of_operand // of_d


def output_rows(spec: MatmulSpec, rows: int) -> int:
    """Returns the number of rows of D that each rank holds if its op(A) has `rows` rows."""
    return _of_output(spec.contraction, spec.group, "m", rows)


AMAXES = ("amax_d", "gelu_aux_amax")


def result_type(name: str, spec: MatmulSpec, found: Extents) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of one rank's result `name`, which is an entry of `spec.output_names`. Batch
    dimensions are left out. `found`: the call's extents. "bgrada" has m of the whole group, because its sums are
    complete on every rank."""
    rows, cols = found.d
    if name in AMAXES:
        return jax.ShapeDtypeStruct((), np.float32)
    if name == "relu_aux":
        return jax.ShapeDtypeStruct((rows, relu_aux_bytes(cols)), np.uint8)
    if name == "gelu_aux":
        return jax.ShapeDtypeStruct(found.d, spec.aux_dtype or spec.out_dtype)
    if name == "d_out_scale":
        mode = spec.scales.d_out
        return jax.ShapeDtypeStruct((rows, cols // low_precision.BLOCK[mode]), low_precision.scale_dtype(mode))
    if name == "d":
        return jax.ShapeDtypeStruct(found.d, spec.out_dtype)
    return jax.ShapeDtypeStruct((found.m if name == "bgrada" else cols,), spec.out_dtype)  # the sums are complete


def operations(spec: MatmulSpec, a_shape: Shape, b_shape: Shape) -> int:
    """Returns 2 m n k of one communicator's product, computed from the local shapes of the stored A and B."""
    found = extents(spec, a_shape, b_shape)
    return 2 * found.m * found.n * found.k


def axes_text(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


# Checks -----------------------------------------------------------------------------------------------------------


def check_local_shapes(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, *, takes_transposed: bool = True) -> Extents:
    """Returns a call's extents. Raises ValueError if the shapes of the stored shards do not fit each other or the
    pattern: k of a and b differ, the ranks of a reduce-scatter do not divide the rows, the grid does not divide d with
    transposed operands, or block-cyclic shards are not as large as the largest part. `takes_transposed`: the message
    may advise `transpose_a` and `transpose_b`."""
    found = extents(spec, a_shape, b_shape)
    if spec.distributions:
        for argument, shape, matrix in (("a", a_shape, spec.distributions[0]), ("b", b_shape, spec.distributions[1])):
            if tuple(shape) != matrix.local_shape:
                raise InvalidValue(
                    f"{argument} must have shape {matrix.local_shape} on each device, the largest part of "
                    f"{matrix}, got {tuple(shape)}"
                )
        return found
    rows, k_a, k_b, cols = found.local
    if spec.contraction.is_grid:
        nrow, ncol = spec.group.shape
        for what, extent, parts, is_moved in (
            ("rows", rows * ncol, nrow, spec.transpose_a),
            ("columns", cols * nrow, ncol, spec.transpose_b),
        ):
            if is_moved and extent % parts:
                raise InvalidValue(
                    f"the result has {extent} {what}, which the {nrow}x{ncol} grid splits into {parts} parts; "
                    f"pad them to a multiple of {parts}"
                )
        k_a *= nrow if spec.transpose_a else ncol
        k_b *= ncol if spec.transpose_b else nrow
    if k_a != k_b:
        where = f"shapes {tuple(a_shape)}, {tuple(b_shape)}" + (" per device" if spec.group.nranks > 1 else "")
        remedy = _remedy(spec, a_shape, b_shape, takes_transposed)
        raise InvalidOperands(f"{{b}} has k={k_b} but {{a}} has k={k_a} ({where}); {remedy}")
    p = spec.group.nranks
    if spec.contraction.scatters and rows % p:
        raise InvalidValue(
            f"{{a}} has {rows} rows, which the {p} ranks of axis "
            f"{axes_text(spec.group.row_axes)} do not divide (shape per device {tuple(a_shape)}); pad the "
            f"rows to a multiple of {p}"
        )
    return found


def _remedy(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, takes_transposed: bool) -> str:
    """Returns the advice for operands with different k: the transposition that may make k equal, if there is one, else
    a text that says only that k must be equal."""
    k = extents(spec, a_shape, b_shape).local[1]
    if b_shape[-1] == k and not spec.transpose_b:
        return (
            "pass transpose_b=True if {b} is stored (n, k)" if takes_transposed else "pass {b}.T if it is stored (n, k)"
        )
    if spec.transpose_b and b_shape[0] == k:
        return "pass transpose_b=False if {b} is stored (k, n)"
    if takes_transposed and not spec.transpose_a and a_shape[0] in b_shape:
        return "pass transpose_a=True if {a} is stored (k, m)"
    return "the contracted extents must be equal"
