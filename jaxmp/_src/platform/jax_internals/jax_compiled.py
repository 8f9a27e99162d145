"""Compiles a JAX program without JAX's caches, and finds the mesh of a lowered program."""

from __future__ import annotations

import functools
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

from jax._src import config as _config
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir as _ir


@functools.cache
def devices_to_compile_for(count: int) -> list[Any]:
    """Returns CPU devices of a separate client, to compile programs for more devices than there are."""
    client: Any = _xla_client.make_cpu_client(num_devices=count)
    return list(client.devices())


def recompile(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compiles a `jax.stages.Lowered` with options of XLA; neither reads nor writes the persistent compilation cache.

    The key of the cache does not include the dump folder of XLA, so a hit would dump nothing.
    """
    module = lowered.compiler_ir("stablehlo").operation
    with module.context, _config.persistent_cache_min_compile_time_secs(float("inf")):
        module.attributes["jaxmp.recompiled"] = _ir.StringAttr.get(uuid.uuid4().hex)
        try:
            return lowered.compile(compiler_options=dict(options))
        finally:
            del module.attributes["jaxmp.recompiled"]


def lowered_mesh(lowered: Any) -> dict[str, int]:
    """Returns {axis: size} of the largest mesh in a lowered program, in the order of the mesh; empty without a mesh."""
    operations = lowered.compiler_ir("stablehlo").body.operations
    meshes = (str(each) for each in operations if each.operation.name == "sdy.mesh")
    found = [{name: int(size) for name, size in re.findall(r'"([^"]*)"=(\d+)', text)} for text in meshes]
    return max(found, key=lambda mesh: math.prod(mesh.values()), default={})
