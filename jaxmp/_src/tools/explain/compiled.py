"""The result of `explain(fn, compiled=True)`: every collective and product of a compiled program, with its cause."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmp._src.core.sharding import partitioner
from jaxmp._src.platform.jax_internals import jax_compiled
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.text import aligned, as_html, short_type
from jaxmp._src.tools.explain.calls import cause_in_call, moving_calls
from jaxmp._src.tools.explain.causes import cause
from jaxmp._src.tools.explain.hlo import COLLECTIVES, Computation, Instruction, Module
from jaxmp._src.tools.explain.memory import Memory, memory_notes, memory_of, shape_of, size_of
from jaxmp._src.tools.explain.origins import Origins
from jaxmp._src.tools.explain.partitioned import Program, groups_of
from jaxmp._src.tools.explain.table import Explanation, Row


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective or product of a compiled program, or the data that a call of jaxmp moves, on one device.

    Attributes:
      kind: XLA's name: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
        "collective-permute", "collective-broadcast"; "dot" for a product; "jaxmp all-reduce" and the like for a call.
      line: the line that needs it, "train.py:41", or with its caller "train.py:41 -> norm:12"; "" if unknown.
      axes: the mesh axes of the devices that communicate; empty for a product, or if the mesh is unknown.
      nbytes: bytes that a device receives each time; 0 for a product.
      count: how often the program runs it; None in a loop without a known number of iterations.
      shape: the result's type as XLA writes it.
      cause, remedy: why it runs, and how to avoid it if that is possible, in words.
      cause_kind: the cause in one word: "whole" (an operation needs a dimension whole), "product", "reduction",
        "reshape", "elementwise", "constraint", "out_shardings", "carry", "gradient", "recomputed", "written", "jaxmp"
        or "unplaced".
      flops: floating-point operations of a product each time; traffic: bytes of its operands and its result.
      round: a name shared by collectives that do not depend on each other, so that one collective could do all of them.
      is_hidden: XLA has put other work between its start and its end, or it is in a call that multiplies meanwhile.
      across: lines of jaxmp's calls between devices that XLA starts between its start and its end.
    """

    kind: str
    line: str
    axes: tuple[str, ...]
    nbytes: int
    count: int | None
    shape: str
    cause: str
    remedy: str
    cause_kind: str
    flops: int = 0
    traffic: int = 0
    round: str = ""
    is_hidden: bool = False
    across: tuple[str, ...] = ()

    @property
    def is_needed(self) -> bool:
        """True if the program cannot do without it, such as a gradient's sum over the batch."""
        return self.remedy.startswith("needed")


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledExplanation:
    """A compiled program. `str` gives its table, and notebooks show it.

    Attributes:
      rows: an `Operation` for each collective and for each product that XLA computes, in the order of the program,
        and for each call of jaxmp that reads data of other devices.
      calls: the `Explanation` of its jaxmp calls.
      memory: a `Memory`, or None if the platform does not report it.
    """

    rows: tuple[Operation, ...]
    calls: Explanation
    memory: Memory | None = None

    @property
    def collectives(self) -> tuple[Operation, ...]:
        """The rows that communicate: XLA's collectives, and jaxmp's calls that read data of other devices."""
        return tuple(row for row in self.rows if row.kind != "dot")

    @property
    def bytes_moved(self) -> int:
        """Bytes that a device receives, in all collectives and in calls of jaxmp that read data of other devices. A
        loop without a known number of iterations counts once."""
        return sum(map(_total, self.collectives))

    @property
    def bytes_hidden(self) -> int:
        """Bytes that a device receives while it computes: in calls of jaxmp, and in collectives that XLA overlaps."""
        return sum(_total(row) for row in self.collectives if row.is_hidden)

    def bytes_by(self, key: Callable[[Operation], Any]) -> dict[Any, int]:
        """Returns the bytes that a device receives, summed by `key(row)`, as `lambda row: row.line`, the most first."""
        sums: dict[Any, int] = {}
        for row in self.collectives:
            sums[key(row)] = sums.get(key(row), 0) + _total(row)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __repr__(self) -> str:
        return f"CompiledExplanation({self._totals()})"

    def __str__(self) -> str:
        """Returns the table with `_words` and `_notes`, and the table of `calls` if it has rows."""
        lines, remedies = list[str](), set[str]()
        for line, row in zip(aligned(_narrow(self._table())), [None, *_merged(self.rows)], strict=True):
            lines.append(line)
            for text in _words(row, remedies) if row is not None else ():
                lines += textwrap.wrap(text, 80, initial_indent="    ", subsequent_indent="    ")
        lines = lines if self.rows else ["no collective and no product of XLA's in this program"]
        notes = [part for note in self._notes() for part in textwrap.wrap(note, 80, subsequent_indent="  ")]
        return "\n".join([*lines, *notes, *([str(self.calls)] if self.calls.rows else [])])

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        head, *cells = self._table()
        words = [["cause", "remedy"], *([row.cause, row.remedy] for row in _merged(self.rows))]
        table = [[*line, *more] for line, more in zip([head, *cells], words, strict=True)]
        calls = self.calls._repr_html_() if self.calls.rows else ""
        return as_html([table], self._notes()) + calls

    def _table(self) -> list[list[str]]:
        head = ["line", "operation", "over", "result", "received", "times"]
        return [head, *map(_cells, _merged(self.rows))]

    def _totals(self) -> str:
        count, every = len(self.collectives), self.bytes_moved
        share = f", {100 * self.bytes_hidden / every:.0f} % of it hidden behind products" if every else ""
        return f"{count} collective{'s' * (count != 1)}, {size_of(every)} received by each device{share}"

    def _notes(self) -> list[str]:
        """Returns the lines below the table: totals, what calls read in place, sums by kind and by line, and memory."""
        notes = [f"total: {self._totals()}"]
        if in_place := sum(row.count * row.bytes_moved for row in self.calls.rows if row.implementation == "host"):
            notes.append(f"{size_of(in_place)} of it are operands of other devices that calls read in place, uncopied")
        for what, key in (("kind", lambda row: row.kind), ("line", lambda row: row.line or "?")):
            sums = list(self.bytes_by(key).items())
            if len(sums) > 1:
                listed = ", ".join(f"{name} {size_of(nbytes)}" for name, nbytes in sums[:6])
                notes.append(f"by {what}: {listed}{', ...' * (len(sums) > 6)}")
        if self.memory is not None:
            notes += memory_notes(self.memory, self.calls.hardware)
        return notes


def compile_program(lowered: Any) -> tuple[Any, Program]:
    """Compiles a `jax.stages.Lowered`. Returns (compiled program, its text with the texts around XLA's partitioner)."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = _compile(lowered, folder)
        whole, parts = (_dumped(folder, when) for when in ("before", "after"))
    return compiled, Program(Module(compiled.as_text()), jax_compiled.lowered_mesh(lowered), whole, parts)


def settled_program(lowered: Any) -> Module | None:
    """Returns the program before XLA's partitioner, with the shardings that XLA settles; None if no partitioner ran. If
    `lowered` is from `partitioner.explaining(stops=True)`, the compilation stops at the first call that the partitioner
    asks about; otherwise it runs to the end. Raises other errors of XLA."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _compile(lowered, folder)
        except jax.errors.JaxRuntimeError as error:
            if partitioner.STOPPED not in str(error):
                raise
        return _dumped(folder, "before")


def _compile(lowered: Any, folder: str) -> Any:
    return jax_compiled.recompile(lowered, {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd.*"})


def compiled_explanation(compiled: Any, program: Program, calls: Explanation) -> CompiledExplanation:
    """Returns the explanation of a compiled program: rows of XLA's collectives and products, then of jaxmp's calls that
    read data of other devices without XLA's collectives. `calls`: the explanation of the program's calls."""
    left = {row.line: row.why for row in calls.rows if row.why.startswith("not fused")}
    origins = Origins(program)
    rows = list(_rows(origins, left, calls.rows))
    shared = ("host+xla",) if len(native.shared_processes) == jax.process_count() else ()  # XLA has no collective then
    for row, why in moving_calls(calls.rows, origins, "host", "cublasmp", *shared):
        dtype = short_type(row.dtypes.rpartition(" -> ")[2].partition(",")[0])
        shape = f"{dtype}[{','.join(map(str, row.local_shapes[2]))}]"
        what = (f"jaxmp {row.pattern.replace('_', '-')}", why.line, row.axes, row.bytes_moved, row.count, shape)
        rows.append(Operation(*what, why.text, why.remedy, why.kind, is_hidden=row.implementation not in shared))
    return CompiledExplanation(tuple(rows), calls, memory_of(compiled, program.compiled))


def _dumped(folder: str, when: str) -> Module | None:
    """Returns the module "before" or "after" XLA's partitioner; None if no partitioner ran."""
    found = sorted(Path(folder).glob(f"*{when}_spmd-partitioning*.txt"))
    return Module(max(found, key=lambda file: file.stat().st_size).read_text()) if found else None


# Rows ----------------------------------------------------------------------------------------------------------


def _rows(origins: Origins, left: Mapping[str, str], calls: Sequence[Row]) -> Iterator[Operation]:
    """Yields a row for each array that a collective moves, and for each product of XLA's. `left`: by line, why `fuse`
    left a product to XLA. `calls`: the rows of jaxmp's calls, which may have a collective's cause."""
    program, module = origins.program, origins.program.compiled
    size = math.prod(program.mesh.values())
    for computation, count in module.executed():
        rounds = _rounds(computation)
        for each in computation.instructions.values():
            if each.kind in COLLECTIVES:
                name, in_flight = f"{computation.name} {rounds[each.name]}", _in_flight(module, computation, each)
                for i, (shape, nbytes) in enumerate(_moved(each, computation, size)):
                    why = cause(origins, computation, each, i)
                    why = cause_in_call(calls, origins, why, each.kind) if why.kind == "jaxmp" else why
                    what = (each.kind, why.line, program.axes(each), nbytes, count, shape)
                    yield Operation(*what, why.text, why.remedy, why.kind, 0, 0, name, *in_flight)
            elif each.is_product:
                what = ("dot", module.line(each), (), 0, count, shape_of(each.results))
                traffic = each.held + sum(operand.nbytes for operand in computation.operands(each))
                of_fuse = left.get(module.innermost(each), "")
                yield Operation(*what, of_fuse, "", "product", _flops(computation, each), traffic)


def _moved(each: Instruction, computation: Computation, ndevices: int) -> list[tuple[str, int]]:
    """Returns (type, bytes that a device receives) of each array of a collective; an all-to-all has one. Bytes are
    counted for a ring or direct sends; an all-reduce counts as a reduce-scatter and an all-gather."""
    groups = groups_of(each, ndevices)
    p = max(map(len, groups), default=1)
    share = (p - 1) / p
    factor = {"all-gather": p - 1, "all-reduce": 2 * share, "collective-permute": bool(groups)}.get(each.kind, share)
    factor = float(p > 1) if each.kind == "collective-broadcast" else factor
    operands = computation.operands(each)
    if "all-to-all" in each.kind:  # the parts of one array
        return [(shape_of(each.results), int(sum(operand.nbytes for operand in operands) * factor))]
    return [(shape_of([x]), int(operand.nbytes * factor)) for x, operand in zip(each.results, operands, strict=False)]


def _flops(computation: Computation, dot: Instruction) -> int:
    """Returns 2 m n k of a device's product; a complex product counts 4 real ones."""
    (kind, shape), *_ = computation.operands(dot)[0].shapes
    k = math.prod(shape[i] for i in dot.summed)
    return 2 * k * math.prod(dot.shapes[0][1]) * (4 if kind.startswith("c") else 1)


def _rounds(computation: Computation) -> dict[str, int]:
    """Returns the length of the longest chain of dependent collectives that starts at each instruction, by its name."""
    found = dict.fromkeys(computation.instructions, 0)
    for each in reversed([*computation.instructions.values()]):
        found[each.name] += each.kind in COLLECTIVES
        for name in each.operands:
            found[name] = max(found[name], found[each.name])
    return found


def _in_flight(module: Module, computation: Computation, collective: Instruction) -> tuple[bool, tuple[str, ...]]:
    """Returns (True if work is between its start and end, the lines of jaxmp's calls between devices there); (False,
    ()) for a collective that is not asynchronous."""
    ends = [user for user in computation.users[collective.name] if user.opcode.endswith("-done")]
    if not collective.opcode.endswith("-start") or not ends:
        return False, ()
    order = [*computation.instructions.values()]
    between = order[order.index(collective) + 1 : order.index(ends[0])]
    calls = [x for x in between if x.attribute("custom_call_target") == '"jaxmp_matmul"']
    lines = [module.line(x) or "?" for x in calls if 'pattern = "local"' not in x.attributes]
    work = ("fusion", "dot", "custom-call", "convolution", "while")
    return any(each.opcode in work for each in between), tuple(dict.fromkeys(lines))


# Words ---------------------------------------------------------------------------------------------------------


def _merged(rows: Sequence[Operation]) -> list[Operation]:
    """Merges rows that are equal in line, kind, axes, kind of cause, `is_needed`, `is_hidden` and `across`, and adds
    their counts. A merged row has the bytes of all runs, and its count is None if one is. Causes and remedies are
    joined by `_joined`. Other fields are from the row with the most bytes; its shape gets ", ..." if shapes differ.
    Needed collectives come after others, and products last."""
    groups: dict[Any, list[Operation]] = {}
    for row in sorted(rows, key=lambda row: (row.kind == "dot", row.is_needed)):
        key = (row.kind, row.line, row.axes, row.cause_kind, row.is_needed, row.is_hidden, row.across)
        groups.setdefault(key, []).append(row)
    merged = []
    for found in groups.values():
        largest, *_ = found = sorted(found, key=_total, reverse=True)
        cause, remedy = (_joined([getattr(row, name) for row in found]) for name in ("cause", "remedy"))
        count = None if None in (counts := [row.count for row in found]) else sum(counts)  # type: ignore[arg-type]
        shape = largest.shape + ", ..." * any(row.shape != largest.shape for row in found)
        nbytes = sum(map(_total, found))
        merged.append(dataclasses.replace(largest, count=count, shape=shape, cause=cause, remedy=remedy, nbytes=nbytes))
    return merged


def _joined(texts: Sequence[str]) -> str:
    """Joins at most three different texts, one per line, and a line that counts the others. Texts that differ only in
    numbers of layers, in brackets, are one text."""
    groups: dict[str, set[str]] = {}
    for text in texts:
        groups.setdefault(re.sub(r"\[\d+\]", "[*]", text), set()).add(text)
    found = [layers if len(each) > 1 else next(iter(each)) for layers, each in groups.items()]
    return "\n".join(found[:3] + [f"and {len(found) - 3} more like these"] * (len(found) > 3))


def _narrow(table: list[list[str]]) -> list[list[str]]:
    """Shortens lines (column 0) and types (column 3) in place, from the left, to a width of 80 if possible; each keeps
    12 characters. Returns the table."""
    for column, least in ((0, 12), (3, 12)):
        width = sum(max(map(len, cells)) + 2 for cells in zip(*table, strict=True)) - 2
        most = max(least, max(len(row[column]) for row in table) - max(0, width - 80))
        for row in table:
            row[column] = row[column] if len(row[column]) <= most else "..." + row[column][3 - most :]
    return table


def _cells(row: Operation) -> list[str]:
    times = "?" if row.count is None else str(row.count) if row.count != 1 else ""
    kind = "product" if row.kind == "dot" else row.kind
    return [row.line or "?", kind, " ".join(row.axes), row.shape, size_of(row.nbytes) if row.nbytes else "", times]


def _words(row: Operation, remedies: set[str]) -> Iterable[str]:
    """Yields the lines below a row: its cause, its remedies except `remedies`, which rows above have shown, and calls
    in flight. Adds the row's remedies to `remedies`."""
    for text in row.cause.splitlines():
        yield f"{text}{'; hidden behind other work' * row.is_hidden}"
    for text in row.remedy.splitlines():
        if text not in remedies:
            remedies.add(text)
            yield text if row.is_needed else f"remedy: {text}"
    if row.across:
        yield f"in flight across jaxmp's call of {', '.join(row.across)}: both wait for other devices"


def _total(row: Operation) -> int:
    return row.nbytes * (1 if row.count is None else row.count)
