"""The index of a device in its mesh, by which a call knows its rank."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import stablehlo

from jaxmp._src.jax_internals import jax_compat, jax_lowering
from jaxmp._src.jax_internals.jax_lowering import mlir

Axes = tuple[tuple[str, int], ...]

mesh_position_p = jax_compat.make_primitive("jaxmp_mesh_position", multiple_results=False)


def mesh_position(axes: Axes) -> jax.Array:
    """The index of this device in a mesh with these axes and sizes, a uint32.

    `lax.axis_index` computes it by a few operations, for which XLA on CPUs starts LLVM: of a program with one call they
    were a third of the compile time. Inside a shard_map over all axes it is the number that XLA has for the device.
    """
    return cast(jax.Array, mesh_position_p.bind(axes=axes))


def _type(*, axes: Axes) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((), np.dtype(np.uint32))


def _lower(ctx: jax_lowering.LoweringContext, *, axes: Axes) -> Any:
    mesh = jax_lowering.manual_mesh(ctx)
    if mesh is not None and tuple(mesh.shape.items()) == axes:
        return [stablehlo.partition_id()]

    def index() -> jax.Array:
        return lax.axis_index(tuple(name for name, _ in axes)).astype(np.uint32)

    return mlir.lower_fun(index, multiple_results=False)(ctx)


mesh_position_p.def_abstract_eval(_type)
mlir.register_lowering(mesh_position_p, _lower)
