"""Finds the processes of a call's ranks, and adds the barriers at which these processes compare the call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxmp._src.core.spec import wire
from jaxmp._src.core.spec.extents import extents
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering, jax_partitioner
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.config import config
from jaxmp._src.platform.runtime.types import ArrayType

# XLA:CPU runs a program of less than a thousand operations during its dispatch. An error is then raised by the dispatch
# instead of the wait for the result, and JAX's fast path turns it into a ValueError. This many more operations make XLA
# run the program later. They take a microsecond to run, and one elementwise kernel to compile.
_UNCHEAP = 1024
# Up to so many processes tell each other directly that they have come to a call: csrc/barrier/circle.h.
_DIRECT = 8
# Every mesh axis as (name, size).
MeshAxes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Span:
    """The devices of a mesh, their processes and their groups, each by position in the mesh.

    Example: axes (x=2, y=2) on devices 0 1 | 2 3, in two processes of two devices: processes (0, 0, 1, 1). A call over
    "x" has groups (0, 1, 0, 1), and each has a rank in both processes. A call over "y" has groups (0, 0, 1, 1), and
    each is in one process.
    """

    devices: tuple[int, ...]
    processes: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def group_processes(self) -> int:
        """The largest number of processes that the ranks of one group span."""
        members: dict[int, set[int]] = {}
        for process, group in zip(self.processes, self.groups, strict=True):
            members.setdefault(group, set()).add(process)
        return max(map(len, members.values()))


def span(axes: MeshAxes, group_axes: tuple[str, ...], mesh: jax.sharding.Mesh | None) -> Span | None:
    """Returns the span, equal on every process, of a call over `group_axes` of `mesh`. If `mesh` is None or has other
    axes than `axes`, the devices are unknown. Then all devices of the job, by id, count as one group if their number is
    the size of a mesh with `axes`; else the result is None."""
    shape = [size for _, size in axes]
    names = [name for name, _ in axes]
    if mesh is None or tuple(mesh.shape.items()) != axes:
        if math.prod(shape) != jax.device_count():
            return None
        devices = sorted(jax.devices(), key=lambda device: device.id)
        groups = np.zeros(shape, int)
    else:
        devices = list(mesh.devices.flat)
        groups = numbered(axes, [name for name in names if name not in group_axes])
    return Span(
        tuple(device.id for device in devices),
        tuple(device.process_index for device in devices),
        tuple(int(group) for group in groups.flat),
    )


def cost(nprocesses: int) -> tuple[int, int]:
    """Returns (messages that each process sends, rounds) of one barrier of a group of so many processes."""
    rounds = (nprocesses - 1).bit_length()
    return (nprocesses - 1, 1) if nprocesses <= _DIRECT else (rounds, rounds)


def met_processes(axes: MeshAxes, group_axes: tuple[str, ...]) -> int:
    """Returns how many processes meet at the barrier of a call that is being traced; 1 if there is no barrier."""
    found = span(axes, group_axes, jax_compat.ambient_mesh()) if native.has_barrier else None
    return 1 if found is None else found.group_processes


def numbered(axes: MeshAxes, names: Sequence[str]) -> np.ndarray:
    """Returns `lax.axis_index(names)` at each position of a mesh, in an array with the shape of the mesh."""
    sizes = dict(axes)
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    numbers = np.zeros(tuple(sizes.values()), np.int64)
    for name in names:
        numbers = numbers * sizes[name] + coordinates[name]
    return numbers


def mesh_devices(spec: MatmulSpec, mesh: jax.sharding.Mesh | None) -> tuple[int, ...]:
    """Returns the ids of the mesh's devices by position; empty if `mesh` is None or has other axes than the spec."""
    if mesh is None or tuple(mesh.shape.items()) != spec.group.mesh:
        return ()
    return tuple(device.id for device in mesh.devices.flat)


IN_BODY = "the call is in a loop or branch of a program of several processes"


def unshared_reason(
    axes: MeshAxes, group_axes: tuple[str, ...], mesh: jax.sharding.Mesh | None, *, is_for_export: bool = False
) -> tuple[str, bool]:
    """Returns (why CPU devices of a group share no call, or ""; True if all processes of the mesh share memory).

    Devices share calls in a job of one process. In other jobs they do if the group is within one process (known devices
    only), all processes of the mesh share memory, the program is not exported, and the call is in no loop or branch.
    The second result is False in a job of one process, if the program is exported, and if the devices are unknown. A
    shared call is pending until all ranks have come. XLA counts a loop or branch with a shared call as started before
    its collectives, but calls over gloo must start in one order on every rank.
    """
    if jax.process_count() == 1:
        return "", False
    if is_for_export:  # the processes that will run it are not known
        return "a job of several processes exports the program", False
    found = span(axes, group_axes, mesh)
    shares_memory = _shares_memory(found, axes, mesh)
    nprocesses = jax.process_count() if found is None else found.group_processes
    if nprocesses > 1:
        return f"the ranks of a group live in {nprocesses} processes", shares_memory
    if jax_lowering.is_in_body():
        return IN_BODY, shares_memory
    why = "processes communicate over gloo, in the order of XLA's program"
    return "" if shares_memory else why, shares_memory


def _shares_memory(found: Span | None, axes: MeshAxes, mesh: jax.sharding.Mesh | None) -> bool:
    """True if all processes of the mesh are known and share memory with this one."""
    is_placed = found is not None and mesh is not None and tuple(mesh.shape.items()) == axes
    return found is not None and is_placed and native.shared_processes.issuperset(found.processes)


@dataclasses.dataclass(frozen=True)
class Site:
    """One call of a program that is being lowered, with the facts that its processes compare."""

    span: Span
    program: str
    next_index: Callable[[str], int]  # counts the calls of a kind in the program
    axes: MeshAxes
    shares_memory: bool  # all processes of the mesh share memory with this one
    is_in_body: bool  # the call is in a loop or branch

    def barrier(self, call: str, fields: Mapping[str, Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns `operands` for XLA's collective, once every process of this device's group has come to an equal call.
        After a short wait it returns anyway, and the collective waits for the others (docs/faults.md). `call`: its name
        for messages. `fields`: values that have to be equal. If a process does not come at all, or comes with another
        call, all processes raise an error or end."""
        native.register()
        position = self.position()
        moved = [wire.as_moved(x) for x in operands]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moved]
        aliases = {i: i for i in range(len(results))}
        with jax.enable_x64(True):  # attributes are 64-bit
            wait = jax.ffi.ffi_call(native.BARRIER_TARGET, results, input_output_aliases=aliases)
            waited = wait(*moved, position, **self.attributes(call, fields))
        return [wire.from_moved(x, like.dtype) for x, like in zip(waited, operands, strict=True)]

    def position(self) -> jax.Array:
        """Returns an int32 array of `_UNCHEAP` elements. Its first element is this device's position in the mesh."""
        position = lax.axis_index(tuple(name for name, _ in self.axes)).astype(np.int32)
        return lax.iota(np.int32, _UNCHEAP) + position

    def attributes(self, call: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of a barrier or collective. Call it once for each, because it counts them in the
        program. `fields` are compared only if the config says so."""
        described = "\n".join(f"{name}={value}" for name, value in fields.items() if config().compares_calls)
        program, first = self.program, 0
        if program.startswith(jax_partitioner.PARTITIONED):  # a program of one call of another program
            program, _, number = program.rpartition("_")
            first = (int(number) + 1) << 32
        return {
            "program": program,
            "index": np.int64(first + self.next_index(native.BARRIER_TARGET)),
            "repeat": np.int64(first + self.next_index(f"{native.BARRIER_TARGET} {described}")),
            "call": call,
            "fields": described,
            "devices": np.array(self.span.devices, np.int64),
            "processes": np.array(self.span.processes, np.int64),
            "groups": np.array(self.span.groups, np.int64),
            "is_sequential": np.int64(jax.local_device_count() == 1),
        }


def fields(spec: MatmulSpec, a: ArrayType, b: ArrayType) -> dict[str, Any]:
    """Returns the values that have to be equal on every process of a group, by names that users know: extents, types
    and the fields of the spec, except for the source line."""
    found = extents(spec, a.shape, b.shape)
    types = " x ".join(dict.fromkeys((a.dtype.name, b.dtype.name)))
    described: dict[str, Any] = {"m": found.m, "n": found.n, "k": found.k, "dtype": types}
    for name, value in _fields_of(spec).items():
        if name == "source_line":
            continue
        if not dataclasses.is_dataclass(value):
            described[name] = getattr(value, "name", value)
            continue
        prefix = "" if name == "group" else f"{name}."
        described |= {f"{prefix}{part}": getattr(x, "name", x) for part, x in _fields_of(value).items()}
    return described


def _fields_of(x: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name."""
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def site(
    ctx: jax_lowering.LoweringContext, axes: MeshAxes, group_axes: tuple[str, ...], *, is_collective: bool = False
) -> Site | None:
    """Returns the site of the call over `group_axes` that is being lowered; None if it needs no barrier, or has none
    because this is one process, the extension has no barrier, or the devices are unknown. A group within one process
    needs no barrier, except for a collective in a job that shares memory. XLA's collectives use gloo there too, and a
    loop with one of our calls does not keep their order. An exported program has no site, because the processes that
    will run it are unknown."""
    if not native.has_barrier or jax.process_count() == 1 or jax_lowering.is_for_export(ctx):
        return None
    mesh = jax_lowering.lowering_mesh(ctx)
    found = span(axes, group_axes, mesh)
    if found is None:
        return None
    shares_memory = _shares_memory(found, axes, mesh)
    if found.group_processes == 1 and not (is_collective and shares_memory):
        return None
    next_index = functools.partial(jax_lowering.next_index, ctx)
    return Site(found, jax_lowering.program_name(ctx), next_index, axes, shares_memory, jax_lowering.is_in_body())
