"""Drawings of calls as text, for terminals."""

from __future__ import annotations

import itertools

from jaxmp._src.tools.draw.blocks import Matrix, label, matrices, sentence, shown
from jaxmp._src.tools.explain.row import Row

_MOST = 6  # blocks that are drawn along a dimension


def text_of(row: Row) -> str:
    """Returns the matrices of a call next to each other, with each block's devices; only a note if
    XLA places them, or on one device."""
    found = matrices(row)
    if not found:
        return f"{title(row)}\n  ({sentence(row)})"
    parts = [_lines(matrix, row.ndevices) for matrix in found]
    height = max(map(len, parts))
    padded = [[*part, *[" " * len(part[0])] * (height - len(part))] for part in parts]
    lines = ["   ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return "\n".join([title(row), *(f"  {line}" for line in lines), f"  {sentence(row)}"])


def title(row: Row) -> str:
    """Returns one line: the program's line, the pattern, mesh axes with sizes, extents, types and the count."""
    axes = " ".join(f"{name}={size}" for name, size in row.mesh)
    extents = "x".join(map(str, row.extents))
    count = f", {row.count} times" if row.count > 1 else ""
    return f"{row.line}  {row.pattern} on {axes or 'one device'}: {extents}, {row.dtypes}{count}"


def _lines(matrix: Matrix, ndevices: int) -> list[str]:
    """Returns the lines of a table of a matrix: each block's devices, in brackets if device 0 receives the block; "..."
    for blocks that `shown` leaves out."""
    rows, columns = (shown(count, _MOST) for count in matrix.grid)
    cells = []
    for i in rows:
        line = []
        for j in columns:
            text = "..." if i is None or j is None else label(matrix.blocks[i, j], ndevices)
            line.append(f"[{text}]" if (i, j) in matrix.received else f" {text} ")
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    body = ("|" + "|".join(map(str.center, line, widths)) + "|" for line in cells)
    lines = [rule, *itertools.chain.from_iterable((line, rule) for line in body)]
    name = f"{matrix.name} {matrix.shape[0]}x{matrix.shape[1]}"
    width = max(len(name), len(rule))
    return [line.ljust(width) for line in (name, *lines)]
