"""Reads the jaxprs of a user's function and evaluates their equations, across JAX versions. Uses `jax._src` like
`jax_compat`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import parallel as _parallel
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from jaxmp._src.platform.jax_internals.jax_compat import convert, is_jit_disabled, varying_axes, with_64_bits_of

Jaxpr = core.Jaxpr


def is_literal(v: Any) -> bool:
    """True if an operand of an equation is a constant instead of a variable."""
    return isinstance(v, core.Literal)


def is_unspecified(sharding: Any) -> bool:
    """True if a `jit` equation leaves a sharding to the compiler."""
    return isinstance(sharding, _UnspecifiedValue)


def is_jaxpr(value: Any) -> bool:
    """True if an equation's parameter is a jaxpr, with or without its constants."""
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns (a jaxpr, its constants). From JAX 0.12 on they are one object."""
    return (jaxpr, getattr(jaxpr, "consts", ())) if isinstance(jaxpr, core.Jaxpr) else (jaxpr.jaxpr, jaxpr.consts)


def source_file(eqn: core.JaxprEqn) -> str:
    """Returns the file with the function of a `jit`, `shard_map` or `scan`. "" for other equations, and if JAX does not
    know it."""
    jaxpr = eqn.params.get("jaxpr")
    info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
    return info.func_filename or "" if info else ""


def has_effects(eqn: core.JaxprEqn) -> bool:
    """True if an equation has side effects. JAX also counts the use of a named axis as an effect; this does not."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def has_state(jaxpr: Jaxpr) -> bool:
    """True if a jaxpr has side effects, takes a mutable array, or uses an axis that no shard_map around it has."""
    known = manual_axes()
    has_refs = any(is_mutable(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    return has_refs or any(getattr(effect, "name", None) not in known for effect in jaxpr.effects)


def without_start(eqn: core.JaxprEqn) -> core.JaxprEqn | None:
    """Returns the collective of an equation that starts one (`lax.psum_scatter_start`); None for any other equation."""
    name = eqn.primitive.name.removesuffix("_start")
    primitive = None if name == eqn.primitive.name else getattr(_parallel, f"{name}_p", None)
    return primitive and eqn.replace(primitive=primitive)


def needed(equations: Sequence[core.JaxprEqn], results: Sequence[Any]) -> list[core.JaxprEqn]:
    """Returns the equations that `results` need or that have effects, and what these need, in order."""
    read_later = {v for v in results if not is_literal(v)}
    kept = []
    for eqn in reversed(equations):
        if has_effects(eqn) or not read_later.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read_later.update(variables(eqn))
    return kept[::-1]


def variables(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the operands of an equation that are no constants."""
    return [v for v in eqn.invars if not is_literal(v)]


def inlined(jaxpr: Any, body_of: Callable[[core.JaxprEqn], Any]) -> tuple[Jaxpr, dict[Any, Any]]:
    """Returns (`jaxpr` with each equation replaced by the equations of the jaxpr `body_of(eqn)`, and so on within them;
    the value of each constant by its variable). An equation stays as it is if `body_of` returns None. The new jaxpr
    has the inputs and constvars of `jaxpr`; only the dict has the constants of the other jaxprs."""
    opened, consts = open_jaxpr(jaxpr)
    constants, equations = dict(zip(opened.constvars, consts, strict=True)), list[Any]()
    new_variable: Any = core.Var

    def write_out(jaxpr: Jaxpr, names: dict[Any, Any]) -> list[Any]:
        for eqn in jaxpr.eqns:
            operands, body = [v if is_literal(v) else names[v] for v in eqn.invars], body_of(eqn)
            if body is None:
                names |= {v: new_variable(v.aval) for v in eqn.outvars}
                equations.append(eqn.replace(invars=operands, outvars=[names[v] for v in eqn.outvars]))
                continue
            inner, consts = open_jaxpr(body)
            made = [new_variable(v.aval) for v in inner.constvars]
            constants.update(zip(made, consts, strict=True))
            results = write_out(inner, dict(zip((*inner.constvars, *inner.invars), (*made, *operands), strict=True)))
            names |= zip(eqn.outvars, results, strict=True)
        return [v if is_literal(v) else names[v] for v in jaxpr.outvars]

    outvars = write_out(opened, {v: v for v in (*opened.constvars, *opened.invars)})
    return opened.replace(eqns=equations, outvars=outvars), constants


def array_of(v: Any, values: Mapping[Any, Any]) -> Any:
    """Returns `values[v]` for a variable, and for a literal an array of its type, weak or not."""
    if not is_literal(v):
        return values[v]
    return convert(v.val, v.aval.dtype, v.aval.weak_type)


def trace(
    fn: Callable[..., Sequence[Any]], avals: Sequence[jax.core.AbstractValue], debug_info: core.DebugInfo | None = None
) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns the jaxpr of a function of arrays of these types, and its constants."""
    debug_info = debug_info or _api_util.debug_info("jaxmp", fn, avals, {})
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(_lu.wrap_init(fn, debug_info=debug_info), list(avals))
    return jaxpr, consts


_ARRAY = object()  # stands for an array in the results of a traced function


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.core.Tracer)


class Traced:
    """A function traced with arguments, which are pytrees. Its `jaxpr` with `consts` is a function of `arrays`.
    `arrays`: the leaves that are JAX arrays. `fn` receives the other leaves, and its caller gets them back,
    unchanged."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        self.arrays = [x for x in leaves if isinstance(x, jax.Array)]

        def of_arrays(*arrays: jax.Array) -> list[Any]:
            given = iter(arrays)
            given_leaves = [next(given) if isinstance(x, jax.Array) else x for x in leaves]
            args, kwargs = jax.tree.unflatten(tree, given_leaves)
            results, self._tree = jax.tree.flatten(fn(*args, **kwargs))
            self._results = [_ARRAY if _is_array(x) else x for x in results]  # no tracer: JAX would report a leak
            return [x for x in results if _is_array(x)]

        info = _api_util.debug_info("fuse", fn, args, dict(kwargs))
        if info.arg_names is not None and len(info.arg_names) == len(leaves):
            names = zip(info.arg_names, leaves, strict=True)
            info = info._replace(arg_names=tuple(name for name, x in names if isinstance(x, jax.Array)))
        self.jaxpr, self.consts = trace(of_arrays, [jax.typeof(x) for x in self.arrays], info)

    def result(self, values: Sequence[Any]) -> Any:
        """Returns the result of `fn`, from the values that the jaxpr returns."""
        found = iter(array_of(v, {}) if is_literal(v) else x for v, x in zip(self.jaxpr.outvars, values, strict=True))
        return jax.tree.unflatten(self._tree, [next(found) if x is _ARRAY else x for x in self._results])


def is_untraced() -> bool:
    """True under `jax.disable_jit`, so that functions run untraced, unless a caller is being traced to a jaxpr."""
    return is_jit_disabled() and not isinstance(_core.trace_ctx.trace, _pe.DynamicJaxprTrace)


def is_type_of(aval: Any, x: Any) -> bool:
    """True if an array has this type; weak types are ignored."""
    return bool(_core.typematch(aval, jax.typeof(x)))


def manual_axes() -> frozenset[str]:
    """Returns the manual mesh axes of the shard_map that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


_as_equation: contextvars.ContextVar[core.JaxprEqn | None] = contextvars.ContextVar("as_equation", default=None)


def traced_as(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Traces as `eqn` from now until the returned context is left: with the line, name stack and mesh of `eqn`, and
    with 64-bit types if `eqn` has any. `equation_in_place` then returns `eqn`."""
    stack = contextlib.ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    stack.callback(_as_equation.reset, _as_equation.set(eqn))
    stack.enter_context(with_64_bits_of(v.aval for v in (*eqn.invars, *eqn.outvars)))
    return stack


def equation_in_place() -> core.JaxprEqn | None:
    """Returns the equation of the innermost `traced_as` context, or None."""
    return _as_equation.get()


def evaluate(eqn: core.JaxprEqn, operands: Sequence[Any], **params: Any) -> Sequence[Any]:
    """Returns the results of an equation, with some of its parameters replaced. Skips a `pvary` of an operand that
    varies already, as results of jaxmp's calls may where JAX's types do not say so. Skips an eager `reshard` from no
    mesh to automatic axes, because JAX's cache of eager calls keeps that mesh's type."""
    if eqn.primitive.name == "reshard" and _core.trace_ctx.trace is _core.eval_trace:
        is_auto = jax.sharding.AxisType.Explicit not in eqn.params["dst_sharding"].mesh.axis_types
        if is_auto and jax.typeof(operands[0]).sharding.mesh.empty:
            return operands
    if eqn.primitive.name == "pvary" and varying_axes(operands[0]).issuperset(eqn.params["axes"]):
        return operands
    bound = eqn.primitive.get_bind_params(eqn.params | params)
    results = eqn.primitive.bind(*operands, **bound)
    return results if eqn.primitive.multiple_results else [results]


def implementation(eqn: core.JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """Returns the function that implements a primitive of another library, with the parameters of an equation. Returns
    None for primitives of JAX and jaxmp."""
    impl: Any = eqn.primitive.impl
    if getattr(impl, "func", impl).__module__.partition(".")[0] in ("jax", "jaxlib", "jaxmp"):
        return None

    def implemented(*operands: Any) -> Sequence[Any]:
        results = impl(*operands, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]

    return implemented


def evaluate_each(
    equations: Sequence[core.JaxprEqn],
    values: dict[Any, Any],
    value_of: Callable[[core.Literal], Any] = operator.attrgetter("val"),
) -> None:
    """Evaluates equations on `values`, and `value_of` for literals, and adds their results to `values`."""
    for eqn in equations:
        operands = [value_of(v) if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
        with traced_as(eqn):
            values |= zip(eqn.outvars, evaluate(eqn, operands), strict=True)


def is_plain(eqn: core.JaxprEqn) -> bool:
    """True if an equation has no effects and no jaxpr among its parameters."""
    return not eqn.effects and not (eqn.params and any(True for _ in core.jaxprs_in_params(eqn.params)))


def evaluate_plain(equations: Sequence[core.JaxprEqn], outputs: Sequence[Any], values: dict[Any, Any]) -> None:
    """Evaluates equations that are `is_plain` on `values`, and adds at least the results in `outputs` to `values`. If
    the caller is being transformed, for example differentiated, the equations become one jitted function that equal
    equations share, so that JAX differentiates it once, like functions of `jax.numpy`. Each equation runs alone if a
    parameter has no hash, or if the caller is only evaluated or traced to a jaxpr."""
    segment = _Segment(equations, outputs)
    is_not_transformed = isinstance(_core.trace_ctx.trace, (_core.EvalTrace, _pe.DynamicJaxprTrace))
    if is_not_transformed or not _is_hashable(segment):
        evaluate_each(equations, values)
    else:
        values |= zip(outputs, _evaluate_segment(segment, *(values[v] for v in segment.inputs)), strict=True)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:  # parameters of an equation may have no hash
        return False
    return True


class _Segment:
    """Consecutive equations. Segments with the same primitives, parameters and links between them are equal."""

    def __init__(self, equations: Sequence[core.JaxprEqn], outputs: Sequence[Any]) -> None:
        self.equations, self.outputs = equations, outputs
        read = (v for eqn in equations for v in eqn.invars if not isinstance(v, core.Literal))
        made = {v for eqn in equations for v in eqn.outvars}
        self.inputs = [v for v in dict.fromkeys(read) if v not in made]

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        numbers: dict[Any, int] = {}  # by variable

        def number(v: Any) -> Any:
            return _Constant(v) if isinstance(v, core.Literal) else numbers.setdefault(v, len(numbers))

        key = [
            (
                (eqn.primitive, eqn.ctx, eqn.source_info.name_stack, *sorted(eqn.params.items())),
                (*map(number, eqn.invars), *map(number, eqn.outvars)),
            )
            for eqn in self.equations
        ]
        return *key, *map(number, (*self.inputs, *self.outputs))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Segment) and self._key == other._key


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _evaluate_segment(segment: _Segment, *operands: Any) -> list[Any]:
    values = dict(zip(segment.inputs, operands, strict=True))
    evaluate_each(segment.equations, values, lambda literal: _Constant(literal).value)
    return [values[v] for v in segment.outputs]


class _Constant:
    """A literal that compares by its type and value."""

    def __init__(self, literal: core.Literal) -> None:
        aval: Any = literal.aval
        value = np.asarray(literal.val)  # an array may belong to another mesh
        self.value = value.item() if aval.weak_type else value
        self._key = aval.str_short(), aval.weak_type, value.tobytes()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key == other._key


def evaluate_with_body(
    eqn: core.JaxprEqn,
    operands: Sequence[Any],
    body: Callable[..., Any],
    rewritten: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Sequence[Any]:
    """Evaluates a `custom_jvp_call` or `custom_vjp_call` as function `body` with each rule as `rewritten(rule)`."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions = [body, *(rewritten(rule.call_wrapped) for rule in bound["subfuns"][1:])]
    bound["subfuns"] = tuple(
        _lu.wrap_init(f, debug_info=each.debug_info) for f, each in zip(functions, bound["subfuns"], strict=True)
    )
    results: Sequence[Any] = eqn.primitive.bind(*operands, **bound)
    return results


def is_mutable(aval: Any) -> bool:
    """True if this is the type of a mutable array (`jax.new_ref`)."""
    return isinstance(aval, _AbstractRef)
