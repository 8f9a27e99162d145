"""Caches of planned calls.

Validation and planning depend only on the types and shardings of the operands, the request and JAX's configuration.
These are the same from one step of a program to the next, and from one layer to another. Validation and planning take
several times as long as dispatching the compiled call, or as tracing it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxmp._src.core.spec.request import Request
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native

CAPACITY = 1024
# Holds the compiled call of one kind, or its plan. It is empty until the first call of this kind fills it.
Entry = list[Any]


# Keyed also by JAX's configuration. Traced calls and parts of calls have their own cache and evict no eager calls.
kept, kept_traced = (jax_compat.cache_in_context(CAPACITY)(lambda key: list[Any]()) for _ in range(2))


def operands_of(request: Request) -> dict[str, Any]:
    """Returns the operands of a request by name; c and epilog inputs only if it has them. {} if `epilog_inputs` is
    neither None nor a dict, or has the name a, b or c."""
    given = {"a": request.a, "b": request.b} if request.c is None else {x: getattr(request, x) for x in "abc"}
    inputs = request.epilog_inputs
    if inputs is None:
        return given
    is_named = isinstance(inputs, Mapping) and inputs.keys().isdisjoint(("a", "b", "c"))
    return given | dict(inputs) if is_named else {}


def look_up(request: Request, operands: Mapping[Any, Any], *static: Any, is_part: bool = False) -> Entry | None:
    """Returns the cache's entry for this request, these operands by name, and further arguments `static`; a new entry
    is empty. `is_part`: the product may be one of several in a call, so the cache of traced calls has it.

    Returns None if nothing is kept: without operands, with operands that are not JAX arrays, with arrays in `scaling`,
    with an alpha or beta that is not a Python number, with arguments without a hash (a list of shardings), and in a job
    of several processes, because its messages need the line of each call.
    """
    types: list[tuple[Any, ...]] = []
    cache: Callable[[Hashable], Entry] = kept_traced if is_part else kept
    for name, x in operands.items():
        if type(x) is jax_compat.ArrayImpl:
            types.append((name, x.aval, x.sharding))
        elif isinstance(x, jax.core.Tracer):
            types.append((name, jax.typeof(x), None))
            cache = kept_traced
        else:
            return None
    alpha, beta, scaling, comm = request.alpha, request.beta, request.scaling, request.comm
    if not types or type(alpha) not in _PLAIN or type(beta) not in _PLAIN or native.has_barrier:
        return None
    if scaling is not None and jax.tree.leaves(scaling):
        return None
    values = _OPTIONS(request) + static
    # Equality is too coarse for what users pass: 0.0 == -0.0, 1 == True, also within a group of options.
    if alpha != 1 or beta is not None:
        values += (repr(alpha), repr(beta))
    for group in (scaling, comm):
        if group is not None:
            values += tuple(getattr(group, "__dict__", {}).values())
    try:
        return cache((tuple(types), values, *map(type, values)))
    except TypeError:
        return None


def find_on_one_device(request: Request, operands: Sequence[Any], *static: Any) -> Entry | None:
    """Returns the entry of `look_up` for an einsum of these operands; None also unless `is_on_one_device`."""
    return look_up(request, dict(enumerate(operands)), *static) if is_on_one_device(request, operands) else None


def is_on_one_device(request: Request, operands: Sequence[Any]) -> bool:
    """True if each operand is an array on one device, and neither request nor context names a mesh or sharding."""
    return request.out_sharding is request.in_shardings is request.mesh is None and _are_on_one_device(*operands)


def _are_on_one_device(*operands: Any) -> bool:
    for x in operands:
        if type(x) is not jax_compat.ArrayImpl or not isinstance(x.sharding, SingleDeviceSharding):
            return False
    return jax_compat.ambient_mesh() is None


def is_simple(*operands: Any) -> bool:
    """True if all operands are arrays on one device, no mesh is set, no process barrier is in use, and jit is enabled.
    Then JAX's own dispatch of a jitted function can run an eager call without options."""
    return _are_on_one_device(*operands) and not (native.has_barrier or jax_compat.is_jit_disabled())


def run(entry: Entry | None, call: Callable[..., Any], *operands: Any) -> Any:
    """Returns `call(*operands)`. Fills an empty entry with the jitted `call`. A filled entry runs instead of `call`."""
    if entry is None:
        return call(*operands)
    if not entry:
        entry.append(jax.jit(call))
    return entry[0](*operands)


_PLAIN = (float, int, complex, type(None))
# The fields of a request that are the same for all operands of the same types.
_OPTIONS = operator.itemgetter(
    *(i for i, name in enumerate(Request._fields) if name not in ("a", "b", "c", "epilog_inputs"))
)
