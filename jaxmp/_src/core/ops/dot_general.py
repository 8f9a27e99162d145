"""`dot_general` with any dimension numbers.

It becomes products of matrices, a (rows..., k) and b (k, n), one per index of the batch dimensions. Dimensions are
merged inside `shard_map`, on each device's shards, so that no reshape moves data between devices. The pattern only
needs to know the axes that shard the contracted dimensions and the columns.

Worked example: x (batch, seq, d) on P("data", "model", None), w (d, heads, size) on P(None, "model", None) and a result
on P("data", None, "model", None) on a 2x2 mesh. Rows (batch, seq) are on ("data"), ("model"), columns on "model", so
the rows of x are gathered over "model" along seq, and each device multiplies (batch / 2 * seq, d) with
(d, heads / 2 * size).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.core.sharding import eager_calls, meshes
from jaxmp._src.core.sharding.sharded_call import make_call, of_arrays
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.options import Precision
from jaxmp._src.core.spec.request import ContractionOptions, Request
from jaxmp._src.core.validation import operand_checks, result_types
from jaxmp._src.core.validation.arguments import converted, types_of, validated
from jaxmp._src.core.validation.dimension_numbers import GivenNumbers, parse
from jaxmp._src.core.validation.public import public


@public
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: GivenNumbers,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    **options: Unpack[ContractionOptions],
) -> jax.Array:
    """Multiplies arrays over devices with `lax.dot_general`'s signature, for layers that take a `dot_general=`.

        result[batch..., lhs free..., rhs free...] = sum over the contracted dimensions of lhs * rhs

    Shardings and communication are as in `matmul`: free dimensions of lhs are rows, free dimensions of rhs are columns.

    Args:
      lhs, rhs: arrays of any rank, of the types that `matmul` takes.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, as in `lax.dot_general`; None
        as in `lax.dot`, for at most 2 dimensions. For batch dimensions see docs/matmul.md.
      out_sharding: sharding of the result; required if a contracted dimension is sharded in both operands.
      in_shardings: a pair of shardings for lhs and rhs (auto axes).

    The other options are as in `matmul`, but `determinism` has no "topology".

    Returns:
      The dimensions of the batch, then the free ones of lhs, then the free ones of rhs; sharded as `out_sharding`.

    Raises: as `matmul`; ValueError for dimension numbers that do not fit.

    Source: `jax.lax.dot_general` (docs.jax.dev); XLA's DotGeneral (openxla.org/xla/operation_semantics).

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.dot_general(jnp.ones((2, 3, 4)), jnp.ones((4, 5, 6)), (((2,), (0,)), ((), ()))).shape
    (2, 3, 5, 6)
    """
    request = Request(
        "dot_general", lhs, rhs, precision=precision, preferred_element_type=preferred_element_type, **options
    )
    return product(request, dimension_numbers)


def product(request: Request, dimension_numbers: GivenNumbers, *, is_part: bool = False) -> jax.Array:
    """Returns `jaxmp.dot_general` of the request's a and b. Equal calls share a plan where `look_up` caches the call.
    `is_part`: the product may be one of several in a user's call, as in an einsum."""
    operands = {"a": request.a, "b": request.b}
    entry = eager_calls.look_up(request, operands, dimension_numbers, is_part=is_part)
    run = entry[0] if entry else _planned(request, dimension_numbers)
    if entry is not None and not entry:
        entry.append(run)
    return run(*operands.values())


def _planned(request: Request, dimension_numbers: GivenNumbers) -> Callable[..., Any]:
    """Checks and plans the product of the request's a and b; returns the function of lhs and rhs that computes it.
    Raises as `jaxmp.dot_general`, and NotImplementedError for the level "topology"."""
    lhs, rhs = request.a, request.b
    numbers = parse(dimension_numbers, lhs, rhs)
    if request.level.global_order:
        raise request.level.mesh_refusal(
            "is not available, because ranks may hold several contracted dimensions interleaved",
            "use jaxmp.matmul on matrices",
        )
    are_rows = numbers.lhs_contract == (lhs.ndim - 1,) and numbers.rhs_contract == (rhs.ndim - 1,)
    conversion, request = converted(request, are_rows=are_rows, is_lax=True)
    arrays, preferred = {"a": request.a, "b": request.b}, cast(Any, request.preferred_element_type)
    for name, x in arrays.items():
        operand_checks.check_operand(f"{{{name}}}", x)
    types = result_types.of_call(types_of(*arrays.values()), preferred, False)
    stays = types.is_low_precision or types.is_mixed
    dtypes = tuple((name, x.dtype if stays else types.operand) for name, x in arrays.items())
    placement = meshes.place(request, numbers.result(lhs.shape, rhs.shape))
    a, b = (jax.ShapeDtypeStruct((1, 1), dtype) for _, dtype in dtypes)  # the matrices made by folding
    spec, *_ = validated(request._replace(a=a, b=b, transpose_b=low_precision.is_scaled(a.dtype)))
    call = make_call(spec, placement, arrays, numbers)
    return of_arrays(call, conversion, dtypes)
