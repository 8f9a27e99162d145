"""The frozen description of one call, and the shapes that follow from it."""

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

# Type of D by type of A and B for integers that only XLA multiplies, modulo 2^bits; int8 is of `low_precision`. A
# product of bool says whether a sum in int32 is not 0.
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
    """The devices that share a product, and how: one communicator of each index of the other mesh axes.

    `mesh` holds every mesh axis as (name, size), since nothing ambient may matter later. `row_axes` are the axes of the
    group; for a grid, the axes over which the rows of every stored matrix are split, and `col_axes` those of the
    columns.
    """

    pattern: Pattern = Pattern.LOCAL
    mesh: tuple[tuple[str, int], ...] = ()
    row_axes: tuple[str, ...] = ()
    col_axes: tuple[str, ...] = ()

    @classmethod
    @functools.lru_cache(maxsize=4096)  # so that what follows from it is found once
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
        """The ranks along `row_axes` and along `col_axes`."""
        return self.size(self.row_axes), self.size(self.col_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.mesh)
        return math.prod(sizes[axis] for axis in axes)


@dataclasses.dataclass(frozen=True, repr=False)
class ScaleModes(Parts):
    """How low-precision operands and results are scaled: a mode of `low_precision` for each of a, b, c, d and aux, and
    for the scales that a block-scaled d gets (`d_out`); `amax_d` and `amax_aux` ask for largest absolute values."""

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
        """Whether a or b has scales."""
        return {self.a, self.b} != {low_precision.NONE}

    def of(self, operand: str) -> str:
        """The mode of a scale by its operand's name, as "scale_a"."""
        return str(getattr(self, operand.removeprefix("scale_")))


@dataclasses.dataclass(frozen=True, repr=False)
class SummationOrder(Parts):
    """What gradients need to be sums in the order of the global array (`levels`); elsewhere default.

    `is_transposed`: on other patterns this product is its transpose (the gradient of an a that is stored transposed).
    `rows` are the dimensions that fold into D's rows, slowest first, each as (extent of what a rank holds of it ahead
    of a scatter or after a gather, axes that shard it otherwise). `cols` are the axes that shard D's columns.
    `outer_rows` rows of each rank are folded ahead of those that are gathered or scattered.
    """

    is_transposed: bool = False
    rows: tuple[tuple[int, tuple[str, ...]], ...] = ()
    cols: tuple[str, ...] = ()
    outer_rows: int = 1


@dataclasses.dataclass(frozen=True, repr=False)
class MatmulSpec(Parts):
    """Everything static about one call but its shapes; row-major, as the user sees it.

    `is_typed`: the enclosing shard_map checks varying axes. `asks_all_reduce`: the epilog has the ALLREDUCE bit, and
    the pattern is not known yet. `c_dtype`, `bias_dtype` and `aux_dtype` (of gelu_aux) are None where they are those of
    the result. `traced` names those of alpha and beta that are arrays, and so are operands beside the call.
    `precision` is a row of `precisions`'s table. `distributions` are the stored a, b and d of a grid whose shards are
    block-cyclic. `source_line` names the call in messages: the public function, and in a job of several processes
    its line, "matmul at train.py:41". `determinism` names the `level`. `b_leads`: on automatic axes,
    JAX's own product has b for its first operand, to which XLA gives an axis that the rows and the columns of d compete
    for. `is_batch`: operands and results have one more dimension in front.
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
    b_leads: bool = False
    is_batch: bool = False

    @functools.cached_property
    def is_unsettled(self) -> bool:
        """Whether XLA's partitioner chooses the pattern."""
        return self.group == _UNSETTLED

    @property
    def function(self) -> str:
        """The public function that the user called."""
        return self.source_line.partition(" at ")[0]

    @functools.cached_property
    def is_bilinear(self) -> bool:
        """Whether a and b are all that it takes, and their product all that it returns."""
        return self.epilog == Epilog.NONE and not self.operand_names

    @functools.cached_property
    def level(self) -> Level:
        """What the bits of the result may depend on."""
        return levels.find(self.determinism)

    @functools.cached_property
    def fixed_reduction_order(self) -> bool:
        """Whether every element is one sum in a fixed order, and its epilog the library's own arithmetic."""
        return self.level.fixed_order

    @functools.cached_property
    def global_order(self) -> bool:
        """Whether sums over ranks, too, are made by calls in the order of the global array."""
        return self.level.global_order

    @functools.cached_property
    def asked_of_library(self) -> str:
        """The option that asks for a library's product, or the empty string."""
        if self.implementation in ("host", "cublasmp"):
            return f"implementation={self.implementation!r}"
        return str(self.level) if self.fixed_reduction_order else ""

    @functools.cached_property
    def contraction(self) -> Contraction:
        """How the axes of the group shard the stored a, b and d, which have no leading dimensions."""
        group, flags = self.group, {"transpose_a": self.transpose_a, "transpose_b": self.transpose_b}
        return contraction.on_axes(group.pattern, group.row_axes, group.col_axes, **flags)

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
        """A copy with `changes`, the same one each time but for an alpha or beta; itself where they change nothing."""
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        # A program may have a new alpha at each step.
        if "alpha" in changes or "beta" in changes:
            return dataclasses.replace(self, **changes)
        key = tuple(changes.items())
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = dataclasses.replace(self, **changes)
        return copy

    @functools.cached_property
    def _copies(self) -> dict[Any, MatmulSpec]:
        """What `replace` has made: a copy takes some 10 us, and what follows from it is found once."""
        return {}

    def regroup(self, **changes: Any) -> MatmulSpec:
        return self.replace(group=dataclasses.replace(self.group, **changes))

    def reorder(self, **changes: Any) -> MatmulSpec:
        return self.replace(order=dataclasses.replace(self.order, **changes))

    def bilinear(self, **changes: Any) -> MatmulSpec:
        """The same product without C, epilog and scales."""
        return self.replace(**(_BILINEAR | changes))

    def swapped(self, **changes: Any) -> MatmulSpec:
        """The product of op(b)^T and op(a)^T, which is the transpose of this one."""
        flags = {"transpose_a": not self.transpose_b, "transpose_b": not self.transpose_a}
        flags |= {"conjugate_a": self.conjugate_b, "conjugate_b": self.conjugate_a}
        return self.replace(**flags, **changes)

    def ungrouped(self) -> MatmulSpec:
        """The same on each device of the mesh by itself; unsettled, it stays so."""
        return self if self.is_unsettled else self.regroup(pattern=Pattern.LOCAL, row_axes=(), col_axes=())

    def summed_over(self, axes: tuple[str, ...]) -> MatmulSpec:
        """The same, summed over these axes of the mesh."""
        return self.regroup(pattern=Pattern.ALL_REDUCE, row_axes=axes)

    def settled(self) -> MatmulSpec:
        """The same on one device where it is unsettled."""
        return self.local() if self.is_unsettled else self

    def unsettled(self) -> MatmulSpec:
        """The same in the pattern that XLA's partitioner chooses."""
        return self.replace(group=_UNSETTLED)

    def local(self) -> MatmulSpec:
        """The same on one device, for operands that are whole there; `fit_comm_options` makes the options fit."""
        return self.replace(group=Group())

    def alike(self, out_dtype: np.dtype, group: Group = Group()) -> MatmulSpec:
        """A plain product of its implementation and level."""
        return MatmulSpec(out_dtype, group, implementation=self.implementation, determinism=self.determinism)

    def folded(self, batch: int) -> MatmulSpec:
        """The same for `batch` such products whose rows follow each other."""
        if not self.global_order:
            return self
        rows = ((batch, ()), *self.order.rows) if self.order.rows else ()
        return self.reorder(outer_rows=batch * self.order.outer_rows, rows=rows)


@functools.lru_cache(maxsize=4096)
def interned(out_dtype: np.dtype, group: Group, **fields: Any) -> MatmulSpec:
    """The one spec of these fields, without alpha and beta, so that what follows from it is found once."""
    return MatmulSpec(out_dtype, group, **fields)


_UNSETTLED = Group(Pattern.UNSETTLED)
_BESIDE = ("beta", "has_c", "traced", "epilog", "asks_all_reduce", "scales", "c_dtype", "bias_dtype", "aux_dtype")
_BILINEAR = {name: getattr(MatmulSpec, name) for name in _BESIDE}  # as by default


@functools.cache
def accumulator(dtype: DTypeLike, out: DTypeLike | None = None) -> np.dtype:
    """Type in which products of `dtype` are summed and added to; of int8 float32 where scales bring them to a wide type
    `out`."""
    name = np.dtype(dtype).name
    if name == low_precision.INT8 and out is not None and np.dtype(out).name in low_precision.WIDE:
        return np.dtype(np.float32)
    return np.dtype(_ACCUMULATORS.get(name, name))
