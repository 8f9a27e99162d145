"""The errors of every public function: an unknown keyword has a remedy, and a traceback ends at the user's line."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.core.spec.request import Request
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.jax_internals.jax_compat import ArrayImpl

_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
F = TypeVar("F", bound=Callable[..., Any])

# Keywords of other functions, and what to pass here instead, if this function has the keyword in the middle.
_ELSEWHERE = {
    "bias": ("epilog_inputs", 'pass epilog=jaxmp.Epilog.BIAS, epilog_inputs={"bias": bias}, or call jaxmp.linear'),
    "activation": ("epilog", "pass epilog=jaxmp.Epilog.RELU or another, or call jaxmp.linear"),
    "epilog": ("activation", "pass activation=, or call jaxmp.matmul"),
    "dtype": ("preferred_element_type", "did you mean preferred_element_type=?"),
    "out_dtype": ("preferred_element_type", "did you mean preferred_element_type=?"),
}


def public(fn: F) -> F:
    """Returns `fn` as users call it. Its first two parameters are the operands a and b in messages.

    Arguments with `__jax_array__` become arrays. TypeErrors of unknown or too many arguments have a remedy. Refusals
    get the names of function and operands. Tracebacks hide jaxmp's frames. `**options: Unpack[...]` is replaced in the
    signature by keywords of `Request`, one by one."""
    signature = _signature(fn)
    parameters = signature.parameters
    operands = dict(zip("ab", parameters, strict=False))
    keywords = frozenset(parameters)
    kinds = [x.kind for x in parameters.values()]
    most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds) - kinds.count(_KEYWORD_ONLY)

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > most:
            raise TypeError(_too_many(fn.__name__, list(parameters), int(most)))
        args = tuple([x if type(x) is ArrayImpl else as_array(x) for x in args])  # at each eager call
        if kwargs:
            kwargs = {name: as_array(x) for name, x in kwargs.items()}
        if kwargs and not keywords.issuperset(kwargs):
            unknown = next(name for name in kwargs if name not in parameters)
            raise TypeError(
                f"{fn.__name__}() got an unexpected keyword argument {unknown!r}; {_remedy(unknown, parameters)}"
            )
        try:
            return fn(*args, **kwargs)
        except Refusal as refusal:
            refusal.of(fn.__name__, operands)
            raise

    boundary: Any = jax_compat.hides_frames(jax_compat.under_known_flags(called))
    if options := _options(fn):
        boundary.__signature__, hints = signature, typing.get_type_hints(fn)
        boundary.__annotations__ = {k: x for k, x in hints.items() if k != "options"} | typing.get_type_hints(options)
    return cast(F, boundary)


def as_array(x: Any) -> Any:
    """Returns the array of an object with `__jax_array__`, such as a Flax parameter, and a mapping with its values
    converted so. Anything else, also a mapping without such an object, is returned unchanged."""
    if x is None or isinstance(x, ArrayImpl | str):
        return x
    if isinstance(x, Mapping):
        found = {name: as_array(each) for name, each in x.items()}
        return x if all(found[name] is x[name] for name in found) else found
    array = getattr(x, "__jax_array__", None)
    return x if array is None else array()


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of `fn`, with each option and its default. Keywords have the order of `Request`."""
    signature = inspect.signature(fn)
    options = _options(fn)
    if options is None:
        return signature
    own = [x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD]
    for name, annotation in options.__annotations__.items():
        shown = getattr(annotation, "__forward_arg__", annotation)
        of_option = {"default": Request._field_defaults[name], "annotation": shown}
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **of_option))
    order = {name: i for i, name in enumerate(Request._fields)}
    own.sort(key=lambda x: (x.kind, order.get(x.name, -1) if x.kind == x.KEYWORD_ONLY else 0))
    return signature.replace(parameters=own)


def _options(fn: Callable[..., Any]) -> Any:
    """Returns the TypedDict in the annotation `**options: Unpack[...]` of `fn`, or None if it has no such parameter."""
    text = fn.__annotations__.get("options", "")
    return fn.__globals__[text[len("Unpack[") : -1]] if text.startswith("Unpack[") else None


def _too_many(function: str, parameters: list[str], most: int) -> str:
    if parameters[0] == "fn":
        return f"{function}() takes a function alone; write {function}(fn)(x) instead of {function}(fn, x)"
    return f"{function}() takes {most} positional arguments; pass others by name, such as {parameters[most]}="


def _remedy(unknown: str, parameters: Collection[str]) -> str:
    if unknown in _ELSEWHERE and _ELSEWHERE[unknown][0] in parameters:
        return _ELSEWHERE[unknown][1]
    begins_alike = [name for name in parameters if name.startswith(unknown)]
    close = begins_alike or difflib.get_close_matches(unknown, parameters, n=1)
    return f"did you mean {close[0]}=?" if close else f"it takes {', '.join(parameters)}"
