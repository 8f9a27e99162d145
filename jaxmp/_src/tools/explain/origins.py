"""Finds the origin of a dimension's sharding: the arguments, constraints and results that ask for it.

An origin is a text: "dimension 0 of x", "with_sharding_constraint in train.py:12" or "out_shardings".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmp._src.tools.explain import hlo
from jaxmp._src.tools.explain.hlo import MOVES, Computation, Instruction
from jaxmp._src.tools.explain.partitioned import Program

# Operations that ask for a sharding, and how a user writes them.
ASKING = {
    "sharding_constraint": "with_sharding_constraint",
    "reshard": "reshard",
    "shard_map": "{}_specs of shard_map",
    "call_exported": "{}_shardings of the exported function",
    "jit": "{}_shardings of an inner jax.jit",
}
# Changes of shape by the program itself, with XLA's operations, which the partitioner also emits on its own.
OWN = {"reshape": "reshape", "slice": "slice", "split": "slice", "pad": "pad", "dynamic_slice": "dynamic-slice"}
OF_SCAN = re.compile(r"while/body/(?:jit\(dynamic_index_in_dim\)/)?dynamic_slice$")
# JAX's scopes.
_OF_JAX = re.compile(
    "while|body|cond|scan|branch_.*|call.*|closed_call|checkpoint|remat.*|custom_.*|shard_map|eval_jaxpr|vmap|jvp"
)
# Operations with a tuple as operand and as result, part by part.
_WHOLE_TUPLES = ("while", "opt-barrier", "optimization-barrier")
# Operations with dimensions in another order than their operands.
_MAPPED = {"broadcast", "transpose", "reshape", "dot", "reduce", "convolution", "gather", "scatter"}


class Dim(NamedTuple):
    """A dimension of an instruction's result, in the program of whole arrays. `part`: the index in a tuple, or ""."""

    computation: Computation
    instruction: Instruction
    part: str
    dim: int

    @property
    def extents(self) -> tuple[int, ...]:
        found = self.instruction.shapes[int(self.part or 0) :]
        return found[0][1] if found else ()

    @property
    def all(self) -> list[Dim]:
        """All dimensions of the value."""
        return [self._replace(dim=i) for i in range(len(self.extents))]


class Origins:
    """Finds the origins of shardings in a program before XLA's partitioner."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[Dim, str], tuple[str, ...]] = {}

    def axes(self, at: Dim) -> tuple[str, ...]:
        """Returns the mesh axes that shard a dimension."""
        dims = self.program.dims(*at[:3])
        return dims[at.dim] if at.dim < len(dims) else ()

    def producers(self, start: Dim, axis: str) -> tuple[str, ...]:
        """Returns at most two arguments or constraints, at `start` or before it, that make the axis shard the
        dimension; () if the axis does not shard it, or if none of them asks for it."""
        stack, below = [start], dict[Dim, list[Dim]]()
        while stack:
            at = stack[-1]
            if (at, axis) in self._known or axis not in self.axes(at):
                self._known.setdefault((at, axis), ())
                stack.pop()
            elif at not in below:
                below[at] = list(self.operands(at))
                stack += [each for each in below[at] if each not in below]
            else:
                found = dict.fromkeys(name for each in below[at] for name in self._known.get((each, axis), ()))
                self._known[at, axis] = (*found,)[:2] or self._own(at, axis)
        return self._known[start, axis]

    def _own(self, at: Dim, axis: str) -> tuple[str, ...]:
        """Returns the origin at `at` itself: an argument, unless XLA chose its sharding; an instruction that asks for
        a sharding, with its line; for a loop's carry, origins of its next value; or ()."""
        each = at.instruction
        if each.opcode == "parameter" and at.computation.name in self.program.callers:
            self._known[at, axis] = ()  # ends the recursion, because the body leads back here
            is_loop = self.program.callers[at.computation.name][1].opcode == "while"
            return self.producers(at._replace(instruction=at.computation.root), axis) if is_loop else ()
        if each.opcode == "parameter" and each.is_argument and at.computation.name == self.whole.entry:
            is_chosen = any(self.whole.chooses_arguments[int(each.parts[0]) :][:1])
            return () if is_chosen else (f"dimension {at.dim} of {each.op_name}",)
        # A shard_map asks only for its manual axes.
        users = at.computation.users[each.name] if each.primitive == "shard_map" else []
        manual = "".join(user.sharding.partition("manual")[2] for user in users)
        is_own = f"'{axis}'" in manual or "=" not in manual  # without names: all axes
        if each.primitive not in ASKING or not is_own:
            return ()
        line = self.whole.line(each)
        return (asker(at.computation, each) + f" in {line}" * bool(line),)

    def consumers(self, start: Dim, axis: str) -> tuple[str, ...]:
        """Follows a value towards the results, to the first place where `axis` has an origin (`met`), and returns the
        origins there: of another operand's sharding ("dimension 0 of w in train.py:9", with the line of the place), a
        constraint, or "out_shardings" at a result of the program. () if there is no such place."""
        if (met := self.met(start, axis)) is None:
            return ()
        line, names = self.line(*met[:2]), self.producers(met, axis) or ("out_shardings",)
        return tuple(name + f" in {line}" * (bool(line) and name.startswith("dimension")) for name in names)

    def met(self, start: Dim, axis: str) -> Dim | None:
        """Returns the first dimension after `start` that has a producer of this axis, or that the program returns; this
        may be `start` itself. Follows users, and dimensions that a product sums together, while the axis shards them.
        None if there is no such dimension within the search's limit. Results count only if XLA does not choose their
        shardings."""
        waiting, seen = [start], {start}
        while waiting and len(seen) < 500:
            at = waiting.pop(0)
            for user in (*self.users(at), *self._partners(at)):
                if user in seen or axis not in self.axes(user):
                    continue
                seen.add(user)
                if self.producers(user, axis):
                    return user
                waiting.append(user)
            is_result = at.instruction.is_root and at.computation.name == self.whole.entry
            if is_result and not self.program.compiled.chooses_results:
                return at
        return None

    @property
    def whole(self) -> hlo.Module:
        """The program before the partitioner, which has run."""
        assert self.program.whole is not None
        return self.program.whole

    # Corresponding dimensions ------------------------------------------------------------------------------------

    def operands(self, at: Dim) -> Iterator[Dim]:
        """Yields the dimensions of operands that this one comes from, element by element, also across computations. A
        parameter leads to its caller's operand, a call or conditional to the roots of what it calls, a loop to its
        operand."""
        place, each, part, index = at
        if each.opcode == "parameter":
            if place.name in self.program.callers:
                outer, caller = self.program.callers[place.name]
                # The operands of the branches follow the operand that chooses the branch.
                branches = [name for name, _ in hlo.called_by(caller)] if caller.opcode == "conditional" else []
                number = 1 + branches.index(place.name) if branches else int(each.parts[0])
                yield Dim(outer, outer.operands(caller)[number], part or caller.parts[number], index)
            return
        if each.opcode in ("conditional", "call"):
            for name, _ in hlo.called_by(each):
                inner = self.whole.computations[name]
                yield Dim(inner, inner.root, part, index)
            return
        for number, operand in enumerate(place.operands(each)):
            if each.opcode == "tuple" and part != str(number):
                continue
            inner_part = each.attribute("index") if each.opcode == "get-tuple-element" else each.parts[number]
            below = Dim(place, operand, part if each.opcode in _WHOLE_TUPLES else inner_part, index)
            if (found := _same_place(at, below, number)) is not None:
                yield below._replace(dim=found)

    def users(self, at: Dim) -> Iterator[Dim]:
        """Yields the dimensions of results that come from this one (`operands`); for a root also the caller's
        result. Calls and conditionals are not users of their operands."""
        place, each, part, index = at
        for user in place.users[each.name]:
            if user.opcode == "tuple":
                found = [Dim(place, user, str(i), index) for i, name in enumerate(user.operands) if name == each.name]
            elif user.opcode in _WHOLE_TUPLES:
                found = [Dim(place, user, part, index)]
            else:
                found = Dim(place, user, "", 0).all
            yield from (above for above in found if at in self.operands(above))
        if each.is_root and place.name in self.program.callers:
            outer, caller = self.program.callers[place.name]
            yield Dim(outer, caller, part, index)

    def _partners(self, at: Dim) -> Iterator[Dim]:
        """Yields the dimensions that products sum together with this one."""
        for user in at.computation.users[at.instruction.name]:
            for side in range(2 * (user.opcode == "dot")):
                mine, other = (summed(at.computation, user, i) for i in (side, 1 - side))
                yield from (each for one, each in zip(mine, other, strict=True) if one == at)

    # Names -------------------------------------------------------------------------------------------------------

    def name(self, at: Dim) -> tuple[str, int]:
        """Returns (name, dimension) of the value that is passed on to `at`: "x" for an argument, "the loop's carry
        (train.py:9)", or "the result of mul (train.py:41)"."""
        top = at
        while True:
            each, primitive = at.instruction, at.instruction.primitive
            top = top if each.op_name == top.instruction.op_name else at  # one JAX operation is several XLA operations
            is_inner = each.opcode == "parameter" and at.computation.name in self.program.callers
            if is_inner and self._changes(at):
                return f"the loop's carry ({self.whole.line(self.program.callers[at.computation.name][1])})", at.dim
            # JAX transposes the gradient of a product's second operand.
            if each.opcode == "transpose" and is_backward(each) and at.computation.operands(each)[0].opcode == "dot":
                primitive, below = at.computation.operands(each)[0].primitive, []
                break
            only_moves = each.opcode in MOVES and (primitive not in OWN or "(_roll" in each.op_name)
            below = list(self.operands(at)) if is_inner or only_moves or primitive in ASKING else []
            if is_call(each) and each.opcode == "custom-call" and "ShardToFull" in each.attributes:
                primitive, below = "jaxmp.matmul", []
            if len(below) != 1:
                break
            (at,) = below
        if each.is_argument and each.opcode == "parameter":
            return each.op_name, at.dim
        name = f"the result of {function(top.computation, top.instruction, primitive)}"
        where = ", ".join(filter(None, ["backward" * is_backward(each), self.line(at.computation, each)]))
        return name + f" ({where})" * bool(where), top.dim

    def whole_operand(self, place: Computation, user: Instruction, number: int) -> Dim:
        """Returns dimension 0 of an operand, before a shard_map takes a device's part of it."""
        at = value(place, user, number)
        while at.instruction.opcode == "custom-call" and at.instruction.primitive == "shard_map":
            at = value(place, at.instruction, 0)
        return at

    def line(self, place: Computation, each: Instruction) -> str:
        """Returns the user's line; for a slice of a scan the loop's line, because JAX traces such slices only once."""
        if OF_SCAN.search(each.op_name) and place.name in self.program.callers:
            each = self.program.callers[place.name][1]
        return self.whole.line(each)

    def _changes(self, at: Dim) -> bool:
        """True if `at` is a parameter of a loop's body, and the loop changes its value."""
        end = at._replace(instruction=at.computation.root)
        while end.instruction.opcode in MOVES and (below := next(self.operands(end), None)) is not None:
            end = below
        return self.program.callers[at.computation.name][1].opcode == "while" and end != at


def is_backward(each: Instruction) -> bool:
    """True if an instruction belongs to a gradient, and not to a forward pass that jax.checkpoint recomputes."""
    return "transpose(" in each.op_name and "rematted_computation" not in each.op_name


def is_call(each: Instruction) -> bool:
    """True if an instruction belongs to a call of jaxmp, or brings operands to it."""
    return "jit(jaxmp_call)" in each.op_name


def asker(place: Computation, each: Instruction) -> str:
    """Returns how a user writes an instruction that asks for a sharding."""
    # A result of a function comes from operations inside it, or out of a shard_map's manual part.
    is_out = any(operand.op_name.startswith(f"{each.op_name}/") for operand in place.operands(each))
    is_out |= any("ShardToFull" in near.attributes for near in (each, *place.users[each.name]))
    return "a call of jaxmp" if is_call(each) else ASKING[each.primitive].format("out" if is_out else "in")


def function(place: Computation, each: Instruction, primitive: str) -> str:
    """Names what computes a value: "softmax" if `each` is the last operation of this function of jax.numpy or jax.nn,
    "exp in softmax" if it is an earlier one, or "exp in Dense_0" in a layer. A layer is a Flax linen module or a scope
    named by the user. Elsewhere returns the primitive alone. If `primitive` is "", names the opcode or an argument."""
    # Inside a shard_map JAX has no names of scopes.
    primitive = primitive or (each.opcode not in MOVES and each.op_name) or each.opcode
    outer, _, scope = each.op_name.rpartition("/")[0].rpartition("/")
    inner = scope.rpartition("(")[2].rstrip(")").lstrip("_")
    if "jit(" in scope:
        if not outer or not (hasattr(jnp, inner) or hasattr(jax.nn, inner)):
            return primitive
        is_inside = any(user.op_name.rpartition("/")[0] == f"{outer}/{scope}" for user in place.users[each.name])
        return f"{primitive} in {inner}" if is_inside else inner
    is_named = re.fullmatch(r"[A-Za-z]\w*", inner) and not _OF_JAX.fullmatch(inner)
    return f"{primitive} in {inner}" if is_named else primitive


def value(computation: Computation, user: Instruction, number: int) -> Dim:
    """Returns dimension 0 of operand `number` of `user`."""
    return Dim(computation, computation.instructions[user.operands[number]], user.parts[number], 0)


def summed(computation: Computation, each: Instruction, side: int) -> list[Dim]:
    """Returns the dimensions of operand `side` (0 or 1) that a product, convolution or reduction sums. For side 0 of a
    scatter, returns all dimensions of the updates. Returns [] for side 1 of reductions and scatters, and for other
    operations."""
    dims = each.numbers(f"{('lhs', 'rhs')[side]}_contracting_dims")
    if each.opcode == "convolution":
        labels = re.findall("[a-z0-9]+", each.attribute("dim_labels"))[side]
        dims = (*map(labels.index, "fi"[side] + "".join(sorted(filter(str.isdigit, labels)))),)
    if each.opcode == "reduce" and side == 0:
        dims = each.numbers("dimensions")
    if each.opcode == "scatter" and side == 0:
        return value(computation, each, 2).all
    return [value(computation, each, side)._replace(dim=i) for i in dims]


def _same_place(at: Dim, below: Dim, number: int) -> int | None:
    """Returns the dimension of `below`, operand `number` of the instruction in `at`, that corresponds to the dimension
    `at` of the result; None if there is none."""
    each, index = at.instruction, at.dim
    rank, extents = len(at.extents), below.extents
    if each.opcode not in _MAPPED:
        return index if len(extents) == rank > index else None
    if each.opcode == "broadcast":
        dimensions = each.numbers("dimensions")
        return dimensions.index(index) if index in dimensions else None
    if each.opcode == "transpose":
        return each.numbers("dimensions")[index]
    if each.opcode == "reshape":
        before, own = math.prod(at.extents[:index]), at.extents[index]
        for i, extent in enumerate(extents):
            start = math.prod(extents[:i])
            if extent > 1 and own > 1 and start < before * own and before < start * extent:
                return i
        return None
    if each.opcode == "dot":
        side = ("lhs", "rhs")[number]
        batch, summed = (each.numbers(f"{side}_{kind}_dims") for kind in ("batch", "contracting"))
        free = [i for i in range(len(extents)) if i not in batch + summed]
        if index < len(batch):
            return batch[index]
        ahead = len(batch) + (rank - len(batch) - len(free)) * number
        return free[index - ahead] if 0 <= index - ahead < len(free) else None
    if each.opcode == "reduce":
        kept = [i for i in range(len(extents)) if i not in each.numbers("dimensions")]
        return kept[index] if extents and index < len(kept) else None
    if each.opcode == "convolution":
        lhs, rhs, result = re.findall("[a-z0-9]+", each.attribute("dim_labels"))
        is_feature = result[index] == "f"
        return (rhs.index("o") if is_feature else lhs.index(result[index])) if number == is_feature else None
    return _of_lookup(each, index, number, rank, len(extents)) if number < 2 else None


def _of_lookup(each: Instruction, index: int, number: int, rank: int, operand_rank: int) -> int | None:
    """Returns the dimension of a gather's or scatter's table (`number` 0) or indices (1) that corresponds to dimension
    `index` of its result; None if there is none. `rank`: of the result."""
    is_gather = each.opcode == "gather"
    tables = each.numbers("operand_batching_dims" if is_gather else "input_batching_dims")
    indices = each.numbers("start_indices_batching_dims" if is_gather else "scatter_indices_batching_dims")
    if not is_gather:
        return index if number == 0 else dict(zip(tables, indices, strict=True)).get(index)
    offset = each.numbers("offset_dims")
    if index in offset:
        dropped = (*each.numbers("collapsed_slice_dims"), *tables)
        return [i for i in range(operand_rank) if i not in dropped][offset.index(index)] if number == 0 else None
    of_indices = [i for i in range(rank) if i not in offset].index(index)
    of_indices += of_indices >= each.numbers("index_vector_dim")[0]
    if number == 0:
        return dict(zip(indices, tables, strict=True)).get(of_indices)
    return of_indices if of_indices < operand_rank else None
