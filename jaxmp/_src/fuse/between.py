"""Names the operations between a product and a collective that keep one call from doing both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmp._src.fuse.graph import PRODUCTS, Graph
from jaxmp._src.fuse.products import SUMS, Product
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# The names of the collectives in users' programs.
_WRITTEN = {"reduce_scatter": "psum_scatter", "psum_invariant": "psum", "all_gather_invariant": "all_gather"}
_GATHERS = ("all_gather", "all_gather_invariant", "reshard")
_SUMS = ("reduce_scatter", *SUMS)
# Linear operations, which may come before or after a sum over ranks, in users' words.
_LINEAR = {
    **dict.fromkeys(("mul", "div", "neg"), "a factor"),
    **dict.fromkeys(("slice", "dynamic_slice", "split"), "a slice"),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), "a reshape"),
    **dict.fromkeys(("add", "add_any", "sub"), "an addition"),
    "convert_element_type": "a cast",
    "concatenate": "a concatenation",
    "select_n": "a mask",
    "transpose": "a transpose",
    "pad": "padding",
    "rev": "a reversal",
    "pvary": "",
}
# The same for functions of jax.numpy.
_FUNCTIONS = {"_roll_static": "a roll", "_roll_dynamic": "a roll", "_where": "a mask", "_pad": "padding"}


# A collective, and the equations between it and a value: () or (the one next to the value, those between the rest).
_Path = tuple[Any, tuple[Any, ...]]


class Between:
    """The paths in a graph between values and collectives. To a later sum over ranks they lead through linear equations
    only, from an earlier gather through any but products and sums over ranks."""

    def __init__(self, graph: Graph) -> None:
        self._equations = graph.equations
        self._before: dict[Any, _Path] = {}  # key: a value computed from a gather
        self._after: dict[Any, _Path] = {}  # key: a value that a sum over ranks is linear in
        for eqn in graph.equations:
            if eqn.primitive.name in _GATHERS:
                self._before |= dict.fromkeys(eqn.outvars, (eqn, ()))
            elif eqn.primitive.name not in (*PRODUCTS, *_SUMS):
                self._follow(eqn, self._before, eqn.invars, eqn.outvars)
        for eqn in reversed(graph.equations):
            inputs = jax_tracing.variables(eqn)
            if eqn.primitive.name in _SUMS:
                self._after |= dict.fromkeys(inputs, (eqn, ()))
            elif _word(eqn) is not None:
                self._follow(eqn, self._after, eqn.outvars, inputs)

    @staticmethod
    def _follow(eqn: Any, known: dict[Any, _Path], sources: Sequence[Any], targets: Sequence[Any]) -> None:
        found = (known.get(v) for v in sources if not jax_tracing.is_literal(v))
        if path := next(filter(None, found), None):
            known |= dict.fromkeys(targets, (path[0], (eqn, path[1])))

    def reason(self, product: Product) -> str:
        """Returns why the product's call does not do the gather before the product or, if there is none, the sum over
        ranks after it. The text names up to three operations between them, the ones nearest to the product. Returns ""
        if there is no such collective, or if the call does another collective of a named axis."""
        operands = [v for v in (product.lhs.value, product.rhs.value) if not jax_tracing.is_literal(v)]
        before = next(filter(None, map(self._before.get, operands)), None)
        path = before or self._after.get(self._equations[product.index].outvars[0])
        if path is None or product.is_shared_by_name:
            return ""
        found, collective, between = dict[str, None](), _named(path[0]), path[1]
        while between and len(found) < 4:
            eqn, between = between
            if _word(eqn) != "":
                found[_named(eqn)] = None
        if not found:
            return f"no call takes in its {collective}, so the product is local"
        words = [*found][:3][:: -1 if before else 1]
        listed = ", ".join(words) + ", and more" * (len(found) > 3)
        return f"between it and its {collective} there is {listed}, so the product is local"


def _word(eqn: Any) -> str | None:
    """Returns the user's word for a linear equation ("" for pvary, which has none); None for other equations."""
    name = eqn.primitive.name
    return _FUNCTIONS.get(str(eqn.params.get("name"))) if name == "jit" else _LINEAR.get(name)


def _named(eqn: Any) -> str:
    line, name = jax_compat.traced_line(eqn), eqn.primitive.name
    word = _word(eqn) or (str(eqn.params["name"]).strip("_") if name == "jit" else _WRITTEN.get(name, name))
    return f"{word} at {line}" if line else word
