"""Finds gradients that a loop sums over devices in each iteration, although one sum after the loop would do."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jaxmp._src.tools.explain.hlo import MOVES, Instruction
from jaxmp._src.tools.explain.origins import OF_SCAN, Dim, is_backward, is_call, value
from jaxmp._src.tools.explain.partitioned import Place
from jaxmp._src.tools.explain.values import Cause, Values, chain

# Linear operations that pass a gradient on. `Origins.users` follows it into and out of loops.
_LINEAR = MOVES | {"add", "while", "dynamic-update-slice", "custom-call", "call"}
_HOW = "jax.sharding.reshard, or jax.lax.pcast in shard_map; on automatic axes in jax.sharding.explicit_axes"


def summed_once(values: Values, sites: Iterable[Place], why: Cause) -> Cause:
    """Returns `why`, the cause of a gradient's sum over `values.axes`; with a note and a remedy if a loop adds up what
    one of `sites` computes. `sites`: what may compute the gradient, in the program before XLA's partitioner."""
    for site in sites:
        loop, passed = _accumulates(values, site)
        if loop:
            whole = values.origins.whole
            at, name = whole.line(loop), _weight(values, whole.innermost(site[1]), passed)
            after = "after the loop" + f" in {at}" * bool(at)
            return why._replace(
                text=f"{why.text}; the loop sums over devices in each iteration",
                remedy=f"tag {name} reduced over {values.over} ({_HOW}), and sum once {after}",
            )
    return why


def _accumulates(values: Values, site: Place) -> tuple[Instruction | None, Collection[Dim]]:
    """Returns (the outermost loop, or None, that adds the site's result to a value that it carries and uses nowhere
    else; every dimension that the result reaches by linear operations, within a limit of the search)."""
    found, (place, each) = None, site
    waiting = [Dim(place, each, str(i) * (len(each.shapes) > 1), 0) for i in range(len(each.shapes))]
    seen = dict.fromkeys(waiting)
    while waiting and len(seen) < 500:
        place, each, *_ = at = waiting.pop(0)
        loop = values.program.callers[place.name][1] if place.name in values.program.callers else None
        if each.opcode == "add" and loop and any(_is_carry(value(place, each, i)) for i in (0, 1)):
            found = loop
        users = [user for user in values.origins.users(at) if _is_linear(user) and user not in seen]
        seen |= dict.fromkeys(users)
        waiting += users
    return found, seen


def _is_linear(at: Dim) -> bool:
    """True if an operation only moves data, adds, runs a loop or call, or multiplies with or divides by a constant."""
    place, each, *_ = at
    if each.opcode in ("multiply", "divide"):
        factors = [*place.operands(each)][each.opcode == "divide" :]
        return any(below.opcode == "constant" for factor in factors for below in chain(place, factor))
    return each.opcode in _LINEAR


def _is_carry(at: Dim) -> bool:
    """True if a value is a part of its computation's parameter, or a copy or conversion of one, and has one user. A
    parameter that is no tuple may have several users."""
    place, each, part, _ = at
    if each.opcode in ("convert", "copy", "get-tuple-element") and len(place.users[each.name]) == 1:
        return _is_carry(value(place, each, 0))
    uses = [of for user in place.users[each.name] for of in zip(user.operands, user.parts, strict=True)]
    return each.opcode == "parameter" and (not part or uses.count((each.name, part)) == 1)


def _weight(values: Values, line: str, gradient: Iterable[Dim]) -> str:
    """Names the operand that a gradient belongs to: of a product of this line, with the gradient's extents, and not
    sharded over the axes; else "the weight"."""
    extents = {tuple(sorted(at.extents)) for at in gradient}
    for place, each in values.program.places():
        if multiplies(each) and not is_backward(each) and values.origins.whole.innermost(each) == line:
            operands = (values.origins.whole_operand(place, each, i) for i in range(len(each.operands)))
            of_weight = (at for at in operands if tuple(sorted(at.extents)) in extents and not values.all(at))
            if at := next(of_weight, None):
                below: Dim | None = at._replace(dim=len(at.extents) - 1)
                while below and (below.instruction.opcode in MOVES or OF_SCAN.search(below.instruction.op_name)):
                    at, below = below, next(values.origins.operands(below), None)
                return values.origins.name(below or at)[0]
    return "the weight"


def multiplies(each: Instruction) -> bool:
    """True for a product, and for a call of jaxmp before XLA's partitioner."""
    is_partitioned = "jaxmp_partitioned" in each.attribute("custom_call_target")
    return each.is_product or (is_call(each) and (is_partitioned or each.opcode == "call"))
