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
import string
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.lowering import xla_matmul
from jaxmp._src.ops.dimension_numbers import DimensionNumbers, GivenNumbers, parse, pick
from jaxmp._src.ops.signatures import ShardingPair
from jaxmp._src.runtime import jax_compat
from jaxmp._src.runtime.types import Shape
from jaxmp._src.sharding import layouts, meshes, patterns
from jaxmp._src.sharding.layouts import Layout
from jaxmp._src.sharding.meshes import partition_spec
from jaxmp._src.sharding.patterns import Dim, Dims
from jaxmp._src.sharding.shard_local import bind_plan, gathered
from jaxmp._src.sharding.sharded_call import check_left_to_xla, jaxmp_call, make_call
from jaxmp._src.spec.caller import Caller
from jaxmp._src.spec.matmul_spec import Group, Pattern, accumulator, axes_text, result_shape
from jaxmp._src.spec.options import Implementation, Mesh, Precision, Sharding
from jaxmp._src.validation import operand_checks
from jaxmp._src.validation.arguments import validated
from jaxmp._src.validation.public import public


@public
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

    Shardings and communication are as in `matmul`: the free dimensions of lhs are rows, those of rhs are columns.

    Args:
      lhs, rhs: arrays of any rank; float32, float64, bfloat16, float16, complex64 or complex128.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, as in `lax.dot_general`. For
        batch dimensions see docs/matmul.md.
      out_sharding: sharding of the result; required where a contracted dimension is sharded in both operands.
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
    options = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "determinism": determinism,
    }
    return product(_NAME, lhs, rhs, dimension_numbers, options, out_sharding, in_shardings, mesh)


_NAME = Caller("dot_general", a="lhs", b="rhs")


# One product ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product, hashable. `columns` are rhs's free dimensions in the order in which they fold into columns: one that
    is gathered or scattered comes first, since ranks are the slowest index of what they share. `in_specs` are the
    shardings in which operands enter shard_map, `gathers` what is gathered there, `out_spec` that of the call's result,
    and `asked` the one that it is to have."""

    name: str
    numbers: DimensionNumbers
    options: tuple[tuple[str, Any], ...]
    placement: meshes.Placement
    columns: tuple[int, ...]
    plan: patterns.Plan = patterns.LOCAL_PLAN
    in_specs: tuple[P, ...] = ()
    gathers: tuple[layouts.Gather, ...] = ()
    out_spec: P = dataclasses.field(default_factory=P)
    asked: P = dataclasses.field(default_factory=P)

    @property
    def keeps_rows(self) -> bool:
        """Whether the row dimensions stay apart: one that ranks share, and others are slower."""
        return self.plan.dimension > 0


def product(
    name: str,
    lhs: Any,
    rhs: Any,
    dimension_numbers: GivenNumbers,
    options: dict[str, Any],
    out_sharding: Sharding | None,
    in_shardings: ShardingPair | None,
    mesh: Mesh | None,
) -> jax.Array:
    """The result of `jaxmp.dot_general`, for the public function `name`."""
    lhs, rhs = operand_checks.as_array(lhs), operand_checks.as_array(rhs)
    numbers = parse(name, dimension_numbers, lhs, rhs)
    if options["determinism"] == "topology":
        raise NotImplementedError(
            f'{name}: determinism="topology" is not available, for ranks may hold several contracted dimensions '
            'interleaved; use jaxmp.matmul on matrices, or pass determinism="batch"'
        )
    precision = options["precision"]
    options = options | {"precision": tuple(precision) if isinstance(precision, list) else precision}
    out_shape = numbers.result(lhs.shape, rhs.shape)
    placement = meshes.place(name, lhs, rhs, out_shape, out_sharding, in_shardings, mesh)
    call = _Product(name, numbers, tuple(options.items()), placement, numbers.rhs_free)
    if placement.mode == meshes.Mode.SHARDED:
        call = _planned(call, lhs, rhs)
    d: jax.Array = jaxmp_dot_general(call, lhs, rhs)
    return d


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_dot_general(product: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    placement = product.placement
    out_shape = product.numbers.result(lhs.shape, rhs.shape)
    if placement.mode == meshes.Mode.XLA:
        d = _product_of_xla(product, lhs, rhs)
        return d if placement.constraint is None else lax.with_sharding_constraint(d, placement.constraint)
    if placement.mode != meshes.Mode.SHARDED:
        d = _fold(product, functools.partial(_multiply, product), out_shape, lhs, rhs)
        return d if placement.constraint is None else lax.with_sharding_constraint(d, placement.constraint)
    mesh, is_explicit = placement.mesh, placement.is_explicit
    lhs, rhs = (
        meshes.reshard(x, mesh, partition_spec(have), spec, is_explicit=is_explicit)
        for x, have, spec in zip((lhs, rhs), (placement.a, placement.b), product.in_specs, strict=True)
    )
    body: Callable[..., jax.Array] = functools.partial(_of_shards, product, out_shape)
    operands: tuple[jax.Array, ...] = (lhs, rhs)
    in_specs = product.in_specs
    if 0 in lhs.shape and 0 in rhs.shape:
        # Nothing to multiply. XLA cannot partition a body whose operands are all empty, so they stay out of it.
        preferred = dict(product.options)["preferred_element_type"]
        _, dtype = operand_checks.resolve_dtypes(product.name, lhs, rhs, preferred)
        local_shape = _local_shape(product, out_shape)

        def zeros(_: jax.Array) -> jax.Array:
            return jnp.zeros(local_shape, dtype)

        body, operands, in_specs = zeros, (jnp.zeros(()),), (P(),)
    d = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=product.out_spec)(*operands)
    return meshes.reshard(d, mesh, product.out_spec, product.asked, is_explicit=is_explicit)


def _product_of_xla(product: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The product of global arrays that XLA partitions."""
    options = dict(product.options)
    flags = dict.fromkeys(("transpose_a", "transpose_b"), False)
    dtype, _ = operand_checks.resolve_dtypes(product.name, lhs, rhs, options["preferred_element_type"])
    matrix = jax.ShapeDtypeStruct((1, 1), dtype)
    spec, _ = validated(product.name, matrix, matrix, None, None, options | flags)
    check_left_to_xla(product.name, spec, product.placement.why)
    numbers, platform = product.numbers, jax_compat.default_platform()
    given = ((numbers.lhs_contract, numbers.rhs_contract), (numbers.lhs_batch, numbers.rhs_batch))
    operands = {"a": lhs.astype(dtype), "b": rhs.astype(dtype)}
    return xla_matmul.global_matmul(operands, spec, platform, product.placement.out_sharding, given)["d"]


def _local_shape(product: _Product, out_shape: Shape) -> Shape:
    """The shape of a device's part of the call's result."""
    return NamedSharding(product.placement.mesh, product.out_spec).shard_shape(out_shape)


def _of_shards(product: _Product, out_shape: Shape, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A device's part of the result."""
    whole = gathered(product.gathers, {"a": lhs, "b": rhs}, "")
    multiply = functools.partial(_multiply_shards, product)
    return _fold(product, multiply, _local_shape(product, out_shape), whole["a"], whole["b"])


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


def _planned(product: _Product, lhs: jax.Array, rhs: jax.Array) -> _Product:
    """The product with its plan, and every sharding as the call takes and gives it."""
    name, numbers, placement = product.name, product.numbers, product.placement
    out_shape = numbers.result(lhs.shape, rhs.shape)
    given = Layout(placement.a, placement.b, _asked_result(name, numbers, placement))
    for argument, dims, shape in zip(
        ("lhs", "rhs", "the result"), given, (lhs.shape, rhs.shape, out_shape), strict=True
    ):
        patterns.check_dims(name, argument, dims, shape, placement.mesh.shape)
    found = _find(numbers, given)
    if found is None:
        found = _find(numbers, layouts.cheapest(_described(product, lhs, rhs), given))
        assert found is not None, given
    plan, columns, layout = found
    specs, gathers = [layout.a, layout.b], tuple[layouts.Gather, ...]()
    if dict(product.options)["determinism"] == "run_to_run":  # else gradients are sums in an order of their own
        (specs[0], of_lhs), (specs[1], of_rhs) = (
            layouts.gathers(operand, have, want, layout)
            for operand, have, want in (("a", given.a, layout.a), ("b", given.b, layout.b))
        )
        gathers = of_lhs + of_rhs
    return dataclasses.replace(
        product,
        plan=plan,
        columns=columns,
        in_specs=tuple(map(partition_spec, specs)),
        gathers=gathers,
        out_spec=partition_spec(layout.d),
        asked=partition_spec(given.d),
    )


def _asked_result(name: str, numbers: DimensionNumbers, placement: meshes.Placement) -> Dims:
    """The sharding that the result is to have."""
    if placement.out is not None:
        return placement.out
    lhs, rhs = placement.a, placement.b
    batch = []
    for i, j in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True):
        if lhs[i] and rhs[j] and lhs[i] != rhs[j]:
            raise ValueError(
                f"{name}: batch dimension {i} of lhs is sharded over {axes_text(lhs[i])} but dimension {j} of rhs over "
                f"{axes_text(rhs[j])}; pass out_sharding, or reshard one of them"
            )
        batch.append(lhs[i] or rhs[j])
    contracted = [(lhs[i], rhs[j]) for i, j in zip(numbers.lhs_contract, numbers.rhs_contract, strict=True)]
    free = patterns.default_result(name, pick(lhs, numbers.lhs_free), pick(rhs, numbers.rhs_free), contracted)
    used = [axis for dim in (*batch, *free) for axis in dim]
    if repeated := [axis for axis in sum(batch, ()) if used.count(axis) > 1]:
        raise ValueError(
            f"{name}: a batch dimension and a free one are both sharded over axis {repeated[0]!r}, so the sharding of "
            "the result is ambiguous; pass out_sharding"
        )
    return (*batch, *free)


def _described(product: _Product, lhs: jax.Array, rhs: jax.Array) -> layouts.Product:
    """What the call multiplies, for the search of a layout."""
    numbers = product.numbers
    letters = iter(string.ascii_letters)
    indices = {("lhs", i): next(letters) for i in range(lhs.ndim)}
    same = zip((*numbers.lhs_batch, *numbers.lhs_contract), (*numbers.rhs_batch, *numbers.rhs_contract), strict=True)
    indices |= {("rhs", j): indices["lhs", i] for i, j in same}
    indices |= {("rhs", j): next(letters) for j in numbers.rhs_free}
    a, b = ([indices[side, i] for i in range(x.ndim)] for side, x in (("lhs", lhs), ("rhs", rhs)))
    preferred = dict(product.options)["preferred_element_type"]
    dtype, out = operand_checks.resolve_dtypes(product.name, lhs, rhs, preferred)
    mesh, extents = product.placement.mesh.shape, dict(zip((*a, *b), (*lhs.shape, *rhs.shape), strict=True))
    return layouts.Product(
        "".join(a),
        "".join(b),
        "".join(numbers.result(a, b)),
        tuple((index, layouts.number(extent, mesh)) for index, extent in extents.items()),
        tuple(mesh.items()),
        (lhs.dtype.itemsize, rhs.dtype.itemsize, out.itemsize, accumulator(dtype).itemsize),
        keeps_result=False,
    )


def _find(numbers: DimensionNumbers, layout: Layout) -> tuple[patterns.Plan, tuple[int, ...], Layout] | None:
    """(plan, order of the columns, the layout with what operands take their part of), or None where no call fits."""
    lhs, rhs = _agreed(numbers.lhs_batch, numbers.rhs_batch, layout.a, layout.b)
    plan = _grid(numbers, lhs, rhs, layout.d)
    if plan is not None:
        return plan, numbers.rhs_free, Layout(lhs, rhs, layout.d)
    lhs, rhs = _agreed(numbers.lhs_contract, numbers.rhs_contract, lhs, rhs)
    lhs, rhs = _sliced(numbers, lhs, rhs, layout.d)
    is_batched_alike = (
        pick(lhs, numbers.lhs_batch) == pick(rhs, numbers.rhs_batch) == layout.d[: len(numbers.lhs_batch)]
    )
    is_contracted_alike = pick(lhs, numbers.lhs_contract) == pick(rhs, numbers.rhs_contract)
    used = [[axis for dim in dims for axis in dim] for dims in (lhs, rhs)]
    if not is_batched_alike or not is_contracted_alike or any(len(set(axes)) < len(axes) for axes in used):
        return None
    found = _find_matrices(numbers, lhs, rhs, layout.d)
    return None if found is None else (*found, Layout(lhs, rhs, layout.d))


def _agreed(left: Sequence[int], right: Sequence[int], lhs: Dims, rhs: Dims) -> tuple[Dims, Dims]:
    """The shardings where an operand that holds a dimension of a pair whole takes its part of it."""
    lhs_dims, rhs_dims = list(lhs), list(rhs)
    for i, j in zip(left, right, strict=True):
        lhs_dims[i], rhs_dims[j] = lhs[i] or rhs[j], rhs[j] or lhs[i]
    return tuple(lhs_dims), tuple(rhs_dims)


def _grid(numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims) -> patterns.Plan | None:
    """The plan where every matrix is in blocks on the same two axes."""
    a = tuple(dim for i, dim in enumerate(lhs) if i not in numbers.lhs_batch)
    b = tuple(dim for i, dim in enumerate(rhs) if i not in numbers.rhs_batch)
    batch = pick(lhs, numbers.lhs_batch)
    is_one_each = len(numbers.lhs_free) == len(numbers.lhs_contract) == len(numbers.rhs_free) == 1
    is_batched_alike = batch == pick(rhs, numbers.rhs_batch) == out[: len(batch)]
    if not is_batched_alike or not is_one_each or not patterns.is_grid(a, b, out[len(batch) :]):
        return None
    return patterns.Plan(Pattern.GRID, a[0], a[1])


def _sliced(numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims) -> tuple[Dims, Dims]:
    """Where the result is finer than an operand, each device takes its own part of it: no communication."""
    lhs_dims, rhs_dims = list(lhs), list(rhs)

    def finer(have: Dim, want: Dim, *operands: Sequence[Dim]) -> Dim:
        extra = want[len(have) :] if want[: len(have)] == have else ()
        return have if any(axis in dim for axis in extra for dims in operands for dim in dims) else have + extra

    wanted = iter(out)
    for i, j in zip(numbers.lhs_batch, numbers.rhs_batch, strict=True):
        want = next(wanted)
        if lhs_dims[i] == rhs_dims[j]:
            lhs_dims[i] = rhs_dims[j] = finer(lhs_dims[i], want, lhs_dims, rhs_dims)
    for dims, free in ((lhs_dims, numbers.lhs_free), (rhs_dims, numbers.rhs_free)):
        for i in free:
            dims[i] = finer(dims[i], next(wanted), dims)
    return tuple(lhs_dims), tuple(rhs_dims)


def _find_matrices(
    numbers: DimensionNumbers, lhs: Dims, rhs: Dims, out: Dims
) -> tuple[patterns.Plan, tuple[int, ...]] | None:
    """(plan, order of the columns) of the product as one of matrices.

    What several dimensions are split over counts as one list of axes. Its order matters where ranks share one of them,
    whose axes then come last.
    """
    ahead = len(numbers.lhs_batch)
    rows, cols = pick(lhs, numbers.lhs_free), pick(rhs, numbers.rhs_free)
    contracted = sum(pick(lhs, numbers.lhs_contract), ())
    shared = [i for i, dim in enumerate(rows + cols) if out[ahead + i] != dim]
    if len(shared) > 1:  # a call gathers or scatters one dimension
        return None
    first = shared[0] - len(rows) if shared and shared[0] >= len(rows) else 0
    order = sorted(range(len(cols)), key=lambda i: i != first)

    def merged(dims: Dims) -> Dim:
        return sum((dims[i] for i in reversed(order)), ())

    result = (*(out[ahead : ahead + len(rows)] or ((),)), merged(out[ahead + len(rows) :]))
    plan = patterns.find_plan((*(rows or ((),)), contracted), (contracted, merged(cols)), result, False, False)
    return None if plan is None else (plan, pick(numbers.rhs_free, order))
