"""Turns the arguments of one call into its spec and its operands."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.spec import levels, low_precision, precisions
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.extents import check_local_shapes
from jaxmp._src.core.spec.matmul_spec import INTEGERS, Group, MatmulSpec, accumulator, interned
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue, NotAvailable
from jaxmp._src.core.spec.request import Request
from jaxmp._src.core.validation import comm_options, epilog_checks, operand_checks, result_types, scale_checks
from jaxmp._src.core.validation.result_types import NOTHING, Conversion
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import Shape


def converted(request: Request, *, are_rows: bool | None = None, is_lax: bool = False) -> tuple[Conversion, Request]:
    """Returns (conversions around a product, request with converted a, b, c and bias). The request's
    `preferred_element_type` becomes the dtype that the call computes, or None. There are no conversions with `scaling`,
    if a or b is not an array of numbers, or if `result_types.conversion` returns None; then a, b, c and bias stay.
    Raises TypeError for a `preferred_element_type` that is no dtype, and as `precisions.preset` and
    `result_types.conversion`.

    `are_rows`: both operands are stored along the contraction, as kernels of 8 bits and fewer take them; by default the
    flags decide. `is_lax`: the result has the type of `lax.dot_general`, not of `jnp.matmul`."""
    a, b, preferred, precision = request.a, request.b, request.preferred_element_type, request.precision
    if preferred is not None:
        preferred = operand_checks.check_preferred(preferred)
        request = request._replace(preferred_element_type=preferred)
    added = added_arrays(request)
    if not (operand_checks.has_numbers(a) and operand_checks.has_numbers(b)) or request.scaling is not None:
        return NOTHING, request
    if are_rows is None:
        are_rows = bool(request.transpose_b and not request.transpose_a)
    found = result_types.conversion(
        types_of(a, b, *added.values()),
        preferred,
        None if precision is None else precisions.preset(precision),
        (request.epilog if isinstance(request.epilog, int) else None, request.implementation is not None),
        (are_rows and all(isinstance(n, int) and n % 16 == 0 for x in (a, b) for n in x.shape[-2:]), is_lax),
    )
    if found is None:
        return NOTHING, request
    changes: dict[str, Any] = {name: found.of(name, x) for name, x in (("a", a), ("b", b), *added.items())}
    if request.epilog_inputs is not None and "bias" in changes:
        changes["epilog_inputs"] = {**request.epilog_inputs, "bias": changes.pop("bias")}
    return found, request._replace(preferred_element_type=found.result, **changes)


def added_arrays(request: Request) -> dict[str, Any]:
    """Returns c and the bias of a request by name; without those that are missing or not arrays of numbers."""
    inputs = request.epilog_inputs
    added = {"c": request.c, "bias": inputs.get("bias") if isinstance(inputs, Mapping) else None}
    return {name: x for name, x in added.items() if x is not None and operand_checks.has_numbers(x)}


def types_of(*arrays: Any) -> result_types.Types:
    """Returns (dtype, whether it is weak) in JAX of each array, except that a ShapeDtypeStruct keeps 64 bits."""
    kinds = ((x, jax.typeof(x)) for x in arrays)
    return tuple((x.dtype if isinstance(x, jax.ShapeDtypeStruct) else t.dtype, t.weak_type) for x, t in kinds)


def validated(
    request: Request,
    group: Group = Group(),  # noqa: B008
) -> tuple[MatmulSpec, dict[str, Any], Shape]:
    """Checks a user's arguments, which `converted` has converted, and returns (spec, operands by name in the types of
    the call, shape of d). Raises a `Refusal` for what is wrong.

    `group`: the ranks that share the product; then the operands and d are a rank's. Alpha and beta that are arrays
    become operands "alpha" and "beta", with 1 in the spec. Products of integers ignore `determinism`: any order gives
    their sums."""
    a, b, c = request.a, request.b, request.c
    operand_checks.check_array("{a}", a, at_least=2)
    operand_checks.check_array("{b}", b, ndim=2)
    operand_checks.check_operand("{a}", a)
    operand_checks.check_operand("{b}", b)
    flags, added = operand_checks.check_flags(request), added_arrays(request).values()
    preferred: Any = request.preferred_element_type  # checked by `converted`
    types = result_types.of_call(types_of(a, b, *added), preferred, request.scaling is not None)
    operand, out, is_low_precision, is_mixed = types
    if operand.name in INTEGERS:  # integer sums are exact in any order
        flags |= levels.ANY_ORDER.option
    if request.comm is not None:
        flags["comm"] = comm_options.resolve_comm_options(out, operand, request.comm, request.level)
    operands = {"a": a, "b": b}
    if not (is_low_precision or is_mixed):
        operands = {name: x if x.dtype == operand else x.astype(operand) for name, x in operands.items()}
    spec = interned(
        out,
        group,
        **flags,
        precision="DEFAULT" if request.precision is None else precisions.resolve(request.precision, operand, out),
        source_line=_source_line(request.function),
    )
    scalars = {"alpha": check_scalar("alpha", request.alpha, out)}
    found = check_local_shapes(spec, a.shape[-2:], b.shape, takes_transposed=request.takes_transposed)
    shape = (*a.shape[:-2], *found.d)
    c_dtype, bias_dtype, has_types = out, out, low_precision.is_scaled(operand)
    if has_types:
        c_dtype, bias_dtype = scale_checks.side_dtypes(out, c, (request.epilog_inputs or {}).get("bias"))
    if c is not None or request.beta is not None:
        scalars["beta"] = check_c(c, request.beta, c_dtype, shape)
    traced = {name: x for name, x in scalars.items() if isinstance(x, jax.Array)}
    changes = scalars | dict.fromkeys(traced, 1.0) | {"has_c": c is not None, "traced": tuple(traced)}
    changes |= {"c_dtype": c_dtype, "bias_dtype": bias_dtype} if has_types else {}
    inputs: dict[str, Any] = {}
    if request.epilog is not Epilog.NONE or request.epilog_inputs is not None:
        of_epilog, inputs = epilog_checks.check_epilog(request, spec, shape, bias_dtype)
        changes |= of_epilog
    spec = spec.replace(**changes)
    if traced:
        _check_traced(spec, a.dtype, is_low_precision)
    if is_low_precision:
        scale_checks.check_stored(spec, a.dtype)
    scales: dict[str, Any] = {}
    if is_low_precision or request.scaling is not None:
        of_scales, scales = scale_checks.resolve_scales(request.scaling, a, b, spec)
        spec = spec.replace(**of_scales)
    others = {} if c is None else {"c": c.astype(c_dtype)}
    others |= inputs | traced | scales
    for name, x in others.items():
        operand_checks.check_operand("{bias}" if name == "bias" else name.replace("scale_", "scaling."), x)
    return spec, operands | others, shape


def _source_line(function: str) -> str:
    """Returns the name of a call for messages, with its source line in a job of several processes. The name is
    `function`, but for a call that `fuse` makes it is "fuse: " and the name of JAX's product."""
    eqn = jax_tracing.equation_in_place()
    product = "" if eqn is None else eqn.primitive.name.removesuffix("_wrapper")
    if eqn is None or product not in ("dot_general", "ragged_dot_general", "scaled_matmul"):
        return f"{function} at {jax_compat.user_line()}" if native.has_barrier else function
    return f"fuse: {product} at {jax_compat.traced_line(eqn)}" if native.has_barrier else f"fuse: {product}"


def _check_traced(spec: MatmulSpec, dtype: np.dtype, is_low_precision: bool) -> None:
    """Raises NotImplementedError if alpha or beta is an array (`spec.traced` is not empty) and the operands have 8 bits
    or fewer, the epilog has a bias gradient, or `determinism` is "batch" or "topology"."""
    arrays = f"got an array for {' and '.join(spec.traced)}"
    if is_low_precision or spec.rule.gradient:
        what = f"{dtype} operands" if is_low_precision else f"epilog {spec.epilog.name}"
        raise NotAvailable(
            f"with {what} alpha and beta are Python numbers, {arrays}; "
            f"{'multiply a scale by it' if is_low_precision else 'scale an operand, or the gradient that comes in'}"
        )
    if spec.fixed_reduction_order:
        raise spec.level.refusal(
            f"takes alpha and beta as Python numbers, {arrays}, after which XLA would apply the epilog",
            "scale an operand",
        )


def check_scalar(argument: str, value: Any, out_dtype: np.dtype) -> Any:
    """Returns alpha or beta in a form that takes no part in type promotion: a number, also of NumPy, as a float or
    complex, and a JAX scalar in the accumulator's type of `out_dtype`.

    Raises TypeError for a bool, another array or another type. Raises it too if the value is complex and the result is
    real, or if the value is a fraction or a JAX scalar of floating point and the result is an integer or bool. Raises
    ValueError for a number beyond the range of the integers that are summed, or of float64."""
    if isinstance(value, np.generic | np.ndarray) and np.ndim(value) == 0:
        value = value.item()
    if isinstance(value, jax.Array) and value.ndim == 0 and value.dtype != np.bool_:
        kinds = [kind for kind in (jnp.complexfloating, jnp.inexact) if jnp.issubdtype(value.dtype, kind)]
        if kinds and not jnp.issubdtype(out_dtype, kinds[0]):
            raise InvalidType(f"{argument} has dtype {value.dtype} but the result has dtype {np.dtype(out_dtype).name}")
        return value.astype(accumulator(out_dtype))
    what = f" of shape {value.shape} and dtype {value.dtype}" if isinstance(value, np.ndarray | jax.Array) else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | complex):
        raise InvalidType(
            f"{argument} must be a Python number or a scalar array, got {type(value).__name__}{what}; "
            "multiply by anything else outside of the call"
        )
    if isinstance(value, complex):
        if not jnp.issubdtype(out_dtype, jnp.complexfloating):
            raise InvalidType(f"{argument}={value} is complex but the result has dtype {np.dtype(out_dtype).name}")
        return value
    try:
        number = float(value)
    except OverflowError:
        raise InvalidValue(f"{argument} must fit a float64, got an integer beyond 1.8e308") from None
    is_integer = jnp.issubdtype(out_dtype, jnp.integer) or out_dtype == np.bool_
    if is_integer and not number.is_integer():
        raise InvalidType(f"{argument}={value} is not an integer but the result has dtype {np.dtype(out_dtype).name}")
    limits = np.iinfo(accumulator(out_dtype)) if is_integer else None
    if limits and not limits.min <= number <= limits.max:
        raise InvalidValue(f"{argument}={value} does not fit {np.dtype(out_dtype).name}, the type of the result")
    return number


def check_c(c: Any, beta: Any, out_dtype: np.dtype, out_shape: Shape) -> Any:
    """Returns beta as `check_scalar` does; 0.0 without c and beta. Raises ValueError if only one is given or c has
    another shape than d. Raises as `check_array`, and as `check_widens` unless JAX promotes the types of c and d to
    d's."""
    if c is None:
        if beta is not None:
            raise InvalidValue(f"beta={beta!r} was given without c; pass c of shape {tuple(out_shape)} or drop beta")
        return 0.0
    if beta is None:
        raise InvalidValue("c was given without beta; pass beta=1.0 to add c as it is")
    operand_checks.check_array("c", c)
    if tuple(c.shape) != tuple(out_shape):
        raise InvalidValue(f"c must have the result's shape {tuple(out_shape)}, got {tuple(c.shape)}")
    operand_checks.check_widens("c", c, out_dtype)
    return check_scalar("beta", beta, out_dtype)
