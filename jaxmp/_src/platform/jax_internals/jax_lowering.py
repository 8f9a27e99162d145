"""Finds the mesh, the devices and the platform of a lowering, and wraps JAX's lowering rules."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import dispatch as _dispatch
from jax._src import shard_map as _shard_map
from jax._src import sharding_impls as _sharding_impls
from jax._src.export import _export
from jax._src.interpreters import mlir as _mlir
from jax.experimental.compute_on import compute_on
from jax.extend.core import Primitive
from jax.interpreters import mlir as mlir

from jaxmp._src.platform.jax_internals.jax_compat import ambient_mesh, under_known_flags

LoweringContext = mlir.LoweringRuleContext
# A function of MLIR values that returns MLIR values.
LoweringRule = Callable[..., Any]

# JAX's rules for operations inside a shard_map, such as scans and sigmoid, are written for these flags.
mlir.register_lowering(_shard_map.shard_map_p, under_known_flags(_mlir._lowerings[_shard_map.shard_map_p].rule))


def require_devices(primitives: Collection[Primitive]) -> None:
    """Ties future lowerings of these primitives to their devices, so that `lowering_mesh` finds the devices.

    JAX forgets the devices inside a shard_map over an abstract mesh. Operands on a mesh of explicit axes cause that
    without jax.set_mesh.
    """
    known = _dispatch.prim_requires_devices_during_lowering
    if known.issuperset(primitives):
        return
    known.update(primitives)
    _dispatch.jaxpr_has_prim_requiring_devices.cache_clear()  # it has answers for other programs
    _wrap(_shard_map.shard_map_p, _on_concrete_mesh)


_wrapped: set[tuple[Primitive, Callable[[LoweringRule], LoweringRule]]] = set()


def _wrap(primitive: Primitive, wrapper: Callable[[LoweringRule], LoweringRule]) -> None:
    """Puts `wrapper` around JAX's rule of a primitive, once."""
    if (primitive, wrapper) not in _wrapped:
        _wrapped.add((primitive, wrapper))
        mlir.register_lowering(primitive, wrapper(_mlir._lowerings[primitive].rule), cacheable=False)


def _on_concrete_mesh(rule: LoweringRule) -> LoweringRule:
    """Wraps the lowering rule of shard_map so that it runs under its mesh with the program's devices.

    The rule runs unchanged if a mesh is set, or if the program has not one device for each position of the mesh.
    """

    @functools.wraps(rule)
    def lower(ctx: LoweringContext, *nodes: Any, mesh: Any, **params: Any) -> Any:
        devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
        if devices is None or len(devices) != mesh.size or ambient_mesh() is not None:
            return rule(ctx, *nodes, mesh=mesh, **params)
        concrete = jax.sharding.Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names)
        with _sharding_impls._internal_use_concrete_mesh(concrete):
            return rule(ctx, *nodes, mesh=mesh, **params)

    return lower


# A call in a program's text that CPU devices share: its groups span mesh axes.
_SHARED_CALL = re.compile(r"@jaxmp_.* axes_(row|col) = dense<[^>]")


def check_exported_programs() -> None:
    """Makes exported programs with calls that ranks share raise NotImplementedError when lowered for CPU devices of
    several processes, from now on, because the ranks would wait for each other forever."""
    require_devices([_export.call_exported_p])
    _wrap(_export.call_exported_p, _in_one_process)


def _in_one_process(rule: LoweringRule) -> LoweringRule:
    """Wraps the lowering rule of exported programs so that it raises NotImplementedError for calls that CPU devices
    of several processes would share (`check_exported_programs`)."""

    @functools.wraps(rule)
    def lower(ctx: LoweringContext, *nodes: Any, exported: Any, **params: Any) -> Any:
        devices = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
        nprocesses = len({device.process_index for device in devices})
        if nprocesses > 1 and platform(ctx) == "cpu" and _SHARED_CALL.search(exported.mlir_module()):
            raise NotImplementedError(
                f"the exported program {exported.fun_name!r} has calls that its ranks share within one process, and "
                f"its {len(devices)} CPU devices belong to {nprocesses} processes; export it for CPUs in a job of "
                'several processes, or with implementation="xla"'
            )
        return rule(ctx, *nodes, exported=exported, **params)

    return lower


def lowering_mesh(ctx: LoweringContext) -> jax.sharding.Mesh | None:
    """Returns the mesh of the shard_map being lowered, or else of `jax.set_mesh`; None if no devices are known."""
    axes = ctx.module_context.axis_context
    mesh = axes.mesh if isinstance(axes, mlir.SPMDAxisContext) else None
    return mesh if isinstance(mesh, jax.sharding.Mesh) else ambient_mesh()


def device_count(ctx: LoweringContext) -> int:
    """Returns the number of devices of the program that is being lowered, 1 if JAX does not say."""
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def global_mesh(ctx: LoweringContext) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """Returns the mesh of the global arrays in the program that is being lowered, with its devices if JAX knows them.
    If no mesh of shard_map, operands, results or `jax.set_mesh` has all devices, the result has one axis of them."""
    axes, count = ctx.module_context.axis_context, device_count(ctx)
    of_types = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in (*ctx.avals_in, *ctx.avals_out))
    known = [getattr(axes, "abstract_mesh", None), *of_types, ambient_mesh()]
    found = next((mesh for mesh in known if mesh is not None and not mesh.empty and mesh.size == count), None)
    mesh = jax.sharding.AbstractMesh((count,), ("devices",)) if found is None else found
    devices = getattr(axes, "device_assignment", None)
    return mesh if devices is None else jax.sharding.Mesh(np.array(devices).reshape(mesh.axis_sizes), mesh.axis_names)


def is_for_export(ctx: LoweringContext) -> bool:
    """True if the program is being lowered for `jax.export`."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def platform(ctx: LoweringContext) -> str:
    """Returns the platform that a rule lowers for; the first one if there are several."""
    return str((ctx.platforms or ctx.module_context.platforms)[0])


def is_on_shards(ctx: LoweringContext) -> bool:
    """True if one device's part is being lowered: for one device, or inside a shard_map over every axis."""
    return manual_mesh(ctx) is not None or device_count(ctx) == 1


def manual_mesh(ctx: LoweringContext) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """Returns the mesh of the shard_map around a lowering rule if it is over every axis, else None."""
    axes = ctx.module_context.axis_context
    if not isinstance(axes, mlir.SPMDAxisContext) or set(axes.manual_axes) != set(axes.mesh.axis_names):
        return None
    return axes.mesh


def program_name(ctx: LoweringContext) -> str:
    """Returns the name of the module that is being lowered."""
    return str(ctx.module_context.module.operation.attributes["sym_name"]).strip('"')


def lower_each_call(key: str) -> None:
    """Makes JAX lower each call apart, from now on, of a function with a lowering that asks `next_index(ctx, key)`.
    Otherwise JAX lowers equal equations, and calls of an inner jit, only once, so that several instructions of the
    compiled program would have one index. Also lets `is_in_body` know loops and branches."""
    _numbered.add(key)
    _mlir._uncacheable_primitives.update(_mlir._lowerings)
    for primitive in list(_mlir._lowerings):
        if primitive.name in _KEEPING:
            _wrap(primitive, _lowering_without_cache)
        if primitive.name in _BODIES:
            _wrap(primitive, in_body())


# Primitives with rules that cache lowered functions in `cached_primitive_lowerings`.
_KEEPING = ("jit", "closed_call", "shard_map", "eval_jaxpr", "program_order")
_numbered: set[str] = set()


def _lowering_without_cache(rule: LoweringRule) -> LoweringRule:
    """Wraps a rule so that it does not cache functions that asked for an index."""

    @functools.wraps(rule)
    def lower(ctx: LoweringContext, *nodes: Any, **params: Any) -> Any:
        kept = ctx.module_context.cached_primitive_lowerings
        before, nkept = [kept.get(key) for key in _numbered], len(kept)
        lowered = rule(ctx, *nodes, **params)
        if [kept.get(key) for key in _numbered] != before:
            for key in list(kept)[nkept:]:
                if not isinstance(key, str):  # strings are keys of next_index
                    del kept[key]
        return lowered

    return lower


# Primitives of loops and branches.
_BODIES = ("while", "scan", "cond")
_is_in_body: contextvars.ContextVar[bool] = contextvars.ContextVar("is_in_body", default=False)


def is_in_body() -> bool:
    """True if a loop or branch is being lowered, after `lower_each_call` or under `in_body`; else False."""
    return _is_in_body.get()


@contextlib.contextmanager
def in_body(is_body: bool = True) -> Iterator[None]:
    """A context that makes `is_in_body()` true if `is_body`, and else leaves it as it is."""
    before = is_in_body()
    _is_in_body.set(before or is_body)
    try:
        yield
    finally:
        _is_in_body.set(before)


def body_of(primitive: Primitive) -> contextlib.AbstractContextManager[None]:
    """Returns the context for the body of an equation: `in_body` for loops and branches."""
    return in_body(primitive.name in _BODIES)


def next_index(ctx: LoweringContext, key: str) -> int:
    """Returns the next number for `key` in the module that is being lowered: 0, 1, ... in the order of the program."""
    counters = ctx.module_context.cached_primitive_lowerings
    counters[key] = counters.get(key, -1) + 1
    return int(counters[key])


def on_stream_of_collectives(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, made to run on XLA's stream of collectives on GPUs, so that no collective runs at the same time.
    XLA's scheduler takes other calls for computation, and starts them while a collective waits for other devices. XLA
    before JAX 0.12 reads a number here and ends the process, so the call stays as it is."""
    if jax.__version_info__ < (0, 12):
        return call
    place: Any = compute_on  # older versions have another signature
    placed: Callable[..., Any] = place(
        call, compute_type="gpu_stream:collective", out_memory_spaces=jax.memory.Space.Device
    )
    # Without the barrier XLA would move a constant operand into the call, with a name that PTX does not take.
    return lambda *given: placed(*jax.lax.optimization_barrier(given))
