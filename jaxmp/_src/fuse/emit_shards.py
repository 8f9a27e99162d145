"""Emits products that ranks of a named axis share, inside shard_map, as calls of jaxmp.

Dimensions fold into rows, columns and k of matrices. Let g be the gathered operand and o the other one. A grid is a
`block_matmul` on a grid of ranks. A result (of o, of g) has the free dimensions of o first. If a grid and an all-gather
can do the gather, the one that copies fewer elements is taken:

    g gathered along stored rows, o stored (rows, k)        grid of one column, g is its b: result (of o, of g)
    g gathered along stored columns, o stored (k, columns)  grid of one row, g is its a: result (of g, of o)
    g gathered along its free dimension                     all_gather_matmul: result (of g, of o)

A shard of g may be transposed before a grid, and the result after a call. FSDP is the first line: x (m, k) times the
gather of w, (k/P, n) or (n/P, k). Gradients of a grid are grids; a gradient of an all-gather repeats the gather.
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


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """An operand as stored, and folded to a matrix: (rows, k) if `has_rows_first`, else (k, columns)."""

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
        """Returns the operand folded so that `dimension`, the last free one of several, is its rows, and the other free
        dimensions lead as a batch. Returns itself if `dimension` is the first free one or contracted. Any other
        `dimension` is an error that is not checked (`Operand.folds`)."""
        free = self.operand.free
        if dimension == free[0] or dimension not in free:
            return self
        extents = (self.stored.shape[d] for d in free)
        return dataclasses.replace(self, folded=self.stored.reshape(*extents, self.folded.shape[-1]))


@dataclasses.dataclass(frozen=True)
class _ShardCall:
    """A call that multiplies a and b: `function`, one of the collective matmuls, over `axes`. The result has the free
    dimensions of a, then of b."""

    function: Callable[..., Any]
    a: _Matrix
    b: _Matrix
    axes: Any

    def __call__(self, c: jax.Array | None = None, **options: Any) -> Any:
        """Returns the result of the call, still folded: d, or (d, other results by name) if the epilog has some. `c`:
        an addend in the shape of the product's result."""
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
    """Returns a product's results from `operands`, (x, w, bias or None, c or None): [d], or [d, the activation's
    argument] if others read it. Raises NotAvailable for activations except relu and gelu, and for operands that fold
    into no matrix. `shared`: the call's other options."""
    x, w, bias, c = operands
    if product.activation and product.activation not in ("relu", "gelu"):
        raise NotAvailable("no epilog applies this activation")
    first, second = _Matrix.of(product.x, x), _Matrix.of(product.w, w)
    shape: tuple[int, ...] = product.result.aval.shape
    if product.collective is not None:
        run = _reducing(product.collective, first, second)
    elif product.x.gather is not None:
        run = _gathering(first, second, is_first=True)
    else:
        run = _gathering(second, first, is_first=False)
    if run.a.operand is not product.x:
        d = run(**shared)
        d = lax.transpose(d, (d.ndim - 1, *range(d.ndim - 1))).reshape(shape)
        return _with_epilog(product, d, bias, c)
    found = run(c, **shared, **epilog_options(product, bias, c))
    return [each.reshape(shape) for each in results_of(product, found)]


def epilog_options(product: Product, bias: jax.Array | None, c: jax.Array | None) -> dict[str, Any]:
    """Returns the options with which a call adds the bias and c, applies the activation and returns its argument."""
    epilog = epilogs.for_activation(product.activation, bias is not None)
    kept = epilog if product.preactivation is None else epilogs.RULES[epilog].with_aux
    inputs = None if bias is None else {"bias": bias}
    return {"epilog": kept, "epilog_inputs": inputs} | ({} if c is None else {"beta": 1.0})


def results_of(product: Product, found: Any) -> list[jax.Array]:
    """Returns the results of a call: [d], or [d, the activation's argument] if the product keeps it."""
    return [found] if product.preactivation is None else [found[0], *found[1].values()]


def _with_epilog(product: Product, d: jax.Array, bias: jax.Array | None, c: jax.Array | None) -> list[jax.Array]:
    """Returns [activation(d + bias + c)], and after it the sum before the activation if the product keeps it, by jnp.
    Used after calls with a transposed result, which would add the bias along the rows."""
    if bias is not None:
        d = d + bias.reshape((1,) * (d.ndim - 1) + bias.shape)
    if c is not None:
        d = d + c
    kept = [] if product.preactivation is None else [d]
    return [{None: lambda d: d, "relu": jax.nn.relu, "gelu": jax.nn.gelu}[product.activation](d), *kept]


def _gathering(g: _Matrix, o: _Matrix, *, is_first: bool) -> _ShardCall:
    """Returns the call of the table above that gathers g, to multiply it and o. `is_first`: g's free dimensions come
    first in the product's result. An all-gather then copies nothing; nor does a grid if both are stored (k, ...)."""
    gather = g.operand.gather
    assert gather is not None
    axes, free = gather.axes, g.operand.free
    is_free, has_rows_first = gather.dimension in free, g.has_rows_first or o.has_rows_first
    if gather.dimension not in free[:1] + g.operand.contract[:1] or (is_free and is_first and has_rows_first):
        return _ShardCall(all_gather_matmul, g.along(gather.dimension), o, axes)
    is_along_rows = is_free == g.has_rows_first
    matrix = g if is_along_rows == o.has_rows_first else g.transposed()
    a, b, grid = (o, matrix, (axes, ())) if o.has_rows_first else (matrix, o, ((), axes))
    return _ShardCall(block_matmul, a, b, grid)


def _reducing(eqn: Any, first: _Matrix, second: _Matrix) -> _ShardCall:
    """Returns the call that multiplies first and second and sums over ranks as `eqn`, a psum or reduce_scatter. If the
    sum is scattered along a dimension of second, a call with second as its a, unless a grid of one row can do it."""
    if eqn.primitive.name != "reduce_scatter":
        return _ShardCall(matmul_all_reduce, first, second, tuple(eqn.params["axes"]))
    names, dimension, rows = eqn.params["axis_name"], eqn.params["scatter_dimension"], len(first.operand.free)
    axes = (names,) if isinstance(names, str) else tuple(names)
    if dimension < rows:
        return _ShardCall(matmul_reduce_scatter, first.along(first.operand.free[dimension]), second, axes)
    if dimension == rows and first.has_rows_first and second.has_rows_first:
        return _ShardCall(block_matmul, first, second, ((), axes))
    return _ShardCall(matmul_reduce_scatter, second.along(second.operand.free[dimension - rows]), first, axes)
