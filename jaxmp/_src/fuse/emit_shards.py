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
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxmp._src.core.ops.collective_matmul import (
    all_gather_matmul,
    block_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxmp._src.core.spec import epilogs
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.fuse.operands import Operand
from jaxmp._src.fuse.products import Product

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """An operand as stored, and folded: (rows, k) if `has_rows_first`, else (k, columns)."""

    operand: Operand
    stored: jax.Array
    folded: jax.Array
    has_rows_first: bool

    @staticmethod
    def of(operand: Operand, x: jax.Array) -> _Matrix:
        if not operand.is_flat:
            raise NotAvailable("its dimensions do not fold into a matrix")
        rows, k = (math.prod(x.shape[d] for d in dims) for dims in (operand.free, operand.contract))
        folded = x.reshape((rows, k) if operand.has_rows_first else (k, rows))
        return _Matrix(operand, x, folded, operand.has_rows_first)

    def transposed(self) -> _Matrix:
        return dataclasses.replace(self, folded=self.folded.T, has_rows_first=not self.has_rows_first)

    def along(self, dimension: int) -> _Matrix:
        """With `dimension` for the folded rows: the others stay in front of them, where they are slower."""
        free = self.operand.free
        if dimension == free[0] or dimension not in free:
            return self
        extents = (self.stored.shape[d] for d in free)
        return dataclasses.replace(self, folded=self.stored.reshape(*extents, self.folded.shape[-1]))


@dataclasses.dataclass(frozen=True)
class _Way:
    """A call that gives a product, (free dimensions of a, of b), and how many elements are copied ahead of it."""

    function: Callable[..., Any]
    a: _Matrix
    b: _Matrix
    axes: Any
    copied: int = 0

    def __call__(self, c: jax.Array | None = None, **options: Any) -> Any:
        """The result of the call; `c` is of the shape of the product's result, whose last dimension are the columns."""
        a, b = self.a.folded, self.b.folded
        if c is not None and a.ndim == 2:
            c = c.reshape(math.prod(c.shape[:-1]), c.shape[-1])
        flags = {
            "transpose_a": not self.a.has_rows_first,
            "transpose_b": self.b.has_rows_first,
            "conjugate_a": self.a.operand.is_conjugated,
            "conjugate_b": self.b.operand.is_conjugated,
        }
        return self.function(a, b, self.axes, c, **flags, **options)


def call(product: Product, operands: Sequence[Any], shared: dict[str, Any]) -> list[jax.Array]:
    """The results of a product of (x, w, bias, c): d, and what its activation is applied to where that is read too."""
    x, w, bias, c = operands
    if product.activation and product.activation not in ("relu", "gelu"):
        raise NotAvailable("no epilog applies this activation")
    first, second = _Matrix.of(product.x, x), _Matrix.of(product.w, w)
    shape: Dims = product.result.aval.shape
    if product.collective is not None:
        ways = [_reducing(product.collective, first, second)]
    elif product.x.gather is not None:
        ways = _gathering(first, second, is_first=True)
    else:
        ways = _gathering(second, first, is_first=False)
    run = min(ways, key=lambda way: way.copied + (0 if way.a.operand is product.x else math.prod(shape)))
    if run.a.operand is not product.x:
        d = run(**shared)
        d = lax.transpose(d, (d.ndim - 1, *range(d.ndim - 1))).reshape(shape)
        return _with_epilog(product, d, bias, c)
    flags: dict[str, Any] = {"epilog": epilogs.for_activation(product.activation, bias is not None)}
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


def _gathering(g: _Matrix, o: _Matrix, *, is_first: bool) -> list[_Way]:
    """The calls that gather g; `is_first`: its free dimensions come first in the product's result."""
    gather = g.operand.gather
    assert gather is not None
    axes, free, ways = gather.axes, g.operand.free, []
    is_free = gather.dimension in free
    if gather.dimension in (free[:1] + g.operand.contract[:1]):
        is_along_rows = is_free == g.has_rows_first
        matrix = g if is_along_rows == o.has_rows_first else g.transposed()
        copied = 0 if matrix is g else g.folded.size
        a, b, grid = (o, matrix, (axes, ())) if o.has_rows_first else (matrix, o, ((), axes))
        ways.append(_Way(block_matmul, a, b, grid, copied))
    if is_free:
        # The gradient of a call that gives the result transposed copies what it gathers.
        copied = 0 if is_first else g.folded.size * lax.axis_size(axes)
        ways.append(_Way(all_gather_matmul, g.along(gather.dimension), o, axes, copied))
    return ways


def _reducing(eqn: Any, first: _Matrix, second: _Matrix) -> _Way:
    """The call that sums over ranks as an equation does."""
    if eqn.primitive.name != "reduce_scatter":
        return _Way(matmul_all_reduce, first, second, tuple(eqn.params["axes"]))
    names, dimension, rows = eqn.params["axis_name"], eqn.params["scatter_dimension"], len(first.operand.free)
    axes = (names,) if isinstance(names, str) else tuple(names)
    if dimension < rows:
        return _Way(matmul_reduce_scatter, first.along(first.operand.free[dimension]), second, axes)
    if dimension == rows and first.has_rows_first and second.has_rows_first:
        return _Way(block_matmul, first, second, ((), axes))
    return _Way(matmul_reduce_scatter, second.along(second.operand.free[dimension - rows]), first, axes)
