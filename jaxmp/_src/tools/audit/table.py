"""The result of `audit`, and how it is shown."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping

from jaxmp._src.platform.runtime.text import aligned, as_html, short_type
from jaxmp._src.tools.audit.bits import Difference
from jaxmp._src.tools.audit.report import Output, Row, Uncompared
from jaxmp._src.tools.audit.together import Together, Trial


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """The operations of a program that give other bits in a variant; `str` gives the table, and notebooks show it.

    The table has, per operation, the line of the program; the primitive; the shapes of its inputs and of its output,
    and their type; the variants with a difference, and how often of how many times it ran; how many elements differ,
    at worst; the largest distance in units in the last place, and absolutely; and the kind of operation.

    Attributes:
      vary: "batch", "mesh" or "processes".
      reference, variants: what was compared: "64 rows" with ("1 row", "32 rows", "67 rows").
      rows: a row for each operation that differs: first the operations found with the first variant, and so on.
      uncompared: the operations that could not be compared, and why.
      outputs: the outputs of the whole program, compiled in one piece, that differ.
      compared: how many operations were compared; operations with one line and one shape count once.
      together: where no operation differs alone and an output does, small groups of operations that differ when they
        are compiled together.
      trials: the remedies that were tried on the whole program if an output differs; the last is the one that helps,
        if any does.
    """

    vary: str
    reference: str
    variants: tuple[str, ...]
    rows: tuple[Row, ...]
    uncompared: tuple[Uncompared, ...]
    outputs: tuple[Output, ...]
    compared: int
    together: tuple[Together, ...] = ()
    trials: tuple[Trial, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*aligned(self._table()), self._total(), "", *self._notes()])

    def __repr__(self) -> str:
        return f"Audit({self._counts()}, vary={self.vary!r})"

    def _repr_html_(self) -> str:
        return as_html([self._table()] if self.rows else [], [self._total(), *self._notes()])

    def _table(self) -> list[list[str]]:
        """Returns the header and a row for each operation that differs; an empty list if none does."""
        return [list(_COLUMNS), *([cell(row) for cell in _COLUMNS.values()] for row in self.rows)] if self.rows else []

    def _counts(self) -> str:
        return f"{len(self.rows)} of {self.compared} operations differ"

    def _total(self) -> str:
        return f"total: {self._counts()}; {self.reference} compared with {', '.join(self.variants)}"

    def _notes(self) -> Iterator[str]:
        """Yields what was not compared, once for all equal reasons; by how much the whole program differs, or that it
        does not; which operations differ together; and the remedies that were tried."""
        for why in dict.fromkeys(one.why for one in self.uncompared):
            places = [f"{one.operation} {one.line}" for one in self.uncompared if one.why == why]
            yield f"not compared, {why}: {_first(dict.fromkeys(places))}"
        if not self.outputs:
            yield "whole program: no output that can be compared differs"
            return
        worst = functools.reduce(Difference.merge, (output.difference for output in self.outputs))
        names = dict.fromkeys(output.name or "the output" for output in self.outputs)
        ulps = f"{worst.ulps} ulp{'s' * (worst.ulps != 1)} ({worst.absolute:.2g})"
        alone = "" if self.rows else "; no operation alone does" + ", and no group was found" * (not self.together)
        yield f"whole program: {_first(names)} differ{'s' * (len(names) == 1)}, by up to {ulps}{alone}"
        for one in self.together:
            times = collections.Counter(f"{operation} {line}" for operation, line in one.operations)
            named = _first([f"{n} x {name}" if n > 1 else name for name, n in times.items()])
            yield f"differ if compiled together: {named}"
        last = self.trials[-1] if self.trials else None
        if last and last.differing and not self.rows:
            yield f"no remedy is known; tried without success: {'; '.join(one.remedy for one in self.trials)}"
        elif last:
            yield f"tried on this program: {last.remedy}: {last.differing} of {last.outputs} outputs differ then"
        if self.rows and (last is None or last.differing):
            yield "remedies for each kind of operation: docs/audit.md"


def _first(names: Collection[str], most: int = 8) -> str:
    """Returns the first `most` names, and how many more there are."""
    return ", ".join([*list(names)[:most], *([f"{len(names) - most} more"] if len(names) > most else [])])


def _shapes(row: Row) -> str:
    *inputs, output = (("x".join(map(str, shape)) or "()") for shape in row.shapes)
    return f"{', '.join(inputs)} -> {output}"


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "line": lambda row: row.line,
    "operation": lambda row: row.operation,
    "shapes": _shapes,
    "type": lambda row: short_type(row.dtypes[-1]),
    "differs in": lambda row: ", ".join(row.variants),
    "times": lambda row: f"{row.count}/{row.runs}",
    "elements": lambda row: f"{row.difference.differing}/{row.difference.elements}",
    "ulps": lambda row: str(row.difference.ulps),
    "absolute": lambda row: f"{row.difference.absolute:.2g}",
    "kind": lambda row: row.kind,
}
