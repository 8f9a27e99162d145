"""One call of a spec: given a mode and a plan, run under `jit`, on shards or on sharded arrays."""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.lowering import xla_matmul
from jaxmp._src.primitive.primitives import global_amax, has_rows
from jaxmp._src.runtime import jax_compat
from jaxmp._src.sharding import eager_calls, layouts, meshes, patterns
from jaxmp._src.sharding.shard_local import bind_empty, bind_plan, bind_shards, on_gathered
from jaxmp._src.spec import epilogs, low_precision, matmul_spec
from jaxmp._src.spec.caller import operand_name
from jaxmp._src.spec.matmul_spec import Group, MatmulSpec, Pattern, result_shape
from jaxmp._src.validation import result_types
from jaxmp._src.validation.arguments import validated
from jaxmp._src.validation.comm_options import check_comm_options, fit_comm_options
from jaxmp._src.validation.operand_checks import as_array, check_all_reduce, check_relu_aux


@dataclasses.dataclass(frozen=True)
class Call:
    """One planned call, hashable: the spec and the mode.

    For global arrays also the plan; the shardings in which operands enter shard_map and results leave it; those that a
    and b were said to have, where their types do not tell; what is gathered inside; the sharding that d is to have,
    where it is another; and whether d is empty.
    """

    spec: MatmulSpec
    mode: meshes.Mode
    plan: patterns.Plan = patterns.LOCAL_PLAN
    mesh: Any = None
    in_specs: tuple[tuple[str, P], ...] = ()
    out_specs: tuple[tuple[str, P], ...] = ()
    is_explicit: bool = False
    given: tuple[tuple[str, P], ...] = ()
    gathers: tuple[layouts.Gather, ...] = ()
    out_spec: P | None = None
    is_empty: bool = False
    constraint: NamedSharding | None = None
    out_sharding: NamedSharding | None = None


# d alone, or with further results by name.
Results = jax.Array | tuple[jax.Array, dict[str, jax.Array]]


def product(
    name: str,
    a: Any,
    b: Any,
    c: Any,
    epilog_inputs: Any,
    options: dict[str, Any],
    out_sharding: Any,
    in_shardings: Any,
    mesh: Any,
    entry: list[Any] | None,
) -> Results:
    """The result of `jaxmp.matmul`, for the public function `name`; fills the `entry` of `eager_calls` for it."""
    are_rows = options["transpose_b"] and not options["transpose_a"]
    conversion, options = result_types.find(name, a, b, c, epilog_inputs, options, are_rows=are_rows)
    converted = result_types.operands(conversion, a, b, c, epilog_inputs)
    spec, operands = validated(name, *converted, options)
    shape = result_shape(spec, *converted[:2])
    placement = meshes.place(name, a, b, shape, out_sharding, in_shardings, mesh)
    call = make_call(spec, placement, operands, shape, name)
    if entry is None:
        result: Results = conversion.of_result(_result(jaxmp_call(call, operands)))
        return result
    given = eager_calls.given_operands(a, b, c, epilog_inputs)
    compiled = _compiled(call, conversion, tuple((key, operands[key].dtype) for key in given))
    entry.append(compiled)
    return compiled(*given.values())


def collective(
    name: str, pattern: Pattern, a: Any, b: Any, axis_names: Any, c: Any, epilog_inputs: Any, options: dict[str, Any]
) -> Results:
    """The result of a product whose group is named, on the shards of the enclosing shard_map."""
    group = group_on_axes(name, pattern, axis_names)
    a, b, c = map(as_array, (a, b, c))

    def multiply(a: Any, b: Any, c: Any, epilog_inputs: Any, options: dict[str, Any]) -> Results:
        return _collective(name, group, a, b, c, epilog_inputs, options)

    are_rows = options["transpose_b"] and not options["transpose_a"]
    result: Results = result_types.converted(name, multiply, a, b, c, epilog_inputs, options, are_rows=are_rows)
    return result


def _collective(
    name: str, group: Group, a: Any, b: Any, c: Any, epilog_inputs: Any, options: dict[str, Any]
) -> Results:
    spec, operands = validated(name, a, b, c, epilog_inputs, options, group)
    if group.pattern == Pattern.GRID and spec.transpose_a and a.ndim > 2:
        raise ValueError(
            f"{name}: {operand_name(name, 'a')} has {a.ndim} dimensions; with transpose_a=True it must have 2, for its "
            "blocks lie across those of the result: use jax.vmap for the others"
        )
    spec = check_all_reduce(name, spec)
    columns = result_shape(spec, a, b)[-1]
    check_comm_options(name, spec, columns)
    check_relu_aux(name, operands, spec, columns, columns)
    return _result(global_amax(spec, bind_shards(spec, a.ndim - 2, operands), spec.group.axes))


def _result(outputs: dict[str, jax.Array]) -> Results:
    """What the user gets: d, or (d, {name: further result})."""
    rest = {"result_amax" if name == "amax_d" else name: x for name, x in outputs.items() if name != "d"}
    return (outputs["d"], rest) if rest else outputs["d"]


def group_on_axes(name: str, pattern: Pattern, axis_names: Any) -> Group:
    """The group that shares a product inside shard_map."""
    mesh = meshes.manual_mesh()
    if mesh is None:
        raise ValueError(
            f"{name}: works on the shards inside shard_map where an axis is named; outside, leave axis_name out of "
            "jaxmp.mlp, or use jaxmp.matmul, and pass out_sharding"
        )
    meshes.check_all_manual(name, mesh)
    row_axes: tuple[str, ...] = _as_axes(name, axis_names)
    col_axes: tuple[str, ...] = ()
    if pattern == Pattern.GRID:
        if isinstance(axis_names, str) or len(axis_names) != 2:
            raise ValueError(
                f"{name}: axis_names must be a pair, the axis of rows and the axis of columns, got {axis_names!r}"
            )
        row_axes, col_axes = (_as_axes(name, axes) for axes in axis_names)
    axes = row_axes + col_axes
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(f"{name}: axis {axis!r} is not in the mesh, which has {tuple(mesh.axis_names)}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axis names {axes} repeat")
    return Group(pattern, tuple(mesh.shape.items()), row_axes, col_axes)


def _as_axes(name: str, names: Any) -> tuple[str, ...]:
    if not isinstance(names, str | tuple | list | P):
        raise TypeError(f"{name}: takes the name of a mesh axis or a tuple of names, got {names!r}")
    return (names,) if isinstance(names, str) else tuple(names)


def make_call(
    spec: MatmulSpec,
    placement: meshes.Placement,
    operands: dict[str, jax.Array],
    shape: tuple[int, ...],
    name: str = "matmul",
) -> Call:
    """The call of this spec on operands placed so, for d of `shape`."""
    if placement.mode == meshes.Mode.XLA:
        check_left_to_xla(name, spec, placement.why)
        return Call(spec, placement.mode, constraint=placement.constraint, out_sharding=placement.out_sharding)
    if placement.mode != meshes.Mode.SHARDED:
        spec = spec.regroup(mesh=placement.axes)
        if placement.mode == meshes.Mode.MANUAL and spec.asks_all_reduce:
            spec = check_all_reduce(name, spec)
        is_settled = placement.mode != meshes.Mode.AUTO
        has_mesh = is_settled or meshes.is_known(placement, operands["a"], operands["b"])
        check_comm_options(name, spec, shape[-1], is_settled, has_mesh)
        check_relu_aux(name, operands, spec, shape[-1], shape[-1])
        return Call(spec, placement.mode, constraint=placement.constraint)
    return _planned_call(spec, placement, operands, shape, name)


def check_left_to_xla(name: str, spec: MatmulSpec, why: str) -> None:
    """Raise NotImplementedError where a product that XLA partitions is asked to be one of a library."""
    beside = [each for each in (*spec.operand_names, *spec.output_names[1:]) if each not in ("c", "bias")]
    blocks = [each for each in beside if not each.startswith("scale_") or spec.scales.of(each) != low_precision.SCALAR]
    asked = (
        f"implementation={spec.implementation!r}" if spec.implementation in ("host", "cublasmp") else "",
        f"determinism={spec.determinism!r}" if spec.fixed_reduction_order else "",
        f"epilog {spec.epilog.name}" if spec.rule.outputs or spec.rule.inputs not in ((), ("bias",)) else "",
        f"{blocks[0]}" if blocks else "",
    )
    for each in filter(None, asked):
        raise NotImplementedError(
            f"{name}: {each} is not available where XLA partitions the product, for {why}; use a mesh whose axes are "
            "all explicit, or all automatic with in_shardings, and shardings without unreduced and reduced axes"
        )


def _planned_call(
    spec: MatmulSpec, placement: meshes.Placement, operands: dict[str, jax.Array], shape: tuple[int, ...], name: str
) -> Call:
    """`make_call` for global arrays."""
    names, results = spec.operand_names, spec.output_names
    mesh, sizes, a, b = placement.mesh, placement.mesh.shape, operands["a"], operands["b"]
    asked = _asked_result(name, spec, placement)
    given = layouts.Layout(placement.a, placement.b, asked)
    arguments = operand_name(name, "a"), operand_name(name, "b"), "the result"
    for argument, dims, whole in zip(arguments, given, (a.shape, b.shape, shape), strict=True):
        patterns.check_dims(name, argument, dims, whole, sizes)
    find_plan = functools.partial(
        patterns.find_plan,
        transpose_a=spec.transpose_a,
        transpose_b=spec.transpose_b,
        gathers_k=_gathers_k(spec, low_precision.operand_type(a.dtype, b.dtype)),
    )
    plan = find_plan(*given)
    if plan is None or plan.gathers_k:
        layout = layouts.cheapest(_product(spec, a, b, shape, sizes), given)
        plan = find_plan(*layout)
        assert plan is not None, (given, layout)
    layout = layouts.Layout(plan.a, plan.b, plan.out)
    ins: dict[str, patterns.Dims] = {"a": plan.a, "b": plan.b}
    gathers: tuple[layouts.Gather, ...] = ()
    if not spec.fixed_reduction_order:  # whose gradients are sums in an order of their own
        (ins["a"], ins["b"]), gathers = layouts.entries(given, layout)
    for operand in names:
        ins[operand] = _dims(spec, plan, operand)
        if operand in matmul_spec.SCALE_NAMES:
            argument = f"scaling.{operand.removeprefix('scale_')}"
            patterns.check_dims(name, argument, ins[operand], operands[operand].shape, sizes)
    known = {} if placement.is_explicit else {"a": given.a, "b": given.b}
    outs: dict[str, patterns.Dims] = {"d": plan.out}
    for result in results[1:]:
        outs[result] = _dims(spec, plan, result)
    group = Group(plan.pattern, tuple(sizes.items()), plan.row_axes, plan.col_axes)
    columns = shape[-1] // group.size(plan.out[-1])
    spec = spec.replace(group=group, is_typed=True)
    if spec.asks_all_reduce:
        spec = check_all_reduce(name, spec)
    if "relu_aux" in names:
        check_relu_aux(name, operands, spec, shape[-1], columns)
    check_comm_options(name, spec, columns)
    return Call(
        spec,
        placement.mode,
        plan,
        mesh,
        meshes.partition_specs(ins),
        meshes.partition_specs(outs),
        placement.is_explicit,
        meshes.partition_specs(known),
        gathers,
        None if plan.out == asked else meshes.partition_spec(asked),
        0 in shape,
    )


def _asked_result(name: str, spec: MatmulSpec, placement: meshes.Placement) -> patterns.Dims:
    """The sharding that d is to have."""
    if placement.out is not None:
        return placement.out
    *rows, k_a = (*placement.a[:-2], placement.a[-1], placement.a[-2]) if spec.transpose_a else placement.a
    k_b, cols = placement.b[::-1] if spec.transpose_b else placement.b
    return patterns.default_result(name, tuple(rows), (cols,), ((k_a, k_b),))


def _product(
    spec: MatmulSpec, a: jax.Array, b: jax.Array, shape: tuple[int, ...], mesh: Mapping[str, int]
) -> layouts.Product:
    """What a call multiplies, for the search of a layout."""
    rows = string.ascii_lowercase[: a.ndim - 1]
    extents = dict(zip(rows, shape, strict=False)) | {"N": shape[-1], "K": b.shape[1 if spec.transpose_b else 0]}
    beside, operand = (*spec.operand_names, *spec.output_names[1:]), low_precision.operand_type(a.dtype, b.dtype)
    return layouts.Product(
        rows[:-1] + "K" + rows[-1] if spec.transpose_a else rows + "K",
        "NK" if spec.transpose_b else "KN",
        rows + "N",
        tuple((index, layouts.nominal_extent(extent, mesh)) for index, extent in extents.items()),
        tuple(mesh.items()),
        (a.dtype.itemsize, b.dtype.itemsize, spec.out_dtype.itemsize, matmul_spec.accumulator(operand).itemsize),
        keeps_result=any(matmul_spec.DIMS[each] for each in beside if each not in ("c", "bias")),
        gathers_k=_gathers_k(spec, operand),
    )


def _gathers_k(spec: MatmulSpec, operand: np.dtype) -> bool:
    """Whether a grid may gather an operand along k: it reads matrices as they are stored, and its gradients are sums in
    an order of their own."""
    is_plain = not (spec.transpose_a or spec.transpose_b or low_precision.is_low_precision(operand))
    return is_plain and not spec.fixed_reduction_order


def _dims(spec: MatmulSpec, plan: patterns.Plan, name: str) -> patterns.Dims:
    """How an operand or result by name is sharded: like the dimensions of d, or of the operand, that it has.

    But the sums of an operand's own rows are whole in a group, whichever operand the call takes for its a.
    """
    if name in ("scale_a", "scale_b"):
        operand = plan.a if name == "scale_a" else plan.b
        return {low_precision.SCALAR: (), low_precision.OUTER_VEC: operand[:-1]}.get(spec.scales.of(name), operand)
    if not matmul_spec.DIMS[name]:
        return ()
    if len(matmul_spec.DIMS[name]) == 2:
        return plan.out
    dim = plan.out[-2] if matmul_spec.DIMS[name] == "m" else plan.out[-1]
    if name == ("bgradb" if plan.is_transposed else "bgrada"):
        dim = plan.outside_group(dim)
    return (dim,)


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_call(call: Call, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The results of a call by name."""
    return _outputs(call, operands)


@functools.lru_cache(eager_calls.CAPACITY)
def _compiled(
    call: Call, conversion: result_types.Conversion, types: tuple[tuple[str, np.dtype], ...]
) -> Callable[..., Results]:
    """A call as a function of operands in this order, which are cast to these types.

    Without jaxmp_call's static argument, which JAX would hash and compare at every call.
    """

    def jaxmp_call(*operands: jax.Array) -> Results:
        named = ((name, dtype, conversion.of(name, x)) for (name, dtype), x in zip(types, operands, strict=True))
        result: Results = conversion.of_result(_result(_outputs(call, {k: x.astype(t) for k, t, x in named})))
        return result

    return jax.jit(jaxmp_call)


def _outputs(call: Call, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    spec = call.spec
    if call.mode == meshes.Mode.MANUAL:
        return bind_shards(spec, 0, operands)
    if call.mode in (meshes.Mode.AUTO, meshes.Mode.XLA):
        if call.mode == meshes.Mode.AUTO:
            outputs = bind_shards(spec.unsettled(), 0, operands)
        else:
            platform = jax_compat.default_platform()
            outputs = xla_matmul.global_matmul(operands, spec, platform, call.out_sharding)
        if call.constraint is not None:
            outputs["d"] = lax.with_sharding_constraint(outputs["d"], call.constraint)
        return outputs
    if not all(isinstance(extent, int) for x in operands.values() for extent in x.shape):
        return _of_any_extent(call, operands)
    in_specs, out_specs = dict(call.in_specs) | dict.fromkeys(spec.traced, P()), dict(call.out_specs)
    placed = {name: bring(call, name, operands[name], where) for name, where in in_specs.items()}
    body = on_gathered(functools.partial(_bind_plan_globally, call, spec), call.gathers, spec.source_line)
    a, b = placed["a"], placed["b"]
    if call.is_empty:
        types = jax.eval_shape(jax.shard_map(body, mesh=call.mesh, in_specs=(in_specs,), out_specs=out_specs), placed)
        if all(0 in types[name].shape for name in ("bgrada", "bgradb") if name in types):
            return _finished(call, _nothing(call, types, out_specs))
    if 0 in a.shape and 0 in b.shape:
        # Nothing to contract. XLA cannot partition a body whose operands are all empty, so they stay out of it.
        shape = result_shape(spec.regroup(pattern=Pattern.LOCAL), a, b)
        shapes = _shard_shapes(call, shape, out_specs)
        body = functools.partial(bind_empty, call.plan, spec, shapes, low_precision.operand_type(a.dtype, b.dtype))
        placed = {name: x for name, x in placed.items() if name not in ("a", "b")} | {"scalar": jnp.zeros(())}
        in_specs = {name: in_specs.get(name, P()) for name in placed}
    return _finished(call, jax.shard_map(body, mesh=call.mesh, in_specs=(in_specs,), out_specs=out_specs)(placed))


def bring(call: Call, name: str, x: jax.Array, spec: P) -> jax.Array:
    """The operand `name` of a call in the sharding in which it enters shard_map."""
    have = meshes.type_spec(x) if call.is_explicit else dict(call.given).get(name, spec)
    return meshes.reshard(x, call.mesh, have, spec, is_explicit=call.is_explicit)


def _finished(call: Call, outputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The results of a call with d in the sharding that was asked for."""
    if call.out_spec is None:
        return outputs
    have = dict(call.out_specs)["d"]
    d = meshes.reshard(outputs["d"], call.mesh, have, call.out_spec, is_explicit=call.is_explicit)
    return outputs | {"d": d}


def _of_any_extent(call: Call, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """XLA's own product of global arrays with symbolic extents, partitioned by XLA: JAX (0.10 to 0.12) cannot replace
    them by numbers in all that a shard_map holds."""
    where = {name: NamedSharding(call.mesh, spec) for name, spec in call.out_specs}
    product = functools.partial(bind_shards, fit_comm_options(call.spec.local()).unsettled(), 0)
    if call.is_explicit:
        outputs: dict[str, jax.Array] = jax.sharding.auto_axes(product, out_sharding=where)(operands)
    else:
        outputs = {name: lax.with_sharding_constraint(x, where[name]) for name, x in product(operands).items()}
    return outputs


def _nothing(call: Call, types: dict[str, Any], out_specs: dict[str, P]) -> dict[str, Any]:
    """The results of a call whose d is empty, where no sums of operands are among them: they depend on no operand.

    XLA cannot partition a body that uses only operands that are empty, as the gradient of such a call would be.
    """

    def zeros(_: jax.Array) -> dict[str, jax.Array]:
        return {
            name: jnp.zeros(NamedSharding(call.mesh, out_specs[name]).shard_shape(x.shape), x.dtype)
            for name, x in types.items()
        }

    return jax.shard_map(zeros, mesh=call.mesh, in_specs=(P(),), out_specs=out_specs)(jnp.zeros(()))


def _shard_shapes(call: Call, whole: tuple[int, ...], out_specs: dict[str, P]) -> dict[str, tuple[int, ...]]:
    """Shapes on each device of d, which is `whole`, and of the epilog's results but the mask."""
    return {
        name: NamedSharding(call.mesh, out_specs[name]).shard_shape(
            whole if has_rows(name) else whole[-2:-1] if matmul_spec.DIMS[name] == "m" else whole[-1:]
        )
        for name in ("d", *epilogs.RULES[call.spec.epilog].outputs)
        if name != "relu_aux"
    }


def _bind_plan_globally(call: Call, spec: MatmulSpec, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    outputs = bind_plan(call.plan, spec, operands)
    if not (spec.scales.amax_d or spec.scales.amax_aux):
        return outputs
    return global_amax(spec, outputs, tuple(axis for axis, _ in spec.group.mesh))
