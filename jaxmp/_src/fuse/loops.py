"""A scan and the scan of its backward pass, of which the second reads what the first has stacked.

JAX stacks what the derivative of an activation needs: of gelu three or four arrays, of relu a mask. Taken as one graph,
in which the second body reads the values of the first, the two bodies show a product with its activation and the
product with the derivative behind it. The first then stacks the aux of its epilog, and the second reads that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax import lax

from jaxmp._src.fuse import control_flow
from jaxmp._src.fuse.graph import Graph, Group, schedule
from jaxmp._src.runtime import jax_compat, jax_tracing

if TYPE_CHECKING:
    from jaxmp._src.fuse.rewrite import Rewriter


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan equation: its body with constants, and how many operands are the same in each step, and carried."""

    eqn: Any
    body: jax_compat.Jaxpr
    consts: Sequence[Any]
    nfixed: int
    ncarry: int

    @staticmethod
    def of(eqn: Any) -> _Scan:
        body, consts = jax_tracing.open_jaxpr(eqn.params["jaxpr"])
        return _Scan(eqn, body, consts, *jax_compat.scan_counts(eqn))

    @property
    def xs(self) -> slice:
        """Of the operands, what is scanned over."""
        return slice(self.nfixed + self.ncarry, None)


class Pair:
    """A forward and a backward scan, the graph of both bodies, and what of it is replaced."""

    def __init__(
        self, forward: _Scan, backward: _Scan, links: dict[Any, Any], constants: tuple[dict[Any, Any], dict[Any, Any]]
    ) -> None:
        self._forward, self._backward, self._links = forward, backward, links
        self._constants = constants
        self._stacked: dict[Any, Any] | None = None
        self._crossing: list[Any] = []
        self._has_failed = False

    def plan(self, rewriter: Rewriter, stacked_elsewhere: set[Any]) -> bool:
        """Whether an epilog of the backward body reads an aux of the forward one."""
        first, second = self._forward.body, self._backward.body
        names = self._links | {inside: eqn.outvars[0] for each in self._constants for inside, eqn in each.items()}
        ahead, between = ({id(eqn): eqn for eqn in each.values()}.values() for each in self._constants)
        equations = [*ahead, *(_renamed(eqn, names) for eqn in first.eqns)]
        self._count = len(equations)
        equations += [*between, *(_renamed(eqn, names) for eqn in second.eqns)]
        self._results = [v if jax_tracing.is_literal(v) else names.get(v, v) for v in second.outvars]
        linked = set(self._links.values())
        carried, stacked = first.outvars[: self._forward.ncarry], first.outvars[self._forward.ncarry :]
        self._kept = [i for i, v in enumerate(stacked) if _of(v, stacked_elsewhere) or not _of(v, linked)]
        own = [*carried, *(stacked[i] for i in self._kept)]
        whole = Graph(equations, [*own, *self._results])
        self._graph = Graph(whole.equations, whole.results, linked)
        groups, self._left = rewriter.safe_groups_of(self._graph, whole)
        if not any(group.what == "gradient" and self._is_across(group, groups) for group in groups):
            return False
        steps = schedule(self._graph, groups, self._results)
        self._second = [step for step in steps if not self._is_first(step)]
        made = {v for step in self._second for v in self._outputs(step)} | {*second.invars, *second.constvars}
        needed = [v for step in self._second for v in self._inputs(step)] + self._results
        self._crossing = [v for v in dict.fromkeys(v for v in needed if not jax_tracing.is_literal(v)) if v not in made]
        self._first = schedule(self._graph, groups, [*own, *self._crossing])
        return all(map(self._is_first, self._first))

    def _is_first(self, step: int | Group) -> bool:
        """Whether a step is one of the forward body."""
        if isinstance(step, int):
            return step < self._count
        dots = [i for i in step.equations if self._graph.equations[i].primitive.name == "dot_general"]
        return max(dots) < self._count

    def _is_across(self, group: Group, groups: Sequence[Group]) -> bool:
        kept = next(other for other in groups if group.inputs[0] in other.outputs)
        return self._is_first(kept) and not self._is_first(group)

    def _inputs(self, step: int | Group) -> Sequence[Any]:
        return step.inputs if isinstance(step, Group) else self._graph.equations[step].invars

    def _outputs(self, step: int | Group) -> Sequence[Any]:
        return step.outputs if isinstance(step, Group) else self._graph.equations[step].outvars

    # Evaluation --------------------------------------------------------------------------------------------------

    def run(self, rewriter: Rewriter, eqn: Any, values: dict[Any, Any]) -> bool:
        """Evaluates one of the two scans into `values`; False where it has to be evaluated as any other."""
        if self._has_failed:
            return False
        try:
            if eqn is self._forward.eqn:
                self._run_forward(rewriter, values)
            else:
                self._run_backward(rewriter, values)
            return True
        except (TypeError, ValueError, NotImplementedError, KeyError):
            self._has_failed = True
            if eqn is self._backward.eqn:  # which needs what JAX's own forward scan stacks
                forward = self._forward.eqn
                operands = [_read(values, v) for v in forward.invars]
                with jax_tracing.traced_as(forward):
                    values |= zip(forward.outvars, control_flow.evaluate(rewriter, forward, operands), strict=True)
            return False

    def _run_forward(self, rewriter: Rewriter, values: dict[Any, Any]) -> None:
        scan = self._forward
        ncarry = scan.ncarry
        stacked = scan.body.outvars[ncarry:]

        def results(inner: dict[Any, Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            rewriter.run(self._graph, self._first, self._left, inner)
            ys = [_read(inner, stacked[i]) for i in self._kept], [inner[v] for v in self._crossing]
            return [_read(inner, v) for v in scan.body.outvars[:ncarry]], ys

        carry, (kept, crossing) = _scan(scan, values, scan.body.invars, {}, results)
        values |= zip(scan.eqn.outvars[:ncarry], carry, strict=True)
        values |= zip((scan.eqn.outvars[ncarry + i] for i in self._kept), kept, strict=True)
        self._stacked = dict(zip(self._crossing, crossing, strict=True))

    def _run_backward(self, rewriter: Rewriter, values: dict[Any, Any]) -> None:
        assert self._stacked is not None
        scan = self._backward

        def results(inner: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
            rewriter.run(self._graph, self._second, self._left, inner)
            found = [_read(inner, v) for v in self._results]
            return found[: scan.ncarry], found[scan.ncarry :]

        invars = [None if v in self._links else v for v in scan.body.invars]
        carry, ys = _scan(scan, values, invars, self._stacked, results)
        values |= zip(scan.eqn.outvars, [*carry, *ys], strict=True)


def _scan(scan: _Scan, values: dict[Any, Any], invars: Sequence[Any], more: dict[Any, Any], results: Any) -> Any:
    """The results of a scan whose body gives `results` of its variables; `more` is scanned over too."""
    n, start = scan.nfixed, scan.xs.start
    operands = [None if v is None else _read(values, x) for v, x in zip(invars, scan.eqn.invars, strict=True)]

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
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )


def _of(v: Any, found: set[Any]) -> bool:
    return not jax_tracing.is_literal(v) and v in found


def _read(values: dict[Any, Any], v: Any) -> Any:
    return v.val if jax_tracing.is_literal(v) else values[v]


def _renamed(eqn: Any, names: dict[Any, Any]) -> Any:
    """An equation that reads other variables."""
    return eqn.replace(invars=[v if jax_tracing.is_literal(v) else names.get(v, v) for v in eqn.invars])


def _constants(graph: Graph, scan: _Scan) -> dict[Any, Any]:
    """Variables of a body that are constants, with the equations ahead of the scan that make them: JAX moves them
    there, out of derivatives of activations."""
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


def find(rewriter: Rewriter, graph: Graph) -> dict[int, Pair]:
    """The pairs of scans of which the second reads an aux of the first, by the index of either."""
    indices = [i for i, eqn in enumerate(graph.equations) if eqn.primitive.name == "scan" and not eqn.effects]
    if len(indices) < 2:
        return {}
    scans = {i: _Scan.of(graph.equations[i]) for i in indices if control_flow.has_products(graph.equations[i])}
    found: dict[int, Pair] = {}
    for j, backward in scans.items():
        outer, inner = backward.eqn.invars[backward.xs], backward.body.invars[backward.xs]
        makers = [None if jax_tracing.is_literal(v) else graph.producer.get(v) for v in outer]
        for i in dict.fromkeys(makers):
            if i not in scans or i in found or j in found:
                continue
            forward = scans[i]
            if forward.eqn.params["length"] != backward.eqn.params["length"]:
                continue
            bodies = dict(zip(forward.eqn.outvars, forward.body.outvars, strict=True))
            links, elsewhere = {}, set()
            for outside, inside, maker in zip(outer, inner, makers, strict=True):
                is_stacked = maker == i and outside in forward.eqn.outvars[forward.ncarry :]
                if is_stacked and not jax_tracing.is_literal(bodies[outside]) and set(graph.readers(outside)) == {j}:
                    links[inside] = bodies[outside]
            linked = set(links.values())
            for outside, inside in list(bodies.items())[forward.ncarry :]:
                if _of(inside, linked) and set(graph.readers(outside)) - {j}:
                    elsewhere.add(inside)
            behind = _constants(graph, backward)
            shared = set(map(id, behind.values()))
            ahead = {v: eqn for v, eqn in _constants(graph, forward).items() if id(eqn) not in shared}
            pair = Pair(forward, backward, links, (ahead, behind))
            if links and pair.plan(rewriter, elsewhere):
                found |= {i: pair, j: pair}
    return found
