"""The two products of a pair of layers, planned together: the hidden layer leaves the first as the second takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.contraction import contraction
from jaxmp._src.contraction.contraction import Contraction
from jaxmp._src.sharding import meshes, sharded_call
from jaxmp._src.spec import epilogs, low_precision
from jaxmp._src.spec.caller import Caller
from jaxmp._src.spec.matmul_spec import Group, MatmulSpec, Pattern, result_shape
from jaxmp._src.spec.options import AxisName
from jaxmp._src.validation.arguments import validated


@dataclasses.dataclass(frozen=True)
class Labels:
    """What messages call the function, its two weights and their biases."""

    function: str
    w_in: str
    b_in: str
    w_out: str
    b_out: str

    @property
    def first(self) -> Caller:
        name = f"{self.function} (x @ {self.w_in})"
        return Caller(name, takes_transposed=False, a="x", b=self.w_in, bias=self.b_in)

    @property
    def second(self) -> Caller:
        name = f"{self.function} (hidden @ {self.w_out})"
        return Caller(name, takes_transposed=False, a="hidden", b=self.w_out, bias=self.b_out)


def check_given(labels: Labels, x: Any, in_shardings: Any) -> None:
    """Raise ValueError for an x of one dimension, and for shardings that are no triple."""
    if getattr(x, "ndim", 0) == 1:
        raise ValueError(
            f"{labels.function}: x must have at least 2 dimensions, got 1 (shape {tuple(x.shape)}); pass x[None]"
        )
    if in_shardings is not None and (isinstance(in_shardings, str) or len(in_shardings) != 3):
        raise ValueError(
            f"{labels.function}: in_shardings must be a triple, one sharding each for x, {labels.w_in} and "
            f"{labels.w_out}, got {in_shardings!r}"
        )


@dataclasses.dataclass(frozen=True)
class Layers:
    """The products of two layers: their specs, operands by name, plans and, of global arrays, calls; where XLA
    partitions only the call of the first, and no plan."""

    mode: meshes.Mode
    specs: tuple[MatmulSpec, MatmulSpec]
    operands: tuple[dict[str, Any], dict[str, Any]]
    plans: tuple[Contraction, ...] = ()
    calls: tuple[sharded_call.ShardedCall, ...] = ()
    first: sharded_call.Call | None = None


def plan_layers(
    labels: Labels,
    x: Any,
    w_in: Any,
    b_in: Any,
    fused: str | None,
    w_out: Any,
    b_out: Any,
    axis_name: AxisName | None,
    shardings: dict[str, Any],
    options: dict[str, Any],
) -> Layers:
    """Both products, the first with a fused activation or none."""
    for argument, operand in (("x", x), (labels.w_in, w_in), (labels.w_out, w_out)):
        if low_precision.is_low_precision(getattr(operand, "dtype", np.float32)):
            raise NotImplementedError(
                f"{labels.function}: {argument} has dtype {operand.dtype}; layers of 8 bits and fewer need scales "
                "between them: call jaxmp.matmul for each product (examples/05_fp8_linear.py)"
            )
    groups = groups_on_axes(labels, axis_name)
    spec, ins = _validated(labels.first, x, w_in, b_in, fused, options, groups[0])
    h = jax.ShapeDtypeStruct(result_shape(spec, x, w_in), _promoted(spec.out_dtype, w_out))
    next_spec, outs = _validated(labels.second, h, w_out, b_out, None, options, groups[1])
    operands = ins, outs
    given = None if shardings["ins"] is None else tuple(shardings["ins"])[:2]
    placement = meshes.place(labels.first, x, w_in, h.shape, shardings["hidden"], given, shardings["mesh"])
    if placement.mode in (meshes.Mode.AUTO, meshes.Mode.XLA):
        call = sharded_call.make_call(spec, placement, ins, h.shape, labels.first)
        return Layers(placement.mode, (spec, next_spec), operands, first=call)
    if placement.mode == meshes.Mode.MANUAL:
        spec, next_spec = (s.regroup(mesh=placement.axes) for s in (spec, next_spec))
        plans = tuple(contraction.on_axes(s.group.pattern, s.group.row_axes, ndim=x.ndim) for s in (spec, next_spec))
        return Layers(placement.mode, (spec, next_spec), operands, plans)
    first, second = _calls(labels, placement, (spec, next_spec), operands, w_out, shardings)
    return Layers(placement.mode, (first.spec, second.spec), operands, (first.plan, second.plan), (first, second))


def groups_on_axes(labels: Labels, axis_name: AxisName | None) -> tuple[Group, Group]:
    """The groups of the two products: x's rows are gathered over the axis, y's are scattered."""
    if axis_name is None:
        return Group(), Group()
    pair = Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER
    first, second = (sharded_call.group_on_axes(labels.function, pattern, axis_name) for pattern in pair)
    return first, second


def _validated(
    name: str, x: Any, w: Any, bias: Any, activation: str | None, options: dict[str, Any], group: Group
) -> tuple[MatmulSpec, dict[str, Any]]:
    epilog = epilogs.for_activation(activation, bias is not None)
    inputs = {} if bias is None else {"bias": bias}
    spec, operands = validated(name, x, w, None, inputs, options | {"epilog": epilog}, group)
    a, b = low_precision.widened(operands["a"], operands["b"])
    return spec, operands | {"a": a, "b": b}


def _promoted(dtype: np.dtype, w: Any) -> np.dtype:
    """The type in which the second layer takes the hidden one; what is no array is refused later, by name."""
    return jnp.promote_types(dtype, w.dtype) if hasattr(w, "dtype") else dtype


def _calls(
    labels: Labels,
    placement: meshes.Placement,
    specs: tuple[MatmulSpec, ...],
    operands: tuple[dict[str, Any], ...],
    w_out: jax.Array,
    shardings: dict[str, Any],
) -> tuple[sharded_call.ShardedCall, sharded_call.ShardedCall]:
    """Both calls on global arrays; the hidden layer keeps the columns of w_in and the other axes of x's rows."""
    if placement.out is None:
        if placement.a[-1] and placement.b[0]:
            raise ValueError(
                f"{labels.function}: the contraction of x @ {labels.w_in} is sharded over {placement.a[-1]} in x and "
                f"{placement.b[0]} in {labels.w_in}, so the sharding of its result is ambiguous; pass hidden_sharding"
            )
        cols = placement.b[1]
        rows = tuple(tuple(axis for axis in dim if axis not in cols) for dim in placement.a[:-1])
        placement = dataclasses.replace(placement, out=(*rows, cols))
    shape = result_shape(specs[0], operands[0]["a"], operands[0]["b"])
    first = sharded_call.planned_call(specs[0], placement, operands[0], shape, labels.first)
    hidden, given = first.frame.asked or first.frame.out_spec, shardings["ins"]
    w = operands[1]["b"]
    h = operands[1]["a"]
    where = (hidden, given[2] if given is not None else meshes.type_spec(w_out))
    shape = result_shape(specs[1], h, w)
    second = meshes.place(labels.second, h, w, shape, shardings["out"], where, placement.mesh)
    return first, sharded_call.planned_call(specs[1], second, operands[1], shape, labels.second)
