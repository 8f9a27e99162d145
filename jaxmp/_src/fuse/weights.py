"""Finds weights of 8 bits or fewer that a program decodes and multiplies by scales before a product.

    x @ (q.astype(x.dtype) * s)   becomes   (x @ q) * s

A wide type (`WIDE`) represents every narrow number (`NARROW`), so the sums are the same as with decoded weights. A
scale of columns or of the tensor multiplies the sums, in float32, instead of each weight. A scale along the contraction
multiplies the other operand. float32 is wide enough for all products with float16 numbers. For other types, rows of the
other operand near an end of the range are first multiplied by a power of two, and their sums are divided by it.

A scale for each block of k multiplies the sums over its block. Each block becomes a group of rows with its own weights,
and the results of the groups are added. With many rows the results of the groups would take more bytes than the decoded
weights, so then the program stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.lowering import decide
from jaxmp._src.core.ops.ragged_dot import ragged_dot
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.spec.refusal import Refusal
from jaxmp._src.fuse import emit, ragged
from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.graph import GATHERS, PASSES, Graph, each_in_place, read, spliced
from jaxmp._src.fuse.operands import is_auto, is_explicit
from jaxmp._src.fuse.products import SUMS
from jaxmp._src.fuse.scales import Part, Parts, Scale, centred, of_sums, repeated, summable
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# Primitives that move numbers, narrow or wide.
_MOVES = ("transpose", "reshape", "pvary")
_DECODES = frozenset((*_MOVES, "convert_element_type", "mul", "broadcast_in_dim", "squeeze"))
# The dimension numbers of `lax.ragged_dot`.
MATRICES = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_LARGEST = float(np.finfo(np.float32).max)
# Operations that a call does on its result, but not after a factor.
_AFTER = ("reduce_scatter", "reshard", *SUMS)


@dataclasses.dataclass(frozen=True)
class Weights:
    """A decoded operand of a product: a narrow value, the equations that move it, and its scales. A scale is (a value,
    for each of its dimensions the operand's `parts` along which it varies: `scales.Parts`). `ndim`: the operand's."""

    value: Any
    moves: tuple[Any, ...]  # the last one first
    scales: tuple[tuple[Any, tuple[tuple[Part, ...], ...]], ...]
    parts: Parts
    ndim: int

    def plain(self) -> list[Scale] | None:
        """Returns the scales as `Scale`s; None if one varies along a part of a dimension (blocks)."""
        found = [self.parts.scale(value, dims, self.ndim) for value, dims in self.scales]
        return None if any(-1 in scale.dims for scale in found) else found

    def cut(self) -> list[tuple[Any, tuple[tuple[Part, ...], ...]]]:
        """Returns `scales` with the parts as later reshapes have cut them, without parts of extent 1."""
        return [(value, self.parts.of(dims)) for value, dims in self.scales]

    def blocks(self, of_k: Sequence[Part]) -> tuple[Part, ...]:
        """Returns the parts among `of_k` (of the contraction) along which a scale varies."""
        varying = {part for _, dims in self.cut() for dim in dims for part in dim}
        return tuple(part for part in of_k if part in varying)


def with_narrow_weights(graph: Graph, options: Options) -> Graph:
    """Returns the graph with gathers and products that read narrow weights as stored, without equations that are then
    not needed. Returns `graph` itself if no gather or product changes."""
    opened = each_in_place(graph, _of_decoder)
    moved = each_in_place(opened, functools.partial(_of_gather, opened))
    rules = {"dot_general": _of_narrow, "ragged_dot_general": _of_groups}

    def rule(eqn: Any) -> Sequence[Any] | None:
        name = eqn.primitive.name
        return rules[name](moved, options, eqn) if name in rules else None

    narrow = each_in_place(moved, rule)
    return graph if narrow is opened else Graph(jax_tracing.needed(narrow.equations, narrow.results), narrow.results)


def _of_decoder(eqn: Any) -> Sequence[Any] | None:
    """Returns the equations inside a `jit` equation that decodes: it reads a narrow array, does nothing but cast, move,
    repeat and multiply (`_DECODES`), and has no given shardings. Returns None for any other equation."""
    if eqn.primitive.name != "jit" or eqn.effects:
        return None
    jaxpr, consts = jax_tracing.open_jaxpr(eqn.params["jaxpr"])
    types = {getattr(getattr(v.aval, "dtype", None), "name", "") for v in jaxpr.invars}
    is_decoder = not types.isdisjoint(low_precision.NARROW) and _DECODES.issuperset(
        inner.primitive.name for inner in jaxpr.eqns
    )
    made = {v for inner in jaxpr.eqns for v in inner.outvars}
    is_made = not any(map(jax_tracing.is_literal, (*eqn.invars, *jaxpr.outvars))) and made.issuperset(jaxpr.outvars)
    is_free = all(map(jax_tracing.is_unspecified, (*eqn.params["in_shardings"], *eqn.params["out_shardings"])))
    if consts or not (is_decoder and is_made and is_free):
        return None
    return spliced(eqn, functools.partial(jax.core.eval_jaxpr, jaxpr, consts), eqn.invars)


def _of_gather(graph: Graph, eqn: Any) -> Sequence[Any] | None:
    """Returns equations that gather narrow numbers and then multiply by the scales, instead of a gather of decoded
    numbers. Returns None for other equations, scales of blocks, and unless `_is_whole` for each scale."""
    weights = _weights_of(graph, eqn.invars[0]) if eqn.primitive.name in GATHERS else None
    scales: Any = weights and weights.plain()
    if weights is None or scales is None or not all(_is_whole(graph, scale, eqn) for scale in scales):
        return None

    def gather(given: dict[Any, Any]) -> Any:
        (whole,) = jax_tracing.evaluate(eqn, [_moved(weights, given[weights.value])])
        for scale in reversed(scales):
            whole = scale.times(whole.astype(scale.value.aval.dtype), read(given, scale.value))
        return whole.astype(eqn.outvars[0].aval.dtype)

    return _in_place(eqn, gather, [weights.value, *(scale.value for scale in scales)])


def _is_whole(graph: Graph, scale: Scale, eqn: Any) -> bool:
    """True if each rank holds all that it needs of a scale after a gather. At a reshard the scale has to be sharded
    like the result. At an all-gather it may not vary along the gathered dimension or, by its type, between ranks. Under
    check_vma=False types do not tell, so then an all-gather needs a literal scale."""
    if eqn.primitive.name == "reshard":
        return scale.is_sharded_as(eqn.outvars[0].aval)
    v = scale.value
    while (maker := graph.made_by(v)) is not None and maker.primitive.name in (*PASSES, "broadcast_in_dim"):
        v = maker.invars[0]
    is_known = jax_compat.is_vma_checked() or jax_tracing.is_literal(v)
    is_same = is_known and jax_compat.varying_axes(v.aval).isdisjoint(eqn.params["axis_name"])
    return is_same and eqn.params["all_gather_dimension"] not in scale.varying


def _of_narrow(graph: Graph, options: Options, eqn: Any) -> Sequence[Any] | None:
    """Returns equations that compute a `dot_general` from its narrow weights, the larger ones if both operands are
    narrow. Returns None without narrow weights, with a batch, weak types or types not in `WIDE`, and if one scale
    varies along k and along columns. With scales returns None also if only a collective reads the result, if not
    `_are_rows_known`, or if a scale is not sharded like what it multiplies. With scales of blocks returns `_of_blocks`,
    or None if the level has a fixed order of sums."""
    (contract, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    dtypes = [v.aval.dtype.name for v in eqn.invars]
    # A call of two types gives a weakly typed operand a weakly typed cotangent, but JAX's product does not.
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
    other, plain = eqn.invars[1 - side], weights.plain()
    if plain is None:
        return None if options.level.fixed_order else _of_blocks(eqn, side, weights)  # XLA adds the sums of blocks
    free = [[i for i in range(v.aval.ndim) if i not in dims] for v, dims in zip(eqn.invars, contract, strict=True)]
    first = len(free[0]) if side else 0  # dimension of the result
    of_result, of_other = [], []
    for scale in plain:
        if set(scale.varying) <= set(free[side]):
            of_result.append(scale.along({d: first + i for i, d in enumerate(free[side])}))
        elif set(scale.varying) <= set(contract[side]):
            of_other.append(scale.along(dict(zip(contract[side], contract[1 - side], strict=True))))
        else:
            return None
    rows, start = free[1 - side], 0 if side else len(free[0])
    of_rows = Scale(other, tuple(start + rows.index(i) if i in rows else None for i in range(other.aval.ndim)))
    if plain and (_is_moved_after(graph, eqn.outvars[0]) or not _are_rows_known(graph, of_rows, out, options)):
        return None
    if not all(s.is_sharded_as(out) for s in of_result) or not all(s.is_sharded_as(other.aval) for s in of_other):
        return None

    def multiply(given: dict[Any, Any]) -> jax.Array:
        x, q, powers = given[other], _moved(weights, given[weights.value]), []
        x, of_x = summable(x, contract[1 - side]) if plain else (x, None)
        for scale in of_other:
            factor, power = centred(jnp.asarray(read(given, scale.value)))
            powers.append(power.reshape(()))
            x = scale.times(x.astype(np.float32) if x.dtype == np.float16 else x, factor)
        d = lax.dot_general(
            *((q, x) if side == 0 else (x, q)),
            eqn.params["dimension_numbers"],
            eqn.params["precision"],
            jnp.float32 if plain else out.dtype,
            out_sharding=eqn.params["out_sharding"],
        )
        for power in powers:
            d = d * jnp.minimum(power, 1)
        for scale in of_result:
            d = scale.times(d, of_sums(read(given, scale.value)))
        for power in powers:
            d = d * jnp.maximum(power, 1)
        return (d if of_x is None else of_rows.times(d, of_x)).astype(out.dtype)

    return _in_place(eqn, multiply, [other, weights.value, *(scale.value for scale in (*of_result, *of_other))])


def _in_place(
    eqn: Any, multiply: Callable[[dict[Any, Any]], jax.Array], operands: Sequence[Any]
) -> Sequence[Any] | None:
    """Returns equations that compute the result of `eqn` by `multiply`, to replace `eqn`; None if its result has
    another type. `multiply` takes the values of the variables `operands`, as a dictionary."""
    variables, is_same = [v for v in operands if not jax_tracing.is_literal(v)], True

    def program(*arrays: Any) -> list[Any]:
        nonlocal is_same
        d = multiply(dict(zip(variables, arrays, strict=True)))
        is_same = jax_tracing.is_type_of(eqn.outvars[0].aval, d)
        return [d]

    equations = spliced(eqn, program, variables)
    return equations if is_same else None


def _moved(weights: Weights, q: Any) -> Any:
    """Returns the narrow array `q`, moved (transposed, reshaped) as the program moves `weights.value`."""
    for move in reversed(weights.moves):
        (q,) = jax_tracing.evaluate(move, [q])
    return q


def _of_blocks(eqn: Any, side: int, weights: Weights) -> Sequence[Any] | None:
    """Returns equations that compute a `dot_general` from the narrow operand `side` (0: lhs, 1: rhs), with scales of
    contiguous blocks of k, as a `ragged_dot` with a group for each block. Returns None on other platforms than CPUs, on
    explicit axes, if the program transposes the narrow numbers, if k is not first in them or its blocks are not
    contiguous, and if rows times blocks are more than a quarter of k."""
    contract, out, other = eqn.params["dimension_numbers"][0], eqn.outvars[0].aval, eqn.invars[1 - side]
    rows = [i for i in range(other.aval.ndim) if i not in contract[1 - side]]
    shape, parts = eqn.invars[side].aval.shape, weights.parts
    count = len(contract[side])
    of_k, of_n = (sum(parts.of([[(i,)] for i in dims]), ()) for dims in (range(count), range(count, len(shape))))
    scales, blocks = weights.cut(), weights.blocks(of_k)
    m, k, n = math.prod(other.aval.shape[i] for i in rows), math.prod(shape[:count]), math.prod(shape[count:])
    groups = math.prod(parts.sizes[part] for part in blocks)
    # Up to this many rows the groups' results take no more bytes than the weights, and less time than decoding.
    is_worth = 4 * m * groups <= k and blocks == of_k[: len(blocks)] and tuple(contract[side]) == tuple(range(count))
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if not is_worth or decide.here().platform != "cpu" or any(map(is_explicit, avals)):
        return None
    if any(move.primitive.name == "transpose" for move in weights.moves):
        return None

    def multiply(given: dict[Any, Any]) -> jax.Array:
        x = lax.transpose(given[other], (*rows, *contract[1 - side])).reshape(m, groups, k // groups)
        x, power = summable(x.swapaxes(0, 1).reshape(m * groups, -1), (1,))
        q = _moved(weights, given[weights.value])
        d = lax.ragged_dot(
            x,
            q.reshape(groups, k // groups, n),
            jnp.full(groups, m, jnp.int32),
            precision=eqn.params["precision"],
            preferred_element_type=jnp.float32,
        ).reshape(groups, m, n)
        for value, dims in scales:
            d = d * parts.spread(read(given, value), dims, (*blocks, *of_n)).reshape(groups, 1, n)
        d = (d * power.reshape(groups, m, 1)).sum(0).astype(out.dtype)
        return (d if side else d.T).reshape(out.shape)

    return _in_place(eqn, multiply, [other, weights.value, *(value for value, _ in scales)])


def _of_groups(graph: Graph, options: Options, eqn: Any) -> Sequence[Any] | None:
    """Returns equations that compute a `lax.ragged_dot` from narrow matrices. Returns None without narrow matrices, for
    weak types or types not in `WIDE`, for other dimension numbers, if XLA would multiply, and if shardings do not fit.
    With scales returns None unless `_are_rows_known`. With scales of blocks of k returns None if the level has a fixed
    order of sums, if the blocks are not contiguous, and if rows times blocks are more than a quarter of k times the
    number of matrices."""
    (x, w, sizes), out = eqn.invars, eqn.outvars[0].aval
    is_left = eqn.params["ragged_dot_dimension_numbers"] != MATRICES or any(v.aval.weak_type for v in (x, w))
    dtypes = {v.dtype.name for v in (x.aval, w.aval, out)}
    weights = None if is_left or not dtypes <= set(low_precision.WIDE) else _weights_of(graph, w)
    if weights is None or ragged.is_of_xla(eqn, options):
        return None
    parts = weights.parts
    of_g, of_k, of_n = parts.of([[(i,)] for i in range(3)])
    scales, blocks = weights.cut(), weights.blocks(of_k)
    (m, k), (g, _, n) = x.aval.shape, w.aval.shape
    count = math.prod(parts.sizes[part] for part in blocks)
    if blocks and (options.level.fixed_order or blocks != of_k[: len(blocks)] or 4 * m * count > g * k):
        return None
    if scales and not _are_rows_known(graph, Scale(x, (0, None)), out, options):
        return None

    def multiply(given: dict[Any, Any]) -> jax.Array:
        factors = [parts.spread(read(given, value), dims, (*of_g, *blocks, *of_n)) for value, dims in scales]
        factor = jnp.clip(math.prod(factors, start=jnp.float32(1)), -_LARGEST, _LARGEST)  # so that 0 times it is 0
        rows, power = summable(given[x], (1,)) if scales else (given[x], None)
        d = ragged_dot(
            rows,
            _moved(weights, given[weights.value]),
            given[sizes],
            scaling=Scaling(b=factor.reshape((g, count, n) if blocks else (g, n))) if factors else None,
            precision=eqn.params["precision"],
            preferred_element_type=out.dtype,
            out_sharding=emit.out_sharding(out),
            implementation=options.implementation,
            **options.level.option,
        )
        return d if power is None else d * power.astype(d.dtype)

    try:
        return _in_place(eqn, multiply, [x, weights.value, sizes, *(value for value, _ in scales)])
    except Refusal:  # if the shardings do not fit together
        return None


def _are_rows_known(graph: Graph, rows: Scale, out: Any, options: Options) -> bool:
    """True if a device knows the largest number in each row of an operand without communication, and always for
    float16, which does not need it. False on automatic axes, after a gather, if the result's rows are sharded in
    another way, and under a global order, where no form may depend on shardings. `rows`: the operand as a Scale, with
    the result's dimensions of its rows. `out`: the result's type."""
    v = rows.value
    if options.level.global_order:
        return False
    if v.aval.dtype == np.float16:
        return True
    is_here = not is_auto(v.aval) and rows.is_sharded_as(out)
    while (eqn := graph.made_by(v)) is not None and eqn.primitive.name in PASSES:
        v = eqn.invars[0]
    return is_here and (eqn is None or eqn.primitive.name not in GATHERS)


def _is_moved_after(graph: Graph, v: Any) -> bool:
    """True if only a collective (psum, reduce_scatter, reshard) reads `v`, perhaps cast or transposed."""
    while (i := graph.only_reader(v)) is not None:
        eqn = graph.equations[i]
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            return eqn.primitive.name in _AFTER
        v = eqn.outvars[0]
    return False


def _weights_of(graph: Graph, v: Any) -> Weights | None:
    """Returns the narrow weights of `v`, if the program only casts, moves and multiplies them by scales; else None."""
    moves: tuple[Any, ...] = ()
    scales: tuple[Any, ...] = ()
    parts, ndim = Parts(v.aval.shape), v.aval.ndim
    dims: Any = tuple(((i,),) for i in range(ndim))  # of v
    while (eqn := graph.made_by(v)) is not None:
        name = eqn.primitive.name
        if name == "convert_element_type":
            v = eqn.invars[0]
            if v.aval.dtype.name in low_precision.NARROW:
                return Weights(v, moves, scales, parts, ndim)
            if v.aval.dtype.name not in low_precision.WIDE:
                return None
        elif name == "mul" and dims is not None:
            found = _factors(graph, eqn, parts, parts.of(dims))
            if found is None:
                return None
            v, scales = found[0], (*scales, found[1])
        elif name in _MOVES:
            permutation = eqn.params.get("permutation")
            if dims is not None and permutation is not None:
                dims = tuple(dims[permutation.index(i)] for i in range(len(dims)))
            v, moves = eqn.invars[0], (*moves, eqn)
            dims = parts.reshaped(dims, v.aval.shape) if dims is not None and name == "reshape" else dims
        else:
            return None
    return None


def _factors(graph: Graph, eqn: Any, parts: Parts, dims: Any) -> tuple[Any, Any] | None:
    """Returns (the full factor, (value, along)) of the multiplication `eqn`. The full factor has the result's shape.
    The other factor repeats `value`, which varies along the parts `along`. `dims`: the parts of the result. Returns
    None if no factor repeats a value."""
    for v, other in (eqn.invars, eqn.invars[::-1]):
        if jax_tracing.is_literal(v) or v.aval.shape != eqn.outvars[0].aval.shape:
            continue
        value, along = repeated(graph, other, parts, dims)
        if sum(map(len, parts.of(along))) < sum(map(len, parts.of(dims))):
            return v, (value, along)
    return None
