"""Formats the tables of reports as text and as HTML."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Sequence


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]


def as_html(tables: Iterable[Sequence[Sequence[str]]], notes: Iterable[str]) -> str:
    """Returns tables as HTML, the first row of each as its header, and `notes` as lines below them."""
    found = []
    for table in tables:
        head, *body = ([html.escape(cell) for cell in cells] for cells in table)
        rows = ["<tr><th>" + "</th><th>".join(head) + "</th></tr>"]
        rows += ["<tr><td>" + "</td><td>".join(cells) + "</td></tr>" for cells in body]
        found.append(f"<table>{''.join(rows)}</table>")
    return f"{''.join(found)}<p>{'<br>'.join(map(html.escape, notes))}</p>"


def short_type(dtype: str) -> str:
    """Returns the name of a type as JAX prints it in a jaxpr."""
    return functools.reduce(lambda name, pair: name.replace(*pair), _SHORT, dtype)


_SHORT = (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))
