"""Finds where a call runs (`Mode`): MANUAL on shards inside shard_map, SHARDED on global arrays with known shardings,
AUTO on global arrays with shardings that XLA's partitioner chooses, XLA if only XLA can multiply there."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.contraction.contraction import Dim, Dims
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.sharding import shardings
from jaxmp._src.core.spec import options
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue, NotAvailable
from jaxmp._src.core.spec.request import Request
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands, Shape


class Mode(enum.Enum):
    MANUAL = "shards inside shard_map"
    SHARDED = "global arrays with known shardings"
    AUTO = "global arrays with shardings that XLA's partitioner chooses"
    XLA = "global arrays on a mesh on which no call of jaxmp can run, so that XLA multiplies"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mode, the mesh (None for AUTO) and the result's shape. For SHARDED also whether the axes are explicit, the
    `dims` (shardings) of a, b and the result as stored (None for a default result), and the result's `unreduced` axes.
    For XLA also `why`. For XLA and AUTO the requested sharding of the result: `constraint`, or for XLA `out_sharding`
    if it names no automatic axes."""

    mode: Mode
    shape: Shape
    mesh: Any = None
    is_explicit: bool = False
    dims: tuple[Dims, Dims, Dims | None] = ((), (), None)
    unreduced: Dim = ()
    constraint: NamedSharding | None = None
    why: str = ""
    out_sharding: NamedSharding | None = None

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return tuple(self.mesh.shape.items()) if self.mesh is not None else ()


def partition_spec(dims: Dims, unreduced: Dim = ()) -> P:
    """Returns the PartitionSpec of these axes, the inverse of `shardings.to_dims`, and of the axes of deferred sums."""
    return P(*(dim or None for dim in dims), unreduced=set(unreduced))


def constrained(outputs: Operands, sharding: NamedSharding | None) -> Operands:
    """Returns the results of a call, d constrained to `sharding`; unchanged if it is None."""
    return outputs if sharding is None else outputs | {"d": lax.with_sharding_constraint(outputs["d"], sharding)}


def on_automatic_axes(
    run: Callable[[Operands], jax.Array], placement: Placement, dims: Dims
) -> Callable[[Operands], jax.Array]:
    """Wraps `run` so that explicit axes of the mesh are automatic inside, and XLA partitions over them. The result is
    sharded as `placement.out_sharding`, or as `dims` if that is None. Returns `run` itself if no axis is explicit."""
    kinds = zip(placement.mesh.axis_names, placement.mesh.axis_types, strict=True)
    axes = tuple(axis for axis, kind in kinds if kind == AxisType.Explicit)
    if not axes:
        return run
    where = placement.out_sharding or NamedSharding(placement.mesh, partition_spec(dims))
    automatic = jax.sharding.auto_axes(run, axes=axes, out_sharding=where)

    def placed(operands: Operands) -> jax.Array:
        whole = {name: x for name, x in operands.items() if jax.typeof(x).sharding.mesh.empty}
        # On the mesh, so that cotangents are whole too.
        whole = {name: collectives.place(x, placement.mesh, P(), is_explicit=True) for name, x in whole.items()}
        result: jax.Array = automatic(operands | whole)
        return result

    # Inside shard_map JAX (0.10 to 0.12) casts only traced arrays between meshes, and keeps no array of the inner mesh.
    return jax.jit(jax.checkpoint(placed)) if getattr(placement.mesh, "manual_axes", ()) else placed


def reshard(x: jax.Array, mesh: Any, have: P, want: P, *, is_explicit: bool) -> jax.Array:
    """Reshards a global array from `have` to `want`, one step of `moves.steps` at a time."""
    now, last = (shardings.as_dims("an array", P(*spec.partitions), x.ndim) for spec in (have, want))
    for step in moves.steps(now, last, mesh.shape) or (last,) * (have != want):
        spec = want.update(partitions=partition_spec(step).partitions)
        x, have = collectives.reshard(x, mesh, have, spec, is_explicit=is_explicit), spec
    return x


def manual_mesh() -> AbstractMesh | None:
    """Returns the mesh of the enclosing shard_map, or None outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or not mesh.manual_axes else mesh


def free_axes(mesh: options.Mesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that are not manual and have more than one device."""
    manual = getattr(mesh, "manual_axes", ())
    return tuple(axis for axis in mesh.axis_names if axis not in manual and mesh.shape[axis] > 1)


def check_axes(mesh: options.Mesh, axes: tuple[str, ...]) -> None:
    """Raises ValueError for axes that the mesh does not have, or that are named twice."""
    for axis in axes:
        if axis not in mesh.shape:
            raise InvalidValue(f"axis {axis!r} is not in the mesh, which has {tuple(mesh.axis_names)}")
    if len(set(axes)) != len(axes):
        raise InvalidValue(f"axis names {axes} repeat")


def place(request: Request, out_shape: Shape) -> Placement:
    """Returns where a requested call runs. Inside shard_map: MANUAL if all axes of several devices are manual, else
    XLA. Outside: SHARDED with `in_shardings`; XLA if the mesh mixes explicit and automatic axes, or vmap maps over a
    sharded dimension; SHARDED on explicit axes; otherwise AUTO. Raises ValueError for `in_shardings` inside shard_map,
    for any sharding or mesh of a MANUAL call, and for shardings or meshes that do not fit together. Raises TypeError
    for a `mesh` that is not a Mesh or AbstractMesh, and ShardingTypeError for unreduced operands of a SHARDED call
    without `in_shardings`. Raises otherwise as `_spec` does."""
    a, b, mesh, out_sharding = request.a, request.b, request.mesh, request.out_sharding
    manual = manual_mesh()
    if manual is not None and free_axes(manual):
        if request.in_shardings is not None:
            raise InvalidValue(
                f"in_shardings were given inside a shard_map that is manual over {tuple(manual.manual_axes)} "
                "only, where XLA partitions the product; drop them, or use jax.lax.with_sharding_constraint"
            )
        return _left_to_xla(
            manual, out_shape, out_sharding, f"the enclosing shard_map is not manual over {free_axes(manual)}"
        )
    if manual is not None:
        for argument in ("{out_sharding}", "in_shardings", "mesh"):
            if getattr(request, argument.strip("{}")) is not None:
                raise InvalidValue(
                    f"{argument} was given inside shard_map, where operands are shards; drop it, or use "
                    "all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce or block_matmul"
                )
        return Placement(Mode.MANUAL, out_shape, manual)
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise InvalidType(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if request.in_shardings is not None:
        return _from_in_shardings(request, out_shape)
    mixed = _mixed_mesh(request)
    if mixed is not None:
        return _left_to_xla(mixed, out_shape, out_sharding, "the mesh has explicit and automatic axes")
    if batch := jax_compat.axis_env().explicit_mesh_axis_names:
        # JAX leaves these axes out of a shard_map, so that no call can run on their shards.
        why = f"jax.vmap maps over a dimension that is sharded over {sorted(batch)}"
        return _left_to_xla(jax.sharding.get_abstract_mesh(), out_shape, out_sharding, why)
    explicit = _explicit_mesh(request)
    if explicit is not None:
        spec_a, spec_b = type_spec(a), type_spec(b)
        dims = shardings.as_dims("{a}", spec_a, a.ndim), shardings.as_dims("{b}", spec_b, b.ndim)
        return _sharded(explicit, True, dims, out_sharding, out_shape)
    return Placement(Mode.AUTO, out_shape, constraint=_constraint(out_sharding, mesh, out_shape))


def check_summed(placement: Placement) -> None:
    """Raises NotImplementedError for an unreduced result, on behalf of a function that needs the sum itself."""
    if placement.unreduced:
        raise NotAvailable(
            f"{{out_sharding}} with unreduced axes {placement.unreduced} is not supported, because the sum is needed "
            "here; take a sharding without them"
        )


def _given_mesh(request: Request) -> options.Mesh | None:
    """Returns the mesh that the user passed as `mesh` or in `out_sharding`, or None."""
    out = request.out_sharding
    return out.mesh if request.mesh is None and isinstance(out, NamedSharding) else request.mesh


def _mixed_mesh(request: Request) -> options.Mesh | None:
    """Returns the first nonempty mesh of (a, b, the request, the context) if its axes (of several devices) are both
    explicit and automatic. Returns None if they are not, also if a later mesh has both."""
    around = _given_mesh(request), jax.sharding.get_abstract_mesh()
    for found in (*(jax.typeof(x).sharding.mesh for x in (request.a, request.b)), *around):
        if found is not None and not found.empty:
            kinds = dict(zip(found.axis_names, found.axis_types, strict=True))
            is_mixed = {kinds[axis] for axis in free_axes(found)} == {AxisType.Explicit, AxisType.Auto}
            return found if is_mixed else None
    return None


def _left_to_xla(mesh: options.Mesh, out_shape: Shape, out_sharding: Any, why: str) -> Placement:
    """Returns the placement of a product that XLA partitions because of `why`. Raises ValueError if the result cannot
    have `out_sharding`: manual axes, explicit next to automatic axes, axes that do not divide it, another mesh. A
    partial sharding (`is_partial`) is left to JAX to check."""
    if out_sharding is None:
        return Placement(Mode.XLA, out_shape, mesh, why=why)
    _check_mesh("{out_sharding}", out_sharding, mesh)
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    named: set[AxisType] = set()
    if not is_partial(out_sharding):  # JAX checks partial shardings
        spec = _spec("{out_sharding}", out_sharding)
        dims = shardings.to_dims("the result", spec, len(out_shape), mesh.axis_names)
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        named = {kinds[axis] for dim in dims for axis in dim}
        if AxisType.Manual in named:
            raise InvalidValue(f"out_sharding {spec} names an axis that is manual in the enclosing shard_map")
        shardings.check_dims("the result", dims, out_shape, mesh.shape)
    if {AxisType.Auto, AxisType.Explicit} <= named:
        raise InvalidValue(
            f"out_sharding {spec} names explicit and automatic axes; name one kind (jax.lax."
            "with_sharding_constraint takes the others)"
        )
    where = NamedSharding(getattr(mesh, "abstract_mesh", mesh), spec)
    if AxisType.Auto in named:
        return Placement(Mode.XLA, out_shape, mesh, why=why, constraint=where)
    return Placement(Mode.XLA, out_shape, mesh, why=why, out_sharding=where)


def _from_in_shardings(request: Request, out_shape: Shape) -> Placement:
    """Returns the SHARDED placement on the request's mesh, else a NamedSharding's, else the ambient mesh. Raises
    ValueError if `in_shardings` are not a pair, without a mesh, and for a sharding that does not fit the mesh or the
    array. Raises otherwise as `_spec` does."""
    in_shardings, out_sharding, mesh = request.in_shardings, request.out_sharding, request.mesh
    shardings.check_each(in_shardings, 2, "{a} and one for {b}")
    for sharding in (*in_shardings, out_sharding):
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) and mesh is None else mesh
    for sharding in in_shardings:
        _check_mesh("in_shardings", sharding, mesh)
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise InvalidValue("in_shardings need a mesh; pass mesh=, NamedShardings, or call under jax.set_mesh(mesh)")
    is_explicit = has_explicit_axes(mesh)
    dims_a, dims_b = (
        shardings.to_dims(operand, _spec("in_shardings", sharding, type_spec(x).reduced), x.ndim, mesh.axis_names)
        for operand, sharding, x in (("{a}", in_shardings[0], request.a), ("{b}", in_shardings[1], request.b))
    )
    return _sharded(mesh, is_explicit, (dims_a, dims_b), out_sharding, out_shape)


def _check_mesh(argument: str, given: Any, mesh: options.Mesh | None) -> None:
    """Raises ValueError if `given`, a mesh or a NamedSharding, has other axes or devices than the call's `mesh`. Does
    nothing for other values, or if `mesh` is None."""
    given = given.mesh if isinstance(given, NamedSharding) else given
    if not isinstance(given, Mesh | AbstractMesh) or mesh is None:
        return
    if tuple(given.shape.items()) != tuple(mesh.shape.items()):
        raise InvalidValue(
            f"{argument} names mesh {dict(given.shape)} but the call runs on {dict(mesh.shape)}; use one mesh"
        )
    if isinstance(given, Mesh) and isinstance(mesh, Mesh):
        ids, wanted = ([device.id for device in x.devices.flat] for x in (given, mesh))
        if ids != wanted:
            raise InvalidValue(f"{argument} names a mesh of devices {ids} but the call runs on {wanted}; use one mesh")


def _sharded(
    mesh: options.Mesh, is_explicit: bool, dims: tuple[Dims, Dims], out_sharding: Any, out_shape: Shape
) -> Placement:
    """Returns the SHARDED placement; `dims`: the shardings of (a, b). Raises ValueError if `out_sharding` has another
    mesh or does not fit d's dimensions, but not if axes do not divide `out_shape`. Raises otherwise as `_spec` does,
    except for unreduced and reduced axes if the mesh `is_explicit`."""
    _check_mesh("{out_sharding}", out_sharding, mesh)
    if out_sharding is None:
        return Placement(Mode.SHARDED, out_shape, mesh, is_explicit, (*dims, None))
    axes = tuple(mesh.axis_names)
    asked = _spec("{out_sharding}", out_sharding, axes if is_explicit else ())
    out = shardings.to_dims("the result", P(*asked.partitions), len(out_shape), axes)
    unreduced = tuple(axis for axis in axes if axis in asked.unreduced)
    return Placement(Mode.SHARDED, out_shape, mesh, is_explicit, (*dims, out), unreduced)


def _explicit_mesh(request: Request) -> options.Mesh | None:
    """Returns the mesh of operands with shardings in their types, or None. It is concrete if an array knows it. Raises
    ValueError if the operands, the request or the context have different meshes.

    Operands on no mesh (NumPy arrays, arrays made before `jax.set_mesh`) are whole on a given or ambient explicit mesh.
    """
    found = None
    for x in (request.a, request.b):
        sharding = jax.typeof(x).sharding
        if not has_explicit_axes(sharding.mesh):
            continue
        concrete = None if isinstance(x, jax.core.Tracer) else getattr(getattr(x, "sharding", None), "mesh", None)
        this = concrete if concrete is not None else sharding.mesh
        if found is not None and found.shape != this.shape:
            raise InvalidValue(f"{{a}} lives on mesh {dict(found.shape)} but {{b}} on {dict(this.shape)}; use one mesh")
        found = this if found is None or concrete is not None else found
    if found is not None:
        _check_context(found)
        _check_mesh("mesh", request.mesh, found)
    elif all(jax.typeof(x).sharding.mesh.empty for x in (request.a, request.b)):
        given = _given_mesh(request)
        around = given if given is not None else jax.sharding.get_abstract_mesh()
        return around if has_explicit_axes(around) else None
    return found


def _check_context(mesh: options.Mesh) -> None:
    """Raises ValueError, as JAX does, if the operands are on another mesh than the mesh around them."""
    around = jax.sharding.get_abstract_mesh()
    found, context = ([(*each.shape.items(),), each.axis_types] for each in (mesh, around))
    if not around.empty and found != context:
        kinds = [", ".join(kind.name.lower() for kind in each) for _, each in (found, context)]
        raise InvalidValue(
            f"the operands live on mesh {dict(found[0])} ({kinds[0]}), but the mesh around them is "
            f"{dict(context[0])} ({kinds[1]}); use one mesh, or move the operands with jax.device_put"
        )


def has_explicit_axes(mesh: options.Mesh) -> bool:
    """True if a mesh has explicit axes."""
    return not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)


def type_dims(argument: str, x: jax.Array) -> Dims:
    """Returns the sharding in the type of an array, as one tuple of axis names per dimension."""
    return shardings.as_dims(argument, type_spec(x), x.ndim)


def check_alike(**weights: jax.Array) -> None:
    """Raises ValueError if the types of two arrays, given by name, have different shardings."""
    (one, have), (other, wanted) = ((name, partition_spec(type_dims(name, x))) for name, x in weights.items())
    if have != wanted:
        raise InvalidValue(f"{one} is sharded {have}, but {other} {wanted}; use one sharding (jax.sharding.reshard)")


def type_spec(x: jax.Array) -> P:
    """Returns the sharding in the type of an array; P() if the type has no mesh."""
    sharding = jax.typeof(x).sharding
    return P() if sharding.mesh.empty else sharding.spec


def of_one_row(sharding: Any) -> Any:
    """Returns the sharding of x[None], a matrix of one row, from x's. Changes the first sharding of a tuple or list.
    Returns other values as they are."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, of_one_row(sharding.spec))
    if isinstance(sharding, P):
        return P(None, *sharding)
    return (of_one_row(sharding[0]), *sharding[1:]) if isinstance(sharding, tuple | list) and sharding else sharding


def is_partial(sharding: Any) -> bool:
    """True if devices hold terms of a sum (unreduced axes), or an operand with such a gradient (reduced axes)."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return bool(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None))


def _spec(argument: str, sharding: Any, tagged: Collection[str] = ()) -> P:
    """Returns a user's sharding as a PartitionSpec, P() for None. Raises TypeError for other types, and
    NotImplementedError for unreduced or reduced axes, except for the axes in `tagged`."""
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if sharding is None:
        return P()
    if not isinstance(sharding, P):
        hint = f"; write P{sharding}" if isinstance(sharding, tuple) else ""
        raise InvalidType(f"{argument} must be a PartitionSpec or a NamedSharding, got {type(sharding).__name__}{hint}")
    if rest := (sharding.unreduced | sharding.reduced).difference(tagged):
        raise NotAvailable(
            f"{argument} with unreduced or reduced axes {sorted(rest)} is not supported; on explicit axes, take the "
            "operand's own reduced axes in in_shardings, and unreduced axes in out_sharding"
        )
    return sharding


def _constraint(out_sharding: Any, mesh: options.Mesh | None, out_shape: Shape) -> NamedSharding | None:
    """Returns `out_sharding` as a NamedSharding, on its own mesh, `mesh` or the ambient one; None for None. Raises
    ValueError if its own mesh is not `mesh`, without a mesh, and if the axes do not divide `out_shape`."""
    if out_sharding is None:
        return None
    spec = _spec("{out_sharding}", out_sharding)
    _check_mesh("{out_sharding}", out_sharding, mesh)
    if isinstance(out_sharding, NamedSharding):
        mesh = out_sharding.mesh
    mesh = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise InvalidValue(
            f"{{out_sharding}} {spec} needs a mesh; pass mesh=, a NamedSharding, or use jax.set_mesh(mesh)"
        )
    dims = shardings.to_dims("the result", spec, len(out_shape), mesh.axis_names)
    shardings.check_dims("the result", dims, out_shape, mesh.shape)
    return NamedSharding(mesh, spec)
