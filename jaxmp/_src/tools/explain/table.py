"""The result of `explain`: the rows of a program, and their table."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxmp._src.core.lowering import process_barrier
from jaxmp._src.platform.hardware.call_time import CallTime
from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.platform.runtime.text import aligned, as_html, short_type
from jaxmp._src.tools.explain.row import Row


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of a program in the order of the program. `str` gives the table, and notebooks show it.

    The table has, per row: the line of the program; the operation with its epilog, or with c; the pattern with its
    axes; m x k x n of the whole product, and of a device's shards if they differ; the types of a, b and d, and in
    brackets the type of sums if it is not d's; the level of determinism, if there is one; the implementation, if rows
    differ in it; 10^9 floating-point operations of all devices together, and 10^6 bytes that each device reads from
    others, each time. Empty columns are left out; `rows` has everything. Below the table, a line per pattern shows the
    index that each mesh axis splits: "mk,kn->mn  x: n (m n n)" means that the ranks of axis x divide the columns n, and
    that x shards op(a) along m, op(b) along n and d along n. In a job of processes another line says how many messages
    each process sends to the others before a call.

    Attributes:
      rows: a row for each call, and for each collective that jaxmp adds to the calls.
      logged: cuBLASMp's log of the calls that ran since the last explanation, if JAXMP_LOG has "cublasmp": the
        algorithm, overlapped or not.
      calls, collectives: the number of calls, and of collectives added to them, that the program runs on each rank.
      left: the number of products that `jaxmp.fuse` left to JAX in a function; each has a row with the reason.
      flops: floating-point operations of all rows, on all devices together.
      hardware: the machine that `explain` was asked about, or None; then there are no times.
      times: the predicted time of one run of each row, a `CallTime` with `.compute`, `.memory`, `.link`, `.exposed`,
        `.total` and `.bound`; None if it cannot be predicted.
      seconds, exposed_seconds: the time of all rows one after another, and of communication that no product hides.
      utilisation: the share of that time that the arithmetic needs at the machine's rate.
      bytes_moved, bytes_in_calls: bytes that one rank reads from its peers in all, and in calls, which overlap them
        with their products.
    """

    rows: tuple[Row, ...]
    logged: tuple[str, ...] = ()
    hardware: Hardware | None = None

    @functools.cached_property
    def times(self) -> tuple[CallTime | None, ...]:
        hardware = self.hardware
        return tuple(None if hardware is None else row.time(hardware) for row in self.rows)

    @property
    def seconds(self) -> float:
        return self._sum_of_times(lambda time: time.total)

    @property
    def exposed_seconds(self) -> float:
        return self._sum_of_times(lambda time: time.exposed)

    @property
    def utilisation(self) -> float:
        return self._sum_of_times(lambda time: time.compute) / self.seconds if self.seconds else 0.0

    @property
    def calls(self) -> int:
        return sum(row.count for row in self.rows if row.is_call)

    @property
    def collectives(self) -> int:
        return sum(row.count for row in self.rows if not row.extents)

    @property
    def bytes_in_calls(self) -> int:
        return sum(row.count * row.bytes_moved for row in self.rows if row.is_call)

    @property
    def left(self) -> int:
        return sum(row.count for row in self.rows if row.extents and not row.is_call)

    @property
    def flops(self) -> int:
        return sum(row.count * row.flops for row in self.rows)

    @property
    def bytes_moved(self) -> int:
        return sum(row.count * row.bytes_moved for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return _NOTHING
        return "\n".join([*aligned(self._table()), f"total: {self._totals()}", "", *self._notes()])

    def __repr__(self) -> str:
        return f"Explanation({self._totals()})"

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        if not self.rows:
            return f"<p>{_NOTHING}</p>"
        return as_html([self._table()], [f"total: {self._totals()}", *self._notes()])

    def _sum_of_times(self, part: Callable[[CallTime], float]) -> float:
        return sum(row.count * part(time) for row, time in zip(self.rows, self.times, strict=True) if time)

    def _table(self) -> list[list[str]]:
        """Returns the header and the cells, without empty columns, and without the implementation if calls share it,
        because the notes name it. For a machine with predicted times."""
        hidden = "by" if len({row.implementation for row in self.rows if row.is_call}) == 1 else ""
        columns = [[header, *map(cell, self.rows)] for header, cell in _COLUMNS.items() if header != hidden]
        columns = [cells for cells in columns if any(cells[1:])]
        if self.hardware is not None:
            columns.append(["us", *(_number(time.total * 1e6) if time else "" for time in self.times)])
            columns.append(["bound by", *(time.bound if time else "" for time in self.times)])
        return [list(cells) for cells in zip(*columns, strict=True)]

    def _totals(self) -> str:
        counts = [_count(self.calls, "call"), *([_count(self.collectives, "collective")] if self.collectives else [])]
        moved = _in_units(self.bytes_moved, 1e6)
        inside = f", {_in_units(self.bytes_in_calls, 1e6) or 0} of it inside of calls" if self.collectives else ""
        moved = f", {moved} MB moved by each device{inside}" if moved else ""
        counts += [f"{self.calls} of {self.calls + self.left} products fused"] if self.left else []
        return f"{', '.join(counts)}, {_in_units(self.flops, 1e9) or 0} Gflop on all devices together{moved}"

    def _notes(self) -> list[str]:
        """Returns lines below the table: the prediction for a machine, the index that each pattern's axes split, each
        implementation with its reason and largest workspace, and cuBLASMp's log."""
        notes = list[str]()
        if self.hardware is not None:
            unknown = sum(time is None for time in self.times)
            why = "XLA partitions it, its extents are symbols, or the machine has no rate for its type"
            notes.append(
                f"predicted on {self.hardware.name}: {_number(self.seconds * 1e6)} us, including "
                f"{_number(self.exposed_seconds * 1e6)} us of communication that no product hides; "
                f"{100 * self.utilisation:.0f} % of its rate"
                + f"; {_count(unknown, 'row')} not counted, because {why}"
                * bool(unknown)
            )
        notes += dict.fromkeys(f"{_pattern(row)}: {row.contraction}" for row in self.rows if ":" in row.contraction)
        workspaces: dict[str, int] = {}
        for row in self.rows:
            reason = f"{row.implementation}: {row.why}; {row.algorithm}{_remarks(row)}"
            workspaces[reason] = max(row.workspace, workspaces.get(reason, 0))
        for reason, size in workspaces.items():
            notes.append(reason + f"; workspace of {_number(size / 1e6)} MB on each device" * bool(size))
        for n in sorted({row.processes for row in self.rows} - {1}):
            messages, rounds = process_barrier.cost(n)
            cost = f"{_count(messages, 'message')} in {_count(rounds, 'round')}"
            notes.append(f"before a call of {n} processes each sends {cost}")
        return [*notes, *(f"cuBLASMp logged: {line}" for line in self.logged)]


_NOTHING = "no jaxmp call in this program"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _in_units(number: Any, unit: float) -> str:
    """Returns `number` divided by `unit` as text; "" for 0, the expression for symbolic extents."""
    if not isinstance(number, int):
        return f"({number})/{unit:.0e}"
    return _number(number / unit) if number else ""


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _remarks(row: Row) -> str:
    """Returns the unusual options of a call: a reduced compute type, communication options, a layout."""
    compute = "" if row.compute in ("", "32F", "64F") else row.compute
    named = (("compute type", compute), ("communication", row.comm), ("block-cyclic", row.layout))
    return "".join(f"; {name} {value}" for name, value in named if value)


# Cells ---------------------------------------------------------------------------------------------------------


def _operation(row: Row) -> str:
    """Returns the operation with its epilog, or with C, and how often it runs if more than once."""
    operation = row.operation.replace("+epilog", "+c" if row.epilog == "NONE" else f"+{row.epilog.lower()}")
    return operation + (f" x{row.count}" if row.count > 1 else "")


def _pattern(row: Row) -> str:
    """Returns the pattern ("" if it is "-"), and the axes of the ranks that share the operation."""
    return " ".join([row.pattern.strip("-"), *row.axes]).strip()


def _whole(row: Row) -> str:
    """Returns m x k x n of a product, or the shape of a collective's result."""
    return "x".join(map(str, row.extents or row.global_shapes[0]))


def _local(row: Row) -> str:
    """Returns m x k x n of the shards of a jaxmp call, or the shape of a collective's operand on a device. "" if it
    equals `_whole`, or for a product that `fuse` left to JAX."""
    text = "x".join(map(str, row.local_extents if row.is_call else row.local_shapes[0]))
    return "" if (row.extents and not row.is_call) or text == _whole(row) else text


def _dtypes(row: Row) -> str:
    """Returns the types of a, b and d, once if they are equal; the type of sums in brackets if it is not d's; and what
    else `row.dtypes` has, such as scale modes."""
    types, *rest = row.dtypes.split(", ")
    short, sums = [short_type(name) for name in re.split(" x | -> ", types)], short_type(row.accumulator)
    text = short[0] if len(set(short)) == 1 else " -> ".join([" x ".join(dict.fromkeys(short[:2])), short[-1]])
    return ", ".join([text if sums in ("", short[-1]) else f"{text} ({sums})", *rest])


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "line": lambda row: row.line,
    "operation": _operation,
    "pattern": _pattern,
    "m x k x n": _whole,
    "per device": _local,
    "dtypes": _dtypes,
    "determinism": lambda row: row.determinism if row.determinism != "run_to_run" else "",
    "by": lambda row: row.implementation,
    "Gflop": lambda row: _in_units(row.flops, 1e9),
    "MB moved": lambda row: _in_units(row.bytes_moved, 1e6),
}
