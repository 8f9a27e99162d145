"""Timelines of profiles, a row for each device: as text and as SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxmp._src.tools.profile.trace import Event

_COLUMNS = 72  # of text
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WIDTH, _HEIGHT, _LEFT, _LINE = 900, 22, 80, 16  # pixels
_INK = "#808080"  # legible on white and on black


def text_of(events: Sequence[Event], seconds: float) -> list[str]:
    """Returns the lines of a timeline of `seconds`: a row for each device, and a legend. A letter is a kind of call,
    "*" any kind after the 26th, "." another operation, and a blank nothing. If several share a column, a call is shown
    before other operations, and then the longest."""
    marks = _marks(events)
    lines = []
    for device in sorted({event.device for event in events}):
        cells: list[tuple[bool, float, str]] = [(False, 0.0, " ")] * _COLUMNS
        for event in (event for event in events if event.device == device):
            first, last = (_column(time, seconds) for time in (event.start, event.start + event.seconds))
            cell = (event.is_call, event.seconds, marks.get(event.name, "."))
            for i in range(first, last + 1):
                cells[i] = max(cells[i], cell)
        lines.append(f"device {device:<3} |{''.join(mark for _, _, mark in cells)}|")
    legend = [f"  {mark}  {name}" for name, mark in marks.items()]
    return [*lines, *legend, "  .  other operations"]


def _column(time: float, seconds: float) -> int:
    return min(int(_COLUMNS * time / seconds), _COLUMNS - 1) if seconds else 0


def _marks(events: Sequence[Event]) -> dict[str, str]:
    """Returns a letter for each kind of call, in the order of `events`; "*" from the 27th kind on."""
    names = dict.fromkeys(event.name for event in events if event.is_call)
    return {name: _MARKS[i] if i < len(_MARKS) else "*" for i, name in enumerate(names)}


def svg_of(events: Sequence[Event], seconds: float) -> str:
    """Returns a timeline as SVG, with an axis and a legend; a mouse shows the name and times of an operation."""
    marks, devices = _marks(events), sorted({event.device for event in events})
    names = list(marks)
    axis = len(devices) * _HEIGHT
    height = axis + (len(names) + 3) * _LINE
    parts = [_text(f"device {device}", 4, i * _HEIGHT + 15) for i, device in enumerate(devices)]
    for event in sorted(events, key=lambda event: event.is_call):
        x, width = (_WIDTH * time / seconds if seconds else 0.0 for time in (event.start, event.seconds))
        top = devices.index(event.device) * _HEIGHT + 2
        fill = _colour(names.index(event.name), len(names)) if event.is_call else "#b0b0b0"
        tip = html.escape(f"{event.name}: {event.seconds * 1e6:.1f} us from {event.start * 1e6:.1f} us")
        parts.append(
            f'<rect x="{_LEFT + x:.2f}" y="{top}" width="{max(width, 0.5):.2f}" height="{_HEIGHT - 4}" fill="{fill}">'
            f"<title>{tip}</title></rect>"
        )
    for i in range(5) if seconds else ():
        x = _LEFT + _WIDTH * i / 4
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{axis}" stroke="{_INK}" stroke-width="0.3"/>')
        parts.append(_text(f"{round(seconds * 1e6 * i / 4, 1):g} us", x, axis + 12))
    for i, name in enumerate(names):
        y = axis + (i + 1) * _LINE + 4
        fill = _colour(i, len(names))
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="10" height="10" fill="{fill}"/>')
        parts.append(_text(name, _LEFT + 16, y + 9))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 60}" height="{height}" '
        f'viewBox="0 0 {_LEFT + _WIDTH + 60} {height}" font-family="sans-serif" font-size="11" fill="{_INK}" '
        f'role="img">{"".join(parts)}</svg>'
    )


def _colour(index: int, count: int) -> str:
    return f"hsl({round(360 * index / max(count, 1))},60%,60%)"


def _text(text: str, x: float, y: float) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'
