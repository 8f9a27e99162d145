"""What users pass to one call, to its spec and its operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmp._src.runtime import jax_compat, native
from jaxmp._src.spec import low_precision, precisions
from jaxmp._src.spec.caller import operand_name
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import INTEGERS, Group, MatmulSpec, result_shape
from jaxmp._src.spec.options import CommOptions
from jaxmp._src.validation import comm_options, operand_checks, scale_checks
from jaxmp._src.validation.shape_checks import check_local_shapes

SPEC_OPTIONS = [
    "alpha",
    "beta",
    "transpose_a",
    "transpose_b",
    "conjugate_a",
    "conjugate_b",
    "epilog",
    "precision",
    "preferred_element_type",
    "implementation",
    "determinism",
    "scaling",
    "comm",
]


def validated(
    name: str,
    a: Any,
    b: Any,
    c: Any,
    epilog_inputs: Any,
    options: dict[str, Any],
    group: Group = Group(),  # noqa: B008
) -> tuple[MatmulSpec, dict[str, Any]]:
    """(spec, operands by name in the types of the call) from what the user passed."""
    operand_checks.check_array(name, operand_name(name, "a"), a, at_least=2)
    operand_checks.check_array(name, operand_name(name, "b"), b, ndim=2)
    flags = operand_checks.check_flags(name, options, a, b)
    preferred = options.get("preferred_element_type")
    is_mixed = low_precision.is_mixed(a.dtype, b.dtype) and options.get("scaling") is None
    # Without a type JAX promotes neither float8 nor float4.
    is_low_precision = scale_checks.are_low_precision(a, b) and (not is_mixed or preferred is None)
    if is_low_precision:
        operand, out = scale_checks.resolve_dtypes(name, a, b, preferred)
    else:
        operand, out = operand_checks.resolve_dtypes(name, a, b, preferred, *added_arrays(c, epilog_inputs))
    if operand.name in INTEGERS:  # whose sums are exact in any order
        flags["determinism"] = "run_to_run"
    operands = {"a": a, "b": b}
    if not (is_low_precision or is_mixed):
        for key, x in (("a", a), ("b", b)):
            operands[key] = x if x.dtype == operand else x.astype(operand)
    comm = options.get("comm")
    spec = MatmulSpec(
        out,
        group,
        **flags,
        precision=precisions.resolve(name, options.get("precision"), operand, out),
        comm=CommOptions() if comm is None else comm_options.resolve_comm_options(name, out, operand, comm),
        source_line=f"{name} at {jax_compat.user_line()}" if native.has_barrier() else "",
    )
    check_local_shapes(name, spec, a.shape[-2:], b.shape)
    shape = result_shape(spec, a, b)
    c_dtype, bias_dtype = scale_checks.side_dtypes(name, out, c) if is_low_precision else (out, out)
    alpha = operand_checks.check_scalar(name, "alpha", options.get("alpha", 1.0), out)
    beta = operand_checks.check_c(name, c, options.get("beta"), c_dtype, shape)
    changes = {"alpha": alpha, "beta": beta, "has_c": c is not None}
    traced: dict[str, Any] = {}
    for key, x in (("alpha", alpha), ("beta", beta)):
        if isinstance(x, jax.Array):
            traced[key] = x
    if traced:
        changes |= dict.fromkeys(traced, 1.0) | {"traced": tuple(traced)}
    if is_low_precision:
        scale_checks.check_bias(name, (epilog_inputs or {}).get("bias"), bias_dtype, out)
        changes |= {"c_dtype": c_dtype, "bias_dtype": bias_dtype}
    epilog = options.get("epilog", Epilog.NONE)
    inputs: dict[str, Any] = {}
    if epilog is not Epilog.NONE or epilog_inputs is not None:
        of_epilog, inputs = operand_checks.check_epilog(name, spec, epilog, epilog_inputs, shape, a.ndim, bias_dtype)
        changes |= of_epilog
    scales: dict[str, Any] = {}
    spec = spec.replace(**changes)
    if traced:
        _check_traced(name, spec, a.dtype, is_low_precision)
    if is_low_precision:
        scale_checks.check_transpositions(name, a.dtype, spec.transpose_a, spec.transpose_b)
        scale_checks.check_epilog(name, spec.epilog.name, a.dtype, out)
    if is_low_precision or options.get("scaling") is not None:
        of_scales, scales = scale_checks.resolve_scales(name, options.get("scaling"), a, b, spec)
        spec = spec.replace(**of_scales)
    for argument, x in (inputs | scales).items():
        operand_checks.check_memory(name, argument.replace("scale_", "scaling."), x)
    added = {} if c is None else {"c": c.astype(c_dtype)}
    operands |= added | inputs | traced | scales
    for argument, x in operands.items():
        operand_checks.check_whole(name, operand_name(name, argument).replace("scale_", "scaling."), x)
    return spec, operands


def added_arrays(c: Any, epilog_inputs: Any) -> list[Any]:
    """The arrays among what is added to a product."""
    bias = operand_checks.as_array(epilog_inputs.get("bias")) if isinstance(epilog_inputs, Mapping) else None
    return [x for x in (c, bias) if operand_checks.is_array(x)]


def _check_traced(name: str, spec: MatmulSpec, dtype: np.dtype, is_low_precision: bool) -> None:
    """Raise NotImplementedError where XLA cannot apply an alpha or beta that is an array after the call."""
    arrays = f"got an array for {' and '.join(spec.traced)}"
    if is_low_precision or spec.rule.gradient:
        what = f"{dtype} operands" if is_low_precision else f"epilog {spec.epilog.name}"
        raise NotImplementedError(
            f"{name}: with {what} alpha and beta are Python numbers, {arrays}; "
            f"{'multiply a scale by it' if is_low_precision else 'scale an operand, or the gradient that comes in'}"
        )
    if spec.fixed_reduction_order:
        raise NotImplementedError(
            f"{name}: determinism={spec.determinism!r} takes alpha and beta as Python numbers, {arrays}, after which "
            'XLA would apply the epilog; scale an operand, or pass determinism="run_to_run"'
        )
