"""The products of a traced function, and from which earlier product or argument each operand comes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp._src.audit.operations import INLINED
from jaxmp._src.hardware.call_time import kind_of
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.primitive.primitives import PRODUCTS, activated_matmul_p
from jaxmp._src.runtime import jax_compat, jax_tracing

_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "complex", "conj"),
    *("convert_element_type", "copy", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2"),
    *("expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt"),
    *("max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pow", "real"),
    *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan"),
    *("tanh", "xor"),
    *("pcast", "pvary", "reshard", "sharding_constraint"),  # the values as they are
}
_OURS = PRODUCTS


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


@dataclasses.dataclass(frozen=True)
class Node:
    """A value whose sharding is chosen.

    Attributes:
      kind: "argument"; "value" of an operation that is not followed; "product"; "join" of operands that an elementwise
        operation takes in one sharding, or of what a loop carries; "close", the end of that loop, which has no value.
      name: of the operation that is not followed, or of the loop's join its index.
      indices: of a product, those of a, b and the result as `jnp.einsum` writes them.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    count: int = 1
    operands: tuple[View, ...] = ()
    line: str = ""
    name: str = ""
    loop: int = -1
    indices: tuple[str, str, str] = ("", "", "")


def chain_of(
    jaxpr: Any, arguments: Sequence[Any], devices: int, hardware: Hardware
) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """(the arguments, which `jaxpr` may not read all, and then the other nodes in the order of the program; products
    that are not counted)."""
    walk = _Walk(devices, hardware)
    views = {v: walk.add("argument", v.aval, 1) for v in arguments}
    walk.follow(jaxpr, [views[v] for v in jaxpr.invars], 1, "")
    return tuple(walk.nodes), tuple(dict.fromkeys(walk.left))


class _Walk:
    """Nodes as they are found, and the products that are not."""

    def __init__(self, devices: int, hardware: Hardware) -> None:
        self.nodes: list[Node] = []
        self.left: list[str] = []
        self._devices, self._hardware = devices, hardware

    def add(self, kind: str, aval: Any, count: int, operands: Sequence[View] = (), **fields: Any) -> View:
        """The view of a new node by itself."""
        shape, dtype = _shape(aval), getattr(aval, "dtype", None)
        if not isinstance(dtype, np.dtype):  # the type of a key
            dtype = np.dtype("uint32")
        self.nodes.append(Node(kind, shape, dtype, count, tuple(operands), **fields))
        return View(len(self.nodes) - 1, tuple(range(len(shape))), shape, dtype, count)

    def follow(
        self, jaxpr: Any, given: Sequence[View | None], count: int, line: str, *, is_ours: bool = False
    ) -> list[View | None]:
        """The views of the results of a jaxpr; None of scalars and of literals."""
        known: dict[Any, View | None] = dict(zip(jaxpr.invars, given, strict=True))
        for v in jaxpr.constvars:
            known[v] = self.add("value", v.aval, 1, name="a constant") if _shape(v.aval) else None

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
        if name == "dot_general" or eqn.primitive in _OURS:
            if (found := self._product(eqn, operands, count, line)) is not None:
                return found
        elif name in INLINED or (name == "shard_map" and is_ours and eqn.params["mesh"].size == 1):
            (body,) = jax_compat.subjaxprs(eqn.params)
            is_ours = is_ours or str(eqn.params.get("name", "")).startswith("jaxmp")
            return self.follow(body, operands, count, line, is_ours=is_ours)
        elif name == "optimization_barrier":
            return operands
        elif name == "scan":
            return self._scan(eqn, operands, count, line)
        elif len(eqn.outvars) == 1 and (name in _ELEMENTWISE or name == "concatenate") and out.shape:
            return [self._merged(operands, out, count, line)]
        elif operands and operands[0] is not None and (dims := _moved(eqn, operands[0], self._devices)):
            return [
                dataclasses.replace(operands[0], dims=each, shape=tuple(v.aval.shape), dtype=v.aval.dtype)
                for v, each in zip(eqn.outvars, dims, strict=True)
            ]
        else:
            self.left += [f"{at or line} inside of {name}" for at in _products_in(eqn)]
        if not any(operands):
            return [None] * len(eqn.outvars)
        return [self.add("value", v.aval, count, name=name) if _shape(v.aval) else None for v in eqn.outvars]

    def _product(self, eqn: Any, operands: list[View | None], count: int, line: str) -> Sequence[View | None] | None:
        """The results of a product, or None where the machine has no rate for its type."""
        is_activated = eqn.primitive is activated_matmul_p
        given = (eqn.invars[0], eqn.invars[-1 if is_activated else 1])
        if kind_of(given[0].aval.dtype.name) not in self._hardware.rates:
            self.left.append(f"{line} of {given[0].aval.dtype.name}")
            return None
        found = [operands[0], operands[-1 if is_activated else 1]]
        views = [
            self.add("value", v.aval, count, name="a constant") if view is None else view
            for view, v in zip(found, given, strict=True)
        ]
        out = eqn.outvars[0].aval
        d = self.add("product", out, count, views, line=line, indices=_indices(eqn))
        if "spec" in eqn.params and eqn.params["spec"].has_c and not is_activated:
            d = self._merged([d, operands[2]], out, count, line) or d
        rest = [v.aval for v in eqn.outvars[1:]]
        return [d, *(dataclasses.replace(d, dtype=x.dtype) if x.shape == out.shape else None for x in rest)]

    def _merged(self, operands: Sequence[View | None], out: Any, count: int, line: str) -> View | None:
        """What an elementwise operation makes. Operands that are broadcast along dimensions in which others are not
        (biases, means, masks) follow those."""
        shape = tuple(out.shape)
        views = [view for view in operands if view is not None and len(view.shape) == len(shape)]
        if not views:
            return None
        dims = [
            tuple(i if n == m else None for i, n, m in zip(view.dims, view.shape, shape, strict=True)) for view in views
        ]
        most = max(len(each) - each.count(None) for each in dims)
        kept = {
            (view.node, each): dataclasses.replace(view, dims=each, shape=shape)
            for view, each in zip(views, dims, strict=True)
            if len(each) - each.count(None) == most
        }
        if len(kept) == 1:
            (view,) = kept.values()
            return dataclasses.replace(view, dtype=np.dtype(out.dtype))
        return self.add("join", out, count, list(kept.values()), line=line)

    def _scan(self, eqn: Any, operands: list[View | None], count: int, line: str) -> Sequence[View | None]:
        """A loop: what it carries has one sharding, ahead of each turn and behind it."""
        (body,) = jax_compat.subjaxprs(eqn.params)
        nconsts, ncarry = jax_compat.scan_counts(eqn)
        length = eqn.params["length"]
        inner = count * length
        types: list[Any] = [v.aval for v in body.invars[nconsts : nconsts + ncarry]]
        carried = [
            self.add("join", aval, inner, [view] if view is not None else [], line=line) if aval.shape else None
            for aval, view in zip(types, operands[nconsts:], strict=False)
        ]
        rows = [
            view and dataclasses.replace(view, dims=view.dims[1:], shape=view.shape[1:], count=view.count * length)
            for view in operands[nconsts + ncarry :]
        ]
        results = self.follow(body, [*operands[:nconsts], *carried, *rows], inner, line)
        for carry, result in zip(carried, results, strict=False):
            if carry is not None and result is not None:
                self.nodes.append(Node("close", (), carry.dtype, inner, (result,), line, loop=carry.node))
        ended = [view and dataclasses.replace(view, count=count) for view in carried]
        stacked = [
            view and dataclasses.replace(view, dims=(None, *view.dims), shape=(length, *view.shape), count=count)
            for view in results[ncarry:]
        ]
        return [*ended, *stacked]


def _shape(aval: Any) -> tuple[int, ...]:
    """() of a type without a shape."""
    return tuple(getattr(aval, "shape", ()))


def _products_in(eqn: Any) -> Iterator[str]:
    """The lines of the products in an equation that is not followed."""
    for body in jax_compat.subjaxprs(eqn.params):
        for inner in body.eqns:
            if inner.primitive.name == "dot_general" or inner.primitive in _OURS:
                yield jax_compat.traced_line(inner)
            yield from _products_in(inner)


def _indices(eqn: Any) -> tuple[str, str, str]:
    """The indices of a product, as `jnp.einsum` writes them."""
    letters = iter(map(chr, itertools.count(ord("a"))))
    if "spec" in eqn.params:
        spec, batch = eqn.params["spec"], next(letters) if eqn.outvars[0].aval.ndim == 3 else ""
        m, k, n = "mkn"
        return (
            f"{batch}{k + m if spec.transpose_a else m + k}",
            f"{batch}{n + k if spec.transpose_b else k + n}",
            (f"{batch}{m}{n}"),
        )
    (of_a, of_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    a = [next(letters) for _ in range(eqn.invars[0].aval.ndim)]
    b = [next(letters) for _ in range(eqn.invars[1].aval.ndim)]
    for i, j in zip((*of_a, *batch_a), (*of_b, *batch_b), strict=True):
        b[j] = a[i]
    d = [a[i] for i in batch_a] + [x for x in a if x not in b] + [x for x in b if x not in a]
    return "".join(a), "".join(b), "".join(d)


# Operations that move dimensions ---------------------------------------------------------------------------------


def _moved(eqn: Any, view: View, devices: int) -> list[tuple[int | None, ...]] | None:
    """Of each result of an operation on one array, the node's dimensions; None where the operation is not followed."""
    name, dims, params = eqn.primitive.name, view.dims, eqn.params
    shapes = [v.aval.shape for v in eqn.outvars]
    if name == "transpose":
        return [tuple(dims[i] for i in params["permutation"])]
    if name == "squeeze":
        return [tuple(dim for i, dim in enumerate(dims) if i not in params["dimensions"])]
    if name == "reshape":
        return [_reshaped(view, shapes[0], devices)]
    if name == "broadcast_in_dim":
        of = {j: i for i, j in enumerate(params["broadcast_dimensions"])}
        kept = {j: i for j, i in of.items() if view.shape[i] == shapes[0][j]}
        return [tuple(dims[kept[j]] if j in kept else None for j in range(len(shapes[0])))]
    if name in ("slice", "dynamic_slice", "split", "pad"):
        return [
            tuple(dim if n == m else None for dim, n, m in zip(dims, view.shape, shape, strict=True))
            for shape in shapes
        ]
    return None


def _reshaped(view: View, shape: Sequence[int], devices: int) -> tuple[int | None, ...]:
    """Runs of dimensions with equal products; of each the first keeps its shards, if the devices divide both extents.

    Worked example, 4 devices: (8, 16, 32) to (128, 4, 8) keeps dimension 0 as 0, and 2 as 1.
    """
    found: list[int | None] = [None] * len(shape)
    if 0 in shape:
        return tuple(found)
    i = j = 0
    while i < len(view.shape) and j < len(shape):
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
    return tuple(found)
