"""`draw`: which device holds which block, and which blocks move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmp._src.core.validation.operand_checks import check_function
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.draw.svg import svg_of
from jaxmp._src.tools.draw.text import text_of
from jaxmp._src.tools.explain.explain import explain
from jaxmp._src.tools.explain.row import Row


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
        return "\n\n".join(map(text_of, self.rows)) if self.rows else "no jaxmp call in this program"

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
