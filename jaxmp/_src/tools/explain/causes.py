"""Why XLA communicates: the operation of the user's program that wants other shards than there are."""

from __future__ import annotations

from jaxmp._src.tools.explain.hlo import Computation, Instruction
from jaxmp._src.tools.explain.lies import joined
from jaxmp._src.tools.explain.moves import Moves
from jaxmp._src.tools.explain.origins import Origins, is_backward
from jaxmp._src.tools.explain.search import Cause
from jaxmp._src.tools.explain.sums import Sums

# JAX's collectives, which a program writes itself.
_WRITTEN = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"}
_WRITTEN |= {"reduce_scatter", "unreduced_reduce_scatter", "ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast"}


def cause(origins: Origins, computation: Computation, collective: Instruction, operand: int = 0) -> Cause:
    """Why a collective of the compiled program runs, for one of its operands."""
    program = origins.program
    if collective.primitive in _WRITTEN:
        return _written(collective, joined(program.axes(collective)), program.compiled.line(collective))
    module, place, each = program.compiled, computation, collective
    if (found := program.partitioned(computation, collective, operand)) is not None and program.parts is not None:
        module, (place, each), operand = program.parts, found, 0
    at = origins, program.axes(collective), module, place, each, operand
    sums, moves = Sums(*at), Moves(*at)
    why = sums.sum() if each.kind in ("all-reduce", "reduce-scatter") else moves.move()
    if why.kind == "gradient" and sums.accumulates():
        text = f"{why.text}; the loop adds it up, and sums over devices in each iteration"
        return why._replace(text=text, remedy="run the loop in shard_map, and sum (jax.lax.psum) once behind it")
    if "rematted_computation" in each.op_name + sums.source.op_name:
        text = f"{why.text}; jax.checkpoint computes it again for the gradient"
        return why._replace(
            kind="recomputed", text=text, remedy="let its policy save the result, as save_only_these_names does"
        )
    return why


def _written(collective: Instruction, over: str, line: str) -> Cause:
    name = f"jax.lax.{collective.primitive.removesuffix('_invariant')}"
    if "jaxmp" in collective.op_name:
        return Cause("jaxmp", f"{name} beside a call of jaxmp", "", line)
    if is_backward(collective):
        of_sum = " (or of a sum over it)" * (collective.primitive == "psum")
        text = f"the gradient of a value that is the same over {over}{of_sum}"
        text = f"{text} is {name}" if name == "jax.lax.psum" else f"the transpose of a collective is {name}"
        return Cause("gradient", text, "", line)
    name += " (or pmean)" * (name == "jax.lax.psum")
    return Cause("written", f"{name} stands in the program", "", line)
