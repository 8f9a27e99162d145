"""The types of a product as JAX has them: operands are converted ahead of the call to types that have a kernel, and its
result behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.jax_internals.jax_compat import convert
from jaxmp._src.spec import precisions
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.low_precision import FLOAT4, is_mixed, operand_type, result_dtypes
from jaxmp._src.spec.matmul_spec import RESULT_TYPES
from jaxmp._src.spec.refusal import NotAvailable
from jaxmp._src.spec.request import Request
from jaxmp._src.validation.arguments import added_arrays
from jaxmp._src.validation.operand_checks import as_array, check_preferred, is_array

_BFLOAT16, _FLOAT32, _INT8, _INT32 = map(np.dtype, (jnp.bfloat16, np.float32, np.int8, np.int32))


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What is converted around a call; by default nothing.

    `steps` are the types to which operands are converted in turn. `result` is the call's preferred_element_type, and
    `out` the type of what the user gets; None where what is added to the product decides. `are_weak`: both operands.
    """

    steps: tuple[np.dtype, ...] = ()
    result: np.dtype | None = None
    out: np.dtype | None = None
    is_weak: bool = False
    are_weak: bool = False

    def of(self, name: str, x: Any) -> Any:
        """The operand of the call by its name."""
        if name in ("a", "b"):
            return self._of_operand(x)
        return self._of_added(x) if name in ("c", "bias") else x

    def of_result(self, result: Any) -> Any:
        """What the user gets of d, or of (d, {name: array})."""
        if isinstance(result, tuple):
            return (self.of_result(result[0]), *result[1:])
        return convert(result, result.dtype if self.out is None else self.out, self.is_weak)

    def _of_operand(self, x: Any) -> Any:
        is_weak = self != Conversion() and jax.typeof(x).weak_type
        # JAX's cotangent is weak where it is converted, or where the product is weak; a conversion's is as its operand.
        if is_weak and (self.are_weak or (self.out is not None and self.out != x.dtype)):
            x = convert(x, x.dtype)
        for dtype in self.steps:
            x = x if x.dtype == dtype else convert(x, dtype)
        return x

    def _of_added(self, x: Any) -> Any:
        """An array that is added to the product: in the call's type where JAX promotes its own with no other."""
        if self.result is None or not is_array(x) or x.dtype.name in RESULT_TYPES or x.dtype == _INT8:
            return x
        return convert(x, self.result)


def find(request: Request, *, are_rows: bool | None = None, is_lax: bool = False) -> tuple[Conversion, Request]:
    """(the conversions around a product, the request of the call); none where JAX refuses the types too.

    `are_rows`: both operands are stored along the contraction, as kernels of 8 bits and fewer take them; by default
    what the flags say. `is_lax`: the result has the type of `lax.dot_general`, not of `jnp.matmul`.
    """
    if request.preferred_element_type is not None:
        request = request._replace(preferred_element_type=check_preferred(request.preferred_element_type))
    if not (is_array(request.a) and is_array(request.b)) or request.scaling is not None:
        return Conversion(), request
    if are_rows is None:
        are_rows = request.transpose_b and not request.transpose_a
    found = _find(request, are_rows=are_rows, is_lax=is_lax)
    if found is None:
        return Conversion(), request
    operands: dict[str, Any] = {name: found.of(name, getattr(request, name)) for name in ("a", "b", "c")}
    if isinstance(request.epilog_inputs, Mapping):
        inputs = {name: found.of(name, as_array(x)) for name, x in request.epilog_inputs.items()}
        operands["epilog_inputs"] = inputs
    return found, request._replace(preferred_element_type=found.result, **operands)


def _find(request: Request, *, are_rows: bool, is_lax: bool) -> Conversion | None:
    """The conversions of a product of two arrays; None where there are none."""
    a, b, added = request.a, request.b, added_arrays(request)
    preferred: Any = request.preferred_element_type
    precision = precisions.preset(request.precision)
    types = jax.typeof(a), jax.typeof(b)
    dtypes = types[0].dtype, types[1].dtype
    are_weak = all(x.weak_type for x in types)
    try:
        out, is_weak = (preferred, are_weak) if is_lax else _of_jnp((a, b), preferred, added)
        out = _of_lax(*dtypes, out, precision)
    except (TypeError, ValueError):  # JAX does not promote the types, or has no such product
        _check_weak(a, b)
        return None
    steps = _steps(*dtypes, out, precision)
    given = steps[-1] if steps else operand_type(*dtypes)
    is_default = preferred is None and out == given
    if is_default and given == _INT8 and all(jnp.issubdtype(x.dtype, jnp.signedinteger) for x in added):
        with jax.numpy_dtype_promotion("standard"):  # c is of the sums, where the user may be strict
            out = np.dtype(jnp.result_type(given, *added))
    are_rows &= all(isinstance(extent, int) and extent % 16 == 0 for x in (a, b) for extent in x.shape[-2:])
    has_low = are_rows and not steps and given.name != FLOAT4  # kernels of float4 need scales
    low = result_dtypes(*dtypes) if has_low else ()
    is_lax_alone = is_lax and not steps and is_mixed(*dtypes)  # may be of types that jnp does not promote
    leaves_type = is_default and given.name in RESULT_TYPES and not is_lax_alone
    of_call = (None, None) if leaves_type else _of_call(given, low, out, request)
    if of_call is None:
        return None
    operand, result = of_call
    if operand is not None and operand != given:
        steps += (operand,)
    is_as_asked = result is None or (result == out and preferred is not None)
    if is_as_asked and not steps and not any(x.weak_type for x in types):
        return None
    return Conversion(steps, result, None if result is None else out, is_weak, are_weak)


def _check_weak(a: Any, b: Any) -> None:
    """Raise NotImplementedError for a weak integer that is wider than the other, to whose type JAX promotes both."""
    types = [jax.typeof(x) for x in (a, b)]
    if any(x.weak_type for x in types) and all(jnp.issubdtype(x.dtype, jnp.integer) for x in types):
        raise NotAvailable(
            f"operands of dtype {jnp.result_type(a, b)} ({{a}} {types[0].dtype}, {{b}} {types[1].dtype}) are not "
            "supported, for JAX has no product of integers that is narrower than one of them; convert the weakly typed "
            "one"
        )


# The types of JAX ------------------------------------------------------------------------------------------------


def of_jnp(operands: Sequence[Any], preferred: DTypeLike | None) -> tuple[np.dtype, bool]:
    """(type of the result of an einsum of `operands`, whether it is weak)."""
    return _of_jnp(operands, check_preferred(preferred), ())


def _of_jnp(operands: Sequence[Any], preferred: np.dtype | None, added: Sequence[Any]) -> tuple[np.dtype, bool]:
    """(type of the result of `jnp.matmul` or `jnp.einsum`, whether it is weak); weak ones give way to what is added."""
    if preferred is not None:
        return preferred, False
    out, is_weak = jax.dtypes.result_type(*operands, return_weak_type_flag=True)
    if is_weak:
        out, is_weak = jax.dtypes.result_type(*operands, *added, return_weak_type_flag=True)
    return np.dtype(out), bool(is_weak)


@jax_compat.cache_in_context(1024)
def _of_lax(a: np.dtype, b: np.dtype, preferred: np.dtype | None, precision: lax.DotAlgorithmPreset | None) -> np.dtype:
    """Type of the result of `lax.dot_general`; TypeError for types that it does not take."""
    numbers = [jax.core.ShapedArray((), dtype) for dtype in (a, b)]
    params = {"precision": precision, "preferred_element_type": preferred, "out_sharding": None}
    product, _ = lax.dot_general_p.abstract_eval(*numbers, dimension_numbers=(((), ()), ((), ())), **params)
    dtype: np.dtype = product.dtype
    return dtype


# Types of float8 that XLA multiplies with each other as they are.
_FLOAT8 = {f"float8_{name}" for name in ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}


def _steps(a: np.dtype, b: np.dtype, out: np.dtype, precision: lax.DotAlgorithmPreset | None) -> tuple[np.dtype, ...]:
    """The types to which JAX converts operands: of two types that of the result, and what the precision takes.

    Where the result is wide, a narrower type with a kernel may have all numbers of the operands too. Kernels decode the
    narrow operand of a mixed pair.
    """
    steps: tuple[np.dtype, ...] = ()
    if _is_decoded(a, b, out):
        a = operand_type(a, b)
    elif a != b and not {a.name, b.name} <= _FLOAT8:
        has_narrow = [kernel for kernel, wide, holds in _HOLDING if wide == out and holds(a) and holds(b)]
        steps = (has_narrow[0] if has_narrow else out,)
    taken = precisions.taken(precision, steps[-1] if steps else a)
    return steps if taken is None else (taken,)


def _is_decoded(a: np.dtype, b: np.dtype, out: np.dtype) -> bool:
    """Whether a kernel takes a mixed pair as it is, with the value that JAX has."""
    wide = operand_type(a, b)
    overflows = wide == np.float16 and "float8_e8m0fnu" in (a.name, b.name)  # where JAX converts it
    return is_mixed(a, b) and out.name in RESULT_TYPES[wide.name] and not overflows


_HOLDING: tuple[tuple[np.dtype, np.dtype, Callable[[np.dtype], bool]], ...] = (
    (_INT8, _INT32, lambda x: x == _INT8 or (_bits_of_integer(x) < 8)),
    (_BFLOAT16, _FLOAT32, lambda x: x == _BFLOAT16 or x.itemsize == 1),
)


def _bits_of_integer(dtype: np.dtype) -> int:
    if dtype == np.bool_:
        return 1
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 64


# The types of kernels --------------------------------------------------------------------------------------------

# Type of the operands, or None for the one that they have, and of the call's result.
_CallTypes = tuple[np.dtype | None, np.dtype]


def _of_call(
    given: np.dtype,
    low: tuple[str, ...],
    out: np.dtype,
    request: Request,
) -> _CallTypes | None:
    """The types of a call for operands of the type `given`; None where no kernel has them.

    Kernels of 8 bits and fewer have results of the types `low`.
    """
    has_kernel, implementation = given.name in RESULT_TYPES, request.implementation
    if given == _INT8:
        return _of_int8(out, request.epilog, implementation)
    if implementation is not None and not has_kernel:
        return None
    precision = precisions.preset(request.precision)
    if precision is not None and precisions.sums_in_16_bits(precision.name):
        out = given
    if out.name in (low or RESULT_TYPES.get(given.name, ())):
        return None, out
    if not jnp.issubdtype(given, jnp.inexact):
        return _of_integers(out)
    is_complex = jnp.issubdtype(given, jnp.complexfloating)
    if out in (np.float64, np.complex128) and given.itemsize < (16 if is_complex else 8):
        wide = np.dtype(np.complex128 if is_complex else np.float64)
        return wide, wide
    if not has_kernel:  # bfloat16 has all numbers of 8 bits and fewer
        return _BFLOAT16, _FLOAT32
    return None, np.dtype(RESULT_TYPES[given.name][-1])


def _of_int8(out: np.dtype, epilog: Any, implementation: str | None) -> _CallTypes | None:
    """For operands of int8, whose kernels give int32 without an epilog."""
    if epilog is Epilog.NONE and jnp.issubdtype(out, jnp.integer) and out.itemsize <= 4:
        return None, _INT32  # the low bits are those of sums in a narrower type
    is_wide = epilog in (Epilog.NONE, Epilog.BIAS) or out.itemsize >= 4  # in a narrower type relu is of other sums
    return _of_integers(out) if is_wide and implementation is None else None


def _of_integers(out: np.dtype) -> _CallTypes:
    """Of integers into a type that XLA does not give them as they are."""
    is_narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    has_less = out == _INT8 or (jnp.issubdtype(out, jnp.integer) and jnp.iinfo(out).bits < 8)
    computed = _FLOAT32 if is_narrow else _INT32 if has_less else out
    return computed, computed
