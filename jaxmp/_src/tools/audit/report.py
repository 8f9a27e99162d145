"""Collects the results of an audit while the variants run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmp._src.tools.audit import operations
from jaxmp._src.tools.audit.bits import Difference


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation with equal bits in its inputs, but not in its outputs, in the reference and a variant.

    Attributes:
      line: the line of the program, "model.py:41".
      operation: the primitive, "reduce_sum"; of jaxmp's products with their level, "jaxmp_matmul (run_to_run)".
      kind: "product", "sum", "elementwise", "convolution", "linear algebra", "random", "whole" of what runs in one
        piece (shard_map and others), or "other equations" where the program itself is another in the variant.
      shapes: of the inputs and of the (first) output that differs, in the reference's batch; dtypes: theirs.
      variants: the variants with a difference.
      count, runs: how often it differs, and how often it runs, in all variants together: equal lines of layers, and
        the steps of a loop, share a row.
      difference: how far apart the outputs are, at worst: `.differing` of `.elements`, `.ulps`, `.absolute`.
    """

    line: str
    operation: str
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    variants: tuple[str, ...]
    count: int
    runs: int
    difference: Difference


@dataclasses.dataclass(frozen=True)
class Uncompared:
    """An operation that was not compared in some variant, and why not."""

    line: str
    operation: str
    why: str


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of the whole program, compiled in one piece, that has other bits in a variant.

    `name` is its place among the outputs, "[0]['w']".
    """

    name: str
    variant: str
    difference: Difference


class Report:
    """Collects what the variants of one audit show."""

    def __init__(self) -> None:
        self._rows: dict[Any, Row] = {}
        self._runs = collections.Counter[Any]()
        self._uncompared: dict[Uncompared, None] = {}
        self._turns = collections.defaultdict[Any, set[int]](set)  # by row, the numbers of the runs that differ

    def ran(self, eqn: Any, line: str) -> None:
        self._runs[_key(eqn, line)] += 1

    def differs(
        self, eqn: Any, line: str, variant: str, found: Difference, output: int = 0, *, is_other: bool = False
    ) -> None:
        """Adds the difference `found` in one output of an equation's last run to the row of its line, operation and
        shapes, which all variants share. A run with several differences counts once. `is_other`: the variant has other
        equations there. Such differences have a row of their own."""
        key = _key(eqn, line), is_other
        self._turns[key].add(self._runs.total())
        avals = [v.aval for v in (*eqn.invars, eqn.outvars[output])]
        new = Row(
            line=line,
            operation=operations.name_of(eqn),
            kind="other equations" if is_other else operations.kind_of(eqn),
            shapes=tuple(tuple(aval.shape) for aval in avals),
            dtypes=tuple(str(aval.dtype) for aval in avals),
            variants=(),
            count=0,
            runs=0,
            difference=found,
        )
        row = self._rows.get(key, new)
        self._rows[key] = dataclasses.replace(
            row,
            variants=tuple(dict.fromkeys((*row.variants, variant))),
            count=len(self._turns[key]),
            difference=row.difference.merge(found),
        )

    def skips(self, eqn: Any, line: str, why: str) -> None:
        """Notes an operation that cannot be compared, and why; equal notes count once."""
        self._uncompared[Uncompared(line, operations.name_of(eqn), why)] = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the operations that differ, in the order of their discovery."""
        return tuple(
            dataclasses.replace(row, runs=max(self._runs[key], row.count)) for (key, _), row in self._rows.items()
        )

    @property
    def uncompared(self) -> tuple[Uncompared, ...]:
        return tuple(self._uncompared)

    @property
    def compared(self) -> int:
        """Returns how many operations were compared; operations with one line and shape count once."""
        return len(self._runs)


def _key(eqn: Any, line: str) -> Any:
    avals: Sequence[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return line, operations.name_of(eqn), tuple((aval.shape, str(aval.dtype)) for aval in avals)
