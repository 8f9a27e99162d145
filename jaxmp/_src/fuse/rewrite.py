"""Evaluates a jaxpr with its products as calls of jaxmp."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.lowering import decide
from jaxmp._src.core.lowering.backend import LARGE_IN_BATCH
from jaxmp._src.core.spec import levels, low_precision
from jaxmp._src.core.spec.refusal import NotAvailable, Refusal
from jaxmp._src.fuse import control_flow, emit, gathers, held, layers, loops, products, ragged, scaled, templates
from jaxmp._src.fuse.between import Between
from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.graph import (
    DERIVED,
    EXCHANGE,
    PRODUCTS,
    Graph,
    Group,
    UnknownError,
    read,
    schedule,
    with_whole_collectives,
    without_batches_of_one,
)
from jaxmp._src.fuse.operands import is_auto
from jaxmp._src.fuse.products import Product
from jaxmp._src.fuse.templates import GELU, Match, gelu_cotangent
from jaxmp._src.fuse.weights import with_narrow_weights
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

Result = TypeVar("Result")

# The reasons why JAX computes a product: part of its name stack, where `explain` reads them.
SCOPE = "jaxmp_left_"
REASONS = {
    "local": "its function has no gather before it, nor a sum over ranks after it, that a call takes in, and XLA's own "
    "product is as fast",
    "batch": "it has a batch, which XLA multiplies, and no call takes in the collectives next to it",
    "groups": "it multiplies groups of rows (lax.ragged_dot), which XLA does here in a call too: elsewhere than on CPU "
    f"devices, and under {levels.GLOBAL_ORDER.asked} where its partitioner chooses the shardings",
    "blocks": "it multiplies blocks with scales (lax.scaled_dot), which no call does",
    "rule": "JAX makes it in the derivative of another operation, such as a function of jnp.linalg",
    "gathered": "its gathered operand is needed elsewhere too, so the gather stays, and the product is local",
    "gather": "no call gathers its operand in this way (tiled=False, a reshape after it, groups of ranks, a batch, a "
    "dimension between others), so the gather stays, and the product is local",
    "shared": "other products read its gathered operand too, and one gather for all, with local products, takes less "
    "time than calls that each gather (docs/cost.md)",
    "summed": "it is added to other values before the collective that sums all of them over the ranks",
    "type": "its types have no kernel of jaxmp's",
    "inner": "it is within an operation that is left as it is",
    "failed": "jaxmp fails on it, by a fault of its own; please report it",
    "refused": "jaxmp refuses these operands, shardings or options",
}


# Notes on the pattern of a call: part of its name stack.
NOTE = "jaxmp_note_"
NOTES = {
    "again": "gathers in its call what other products gather too, because one gather before all of them takes longer "
    "(docs/cost.md)",
    "shared": "its operand is gathered before it, once for several products, which takes less time than calls that "
    "each gather (docs/cost.md)",
}


# Reasons with details, by their names in a name stack.
_details: dict[str, str] = {}


def notes_in(names: Sequence[str]) -> list[str]:
    """Returns the notes on a call, in words, that these name stacks hold."""
    found = dict.fromkeys(re.findall(NOTE + "([a-z0-9]+)", "/".join(names)))
    return [NOTES.get(key) or _details[key] for key in found]


def reason_in(names: Sequence[str]) -> str:
    """Returns the reason, in words, that the innermost of these name stacks holds."""
    name: str = re.findall(SCOPE + "([a-z0-9]+)", "/".join(names))[-1]
    return REASONS.get(name) or _details[name]


def _name_of(reason: str) -> str:
    """Returns the name of a reason in a name stack."""
    name = "of" + hashlib.sha256(reason.encode()).hexdigest()[:10]
    _details[name] = reason
    return name


def _name_of_refusal(error: Exception) -> str:
    return _name_of(f"{REASONS['refused']}: {error}")


class Rewriter:
    """Evaluates the jaxprs of one traced function."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._functions = control_flow.Functions(self.evaluate)
        self._depth = 0  # the number of nested jaxprs that are being evaluated
        self._around: list[Any] = []  # the equations around the one that is being evaluated
        self._lost: dict[str, None] = {}  # products that do not keep the level, with line and reason
        self._parted: dict[str, None] = {}  # other operations that do not keep the level, with line and remedy

    def evaluate(self, jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
        """Returns the results of a jaxpr."""
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        return self.results(Graph.of(jaxpr), known)

    def results(self, graph: Graph, known: dict[Any, Any]) -> list[Any]:
        """Returns the results of a graph. `known`: the values of its arguments and constants.

        Raises NotImplementedError for products that do not keep the level.
        """
        values, results = dict(known), graph.results
        graph = Graph(graph.equations, [*results, *graph.unread()])
        self._depth += 1
        try:
            graph, groups, left = self._found(graph)
            steps = schedule(graph, groups, graph.results)
            pairs = self._safely(graph.equations, lambda: loops.find_pairs(graph, self._groups)) or {}
            self._run(graph, steps, left, values, pairs=pairs)
        finally:
            self._depth -= 1
        if self._lost and not self._depth:
            lost, self._lost = list(self._lost), {}
            what = "sum" if all(text.startswith("the sum") for text in lost) else "product"
            raise NotAvailable(
                f"fuse: {self.options.level.asked} does not hold for {len(lost)} {what}{'s' if lost[1:] else ''}: "
                f"{'; '.join(lost)}. Pass strict=False to leave {'them' if lost[1:] else 'it'} to JAX, with a warning"
            )
        if self._parted and not self._depth:
            parted, self._parted = "; ".join(self._parted), {}
            text = f"fuse: the bits of these operations of XLA may depend on the mesh: {parted}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return [read(values, v) for v in results]

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
        """Evaluates steps in this order. Adds to `values` what later steps read or is `wanted` later. `pairs`: pairs
        of scans, by the index of each scan."""
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
        """True if a step is an equation that the rewriter evaluates as it is.

        Groups, products, narrow gathers and equations with jaxprs are not; at a level, nor are held ones.
        """
        eqn = None if isinstance(step, Group) else graph.equations[step]
        if eqn is None or eqn.primitive.name in (*PRODUCTS, *DERIVED) or not jax_tracing.is_plain(eqn):
            return False
        if gathers.is_narrow(eqn):
            return False
        return not (self.options.level.fixed_order and (held.is_held(eqn) or held.parts(eqn)))

    # ---- what is replaced

    def _found(self, graph: Graph) -> tuple[Graph, list[Group], dict[int, str]]:
        """Returns (the graph with whole collectives where a group takes them in, the groups, why others have none)."""

        def found(left: Collection[Any]) -> tuple[Graph, list[Group], dict[int, str]]:
            whole = without_batches_of_one(with_whole_collectives(graph, left), self._safely)
            whole = with_narrow_weights(whole, self.options, self._safely)
            return whole, *self._groups(whole, whole)

        whole, groups, why = found(())
        if not any(map(jax_tracing.without_start, graph.equations)):
            return whole, groups, why
        inside = {i for group in groups for i in group.equations}
        reasons = {whole.equations[i].outvars[0]: reason for i, reason in why.items()}
        graph, groups, why = found({v for i, eqn in enumerate(whole.equations) if i not in inside for v in eqn.outvars})
        return graph, groups, {i: reasons.get(graph.equations[i].outvars[0], reason) for i, reason in why.items()}

    def _groups(self, graph: Graph, whole: Graph) -> tuple[list[Group], dict[int, str]]:
        """Returns (what is replaced, why other products are not, by index). `whole`: the graph without barriers."""
        dots = [i for i, eqn in enumerate(graph.equations) if eqn.primitive.name == "dot_general"]
        if not dots:
            return [], {}
        manual, of_dots = bool(jax_tracing.manual_axes()), [graph.equations[i] for i in dots]
        choice = self._safely(of_dots, lambda: gathers.choose(graph, dots, self.options.implementation))
        choice = choice or gathers.Choice()
        find = functools.partial(products.product_at, graph, epilogs=self.options.epilogs, manual=manual)
        found = [
            self._safely([eqn], functools.partial(find, i, choice.taken)) or products.bare(graph, i)
            for i, eqn in zip(dots, of_dots, strict=True)
        ]
        groups, between = list[Group](), Between(graph)
        if self.options.epilogs and not manual:
            groups += self._safely(of_dots, lambda: layers.find_layers(graph, found, self.options)) or []
            groups += self._safely(of_dots, lambda: self._pairs(whole, found)) or []
        taken = {i for group in groups for i in group.equations}
        made = {v for group in groups for v in group.outputs}
        left: dict[int, str] = {}
        for product in found:
            if product.index in taken:
                continue
            has_no_epilog = product.activation not in (None, "relu", "gelu")  # no single product has this epilog
            if product.before is not None and (has_no_epilog or product.result in made):  # another call adds the two
                product = product.before
            why = self._why_left(product)
            if why in ("local", "batch"):
                why = choice.why.get(product.index, "summed" if products.is_summed_with_others(graph, product) else why)
            if why == "local" and (text := between.reason(product)):
                why = _name_of(text)
            if why is None:
                note = "again" if product.index in choice.again else choice.why.get(product.index, "")
                if note not in NOTES:
                    note = _name_of(text) if manual and (text := between.reason(product)) else ""
                groups.append(self._product(product, note))
                made |= {product.result}
            else:
                left[product.index] = why
        return groups, left

    def _product(self, product: Product, note: str = "") -> Group:
        """Builds the group of a product's call. `note`: the name of a note on the call, or ""."""
        call = functools.partial(emit.call, product, self.options)
        call = jax.named_scope(NOTE + note)(call) if note else call
        return Group(product.equations, emit.inputs(product), emit.outputs(product), call, "product")

    def _pairs(self, graph: Graph, found: Sequence[Product]) -> list[Group]:
        """Pairs each product before gelu with the product before gelu's derivative. The first call returns the aux that
        the epilog of the second call reads."""
        groups: list[Group] = []
        firsts = (p for p in found if p.is_matrix and not p.activation and p.c is None and p.alpha is None)
        plain = (p for p in found if p.is_matrix and not (p.epilog or p.collective or p.alpha))
        seconds = {product.result: product for product in plain}
        cotangents = frozenset(seconds)
        for forward in firsts:
            match = templates.find_activation(graph, GELU, forward.result)
            back = match and templates.find_cotangent(graph, gelu_cotangent, match, cotangents)
            if match is None or back is None:
                continue
            backward = seconds[back.arguments[1]]
            pair = _pair(graph, forward, match, backward, back)
            if pair is None or backward is forward:
                continue
            kept, after = pair
            call, inputs = functools.partial(emit.gradient, after, self.options), emit.inputs(after)
            gradient = Group(after.equations, (kept.preactivation, *inputs), (after.result,), call, "gradient")
            groups += [self._product(kept), gradient]
        return groups

    def _why_left(self, product: Product) -> str | None:
        """Returns why JAX computes a product (a key of REASONS); None if the product becomes a call."""
        dtypes = product.lhs.dtype, product.rhs.dtype
        is_int8 = set(dtypes) == {np.dtype("int8")}
        if not is_int8 and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
            return "type"
        if self.options.level.fixed_order or product.communicates:
            return None
        if product.lhs.batch:
            return "batch"
        if is_auto(product.lhs.value.aval):
            return None
        # On CPUs XLA multiplies these more slowly, by far if int8 sums wrap. It converts narrow weights in memory.
        has_16_bits = any(dtype.itemsize == 2 for dtype in dtypes)
        is_narrow = product.is_matrix and (product.dtype == np.int8 or has_16_bits)
        is_weak = any(operand.value.aval.weak_type for operand in (product.lhs, product.rhs))  # JAX's cotangent is not
        is_mixed = low_precision.is_mixed(*dtypes) and product.lhs.is_flat and product.rhs.is_flat and not is_weak
        is_faster = is_narrow or is_mixed or _gains_by_symmetry(product)
        return None if is_faster or product.activation in ("relu", "gelu") else "local"

    # ---- evaluation

    def _group(self, graph: Graph, group: Group, values: dict[Any, Any]) -> None:
        """Evaluates a group by its call. If that fails, JAX evaluates the group's equations; under a level, calls still
        compute the products alone."""
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
        """Evaluates the equations that a group replaces, without its call."""
        parts: list[Group] = []
        if self.options.level.fixed_order and group.what != "bare":
            dots = (i for i in group.equations if graph.equations[i].primitive.name == "dot_general")
            parts = [dataclasses.replace(self._product(products.bare(graph, i)), what="bare") for i in sorted(dots)]
        steps = schedule(graph, parts, group.outputs, values)
        read_first = {v for step in steps for v in graph.inputs(step) if not jax_tracing.is_literal(v)}
        if not values.keys() >= read_first - graph.producer.keys():
            raise UnknownError("its equations read what the body of another scan reads")
        self._run(graph, steps, dict.fromkeys(group.equations, why), values)

    def _why_not(self, eqn: Any, error: Exception, *, is_lost: bool = True) -> str:
        """Returns the name of the reason why JAX gets an equation after an error. `is_lost`: notes products as lost."""
        _check_is_fault(error, [eqn])
        if isinstance(error, Refusal):
            if is_lost:
                self._lose(eqn, f"jaxmp refuses it: {error}")
            return _name_of_refusal(error)
        if is_lost and self.options.level.fixed_order and any(control_flow.products_in(eqn)):
            self._lose(eqn, f"jaxmp fails on it ({error!r}); please report it")
        else:
            _report([eqn], error)
        return "failed"

    def _lose(self, eqn: Any, why: str) -> None:
        """Notes that JAX computes the products of an equation, so that they do not keep the level."""
        if not self.options.level.fixed_order:
            return
        for product in control_flow.products_in(eqn):
            self._lose_one("product", product, eqn, why=why)

    def _lose_one(self, what: str, *equations: Any, why: str) -> None:
        """Notes that JAX computes a product or a sum. `equations`: it and what is around it."""
        text = f"the {what} at {self._line(*equations)}: {why}"
        if self.options.strict:
            self._lost[text] = None
        else:
            warnings.warn(f"fuse: {self.options.level.asked} does not hold for {text}", RuntimeWarning, stacklevel=2)

    def _line(self, *equations: Any) -> str:
        """Returns the line of the first equation that has one. `equations`: an equation and what is around it."""
        lines = map(jax_compat.traced_line, (*equations, *reversed(self._around)))
        return next(filter(None, lines), "an unknown line")

    def _safely(self, equations: Sequence[Any], analyze: Callable[[], Result]) -> Result | None:
        """Returns the result of an analysis of equations. Warns and returns None if it fails by a fault of jaxmp."""
        try:
            return analyze()
        except Exception as error:
            _report(equations, error)
            return None

    def _of_its_own(self, eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], str]:
        """Returns (results of the call for a product other than `dot_general`, ""), or ([], why there is no call)."""
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
        """Returns the results of a sum or an elementwise operation, in the form that keeps the level."""
        with jax_tracing.traced_as(eqn):
            try:
                return [*map(_as_weak_as, eqn.outvars, held.evaluate(eqn, operands, self.options))]
            except Exception as error:
                _check_is_fault(error, [eqn])
                why = "jaxmp refuses it" if isinstance(error, Refusal) else "jaxmp fails on it; please report it"
                self._lose_one("sum", eqn, why=f"{why}: {error}")
            return jax_tracing.evaluate(eqn, operands)

    def _equation(self, eqn: Any, operands: Sequence[Any], why: str) -> Sequence[Any]:
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
        if self.options.level.fixed_order and held.is_held(eqn):
            return self._held(eqn, operands)
        if self.options.level.global_order and held.parts(eqn):
            self._parted[f"{name.removesuffix('_invariant')} at {self._line(eqn)} ({held.PARTED[name]})"] = None
        with jax_tracing.traced_as(eqn):
            if gathers.is_narrow(eqn):
                return [gathers.as_bytes(eqn, *operands)]
            more = held.HELD.union(held.PARTED) if self.options.level.fixed_order else ()
            if name not in ("custom_jvp_call", EXCHANGE) and not control_flow.has_products(eqn, more):
                weaker = control_flow.weaker_calls(eqn, self.options.level) if self.options.level.fixed_order else ()
                for spec in weaker:
                    why = f"the program calls jaxmp with {spec.level}; pass {self.options.level.asked} there"
                    self._lose_one("product", eqn, why=why)
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
            _check_is_fault(fault, [eqn])
            with jax.named_scope(SCOPE + "inner"):
                results = jax_tracing.evaluate(eqn, operands)  # raises the errors of the user's own rules
            self._why_not(eqn, fault)
            return results


def _check_is_fault(error: Exception, equations: Sequence[Any] = ()) -> None:
    """Raises an error that is neither a refusal nor a fault of jaxmp, because a run that failed, perhaps in one process
    of several, cannot be repeated. Neither can effects: with such equations, raises every error but a refusal."""
    if isinstance(error, Refusal):
        return
    is_of_a_run = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    is_other = is_of_a_run or isinstance(error, Warning | FloatingPointError)
    if is_other or any(map(jax_tracing.has_effects, equations)):
        raise error


def _report(equations: Sequence[Any], error: Exception) -> None:
    """Warns of a fault of jaxmp."""
    _check_is_fault(error)
    lines = [line for line in dict.fromkeys(map(jax_compat.traced_line, equations)) if line]
    warnings.warn(
        f"jaxmp.fuse fails on a part of the program and leaves it as it is ({error!r}, at "
        f"{', '.join(lines[:3]) or 'an unknown line'}); please report it",
        RuntimeWarning,
        stacklevel=2,
    )


def _gains_by_symmetry(product: Product) -> bool:
    """True if it is a large matrix times its transpose on CPUs, because hostmp computes only half of the result."""
    shape = product.lhs.value.aval.shape
    work = 2 * math.prod(shape) * math.prod(shape[i] for i in product.lhs.free)
    is_large = isinstance(work, int) and work >= LARGE_IN_BATCH
    return product.is_symmetric and is_large and decide.here().platform == "cpu"


def _as_weak_as(v: Any, x: jax.Array) -> jax.Array:
    """Returns `x` with the weak type of `v`, because the types of later operations depend on it."""
    weak: jax.Array = jax_compat.convert(x, x.dtype, v.aval.weak_type)
    return weak


def _pair(
    graph: Graph, forward: Product, match: Match, backward: Product, back: Match
) -> tuple[Product, Product] | None:
    """Returns (the first product up to its activation, the second product with the derivative after it), or None if
    other equations read a value that neither returns."""
    both = match.equations | back.equations
    if graph.leaks(both, (match.output, back.output)) or not both.issuperset(graph.readers(backward.result)):
        return None
    kept = dataclasses.replace(
        forward,
        result=match.output,
        equations=forward.equations | both - back.equations | back.equations & match.equations,
        activation="gelu",
        preactivation=forward.result,
    )
    after = dataclasses.replace(backward, result=back.output, equations=backward.equations | back.equations)
    return kept, after
