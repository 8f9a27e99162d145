"""Numerics of a product in XLA: operands in the accumulator's type, the dot, and an epilog that rounds once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.activations import FUNCTIONS, multiply_by_slope, pack_relu_aux
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.runtime.types import Operands


def decoded(
    a: jax.Array, b: jax.Array, operands: Operands, spec: MatmulSpec, acc: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns fp8, fp4 (times their scales) and int8 operands (scales not applied) in the type `acc`, others unchanged.
    Only the type of a decides, so b must be of the same kind. `operands`: has the scales."""
    if not low_precision.is_low_precision(a.dtype):
        return a, b
    if not low_precision.is_scaled(a.dtype):
        return a.astype(acc), b.astype(acc)
    a = low_precision.dequantize(a, operands.get("scale_a"), spec.scales.a, acc)
    return a, low_precision.dequantize(b, operands.get("scale_b"), spec.scales.b, acc)


def widened(a: jax.Array, b: jax.Array, platform: str, acc: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Converts operands to the accumulator's type, which is exact, if they are booleans or the platform is "cpu", where
    XLA has no product of 16-bit operands into it in some layouts. Returns others unchanged."""
    if a.dtype == np.bool_ or platform == "cpu":
        return a.astype(acc), b.astype(acc)
    return a, b


# XLA's names for the algorithms that sum in 16 bits.
_SUMS_IN_16_BITS = {"16F": "F16_F16_F16", "BF16_BF16_BF16": "BF16_BF16_BF16"}


def dot_general(
    a: jax.Array,
    b: jax.Array,
    spec: MatmulSpec,
    compute: str,
    acc: np.dtype,
    *,
    numbers: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Returns op(a) @ op(b) in type `acc`, summed at the highest precision, or in 16 bits if the compute type `compute`
    does. a is (..., rows, k), or (..., k, rows) if transposed. `numbers`: dimension numbers that replace the
    transpositions, but not the conjugations."""
    a = lax.conj(a) if spec.conjugate_a else a
    b = lax.conj(b) if spec.conjugate_b else b
    narrow = _SUMS_IN_16_BITS.get(compute)
    precision = lax.DotAlgorithmPreset[narrow] if narrow else lax.Precision.HIGHEST
    if numbers is None:
        numbers = (((a.ndim - (2 if spec.transpose_a else 1),), (1 if spec.transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=acc, out_sharding=out_sharding)


def apply_epilog(z: jax.Array, operands: Operands, spec: MatmulSpec) -> Operands:
    """Returns the results by name from the accumulated product: scale, add C and bias, apply the activation or multiply
    by its derivative, round once, sum the bias gradient (also over ranks). C is not read if the spec's beta is 0.
    `operands`: the operands of the call by name. a and b are this device's shards, and some epilogs sum them. An
    "alpha" or "beta" among the operands is an array that replaces the spec's value; C is read then even if that beta
    is 0."""
    if scales_sums(z.dtype, spec):
        z = _scaled(z.astype(np.float32), operands)
    acc, row, alpha, beta = z.dtype, spec.rule, operands.get("alpha"), operands.get("beta")
    if alpha is not None or spec.alpha != 1:
        z = z * jnp.asarray(spec.alpha if alpha is None else alpha, acc)
    if spec.has_c and (beta is not None or spec.beta != 0):  # if beta is 0, C is not read, because it may hold NaN
        c = operands["c"].astype(acc)
        c = c * operands["scale_c"] if "scale_c" in operands else c
        is_plain = beta is None and spec.beta == 1
        z = z + (c if is_plain else c * jnp.asarray(spec.beta if beta is None else beta, acc))
    if row.has_bias:
        z = z + operands["bias"].astype(acc)[(None,) * (z.ndim - 1)]
    if row.derivative:
        d = multiply_by_slope(row.derivative, operands[row.aux_input], z)
    else:
        d = FUNCTIONS[row.activation](z) if row.activation else z
    outputs = _encoded("d", d, spec.out_dtype, operands, spec)
    if row.aux == "relu_aux":
        outputs["relu_aux"] = pack_relu_aux(z > 0)
    elif row.aux == "gelu_aux":
        outputs |= _encoded("gelu_aux", z, spec.aux_dtype or spec.out_dtype, operands, spec)
    if row.gradient:
        summed = (operands | outputs)[bias_grad.summed(row.gradient)]
        outputs[row.gradient] = bias_grad.bias_gradient(row.gradient, spec, summed)
    return {name: outputs[name] for name in spec.output_names}


def scales_sums(acc: np.dtype, spec: MatmulSpec) -> bool:
    """True if scales convert exact int8 sums to the type of the result."""
    return acc == np.int32 and spec.out_dtype.name in low_precision.WIDE


def _scaled(z: jax.Array, operands: Operands) -> jax.Array:
    """Multiplies z by the scales of its rows and columns, if given."""
    for name, dim in (("scale_a", 1), ("scale_b", 0)):
        scale = operands.get(name, np.float32(1))
        z = z * (lax.expand_dims(scale, (dim,)) if scale.ndim else scale)
    return z


def _encoded(name: str, x: jax.Array, dtype: np.dtype, operands: Operands, spec: MatmulSpec) -> Operands:
    """Returns {name: x rounded to `dtype`}; `name` is "d" or "gelu_aux". For fp8 and fp4, x is multiplied by its scale
    first, or scaled in blocks, which adds "d_out_scale". For these types, the largest absolute value before scaling is
    added as "amax_d" or "gelu_aux_amax", if asked for."""
    if not low_precision.is_scaled(dtype):
        return {name: x.astype(dtype)}
    scale, amax = ("scale_d", "amax_d") if name == "d" else ("scale_aux", "gelu_aux_amax")
    outputs = {amax: low_precision.amax(x)} if amax in spec.output_names else {}
    x = x * operands[scale] if scale in operands else x
    if name == "d" and spec.scales.d_out != low_precision.NONE:
        stored, scales = low_precision.encode_blocks(x, spec.scales.d_out, dtype)
        return outputs | {"d": stored, "d_out_scale": scales}
    return outputs | {name: low_precision.encode(x, dtype)}
