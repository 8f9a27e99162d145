"""Checks of operands of 8 bits and fewer: types, transpositions, epilogs and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.epilogs import RULES
from jaxmp._src.core.spec.low_precision import (
    BLK128,
    FLOAT4,
    FLOAT8,
    INT8,
    NONE,
    SCALAR,
    VEC16,
    VEC32,
    VEC128,
    WIDE,
    Scaling,
)
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, ScaleModes
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue, NotAvailable
from jaxmp._src.core.validation.operand_checks import check_dtype, check_flag
from jaxmp._src.platform.runtime.types import ArrayType

# Names of the epilogs that cuBLAS has for 8-bit operands.
_EPILOGS = ("NONE", "BIAS", "RELU", "RELU_BIAS", "RELU_AUX", "RELU_AUX_BIAS", "DRELU")
_GELU_AUX = ("GELU_AUX", "GELU_AUX_BIAS")


def side_dtypes(out: np.dtype, c: ArrayType | None, bias: Any) -> tuple[np.dtype, np.dtype]:
    """Returns (type of C, type of the bias) for a D of type `out` from float8 or float4 operands. Both are `out`, but
    the bias of a float32 D is bfloat16. For a float8 or float4 D both are c's type, float16 without c. Raises TypeError
    for a float8 or float4 D unless c is float16 or bfloat16, and for a bias of another type."""
    if not low_precision.is_scaled(out):
        of_c, of_bias = out, np.dtype(jnp.bfloat16) if out == np.float32 else out
    else:
        of_c = of_bias = np.dtype(np.float16) if c is None else c.dtype
        if of_c.name not in ("float16", "bfloat16"):
            raise InvalidType(f"c has dtype {of_c} but a result of {out.name} takes c in float16 or bfloat16")
    have = getattr(bias, "dtype", of_bias)
    if np.dtype(have) != of_bias:
        raise InvalidType(
            f"bias has dtype {have}, but a result of {out.name} from 8-bit operands takes it in {of_bias.name}; "
            "convert it"
        )
    return of_c, of_bias


def check_stored(spec: MatmulSpec, dtype: np.dtype) -> None:
    """Raises ValueError for float8 and float4 operands unless a is stored (m, k) and b (n, k); int8 operands may be
    stored either way. Raises NotImplementedError for an epilog that cuBLAS lacks for `dtype` and the result's type."""
    is_scaled, out = low_precision.is_scaled(dtype), spec.out_dtype
    if is_scaled and (spec.transpose_a or not spec.transpose_b):
        raise InvalidValue(
            f"{dtype.name} operands are multiplied along their last dimensions only, a stored (m, k) and b stored "
            f"(n, k): pass transpose_a=False and transpose_b=True, got transpose_a={spec.transpose_a} and "
            f"transpose_b={spec.transpose_b}"
        )
    allowed: tuple[str, ...] = ("NONE",) if dtype.name == INT8 else _EPILOGS
    if dtype.name == INT8 and out.name in WIDE:
        allowed = tuple(epilog.name for epilog, row in RULES.items() if not row.gradient)
    allowed += _GELU_AUX if is_scaled and out.name != FLOAT4 else ()
    if spec.epilog.name not in allowed:
        raise NotAvailable(
            f"epilog {spec.epilog.name} is not available for {dtype.name} operands and a result of {out.name}; "
            f"available: {', '.join(allowed)}"
        )


def resolve_scales(
    scaling: Scaling | None, a: ArrayType, b: ArrayType, spec: MatmulSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ({"scales", "aux_dtype"}, the spec's fields; scales that are given, as {"scale_a": ...}) for float8 and
    float4 operands, and for two int8 with `scaling`. Returns ({}, {}) for other operands. Raises TypeError for other
    operands with `scaling`, and TypeError, ValueError or NotImplementedError if scales do not fit."""
    if scaling is not None and not isinstance(scaling, Scaling):
        raise InvalidType(
            f"scaling must be a jaxmp.Scaling, got {type(scaling).__name__}; pass scaling=jaxmp.Scaling(a=..., b=...)"
        )
    is_int8 = scaling is not None and a.dtype.name == b.dtype.name == INT8
    if not low_precision.is_scaled(a.dtype) and not is_int8:
        if scaling is not None:
            raise InvalidType(
                f"only float8, float4 and int8 operands take scaling, but {{a}} has dtype {a.dtype} and {{b}} "
                f"{b.dtype}; drop scaling"
            )
        return {}, {}
    out = np.dtype(spec.out_dtype)
    scaling = Scaling() if scaling is None else scaling
    amax, aux_amax = (check_flag(f"scaling.{key}", getattr(scaling, key)) for key in ("result_amax", "aux_amax"))
    modes = {
        "a": low_precision.find_mode("scaling.a", scaling.a, a, is_k_first=spec.transpose_a),
        "b": low_precision.find_mode("scaling.b", scaling.b, b, is_k_first=not spec.transpose_b),
        "c": _check_scalar("c", scaling.c),
        "d": _check_scalar("d", scaling.d),
        "aux": _check_scalar("aux", scaling.aux),
    }
    _check_int8(scaling) if is_int8 else _check_modes(modes, out)
    of_aux = {"aux_dtype": scaling.aux_dtype, "aux": scaling.aux, "aux_amax": aux_amax}
    aux = _resolve_aux(spec, a.dtype, b.dtype, modes["a"], of_aux)
    is_blocked = modes["a"] in (VEC16, VEC32)
    if amax and (out.name not in FLOAT8 or is_blocked):
        raise NotAvailable(
            f"scaling.result_amax needs a float8 result with tensor-wide scales; the result is "
            f"{out.name} and scaling.a is {modes['a']}: use jnp.max(jnp.abs(d)) of a wider result"
        )
    out_scale = modes["a"] if is_blocked and low_precision.is_low_precision(out) else NONE
    given = {f"scale_{key}": getattr(scaling, key) for key, mode in modes.items() if mode != NONE}
    fields = ScaleModes(**modes, d_out=out_scale, amax_d=amax, amax_aux=aux_amax)
    return {"scales": fields, "aux_dtype": aux}, given


def _check_scalar(argument: str, scale: Any) -> str:
    """Returns SCALAR, or NONE if `scale` is None. Raises ValueError for anything but a float32 array ()."""
    if scale is None:
        return NONE
    if getattr(scale, "shape", None) != () or getattr(scale, "dtype", None) != np.float32:
        got = f"shape {scale.shape} of {scale.dtype}" if hasattr(scale, "dtype") else type(scale).__name__
        raise InvalidValue(f"scaling.{argument} must be a float32 scalar of shape (), got {got}")
    return SCALAR


def _check_int8(scaling: Scaling) -> None:
    """Raises ValueError if `scaling` has anything except a and b, the scales that int8 operands take."""
    rest = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(scaling)[2:]}
    if said := [name for name, value in rest.items() if value is not None and value is not False]:
        raise InvalidValue(
            f"scaling.{said[0]} applies to float8 and float4 operands only, but {{a}} has dtype int8; drop it"
        )


def _check_modes(modes: dict[str, str], out: np.dtype) -> None:
    """Checks the modes of float8 and float4 scales against each other and against the result's type `out`.

    Raises NotImplementedError unless a and b have one mode other than BLK128, are NONE with SCALAR, or are VEC128 with
    BLK128. Raises it for a result of 8 bits or fewer unless the mode is NONE, SCALAR, VEC16 or VEC32. Raises ValueError
    for a scale of c with other modes than NONE and SCALAR. Raises ValueError for a scale of d unless the result has 8
    bits or fewer and the mode is NONE, SCALAR or VEC16."""
    a, b = modes["a"], modes["b"]
    tensorwide = {a, b} <= {NONE, SCALAR}
    both_128 = {a, b} == {VEC128} or {a, b} == {VEC128, BLK128}
    if not tensorwide and not both_128 and (a != b or a == BLK128):
        raise NotAvailable(
            f"scaling.a is {a} and scaling.b is {b}, which cannot be combined; both must have one mode, or "
            "(rows, k/128) with (rows, k/128) or (rows/128, k/128)"
        )
    is_low_precision_out = low_precision.is_low_precision(out)
    if is_low_precision_out and not tensorwide and a not in (VEC16, VEC32):
        raise NotAvailable(
            f"with scales of {a} the result must be bfloat16, float16 or float32, got {np.dtype(out).name}"
        )
    if modes["c"] != NONE and not tensorwide:
        raise InvalidValue(f"scaling.c goes with tensor-wide scales only, scaling.a is {a}; multiply beta with it")
    if modes["d"] != NONE and not (is_low_precision_out and (tensorwide or a == VEC16)):
        raise InvalidValue(
            f"scaling.d scales a result of float8 with tensor-wide scales, or of float4; the result is "
            f"{np.dtype(out).name} and scaling.a is {a}: drop it" + (", blocks get their own" if a == VEC32 else "")
        )


def _resolve_aux(spec: MatmulSpec, a: np.dtype, b: np.dtype, scale_a: str, given: dict[str, Any]) -> np.dtype | None:
    """Returns the type of gelu_aux, or None if the epilog has none.

    It is the type of d, but for a float8 d the type of c (float16 without c), as in nvmath-python. The user may ask
    for float8_e4m3fn, also with a scale and an amax, where cuBLAS supports that (its documentation,
    cublasLtMatmulDescAttributes_t); NotImplementedError for other types. Raises ValueError for options of an aux if
    there is none, or for its scale and amax if it is not float8. `a`, `b`: the types of the operands. `scale_a`: the
    mode of a's scale. `given`: the options "aux_dtype", "aux" (the scale) and "aux_amax"."""
    said = [argument for argument, value in given.items() if value is not None and value is not False]
    epilog, out = spec.epilog.name, spec.out_dtype
    if epilog not in _GELU_AUX:
        if said:
            raise InvalidValue(
                f"scaling.{said[0]} applies to gelu_aux, but epilog {epilog} has none; drop it, or use "
                f"{' or '.join(_GELU_AUX)}"
            )
        return None
    c = np.dtype(spec.c_dtype)
    default = c if out.name in FLOAT8 else out
    asked = default if given["aux_dtype"] is None else check_dtype("scaling.aux_dtype", given["aux_dtype"])
    is_e4m3 = {a.name, b.name, out.name} == {"float8_e4m3fn"} and c == np.float16 and scale_a in (NONE, SCALAR)
    allowed = (default.name, "float8_e4m3fn") if is_e4m3 and epilog == "GELU_AUX" else (default.name,)
    if asked.name not in allowed:
        raise NotAvailable(
            f"scaling.aux_dtype {asked.name} is not available for epilog {epilog} with {a} and {b} "
            f"operands, c of {c} and a result of {out}; available: {', '.join(allowed)} "
            "(float8_e4m3fn goes with GELU_AUX, operands and a result of float8_e4m3fn, tensor-wide scales, and "
            "c of float16 or none)"
        )
    rest = [argument for argument in said if argument != "aux_dtype"]
    if rest and asked.name not in FLOAT8:
        raise InvalidValue(
            f"scaling.{rest[0]} applies to a gelu_aux of float8, but it is {asked.name} here; drop it, or set "
            "scaling.aux_dtype to jnp.float8_e4m3fn"
        )
    return asked
