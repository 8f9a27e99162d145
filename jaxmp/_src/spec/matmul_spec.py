"""The frozen description of one call, and the shapes that follow from it."""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from jaxmp._src.spec import epilogs, low_precision
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.process_grid import Distributed

# Type of D by type of A and B; cublasmp.h and nvmath's type table. Everything 16-bit accumulates in float32.
RESULT_TYPES = {
    "float32": ("float32",),
    "float64": ("float64",),
    "complex64": ("complex64",),
    "complex128": ("complex128",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
}
_ACCUMULATORS = {"bfloat16": "float32", "float16": "float32", "int8": "int32"} | dict.fromkeys(
    low_precision.SCALED, "float32"
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


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """Everything static about one call but its shapes; row-major, as the user sees it.

    `mesh` holds every mesh axis as (name, size), since nothing ambient may matter later. `row_axes` are the
    axes of the group; for a grid, the axes over which the rows of every stored matrix are split, and
    `col_axes` those of the columns. `is_typed` says that the enclosing shard_map checks varying axes, and
    `asks_all_reduce` that the epilog has the ALLREDUCE bit and the pattern is not known yet. The scale
    modes are `low_precision`'s; `c_dtype`, `bias_dtype` and `aux_dtype` (of gelu_aux) are None where they are those of
    the result. `traced` names those of alpha and beta that are arrays, and so are operands beside the call.
    `precision` is a row of `precisions`'s table. `cyclic` are the stored a, b and d of a grid whose shards are
    block-cyclic.
    `line` names the call in messages of a job of several processes, "matmul at train.py:41", and is empty elsewhere.
    `determinism` is the level of docs/determinism.md. `is_turned`: on other patterns this product is its transpose (the
    gradient of an a that is stored transposed). What is left serves the order of the sums in the gradients of
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
    scale_a: str = low_precision.NONE
    scale_b: str = low_precision.NONE
    scale_c: str = low_precision.NONE
    scale_d: str = low_precision.NONE
    scale_aux: str = low_precision.NONE
    d_out_scale: str = low_precision.NONE
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
    is_turned: bool = False
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
        """A copy with `changes`; itself where they change nothing, for a copy of all fields takes some 20 us."""
        is_changed = any(getattr(self, name) != value for name, value in changes.items())
        return dataclasses.replace(self, **changes) if is_changed else self

    def __repr__(self) -> str:
        """What is not as by default, for jaxprs hold one in each equation."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return f"MatmulSpec({', '.join(f'{field.name}={x!r}' for field, x in values if x != field.default)})"

    def bilinear(self, **changes) -> MatmulSpec:
        """The same product without C, epilog and scales."""
        plain = dict.fromkeys((*SCALE_NAMES, "d_out_scale"), low_precision.NONE) | {
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

    def local(self) -> MatmulSpec:
        """The same on one device, for operands that are whole there; hints are for `comm_options` to fit."""
        return self.replace(pattern=Pattern.LOCAL, mesh=(), row_axes=(), col_axes=())

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
    scales = tuple(name for name in SCALE_NAMES if getattr(spec, name) != low_precision.NONE)
    return ("c",) * spec.has_c + epilogs.rule(spec.epilog).inputs + scales


def output_names(spec: MatmulSpec) -> tuple[str, ...]:
    """The results, in the order of the primitive and of the custom call."""
    scales = ("amax_d",) * spec.amax_d + ("gelu_aux_amax",) * spec.aux_amax
    scales += ("d_out_scale",) * (spec.d_out_scale != low_precision.NONE)
    return ("d", *epilogs.rule(spec.epilog).outputs, *scales)


def aux_dtype(spec: MatmulSpec) -> np.dtype:
    """Type of gelu_aux."""
    return np.dtype(spec.aux_dtype or spec.out_dtype)


def dims(spec: MatmulSpec, name: str) -> str:
    """What an operand or result spans, as `DIMS`; blocks of scales along k are u in a and v in b, of rows w and x."""
    if name not in ("scale_a", "scale_b"):
        return DIMS[name]
    row, inner, block = "muw" if name == "scale_a" else "nvx"
    mode = getattr(spec, name)
    return {low_precision.SCALAR: "", low_precision.OUTER_VEC: row, low_precision.BLK128: block + inner}.get(
        mode, row + inner
    )


def output_rows(spec: MatmulSpec, rows: int) -> int:
    """Rows of D that each rank holds when its op(A) has `rows` of them."""
    if spec.pattern == Pattern.ALL_GATHER:
        return rows * spec.nranks
    if spec.pattern == Pattern.REDUCE_SCATTER:
        return rows // spec.nranks
    return rows


def result_shape(spec: MatmulSpec, a, b) -> tuple[int, ...]:
    """Shape of d from `a`, whose leading dimensions d has too, and `b`."""
    return (*a.shape[:-2], *output_shape(spec, a.shape[-2:], b.shape))


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


def operations(spec: MatmulSpec, a_shape, b_shape) -> int:
    """Multiplications and additions of the product that one communicator computes, from the local shapes."""
    return 2 * math.prod(global_extents(spec, a_shape, b_shape))


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
