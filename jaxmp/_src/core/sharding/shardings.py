"""Converts a user's shardings to one tuple of axis names per dimension, slowest first, and checks them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxmp._src.core.contraction.contraction import Contraction, Dim, Dims, Layout
from jaxmp._src.core.spec.extents import axes_text
from jaxmp._src.core.spec.refusal import InvalidSharding, InvalidValue
from jaxmp._src.platform.runtime.types import Shape


@functools.lru_cache(maxsize=4096)
def to_dims(argument: str, spec: PartitionSpec, ndim: int, mesh: tuple[str, ...] | None) -> Dims:
    """Converts a user's PartitionSpec as `as_dims` does. Raises ValueError if it has more entries than dimensions or an
    entry that does not name axes, and for axes that are used twice or not in `mesh` (None: any axes)."""
    if len(spec) > ndim:
        raise InvalidValue(f"the sharding of {argument}, {spec}, has {len(spec)} entries for {ndim} dimensions")
    used: set[str] = set()
    for entry in spec.partitions:
        if entry is not None and not isinstance(entry, str | tuple):
            raise InvalidValue(f"the sharding of {argument}, {spec}, may hold axis names, tuples of them and None")
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if mesh is not None and axis not in mesh:
                raise InvalidValue(f"the sharding of {argument} names axis {axis!r}, the mesh has {mesh}")
            if axis in used:
                raise InvalidValue(f"the sharding of {argument} uses axis {axis!r} for two dimensions")
            used.add(axis)
    return as_dims(argument, spec, ndim)


@functools.lru_cache(maxsize=4096)
def as_dims(argument: str, spec: PartitionSpec, ndim: int) -> Dims:
    """Converts a PartitionSpec to one tuple of axis names per dimension. Refuses unreduced axes (ShardingTypeError)."""
    if spec.unreduced:
        raise InvalidSharding(
            f"{argument} cannot be unreduced, but each device holds a term of a sum over {sorted(spec.unreduced)}; "
            "take the sum first (jax.sharding.reshard)"
        )
    dims: list[Dim] = [()] * ndim
    for i, entry in enumerate(spec.partitions):
        dims[i] = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return tuple(dims)


def check_each(given: Any, count: int, names: str) -> None:
    """Raises ValueError unless in_shardings are None, or a sharding for each of `count` arrays. `names`: of these."""
    is_group = isinstance(given, tuple | list) and not isinstance(given, PartitionSpec)
    if given is not None and (not is_group or len(given) != count):
        kind = {2: "pair", 3: "triple"}[count]
        raise InvalidValue(f"in_shardings must be a {kind}, one sharding for {names}, got {given!r}")


def check_dims(argument: str, dims: Dims, shape: Shape, mesh: Mapping[str, int]) -> None:
    """Raises ValueError if axes do not divide the shape."""
    for i, (dim, extent) in enumerate(zip(dims, shape, strict=True)):
        size = math.prod(map(mesh.__getitem__, dim))
        if extent % size:
            is_number = isinstance(extent, int)
            remedy = f"pad it to {-(-extent // size) * size}" if is_number else f"export for an extent of {size} * n"
            raise InvalidValue(
                f"dimension {i} of {argument} has extent {extent}, which axis {axes_text(dim)} of size {size} "
                f"does not divide (global shape {tuple(shape)}); {remedy}, or shard it differently"
            )


def with_dims(
    product: Contraction,
    sharded: tuple[Dims, Dims, Dims | None],
    shapes: Sequence[Shape],
    mesh: Mapping[str, int],
    unreduced: Dim = (),
) -> Contraction:
    """Returns `product` with these shardings of (a, b, d), and with d's deferred axes `unreduced`. None for d means the
    default of `lax.dot_general`. Raises ValueError if axes do not divide `shapes`, and ShardingTypeError if the default
    is ambiguous, or if `unreduced` are not the axes of the contraction in both operands."""
    a, b, out = sharded
    layout = Layout(a, b, _default_result(product, a, b) if out is None else out)
    for argument, dims, shape in zip(("{a}", "{b}", "the result"), layout, shapes, strict=True):
        check_dims(argument, dims, shape, mesh)
    product = product.replace(layout)
    if unreduced:
        of_a, of_b = ([product.sharded(which, index) for index in product.contracted] for which in "ab")
        if of_a != of_b or set(sum(of_a, ())) != set(unreduced):
            raise InvalidSharding(
                f"out_sharding's unreduced axes should be equal to the contracting specs, got {unreduced}, but the "
                f"contraction is sharded over {of_a} in {{a}} and {of_b} in {{b}}; pass another (jax.sharding.reshard)"
            )
    return dataclasses.replace(product, unreduced=unreduced)


def _default_result(product: Contraction, a: Dims, b: Dims) -> Dims:
    """Returns the default sharding of a result, as in `lax.dot_general`: the batch is sharded as in a, and the free
    dimensions of a and b as in their operand. Raises ShardingTypeError if the result is ambiguous."""
    of_a, of_b = dict(zip(product.a, a, strict=True)), dict(zip(product.b, b, strict=True))
    for index in product.batch:
        if of_a[index] and of_b[index] and of_a[index] != of_b[index]:
            raise InvalidSharding(
                f"batch dimension {product.a.index(index)} of {{a}} is sharded over {axes_text(of_a[index])} but "
                f"dimension {product.b.index(index)} of {{b}} over {axes_text(of_b[index])}; pass out_sharding, or "
                "reshard one of them"
            )
    for k_a, k_b in ((of_a[index], of_b[index]) for index in product.contracted):
        if k_a and k_b:
            both = axes_text(k_a) if k_a == k_b else f"{axes_text(k_a)} in {{a}} and {axes_text(k_b)} in {{b}}"
            raise InvalidSharding(
                f"the contraction is sharded over axis {both} and it is ambiguous how the result should be "
                f"sharded; pass out_sharding (without {axes_text(k_a)} to all-reduce, with it on the rows to "
                "reduce-scatter)"
            )
    batch, rows, cols = (
        sum((where[index] for index in indices), ())
        for indices, where in ((product.batch, of_a), (product.rows, of_a), (product.cols, of_b))
    )
    if shared := [axis for axis in rows if axis in cols]:
        raise InvalidSharding(
            f"rows of {{a}} and columns of {{b}} are both sharded over axis {shared[0]!r}; pass out_sharding, "
            f"without {shared[0]!r} on the rows to gather {{a}}, or without it on the columns to gather {{b}}"
        )
    if repeated := [axis for axis in batch if axis in cols]:
        raise InvalidSharding(
            f"a batch dimension and a free one are both sharded over axis {repeated[0]!r}, so the sharding of "
            "the result is ambiguous; pass out_sharding"
        )
    return tuple((of_b | of_a)[index] for index in product.d)  # a batch has a's sharding, as in JAX 0.10
