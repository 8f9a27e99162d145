"""Finds the equations that make and read each value of a jaxpr, and orders the steps of a rewritten jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import lax

from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.fuse.reasons import safely
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# Primitives that multiply matrices.
PRODUCTS = ("dot_general", "ragged_dot_general", "scaled_dot", "scaled_matmul_wrapper")
# Other primitives, with products in their derivatives.
DERIVED = ("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "householder_product", "triangular_solve")
# A collective that XLA has on accelerators only.
EXCHANGE = "ragged_all_to_all"
# Stands for the reader of a value that the jaxpr returns.
RESULT = -1
# Primitives that gather an operand, and primitives that may come between a gather and its product.
GATHERS = ("reshard", "all_gather")
PASSES = ("transpose", "convert_element_type", "pvary", "conj")


class UnknownError(Refusal):
    """A part of a program that stays as it is, because jaxmp cannot rewrite it."""


def dimension_numbers(eqn: Any) -> tuple[Any, Any, Sequence[int]]:
    """Returns a product's (contracted dimensions, batch dimensions, group dimensions of rhs: one matrix per group)."""
    if eqn.primitive.name == "scaled_matmul_wrapper":
        return ((2,), (2,)), ((0,), (0,)), ()
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return *eqn.params["dimension_numbers"], ()
    return *numbers.dot_dimension_numbers, numbers.rhs_group_dimensions


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Equations, by index, that one rewrite replaces. `emit` takes the values of `inputs` and returns the values of
    `outputs`. `what`: "product", "bare" (a product alone), "layers" or "gradient" (a product and gelu's derivative)."""

    equations: frozenset[int]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    emit: Callable[..., Sequence[Any]]
    what: str

    @property
    def variables(self) -> list[Any]:
        """The inputs that are not literals."""
        return [v for v in self.inputs if not jax_tracing.is_literal(v)]


def read(values: dict[Any, Any], v: Any) -> Any:
    """Returns `values[v]` for a variable, and a literal's value."""
    return v.val if jax_tracing.is_literal(v) else values[v]


class Graph:
    """The equations and results of a jaxpr, with the readers of each value.

    Searches stop at values of the `barrier`: `made_by` and `only_reader` return None for them.
    """

    def __init__(self, equations: Sequence[Any], results: Sequence[Any], barrier: Collection[Any] = ()) -> None:
        self.equations, self.results = list(equations), list(results)
        self._barrier = frozenset(barrier)
        self.producer: dict[Any, int] = {}
        self._readers: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.equations):
            self.producer |= dict.fromkeys(eqn.outvars, i)
            for v in eqn.invars:
                if not jax_tracing.is_literal(v):
                    self._readers.setdefault(v, []).append(i)
        for v in results:
            if not jax_tracing.is_literal(v):
                self._readers.setdefault(v, []).append(RESULT)

    @staticmethod
    def of(jaxpr: jax_compat.Jaxpr) -> Graph:
        """Returns the graph of a jaxpr."""
        return Graph(jaxpr.eqns, jaxpr.outvars)

    def made_by(self, v: Any) -> Any | None:
        """Returns the equation that makes a value; None for an argument, a literal or a value of the barrier."""
        if jax_tracing.is_literal(v) or v in self._barrier or v not in self.producer:
            return None
        return self.equations[self.producer[v]]

    def readers(self, v: Any) -> list[int]:
        """Returns the indices of a value's readers, one for each operand, and RESULT if the jaxpr returns it."""
        return self._readers.get(v, [])

    def only_reader(self, v: Any) -> int | None:
        """Returns the index of the only reader of a value; None if it has others, is a result or in the barrier."""
        readers = () if v in self._barrier else self.readers(v)
        return readers[0] if len(readers) == 1 and readers[0] != RESULT else None

    def unread(self) -> list[Any]:
        """Returns one value of each equation that has no readers, because checks and errors may depend on it."""
        unread = (eqn.outvars for eqn in self.equations if not any(map(self.readers, eqn.outvars)))
        return [v for outvars in unread for v in outvars[:1]]

    def inputs(self, step: int | Group) -> Sequence[Any]:
        """Returns the values that an equation or a group reads."""
        return step.inputs if isinstance(step, Group) else self.equations[step].invars

    def outputs(self, step: int | Group) -> Sequence[Any]:
        """Returns the values that an equation or a group computes."""
        return step.outputs if isinstance(step, Group) else self.equations[step].outvars

    def last_product(self, group: Group) -> int:
        """Returns the index of the last `dot_general` that a group replaces."""
        return max(i for i in group.equations if self.equations[i].primitive.name == "dot_general")

    def evaluate_plain(self, indices: Sequence[int], values: dict[Any, Any], wanted: Collection[Any]) -> None:
        """Evaluates plain equations, and adds to `values` at least each result that is `wanted` or that others read."""
        equations, inside = [self.equations[i] for i in indices], set(indices)
        made = (v for eqn in equations for v in eqn.outvars)
        outputs = [v for v in made if v in wanted or not inside.issuperset(self.readers(v))]
        jax_tracing.evaluate_plain(equations, outputs, values)

    def leaks(self, equations: frozenset[int], outputs: Sequence[Any]) -> bool:
        """True if a value of `equations` that is not in `outputs` is read by others or is a result of the graph."""
        return any(
            v not in outputs and not equations.issuperset(self.readers(v))
            for i in equations
            for v in self.equations[i].outvars
        )


def with_whole_collectives(graph: Graph, left: Collection[Any] = ()) -> Graph:
    """Returns the graph with each collective's start and done joined to one equation. Both stay if the result of done
    is in `left`, or if another equation reads start. Returns `graph` itself if there are none to join."""
    equations, joined = list[Any](), set[int]()
    for eqn in graph.equations:
        start: Any = graph.made_by(eqn.invars[0]) if eqn.primitive.name.endswith("_done") else None
        is_read_once = start is not None and graph.only_reader(start.outvars[0]) is not None
        whole = jax_tracing.without_start(start) if is_read_once and eqn.outvars[0] not in left else None
        equations.append(eqn if whole is None else whole.replace(outvars=eqn.outvars))
        joined |= {id(start)} if whole else set()
    return Graph([eqn for eqn in equations if id(eqn) not in joined], graph.results) if joined else graph


def each_in_place(graph: Graph, rule: Callable[[Any], Sequence[Any] | None]) -> Graph:
    """Returns the graph with each equation replaced by the equations that `rule` returns for it; `graph` itself if no
    equation is replaced. An equation stays if `rule` returns None, or fails, with a warning (`reasons.safely`)."""
    parts = [safely([eqn], functools.partial(rule, eqn)) for eqn in graph.equations]
    if not any(parts):
        return graph
    equations = (part or [eqn] for eqn, part in zip(graph.equations, parts, strict=True))
    return Graph(list(itertools.chain(*equations)), graph.results)


def without_batch_of_one(graph: Graph, eqn: Any) -> Sequence[Any] | None:
    """Returns equations that compute a `dot_general` without its batch, if all batch dimensions have extent 1: lhs's
    batch dimensions become rows, and rhs's are removed. Returns None for other equations, and if rhs is gathered: a
    call takes in that gather with the batch."""
    is_product = eqn.primitive.name == "dot_general"
    (contract, of_k), (batch, of_batch) = eqn.params["dimension_numbers"] if is_product else (((), ()),) * 2
    if not batch or any(eqn.invars[0].aval.shape[i] != 1 for i in batch):
        return None
    source = graph.made_by(eqn.invars[1])
    while source is not None and source.primitive.name in PASSES:
        source = graph.made_by(source.invars[0])
    if source is not None and source.primitive.name in GATHERS:
        return None

    def multiply(x: Any, y: Any) -> list[Any]:
        order = [*batch, *(i for i in range(x.ndim) if i not in batch)]
        of_x, of_y = map(order.index, contract), (i - sum(j < i for j in of_batch) for i in of_k)
        numbers = (tuple(of_x), tuple(of_y)), ((), ())
        operands = lax.transpose(x, order), lax.squeeze(y, of_batch)
        return list(jax_tracing.evaluate(eqn, operands, dimension_numbers=numbers))

    return spliced(eqn, multiply, eqn.invars)


def spliced(eqn: Any, program: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
    """Returns equations that compute `eqn.outvars` by `program` from the variables `operands`, to replace `eqn`.
    `program` may neither close over arrays nor return an argument or a literal; this is not checked."""
    with jax_tracing.traced_as(eqn):
        jaxpr, _ = jax_tracing.trace(program, [v.aval for v in operands])
    names = dict(zip((*jaxpr.invars, *jaxpr.outvars), (*operands, *eqn.outvars), strict=True))
    return [
        part.replace(
            invars=[v if jax_tracing.is_literal(v) else names.get(v, v) for v in part.invars],
            outvars=[names.get(v, v) for v in part.outvars],
        )
        for part in jaxpr.eqns
    ]


def schedule(
    graph: Graph, groups: Sequence[Group], results: Sequence[Any], known: Collection[Any] = ()
) -> list[int | Group]:
    """Returns the steps (indices of equations, and groups) that compute `results`, each after all that it reads, else
    in the program's order. Values in `known` need no step. Without `known` all equations with effects are steps too. A
    group replaces the equations that make its outputs."""
    makers: dict[Any, int | Group] = graph.producer | {v: group for group in groups for v in group.outputs}

    def made(values: Sequence[Any]) -> list[int | Group]:
        """Returns the step that makes each value, repeats included. Literals, known values and inputs have none."""
        return [makers[v] for v in values if not jax_tracing.is_literal(v) and v not in known and v in makers]

    def after_inputs(steps: Sequence[int | Group]) -> list[int | Group]:
        """Returns these steps and all that they need, depth first. No recursion, because a jaxpr may be long."""
        order: list[int | Group] = []
        entered: set[int | Group] = set()
        done: set[int | Group] = set()
        stack = list(steps[::-1])
        while stack:
            step = stack[-1]
            if step not in entered:
                entered.add(step)
                stack += [each for each in made(graph.inputs(step)) if each not in done][::-1]
                continue
            stack.pop()
            if step not in done:
                done.add(step)
                order.append(step)
        return order

    def place(step: int | Group) -> int:
        """Returns a step's place in the program: an equation's index, or a group's last product or input."""
        if isinstance(step, int):
            return step
        return max([graph.last_product(step), *(graph.producer.get(v, -1) for v in step.variables)])

    effects: list[int | Group] = (
        [] if known else [i for i, eqn in enumerate(graph.equations) if jax_tracing.has_effects(eqn)]
    )
    return after_inputs(sorted(after_inputs(made(results) + effects), key=place))
