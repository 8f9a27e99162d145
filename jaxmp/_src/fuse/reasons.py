"""Why JAX computes a product: names in its name stack, which `explain` reads, and warnings of jaxmp's own faults."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxmp._src.core.spec import levels
from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

Result = TypeVar("Result")

# The reasons why JAX computes a product: part of its name stack, where `explain` reads them.
SCOPE = "jaxmp_left_"
REASONS = {
    "local": "its function has no gather before it, nor a sum over ranks after it, that a call takes in, and XLA's own "
    "product is as fast",
    "batch": "it has a batch, which XLA multiplies, and no call takes in the collectives next to it",
    "groups": "it multiplies groups of rows (lax.ragged_dot), which XLA does here in a call too: elsewhere than on CPU "
    f"devices, and under {levels.GLOBAL_ORDER.asked} where its partitioner chooses the shardings",
    "blocks": "it multiplies blocks with scales (lax.scaled_dot), which no call does",
    "rule": "JAX makes it in the derivative of another operation, such as a function of jnp.linalg",
    "gathered": "its gathered operand is needed elsewhere too, so the gather stays, and the product is local",
    "gather": "no call gathers its operand in this way (tiled=False, a reshape after it, groups of ranks, a batch, a "
    "dimension between others), so the gather stays, and the product is local",
    "shared": "other products read its gathered operand too, and one gather for all, with local products, takes less "
    "time than calls that each gather (docs/cost.md)",
    "type": "its types have no kernel of jaxmp's",
    "inner": "it is within an operation that is left as it is",
    "failed": "jaxmp fails on it, by a fault of its own; please report it",
    "refused": "jaxmp refuses these operands, shardings or options",
}
# Notes on the pattern of a call: part of its name stack.
NOTE = "jaxmp_note_"
NOTES = {
    "again": "gathers in its call what other products gather too, because one gather before all of them takes longer "
    "(docs/cost.md)",
    "shared": "its operand is gathered before it, once for several products, which takes less time than calls that "
    "each gather (docs/cost.md)",
}
# Reasons with details, by their names in a name stack.
_details: dict[str, str] = {}


def notes_in(names: Sequence[str]) -> list[str]:
    """Returns the notes on a call, in words, that these name stacks hold, each once."""
    found = dict.fromkeys(re.findall(NOTE + "([a-z0-9]+)", "/".join(names)))
    return [NOTES.get(key) or _details[key] for key in found]


def reason_in(names: Sequence[str]) -> str:
    """Returns the reason, in words, that the innermost of these name stacks holds. There has to be one."""
    name: str = re.findall(SCOPE + "([a-z0-9]+)", "/".join(names))[-1]
    return REASONS.get(name) or _details[name]


def name_of(reason: str) -> str:
    """Returns a name for the text of a reason or note, and keeps the text for `reason_in` and `notes_in`."""
    name = "of" + hashlib.sha256(reason.encode()).hexdigest()[:10]
    _details[name] = reason
    return name


def safely(equations: Sequence[Any], analyze: Callable[[], Result]) -> Result | None:
    """Returns the result of `analyze`, an analysis of equations. If it fails by a refusal or a fault of jaxmp, warns
    and returns None, even if the equations have effects. Raises errors of a run (`raise_unless_fault`)."""
    try:
        return analyze()
    except Exception as error:
        report(equations, error)
        return None


def raise_unless_fault(error: Exception, equations: Sequence[Any] = ()) -> None:
    """Returns if `error` is a refusal or a fault of jaxmp, so that JAX may run the equations instead. Raises an error
    of a run (a RuntimeError, Warning or FloatingPointError, but no NotImplementedError), and any error but a refusal if
    one of `equations` has effects. Effects, and a run that failed in one process of several, cannot be repeated."""
    if isinstance(error, Refusal):
        return
    is_of_a_run = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    is_other = is_of_a_run or isinstance(error, Warning | FloatingPointError)
    if is_other or any(map(jax_tracing.has_effects, equations)):
        raise error


def report(equations: Sequence[Any], error: Exception) -> None:
    """Warns that jaxmp fails on equations. Raises an error of a run instead (`raise_unless_fault`)."""
    raise_unless_fault(error)
    lines = [line for line in dict.fromkeys(map(jax_compat.traced_line, equations)) if line]
    warnings.warn(
        f"jaxmp.fuse fails on a part of the program and leaves it as it is ({error!r}, at "
        f"{', '.join(lines[:3]) or 'an unknown line'}); please report it",
        RuntimeWarning,
        stacklevel=2,
    )
