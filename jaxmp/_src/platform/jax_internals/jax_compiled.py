"""Compiled programs of JAX: compile one apart from JAX's caches, and find the mesh of a lowered one."""

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
    """CPU devices of a client of their own, for programs of more devices than there are, which only compile."""
    client: Any = _xla_client.make_cpu_client(num_devices=count)
    return list(client.devices())


def compile_anew(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compile a `jax.stages.Lowered` with options of XLA, neither from the persistent compilation cache nor into it.

    The cache's key leaves out where XLA dumps to, so a hit would dump nothing.
    """
    module = lowered.compiler_ir("stablehlo").operation
    with module.context, _config.persistent_cache_min_compile_time_secs(float("inf")):
        module.attributes["jaxmp.compiled_anew"] = _ir.StringAttr.get(uuid.uuid4().hex)
        try:
            return lowered.compile(compiler_options=dict(options))
        finally:
            del module.attributes["jaxmp.compiled_anew"]


def lowered_mesh(lowered: Any) -> dict[str, int]:
    """The axes of the largest mesh that a lowered program names, in the order of its devices; empty without one."""
    operations = lowered.compiler_ir("stablehlo").body.operations
    meshes = (str(each) for each in operations if each.operation.name == "sdy.mesh")
    found = [{name: int(size) for name, size in re.findall(r'"([^"]*)"=(\d+)', text)} for text in meshes]
    return max(found, key=lambda mesh: math.prod(mesh.values()), default={})
