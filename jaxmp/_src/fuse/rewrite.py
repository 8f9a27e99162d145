"""Evaluates a jaxpr with its products as calls of jaxmp."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxmp._src.core.spec.refusal import NotAvailable, Refusal
from jaxmp._src.fuse import control_flow, gathers, groups, held, loops, products, ragged, scaled
from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.graph import DERIVED, EXCHANGE, PRODUCTS, Graph, Group, UnknownError, read, schedule
from jaxmp._src.fuse.reasons import REASONS, SCOPE, name_of, raise_unless_fault, report, safely
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing


class Rewriter:
    """Evaluates the jaxprs of one traced function, and collects what does not keep the level."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._functions = control_flow.Functions(self.evaluate)
        self._depth = 0  # the number of nested jaxprs that are being evaluated
        self._around: list[Any] = []  # the equations around the one that is being evaluated
        self._lost: dict[str, None] = {}  # products that do not keep the level, with line and reason
        self._parted: dict[str, None] = {}  # other operations that do not keep the level, with line and remedy

    def evaluate(self, jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
        """Returns the results of a jaxpr. Equations that nothing reads run too. After the outermost jaxpr, raises
        NotImplementedError if `strict` and any product, sum or elementwise operation does not keep the level. Under a
        global order warns of operations with a `held.remedy`."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        graph = Graph.of(jaxpr)
        graph = Graph(graph.equations, [*graph.results, *graph.unread()])
        self._depth += 1
        try:
            graph, replaced, left = groups.grouped(graph, self.options)
            steps = schedule(graph, replaced, graph.results)
            find = functools.partial(groups.groups_of, options=self.options)
            pairs = safely(graph.equations, lambda: loops.find_pairs(graph, find)) or {}
            self._run(graph, steps, left, values, pairs=pairs)
        finally:
            self._depth -= 1
        if self._lost and not self._depth:
            lost, self._lost = "; ".join(self._lost), {}
            raise NotAvailable(
                f"fuse: {self.options.level.asked} does not hold for {lost}. Pass strict=False to leave these to JAX, "
                "with a warning"
            )
        if self._parted and not self._depth:
            parted, self._parted = "; ".join(self._parted), {}
            text = f"fuse: the bits of these operations of XLA may depend on the mesh: {parted}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return [read(values, v) for v in jaxpr.outvars]

    def _run(
        self,
        graph: Graph,
        steps: Sequence[int | Group],
        left: dict[int, str],
        values: dict[Any, Any],
        wanted: Collection[Any] = (),
        *,
        pairs: Mapping[int, loops.Pair] = types.MappingProxyType({}),
    ) -> None:
        """Evaluates steps in this order. Adds to `values` at least what is `wanted` and what later steps read. `left`:
        by index, why JAX computes a product. `pairs`: by the index of each scan that is in a pair, the pair."""
        wanted = {*wanted, *(v for step in steps if isinstance(step, Group) for v in step.variables)}
        evaluate = functools.partial(control_flow.evaluate, self._functions)
        for is_plain, segment in itertools.groupby(steps, lambda step: self._is_plain(graph, step)):
            if is_plain:
                graph.evaluate_plain([step for step in segment if isinstance(step, int)], values, wanted)
                continue
            for step in segment:
                if isinstance(step, Group):
                    self._group(graph, step, values)
                    continue
                eqn = graph.equations[step]
                if step in pairs and pairs[step].run(eqn, values, self._run, evaluate):
                    continue
                operands = [read(values, v) for v in eqn.invars]
                values |= zip(eqn.outvars, self._equation(eqn, operands, left.get(step, "")), strict=True)

    def _is_plain(self, graph: Graph, step: int | Group) -> bool:
        """True if JAX can evaluate a step as it is. False for groups, products, operations with products in their
        derivatives, narrow gathers, equations with jaxprs or effects, and at a level for primitives of other libraries
        and for equations that `held.is_held` or that have a `held.remedy`."""
        eqn = None if isinstance(step, Group) else graph.equations[step]
        if eqn is None or eqn.primitive.name in (*PRODUCTS, *DERIVED) or not jax_tracing.is_plain(eqn):
            return False
        if gathers.is_narrow(eqn):
            return False
        is_other = held.is_held(eqn) or held.remedy(eqn) or jax_tracing.implementation(eqn) is not None
        return not (self.options.level.fixed_order and is_other)

    def _group(self, graph: Graph, group: Group, values: dict[Any, Any]) -> None:
        """Evaluates a group by its call, and adds the results to `values`. If the call is refused, fails or gives other
        types, evaluates the group's equations instead (`_without`)."""
        last = graph.equations[graph.last_product(group)]
        try:
            with jax_tracing.traced_as(last):
                results = group.emit(*(jax_tracing.array_of(v, values) for v in group.inputs))
            for v, x in zip(group.outputs, results, strict=True):
                if not jax_tracing.is_type_of(v.aval, x):
                    raise NotAvailable(f"{v.aval} became {jax.typeof(x)}")
            values |= {v: _as_weak_as(v, x) for v, x in zip(group.outputs, results, strict=True)}
        except Exception as error:
            is_last = group.what == "bare" or not self.options.level.fixed_order
            self._without(graph, group, values, self._why_not(last, error, is_lost=is_last))

    def _without(self, graph: Graph, group: Group, values: dict[Any, Any], why: str) -> None:
        """Evaluates the equations that a group replaces, without its call. At a level, each product becomes a call of
        its own, unless the group was such a call already. JAX computes other products, with the reason `why` in their
        name stack. Raises UnknownError if an equation reads a value that another scan's body makes."""
        parts: list[Group] = []
        if self.options.level.fixed_order and group.what != "bare":
            dots = (i for i in group.equations if graph.equations[i].primitive.name == "dot_general")
            parts = [
                dataclasses.replace(groups.of_product(products.bare(graph, i), self.options), what="bare")
                for i in sorted(dots)
            ]
        steps = schedule(graph, parts, group.outputs, values)
        read_first = {v for step in steps for v in graph.inputs(step) if not jax_tracing.is_literal(v)}
        if not values.keys() >= read_first - graph.producer.keys():
            raise UnknownError("its equations read what the body of another scan reads")
        self._run(graph, steps, dict.fromkeys(group.equations, why), values)

    def _why_not(self, eqn: Any, error: Exception, *, is_lost: bool = True) -> str:
        """Returns the name of the reason why JAX gets an equation after `error`: that jaxmp refuses it, or "failed" for
        a fault of jaxmp. At a level, notes that the equation's products are lost, if `is_lost`. Warns of a fault
        without such a note. Raises an error of a run (`raise_unless_fault`)."""
        raise_unless_fault(error, [eqn])
        is_noted = is_lost and self._lose(eqn, _said_of(error))
        if isinstance(error, Refusal):
            return name_of(f"{REASONS['refused']}: {error}")
        if not is_noted:
            report([eqn], error)
        return "failed"

    def _lose(self, eqn: Any, why: str) -> bool:
        """At a level, notes (`_note_lost`) each product of an equation that JAX computes, as not keeping the level.
        Returns True if there are any."""
        found = control_flow.products_in(eqn) if self.options.level.fixed_order else []
        for product in found:
            self._note_lost("product", product, eqn, why=why)
        return bool(found)

    def _note_lost(self, what: str, *equations: Any, why: str) -> None:
        """Notes that JAX computes an operation, a `what`, which does not keep the level; if not `strict`, warns at
        once. `equations`: it and what is around it."""
        text = f"the {what} at {self._line(*equations)}: {why}"
        if self.options.strict:
            self._lost[text] = None
        else:
            warnings.warn(f"fuse: {self.options.level.asked} does not hold for {text}", RuntimeWarning, stacklevel=2)

    def _line(self, *equations: Any) -> str:
        """Returns the line of the innermost equation that has one, of `equations` and what is around; else "an unknown
        line"."""
        lines = map(jax_compat.traced_line, (*equations, *reversed(self._around)))
        return next(filter(None, lines), "an unknown line")

    def _of_its_own(self, eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], str]:
        """Returns (results of the call for a `ragged_dot_general` or `scaled_matmul`, ""). If there is no call, returns
        ([], the name of the reason), and at a level notes the product as lost."""
        is_ragged = eqn.primitive.name == "ragged_dot_general"
        if is_ragged and ragged.is_of_xla(eqn, self.options):
            self._lose(eqn, REASONS["groups"])
            return [], "groups"
        try:
            with jax_tracing.traced_as(eqn):
                return (ragged if is_ragged else scaled).call(eqn, self.options, operands), ""
        except Exception as error:
            return [], self._why_not(eqn, error)

    def _held(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of an equation that `is_held` in the form that keeps the level. If jaxmp refuses it or
        fails, notes the operation as lost, and JAX evaluates the equation."""
        with jax_tracing.traced_as(eqn):
            try:
                return [*map(_as_weak_as, eqn.outvars, held.evaluate(eqn, operands, self.options))]
            except Exception as error:
                raise_unless_fault(error, [eqn])
                name = eqn.primitive.name
                what = "sum" if name in ("reduce_sum", "cumsum", "scatter-add") else name
                self._note_lost(what, eqn, why=_said_of(error))
            return jax_tracing.evaluate(eqn, operands)

    def _equation(self, eqn: Any, operands: Sequence[Any], why: str) -> Sequence[Any]:
        """Returns the results of an equation that no group replaces and that is not `_is_plain`. `why`: why JAX
        computes it, which goes into the name stack of a product; "" if not known."""
        name = eqn.primitive.name
        if name in ("ragged_dot_general", "scaled_matmul_wrapper"):
            results, why = self._of_its_own(eqn, operands)
            if results:
                return results
        if name == "scaled_dot":
            self._lose(eqn, REASONS["blocks"])
        if name in (*PRODUCTS, *DERIVED):
            why = why or ("blocks" if name in PRODUCTS else "rule")
            with jax_tracing.traced_as(eqn), jax.named_scope(SCOPE + why):
                return jax_tracing.evaluate(eqn, operands)
        if self.options.level.global_order and (remedy := held.remedy(eqn)):
            self._parted[f"{name.removesuffix('_invariant')} at {self._line(eqn)} ({remedy})"] = None
        if self.options.level.fixed_order and held.is_held(eqn):
            return self._held(eqn, operands)
        with jax_tracing.traced_as(eqn):
            if gathers.is_narrow(eqn):
                return [gathers.gather_narrow(eqn, *operands)]
            if self.options.level.fixed_order and (program := control_flow.opened(eqn)):
                return self.evaluate(*program, *operands)
            more = held.HELD.union(held.PARTED) if self.options.level.fixed_order else ()
            if name not in ("custom_jvp_call", EXCHANGE) and not control_flow.has_products(eqn, more):
                weaker = control_flow.weaker_calls(eqn, self.options.level) if self.options.level.fixed_order else ()
                for spec in weaker:
                    why = f"the program calls jaxmp with {spec.level}; pass {self.options.level.asked} there"
                    self._note_lost("product", eqn, why=why)
                return jax_tracing.evaluate(eqn, operands)
            self._around.append(eqn)
            try:
                if name == EXCHANGE:
                    return ragged.exchange(eqn, operands)
                return control_flow.evaluate(self._functions, eqn, operands)
            except Exception as error:
                fault = error
            finally:
                self._around.pop()
            raise_unless_fault(fault, [eqn])
            with jax.named_scope(SCOPE + "inner"):
                results = jax_tracing.evaluate(eqn, operands)  # raises the errors of the user's own rules
            self._why_not(eqn, fault)
            return results


def _said_of(error: Exception) -> str:
    is_refusal = isinstance(error, Refusal)
    return f"jaxmp refuses it: {error}" if is_refusal else f"jaxmp fails on it ({error!r}); please report it"


def _as_weak_as(v: Any, x: jax.Array) -> jax.Array:
    """Returns `x` with the weak type of `v`, because the types of later operations depend on it."""
    weak: jax.Array = jax_compat.convert(x, x.dtype, v.aval.weak_type)
    return weak
