"""The frozen description of one call, and all validation of what users pass."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _epilog, _layout, _narrow
from jaxmp._epilog import Epilog
from jaxmp._layout import Distributed

IMPLEMENTATIONS = (None, "host", "xla", "cublasmp")
DETERMINISM = ("run_to_run", "batch", "topology")

# Type of D by type of A and B; cublasmp.h and nvmath's type table. Everything 16-bit accumulates in float32.
_RESULT_TYPES = {
    "float32": ("float32",),
    "float64": ("float64",),
    "complex64": ("complex64",),
    "complex128": ("complex128",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
}
# cublasMpMatmulAlgoType_t's names, and the patterns on which cuBLASMp has each (cublasmp.h 0.10).
ALGORITHMS = ("default", "split_p2p", "split_multicast", "atomic_p2p", "atomic_multicast", "no_overlap", "fused")
_ACCUMULATORS = {"bfloat16": "float32", "float16": "float32", "int8": "int32"} | dict.fromkeys(
    _narrow.SCALED, "float32"
)


# What each operand and result spans, by name: rows (m) and columns (n) of d, or n as a mask packed into bytes (p).
DIMS = {
    "c": "mn",
    "bias": "n",
    "d": "mn",
    "relu_aux": "mp",
    "gelu_aux": "mn",
    "drelu_bgrad": "n",
    "dgelu_bgrad": "n",
    "bgrada": "m",
    "bgradb": "n",
}
# Scalars, and the scales of d's blocks (q of them a row).
DIMS |= dict.fromkeys(("scale_c", "scale_d", "scale_aux", "amax_d", "gelu_aux_amax"), "") | {"d_out_scale": "mq"}
# The scales of a and b span what their mode says (`dims`), and fold and shard as their operand does.
DIMS |= {"scale_a": "", "scale_b": ""}
SCALE_NAMES = ("scale_a", "scale_b", "scale_c", "scale_d", "scale_aux")


class Pattern(enum.StrEnum):
    """How one communicator's ranks share the product."""

    LOCAL = "local"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    GRID = "grid"


_SUMMING = (Pattern.REDUCE_SCATTER, Pattern.ALL_REDUCE)
_ALGORITHM_PATTERNS = {
    "default": tuple(Pattern),
    "no_overlap": tuple(Pattern),
    "split_p2p": (Pattern.ALL_GATHER, *_SUMMING),
    "split_multicast": _SUMMING,
    "atomic_p2p": (Pattern.ALL_GATHER, *_SUMMING),
    "atomic_multicast": _SUMMING,
    "fused": (Pattern.ALL_REDUCE,),
}


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """Everything static about one call but its shapes; row-major, as the user sees it.

    `mesh` holds every mesh axis as (name, size), since nothing ambient may matter later. `row_axes` are the
    axes of the group; for a grid, the axes over which the rows of every stored matrix are split, and
    `col_axes` those of the columns. `is_typed` says that the enclosing shard_map checks varying axes, and
    `asks_all_reduce` that the epilog has the ALLREDUCE bit and the pattern is not known yet. The scale
    modes are `_narrow`'s; `c_dtype`, `bias_dtype` and `aux_dtype` (of gelu_aux) are None where they are those of the
    result. `traced` names those of alpha and beta that are arrays, and so are operands beside the call.
    `precision` is a row of `_precision`'s table. `cyclic` are the stored a, b and d of a grid whose shards are
    block-cyclic.
    `line` names the call in messages of a job of several processes, "matmul at train.py:41", and is empty elsewhere.
    `determinism` is the level of docs/determinism.md. What is left serves the order of the sums in the gradients of
    "topology" alone: `rows` are the dimensions that fold into D's rows, slowest first, each as (extent of what a rank
    holds of it ahead of a scatter or after a gather, axes that shard it otherwise); `cols` are the axes that shard D's
    columns; `ahead` rows of each rank are folded ahead of those that are gathered or scattered.
    """

    out_dtype: np.dtype
    pattern: Pattern = Pattern.LOCAL
    mesh: tuple[tuple[str, int], ...] = ()
    row_axes: tuple[str, ...] = ()
    col_axes: tuple[str, ...] = ()
    transpose_a: bool = False
    transpose_b: bool = False
    conjugate_a: bool = False
    conjugate_b: bool = False
    alpha: complex | float = 1.0
    beta: complex | float = 0.0
    has_c: bool = False
    epilog: Epilog = Epilog.NONE
    scale_a: str = _narrow.NONE
    scale_b: str = _narrow.NONE
    scale_c: str = _narrow.NONE
    scale_d: str = _narrow.NONE
    scale_aux: str = _narrow.NONE
    d_out_scale: str = _narrow.NONE
    amax_d: bool = False
    aux_amax: bool = False
    c_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None
    aux_dtype: np.dtype | None = None
    precision: str = "DEFAULT"
    implementation: str | None = None
    is_typed: bool = False
    asks_all_reduce: bool = False
    traced: tuple[str, ...] = ()
    communication_dtype: str | None = None
    algorithm: str = "default"
    comm_sm_count: int = 0
    cyclic: tuple[Distributed, Distributed, Distributed] | None = None
    line: str = ""
    determinism: str = "run_to_run"
    rows: tuple[tuple[int, tuple[str, ...]], ...] = ()
    cols: tuple[str, ...] = ()
    ahead: int = 1

    @property
    def is_invariant(self) -> bool:
        """Whether every element is one ordered sum, and its epilog the library's own arithmetic."""
        return self.determinism != "run_to_run"

    @property
    def group_axes(self) -> tuple[str, ...]:
        return self.row_axes + self.col_axes

    def axis_size(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.mesh)
        return math.prod(sizes[axis] for axis in axes)

    @property
    def nranks(self) -> int:
        return self.axis_size(self.group_axes)

    @property
    def ngroups(self) -> int:
        return math.prod(size for _, size in self.mesh) // self.nranks if self.mesh else 1

    def replace(self, **changes) -> MatmulSpec:
        return dataclasses.replace(self, **changes)

    def bilinear(self, **changes) -> MatmulSpec:
        """The same product without C, epilog and scales."""
        plain = dict.fromkeys((*SCALE_NAMES, "d_out_scale"), _narrow.NONE) | {
            "beta": 0.0,
            "has_c": False,
            "epilog": Epilog.NONE,
            "asks_all_reduce": False,
            "amax_d": False,
            "aux_amax": False,
            "c_dtype": None,
            "bias_dtype": None,
            "aux_dtype": None,
            "traced": (),
        }
        return self.replace(**(plain | changes))

    def bare(self) -> MatmulSpec:
        """The same for operands that are neither transposed nor conjugated."""
        return self.replace(transpose_a=False, transpose_b=False, conjugate_a=False, conjugate_b=False)

    def folded(self, batch: int) -> MatmulSpec:
        """The same for `batch` such products whose rows follow each other."""
        if self.determinism != "topology":
            return self
        return self.replace(ahead=batch * self.ahead, rows=((batch, ()), *self.rows) if self.rows else ())


def accumulator(dtype) -> np.dtype:
    """Type in which products of `dtype` are summed."""
    name = np.dtype(dtype).name
    return np.dtype(_ACCUMULATORS.get(name, name))


def operand_names(spec: MatmulSpec) -> tuple[str, ...]:
    """The operands after a and b, in the order of the primitive and of the custom call."""
    scales = tuple(name for name in SCALE_NAMES if getattr(spec, name) != _narrow.NONE)
    return ("c",) * spec.has_c + _epilog.rule(spec.epilog).inputs + scales


def output_names(spec: MatmulSpec) -> tuple[str, ...]:
    """The results, in the order of the primitive and of the custom call."""
    scales = ("amax_d",) * spec.amax_d + ("gelu_aux_amax",) * spec.aux_amax
    scales += ("d_out_scale",) * (spec.d_out_scale != _narrow.NONE)
    return ("d", *_epilog.rule(spec.epilog).outputs, *scales)


def aux_dtype(spec: MatmulSpec) -> np.dtype:
    """Type of gelu_aux."""
    return np.dtype(spec.aux_dtype or spec.out_dtype)


def dims(spec: MatmulSpec, name: str) -> str:
    """What an operand or result spans, as `DIMS`; blocks of scales along k are u in a and v in b, of rows w and x."""
    if name not in ("scale_a", "scale_b"):
        return DIMS[name]
    row, inner, block = "muw" if name == "scale_a" else "nvx"
    mode = getattr(spec, name)
    return {_narrow.SCALAR: "", _narrow.OUTER_VEC: row, _narrow.BLK128: block + inner}.get(mode, row + inner)


def output_rows(spec: MatmulSpec, rows: int) -> int:
    """Rows of D that each rank holds when its op(A) has `rows` of them."""
    if spec.pattern == Pattern.ALL_GATHER:
        return rows * spec.nranks
    if spec.pattern == Pattern.REDUCE_SCATTER:
        return rows // spec.nranks
    return rows


def local_extents(spec: MatmulSpec, a_shape, b_shape) -> tuple[int, int, int, int]:
    """(rows of op(A), k of op(A), k of op(B), columns of op(B)), all local."""
    rows, k_a = a_shape[::-1] if spec.transpose_a else a_shape
    k_b, cols = b_shape[::-1] if spec.transpose_b else b_shape
    return rows, k_a, k_b, cols


def output_shape(spec: MatmulSpec, a_shape, b_shape) -> tuple[int, int]:
    """Shape of each rank's D."""
    if spec.cyclic:
        return spec.cyclic[2].local_shape
    rows, _, _, cols = local_extents(spec, a_shape, b_shape)
    if spec.pattern == Pattern.GRID:
        # A transposed operand has the rows (columns) of D where the grid has its columns (rows).
        nrow, ncol = spec.axis_size(spec.row_axes), spec.axis_size(spec.col_axes)
        rows = rows * ncol // nrow if spec.transpose_a else rows
        cols = cols * nrow // ncol if spec.transpose_b else cols
    return output_rows(spec, rows), cols


def global_extents(spec: MatmulSpec, a_shape, b_shape) -> tuple[int, int, int]:
    """(m, n, k) of the product that one communicator computes, from the local shapes of A and B."""
    if spec.cyclic:
        (rows, cols), d = spec.cyclic[0].shape, spec.cyclic[2]
        return *d.shape, rows if spec.transpose_a else cols
    rows, k, _, cols = local_extents(spec, a_shape, b_shape)
    p = spec.nranks
    if spec.pattern == Pattern.ALL_GATHER:
        return rows * p, cols * p, k
    if spec.pattern in (Pattern.REDUCE_SCATTER, Pattern.ALL_REDUCE):
        return rows, cols, k * p
    if spec.pattern == Pattern.GRID:
        nrow, ncol = spec.axis_size(spec.row_axes), spec.axis_size(spec.col_axes)
        m = rows * (ncol if spec.transpose_a else nrow)
        n = cols * (nrow if spec.transpose_b else ncol)
        return m, n, k * (nrow if spec.transpose_a else ncol)
    return rows, cols, k


def check_local_shapes(name: str, spec: MatmulSpec, a_shape, b_shape) -> None:
    """Raise ValueError where local shards do not fit the pattern."""
    if spec.cyclic:
        for argument, shape, matrix in (("a", a_shape, spec.cyclic[0]), ("b", b_shape, spec.cyclic[1])):
            if tuple(shape) != matrix.local_shape:
                raise ValueError(
                    f"{name}: {argument} must have shape {matrix.local_shape} on each device, the largest part of "
                    f"{matrix}, got {tuple(shape)}"
                )
        return
    rows, k_a, k_b, cols = local_extents(spec, a_shape, b_shape)
    if spec.pattern == Pattern.GRID:
        nrow, ncol = spec.axis_size(spec.row_axes), spec.axis_size(spec.col_axes)
        _check_grid(name, spec, rows, cols, nrow, ncol)
        k_a *= nrow if spec.transpose_a else ncol
        k_b *= ncol if spec.transpose_b else nrow
    if k_a != k_b:
        where = f"shapes {tuple(a_shape)}, {tuple(b_shape)}" + (" per device" if spec.nranks > 1 else "")
        raise ValueError(
            f"{name}: b has k={k_b} but a has k={k_a} ({where}); {_transpose_hint(spec, a_shape, b_shape)}"
        )
    if spec.pattern == Pattern.REDUCE_SCATTER and rows % spec.nranks:
        raise ValueError(
            f"{name}: a has {rows} rows, which the {spec.nranks} ranks of axis {axes_text(spec.row_axes)} do not "
            f"divide (shape per device {tuple(a_shape)}); pad the rows to a multiple of {spec.nranks}"
        )


def _check_grid(name: str, spec: MatmulSpec, rows: int, cols: int, nrow: int, ncol: int) -> None:
    for what, extent, parts, is_moved in (
        ("rows", rows * ncol, nrow, spec.transpose_a),
        ("columns", cols * nrow, ncol, spec.transpose_b),
    ):
        if is_moved and extent % parts:
            raise ValueError(
                f"{name}: the result has {extent} {what}, which the {nrow}x{ncol} grid splits into {parts} parts; "
                f"pad them to a multiple of {parts}"
            )


def _transpose_hint(spec: MatmulSpec, a_shape, b_shape) -> str:
    _, k, _, _ = local_extents(spec, a_shape, b_shape)
    if b_shape[-1] == k and not spec.transpose_b:
        return "pass transpose_b=True if b is stored (n, k)"
    if spec.transpose_b and b_shape[0] == k:
        return "pass transpose_b=False if b is stored (k, n)"
    if not spec.transpose_a and a_shape[0] in b_shape:
        return "pass transpose_a=True if a is stored (k, m)"
    return "the contracted extents must be equal"


def axes_text(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


# What the user passes ------------------------------------------------------------------------------------------


def check_array(name: str, argument: str, x, ndim: int | None = None, at_least: int | None = None) -> None:
    """Raise TypeError or ValueError unless `x` is an array of a supported type and rank."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: {argument} must be an array, got {type(x).__name__}; convert it with jnp.asarray")
    if ndim is not None and len(x.shape) != ndim:
        raise ValueError(f"{name}: {argument} must have {ndim} dimensions, got {len(x.shape)} (shape {tuple(x.shape)})")
    if at_least is not None and len(x.shape) < at_least:
        raise ValueError(
            f"{name}: {argument} must have at least {at_least} dimensions, got {len(x.shape)} (shape {tuple(x.shape)})"
        )
    dtype = x.dtype
    if dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.integer) and dtype != np.int8):
        raise TypeError(
            f"{name}: {argument} has dtype {dtype}; integer operands but int8, and boolean ones, are not supported and "
            f"never widened: convert it, for example {argument}.astype(jnp.float32)"
        )


def resolve_dtypes(name: str, a, b, preferred) -> tuple[np.dtype, np.dtype]:
    """(type of the operands by JAX's promotion, type of D)."""
    operand = np.dtype(jnp.result_type(a, b))
    if operand.name not in _RESULT_TYPES:
        raise NotImplementedError(
            f"{name}: operands of dtype {operand.name} (a {a.dtype}, b {b.dtype}) are not supported; "
            f"supported are {', '.join(_RESULT_TYPES)}"
        )
    allowed = _RESULT_TYPES[operand.name]
    if preferred is None:
        return operand, operand
    out = np.dtype(jax.dtypes.canonicalize_dtype(preferred))
    if out.name not in allowed:
        raise NotImplementedError(
            f"{name}: preferred_element_type {np.dtype(preferred).name} is not available for {operand.name} operands; "
            f"available: {', '.join(allowed)}"
        )
    return operand, out


def check_scalar(name: str, argument: str, value, out_dtype) -> Any:
    """A Python number, or a JAX scalar in the accumulator's type; neither takes part in promotion."""
    if isinstance(value, np.generic | np.ndarray) and np.ndim(value) == 0:
        value = value.item()
    if isinstance(value, jax.Array) and value.ndim == 0 and value.dtype != np.bool_:
        if jnp.iscomplexobj(value) and not jnp.issubdtype(out_dtype, jnp.complexfloating):
            raise TypeError(
                f"{name}: {argument} has dtype {value.dtype} but the result has dtype {np.dtype(out_dtype).name}"
            )
        return value.astype(accumulator(out_dtype))
    what = f" of shape {value.shape} and dtype {value.dtype}" if isinstance(value, np.ndarray | jax.Array) else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | complex):
        raise TypeError(
            f"{name}: {argument} must be a Python number or a scalar array, got {type(value).__name__}{what}; "
            "multiply by anything else outside of the call"
        )
    if isinstance(value, complex):
        if not jnp.issubdtype(out_dtype, jnp.complexfloating):
            raise TypeError(
                f"{name}: {argument}={value} is complex but the result has dtype {np.dtype(out_dtype).name}"
            )
        return value
    if jnp.issubdtype(out_dtype, jnp.integer) and not float(value).is_integer():
        raise TypeError(
            f"{name}: {argument}={value} is not an integer but the result has dtype {np.dtype(out_dtype).name}"
        )
    if jnp.issubdtype(out_dtype, jnp.integer) and not -(2**31) <= float(value) < 2**31:
        raise ValueError(f"{name}: {argument}={value} does not fit {np.dtype(out_dtype).name}, the type of the result")
    return float(value)


def check_c(name: str, c, beta, out_dtype, out_shape) -> Any:
    """Validate C against D and return beta."""
    if c is None:
        if beta is not None:
            raise ValueError(
                f"{name}: beta={beta!r} was given without c; pass c of shape {tuple(out_shape)} or drop beta"
            )
        return 0.0
    if beta is None:
        raise ValueError(f"{name}: c was given without beta; pass beta=1.0 to add c as it is")
    if np.dtype(out_dtype) != np.int32 or getattr(c, "dtype", None) != np.int32:
        check_array(name, "c", c)
    if tuple(c.shape) != tuple(out_shape):
        raise ValueError(f"{name}: c must have the result's shape {tuple(out_shape)}, got {tuple(c.shape)}")
    check_widens(name, "c", c, out_dtype)
    return check_scalar(name, "beta", beta, out_dtype)


def check_widens(name: str, argument: str, x, out_dtype) -> None:
    """Raise TypeError unless `x` converts to the result's type without loss by JAX's promotion."""
    if np.dtype(jnp.promote_types(x.dtype, out_dtype)) != np.dtype(out_dtype):
        raise TypeError(
            f"{name}: {argument} has dtype {x.dtype} but the result has dtype {np.dtype(out_dtype).name}; convert "
            f"{argument} to {np.dtype(out_dtype).name}, or ask for a wider result with preferred_element_type"
        )


def check_epilog(name: str, spec: MatmulSpec, epilog, epilog_inputs, shape, ndim_a: int) -> tuple[MatmulSpec, dict]:
    """(spec with the epilog, its inputs in the types of the call), for d of `shape`.

    The columns of a relu_aux depend on the pattern: see `check_relu_aux`.
    """
    out = spec.out_dtype
    try:
        number = int(epilog)
        epilog = Epilog(number & ~Epilog.ALLREDUCE)
        row = _epilog.rule(epilog)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: epilog must be a jaxmp.Epilog, got {epilog!r}") from None
    given = dict(epilog_inputs or {})
    missing = [key for key in row.inputs if given.get(key) is None]
    unknown = sorted(set(given) - set(row.inputs))
    if missing:
        raise ValueError(
            f"{name}: epilog {epilog.name} needs epilog_inputs {list(row.inputs)}, missing {missing}; "
            f"pass epilog_inputs={{{missing[0]!r}: ...}}"
        )
    if unknown:
        raise ValueError(
            f"{name}: epilog {epilog.name} takes epilog_inputs {list(row.inputs)}, got unknown {unknown}; "
            "drop them or choose an epilog that uses them"
        )
    if (row.activation or row.derivative) and jnp.issubdtype(out, jnp.complexfloating):
        raise TypeError(f"{name}: epilog {epilog.name} is defined for real types, the result is {np.dtype(out).name}")
    _check_summed_operand(name, spec, epilog, ndim_a)
    checks = {"bias": _check_bias, "relu_aux": _check_relu_aux_input, "gelu_aux": _check_gelu_aux_input}
    dtypes = {"bias": spec.bias_dtype or out}
    inputs = {key: checks[key](name, given[key], dtypes.get(key, out), tuple(shape)) for key in row.inputs}
    return spec.replace(epilog=epilog, asks_all_reduce=bool(number & Epilog.ALLREDUCE)), inputs


def _check_summed_operand(name: str, spec: MatmulSpec, epilog: Epilog, ndim_a: int) -> None:
    """cuBLASMp sums an operand over k only where k is its slowest stored dimension, column-major."""
    if epilog == Epilog.BGRADB and spec.transpose_b:
        raise NotImplementedError(
            f"{name}: epilog BGRADB needs transpose_b=False, for cuBLASMp sums b only where it is stored (k, n); "
            "store b so, or sum it ahead of the call"
        )
    if epilog == Epilog.BGRADA and not spec.transpose_a:
        raise NotImplementedError(
            f"{name}: epilog BGRADA needs transpose_a=True, for cuBLASMp sums a only where it is stored (k, m); "
            "store a so, or sum it ahead of the call"
        )
    if epilog == Epilog.BGRADA and ndim_a != 2:
        raise ValueError(
            f"{name}: epilog BGRADA needs a with 2 dimensions, (k, m), got {ndim_a}; use jax.vmap for the others"
        )


def _check_bias(name: str, bias, out_dtype, shape):
    check_array(name, "bias", bias, ndim=1)
    if bias.shape[0] != shape[-1]:
        raise ValueError(
            f"{name}: bias must have shape ({shape[-1]},), one value per column of the result, got {tuple(bias.shape)}"
        )
    check_widens(name, "bias", bias, out_dtype)
    return bias.astype(out_dtype)


def _check_relu_aux_input(name: str, aux, out_dtype, shape):
    if getattr(aux, "dtype", None) != np.uint8:
        raise TypeError(
            f"{name}: relu_aux must be the uint8 array that a RELU_AUX epilog returned, got "
            f"{getattr(aux, 'dtype', type(aux).__name__)}"
        )
    if aux.ndim != len(shape) or tuple(aux.shape[:-1]) != shape[:-1]:
        raise ValueError(
            f"{name}: relu_aux must have the rows of the result, shape {(*shape[:-1], '...')}, got {tuple(aux.shape)}"
        )
    return aux


def check_relu_aux(name: str, operands: dict[str, Any], spec: MatmulSpec, columns: int, shards: int = 1) -> None:
    """Raise ValueError where an input mask is not packed as `shards` shards of d's columns would be."""
    if "relu_aux" not in _epilog.rule(spec.epilog).inputs:
        return
    aux, width = operands["relu_aux"], shards * _layout.relu_aux_bytes(columns // shards)
    if aux.shape[-1] != width:
        raise ValueError(
            f"{name}: relu_aux must have {width} bytes a row, a bit for each of the result's {columns} columns, "
            f"padded to 16 bytes in each of their {shards} shards, got shape {tuple(aux.shape)}"
        )


def _check_gelu_aux_input(name: str, aux, out_dtype, shape):
    check_array(name, "gelu_aux", aux)
    if tuple(aux.shape) != shape:
        raise ValueError(f"{name}: gelu_aux must have the result's shape {shape}, got {tuple(aux.shape)}")
    if np.dtype(aux.dtype) != np.dtype(out_dtype):
        raise TypeError(f"{name}: gelu_aux must have the result's dtype {np.dtype(out_dtype).name}, got {aux.dtype}")
    return aux


def check_all_reduce(name: str, spec: MatmulSpec) -> MatmulSpec:
    """The spec less its ALLREDUCE bit; ValueError where the call's pattern is not an all-reduce."""
    nranks = spec.axis_size(tuple(axis for axis, _ in spec.mesh)) if spec.pattern == Pattern.LOCAL else spec.nranks
    if spec.asks_all_reduce and spec.pattern != Pattern.ALL_REDUCE and nranks > 1:
        raise ValueError(
            f"{name}: epilog ALLREDUCE belongs to the all_reduce pattern, but this call's pattern is "
            f"{spec.pattern.value}; shard the contraction and pass an out_sharding without its axis, call "
            "matmul_all_reduce inside shard_map, or drop ALLREDUCE"
        )
    return spec.replace(asks_all_reduce=False)


def check_implementation(name: str, implementation) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{name}: implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_determinism(name: str, level) -> str:
    if level not in DETERMINISM:
        raise ValueError(f"{name}: determinism must be one of {DETERMINISM}, got {level!r}")
    return level


def check_gathered_scales(name: str, spec: MatmulSpec, why: str) -> None:
    """Raise NotImplementedError where operands are gathered for the bits whose scales would have to follow them."""
    if spec.is_invariant and {spec.scale_a, spec.scale_b} - {_narrow.NONE, _narrow.SCALAR}:
        raise NotImplementedError(
            f"{name}: determinism={spec.determinism!r} has scales of whole tensors only {why}; got scales.a of "
            f'{spec.scale_a} and scales.b of {spec.scale_b}: take those, or pass determinism="run_to_run"'
        )


def check_conjugate(name: str, argument: str, flag: bool, x) -> bool:
    """Whether to conjugate; real operands refuse, so that a wrong flag does not pass unseen."""
    if flag and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: {argument}=True needs a complex operand, got dtype {x.dtype}")
    return bool(flag)


def resolve_hints(name: str, out_dtype, operand, communication_dtype, algorithm, comm_sm_count) -> dict[str, Any]:
    """The hints as fields of a spec; `check_hints` judges them against the pattern once that is known."""
    if communication_dtype is not None:
        communication_dtype = np.dtype(jax.dtypes.canonicalize_dtype(communication_dtype))
        scale, out = accumulator(operand), np.dtype(out_dtype)
        is_number = communication_dtype.name in _RESULT_TYPES
        is_alike = jnp.issubdtype(communication_dtype, jnp.complexfloating) == jnp.issubdtype(out, jnp.complexfloating)
        if not (is_number and is_alike and out.itemsize <= communication_dtype.itemsize <= scale.itemsize):
            raise ValueError(
                f"{name}: communication_dtype must be no smaller than the result's {out.name} and no larger than "
                f"{scale.name}, in which products are summed, got {communication_dtype.name}"
            )
        communication_dtype = communication_dtype.name
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"{name}: algorithm must be None or one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if comm_sm_count is not None:
        if isinstance(comm_sm_count, bool) or not isinstance(comm_sm_count, int | np.integer):
            raise TypeError(f"{name}: comm_sm_count must be an integer, got {type(comm_sm_count).__name__}")
        if not 1 <= comm_sm_count < 2**31:
            raise ValueError(
                f"{name}: comm_sm_count must be at least 1, the number of multiprocessors that communicate, got "
                f"{comm_sm_count}; None leaves it to the library"
            )
    return {
        "communication_dtype": communication_dtype,
        "algorithm": algorithm or "default",
        "comm_sm_count": int(comm_sm_count or 0),
    }


def check_hints(name: str, spec: MatmulSpec, is_settled: bool = True, has_mesh: bool = True) -> None:
    """Raise ValueError for a hint that the call's pattern does not take; unsettled, no pattern is known yet."""
    pattern, remedy = f"this call is {spec.pattern.value}", "drop it"
    if not is_settled:
        pattern = "XLA's partitioner has not chosen one yet"
        remedy = "pass in_shardings and out_sharding, or use explicit axes"
    if not has_mesh:
        pattern = "no mesh is known to this call, which is local then"
        remedy = "drop it, or give the call a mesh (jax.set_mesh, or mesh=) and pass in_shardings and out_sharding"
    if spec.communication_dtype is not None and (spec.pattern not in _SUMMING or not is_settled):
        raise ValueError(
            f"{name}: communication_dtype={spec.communication_dtype} is of partial sums, so the pattern must be "
            f"reduce_scatter or all_reduce, but {pattern}; {remedy}"
        )
    takes = _ALGORITHM_PATTERNS[spec.algorithm]
    if spec.pattern not in takes or (not is_settled and len(takes) < len(Pattern)):
        raise ValueError(
            f"{name}: algorithm={spec.algorithm!r} needs the pattern {' or '.join(p.value for p in takes)}, but "
            f"{pattern}; {remedy}"
        )


def fit_hints(spec: MatmulSpec) -> MatmulSpec:
    """The spec of a derived call, less the hints that its pattern or the type of its D does not take."""
    dtype = spec.communication_dtype
    if dtype and (spec.pattern not in _SUMMING or np.dtype(dtype).itemsize < np.dtype(spec.out_dtype).itemsize):
        spec = spec.replace(communication_dtype=None)
    return spec if spec.pattern in _ALGORITHM_PATTERNS[spec.algorithm] else spec.replace(algorithm="default")


def hints_text(spec: MatmulSpec) -> str:
    """The hints that were given, as a user writes them."""
    given = (
        ("communication_dtype", spec.communication_dtype, None),
        ("algorithm", spec.algorithm, "default"),
        ("comm_sm_count", spec.comm_sm_count, 0),
    )
    return ", ".join(f"{name}={value}" for name, value, default in given if value != default)


def check_blocks(
    name: str, a: Distributed, b: Distributed, d: Distributed, transpose_a: bool, transpose_b: bool
) -> None:
    """Raise ValueError unless the blocks along each of m, n and k are of one size: cuBLASMp's block contract."""
    (m_a, k_a) = a.layout.block[::-1] if transpose_a else a.layout.block
    (k_b, n_b) = b.layout.block[::-1] if transpose_b else b.layout.block
    m_d, n_d = d.layout.block
    for dimension, one, x, other, y in (
        ("k", "a", k_a, "b", k_b),
        ("m", "a", m_a, "the result", m_d),
        ("n", "b", n_b, "the result", n_d),
    ):
        if x != y:
            raise ValueError(
                f"{name}: along {dimension}, {one} has blocks of {x} but {other} has {y}; they must be equal: lay "
                f"{other} out in blocks of {x}, or {one} in blocks of {y} (jaxmp.to_block_cyclic)"
            )
