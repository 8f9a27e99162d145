"""The result of `explain`: the rows of a program, and their table."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxmp._src.core.contraction import contraction
from jaxmp._src.core.contraction.contraction import Dim, Layout
from jaxmp._src.core.lowering import process_barrier
from jaxmp._src.platform.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.platform.runtime.text import aligned, as_html, short_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One call, one product that is left to JAX or XLA, or one collective that jaxmp added, as every rank runs it.

    Attributes:
      operation: "matmul", "matmul+epilog" (with an epilog or c) or "ragged_dot"; for a product that `fuse` left to JAX
        its primitive; for a collective "all_gather", "all_to_all", "reduce_scatter", "all_reduce" or
        "collective_permute".
      count: how often the program runs it (the trip counts of enclosing scans, multiplied; each branch of a conditional
        counts as run). If both operands have a batch, also times its extent, both as one product and as one call per
        index.
      global_shapes, local_shapes: of a, b and d, as stored, of all groups together and per device; for a collective,
        the shape after it and the shape that a device has before it. Inside a shard_map with check_vma=False the global
        shapes are the shapes of one group's product.
      dtypes: "a x b -> d", the scale modes of a and b if they have scales, and gelu_aux's type if it is not d's.
      accumulator: the type of sums.
      determinism: the requested level: "run_to_run", "batch" or "topology".
      pattern: how the ranks of a group share the product, "all_gather", or "XLA's"; "-" for a collective, or a product
        left to JAX; groups: their number, size and axes.
      epilog: name of the epilog.
      implementation, why: the implementation and the rule that chose it.
      algorithm: the library's algorithm and kernel, if a plan can be made here.
      flops: floating-point operations of all groups together each time (2 m n k; a complex product counts 4 real ones).
      bytes_moved: bytes that one rank reads from its peers each time.
      workspace: bytes per rank; 0 for cuBLASMp, because its workspace is known only when the call first runs.
      compute: cuBLAS's compute type.
      comm, layout: the call's communication options and block-cyclic layouts; empty if it has none.
      extents, local_extents: (m, k, n) of the whole product, and of the shards of a and b that a device holds (rows of
        a, a's part of k, columns of b); empty for a collective.
      ndevices: number of devices that run it, in all groups together.
      transfers: the transfers that a rank receives if devices do not share memory. `bytes_moved` of "host" counts whole
        operands; a call over links moves only these transfers.
      processes: number of processes that meet at the call's barrier (docs/faults.md); 1 if there is none.
      chunks: number of chunks of a call between machines, so that its communication overlaps the product.
      mesh: every axis of the mesh as (name, size); the last axis varies fastest from device to device.
      placement: the axes that shard op(a) (m, k), op(b) (k, n) and d (m, n) in the call, each as (axes of its rows,
        axes of its columns); for an array with a matrix per group, (axes of the groups, axes of its columns). Empty for
        a collective, or if the mesh is unknown.
      line: the line of the program that calls it, "train.py:41". For a gradient, the line of the forward call; for a
        layer of Flax, Equinox or Haiku, the line that calls the layer.
    """

    operation: str
    count: int
    pattern: str
    groups: str
    global_shapes: tuple[tuple[int, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    dtypes: str
    accumulator: str = ""
    determinism: str = ""
    epilog: str = ""
    implementation: str
    why: str
    algorithm: str
    flops: int = 0
    bytes_moved: int = 0
    workspace: int = 0
    compute: str = ""
    comm: str = ""
    layout: str = ""
    line: str = ""
    extents: tuple[int, ...] = ()
    local_extents: tuple[int, ...] = ()
    ndevices: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    placement: tuple[tuple[Dim, Dim], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    processes: int = 1
    chunks: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the ranks of a group."""
        return (*re.findall(r"'([^']+)'", self.groups),)

    @property
    def is_call(self) -> bool:
        """True for a product of jaxmp; False for a collective, and for a product that `fuse` leaves to JAX."""
        return bool(self.extents) and self.pattern != "-"

    @property
    def has_matrices(self) -> bool:
        """False for a `ragged_dot`, where an array has a matrix for each group; True for other operations."""
        return self.operation != "ragged_dot"

    @property
    def contraction(self) -> str:
        """The index that each axis splits, and its indices of op(a), op(b) and d: "mk,kn->mn  x: k (k k m)". "" for a
        `ragged_dot`, or without a `placement`."""
        return str(contraction.of_matrices(2, Layout(*self.placement))) if self.placement and self.has_matrices else ""

    def time(self, hardware: Hardware) -> CallTime | None:
        """Predicts the time of one run; None if extents are symbolic, if XLA partitions the product, or if the machine
        has no rate for a product's type. On devices that share a processor, the host implementation reads the operands
        of its peers in place. On other machines it counts as cuBLASMp, which overlaps its transfers."""
        if not isinstance(self.flops, int) or (self.pattern == "XLA's" and self.ndevices > 1):
            return None
        types = self.dtypes.split(",")[0].replace(" -> ", " x ").split(" x ")
        kind = kind_of(types[0], self.compute)
        if self.flops and kind not in hardware.rates:
            return None
        held = sum(math.prod(shape) * jnp.dtype(x).itemsize for shape, x in zip(self.local_shapes, types, strict=False))
        transfers = () if hardware.is_shared and self.implementation == "host" else self.transfers
        return call_time(
            hardware,
            flops=self.flops,
            kind=kind,
            ndevices=self.ndevices,
            nbytes=held + sum(each.nbytes for each in transfers),
            transfers=transfers,
            is_fused=self.implementation in ("host", "cublasmp"),
            chunks=self.chunks,
            implementation=self.implementation,
        )


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
