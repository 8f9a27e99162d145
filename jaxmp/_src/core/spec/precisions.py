"""One table: what a `precision` asks of a GPU for each type of operands.

A precision is JAX's (`lax.Precision`, `lax.DotAlgorithmPreset`) or one of cuBLAS's compute types by name. It says how
operands may be rounded before the product and what type the sums may have, but not the type of the result. A CPU
rounds no operands, and it sums in their full type, which is at least as exact (the row DEFAULT). XLA does the same on
GPUs, except for the algorithms that sum in 16 bits (16F and BF16_BF16_BF16).

`_PRESETS` is the table: the compute types of 16-bit, single and double operands for each preset. Products of 16-bit
operands are exact in 32F. None and any `lax.Precision` use the row DEFAULT.

If a preset does not take a type of operands, they are converted before the call to the first type that JAX names for it
(`converted_to`). Operands of 8 bits and fewer have no other choice: None and the ANY_F8 presets sum float8 and float4
in float32 (32F), None sums int8 in int32 (32I). Other integers have no choice either: XLA sums them in their own type.

Rounding happens only where it is asked for: every `lax.Precision` is the operands' full type, which is at least as
exact as what JAX promises for it. The six- and three-fold emulations are served by the nine-fold one for that reason.

Sources: cublas_api.h (cublasComputeType_t) and its documentation, jax.lax.DotAlgorithmPreset, nvmath-python's type
table.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.matmul_spec import INTEGERS, accumulator
from jaxmp._src.core.spec.refusal import InvalidValue, NoPrecision

# Compute types that do not sum in the operands' own type (or in float32 for 16-bit operands). Names are cuBLAS's
# without CUBLAS_COMPUTE_, or XLA's if cuBLAS has none.
SUMMED_IN = {"16F": "float16", "BF16_BF16_BF16": "bfloat16"}

_HALVES = ("bfloat16", "float16")
_SINGLES = ("float32", "complex64")
_DOUBLES = ("float64", "complex128")


def _row(
    halves: str | None = None, singles: str | None = None, doubles: str | None = None, only: str = ""
) -> dict[str, str]:
    """Returns {type of operands: compute type} for a row of the table. A type without a compute type is left out.
    `only`: the single 16-bit type that the row takes."""
    types = {name: halves for name in _HALVES if not only or name == only}
    types |= dict.fromkeys(_SINGLES, singles) | dict.fromkeys(_DOUBLES, doubles)
    return {name: compute for name, compute in types.items() if compute}


_FLOAT8 = dict.fromkeys(low_precision.FLOAT8, "32F")
_PRESETS = {
    "DEFAULT": _row("32F", "32F", "64F")
    | dict.fromkeys(low_precision.SCALED, "32F")
    | dict.fromkeys(INTEGERS, "INTEGER")
    | {"int8": "32I"},
    **{f"ANY_F8_ANY_F8_{name}": _FLOAT8 for name in ("F32", "F32_FAST_ACCUM", "ANY", "ANY_FAST_ACCUM")},
    "F32_F32_F32": _row("32F", "32F"),
    "TF32_TF32_F32_X3": _row("32F", "32F"),
    "TF32_TF32_F32": _row("32F", "32F_FAST_TF32"),
    "BF16_BF16_F32": _row("32F", "32F_FAST_16BF", only="bfloat16"),
    "F16_F16_F32": _row("32F", "32F_FAST_16F", only="float16"),
    **{f"BF16_BF16_F32_X{times}": _row("32F", "32F_EMULATED_16BFX9") for times in (3, 6, 9)},
    "F64_F64_F64": _row(doubles="64F"),
    "F16_F16_F16": _row("16F", only="float16"),
    "BF16_BF16_BF16": _row("BF16_BF16_BF16", only="bfloat16"),
}
# cuBLAS's own names; a 16-bit product is exact in f32, so rounding its operands further is left to the presets.
_NAMES = {
    "32F": _row("32F", "32F"),
    "32F_PEDANTIC": _row("32F_PEDANTIC", "32F_PEDANTIC"),
    "32F_FAST_TF32": _row("32F", "32F_FAST_TF32"),
    "32F_FAST_16BF": _row("32F", "32F_FAST_16BF", only="bfloat16"),
    "32F_FAST_16F": _row("32F", "32F_FAST_16F", only="float16"),
    "32F_EMULATED_16BFX9": _row("32F", "32F_EMULATED_16BFX9"),
    "64F": _row(doubles="64F"),
    "64F_PEDANTIC": _row(doubles="64F_PEDANTIC"),
    "64F_EMULATED_FIXEDPOINT": _row(doubles="64F_EMULATED_FIXEDPOINT"),
    "16F": _row("16F", only="float16"),
}
_TABLE = _PRESETS | _NAMES


def resolve(precision: Any, operand: DTypeLike, out: DTypeLike) -> str:
    """Returns the name of the table's row for `precision`. `operand`: the operands' type after the conversion to
    `converted_to`, which the caller makes; `out`: the result's type. Raises ValueError if the precision is unknown.
    Raises an error that is both a NotImplementedError and a ValueError if the row does not take `operand`, or sums in a
    16-bit type other than `out`."""
    asked = _find(precision)
    if np.dtype(operand).name not in _TABLE[asked]:
        takes = ", ".join(_TABLE[asked]) or "nothing"
        raise NoPrecision(
            f"precision={asked} takes operands of {takes}, got {np.dtype(operand).name}; convert them, or pass "
            "precision=None"
        )
    narrow = SUMMED_IN.get(compute_type(asked, np.dtype(operand)))
    if narrow not in (None, np.dtype(out).name):
        raise NoPrecision(
            f"precision={asked} sums in {narrow}, so the result cannot be {np.dtype(out).name}; "
            "drop preferred_element_type, or pass precision=None"
        )
    return asked


def _algorithm(name: str) -> lax.DotAlgorithm:
    """Returns the algorithm of a preset's name. BF16_BF16_F32_X3: bfloat16 operands, float32 sums, 3 operations."""
    a, b, sums, times = (name if "_X" in name else f"{name}_X1").split("_")
    return _typed(lax.DotAlgorithm(_DTYPES[a], _DTYPES[b], _DTYPES[sums], num_primitive_operations=int(times[1:])))


def _typed(algorithm: lax.DotAlgorithm) -> lax.DotAlgorithm:
    """Returns an equal algorithm with NumPy dtypes in place of the user's types."""
    a, b, sums, *times = algorithm
    return lax.DotAlgorithm._make((np.dtype(a), np.dtype(b), np.dtype(sums), *times))


_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_ALGORITHMS = {_algorithm(name): name for name in _PRESETS if name.startswith(tuple(_DTYPES))}


def _find(precision: Any) -> str:
    """Returns the name of the table's row. A `lax.DotAlgorithmPreset`, its name or a name in `_NAMES` has a row of that
    name; a `lax.DotAlgorithm` the row of the equal preset. None, a `lax.Precision`, its name and a pair of these:
    DEFAULT. Raises ValueError for anything else, and for an algorithm without a preset an error that is a
    NotImplementedError too."""
    if isinstance(precision, lax.DotAlgorithm):
        if (known := _typed(precision)) not in _ALGORITHMS:
            raise NoPrecision(
                f"precision={precision} is not implemented; pass one of {', '.join(_ALGORITHMS.values())}"
            )
        return _ALGORITHMS[known]
    asked = precision.name if isinstance(precision, lax.DotAlgorithmPreset) else precision
    if isinstance(asked, str) and asked in _TABLE:
        return asked
    values = tuple(precision) if isinstance(precision, tuple | list) else (precision, precision)
    if len(values) != 2:
        raise InvalidValue(f"precision must be one value or a pair, got {precision!r}")
    for value in values:
        try:
            if value is not None and not isinstance(value, lax.Precision):
                lax.Precision(str(value))  # a number would select another precision
        except ValueError:
            raise InvalidValue(
                f"precision must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, the name of one, "
                f"or one of {', '.join(_NAMES)}; got {precision!r}"
            ) from None
    return "DEFAULT"


def preset(precision: Any) -> lax.DotAlgorithmPreset | None:
    """Returns the JAX preset if `precision` is one, its name, or an equal `lax.DotAlgorithm`; else None. Raises as
    `_find` for an algorithm that no preset equals."""
    precision = _find(precision) if isinstance(precision, lax.DotAlgorithm) else precision
    name = precision.name if isinstance(precision, lax.DotAlgorithmPreset) else precision
    return lax.DotAlgorithmPreset.__members__.get(name) if isinstance(name, str) else None


def converted_to(asked: lax.DotAlgorithmPreset | None, operand: DTypeLike) -> np.dtype | None:
    """Returns the first type that JAX names for the preset `asked`, if the preset does not take `operand`. Returns None
    if it takes `operand`, names no types, or `asked` is None."""
    if asked is None or asked.supported_lhs_types is None or np.dtype(operand).name in _TABLE[asked.name]:
        return None
    return np.dtype(asked.supported_lhs_types[0])


@functools.cache
def compute_type(asked: str, operand: np.dtype, platform: str = "") -> str:
    """Returns the compute type of `operand` in the row `asked` (from `resolve`); on "cpu" in the row DEFAULT."""
    return _TABLE["DEFAULT" if platform == "cpu" else asked][operand.name]


def summed_in(compute: str, operand: DTypeLike) -> np.dtype:
    """Returns the type of a compute type's sums of products of `operand`."""
    return np.dtype(SUMMED_IN.get(compute) or accumulator(np.dtype(operand)))


@functools.cache
def sums_in_16_bits(asked: str) -> bool:
    """True if the row `asked` sums in 16 bits for some type of operands."""
    return not SUMMED_IN.keys().isdisjoint(_TABLE[asked].values())
