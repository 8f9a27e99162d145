"""Types that JAX multiplies and no kernel does, by types of which there is one: the operands are converted ahead of the
call, or its result behind it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.low_precision import result_dtypes
from jaxmp._src.spec.matmul_spec import RESULT_TYPES
from jaxmp._src.validation.arguments import added_arrays
from jaxmp._src.validation.operand_checks import as_array, is_array
from jaxmp._src.validation.scale_checks import are_low_precision


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The types of a call: of its operands, or None for those that they have, and of its result; and of what the user
    gets."""

    operand: np.dtype | None
    result: np.dtype
    out: np.dtype

    def of_operand(self, x: Any) -> Any:
        return x if self.operand is None else jnp.asarray(x).astype(self.operand)

    def of_added(self, x: Any) -> Any:
        """An array that is added to the product: in the call's type where JAX promotes its own with no other."""
        if not is_array(x) or x.dtype.name in RESULT_TYPES or x.dtype == np.int8:
            return x
        return jnp.asarray(x).astype(self.result)

    def of_result(self, d: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(d) and not jnp.issubdtype(self.out, jnp.complexfloating):
            d = d.real
        return d.astype(self.out)


def converted(
    multiply: Callable[[Any, Any, Any, Any, dict[str, Any]], Any],
    a: Any,
    b: Any,
    c: Any,
    epilog_inputs: Any,
    options: dict[str, Any],
    *,
    are_rows: bool,
) -> Any:
    """`multiply(a, b, c, epilog_inputs, options)`, d or (d, {name: array}), with conversions where it has no kernel for
    the types.

    `are_rows`: whether both operands are stored along the contraction, as kernels of 8 bits and fewer take them.
    """
    found = find(a, b, options, are_rows=are_rows, added=added_arrays(c, epilog_inputs))
    if found is None:
        return multiply(a, b, c, epilog_inputs, options)
    if isinstance(epilog_inputs, Mapping) and "bias" in epilog_inputs:
        epilog_inputs = {**epilog_inputs, "bias": found.of_added(as_array(epilog_inputs["bias"]))}
    options = options | {"preferred_element_type": found.result}
    result = multiply(found.of_operand(a), found.of_operand(b), found.of_added(c), epilog_inputs, options)
    return (found.of_result(result[0]), *result[1:]) if isinstance(result, tuple) else found.of_result(result)


def find(a: Any, b: Any, options: Mapping[str, Any], *, are_rows: bool, added: Sequence[Any] = ()) -> Conversion | None:
    """The conversions of a product; None where a kernel has the types, and where JAX refuses them too."""
    preferred = options.get("preferred_element_type")
    if not (is_array(a) and is_array(b)):
        return None
    try:
        is_low, given = are_low_precision(a, b), np.dtype(jnp.result_type(a, b))
        if given == np.int8:
            return _find_int8(preferred, added, options, is_same=a.dtype == b.dtype)
        has_kernel = given.name in RESULT_TYPES and not is_low
        is_chosen = options.get("scaling") is not None or options.get("implementation") is not None
        if (has_kernel and preferred is None) or (is_chosen and not has_kernel):
            return None
        are_rows &= all(isinstance(extent, int) and extent % 16 == 0 for x in (a, b) for extent in x.shape[-2:])
        return _find(given, result_dtypes(a.dtype, b.dtype) if are_rows and is_low else (), preferred)
    except (TypeError, ValueError):  # types that are none, or that JAX does not promote
        return None


def _find(given: np.dtype, low: tuple[str, ...], preferred: Any) -> Conversion | None:
    """For operands of the type `given`, of which kernels of 8 bits and fewer have results of the types `low`."""
    out = given if preferred is None else np.dtype(jax.dtypes.canonicalize_dtype(preferred))
    if out.name in (low or RESULT_TYPES.get(given.name, ())):
        return Conversion(None, out, out) if preferred is None else None
    if not _is_product_of_jax(given, out):
        return None
    if not jnp.issubdtype(given, jnp.inexact):
        return _of_integers(out)
    is_complex = jnp.issubdtype(given, jnp.complexfloating)
    if out in (np.float64, np.complex128) and given.itemsize < (16 if is_complex else 8):
        wide = np.dtype(np.complex128 if is_complex else np.float64)
        return Conversion(wide, wide, out)
    if given.itemsize == 1:  # bfloat16 has all numbers of 8 bits and fewer
        return Conversion(np.dtype(jnp.bfloat16), np.dtype(np.float32), out)
    return Conversion(None, np.dtype(RESULT_TYPES[given.name][-1]), out)


def _find_int8(preferred: Any, added: Sequence[Any], options: Mapping[str, Any], *, is_same: bool) -> Conversion | None:
    """Of int8 with int8 (or, unless `is_same`, bool), whose kernels give int32 without an epilog; by default the result
    is int8, or has the type of wider integers that are added."""
    int8, int32 = np.dtype(np.int8), np.dtype(np.int32)
    if preferred is not None:
        out = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
    elif all(jnp.issubdtype(x.dtype, jnp.signedinteger) for x in added):
        out = np.dtype(jnp.result_type(int8, *added))
    else:
        out = int8
    epilog = options.get("epilog", Epilog.NONE)
    has_kernel = epilog is Epilog.NONE and jnp.issubdtype(out, jnp.integer) and out.itemsize <= 4
    if (has_kernel and is_same and preferred is not None and out == int32) or not _is_product_of_jax(int8, out):
        return None
    if has_kernel:  # the low bits of int32 are those of sums in a narrower type
        return Conversion(None if is_same else int8, int32, out)
    is_wide = epilog in (Epilog.NONE, Epilog.BIAS) or out.itemsize >= 4  # in a narrower type relu is of other sums
    return _of_integers(out) if is_wide and options.get("implementation") is None else None


def _of_integers(out: np.dtype) -> Conversion:
    """Of integers into a type that XLA does not give them as they are."""
    is_narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    has_less = out == np.int8 or (jnp.issubdtype(out, jnp.integer) and jnp.iinfo(out).bits < 8)
    computed = np.dtype(np.float32) if is_narrow else np.dtype(np.int32) if has_less else out
    return Conversion(computed, computed, out)


@functools.lru_cache(1024)
def _is_product_of_jax(operand: np.dtype, out: np.dtype) -> bool:
    """Whether JAX multiplies operands of a type into a result of another."""
    x = jax.ShapeDtypeStruct((1, 1), operand)
    try:
        jax.eval_shape(lambda x, y: lax.dot(x, y, preferred_element_type=out), x, x)
    except TypeError:
        return False
    return True
