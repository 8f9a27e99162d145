"""Plans the two products of a pair of layers together: the first returns the hidden layer as the second takes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.core.contraction.contraction import Contraction
from jaxmp._src.core.sharding import meshes, sharded_call, shardings
from jaxmp._src.core.spec import epilogs, low_precision
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern
from jaxmp._src.core.spec.options import AxisName
from jaxmp._src.core.spec.refusal import InvalidValue, NotAvailable, naming
from jaxmp._src.core.spec.request import Request
from jaxmp._src.core.validation.arguments import validated
from jaxmp._src.core.validation.operand_checks import has_numbers
from jaxmp._src.platform.runtime.types import Shape


@dataclasses.dataclass(frozen=True)
class Label:
    """The names, in messages, of one product of a function, its operands and its bias."""

    function: str
    a: str
    b: str
    bias: str

    @property
    def name(self) -> str:
        """The name of the product, such as "mlp (x @ w_in)"."""
        return f"{self.function} ({self.a} @ {self.b})"

    def naming(self, **others: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context that gives refusals of this product its names."""
        return naming(self.name, a=self.a, b=self.b, bias=self.bias, **others)

    def request(self, x: Any, w: Any, bias: Any, activation: str | None = None, **options: Any) -> Request:
        """Returns the request of the product with its bias and a fused activation."""
        inputs = None if bias is None else {"bias": bias}
        epilog = epilogs.for_activation(activation, bias is not None)
        return Request(self.name, x, w, epilog=epilog, epilog_inputs=inputs, takes_transposed=False, **options)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The products of two layers, in order: operands by name, calls and plans. If XLA partitions the products, only the
    first has a call, and `plans` is empty."""

    operands: tuple[dict[str, Any], dict[str, Any]]
    calls: tuple[sharded_call.Call, ...]
    plans: tuple[Contraction, ...] = ()


def plan_layers(labels: tuple[Label, Label], first: Request, second: Request, axis_name: AxisName | None) -> Layers:
    """Plans both products. `first` has the `in_shardings` of x and both weights, and the hidden layer's sharding as its
    `out_sharding`; `second` has no a yet. `axis_name`: a manual axis that gathers x and scatters y, or None. Raises
    ValueError for `in_shardings` other than a triple, and NotImplementedError for float8 and float4 operands, if both x
    and the first weight are int8, and for an unreduced hidden layer. Raises as `validated` for other arguments."""
    (one, other), x, w_out, ins = labels, first.a, second.b, first.in_shardings
    shardings.check_each(ins, 3, f"each of x, {one.b} and {other.b}")
    arrays = {"x": x, one.b: first.b, other.b: w_out}
    low = {name: y.dtype for name, y in arrays.items() if has_numbers(y) and low_precision.is_low_precision(y.dtype)}
    for argument, dtype in low.items():  # int8 with a wider type multiplies in the wider type
        if low_precision.is_scaled(dtype) or {"x", one.b} <= low.keys():
            raise NotAvailable(
                f"{argument} has dtype {dtype}; layers of 8 bits and fewer need scales "
                "between them: call jaxmp.matmul for each product (examples/05_fp8_linear.py)"
            )
    groups = groups_on_axes(axis_name)
    with one.naming():
        spec, operands, shape = validated_layer(first, groups[0])
        # In the type that the second layer takes. A w_out that is not an array is refused later, by name.
        dtype = spec.out_dtype
        h = jax.ShapeDtypeStruct(shape, jnp.promote_types(dtype, w_out.dtype) if has_numbers(w_out) else dtype)
    with other.naming():
        next_spec, next_operands, shape = validated_layer(second._replace(a=h), groups[1])
    both = operands, next_operands
    with one.naming(out_sharding="hidden_sharding"):
        placement = meshes.place(first._replace(in_shardings=None if ins is None else tuple(ins)[:2]), h.shape)
        meshes.check_summed(placement)
        if placement.mode in (meshes.Mode.AUTO, meshes.Mode.XLA):
            return Layers(both, (sharded_call.make_call(spec, placement, operands),))
    if placement.mode == meshes.Mode.MANUAL:
        specs = spec.regroup(mesh=placement.axes), next_spec.regroup(mesh=placement.axes)
        plans = tuple(each.group.contraction(x.ndim) for each in specs)
        calls = tuple(sharded_call.ManualCall(s, dimension=x.ndim - 2) for s in specs)
        return Layers(both, calls, plans)
    placement = _with_hidden(one, placement)
    with one.naming():
        call = sharded_call.planned_call(spec, placement, operands)
    with other.naming():
        hidden = call.frame.asked or call.frame.out_spec
        where = (hidden, ins[2] if ins is not None else meshes.type_spec(w_out))
        a, b = next_operands["a"], next_operands["b"]
        second = second._replace(a=a, b=b, in_shardings=where, mesh=placement.mesh)
        placement = meshes.place(second, shape)
        next_call = sharded_call.planned_call(next_spec, placement, next_operands)
    return Layers(both, (call, next_call), (call.plan, next_call.plan))


def groups_on_axes(axis_name: AxisName | None) -> tuple[Group, Group]:
    """Returns (the group of an all-gather, the group of a reduce-scatter) over the axis, both without axes for None."""
    patterns = Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER
    on_axes = functools.partial(sharded_call.group_on_axes, outside="leave axis_name out")
    first, second = (Group() if axis_name is None else on_axes(p, axis_name) for p in patterns)
    return first, second


def validated_layer(request: Request, group: Group) -> tuple[MatmulSpec, dict[str, Any], Shape]:
    """Validates a layer's request. Returns (spec, operands by name, the result's shape), with mixed types converted."""
    spec, operands, shape = validated(request, group)
    a, b = low_precision.widened(operands["a"], operands["b"])
    return spec, operands | {"a": a, "b": b}, shape


def _with_hidden(label: Label, placement: meshes.Placement) -> meshes.Placement:
    """Returns the placement with a sharding of the result, the hidden layer; returns `placement` if it already has one.
    The columns have w_in's axes, and the rows have x's other axes. Raises ValueError if x and w_in both shard the
    contraction, because the result is ambiguous."""
    a, b, out = placement.dims
    if out is not None:
        return placement
    if a[-1] and b[0]:
        raise InvalidValue(
            f"the contraction of x @ {label.b} is sharded over {a[-1]} in x and {b[0]} in {label.b}, so the sharding "
            "of its result is ambiguous; pass hidden_sharding"
        )
    rows = tuple(tuple(axis for axis in dim if axis not in b[1]) for dim in a[:-1])
    return dataclasses.replace(placement, dims=(a, b, (*rows, b[1])))
