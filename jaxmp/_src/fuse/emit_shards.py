"""Products inside shard_map that ranks of a named axis share, as calls of jaxmp.

Dimensions fold into rows, columns and k of matrices. Let g be the operand that is gathered, o the other one. Of the
calls that gather as wanted, the one is taken that copies least:

    g gathered along stored rows, o stored (rows, k)        grid of one column, g is its b: result (of o, of g)
    g gathered along stored columns, o stored (k, columns)  grid of one row, g is its a: result (of g, of o)
    g gathered along its free dimension                     all_gather_matmul: result (of g, of o)

A shard of g may be transposed ahead of a grid, and the result behind a call. FSDP is the first line: x (m, k) times the
gather of w, (k/P, n) or (n/P, k). Gradients of a grid are grids; one of an all-gather gathers anew, beside a call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxmp._src.fuse.products import Operand, Product
from jaxmp._src.ops.collective_matmul import (
    all_gather_matmul,
    block_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxmp._src.spec import epilogs

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """An operand as stored, and folded: (rows, k) if `has_rows_first`, else (k, columns)."""

    stored: jax.Array
    operand: Operand
    folded: jax.Array

    @property
    def has_rows_first(self) -> bool:
        return self.operand.has_rows_first

    @property
    def free(self) -> Dims:
        """Its free extents."""
        return tuple(self.stored.shape[d] for d in self.operand.free)

    def along(self, dimension: int) -> jax.Array:
        """With `dimension` for the folded rows: the others stay in front of them, where they are slower."""
        first = self.operand.free[0]
        if dimension == first or dimension not in self.operand.free:
            return self.folded
        return self.stored.reshape(*self.free, self.folded.shape[-1])


def _matrix(operand: Operand, x: jax.Array) -> _Matrix:
    if not operand.is_flat:
        raise NotImplementedError  # its dimensions do not fold into a matrix, so the product stays JAX's
    rows, k = (math.prod(x.shape[d] for d in dims) for dims in (operand.free, operand.contract))
    return _Matrix(x, operand, x.reshape((rows, k) if operand.has_rows_first else (k, rows)))


# How many elements are copied beside a call (that of an all-gather which gives the result transposed: also by its
# gradient), whether its result has the free dimensions in the order of the product's, and the call.
_Way = tuple[int, bool, Callable[..., Any]]


def call(
    product: Product,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    c: jax.Array | None,
    shared: dict[str, Any],
) -> list[jax.Array]:
    """The results of a product: d, and what its activation is applied to where that is read as well."""
    if product.activation and product.activation not in ("relu", "gelu"):
        raise NotImplementedError("no epilog applies this activation")
    first, second = _matrix(product.x, x), _matrix(product.w, w)
    alpha = 1.0 if product.alpha is None else product.alpha
    shape, ways = _ways(product, first, second)
    _, is_in_order, run = min(ways, key=lambda way: way[0])
    if not is_in_order:
        d = run(**shared, alpha=alpha)
        d = lax.transpose(d, (d.ndim - 1, *range(d.ndim - 1))).reshape(shape)
        return _with_epilog(product, d, bias, c)
    flags: dict[str, Any] = {"alpha": alpha, "epilog": epilogs.for_activation(product.activation, bias is not None)}
    flags["epilog_inputs"] = None if bias is None else {"bias": bias}
    if c is not None:
        flags |= {"beta": 1.0, "c": c}
    if product.preactivation is None:
        return [run(**shared, **flags).reshape(shape)]
    flags["epilog"] = epilogs.RULES[flags["epilog"]].with_aux
    d, more = run(**shared, **flags)
    return [each.reshape(shape) for each in (d, *more.values())]


def _with_epilog(product: Product, d: jax.Array, bias: jax.Array | None, c: jax.Array | None) -> list[jax.Array]:
    """The results of a product whose columns are the rows of its call, which has another bias."""
    if bias is not None:
        d = d + bias.reshape((1,) * (d.ndim - 1) + bias.shape)
    if c is not None:
        d = d + c
    kept = [] if product.preactivation is None else [d]
    return [{None: lambda d: d, "relu": jax.nn.relu, "gelu": jax.nn.gelu}[product.activation](d), *kept]


def _ways(product: Product, first: _Matrix, second: _Matrix) -> tuple[Dims, list[_Way]]:
    """(the shape of the result, the calls that give it)."""
    if product.lhs.gather is not None or product.rhs.gather is not None:
        return _gathering(product, first, second)
    return _reducing(product, first, second)


def _gathering(product: Product, first: _Matrix, second: _Matrix) -> tuple[Dims, list[_Way]]:
    is_first = product.x.gather is not None
    g, o = (first, second) if is_first else (second, first)
    assert g.operand.gather is not None
    gather, axes = g.operand.gather, g.operand.gather.axes
    is_free = gather.dimension in g.operand.free
    extents = [first.free, second.free]
    if is_free:
        i = g.operand.free.index(gather.dimension)
        extents[not is_first] = (*g.free[:i], g.free[i] * lax.axis_size(axes), *g.free[i + 1 :])
    shape = sum(extents, ())
    stored_along = 0 if is_free == g.has_rows_first else 1
    ways: list[_Way] = []
    if gather.dimension in (g.operand.free[:1] + g.operand.contract[:1]):
        along = 1 if not o.has_rows_first else 0
        is_moved = stored_along != along
        matrix = g.folded.T if is_moved else g.folded
        has_rows_first = g.has_rows_first != is_moved
        copied = (g.folded.size if is_moved else 0, math.prod(shape))
        if along == 0:
            run = _bound(block_matmul, o.folded, matrix, (axes, ()), transpose_b=has_rows_first, **_conjugated(o, g))
            ways.append((copied[0] + copied[1] * is_first, not is_first, run))
        else:
            run = _bound(
                block_matmul, matrix, o.folded, ((), axes), transpose_a=not has_rows_first, **_conjugated(g, o)
            )
            ways.append((copied[0] + copied[1] * (not is_first), is_first, run))
    if is_free:
        run = _bound(
            all_gather_matmul,
            g.along(gather.dimension),
            o.folded,
            axes,
            transpose_a=not g.has_rows_first,
            transpose_b=o.has_rows_first,
            **_conjugated(g, o),
        )
        behind = 0 if is_first else math.prod(shape) + g.folded.size * lax.axis_size(axes)
        ways.append((behind, is_first, run))
    return shape, ways


def _reducing(product: Product, first: _Matrix, second: _Matrix) -> tuple[Dims, list[_Way]]:
    eqn = product.collective
    shape: Dims = tuple(eqn.outvars[0].aval.shape)
    flags = {"transpose_a": not first.has_rows_first, "transpose_b": second.has_rows_first}
    flags |= _conjugated(first, second)
    if eqn.primitive.name != "reduce_scatter":
        axes = tuple(eqn.params["axes"])
        return shape, [(0, True, _bound(matmul_all_reduce, first.folded, second.folded, axes, **flags))]
    names, dimension, rows = eqn.params["axis_name"], eqn.params["scatter_dimension"], len(first.free)
    axes = (names,) if isinstance(names, str) else tuple(names)
    if dimension < rows:
        a = first.along(first.operand.free[dimension])
        return shape, [(0, True, _bound(matmul_reduce_scatter, a, second.folded, axes, **flags))]
    position = dimension - rows
    if position == 0 and first.has_rows_first and second.has_rows_first:
        run = _bound(
            block_matmul, first.folded, second.folded, ((), axes), transpose_b=True, **_conjugated(first, second)
        )
        return shape, [(0, True, run)]
    b = second.along(second.operand.free[position])
    flags = {"transpose_a": not second.has_rows_first, "transpose_b": first.has_rows_first}
    flags |= _conjugated(second, first)
    return shape, [(0, False, _bound(matmul_reduce_scatter, b, first.folded, axes, **flags))]


def _conjugated(a: _Matrix, b: _Matrix) -> dict[str, bool]:
    return {"conjugate_a": a.operand.is_conjugated, "conjugate_b": b.operand.is_conjugated}


def _bound(function: Callable[..., Any], a: jax.Array, b: jax.Array, axes: Any, **flags: bool) -> Callable[..., Any]:
    """The call; its `c` is of the shape of the product's result, of which the last dimension are the columns."""

    def run(c: jax.Array | None = None, **options: Any) -> Any:
        if c is not None and a.ndim == 2:
            c = c.reshape(math.prod(c.shape[:-1]), c.shape[-1])
        return function(a, b, axes, c, **flags, **options)

    return run
