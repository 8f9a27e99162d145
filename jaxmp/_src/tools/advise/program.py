"""`advise` of a function: the known ways to share it among devices, compiled, and ranked by predicted time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp._src.core.validation.operand_checks import is_array
from jaxmp._src.platform.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.platform.jax_internals import jax_compat, jax_compiled
from jaxmp._src.platform.runtime.text import aligned, as_html
from jaxmp._src.tools.advise.dimensions import Dimensions
from jaxmp._src.tools.advise.recipes import Mesh, Recipe, recipes
from jaxmp._src.tools.explain.compiled import CompiledExplanation, Operation
from jaxmp._src.tools.explain.explain import explain, split_arrays

Choice = TypeVar("Choice")
Table = list[list[str]]


@dataclasses.dataclass(frozen=True, repr=False)
class Ranking(Generic[Choice]):
    """The result of `advise`: choices on one machine, the best one first, and remarks about them."""

    subject: str
    choices: tuple[Choice, ...]
    hardware: Hardware
    remarks: tuple[str, ...]
    legend: ClassVar[str]

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def tables(self) -> list[Table]:
        """Returns the header and the cells of each table."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Returns the lines that are printed below the tables."""
        return [self.legend, *self.remarks, f"{self.hardware.name}: {self.hardware.source or 'as given'}"]

    def __str__(self) -> str:
        return "\n\n".join("\n".join(x) for x in ([self.subject], *map(aligned, self.tables()), self.notes()))

    def __repr__(self) -> str:
        best: Any = self.best
        return f"{type(self).__name__}({self.subject}: {best.name}, {best.seconds * 1e6:.3g} us)"

    def _repr_html_(self) -> str:
        return as_html(self.tables(), [self.subject, *self.notes()])


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """A product of a plan, or collectives that run as one.

    Attributes:
      line: the line of the program, "train.py:41".
      operation: "product", or the kind of the collective: "all-reduce".
      pattern: of a product, `explain`'s word for it; "local" for XLA's own.
      count: how often it runs; nbytes: bytes that a device receives each time.
      time: the predicted time of one run.
    """

    line: str
    operation: str
    pattern: str
    count: int
    nbytes: int
    time: CallTime

    @property
    def seconds(self) -> float:
        return self.count * self.time.total


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to share a function among devices, compiled.

    Attributes:
      name: what the devices share: "data", "fully sharded", "tensor", "sequence", "expert", "data and expert"; two of
        them on the two axes of a mesh, as "data x tensor"; or "whole", if nothing can be shared.
      arguments, keywords: the shardings of the function's arguments, as it takes them; None in the places of those
        that are no arrays.
      mesh: (axis, size) of the mesh.
      steps, products: the products and collectives; the products alone.
      explanation: what `explain(fn, compiled=True)` says of the program, with a cause for each collective.
      seconds, exposed_seconds: the predicted time of all steps, and what of their communication no product hides.
      bytes_moved: bytes that a device receives.
      memory: bytes of a device at the peak; 0 if the platform does not report it.
      fits: whether the machine's devices have that memory; True if it is not reported.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    mesh: Mesh
    steps: tuple[PlanStep, ...]
    explanation: CompiledExplanation
    fits: bool

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def exposed_seconds(self) -> float:
        return sum(step.count * step.time.exposed for step in self.steps)

    @property
    def bytes_moved(self) -> int:
        return self.explanation.bytes_moved

    @property
    def memory(self) -> int:
        return self.explanation.memory.peak if self.explanation.memory else 0

    @property
    def products(self) -> tuple[PlanStep, ...]:
        return tuple(step for step in self.steps if step.operation == "product")


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramAdvice(Ranking[Plan]):
    """Plans for a function on one machine. `str` gives the tables, and notebooks show them.

    Attributes:
      choices: the plans. Plans that fit in memory come first, then they are sorted by time, then by bytes. A plan on
        two axes comes before a plan on one axis only if it takes a tenth less.
      best: the first.
      remarks: plans that were left out, and types without a rate.
      hardware: the machine.
    """

    legend = "us are predicted; MB are of one device, as compiled; `.best.explanation` tells why each collective runs"

    def tables(self) -> list[Table]:
        """Returns the table of plans, and the table of arguments in the best plan."""
        leaves = jax.tree_util.tree_leaves_with_path((self.best.arguments, self.best.keywords))
        head = ["plan", "mesh", "us", "us exposed", "collectives", "MB received", "MB held", ""]
        return [
            [head, *map(_cells, self.choices)],
            [["argument", "sharding"], *([jax.tree_util.keystr(path[1:]), repr(spec)] for path, spec in leaves)],
        ]


def advised(fn: Callable[..., Any], devices: int, hardware: Hardware, quiet: bool) -> Callable[..., ProgramAdvice]:
    """Returns the function that `advise(fn, devices=...)` returns. It compiles a plan for each recipe, prints the table
    unless `quiet`, and leaves out plans that raise; the remarks name them. If all do, it compiles the plan "whole". If
    this plan raises too, it raises the first error. It raises ValueError if no plan has a product, or if the mesh that
    is set has another number of devices."""
    name = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn, updated=())
    @jax_compat.hides_frames
    def of_arguments(*args: Any, **kwargs: Any) -> ProgramAdvice:
        axes = jax.sharding.get_abstract_mesh().shape
        if axes and math.prod(axes.values()) != devices:
            raise ValueError(f"advise: devices is {devices}, but the mesh that is set has {math.prod(axes.values())}")
        *arrays, fn_of_arrays = split_arrays(fn, args, kwargs)
        given: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        dimensions = Dimensions(jax.make_jaxpr(jax.jit(fn_of_arrays))(*given[0], **given[1]).jaxpr)
        types, first = jax.tree.leaves(given), len(jax.tree.leaves(given[0][:1]))
        nparameters = first if 1 < first < len(types) else 0
        plans, errors = list[Plan](), dict[str, Exception]()
        found = [*recipes(dimensions, types, nparameters, devices, tuple(axes.items()))]
        whole = Recipe("whole", found[0].mesh, (PartitionSpec(),) * len(types))
        for recipe in [*found, whole]:
            if plans and recipe is whole:
                break
            try:
                plans.append(_plan(recipe, fn, (args, kwargs), dimensions.types, hardware))
            except Exception as error:  # what the program raises with these shardings
                errors[f"{recipe.name} ({mesh_text(recipe.mesh)})"] = error
        if not plans:
            raise next(iter(errors.values()))
        if not any(plan.products for plan in plans):
            raise ValueError(f"advise: {name} has no product with a predicted time")
        # A second axis has to save a tenth, because predictions are no more exact.
        plans.sort(key=lambda x: (not x.fits, x.seconds * (1.1 if len(x.mesh) > 1 else 1), x.bytes_moved))
        lines = {plan: (str(error).strip() or type(error).__name__).splitlines()[0] for plan, error in errors.items()}
        remarks = [f"left out: {plan}, which raises {line}" for plan, line in lines.items()]
        rates = {str(x) for x in dimensions.types.values() if kind_of(x.name) not in hardware.rates}
        remarks += [f"products of {dtype} have no rate on this machine, and no time here" for dtype in sorted(rates)]
        subject = f"{name} on {devices} devices of {hardware.name}"
        advice = ProgramAdvice(subject, tuple(plans), hardware, tuple(remarks))
        if not quiet:
            print(advice)
        return advice

    return of_arguments


def _plan(
    recipe: Recipe, fn: Callable[..., Any], given: Any, types: Mapping[str, np.dtype], hardware: Hardware
) -> Plan:
    """Compiles `fn` with the recipe's shardings of its arrays, and returns the plan. `given`: (args, kwargs) of `fn`;
    leaves that are no arrays stay. `types`: as in `_steps`. Raises what tracing and compiling raise."""
    mesh, specs, (leaves, tree) = _mesh(recipe.mesh), iter(recipe.specs), jax.tree.flatten(given)
    found = [next(specs) if is_array(leaf) else None for leaf in leaves]
    placed = [
        leaf if spec is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, found, strict=True)
    ]
    of_args, of_kwargs = jax.tree.unflatten(tree, found)
    args, kwargs = jax.tree.unflatten(tree, placed)
    with jax.set_mesh(mesh):
        explanation = explain(fn, quiet=True, hardware=hardware, compiled=True)(*args, **kwargs)
    steps = tuple(_steps(explanation, dict(recipe.mesh), types, hardware))
    fits = explanation.memory is None or explanation.memory.peak <= hardware.memory
    return Plan(recipe.name, of_args, of_kwargs, recipe.mesh, steps, explanation, fits)


def _mesh(axes: Mesh) -> jax.sharding.Mesh:
    """Returns a mesh with `axes`, on the first devices of the mesh that is set, or else of JAX. If those are too few,
    on devices that can only be compiled for. Its axes have the types of the mesh that is set, or else are automatic."""
    ambient, kinds = jax_compat.ambient_mesh(), jax.sharding.get_abstract_mesh().axis_types
    names, sizes = zip(*axes, strict=True)
    devices = jax.devices() if ambient is None else list(ambient.devices.flat)
    if len(devices) < math.prod(sizes):
        devices = jax_compiled.devices_to_compile_for(math.prod(sizes))
    grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(grid, names, axis_types=kinds or (AxisType.Auto,) * len(names))


def _steps(
    explanation: CompiledExplanation, mesh: Mapping[str, int], types: Mapping[str, np.dtype], hardware: Hardware
) -> Iterator[PlanStep]:
    """Yields the steps of a program: XLA's products, XLA's collectives (one step for all of one kind, axes and
    `round`), and jaxmp's fused calls. A product of a type without a rate on `hardware` has a time of 0. `mesh`: sizes
    of the axes. `types`: the type of the products of a line, because XLA widens types on CPUs; for another line the
    first of them."""
    ndevices = math.prod(mesh.values())
    rounds: dict[Any, list[Operation]] = {}
    for row in explanation.rows:
        if row.kind == "dot":
            dtype = types.get(row.line.rpartition(" -> ")[2], next(iter(types.values()), np.dtype("float32")))
            time = CallTime()
            if (kind := kind_of(dtype.name)) in hardware.rates:
                flops = row.flops * ndevices
                time = call_time(hardware, flops=flops, kind=kind, ndevices=ndevices, nbytes=row.traffic)
            yield PlanStep(row.line, "product", "local", row.count or 1, 0, time)
        elif not row.kind.startswith("jaxmp"):  # the time of a call has what it moves
            rounds.setdefault((row.kind, row.axes, row.round), []).append(row)
    for (kind, axes, _), rows in rounds.items():
        nbytes = sum(row.nbytes for row in rows)
        transfers = (Transfer.over(mesh, axes or (*mesh,), nbytes),)
        time = call_time(hardware, ndevices=ndevices, nbytes=nbytes, transfers=transfers)
        yield PlanStep(rows[0].line, kind, "", rows[0].count or 1, nbytes, time)
    for call in explanation.calls.rows:
        if call.flops and call.implementation != "xla" and not call.why.startswith("not fused"):
            if call.implementation == "host+xla":  # what it moves is above
                call = dataclasses.replace(call, transfers=())
            time, nbytes = call.time(hardware) or CallTime(), sum(each.nbytes for each in call.transfers)
            yield PlanStep(call.line, "product", call.pattern, call.count, nbytes, time)


def mesh_text(mesh: Mesh) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh)


def _cells(plan: Plan) -> list[str]:
    return [
        plan.name,
        mesh_text(plan.mesh),
        *(f"{seconds * 1e6:.4g}" for seconds in (plan.seconds, plan.exposed_seconds)),
        str(len(plan.explanation.collectives)),
        *(f"{number / 1e6:.4g}" for number in (plan.bytes_moved, plan.memory)),
        "" if plan.fits else "does not fit",
    ]
