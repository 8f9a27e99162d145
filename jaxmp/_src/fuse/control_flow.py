"""Evaluates equations that contain jaxprs, with these jaxprs rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmp._src.core.primitive.primitives import is_own_jit
from jaxmp._src.core.spec.levels import Level
from jaxmp._src.fuse.graph import DERIVED, EXCHANGE, PRODUCTS, UnknownError
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# Takes (jaxpr, its constants, *its arguments) and returns the jaxpr's results.
Evaluate = Callable[..., list[Any]]
Function = Callable[..., Any]


class Functions:
    """Turns jaxprs into functions, one for each jaxpr, so that JAX traces and compiles each jaxpr once."""

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self._known: dict[Any, Function] = {}
        self._jaxprs: list[Any] = []  # kept alive, because their ids are keys

    def of(self, closed: Any) -> Function:
        """Returns the function that evaluates a jaxpr by `self.evaluate`, the same function for the same jaxpr."""
        if id(closed) not in self._known:
            self._jaxprs.append(closed)
            jaxpr, consts = jax_tracing.open_jaxpr(closed)
            self._known[id(closed)] = functools.partial(self.evaluate, jaxpr, consts)
        return self._known[id(closed)]

    def jitted(self, params: dict[str, Any]) -> Function:
        """Returns the function of a `jit` equation with these parameters, jitted with its name and options. It is one
        function for the same jaxpr, shardings and donations."""
        f = self.of(params["jaxpr"])
        key = id(f), tuple(map(repr, (params["in_shardings"], params["out_shardings"], params["donated_invars"])))
        if key not in self._known:

            def named(*args: Any) -> list[Any]:
                results: list[Any] = f(*args)
                return results

            named.__name__ = named.__qualname__ = params["name"]
            given, wanted = (
                [None if jax_tracing.is_unspecified(s) else s for s in params[side]]
                for side in ("in_shardings", "out_shardings")
            )
            shardings: dict[str, Any] = {}
            if any(s is not None for s in given):
                shardings["in_shardings"] = tuple(given)
            if any(s is not None for s in wanted):
                shardings["out_shardings"] = wanted
            donated = tuple(i for i, is_donated in enumerate(params["donated_invars"]) if is_donated)
            self._known[key] = jax.jit(
                named, donate_argnums=donated, inline=params["inline"], keep_unused=params["keep_unused"], **shardings
            )
        return self._known[key]


def has_products(eqn: Any, more: Collection[str] = ()) -> bool:
    """True if the jaxprs in an equation contain a product, an operation with products in its derivative, a ragged
    all-to-all, or a primitive of `more`. Always true for a custom VJP, because of its rules; false for functions of
    jaxmp. The equation itself does not count."""
    if is_own_jit(eqn):
        return False
    return eqn.primitive.name == "custom_vjp_call" or any(
        inner.primitive.name in (*PRODUCTS, *DERIVED, EXCHANGE, *more) or has_products(inner, more)
        for sub in jax_compat.subjaxprs(eqn.params)
        for inner in sub.eqns
    )


def products_in(eqn: Any) -> Iterator[Any]:
    """Yields the equation itself if it is a product, else the products in its jaxprs, except jaxmp's functions."""
    if eqn.primitive.name in PRODUCTS:
        yield eqn
    elif not is_own_jit(eqn):
        for sub in jax_compat.subjaxprs(eqn.params):
            for inner in sub.eqns:
                yield from products_in(inner)


def weaker_calls(eqn: Any, level: Level) -> Iterator[Any]:
    """Yields specs of jaxmp's calls, of `eqn` or in its jaxprs, that promise less than `level`, except of integers."""
    spec = eqn.params.get("spec")
    if isinstance(given := getattr(spec, "level", None), Level):
        is_weaker = (level.fixed_order, level.global_order) > (given.fixed_order, given.global_order)
        if is_weaker and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact):
            yield spec
    for sub in jax_compat.subjaxprs(eqn.params):
        for inner in sub.eqns:
            yield from weaker_calls(inner, level)


def evaluate(functions: Functions, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns an equation's results, its jaxprs run by `functions`. Raises UnknownError for others than `_RULES`."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None:
        raise UnknownError(f"{eqn.primitive.name} is left as it is")
    results: Sequence[Any] = rule(functions, eqn.params, list(operands), eqn)
    return results


def opened(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """Returns (the jaxpr, the constants) of a primitive of another library, with the derivative that the library gives.

    Returns None for primitives of JAX, and if JAX cannot trace the implementation.
    """
    implementation = jax_tracing.implementation(eqn)
    if implementation is None:
        return None
    run = jax.custom_jvp(implementation)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moved = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of_moved(*values: Any) -> Sequence[Any]:
            given = dict(zip(moved, values, strict=True))
            return list(jax_tracing.evaluate(eqn, [given.get(i, x) for i, x in enumerate(primals)]))

        return jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])

    run.defjvp(jvp, symbolic_zeros=True)
    try:
        return jax_tracing.trace(run, [v.aval for v in eqn.invars])
    except Exception:  # raised by the library's code, which may compute outside of JAX
        return None


def _jit(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    return functions.jitted(params)(*operands)


def _scan(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    """Runs a scan with its body rewritten; returns [*carry, *stacked]."""
    consts, carry = jax_compat.scan_counts(eqn)
    body = functions.of(params["jaxpr"])
    fixed, init, xs = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]

    def step(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *state, *x)
        return results[:carry], results[carry:]

    # lax.scan takes a symbolic length from the arrays only.
    length = None if xs else params["length"]
    state, ys = lax.scan(step, init, xs, length=length, reverse=params["reverse"], unroll=params["unroll"])
    return [*state, *ys]


def _while(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    """Runs a while loop with its condition and body rewritten; returns the last state."""
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:of_cond], operands[of_cond : of_cond + of_body]
    cond, body = functions.of(params["cond_jaxpr"]), functions.of(params["body_jaxpr"])
    predicate: Any = jax_tracing.open_jaxpr(params["cond_jaxpr"])[0].outvars[0]
    if predicate.aval.shape:  # of `vmap`: one for each example, and lax.while_loop takes one
        return _as_it_stands(functions, params, operands, eqn)
    return lax.while_loop(
        lambda state: cond(*cond_consts, *state)[0],
        lambda state: list(body(*body_consts, *state)),
        operands[of_cond + of_body :],
    )


def _cond(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    if set(params) - {"branches"}:  # a choice by platform
        return _as_it_stands(functions, params, operands, eqn)
    branches = [functions.of(branch) for branch in params["branches"]]
    return lax.switch(operands[0], branches, *operands[1:])


def _remat(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    f = functions.of(params["jaxpr"])
    if params["differentiated"]:  # in a backward pass: keep its operations apart from the forward ones
        return _as_it_stands(functions, params, operands, eqn)
    return jax.checkpoint(f, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)


def _as_it_stands(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    """Returns the results of an equation that keeps its primitive and parameters, with the jaxprs in them rewritten.
    Raises UnknownError if a rewritten jaxpr has constants or results of other types."""

    def rewritten(closed: Any) -> Any:
        before, _ = jax_tracing.open_jaxpr(closed)
        jaxpr, consts = jax_tracing.trace(functions.of(closed), [v.aval for v in before.invars])
        if consts or [v.aval for v in jaxpr.outvars] != [v.aval for v in before.outvars]:
            raise UnknownError(f"a program within {eqn.primitive.name} would have other constants or results")
        return jaxpr if isinstance(closed, jax_compat.Jaxpr) else type(closed)(jaxpr, ())

    def is_leaf(x: Any) -> bool:
        return x is None or jax_tracing.is_jaxpr(x)

    parts = {
        name: x for name, x in params.items() if any(map(jax_tracing.is_jaxpr, jax.tree.leaves(x, is_leaf=is_leaf)))
    }
    changed = jax.tree.map(lambda x: rewritten(x) if jax_tracing.is_jaxpr(x) else x, parts, is_leaf=is_leaf)
    return jax_tracing.evaluate(eqn, operands, **changed)


def _custom(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    body = functions.of(params["call_jaxpr"])
    return jax_tracing.evaluate_with_body(eqn, operands, body, lambda rule: functools.partial(_rule, functions, rule))


def _rule(functions: Functions, rule: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a user's differentiation rule for `args`, with its products rewritten; symbolic zeros and
    flags stay. A rule that cannot be traced runs as it is."""
    try:
        traced = jax_tracing.Traced(rule, args, {})
    except Exception:  # raised by the user's rule, which may need concrete values
        return rule(*args)
    return traced.result(functions.evaluate(traced.jaxpr, traced.consts, *traced.arrays))


def _call(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    return functions.of(params["call_jaxpr"])(*operands)


def _shard_map(functions: Functions, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    """Runs a `shard_map` with its body rewritten, over the axes that the equation makes manual."""
    f = functions.of(params["jaxpr"])
    mapped: Any = jax.shard_map(
        lambda *args: tuple(f(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=frozenset(params["newly_manual_axes"]),
    )
    return mapped(*operands)


_RULES = {
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _as_it_stands,
    "composite": _as_it_stands,
    "remat2": _remat,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "closed_call": _call,
    "shard_map": _shard_map,
}
