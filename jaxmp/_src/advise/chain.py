"""The products of a traced function, and from which earlier product or argument each operand comes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._src.audit.operations import INLINED
from jaxmp._src.contraction.contraction import LOCAL, Contraction, in_no_layout
from jaxmp._src.hardware.call_time import kind_of
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.jax_internals import jax_compat, jax_tracing
from jaxmp._src.primitive.primitives import PRODUCTS, activated_matmul_p
from jaxmp._src.validation import dimension_numbers

_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "complex", "conj"),
    *("convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2"),
    *("expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
    *("max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pow", "real"),
    *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan"),
    *("tanh", "xor", "concatenate"),
    *("pcast", "pvary", "reshard", "jaxmp_reshard", "sharding_constraint"),  # the values as they are
}


@dataclasses.dataclass(frozen=True)
class View:
    """A value as the dimensions of a node: of each of its own that of the node, or None where no shard survives.

    `count`: how many such values the program has; more than 1 within a scan.
    """

    node: int
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    count: int

    def of(self, aval: Any, dims: Sequence[int | None] | None = None) -> View:
        """The same of another shape and type, in these dimensions."""
        dims = self.dims if dims is None else tuple(dims)
        return dataclasses.replace(self, dims=dims, shape=_shape(aval), dtype=_dtype(aval))


@dataclasses.dataclass(frozen=True)
class Node:
    """A value whose sharding is chosen.

    Attributes:
      kind: "argument"; "value" of an operation that is not followed; "product"; "join" of operands that an elementwise
        operation takes in one sharding, or of what a loop carries; "close", the end of that loop, which has no value.
      name: of the operation that is not followed; loop: the join that a loop begins with.
      product: its indices.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    count: int = 1
    operands: tuple[View, ...] = ()
    line: str = ""
    name: str = ""
    loop: int = -1
    product: Contraction = LOCAL


class Chain:
    """The nodes of a program: its arguments, and the others in its order; and the products that are not counted."""

    def __init__(self, jaxpr: Any, arguments: Sequence[Any], devices: int, hardware: Hardware) -> None:
        self.nodes: list[Node] = []
        self.left: dict[str, None] = {}
        self._devices, self._hardware = devices, hardware
        views = {v: self._add("argument", v.aval, 1) for v in arguments}
        self._follow(jaxpr, [views[v] for v in jaxpr.invars], 1, "")

    def _add(self, kind: str, aval: Any, count: int, operands: Sequence[View] = (), **fields: Any) -> View:
        """The view of a new node by itself."""
        shape, dtype = _shape(aval), _dtype(aval)
        self.nodes.append(Node(kind, shape, dtype, count, tuple(operands), **fields))
        return View(len(self.nodes) - 1, tuple(range(len(shape))), shape, dtype, count)

    def _follow(
        self, jaxpr: Any, given: Sequence[View | None], count: int, line: str, *, is_ours: bool = False
    ) -> list[View | None]:
        """The views of the results of a jaxpr; None of scalars and of literals."""
        known: dict[Any, View | None] = dict(zip(jaxpr.invars, given, strict=True))
        for v in jaxpr.constvars:
            known[v] = self._add("value", v.aval, 1, name="a constant") if _shape(v.aval) else None

        def view(v: Any) -> View | None:
            return None if jax_tracing.is_literal(v) else known[v]

        for eqn in jaxpr.eqns:
            here = line if is_ours else jax_compat.traced_line(eqn) or line
            results = self._results(eqn, [view(v) for v in eqn.invars], count, here, is_ours)
            known |= zip(eqn.outvars, results, strict=True)
        return [view(v) for v in jaxpr.outvars]

    def _results(
        self, eqn: Any, operands: list[View | None], count: int, line: str, is_ours: bool
    ) -> Sequence[View | None]:
        name: str = eqn.primitive.name
        out: Any = eqn.outvars[0].aval if eqn.outvars else None
        if _is_product(eqn):
            if kind_of(eqn.invars[0].aval.dtype.name) in self._hardware.rates:
                return self._product(eqn, operands, count, line)
            self.left[f"{line} of {eqn.invars[0].aval.dtype.name}"] = None
        elif name in INLINED or (name == "shard_map" and is_ours and eqn.params["mesh"].size == 1):
            (body,) = jax_compat.subjaxprs(eqn.params)
            is_ours = is_ours or str(eqn.params.get("name", "")).startswith("jaxmp")
            return self._follow(body, operands, count, line, is_ours=is_ours)
        elif name == "optimization_barrier":
            return operands
        elif name == "scan":
            return self._scan(eqn, operands, count, line)
        elif len(eqn.outvars) == 1 and name in _ELEMENTWISE and out.shape:
            return [self._merged(operands, out, count, line)]
        elif operands and operands[0] is not None and (dims := _moved(eqn, operands[0], self._devices)):
            return [operands[0].of(v.aval, each) for v, each in zip(eqn.outvars, dims, strict=True)]
        else:
            self.left |= {f"{at or line} inside of {name}": None for at in _products_in(eqn)}
        if not any(operands):
            return [None] * len(eqn.outvars)
        return [self._add("value", v.aval, count, name=name) if _shape(v.aval) else None for v in eqn.outvars]

    def _product(self, eqn: Any, operands: list[View | None], count: int, line: str) -> Sequence[View | None]:
        is_activated, out = eqn.primitive is activated_matmul_p, eqn.outvars[0].aval
        views = [
            operands[i] or self._add("value", eqn.invars[i].aval, count, name="a constant")
            for i in (0, -1 if is_activated else 1)
        ]
        d = self._add("product", out, count, views, line=line, product=_indices(eqn))
        if "spec" in eqn.params and eqn.params["spec"].has_c and not is_activated:
            d = self._merged([d, operands[2]], out, count, line) or d
        return [d, *(d.of(v.aval) if v.aval.shape == out.shape else None for v in eqn.outvars[1:])]

    def _merged(self, operands: Sequence[View | None], out: Any, count: int, line: str) -> View | None:
        """What an elementwise operation makes. Operands that are broadcast along dimensions in which others are not
        (biases, means, masks) follow those."""
        views = [view for view in operands if view is not None and len(view.shape) == len(out.shape)]
        views = [view.of(out, _kept(view, out.shape)) for view in views]
        most = max((len(view.dims) - view.dims.count(None) for view in views), default=0)
        followed = {(view.node, view.dims): view for view in views if len(view.dims) - view.dims.count(None) == most}
        if len(followed) > 1:
            return self._add("join", out, count, list(followed.values()), line=line)
        return next(iter(followed.values()), None)

    def _scan(self, eqn: Any, operands: list[View | None], count: int, line: str) -> Sequence[View | None]:
        """A loop: what it carries has one sharding, ahead of each turn and behind it."""
        (body,) = jax_compat.subjaxprs(eqn.params)
        nconsts, ncarry = jax_compat.scan_counts(eqn)
        length = eqn.params["length"]
        inner, carries = count * length, list[Any](body.invars[nconsts : nconsts + ncarry])
        carried = [
            self._add("join", v.aval, inner, [view] if view else [], line=line) if v.aval.shape else None
            for v, view in zip(carries, operands[nconsts:], strict=False)
        ]
        rows = [
            view and dataclasses.replace(view, dims=view.dims[1:], shape=view.shape[1:], count=view.count * length)
            for view in operands[nconsts + ncarry :]
        ]
        results = self._follow(body, [*operands[:nconsts], *carried, *rows], inner, line)
        for carry, result in zip(carried, results, strict=False):
            if carry is not None and result is not None:
                self.nodes.append(Node("close", (), carry.dtype, inner, (result,), line, loop=carry.node))
        stacked = [
            view and view.of(v.aval, (None, *view.dims))
            for v, view in zip(eqn.outvars[ncarry:], results[ncarry:], strict=True)
        ]
        return [view and dataclasses.replace(view, count=count) for view in (*carried, *stacked)]


def _shape(aval: Any) -> tuple[int, ...]:
    """() of a type without a shape."""
    return tuple(getattr(aval, "shape", ()))


def _dtype(aval: Any) -> np.dtype:
    """That of a key's words, where its type is of no number."""
    dtype = getattr(aval, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) else np.dtype("uint32")


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name == "dot_general" or eqn.primitive in PRODUCTS


def _products_in(eqn: Any) -> Iterator[str]:
    """The lines of the products in an equation that is not followed."""
    for body in jax_compat.subjaxprs(eqn.params):
        for inner in body.eqns:
            if _is_product(inner):
                yield jax_compat.traced_line(inner)
            yield from _products_in(inner)


def _indices(eqn: Any) -> Contraction:
    if "spec" in eqn.params:
        batch = "i" if eqn.outvars[0].aval.ndim == 3 else ""
        return in_no_layout(*(batch + indices for indices in eqn.params["spec"].contraction.indices))
    a, b = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return dimension_numbers.parse(eqn.params["dimension_numbers"], a, b).product(a.ndim, b.ndim)


# Operations that move dimensions ---------------------------------------------------------------------------------


def _kept(view: View, shape: Sequence[int]) -> tuple[int | None, ...]:
    """The dimensions whose extents are those of `shape`."""
    return tuple(dim if n == m else None for dim, n, m in zip(view.dims, view.shape, shape, strict=True))


def _moved(eqn: Any, view: View, devices: int) -> list[Sequence[int | None]] | None:
    """Of each result of an operation on one array, the node's dimensions; None where the operation is not followed."""
    name, dims, params = eqn.primitive.name, view.dims, eqn.params
    shapes = [v.aval.shape for v in eqn.outvars]
    if name == "transpose":
        return [[dims[i] for i in params["permutation"]]]
    if name == "squeeze":
        return [[dim for i, dim in enumerate(dims) if i not in params["dimensions"]]]
    if name == "reshape":
        return [_reshaped(view, shapes[0], devices)]
    if name == "broadcast_in_dim":
        of = {j: i for i, j in enumerate(params["broadcast_dimensions"]) if view.shape[i] == shapes[0][j]}
        return [[dims[of[j]] if j in of else None for j in range(len(shapes[0]))]]
    if name in ("slice", "dynamic_slice", "split", "pad"):
        return [_kept(view, shape) for shape in shapes]
    return None


def _reshaped(view: View, shape: Sequence[int], devices: int) -> list[int | None]:
    """Runs of dimensions with equal products; of each the first keeps its shards, if the devices divide both extents.

    Worked example, 4 devices: (8, 16, 32) to (128, 4, 8) keeps dimension 0 as 0, and 2 as 1.
    """
    found: list[int | None] = [None] * len(shape)
    i = j = 0
    while 0 not in shape and i < len(view.shape) and j < len(shape):
        first, have, want = (i, j), view.shape[i], shape[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have, i = have * view.shape[i], i + 1
            else:
                want, j = want * shape[j], j + 1
        # Extents of 1 ahead of the first one that can be sharded.
        of = next((x for x in range(first[0], i) if view.shape[x] > 1), first[0])
        to = next((x for x in range(first[1], j) if shape[x] > 1), first[1])
        if view.shape[of] == shape[to] or math.gcd(view.shape[of], shape[to]) % devices == 0:
            found[to] = view.dims[of]
    return found
