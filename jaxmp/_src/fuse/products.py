"""Finds the operations around a product in a jaxpr that one call of jaxmp can do with it.

Before the product, the call does transposes, casts, and gathers that nothing else needs. After the product it does, in
this order: one cast, one transpose, one collective with scalar factors before it, a scalar factor, a bias, and an
activation or an addition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.options import ActivationName
from jaxmp._src.fuse.graph import Graph
from jaxmp._src.fuse.operands import Operand, axes_of_type, is_explicit, operand_of
from jaxmp._src.fuse.scales import Parts, Scale, repeated
from jaxmp._src.fuse.templates import ACTIVATIONS, find_activation
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

SUMS = ("psum", "psum_invariant")


@dataclasses.dataclass(frozen=True)
class Product:
    """A `dot_general` with the operations around it that one call does. `result`: the value that the call computes."""

    index: int
    lhs: Operand
    rhs: Operand
    result: Any
    equations: frozenset[int]
    precision: Any
    dtype: np.dtype  # of the result
    is_swapped: bool = False  # rhs's free dimensions come first in the result
    collective: Any = None  # the equation after it, inside shard_map
    is_resharded: bool = False  # the result, outside shard_map
    alpha: Any = None
    divisors: tuple[np.ndarray, ...] = ()  # of the sum over ranks
    scales: tuple[Scale, ...] = ()  # of an int8 product, along dimensions of the result
    bias: Any = None
    activation: ActivationName | None = None
    is_maximum: bool = False  # the activation is jnp.maximum(z, 0), which has the slope 1/2 at 0, relu has 0
    preactivation: Any = None  # set if other equations read it too
    c: Any = None
    before: Product | None = None  # the product without its activation or c

    @property
    def x(self) -> Operand:
        """The operand with the free dimensions that come first in the result."""
        return self.rhs if self.is_swapped else self.lhs

    @property
    def w(self) -> Operand:
        return self.lhs if self.is_swapped else self.rhs

    @property
    def is_matrix(self) -> bool:
        """True if it is x (..., k) times w, (k, n) or (n, k)."""
        x, w = self.x, self.w
        return not x.batch and x.contract == (x.ndim - 1,) and w.ndim == 2 and len(w.contract) == 1

    @property
    def is_symmetric(self) -> bool:
        """True if both operands are one array with the same contraction and no batch: a matrix times its transpose."""
        lhs, rhs = (dataclasses.replace(operand, equations=frozenset()) for operand in (self.lhs, self.rhs))
        return lhs == rhs and not lhs.batch

    @property
    def is_shared_by_name(self) -> bool:
        """True if the ranks of a named axis share the product, inside shard_map."""
        return self.collective is not None or self.lhs.gather is not None or self.rhs.gather is not None

    @property
    def has_epilog(self) -> bool:
        return bool(self.scales) or not (self.c is self.bias is self.activation is None)

    @property
    def communicates(self) -> bool:
        """True if ranks communicate for the product or its gradients, by collectives or by shardings in types."""
        if self.is_shared_by_name:
            return True
        if self.lhs.is_resharded or self.rhs.is_resharded or self.is_resharded:
            return True
        # The gradient of an operand that the ranks share is summed over them, in a call of its own.
        return _is_shared(self.lhs, self.rhs)


def _is_shared(lhs: Operand, rhs: Operand) -> bool:
    """True if ranks share the product: inside shard_map if the operands vary over different axes and have no batch,
    outside if explicit axes shard a dimension that is not a batch."""
    if jax_tracing.manual_axes():
        varying = [jax_compat.varying_axes(operand.value.aval) for operand in (lhs, rhs)]
        return not lhs.batch and varying[0] != varying[1]
    explicit = (operand for operand in (lhs, rhs) if is_explicit(operand.value.aval))
    return any(any(axes_of_type(x.value.aval)[i] for i in x.contract + x.free) for x in explicit)


def product_at(
    graph: Graph, index: int, gathers: frozenset[int], *, epilogs: bool, scales: bool, manual: bool
) -> Product:
    """Returns the product of the `dot_general` at `index`, with all operations around it that its call can do.
    `gathers`: indices of the gathers that calls do. `epilogs`: calls also do factors, biases, activations and
    additions, and with `scales` also scales. `manual`: the jaxpr is inside shard_map, so calls may do a sum over ranks;
    else they may do a reshard."""
    product = bare(graph, index, gathers)
    product = _with_cast(graph, product)
    product = _with_transpose(graph, product)
    product = _with_collective(graph, product, manual=manual, factors=epilogs)
    if product.divisors:
        return product
    product = _with_scales(graph, product) if epilogs and scales else product
    if not epilogs or not product.is_matrix or not jnp.issubdtype(product.dtype, jnp.floating):
        return product
    product = _with_alpha(graph, product)
    if product.result.aval.sharding.spec.unreduced:  # what follows would come before the sum
        return product
    product = _with_bias(graph, product)
    found = _with_activation(graph, product)
    return found if found.activation else _with_c(graph, product)


def bare(graph: Graph, index: int, gathers: frozenset[int] = frozenset()) -> Product:
    """Returns the product of the `dot_general` at `index`, with only operations before it (`operand_of`). These include
    pvary, unless the result would then vary over fewer axes."""
    eqn: Any = graph.equations[index]
    contract, batch = eqn.params["dimension_numbers"]
    for over_pvary in (True, False):
        lhs, rhs = (
            operand_of(graph, v, contract[side], batch[side], gathers, over_pvary=over_pvary)
            for side, v in enumerate(eqn.invars)
        )
        varying = (jax_compat.varying_axes(aval) for aval in (lhs.value.aval, rhs.value.aval))
        if frozenset().union(*varying) == jax_compat.varying_axes(eqn.outvars[0].aval):
            break
    order = sorted(range(len(lhs.contract)), key=lhs.contract.__getitem__)
    lhs, rhs = (dataclasses.replace(each, contract=tuple(each.contract[i] for i in order)) for each in (lhs, rhs))
    return Product(
        index,
        lhs,
        rhs,
        eqn.outvars[0],
        frozenset((index,)) | lhs.equations | rhs.equations,
        eqn.params["precision"],
        np.dtype(eqn.outvars[0].aval.dtype),
    )


def collective_after(graph: Graph, index: int) -> Any | None:
    """Returns the equation of the sum over ranks that a product's call could do if it gathered nothing. Returns None if
    there is none, and outside shard_map."""
    product = _with_transpose(graph, _with_cast(graph, bare(graph, index)))
    found = _with_collective(graph, product, manual=True, factors=True)
    return found.collective if jax_tracing.manual_axes() else None


def _next(graph: Graph, product: Product, *names: str) -> tuple[int, Any] | None:
    """Returns (index, equation) of the result's only reader if it has one of these primitives, else None."""
    i = graph.only_reader(product.result)
    return (i, graph.equations[i]) if i is not None and graph.equations[i].primitive.name in names else None


def _after(product: Product, i: int, eqn: Any, **changes: Any) -> Product:
    return dataclasses.replace(product, result=eqn.outvars[0], equations=product.equations | {i}, **changes)


# Each `_with` function returns the product itself if the call cannot do the next operation.
def _with_cast(graph: Graph, product: Product) -> Product:
    """Takes in a cast of a float32 result to the operands' 16-bit type (the wide one of two): one rounding anyway."""
    found = _next(graph, product, "convert_element_type")
    dtypes = product.lhs.dtype, product.rhs.dtype
    wide = low_precision.operand_type(*dtypes)
    if found is None or product.dtype != np.float32 or found[1].params["new_dtype"] != wide:
        return product
    has_16_bits = wide.itemsize == 2 and (dtypes[0] == dtypes[1] or low_precision.is_mixed(*dtypes))
    return _after(product, *found, dtype=wide) if has_16_bits else product


def _with_transpose(graph: Graph, product: Product) -> Product:
    """Takes in transposes that swap all rows with all columns, by swapping the operands; none if there is a batch."""
    while (found := _next(graph, product, "transpose")) is not None and not product.lhs.batch:
        rows, cols = len(product.x.free), len(product.w.free)
        if found[1].params["permutation"] != (*range(rows, rows + cols), *range(rows)):
            break
        product = _after(product, *found, is_swapped=not product.is_swapped)
    return product


def _with_collective(graph: Graph, product: Product, *, manual: bool, factors: bool) -> Product:
    """Takes in a reshard on explicit axes or, if `manual`, a sum over ranks (psum or reduce_scatter); with `factors`,
    also the factors before the sum. Takes in no sum if the product has an all_gather or operands that are not
    `is_flat`, and no factors without a sum."""
    if not manual:
        found = _next(graph, product, "reshard")
        if found is None or not is_explicit(product.result.aval) or not is_explicit(found[1].outvars[0].aval):
            return product
        return _after(product, *found, is_resharded=True)
    if product.is_shared_by_name or not (product.lhs.is_flat and product.rhs.is_flat):
        return product
    scaled = _with_factors(graph, product) if factors else product
    found = _next(graph, scaled, "reduce_scatter", *SUMS)
    if found is None or len(found[1].invars) != 1 or found[1].params.get("axis_index_groups") is not None:
        return product
    if found[1].primitive.name == "reduce_scatter":
        dimension, rows = found[1].params["scatter_dimension"], len(product.x.free)
        operand, i = (product.x, dimension) if dimension < rows else (product.w, dimension - rows)
        if not found[1].params["tiled"] or not operand.folds(operand.free[i]):
            return product
    return _after(scaled, *found, collective=found[1])


def _with_factors(graph: Graph, product: Product) -> Product:
    """Takes in negations, and literal numbers (not 0 or infinity) that multiply or divide a product of floating point,
    as alpha. The call multiplies its sums in the accumulator's type, which overflows and underflows less than 16 bits.
    A divisor that is not a power of 2 becomes one of `divisors` instead, which divide the call's result, because
    multiplication by its reciprocal would give other bits. Results of 16 bits or fewer have no divisors, only alpha."""
    while jnp.issubdtype(product.dtype, jnp.floating) and (i := graph.only_reader(product.result)) is not None:
        eqn = graph.equations[i]
        name, others = eqn.primitive.name, [v for v in eqn.invars if v is not product.result]
        number = np.asarray(-1.0) if name == "neg" else _number(graph, others[0]) if len(others) == 1 else None
        if number is None or not number or not np.isfinite(number):  # alpha cannot give the NaN of 0 * infinity
            break
        if name in ("mul", "neg") or (name == "div" and eqn.invars[0] is product.result):
            is_divisor = name == "div" and abs(math.frexp(number)[0]) != 0.5 and product.dtype.itemsize > 2
            factor = 1.0 if is_divisor else 1 / float(number) if name == "div" else float(number)
            alpha = factor * (1.0 if product.alpha is None else product.alpha)
            if not _is_normal(alpha, product):
                break
            product = _after(product, i, eqn, alpha=alpha, divisors=(*product.divisors, *[number] * is_divisor))
        else:
            break
    return product


def _number(graph: Graph, v: Any) -> Any:
    """Returns the literal scalar that a value repeats by broadcasts, casts and pvary, in the value's type; or None."""
    if jax_tracing.is_literal(v):
        return np.asarray(v.val) if np.ndim(v.val) == 0 else None
    eqn = graph.made_by(v)
    if eqn is None or eqn.primitive.name not in ("pvary", "convert_element_type", "broadcast_in_dim"):
        return None
    x = _number(graph, eqn.invars[0])
    return None if x is None else x.astype(v.aval.dtype)


def _with_scales(graph: Graph, product: Product) -> Product:
    """Takes in the cast of int8 sums to float32, one or two float32 factors after it (of rows, of columns or of the
    tensor), and then a cast. A factor has to be sharded like its operand. Takes in nothing if there is no such factor,
    or if ranks share the product by name."""
    found, shape = _next(graph, product, "convert_element_type"), product.result.aval.shape
    is_int8 = {product.lhs.dtype.name, product.rhs.dtype.name} == {"int8"} and product.dtype == np.int32
    if not is_int8 or not product.is_matrix or product.is_shared_by_name or found is None:
        return product
    scaled = _after(product, *found, dtype=np.dtype(found[1].params["new_dtype"]))
    while scaled.dtype == np.float32 and (found := _next(graph, scaled, "mul")) is not None:
        others = [v for v in found[1].invars if v is not scaled.result]
        if len(others) != 1 or jax_tracing.is_literal(others[0]):
            break
        scale = _repeated(graph, others[0], shape)
        rows, operand = len(shape) - 1, product.x.value.aval
        if scale.varying == (rows,):
            operand, placed = product.w.value.aval, scale.along({rows: product.w.free[0]})
        elif scale.varying in ((), tuple(i for i in range(rows) if shape[i] != 1)):
            placed = scale
        else:
            break
        # A call takes one scale for each operand. The product of two scales may overflow although the result does not.
        taken = [s.varying for s in scaled.scales]
        if len(taken) == 2 or (scale.varying and scale.varying in taken):
            break
        if scale.value.aval.dtype != np.float32 or not placed.is_sharded_as(operand):
            break
        scaled = _after(scaled, *found, scales=(*scaled.scales, scale))
    if not scaled.scales:
        return product
    found = _next(graph, scaled, "convert_element_type")
    if found is None or found[1].params["new_dtype"].name not in low_precision.WIDE:
        return scaled
    return _after(scaled, *found, dtype=np.dtype(found[1].params["new_dtype"]))


def _repeated(graph: Graph, v: Any, shape: Sequence[int]) -> Scale:
    """Returns the array that `v`, of a product's `shape`, repeats (`Parts.scale`)."""
    parts = Parts(shape)
    return parts.scale(*repeated(graph, v, parts, [[(i,)] for i in range(len(shape))]), len(shape))


def _with_alpha(graph: Graph, product: Product) -> Product:
    """Takes in one multiplication by a literal number, not 0 or infinity, as alpha, times any alpha before."""
    found = _next(graph, product, "mul")
    if found is None:
        return product
    scalars = [v for v in found[1].invars if jax_tracing.is_literal(v) and np.ndim(v.val) == 0]
    if len(scalars) != 1:
        return product
    alpha = float(scalars[0].val) * (1.0 if product.alpha is None else product.alpha)
    return _after(product, *found, alpha=alpha) if _is_normal(alpha, product) else product


def _is_normal(alpha: float, product: Product) -> bool:
    """True if alpha is a normal number of the sums' type. Another alpha cannot give the NaN of 0 * infinity."""
    limits = np.finfo(np.float64 if product.dtype.itemsize == 8 else np.float32)
    return bool(limits.tiny <= abs(alpha) <= limits.max)


def _with_bias(graph: Graph, product: Product) -> Product:
    """Takes in the addition of a vector of columns of the result's type, repeated for each row."""
    found, shape = _next(graph, product, "add"), product.result.aval.shape
    others = [v for v in found[1].invars if v is not product.result] if found else []
    if found is None or len(others) != 1 or len(shape) < 2:
        return product
    bias = _repeated(graph, others[0], shape)
    is_vector = bias.value.aval.shape == shape[-1:] and bias.dims in ((len(shape) - 1,), (None,))
    return _after(product, *found, bias=bias.value) if is_vector and bias.value.aval.dtype == product.dtype else product


def _with_activation(graph: Graph, product: Product) -> Product:
    """Takes in an activation (`templates.ACTIVATIONS`), unless there is an alpha. If other equations read its argument,
    takes in gelu only, and the call returns the argument too."""
    if product.alpha is not None:
        return product
    for activation in ACTIVATIONS:
        match = find_activation(graph, activation, product.result)
        if match is None or match.output.aval.dtype != product.dtype:
            continue
        if graph.leaks(match.equations, (match.output,)):
            continue
        is_kept = not match.equations.issuperset(graph.readers(product.result))
        if is_kept and activation.name != "gelu":
            continue
        return dataclasses.replace(
            product,
            result=match.output,
            equations=product.equations | match.equations,
            activation=activation.name,
            is_maximum=activation.reader == "max",
            preactivation=product.result if is_kept else None,
            before=product,
        )
    return product


def _with_c(graph: Graph, product: Product) -> Product:
    """Takes in the addition of an array of the result's type, perhaps in another sharding, as c, unless x is a vector.
    `before` is then the product without it."""
    found = _next(graph, product, "add", "add_any")
    if found is None or product.x.ndim == 1:
        return product
    i, eqn = found
    others = [v for v in eqn.invars if v is not product.result]
    if len(others) != 1 or jax_tracing.is_literal(others[0]):
        return product
    if others[0].aval.update(sharding=product.result.aval.sharding) != product.result.aval:
        return product
    return _after(product, i, eqn, c=others[0], before=product)
