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
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.ops.dimension_numbers import DimensionNumbers, GivenNumbers, parse, pick
from jaxmp._src.ops.signatures import ShardingPair
from jaxmp._src.primitive import collectives
from jaxmp._src.runtime.types import Shape
from jaxmp._src.sharding import meshes, patterns
from jaxmp._src.sharding.meshes import partition_spec
from jaxmp._src.sharding.patterns import Dim, Dims
from jaxmp._src.sharding.shard_local import bind_plan
from jaxmp._src.sharding.sharded_call import jaxmp_call, make_call
from jaxmp._src.spec.matmul_spec import Group, Pattern, axes_text, result_shape
from jaxmp._src.spec.options import Implementation, Mesh, Precision, Sharding
from jaxmp._src.validation import operand_checks
from jaxmp._src.validation.arguments import validated


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: GivenNumbers,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Sharding | None = None,
    in_shardings: ShardingPair | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
    determinism: Literal["run_to_run", "batch"] = "run_to_run",
) -> jax.Array:
    """Distributed product with `lax.dot_general`'s signature, for layers that take a `dot_general=`.

        result[batch..., lhs free..., rhs free...] = sum over the contracted dimensions of lhs * rhs

    Shardings and communication are as in `matmul`: the free dimensions of lhs are rows, those of rhs are columns. It
    communicates nothing that was not asked for: an `out_sharding` that one call cannot give is an error, and so is a
    contraction that is sharded in one operand only without `out_sharding`.

    Args:
      lhs, rhs: arrays of any rank; float32, float64, bfloat16, float16, complex64 or complex128.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, as in `lax.dot_general`. For
        batch dimensions see docs/matmul.md.
      out_sharding: sharding of the result; required where a contracted dimension is sharded. One of its free
        dimensions may be gathered or scattered; the others lie as in the operands, or more finely.
      in_shardings: a pair of shardings for lhs and rhs (auto axes).

    The other options are those of `matmul`, `determinism` without "topology".

    Returns:
      The dimensions of the batch, then the free ones of lhs, then the free ones of rhs; sharded as `out_sharding` says.

    Raises: as `matmul`; TypeError for integer operands, ValueError for dimension numbers that do not fit.

    Source: `jax.lax.dot_general` (docs.jax.dev); XLA's DotGeneral (openxla.org/xla/operation_semantics).

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.dot_general(jnp.ones((2, 3, 4)), jnp.ones((4, 5, 6)), (((2,), (0,)), ((), ()))).shape
    (2, 3, 5, 6)
    """
    arrays: tuple[jax.Array, jax.Array] = operand_checks.as_array(lhs), operand_checks.as_array(rhs)
    numbers = parse("dot_general", dimension_numbers, *arrays)
    level: str = determinism
    if level == "topology":
        raise NotImplementedError(
            'dot_general: determinism="topology" is not available, for ranks may hold several contracted dimensions '
            'interleaved; use jaxmp.matmul on matrices, or pass determinism="batch"'
        )
    options = {
        "precision": tuple(precision) if isinstance(precision, list) else precision,
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "determinism": level,
    }
    return _product("dot_general", *arrays, numbers, options, out_sharding, in_shardings, mesh)


# One product ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product, hashable. `columns` are rhs's free dimensions in the order in which they fold into columns: one that
    is gathered or scattered comes first, since ranks are the slowest index of what they share."""

    name: str
    numbers: DimensionNumbers
    options: tuple[tuple[str, Any], ...]
    placement: meshes.Placement
    columns: tuple[int, ...]
    plan: patterns.Plan = patterns.LOCAL_PLAN
    in_specs: tuple[P, ...] = ()
    out_spec: P = dataclasses.field(default_factory=P)

    @property
    def keeps_rows(self) -> bool:
        """Whether the row dimensions stay apart: one that ranks share, and others are slower."""
        return self.plan.dimension > 0


def _product(
    name: str,
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: DimensionNumbers,
    options: dict[str, Any],
    out_sharding: Sharding | None,
    in_shardings: ShardingPair | None,
    mesh: Mesh | None,
) -> jax.Array:
    out_shape = numbers.result(lhs.shape, rhs.shape)
    placement = meshes.place(name, lhs, rhs, out_shape, out_sharding, in_shardings, mesh)
    product = _Product(name, numbers, tuple(options.items()), placement, numbers.rhs_free)
    if placement.mode == meshes.Mode.SHARDED:
        product = _planned(product, lhs.shape, rhs.shape)
    d: jax.Array = jaxmp_dot_general(product, lhs, rhs)
    return d


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_dot_general(product: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    placement = product.placement
    out_shape = product.numbers.result(lhs.shape, rhs.shape)
    if placement.mode != meshes.Mode.SHARDED:
        d = _fold(product, functools.partial(_multiply, product), out_shape, lhs, rhs)
        return d if placement.constraint is None else lax.with_sharding_constraint(d, placement.constraint)
    mesh, specs = placement.mesh, product.in_specs
    if placement.is_explicit:
        # To the plan's finer shardings: each device takes its part of what it has.
        lhs, rhs = (
            collectives.reshard(x, mesh, spec, is_local=True) for x, spec in zip((lhs, rhs), specs, strict=True)
        )
    local_shape = NamedSharding(mesh, product.out_spec).shard_shape(out_shape)
    if 0 in lhs.shape and 0 in rhs.shape:
        # Nothing to multiply. XLA cannot partition a body whose operands are all empty, so they stay out of it.
        preferred = dict(product.options)["preferred_element_type"]
        _, dtype = operand_checks.resolve_dtypes(product.name, lhs, rhs, preferred)

        def zeros(_: jax.Array) -> jax.Array:
            return jnp.zeros(local_shape, dtype)

        return jax.shard_map(zeros, mesh=mesh, in_specs=(P(),), out_specs=product.out_spec)(jnp.zeros(()))
    body = functools.partial(_fold, product, functools.partial(_multiply_shards, product), local_shape)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=product.out_spec)(lhs, rhs)


def _fold(
    product: _Product, multiply: Callable[..., jax.Array], out_shape: Shape, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
    """The result, of shape `out_shape`; `multiply` makes it of a (rows..., k) or (k, m) and b (k, n) or (n, k)."""
    numbers = product.numbers
    a, transpose_a = _matrix(lhs, numbers.lhs_batch, numbers.lhs_free, numbers.lhs_contract, product.keeps_rows)
    b, transpose_b = _matrix(rhs, numbers.rhs_batch, numbers.rhs_contract, product.columns)
    multiply = functools.partial(multiply, flags={"transpose_a": transpose_a, "transpose_b": transpose_b})
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
    is_turned = stored == second + first and stored != first + second and not keeps_first
    parts = [pick(x.shape, first) if keeps_first else (math.prod(pick(x.shape, first)),)]
    parts.insert(0 if is_turned else 1, (math.prod(pick(x.shape, second)),))
    lead = (math.prod(pick(x.shape, batch)),) if batch else ()
    x = lax.transpose(x, (*batch, *(stored if is_turned else first + second)))
    return x.reshape(*lead, *parts[0], *parts[1]), is_turned


def _multiply(product: _Product, a: jax.Array, b: jax.Array, *, flags: dict[str, bool]) -> jax.Array:
    """The product of whole matrices, where no sharding is known, or of one device's, inside shard_map."""
    spec, operands = validated(product.name, a, b, None, None, dict(product.options) | flags)
    placement = dataclasses.replace(product.placement, constraint=None)
    shape = result_shape(spec, operands["a"], operands["b"])
    d: jax.Array = jaxmp_call(make_call(spec, placement, operands, shape), operands)["d"]
    return d


def _multiply_shards(product: _Product, a: jax.Array, b: jax.Array, *, flags: dict[str, bool]) -> jax.Array:
    """One device's part of the planned product."""
    plan = product.plan
    group = Group(plan.pattern, product.placement.axes, plan.row_axes, plan.col_axes)
    # A grid's contraction is cut otherwise in a than in b; elsewhere the shards fit as the whole matrices do.
    known = group if plan.pattern == Pattern.GRID else Group()
    spec, operands = validated(product.name, a, b, None, None, dict(product.options) | flags, known)
    return bind_plan(plan, spec.replace(group=group), operands)["d"]


# Shardings -----------------------------------------------------------------------------------------------------


def _planned(product: _Product, lhs_shape: Shape, rhs_shape: Shape) -> _Product:
    """The product with its plan, and every sharding as the call takes and gives it."""
    name, numbers, placement = product.name, product.numbers, product.placement
    sizes, out_shape = placement.mesh.shape, numbers.result(lhs_shape, rhs_shape)
    given = (
        ("lhs", placement.a, lhs_shape),
        ("rhs", placement.b, rhs_shape),
        ("the result", placement.out, out_shape),
    )
    patterns.check_given(name, given, sizes)
    lhs, rhs = _agreed(name, "batch", numbers.lhs_batch, numbers.rhs_batch, placement.a, placement.b)
    plan, columns, out = _grid(numbers, lhs, rhs, placement.out), numbers.rhs_free, placement.out
    if plan is None:
        lhs, rhs = _agreed(name, "contracting", numbers.lhs_contract, numbers.rhs_contract, lhs, rhs)
        if out is not None:
            lhs, rhs = _sliced(name, numbers, lhs, rhs, out)
        plan, columns = _plan_matrices(name, numbers, lhs, rhs, out)
    out = numbers.result(lhs, rhs) if out is None else out
    patterns.check_planned(name, given, (lhs, rhs, out), sizes)
    in_specs = partition_spec(lhs), partition_spec(rhs)
    return dataclasses.replace(product, plan=plan, columns=columns, in_specs=in_specs, out_spec=partition_spec(out))


def _agreed(name: str, kind: str, left: Sequence[int], right: Sequence[int], lhs: Dims, rhs: Dims) -> tuple[Dims, Dims]:
    """One sharding for each pair of dimensions; an operand that holds one of them whole takes its part."""
    lhs_dims, rhs_dims = list(lhs), list(rhs)
    for i, j in zip(left, right, strict=True):
        if lhs[i] and rhs[j] and lhs[i] != rhs[j]:
            raise ValueError(
                f"{name}: {kind} dimension {i} of lhs is sharded over {axes_text(lhs[i])} but dimension {j} of rhs "
                f"over {axes_text(rhs[j])}; reshard one of them"
            )
        lhs_dims[i] = rhs_dims[j] = lhs[i] or rhs[j]
    return tuple(lhs_dims), tuple(rhs_dims)


def _grid(numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims | None) -> patterns.Plan | None:
    """The plan where every matrix is in blocks on the same two axes."""
    a = tuple(dim for i, dim in enumerate(lhs) if i not in numbers.lhs_batch)
    b = tuple(dim for i, dim in enumerate(rhs) if i not in numbers.rhs_batch)
    is_one_each = len(numbers.lhs_free) == len(numbers.lhs_contract) == len(numbers.rhs_free) == 1
    batch = pick(lhs, numbers.lhs_batch)
    if out is None or out[: len(batch)] != batch or not is_one_each:
        return None
    if not patterns.is_grid(a, b, out[len(batch) :]):
        return None
    return patterns.Plan(Pattern.GRID, a[0], a[1])


def _sliced(name: str, numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims) -> tuple[Dims, Dims]:
    """Where the result is finer than an operand, each device takes its own part of it: no communication."""
    lhs_dims, rhs_dims = list(lhs), list(rhs)

    def finer(have: Dim, want: Dim, *operands: Sequence[Dim]) -> Dim:
        extra = want[len(have) :] if want[: len(have)] == have else ()
        return have if any(axis in dim for axis in extra for dims in operands for dim in dims) else have + extra

    wanted = iter(out)
    for i, j in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True):
        want = next(wanted)
        lhs_dims[i] = rhs_dims[j] = finer(lhs_dims[i], want, lhs_dims, rhs_dims)
        if lhs_dims[i] != want:
            raise ValueError(
                f"{name}: batch dimension {i} of lhs is sharded over {lhs[i] or None} but out_sharding asks for "
                f"{want or None}; reshard the operands first, or the result afterwards (jax.sharding.reshard)"
            )
    for dims, free in ((lhs_dims, numbers.lhs_free), (rhs_dims, numbers.rhs_free)):
        for i in free:
            dims[i] = finer(dims[i], next(wanted), dims)
    return tuple(lhs_dims), tuple(rhs_dims)


def _plan_matrices(
    name: str, numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims | None
) -> tuple[patterns.Plan, tuple[int, ...]]:
    """(plan, order of the columns) of the product as one of matrices.

    What several dimensions are split over counts as one list of axes. Its order matters where ranks share one of them,
    whose axes then come last.
    """
    ahead = len(numbers.lhs_batch)
    rows, cols = pick(lhs, numbers.lhs_free), pick(rhs, numbers.rhs_free)
    contracted = sum(pick(lhs, numbers.lhs_contract), ())
    shared = [i for i, dim in enumerate(rows + cols) if out is not None and out[ahead + i] != dim]
    if out is not None and len(shared) > 1:
        raise ValueError(
            f"{name}: out_sharding {partition_spec(out)} differs from the shardings of lhs and rhs in dimensions "
            f"{[ahead + i for i in shared]} of the result, and one call gathers or scatters one of them; reshard first "
            "(jax.sharding.reshard)"
        )
    first = shared[0] - len(rows) if shared and shared[0] >= len(rows) else 0
    order = sorted(range(len(cols)), key=lambda i: i != first)

    def merged(dims: Dims) -> Dim:
        return sum((dims[i] for i in reversed(order)), ())

    result = None
    if out is not None:
        result = (*(out[ahead : ahead + len(rows)] or ((),)), merged(out[ahead + len(rows) :]))
    try:
        plan = patterns.plan_call(
            name, (*(rows or ((),)), contracted), (contracted, merged(cols)), result, False, False
        )
    except ValueError as error:
        raise ValueError(
            f"{error} (rows are dimensions {numbers.lhs_free} of lhs, columns {numbers.rhs_free} of rhs)"
        ) from None
    return plan, pick(numbers.rhs_free, order)
