"""How products of groups of rows are lowered: hostmp's custom call on the shards of CPU devices, XLA's ragged product
elsewhere. Ranks that cannot multiply together gather matrices, and reduce-scatter their sums."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.jax_internals import jax_compat, jax_lowering
from jaxmp._src.jax_internals.jax_lowering import mlir
from jaxmp._src.lowering import process_barrier, xla_matmul
from jaxmp._src.lowering.ffi_call import mesh_position
from jaxmp._src.primitive.grouped import GroupedSpec, batch_of
from jaxmp._src.runtime import native
from jaxmp._src.spec.matmul_spec import accumulator
from jaxmp._src.spec.refusal import NotAvailable


def grouped_rule(platform: str) -> jax_lowering.LoweringRule:
    def rule(ctx: jax_lowering.LoweringContext, *nodes: Any, spec: GroupedSpec) -> Any:
        why = "" if platform == "cpu" else f"the platform is {jax_lowering.platform(ctx)!r}"
        why = why or ("" if jax_lowering.is_on_shards(ctx) else "XLA's partitioner chooses the shardings")
        if why and spec.implementation == "host":
            raise NotAvailable(f'implementation="host" is not available, for {why}; pass implementation=None')
        is_host = not why and spec.implementation != "xla"
        if spec.level.fixed_order and not is_host:
            raise spec.level.refusal(f"is not available, for {why or 'XLA is asked for'}")

        apart = process_barrier.why_apart(spec.mesh, spec.experts, lambda: jax_lowering.lowering_mesh(ctx))
        is_together = is_host and not apart

        def local(x: jax.Array, w: jax.Array, bounds: jax.Array, spec: GroupedSpec) -> jax.Array:
            return (_custom_call if is_host else _of_xla)(x, w, bounds, spec)

        def lower(x: jax.Array, w: jax.Array, bounds: jax.Array) -> jax.Array:
            if is_together or not spec.experts:
                return local(x, w, bounds, spec)
            alone = dataclasses.replace(spec, experts=(), mesh=())
            if not spec.is_contraction:
                w = xla_matmul.collective("all_gather", w, spec.experts, (1,), None, platform)
                return local(x, w, bounds, alone)
            sums = local(x, w, bounds, dataclasses.replace(alone, out_dtype=accumulator(x.dtype)))
            sums = xla_matmul.collective("reduce_scatter", sums, spec.experts, (1,), None, platform)
            return sums.astype(spec.out_dtype)

        with jax_compat.off_explicit_mesh():
            return mlir.lower_fun(lower, multiple_results=False)(ctx, *nodes)

    return rule


def _custom_call(x: jax.Array, w: jax.Array, bounds: jax.Array, spec: GroupedSpec) -> jax.Array:
    native.register()
    n = w.shape[2] if spec.is_transposed else w.shape[-1]
    groups = (bounds.shape[1] - 1) // spec.nranks
    shape = (groups, x.shape[2], n) if spec.is_contraction else (x.shape[1], n)
    result = jax.ShapeDtypeStruct((batch_of((x, w, bounds)), *shape), spec.out_dtype)
    flags = {
        "is_contraction": spec.is_contraction,
        "is_transposed": spec.is_transposed,
        "is_fixed_order": spec.level.fixed_order,
    }
    names = [name for name, _ in spec.mesh]
    axes = {
        "mesh_shape": np.array([size for _, size in spec.mesh], np.int64),
        "axes_row": np.array([names.index(axis) for axis in spec.experts], np.int64),
    }
    position = [mesh_position(spec.mesh)] if spec.nranks > 1 else []
    (m, k), types = x.shape[1:], "*".join(y.dtype.name for y in (x, w))
    name = f"jaxmp ragged_dot {m}x{k}x{n} of {bounds.shape[1] - 1} {types}->{spec.out_dtype.name} {spec.level.name}"
    with jax.enable_x64(True), jax.named_scope(name):  # attributes are 64-bit
        call = jax.ffi.ffi_call(native.GROUPED_TARGET, result)
        d: jax.Array = call(x, w, bounds, *position, **{name: np.int64(flag) for name, flag in flags.items()}, **axes)
    return d


_CONTRACTION = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def _of_xla(x: jax.Array, w: jax.Array, bounds: jax.Array, spec: GroupedSpec) -> jax.Array:
    """By `lax.ragged_dot_general`, whose first group begins with the first row."""

    def product(x: jax.Array, w: jax.Array, bounds: jax.Array) -> jax.Array:
        bounds = jnp.clip(bounds, 0, x.shape[0])
        first, sizes, sums = bounds[0], jnp.diff(bounds), accumulator(x.dtype)
        x = jnp.roll(x, -first, 0)
        if spec.is_contraction:
            w = jnp.roll(w, -first, 0)
            return lax.ragged_dot_general(x, w, sizes, _CONTRACTION, preferred_element_type=sums)
        w = w.swapaxes(1, 2) if spec.is_transposed else w
        return jnp.roll(lax.ragged_dot(x, w, sizes, preferred_element_type=sums), first, 0)

    batch = batch_of((x, w, bounds))
    if batch == 1:
        return product(x[0], w[0], bounds[0])[None].astype(spec.out_dtype)
    every = [jnp.broadcast_to(y, (batch, *y.shape[1:])) for y in (x, w, bounds)]
    d: jax.Array = lax.map(lambda each: product(*each), every)
    return d.astype(spec.out_dtype)
