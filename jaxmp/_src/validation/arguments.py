"""What users pass to one call, to its spec and its operands."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from jaxmp._src.runtime import jax_compat, native
from jaxmp._src.spec import epilogs, low_precision, precisions
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import MatmulSpec, check_local_shapes, result_shape
from jaxmp._src.validation import comm_options, operand_checks, scale_checks

_PACKAGE = str(pathlib.Path(__file__).parents[2])  # jaxmp/
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
    "scales",
    "result_amax",
    "aux_dtype",
    "aux_amax",
    "communication_dtype",
    "algorithm",
    "comm_sm_count",
    "determinism",
]
_HINTS = ("communication_dtype", "algorithm", "comm_sm_count")


def validated(name: str, a, b, c, epilog_inputs, options: dict, pattern: dict | None = None):
    """(spec, operands by name in the types of the call) from what the user passed."""
    unknown = sorted(set(options) - set(SPEC_OPTIONS))
    if unknown:
        raise TypeError(f"{name}: unexpected keyword arguments {unknown}; known are {SPEC_OPTIONS}")
    operand_checks.check_array(name, "a", a, at_least=2)
    operand_checks.check_array(name, "b", b, ndim=2)
    is_narrow = low_precision.is_narrow(a.dtype) or low_precision.is_narrow(b.dtype)
    operands, out = _typed_operands(name, a, b, options.get("preferred_element_type"), is_narrow)
    spec = _product_spec(name, a, b, operands["a"].dtype, out, options).replace(**(pattern or {}))
    check_local_shapes(name, spec, a.shape[-2:], b.shape)
    shape = result_shape(spec, a, b)
    c_dtype, bias_dtype = scale_checks.side_dtypes(name, out, c) if is_narrow else (out, out)
    scalars = {
        "alpha": operand_checks.check_scalar(name, "alpha", options.get("alpha", 1.0), out),
        "beta": operand_checks.check_c(name, c, options.get("beta"), c_dtype, shape),
    }
    traced = {argument: x for argument, x in scalars.items() if isinstance(x, jax.Array)}
    spec = spec.replace(**(scalars | dict.fromkeys(traced, 1.0)), traced=tuple(traced), has_c=c is not None)
    if is_narrow:
        scale_checks.check_bias(name, (epilog_inputs or {}).get("bias"), bias_dtype, out)
        spec = spec.replace(c_dtype=c_dtype, bias_dtype=bias_dtype)
    epilog = options.get("epilog", Epilog.NONE)
    spec, inputs = operand_checks.check_epilog(name, spec, epilog, epilog_inputs, shape, a.ndim)
    _check_traced(name, spec, a.dtype, is_narrow)
    if is_narrow:
        scale_checks.check_transpositions(name, a.dtype, spec.transpose_a, spec.transpose_b)
        scale_checks.check_epilog(name, spec.epilog.name, a.dtype, out)
    changes, scales = scale_checks.resolve_scales(name, options, a, b, spec)
    for argument, x in (inputs | scales).items():
        operand_checks.check_memory(name, argument.replace("scale_", "scales."), x)
    added = {} if c is None else {"c": c.astype(c_dtype)}
    return spec.replace(**changes), operands | added | inputs | traced | scales


def _typed_operands(name: str, a, b, preferred, is_narrow: bool) -> tuple[dict[str, Any], np.dtype]:
    """(a and b in the types of the call, type of d); operands of 8 bits and fewer are never promoted."""
    if is_narrow:
        return {"a": a, "b": b}, scale_checks.resolve_dtypes(name, a, b, preferred)
    operand, out = operand_checks.resolve_dtypes(name, a, b, preferred)
    return {key: x if x.dtype == operand else x.astype(operand) for key, x in (("a", a), ("b", b))}, out


def _product_spec(name: str, a, b, operand: np.dtype, out: np.dtype, options: dict) -> MatmulSpec:
    """The spec of the product alone, for operands of type `operand`."""
    operand_checks.check_implementation(name, options.get("implementation"))
    return MatmulSpec(
        out_dtype=out,
        transpose_a=operand_checks.check_flag(name, "transpose_a", options.get("transpose_a", False)),
        transpose_b=operand_checks.check_flag(name, "transpose_b", options.get("transpose_b", False)),
        conjugate_a=operand_checks.check_conjugate(name, "conjugate_a", options.get("conjugate_a", False), a),
        conjugate_b=operand_checks.check_conjugate(name, "conjugate_b", options.get("conjugate_b", False), b),
        precision=precisions.resolve(name, options.get("precision"), operand, out),
        implementation=options.get("implementation"),
        **comm_options.resolve_hints(name, out, operand, *(options.get(hint) for hint in _HINTS)),
        line=f"{name} at {jax_compat.user_line(_PACKAGE)}" if native.has_barrier() else "",
        determinism=operand_checks.check_determinism(name, options.get("determinism", "run_to_run")),
    )


def _check_traced(name: str, spec: MatmulSpec, dtype, is_narrow: bool) -> None:
    """Raise NotImplementedError where XLA cannot apply an alpha or beta that is an array after the call."""
    arrays = f"got an array for {' and '.join(spec.traced)}"
    if spec.traced and (is_narrow or epilogs.rule(spec.epilog).gradient):
        what = f"{dtype} operands" if is_narrow else f"epilog {spec.epilog.name}"
        raise NotImplementedError(
            f"{name}: with {what} alpha and beta are Python numbers, {arrays}; "
            f"{'multiply a scale by it' if is_narrow else 'scale an operand, or the gradient that comes in'}"
        )
    if spec.traced and spec.is_invariant:
        raise NotImplementedError(
            f"{name}: determinism={spec.determinism!r} takes alpha and beta as Python numbers, {arrays}, after which "
            'XLA would apply the epilog; scale an operand, or pass determinism="run_to_run"'
        )
