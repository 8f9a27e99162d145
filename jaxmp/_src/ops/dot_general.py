"""`dot_general` with any dimension numbers.

It becomes products of matrices, a (rows..., k) and b (k, n), one per index of the batch dimensions. The dimensions are
put together inside `shard_map`, on each device's shards, so that no reshape moves data between devices: all that
the pattern has to know of contracted dimensions, or of columns, is over which axes they are split.

Worked example: x (batch, seq, d) on P("data", "model", None), w (d, heads, size) on P(None, "model", None) and a result
on P("data", None, "model", None) on a 2x2 mesh. Rows (batch, seq) are on ("data"), ("model"), columns on "model", so
the rows of x are gathered over "model" along seq, and each device multiplies (batch / 2 * seq, d) with
(d, heads / 2 * size).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.contraction import planner
from jaxmp._src.contraction.contraction import Contraction
from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.lowering import xla_matmul
from jaxmp._src.primitive.collectives import cast_reduced
from jaxmp._src.runtime.types import Operands, Shape
from jaxmp._src.sharding import eager_calls, meshes, shardings
from jaxmp._src.sharding.on_shards import Frame, frame_of, on_shards
from jaxmp._src.sharding.shard_local import bind_plan
from jaxmp._src.sharding.sharded_call import check_left_to_xla, jaxmp_call, make_call
from jaxmp._src.spec.matmul_spec import Group, accumulator
from jaxmp._src.spec.options import Precision
from jaxmp._src.spec.request import ContractionOptions, Request
from jaxmp._src.validation import result_types
from jaxmp._src.validation.arguments import converted, types_of, validated
from jaxmp._src.validation.dimension_numbers import DimensionNumbers, GivenNumbers, parse, pick
from jaxmp._src.validation.public import public


@public
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: GivenNumbers,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    **options: Unpack[ContractionOptions],
) -> jax.Array:
    """Distributed product with `lax.dot_general`'s signature, for layers that take a `dot_general=`.

        result[batch..., lhs free..., rhs free...] = sum over the contracted dimensions of lhs * rhs

    Shardings and communication are as in `matmul`: the free dimensions of lhs are rows, those of rhs are columns.

    Args:
      lhs, rhs: arrays of any rank, of the types that `matmul` takes.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, as in `lax.dot_general`. For
        batch dimensions see docs/matmul.md.
      out_sharding: sharding of the result; required where a contracted dimension is sharded in both operands.
      in_shardings: a pair of shardings for lhs and rhs (auto axes).

    The other options are those of `matmul`, `determinism` without "topology".

    Returns:
      The dimensions of the batch, then the free ones of lhs, then the free ones of rhs; sharded as `out_sharding` says.

    Raises: as `matmul`; ValueError for dimension numbers that do not fit.

    Source: `jax.lax.dot_general` (docs.jax.dev); XLA's DotGeneral (openxla.org/xla/operation_semantics).

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.dot_general(jnp.ones((2, 3, 4)), jnp.ones((4, 5, 6)), (((2,), (0,)), ((), ()))).shape
    (2, 3, 5, 6)
    """
    request = Request(
        "dot_general", None, None, precision=precision, preferred_element_type=preferred_element_type, **options
    )
    entry = eager_calls.find_on_one_device(request, (lhs, rhs), dimension_numbers)

    def jaxmp_product(lhs: Any, rhs: Any) -> jax.Array:
        return product(request._replace(a=lhs, b=rhs), dimension_numbers)

    result: jax.Array = eager_calls.run(entry, jaxmp_product, lhs, rhs)
    return result


# One product ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product, hashable: its request without operands and shardings; with a plan where operands are sharded."""

    request: Request
    numbers: DimensionNumbers
    placement: meshes.Placement
    plan: Contraction | None = None
    frame: Frame | None = None

    @property
    def columns(self) -> tuple[int, ...]:
        """The free dimensions of rhs in the order in which they fold."""
        return tuple(map(self.plan.b.index, self.plan.columns)) if self.plan else self.numbers.rhs_free

    def dtypes(self, lhs: jax.Array, rhs: jax.Array) -> tuple[np.dtype, np.dtype]:
        """Those of the operands as multiplied, and of the result."""
        preferred: Any = self.request.preferred_element_type
        return result_types.of_call(types_of(lhs, rhs), preferred, False)[:2]


def product(request: Request, dimension_numbers: GivenNumbers) -> jax.Array:
    """The result of `jaxmp.dot_general`."""
    lhs, rhs = request.a, request.b
    conversion, call = eager_calls.planned(_planned, request, dimension_numbers)
    d: jax.Array = conversion.of_result(jaxmp_dot_general(call, conversion.of("a", lhs), conversion.of("b", rhs)))
    return d


def _planned(request: Request, dimension_numbers: GivenNumbers) -> tuple[result_types.Conversion, _Product]:
    lhs, rhs = request.a, request.b
    numbers = parse(dimension_numbers, lhs, rhs)
    if request.level.global_order:
        raise request.level.mesh_refusal(
            "is not available, for ranks may hold several contracted dimensions interleaved",
            "use jaxmp.matmul on matrices",
        )
    are_rows = numbers.lhs_contract == (lhs.ndim - 1,) and numbers.rhs_contract == (rhs.ndim - 1,)
    conversion, request = converted(request, are_rows=are_rows, is_lax=True)
    lhs, rhs, precision = request.a, request.b, request.precision
    placement = meshes.place(request, numbers.result(lhs.shape, rhs.shape))
    precision = tuple(precision) if isinstance(precision, list) else precision
    bare = request._replace(a=None, b=None, precision=precision, out_sharding=None, in_shardings=None, mesh=None)
    call = _Product(bare, numbers, placement)
    if placement.mode == meshes.Mode.SHARDED:
        gathers_inside = not request.level.fixed_order  # else gradients are sums in an order of their own
        shapes = lhs.shape, rhs.shape
        whole = numbers.product(lhs.ndim, rhs.ndim)
        given = shardings.lying(whole, placement.lie, (*shapes, placement.shape), placement.mesh.shape)
        operand, out = call.dtypes(lhs, rhs)
        itemsizes = lhs.dtype.itemsize, rhs.dtype.itemsize, out.itemsize, accumulator(operand).itemsize
        terms = functools.partial(planner.terms, given, (*shapes, placement.shape), placement.mesh.shape, itemsizes)
        plan = planner.plan(given, terms, gathers_k=gathers_inside)
        where = placement.mesh, placement.is_explicit
        frame = frame_of(where, given.layout, plan, gathers_inside=gathers_inside)
        call = dataclasses.replace(call, plan=plan, frame=frame)
    return conversion, call


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_dot_general(product: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    placement, frame = product.placement, product.frame
    out_shape = product.numbers.result(lhs.shape, rhs.shape)
    if frame is None:
        if placement.mode == meshes.Mode.XLA:
            d = _product_of_xla(product, lhs, rhs)
        else:
            lhs, rhs = cast_reduced({"lhs": lhs, "rhs": rhs}).values()  # ahead of vmap, where JAX has no such cast
            d = _fold(product, out_shape, lhs, rhs)
        return d if placement.constraint is None else lax.with_sharding_constraint(d, placement.constraint)
    local_shape = NamedSharding(placement.mesh, frame.out_spec).shard_shape(out_shape)
    operands = {"a": lhs, "b": rhs}

    def multiplied(shards: Operands) -> Operands:
        return {"d": _fold(product, local_shape, shards["a"], shards["b"])}

    def zeros(_: Operands) -> Operands:
        return {"d": jnp.zeros(local_shape, product.dtypes(lhs, rhs)[1])}

    body: Callable[[Operands], Operands] = multiplied
    if 0 in lhs.shape and 0 in rhs.shape:
        # XLA cannot partition a body whose operands are all empty, so they stay out of it.
        body, operands = zeros, {"scalar": jnp.zeros(())}
    result: jax.Array = on_shards(frame, body, operands, "")["d"]
    return result


def _product_of_xla(product: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    dtype, _ = product.dtypes(lhs, rhs)
    matrix = jax.ShapeDtypeStruct((1, 1), dtype)
    spec, *_ = validated(product.request._replace(a=matrix, b=matrix))
    check_left_to_xla(spec, product.placement.why)
    numbers, platform = product.numbers, jax_compat.default_platform()
    given = ((numbers.lhs_contract, numbers.rhs_contract), (numbers.lhs_batch, numbers.rhs_batch))
    operands = {"a": lhs.astype(dtype), "b": rhs.astype(dtype)}
    return xla_matmul.global_matmul(operands, spec, platform, product.placement.out_sharding, given)["d"]


def _fold(product: _Product, out_shape: Shape, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The result, of shape `out_shape`, by a product of a (rows..., k) or (k, m) and b (k, n) or (n, k)."""
    numbers = product.numbers
    # Row dimensions stay apart where ranks share one, and others are slower.
    keeps_rows = product.plan is not None and product.plan.dimension > 0
    a, transpose_a = _matrix(lhs, numbers.lhs_batch, numbers.lhs_free, numbers.lhs_contract, keeps_rows)
    b, transpose_b = _matrix(rhs, numbers.rhs_batch, numbers.rhs_contract, product.columns)
    request = product.request._replace(transpose_a=transpose_a, transpose_b=transpose_b)
    multiply = functools.partial(_multiply, product, request)
    d = jax.vmap(multiply)(a, b) if numbers.lhs_batch else multiply(a, b)
    ahead = len(numbers.lhs_batch) + len(numbers.lhs_free)
    order = tuple(map(numbers.rhs_free.index, product.columns))
    d = d.reshape(*out_shape[:ahead], *pick(out_shape[ahead:], order))
    return lax.transpose(d, (*range(ahead), *(ahead + order.index(i) for i in range(len(order)))))


def _matrix(
    x: jax.Array, batch: Shape, first: Shape, second: Shape, keeps_first: bool = False
) -> tuple[jax.Array, bool]:
    """(`x` as (batch, first, second) or as (batch, second, first), whichever takes no copy; whether it is the latter).

    Each of the three is one dimension, but for `first` under `keeps_first`, and for a batch of no dimensions.
    """
    stored = tuple(i for i in range(x.ndim) if i not in batch)
    is_transposed = stored == second + first and stored != first + second and not keeps_first
    parts = [pick(x.shape, first) if keeps_first else (math.prod(pick(x.shape, first)),)]
    parts.insert(0 if is_transposed else 1, (math.prod(pick(x.shape, second)),))
    lead = (math.prod(pick(x.shape, batch)),) if batch else ()
    x = lax.transpose(x, (*batch, *(stored if is_transposed else first + second)))
    return x.reshape(*lead, *parts[0], *parts[1]), is_transposed


def _multiply(product: _Product, request: Request, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of whole matrices, where no sharding is known, or of one device's, inside shard_map."""
    plan, placement = product.plan, product.placement
    group = Group() if plan is None else Group.of(plan, placement.axes)
    # A grid's contraction is cut otherwise in a than in b; elsewhere the shards fit as the whole matrices do.
    fits = group if plan is not None and plan.is_grid else Group()
    spec, operands, shape = validated(request._replace(a=a, b=b), fits)
    if plan is not None:
        return bind_plan(plan, spec.replace(group=group), operands)["d"]
    call = make_call(spec, dataclasses.replace(placement, shape=shape, constraint=None), operands)
    d: jax.Array = jaxmp_call(call, operands)["d"]
    return d
