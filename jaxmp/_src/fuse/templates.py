"""Finds the equations of a known function, such as an activation, in a jaxpr.

The function is traced for the type at hand, so the equations are the ones that this version of JAX writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.spec.options import ActivationName
from jaxmp._src.fuse.graph import RESULT, Graph
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """One way to write an activation: jaxmp's name for it, the function, and a primitive that reads the function's
    argument. The function is traced only if this primitive reads the value in question."""

    name: ActivationName
    function: Function
    reader: str


GELU = Activation("gelu", jax.nn.gelu, "integer_pow")
ACTIVATIONS = (
    Activation("relu", jax.nn.relu, "custom_jvp_call"),
    Activation("relu", lambda z: jnp.maximum(z, 0), "max"),
    GELU,
    Activation("gelu_exact", lambda z: jax.nn.gelu(z, approximate=False), "neg"),
    Activation("silu", jax.nn.silu, "jit"),
    Activation("silu", lambda z: z * jax.nn.sigmoid(z), "logistic"),
    Activation("sigmoid", jax.nn.sigmoid, "logistic"),
    Activation("tanh", jnp.tanh, "tanh"),
)
_COMMUTE = ("add", "mul", "max", "min", "add_any")


@dataclasses.dataclass(frozen=True)
class Match:
    """The equations of a function in a graph, by index, with the function's result and arguments."""

    equations: frozenset[int]
    output: Any
    arguments: tuple[Any, ...]


def _gelu_cotangent(z: Any, cotangent: Any) -> Any:
    return jax.vjp(jax.nn.gelu, z)[1](cotangent)[0]


def find_activation(graph: Graph, activation: Activation, v: Any) -> Match | None:
    """Returns the equations that apply an activation to the value `v`, or None."""
    if activation.reader not in (graph.equations[i].primitive.name for i in graph.readers(v) if i != RESULT):
        return None
    template = template_of(activation.function, (v.aval,))
    return None if template is None else unify(graph, template, (v,))


def find_gelu_cotangent(graph: Graph, match: Match, cotangents: frozenset[Any]) -> Match | None:
    """Returns the equations that compute the cotangent of the argument of the gelu `match` from the cotangent of its
    result, which is one of `cotangents`; else None."""
    (v,) = match.arguments
    has_one = jnp.issubdtype(v.aval.dtype, jnp.inexact)
    template = template_of(_gelu_cotangent, (v.aval, match.output.aval)) if has_one else None
    return None if template is None else unify(graph, template, (v, cotangents))


@jax_compat.cache_in_context(1024)
def template_of(function: Function, avals: tuple[Any, ...]) -> jax_compat.Jaxpr | None:
    """Returns a function's jaxpr for arguments of these types, traced once, without dead code and unused arguments.
    Calls in the function stay calls. Returns None if the function does not take these types (TypeError, ValueError) or
    its jaxpr has constants."""
    try:
        jaxpr, consts = jax_tracing.trace(lambda *xs: [function(*xs)], avals)
    except (TypeError, ValueError):  # from JAX: a type that the function does not take
        return None
    return None if consts else jax_compat.without_dead_code(jaxpr)


def unify(graph: Graph, template: jax_tracing.Jaxpr, arguments: Sequence[Any]) -> Match | None:
    """Returns the equations of `graph` that match the equations of `template` with these arguments; None if one has no
    match. Operands of additions, products, maxima and minima match in either order. An argument may be a set of values.
    It then stands for the first of them that a matching equation reads."""
    known: dict[Any, Any] = dict(zip(template.invars, arguments, strict=True))
    found: list[int] = []
    for wanted in template.eqns:
        given = [known[v] for v in wanted.invars if not jax_tracing.is_literal(v)]
        anchor = next((x for x in given if not isinstance(x, (_Constant, frozenset))), None)
        if anchor is None:
            known |= dict.fromkeys(wanted.outvars, _Constant(wanted))
            continue
        for i in graph.readers(anchor):
            if i != RESULT and i not in found and _is_same(graph.equations[i], wanted, known, graph.made_by):
                break
        else:
            return None
        found.append(i)
        eqn = graph.equations[i]
        for v in wanted.invars:
            if not jax_tracing.is_literal(v) and isinstance(known[v], frozenset):
                known[v] = next(x for x in eqn.invars if not jax_tracing.is_literal(x) and x in known[v])
        known |= zip(wanted.outvars, eqn.outvars, strict=True)
    (output,) = template.outvars
    if not found or output not in known:
        return None
    return Match(frozenset(found), known[output], tuple(known[v] for v in template.invars))


@dataclasses.dataclass(frozen=True)
class _Constant:
    """The result of an equation that reads literals only. A graph may have this equation several times."""

    equation: Any


# Returns the equation that makes a value, or None.
Producer = Callable[[Any], Any]


def _is_same(eqn: Any, wanted: Any, known: dict[Any, Any], made_by: Producer) -> bool:
    """True if `eqn` has the primitive, parameters and operands of `wanted`, for `_COMMUTE` in either order. `known`:
    for each variable of the template the graph's value, a set of values or a `_Constant`."""
    if eqn.primitive is not wanted.primitive or not _same_params(eqn.params, wanted.params):
        return False
    if len(eqn.outvars) != len(wanted.outvars):
        return False
    if eqn.primitive.name == "custom_jvp_call" and _source(eqn) != _source(wanted):
        return False
    return _are_operands(eqn.invars, wanted.invars, known, made_by) or (
        eqn.primitive.name in _COMMUTE and _are_operands(eqn.invars, wanted.invars[::-1], known, made_by)
    )


def _source(eqn: Any) -> tuple[str, str]:
    """Returns the names and the places of the function and of the rule of a `custom_jvp_call`."""
    function, rule = jax_tracing.open_jaxpr(eqn.params["call_jaxpr"])[0], eqn.params["jvp_jaxpr_fun"]
    return str(function.debug_info.func_src_info), str(rule.debug_info.func_src_info)


def _are_operands(haves: Sequence[Any], wants: Sequence[Any], known: dict[Any, Any], made_by: Producer) -> bool:
    return all(_is_operand(have, want, known, made_by) for have, want in zip(haves, wants, strict=True))


def _is_operand(have: Any, want: Any, known: dict[Any, Any], made_by: Producer) -> bool:
    """True if `have` is a literal of the type and value of `want`, or the value that `known` has for `want`. If `known`
    has a set of values, `have` must be in the set. If it has a `_Constant`, `made_by(have)` must be an equal equation.
    """
    if jax_tracing.is_literal(want):
        return (
            jax_tracing.is_literal(have) and have.aval.dtype == want.aval.dtype and np.array_equal(have.val, want.val)
        )
    if jax_tracing.is_literal(have):
        return False
    if isinstance(known[want], _Constant):
        eqn = made_by(have)
        return eqn is not None and _is_same(eqn, known[want].equation, known, made_by)
    return have in known[want] if isinstance(known[want], frozenset) else known[want] is have


# Parameters that do not count: each equation has its own object of a differentiation rule (`_source`).
_IGNORED = ("name", "ctx_mesh", "jvp_jaxpr_fun", "jvp", "fwd", "bwd", "fwd_jaxpr_thunk")


def _same_params(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two equations of one primitive do the same, by their parameters."""

    def same(x: Any, y: Any) -> bool:
        if jax_tracing.is_jaxpr(x) and jax_tracing.is_jaxpr(y):
            return _same_jaxpr(x, y)
        return type(x) is type(y) and bool(x == y)

    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key not in _IGNORED)


def _same_jaxpr(one: Any, other: Any) -> bool:
    """True if two jaxprs have equal input types, equations in the same order, and results. Names of variables do not
    count. False if one has constants."""
    (a, a_consts), (b, b_consts) = jax_tracing.open_jaxpr(one), jax_tracing.open_jaxpr(other)
    numbers = [(len(each.eqns), len(each.outvars), [v.aval for v in each.invars]) for each in (a, b)]
    if a_consts or b_consts or numbers[0] != numbers[1]:
        return False
    known = dict(zip(b.invars, a.invars, strict=True))
    made_by = Graph.of(a).made_by
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if not _is_same(x, y, known, made_by):
            return False
        known |= dict(zip(y.outvars, x.outvars, strict=True))
    return all(_is_operand(x, y, known, made_by) for x, y in zip(a.outvars, b.outvars, strict=True))
