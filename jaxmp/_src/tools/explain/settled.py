"""Finds the patterns that XLA's partitioner chooses for calls, from the shardings in the program before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from jaxmp._src.core.sharding import partitioner
from jaxmp._src.platform.jax_internals import jax_partitioner
from jaxmp._src.platform.jax_internals.jax_partitioner import Global
from jaxmp._src.tools.explain.hlo import Instruction, Module
from jaxmp._src.tools.explain.partitioned import split
from jaxmp._src.tools.explain.rows import UNSETTLED, UNSETTLED_BATCH, settled_row
from jaxmp._src.tools.explain.table import Row


def with_settled(rows: Sequence[Row], whole: Module | None, *, has_batches: bool) -> list[Row]:
    """Returns `rows` with each `UNSETTLED` row replaced by a row that the partitioner settles, matched by operation and
    extents. It keeps the old row's line, and its count divided by the parts of the batch. Unmatched settled rows come
    last; unmatched unsettled rows are dropped. If nothing was settled, unsettled rows are local. `whole`: the program
    before the partitioner; None on one device. `has_batches`: XLA partitions the products with a batch,
    `UNSETTLED_BATCH`; otherwise they are local."""
    settled = list(_settled(whole)) if whole is not None else []
    left, found = list(settled), []
    for row in rows:
        if row.pattern != UNSETTLED or not settled:
            found.append(row)
        elif (match := next((one for one in left if _may_be_same_call(one[0], row)), None)) is not None:
            left.remove(match)
            count = row.count // match[1]
            names = ["line", *["global_shapes", "extents", "flops"] * (row.operation == "ragged_dot")]
            found.append(dataclasses.replace(match[0], count=count, **{name: getattr(row, name) for name in names}))
    return [_completed(row, has_batches) for row in [*found, *(row for row, _ in left)]]


def _settled(whole: Module) -> Iterator[tuple[Row, int]]:
    """Yields (row, number of parts into which the mesh splits its batch) for each product, and each collective that
    moves data, in the calls of `whole`, as sharded there."""
    products = functools.cache(partitioner.settled)
    for computation, count in whole.executed():
        for each in computation.instructions.values():
            if partitioner.TARGET not in each.attribute("custom_call_target"):
                continue
            text = f"{{{each.attribute('backend_config')}}}"
            parts = zip(computation.operands(each), each.parts, strict=True)
            operands = tuple(_arrays(operand)[int(part or 0)] for operand, part in parts)
            for one in products(text, operands, _arrays(each)):
                line, times = whole.innermost(each), (count or 1) * one.times
                yield from ((row, one.parts) for row in settled_row(one, line, times))


def _arrays(each: Instruction) -> tuple[Global, ...]:
    """Returns the result of an instruction, with its sharding, as a tuple of one, or of all if it has several."""
    text = each.sharding or "replicated"
    shardings = split(text) if text.startswith("{") else [text]
    pairs = zip(each.shapes, shardings, strict=True)
    return tuple(jax_partitioner.in_text(*shape, f"{{{sharding}}}") for shape, sharding in pairs)


def _may_be_same_call(settled: Row, row: Row) -> bool:
    """True if a settled call may be this row's, or compute d transposed, with the extents reversed. It has the row's
    operation and epilog, or is a matmul without one, because XLA applies the epilog after a transposed call. Its
    operands have the row's types, in any order. A `ragged_dot` has no transpose: its extents and all its types are
    equal in order."""
    if row.operation == "ragged_dot":
        return (settled.operation, settled.extents, settled.dtypes) == (row.operation, row.extents, row.dtypes)
    plain = ("matmul", "NONE")  # a call that computes d transposed: XLA applies the epilog after it
    same = (settled.operation, settled.epilog) in ((row.operation, row.epilog), plain)
    types, others = ({*one.dtypes.split(" -> ")[0].split(" x ")} for one in (settled, row))
    return same and types == others and settled.extents in (row.extents, row.extents[::-1])


def _completed(row: Row, has_batches: bool) -> Row:
    """Returns `row` with the pattern "local" if the partitioner has not settled it, and otherwise as it is. If
    `has_batches`, an unsettled batch also gets XLA as its implementation."""
    if row.pattern == UNSETTLED_BATCH and has_batches:
        why = "a batch, which XLA partitions (auto axes, no in_shardings); the shapes per device are its own"
        row = dataclasses.replace(row, implementation="xla", why=why, algorithm="lax.dot_general", workspace=0)
    return dataclasses.replace(row, pattern="local") if row.pattern in (UNSETTLED, UNSETTLED_BATCH) else row
