"""Two traces of one program, run side by side: each pair of equations from equal bits.

A value of the variant *corresponds* to one of the reference if it has the same bits, or, in another batch, the bits of
the same rows. An equation with inputs that correspond and outputs that do not is reported, and the variant continues at
the reference's outputs. Equations are paired by names, shapes and lines. A wrong pair costs a comparison and reports
nothing false, because the inputs of a pair are compared too.

Scans, whiles and conds are followed step by step if both sides take the same steps; other equations run alone. A value
is *mixed* if its rows depend on other rows of the batch, and *packed* if its elements are in an order that differs
between meshes and that only the gradient knows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing
from jaxmp._src.tools.audit import bits, operations
from jaxmp._src.tools.audit.report import Report
from jaxmp._src.tools.audit.side import Side, Value
from jaxmp._src.tools.audit.variation import Relation, Rows, Variation

_MIXES = "its result mixes the rows of the batch"
_UNPLACED = "no dimension of its result is the batch"
_OF_SIZE = "its operands depend on the size of the batch, or on the place of a row"
_OTHERS = "its operands are others in the variant by themselves"
_UNPAIRED = "the variant has other equations here"


# A value of each side that stand in one place, and how they correspond.
Pair = tuple[Value, Value, Relation]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A jaxpr that a walk has followed: its equations in pairs, the values of both sides, and its results."""

    pairs: list[tuple[Any, Any]]
    environments: Sequence[dict[Any, Value]]
    outvars: Sequence[Any]


class Walk:
    """The reference and one variant, from the first equation to the last.

    Attributes:
      variation, sides: what varies; the reference and the variant.
      results: the outputs of both, and how they correspond.
      bodies: by jaxpr of the reference what was followed: the program, branches, and the last step of each loop.
    """

    def __init__(self, variation: Variation, reference: Side, variant: Side, report: Report) -> None:
        self.variation, self.sides, self._report = variation, (reference, variant), report
        self.results, self.bodies = list[Pair](), dict[Any, Body]()

    def follow(self, line: str) -> None:
        """Runs both sides by equations, reports differences, sets `results`. `line`: for equations without a line."""
        reference, variant = self.sides
        inputs, others = ([Value(x) for x in side.arrays] for side in self.sides)
        for one, other in zip(inputs, others, strict=True):
            other.is_of_batch = self._correspond(one, other) and other.relation != "same"
        self.results = self._jaxprs((reference.jaxpr, variant.jaxpr), (inputs, others), line)

    def differences(self, ones: Sequence[Any], others: Sequence[Any]) -> list[bits.Difference | None]:
        """Compares the outputs `ones` of the whole program on the reference's side with `others` on the variant's; None
        for an output that is equal or not comparable."""
        return [
            None
            if relation in ("other", "packed") or value.is_mixed
            else self.variation.difference(other, bits.pull(one), relation)
            for one, other, (_, value, relation) in zip(ones, others, self.results, strict=True)
        ]

    # Jaxprs ------------------------------------------------------------------------------------------------------

    def _jaxprs(
        self, jaxprs: tuple[Any, Any], inputs: tuple[Sequence[Value], Sequence[Value]], line: str
    ) -> list[Pair]:
        """Follows a jaxpr of each side, adds it to `bodies`, and returns the pairs of the results."""
        programs = [side.inlined(jaxpr) for side, jaxpr in zip(self.sides, jaxprs, strict=True)]
        environments = [
            {v: Value(x) for v, x in constants.items()} | dict(zip(program.invars, values, strict=True))
            for (program, constants), values in zip(programs, inputs, strict=True)
        ]

        def join(atoms: Sequence[Any], others: Sequence[Any]) -> list[Pair]:
            return [
                self._join(_read(environments[0], v), _read(environments[1], w))
                for v, w in zip(atoms, others, strict=True)
            ]

        equations = [operations.live_equations(program, line) for program, _ in programs]
        body = self.bodies[jax_tracing.open_jaxpr(jaxprs[0])[0]] = Body([], environments, programs[0][0].outvars)
        for eqn, other in operations.paired(*equations, is_batch=self.variation.rows is not None):
            if eqn is None or other is None:
                self._run_only(0 if other is None else 1, eqn or other, environments, line)
                continue
            body.pairs.append((eqn, other))
            here = jax_compat.traced_line(eqn) or line
            results = self._equation(eqn, other, join(eqn.invars, other.invars), here)
            for v, w, (one, two) in zip(eqn.outvars, other.outvars, results, strict=True):
                environments[0][v], environments[1][w] = one, two
        return join(programs[0][0].outvars, programs[1][0].outvars)

    def _run_only(self, side: int, eqn: Any, environments: Sequence[dict[Any, Value]], line: str) -> None:
        """Runs an equation that only `side` (0 or 1) has. `_join` compares the results where both sides read them."""
        operands = [_read(environments[side], v) for v in eqn.invars]
        origin = (eqn, jax_compat.traced_line(eqn) or line)
        for i, x in enumerate(self.sides[side].run(eqn, [x.array for x in operands])):
            value = Value(x, origin=origin, is_by_device=operations.is_by_device(eqn, i))
            environments[side][eqn.outvars[i]] = _inheriting(value, operands)

    def _join(self, one: Value, other: Value) -> Pair:
        """Returns two values and their relation. If they do not correspond, but an equation that only one side has made
        one of them, reports a difference (on another mesh) or that they were not compared (in another batch), and
        continues with the bits that the reference implies. Both stay, with the relation "other", if no such equation
        made one or their shapes do not relate; also, with a report, if they differ mostly by their orders."""
        if self._correspond(one, other):
            return one, other, other.relation
        origin = other.origin or one.origin
        relations = self.variation.relations(np.shape(one.array), np.shape(other.array))
        if origin is None or not relations:
            return one, other, "other"
        eqn, line = origin
        if self.variation.rows is not None:
            self._report.skips(eqn, line, _UNPAIRED)
            return one, self._replaced(one, other, relations[0]), relations[0]
        least = self._reordered(one, other)
        found = least or self.variation.difference(other.array, one.host, relations[0])
        assert found is not None  # they do not correspond
        self._report.differs(eqn, line, self.variation.name, found, is_other=True)
        return (one, other, "other") if least else (one, self._replaced(one, other, relations[0]), relations[0])

    def _correspond(self, one: Value, other: Value, first: Relation | None = None) -> bool:
        """True if two values correspond: in a relation that their shapes allow (`first` is tried first), or as "packed"
        if they may be in the order of the devices and have the same elements. Then `other` keeps twin and relation.
        True without a comparison if `one` is the twin of `other` already, also if the relation is "other"."""
        if other.twin is one:
            return True
        relations = self.variation.relations(np.shape(one.array), np.shape(other.array))
        for relation in sorted(relations, key=lambda relation: relation != first):
            if self.variation.difference(other.array, one.host, relation) is None:
                other.twin, other.relation = one, relation
                return True
        if self._is_by_device(other) and self.variation.is_reordered(other.host, one.host):
            other.twin, other.relation = one, "packed"
            return True
        return False

    def _is_by_device(self, value: Value) -> bool:
        return value.is_by_device and self.variation.rows is None

    def _reordered(self, one: Value, other: Value) -> bits.Difference | None:
        """Returns `least_difference` if `other` may be in the order of the devices; else None."""
        return self.variation.least_difference(other.host, one.host) if self._is_by_device(other) else None

    def _put(self, host: np.ndarray, like: Value, side: int = 1, leading: int = 0) -> Any:
        with self.sides[side].scope():
            return bits.push(host, like.array, leading=leading)

    # Equations ---------------------------------------------------------------------------------------------------

    def _equation(self, eqn: Any, other: Any, pairs: Sequence[Pair], line: str) -> list[tuple[Value, Value]]:
        enter = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(eqn.primitive.name)
        found = enter(eqn, other, pairs, line) if enter else None
        return self._alone(eqn, other, pairs, line) if found is None else found

    def _cond(self, eqn: Any, other: Any, pairs: Any, line: str) -> list[tuple[Value, Value]] | None:
        """Follows the branch that the reference takes; None if the index of the branch is not the same."""
        (index, _, relation), *operands = pairs
        if relation != "same":
            return None
        branches = [e.params["branches"] for e in (eqn, other)]
        taken = min(max(int(self.variation.decision(index.host)), 0), len(branches[0]) - 1)
        return [x[:2] for x in self._jaxprs((branches[0][taken], branches[1][taken]), _apart(operands), line)]

    def _while(self, eqn: Any, other: Any, pairs: Any, line: str) -> list[tuple[Value, Value]]:
        """Follows a loop as often as the reference's condition is true."""
        nconds, nbody = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        conditions, bodies = ((eqn.params[name], other.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
        of_cond, of_body, carry = pairs[:nconds], pairs[nconds : nconds + nbody], pairs[nconds + nbody :]
        while True:
            ((goes_on, _, _),) = self._jaxprs(conditions, _apart([*of_cond, *carry]), line)
            if not bool(self.variation.decision(goes_on.host)):  # the variant goes on from equal bits here too
                return [x[:2] for x in carry]
            carry = self._jaxprs(bodies, _apart([*of_body, *carry]), line)

    def _scan(self, eqn: Any, other: Any, pairs: Any, line: str) -> list[tuple[Value, Value]] | None:
        """Walks the steps of a scan in order, and returns the pairs of its results. Returns None for a scan without
        steps, or if the variant's scan has another number of steps, as a scan over the rows of another batch has."""
        length, bodies = eqn.params["length"], (eqn.params["jaxpr"], other.params["jaxpr"])
        if length == 0 or other.params["length"] != length:
            return None
        nconsts, ncarry = jax_compat.scan_counts(eqn)
        consts, carry, xs = pairs[:nconsts], pairs[nconsts : nconsts + ncarry], pairs[nconsts + ncarry :]
        steps = range(length)[::-1] if eqn.params["reverse"] else range(length)
        ys: dict[int, list[Pair]] = {}
        for i in steps:
            results = self._jaxprs(bodies, _apart([*consts, *carry, *(self._step(pair, i) for pair in xs)]), line)
            carry, ys[i] = results[:ncarry], results[ncarry:]
        stacked = [self._stack([ys[i][k] for i in range(length)]) for k in range(len(ys[0]))]
        return [*(x[:2] for x in carry), *stacked]

    def _step(self, pair: Pair, i: int) -> Pair:
        """Returns slice `i` of both values along dimension 0. The relation is "other" if dimension 0 has the rows."""
        one, other, relation = pair
        if isinstance(relation, Rows):
            relation = dataclasses.replace(relation, dim=relation.dim - 1) if relation.dim else "other"
        arrays = (self._put(x.host[i], x, side, leading=-1) for side, x in enumerate((one, other)))
        return _paired(arrays, relation, [other])

    def _stack(self, steps: Sequence[Pair]) -> tuple[Value, Value]:
        """Returns the values of all steps of a scan, stacked along a new dimension 0. The relation is "other" if the
        relations of the steps differ, but "packed" if each is "packed" or "same"."""
        found = {relation for _, _, relation in steps}
        relation: Relation = "packed" if found == {"same", "packed"} else "other"
        if len(found) == 1:
            (relation,) = found
        if isinstance(relation, Rows):
            relation = dataclasses.replace(relation, dim=relation.dim + 1)
        arrays = (
            self._put(np.stack([x.host for x in column]), column[0], side, leading=1)
            for side, column in enumerate(_apart(steps))
        )
        return _paired(arrays, relation, [x for _, x, _ in steps])[:2]

    # Equations that run alone ------------------------------------------------------------------------------------

    def _alone(self, eqn: Any, other: Any, pairs: Any, line: str) -> list[tuple[Value, Value]]:
        """Runs an equation of each side, notes the run, and returns the pairs of its results, as `_settled` does. A
        relu mask, or a result that `_is_other_order`, stays as it is. Its relation is "packed" if there are others
        and `_settled` replaces none of them, else "other"."""
        operands = [x for _, x, _ in pairs]
        ones = self.sides[0].run(eqn, [x.array for x, _, _ in pairs])
        others = self.sides[1].run(other, [x.array for x in operands])
        self._report.ran(eqn, line)
        settled, packed, is_same = list[tuple[Value, Value]](), list[tuple[Value, Value]](), True
        for i, arrays in enumerate(zip(ones, others, strict=True)):
            one, two = map(Value, arrays)
            two.is_by_device = operations.is_by_device(other, i)
            after = _inheriting(two, operands)
            if operations.is_packed(eqn, one.array.dtype) or self._is_other_order(one, two):
                packed.append((one, two))
            else:
                after = self._settled(eqn, pairs, i, one, two, line)
                is_same &= after is two
            settled.append((one, after))
        if is_same and len(packed) < len(settled):
            for one, two in packed:
                two.twin, two.relation = one, "packed"
        return settled

    def _is_other_order(self, one: Value, other: Value) -> bool:
        """True if these values are in the order of the devices, in two shapes, and do not have the same elements."""
        return self._is_by_device(other) and one.array.shape != other.array.shape and not self._correspond(one, other)

    def _settled(self, eqn: Any, pairs: Any, i: int, one: Value, other: Value, line: str) -> Value:
        """Returns the value with which the variant goes on for output `i`, which is `one` on the reference's side and
        `other` on the variant's; reports a difference, or why the output cannot be compared. This is the value with the
        reference's bits, but `other` if no dimension is the batch, if the order differs, or if `_of_size` keeps it. It
        is marked as mixed if inputs have rows of the batch and the output has none, or mixes them."""
        batched = [relation for _, x, relation in pairs if isinstance(relation, Rows) and x.is_of_batch]
        if self._correspond(one, other, batched[0] if batched else None):
            other.is_mixed |= bool(batched) and other.relation == "same"
            return other
        relations = self.variation.relations(one.array.shape, other.array.shape)
        is_of_size = any(relation == "other" for _, _, relation in pairs)
        if not relations:
            if batched:
                self._report.skips(eqn, line, _UNPLACED)
            other.is_mixed |= bool(batched)
            return other
        least = self._reordered(one, other)
        if least is not None:
            if is_of_size:
                self._report.skips(eqn, line, _OTHERS)
            else:
                self._report.differs(eqn, line, self.variation.name, least, i)
            return _inheriting(Value(other.array), [other])
        if is_of_size or (isinstance(relations[0], Rows) and not batched):
            return self._of_size(eqn, one, other, relations[0], line)
        kept = next((r for r in relations if not batched or self._keeps_rows(eqn, pairs, i, one, r)), None)
        if kept is None:
            self._report.skips(eqn, line, _MIXES)
            other.is_mixed = True
            return self._replaced(one, other, relations[0])
        difference = self.variation.difference(other.array, one.host, kept)
        assert difference is not None
        self._report.differs(eqn, line, self.variation.name, difference, i)
        return self._replaced(one, other, kept)

    def _of_size(self, eqn: Any, one: Value, other: Value, relation: Relation, line: str) -> Value:
        """Returns the value with which the variant continues if operands or the equation depend on the batch size.
        Usually this is `other`, always for integers and masks: row 2 of the variant's batch is another row. For floats
        that also depend on the batch's arrays (noise added to the rows), and for all floats on another mesh, reports
        that they were not compared, marks them as mixed, and returns the reference's, or nothing after them could be
        compared."""
        is_of_mesh = self.variation.rows is None
        if not (other.is_of_batch or is_of_mesh) or not jnp.issubdtype(one.array.dtype, jnp.inexact):
            return other
        self._report.skips(eqn, line, _OTHERS if is_of_mesh else _OF_SIZE)
        other.is_mixed = True
        return self._replaced(one, other, relation)

    def _replaced(self, one: Value, other: Value, relation: Relation) -> Value:
        array = self._put(self.variation.expected(one.host, relation), other)
        return _inheriting(Value(array, one, relation), [other])

    def _keeps_rows(self, eqn: Any, pairs: Any, i: int, out: Value, relation: Relation) -> bool:
        """True if a row of output `i` depends only on the same row of the inputs. Tried out on the reference: if about
        half of the rows are replaced by others, and by their negatives, the rest has to keep its bits. Each bit of the
        rows' numbers gives two halves. Of any two rows, each is once replaced while the other is kept."""
        nrows = self.variation.nrows
        for bit, kept_bit, sign in itertools.product(range((nrows - 1).bit_length()), (0, 1), (1, -1)):
            rows = np.arange(nrows)
            kept = rows >> bit & 1 == kept_bit
            rows[~kept] = np.resize(rows[kept][::-1], nrows - kept.sum())
            operands = []
            for one, _, how in pairs:
                if isinstance(how, Rows):
                    host = how.take(one.host, nrows, rows)
                    if sign < 0 and jnp.issubdtype(host.dtype, jnp.inexact):
                        how.apart(host, nrows)[~kept] *= -1
                    operands.append(self._put(host, one, side=0))
                else:
                    operands.append(one.array)
            have, want = bits.pull(self.sides[0].run(eqn, operands)[i]), out.host
            if isinstance(relation, Rows):
                have, want = (relation.apart(x, nrows)[kept] for x in (have, want))
            if bits.difference(have, want) is not None:
                return False
        return True


def _apart(pairs: Sequence[Pair]) -> tuple[list[Value], list[Value]]:
    return [one for one, _, _ in pairs], [other for _, other, _ in pairs]


def _paired(arrays: Iterable[Any], relation: Relation, operands: Sequence[Value]) -> Pair:
    """Returns the values of the two arrays as a pair; the second is marked as `_inheriting` does."""
    one, other = map(Value, arrays)
    other.twin, other.relation = one, relation
    return one, _inheriting(other, operands), relation


def _inheriting(value: Value, operands: Sequence[Value]) -> Value:
    """Marks `value` as of the batch, or as mixed, if one of `operands` is; returns it."""
    value.is_of_batch |= any(x.is_of_batch for x in operands)
    value.is_mixed |= any(x.is_mixed for x in operands)
    return value


def _read(environment: dict[Any, Value], atom: Any) -> Value:
    return Value(atom.val) if jax_tracing.is_literal(atom) else environment[atom]
