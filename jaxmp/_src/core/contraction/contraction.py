"""A distributed contraction: for each mesh axis, the index that its ranks divide among themselves.

    d[D] = sum a[A] * b[B]        indices as in `jnp.einsum`, in the order of storage: "mk,kn->mn"

A mesh axis shards an array along one index, or not at all ("-" here, "" in `Role`). `Role` holds the index for each
array, and `split` is the index that the ranks divide when they multiply. The communication follows from it: an operand
with the split index is used as it is, any other operand is needed whole, and a contracted split leaves partial sums.

    name             split   a  b  d
    rows             m       m  -  m      nothing moves
    columns          n       -  n  n
    batch            i       i  i  i
    none             -       -  -  -      the ranks compute the same
    all-gather       n       m  n  n      a's rows are gathered
                     m       m  n  m      b's columns are gathered
    reduce-scatter   k       k  k  m      partial sums are scattered over rows (or n: columns)
    all-reduce       k       k  k  -
    grid             m       m  k  m      b is gathered along k (FSDP)
                     n       k  n  n      a is gathered along k
    deferred         k       k  k  +      nothing moves: each rank keeps its term of the sum (unreduced axes of d)

An index of d is a batch (in a and b), a row (in a only) or a column (in b only); rows and columns are free indices.
An operand with reduced axes is whole along them, and its cotangent is deferred over them.
A call has one communicator for each group of ranks, which differ in their position along the communicating axes (the
axes of the group) only. All communicating axes have one role, or all are of a grid.

Worked example: mesh (data=2, model=4), a P("data", "model"), b P("model", None), d P("data", None):
`mk,kn->mn  data: m (m - m)  model: k (k k -)`, an all-reduce over model in two groups, one for each index of data.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import string
from typing import NamedTuple

DEFERRED = "+"  # d's index in the role of an axis that the program sums over later

# Dim: the mesh axes that shard one dimension, slowest first. Dims: a Dim for each dimension of an array.
Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


class Pattern(enum.StrEnum):
    """How the ranks of one communicator share the product. UNSETTLED: XLA's partitioner chooses."""

    UNSETTLED = "?"
    LOCAL = "local"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    GRID = "grid"


class Layout(NamedTuple):
    """The mesh axes that shard each dimension of a, b and d."""

    a: Dims
    b: Dims
    d: Dims


class Role(NamedTuple):
    """The index along which one mesh axis shards a, b and d; "" for an array that it does not shard."""

    a: str = ""
    b: str = ""
    d: str = ""

    @property
    def split(self) -> str:
        """The index that the ranks of the axis divide when they multiply; "" if all of them compute the same."""
        return self.a if self.is_contracted or self.d == DEFERRED else self.d

    @property
    def communicates(self) -> bool:
        return self.a != "" and self.b != "" and not self.a == self.b == self.d and self.d != DEFERRED

    @property
    def is_contracted(self) -> bool:
        return self.communicates and self.a == self.b


@dataclasses.dataclass(frozen=True)
class Contraction:
    """`a`, `b`, `d`: the indices of the three arrays as stored. `layout`: the shardings of the arrays in the call.

    `is_partial`: only the axes of the group are known, as inside a user's shard_map. `is_grid_stored`: the arrays are
    stored in the blocks of a grid, which may have a single row or column. `unreduced`: d's deferred axes.
    """

    a: str
    b: str
    d: str
    layout: Layout
    is_partial: bool = False
    is_grid_stored: bool = False
    unreduced: Dim = ()

    def __str__(self) -> str:
        axes = (f"  {x}: {r.split or '-'} ({' '.join(index or '-' for index in r)})" for x, r in self.roles.items())
        return f"{self.a},{self.b}->{self.d}{''.join(axes)}"

    @functools.lru_cache(maxsize=4096)  # noqa: B019  frozen; what follows from it is found once
    def replace(self, layout: Layout) -> Contraction:
        """Returns the contraction in another layout."""
        return dataclasses.replace(self, layout=layout)

    def local(self) -> Contraction:
        """Returns the contraction with d sharded as it is, and a and b as d along its indices, whole along others."""
        where = dict(zip(self.d, self.layout.d, strict=True))
        a, b = (tuple(where.get(index, ()) for index in indices) for indices in (self.a, self.b))
        return self.replace(Layout(a, b, self.layout.d))

    def with_whole_b(self) -> Contraction:
        """Returns the contraction with b whole over the axes along which a call gathers b. Other axes still shard b."""
        kept = {axis for axis, role in self.roles.items() if not role.communicates or role.b == role.split}
        b = tuple(tuple(axis for axis in dim if axis in kept) for dim in self.layout.b)
        return self.replace(self.layout._replace(b=b))

    def cotangent(self, which: str) -> Contraction:
        """Returns the product that is the cotangent of `which`. For "a" the operands are (d, b), and for "b" they are
        (a, d). The arrays are sharded as in this product, and the result has no deferred axes."""
        names = {"a": "dba", "b": "adb"}[which]
        a, b, d = (getattr(self, name) for name in names)
        layout = Layout(*(getattr(self.layout, name) for name in names))
        return dataclasses.replace(self, a=a, b=b, d=d, layout=layout, unreduced=())

    @functools.cached_property
    def indices(self) -> tuple[str, str, str]:
        return self.a, self.b, self.d

    @functools.cached_property
    def batch(self) -> str:
        return "".join(index for index in self.d if index in self.a and index in self.b)

    @functools.cached_property
    def rows(self) -> str:
        return "".join(index for index in self.d if index not in self.b)

    @functools.cached_property
    def cols(self) -> str:
        return "".join(index for index in self.d if index not in self.a)

    @functools.cached_property
    def contracted(self) -> str:
        return "".join(index for index in self.a if index not in self.d)

    def sharded(self, which: str, index: str) -> Dim:
        """Returns the axes that shard the array `which` ("a", "b", "d") along an index that it has."""
        dims: Dims = getattr(self.layout, which)
        return dims[getattr(self, which).index(index)]

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """The role of each axis that shards an array, in the order of d's dimensions, then a's, then b's. For axes of
        `unreduced` d's index is DEFERRED."""
        found: dict[str, list[str]] = {}
        for which in "dab":
            for index, dim in zip(getattr(self, which), getattr(self.layout, which), strict=True):
                for axis in dim:
                    found.setdefault(axis, ["", "", ""])["abd".index(which)] = index
        for axis in self.unreduced:
            found[axis][2] = DEFERRED
        return {axis: Role(*indices) for axis, indices in found.items()}

    def is_grid_role(self, role: Role) -> bool:
        """True if one operand is sharded along a contracted index and the other operand along an index of d."""
        return role.communicates and (role.a in self.d) != (role.b in self.d)

    def is_one_call(self, roles: dict[str, Role]) -> bool:
        """True if one call can communicate over all axes: all sum to one index of d (or to none), all gather one
        operand along one index, or all are of a grid. Axes with roles that do not communicate do not count."""

        def kind(role: Role) -> tuple[str, str]:
            if role.is_contracted:
                return "sum", role.d
            if self.is_grid_role(role):
                return "grid", ""
            return ("gather a", role.a) if role.d == role.b else ("gather b", role.b)

        return len({kind(role) for role in roles.values() if role.communicates}) <= 1

    @functools.cached_property
    def is_block_grid(self) -> bool:
        """True if the arrays are stored in the blocks of one grid: each has two dimensions, not counting batches, and
        both are sharded. The first one as stored is sharded over the same axes in all three arrays, and so is the
        second one."""
        a, b, d = (
            tuple(dim for index, dim in zip(*each, strict=True) if index not in self.batch)
            for each in zip(self.indices, self.layout, strict=True)
        )
        return len(a) == 2 and a == b == d and all(a)

    @functools.cached_property
    def _group(self) -> tuple[Pattern, Dim, Dim]:
        """Returns (pattern, axes of the group, ()), or (LOCAL, (), ()) if nothing moves. For a grid it is (GRID, the
        axes that number its rows, the axes that number its columns). These axes shard d's first and second dimension,
        batches aside, if the arrays are stored in blocks; otherwise they shard b and a along k."""
        if self.is_block_grid or self.is_grid_stored:
            rows, cols = (dim for index, dim in zip(self.d, self.layout.d, strict=True) if index not in self.batch)
            return Pattern.GRID, rows, cols
        role = self.role
        if not role.communicates:
            return Pattern.LOCAL, (), ()
        if role.is_contracted:
            axes = sum((self.sharded("a", index) for index in self.contracted), ())
            return Pattern.REDUCE_SCATTER if role.d else Pattern.ALL_REDUCE, axes, ()
        if self.is_grid_role(role):
            return Pattern.GRID, self.sharded("b", self.contracted), self.sharded("a", self.contracted)
        which = "a" if role.d == role.b else "b"
        return Pattern.ALL_GATHER, self.sharded(which, self.shared)[len(self.sharded("d", self.shared)) :], ()

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The name of the communication, in the library's call and in messages."""
        return self._group[0]

    @functools.cached_property
    def row_axes(self) -> Dim:
        return self._group[1]

    @functools.cached_property
    def col_axes(self) -> Dim:
        return self._group[2]

    @functools.cached_property
    def shared(self) -> str:
        """The free index along which one operand is gathered, or d is scattered. "" in other patterns and in grids."""
        role = self.role
        if self.is_grid_role(role):
            return ""
        if role.is_contracted:
            return role.d
        return role.a if role.d == role.b else role.b

    @functools.cached_property
    def role(self) -> Role:
        """The role of the first axis that communicates. Empty if none does, and for `is_block_grid`."""
        of_all = (role for role in self.roles.values() if role.communicates)
        return Role() if self.is_block_grid else next(of_all, Role())

    @functools.cached_property
    def communicates(self) -> bool:
        return self.pattern != Pattern.LOCAL

    @functools.cached_property
    def is_grid(self) -> bool:
        """True if the ranks share k and gather operands along it."""
        return self.pattern == Pattern.GRID

    @functools.cached_property
    def gathers(self) -> bool:
        """True if the ranks gather the rows of a or the columns of b."""
        return self.pattern == Pattern.ALL_GATHER

    @functools.cached_property
    def scatters(self) -> bool:
        """True if the ranks sum their products and each rank gets its part of the sums."""
        return self.pattern == Pattern.REDUCE_SCATTER

    @functools.cached_property
    def sums(self) -> bool:
        """True if the ranks sum their products in the call (all-reduce or reduce-scatter)."""
        return self.role.is_contracted

    @functools.cached_property
    def is_reduced(self) -> bool:
        """True if the ranks sum their products and every rank gets the whole sum."""
        return self.pattern == Pattern.ALL_REDUCE

    @functools.cached_property
    def scattered(self) -> int | None:
        """The dimension of d along which sums are scattered, or None."""
        return self.d.index(self.role.d) if self.sums and self.role.d else None

    @functools.cached_property
    def gathered(self) -> tuple[str, int] | None:
        """(the operand that the ranks gather over the axes of `role`, "a" or "b"; the dimension along which they gather
        it). None if they sum, if nothing is gathered, and for a grid of blocks, which gathers both operands."""
        if self.sums or not self.role.communicates:
            return None
        which = "a" if self.role.d == self.role.b else "b"
        return which, getattr(self, which).index(getattr(self.role, which))

    @functools.cached_property
    def is_transposed(self) -> bool:
        """True if `shared` is a column: the call computes d transposed, with b as its first operand."""
        return self.shared != "" and self.shared in self.cols

    @property
    def columns(self) -> str:
        """The columns in the order of their folding: as in d, but `shared` first if it is a column, because ranks are
        the slowest index of the dimension that they share."""
        return "".join(sorted(self.cols, key=lambda index: index != self.shared))

    @functools.cached_property
    def dimension(self) -> int:
        """The position of `shared` in `rows`; 0 if it is not a row."""
        return self.rows.index(self.shared) if self.shared and self.shared in self.rows else 0

    @functools.cached_property
    def is_stored_in_order(self) -> bool:
        """True if one index k is contracted, and follows all rows in a and precedes all columns in b."""
        k = self.contracted
        is_last = len(k) == 1 and all(self.a.index(row) < self.a.index(k) for row in self.rows)
        return is_last and all(self.b.index(k) < self.b.index(col) for col in self.cols)

    @functools.cached_property
    def gathers_k(self) -> bool:
        """True if a grid has a single row or column, so that only one operand is gathered, along k."""
        return self.is_grid and not (self.row_axes and self.col_axes)

    def outside_group(self, dim: Dim) -> Dim:
        """Returns the axes of `dim` that are not in the group."""
        return tuple(axis for axis in dim if axis not in self.row_axes + self.col_axes)


LETTERS = string.ascii_lowercase[8:] + string.ascii_lowercase[:8] + string.ascii_uppercase
_LEADING = [letter for letter in LETTERS if letter not in "kmn"]


def in_no_layout(a: str, b: str, d: str) -> Contraction:
    """Returns a product of these indices, with all arrays unsharded."""
    return Contraction(a, b, d, Layout(*(((),) * len(indices) for indices in (a, b, d))))


@functools.lru_cache(maxsize=4096)
def of_matrices(
    ndim: int, layout: Layout | None = None, *, transpose_a: bool = False, transpose_b: bool = False
) -> Contraction:
    """Returns a product of matrices in this layout, unsharded by default. a and d have `ndim` dimensions, with the same
    leading indices; b has two. A transposed a is stored as (..., k, m), a transposed b as (n, k)."""
    lead = "".join(_LEADING[: ndim - 2])
    product = in_no_layout(lead + ("km" if transpose_a else "mk"), "nk" if transpose_b else "kn", lead + "mn")
    return product if layout is None else product.replace(layout)


@functools.lru_cache(maxsize=4096)
def on_axes(
    pattern: Pattern,
    row_axes: Dim,
    col_axes: Dim = (),
    ndim: int = 2,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Contraction:
    """Returns a product of matrices (as `of_matrices`) in this pattern, with `is_partial`, because other axes are not
    known. Over `row_axes`, ALL_GATHER gathers a's rows m, REDUCE_SCATTER scatters sums over d's rows m, and ALL_REDUCE
    reduces sums. In a GRID, each matrix as stored has rows over `row_axes` and columns over `col_axes`. Other
    patterns shard nothing."""
    whole: Dim = ()
    a, b, d = {
        Pattern.ALL_GATHER: ((row_axes, whole), (whole, row_axes), (whole, row_axes)),
        Pattern.REDUCE_SCATTER: ((whole, row_axes), (row_axes, whole), (row_axes, whole)),
        Pattern.ALL_REDUCE: ((whole, row_axes), (row_axes, whole), (whole, whole)),
    }.get(pattern, ((whole, whole),) * 3)
    a, b = a[::-1] if transpose_a else a, b[::-1] if transpose_b else b
    if pattern == Pattern.GRID:  # for every matrix as it is stored
        a = b = d = (row_axes, col_axes)
    lead = (whole,) * (ndim - 2)
    layout = Layout((*lead, *a), b, (*lead, *d))
    made = of_matrices(ndim, layout, transpose_a=transpose_a, transpose_b=transpose_b)
    return dataclasses.replace(made, is_partial=True, is_grid_stored=pattern == Pattern.GRID)


LOCAL = on_axes(Pattern.LOCAL, ())
