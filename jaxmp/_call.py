"""One call between its arguments and its bind: validated, given a mode and a plan, run under `jit`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp import _bgrad, _checks, _compat, _epilog, _hints, _mesh, _narrow, _native, _precision, _sharding, _spec, _xla
from jaxmp._epilog import Epilog
from jaxmp._primitive import bind, bind_rows, fold_scale, global_amax, has_rows
from jaxmp._spec import MatmulSpec, Pattern

_PACKAGE = os.path.dirname(__file__)
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
    "scales",
    "result_amax",
    "aux_dtype",
    "aux_amax",
    "communication_dtype",
    "algorithm",
    "comm_sm_count",
    "determinism",
]
HINTS = ("communication_dtype", "algorithm", "comm_sm_count")
_OF_SCALES = ("scales", "result_amax", "aux_dtype", "aux_amax")  # float8 and float4 alone take these


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
    _checks.check_array(name, "a", a, at_least=2)
    _checks.check_array(name, "b", b, ndim=2)
    is_narrow = _narrow.is_narrow(a.dtype) or _narrow.is_narrow(b.dtype)
    operands, out = _typed_operands(name, a, b, options.get("preferred_element_type"), is_narrow)
    _checks.check_implementation(name, options.get("implementation"))
    spec = MatmulSpec(
        out_dtype=out,
        transpose_a=bool(options.get("transpose_a", False)),
        transpose_b=bool(options.get("transpose_b", False)),
        conjugate_a=_checks.check_conjugate(name, "conjugate_a", options.get("conjugate_a", False), a),
        conjugate_b=_checks.check_conjugate(name, "conjugate_b", options.get("conjugate_b", False), b),
        precision=_precision.resolve(name, options.get("precision"), operands["a"].dtype, out),
        implementation=options.get("implementation"),
        **_hints.resolve_hints(name, out, operands["a"].dtype, *(options.get(hint) for hint in HINTS)),
        line=f"{name} at {_compat.user_line(_PACKAGE)}" if _native.has_roll_call() else "",
        determinism=_checks.check_determinism(name, options.get("determinism", "run_to_run")),
        **(pattern or {}),
    )
    _spec.check_local_shapes(name, spec, a.shape[-2:], b.shape)
    shape = _spec.result_shape(spec, a, b)
    c_dtype, bias_dtype = _narrow.side_dtypes(name, out, c) if is_narrow else (out, out)
    scalars = {
        "alpha": _checks.check_scalar(name, "alpha", options.get("alpha", 1.0), out),
        "beta": _checks.check_c(name, c, options.get("beta"), c_dtype, shape),
    }
    traced = {argument: x for argument, x in scalars.items() if isinstance(x, jax.Array)}
    scalars |= dict.fromkeys(traced, 1.0)
    if is_narrow:
        _narrow.check_bias(name, (epilog_inputs or {}).get("bias"), bias_dtype, out)
        spec = spec.replace(c_dtype=c_dtype, bias_dtype=bias_dtype)
    epilog = options.get("epilog", Epilog.NONE)
    spec, inputs = _checks.check_epilog(name, spec, epilog, epilog_inputs, shape, a.ndim)
    if traced and (is_narrow or _epilog.rule(spec.epilog).gradient):
        what = f"{a.dtype} operands" if is_narrow else f"epilog {spec.epilog.name}"
        raise NotImplementedError(
            f"{name}: with {what} alpha and beta are Python numbers, got an array for {' and '.join(traced)}; "
            f"{'multiply a scale by it' if is_narrow else 'scale an operand, or the gradient that comes in'}"
        )
    if traced and spec.is_invariant:
        raise NotImplementedError(
            f"{name}: determinism={spec.determinism!r} takes alpha and beta as Python numbers, got an array for "
            f"{' and '.join(traced)}, after which XLA would apply the epilog; scale an operand, or pass "
            'determinism="run_to_run"'
        )
    operands |= (inputs if c is None else {"c": c.astype(c_dtype), **inputs}) | traced
    spec = spec.replace(**scalars, traced=tuple(traced), has_c=c is not None)
    if not is_narrow:
        _refuse_scaling(name, options, a)
        return spec, operands
    _narrow.check_transpositions(name, a.dtype, spec.transpose_a, spec.transpose_b)
    _narrow.check_epilog(name, spec.epilog.name, a.dtype, out)
    changes, scales = _scaling(name, options, a, b, spec)
    return spec.replace(**changes), operands | scales


def _typed_operands(name: str, a, b, preferred, is_narrow: bool) -> tuple[dict[str, Any], np.dtype]:
    """(a and b in the types of the call, type of d); operands of 8 bits and fewer are never promoted."""
    if is_narrow:
        return {"a": a, "b": b}, _narrow.resolve_dtypes(name, a, b, preferred)
    operand, out = _checks.resolve_dtypes(name, a, b, preferred)
    return {key: x if x.dtype == operand else x.astype(operand) for key, x in (("a", a), ("b", b))}, out


def _refuse_scaling(name: str, options: dict, a) -> None:
    for argument in _OF_SCALES:
        if options.get(argument):
            raise TypeError(f"{name}: {argument} goes with float8 and float4 operands, a has dtype {a.dtype}; drop it")


def _scaling(name: str, options: dict, a, b, spec: MatmulSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the spec's fields, the operands by name) of the scales of narrow operands."""
    out = np.dtype(spec.out_dtype)
    scales = options.get("scales") or _narrow.Scales()
    if not isinstance(scales, _narrow.Scales):
        raise TypeError(f"{name}: scales must be a jaxmp.Scales, got {type(scales).__name__}")
    amax, aux_amax = (bool(options.get(argument, False)) for argument in ("result_amax", "aux_amax"))
    if not _narrow.is_scaled(a.dtype):
        if scales != _narrow.Scales() or any(options.get(argument) for argument in _OF_SCALES[1:]):
            raise TypeError(
                f"{name}: {', '.join(_OF_SCALES)} go with float8 and float4 operands, a has dtype {a.dtype}; drop them"
            )
        return {}, {}
    modes = {
        "a": _narrow.find_mode(name, "a", scales.a, tuple(a.shape), a.dtype),
        "b": _narrow.find_mode(name, "b", scales.b, tuple(b.shape), b.dtype),
        "c": _narrow.check_scalar(name, "c", scales.c),
        "d": _narrow.check_scalar(name, "d", scales.d),
        "aux": _narrow.check_scalar(name, "aux", scales.aux),
    }
    _narrow.check_modes(name, modes, out)
    of_aux = {"aux_dtype": options.get("aux_dtype"), "scales.aux": scales.aux, "aux_amax": aux_amax}
    aux = _narrow.resolve_aux(name, spec.epilog.name, (a.dtype, b.dtype, out), spec.c_dtype, modes["a"], of_aux)
    is_blocked = modes["a"] in (_narrow.VEC16, _narrow.VEC32)
    if amax and (out.name not in _narrow.FLOAT8 or is_blocked):
        raise NotImplementedError(
            f"{name}: result_amax is taken of a float8 result with tensor-wide scales; the result is {out.name} and "
            f"scales.a is {modes['a']}: use jnp.max(jnp.abs(d)) of a wider result"
        )
    fields = {f"scale_{key}": mode for key, mode in modes.items()}
    out_scale = modes["a"] if is_blocked and _narrow.is_narrow(out) else _narrow.NONE
    given = {f"scale_{key}": getattr(scales, key) for key, mode in modes.items() if mode != _narrow.NONE}
    results = {"amax_d": amax, "aux_amax": aux_amax, "aux_dtype": aux, "d_out_scale": out_scale}
    return fields | results, given


def result(outputs: dict[str, Any]):
    """What the user gets: d, or (d, {name: further result})."""
    rest = {"result_amax" if name == "amax_d" else name: x for name, x in outputs.items() if name != "d"}
    return (outputs["d"], rest) if rest else outputs["d"]


def collective(name: str, pattern: Pattern, a, b, axis_names, c, epilog_inputs, options: dict):
    where = pattern_on_axes(name, pattern, axis_names)
    spec, operands = validated(name, a, b, c, epilog_inputs, options, where)
    if pattern == Pattern.GRID and spec.transpose_a and a.ndim > 2:
        raise ValueError(
            f"{name}: a has {a.ndim} dimensions; with transpose_a=True it must have 2, for its blocks lie across those "
            "of the result: use jax.vmap for the others"
        )
    spec = _checks.check_all_reduce(name, spec)
    _hints.check_hints(name, spec)
    _checks.check_relu_aux(name, operands, spec, _spec.result_shape(spec, a, b)[-1])
    return result(global_amax(spec, _bind_shards(spec, a.ndim - 2, operands), spec.group_axes))


def pattern_on_axes(name: str, pattern: Pattern, axis_names) -> dict[str, Any]:
    """What a spec says of the group that shares a product inside shard_map."""
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
    return {"pattern": pattern, "mesh": tuple(mesh.shape.items()), "row_axes": row_axes, "col_axes": col_axes}


def _as_axes(names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def make_call(spec: MatmulSpec, placement: _mesh.Placement, operands, name: str = "matmul") -> _Call:
    shape = _spec.result_shape(spec, operands["a"], operands["b"])
    if placement.mode != _mesh.Mode.SHARDED:
        spec = spec.replace(mesh=placement.axes)
        if placement.mode == _mesh.Mode.MANUAL:
            spec = _checks.check_all_reduce(name, spec)
        is_settled = placement.mode != _mesh.Mode.AUTO
        has_mesh = is_settled or _mesh.is_known(placement, operands["a"], operands["b"])
        _hints.check_hints(name, spec, is_settled, has_mesh)
        _checks.check_relu_aux(name, operands, spec, shape[-1])
        return _Call(spec, placement.mode, constraint=placement.constraint)
    plan = _sharding.plan_call(name, placement.a, placement.b, placement.out, spec.transpose_a, spec.transpose_b)
    mesh = placement.mesh
    for argument, dims, x in (
        ("a", plan.a, operands["a"].shape),
        ("b", plan.b, operands["b"].shape),
        ("the result", plan.out, shape),
    ):
        _sharding.check_dims(name, argument, dims, x, mesh.shape)
    _checks.check_relu_aux(name, operands, spec, shape[-1], math.prod(mesh.shape[axis] for axis in plan.out[-1]))
    in_specs = [plan.a, plan.b, *(_dims(spec, plan, name) for name in _spec.operand_names(spec))]
    out_specs = [_dims(spec, plan, name) for name in _spec.output_names(spec)]
    for scale, dims in zip(_spec.operand_names(spec), in_specs[2:], strict=True):
        if scale in _spec.SCALE_NAMES:
            argument = f"scales.{scale.removeprefix('scale_')}"
            _sharding.check_dims(name, argument, dims, operands[scale].shape, mesh.shape)
    spec = spec.replace(pattern=plan.pattern, mesh=placement.axes, row_axes=plan.row_axes, col_axes=plan.col_axes)
    spec = _checks.check_all_reduce(name, spec)
    _hints.check_hints(name, spec)
    return _Call(
        spec, placement.mode, plan, mesh, _partition_specs(in_specs), _partition_specs(out_specs), placement.is_explicit
    )


def _dims(spec: MatmulSpec, plan: _sharding.Plan, name: str) -> _sharding.Dims:
    """How an operand or result by name is sharded: like the dimensions of d, or of the operand, that it has.

    But the sums of an operand's own rows are whole in a group, whichever operand the call takes for its a.
    """
    if name in ("scale_a", "scale_b"):
        operand = plan.a if name == "scale_a" else plan.b
        return {_narrow.SCALAR: (), _narrow.OUTER_VEC: operand[:-1]}.get(getattr(spec, name), operand)
    if not _spec.DIMS[name]:
        return ()
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
    placed = {name: reshard(call, name, operands[name], in_specs[name]) for name in in_specs}
    scalars = {name: operands[name] for name in spec.traced}
    placed, in_specs = placed | scalars, in_specs | dict.fromkeys(scalars, P())
    body = functools.partial(_bind_plan_globally, call.plan, spec)
    a, b = placed["a"], placed["b"]
    if 0 in a.shape[-2:] and 0 in b.shape:
        # Nothing to contract. XLA cannot partition a body whose operands are all empty, so they stay out of it.
        whole = _spec.result_shape(spec.replace(pattern=Pattern.LOCAL), a, b)
        shapes = {
            name: NamedSharding(call.mesh, out_specs[name]).shard_shape(
                whole if has_rows(name) else whole[-2:-1] if _spec.DIMS[name] == "m" else whole[-1:]
            )
            for name in ("d", *_epilog.rule(spec.epilog).outputs)
            if name != "relu_aux"
        }
        body = functools.partial(_bind_empty, call.plan, spec, shapes, a.dtype)
        placed = {name: x for name, x in placed.items() if name not in ("a", "b")} | {"scalar": jnp.zeros(())}
        in_specs = {name: in_specs.get(name, P()) for name in placed}
    return jax.shard_map(body, mesh=call.mesh, in_specs=(in_specs,), out_specs=out_specs)(placed)


def reshard(call: _Call, argument: str, x, spec: P):
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


def _bind_plan_globally(plan: _sharding.Plan, spec: MatmulSpec, operands: dict[str, Any]) -> dict[str, Any]:
    return global_amax(spec, bind_plan(plan, spec, operands), tuple(axis for axis, _ in spec.mesh))


def bind_plan(plan: _sharding.Plan, spec: MatmulSpec, operands: dict[str, Any]) -> dict[str, Any]:
    """One device's part of a planned call."""
    a, b = operands["a"], operands["b"]
    if plan.gather == "a":
        is_last = plan.dimension == a.ndim - 2
        a = _gather(plan, a, a.ndim - 1 if spec.transpose_a and is_last else plan.dimension)
    elif plan.gather == "b":
        b = _gather(plan, b, 0 if spec.transpose_b else 1)
    scale = f"scale_{plan.gather}"
    if plan.gather and getattr(spec, scale) not in (_narrow.NONE, _narrow.SCALAR):
        dimension = plan.dimension if plan.gather == "a" else 0
        operands = operands | {scale: _gather(plan, operands[scale], dimension)}
    if plan.is_swapped and spec.is_invariant:
        plan, spec, a, b = _without_swap(plan, spec, a, b)
    if spec.determinism == "topology" and spec.pattern != Pattern.GRID:
        spec = _with_order(plan, spec, a)
    operands = operands | {"a": a, "b": b}
    if not plan.is_swapped:
        outputs = _bind_shards(spec, plan.dimension, operands)
        return _sum_over_data(spec, outputs, _outside(plan, sum(plan.out[:-1], ())))
    # D = (op(b)^T @ op(a)^T)^T: the columns of D take the part that rows have in the pattern.
    rows, a, is_transposed = _flat_rows(spec, a)
    swapped = spec.bilinear(
        transpose_a=not spec.transpose_b,
        transpose_b=not is_transposed,
        conjugate_a=spec.conjugate_b,
        conjugate_b=spec.conjugate_a,
        out_dtype=_spec.accumulator(a.dtype),
        is_typed=_compat.is_vma_checked(),
        epilog=_epilog.SWAPPED.get(spec.epilog, Epilog.NONE),
        scale_a=spec.scale_b,
        scale_b=spec.scale_a,
        traced=spec.traced,
    )
    scales = {"scale_a": operands.get("scale_b"), "scale_b": fold_scale(spec, operands.get("scale_a"))}
    extra = {name: scales[name] for name in _spec.operand_names(swapped)}
    z, *gradient = bind(_hints.fit_hints(swapped), b, a, extra).values()
    if gradient:
        rest = _apply_epilog(z.T, operands, spec.replace(alpha=1.0, epilog=Epilog.NONE), rows)
        return rest | {_epilog.rule(spec.epilog).gradient: gradient[0].astype(spec.out_dtype)}
    outputs = _apply_epilog(z.T, operands, spec.replace(alpha=1.0), rows)
    return _sum_over_data(spec, outputs, sum(plan.out[:-1], ()))


def _sum_over_data(spec: MatmulSpec, outputs: dict[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
    """Bias gradients of d, summed over the axes that share its rows beside the call's group."""
    names = [name for name in outputs if axes and _bgrad.summed(name) == "d"]
    if names and spec.determinism == "topology":
        raise NotImplementedError(
            f'matmul: determinism="topology" has no epilog {spec.epilog.name} on rows that are sharded over '
            f"{_spec.axes_text(axes)} beside the call, for XLA would complete {names[0]}; take the gradient of a bias, "
            'or pass determinism="batch"'
        )
    with jax.named_scope(_bgrad.SCOPE):
        return {name: lax.psum(x, axes) if name in names else x for name, x in outputs.items()}


def _without_swap(plan: _sharding.Plan, spec: MatmulSpec, a, b):
    """A swapped call as a local one of gathered operands, whose epilog is the library's.

    XLA's arithmetic is not bit for bit the library's, and depends on what XLA fuses it with.
    """
    if _epilog.rule(spec.epilog).gradient:
        raise NotImplementedError(
            f"matmul: determinism={spec.determinism!r} has no epilog {spec.epilog.name} where columns of the result "
            f"are gathered or scattered over {_spec.axes_text(plan.row_axes)}; take another out_sharding, or "
            'pass determinism="run_to_run"'
        )
    why = f"where columns of the result are gathered or scattered over {_spec.axes_text(plan.row_axes)}"
    _checks.check_gathered_scales("matmul", spec, why)
    gathered = dataclasses.replace(plan, pattern=Pattern.LOCAL, gather_axes=plan.row_axes, is_swapped=False)
    k, n = (1, 0) if spec.transpose_b else (0, 1)
    with jax.named_scope("jaxmp_whole_operands"):
        if plan.pattern == Pattern.ALL_GATHER:
            b = _gather(gathered, b, n)
        else:
            a, b = _gather(gathered, a, a.ndim - (2 if spec.transpose_a else 1)), _turn(plan, b, n, k)
    return gathered, spec.replace(pattern=Pattern.LOCAL, row_axes=()), a, b


def _turn(plan: _sharding.Plan, x, split: int, joined: int):
    """`x` sharded over the group along dimension `split` instead of `joined`."""
    if x.size == 0:  # as in _gather
        p, shape = lax.axis_size(plan.row_axes), list(x.shape)
        shape[split], shape[joined] = shape[split] // p, shape[joined] * p
        return jnp.zeros(shape, x.dtype)
    return _move(lambda x: lax.all_to_all(x, plan.row_axes, split, joined, tiled=True), x)


def _with_order(plan: _sharding.Plan, spec: MatmulSpec, a) -> MatmulSpec:
    """The spec with the places of D's rows and columns in the global array."""
    shape = (*a.shape[:-2], a.shape[-1]) if spec.transpose_a else a.shape[:-1]
    rows = [
        (extent, tuple(axis for axis in axes if axis not in spec.row_axes))
        for extent, axes in zip(shape, plan.out[:-1], strict=True)
    ]
    if spec.pattern == Pattern.ALL_GATHER:
        extent, axes = rows[plan.dimension]
        rows[plan.dimension] = (extent * spec.nranks, axes)
    return spec.replace(rows=tuple(rows), cols=plan.out[-1])


def _gather(plan: _sharding.Plan, x, dimension: int):
    """The gather that out_sharding asks for where the ranks of a group would otherwise compute the same."""
    if x.size == 0:  # XLA gathers nothing that is empty
        shape = list(x.shape)
        shape[dimension] *= lax.axis_size(plan.gather_axes)
        return jnp.zeros(shape, x.dtype)
    with jax.named_scope("jaxmp_all_gather"):
        return _move(lambda x: lax.all_gather(x, plan.gather_axes, axis=dimension, tiled=True, to="invarying"), x)


def _move(collective: Callable, x):
    """`collective(x)`, of floats of 8 bits and fewer as bytes, which every platform moves."""
    is_narrow = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    return _move_bytes(collective, x) if is_narrow else collective(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bytes(collective: Callable, x):
    return _narrow.from_bytes(collective(_narrow.as_bytes(x)), x.dtype)


@_move_bytes.defjvp
def _move_bytes_jvp(collective: Callable, primals, tangents):
    """Bytes have no derivative, but what they are moved by is linear: tangents, and cotangents, travel in float32."""
    (x,), (t,) = primals, tangents
    return _move_bytes(collective, x), collective(t.astype(jnp.float32)).astype(t.dtype)


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
    scalars = {name: operands[name] for name in spec.traced}
    local = spec.replace(pattern=Pattern.LOCAL)
    outputs = dict(zip(_spec.output_names(spec), _xla.apply_epilog(z, folded, local, **scalars), strict=True))
    return {name: x.reshape(*rows, x.shape[-1]) if has_rows(name) else x for name, x in outputs.items()}


def _bind_empty(
    plan: _sharding.Plan, spec: MatmulSpec, shapes: dict[str, tuple[int, ...]], dtype, operands: dict[str, Any]
) -> dict[str, Any]:
    """The epilog of a sum over nothing; `shapes` are those of the results on each device."""
    gradient, shape = _epilog.rule(spec.epilog).gradient, shapes["d"]
    if _bgrad.summed(gradient) in ("a", "b"):
        rest = _bind_empty(plan, spec.replace(epilog=Epilog.NONE), shapes, dtype, operands)
        return rest | {gradient: jnp.zeros(shapes[gradient], spec.out_dtype)}
    if spec.is_invariant:
        local = spec.bare().replace(pattern=Pattern.LOCAL, row_axes=(), col_axes=())
        nothing = {"a": jnp.zeros((*shape[:-1], 0), dtype), "b": jnp.zeros((0, shape[-1]), dtype)}
        return _sum_over_data(spec, _bind_shards(local, 0, operands | nothing), sum(plan.out[:-1], ()))
    z = jnp.zeros((math.prod(shape[:-1]), shape[-1]), _spec.accumulator(dtype))
    return _sum_over_data(spec, _apply_epilog(z, operands, spec, shape[:-1]), sum(plan.out[:-1], ()))


def _bind_shards(spec: MatmulSpec, dimension: int, operands: dict[str, Any], *, auto: bool = False) -> dict[str, Any]:
    """The results from shards of any rank; `dimension` of a is the one gathered or scattered."""
    spec = spec.replace(is_typed=_compat.is_vma_checked())
    a, b = operands["a"], operands["b"]
    if spec.traced and set(spec.traced) <= set(operands):
        # cuBLASMp takes its scalars from the host, ahead of the call. A traced one scales the accumulated product
        # instead, in operations that XLA fuses into one, with C and the epilog behind it.
        plain = spec.bilinear(out_dtype=_spec.accumulator(a.dtype), traced=spec.traced)
        z = _bind_shards(plain, dimension, {"a": a, "b": b}, auto=auto)["d"]
        return _apply_epilog(z.reshape(-1, z.shape[-1]), operands, spec.replace(alpha=1.0), z.shape[:-1])
    extra = {name: operands[name] for name in _spec.operand_names(spec)}
    if a.ndim == 2:
        return bind(spec, a, b, extra, auto=auto)
    if spec.transpose_a:
        a, spec = a.swapaxes(-1, -2), spec.replace(transpose_a=False)
    ordered = spec.pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER)
    shape, lead = a.shape[:-1], dimension if ordered else 0
    batch, rows = math.prod(shape[:lead]), math.prod(shape[lead:])
    spec = spec.replace(ahead=batch) if spec.determinism == "topology" else spec
    extra = {name: x.reshape(batch, -1, x.shape[-1]) if has_rows(name) else x for name, x in extra.items()}
    if spec.scale_a not in (_narrow.NONE, _narrow.SCALAR):
        extra["scale_a"] = extra["scale_a"].reshape(batch, rows, *extra["scale_a"].shape[a.ndim - 1 :])
    outputs = bind_rows(spec, a.reshape(batch, rows, a.shape[-1]), b, extra, auto=auto)
    shape = list(shape)
    if ordered:
        shape[lead] = _spec.output_rows(spec, shape[lead])
    return {name: x.reshape(*shape, x.shape[-1]) if has_rows(name) else x for name, x in outputs.items()}
