"""Which dimensions of a program's arguments are one: the batch, the features, the hidden features of a layer, experts.

Each dimension of a traced value has a class, an integer. Two classes merge where an operation takes their dimensions as
one, as a product does with the columns of `x` and the rows of `w`. Dimensions of a result get the classes of the
operands' dimensions that they correspond to, and new classes where there is none.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._src.core.contraction.contraction import in_no_layout
from jaxmp._src.core.primitive.grouped import GROUPED
from jaxmp._src.core.primitive.primitives import PRODUCTS, activated_matmul_p
from jaxmp._src.core.sharding import ragged
from jaxmp._src.core.validation import dimension_numbers
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing
from jaxmp._src.tools.audit.operations import INLINED

# The classes of a value's dimensions; None for one that is new.
Classes = Sequence[int | None]
# Classes of a traced value's dimensions, and a bit for each argument of the program that it depends on.
Value = tuple[list[int], int]


class Dimensions:
    """The classes of the dimensions of `jaxpr`'s values. `types`: by line ("train.py:41"), the type of the first
    operand of the line's last product. `arguments`: the classes of each argument's dimensions."""

    def __init__(self, jaxpr: Any) -> None:
        self._parents: list[int] = []
        self._looped, self._sums = list[int](), list[tuple[int, int, int]]()
        self.types: dict[str, np.dtype] = {}
        values = [(self._new(v), 1 << i) for i, v in enumerate(jaxpr.invars)]
        self._follow(jaxpr, values)
        self.arguments = [tuple(map(self._find, dims)) for dims, _ in values]

    @property
    def looped(self) -> set[int]:
        """Returns the classes of dimensions that a scan iterates over."""
        return {*map(self._find, self._looped)}

    def summed(self, arguments: int) -> set[int]:
        """Returns the classes that a product sums, if each of its operands depends on one of `arguments` (a bit for
        each)."""
        return {self._find(dim) for dim, a, b in self._sums if a & arguments and b & arguments}

    def _find(self, dim: int) -> int:
        while self._parents[dim] != dim:
            dim = self._parents[dim]
        return dim

    def _merge(self, dims: Sequence[int]) -> int:
        for dim in dims[1:]:
            self._parents[self._find(dim)] = self._find(dims[0])
        return dims[0]

    def _new(self, v: Any, dims: Classes | None = None) -> list[int]:
        """Returns a class for each of a variable's dimensions: `dims`, with a new class for each None. All are new if
        `dims` is None."""
        found = [None] * len(_shape(v)) if dims is None else dims
        first = len(self._parents)
        self._parents += range(first, first + len(found))
        return [first + i if dim is None else dim for i, dim in enumerate(found)]

    def _follow(self, jaxpr: Any, given: Sequence[Value]) -> list[Value]:
        """Gives the dimensions of every value of a jaxpr classes, merges classes, and notes loops and products.
        `given`: the values of its arguments. Returns the values of its results. A value is its classes, and a bit for
        each argument of the program that it depends on."""
        known = dict(zip(jaxpr.invars, given, strict=True)) | {v: (self._new(v), 0) for v in jaxpr.constvars}

        def value(v: Any) -> Value:
            return (self._new(v), 0) if jax_tracing.is_literal(v) else known[v]

        for eqn in jaxpr.eqns:
            values = [value(v) for v in eqn.invars]
            every = functools.reduce(operator.or_, (bits for _, bits in values), 0)
            for v, dims in zip(eqn.outvars, self._results(eqn, values, every), strict=True):
                known[v] = self._new(v, dims), every
        return [value(v) for v in jaxpr.outvars]

    def _results(self, eqn: Any, values: list[Value], every: int) -> Sequence[Classes | None]:
        """Returns the classes of dimensions of each result of an equation; None for each dimension or result without
        known ones. Merges the classes of an elementwise operation's operands where they have the result's extent; other
        operations of unknown kind count as elementwise. `every`: a bit for each argument of the program that the
        operands depend on."""
        name, params, shapes = eqn.primitive.name, eqn.params, [_shape(v) for v in eqn.outvars]
        if name == "scan":
            return self._scan(eqn, values, every)
        if (indices := _product(eqn)) is not None:
            return self._of_product(indices, eqn, values)
        if name in INLINED or name in ("while", "cond", "shard_map"):
            return self._of_bodies(eqn, values, shapes)
        if not values or not shapes:
            return [None] * len(shapes)
        dims, shape, dropped = values[0][0], _shape(eqn.invars[0]), params.get("axes", params.get("dimensions"))
        if name == "transpose":
            return [[dims[i] for i in params["permutation"]]]
        if name == "reshape":
            return [_reshaped(dims, shape, shapes[0])]
        if name == "broadcast_in_dim":
            of = {j: dims[i] for i, j in enumerate(params["broadcast_dimensions"]) if shape[i] == shapes[0][j]}
            return [[of.get(j) for j in range(len(shapes[0]))]]
        if name == "gather":
            numbers = params["dimension_numbers"]
            left = {*range(len(shape))} - {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            of = dict(zip(numbers.offset_dims, sorted(left), strict=True))
            return [[dims[of[j]] if j in of and shape[of[j]] == n else None for j, n in enumerate(shapes[0])]]
        if isinstance(dropped, tuple) and dropped and len(shapes[0]) + len(dropped) == len(shape):
            return [[dim for i, dim in enumerate(dims) if i not in dropped]] * len(shapes)
        count = 1 if name.startswith(("scatter", "conv", "dynamic")) else None
        taken = [(_shape(v), dims) for v, (dims, _) in zip(eqn.invars[:count], values, strict=False)]
        return [self._elementwise(taken, out) for out in shapes]

    def _elementwise(self, taken: Sequence[tuple[Any, list[int]]], out: Sequence[int]) -> Classes:
        taken = [(shape, dims) for shape, dims in taken if len(shape) == len(out)]
        candidates = [[dims[i] for shape, dims in taken if shape[i] == n] for i, n in enumerate(out)]
        return [self._merge(dims) if dims else None for dims in candidates]

    def _scan(self, eqn: Any, values: list[Value], every: int) -> Sequence[Classes]:
        """Returns the classes of a scan's results. Merges its carries with what the body returns for them, and notes
        the first dimensions of what it iterates over as `looped`."""
        (body,) = jax_compat.subjaxprs(eqn.params)
        nconsts, ncarry = jax_compat.scan_counts(eqn)
        carry, rows = [dims for dims, _ in values[nconsts : nconsts + ncarry]], values[nconsts + ncarry :]
        self._looped += [dims[0] for dims, _ in rows]
        turn = [(dims[1:], bits) for dims, bits in rows]
        results = self._follow(body, [*values[:nconsts], *((dims, every) for dims in carry), *turn])
        self._equate(carry, [dims for dims, _ in results[:ncarry]])
        return [*carry, *([None, *dims] for dims, _ in results[ncarry:])]

    def _of_bodies(self, eqn: Any, values: list[Value], shapes: list[Any]) -> Sequence[Classes | None]:
        """Returns the classes of the results of an equation's bodies (of a cond's branches, for example), which take
        its last operands; for a while loop, of what it carries. Merges the bodies' classes. Skips bodies with other
        shapes than the equation's, such as a loop's condition; if all are skipped, each result has None. `shapes`: of
        the equation's results."""
        found = [[dims for dims, _ in values[-len(shapes) :]]] if eqn.primitive.name == "while" else []
        for body in jax_compat.subjaxprs(eqn.params):
            first = len(values) - len(body.invars)
            given = [*map(_shape, eqn.invars[first:]), *shapes] if first >= 0 else None
            if given == [*map(_shape, (*body.invars, *body.outvars))]:
                found.append([dims for dims, _ in self._follow(body, values[first:])])
        for others in found[1:]:
            self._equate(found[0], others)
        return found[0] if found else [None] * len(shapes)

    def _of_product(self, indices: Sequence[str], eqn: Any, values: list[Value]) -> Sequence[Classes | None]:
        """Merges the classes of dimensions with one index, and notes the summed classes and the type of the first
        operand. Returns the classes of each result; None for a result with another number of dimensions than the
        product's."""
        (a, bits_a), (b, bits_b) = values[0], values[-1 if eqn.primitive is activated_matmul_p else 1]
        of: dict[str, int] = {}
        for index, dim in zip(indices[0] + indices[1], a + b, strict=True):
            of[index] = self._merge([of.get(index, dim), dim])
        self._sums += [(of[i], bits_a, bits_b) for i in indices[0] if i in indices[1] and i not in indices[2]]
        self.types[jax_compat.traced_line(eqn)] = eqn.invars[0].aval.dtype
        return [[of.get(i) for i in indices[2]] if len(_shape(v)) == len(indices[2]) else None for v in eqn.outvars]

    def _equate(self, values: Sequence[list[int]], others: Sequence[list[int]]) -> None:
        for dims, same in zip(values, others, strict=True):
            for pair in zip(dims, same, strict=True):
                self._merge(pair)


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _product(eqn: Any) -> Sequence[str] | None:
    """Returns the indices of a product's two operands and result, a letter per dimension. None for other equations,
    also for a `ragged_dot` of JAX unless its operands have 2 and 3 dimensions."""
    if eqn.primitive in PRODUCTS:
        batch = "i" if eqn.outvars[0].aval.ndim == 3 else ""
        return in_no_layout(*(batch + indices for indices in eqn.params["spec"].contraction.indices)).indices
    if eqn.primitive in GROUPED:
        x, w, _, d = ragged.indices_of(eqn.params["spec"], [*map(_shape, (*eqn.invars[:3], eqn.outvars[0]))])
        return x, w, d
    if eqn.primitive.name == "dot_general":
        a, b = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
        return dimension_numbers.parse(eqn.params["dimension_numbers"], a, b).product(a.ndim, b.ndim).indices
    is_grouped = eqn.primitive.name.startswith("ragged_dot") and [*map(len, map(_shape, eqn.invars[:2]))] == [2, 3]
    return ("mk", "gkn", "mn") if is_grouped else None


def _reshaped(dims: Sequence[int], shape: Sequence[int], out: Sequence[int]) -> Classes:
    """Returns the classes of a reshape's result. A dimension gets the class of the operand's dimension with as many
    elements from it on to the end, if their extents have a common factor above 1; else None. Worked example: (8, 16,
    32) to (128, 4, 8) keeps dimension 0 as 0, and 2 as 1."""
    begins = {math.prod(shape[i:]): i for i, n in enumerate(shape) if n > 1}
    pairs = [(begins.get(math.prod(out[j:])), n) for j, n in enumerate(out)]
    return [None if i is None or math.gcd(shape[i], n) == 1 else dims[i] for i, n in pairs]
