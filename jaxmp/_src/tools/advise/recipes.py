"""The known ways to share a program among devices, as shardings of its arguments.

A recipe on two mesh axes has two parts, a recipe of `RECIPES` for each. Dimensions with one class, an integer, are one
dimension of the program, such as the batch (`dimensions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmp._src.tools.advise.dimensions import Dimensions

# The axes of a mesh and their sizes.
Mesh = tuple[tuple[str, int], ...]

# The dimensions that each recipe splits over its devices.
RECIPES = {
    "data": ("batch",),
    "fully sharded": ("batch", "parameters"),
    "tensor": ("hidden",),
    "sequence": ("sequence",),
    "expert": ("experts",),
    "data and expert": ("batch", "experts"),
}
PAIRS = (("data", "tensor"), ("fully sharded", "tensor"), ("data", "sequence"), ("data", "expert"))


class Recipe(NamedTuple):
    """A way to share a program: its name, a mesh, and the sharding of each argument."""

    name: str
    mesh: Mesh
    specs: tuple[PartitionSpec, ...]


class Leaf(NamedTuple):
    """An array argument: the classes of its dimensions, its shape, and whether it is of the batch."""

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    is_batch: bool


def recipes(
    dimensions: Dimensions, types: Sequence[Any], nparameters: int, devices: int, mesh: Mesh
) -> Iterator[Recipe]:
    """Yields the recipes for a program on `mesh`: each of `RECIPES` on all axes together, and each of `PAIRS` with the
    second recipe on the last axis, if there are several axes. If `mesh` is empty, yields each of `RECIPES` on an axis
    "x" of `devices`, and each of `PAIRS` on axes "x" and "y" of each size of "y" in `_factors`. Leaves out repetitions,
    and recipes with None as `specs`. If none is left, yields "whole", which shards nothing. `types`: of the
    program's arguments. `nparameters`: how many of them, from the first on, are parameters; 0 if they are unknown."""
    classes = _Classes(dimensions, types, nparameters)
    names, seen = tuple(name for name, _ in mesh), set[Any]()
    whole = mesh or (("x", devices),)
    single = [(whole, ((name, tuple(axis for axis, _ in whole)),)) for name in RECIPES]
    meshes = [mesh] if len(mesh) > 1 else [(("x", devices // n), ("y", n)) for n in _factors(devices)] * (not mesh)
    paired = [(m, ((x, (names or ("x", "y"))[:-1]), (y, (names or ("x", "y"))[-1:]))) for m in meshes for x, y in PAIRS]
    for on, parts in (*single, *paired):
        specs = classes.specs(parts, dict(on))
        if specs is not None and (on, specs) not in seen:
            seen.add((on, specs))
            yield Recipe(" x ".join(name for name, _ in parts), on, specs)
    if not seen:
        yield Recipe("whole", whole, (PartitionSpec(),) * len(types))


def _factors(devices: int) -> list[int]:
    """Returns at most two sizes of a second axis, ascending: the divisors of `devices` nearest to its square root, but
    not 1 or `devices`."""
    found = [n for n in range(2, devices) if devices % n == 0]
    return sorted(sorted(found, key=lambda n: abs(math.log(n * n / devices)))[:2])


class _Classes:
    """The classes of dimensions that are the batch, sequences, experts and hidden features. A sequence is the second
    dimension of an argument of the batch; of floats only before a third one, because features come last."""

    def __init__(self, dimensions: Dimensions, types: Sequence[Any], nparameters: int) -> None:
        all_dims, self._looped = dimensions.arguments, dimensions.looped
        self._batch = _batch(all_dims, types, nparameters)
        self._leaves = [Leaf(d, t.shape, not self._batch.isdisjoint(d)) for d, t in zip(all_dims, types, strict=True)]
        of_batch = [(leaf, t) for leaf, t in zip(self._leaves, types, strict=True) if leaf.is_batch]
        wide = [leaf for leaf, t in of_batch if len(leaf.dims) > 1 + jnp.issubdtype(t.dtype, jnp.floating)]
        self._sequence = {leaf.dims[1] for leaf in wide} - self._looped
        rows = [[(leaf.dims[i], leaf.shape[i]) for i in self._rows(leaf)] for leaf in self._leaves if not leaf.is_batch]
        self._matrices = [dict(each) for each in rows if len(each) > 1]
        mixed = dimensions.summed(sum(1 << i for i, leaf in enumerate(self._leaves) if leaf.is_batch))
        extents = [pair for each in rows for pair in each if pair[0] not in mixed]
        self._extents = dict(sorted(extents, key=lambda pair: -pair[1]))

    def _rows(self, leaf: Leaf) -> list[int]:
        """Returns the numbers of an argument's dimensions that no loop iterates over."""
        return [i for i, dim in enumerate(leaf.dims) if dim not in self._looped]

    def _hidden(self, size: int) -> set[int]:
        """Returns classes of dimensions of parameters, as Megatron shards them: extents that `size` divides, largest
        first, but no two in one matrix. In two consecutive layers the first has its columns sharded and the second its
        rows. Leaves out classes that a product sums if both its operands depend on the batch."""
        found = set[int]()
        for dim, extent in self._extents.items():
            if extent % size == 0 and all(found.isdisjoint(each) for each in self._matrices if dim in each):
                found.add(dim)
        return found

    def specs(
        self, parts: Sequence[tuple[str, tuple[str, ...]]], sizes: dict[str, int]
    ) -> tuple[PartitionSpec, ...] | None:
        """Returns the sharding of each argument by `parts`, (recipe, mesh axes). None if some kind of dimension of a
        part shards no argument, as on axes of size 1. A kind shards the best dimension of each argument that the axes
        divide; "parameters" comes last, and takes the largest one that is left. `sizes`: of mesh axes."""
        axes = [(kind, names) for name, names in parts for kind in RECIPES[name]]
        placed = [list[tuple[str, ...]](() for _ in leaf.dims) for leaf in self._leaves]
        for kind, names in sorted(axes, key=lambda part: part[0] == "parameters"):  # of what others leave
            size, is_used = math.prod(sizes[name] for name in names), False
            for leaf, dims in zip(self._leaves, placed, strict=True):
                left = [n // math.prod(sizes[name] for name in of) for n, of in zip(leaf.shape, dims, strict=True)]
                found = [i for i in self._where(kind, leaf, size) if left[i] and left[i] % size == 0]
                if found and size > 1:
                    best = max(found, key=lambda i: (not dims[i], left[i])) if kind == "parameters" else found[0]
                    dims[best], is_used = (*dims[best], *names), True
            if not is_used:
                return None
        return tuple(PartitionSpec(*dims) if any(dims) else PartitionSpec() for dims in placed)

    def _where(self, kind: str, leaf: Leaf, size: int) -> list[int]:
        """Returns the numbers of an argument's dimensions that may be sharded for a kind (in the values of `RECIPES`),
        the best one first. "batch" and "sequence" are for arguments of the batch, the others for parameters, without
        dimensions that a loop iterates over: "experts" the first of at least three, "hidden" and "parameters" from the
        last one on. Only "hidden" uses `size`."""
        if kind in ("batch", "sequence"):
            wanted = self._batch if kind == "batch" else self._sequence
            return [i for i, dim in enumerate(leaf.dims) if dim in wanted and leaf.is_batch]
        rows = [] if leaf.is_batch else self._rows(leaf)
        if kind == "experts":
            return rows[: len(rows) > 2]
        hidden = self._hidden(size) if kind == "hidden" else {*leaf.dims}
        return [i for i in reversed(rows) if leaf.dims[i] in hidden]


def _batch(dims: Sequence[tuple[int, ...]], types: Sequence[Any], nparameters: int) -> set[int]:
    """Returns the classes of the batch: first dimensions of arguments after the first `nparameters`, the parameters. No
    parameter has a dimension of such a class. All classes that it returns have one extent. If there are several
    extents, it takes the extent of the class that most arguments have, or else of the largest argument. If
    `nparameters` is 0, a class of the batch is in no other place than the first dimension; of several extents, it takes
    the extent of the first array of signed integers (such as tokens), or else of the first argument. Empty if there is
    none."""
    others = {dim for each in dims[:nparameters] for dim in each}
    if not nparameters:
        others = {dim for each in dims for dim in each[1:]}
    found = [i for i, each in enumerate(dims) if i >= nparameters and each and each[0] not in others]

    def rank(i: int) -> Any:
        if not nparameters:
            return jnp.issubdtype(types[i].dtype, jnp.signedinteger)
        return sum(dims[i][0] in each for each in dims), math.prod(types[i].shape)

    extent = types[max(found, key=rank)].shape[0] if found else 0
    return {dims[i][0] for i in found if types[i].shape[0] == extent}
