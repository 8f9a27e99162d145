"""Evaluates equations that contain jaxprs, with these jaxprs rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxmp._src.core.primitive.primitives import is_own_jit
from jaxmp._src.core.spec.levels import Level
from jaxmp._src.fuse.graph import DERIVED, EXCHANGE, PRODUCTS, UnknownError
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# Takes (jaxpr, its constants, *its arguments) and returns the jaxpr's results.
Evaluate = Callable[..., list[Any]]
Function = Callable[..., Any]


class Functions:
    """Turns jaxprs into functions and into rewritten jaxprs, one for each jaxpr, so that JAX traces and compiles each
    jaxpr once."""

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self._known: dict[tuple[Any, str], Any] = {}  # rewritten jaxprs

    def of(self, closed: Any) -> Function:
        """Returns the function that evaluates a jaxpr by `self.evaluate`."""
        jaxpr, consts = jax_tracing.open_jaxpr(closed)
        return functools.partial(self.evaluate, jaxpr, consts)

    def rewritten(self, closed: Any, primitive: str) -> Any:
        """Returns a jaxpr that computes `closed`, a parameter of `primitive`, by `self.evaluate`. The same jaxpr and
        primitive give the same result. Raises UnknownError if the results have other types, which only `jit` and
        `remat2` may have, and if the jaxpr of a `remat2` would have constants."""
        key = closed, primitive
        if key not in self._known:
            before, _ = jax_tracing.open_jaxpr(closed)

            def run(*args: Any) -> list[Any]:
                results: list[Any] = self.of(closed)(*args)
                is_same = all(map(jax_tracing.is_type_of, [v.aval for v in before.outvars], results))
                if not is_same and primitive not in ("jit", "remat2"):
                    raise UnknownError("a program within it would have other results")
                return results

            jaxpr, consts = jax_tracing.trace(run, [v.aval for v in before.invars], before.debug_info)
            if consts and primitive == "remat2":
                raise UnknownError("a program within it would have constants")
            self._known[key] = jaxpr if primitive == "remat2" else type(closed)(jaxpr, consts)
        return self._known[key]


def inside(eqn: Any, *, of_jaxmp: bool = False) -> Iterator[Any]:
    """Yields the equations in the jaxprs of an equation, and in theirs; with `of_jaxmp` also in jaxmp's functions."""
    if of_jaxmp or not is_own_jit(eqn):
        for sub in jax_compat.subjaxprs(eqn.params):
            for inner in sub.eqns:
                yield inner
                yield from inside(inner, of_jaxmp=of_jaxmp)


def has_products(eqn: Any, more: Collection[str] = ()) -> bool:
    """True if the jaxprs in an equation contain a product, an operation with products in its derivative, a ragged
    all-to-all, or a primitive of `more`. Always true for a custom VJP, because of its rules; false for functions of
    jaxmp. The equation itself does not count."""
    wanted = {"custom_vjp_call", *PRODUCTS, *DERIVED, EXCHANGE, *more}
    return eqn.primitive.name == "custom_vjp_call" or any(inner.primitive.name in wanted for inner in inside(eqn))


def products_in(eqn: Any) -> list[Any]:
    """Returns the products among an equation and the equations in its jaxprs, except jaxmp's functions."""
    return [each for each in (eqn, *inside(eqn)) if each.primitive.name in PRODUCTS]


def weaker_calls(eqn: Any, level: Level) -> Iterator[Any]:
    """Yields specs of jaxmp's calls, of `eqn` or in its jaxprs, that promise less than `level`, except of integers."""
    for each in (eqn, *inside(eqn, of_jaxmp=True)):
        spec = each.params.get("spec")
        if isinstance(given := getattr(spec, "level", None), Level):
            is_weaker = (level.fixed_order, level.global_order) > (given.fixed_order, given.global_order)
            if is_weaker and jnp.issubdtype(each.invars[0].aval.dtype, jnp.inexact):
                yield spec


def evaluate(functions: Functions, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns an equation's results, its jaxprs run by `functions`. Raises UnknownError for others than `_RULES`."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None:
        raise UnknownError(f"{eqn.primitive.name} is left as it is")
    results: Sequence[Any] = rule(functions, eqn, list(operands))
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


def _as_it_stands(functions: Functions, eqn: Any, operands: list[Any]) -> Any:
    """Returns the results of an equation that keeps its primitive and parameters, with the jaxprs in them rewritten."""

    def is_leaf(x: Any) -> bool:
        return x is None or jax_tracing.is_jaxpr(x)

    def rewritten(x: Any) -> Any:
        return functions.rewritten(x, eqn.primitive.name) if jax_tracing.is_jaxpr(x) else x

    return jax_tracing.evaluate(eqn, operands, **jax.tree.map(rewritten, eqn.params, is_leaf=is_leaf))


def _custom(functions: Functions, eqn: Any, operands: list[Any]) -> Any:
    body = functions.of(eqn.params["call_jaxpr"])
    return jax_tracing.evaluate_with_body(eqn, operands, body, lambda rule: functools.partial(_rule, functions, rule))


def _rule(functions: Functions, rule: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a user's differentiation rule for `args`, with its products rewritten; symbolic zeros and
    flags stay. A rule that cannot be traced runs as it is."""
    try:
        traced = jax_tracing.Traced(rule, args, {})
    except Exception:  # raised by the user's rule, which may need concrete values
        return rule(*args)
    return traced.result(functions.evaluate(traced.jaxpr, traced.consts, *traced.arrays))


def _shard_map(functions: Functions, eqn: Any, operands: list[Any]) -> Any:
    """Runs a `shard_map` with its body rewritten, over the axes that the equation makes manual."""
    params = eqn.params
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


_KEPT = ("jit", "scan", "while", "cond", "remat2", "custom_linear_solve", "composite")
_RULES = {
    **dict.fromkeys(_KEPT, _as_it_stands),
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "closed_call": lambda functions, eqn, operands: functions.of(eqn.params["call_jaxpr"])(*operands),
    "shard_map": _shard_map,
}
