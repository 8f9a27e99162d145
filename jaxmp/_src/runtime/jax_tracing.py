"""Reading the jaxprs of a user's function and evaluating their equations, across JAX versions; with `jax_compat` and
`jax_partitioner` the only user of `jax._src`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _pe
from jax._src.named_sharding import UnspecifiedValue as _UnspecifiedValue
from jax._src.state.types import AbstractRef as _AbstractRef

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


def trace(fn: Callable[..., Sequence[Any]], avals: Sequence[jax.core.AbstractValue]) -> tuple[Jaxpr, Sequence[Any]]:
    """(the jaxpr of a function of arrays of these types, its constants)."""
    debug_info = _api_util.debug_info("jaxmp", fn, avals, {})
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(fn, debug_info=debug_info), list(avals))
    return jaxpr, consts


def is_type_of(aval: Any, x: Any) -> bool:
    """Whether an array has this type, but for weak types."""
    return bool(_core.typematch(aval, jax.typeof(x)))


def manual_axes() -> frozenset[str]:
    """The mesh axes over which the shard_map that is being traced is manual."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def traced_as(eqn: _core.JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """A context in which what is traced has the line, the name stack and the mesh of an equation."""
    stack = contextlib.ExitStack()
    names = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(_source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    return stack


def evaluate(eqn: _core.JaxprEqn, operands: Sequence[Any], **params: Any) -> Sequence[Any]:
    """The results of an equation, with some of its parameters replaced."""
    bound = eqn.primitive.get_bind_params(eqn.params | params)
    results = eqn.primitive.bind(*operands, **bound)
    return results if eqn.primitive.multiple_results else [results]


def evaluate_cached(eqn: _core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, through a jitted function that equal equations share.

    JAX differentiates an operation of `jax.numpy` once for each type, since it is jitted, and a bare equation anew.
    """
    try:
        literals = tuple((i, _Constant(v)) for i, v in enumerate(eqn.invars) if isinstance(v, _core.Literal))
        run = _jitted(eqn.primitive, tuple(sorted(eqn.params.items())), literals, len(eqn.invars))
    except TypeError:  # parameters without a hash
        return evaluate(eqn, operands)
    results = run(*(x for x, v in zip(operands, eqn.invars, strict=True) if not isinstance(v, _core.Literal)))
    return results if eqn.primitive.multiple_results else [results]


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


@functools.lru_cache(maxsize=4096)
def _jitted(
    primitive: Any, params: tuple[tuple[str, Any], ...], literals: tuple[tuple[int, _Constant], ...], count: int
) -> Callable[..., Any]:
    constants = {i: constant.value for i, constant in literals}

    def run(*operands: Any) -> Any:
        rest = iter(operands)
        given = [constants[i] if i in constants else next(rest) for i in range(count)]
        return primitive.bind(*given, **dict(params))

    return jax.jit(run, inline=True)


def evaluate_with_body(eqn: _core.JaxprEqn, operands: Sequence[Any], body: Callable[..., Any]) -> Sequence[Any]:
    """The results of a `custom_jvp_call` or `custom_vjp_call` that computes `body`; its rules stay."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    first, *rules = bound["subfuns"]
    bound["subfuns"] = (_lu.wrap_init(body, debug_info=first.debug_info), *rules)
    results: Sequence[Any] = eqn.primitive.bind(*operands, **bound)
    return results


def is_mutable(aval: Any) -> bool:
    """Whether this is the type of a mutable array, `jax.new_ref`."""
    return isinstance(aval, _AbstractRef)
