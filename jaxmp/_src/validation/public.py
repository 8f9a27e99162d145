"""The errors of every public function: an unknown keyword has a remedy, and a traceback ends at the user's line."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from jaxmp._src.runtime import jax_compat

F = TypeVar("F", bound=Callable[..., Any])

# What a keyword of another function is here, if this one has the keyword in the middle.
_ELSEWHERE = {
    "bias": ("epilog_inputs", 'pass epilog=jaxmp.Epilog.BIAS, epilog_inputs={"bias": bias}, or call jaxmp.linear'),
    "activation": ("epilog", "pass epilog=jaxmp.Epilog.RELU or another, or call jaxmp.linear"),
    "epilog": ("activation", "pass activation=, or call jaxmp.matmul"),
    "dtype": ("preferred_element_type", "did you mean preferred_element_type=?"),
    "out_dtype": ("preferred_element_type", "did you mean preferred_element_type=?"),
}


def public(fn: F) -> F:
    """`fn` as users call it."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError:
            parameters = inspect.signature(fn).parameters
            is_open = any(x.kind == x.VAR_KEYWORD for x in parameters.values())
            unknown = next((name for name in kwargs if name not in parameters and not is_open), None)
            if unknown is None:
                raise
        raise TypeError(
            f"{fn.__name__}() got an unexpected keyword argument {unknown!r}; {_remedy(unknown, parameters)}"
        )

    return cast(F, jax_compat.hides_frames(called))


def _remedy(unknown: str, parameters: Collection[str]) -> str:
    if unknown in _ELSEWHERE and _ELSEWHERE[unknown][0] in parameters:
        return _ELSEWHERE[unknown][1]
    begins_alike = [name for name in parameters if name.startswith(unknown)]
    close = begins_alike or difflib.get_close_matches(unknown, parameters, n=1)
    return f"did you mean {close[0]}=?" if close else f"it takes {', '.join(parameters)}"
