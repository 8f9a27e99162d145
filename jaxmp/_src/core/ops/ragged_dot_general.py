"""`ragged_dot_general`: the modes of `lax.ragged_dot_general`, by the primitive `grouped_p` or by `dot_general`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmp._src.core.ops import dot_general, ragged_dot
from jaxmp._src.core.primitive.grouped import GroupedSpec, grouped
from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.sharding.ragged import bounds_of
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.core.spec.refusal import InvalidOperands, NotAvailable
from jaxmp._src.core.spec.request import GroupOptions, Request
from jaxmp._src.core.validation import dimension_numbers
from jaxmp._src.core.validation.dimension_numbers import DimensionNumbers, pick
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.runtime.types import Operands, Shape

_MATRICES = DimensionNumbers((1,), (1,), (), (), (0,), (0, 2))  # for lax.ragged_dot; groups are a free dimension


@public
def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    **options: Unpack[GroupOptions],
) -> jax.Array:
    """Multiplies groups of rows, with the dimension numbers and the three modes of `lax.ragged_dot_general`.

    The ragged dimension of lhs is cut into groups. If it is free, rhs has a matrix for each group, and the result is as
    in `ragged_dot`. If it is contracted, the result has a sum for each group. If it is a batch dimension, the result is
    as in `dot_general`, for any sizes.

    Args:
      lhs, rhs: arrays of the types that `ragged_dot` takes.
      group_sizes: (groups,), or (batch..., outer..., groups). `outer`: the dimensions of the same kind as the ragged
        dimension that come before it. If the ragged dimension is a batch dimension, (outer..., groups).
      ragged_dot_dimension_numbers: as in `lax.ragged_dot_general`.

    The other options are as in `ragged_dot`. Arrays that explicit axes or `in_shardings` shard, and the level
    "topology", need the dimension numbers of `lax.ragged_dot`; others are refused (NotImplementedError).

    Returns: The dimensions of the batch, then the free dimensions of lhs, then the free dimensions of rhs; if the
    ragged dimension is contracted, the dimension of groups comes first.

    Raises: as `ragged_dot`; ValueError for dimension numbers that do not fit.

    Source: `jax.lax.ragged_dot_general` (docs.jax.dev).

    >>> import jax.numpy as jnp, jaxmp
    >>> numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    >>> jaxmp.ragged_dot_general(jnp.ones((4, 1)), jnp.ones((4, 1)), jnp.array([1, 2]), numbers).tolist()
    [[[1.0]], [[2.0]]]
    """
    request = Request("ragged_dot_general", lhs, rhs, **options)
    given: Any = ragged_dot_dimension_numbers
    numbers = _parsed(given, lhs, rhs, group_sizes)
    if numbers.is_batch:
        return dot_general.product(request, given.dot_dimension_numbers)
    if numbers == _Numbers(_MATRICES, 0, 0):
        return ragged_dot.product(request, group_sizes)
    conversion, request = ragged_dot.converted(request, group_sizes)
    spec, operands = ragged_dot.spec_and_operands(request)
    if spec.level.global_order:
        raise spec.level.mesh_refusal(
            "takes the dimension numbers of lax.ragged_dot only", "multiply each group by jaxmp.matmul"
        )
    request = request._replace(a=operands["a"], b=operands["b"])
    sizes = jnp.asarray(group_sizes)
    placement = meshes.place(request, numbers.result(request.a.shape, request.b.shape, sizes.shape[-1]))
    is_sharded = any(meshes.type_dims("{a}", request.a) + meshes.type_dims("{b}", request.b))
    if placement.mode == meshes.Mode.SHARDED or (placement.mode == meshes.Mode.XLA and is_sharded):
        raise NotAvailable(
            "arrays with shardings take the dimension numbers of lax.ragged_dot only; call inside a shard_map over "
            "all axes of the mesh"
        )
    spec = ragged_dot.of_global(spec, placement)
    run: Callable[[Operands], jax.Array] = functools.partial(jaxmp_ragged_dot_general, spec, numbers)
    if placement.mode == meshes.Mode.XLA:
        run = meshes.on_automatic_axes(run, placement, ((),) * len(placement.shape))
    d: jax.Array = conversion.of_result(run({"lhs": request.a, "rhs": request.b, "sizes": sizes}))
    return d if placement.constraint is None else lax.with_sharding_constraint(d, placement.constraint)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """`ragged`: the dimension of lhs. `group`: the dimension of rhs that chooses a matrix; None if the ragged dimension
    is not free. `outer`: if `group_sizes` has more than one dimension, the dimensions of lhs of the same kind (free,
    contracted or batch) as the ragged one that come before it, and have their own sizes for each index; else ()."""

    dot: DimensionNumbers
    ragged: int
    group: int | None
    outer: tuple[int, ...] = ()

    @property
    def is_batch(self) -> bool:
        return self.ragged in self.dot.lhs_batch

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(i for i in self.dot.rhs_free if i != self.group)

    def among(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ragged dimension, then the other dimensions in `dims` that have no sizes of their own."""
        return (self.ragged, *(i for i in dims if i != self.ragged and i not in self.outer))

    def of_rhs(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the dimensions of rhs that are contracted with the dimensions `dims` of lhs."""
        return pick(self.dot.rhs_contract, tuple(map(self.dot.lhs_contract.index, dims)))

    def result(self, lhs: Shape, rhs: Shape, groups: int) -> Shape:
        ahead = (groups,) if self.group is None else ()
        return (*ahead, *pick(lhs, self.dot.lhs_batch), *pick(lhs, self.dot.lhs_free), *pick(rhs, self.columns))


@functools.partial(jax.jit, static_argnums=(0, 1))
def jaxmp_ragged_dot_general(spec: GroupedSpec, numbers: _Numbers, operands: Operands) -> jax.Array:
    """Computes the product by merging dimensions as `grouped` takes them. If the ragged dimension is free, groups of
    rows have a matrix each; if it is contracted, the result has a sum for each group."""
    lhs, rhs, sizes = (operands[name] for name in ("lhs", "rhs", "sizes"))
    product, (m, groups) = numbers.dot, (lhs.shape[numbers.ragged], sizes.shape[-1])
    bounds = jax.vmap(lambda each: bounds_of(each, None, m, groups))(sizes.reshape(-1, groups))
    shape = numbers.result(lhs.shape, rhs.shape, groups)
    lead = *product.lhs_batch, *numbers.outer
    if numbers.group is None:
        rows = numbers.among(product.lhs_contract)
        x = _folded(lhs, lead, rows, product.lhs_free)
        y = _folded(rhs, (*product.rhs_batch, *numbers.of_rhs(numbers.outer)), numbers.of_rhs(rows), numbers.columns)
        out = accumulator(x.dtype) if numbers.outer else spec.out_dtype  # sums are rounded when they are complete
        d = grouped(spec.contraction(out), x, y, bounds * _size(lhs, rows[1:]))
        d = d.reshape(_size(lhs, product.lhs_batch), _size(lhs, numbers.outer), *d.shape[1:])
        d = d.sum(1).astype(spec.out_dtype)
        return jnp.moveaxis(d, 1, 0).reshape(shape)
    rows = numbers.among(product.lhs_free)
    x = _folded(lhs, lead, rows, product.lhs_contract)
    w = _folded(rhs, product.rhs_batch, (numbers.group,), product.rhs_contract, numbers.columns)
    if product.lhs_batch and numbers.outer:
        w = jnp.repeat(w, _size(lhs, numbers.outer), 0)
    d = grouped(spec, x, w, bounds * _size(lhs, rows[1:]))
    stored = *lead, *rows
    d = d.reshape(*pick(lhs.shape, stored), d.shape[-1])
    order = map(stored.index, (*product.lhs_batch, *product.lhs_free))
    return lax.transpose(d, (*order, len(stored))).reshape(shape)


def _folded(x: jax.Array, *parts: tuple[int, ...]) -> jax.Array:
    """Transposes `x` and merges the dimensions of each part into one; the parts have all its dimensions."""
    return lax.transpose(x, sum(parts, ())).reshape([_size(x, part) for part in parts])


def _size(x: jax.Array, dims: tuple[int, ...]) -> int:
    return math.prod(pick(x.shape, dims))


def _parsed(given: Any, lhs: Any, rhs: Any, sizes: Any) -> _Numbers:
    """Returns the user's dimension numbers, checked. Raises InvalidOperands (a TypeError and a ValueError) if the
    numbers or the shape of `sizes` do not fit, and TypeError if `sizes` are not integers."""
    ragged_dot.check_integers("group_sizes", sizes)
    try:
        (ragged,), group, dot = given.lhs_ragged_dimensions, given.rhs_group_dimensions, given.dot_dimension_numbers
    except (AttributeError, TypeError, ValueError):
        raise InvalidOperands(
            "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers with one ragged dimension of "
            f"{{a}}, got {given!r}"
        ) from None
    numbers = dimension_numbers.parse(dot, lhs, rhs)
    if ragged not in range(lhs.ndim):
        raise InvalidOperands(f"the ragged dimension of {{a}} must be one of its {lhs.ndim}, got {ragged}")
    is_free = ragged in numbers.lhs_free
    if len(group) != is_free or any(i not in numbers.rhs_free for i in group):
        wanted = "one free dimension" if is_free else "no dimension"
        raise InvalidOperands(f"rhs_group_dimensions must have {wanted} of {{b}}, got {tuple(group)}")
    kind = numbers.lhs_free if is_free else numbers.lhs_batch
    if ragged in numbers.lhs_contract:
        kind = tuple(i % lhs.ndim for i in dot[0][0])
    outer = kind[: kind.index(ragged)]
    lead = outer if ragged in numbers.lhs_batch else (*numbers.lhs_batch, *outer)
    groups = rhs.shape[group[0]] if is_free else sizes.shape[-1] if sizes.ndim else 0
    allowed = dict.fromkeys(((groups,), (*pick(lhs.shape, lead), groups)))
    if sizes.shape not in allowed:
        raise InvalidOperands(f"group_sizes must have shape {' or '.join(map(str, allowed))}, got {sizes.shape}")
    return _Numbers(numbers, ragged, group[0] if is_free else None, () if sizes.ndim == 1 else outer)
