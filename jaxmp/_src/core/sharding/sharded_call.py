"""Builds the call of a spec from its mode and plan, to run under `jit`, on shards or on sharded arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.contraction import contraction, planner
from jaxmp._src.core.contraction.contraction import Contraction, Dim, Dims
from jaxmp._src.core.contraction.moves import Gather
from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.primitive.primitives import global_amax
from jaxmp._src.core.sharding import eager_calls, meshes, shardings
from jaxmp._src.core.sharding.on_shards import Frame, frame, on_gathered, on_shards
from jaxmp._src.core.sharding.shard_local import bind_folded, bind_plan, bind_shards
from jaxmp._src.core.spec import low_precision, matmul_spec
from jaxmp._src.core.spec.extents import SPANS, axes_text, spans
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern
from jaxmp._src.core.spec.options import CommOptions
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue, NotAvailable
from jaxmp._src.core.spec.request import Request
from jaxmp._src.core.validation.arguments import converted, validated
from jaxmp._src.core.validation.comm_options import check_comm_options, comm_options_text, fit_comm_options
from jaxmp._src.core.validation.dimension_numbers import DimensionNumbers
from jaxmp._src.core.validation.epilog_checks import check_all_reduce, check_relu_aux
from jaxmp._src.core.validation.result_types import Conversion
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import ArrayType, Operands, Shape, is_symbolic


@dataclasses.dataclass(frozen=True)
class ManualCall:
    """A call on the shards of the enclosing shard_map. `dimension`: the dimension of a that is gathered or scattered.
    `numbers`, here and in other calls: the dimension numbers, or None for a product of matrices."""

    spec: MatmulSpec
    numbers: DimensionNumbers | None = None
    dimension: int = 0

    def __call__(self, operands: Operands) -> Operands:
        return _bind(self.spec, self.numbers, operands, self.dimension)


@dataclasses.dataclass(frozen=True)
class PartitionedCall:
    """A call on global arrays. XLA's partitioner chooses the shardings, except for a constraint on d."""

    spec: MatmulSpec
    numbers: DimensionNumbers | None
    constraint: NamedSharding | None

    def __call__(self, operands: Operands) -> Operands:
        return meshes.constrained(_bind(self.spec.unsettled(), self.numbers, operands), self.constraint)


@dataclasses.dataclass(frozen=True)
class XlaCall:
    """A product of global arrays that XLA computes and partitions. `out_sharding`: d's sharding on explicit axes."""

    spec: MatmulSpec
    numbers: DimensionNumbers | None
    constraint: NamedSharding | None
    out_sharding: NamedSharding | None

    def __call__(self, operands: Operands) -> Operands:
        platform, numbers = jax_compat.default_platform(), self.numbers and self.numbers.given
        outputs = xla_matmul.global_matmul(operands, self.spec, platform, self.out_sharding, numbers)
        return meshes.constrained(outputs, self.constraint)


@dataclasses.dataclass(frozen=True)
class ShardedCall:
    """A planned call on global arrays. `is_empty`: d has no elements."""

    spec: MatmulSpec
    numbers: DimensionNumbers | None
    plan: Contraction
    frame: Frame
    is_empty: bool

    def __call__(self, operands: Operands) -> Operands:
        """Returns the results by name, from shards in `shard_map`; XLA multiplies arrays with symbolic extents."""
        if is_symbolic(*operands.values()):
            return _of_any_extent(self, operands)
        operands = {name: operands[name] for name in (*self.spec.names, *self.spec.traced)}
        body: Callable[[Operands], Operands] = functools.partial(bind_plan, self.plan, self.spec)
        if self.numbers:
            whole = self.numbers.result(operands["a"].shape, operands["b"].shape)
            shape = NamedSharding(self.frame.mesh, self.frame.out_spec).shard_shape(whole)
            body = functools.partial(bind_folded, self.spec, self.numbers, plan=self.plan, shape=shape)
        if self.is_empty or (0 in operands["a"].shape and 0 in operands["b"].shape):
            body, operands = _of_empty(self, body, operands)
        return on_shards(self.frame, body, operands, self.spec.source_line)


Call = ManualCall | PartitionedCall | XlaCall | ShardedCall


def _bind(spec: MatmulSpec, numbers: DimensionNumbers | None, operands: Operands, dimension: int = 0) -> Operands:
    return bind_folded(spec, numbers, operands) if numbers else bind_shards(spec, dimension, operands)


# d, or (d, further results by name).
Results = jax.Array | tuple[jax.Array, Operands]


def product(
    request: Request, entry: eager_calls.Entry | None = None, given: Mapping[str, Any] | None = None
) -> Results:
    """Returns the result of `jaxmp.matmul`. Appends the call, as a function of the operands `given` by name, to its
    `entry` of `eager_calls`; keeps nothing if `entry` or `given` is None."""
    conversion, of_call = converted(request)
    spec, operands, shape = validated(of_call)
    call = make_call(spec, meshes.place(request, shape), operands)
    if entry is None or given is None:
        return conversion.of_result(_result(jaxmp_call(call, operands)))
    types = tuple((name, operands[name].dtype) for name in given)
    run = of_arrays(call, conversion, types)
    entry.append(run)
    return run(*given.values())


def collective(request: Request, pattern: Pattern, *axes: Any) -> Results:
    """Returns the result of a product in `pattern` on shards in shard_map. Takes `axes` as `group_on_axes` does. Raises
    as `group_on_axes` and `jaxmp.matmul`, and ValueError on a grid for a transposed a of more than 2 dimensions."""
    group = group_on_axes(pattern, *axes, outside="use jaxmp.matmul")
    conversion, request = converted(request)
    spec, operands, shape = validated(request, group)
    if spec.contraction.is_grid and spec.transpose_a and request.a.ndim > 2:
        raise InvalidValue(
            f"{{a}} has {request.a.ndim} dimensions; with transpose_a=True it must have 2, because its columns "
            "are rows of the result: use jax.vmap for the others"
        )
    spec, gathers = check_all_reduce(spec), list[Gather]()
    if _takes_narrow(spec, operands) and spec.contraction.is_grid and not (group.col_axes or spec.transpose_a):
        gathers.append(Gather(0, group.row_axes, varies=True, narrow=spec.comm.narrow))
        spec = _without_narrow(spec).ungrouped()
    check_comm_options(spec, shape[-1])
    check_relu_aux(operands, shape[-1], shape[-1])
    multiply = functools.partial(bind_shards, spec, request.a.ndim - 2)
    outputs = on_gathered(multiply, {"b": tuple(gathers)}, spec.source_line)(operands)
    result: Results = conversion.of_result(_result(global_amax(spec, outputs, spec.group.axes)))
    return result


def _result(outputs: Operands) -> Results:
    """Returns what the user gets: d, or (d, {name: further result}); amax_d gets the name "result_amax"."""
    rest = {"result_amax" if name == "amax_d" else name: x for name, x in outputs.items() if name != "d"}
    return (outputs["d"], rest) if rest else outputs["d"]


def group_on_axes(pattern: Pattern, rows: Any, cols: Any = (), *, outside: str) -> Group:
    """Returns the group of these axes, which share a product inside shard_map. `cols`: the axes along a grid's columns.
    Raises ValueError for unknown axes, if not all axes of several devices are manual, and outside shard_map (with the
    advice `outside`), and TypeError for axes that are not names."""
    mesh = meshes.manual_mesh()
    if mesh is None:
        raise InvalidValue(
            f"works on the shards inside shard_map where an axis is named; outside, {outside}, and pass out_sharding"
        )
    if rest := meshes.free_axes(mesh):
        raise InvalidValue(
            f"the enclosing shard_map is manual over {tuple(mesh.manual_axes)} but not over {rest}; make every "
            f"axis manual (leave out axis_names), put the call into a second shard_map, with axis_names={set(rest)}, "
            "or use jaxmp.matmul, which XLA then partitions"
        )
    row_axes, col_axes = _as_axes(rows), _as_axes(cols)
    meshes.check_axes(mesh, row_axes + col_axes)
    return Group(pattern, tuple(mesh.shape.items()), row_axes, col_axes)


def _as_axes(names: Any) -> tuple[str, ...]:
    if not isinstance(names, str | tuple | list | P):
        raise InvalidType(f"takes the name of a mesh axis or a tuple of names, got {names!r}")
    return (names,) if isinstance(names, str) else tuple(names)


def make_call(
    spec: MatmulSpec, placement: meshes.Placement, operands: Operands, numbers: DimensionNumbers | None = None
) -> Call:
    """Returns the call of this spec on operands with this placement: ManualCall, ShardedCall, PartitionedCall (AUTO) or
    XlaCall. Raises ValueError or NotImplementedError for shardings and options that this call does not take."""
    if placement.mode == meshes.Mode.XLA:
        check_left_to_xla(spec, placement.why)
        return XlaCall(spec, numbers, placement.constraint, placement.out_sharding)
    if placement.mode == meshes.Mode.SHARDED:
        return planned_call(spec, placement, operands, numbers)
    spec = spec.regroup(mesh=placement.axes)
    if placement.mode == meshes.Mode.MANUAL:
        spec = check_all_reduce(spec)
    if _has_columns(spec):
        columns = placement.shape[-1]
        check_comm_options(spec, columns, is_settled=placement.mode != meshes.Mode.AUTO)
        check_relu_aux(operands, columns, columns)
    if placement.mode == meshes.Mode.AUTO:
        return PartitionedCall(spec, numbers, placement.constraint)
    return ManualCall(spec, numbers)


def _has_columns(spec: MatmulSpec) -> bool:
    """True if an operand (the mask of relu) or the communication options depend on the columns of d."""
    return "relu_aux" in spec.operand_names or spec.comm != CommOptions()


def check_left_to_xla(spec: MatmulSpec, why: str) -> None:
    """Raises NotImplementedError if a product of XLA was asked for "host" or "cublasmp", "batch" or "topology",
    rounded communication, an epilog with more than bias and activation, an amax, or scales other than scalars."""
    others = [each for each in (*spec.operand_names, *spec.output_names[1:]) if each not in ("c", "bias")]
    blocks = [each for each in others if not each.startswith("scale_") or spec.scales.of(each) != low_precision.SCALAR]
    asked = (
        spec.asked_of_library,
        comm_options_text(spec) if any(spec.comm.narrow) else "",
        f"epilog {spec.epilog.name}" if spec.rule.outputs or spec.rule.inputs not in ((), ("bias",)) else "",
        f"{blocks[0]}" if blocks else "",
    )
    for each in filter(None, asked):
        raise NotAvailable(
            f"{each} is not available where XLA partitions the product, for {why}; use a mesh whose axes are "
            "all explicit, or all automatic with in_shardings"
        )


def check_deferred(spec: MatmulSpec, axes: Dim) -> None:
    """Raises NotImplementedError if a call with a sum deferred over `axes` asks for more than the product and scales of
    a and b: c, an epilog, an all-reduce, an amax, or scales of d. `axes` is for the message only."""
    others = [each for each in (*spec.operand_names, *spec.output_names[1:]) if each not in ("scale_a", "scale_b")]
    if others or spec.epilog or spec.asks_all_reduce:
        raise NotAvailable(
            f"{others[0] if others else f'epilog {spec.epilog.name}'} is not available with an out_sharding that is "
            f"unreduced over {axes_text(axes)}, because it would come before the sum; apply it to the sum"
        )


def planned_call(
    spec: MatmulSpec, placement: meshes.Placement, operands: Operands, numbers: DimensionNumbers | None = None
) -> ShardedCall:
    """Returns the call for global arrays with known shardings. Raises as `make_call`."""
    mesh, a, b, shape = placement.mesh, operands["a"], operands["b"], placement.shape
    product = contraction.of_matrices(a.ndim, transpose_a=spec.transpose_a, transpose_b=spec.transpose_b)
    product = numbers.product(a.ndim, b.ndim) if numbers else product
    shapes = a.shape, b.shape, shape
    given = shardings.with_dims(product, placement.dims, shapes, mesh.shape, placement.unreduced)
    if given.unreduced:
        check_deferred(spec, given.unreduced)
    plan = planned(spec, given, (a, b), shape, mesh.shape)
    plan = plan.with_whole_b() if any(spec.comm.narrow) else plan
    spec = check_all_reduce(spec.replace(is_typed=True, group=Group.of(plan, tuple(mesh.shape.items()))))
    where, (of_a, of_b, asked) = (mesh, placement.is_explicit), given.layout
    arrays: list[tuple[str, Dims | None, Dims]] = [("a", of_a, plan.layout.a), ("b", of_b, plan.layout.b)]
    for name in spec.operand_names:
        dims = dims_of(spec, plan, name)
        if name in matmul_spec.SCALE_NAMES:
            argument = f"scaling.{name.removeprefix('scale_')}"
            shardings.check_dims(argument, dims, operands[name].shape, mesh.shape)
        arrays.append((name, None, dims))
    outs = tuple((name, dims_of(spec, plan, name)) for name in spec.output_names)
    # Under a level gradients have their own order of sums, so they cannot be a gather's transpose.
    layout = None if spec.fixed_reduction_order else plan.layout
    # All ranks that gather an operand compute the same sums of it, so the sums do not vary over these axes.
    summed = tuple(name for name in "ab" if f"bgrad{name}" in spec.output_names)
    made = frame(where, tuple(arrays), layout, outs, asked, plan.unreduced, summed=summed)
    entry = dict(made.entries)["b"]
    if _takes_narrow(spec, operands) and entry.gathers and entry.spec == meshes.partition_spec(of_b):
        spec, made = _without_narrow(spec), made.with_narrow_b(spec.comm.narrow)
    if _has_columns(spec):
        columns = shape[-1] // spec.group.size(plan.layout.d[-1])
        check_relu_aux(operands, shape[-1], columns)
        check_comm_options(spec, columns)
    return ShardedCall(spec, numbers, plan, made, 0 in shape)


def _takes_narrow(spec: MatmulSpec, operands: Operands) -> bool:
    """True if `comm` asks to round b before its gather, b has floats of 16 or 32 bits, and no extent is symbolic."""
    is_wide = operands["b"].dtype.name in low_precision.WIDE and not is_symbolic(operands["a"], operands["b"])
    return any(spec.comm.narrow) and is_wide


def _without_narrow(spec: MatmulSpec) -> MatmulSpec:
    return spec.replace(comm=dataclasses.replace(spec.comm, weights=None, gradients=None))


def planned(
    spec: MatmulSpec,
    given: Contraction,
    ab: Sequence[ArrayType],
    shape: Shape,
    mesh: Mapping[str, int],
    *,
    shares_columns: bool = True,
) -> Contraction:
    """Plans a product of `ab` (a, b) and d of `shape` on a mesh with these sizes. `given`: the product with the
    shardings that the arrays have. `shares_columns`: as in `planner.Terms`."""
    (a, b), others = ab, (*spec.operand_names, *spec.output_names[1:])
    operand = low_precision.operand_type(a.dtype, b.dtype)
    of_b, of_sums = 0 if any(spec.comm.narrow) else b.dtype.itemsize, matmul_spec.accumulator(operand).itemsize
    terms = planner.Terms(
        planner.extents_of(given, (a.shape, b.shape, shape), mesh),
        tuple(mesh.items()),
        (a.dtype.itemsize, of_b, spec.out_dtype.itemsize, of_sums),
        keeps_result=any(SPANS.get(each) for each in others if each not in ("c", "bias")),
        # No operand is gathered along k if its gradient has to be a sum in a fixed order, or it has scales along k.
        gathers_k=not (spec.fixed_reduction_order or low_precision.is_scaled(operand)),
        shares_columns=shares_columns,
    )
    return planner.plan(given, terms)


def dims_of(spec: MatmulSpec, plan: Contraction, name: str) -> Dims:
    """Returns the sharding of an operand or result. Each dimension is sharded as in d, a or b; a scalar has (). Only
    axes outside the group shard bgrada, or bgradb if the call takes b as its first operand."""
    found = spans(spec, name)
    if name in ("a", "b", "scale_a", "scale_b"):
        operand: Dims = getattr(plan.layout, name[-1])
        own = dict(zip((span.dim for span in spans(spec, name[-1])), operand[-2:], strict=True))
        return (*operand[:-2], *(own[span.dim] for span in found)) if found else ()
    if len(found) != 1:
        return plan.layout.d if found else ()
    dim = plan.layout.d[-2 if found[0].dim == "m" else -1]
    if name == ("bgradb" if plan.is_transposed else "bgrada"):
        dim = plan.outside_group(dim)
    return (dim,)


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_call(call: Call, operands: Operands) -> Operands:
    """Returns the results of a call by name; under jit, with the call as a static argument."""
    return call(operands)


@functools.lru_cache(eager_calls.CAPACITY)
def of_arrays(call: Call, conversion: Conversion, types: tuple[tuple[str, np.dtype], ...]) -> Callable[..., Results]:
    """Returns a call as a jitted function of operands in the order of `types`. The function casts them to these types
    as `validated` does. It has no static argument, which JAX would hash at every call."""

    def jaxmp_call(*operands: jax.Array) -> Results:
        named = {}
        for (name, dtype), x in zip(types, operands, strict=True):
            x = conversion.of(name, x)
            named[name] = x if x.dtype == dtype and name not in ("c", "bias") else x.astype(dtype)
        return conversion.of_result(_result(call(named)))

    return jax.jit(jaxmp_call)


def _of_empty(
    call: ShardedCall, run: Callable[[Operands], Operands], operands: Operands
) -> tuple[Callable[[Operands], Operands], Operands]:
    """Returns (body, operands) of a call with an empty d or nothing to contract. `run`: the body of other calls. XLA
    cannot partition a body with only empty operands, nor the gradient of one that uses only these. So the body makes an
    empty a or b, and gets an unused "scalar". It returns zeros for an empty d, unless bgrada or bgradb is not empty."""
    mesh, layout = call.frame.mesh, call.plan.layout
    empty = {name: x for name, x in operands.items() if name in ("a", "b") and 0 in x.shape}

    def made(name: str, x: jax.Array) -> jax.Array:
        dims: Dims = getattr(layout, name)
        shape = NamedSharding(mesh, meshes.partition_spec(dims)).shard_shape(x.shape)
        return cast_varying(jnp.zeros(shape, x.dtype), sum(dims, ()))

    def body(rest: Operands) -> Operands:
        operands = rest | {name: made(name, x) for name, x in empty.items()}
        if call.is_empty:
            types = jax.eval_shape(run, operands)
            if all(0 in types[name].shape for name in ("bgrada", "bgradb") if name in types):
                return {name: jnp.zeros(x.shape, x.dtype) for name, x in types.items()}
        return run(operands)

    rest = {name: x for name, x in operands.items() if name not in empty}
    return body, rest | {"scalar": jnp.zeros(())}


def _of_any_extent(call: ShardedCall, operands: Operands) -> Operands:
    """Returns the results of XLA's own product, by name, for arrays with symbolic extents. JAX (0.10 to 0.12) cannot
    replace these extents by numbers everywhere inside a shard_map. Drops `comm` options as `fit_comm_options` does."""
    where = {name: NamedSharding(call.frame.mesh, spec) for name, spec in call.frame.outs}
    product = functools.partial(_bind, fit_comm_options(call.spec.local()).unsettled(), call.numbers)
    if call.frame.is_explicit:
        outputs: Operands = jax.sharding.auto_axes(product, out_sharding=where)(operands)
        return outputs
    return {name: lax.with_sharding_constraint(x, where[name]) for name, x in product(operands).items()}
