"""The frozen description of one call, and tables of the types of its result and sums."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxmp._src.core.contraction import contraction
from jaxmp._src.core.contraction.contraction import Contraction
from jaxmp._src.core.contraction.contraction import Pattern as Pattern
from jaxmp._src.core.spec import epilogs, levels, low_precision
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.levels import Level
from jaxmp._src.core.spec.options import CommOptions, Parts
from jaxmp._src.core.spec.process_grid import Distributed

# Types of D by type of A and B, for integers that only XLA multiplies, modulo 2^bits; int8 is in `low_precision`. A
# product of bool says whether its sum in int32 is nonzero.
INTEGERS = {
    "bool": ("bool",),
    "int16": ("int16", "int32", "int64"),
    "int32": ("int32", "int64"),
    "int64": ("int64",),
    "uint8": ("uint8", "uint16", "uint32", "uint64"),
    "uint16": ("uint16", "uint32", "uint64"),
    "uint32": ("uint32", "uint64"),
    "uint64": ("uint64",),
}
# Type of D by type of A and B; cublasmp.h and nvmath's type table. Everything 16-bit accumulates in float32.
RESULT_TYPES = {
    "float32": ("float32",),
    "float64": ("float64",),
    "complex64": ("complex64",),
    "complex128": ("complex128",),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
} | INTEGERS
_ACCUMULATORS = {"bfloat16": "float32", "float16": "float32", "int8": "int32", "bool": "int32"} | dict.fromkeys(
    low_precision.SCALED, "float32"
)


FLAGS = ("transpose_a", "transpose_b", "conjugate_a", "conjugate_b")
SCALE_NAMES = ("scale_a", "scale_b", "scale_c", "scale_d", "scale_aux")


@dataclasses.dataclass(frozen=True, repr=False)
class Group(Parts):
    """The devices that share a product, and how. Each index of the mesh axes outside the group has a communicator of
    its own.

    `mesh` holds every mesh axis as (name, size), since nothing ambient may matter later. `row_axes` are the group's
    axes, except on a grid: there they shard the rows of every stored matrix, and `col_axes` the columns."""

    pattern: Pattern = Pattern.LOCAL
    mesh: tuple[tuple[str, int], ...] = ()
    row_axes: tuple[str, ...] = ()
    col_axes: tuple[str, ...] = ()

    @classmethod
    @functools.lru_cache(maxsize=4096)  # so that the cached properties are computed once
    def of(cls, product: Contraction, mesh: tuple[tuple[str, int], ...]) -> Group:
        """The group of a planned product on a mesh with these axes."""
        return cls(product.pattern, mesh, product.row_axes, product.col_axes)

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        return self.row_axes + self.col_axes

    @functools.cached_property
    def nranks(self) -> int:
        return self.size(self.axes)

    @functools.cached_property
    def ngroups(self) -> int:
        return math.prod(size for _, size in self.mesh) // self.nranks if self.mesh else 1

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """The numbers of ranks along `row_axes` and along `col_axes`."""
        return self.size(self.row_axes), self.size(self.col_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.mesh)
        return math.prod(sizes[axis] for axis in axes)

    def contraction(self, ndim: int = 2, **flags: bool) -> Contraction:
        """Returns the group's product, of an a and a d with `ndim` dimensions. `flags`: which operand is transposed."""
        return contraction.on_axes(self.pattern, self.row_axes, self.col_axes, ndim, **flags)


@dataclasses.dataclass(frozen=True, repr=False)
class ScaleModes(Parts):
    """How low-precision operands and results are scaled: a mode of `low_precision` for each of a, b, c, d and aux, and
    for the scales of a block-scaled d (`d_out`); `amax_d` and `amax_aux` request largest absolute values."""

    a: str = low_precision.NONE
    b: str = low_precision.NONE
    c: str = low_precision.NONE
    d: str = low_precision.NONE
    aux: str = low_precision.NONE
    d_out: str = low_precision.NONE
    amax_d: bool = False
    amax_aux: bool = False

    @property
    def are_of_factors(self) -> bool:
        """True if a or b has scales."""
        return {self.a, self.b} != {low_precision.NONE}

    def of(self, operand: str) -> str:
        """Returns the mode of a scale by its operand's name, as "scale_a"."""
        return str(getattr(self, operand.removeprefix("scale_")))


@dataclasses.dataclass(frozen=True, repr=False)
class SummationOrder(Parts):
    """The data that gradients need to sum in the order of the global array (`levels`); otherwise default.

    `is_transposed`: other patterns compute this product transposed (the gradient of an a that is stored transposed).
    `rows`: the dimensions that fold into D's rows, slowest first, each as (the extent that a rank holds before a
    scatter or after a gather, other axes that shard it). `cols`: the axes that shard D's columns. `outer_rows`: the
    number of each rank's rows that fold before the gathered or scattered rows.
    """

    is_transposed: bool = False
    rows: tuple[tuple[int, tuple[str, ...]], ...] = ()
    cols: tuple[str, ...] = ()
    outer_rows: int = 1


@dataclasses.dataclass(frozen=True, repr=False)
class MatmulSpec(Parts):
    """Everything static about one call except its shapes; row-major, as the user sees it.

    `is_typed`: the enclosing shard_map checks varying axes. `asks_all_reduce`: the epilog has the ALLREDUCE bit, and
    the pattern is not known yet. `c_dtype`, `bias_dtype` and `aux_dtype` (of gelu_aux): None means the type of the
    result. `traced`: "alpha" and "beta" if they are arrays, and so extra operands of the call. `precision`: a row of
    the table in `precisions`. `distributions`: the stored a, b and d of a grid with block-cyclic shards.
    `source_line`: the name of the call in messages, which is the public function, and in a job of several processes
    also its line: "matmul at train.py:41". `determinism`: the name of the `level`. `first_operand_is_b`: on automatic
    axes, JAX's own product has b as its first operand, and XLA gives that operand an axis that rows and columns of d
    compete for. `batch`: how many more dimensions operands and results have in front.
    """

    out_dtype: np.dtype
    group: Group = Group()
    transpose_a: bool = False
    transpose_b: bool = False
    conjugate_a: bool = False
    conjugate_b: bool = False
    alpha: complex | float = 1.0
    beta: complex | float = 0.0
    has_c: bool = False
    traced: tuple[str, ...] = ()
    epilog: Epilog = Epilog.NONE
    asks_all_reduce: bool = False
    scales: ScaleModes = ScaleModes()
    c_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None
    aux_dtype: np.dtype | None = None
    precision: str = "DEFAULT"
    determinism: str = levels.ANY_ORDER.name
    order: SummationOrder = SummationOrder()
    implementation: str | None = None
    comm: CommOptions = CommOptions()  # noqa: RUF009  frozen
    distributions: tuple[Distributed, Distributed, Distributed] | None = None
    is_typed: bool = False
    source_line: str = "matmul"
    first_operand_is_b: bool = False
    batch: int = 0

    @functools.cached_property
    def is_unsettled(self) -> bool:
        """True if XLA's partitioner chooses the pattern."""
        return self.group == _UNSETTLED

    @property
    def function(self) -> str:
        """The public function that the user called."""
        return self.source_line.partition(" at ")[0]

    @functools.cached_property
    def is_bilinear(self) -> bool:
        """True if a and b are the only operands, and their product the only result."""
        return self.epilog == Epilog.NONE and not self.operand_names

    @functools.cached_property
    def level(self) -> Level:
        """The level: it says what the bits of the result may depend on."""
        return levels.parse(self.determinism)

    @functools.cached_property
    def fixed_reduction_order(self) -> bool:
        """True if every element is one sum in a fixed order, and the library's own arithmetic applies the epilog."""
        return self.level.fixed_order

    @functools.cached_property
    def global_order(self) -> bool:
        """True if calls also make the sums over ranks, in the order of the global array."""
        return self.level.global_order

    @functools.cached_property
    def asked_of_library(self) -> str:
        """Returns `implementation='host'` or `implementation='cublasmp'` if the user passed one of these. Otherwise
        returns the level as text, as `determinism='batch'`, if the level fixes an order, else ""."""
        if self.implementation in ("host", "cublasmp"):
            return f"implementation={self.implementation!r}"
        return str(self.level) if self.fixed_reduction_order else ""

    @functools.cached_property
    def contraction(self) -> Contraction:
        """How the axes of the group shard the stored a, b and d, which have no leading dimensions."""
        return self.group.contraction(transpose_a=self.transpose_a, transpose_b=self.transpose_b)

    @functools.cached_property
    def rule(self) -> epilogs.EpilogRule:
        """The row of the epilog's table."""
        return epilogs.RULES[self.epilog]

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The operands after a and b, in the order of the primitive and of the custom call."""
        scales = tuple(name for name in SCALE_NAMES if self.scales.of(name) != low_precision.NONE)
        return ("c",) * self.has_c + self.rule.inputs + scales

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """All operands, in that order."""
        return ("a", "b", *self.operand_names)

    @functools.cached_property
    def output_names(self) -> tuple[str, ...]:
        """The results, in the order of the primitive and of the custom call."""
        amaxes = ("amax_d",) * self.scales.amax_d + ("gelu_aux_amax",) * self.scales.amax_aux
        scales = ("d_out_scale",) * (self.scales.d_out != low_precision.NONE)
        return ("d", *self.rule.outputs, *amaxes, *scales)

    def replace(self, **changes: Any) -> MatmulSpec:
        """Returns a spec with `changes`: itself if nothing changes."""
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        return dataclasses.replace(self, **changes)

    def regroup(self, **changes: Any) -> MatmulSpec:
        return self.replace(group=dataclasses.replace(self.group, **changes))

    def reorder(self, **changes: Any) -> MatmulSpec:
        return self.replace(order=dataclasses.replace(self.order, **changes))

    def bilinear(self, **changes: Any) -> MatmulSpec:
        """Returns the same product with `changes`, without C, epilog, scales, beta, and an alpha that is an array."""
        return self.replace(**(_BILINEAR | changes))

    def swapped(self, **changes: Any) -> MatmulSpec:
        """Returns the spec of op(b)^T op(a)^T, the transpose of this product, for operands passed as (b, a): only the
        flags are exchanged and the `changes` applied. Scales, epilog and types stay."""
        flags = {"transpose_a": not self.transpose_b, "transpose_b": not self.transpose_a}
        flags |= {"conjugate_a": self.conjugate_b, "conjugate_b": self.conjugate_a}
        return self.replace(**flags, **changes)

    def ungrouped(self) -> MatmulSpec:
        """Returns the same product on each device by itself, with the mesh; an unsettled spec is returned unchanged."""
        return self if self.is_unsettled else self.regroup(pattern=Pattern.LOCAL, row_axes=(), col_axes=())

    def summed_over(self, axes: tuple[str, ...]) -> MatmulSpec:
        """Returns the same product, summed over these mesh axes."""
        return self.regroup(pattern=Pattern.ALL_REDUCE, row_axes=axes)

    def settled(self) -> MatmulSpec:
        """Returns itself if its pattern is known; if XLA's partitioner would choose it, the product on one device."""
        return self.local() if self.is_unsettled else self

    def unsettled(self) -> MatmulSpec:
        """Returns the same product in the pattern that XLA's partitioner chooses."""
        return self.replace(group=_UNSETTLED)

    def local(self) -> MatmulSpec:
        """Returns the same product on one device without a mesh. `fit_comm_options` can adjust its options."""
        return self.replace(group=Group())

    def plain(self, out_dtype: np.dtype, group: Group = Group()) -> MatmulSpec:
        """Returns a product with the same implementation and level, and defaults for all other fields."""
        return MatmulSpec(out_dtype, group, implementation=self.implementation, determinism=self.determinism)

    def folded(self, batch: int) -> MatmulSpec:
        """In global order, returns the spec of `batch` such products as one product with their rows in sequence:
        `order` gets the batch as slowest row dimension, and `batch` times the outer rows. Otherwise returns itself."""
        if not self.global_order:
            return self
        rows = ((batch, ()), *self.order.rows) if self.order.rows else ()
        return self.reorder(outer_rows=batch * self.order.outer_rows, rows=rows)


@functools.lru_cache(maxsize=4096)
def interned(out_dtype: np.dtype, group: Group, **fields: Any) -> MatmulSpec:
    """Returns the one cached spec with these fields, without alpha and beta; its properties are computed once."""
    return MatmulSpec(out_dtype, group, **fields)


_UNSETTLED = Group(Pattern.UNSETTLED)
_BESIDE = ("beta", "has_c", "traced", "epilog", "asks_all_reduce", "scales", "c_dtype", "bias_dtype", "aux_dtype")
_BILINEAR = {name: getattr(MatmulSpec, name) for name in _BESIDE}  # the defaults


@functools.cache
def accumulator(dtype: DTypeLike, out: DTypeLike | None = None) -> np.dtype:
    """Returns the type of sums of products of `dtype`: float32 for 16-bit, 8-bit and 4-bit floats, int32 for bool and
    int8, else `dtype` itself. For int8 with an `out` in `WIDE` it is float32, because scales multiply the sums."""
    name = np.dtype(dtype).name
    if name == low_precision.INT8 and out is not None and np.dtype(out).name in low_precision.WIDE:
        return np.dtype(np.float32)
    return np.dtype(_ACCUMULATORS.get(name, name))
