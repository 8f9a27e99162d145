"""Who makes and who reads each value of a jaxpr, and the parts of it that a rewrite replaces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import lax

from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# Primitives that multiply matrices.
PRODUCTS = ("dot_general", "ragged_dot_general", "scaled_dot", "scaled_matmul_wrapper")
# Others, with products in their derivatives.
DERIVED = ("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "householder_product", "triangular_solve")
# A collective that XLA has on accelerators alone.
EXCHANGE = "ragged_all_to_all"
# The reader of what a jaxpr returns.
RESULT = -1
# What gathers an operand, and what may stand between it and the product.
GATHERS = ("reshard", "all_gather")
PASSES = ("transpose", "convert_element_type", "pvary", "conj")


# What a function gives that reads these equations, or None where it fails.
Safely = Callable[[Sequence[Any], Callable[[], Any]], Any]


class UnknownError(Refusal):
    """A part of a program that stays as it is, since nobody knows what it does."""


def dimension_numbers(eqn: Any) -> tuple[Any, Any, Sequence[int]]:
    """(contracted dimensions, those of the batch, those of rhs by which groups of rows choose their matrix)."""
    if eqn.primitive.name == "scaled_matmul_wrapper":
        return ((2,), (2,)), ((0,), (0,)), ()
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return *eqn.params["dimension_numbers"], ()
    return *numbers.dot_dimension_numbers, numbers.rhs_group_dimensions


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Equations that one rewrite replaces, by index.

    `emit` takes the values of `inputs` and gives those of `outputs`. `what` says in a word what it becomes.
    """

    equations: frozenset[int]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    emit: Callable[..., Sequence[Any]]
    what: str

    @property
    def variables(self) -> list[Any]:
        """The inputs that are no literals."""
        return [v for v in self.inputs if not jax_tracing.is_literal(v)]


def read(values: dict[Any, Any], v: Any) -> Any:
    """What a variable of a jaxpr, or a literal, stands for."""
    return v.val if jax_tracing.is_literal(v) else values[v]


class Graph:
    """Equations with their readers, and what they return.

    Over values of the `barrier` nobody looks back, nor ahead: `made_by` and `only_reader` do not know them.
    """

    def __init__(self, equations: Sequence[Any], results: Sequence[Any], barrier: Collection[Any] = ()) -> None:
        self.equations, self.results = list(equations), list(results)
        self._barrier = frozenset(barrier)
        self.matches: dict[Any, Any] = {}  # of `templates`, by what was looked for
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
        """The graph of a jaxpr."""
        return Graph(jaxpr.eqns, jaxpr.outvars)

    def made_by(self, v: Any) -> Any | None:
        """The equation that makes a value; None of an argument and of a literal."""
        if jax_tracing.is_literal(v) or v in self._barrier or v not in self.producer:
            return None
        return self.equations[self.producer[v]]

    def readers(self, v: Any) -> list[int]:
        """Indices of the equations that read a value, once for each operand; RESULT where the jaxpr returns it."""
        return self._readers.get(v, [])

    def only_reader(self, v: Any) -> int | None:
        """The index of the one equation that reads a value, or None."""
        readers = () if v in self._barrier else self.readers(v)
        return readers[0] if len(readers) == 1 and readers[0] != RESULT else None

    def unread(self) -> list[Any]:
        """A value of each equation of which nothing is read: checks and errors may still depend on it."""
        unread = (eqn.outvars for eqn in self.equations if not any(map(self.readers, eqn.outvars)))
        return [v for outvars in unread for v in outvars[:1]]

    def inputs(self, step: int | Group) -> Sequence[Any]:
        """What an equation or a group reads."""
        return step.inputs if isinstance(step, Group) else self.equations[step].invars

    def outputs(self, step: int | Group) -> Sequence[Any]:
        """What an equation or a group gives."""
        return step.outputs if isinstance(step, Group) else self.equations[step].outvars

    def last_product(self, group: Group) -> int:
        """The index of the last product that a group replaces."""
        return max(i for i in group.equations if self.equations[i].primitive.name == "dot_general")

    def evaluate_plain(self, indices: Sequence[int], values: dict[Any, Any], wanted: Collection[Any]) -> None:
        """Evaluates plain equations, of `values` and into them, as far as others read it or it is `wanted`."""
        equations, inside = [self.equations[i] for i in indices], set(indices)
        made = (v for eqn in equations for v in eqn.outvars)
        outputs = [v for v in made if v in wanted or not inside.issuperset(self.readers(v))]
        jax_tracing.evaluate_plain(equations, outputs, values)

    def leaks(self, equations: frozenset[int], outputs: Sequence[Any]) -> bool:
        """Whether anything outside reads a value of `equations` that is none of `outputs`."""
        return any(
            v not in outputs and not equations.issuperset(self.readers(v))
            for i in equations
            for v in self.equations[i].outvars
        )


def without_batches_of_one(graph: Graph, safely: Safely) -> Graph:
    """The same, where a batch of one product is that product."""
    parts = [safely([eqn], functools.partial(_of_one, graph, eqn)) or [eqn] for eqn in graph.equations]
    is_changed = any(len(equations) > 1 for equations in parts)
    return Graph(list(itertools.chain(*parts)), graph.results) if is_changed else graph


def _of_one(graph: Graph, eqn: Any) -> Sequence[Any]:
    """A `dot_general` whose batch is one product without it: of lhs its dimensions are rows, of rhs they go. A matrix
    times its transpose stays one array twice. Any other equation as it is, and one whose rhs was gathered, which a call
    takes in with the batch."""
    is_product = eqn.primitive.name == "dot_general"
    (contract, of_k), (batch, of_batch) = eqn.params["dimension_numbers"] if is_product else (((), ()),) * 2
    if not batch or any(eqn.invars[0].aval.shape[i] != 1 for i in batch):
        return [eqn]
    source = graph.made_by(eqn.invars[1])
    while source is not None and source.primitive.name in PASSES:
        source = graph.made_by(source.invars[0])
    if source is not None and source.primitive.name in GATHERS:
        return [eqn]

    def multiply(x: Any, y: Any) -> list[Any]:
        order = [*batch, *(i for i in range(x.ndim) if i not in batch)]
        of_x, of_y = map(order.index, contract), (i - sum(j < i for j in of_batch) for i in of_k)
        numbers = (tuple(of_x), tuple(of_y)), ((), ())
        operands = lax.transpose(x, order), lax.squeeze(y, of_batch)
        return list(jax_tracing.evaluate(eqn, operands, dimension_numbers=numbers))

    stored, dims = _stored(graph, eqn.invars[0], (*batch, *contract))
    ones, summed = dims[: len(batch)], dims[len(batch) :]

    def square(x: Any) -> list[Any]:
        inner = tuple(i - sum(j < i for j in ones) for i in summed)
        matrix = lax.squeeze(x, ones)
        (d,) = jax_tracing.evaluate(eqn, (matrix, matrix), dimension_numbers=((inner, inner), ((), ())))
        return [lax.expand_dims(d, range(len(ones)))]

    program: Callable[..., list[Any]] = multiply
    operands = eqn.invars
    is_square = (stored, dims) == _stored(graph, eqn.invars[1], (*of_batch, *of_k))
    if is_square and len(dims) == stored.aval.ndim - 1 and eqn.params["out_sharding"] is None:
        program, operands = square, [stored]
    return spliced(eqn, program, operands)


def spliced(eqn: Any, program: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
    """The equations of a program of `operands`, in place of an equation."""
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


def _stored(graph: Graph, v: Any, dims: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """(the value that transposes made `v` of, `dims` in that value)."""
    while (eqn := graph.made_by(v)) is not None and eqn.primitive.name == "transpose":
        v, dims = eqn.invars[0], [eqn.params["permutation"][d] for d in dims]
    return v, tuple(dims)


def schedule(
    graph: Graph, groups: Sequence[Group], results: Sequence[Any], known: Collection[Any] = ()
) -> list[int | Group]:
    """What has to be evaluated for `results`, and if nothing is `known` for effects, in the order of the program but
    after all that it reads: groups instead of the equations that make their outputs."""
    makers: dict[Any, int | Group] = graph.producer | {v: group for group in groups for v in group.outputs}

    def made(values: Sequence[Any]) -> list[int | Group]:
        """What makes these values."""
        return [makers[v] for v in values if not jax_tracing.is_literal(v) and v not in known and v in makers]

    def after_inputs(steps: Sequence[int | Group]) -> list[int | Group]:
        """These steps and all that they need, depth first, without recursion: a jaxpr may be long."""
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
        """The index after which a step comes: of a call its last product, or the last of its inputs."""
        if isinstance(step, int):
            return step
        return max([graph.last_product(step), *(graph.producer.get(v, -1) for v in step.variables)])

    effects: list[int | Group] = (
        [] if known else [i for i, eqn in enumerate(graph.equations) if jax_tracing.has_effects(eqn)]
    )
    return after_inputs(sorted(after_inputs(made(results) + effects), key=place))
