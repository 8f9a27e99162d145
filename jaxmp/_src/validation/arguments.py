"""What users pass to one call, to its spec and its operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.runtime import native
from jaxmp._src.spec import low_precision, precisions
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import INTEGERS, Group, MatmulSpec, result_shape
from jaxmp._src.spec.refusal import NotAvailable
from jaxmp._src.spec.request import Request
from jaxmp._src.validation import comm_options, operand_checks, scale_checks
from jaxmp._src.validation.shape_checks import check_local_shapes


def validated(
    request: Request,
    group: Group = Group(),  # noqa: B008
) -> tuple[MatmulSpec, dict[str, Any]]:
    """(spec, operands by name in the types of the call) from what the user passed."""
    a, b, c, epilog, epilog_inputs = request.a, request.b, request.c, request.epilog, request.epilog_inputs
    operand_checks.check_array("{a}", a, at_least=2)
    operand_checks.check_array("{b}", b, ndim=2)
    flags = operand_checks.check_flags(request)
    preferred: Any = request.preferred_element_type  # which `result_types.find` has checked
    is_mixed = low_precision.is_mixed(a.dtype, b.dtype) and request.scaling is None
    # Without a type JAX promotes neither float8 nor float4.
    is_low_precision = scale_checks.are_low_precision(a, b) and (not is_mixed or preferred is None)
    if is_low_precision:
        operand, out = scale_checks.resolve_dtypes(a, b, preferred)
    else:
        operand, out = operand_checks.resolve_dtypes(a, b, preferred, *added_arrays(request))
    if operand.name in INTEGERS:  # whose sums are exact in any order
        flags["determinism"] = "run_to_run"
    operands = {"a": a, "b": b}
    if not (is_low_precision or is_mixed):
        for key, x in (("a", a), ("b", b)):
            operands[key] = x if x.dtype == operand else x.astype(operand)
    line = f" at {jax_compat.user_line()}" if native.has_barrier() else ""
    spec = MatmulSpec(
        out,
        group,
        **flags,
        precision=precisions.resolve(request.precision, operand, out),
        comm=comm_options.resolve_comm_options(out, operand, request.comm),
        source_line=request.function + line,
    )
    check_local_shapes(spec, a.shape[-2:], b.shape, takes_transposed=request.takes_transposed)
    shape = result_shape(spec, a, b)
    c_dtype, bias_dtype = scale_checks.side_dtypes(out, c) if is_low_precision else (out, out)
    alpha = operand_checks.check_scalar("alpha", request.alpha, out)
    beta = operand_checks.check_c(c, request.beta, c_dtype, shape)
    changes = {"alpha": alpha, "beta": beta, "has_c": c is not None}
    traced: dict[str, Any] = {}
    for key, x in (("alpha", alpha), ("beta", beta)):
        if isinstance(x, jax.Array):
            traced[key] = x
    if traced:
        changes |= dict.fromkeys(traced, 1.0) | {"traced": tuple(traced)}
    if is_low_precision:
        scale_checks.check_bias((epilog_inputs or {}).get("bias"), bias_dtype, out)
        changes |= {"c_dtype": c_dtype, "bias_dtype": bias_dtype}
    inputs: dict[str, Any] = {}
    if epilog is not Epilog.NONE or epilog_inputs is not None:
        of_epilog, inputs = operand_checks.check_epilog(request, spec, shape, bias_dtype)
        changes |= of_epilog
    scales: dict[str, Any] = {}
    spec = spec.replace(**changes)
    if traced:
        _check_traced(spec, a.dtype, is_low_precision)
    if is_low_precision:
        scale_checks.check_transpositions(a.dtype, spec.transpose_a, spec.transpose_b)
        scale_checks.check_epilog(spec.epilog.name, a.dtype, out)
    if is_low_precision or request.scaling is not None:
        of_scales, scales = scale_checks.resolve_scales(request.scaling, a, b, spec)
        spec = spec.replace(**of_scales)
    for argument, x in (inputs | scales).items():
        operand_checks.check_memory(argument.replace("scale_", "scaling."), x)
    added = {} if c is None else {"c": c.astype(c_dtype)}
    operands |= added | inputs | traced | scales
    for argument, x in operands.items():
        operand_checks.check_whole(_ROLES.get(argument, argument).replace("scale_", "scaling."), x)
    return spec, operands


_ROLES = {"a": "{a}", "b": "{b}", "bias": "{bias}"}


def added_arrays(request: Request) -> list[Any]:
    """The arrays among what is added to a product."""
    inputs = request.epilog_inputs
    bias = operand_checks.as_array(inputs.get("bias")) if isinstance(inputs, Mapping) else None
    return [x for x in (request.c, bias) if operand_checks.is_array(x)]


def _check_traced(spec: MatmulSpec, dtype: np.dtype, is_low_precision: bool) -> None:
    """Raise NotImplementedError where XLA cannot apply an alpha or beta that is an array after the call."""
    arrays = f"got an array for {' and '.join(spec.traced)}"
    if is_low_precision or spec.rule.gradient:
        what = f"{dtype} operands" if is_low_precision else f"epilog {spec.epilog.name}"
        raise NotAvailable(
            f"with {what} alpha and beta are Python numbers, {arrays}; "
            f"{'multiply a scale by it' if is_low_precision else 'scale an operand, or the gradient that comes in'}"
        )
    if spec.fixed_reduction_order:
        raise NotAvailable(
            f"determinism={spec.determinism!r} takes alpha and beta as Python numbers, {arrays}, after which "
            'XLA would apply the epilog; scale an operand, or pass determinism="run_to_run"'
        )
