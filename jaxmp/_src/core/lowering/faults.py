"""Faults of cuBLASMp 0.10.0 in documented calls, found by the conformance suite and tests/gpu on an H200.

Each function returns why a call is computed in another way, or "". The suite's list is in tests/conformance/cases.cc.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.matmul_spec import MatmulSpec


def of_operands(spec: MatmulSpec) -> str:
    """Returns why XLA computes a product of several ranks: a stored (k, m) on a grid, or VEC128 scales of both
    operands where ranks sum."""
    if spec.group.nranks == 1:
        return ""
    if spec.transpose_a and (spec.contraction.is_grid or spec.distributions):
        return "cuBLASMp multiplies wrongly on a grid where a is stored (k, m)"
    if spec.contraction.sums and spec.scales.a == spec.scales.b == low_precision.VEC128:
        return "cuBLASMp reads wrong scales of blocks of 128 if it sums over ranks"
    return ""


def of_gelu(spec: MatmulSpec) -> str:
    """Returns why XLA applies gelu or its derivative: for results with more than 8 bits of mantissa."""
    out = np.dtype(spec.out_dtype)
    if "gelu" not in (spec.rule.activation, spec.rule.derivative) or jnp.finfo(out).nmant <= 8:
        return ""
    return f"cuBLASMp's gelu is right to {11 if out == np.float64 else 5} digits, fewer than {out.name} has"


def of_epilog(spec: MatmulSpec) -> str:
    """Returns why XLA applies the epilog: bgrada and bgradb in float16; over several ranks any bias gradient with a
    derivative in float64; where ranks sum, bgrada, bgradb and the largest absolute value of gelu_aux."""
    row, out = spec.rule, np.dtype(spec.out_dtype)
    sums_operand = row.gradient in ("bgrada", "bgradb")
    if sums_operand and out == np.float16:
        return f"cuBLASMp sums in float16 if it computes {row.gradient}"
    if spec.group.nranks == 1:
        return ""
    if row.derivative and row.gradient and out == np.float64:
        return f"cuBLASMp's {row.gradient} of float64 is wrong over several ranks"
    if not spec.contraction.sums:
        return ""
    if sums_operand:
        return f"cuBLASMp refuses {row.gradient} of some types if it sums over ranks"
    return "cuBLASMp leaves gelu_aux_amax unset if it sums over ranks" if spec.scales.amax_aux else ""


def of_mask(spec: MatmulSpec) -> str:
    """Returns why the mask of RELU is made from the result, for every epilog that has one."""
    return "cuBLASMp's mask has ones where the sum is 0" if spec.rule.aux == "relu_aux" else ""
