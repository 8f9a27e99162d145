"""Checks users' arguments one at a time: each is refused by name, or returned in the types of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._src.core.spec.options import Implementation
from jaxmp._src.core.spec.refusal import InvalidOperands, InvalidType, InvalidValue
from jaxmp._src.core.spec.request import Request
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import ArrayType

_IMPLEMENTATIONS = (None, *get_args(Implementation))


def check_function(name: str, fn: Any) -> None:
    """Raises TypeError unless `fn` is a function. `name`: the transform of functions that got it."""
    if not callable(fn):
        raise TypeError(f"{name}: takes a function, got {type(fn).__name__}; write {name}(fn)(*args)")


def check_array(argument: str, x: Any, ndim: int | None = None, at_least: int | None = None) -> None:
    """Raises an error that is a TypeError and a ValueError unless `x` is an array of numbers or bools. The same unless
    it has `ndim` dimensions, and `at_least` so many, if given. Raises ValueError if it is in host memory."""
    if not is_array(x):
        is_numpy = isinstance(x, np.ndarray | np.generic)
        what, of_dtype = (" of numbers", f" of dtype {x.dtype}") if is_numpy else ("", "")
        kind = "a jax.Ref" if isinstance(x, jax.Ref) else type(x).__name__
        raise InvalidOperands(f"{argument} must be an array{what}, got {kind}{of_dtype}{_as_array(argument, x)}")
    if not has_numbers(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        remedy = "; draw numbers with it, as jax.random.normal does" if is_key else ""
        raise InvalidOperands(f"{argument} must be an array of numbers, got dtype {x.dtype}{remedy}")
    found = len(x.shape)
    if (ndim is not None and found != ndim) or (at_least is not None and found < at_least):
        wanted = f"at least {at_least}" if ndim is None else f"{ndim}"
        wanted += " dimension" if 1 in (ndim, at_least) else " dimensions"
        raise InvalidOperands(
            f"{argument} must have {wanted}, got {found} (shape {tuple(x.shape)}){_as_rank(argument, x, ndim)}"
        )
    check_memory(argument, x)


def _as_rank(argument: str, x: Any, ndim: int | None) -> str:
    """Returns the end of a message: how to get `ndim` dimensions (None: two or more) from x; "" if nothing is known."""
    if len(x.shape) == 1:
        return f"; pass {argument}[:, None]" if ndim and argument != "{a}" else f"; pass {argument}[None]"
    return "; jaxmp.einsum and jax.vmap take a batch of matrices" if ndim == 2 and len(x.shape) > 2 else ""


def _as_array(argument: str, x: Any) -> str:
    """Returns the end of a message: how to get an array from `x`; empty if nothing is known."""
    if isinstance(x, np.ma.MaskedArray):
        return f"; pass {argument}.filled()"
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        return f"; its bytes have another order than this machine's: pass {argument}.astype({x.dtype.name!r})"
    if x is None or isinstance(x, str | bytes | np.ndarray | np.generic):
        return ""
    if hasattr(x, "todense"):
        return f"; a sparse array has to be dense: pass {argument}.todense()"
    if isinstance(x, Mapping):
        return f"; pass one of its arrays, which it has under {', '.join(map(repr, x)) or 'no key'}"
    if isinstance(x, jax.Ref):
        return f"; pass what it holds, {argument}[...]"
    if is_array(getattr(x, "value", None)):
        return f"; pass the array in it, {argument}.value"
    if callable(x):
        return "; pass one of its arrays"
    return "; convert it with jnp.asarray"


def check_memory(argument: str, x: Any) -> None:
    """Raises ValueError for an array in host memory: a device's library would receive its pointer."""
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host:
        raise InvalidValue(
            f"{argument} is in host memory, but products run in device memory; move it "
            "there first, with jax.device_put(x, jax.memory.Space.Device)"
        )


def check_operand(argument: str, x: Any) -> None:
    """Raises ValueError for an array in host memory, or an unreduced one inside shard_map."""
    check_memory(argument, x)
    kind: Any = jax.typeof(x) if isinstance(x, jax.Array) else None
    if kind is not None and kind.manual_axis_type.unreduced:
        raise InvalidValue(
            f"{argument} is unreduced: each device holds a term of a sum over "
            f"{sorted(kind.manual_axis_type.unreduced)}; take the sum first, with jax.lax.psum"
        )


def is_array(x: object) -> bool:
    """True if `x` has a shape and a dtype and JAX takes it as an array, or if it is a `ShapeDtypeStruct`. False for
    Python scalars, lists, a `jax.Ref` and other libraries' tensors."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return True
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return False
    try:
        return isinstance(jax.typeof(x), jax.core.ShapedArray)  # a jax.Ref has another type
    except (TypeError, ValueError):
        return False


def has_numbers(x: Any) -> bool:
    """True if `x` is an array (`is_array`) of numbers or bools: not random keys, not float0."""
    return is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_)


def check_dtype(argument: str, value: Any) -> np.dtype:
    """Returns the dtype that a user names, of 32 bits if 64-bit types are off. Raises TypeError if there is none."""
    try:
        return jax_compat.canonical_dtype(value, f"{argument}")
    except TypeError:
        raise InvalidType(f"{argument} must be a dtype, such as jnp.float32, got {value!r}") from None


def check_preferred(value: DTypeLike | None) -> np.dtype | None:
    return None if value is None else check_dtype("preferred_element_type", value)


def check_flag(argument: str, value: Any) -> bool:
    """Returns a flag as a bool. Raises TypeError for anything but a bool: BLAS's "N" would be truthy."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    what = "a tracer, which is not a static value" if isinstance(value, jax.core.Tracer) else repr(value)
    raise InvalidType(f"{argument} must be True or False, got {what}")


def check_flags(request: Request) -> dict[str, Any]:
    """Returns spec fields by name: both transpose and both conjugate flags, implementation, `first_operand_is_b` (not
    checked) and determinism. Raises TypeError for a flag that is no bool and for conjugation of a real operand, and
    ValueError for an unknown implementation or determinism."""
    return {
        "transpose_a": check_flag("transpose_a", request.transpose_a),
        "transpose_b": check_flag("transpose_b", request.transpose_b),
        "conjugate_a": check_conjugate("conjugate_a", request.conjugate_a, request.a),
        "conjugate_b": check_conjugate("conjugate_b", request.conjugate_b, request.b),
        "implementation": check_implementation(request.implementation),
        "first_operand_is_b": request.first_operand_is_b,
    } | request.level.option


def check_widens(argument: str, x: Any, out_dtype: np.dtype) -> None:
    """Raises TypeError unless JAX promotes the types of `x` and of the result to the result's, and JAX's own
    TypePromotionError (a ValueError) if JAX promotes them to no type, as float8 and float32. A NumPy array has the type
    that JAX gives it, and a weak type gives way as in JAX."""
    if np.dtype(jnp.result_type(x, np.dtype(out_dtype))) != np.dtype(out_dtype):
        raise InvalidType(
            f"{argument} has dtype {x.dtype} but the result has dtype {np.dtype(out_dtype).name}; convert "
            f"{argument} to {np.dtype(out_dtype).name}, or ask for a wider result with preferred_element_type"
        )


def check_implementation(value: Any) -> Any:
    if value not in _IMPLEMENTATIONS:
        raise InvalidValue(f"implementation must be one of {_IMPLEMENTATIONS}, got {value!r}")
    return value


def check_conjugate(argument: str, flag: Any, x: ArrayType) -> bool:
    """Returns `flag` as a bool. Raises TypeError if it is True for a real `x`, which is a mistake, or no bool."""
    is_conjugated = check_flag(argument, flag)
    if is_conjugated and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise InvalidType(f"{argument}=True needs a complex operand, got dtype {x.dtype}")
    return is_conjugated
