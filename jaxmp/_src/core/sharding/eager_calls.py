"""Caches of planned calls.

Validation and planning depend only on the types and shardings of the operands, the request and JAX's configuration,
which are the same from one step of a program to the next, and from one layer to another. They take several times as
long as the dispatch of the compiled call, or as to trace it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxmp._src.core.spec.request import ContractionOptions, Request
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native

CAPACITY = 1024
# The compiled call of a kind, which takes the operands, or its plan; empty until the first call of the kind fills it.
Entry = list[Any]


def _empty(key: Hashable) -> Entry:
    return []


# By a key and JAX's configuration. Calls of operands that are traced, and parts of a call, leave eager calls in theirs.
kept, kept_traced = (jax_compat.cache_in_context(CAPACITY)(_empty) for _ in range(2))


def operands_of(request: Request) -> dict[str, Any]:
    """What was passed for operands, by name; nothing where the names are wrong."""
    given = {"a": request.a, "b": request.b} if request.c is None else {x: getattr(request, x) for x in "abc"}
    inputs = request.epilog_inputs
    if inputs is None:
        return given
    is_named = isinstance(inputs, Mapping) and inputs.keys().isdisjoint(("a", "b", "c"))
    return given | dict(inputs) if is_named else {}


def find(request: Request, operands: Mapping[Any, Any], *static: Any, is_part: bool = False) -> Entry | None:
    """The entry for this request of these operands, by name, and further arguments; `is_part`: of a product that may be
    one of several in a call.

    None where nothing is kept: without operands, for some that are no arrays, with arrays in `scaling`, for an alpha or
    beta that is no Python number, for arguments without a hash (a list of shardings), and where each call has its line
    for messages.
    """
    types, cache = [], kept_traced if is_part else kept
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
    return _entry(cache, types, values)


def _entry(cache: Callable[[Hashable], Entry], types: list[Any], values: tuple[Any, ...]) -> Entry | None:
    try:
        return cache((tuple(types), values, *map(type, values)))
    except TypeError:
        return None


def find_on_one_device(request: Request, operands: Sequence[Any], *static: Any) -> Entry | None:
    """As `find`, for a contraction; None also for operands of several devices, and where anybody speaks of a mesh."""
    if native.has_barrier or not is_on_one_device(request, operands):
        return None
    return _entry(kept, [(x.aval, x.sharding) for x in operands], _OF_CONTRACTIONS(request) + static)


def is_on_one_device(request: Request, operands: Sequence[Any]) -> bool:
    """Whether all operands are arrays of one device, and nobody speaks of a mesh."""
    return request.out_sharding is request.in_shardings is request.mesh is None and _are_on_one_device(*operands)


def _are_on_one_device(*operands: Any) -> bool:
    for x in operands:
        if type(x) is not jax_compat.ArrayImpl or not isinstance(x.sharding, SingleDeviceSharding):
            return False
    return jax_compat.ambient_mesh() is None


def is_simple(*operands: Any) -> bool:
    """Whether JAX's own dispatch of a jitted function serves an eager call that has no options."""
    return _are_on_one_device(*operands) and not (native.has_barrier or jax_compat.is_jit_disabled())


def run(entry: Entry | None, call: Callable[..., Any], *operands: Any) -> Any:
    """`call(*operands)`, compiled in one piece and kept where there is an entry for it."""
    if entry is None:
        return call(*operands)
    if not entry:
        entry.append(jax.jit(call))
    return entry[0](*operands)


_PLAIN = (float, int, complex, type(None))
# What of a request is the same for all operands of its types.
_OPTIONS = operator.itemgetter(
    *(i for i, name in enumerate(Request._fields) if name not in ("a", "b", "c", "epilog_inputs"))
)
_OF_CONTRACTIONS = operator.attrgetter(
    "function", "precision", "preferred_element_type", *ContractionOptions.__annotations__
)
