"""The errors of every public function: an unknown keyword has a remedy, and a traceback ends at the user's line."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import jax

from jaxmp._src.runtime import jax_compat, jax_rules
from jaxmp._src.spec.refusal import Refusal

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
    """`fn` as users call it; its first two parameters are a and b of a product."""
    operands = dict(zip("ab", inspect.signature(fn).parameters, strict=False))

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        jax_rules.register_imported()
        try:
            return fn(*args, **kwargs)
        except Refusal as refusal:
            refusal.of(fn.__name__, operands)
            raise
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            raise ValueError(
                f"{fn.__name__}: operands on incompatible devices, {_places(fn, args, kwargs)} (device ids); move them "
                "to the same ones with jax.device_put"
            ) from error
        except TypeError:
            parameters = inspect.signature(fn).parameters
            is_open = any(x.kind == x.VAR_KEYWORD for x in parameters.values())
            unknown = next((name for name in kwargs if name not in parameters and not is_open), None)
            if unknown is None:
                raise
        raise TypeError(
            f"{fn.__name__}() got an unexpected keyword argument {unknown!r}; {_remedy(unknown, parameters)}"
        )

    return cast(F, jax_compat.hides_frames(jax_compat.under_known_flags(called)))


def _places(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The operands and their devices, "a on 0 and b on 1": JAX names the operands of a function of ours."""
    places: dict[str, str] = {}
    for argument, value in inspect.signature(fn).bind(*args, **kwargs).arguments.items():
        for path, x in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
                ids = ", ".join(str(i) for i in sorted(device.id for device in x.devices()))
                places.setdefault(ids, f"{argument}{jax.tree_util.keystr(path)} on {ids}")
    return " and ".join(places.values())


def _remedy(unknown: str, parameters: Collection[str]) -> str:
    if unknown in _ELSEWHERE and _ELSEWHERE[unknown][0] in parameters:
        return _ELSEWHERE[unknown][1]
    begins_alike = [name for name in parameters if name.startswith(unknown)]
    close = begins_alike or difflib.get_close_matches(unknown, parameters, n=1)
    return f"did you mean {close[0]}=?" if close else f"it takes {', '.join(parameters)}"
