"""A custom call that XLA's partitioner has this module replace by one device's part of a product.

`jax.experimental.custom_partitioning` does the same, but names a call by the address of a Python object: a program with
one is neither found again in a persistent compilation cache nor exported. Here a call is named by its description, so
any process that has imported jaxmp can partition it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._src.jax_internals import jax_lowering, jax_partitioner
from jaxmp._src.jax_internals.jax_partitioner import Global, OnShards
from jaxmp._src.runtime import native
from jaxmp._src.spec.options import Mesh

TARGET = "jaxmp_partitioned_matmul"

# (a function of one device's shards, the shardings of the operands, those of the results); None for a sharding leaves
# the one that XLA proposes.
Placed = tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]


def lower(
    ctx: jax_lowering.LoweringContext, operands: Sequence[Any], call: dict[str, Any], sharding_rule: str
) -> Sequence[Any]:
    """The results of a call that is to be partitioned; `call` describes it by JSON values."""
    native.register()  # the executable may come from a cache, and then nothing asks us
    mesh = jax_lowering.global_mesh(ctx)
    described: dict[str, Any] = {
        "call": call,
        "platform": jax_lowering.platform(ctx),
        "mesh": [] if mesh is None else list(mesh.shape.items()),
        "x64": bool(jax.config.read("jax_enable_x64")),
    }
    if native.has_barrier():  # processes tell the calls of a program apart
        described["index"] = jax_lowering.next_index(ctx, native.BARRIER_TARGET)
        described["program"] = jax_lowering.program_name(ctx)
    if mesh is not None and not jax_lowering.is_for_export(ctx):
        described["devices"] = [device.id for device in mesh.devices.flat]
    text = json.dumps(described, sort_keys=True)
    return jax_partitioner.partitioned_call(ctx, operands, target=TARGET, text=text, sharding_rule=sharding_rule)


def register(place: Callable[[dict[str, Any], Mesh, Sequence[Global], Sequence[Global]], Placed]) -> None:
    """Have `place(call, mesh, operands, results)` partition the calls."""

    def partition(text: str, operands: Sequence[Global], results: Sequence[Global]) -> OnShards:
        described = json.loads(text)
        platform, x64 = described["platform"], described["x64"]
        mesh = _mesh(described["mesh"], described.get("devices"), platform)
        name = f"{jax_partitioner.PARTITIONED}{described.get('program', '')}_{described.get('index', 0)}"
        return OnShards(*place(described["call"], mesh, operands, results), mesh, platform, x64, name)

    jax_partitioner.register_partitioner(TARGET, partition)


def _mesh(axes: Sequence[tuple[str, int]], ids: Sequence[int] | None, platform: str) -> Mesh:
    """The mesh of these axes; of devices where they are said."""
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    if ids is None:
        return jax.sharding.AbstractMesh(sizes, names)
    devices = {device.id: device for device in jax.devices(platform)}
    return jax.sharding.Mesh(np.array([devices[id] for id in ids]).reshape(sizes), names)
