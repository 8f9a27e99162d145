"""Explains why a call of jaxmp moves data, from the shardings of its operands and its result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxmp._src.tools.explain.hlo import Computation, Instruction
from jaxmp._src.tools.explain.loops import multiplies, summed_once
from jaxmp._src.tools.explain.origins import Origins, is_call
from jaxmp._src.tools.explain.table import Row
from jaxmp._src.tools.explain.values import Cause, Values

# A call in its computation, and the numbers of its operands a and b.
Site = tuple[Computation, Instruction, tuple[int, int]]
_PATTERNS = "give operands and result shardings of one pattern (docs/matmul.md), so that the call moves data while "
_PATTERNS += "it multiplies"


def moving_calls(rows: Sequence[Row], origins: Origins, *implementations: str) -> Iterator[tuple[Row, Cause]]:
    """Yields (row, cause) of each product by one of these `implementations` that reads data of other devices. If the
    call of a row is not found in the program, the cause does not name the operands."""
    sites = list(_sites(origins))
    for row in rows:
        if row.extents and row.bytes_moved and row.implementation in implementations:
            site = _of_row(origins, sites, row)
            sites = [each for each in sites if each is not site]
            yield row, _cause(row, origins, site)


def cause_in_call(rows: Sequence[Row], origins: Origins, found: Cause, kind: str) -> Cause:
    """Returns the cause of a collective of this `kind` that jaxmp added to a call. `found`: the cause so far. If a row
    at the line of `found` is this collective (its `operation`), returns `found` with the row's `why` appended and a new
    remedy. Else, if a call at this line has this pattern, returns the call's cause with the line of `found`. Else
    returns `found`."""
    name = kind.replace("-", "_")
    of_line = [row for row in rows if row.line and row.line == found.line.rpartition(" -> ")[2]]
    if row := next((row for row in of_line if row.operation == name), None):
        return found._replace(text=f"{found.text}: {row.why}", remedy=_PATTERNS)
    if row := next((row for row in of_line if row.pattern == name), None):
        return _cause(row, origins, _of_row(origins, _sites(origins), row))._replace(line=found.line)
    return found


def _sites(origins: Origins) -> Iterator[Site]:
    """Yields the products of jaxmp in the program before XLA's partitioner, as sites with operands 0 and 1 as a and b;
    nothing if no partitioner ran. A call with several results has several products, so it is yielded once for every two
    of its operands."""
    for computation, each in origins.program.places():
        if is_call(each) and multiplies(each):
            numbers = range(len(each.operands) if len(each.shapes) > 1 else min(2, len(each.operands)))
            yield from ((computation, each, pair) for pair in itertools.combinations(numbers, 2))


def _of_row(origins: Origins, sites: Iterable[Site], row: Row) -> Site | None:
    """Returns the first site of the row's line with operands of the row's sizes, or None."""
    m, k, n = row.extents
    for site in sites:
        sizes = [math.prod(origins.whole_operand(*site[:2], i).extents) for i in site[2]]
        if origins.whole.innermost(site[1]) == row.line and sorted(sizes) == sorted((m * k, k * n)):
            return site
    return None


def _cause(row: Row, origins: Origins, site: Site | None) -> Cause:
    """Returns the cause, "jaxmp", of what the call of `row` reads, in words for its pattern; the row's `why`, and no
    remedy, for patterns without words. Names the operands of `site` unless it is None. For an all_reduce of a gradient,
    adds what `summed_once` says."""
    values = Values(origins, row.axes)
    over = values.over
    operands = [origins.whole_operand(*site[:2], i) for i in site[2]] if site else []
    dims = [each for operand in operands for each in values.all(operand)]
    is_gradient = site is not None and "transpose(" in site[1].op_name
    sums = f"{'the gradient of ' * is_gradient}this product sums {values.which(dims)}, and its result is"
    have = f"sharded over {over}" + f" ({values.describe(dims)})" * bool(dims)
    # If devices read operands of other devices instead, as on CPUs of one process, partial sums do not move.
    reads = row.implementation == "host" or row.determinism != "run_to_run"
    adds = "each device reads what it needs of the others' operands" if reads else "the call adds the partial sums"
    less = "each device reads less of the operands" if reads else "a reduce-scatter moves half"
    remedy = f"{'needed, or ' * is_gradient}let out_sharding shard the result over {over}: {less}"
    if row.implementation == "host":
        remedy = "needed where every device uses the result; if the result is sharded, the call reads as much"
    text, remedy = {
        "all_reduce": (f"{sums} whole over {over}: {adds}, and every device gets all sums", remedy),
        "reduce_scatter": (
            f"{sums} sharded over {over}: {adds}, and every device gets its part of the sums",
            f"{values.leave_whole(dims)}; where the sum is needed, so is this",
        ),
        "all_gather": (
            f"both operands are {have}, along dimensions of the result; the call gathers one",
            "the result can keep one of the two: leave the other whole, or shard it over another axis",
        ),
        "grid": (
            f"the operands are {have}, along different dimensions; the call gathers them",
            "shard what the product sums in both operands; needed for weights that are sharded to save memory (FSDP)",
        ),
    }.get(row.pattern, (row.why, ""))
    why = Cause("jaxmp", text, remedy, row.line)
    return summed_once(values, [site[:2]] if site and is_gradient and row.pattern == "all_reduce" else [], why)
