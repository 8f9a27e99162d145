"""The types of a product, as JAX defines them: operands are converted before the call to types that have a kernel, and
its result is converted afterwards.

Everything follows from the types of a, b, and c and the bias, which are `added` to the product, and is cached by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.spec import precisions
from jaxmp._src.core.spec.epilogs import RULES, Epilog
from jaxmp._src.core.spec.low_precision import (
    FLOAT4,
    is_low_precision,
    is_mixed,
    is_scaled,
    operand_type,
    result_dtypes,
)
from jaxmp._src.core.spec.matmul_spec import INTEGERS, RESULT_TYPES
from jaxmp._src.core.spec.refusal import NoKernel, NoPromotion
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.jax_internals.jax_compat import TypePromotionError, convert

F = TypeVar("F", bound=Callable[..., Any])
_BFLOAT16, _FLOAT32, _INT8, _INT32 = map(np.dtype, (jnp.bfloat16, np.float32, np.int8, np.int32))
# For a, b and each array added to their product: (dtype, whether it is weak).
Types = tuple[tuple[np.dtype, bool], ...]


class _Typed:
    """An array as JAX's promotion sees it."""

    def __init__(self, kind: tuple[np.dtype, bool]) -> None:
        self.dtype, self.weak_type = kind
        self.aval = self


_WIDE = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64, np.complex128)))


def _once_for_types(fn: F) -> F:
    """Returns `fn`, a function of `types` and more, cached by its arguments and JAX's settings. JAX's 64-bit types are
    on while `fn` runs, if `types` has one."""

    def typed(types: Types, *args: Any) -> Any:
        # If 64-bit types are off, JAX narrows all types except types of arrays.
        has_wide = not _WIDE.isdisjoint(dtype for dtype, _ in types)
        with jax.enable_x64(True) if has_wide else contextlib.nullcontext():
            return fn(types, *args)

    return cast(F, jax_compat.cache_in_context(1024)(typed))


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversions around a call; by default none.

    `steps`: a and b are converted to these types, one after the other. `result`: the call's preferred_element_type, or
    None. `out`: the type that the user gets; None if it is the call's result, which follows from what is added.
    `is_weak`: the user's result is weakly typed. `are_weak`: both operands are weakly typed."""

    steps: tuple[np.dtype, ...] = ()
    result: np.dtype | None = None
    out: np.dtype | None = None
    is_weak: bool = False
    are_weak: bool = False

    def of(self, name: str, x: Any) -> Any:
        """Returns the operand `name` of the call, converted.

        a and b are converted to each type of `steps`. Before that a weakly typed a or b becomes strongly typed, if both
        are weak or `out` is another type. c and the bias are converted to `result` if their type has no kernel; they
        stay if `result` is None, if they are int8, and if they are floats and `result` is not. Other operands are
        returned unchanged."""
        if name in ("c", "bias"):  # in the call's type where JAX promotes its own with no other
            if self.result is None or x.dtype.name in RESULT_TYPES or x.dtype == _INT8:
                return x
            would_cut = jnp.issubdtype(x.dtype, jnp.inexact) and not jnp.issubdtype(self.result, jnp.inexact)
            return x if would_cut else convert(x, self.result)
        if name not in ("a", "b") or self == NOTHING:
            return x
        # JAX's cotangent is weak if it is converted or the product is weak; a conversion's is weak as its operand is.
        if jax.typeof(x).weak_type and (self.are_weak or (self.out is not None and self.out != x.dtype)):
            x = convert(x, x.dtype)
        for dtype in self.steps:
            x = x if x.dtype == dtype else convert(x, dtype)
        return x

    def of_result(self, result: Any) -> Any:
        """Converts d to `out` (None: d's own type), weakly typed if `is_weak`. Of (d, {name: array}) only d is
        converted."""
        if isinstance(result, tuple):
            return (self.of_result(result[0]), *result[1:])
        if self.out is None and not self.is_weak:
            return result
        return convert(result, result.dtype if self.out is None else self.out, self.is_weak)


NOTHING = Conversion()


@_once_for_types
def conversion(
    types: Types,
    preferred: np.dtype | None,
    precision: lax.DotAlgorithmPreset | None,
    asked: tuple[int | None, bool],
    kind: tuple[bool, bool],
) -> Conversion | None:
    """Returns the conversions of a product of two arrays. Returns None if nothing has to be converted, if JAX refuses
    the types, if an implementation is asked for and no kernel takes them, or for int8 as `_of_int8`. Raises NoKernel or
    NoPromotion as `_check_weak` and `_with_added`.

    `types`: of a, b, and each array that is added. `preferred`: the user's preferred_element_type. `asked`: (the
    epilog, whether an implementation is asked for). `kind`: (whether operands are stored as kernels of 8 bits and fewer
    take them, whether the result has the type of `lax.dot_general` instead of `jnp.matmul`)."""
    a, b, *added = map(_Typed, types)
    dtypes, are_weak, (are_rows, is_lax) = (a.dtype, b.dtype), a.weak_type and b.weak_type, kind
    try:
        out, is_weak = (preferred, are_weak) if is_lax else of_jnp((a, b), preferred, added)
        out = _of_lax(*dtypes, out, precision)
        is_gelu = RULES[Epilog((asked[0] or 0) & ~Epilog.ALLREDUCE)].activation == "gelu"
        is_weak = is_weak and not is_gelu  # gelu's constants are not weak
    except (TypeError, ValueError):  # JAX does not promote the types, or has no such product
        _check_weak(a, b)
        return None
    steps = _steps(*dtypes, out, precision)
    given = steps[-1] if steps else operand_type(*dtypes)
    is_default = preferred is None and out == given
    if is_default and jnp.issubdtype(given, jnp.integer) and added:
        out = _with_added(given, added)
    has_low = are_rows and not steps and given.name != FLOAT4  # kernels of float4 need scales
    low = result_dtypes(*dtypes) if has_low else ()
    is_lax_alone = is_lax and not steps and is_mixed(*dtypes)  # may be of types that jnp does not promote
    leaves_type = is_default and given.name in RESULT_TYPES and not is_lax_alone
    of_kernel = (None, None) if leaves_type else _of_kernel(given, low, out, precision, asked)
    if of_kernel is None:
        return None
    operand, result = of_kernel
    if operand is not None and operand != given:
        steps += (operand,)
    is_as_asked = result is None or (result == out and preferred is not None)
    if is_as_asked and not steps and not (a.weak_type or b.weak_type):
        return None
    return Conversion(steps, result, None if result is None else out, is_weak, are_weak)


def _with_added(given: np.dtype, added: Sequence[_Typed]) -> np.dtype:
    """Returns the type of a product of integers `given` plus `added`. For int8 it is the type that JAX promotes all to,
    if that is an integer, because sums have 32 bits; otherwise `given`. Raises NoPromotion if JAX does not."""
    try:
        with jax.numpy_dtype_promotion("standard"):  # c has the type of the sums, also if the user's setting is strict
            out = np.dtype(jnp.result_type(given, *added))
    except TypePromotionError as error:
        raise NoPromotion(str(error)) from None
    return out if given == _INT8 and jnp.issubdtype(out, jnp.integer) else given


def _check_weak(a: _Typed, b: _Typed) -> None:
    """Called if JAX refused the types. Raises NoKernel for two integers, one of them weak, which JAX would narrow."""
    if (a.weak_type or b.weak_type) and all(jnp.issubdtype(x.dtype, jnp.integer) for x in (a, b)):
        raise NoKernel(
            f"operands of dtype {jnp.result_type(a, b)} ({{a}} {a.dtype}, {{b}} {b.dtype}) are not supported, "
            "because JAX has no product of integers that is narrower than one of them; convert the weakly typed "
            "one"
        )


class CallTypes(NamedTuple):
    """`operand`: the type of a and b; they keep theirs if `is_low_precision` or `is_mixed`. `out`: the type of D."""

    operand: np.dtype
    out: np.dtype
    is_low_precision: bool
    is_mixed: bool


@_once_for_types
def of_call(types: Types, preferred: np.dtype | None, has_scaling: bool) -> CallTypes:
    """Returns the types of a call for operands that `conversion` has converted. `types`: of a, b and each array that is
    added.

    Without `preferred`, D gets the type that JAX promotes the product and what is added to, if kernels of the product
    give it; else, and always for integers, the operands' type. With `preferred`, D has this type; integers are
    multiplied in it too, and a mixed pair in its wide type. 8 bits or fewer: see `_of_low_precision`. Raises
    NoPromotion or NoKernel for types that have no product. Without `preferred`, raises JAX's own TypePromotionError for
    an added type that JAX does not promote with the operands'."""
    a, b, *added = map(_Typed, types)
    both = a.dtype, b.dtype
    mixes = is_mixed(*both) and not has_scaling
    is_low = any(map(is_scaled, both)) or all(map(is_low_precision, both))
    if is_low and (not mixes or preferred is None):  # without a type JAX promotes neither float8 nor float4
        return CallTypes(a.dtype, _of_low_precision(*both, preferred, has_scaling), True, mixes)
    takes_pair = preferred is not None and is_mixed(*both)
    try:
        operand = operand_type(*both) if takes_pair else np.dtype(jnp.result_type(a, b))
    except TypePromotionError as error:
        raise NoPromotion(str(error)) from None
    if operand.name not in RESULT_TYPES:
        raise NoKernel(
            f"operands of dtype {operand.name} ({{a}} {a.dtype}, {{b}} {b.dtype}) are not supported; supported are "
            f"{', '.join(RESULT_TYPES)}"
        )
    allowed, is_integer = RESULT_TYPES[operand.name], operand.name in INTEGERS
    if preferred is None:
        out = np.dtype(jnp.result_type(operand, *added))
        return CallTypes(operand, out if out.name in allowed and not is_integer else operand, False, mixes)
    if preferred.name not in allowed:
        raise NoKernel(
            f"preferred_element_type {preferred.name} is not available for {operand.name} operands; "
            f"available: {', '.join(allowed)}"
        )
    return CallTypes(preferred if is_integer else operand, preferred, False, mixes)


def _of_low_precision(a: np.dtype, b: np.dtype, preferred: np.dtype | None, has_scaling: bool) -> np.dtype:
    """Returns the type of D for operands of 8 bits and fewer, which are never promoted: `preferred`. Without it int8
    gives int32, with scales float32. Raises NoPromotion without `preferred` for other types, and NoKernel for a
    `preferred` that they do not give. A pair that is not multiplied raises the one or the other too."""
    allowed = result_dtypes(a, b, has_scaling)
    if not allowed:
        raise (NoPromotion if preferred is None else NoKernel)(
            f"{{a}} is {a.name} and {{b}} is {b.name}; "
            "float8 goes with float8 (float8_e5m2 not with itself), float4_e2m1fn with its own type: "
            "convert one of them"
        )
    if preferred is None and a == _INT8:
        return np.dtype(allowed[-1])
    if preferred is None:
        raise NoPromotion(
            f"operands of {a.name} and {b.name} need preferred_element_type; available: {', '.join(allowed)}"
        )
    if preferred.name not in allowed:
        raise NoKernel(
            f"preferred_element_type {preferred.name} is not available for {a.name} and {b.name} "
            f"operands; available: {', '.join(allowed)}"
        )
    return preferred


# The types of JAX ------------------------------------------------------------------------------------------------


def of_jnp(operands: Sequence[Any], preferred: np.dtype | None, added: Sequence[Any] = ()) -> tuple[np.dtype, bool]:
    """Returns (the type of the result, whether it is weak): `preferred`, which is never weak, or the type of
    `jnp.matmul` of the operands. A weak type of `jnp.matmul` is promoted with the types of `added`; another is not.
    Raises JAX's TypePromotionError (a ValueError) for types that JAX does not promote."""
    if preferred is not None:
        return preferred, False
    out, is_weak = jax.dtypes.result_type(*operands, return_weak_type_flag=True)
    if is_weak:
        out, is_weak = jax.dtypes.result_type(*operands, *added, return_weak_type_flag=True)
    return np.dtype(out), bool(is_weak)


def _of_lax(a: np.dtype, b: np.dtype, preferred: np.dtype | None, precision: lax.DotAlgorithmPreset | None) -> np.dtype:
    """Returns the type of the result of `lax.dot_general`. Raises TypeError or ValueError for types that it refuses."""
    numbers = [jax.core.ShapedArray((), dtype) for dtype in (a, b)]
    params = {"precision": precision, "preferred_element_type": preferred, "out_sharding": None}
    product, _ = lax.dot_general_p.abstract_eval(*numbers, dimension_numbers=(((), ()), ((), ())), **params)
    return product.dtype


# Types of float8 that XLA multiplies with each other as they are.
_FLOAT8 = {f"float8_{name}" for name in ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}


def _steps(a: np.dtype, b: np.dtype, out: np.dtype, precision: lax.DotAlgorithmPreset | None) -> tuple[np.dtype, ...]:
    """Returns a tuple of the one type that JAX converts both operands to, or () if they keep their types. It is the
    type that `precision` needs, if it does not take theirs; otherwise, if the types differ, `out`, the result's.

    Instead of int32 it is int8, and instead of float32 bfloat16, if this holds all numbers of both operands. Two types
    of float8 stay. So does a type of 8 bits or fewer with one of 16 or 32, if a kernel gives `out`, because kernels
    decode the narrow operand."""
    steps: tuple[np.dtype, ...] = ()
    wide = operand_type(a, b)
    overflows = wide == np.float16 and "float8_e8m0fnu" in (a.name, b.name)  # if JAX converts it
    if is_mixed(a, b) and out.name in RESULT_TYPES[wide.name] and not overflows:  # a kernel has JAX's value
        a = wide
    elif a != b and not {a.name, b.name} <= _FLOAT8:
        has_narrow = [kernel for kernel, wide, holds in _HOLDING if wide == out and holds(a) and holds(b)]
        steps = (has_narrow[0] if has_narrow else out,)
    taken = precisions.converted_to(precision, steps[-1] if steps else a)
    return steps if taken is None else (taken,)


_HOLDING: tuple[tuple[np.dtype, np.dtype, Callable[[np.dtype], bool]], ...] = (
    (_INT8, _INT32, lambda x: x in (_INT8, np.bool_) or (jnp.issubdtype(x, jnp.integer) and jnp.iinfo(x).bits < 8)),
    (_BFLOAT16, _FLOAT32, lambda x: x == _BFLOAT16 or x.itemsize == 1),
)


# The types of kernels --------------------------------------------------------------------------------------------

# (type of the operands, or None to keep it; type of the call's result).
_KernelTypes = tuple[np.dtype | None, np.dtype]


def _of_kernel(
    given: np.dtype,
    low: tuple[str, ...],
    out: np.dtype,
    precision: lax.DotAlgorithmPreset | None,
    asked: tuple[int | None, bool],
) -> _KernelTypes | None:
    """Returns (the type to convert both operands to, or None to keep `given`; the type of the call's result, which is
    converted to the user's `out` afterwards). Returns None if no kernel takes `given` although an implementation is
    asked for.

    If a kernel gives `out` for `given`, returns (None, out). Otherwise integers follow `_of_integers`. For an `out` of
    float64 or complex128, narrower operands and the result become float64, or complex128 if the operands are complex,
    unless `precision` takes no such operands. Operands without a kernel become bfloat16, with a float32 result. Any
    other type is kept, and the result is the last one in RESULT_TYPES. int8 always follows `_of_int8`.

    `given`: the operands' type after `_steps`, or the wide one of two. `low`: types of results that kernels of 8 bits
    and fewer have, or (). `precision`: if it sums in 16 bits, `given` stands for `out`. `asked`: as in `conversion`."""
    has_kernel, (epilog, has_implementation) = given.name in RESULT_TYPES, asked
    if given == _INT8:
        return _of_int8(out, epilog, has_implementation)
    if has_implementation and not has_kernel:
        return None
    if precision is not None and precisions.sums_in_16_bits(precision.name):
        out = given
    if out.name in (low or RESULT_TYPES.get(given.name, ())):
        return None, out
    if not jnp.issubdtype(given, jnp.inexact):
        return _of_integers(out)
    is_complex = jnp.issubdtype(given, jnp.complexfloating)
    if out in (np.float64, np.complex128) and given.itemsize < (16 if is_complex else 8):
        wide = np.dtype(np.complex128 if is_complex else np.float64)
        if precisions.converted_to(precision, wide) is None:
            return wide, wide
    if not has_kernel:  # bfloat16 has all numbers of 8 bits and fewer
        return _BFLOAT16, _FLOAT32
    return None, np.dtype(RESULT_TYPES[given.name][-1])


def _of_int8(out: np.dtype, epilog: int | None, has_implementation: bool) -> _KernelTypes | None:
    """Returns the types for int8 operands, as `_of_kernel`: (None, int32) for integers of up to 32 bits without an
    epilog. XLA multiplies in other calls, in the types of `_of_integers`. For these returns None if an implementation
    is asked for, or if the result has less than 32 bits and the epilog is not NONE or BIAS."""
    if epilog == Epilog.NONE and jnp.issubdtype(out, jnp.integer) and out.itemsize <= 4:
        return None, _INT32  # the low bits equal sums in a narrower type
    is_wide = epilog in (Epilog.NONE, Epilog.BIAS) or out.itemsize >= 4  # a relu of narrower sums differs
    return _of_integers(out) if is_wide and not has_implementation else None


def _of_integers(out: np.dtype) -> _KernelTypes:
    """Returns (type, type) that XLA multiplies integers in and gives: float32 for results of 16-bit floating point and
    narrower, int32 for integers of 8 bits and fewer (but not uint8), otherwise `out`."""
    is_narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    has_less = out == _INT8 or (jnp.issubdtype(out, jnp.integer) and jnp.iinfo(out).bits < 8)
    computed = _FLOAT32 if is_narrow else _INT32 if has_less else out
    return computed, computed
