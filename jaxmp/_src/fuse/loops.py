"""Pairs a scan with the scan of its backward pass, which reads what the first scan has stacked.

JAX stacks what the derivative of an activation needs: for gelu three or four arrays. Both bodies are joined to one
graph, so that the second body reads the values of the first. This graph shows a product with its activation, and the
product followed by the derivative. The first scan then stacks the aux of its epilog (gelu's argument), and the second
scan reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

from jax import lax

from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.fuse import control_flow
from jaxmp._src.fuse.graph import Graph, Group, read, schedule
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

Values = dict[Any, Any]
# Takes a graph, with and without barriers; returns (what is replaced, why other products are not, by index).
Plan = Callable[[Graph, Graph], tuple[list[Group], dict[int, str]]]
# Takes (graph, steps, why products are not replaced, values, variables wanted later); adds results to the values.
Run = Callable[[Graph, Sequence[int | Group], dict[int, str], Values, Sequence[Any]], None]


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan equation of a graph, its body, and how many of its operands are the same in all steps (`nfixed`) and how
    many are carried (`ncarry`)."""

    index: int
    eqn: Any
    body: jax_compat.Jaxpr
    consts: Sequence[Any]
    nfixed: int
    ncarry: int

    @staticmethod
    def of(graph: Graph, index: int) -> _Scan:
        eqn: Any = graph.equations[index]
        body, consts = jax_tracing.open_jaxpr(eqn.params["jaxpr"])
        return _Scan(index, eqn, body, consts, *jax_compat.scan_counts(eqn))

    @property
    def xs(self) -> slice:
        """The slice of the operands that are scanned over."""
        return slice(self.nfixed + self.ncarry, None)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A forward scan, a backward scan, and the graph of both bodies. An epilog of the backward body reads an aux of the
    forward body.

    `links`: variables of the backward body, with the forward body's value for each. `left`: by index, why JAX computes
    a product of the graph. `results`: of the backward body. `stacked`: places of the forward scan's stacked results
    that other equations read. `crossing`: the values that the forward body stacks for the backward body. `steps`: of
    the forward and of the backward body."""

    forward: _Scan
    backward: _Scan
    links: Values
    graph: Graph
    left: dict[int, str]
    results: Sequence[Any]
    stacked: Sequence[int]
    crossing: Sequence[Any]
    steps: tuple[Sequence[int | Group], Sequence[int | Group]]

    def run(self, eqn: Any, values: Values, run: Run, evaluate: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> bool:
        """Evaluates `eqn`, one of the two scans, into `values`, and returns True. The forward scan also sets
        `values[self]`, which the backward scan reads. Returns False if a call of this scan is refused, or was in the
        forward scan: the caller then has to evaluate `eqn` like any other equation. If the backward scan is refused,
        the forward scan's results are replaced too, by `evaluate`."""
        forward = self.forward.eqn
        if eqn is not forward and self not in values:
            return False
        try:
            if eqn is forward:
                self._run_forward(values, run)
            else:
                self._run_backward(values, run)
            return True
        except Refusal:
            if eqn is not forward:  # JAX's backward scan needs the results of JAX's forward scan
                operands = [read(values, v) for v in forward.invars]
                with jax_tracing.traced_as(forward):
                    values |= zip(forward.outvars, evaluate(forward, operands), strict=True)
            return False

    def _run_forward(self, values: Values, run: Run) -> None:
        """Adds to `values` the results that other equations read, and `values[self]`, what the backward scan reads."""
        scan = self.forward
        ncarry = scan.ncarry
        stacked = scan.body.outvars[ncarry:]

        def results(inner: Values) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            run(self.graph, self.steps[0], self.left, inner, self.crossing)
            ys = [read(inner, stacked[i]) for i in self.stacked], [inner[v] for v in self.crossing]
            return [read(inner, v) for v in scan.body.outvars[:ncarry]], ys

        carry, (kept, crossing) = _scan(scan, values, scan.body.invars, {}, results)
        values |= zip(scan.eqn.outvars[:ncarry], carry, strict=True)
        values |= zip((scan.eqn.outvars[ncarry + i] for i in self.stacked), kept, strict=True)
        values[self] = dict(zip(self.crossing, crossing, strict=True))

    def _run_backward(self, values: Values, run: Run) -> None:
        """Adds the results of the backward scan to `values`, computed from `values[self]`."""
        scan = self.backward

        def results(inner: Values) -> tuple[list[Any], list[Any]]:
            run(self.graph, self.steps[1], self.left, inner, ())
            found = [read(inner, v) for v in self.results]
            return found[: scan.ncarry], found[scan.ncarry :]

        invars = [None if v in self.links else v for v in scan.body.invars]
        carry, ys = _scan(scan, values, invars, values[self], results)
        values |= zip(scan.eqn.outvars, [*carry, *ys], strict=True)


def _pair(outer: Graph, forward: _Scan, backward: _Scan, plan: Plan) -> Pair | None:
    """Returns the pair of two scans of the graph `outer`; `plan` finds the groups. Returns None if the forward scan
    stacks nothing for the backward scan alone, if their lengths differ, if no epilog of the backward body reads an aux
    of the forward body, or if the forward body would need the backward body."""
    first, second, reader = forward.body, backward.body, {backward.index}
    stacked = list(zip(forward.eqn.outvars, first.outvars, strict=True))[forward.ncarry :]
    variables = [(v, inside) for v, inside in stacked if not jax_tracing.is_literal(inside)]
    whole_there = {v for v in backward.eqn.invars[: backward.xs.start] if not jax_tracing.is_literal(v)}
    read_there = {v: inside for v, inside in variables if set(outer.readers(v)) == reader and v not in whole_there}
    xs = zip(backward.eqn.invars[backward.xs], second.invars[backward.xs], strict=True)
    links = {inside: read_there[v] for v, inside in xs if _of(v, read_there)}
    if not links or forward.eqn.params["length"] != backward.eqn.params["length"]:
        return None
    of_backward = _constants(outer, backward)
    shared = set(map(id, of_backward.values()))
    of_forward = {v: eqn for v, eqn in _constants(outer, forward).items() if id(eqn) not in shared}
    names = links | {inside: eqn.outvars[0] for inside, eqn in (of_forward | of_backward).items()}
    makers, between = ({id(eqn): eqn for eqn in each.values()}.values() for each in (of_forward, of_backward))
    equations = [*makers, *(_renamed(eqn, names) for eqn in first.eqns)]
    count = len(equations)
    equations += [*between, *(_renamed(eqn, names) for eqn in second.eqns)]
    results = [v if jax_tracing.is_literal(v) else names.get(v, v) for v in second.outvars]
    linked = set(links.values())
    kept = [i for i, (v, inside) in enumerate(stacked) if v not in read_there or not _of(inside, linked)]
    own = [*first.outvars[: forward.ncarry], *(stacked[i][1] for i in kept)]
    whole = Graph(equations, [*own, *results])
    graph = Graph(whole.equations, whole.results, linked)
    groups, left = plan(graph, whole)

    def is_first(step: int | Group) -> bool:
        return (step if isinstance(step, int) else graph.last_product(step)) < count

    aux = {v for group in groups if is_first(group) for v in group.outputs}
    if not any(group.what == "gradient" and group.inputs[0] in aux and not is_first(group) for group in groups):
        return None
    later = [step for step in schedule(graph, groups, results) if not is_first(step)]
    made = {v for step in later for v in graph.outputs(step)} | {*second.invars, *second.constvars}
    needed = [v for step in later for v in graph.inputs(step)] + results
    crossing = [v for v in dict.fromkeys(v for v in needed if not jax_tracing.is_literal(v)) if v not in made]
    steps = schedule(graph, groups, [*own, *crossing]), later
    pair = Pair(forward, backward, links, graph, left, results, kept, crossing, steps)
    return pair if all(map(is_first, steps[0])) else None


def _scan(scan: _Scan, values: dict[Any, Any], invars: Sequence[Any], more: dict[Any, Any], results: Any) -> Any:
    """Runs a scan and returns (carry, stacked). `results`: computes (carry, stacked) of one step from a dictionary of
    values by variable. `more`: further arrays to scan over, by variable. `invars`: the body's variables, with None for
    operands that are not passed."""
    n, start = scan.nfixed, scan.xs.start
    operands = [None if v is None else read(values, x) for v, x in zip(invars, scan.eqn.invars, strict=True)]

    def step(carry: list[Any], xs: tuple[list[Any], list[Any]]) -> Any:
        inner = dict(zip(scan.body.constvars, scan.consts, strict=True))
        given = [*operands[:n], *carry, *xs[0]]
        inner |= {v: x for v, x in zip(invars, given, strict=True) if v is not None}
        return results(inner | dict(zip(more, xs[1], strict=True)))

    params = scan.eqn.params
    with jax_tracing.traced_as(scan.eqn):
        return lax.scan(
            step,
            operands[n:start],
            (operands[start:], list(more.values())),
            length=None if scan.eqn.invars[start:] else params["length"],  # lax.scan takes no symbolic length
            reverse=params["reverse"],
            unroll=params["unroll"],
        )


def _of(v: Any, found: Container[Any]) -> bool:
    return not jax_tracing.is_literal(v) and v in found


def _renamed(eqn: Any, names: dict[Any, Any]) -> Any:
    """Returns the equation with the operands that `names` has renamed."""
    return eqn.replace(invars=[v if jax_tracing.is_literal(v) else names.get(v, v) for v in eqn.invars])


def _constants(graph: Graph, scan: _Scan) -> dict[Any, Any]:
    """Returns, by the body's variable, the equation before a scan that makes a fixed operand from literals alone (a
    broadcast or a reshard). JAX moves these equations there, out of derivatives of activations."""
    found = {}
    for outside, inside in zip(scan.eqn.invars[: scan.nfixed], scan.body.invars, strict=False):
        eqn = graph.made_by(outside)
        if (
            eqn is not None
            and eqn.primitive.name in ("broadcast_in_dim", "reshard")
            and all(map(jax_tracing.is_literal, eqn.invars))
        ):
            found[inside] = eqn
    return found


def find_pairs(graph: Graph, plan: Plan) -> dict[int, Pair]:
    """Returns the pairs of scans (`_pair`), each under the indices of both scans. A scan is in at most one pair."""
    indices = [i for i, eqn in enumerate(graph.equations) if eqn.primitive.name == "scan" and not eqn.effects]
    if len(indices) < 2:
        return {}
    scans = {i: _Scan.of(graph, i) for i in indices if control_flow.has_products(graph.equations[i])}
    found: dict[int, Pair] = {}
    for j, backward in scans.items():
        xs = (v for v in backward.eqn.invars[backward.xs] if not jax_tracing.is_literal(v))
        for i in dict.fromkeys(map(graph.producer.get, xs)):
            if i in scans and not {i, j} & found.keys() and (pair := _pair(graph, scans[i], backward, plan)):
                found |= {i: pair, j: pair}
    return found
