"""Pairs the equations of two traces of one program."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing
from jaxmp._src.tools.audit import operations


def live_equations(jaxpr: Any, line: str) -> list[Any]:
    """Returns the equations that the results need or that have effects. Raises NotImplementedError if any equation of
    `jaxpr` has a mutable array; the message names `line` if the equation has no line."""
    for eqn in reversed(jaxpr.eqns):
        if any(jax_tracing.is_mutable(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            raise NotImplementedError(
                f"audit: does not follow mutable arrays, found {eqn.primitive.name} of one at"
                f" {jax_compat.traced_line(eqn) or line}; write fn without jax.new_ref"
            )
    return jax_tracing.needed(jaxpr.eqns, jaxpr.outvars)


def paired(equations: Sequence[Any], others: Sequence[Any], *, is_batch: bool) -> Iterator[tuple[Any, Any]]:
    """Yields the equations of both traces in pairs that look equal (`_likeness`). Both traces can run in the order of
    the pairs. An equation that only one trace has comes with None."""
    names, other_names = ([_likeness(eqn, is_batch) for eqn in eqns] for eqns in (equations, others))
    if names == other_names:
        yield from zip(equations, others, strict=True)
        return
    for kind, i, j, k, m in difflib.SequenceMatcher(None, names, other_names, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(equations[i:j], others[k:m], strict=True)
        else:
            yield from ((eqn, None) for eqn in equations[i:j])
            yield from ((None, eqn) for eqn in others[k:m])


def _likeness(eqn: Any, is_batch: bool) -> Any:
    """Returns what is equal for equations that make a pair: name, number of operands, shapes and types of the results,
    and line. The name of jaxmp's calls has no level. Relu masks do not count. If `is_batch`, shapes count by rank."""
    ours = operations.our_equation(eqn)
    spec = None if ours is None else ours.params["spec"]
    name = eqn.primitive.name if spec is None else f"jaxmp {getattr(spec, 'epilog', spec.function)}"
    results = tuple(
        (len(v.aval.shape) if is_batch or operations.is_by_device(eqn, i) else v.aval.shape, str(v.aval.dtype))
        for i, v in enumerate(eqn.outvars)
        if not operations.is_packed(eqn, v.aval.dtype)
    )
    return name, len(eqn.invars), results, jax_compat.traced_line(eqn)
