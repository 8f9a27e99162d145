"""`advise` of a function: the shardings of all of its products together, ranked by predicted time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxmp._src.advise.chain import Node, chain_of
from jaxmp._src.advise.options import AXIS
from jaxmp._src.advise.search import CAP, Chosen, Cost, Reshard, Run, Search, Sharding
from jaxmp._src.explain.explain import is_array, split_arrays
from jaxmp._src.hardware.call_time import CallTime
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.runtime import jax_compat

# Of which patterns plans are made: all, and those that have a name in the field.
_FAMILIES = (
    ("local", "grid", "all_gather", "reduce_scatter", "all_reduce"),
    ("local",),
    ("local", "grid"),  # FSDP
    ("local", "all_reduce"),  # tensor parallelism
    ("local", "all_gather", "reduce_scatter"),  # sequence parallelism
)


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """A product of a plan, or a reshard ahead of one.

    Attributes:
      line: the line of the program, "train.py:41".
      operation: "product" or "reshard"; pattern: `explain`'s word for it; count: how often it runs.
      shapes, shardings: of a, b and the result, as the program's `dot_general` has them; of a reshard ahead and behind.
      time: the predicted time of one run.
    """

    line: str
    operation: str
    pattern: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[PartitionSpec, ...]
    time: CallTime

    @property
    def seconds(self) -> float:
        return self.count * self.time.total


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shardings of all products of a function.

    Attributes:
      name: how many products have which pattern, and how many reshards there are.
      arguments, keywords: the shardings of the function's arguments, as it takes them, for `jax.device_put`; None in
        the places of those that are no arrays.
      mesh: (axis, size) of the mesh.
      steps: the products and reshards, in turn.
      seconds, exposed_seconds: the predicted time of all, and what of their communication no product hides.
      argument_bytes: of the shards of the arguments that a device holds; result_bytes: of the products' results and of
        resharded copies, as if all were kept until the end, as they are for a gradient; memory: of both.
      fits: whether the machine's devices have that memory.
      is_efficient: whether no other plan found is faster in as little memory.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    mesh: tuple[tuple[str, int], ...]
    steps: tuple[PlanStep, ...]
    seconds: float
    exposed_seconds: float
    argument_bytes: int
    result_bytes: int
    fits: bool
    is_efficient: bool

    @property
    def memory(self) -> int:
        return self.argument_bytes + self.result_bytes

    @property
    def products(self) -> tuple[PlanStep, ...]:
        """The steps that are products."""
        return tuple(step for step in self.steps if step.operation == "product")


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramAdvice:
    """Plans for the products of a function on one machine. `str` gives the tables, and notebooks show them.

    Attributes:
      choices: the plans: those that fit in memory first, then by time, then by memory.
      best: the first.
      remarks: what was not followed, or not counted.
      hardware: the machine.
    """

    program: str
    choices: tuple[Plan, ...]
    remarks: tuple[str, ...]
    hardware: Hardware

    @property
    def best(self) -> Plan:
        return self.choices[0]

    def tables(self) -> tuple[list[list[str]], ...]:
        """Header and cells of three tables: the plans, the steps of the best one, the arguments in it."""
        plans = ["plan", "us", "us exposed", "MB arguments", "MB results", ""]
        steps = ["line", "operation", "shapes", "shardings", "us", "bound by"]
        leaves = jax.tree_util.tree_leaves_with_path((self.best.arguments, self.best.keywords), is_leaf=_is_spec)
        named = [[jax.tree_util.keystr(path[1:]), _text(spec)] for path, spec in leaves]
        return (
            [plans, *map(_cells, self.choices)],
            [steps, *map(_step_cells, self.best.steps)],
            [["argument", "sharding"], *named],
        )

    def notes(self) -> list[str]:
        """What is printed below the tables."""
        return [
            "*: no other plan is faster in as little memory; MB are of one device, all results kept",
            *self.remarks,
            f"{self.hardware.name}: {self.hardware.source or 'as given'}",
        ]

    def __str__(self) -> str:
        parts = [[self.program], *map(lines_of, self.tables()), self.notes()]
        return "\n\n".join("\n".join(lines) for lines in parts)

    def __repr__(self) -> str:
        return f"ProgramAdvice({self.program}: {self.best.name}, {self.best.seconds * 1e6:.3g} us)"

    def _repr_html_(self) -> str:
        """The tables for notebooks."""
        tables = "".join(map(_html_of, self.tables()))
        return f"<p>{html.escape(self.program)}</p>{tables}<p>{'<br>'.join(map(html.escape, self.notes()))}</p>"


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
        arrays, fn_of_arrays = split_arrays(self._fn, args, kwargs)
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        nodes, left = self._chain(fn_of_arrays, given)
        mesh = jax.sharding.get_abstract_mesh()
        if left and AxisType.Explicit in mesh.axis_types:  # of their shards jaxmp's calls make shard_maps
            with contextlib.suppress(Exception), _with_axes_of_one(mesh):
                nodes, left = self._chain(fn_of_arrays, given)
        if not any(node.kind == "product" for node in nodes):
            raise ValueError(f"advise: {self._name} has no product whose time is predicted{_left_text(left)}")
        search = Search(nodes, self._devices, self._hardware)
        found = [self._plan(nodes, args, kwargs, *each) for each in _plans(search, self._hardware)]
        plans = list({(plan.seconds, plan.memory): plan for plan in found}.values())
        plans.sort(key=lambda plan: (not plan.fits, plan.seconds, plan.memory))
        least, choices = float("inf"), []
        for plan in plans:
            choices.append(dataclasses.replace(plan, is_efficient=plan.memory < least))
            least = min(least, plan.memory)
        program = f"{self._name} on {self._devices} devices of {self._hardware.name}, mesh ({AXIS}={self._devices})"
        return ProgramAdvice(program, tuple(choices), _remarks(nodes, left, search.met_cap), self._hardware)

    def _chain(self, fn: Callable[..., Any], given: Sequence[Any]) -> tuple[tuple[Node, ...], tuple[str, ...]]:
        traced = jax.make_jaxpr(jax.jit(fn))(given).jaxpr
        return chain_of(jax_compat.without_dead_code(traced), traced.invars, self._devices, self._hardware)

    def _plan(
        self, nodes: Sequence[Node], args: tuple[Any, ...], kwargs: dict[str, Any], cost: Cost, decisions: list[Any]
    ) -> Plan:
        chosen = {one.node: one.sharding for one in decisions if isinstance(one, Chosen)}
        arguments = [(i, node) for i, node in enumerate(nodes) if node.kind == "argument"]
        unread = sum(int(np.prod(node.shape)) * node.dtype.itemsize for i, node in arguments if i not in chosen)
        specs = iter([_spec(len(node.shape), chosen.get(i)) for i, node in arguments])
        placed = [next(specs) if is_array(leaf) else None for leaf in jax.tree.leaves((args, kwargs))]
        of_args, of_kwargs = jax.tree.unflatten(jax.tree.structure((args, kwargs)), placed)
        return Plan(
            _name(decisions),
            of_args,
            of_kwargs,
            ((AXIS, self._devices),),
            tuple(_steps(nodes, decisions)),
            cost.seconds,
            cost.exposed,
            cost.arguments + unread,
            cost.results,
            cost.memory + unread <= self._hardware.memory,
            False,
        )


@contextlib.contextmanager
def _with_axes_of_one(mesh: AbstractMesh) -> Iterator[None]:
    """A context with the axes of a mesh, each of size 1."""
    small = AbstractMesh((1,) * len(mesh.axis_names), mesh.axis_names, axis_types=mesh.axis_types)
    # Without the empty mesh between them JAX refuses a mesh of another size.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(small):
        yield


def _plans(search: Search, hardware: Hardware) -> Iterator[tuple[Cost, list[Any]]]:
    """Of each family the fastest plan that fits in memory, and the smallest."""
    for patterns in _FAMILIES:
        plans = search.plans(patterns)
        yield next((plan for plan in plans if plan[0].memory <= hardware.memory), plans[-1])
        yield plans[-1]


def _name(decisions: Sequence[Any]) -> str:
    counts = collections.Counter(
        one.option.pattern if isinstance(one, Run) else "reshard" for one in decisions if not isinstance(one, Chosen)
    )
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _steps(nodes: Sequence[Node], decisions: Sequence[Any]) -> list[PlanStep]:
    """The steps of a plan; a reshard has the line of the product that it is ahead of."""
    steps: list[PlanStep] = []
    line = ""
    for one in reversed(decisions):
        if isinstance(one, Run):
            node, option = nodes[one.node], one.option
            line, shapes = node.line, (*(view.shape for view in node.operands), node.shape)
            wanted = (option.a, option.b, option.d)
            shardings = tuple(_spec(len(shape), dim) for shape, dim in zip(shapes, wanted, strict=True))
            steps.append(PlanStep(line, "product", option.pattern, option.runs, shapes, shardings, option.time))
        elif isinstance(one, Reshard):
            shape = nodes[one.view.node].shape if one.of_node else one.view.shape
            shardings = (_spec(len(shape), one.have), _spec(len(shape), one.want))
            steps.append(PlanStep(line, "reshard", "", one.runs, (shape,), shardings, one.time))
    return steps[::-1]


def _remarks(nodes: Sequence[Node], left: Sequence[str], met_cap: bool) -> tuple[str, ...]:
    read = {view.node for node in nodes for view in node.operands}
    free = collections.Counter(nodes[i].name for i in sorted(read) if nodes[i].kind == "value")
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in free.items())
    return (
        *([f"not followed, so taken in whatever sharding is wanted first: what comes from {names}"] if free else []),
        *([f"products that are not counted: {', '.join(left)}"] if left else []),
        *([f"more than {CAP} beginnings of plans; the fastest and the smallest were kept"] if met_cap else []),
    )


def _left_text(left: Sequence[str]) -> str:
    return f"; not counted are {', '.join(left)}" if left else ""


def _spec(ndim: int, dim: Sharding) -> PartitionSpec:
    return PartitionSpec(*(AXIS if i == dim else None for i in range(ndim))) if dim is not None else PartitionSpec()


# Tables ------------------------------------------------------------------------------------------------------------


def lines_of(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]


def _html_of(table: Sequence[Sequence[str]]) -> str:
    head, *body = ([html.escape(cell) for cell in cells] for cells in table)
    rows = ["<tr><th>" + "</th><th>".join(head) + "</th></tr>"]
    rows += ["<tr><td>" + "</td><td>".join(cells) + "</td></tr>" for cells in body]
    return f"<table>{''.join(rows)}</table>"


def _cells(plan: Plan) -> list[str]:
    mark = "*" if plan.is_efficient else ""
    numbers = (plan.seconds * 1e6, plan.exposed_seconds * 1e6, plan.argument_bytes / 1e6, plan.result_bytes / 1e6)
    return [plan.name, *(f"{number:.4g}" for number in numbers), mark if plan.fits else "does not fit"]


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


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
