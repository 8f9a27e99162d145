"""What cuBLASMp 0.10.0 gets wrong of what it documents, as the conformance suite found it on an H200.

Each function says why a call is computed otherwise, or "". The suite's list is tests/conformance/cases.cc.
"""

from __future__ import annotations

import numpy as np

from jaxmp._src.spec import low_precision
from jaxmp._src.spec.matmul_spec import MatmulSpec


def of_operands(spec: MatmulSpec) -> str:
    """Of a product that XLA multiplies instead."""
    if spec.group.nranks == 1:
        return ""
    if spec.transpose_a and (spec.contraction.is_grid or spec.distributions):
        return "cuBLASMp multiplies wrongly on a grid where a is stored (k, m)"
    if spec.contraction.sums and low_precision.VEC128 in (spec.scales.a, spec.scales.b):
        return "cuBLASMp reads wrong scales of blocks of 128 where it sums over ranks"
    return ""


def of_epilog(spec: MatmulSpec) -> str:
    """Of an epilog that XLA applies instead."""
    row, out = spec.rule, np.dtype(spec.out_dtype)
    if out == np.float64 and "gelu" in (row.activation, row.derivative):
        return "cuBLASMp's gelu of float64 is right to 11 digits"
    if spec.group.nranks == 1:
        return ""
    if out == np.float64 and row.derivative and row.gradient:
        return "cuBLASMp sums no float64 behind a derivative over several ranks"
    if not spec.contraction.sums:
        return ""
    if row.gradient in ("bgrada", "bgradb") and out.itemsize == 2:
        return "cuBLASMp sums no operand beside a 16-bit result that it reduces"
    return "cuBLASMp takes no largest value of an aux where it sums over ranks" if spec.scales.amax_aux else ""


def of_mask(spec: MatmulSpec) -> str:
    """Of the mask of RELU, which is made from the result instead."""
    return "cuBLASMp's mask has ones where the sum is 0" if spec.rule.aux == "relu_aux" else ""
