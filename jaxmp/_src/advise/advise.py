"""`advise`: the shardings of a product, ranked by predicted time."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxmp._src.advise.candidates import Candidate, candidates, flops_of, time_of
from jaxmp._src.advise.program import Advised, ProgramAdvice, lines_of
from jaxmp._src.advise.reference import Reference, reference
from jaxmp._src.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.hardware.hardware import Hardware, hardware_of
from jaxmp._src.spec.matmul_spec import accumulator
from jaxmp._src.validation.public import public


@dataclasses.dataclass(frozen=True)
class Choice:
    """A sharding of a product.

    Attributes:
      name: what is done, for people; pattern: `explain`'s word for it.
      mesh: (axis, size) of the mesh, whose last axis varies fastest from device to device.
      a, b, d: the shardings of the operands and of the result.
      seconds: the predicted time; time: its parts.
      memory: bytes of the shards of a, b and d that a device holds.
      bytes_moved: bytes that a device receives.
      fits: whether the machine's devices have that memory.
      is_efficient: whether no other sharding is faster in as little memory.
    """

    name: str
    pattern: str
    mesh: tuple[tuple[str, int], ...]
    a: PartitionSpec
    b: PartitionSpec
    d: PartitionSpec
    time: CallTime
    memory: int
    bytes_moved: int
    fits: bool
    is_efficient: bool

    @property
    def seconds(self) -> float:
        return self.time.total


@dataclasses.dataclass(frozen=True, repr=False)
class Advice:
    """The shardings of one product on one machine.

    `str` gives the table: of each kind the best mesh, and all that are efficient.

    Attributes:
      choices: all of them: those that fit in memory first, then by time, then by memory.
      best: the first.
      reference: the communication-optimal grid; reference_time: its predicted time on this machine.
      hardware: the machine.
    """

    product: str
    choices: tuple[Choice, ...]
    reference: Reference
    reference_time: CallTime
    hardware: Hardware

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def rows(self) -> list[list[str]]:
        """The header and the cells of the table."""
        names: set[str] = set()
        shown = []
        for choice in self.choices:
            if choice.name not in names or (choice.is_efficient and choice.fits):
                shown.append(choice)
            names.add(choice.name)
        head = ["sharding", "mesh", "a", "b", "d", "us", "bound by", "MB held", "MB moved", ""]
        return [head, *map(_cells, shown)]

    def notes(self) -> list[str]:
        """What is printed below the table."""
        found, time = self.reference, self.reference_time
        grid = "x".join(map(str, found.grid))
        return [
            "*: no other is faster in as little memory; MB are of one device",
            f"communication-optimal: grid (m, n, k) of {grid}; each device receives {_mega(found.elements)} million "
            f"elements (with any algorithm at least {_mega(found.lower_bound)}), {time.total * 1e6:.3g} us",
            f"{self.hardware.name}: {self.hardware.source or 'as given'}",
        ]

    def __str__(self) -> str:
        return "\n".join([self.product, "", *lines_of(self.rows()), "", *self.notes()])

    def __repr__(self) -> str:
        return f"Advice({self.product}: {self.best.name}, {self.best.seconds * 1e6:.3g} us)"


@overload
def advise(
    m: int,
    k: int,
    n: int,
    devices: int,
    *,
    hardware: str | Hardware = ...,
    dtype: DTypeLike = ...,
    out_dtype: DTypeLike | None = ...,
    quiet: bool = ...,
) -> Advice: ...


@overload
def advise(
    fn: Callable[..., Any], /, *, devices: int, hardware: str | Hardware = ..., quiet: bool = ...
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
    """Print the shardings of a product of (m, k) and (k, n), or of all products of a function, fastest first.

    `advise(m, k, n, devices)` ranks the shardings of one product on a mesh of one or two axes; a mesh has nodes of
    neighbouring devices. `advise(fn, devices=8)(*args)` traces `fn`, plain JAX or jaxmp's, for its arrays (or
    `jax.ShapeDtypeStruct`s), runs nothing, and ranks plans: shardings of its arguments and of each of its products on
    one mesh axis "x" of all devices, of which the sum of the times, with the reshards between products, is smallest.
    The shardings that `fn` names are passed over; if it names mesh axes, set a mesh with `jax.set_mesh` first.

    Times are those of the model of docs/cost.md, for calls of jaxmp. Where an operand lies whole on several devices,
    its copies cost memory, and time on CPU devices of one process only.

    Args:
      m, k, n: extents of the whole product; or, in place of m alone, a function.
      devices: how many devices share it.
      hardware: "h100-8", "h200-8", "gb200-nvl72", "this" after `jaxmp info --calibrate`, or a `jaxmp.Hardware`.
      dtype: of the operands of one product, by default bfloat16; out_dtype: of its result, by default the same.
      quiet: whether to return without printing.

    Returns:
      An `Advice`: `.best` and `.choices` with shardings, seconds and bytes, and `.reference`, the
      communication-optimal grid of the literature. Of a function, a function of the same arguments that returns a
      `ProgramAdvice`, whose `.best` and `.choices` have the shardings of the arguments and of each product.

    Raises:
      TypeError: an extent or a number of devices is no integer, or a type is given with a function.
      ValueError: one is below 1, no sharding divides the extents, the function has no product, or the hardware is
        unknown; and what the function raises.

    >>> import jax, jaxmp
    >>> advice = jaxmp.advise(8192, 8192, 8192, 8, hardware="h100-8", quiet=True)
    >>> advice.best.bytes_moved, advice.best.memory == min(choice.memory for choice in advice.choices)
    (0, False)
    >>> x = jax.ShapeDtypeStruct((8192, 16384), "bfloat16")
    >>> w = jax.ShapeDtypeStruct((16384, 16384), "bfloat16")
    >>> def layer(x, w_in, w_out):
    ...     return jax.nn.relu(x @ w_in) @ w_out
    >>> advice = jaxmp.advise(layer, devices=8, hardware="h100-8", quiet=True)(x, w, w)
    >>> advice.best.arguments
    (P('x', None), P(), P())
    >>> [plan.name for plan in advice.choices if plan.is_efficient]
    ['2 local', '2 grid']
    """
    if callable(m):
        if not (k is n is dtype is out_dtype is None):
            raise TypeError("advise: k, n, dtype and out_dtype are of one product; a function's arguments have theirs")
        return Advised(m, _count("devices", devices), hardware_of("advise", hardware), quiet)
    m, k, n, devices = (_count(name, x) for name, x in (("m", m), ("k", k), ("n", n), ("devices", devices)))
    machine = hardware_of("advise", hardware)
    operand = np.dtype(jnp.dtype("bfloat16" if dtype is None else dtype))
    out = np.dtype(jnp.dtype(operand if out_dtype is None else out_dtype))
    timed = [
        (each, time_of(machine, each, flops_of(m, k, n, operand), devices, operand))
        for each in candidates(m, k, n, devices, operand, out)
    ]
    if not timed:
        raise ValueError(
            f"advise: no sharding over {devices} devices divides m={m}, k={k}, n={n}; pad them, or take other devices"
        )
    advice = Advice(
        f"{m}x{k}x{n} {operand.name} on {devices} devices of {machine.name}",
        _ranked(timed, machine),
        found := reference(m, k, n, devices, machine.memory / operand.itemsize),
        _reference_time(machine, found, m, k, n, devices, operand),
        machine,
    )
    if not quiet:
        print(advice)
    return advice


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"advise: {name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"advise: {name} must be at least 1, got {number}")
    return number


def _reference_time(
    hardware: Hardware, found: Reference, m: int, k: int, n: int, devices: int, dtype: np.dtype
) -> CallTime:
    """The time on that grid, whose devices along k and n are taken for neighbours; sums move in the accumulator."""
    pm, pn, pk = found.grid
    a, b, d = m * k / (pm * pk), k * n / (pk * pn), m * n / (pm * pn)
    sums = accumulator(dtype).itemsize
    parts = (
        (a * (1 - 1 / pn) * dtype.itemsize, pn, 1),
        (b * (1 - 1 / pm) * dtype.itemsize, pm, pn * pk),
        (d * (1 - 1 / pk) * sums, pk, pn),
    )
    return call_time(
        hardware,
        flops=flops_of(m, k, n, dtype),
        kind=kind_of(dtype.name),
        ndevices=devices,
        nbytes=found.held * dtype.itemsize,
        transfers=tuple(Transfer(round(nbytes), ranks, stride) for nbytes, ranks, stride in parts if nbytes),
        is_fused=True,
    )


def _ranked(timed: list[tuple[Candidate, CallTime]], hardware: Hardware) -> tuple[Choice, ...]:
    """Those that fit first, then by time, then by memory; in that order one is efficient if it needs less memory than
    all before it."""
    timed = sorted(timed, key=lambda pair: (pair[0].held > hardware.memory, pair[1].total, pair[0].held))
    least, choices = float("inf"), []
    for each, time in timed:
        choices.append(
            Choice(
                each.name,
                each.pattern,
                each.mesh,
                *each.shardings,
                time=time,
                memory=each.held,
                bytes_moved=sum(transfer.nbytes for transfer in each.transfers),
                fits=each.held <= hardware.memory,
                is_efficient=each.held < least,
            )
        )
        least = min(least, each.held)
    return tuple(choices)


def _cells(choice: Choice) -> list[str]:
    mark = "*" if choice.is_efficient else ""
    return [
        choice.name,
        " ".join(f"{axis}={size}" for axis, size in choice.mesh),
        *(_text(spec) for spec in (choice.a, choice.b, choice.d)),
        f"{choice.seconds * 1e6:.4g}",
        choice.time.bound,
        _mega(choice.memory),
        _mega(choice.bytes_moved),
        mark if choice.fits else "does not fit",
    ]


def _text(spec: PartitionSpec) -> str:
    """A sharding in short: "yx, -" for P(("y", "x"), None)."""
    return ", ".join(entry if isinstance(entry, str) else "".join(entry or "-") for entry in spec)


def _mega(number: float) -> str:
    return f"{number / 1e6:.3g}"
