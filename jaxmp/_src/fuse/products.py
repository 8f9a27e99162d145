"""What stands around a product in a jaxpr, and what of it one call of jaxmp can do.

A product takes in, from its operands back, transposes, casts, and gathers that nothing else needs; from its result on,
in this order, one cast, one transpose, one collective, a scalar factor, a bias, and an activation or an addition.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxmp._src.fuse.graph import RESULT, Graph
from jaxmp._src.fuse.templates import ACTIVATIONS, Templates
from jaxmp._src.runtime import jax_compat, jax_tracing
from jaxmp._src.spec.options import ActivationName

Dims = tuple[int, ...]
GATHERS = ("all_gather",)
SUMS = ("psum", "psum_invariant")


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather inside shard_map: of dimension `dimension` over `axes`."""

    axes: tuple[str, ...]
    dimension: int


class Aux:
    """The aux of an epilog, which no value of the jaxpr is."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """What a product reads: `value`, cast to `dtype`, with its own dimension numbers; `gather` where it is a shard."""

    value: Any
    dtype: np.dtype
    contract: Dims
    batch: Dims
    equations: frozenset[int] = frozenset()
    gather: Gather | None = None
    is_resharded: bool = False

    @property
    def ndim(self) -> int:
        return len(self.value.aval.shape)

    @property
    def free(self) -> Dims:
        return tuple(i for i in range(self.ndim) if i not in self.contract + self.batch)


@dataclasses.dataclass(frozen=True)
class Product:
    """One `dot_general` with what one call does of its surroundings; `result` is the value that the call gives."""

    index: int
    lhs: Operand
    rhs: Operand
    result: Any
    equations: frozenset[int]
    precision: Any
    dtype: np.dtype  # of the result
    is_swapped: bool = False  # rhs's free dimensions come first in the result
    collective: Any = None  # the equation behind it, inside shard_map
    is_resharded: bool = False  # its result, outside
    alpha: Any = None
    bias: Any = None
    activation: ActivationName | None = None
    preactivation: Any = None  # where other equations read it as well
    aux: Any = None  # of the activation, where another product's epilog reads it
    c: Any = None
    before: Product | None = None  # without the activation, or c

    @property
    def x(self) -> Operand:
        """The operand whose free dimensions come first in the result."""
        return self.rhs if self.is_swapped else self.lhs

    @property
    def w(self) -> Operand:
        return self.lhs if self.is_swapped else self.rhs

    @property
    def is_matrix(self) -> bool:
        """Whether it is x (..., k) times w, (k, n) or (n, k)."""
        x, w = self.x, self.w
        return not x.batch and x.contract == (x.ndim - 1,) and w.ndim == 2 and len(w.contract) == 1

    @property
    def epilog(self) -> str:
        names = [("c", self.c), ("bias", self.bias), (self.activation or "", self.activation)]
        return "+".join(name for name, value in names if value is not None and name)

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything for it or for its gradients, by the shardings or by collectives."""
        if self.collective is not None or self.lhs.gather or self.rhs.gather:
            return True
        if self.lhs.is_resharded or self.rhs.is_resharded or self.is_resharded:
            return True
        # Of an operand that the ranks share, the gradient is summed over them, in the call that it becomes.
        return not self.lhs.batch and _is_shared(self.lhs.value.aval, self.rhs.value.aval)


def _is_shared(a: Any, b: Any) -> bool:
    """Whether ranks hold parts of one operand that others have whole, or of the contraction."""
    if jax_tracing.manual_axes():
        return jax_compat.varying_axes(a) != jax_compat.varying_axes(b)
    return any(any(_axes(aval)) for aval in (a, b) if is_explicit(aval))


def _axes(aval: Any) -> tuple[tuple[str, ...], ...]:
    """The explicit axes over which each dimension is sharded."""
    spec = aval.sharding.spec
    entries = [spec[i] if i < len(spec) else None for i in range(len(aval.shape))]
    return tuple(
        () if e is None or not isinstance(e, str | tuple) else (e,) if isinstance(e, str) else e for e in entries
    )


def is_auto(aval: Any) -> bool:
    """Whether XLA's partitioner decides how a value of this type is sharded, as far as tracing knows."""
    mesh = aval.sharding.mesh if not aval.sharding.mesh.empty else jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def is_explicit(aval: Any) -> bool:
    """Whether shardings are part of the type."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types if not aval.sharding.mesh.empty else False


# Gathers ---------------------------------------------------------------------------------------------------------


def shared_gathers(graph: Graph, *, in_place: bool) -> frozenset[int]:
    """Indices of the gathers that products can take in, so that the gathered value is never made.

    With several readers each product would gather anew, but where they read the shards `in_place`.
    """
    found = set()
    for i, eqn in enumerate(graph.equations):
        if not _is_gather(eqn):
            continue
        ends = list(_ends(graph, eqn.outvars[0]))
        takes = [graph.equations[j].primitive.name == "dot_general" for j in ends if j != RESULT]
        if not ends or RESULT in ends or not all(takes) or (len(ends) > 1 and not in_place):
            continue
        if all(_takes_gather(graph, j, i) for j in ends):
            found.add(i)
    return frozenset(found)


def _is_gather(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "reshard":
        if jax_tracing.is_literal(eqn.invars[0]) or not all(is_explicit(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return False
        have, want = (_axes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        return have != want and all(set(w) <= set(h) for h, w in zip(have, want, strict=True))
    if name not in GATHERS:
        return False
    return bool(eqn.params["tiled"]) and eqn.params.get("axis_index_groups") is None


def _ends(graph: Graph, v: Any) -> list[int]:
    """Who reads a value, behind casts and transposes."""
    ends: list[int] = []
    for i in graph.readers(v):
        if i != RESULT and graph.equations[i].primitive.name in _PASSES:
            ends += _ends(graph, graph.equations[i].outvars[0])
        else:
            ends.append(i)
    return ends


def _takes_gather(graph: Graph, dot: int, gather: int) -> bool:
    """Whether a product reads this gather in a place where a call can gather."""
    eqn: Any = graph.equations[dot]
    contract, batch = eqn.params["dimension_numbers"]
    for side, v in enumerate(eqn.invars):
        operand = _operand(graph, v, contract[side], batch[side], frozenset((gather,)))
        if gather not in operand.equations:
            continue
        if operand.gather is None:  # a reshard, which the call's layout sees to
            return True
        # Inside shard_map a call gathers the rows of an lhs whose rhs is a matrix.
        is_row = operand.free and operand.gather.dimension in (operand.free[0], operand.free[-1])
        return side == 0 and bool(is_row) and len(eqn.invars[1].aval.shape) == 2 and not batch[0]
    return False


def reads_gathered(graph: Graph, index: int) -> bool:
    """Whether a product's operand is gathered ahead of it."""
    for v in graph.equations[index].invars:
        while (eqn := graph.made_by(v)) is not None and eqn.primitive.name in _PASSES:
            v = eqn.invars[0]
        if eqn is not None and _is_gather(eqn):
            return True
    return False


# What may stand between a gather and a product.
_PASSES = ("transpose", "convert_element_type", "pvary")

# Operands --------------------------------------------------------------------------------------------------------


def _operand(graph: Graph, v: Any, contract: Dims, batch: Dims, gathers: frozenset[int]) -> Operand:
    """What a product reads for `v`: back to where a gather that it takes in starts, or over transposes alone."""
    dtype = v.aval.dtype
    now = best = Operand(v, dtype, tuple(contract), tuple(batch))
    while (eqn := graph.made_by(now.value)) is not None:
        i, name = graph.producer[now.value], eqn.primitive.name
        is_only = graph.only_reader(now.value) is not None
        taken = now.equations | {i}
        if i in gathers and now.gather is None and not jax_tracing.is_literal(eqn.invars[0]):
            if name == "reshard":
                now = best = dataclasses.replace(now, value=eqn.invars[0], equations=taken, is_resharded=True)
                continue
            axes = eqn.params["axis_name"]
            gather = Gather((axes,) if isinstance(axes, str) else tuple(axes), eqn.params["all_gather_dimension"])
            now = best = dataclasses.replace(now, value=eqn.invars[0], equations=taken, gather=gather)
            continue
        if not is_only and not gathers:
            break
        if name == "transpose" and now.gather is None and not jax_tracing.is_literal(eqn.invars[0]):
            permutation = eqn.params["permutation"]
            moved = dataclasses.replace(
                now,
                value=eqn.invars[0],
                contract=tuple(permutation[d] for d in now.contract),
                batch=tuple(permutation[d] for d in now.batch),
                equations=taken,
            )
            if [permutation[d] for d in now.free] != sorted(permutation[d] for d in now.free):
                break
            now = moved
            best = now if best.equations == now.equations - {i} and best.gather is None else best
            continue
        if name in ("convert_element_type", "pvary") and _is_widening_free(eqn):
            now = dataclasses.replace(now, value=eqn.invars[0], equations=taken)
            continue
        break
    return best


def _is_widening_free(eqn: Any) -> bool:
    """Whether a cast may follow a gather as well as come ahead of it: elementwise, of floating-point numbers."""
    if jax_tracing.is_literal(eqn.invars[0]):
        return False
    return bool(jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating))


# Products --------------------------------------------------------------------------------------------------------


def find(
    graph: Graph, index: int, gathers: frozenset[int], templates: Templates, *, epilogs: bool, manual: bool
) -> Product:
    """The product of a `dot_general`, with what it can take in."""
    eqn: Any = graph.equations[index]
    contract, batch = eqn.params["dimension_numbers"]
    lhs, rhs = (_operand(graph, v, contract[side], batch[side], gathers) for side, v in enumerate(eqn.invars))
    product = Product(
        index,
        lhs,
        rhs,
        eqn.outvars[0],
        frozenset((index,)) | lhs.equations | rhs.equations,
        eqn.params["precision"],
        np.dtype(eqn.outvars[0].aval.dtype),
    )
    product = _with_cast(graph, product)
    product = _with_transpose(graph, product)
    product = _with_collective(graph, product, manual=manual)
    if not epilogs or not product.is_matrix or not jnp.issubdtype(product.dtype, jnp.floating):
        return product
    product = _with_alpha(graph, product)
    product = _with_bias(graph, product)
    found = _with_activation(graph, product, templates)
    return found if found.activation else _with_c(graph, product)


def _next(graph: Graph, product: Product, name: str) -> tuple[int, Any] | None:
    """(index, equation) of the only reader of the result, if it is of this primitive."""
    i = graph.only_reader(product.result)
    return (i, graph.equations[i]) if i is not None and graph.equations[i].primitive.name == name else None


def _after(product: Product, i: int, eqn: Any, **changes: Any) -> Product:
    return dataclasses.replace(product, result=eqn.outvars[0], equations=product.equations | {i}, **changes)


def _with_cast(graph: Graph, product: Product) -> Product:
    """A sum in float32 that is cast to the operands' 16 bits is rounded once either way."""
    found = _next(graph, product, "convert_element_type")
    if found is None or product.dtype != np.float32 or found[1].params["new_dtype"] != product.lhs.dtype:
        return product
    is_narrow = product.lhs.dtype == product.rhs.dtype and product.lhs.dtype.itemsize == 2
    return _after(product, *found, dtype=np.dtype(product.lhs.dtype)) if is_narrow else product


def _with_transpose(graph: Graph, product: Product) -> Product:
    """A result whose rows and columns change places is the product of its operands in the other order."""
    found = _next(graph, product, "transpose")
    if found is None or product.lhs.batch:
        return product
    rows, cols = len(product.lhs.free), len(product.rhs.free)
    swapped = (*range(rows, rows + cols), *range(rows))
    return _after(product, *found, is_swapped=True) if found[1].params["permutation"] == swapped else product


def _with_collective(graph: Graph, product: Product, *, manual: bool) -> Product:
    if not manual:
        found = _next(graph, product, "reshard")
        if found is None or not is_explicit(product.result.aval) or not is_explicit(found[1].outvars[0].aval):
            return product
        return _after(product, *found, is_resharded=True)
    if product.lhs.gather or not product.is_matrix or product.is_swapped:
        return product
    for name in ("reduce_scatter", *SUMS):
        found = _next(graph, product, name)
        if found is None or len(found[1].invars) != 1 or found[1].params.get("axis_index_groups") is not None:
            continue
        rows = product.lhs.ndim - 1
        if name == "reduce_scatter":
            params = found[1].params
            if not params["tiled"] or params["scatter_dimension"] not in (0, rows - 1):
                continue
        return _after(product, *found, collective=found[1])
    return product


def _with_alpha(graph: Graph, product: Product) -> Product:
    found = _next(graph, product, "mul")
    if found is None:
        return product
    scalars = [v for v in found[1].invars if jax_tracing.is_literal(v) and np.ndim(v.val) == 0]
    return _after(product, *found, alpha=float(scalars[0].val)) if len(scalars) == 1 else product


def _with_bias(graph: Graph, product: Product) -> Product:
    found = _next(graph, product, "add")
    if found is None:
        return product
    i, eqn = found
    others = [v for v in eqn.invars if v is not product.result]
    columns = product.result.aval.shape[-1]
    if len(others) != 1 or (bias := _broadcast_vector(graph, others[0], columns)) is None:
        return product
    value, equations = bias
    if value.aval.dtype != product.dtype or eqn.outvars[0].aval.shape != product.result.aval.shape:
        return product
    kept = equations if all(graph.only_reader(graph.equations[j].outvars[0]) is not None for j in equations) else ()
    return dataclasses.replace(_after(product, i, eqn, bias=value), equations=product.equations | {i} | frozenset(kept))


def _broadcast_vector(graph: Graph, v: Any, columns: int) -> tuple[Any, tuple[int, ...]] | None:
    """(the vector of `columns` numbers that `v` repeats along its last dimension, the equations that do it)."""
    equations: tuple[int, ...] = ()
    while (eqn := graph.made_by(v)) is not None and not jax_tracing.is_literal(eqn.invars[0]):
        name, (x, *rest) = eqn.primitive.name, eqn.invars
        last = len(v.aval.shape) - 1
        if name == "broadcast_in_dim" and not rest and eqn.params["broadcast_dimensions"][-1:] == (last,):
            ones = math.prod(x.aval.shape[:-1]) == 1
        elif name == "reshape":
            ones = math.prod(x.aval.shape[:-1]) == 1 and x.aval.shape[-1:] == v.aval.shape[-1:]
        else:
            break
        if not ones or x.aval.shape[-1:] != (columns,):
            break
        equations, v = (*equations, graph.producer[v]), x
    return (v, equations) if v.aval.shape == (columns,) and equations else None


def _with_activation(graph: Graph, product: Product, templates: Templates) -> Product:
    if product.alpha is not None:
        return product
    for name, function in ACTIVATIONS:
        match = templates.find(graph, function, (product.result,))
        if match is None or match.output.aval.dtype != product.dtype:
            continue
        if graph.leaks(match.equations, (match.output,)):
            continue
        is_kept = not match.equations.issuperset(graph.readers(product.result))
        if is_kept and name != "gelu":
            continue
        return dataclasses.replace(
            product,
            result=match.output,
            equations=product.equations | match.equations,
            activation=name,
            preactivation=product.result if is_kept else None,
            before=product,
        )
    return product


def _with_c(graph: Graph, product: Product) -> Product:
    """A sum with another array of the result's type, which the call adds to its product."""
    found = _next(graph, product, "add") or _next(graph, product, "add_any")
    if found is None:
        return product
    i, eqn = found
    others = [v for v in eqn.invars if v is not product.result]
    if len(others) != 1 or jax_tracing.is_literal(others[0]) or others[0].aval != product.result.aval:
        return product
    return _after(product, i, eqn, c=others[0], before=product)


def platform_reads_in_place() -> bool:
    """Whether calls read the shards of other ranks where they lie, so that a gather costs nothing."""
    return jax_compat.default_platform() == "cpu" and jax.process_count() == 1
