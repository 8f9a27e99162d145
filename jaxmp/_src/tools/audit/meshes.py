"""The sides (`Side`) of an audit that differ by their mesh: one device and more, one process and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.audit import bits
from jaxmp._src.tools.audit.side import Side
from jaxmp._src.tools.audit.variation import Variation


def of_process(trace: Callable[..., Side], arrays: Sequence[Any]) -> Iterator[tuple[Variation, Side]]:
    """Yields (variation, side) for one device, and for larger meshes up to the mesh of the operands (`_mesh_of`), as
    `_smaller` gives them. `trace` makes a side of arrays and a mesh. Raises ValueError if the mesh of the operands has
    fewer than 2 devices or there is none, or as `_side` does."""
    mesh = _mesh_of(arrays)
    if mesh is None or mesh.size < 2:
        raise ValueError(
            f'audit: vary="mesh" needs operands on one mesh of at least 2 devices, got {_described(mesh)}; place them'
            ' with jax.device_put(x, NamedSharding(mesh, spec)), or pass vary="batch"'
        )
    for sizes in _smaller(tuple(mesh.shape.values())):
        part = _with_devices(mesh, mesh.devices[tuple(slice(size) for size in sizes)])
        yield Variation(_name(part)), _side(trace, part, arrays)


def across_processes(trace: Callable[..., Side], arrays: Sequence[Any]) -> Iterator[tuple[Variation, Side]]:
    """Yields two (variation, side): for the largest of `_smaller` meshes that this process's devices alone can form,
    and for the mesh of the operands. Raises ValueError unless that mesh has devices of every process of a job of
    several."""
    mesh = _mesh_of(arrays)
    owners = {device.process_index for device in mesh.devices.flat} if mesh is not None else set()
    if len(owners) < 2 or len(owners) < jax.process_count():
        raise ValueError(
            'audit: vary="processes" needs operands on one mesh with devices of every process of a job of several, got'
            f" {_described(mesh)} of {len(owners)} of {jax.process_count()}; start the job with jaxmp.distributed, or"
            ' pass vary="mesh" to compare meshes of one process'
        )
    assert mesh is not None
    local = jax.local_devices(backend=mesh.devices.flat[0].platform)
    sizes = max((one for one in _smaller(tuple(mesh.shape.values())) if np.prod(one) <= len(local)), key=np.prod)
    alone = _with_devices(mesh, np.array(local[: np.prod(sizes)]).reshape(sizes))
    yield Variation(f"{_name(alone)} of one process"), _side(trace, alone, arrays)
    yield Variation(f"{_name(mesh)} of {len(owners)} processes", across=True), _side(trace, mesh, arrays)


def _mesh_of(arrays: Sequence[Any]) -> Mesh | None:
    """Returns the mesh of the operands, or else of `jax.set_mesh`, or None. Raises ValueError for several meshes."""
    found: set[Any] = {x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding)}
    if len(found) > 1:
        raise ValueError(
            f"audit: the operands have to be on one mesh, got {', '.join(sorted(map(_described, found)))}; place them"
            " with jax.device_put(x, NamedSharding(mesh, spec))"
        )
    return next(iter(found), None) or jax_compat.ambient_mesh()


def _side(trace: Callable[..., Side], mesh: Mesh, arrays: Sequence[Any]) -> Side:
    """Copies the arrays to `mesh`, with the spec that each has, or replicated without one, and traces there. Raises
    ValueError if that fails on another mesh than the operands'; on theirs, raises the program's error."""
    try:
        hosts = [bits.pull(x) for x in arrays]
        with jax.set_mesh(mesh):
            placed = [bits.place(host, NamedSharding(mesh, _spec(x))) for host, x in zip(hosts, arrays, strict=True)]
            for i, x in enumerate(arrays):
                if bits.is_key(x):
                    placed[i] = jax.random.wrap_key_data(placed[i], impl=jax.random.key_impl(x))
        return trace(placed, mesh)
    except Exception as error:
        if mesh == _mesh_of(arrays):
            raise  # it fails without audit too
        raise ValueError(
            f"audit: fn cannot be traced on the mesh {dict(mesh.shape)}; it has to take every array that is on a"
            " mesh as an argument, and its mesh from jax.sharding.get_mesh() or from its operands"
        ) from error


def _with_devices(mesh: Mesh, devices: np.ndarray) -> Mesh:
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _described(mesh: Mesh | None) -> str:
    return "no mesh" if mesh is None else str(dict(mesh.shape))


def _name(mesh: Mesh) -> str:
    name = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{mesh.size} device{'s' * (mesh.size != 1)} ({name})" if len(mesh.shape) > 1 else name


def _smaller(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns sizes of meshes, from all ones up to `sizes`; each step back divides all by their least prime factor."""
    found = [sizes]
    while max(found[0]) > 1:
        factors = (next((n for n in range(2, size) if size % n == 0), size) for size in found[0])
        found.insert(0, tuple(size // factor for size, factor in zip(found[0], factors, strict=True)))
    return found


def _spec(x: jax.Array) -> P:
    return x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()
