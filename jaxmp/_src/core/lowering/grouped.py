"""Lowers products of groups of rows: to hostmp's custom call on the shards of CPU devices, elsewhere to XLA's ragged
product.

Ranks of several processes that share memory exchange only rows: each rank reads the rows of its groups from the other
ranks, and then the results of its own rows. Ranks that share no memory gather matrices, or reduce-scatter their
sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.lowering import decide, process_barrier, rules
from jaxmp._src.core.lowering.ffi_call import mesh_position
from jaxmp._src.core.lowering.process_collectives import SharedMemory
from jaxmp._src.core.primitive.grouped import GroupedSpec, batch_of
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering
from jaxmp._src.platform.jax_internals.jax_lowering import mlir
from jaxmp._src.platform.runtime import native


def grouped_rule(platform: str) -> jax_lowering.LoweringRule:
    """Returns the rule of `grouped_p`. The forms of a decision are in `decide.Decision`."""

    def rule(ctx: jax_lowering.LoweringContext, *nodes: Any, spec: GroupedSpec) -> Any:
        where = decide.in_rule(ctx, platform, spec.mesh, spec.experts)
        decision = decide.grouped(spec, [*ctx.avals_in, *ctx.avals_out], where)
        local = _custom_call if decision.implementation == "host" else _of_xla
        is_alone = decision.form in ("local", "shared")
        site = None
        if platform == "cpu" and not is_alone:
            site = process_barrier.site(ctx, spec.mesh, spec.experts, is_collective=True)

        def lower(x: jax.Array, w: jax.Array, bounds: jax.Array) -> jax.Array:
            alone = dataclasses.replace(spec, experts=(), mesh=())
            if is_alone:
                return local(x, w, bounds, spec if decision.form == "shared" else alone)
            if decision.form == "exchange":
                assert site is not None
                same = dataclasses.replace(spec, implementation=None)
                fields = {"shapes of shards": (x.shape, w.shape), "dtype": x.dtype.name, "spec": same}
                memory = SharedMemory(site, spec.function, fields)
                shards = [y[0] for y in (x, w, bounds)]
                return _exchanged(memory, shards, spec, functools.partial(local, spec=alone))[None]
            move = functools.partial(rules.communicated, site, axes=spec.experts, dimensions=(1,), platform=platform)
            if not spec.is_contraction:
                return local(x, move("all_gather", w, caller=spec.function), bounds, alone)
            sums = local(x, w, bounds, dataclasses.replace(alone, out_dtype=accumulator(x.dtype)))
            return move("reduce_scatter", sums, caller=spec.function).astype(spec.out_dtype)

        with jax_compat.off_explicit_mesh():
            return mlir.lower_fun(lower, multiple_results=False)(ctx, *nodes)

    return rule


def _exchanged(
    memory: SharedMemory, operands: Sequence[jax.Array], spec: GroupedSpec, product: Callable[..., jax.Array]
) -> jax.Array:
    """Returns the product of groups of rows in several processes. Each rank collects the rows of its groups, sorted by
    group and then by rank, so that sums have the bits of one process, and passes them to `product`. A contraction
    returns the rank's own groups. A product of rows returns the rank's own rows, in their order; rows of no group are
    0. `operands`: x, w and bounds; they and the result have no batch dimension. The operands and the result of
    `product` have one, of extent 1."""
    x, w, bounds = operands
    ranks, m, axes = spec.nranks, x.shape[0], spec.experts
    bounds = memory.all_gather(jnp.clip(bounds, 0, m)[None], axes, 0)  # (ranks, groups + 1)

    def by_owner(of_each: jax.Array) -> jax.Array:
        """Rearranges (ranks, groups) to (owner, group, rank)."""
        return of_each.reshape(ranks, ranks, -1).transpose(1, 2, 0)

    first, sizes = by_owner(bounds[:, :-1]), by_owner(jnp.diff(bounds))
    ends = jnp.cumsum(sizes.reshape(ranks, -1), 1).reshape(sizes.shape)
    begin, me = ends - sizes, lax.axis_index(axes)
    owner, rank = (lax.broadcasted_iota(np.int32, sizes.shape, i) for i in (0, 2))
    take = jnp.stack([rank[me], first[me], sizes[me], begin[me]], -1).reshape(-1, 4)
    x, *others = (
        memory.rows(y, ranks * m, jnp.full(ranks, m), take, axes) for y in ([x, w] if spec.is_contraction else [x])
    )
    own = jnp.concatenate([jnp.zeros(1, np.int32), ends[me, :, -1]])
    d: jax.Array = product(x[None], others[0][None] if others else w[None], own[None])[0]
    if spec.is_contraction:
        return d
    back = jnp.stack([each[:, :, me] for each in (owner, begin, sizes, first)], -1).reshape(-1, 4)
    d = memory.rows(d, m, ends[:, -1, -1], back, axes)
    at = jnp.arange(m, dtype=np.int32)[:, None]
    return jnp.where((at >= bounds[me, 0]) & (at < bounds[me, -1]), d, 0)


def _custom_call(x: jax.Array, w: jax.Array, bounds: jax.Array, spec: GroupedSpec) -> jax.Array:
    """Returns the product by hostmp: (batch, m, n), or (batch, groups of this rank, k, n) for a contraction. Ranks of
    one process that multiply together share the call."""
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
    mesh, experts = (spec.mesh, spec.experts) if spec.nranks > 1 else ((), ())
    names = [name for name, _ in mesh]
    axes = {
        "mesh_shape": np.array([size for _, size in mesh], np.int64),
        "axes_row": np.array([names.index(axis) for axis in experts], np.int64),
    }
    position = [mesh_position(spec.mesh)] if spec.nranks > 1 else []
    (m, k), types = x.shape[1:], "*".join(y.dtype.name for y in (x, w))
    name = f"jaxmp ragged_dot {m}x{k}x{n} of {bounds.shape[1] - 1} {types}->{spec.out_dtype.name} {spec.level.name}"
    with jax.enable_x64(True), jax.named_scope(name):  # attributes are 64-bit
        call = jax.ffi.ffi_call(native.GROUPED_TARGET, result)
        d: jax.Array = call(x, w, bounds, *position, **{name: np.int64(flag) for name, flag in flags.items()}, **axes)
    return d


_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)
_CONTRACTION = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def _of_xla(x: jax.Array, w: jax.Array, bounds: jax.Array, spec: GroupedSpec) -> jax.Array:
    """Returns the product by `lax.ragged_dot_general` or the user's function, in `spec.out_dtype`: (batch, m, n), or
    (batch, groups, k, n) for a contraction. The function gets one index of the batch at a time, and rows rotated so
    that group 0 begins at row 0."""
    x, w = low_precision.widened(x, w)
    given = spec.implementation
    multiply = given if callable(given) else functools.partial(lax.ragged_dot_general, precision=lax.Precision.HIGHEST)

    def product(x: jax.Array, w: jax.Array, bounds: jax.Array) -> jax.Array:
        bounds = jnp.clip(bounds, 0, x.shape[0])
        first, sizes, sums = bounds[0], jnp.diff(bounds), accumulator(x.dtype)
        x = jnp.roll(x, -first, 0)
        if spec.is_contraction:
            w = jnp.roll(w, -first, 0)
            return multiply(x, w, sizes, _CONTRACTION, preferred_element_type=sums)
        w = w.swapaxes(1, 2) if spec.is_transposed else w
        return jnp.roll(multiply(x, w, sizes, _ROWS, preferred_element_type=sums), first, 0)

    batch = batch_of((x, w, bounds))
    if batch == 1:
        return product(x[0], w[0], bounds[0])[None].astype(spec.out_dtype)
    every = [jnp.broadcast_to(y, (batch, *y.shape[1:])) for y in (x, w, bounds)]
    d: jax.Array = lax.map(lambda each: product(*each), every)
    return d.astype(spec.out_dtype)
