"""`advise` of a function: the shardings of all of its products together, ranked by predicted time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxmp._src.advise.chain import Chain, Node
from jaxmp._src.advise.search import AXIS, CAP, Chosen, PlanStep, Search, spec_of
from jaxmp._src.explain.arrays import is_array, split_arrays
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.runtime.text import aligned, as_html

Choice = TypeVar("Choice")
Table = list[list[str]]


@dataclasses.dataclass(frozen=True, repr=False)
class Ranking(Generic[Choice]):
    """What `advise` returns: choices on one machine, the best one first, and what there is to say of them."""

    subject: str
    choices: tuple[Choice, ...]
    hardware: Hardware
    remarks: tuple[str, ...]
    legend: ClassVar[str]

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def tables(self) -> list[Table]:
        """The header and the cells of each."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What is printed below the tables."""
        return [self.legend, *self.remarks, f"{self.hardware.name}: {self.hardware.source or 'as given'}"]

    def __str__(self) -> str:
        return "\n\n".join("\n".join(x) for x in ([self.subject], *map(aligned, self.tables()), self.notes()))

    def __repr__(self) -> str:
        best: Any = self.best
        return f"{type(self).__name__}({self.subject}: {best.name}, {best.seconds * 1e6:.3g} us)"

    def _repr_html_(self) -> str:
        return as_html(self.tables(), [self.subject, *self.notes()])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shardings of all products of a function.

    Attributes:
      name: how many products have which pattern, and how many reshards there are.
      arguments, keywords: the shardings of the function's arguments, as it takes them, for `jax.device_put`; None in
        the places of those that are no arrays.
      mesh: (axis, size) of the mesh.
      steps, products: the products and reshards, in turn; the products alone.
      seconds, exposed_seconds: the predicted time of all, and what of their communication no product hides.
      argument_bytes: of the shards of the arguments that a device holds; result_bytes: of the products' results and of
        resharded copies, as if all were kept until the end, as they are for a gradient; memory: of both.
      fits: whether the machine's devices have that memory.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    mesh: tuple[tuple[str, int], ...]
    steps: tuple[PlanStep, ...]
    argument_bytes: int
    result_bytes: int
    fits: bool

    @property
    def name(self) -> str:
        counts = collections.Counter(step.pattern or step.operation for step in self.steps)
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def exposed_seconds(self) -> float:
        return sum(step.count * step.time.exposed for step in self.steps)

    @property
    def memory(self) -> int:
        return self.argument_bytes + self.result_bytes

    @property
    def products(self) -> tuple[PlanStep, ...]:
        return tuple(step for step in self.steps if step.operation == "product")


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramAdvice(Ranking[Plan]):
    """Plans for the products of a function on one machine. `str` gives the tables, and notebooks show them.

    Attributes:
      choices: the plans, each of less memory than all that are faster: those that fit in memory first, then by time.
      best: the first.
      remarks: what was not followed, or not counted.
      hardware: the machine.
    """

    legend = "no plan is faster in as little memory; MB are of one device, all results kept"

    def tables(self) -> list[Table]:
        """The plans, the steps of the best one, the arguments in it."""
        leaves = jax.tree_util.tree_leaves_with_path(
            (self.best.arguments, self.best.keywords), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        return [
            [["plan", "us", "us exposed", "MB arguments", "MB results", ""], *map(_cells, self.choices)],
            [["line", "operation", "shapes", "shardings", "us", "bound by"], *map(_step_cells, self.best.steps)],
            [["argument", "sharding"], *([jax.tree_util.keystr(path[1:]), _text(spec)] for path, spec in leaves)],
        ]


class Advised:
    """`advise(fn, devices=...)`, whose text says how it is called."""

    def __init__(self, fn: Callable[..., Any], devices: int, hardware: Hardware, quiet: bool) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._devices, self._hardware, self._quiet = fn, devices, hardware, quiet
        self._name = getattr(fn, "__name__", type(fn).__name__)

    def __repr__(self) -> str:
        return f"<jaxmp.advise of {self._name}: call it with the arguments of {self._name}>"

    @jax_compat.hides_frames
    def __call__(self, *args: Any, **kwargs: Any) -> ProgramAdvice:
        advice = self._advice(args, kwargs)
        if not self._quiet:
            print(advice)
        return advice

    def _advice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramAdvice:
        *arrays, fn_of_arrays = split_arrays(self._fn, args, kwargs)
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        chain = self._chain(fn_of_arrays, given)
        mesh = jax.sharding.get_abstract_mesh()
        if chain.left and AxisType.Explicit in mesh.axis_types:  # of their shards jaxmp's calls make shard_maps
            with contextlib.suppress(Exception), _with_axes_of_one(mesh):
                chain = self._chain(fn_of_arrays, given)
        if not any(node.kind == "product" for node in chain.nodes):
            left = f"; not counted are {', '.join(chain.left)}" if chain.left else ""
            raise ValueError(f"advise: {self._name} has no product whose time is predicted{left}")
        search = Search(chain.nodes, self._devices, self._hardware)
        plans = [self._plan(chain.nodes, args, kwargs, *found) for found in search.plans()]
        plans.sort(key=lambda plan: not plan.fits)
        program = f"{self._name} on {self._devices} devices of {self._hardware.name}, mesh ({AXIS}={self._devices})"
        return ProgramAdvice(program, tuple(plans), self._hardware, _remarks(chain, search.met_cap))

    def _chain(self, fn: Callable[..., Any], given: Sequence[Any]) -> Chain:
        traced = jax.make_jaxpr(jax.jit(fn))(*given[0], **given[1]).jaxpr
        return Chain(jax_compat.without_dead_code(traced), traced.invars, self._devices, self._hardware)

    def _plan(
        self, nodes: Sequence[Node], args: tuple[Any, ...], kwargs: dict[str, Any], memory: int, decisions: list[Any]
    ) -> Plan:
        chosen = {one.node: one.sharding for one in decisions if isinstance(one, Chosen)}
        arguments = {i: math.prod(x.shape) * x.dtype.itemsize for i, x in enumerate(nodes) if x.kind == "argument"}
        # One that no product reads lies whole.
        memory += sum(nbytes for i, nbytes in arguments.items() if i not in chosen)
        held = sum(nbytes // (1 if chosen.get(i) is None else self._devices) for i, nbytes in arguments.items())
        specs = (spec_of(len(nodes[i].shape), chosen.get(i)) for i in arguments)
        leaves, tree = jax.tree.flatten((args, kwargs))
        of_args, of_kwargs = jax.tree.unflatten(tree, [next(specs) if is_array(leaf) else None for leaf in leaves])
        steps = tuple(one for one in decisions if isinstance(one, PlanStep))
        fits = memory <= self._hardware.memory
        return Plan(of_args, of_kwargs, ((AXIS, self._devices),), steps, held, memory - held, fits)


@contextlib.contextmanager
def _with_axes_of_one(mesh: AbstractMesh) -> Iterator[None]:
    """A context with the axes of a mesh, each of size 1."""
    small = AbstractMesh((1,) * len(mesh.axis_names), mesh.axis_names, axis_types=mesh.axis_types)
    # Without the empty mesh between them JAX refuses a mesh of another size.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(small):
        yield


def _remarks(chain: Chain, met_cap: bool) -> tuple[str, ...]:
    read = sorted({view.node for node in chain.nodes for view in node.operands})
    free = collections.Counter(chain.nodes[i].name for i in read if chain.nodes[i].kind == "value")
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in free.items())
    return (
        *([f"not followed, so taken in whatever sharding is wanted first: what comes from {names}"] if free else []),
        *([f"products that are not counted: {', '.join(chain.left)}"] if chain.left else []),
        *([f"more than {CAP} beginnings of plans; the fastest and the smallest were kept"] if met_cap else []),
    )


# Cells -------------------------------------------------------------------------------------------------------------


def _cells(plan: Plan) -> list[str]:
    numbers = (plan.seconds * 1e6, plan.exposed_seconds * 1e6, plan.argument_bytes / 1e6, plan.result_bytes / 1e6)
    return [plan.name, *(f"{number:.4g}" for number in numbers), "" if plan.fits else "does not fit"]


def _step_cells(step: PlanStep) -> list[str]:
    name = step.pattern or step.operation
    return [
        step.line,
        f"{name} x{step.count}" if step.count > 1 else name,
        " ".join("x".join(map(str, shape)) for shape in step.shapes),
        " -> ".join(" ".join(map(_text, part)) for part in (step.shardings[:-1], step.shardings[-1:])),
        f"{step.seconds * 1e6:.4g}",
        step.time.bound,
    ]


def _text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
