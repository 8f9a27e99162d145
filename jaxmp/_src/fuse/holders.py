"""Values for traced arrays, in whatever object a function has put them."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import functools
import gc
import operator
import types
from collections.abc import Callable
from typing import Any

from jaxmp._src.fuse.graph import Graph
from jaxmp._src.platform.jax_internals import jax_tracing

Evaluate = Callable[[Graph, dict[Any, Any]], list[Any]]
ValueOf = Callable[[Any], Any]

# What cannot change, and is made anew of its parts, as tuples are.
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    slice: lambda x: (x.start, x.stop, x.step),
    types.MethodType: lambda x: (x.__func__, x.__self__),
}
_UNCHANGING = tuple, *_PARTS


def settle(recording: jax_tracing.Recording, results: list[Any], evaluate: Evaluate) -> None:
    """Evaluates a recording, and puts values in place of its tracers, in `results` and in every object that holds one.

    Lists, dicts and attributes change in place. A tuple, slice or bound method is made anew, and the new one put where
    the old one was.
    """
    equations, known, tracers = recording.finish(results)
    if recording.give(tracers, evaluate(Graph(equations, [tracer.val for tracer in tracers]), known)):
        return
    del tracers
    _fill(results, recording.value_of, set())
    for variable, x in contextvars.copy_context().items():  # which the collector does not look into
        if (value := _fill(x, recording.value_of)) is not x:
            variable.set(value)
    wanted = tuple(recording.held())  # by others than the results
    while wanted:
        holders = [x for x in gc.get_referrers(*wanted) if x is not wanted]
        wanted = tuple(x for x in holders if isinstance(x, _UNCHANGING))
        dicts = [x for x in holders if isinstance(x, dict)]
        classes = [x for x in gc.get_referrers(*dicts) if isinstance(x, type)] if dicts else []
        for holder in classes + holders:  # classes cache what is in their dict, so they change ahead of it
            _update(holder, lambda x: _fill(x, recording.value_of))


def _fill(x: Any, value_of: ValueOf, seen: set[int] | None = None) -> Any:
    """What stands in place of `x`: of a tracer its value, of a tuple (slice, method) that holds one a new one.

    With the ids of lists and dicts that were `seen`, those in it are changed.
    """
    if isinstance(x, _UNCHANGING):
        parts = x if isinstance(x, tuple) else _PARTS[type(x)](x)
        items = [_fill(item, value_of, seen) for item in parts]
        if all(map(operator.is_, items, parts)):
            return x
        if not isinstance(x, tuple):
            return type(x)(*items)
        made = tuple.__new__(type(x), items)
        if hasattr(x, "__dict__"):
            vars(made).update(vars(x))
        return made
    if seen is not None and isinstance(x, (list, dict)) and id(x) not in seen:
        seen.add(id(x))
        _update(x, lambda item: _fill(item, value_of, seen))
    return value_of(x)


def _update(holder: Any, value_of: ValueOf) -> None:
    """Puts values in place of what a mutable object refers to."""
    if isinstance(holder, (list, collections.deque)):
        kind: Any = list if isinstance(holder, list) else collections.deque  # whose own method notices nothing
        for i, x in enumerate(holder):
            if (value := value_of(x)) is not x:
                kind.__setitem__(holder, i, value)
    elif isinstance(holder, dict):
        for key, x in holder.items():
            if (value := value_of(x)) is not x:
                dict.__setitem__(holder, key, value)
    elif isinstance(holder, types.GeneratorType):
        frame: Any = holder.gi_frame
        variables = frame.f_locals
        for name, x in list(variables.items()):
            if (value := value_of(x)) is not x:
                variables[name] = value
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))  # before Python 3.13
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value_of(holder.cell_contents)
    elif isinstance(holder, functools.partial):
        parts: Any = holder.__reduce__()[2]
        holder.__setstate__(tuple(map(value_of, parts)))  # type: ignore[attr-defined]
    elif isinstance(holder, types.FunctionType):
        holder.__defaults__ = value_of(holder.__defaults__)
    elif isinstance(holder, type):
        for name, x in list(vars(holder).items()):
            if (value := value_of(x)) is not x:
                type.__setattr__(holder, name, value)
    elif not isinstance(holder, _UNCHANGING):
        if isinstance(holder, BaseException) and value_of(holder.args) is not holder.args:
            holder.args = value_of(holder.args)
        if isinstance(holder, functools._lru_cache_wrapper):  # whose entries nobody can change
            holder.cache_clear()
        if hasattr(holder, "__dict__"):
            _update(vars(holder), value_of)
        for slot in (member for kind in type(holder).__mro__ for member in vars(kind).values()):
            with contextlib.suppress(AttributeError):  # not set
                if isinstance(slot, types.MemberDescriptorType) and value_of(x := slot.__get__(holder)) is not x:
                    slot.__set__(holder, value_of(x))
