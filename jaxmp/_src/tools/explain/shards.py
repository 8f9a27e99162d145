"""The shards of a row of `explain`: mesh axes, shardings around reshards, shapes per device.

A `Dim` is the tuple of mesh axes that shard one dimension of an array.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.primitive.collectives import reshard_p
from jaxmp._src.core.primitive.grouped import GROUPED, GroupedSpec
from jaxmp._src.core.primitive.primitives import MATMULS
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.jax_internals import jax_compat

# The axes along which a, and along which b, differs between ranks.
Varying = tuple[Collection[str], Collection[str]]


def outside(spec: MatmulSpec, varying: Varying) -> tuple[Dim, Dim]:
    """Returns (axes along which other groups have other rows of a; axes along which they have other columns of b),
    without the group's own axes, and without axes along which both a and b differ, a batch."""
    of_a, of_b = (set(axes) - set(spec.group.axes) for axes in varying)
    names = [name for name, _ in spec.group.mesh]
    rows, cols = (tuple(name for name in names if name in axes) for axes in (of_a - of_b, of_b - of_a))
    return rows, cols


def placement(spec: MatmulSpec, outside: tuple[Dim, Dim], known: Iterable[Dim] = ()) -> tuple[tuple[Dim, Dim], ...]:
    """Returns (axes of rows, axes of columns) of op(a), op(b) and d: `outside` axes, which shard (m, n), and axes of
    the group by its pattern. If several axes shard a dimension, they are in the order of the dimension in `known` with
    the same axes. If there is none, the group's axes come last."""
    product, ahead = spec.contraction, {"m": outside[0], "n": outside[1], "k": ()}
    ordered = {frozenset(dim): dim for dim in known}

    def dim(which: str, index: str) -> Dim:
        axes = (*ahead[index], *product.sharded(which, index))
        return ordered.get(frozenset(axes), axes)

    return tuple((dim(which, rows), dim(which, cols)) for which, rows, cols in ("amk", "bkn", "dmn"))


def grouped_placement(spec: GroupedSpec) -> tuple[tuple[Dim, Dim], ...]:
    """Returns the axes that shard (rows, columns) of x, w and the result; for the array with a matrix per group,
    (groups, columns). () if the call has no axes."""
    axes = dict(spec.splits)
    return tuple((axes[text[0]], axes[text[1] if len(text) == 2 else "n"]) for text in spec.indices) if axes else ()


def grouped_sizes(spec: GroupedSpec, groups: int, m: int, k: int, n: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of x (m, k), w and the result of groups of rows, as stored, and then (m, k, n). If the product
    contracts over the rows, w is (m, n), the result has a (k, n) per group, and the last is (k, m, n). Else w has one
    per group, maybe transposed, and the result is (m, n)."""
    of = {"g": groups, "m": m, "k": k, "n": n}
    every = (*spec.indices, "kmn" if spec.is_contraction else "mkn")
    return tuple(tuple(of[index] for index in text) for text in every)


def sharded_dims(eqn: Any) -> tuple[Dim, ...]:
    """Returns the dimensions of a shard_map's operands and results that several mesh axes shard; () for others."""
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"]) if eqn.primitive.name == "shard_map" else ()
    return tuple(entry for spec in specs for entry in spec.partitions if isinstance(entry, tuple) and len(entry) > 1)


def terms_of_sums(jaxpr: jax_compat.Jaxpr, known: Mapping[int, Collection[str]]) -> dict[int, Collection[str]]:
    """Returns the variables that are terms of deferred sums, by `id`, with the axes of the sums: operands of an
    equation that makes an unreduced array, the values that they are computed from, back to a product, and `known`, the
    terms among the results. A term leaves a shard_map as a part of an array; JAX makes it an unreduced array."""
    found = dict(known)
    for eqn in reversed([each for each in jaxpr.eqns if each.outvars]):
        before = (jax_compat.unreduced_axes(v.aval) for v in eqn.invars)
        new = jax_compat.unreduced_axes(eqn.outvars[0].aval).difference(*before)
        if eqn.primitive not in {*MATMULS, *GROUPED} and not any(jax_compat.subjaxprs(eqn.params)):
            axes = new or found.get(id(eqn.outvars[0]), ())
            found |= {id(v): axes for v in eqn.invars if axes}
    return found


def mesh_size(aval: jax.core.ShapedArray) -> int:
    """Returns the number of devices of an array's mesh; 1 without a mesh."""
    mesh = aval.sharding.mesh
    return 1 if mesh.empty else math.prod(mesh.shape.values())


def local_shape(aval: jax.core.ShapedArray) -> tuple[int, ...]:
    """Returns the shape per device; inside shard_map, or without a mesh, the shape of the type."""
    mesh = aval.sharding.mesh
    is_local = mesh.empty or mesh.manual_axes
    return tuple(aval.shape if is_local else aval.sharding.shard_shape(aval.shape))


def resharding(eqn: Any, constraint: Any) -> tuple[NamedSharding, NamedSharding] | None:
    """Returns (sharding before, sharding after) of `eqn`, a reshard of jaxmp's or JAX's or a constraint. A constraint
    moves data from the sharding of `constraint`, the constraint that makes its operand; None if that is None."""
    if eqn.primitive is reshard_p:
        have, want = (NamedSharding(eqn.params["mesh"], eqn.params[name]) for name in ("have", "spec"))
        return have, want
    if eqn.primitive.name == "reshard":
        return eqn.invars[0].aval.sharding, eqn.outvars[0].aval.sharding
    return None if constraint is None else (constraint.params["sharding"], eqn.params["sharding"])
