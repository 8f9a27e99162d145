"""One call between its arguments and its bind: validated, given a mode and a plan, run under `jit`."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp import _bgrad, _compat, _epilog, _mesh, _precision, _sharding, _spec, _xla
from jaxmp._epilog import Epilog
from jaxmp._primitive import bind, bind_rows, has_rows
from jaxmp._spec import MatmulSpec, Pattern

SPEC_OPTIONS = [
    "alpha",
    "beta",
    "transpose_a",
    "transpose_b",
    "conjugate_a",
    "conjugate_b",
    "epilog",
    "precision",
    "preferred_element_type",
    "implementation",
    "communication_dtype",
    "algorithm",
    "comm_sm_count",
]


HINTS = ("communication_dtype", "algorithm", "comm_sm_count")


@dataclasses.dataclass(frozen=True)
class _Call:
    """One validated call, hashable: the spec and the mode; for global arrays the plan and every sharding."""

    spec: MatmulSpec
    mode: _mesh.Mode
    plan: _sharding.Plan = _sharding.LOCAL_PLAN
    mesh: Any = None
    in_specs: tuple[P, ...] = ()
    out_specs: tuple[P, ...] = ()
    is_explicit: bool = False
    constraint: NamedSharding | None = None


def validated(name: str, a, b, c, epilog_inputs, options: dict, pattern: dict | None = None):
    """(spec, operands by name in the types of the call) from what the user passed."""
    unknown = sorted(set(options) - set(SPEC_OPTIONS))
    if unknown:
        raise TypeError(f"{name}: unexpected keyword arguments {unknown}; known are {SPEC_OPTIONS}")
    _spec.check_array(name, "a", a, at_least=2)
    _spec.check_array(name, "b", b, ndim=2)
    operand, out = _spec.resolve_dtypes(name, a, b, options.get("preferred_element_type"))
    _spec.check_implementation(name, options.get("implementation"))
    spec = MatmulSpec(
        out_dtype=out,
        transpose_a=bool(options.get("transpose_a", False)),
        transpose_b=bool(options.get("transpose_b", False)),
        conjugate_a=_spec.check_conjugate(name, "conjugate_a", options.get("conjugate_a", False), a),
        conjugate_b=_spec.check_conjugate(name, "conjugate_b", options.get("conjugate_b", False), b),
        alpha=_spec.check_scalar(name, "alpha", options.get("alpha", 1.0), out),
        precision=_precision.resolve(name, options.get("precision"), operand, out),
        implementation=options.get("implementation"),
        **_spec.resolve_hints(name, out, operand, *(options.get(hint) for hint in HINTS)),
        **(pattern or {}),
    )
    _spec.check_local_shapes(name, spec, a.shape[-2:], b.shape)
    shape = result_shape(spec, a, b)
    beta = _spec.check_c(name, c, options.get("beta"), out, shape)
    epilog = options.get("epilog", Epilog.NONE)
    spec, inputs = _spec.check_epilog(name, spec, epilog, epilog_inputs, shape, a.ndim)
    operands = {"a": a.astype(operand), "b": b.astype(operand)}
    operands |= inputs if c is None else {"c": c.astype(out), **inputs}
    return spec.replace(beta=beta, has_c=c is not None), operands


def result_shape(spec: MatmulSpec, a, b) -> tuple[int, ...]:
    return (*a.shape[:-2], *_spec.output_shape(spec, a.shape[-2:], b.shape))


def result(outputs: dict[str, Any]):
    """What the user gets: d, or (d, {name: further result})."""
    rest = {name: x for name, x in outputs.items() if name != "d"}
    return (outputs["d"], rest) if rest else outputs["d"]


def collective(name: str, pattern: Pattern, a, b, axis_names, c, epilog_inputs, options: dict):
    mesh = _mesh.manual_mesh(name)
    if mesh is None:
        raise ValueError(f"{name}: works on the shards inside shard_map; outside, use jaxmp.matmul with out_sharding")
    row_axes: tuple[str, ...] = _as_axes(axis_names)
    col_axes: tuple[str, ...] = ()
    if pattern == Pattern.GRID:
        if isinstance(axis_names, str) or len(axis_names) != 2:
            raise ValueError(
                f"{name}: axis_names must be a pair, the axis of rows and the axis of columns, got {axis_names!r}"
            )
        row_axes, col_axes = map(_as_axes, axis_names)
    axes = row_axes + col_axes
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(f"{name}: axis {axis!r} is not in the mesh, which has {tuple(mesh.axis_names)}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axis names {axes} repeat")
    where = {"pattern": pattern, "mesh": tuple(mesh.shape.items()), "row_axes": row_axes, "col_axes": col_axes}
    spec, operands = validated(name, a, b, c, epilog_inputs, options, where)
    _spec.check_hints(name, spec)
    if pattern == Pattern.GRID and spec.transpose_a and a.ndim > 2:
        raise ValueError(
            f"{name}: a has {a.ndim} dimensions; with transpose_a=True it must have 2, for its blocks lie across those "
            "of the result: use jax.vmap for the others"
        )
    spec = _spec.check_all_reduce(name, spec)
    _spec.check_relu_aux(name, operands, spec, result_shape(spec, a, b)[-1])
    return result(_bind_shards(spec, a.ndim - 2, operands))


def _as_axes(names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def make_call(spec: MatmulSpec, placement: _mesh.Placement, operands) -> _Call:
    shape = result_shape(spec, operands["a"], operands["b"])
    if placement.mode != _mesh.Mode.SHARDED:
        spec = spec.replace(mesh=placement.axes)
        if placement.mode == _mesh.Mode.MANUAL:
            spec = _spec.check_all_reduce("matmul", spec)
        _spec.check_hints("matmul", spec, is_settled=placement.mode != _mesh.Mode.AUTO)
        _spec.check_relu_aux("matmul", operands, spec, shape[-1])
        return _Call(spec, placement.mode, constraint=placement.constraint)
    plan = _sharding.plan_call("matmul", placement.a, placement.b, placement.out, spec.transpose_a, spec.transpose_b)
    mesh = placement.mesh
    for argument, dims, x in (
        ("a", plan.a, operands["a"].shape),
        ("b", plan.b, operands["b"].shape),
        ("the result", plan.out, shape),
    ):
        _sharding.check_dims("matmul", argument, dims, x, mesh.shape)
    _spec.check_relu_aux("matmul", operands, spec, shape[-1], math.prod(mesh.shape[axis] for axis in plan.out[-1]))
    in_specs = [plan.a, plan.b, *(_dims(plan, name) for name in _spec.operand_names(spec))]
    out_specs = [_dims(plan, name) for name in _spec.output_names(spec)]
    spec = spec.replace(pattern=plan.pattern, mesh=placement.axes, row_axes=plan.row_axes, col_axes=plan.col_axes)
    spec = _spec.check_all_reduce("matmul", spec)
    _spec.check_hints("matmul", spec)
    return _Call(
        spec, placement.mode, plan, mesh, _partition_specs(in_specs), _partition_specs(out_specs), placement.is_explicit
    )


def _dims(plan: _sharding.Plan, name: str) -> _sharding.Dims:
    """How an operand or result by name is sharded: like the dimensions of d that it has.

    But the sums of an operand's own rows are whole in a group, whichever operand the call takes for its a.
    """
    if has_rows(name):
        return plan.out
    dim = plan.out[-2] if _spec.DIMS[name] == "m" else plan.out[-1]
    if name == ("bgradb" if plan.is_swapped else "bgrada"):
        dim = _outside(plan, dim)
    return (dim,)


def _outside(plan: _sharding.Plan, dim: _sharding.Dim) -> _sharding.Dim:
    return tuple(axis for axis in dim if axis not in plan.row_axes + plan.col_axes)


def _partition_specs(dims) -> tuple[P, ...]:
    return tuple(P(*(dim or None for dim in entry)) for entry in dims)


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_call(call: _Call, operands: dict[str, Any]) -> dict[str, Any]:
    """The results of a call by name."""
    spec = call.spec
    if call.mode == _mesh.Mode.MANUAL:
        return _bind_shards(spec, 0, operands)
    if call.mode == _mesh.Mode.AUTO:
        outputs = _bind_shards(spec, 0, operands, auto=True)
        if call.constraint is not None:
            outputs["d"] = lax.with_sharding_constraint(outputs["d"], call.constraint)
        return outputs
    in_specs = dict(zip(("a", "b", *_spec.operand_names(spec)), call.in_specs, strict=True))
    out_specs = dict(zip(_spec.output_names(spec), call.out_specs, strict=True))
    placed = {name: _reshard(call, name, operands[name], in_specs[name]) for name in in_specs}
    body = functools.partial(_bind_plan, call.plan, spec)
    a, b = placed["a"], placed["b"]
    if 0 in a.shape[-2:] and 0 in b.shape:
        # Nothing to contract. XLA cannot partition a body whose operands are all empty, so they stay out of it.
        whole = result_shape(spec.replace(pattern=Pattern.LOCAL), a, b)
        shapes = {
            name: NamedSharding(call.mesh, out_specs[name]).shard_shape(
                whole if has_rows(name) else whole[-2:-1] if _spec.DIMS[name] == "m" else whole[-1:]
            )
            for name in ("d", *_epilog.rule(spec.epilog).outputs)
            if name != "relu_aux"
        }
        body = functools.partial(_bind_empty, call.plan, spec, shapes, a.dtype)
        placed = {name: placed[name] for name in _spec.operand_names(spec)} | {"scalar": jnp.zeros(())}
        in_specs = {name: in_specs.get(name, P()) for name in placed}
    return jax.shard_map(body, mesh=call.mesh, in_specs=(in_specs,), out_specs=out_specs)(placed)


def _reshard(call: _Call, argument: str, x, spec: P):
    """Bring an explicit operand to the finer sharding of the plan: each device takes its part of what it has."""
    if not call.is_explicit:
        return x
    have = jax.typeof(x).sharding
    dims, wanted = (_normal(s, x.ndim) for s in (P() if have.mesh.empty else have.spec, spec))
    if not have.mesh.empty and dims == wanted:
        return x
    if any(want[: len(dim)] != dim for dim, want in zip(dims, wanted, strict=True)):
        raise ValueError(
            f"matmul: {argument} is sharded {have.spec}, but this call needs it {spec}; "
            "reshard it first (jax.sharding.reshard)"
        )
    return jax.sharding.reshard(x, NamedSharding(call.mesh, spec))


def _normal(spec: P, ndim: int) -> _sharding.Dims:
    return _sharding.to_dims("matmul", "operand", spec, ndim)


def _bind_plan(plan: _sharding.Plan, spec: MatmulSpec, operands: dict[str, Any]) -> dict[str, Any]:
    """One device's part of a planned call."""
    a, b = operands["a"], operands["b"]
    if plan.gather == "a":
        is_last = plan.dimension == a.ndim - 2
        a = _gather(plan, a, a.ndim - 1 if spec.transpose_a and is_last else plan.dimension)
    elif plan.gather == "b":
        b = _gather(plan, b, 0 if spec.transpose_b else 1)
    if not plan.is_swapped:
        outputs = _bind_shards(spec, plan.dimension, operands | {"a": a, "b": b})
        return _sum_over_data(outputs, _outside(plan, sum(plan.out[:-1], ())))
    # D = (op(b)^T @ op(a)^T)^T: the columns of D take the part that rows have in the pattern.
    rows, a, is_transposed = _flat_rows(spec, a)
    swapped = spec.bilinear(
        transpose_a=not spec.transpose_b,
        transpose_b=not is_transposed,
        conjugate_a=spec.conjugate_b,
        conjugate_b=spec.conjugate_a,
        out_dtype=_spec.accumulator(a.dtype),
        is_typed=_compat.is_vma_checked(),
        epilog=_SWAPPED.get(spec.epilog, Epilog.NONE),
    )
    z, *gradient = bind(_spec.fit_hints(swapped), b, a).values()
    if gradient:
        rest = _apply_epilog(z.T, operands, spec.replace(alpha=1.0, epilog=Epilog.NONE), rows)
        return rest | {_epilog.rule(spec.epilog).gradient: gradient[0].astype(spec.out_dtype)}
    outputs = _apply_epilog(z.T, operands, spec.replace(alpha=1.0), rows)
    return _sum_over_data(outputs, sum(plan.out[:-1], ()))


# The transposed product has op(b) where this one has op(a).
_SWAPPED = {Epilog.BGRADA: Epilog.BGRADB, Epilog.BGRADB: Epilog.BGRADA}


def _sum_over_data(outputs: dict[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
    """Bias gradients of d, summed over the axes that share its rows beside the call's group."""
    with jax.named_scope(_bgrad.SCOPE):
        return {name: lax.psum(x, axes) if axes and _bgrad.summed(name) == "d" else x for name, x in outputs.items()}


def _gather(plan: _sharding.Plan, x, dimension: int):
    """The gather that out_sharding asks for where the ranks of a group would otherwise compute the same."""
    if x.size == 0:  # XLA gathers nothing that is empty
        shape = list(x.shape)
        shape[dimension] *= lax.axis_size(plan.gather_axes)
        return jnp.zeros(shape, x.dtype)
    with jax.named_scope("jaxmp_all_gather"):
        return lax.all_gather(x, plan.gather_axes, axis=dimension, tiled=True, to="invarying")


def _flat_rows(spec: MatmulSpec, a):
    """(row extents, a as a matrix, whether it is stored transposed); leading dimensions fold into rows."""
    if a.ndim == 2:
        return (a.shape[1 if spec.transpose_a else 0],), a, spec.transpose_a
    if spec.transpose_a:
        a = a.swapaxes(-1, -2)
    return a.shape[:-1], a.reshape(-1, a.shape[-1]), False


def _apply_epilog(z, operands: dict[str, Any], spec: MatmulSpec, rows: tuple[int, ...]) -> dict[str, Any]:
    """The epilog of a product that a call has left plain; `rows` are the extents that fold into z's rows.

    A bias gradient of d is that of this device's rows.
    """
    extra = {name: operands[name] for name in _spec.operand_names(spec)}
    folded = [x.reshape(z.shape[0], x.shape[-1]) if has_rows(name) else x for name, x in extra.items()]
    local = spec.replace(pattern=Pattern.LOCAL)
    outputs = dict(zip(_spec.output_names(spec), _xla.apply_epilog(z, folded, local), strict=True))
    return {name: x.reshape(*rows, x.shape[-1]) if has_rows(name) else x for name, x in outputs.items()}


def _bind_empty(
    plan: _sharding.Plan, spec: MatmulSpec, shapes: dict[str, tuple[int, ...]], dtype, operands: dict[str, Any]
) -> dict[str, Any]:
    """The epilog of a sum over nothing; `shapes` are those of the results on each device."""
    gradient, shape = _epilog.rule(spec.epilog).gradient, shapes["d"]
    if _bgrad.summed(gradient) in ("a", "b"):
        rest = _bind_empty(plan, spec.replace(epilog=Epilog.NONE), shapes, dtype, operands)
        return rest | {gradient: jnp.zeros(shapes[gradient], spec.out_dtype)}
    z = jnp.zeros((math.prod(shape[:-1]), shape[-1]), _spec.accumulator(dtype))
    return _sum_over_data(_apply_epilog(z, operands, spec, shape[:-1]), sum(plan.out[:-1], ()))


def _bind_shards(spec: MatmulSpec, dimension: int, operands: dict[str, Any], *, auto: bool = False) -> dict[str, Any]:
    """The results from shards of any rank; `dimension` of a is the one gathered or scattered."""
    spec = spec.replace(is_typed=_compat.is_vma_checked())
    a, b = operands["a"], operands["b"]
    extra = {name: operands[name] for name in _spec.operand_names(spec)}
    if a.ndim == 2:
        return bind(spec, a, b, extra, auto=auto)
    if spec.transpose_a:
        a, spec = a.swapaxes(-1, -2), spec.replace(transpose_a=False)
    ordered = spec.pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER)
    shape, lead = a.shape[:-1], dimension if ordered else 0
    batch, rows = math.prod(shape[:lead]), math.prod(shape[lead:])
    extra = {name: x.reshape(batch, -1, x.shape[-1]) if has_rows(name) else x for name, x in extra.items()}
    outputs = bind_rows(spec, a.reshape(batch, rows, a.shape[-1]), b, extra, auto=auto)
    shape = list(shape)
    if ordered:
        shape[lead] = _spec.output_rows(spec, shape[lead])
    return {name: x.reshape(*shape, x.shape[-1]) if has_rows(name) else x for name, x in outputs.items()}
