"""`ragged_all_to_all`: lax's own on accelerators; an all-gather on CPU devices, where XLA does not have it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmp._src.core.ops.ragged_dot import check_integers
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.spec.options import AxisName
from jaxmp._src.core.spec.refusal import InvalidValue, NotAvailable
from jaxmp._src.core.validation import operand_checks
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing


@public
def ragged_all_to_all(
    operand: ArrayLike,
    output: ArrayLike,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """`lax.ragged_all_to_all`, inside `jax.shard_map`, also on CPU devices.

    Each rank sends slices of rows of `operand`, the same number to each rank. Slice i has the `send_sizes[i]` rows from
    `input_offsets[i]` on, and is written to the receiver's `output` from row `output_offsets[i]` on.

    On CPU devices it is an all-gather of the operands, and each rank takes its rows from the result. It works under any
    transformation, and a row that is sent twice gets the sum of both cotangents. Slices of one receiver must not
    overlap. On other devices it is lax's own.

    Args:
      operand: (n, ...); output: (m, ...), with the same dtype and the same further dimensions.
      input_offsets, send_sizes, output_offsets, recv_sizes: (slices,), integers; the first slices go to, and come from,
        the first rank. On CPU devices `recv_sizes` is ignored, because the senders' sizes are enough.
      axis_name: the mesh axis, or axes.
      axis_index_groups: as in lax; not on CPU devices.

    Returns: (m, ...), `output` with the received rows.

    Raises: ValueError for shapes that do not fit and outside of `jax.shard_map`, TypeError for offsets and sizes that
    are not integers, NotImplementedError for `axis_index_groups` on CPU devices.

    Source: `jax.lax.ragged_all_to_all` (docs.jax.dev).

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> def two_rows(x):
    ...     first, at, two = jnp.array([0]), jnp.array([1]), jnp.array([2])
    ...     return jaxmp.ragged_all_to_all(x, jnp.zeros(4), first, two, at, two, axis_name="x")
    >>> jax.shard_map(two_rows, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))(jnp.arange(1.0, 4.0)).tolist()
    [0.0, 1.0, 2.0, 0.0]
    """
    sizes = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    for name, x in (("operand", operand), ("output", output)):
        operand_checks.check_array(name, x)
    for name, x in sizes.items():
        check_integers(name, x)
    x, into, send = jnp.asarray(operand), jnp.asarray(output), jnp.asarray(send_sizes)
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if x.ndim < 1 or x.shape[1:] != into.shape[1:] or x.dtype != into.dtype:
        raise InvalidValue(
            f"operand and output may differ in their first dimension only, got {x.dtype}{x.shape} and "
            f"{into.dtype}{into.shape}"
        )
    if unknown := set(axes).difference(jax_tracing.manual_axes()):
        raise InvalidValue(
            f"axis_name={next(iter(unknown))!r} names no axis here; call it inside a jax.shard_map over that axis"
        )
    ranks = lax.axis_size(axes)
    if any(jnp.shape(each) != send.shape for each in sizes.values()) or send.ndim != 1 or send.size % ranks:
        shapes = ", ".join(f"{name} {jnp.shape(each)}" for name, each in sizes.items())
        raise InvalidValue(f"offsets and sizes must have one length, a multiple of the {ranks} ranks, got {shapes}")
    if jax_compat.default_platform() != "cpu":
        return lax.ragged_all_to_all(
            x, into, *map(jnp.asarray, sizes.values()), axis_name=axes, axis_index_groups=axis_index_groups
        )
    if axis_index_groups is not None:
        raise NotAvailable("axis_index_groups are not available on CPU devices; make the groups an axis of the mesh")
    if 0 in x.shape:  # nothing is sent
        return collectives.cast_varying(into, axes, source_line="ragged_all_to_all")
    rows, slices = x.shape[0], jnp.stack([jnp.asarray(each) for each in list(sizes.values())[:3]])
    every = collectives.all_gather(x, axes, axis=0, source_line="ragged_all_to_all")
    told = collectives.all_gather(slices.astype(jnp.int32)[None], axes, axis=0, source_line="ragged_all_to_all")
    mine = told.reshape(ranks, 3, ranks, -1)[:, :, lax.axis_index(axes)]  # (sender, 3, slice)
    begin, size, to = (each.reshape(1, -1) for each in mine.swapaxes(0, 1))
    begin = begin + rows * jnp.arange(ranks, dtype=jnp.int32).repeat(to.size // ranks)[None]
    # For each row of the output: its slice, and its index among all rows that are sent.
    at = jnp.arange(into.shape[0], dtype=jnp.int32)[:, None]
    is_within = (to <= at) & (at < to + size)
    found = jnp.where(is_within, begin - to + at, 0).sum(1)
    is_received = is_within.any(1).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(is_received, every.at[found].get(mode="clip"), into)
