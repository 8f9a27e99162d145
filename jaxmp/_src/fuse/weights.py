"""Weights of 8 bits and fewer as models write them: decoded, and multiplied by scales, ahead of a product.

    x @ (q.astype(x.dtype) * s)   becomes   (x @ q) * s

A wide type has every narrow number, so the sums are those of the decoded weights. A scale of whole columns, or of the
tensor, multiplies the sums, in float32, rather than each weight, and one along the contraction the other operand. A
scale for each block of k does neither: its weights stay decoded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.fuse.graph import Graph, read, spliced
from jaxmp._src.fuse.operands import axes_of_type, is_explicit
from jaxmp._src.fuse.products import SUMS
from jaxmp._src.jax_internals import jax_tracing
from jaxmp._src.spec import low_precision

Dims = tuple[int, ...]
# What moves numbers, as well narrow as wide.
_MOVES = ("transpose", "reshape", "pvary")
_DECODES = frozenset((*_MOVES, "convert_element_type", "mul", "broadcast_in_dim", "squeeze"))
# What a call does to its result, and does not do behind a factor.
_BEHIND = ("reduce_scatter", "reshard", *SUMS)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A factor of an array: `value`, and for each of its dimensions that of the array, or None for one of size 1."""

    value: Any
    dims: tuple[int | None, ...] = ()

    @property
    def varying(self) -> Dims:
        return tuple(d for d in self.dims if d is not None)

    def along(self, order: Mapping[int, int] | Sequence[int]) -> Scale:
        """The same where dimension i of the array is dimension `order[i]` of another."""
        return Scale(self.value, tuple(None if d is None else order[d] for d in self.dims))

    def lies_as(self, aval: Any) -> bool:
        """Whether it is sharded as an array of this type, where shardings are part of types."""
        if not self.varying or not is_explicit(aval):
            return True
        own, axes = axes_of_type(self.value.aval), axes_of_type(aval)
        return all(own[i] == (() if d is None else axes[d]) for i, d in enumerate(self.dims))

    def times(self, x: jax.Array, value: Any) -> jax.Array:
        """x times it, in float32, in the type of x."""
        factor = lax.squeeze(jnp.asarray(value, jnp.float32), [i for i, d in enumerate(self.dims) if d is None])
        factor = lax.transpose(factor, sorted(range(factor.ndim), key=self.varying.__getitem__))
        if self.varying:
            factor = lax.expand_dims(factor, [d for d in range(x.ndim) if d not in self.varying])
        return (x.astype(jnp.float32) * factor).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Weights:
    """What an operand of a product is made of: a narrow value, equations that move it, and scales."""

    value: Any
    moves: tuple[Any, ...]  # from the last one back
    scales: tuple[Scale, ...]


def with_narrow_weights(graph: Graph) -> Graph:
    """The same, where a product reads weights that are stored narrow as they are."""
    opened = _each_in_place(graph, _of_decoder)
    narrow = _each_in_place(opened, functools.partial(_of_narrow, opened))
    return graph if narrow is opened else Graph(jax_tracing.needed(narrow.equations, narrow.results), narrow.results)


def _each_in_place(graph: Graph, rule: Callable[[Any], Sequence[Any] | None]) -> Graph:
    """The same with other equations in place of those for which a rule has some."""
    parts = [rule(eqn) for eqn in graph.equations]
    if not any(parts):
        return graph
    equations = (part or [eqn] for eqn, part in zip(graph.equations, parts, strict=True))
    return Graph(list(itertools.chain(*equations)), graph.results)


def _of_decoder(eqn: Any) -> Sequence[Any] | None:
    """The equations of a jitted function that decodes an array."""
    if eqn.primitive.name not in ("jit", "pjit") or eqn.effects:
        return None
    jaxpr, consts = jax_tracing.open_jaxpr(eqn.params["jaxpr"])
    types = {getattr(getattr(v.aval, "dtype", None), "name", "") for v in jaxpr.invars}
    made = {v for inner in jaxpr.eqns for v in inner.outvars}
    is_decoder = not types.isdisjoint(low_precision.NARROW) and _DECODES.issuperset(
        inner.primitive.name for inner in jaxpr.eqns
    )
    if (
        not is_decoder
        or any(map(jax_tracing.is_literal, (*eqn.invars, *jaxpr.outvars)))
        or not made >= {*jaxpr.outvars}
    ):
        return None
    if not all(map(jax_tracing.is_unspecified, (*eqn.params["in_shardings"], *eqn.params["out_shardings"]))):
        return None

    def program(*args: Any) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        jax_tracing.evaluate_each(jaxpr.eqns, values)
        return [read(values, v) for v in jaxpr.outvars]

    return spliced(eqn, program, eqn.invars)


def _of_narrow(graph: Graph, eqn: Any) -> Sequence[Any] | None:
    """The equations of a `dot_general` that reads narrow weights, or None where none are found."""
    if eqn.primitive.name != "dot_general":
        return None
    (contract, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    dtypes = [v.aval.dtype.name for v in eqn.invars]
    # Of a weakly typed operand a call of two types has a weakly typed cotangent, and JAX's product not.
    if (
        any(batch)
        or any(v.aval.weak_type for v in eqn.invars)
        or not {out.dtype.name, *dtypes} <= set(low_precision.WIDE)
    ):
        return None
    found = [(side, w) for side, v in enumerate(eqn.invars) if (w := _weights_of(graph, v)) is not None]
    if not found:
        return None
    side, weights = max(found, key=lambda each: math.prod(each[1].value.aval.shape))
    other = eqn.invars[1 - side]
    free = [[i for i in range(v.aval.ndim) if i not in dims] for v, dims in zip(eqn.invars, contract, strict=True)]
    first = len(free[0]) if side else 0  # dimension of the result
    of_result, of_other = [], []
    for scale in weights.scales:
        if set(scale.varying) <= set(free[side]):
            of_result.append(scale.along({d: first + i for i, d in enumerate(free[side])}))
        elif set(scale.varying) <= set(contract[side]):
            of_other.append(scale.along(dict(zip(contract[side], contract[1 - side], strict=True))))
        else:
            return None
    if of_result and _is_moved_behind(graph, eqn.outvars[0]):
        return None
    if not all(s.lies_as(out) for s in of_result) or not all(s.lies_as(other.aval) for s in of_other):
        return None
    scales = [*of_result, *of_other]
    operands = [other, weights.value, *(scale.value for scale in scales if not jax_tracing.is_literal(scale.value))]
    is_same = True

    def multiply(*arrays: Any) -> list[Any]:
        nonlocal is_same
        given = dict(zip(operands, arrays, strict=True))
        x, q = given[other], given[weights.value]
        for move in reversed(weights.moves):
            (q,) = jax_tracing.evaluate(move, [q])
        for scale in of_other:
            x = scale.times(x, read(given, scale.value))
        d = lax.dot_general(
            *((q, x) if side == 0 else (x, q)),
            eqn.params["dimension_numbers"],
            eqn.params["precision"],
            jnp.float32 if of_result else out.dtype,
            out_sharding=eqn.params["out_sharding"],
        )
        for scale in of_result:
            d = scale.times(d, read(given, scale.value))
        d = d.astype(out.dtype)
        is_same = jax_tracing.is_type_of(out, d)
        return [d]

    equations = spliced(eqn, multiply, operands)
    return equations if is_same else None


def _is_moved_behind(graph: Graph, v: Any) -> bool:
    """Whether a result goes to a collective, which its call does then."""
    while (i := graph.only_reader(v)) is not None:
        eqn = graph.equations[i]
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            return eqn.primitive.name in _BEHIND
        v = eqn.outvars[0]
    return False


def _weights_of(graph: Graph, v: Any) -> Weights | None:
    """What decoding made an operand of, or None."""
    moves: tuple[Any, ...] = ()
    scales: tuple[Scale, ...] = ()
    order: Dims | None = tuple(range(v.aval.ndim))  # of the operand's dimensions, those of v; None: others
    while (eqn := graph.made_by(v)) is not None:
        name = eqn.primitive.name
        if name == "convert_element_type":
            v = eqn.invars[0]
            if v.aval.dtype.name in low_precision.NARROW:
                return Weights(v, moves, scales)
            if v.aval.dtype.name not in low_precision.WIDE:
                return None
        elif name == "mul" and order is not None:
            found = _factors(graph, eqn)
            if found is None:
                return None
            v, scales = found[0], (*scales, found[1].along(order))
        elif name in _MOVES:
            permutation = eqn.params.get("permutation")
            if order is not None and permutation is not None:
                order = tuple(order[permutation.index(d)] for d in range(len(order)))
            order = None if name == "reshape" else order
            v, moves = eqn.invars[0], (*moves, eqn)
        else:
            return None
    return None


def _factors(graph: Graph, eqn: Any) -> tuple[Any, Scale] | None:
    """(the factor that has all numbers of a product of two arrays, what the other one repeats)."""
    for v, other in (eqn.invars, eqn.invars[::-1]):
        if jax_tracing.is_literal(v) or v.aval.shape != eqn.outvars[0].aval.shape:
            continue
        scale = _repeated(graph, other)
        if len(scale.varying) < sum(extent > 1 for extent in v.aval.shape):
            return v, scale
    return None


def _repeated(graph: Graph, v: Any) -> Scale:
    """What an array repeats."""
    scale = Scale(v, tuple(i if extent > 1 else None for i, extent in enumerate(v.aval.shape)))
    while (eqn := graph.made_by(scale.value)) is not None and eqn.primitive.name == "broadcast_in_dim":
        x, dims = eqn.invars[0], eqn.params["broadcast_dimensions"]
        if jax_tracing.is_literal(x) or len(eqn.invars) > 1:
            break
        scale = Scale(x, tuple(scale.dims[d] if n > 1 else None for d, n in zip(dims, x.aval.shape, strict=True)))
    return scale
