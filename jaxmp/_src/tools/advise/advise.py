"""`advise`: the shardings of a product, ranked by predicted time."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxmp._src.core.contraction import moves, planner
from jaxmp._src.core.contraction.contraction import in_no_layout
from jaxmp._src.core.sharding.meshes import partition_spec
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.hardware.call_time import CallTime, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import Hardware, hardware_of
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.advise.program import ProgramAdvice, Ranking, Table, advised, mesh_text
from jaxmp._src.tools.advise.recipes import Mesh


@dataclasses.dataclass(frozen=True)
class Choice:
    """A sharding of a product.

    Attributes:
      pattern: `explain`'s word for what is done; splits: its text of what each mesh axis splits.
      mesh: (axis, size) of the mesh; the last axis varies fastest from device to device.
      a, b, d: the shardings of the operands and of the result.
      seconds: the predicted time; time: its parts.
      memory: bytes of the shards of a, b and d that a device holds.
      bytes_moved: bytes that a device receives.
      fits: whether the machine's devices have that memory.
      is_efficient: whether no other sharding is faster in as little memory.
    """

    pattern: str
    splits: str
    mesh: Mesh
    a: PartitionSpec
    b: PartitionSpec
    d: PartitionSpec
    time: CallTime
    memory: int
    bytes_moved: int
    fits: bool
    is_efficient: bool

    @property
    def name(self) -> str:
        return self.pattern

    @property
    def seconds(self) -> float:
        return self.time.total


@dataclasses.dataclass(frozen=True, repr=False)
class Advice(Ranking[Choice]):
    """The shardings of one product on one machine. `str` gives the table: of each pattern the best, and all that are
    efficient.

    Attributes:
      choices: all choices. Choices that fit in memory come first, then they are sorted by time, then by memory.
      best: the first.
      lower_bound: bytes that some device receives under any algorithm, if each begins with its part of one copy.
      hardware: the machine.
    """

    lower_bound: float
    legend = "*: no other is faster in as little memory; MB are of one device"

    def tables(self) -> list[Table]:
        best = {each.pattern: each for each in self.choices[::-1]}
        shown = [each for each in self.choices if each is best[each.pattern] or (each.is_efficient and each.fits)]
        head = ["pattern", "mesh", "a", "b", "d", "us", "bound by", "MB held", "MB moved", ""]
        return [[head, *map(_cells, shown)]]


@overload
def advise(
    m: int,
    k: int,
    n: int,
    devices: int | None = ...,
    *,
    hardware: str | Hardware = ...,
    dtype: DTypeLike = ...,
    out_dtype: DTypeLike | None = ...,
    quiet: bool = ...,
) -> Advice: ...


@overload
def advise(
    fn: Callable[..., Any], /, *, devices: int | None = ..., hardware: str | Hardware = ..., quiet: bool = ...
) -> Callable[..., ProgramAdvice]: ...


@public
def advise(
    m: Any,
    k: Any = None,
    n: Any = None,
    devices: Any = None,
    *,
    hardware: str | Hardware = "h100-8",
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    quiet: bool = False,
) -> Any:
    """Print the shardings of a product of (m, k) and (k, n), or of the arguments of a function, fastest first.

    `advise(m, k, n, devices)` ranks the shardings of one product on meshes of one or two axes, by the model of time of
    docs/cost.md. `advise(fn, devices=8)(*args)` compiles `fn`, plain JAX or jaxmp's, for its arrays (or
    `jax.ShapeDtypeStruct`s) as data, fully sharded, tensor, sequence and expert parallelism shard them, and pairs of
    these on two mesh axes, and runs nothing. It ranks these plans by the time of the products, calls and collectives
    of each compiled program. There may be more devices than exist. The leaves of the first argument are parameters,
    if it has several, and the others' first dimension is the batch. Of a function of single arrays the batch is what
    comes first in every argument that has it. Shardings of the arguments are passed over; under `jax.set_mesh` plans
    use the axes of that mesh.

    Args:
      m, k, n: extents of the whole product; or, in place of m alone, a function.
      devices: how many devices share it; by default the devices of the mesh that is set, or else all of JAX's.
      hardware: "h100-8", "h200-8", "gb200-nvl72", "this" after `jaxmp info --calibrate`, or a `jaxmp.Hardware`.
      dtype: of the operands of one product, by default bfloat16; out_dtype: of its result, by default the same.
      quiet: whether to return without printing.

    Returns:
      An `Advice`; its `.best` and `.choices` have shardings, seconds and bytes. For a function, a function of the same
      arguments that returns a `ProgramAdvice`; its `.best` and `.choices` have the shardings of the arguments, and
      the seconds, bytes and memory of the compiled program.

    Raises:
      TypeError: an extent or a number of devices is no integer, or k, n or a type is given with a function.
      ValueError: one is below 1, no sharding divides the extents, the function has no product, the hardware is
        unknown, or the mesh that is set has another number of devices; and what the function raises.

    >>> import jax, jaxmp
    >>> advice = jaxmp.advise(8192, 8192, 8192, 8, hardware="h100-8", quiet=True)
    >>> advice.best.bytes_moved, advice.best.memory == min(choice.memory for choice in advice.choices)
    (0, False)
    >>> x = jax.ShapeDtypeStruct((8192, 1024), "bfloat16")
    >>> w = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")
    >>> advice = jaxmp.advise(lambda x, w: x @ w, devices=8, hardware="h100-8", quiet=True)(x, w)
    >>> advice.best.name, advice.best.arguments, advice.best.bytes_moved
    ('data', (P('x', None), P()), 0)
    """
    if devices is None:
        mesh = jax_compat.ambient_mesh()
        devices = mesh.size if mesh else jax.device_count()
    if callable(m):
        if not (k is n is dtype is out_dtype is None):
            raise TypeError("advise: k, n, dtype and out_dtype describe one product; leave them out for a function")
        return advised(m, _count("devices", devices), hardware_of("advise", hardware), quiet)
    m, k, n, devices = (_count(name, x) for name, x in (("m", m), ("k", k), ("n", n), ("devices", devices)))
    machine = hardware_of("advise", hardware)
    operand = _dtype("dtype", "bfloat16" if dtype is None else dtype)
    out = _dtype("out_dtype", operand if out_dtype is None else out_dtype)
    extents = {"m": m, "k": k, "n": n}
    found = [each for mesh in _meshes(devices) for each in _choices(extents, operand, out, mesh, machine)]
    if not found:
        raise ValueError(
            f"advise: no sharding over {devices} devices divides m={m}, k={k}, n={n}; pad them, or take other devices"
        )
    least = operand.itemsize * lower_bound(m, k, n, devices, machine.memory / operand.itemsize)
    remark = f"with one copy of a and b, some device receives at least {_mega(least)} MB with any algorithm"
    subject = f"{m}x{k}x{n} {operand.name} on {devices} devices of {machine.name}"
    advice = Advice(subject, tuple(_ranked(found)), machine, (remark,), least)
    if not quiet:
        print(advice)
    return advice


def _dtype(argument: str, value: DTypeLike) -> np.dtype:
    """Returns the type that `value` names. Raises TypeError, with the argument's name, if it names none."""
    try:
        return np.dtype(jnp.dtype(value))
    except TypeError:
        raise TypeError(f"advise: {argument} must be a dtype, such as jnp.bfloat16, got {value!r}") from None


def _count(name: str, value: Any) -> int:
    """Returns `value` as an int. Raises TypeError if it is no integer, and ValueError if it is below 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"advise: {name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"advise: {name} must be at least 1, got {number}")
    return number


def _meshes(devices: int) -> Iterator[Mesh]:
    """Yields the meshes of all these devices: of one axis, "x", and of two axes, "y" and "x"."""
    for size in range(1, devices + 1):
        if devices % size == 0 and (size > 1 or devices == 1):  # x alone, rather than y alone
            yield tuple((axis, count) for axis, count in (("y", devices // size), ("x", size)) if count > 1)


def _choices(
    extents: dict[str, int], dtype: np.dtype, out_dtype: np.dtype, mesh: Mesh, hardware: Hardware
) -> Iterator[Choice]:
    """Yields the shardings of a product on this mesh that split a dimension over every axis; none if no extents are
    divisible. `is_efficient` is False in all of them: `_ranked` sets it. In shared memory the time counts no transfers,
    but `bytes_moved` does."""
    itemsizes = (dtype.itemsize, dtype.itemsize, out_dtype.itemsize, accumulator(dtype).itemsize)
    gathers_k = not low_precision.is_scaled(dtype)
    terms = planner.Terms(tuple(extents.items()), mesh, itemsizes, keeps_result=False, gathers_k=gathers_k)
    flops = 2 * math.prod(extents.values()) * (4 if np.issubdtype(dtype, np.complexfloating) else 1)
    for call in planner.layouts(in_no_layout("mk", "kn", "mn"), terms):
        if len(call.roles) < len(mesh):
            continue
        a, b, d, sums = planner.local_bytes(call, terms)
        transfers = moves.in_call(call, dict(mesh), a, b, sums)
        held, received = a + b + d, sum(each.nbytes for each in transfers)
        moved = () if hardware.is_shared else transfers  # read in place, as `explain` counts them
        time = call_time(
            hardware,
            flops=flops,
            kind=kind_of(dtype.name),
            ndevices=math.prod(size for _, size in mesh),
            nbytes=held + (received if moved else 0),
            transfers=moved,
            is_fused=True,
        )
        of_a, of_b, of_d = map(partition_spec, call.layout)
        fits = held <= hardware.memory
        yield Choice(call.pattern.value, str(call), mesh, of_a, of_b, of_d, time, held, received, fits, False)


def _ranked(found: list[Choice]) -> Iterator[Choice]:
    """Yields choices, sorted: choices that fit in memory first, then by time, then by memory. A choice is marked
    efficient if it needs less memory than all choices before it."""
    least = float("inf")
    for each in sorted(found, key=lambda x: (not x.fits, x.seconds, x.memory)):
        yield dataclasses.replace(each, is_efficient=each.memory < least)
        least = min(least, each.memory)


def lower_bound(m: int, k: int, n: int, devices: int, memory: float) -> float:
    """Returns the elements that some device must receive under any algorithm, if each begins with part of one copy.
    `memory`: the elements that a device can hold. The result is the larger of two bounds, and at least 0. For any
    memory: Al Daas, Ballard, Grigori, Kumar, Rouse, "Tight memory-independent parallel matrix multiplication
    communication lower bounds", SPAA 2022, theorem 3. With a memory of S elements: 2mnk / (P sqrt(S)) - S, Smith,
    Lowery, Langou, van de Geijn, "A tight I/O lower bound for matrix multiplication", 2019 (COSMA has its parallel
    form)."""
    small, middle, large = sorted((m, k, n))
    total = m * k + k * n + m * n
    if devices <= large / middle:
        access = (large * middle + large * small) / devices + middle * small
    elif devices <= large * middle / small**2:
        access = 2 * (large * middle * small**2 / devices) ** 0.5 + large * middle / devices
    else:
        access = 3 * (m * n * k / devices) ** (2 / 3)
    limited = 2 * m * n * k / (devices * memory**0.5) - memory
    return float(max(access - total / devices, limited, 0.0))


def _cells(choice: Choice) -> list[str]:
    """Returns the choice's row of the table. The last cell is "*" for an efficient choice, or says that it does not
    fit."""
    return [
        choice.pattern,
        mesh_text(choice.mesh),
        *map(repr, (choice.a, choice.b, choice.d)),
        f"{choice.seconds * 1e6:.4g}",
        choice.time.bound,
        _mega(choice.memory),
        _mega(choice.bytes_moved),
        ("*" if choice.is_efficient else "") if choice.fits else "does not fit",
    ]


def _mega(number: float) -> str:
    return f"{number / 1e6:.3g}"
