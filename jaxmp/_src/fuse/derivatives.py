"""Evaluates a function at a level of determinism, with derivatives at this level.

JAX would differentiate the calls of a rewritten program, and leave the operations between them to XLA. So the function
differentiated is the one before rewriting, and its linear map is `linear_p`. Each part is then rewritten: the
function with its residuals, the linear map in forward mode, and the transposed map in reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, mlir

from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.rewrite import Rewriter
from jaxmp._src.platform.jax_internals import jax_compat, jax_rules, jax_tracing

Function = Callable[..., Sequence[jax.Array]]

# (*residuals, *tangents) -> the results of `function`, which is linear in the tangents.
linear_p = jax_compat.make_primitive("jaxmp_linear", multiple_results=True)
# (*values, *results) -> the results, with the derivatives of `function`. They are its results at `places`.
kept_p = jax_compat.make_primitive("jaxmp_kept", multiple_results=True)


def evaluated(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, *, is_open: bool = False
) -> Any:
    """Traces a function of pytrees and returns its result, computed with the trace's products as calls. At a level the
    result has the derivative of this module, unless the function has side effects or mutable arrays: then JAX
    differentiates each operation. `is_open`: the operations are no part of a function with a derivative rule, because a
    policy of `jax.checkpoint` asks for each operation, but does not look into such a function."""
    traced = jax_tracing.Traced(fn, args, kwargs)
    jaxpr, consts = traced.jaxpr, traced.consts

    def plain(*values: Any) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, values[: len(consts)], *values[len(consts) :])

    def rewritten(*values: Any) -> list[Any]:
        return Rewriter(options).evaluate(jaxpr, values[: len(consts)], *values[len(consts) :])

    values = [*consts, *traced.arrays]
    if not options.level.fixed_order or jax_tracing.has_state(jaxpr):
        return traced.result(rewritten(*values))
    if is_open:
        made = rewritten(*map(jax.lax.stop_gradient, values))  # only `kept_p` has derivatives
        return traced.result(
            kept_p.bind(*values, *made, function=plain, places=tuple(range(len(made))), options=options)
        )
    run = jax.custom_jvp(rewritten)
    run.defjvp(lambda primals, tangents: _jvp(plain, options, primals, tangents), symbolic_zeros=True)
    return traced.result(run(*values))


def _jvp(
    function: Function, options: Options, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns (the results of a function, their tangents), both at the level. One `linear_p` call computes the tangents
    of inexact results from those `tangents` that are no symbolic zeros. Integer results get zeros of type float0."""
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero | ad.Zero)]

    def linearized(*primals: Any) -> Any:
        return jax.linearize(_of_some(function, primals, moved), *(primals[i] for i in moved))

    results, linear = evaluated(linearized, primals, {}, options, is_open=True)
    residuals, tree = jax.tree.flatten(linear)
    inexact = [i for i, x in enumerate(results) if jax.numpy.issubdtype(x.dtype, np.inexact)]

    def of_residuals(*values: Any) -> list[jax.Array]:
        residuals_, tangents_ = values[: len(residuals)], values[len(residuals) :]
        found = jax.tree.unflatten(tree, residuals_)(*tangents_)
        return [found[i] for i in inexact]

    made = linear_p.bind(
        *residuals, *(tangents[i] for i in moved), function=of_residuals, nresiduals=len(residuals), options=options
    )
    of_inexact = dict(zip(inexact, made, strict=True))
    zeros = (np.zeros(np.shape(x), jax.dtypes.float0) for x in results)  # a result may be a literal
    return list(results), [of_inexact.get(i, zero) for i, zero in enumerate(zeros)]


def _of_some(function: Function, operands: Sequence[Any], places: Sequence[int]) -> Function:
    """Returns `function` as a function of the operands at `places` alone; the other operands are fixed."""

    def of_some(*values: Any) -> Sequence[Any]:
        given = dict(zip(places, values, strict=True))
        return function(*(given.get(i, x) for i, x in enumerate(operands)))

    return of_some


def _abstract_eval(*avals: Any, function: Function, **_: Any) -> list[Any]:
    return [v.aval for v in jax_tracing.trace(function, avals)[0].outvars]


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, function: Function, nresiduals: int, options: Options
) -> Any:
    """Returns (results, tangents) of `linear_p`. If only linear operands have tangents, the map itself is applied to
    them; if residuals have tangents too, the whole function is differentiated (`_jvp`)."""
    params = {"function": function, "nresiduals": nresiduals, "options": options}
    if any(not isinstance(t, ad.Zero) for t in tangents[:nresiduals]):
        return _jvp(function, options, primals, tangents)
    linear = map(ad.instantiate_zeros, tangents[nresiduals:])
    return linear_p.bind(*primals, **params), linear_p.bind(*primals[:nresiduals], *linear, **params)


def _transpose(
    cotangents: Sequence[Any], *operands: Any, function: Function, nresiduals: int, options: Options
) -> list[Any]:
    """Returns the cotangents of the linear operands at the level, and None for other operands."""
    wanted = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

    def transposed(operands: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        linear, zeros = _of_some(function, operands, wanted), (ad.Zero(operands[i]) for i in wanted)
        with jax_compat.with_64_bits_of([*operands, *cotangents]):
            return jax.linear_transpose(linear, *map(ad.instantiate_zeros, zeros))(cotangents)

    known = [x.aval if i in wanted else x for i, x in enumerate(operands)]
    found = evaluated(transposed, (known, list(map(ad.instantiate_zeros, cotangents))), {}, options)
    of_wanted = dict(zip(wanted, found, strict=True))
    return [of_wanted.get(i) for i in range(len(operands))]


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, function: Function, **params: Any) -> Any:
    """Returns (the results for batched operands, their batch dimensions, which are 0)."""
    results = linear_p.bind(*operands, function=jax.vmap(function, dims), **params)
    return results, [0] * len(results)


def _lower(*operands: Any, function: Function, options: Options, **_: Any) -> Any:
    return evaluated(function, operands, {}, options, is_open=True)


def lowered(eqn: Any) -> list[jax_compat.Jaxpr]:
    """Returns [the jaxpr that a `linear_p` equation is lowered to], so that reports list its calls; else []."""
    if eqn.primitive is not linear_p:
        return []
    return [jax_tracing.trace(lambda *operands: _lower(*operands, **eqn.params), [v.aval for v in eqn.invars])[0]]


def _kept_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, places: Sequence[int], **params: Any) -> Any:
    """Returns (results, tangents) of `kept_p`, both computed by its function."""
    n = len(primals) - len(places)
    results, found = _jvp(primals=primals[:n], tangents=tangents[:n], **params)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    found = [zero if t.dtype == jax.dtypes.float0 else t for t, zero in zip(found, zeros, strict=True)]
    return [results[i] for i in places], [found[i] for i in places]


def _kept_batch(operands: Sequence[Any], dims: Sequence[Any], *, function: Function, **params: Any) -> Any:
    """Returns what `_batch` does for `kept_p`."""
    n = len(operands) - len(params["places"])
    made = jax.vmap(lambda *operands: operands[n:], dims)(*operands)
    results = kept_p.bind(*operands[:n], *made, function=jax.vmap(function, dims[:n]), **params)
    return results, [0] * len(results)


kept_p.def_abstract_eval(lambda *avals, places, **_: list(avals[len(avals) - len(places) :]))
ad.primitive_jvps[kept_p] = _kept_jvp
jax_compat.batching.primitive_batchers[kept_p] = _kept_batch
mlir.register_lowering(kept_p, lambda _, *operands, places, **__: operands[len(operands) - len(places) :])
jax_rules.register_unread(kept_p)
linear_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _transpose
jax_compat.batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_lower, multiple_results=True))
