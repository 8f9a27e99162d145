"""A cache of planned calls for eager use.

Validation and planning depend only on the types and shardings of the operands, the options and JAX's configuration,
which are the same from one step of a program to the next. They take several times as long as the dispatch of the
compiled call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxmp._src.runtime import jax_compat, native

CAPACITY = 1024


@jax_compat.cache_in_context(CAPACITY)
def kept(key: Hashable) -> list[Any]:
    """The cache entry for this key under JAX's present configuration: empty until the first call fills it."""
    return []


def given_operands(a: Any, b: Any, c: Any, epilog_inputs: Any) -> dict[str, Any]:
    """What was passed for operands, by name; nothing where the names are wrong."""
    given = {"a": a, "b": b} if c is None else {"a": a, "b": b, "c": c}
    if epilog_inputs is None:
        return given
    is_named = isinstance(epilog_inputs, Mapping) and epilog_inputs.keys().isdisjoint(("a", "b", "c"))
    return given | dict(epilog_inputs) if is_named else {}


def decided(operands: dict[str, Any], options: dict[str, Any], shardings: tuple[Any, ...]) -> list[Any] | None:
    """Where what follows from these arguments is kept, empty until the first call of its kind has filled it.

    None where nothing is kept: without operands, for some that are tracers or no arrays, with arrays in `scaling`, for
    an alpha or beta that is no Python number, for arguments without a hash (a list of shardings), and where each call
    has its line for messages.
    """
    types = []
    for name, x in operands.items():
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return None
        types.append((name, x.aval, x.sharding))
    alpha, beta, scaling, comm = (options[name] for name in ("alpha", "beta", "scaling", "comm"))
    if not types or type(alpha) not in _PLAIN or type(beta) not in _PLAIN or native.has_barrier():
        return None
    if scaling is not None and jax.tree.leaves(scaling):
        return None
    # Equality is too coarse for what users pass: 0.0 == -0.0, 1 == True, also within a group of options.
    values = (*options.values(), repr(alpha), repr(beta), *shardings)
    for group in (scaling, comm):
        if group is not None:
            values += tuple(getattr(group, "__dict__", {}).values())
    try:
        return kept((tuple(types), values, tuple(map(type, values))))
    except TypeError:
        return None


def on_one_device(
    fn: Callable[..., jax.Array], operands: Sequence[Any], options: Mapping[str, Any], *static: Hashable
) -> Callable[..., jax.Array] | None:
    """`fn(*static, options, *operands)` of the operands, compiled in one piece.

    None where nothing is kept: for tracers, for others than arrays of one device, under a mesh, and for options without
    a hash.
    """
    types = []
    for x in operands:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return None
        if not isinstance(x.sharding, SingleDeviceSharding):
            return None
        types.append((x.aval, x.sharding))
    if jax_compat.ambient_mesh() is not None or native.has_barrier():
        return None
    try:
        entry = kept((fn, tuple(types), static, *options.values(), *map(type, options.values())))
    except TypeError:
        return None
    if not entry:
        entry.append(jax.jit(functools.partial(fn, *static, dict(options))))
    compiled: Callable[..., jax.Array] = entry[0]
    return compiled


_PLAIN = (float, int, complex, type(None))
