"""`draw`: which device holds which block, and which blocks move."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from jaxmp._src.core.validation.operand_checks import check_function
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.draw.blocks import Matrix, label, matrices, sentence, shown, title
from jaxmp._src.tools.draw.svg import svg_of
from jaxmp._src.tools.explain.explain import explain
from jaxmp._src.tools.explain.table import Row

_MOST = 6  # blocks that are drawn along a dimension


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """Pictures of the calls of a program: `str` for a terminal, `.svg` for a file; notebooks show it.

    Attributes:
      rows: the calls, as `explain` has them, without collectives and products left to JAX. Rows of one line, pattern,
        extents, sharding and types are one row, with their counts added.
      svg: the picture as the text of an SVG file.
    """

    rows: tuple[Row, ...]

    @property
    def svg(self) -> str:
        return svg_of(self.rows)

    def __str__(self) -> str:
        return "\n\n".join(map(_text_of, self.rows)) if self.rows else "no jaxmp call in this program"

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return self.svg


@public
def draw(fn: Callable[..., Any]) -> Callable[..., Drawing]:
    """Draw which device holds which block of each jaxmp call of `fn`, and which blocks a device receives.

    `draw(fn)(*args, **kwargs)` traces `fn` as `explain` does and runs nothing.

    Args:
      fn: a function of arrays, jitted or not, or a gradient function.

    Returns:
      A function of the same arguments that returns a `Drawing`, which terminals show as text and notebooks as SVG.

    Raises: TypeError where `fn` is no function; and what `fn` raises.

    >>> import jax, jaxmp
    >>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
    >>> mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("x", None)))
    >>> w = jax.ShapeDtypeStruct((16, 4), "float32", sharding=NamedSharding(mesh, P(None, "x")))
    >>> def product(x, w):
    ...     return jaxmp.matmul(x, w, out_sharding=P(None, "x"))
    >>> with jax.sharding.use_abstract_mesh(mesh):
    ...     print(str(jaxmp.draw(product)(x, w)).partition(": ")[2])
    8x16x4, float32 x float32 -> float32
      A 8x16   B 16x4    D 8x4
      +---+    +---+---+   +---+---+
      | 0 |    | 0 | 1 |   | 0 | 1 |
      +---+    +---+---+   +---+---+
      |[1]|
      +---+
      while it multiplies, device 0 receives the blocks of A in brackets
    """
    check_function("draw", fn)
    explained = explain(fn, quiet=True)

    @jax_compat.hides_frames
    def drawn(*args: Any, **kwargs: Any) -> Drawing:
        rows: dict[Any, Row] = {}
        for row in explained(*args, **kwargs).rows:
            if row.is_call:
                key = (row.line, row.pattern, row.extents, row.placement, row.dtypes)
                same = rows.get(key)
                rows[key] = dataclasses.replace(row, count=row.count + (same.count if same else 0))
        return Drawing(tuple(rows.values()))

    return drawn


def _text_of(row: Row) -> str:
    """Returns the matrices of a call next to each other, with each block's devices, and the sentence about it."""
    parts = [_lines(matrix, row.ndevices) for matrix in matrices(row)]
    height = max(map(len, parts), default=0)
    padded = [[*part, *[" " * len(part[0])] * (height - len(part))] for part in parts]
    lines = ["   ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return "\n".join([title(row), *(f"  {line}" for line in lines), f"  {sentence(row)}"])


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
