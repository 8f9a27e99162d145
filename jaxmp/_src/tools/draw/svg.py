"""Drawings of calls as SVG, for notebooks and documents; they are read on light and on dark pages."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

from jaxmp._src.tools.draw.blocks import Matrix, label, matrices, sentence, shown
from jaxmp._src.tools.draw.text import title
from jaxmp._src.tools.explain.row import Row

_MOST = 8  # blocks that are drawn along a dimension
_SIDE = 150  # pixels of a matrix' longer side, at most
_SHORT = 40  # and of its shorter one, at least
_CELL = 16, 30  # pixels of a block, at least: of its height and of its width
_GAP, _LINE, _MARGIN = 50, 18, 10
_INK = "#808080"  # legible on white and on black


def svg_of(rows: Sequence[Row]) -> str:
    """Returns one SVG picture of all calls, one below the other."""
    parts, top, width = [], _MARGIN, 0.0
    for row in rows:
        part, right, bottom = _call(row, top)
        parts.append(part)
        top, width = round(bottom) + 2 * _LINE, max(width, right)
    width, height = round(width + _MARGIN), top
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}" role="img">{"".join(parts)}</svg>'
    )


def _call(row: Row, top: float) -> tuple[str, float, float]:
    """Returns (SVG elements of one call, drawn from `top` down; their right end; their lower end), in pixels."""
    found, head = matrices(row), title(row)
    parts = [_text(head, _MARGIN, top + 12, "start", bold=True)]
    left, right, top = float(_MARGIN), _MARGIN + 7.5 * len(head), top + 2 * _LINE
    bottom = top
    longest = max((extent for matrix in found for extent in matrix.shape), default=1)
    for matrix, sign in zip(found, ("×", "=", ""), strict=False):
        height, width = (
            max(_SHORT, _SIDE * extent / max(longest, 1), least * min(count, _MOST))
            for extent, count, least in zip(matrix.shape, matrix.grid, _CELL, strict=True)
        )
        parts.append(_text(f"{matrix.name} {matrix.shape[0]}×{matrix.shape[1]}", left, top - 4, "start"))
        parts.append(_matrix(matrix, row.ndevices, (left, top, width, height)))
        if sign:
            parts.append(_text(sign, left + width + _GAP / 2, top + _SHORT / 2, "middle", bold=True))
        left, bottom = left + width + _GAP, max(bottom, top + height)
    note = sentence(row).replace("in brackets", "with dashed borders")
    parts.append(_text(note, _MARGIN, bottom + _LINE, "start"))
    return "".join(parts), max(left, right, _MARGIN + 6.5 * len(note)), bottom + _LINE


def _matrix(matrix: Matrix, ndevices: int, place: tuple[float, float, float, float]) -> str:
    """Returns the blocks of a matrix in `place` (left, top, width, height), and "…" for blocks that `shown` leaves
    out. A block has the colour of its first device, and a dashed border if device 0 receives it."""
    left, top, width, height = place
    rows, columns = (shown(count, _MOST) for count in matrix.grid)
    dy, dx = height / len(rows), width / len(columns)
    parts = []
    for (y, i), (x, j) in itertools.product(enumerate(rows), enumerate(columns)):
        middle = left + (x + 0.5) * dx, top + (y + 0.5) * dy + 4
        if i is None or j is None:
            parts.append(_text("…", *middle, "middle"))
            continue
        devices, corner = matrix.blocks[i, j], (left + x * dx, top + y * dy)
        parts.append(_rectangle((*corner, dx, dy), _colour(devices[0], ndevices), (i, j) in matrix.received))
        parts.append(_text(label(devices, ndevices), *middle, "middle", on=True))
    return "".join(parts)


def _rectangle(place: tuple[float, float, float, float], colour: str, is_received: bool) -> str:
    x, y, width, height = (f"{value:.1f}" for value in place)
    stroke = 'stroke-width="2" stroke-dasharray="4 2"' if is_received else 'stroke-width="0.5"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" stroke="#202020" {stroke}/>'


def _colour(device: int, ndevices: int) -> str:
    """Returns a light colour for each device, around the circle of hues."""
    return f"hsl({round(360 * device / max(ndevices, 1))},65%,78%)"


def _text(text: str, x: float, y: float, anchor: str, *, bold: bool = False, on: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    ink = ' fill="#202020" font-size="10"' if on else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}{ink}>{html.escape(text)}</text>'
