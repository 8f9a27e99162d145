"""Reading the jaxprs of a user's function and evaluating their equations, across JAX versions; with `jax_compat` and
`jax_partitioner` the only user of `jax._src`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import linear_util as _lu
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax._src.state.types import AbstractRef as _AbstractRef

from jaxmp._src.platform.jax_internals.jax_compat import is_jit_disabled, varying_axes, with_64_bits_of

Jaxpr = _core.Jaxpr


def is_literal(v: Any) -> bool:
    """Whether an operand of an equation is a constant in its place."""
    return isinstance(v, _core.Literal)


def is_unspecified(sharding: Any) -> bool:
    """Whether a `jit` equation leaves a sharding to the compiler."""
    return isinstance(sharding, _UnspecifiedValue)


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, with its constants or without."""
    return isinstance(value, (_core.Jaxpr, getattr(_core, "ClosedJaxpr", _core.Jaxpr)))


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """(a jaxpr, its constants); from JAX 0.12 on they are one object."""
    return (jaxpr, getattr(jaxpr, "consts", ())) if isinstance(jaxpr, _core.Jaxpr) else (jaxpr.jaxpr, jaxpr.consts)


def has_effects(eqn: _core.JaxprEqn) -> bool:
    """Whether an equation does more than give results. JAX counts the use of a named axis as an effect too."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def needed(equations: Sequence[_core.JaxprEqn], results: Sequence[Any]) -> list[_core.JaxprEqn]:
    """The equations that the results need, or that have effects."""
    read_later = {v for v in results if not is_literal(v)}
    kept = []
    for eqn in reversed(equations):
        if has_effects(eqn) or not read_later.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read_later |= {v for v in eqn.invars if not is_literal(v)}
    return kept[::-1]


def array_of(v: Any, values: Mapping[Any, Any]) -> Any:
    """The array that a variable of a jaxpr, or a literal, stands for."""
    if not is_literal(v):
        return values[v]
    return _lax._convert_element_type(v.val, v.aval.dtype, weak_type=v.aval.weak_type)


# True inside a `Recording`, so that JAX traces jitted functions and does not run what it has compiled for the caller.
_is_recording = jax.make_user_context(False)


def trace(
    fn: Callable[..., Sequence[Any]], avals: Sequence[jax.core.AbstractValue], *, as_recorded: bool = False
) -> tuple[Jaxpr, Sequence[Any]]:
    """(the jaxpr of a function of arrays of these types, its constants); `as_recorded`: with the jaxprs of jitted
    functions that JAX has cached for a `Recording`."""
    debug_info = _api_util.debug_info("jaxmp", fn, avals, {})
    with _is_recording(as_recorded or _is_recording.value):
        jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(fn, debug_info=debug_info), list(avals))
    return jaxpr, consts


class Recording(_pe.DynamicJaxprTrace):
    """A trace of what is computed while it is entered, at the level of its caller.

    Objects that may change at their own level only (Flax's) may change inside it, as they may beside it.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._caller = _core.trace_ctx.trace
        self._names: dict[int, str] = {}  # of the arguments, for JAX's messages
        self._read: list[str] = []  # in the order in which they are read
        named = None
        with contextlib.suppress(Exception):  # arguments that are no pytrees
            named = _api_util.debug_info("fuse", fn, args, kwargs)
            self._names |= zip(map(id, jax.tree.leaves((args, kwargs))), named.arg_names or (), strict=True)
            named = named._replace(arg_names=cast(Any, self._read))
        super().__init__(cast(Any, named), parent_trace=self._caller)
        self._weakref = self._caller._weakref  # JAX compares levels by it
        self._arrays: dict[int, tuple[Any, Any]] = {}  # arrays from outside and their tracers, by the array's id
        self._tracers: list[weakref.ref[Any]] = []
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Recording:
        self._context.enter_context(_is_recording(True))
        self._context.enter_context(_core.set_current_trace(self))
        self._context.enter_context(_source_info_util.reset_name_stack())
        if self._caller is _core.eval_trace:  # JAX would fold arguments, which are constants here
            self._context.enter_context(_config.eager_constant_folding(False))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def new_const(self, x: Any, source_info: Any, aval: Any = None) -> Any:
        if not isinstance(x, jax.Array):
            return self._noted(super().new_const(x, source_info, aval))
        if id(x) not in self._arrays:  # an argument: as a constant, a scalar would be a literal
            self._read.append(self._names.get(id(x), "a closed-over array"))
            self._arrays[id(x)] = x, self._noted(self.new_arg(_core.typeof(x), source_info))
        return self._arrays[id(x)][1]

    def var_to_tracer(self, *args: Any) -> Any:
        tracer: Any = super().var_to_tracer(*args)  # type: ignore[no-untyped-call]
        return self._noted(tracer)

    def _noted(self, tracer: Any) -> Any:
        self._tracers.append(weakref.ref(tracer))
        return tracer

    def finish(self, results: Any) -> tuple[list[_core.JaxprEqn], dict[Any, Any], list[Any]]:
        """(the equations, the values of variables that none of them makes, the tracers that are still referred to)."""
        known = dict(self.frame.constvar_to_val) | {tracer.val: x for x, tracer in self._arrays.values()}
        equations = self.frame.get_eqns()
        for equation in self.frame.tracing_eqns:
            if isinstance(equation, _pe.TracingEqn):
                equation.in_tracers = []  # else a tracer would refer to all that it is made of
        self.frame.tracing_eqns, self._arrays = [], {}
        returned: list[Any] = []
        with contextlib.suppress(Exception):  # what is no pytree
            returned = jax.tree.leaves(results)
        if {*map(id, self.held())} - {*map(id, returned)}:
            gc.collect()  # garbage would differ between the processes of a job
        return equations, known, self.held()

    def held(self) -> list[Any]:
        """The tracers that are still referred to."""
        return [tracer for ref in self._tracers if (tracer := ref()) is not None]

    def give(self, tracers: Sequence[Any], values: Sequence[Any]) -> bool:
        """Gives tracers their values; True if they became tracers of the caller's, which may stay where they are."""
        for tracer, value in zip(tracers, values, strict=True):
            if isinstance(tracer.aval, _core.ShapedArray) and not isinstance(value, jax.Array):  # a literal
                value = _lax._convert_element_type(value, tracer.aval.dtype, weak_type=tracer.aval.weak_type)
            if not isinstance(self._caller, _pe.DynamicJaxprTrace):
                tracer.parent = value
                continue
            value = self._caller.to_jaxpr_tracer(value, tracer._line_info)
            for name in ("_trace", "aval", *_pe.DynamicJaxprTracer.__slots__):
                setattr(tracer, name, getattr(value, name))
            weakref.finalize(tracer, lambda _: None, value)  # JAX drops a constant with its own tracer
            if isinstance(self._caller, Recording):
                self._caller._noted(tracer)
        self._invalidated = True
        return isinstance(self._caller, _pe.DynamicJaxprTrace)

    def value_of(self, x: Any) -> Any:
        """What a tracer was given; anything else stands for itself."""
        return x.parent if isinstance(x, _pe.DynamicJaxprTracer) and x._trace is self else x


def is_untraced() -> bool:
    """Whether functions run without a trace here: under `jax.disable_jit`, unless a caller is traced to a jaxpr."""
    return is_jit_disabled() and not isinstance(_core.trace_ctx.trace, _pe.DynamicJaxprTrace)


def is_type_of(aval: Any, x: Any) -> bool:
    """Whether an array has this type, but for weak types."""
    return bool(_core.typematch(aval, jax.typeof(x)))


def manual_axes() -> frozenset[str]:
    """The mesh axes over which the shard_map that is being traced is manual."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


_as_equation: contextvars.ContextVar[_core.JaxprEqn | None] = contextvars.ContextVar("as_equation", default=None)


def traced_as(eqn: _core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """A context in which what is traced has the line, the name stack, the mesh and the 64-bit types of an equation."""
    stack = contextlib.ExitStack()
    names = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(_source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    stack.callback(_as_equation.reset, _as_equation.set(eqn))
    stack.enter_context(with_64_bits_of(v.aval for v in (*eqn.invars, *eqn.outvars)))
    return stack


def equation_in_place() -> _core.JaxprEqn | None:
    """Returns the equation as which something is being traced (`traced_as`), or None."""
    return _as_equation.get()


def evaluate(eqn: _core.JaxprEqn, operands: Sequence[Any], **params: Any) -> Sequence[Any]:
    """The results of an equation, with some of its parameters replaced.

    What varies already need not be made to: a call knows it of results whose type in JAX does not say it. Nor does an
    eager number of one device get the type of a mesh, which JAX's cache of eager calls would give to others.
    """
    if eqn.primitive.name == "reshard" and _core.trace_ctx.trace is _core.eval_trace:
        is_auto = jax.sharding.AxisType.Explicit not in eqn.params["dst_sharding"].mesh.axis_types
        if is_auto and _core.typeof(operands[0]).sharding.mesh.empty:
            return operands
    if eqn.primitive.name == "pvary" and varying_axes(operands[0]).issuperset(eqn.params["axes"]):
        return operands
    bound = eqn.primitive.get_bind_params(eqn.params | params)
    results = eqn.primitive.bind(*operands, **bound)
    return results if eqn.primitive.multiple_results else [results]


def evaluate_each(
    equations: Sequence[_core.JaxprEqn],
    values: dict[Any, Any],
    value_of: Callable[[_core.Literal], Any] = operator.attrgetter("val"),
    *,
    are_plain: bool = False,
) -> None:
    """Evaluates equations, of `values`, and `value_of` literals, into them.

    Where the caller is traced to a jaxpr, those that `are_plain` are put into it as they stand, for their types are
    known.
    """
    trace, names = _core.trace_ctx.trace, _source_info_util.current_name_stack()
    is_staging = are_plain and isinstance(trace, _pe.DynamicJaxprTrace)
    for eqn in equations:
        operands = [value_of(v) if isinstance(v, _core.Literal) else values[v] for v in eqn.invars]
        results = _staged(trace, names, eqn, operands) if is_staging else None
        if results is None:
            with traced_as(eqn):
                results = evaluate(eqn, operands)
        values |= zip(eqn.outvars, results, strict=True)


def _staged(trace: Any, names: Any, eqn: _core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    """The results of an equation that is put into a jaxpr; None where its operands are of other types."""
    info = eqn.source_info.replace(name_stack=names + eqn.source_info.name_stack)
    arrays = (x if isinstance(x, _core.Tracer) else _dtypes.canonicalize_value(x) for x in operands)
    tracers = [trace.to_jaxpr_tracer(x, info) for x in arrays]
    avals = [x.aval for x in tracers]
    if avals != [v.aval for v in eqn.invars] or eqn.primitive.is_high(*avals, **eqn.params):
        return None
    types = [v.aval for v in eqn.outvars]
    results: Sequence[Any] = trace.emit_eqn(tracers, types, eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx)
    return results


def is_plain(eqn: _core.JaxprEqn) -> bool:
    """Whether an equation has no effects and holds no jaxpr."""
    return not eqn.effects and not (eqn.params and any(True for _ in _core.jaxprs_in_params(eqn.params)))


def evaluate_plain(equations: Sequence[_core.JaxprEqn], outputs: Sequence[Any], values: dict[Any, Any]) -> None:
    """Evaluates plain equations, of `values` and into them; other equations read `outputs` of theirs.

    Where the caller differentiates, they are one jitted function that equal equations share, as for the functions of
    `jax.numpy`: JAX differentiates that once.
    """
    segment = _Segment(equations, outputs)
    is_not_transformed = isinstance(_core.trace_ctx.trace, (_core.EvalTrace, _pe.DynamicJaxprTrace))
    if is_not_transformed or not _is_hashable(segment):
        evaluate_each(equations, values, are_plain=True)
    else:
        values |= zip(outputs, _evaluate_segment(segment, *(values[v] for v in segment.inputs)), strict=True)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:  # parameters of an equation may have no hash
        return False
    return True


class _Segment:
    """Equations that follow each other, which compare by what they compute."""

    def __init__(self, equations: Sequence[_core.JaxprEqn], outputs: Sequence[Any]) -> None:
        self.equations, self.outputs = equations, outputs
        read = (v for eqn in equations for v in eqn.invars if not isinstance(v, _core.Literal))
        made = {v for eqn in equations for v in eqn.outvars}
        self.inputs = [v for v in dict.fromkeys(read) if v not in made]

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        numbers: dict[Any, int] = {}  # of values

        def number(v: Any) -> Any:
            return _Constant(v) if isinstance(v, _core.Literal) else numbers.setdefault(v, len(numbers))

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
    evaluate_each(segment.equations, values, lambda literal: _Constant(literal).value, are_plain=True)
    return [values[v] for v in segment.outputs]


class _Constant:
    """A literal that compares by its type and value."""

    def __init__(self, literal: _core.Literal) -> None:
        aval: Any = literal.aval
        value = np.asarray(literal.val)  # an array may belong to another mesh
        self.value = value.item() if aval.weak_type else value
        self._key = aval.str_short(), aval.weak_type, value.tobytes()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key == other._key


def evaluate_with_body(
    eqn: _core.JaxprEqn,
    operands: Sequence[Any],
    body: Callable[..., Any],
    rewritten: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Sequence[Any]:
    """The results of a `custom_jvp_call` or `custom_vjp_call` that computes `body`, with `rewritten` of its rules."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions = [body, *(rewritten(rule.call_wrapped) for rule in bound["subfuns"][1:])]
    bound["subfuns"] = tuple(
        _lu.wrap_init(f, debug_info=each.debug_info) for f, each in zip(functions, bound["subfuns"], strict=True)
    )
    results: Sequence[Any] = eqn.primitive.bind(*operands, **bound)
    return results


def is_mutable(aval: Any) -> bool:
    """Whether this is the type of a mutable array, `jax.new_ref`."""
    return isinstance(aval, _AbstractRef)
