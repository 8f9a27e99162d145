"""Equations that hold other jaxprs, with these rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from jaxmp._src.fuse.graph import DERIVED, PRODUCTS
from jaxmp._src.primitive.primitives import saves_products
from jaxmp._src.runtime import jax_compat, jax_tracing

if TYPE_CHECKING:
    from jaxmp._src.fuse.rewrite import Rewriter


class UnknownError(Exception):
    """An equation whose jaxprs are left as they are."""


def has_products(eqn: Any) -> bool:
    """Whether an equation's jaxprs hold a product of the user's, or it may have one in a rule of differentiation."""
    if str(eqn.params.get("name", "")).startswith("jaxmp"):
        return False
    return eqn.primitive.name == "custom_vjp_call" or any(
        inner.primitive.name in (*PRODUCTS, *DERIVED) or has_products(inner)
        for sub in jax_compat.subjaxprs(eqn.params)
        for inner in sub.eqns
    )


def evaluate(rewriter: Rewriter, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation whose jaxprs are rewritten. Raises UnknownError where nobody knows it."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None:
        raise UnknownError
    results: Sequence[Any] = rule(rewriter, eqn.params, list(operands), eqn)
    return results


def _jit(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    f = rewriter.compiled(params)
    return f(*operands)


def _scan(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    consts, carry = jax_compat.scan_counts(eqn)
    body = rewriter.function_of(params["jaxpr"])
    fixed, init, xs = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]

    def step(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *state, *x)
        return results[:carry], results[carry:]

    state, ys = lax.scan(step, init, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return [*state, *ys]


def _while(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:of_cond], operands[of_cond : of_cond + of_body]
    cond, body = rewriter.function_of(params["cond_jaxpr"]), rewriter.function_of(params["body_jaxpr"])
    return lax.while_loop(
        lambda state: cond(*cond_consts, *state)[0],
        lambda state: list(body(*body_consts, *state)),
        operands[of_cond + of_body :],
    )


def _cond(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    if set(params) - {"branches"}:
        raise UnknownError  # branches by platform
    branches = [rewriter.function_of(branch) for branch in params["branches"]]
    return lax.switch(operands[0], branches, *operands[1:])


def _remat(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    f = rewriter.function_of(params["jaxpr"])
    if params["differentiated"]:  # in a backward pass: what keeps its operations apart from the forward ones stays
        jaxpr, consts = jax_tracing.trace(f, [v.aval for v in eqn.invars])
        if consts:
            raise UnknownError
        return jax_tracing.evaluate(eqn, operands, jaxpr=jaxpr)
    policy = params["policy"]
    policy = None if policy is None else functools.partial(saves_products, policy)
    return jax.checkpoint(f, prevent_cse=params["prevent_cse"], policy=policy)(*operands)


def _custom(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    body = rewriter.function_of(params["call_jaxpr"])
    return jax_tracing.evaluate_with_body(eqn, operands, body, lambda rule: functools.partial(_rule, rewriter, rule))


def _rule(rewriter: Rewriter, rule: Callable[..., Any], *args: Any) -> Any:
    """What a rule of differentiation gives, with its products rewritten. Its zeros and flags stay as they are."""
    arrays = [x for x in args if isinstance(x, jax.Array)]
    results: list[Any] = []
    tree: Any = None

    def of_arrays(*arrays: jax.Array) -> list[jax.Array]:
        nonlocal results, tree
        given = iter(arrays)
        results, tree = jax.tree.flatten(rule(*(next(given) if isinstance(x, jax.Array) else x for x in args)))
        return [x for x in results if isinstance(x, jax.Array)]

    try:
        jaxpr, consts = jax_tracing.trace(of_arrays, [jax.typeof(x) for x in arrays])
    except Exception:  # as of a rule that asks for values
        return rule(*args)
    found = iter(rewriter.evaluate(jaxpr, consts, *arrays))
    return jax.tree.unflatten(tree, [next(found) if isinstance(x, jax.Array) else x for x in results])


def _call(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    return rewriter.function_of(params["call_jaxpr"])(*operands)


def _shard_map(rewriter: Rewriter, params: dict[str, Any], operands: list[Any], eqn: Any) -> Any:
    f = rewriter.function_of(params["jaxpr"])
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    mapped: Any = jax.shard_map(
        lambda *args: tuple(f(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=frozenset(manual or ()),
    )
    return mapped(*operands)


_RULES = {
    "jit": _jit,
    "pjit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "checkpoint": _remat,
    "remat2": _remat,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "closed_call": _call,
    "core_call": _call,
    "shard_map": _shard_map,
}
