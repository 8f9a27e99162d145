"""Emits products as calls of jaxmp."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.ops import dot_general as _dot_general
from jaxmp._src.core.ops.matmul import linear, matmul
from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.spec import levels
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.levels import Level
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.spec.options import Implementation
from jaxmp._src.core.spec.refusal import NotAvailable, of_layer
from jaxmp._src.core.spec.request import Request
from jaxmp._src.fuse import emit_shards
from jaxmp._src.fuse.operands import Operand, axes_of_type, is_auto, is_explicit
from jaxmp._src.fuse.products import Product


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `fuse`."""

    level: Level
    implementation: Implementation | None
    epilogs: bool
    strict: bool = True


def inputs(product: Product) -> tuple[Any, ...]:
    """Returns the variables that a product's call takes: x, w, and its bias, c and scales if it has them."""
    extra = (product.bias, product.c)
    scales = (scale.value for scale in product.scales)
    return (product.x.value, product.w.value, *(v for v in extra if v is not None), *scales)


def outputs(product: Product) -> tuple[Any, ...]:
    return (product.result, *(() if product.preactivation is None else (product.preactivation,)))


def call(product: Product, options: Options, x: jax.Array, w: jax.Array, *extra: jax.Array) -> list[jax.Array]:
    """Returns the values of a product's `outputs`, [result] or [result, the activation's argument], from one call on
    its `inputs`. `extra`: the inputs after x and w. Divides the result by the product's divisors. The derivative is
    JAX's, also if the activation `is_maximum`. Errors use the operand names of `lax.dot_general`."""
    if product.is_maximum:
        return _maximum(product, options)(x, w, *extra)
    first, second = ("rhs", "lhs") if product.is_swapped else ("lhs", "rhs")
    with of_layer("", a=first, b=second):
        d, *rest = _call(product, options, x, w, *extra)
    return [functools.reduce(operator.truediv, product.divisors, d), *rest]


def _maximum(product: Product, options: Options) -> Callable[..., list[jax.Array]]:
    """Returns `call` for a product that `is_maximum`, with the derivative of jnp.maximum."""
    before = product.before
    assert before is not None

    def by_jnp(*operands: jax.Array) -> list[jax.Array]:
        return [jnp.maximum(call(before, options, *operands)[0], 0)]

    fused: Any = jax.custom_jvp(functools.partial(call, dataclasses.replace(product, is_maximum=False), options))
    fused.defjvp(functools.partial(jax.jvp, by_jnp))
    return fused


def _call(product: Product, options: Options, x: jax.Array, w: jax.Array, *extra: jax.Array) -> list[jax.Array]:
    """Returns what `call` does, before the divisors. `emit_shards` computes products that ranks of a named axis share,
    `_general` other operands than x (..., k) and a matrix, and `matmul` or `linear` the rest."""
    rest = iter(extra)
    bias = None if product.bias is None else next(rest)
    c = None if product.c is None else next(rest)
    scaling = _scaling(product, rest)
    x, w = _in_type(product.x, x), _in_type(product.w, w)
    shared = _shared(product, options)
    if product.is_shared_by_name:
        return emit_shards.call(product, (x, w, bias, c), shared)
    shared["out_sharding"] = out_sharding(product.result.aval)
    conjugates = product.x.is_conjugated, product.w.is_conjugated
    if any(conjugates) and product.x.ndim == product.w.ndim == 2 and len(product.x.contract) == 1:
        shared |= {"transpose_a": product.x.contract == (0,), "transpose_b": product.w.contract == (1,)}
        return [matmul(x, w, conjugate_a=conjugates[0], conjugate_b=conjugates[1], **shared)]
    x, w = (lax.conj(each) if is_conjugated else each for each, is_conjugated in zip((x, w), conjugates, strict=True))
    if not product.is_matrix or (product.is_swapped and is_auto(product.result.aval) and not product.has_epilog):
        return [_general(product, options.level, x, w, shared)]
    shared |= {"transpose_b": product.w.contract == (1,), "scaling": scaling}
    if c is None and product.preactivation is None:
        return [linear(x, w, bias, activation=product.activation, **shared)]
    if c is not None and shared["out_sharding"] is not None:
        mesh, spec = product.result.aval.sharding.mesh, jax.typeof(c).sharding.spec
        c = meshes.reshard(c, mesh, spec, shared["out_sharding"], is_explicit=True)
    found = matmul(x, w, c, **shared, **emit_shards.epilog_options(product, bias, c))
    return emit_shards.results_of(product, found)


def _scaling(product: Product, values: Iterable[jax.Array]) -> Scaling | None:
    """Returns the call's scales, or None if the product has none. A scale of rows is a's and a scale of columns b's; a
    scalar takes the free place, a's if both are free. `values`: the arrays of `product.scales`."""
    rows = product.result.aval.shape[:-1]
    found: dict[str, jax.Array] = {}
    for scale, value in sorted(zip(product.scales, values, strict=True), key=lambda each: not each[0].varying):
        factor = lax.squeeze(value, [i for i, d in enumerate(scale.dims) if d is None])
        is_of_b = scale.varying == (len(rows),)
        if scale.varying and not is_of_b:
            factor = lax.expand_dims(factor, [i for i, extent in enumerate(rows) if extent == 1])
        found["b" if is_of_b or "a" in found else "a"] = factor
    return Scaling(found.get("a"), found.get("b")) if found else None


def gradient(product: Product, options: Options, aux: jax.Array, *xw: jax.Array) -> list[jax.Array]:
    """Returns [x @ w times gelu's derivative at `aux`], the cotangent of gelu's argument, from one call. `xw`: x, w."""
    given = _shared(product, options) | {
        "epilog": Epilog.DGELU,
        "epilog_inputs": {"gelu_aux": aux},
        "transpose_b": product.w.contract == (1,),
        "out_sharding": out_sharding(product.result.aval),
    }
    return [matmul(*map(_in_type, (product.x, product.w), xw), **given)]


def _in_type(operand: Operand, x: jax.Array) -> jax.Array:
    """Casts x to `operand.dtype`. Returns x itself if it has this type: a weak type stays, as in JAX's cotangent."""
    return x if x.dtype == operand.dtype else x.astype(operand.dtype)


def _shared(product: Product, options: Options) -> dict[str, Any]:
    """Returns the options of every call: precision, result type, implementation, alpha if any, and level."""
    return {
        "precision": product.precision,
        "preferred_element_type": product.dtype,
        "implementation": options.implementation,
        **({} if product.alpha is None else {"alpha": product.alpha}),
        **options.level.option,
    }


def out_sharding(aval: Any) -> P | None:
    """Returns the spec of a result on explicit axes; None for other results and inside shard_map."""
    return aval.sharding.spec if is_explicit(aval) and not aval.sharding.mesh.manual_axes else None


def _general(product: Product, level: Level, x: jax.Array, y: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Returns x times y, operands of any form, by `dot_general`. Under a global order calls `_as_matrices`, which
    may raise NotAvailable, if there is no batch. A batch then has the level "batch"; raises NotAvailable if explicit
    axes shard its contraction. May remove `out_sharding` from `options`."""
    one, other = product.x, product.w
    if level.global_order:
        if not one.batch:
            return _as_matrices(one, x, other, y, options)
        if any(axes_of_type(jax.typeof(x))[d] for x, dims in ((x, one.contract), (y, other.contract)) for d in dims):
            raise NotAvailable("ranks share the contraction of a batch")
        options = options | levels.ANY_MESH_ORDER.option  # products of whole rows and columns do not depend on the mesh
    numbers = ((one.contract, other.contract), (one.batch, other.batch))
    if product.is_swapped and is_auto(product.result.aval):
        del options["out_sharding"]
        return _dot_general.product(Request("dot_general", x, y, first_operand_is_b=True, **options), numbers)
    d: jax.Array = _dot_general.dot_general(x, y, numbers, **options)
    return d


def _as_matrices(one: Operand, x: jax.Array, other: Operand, y: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Returns x times y in the shape of `dot_general`, multiplied as matrices (rows, k) and (k, columns) of joined
    dimensions. Gathers all dimensions of k except the first, so that each rank has a contiguous piece of k. Raises
    NotAvailable if any but the first of joined rows or columns is sharded. Removes `out_sharding` from `options`."""
    x, y = _gathered(x, one.contract[1:]), _gathered(y, other.contract[1:])
    shape = tuple(x.shape[d] for d in one.free) + tuple(y.shape[d] for d in other.free)
    a, b = _joined(x, one.free, one.contract), _joined(y, other.contract, other.free)
    of_d = options.pop("out_sharding")
    flat = None
    if of_d is not None:
        entries = [*of_d.partitions, *(None for _ in range(len(shape) - len(of_d)))]
        joined = [_joined_axes(part) for part in (entries[: len(one.free)], entries[len(one.free) :])]
        flat = of_d.update(partitions=joined)
    d: jax.Array = matmul(a, b, out_sharding=flat, **options)
    return lax.reshape(
        d, shape, out_sharding=None if of_d is None else jax.sharding.NamedSharding(jax.typeof(d).sharding.mesh, of_d)
    )


def _gathered(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Returns x with the dimensions `dims` whole on every device; x itself if its type shards none of them."""
    axes, sharding = axes_of_type(jax.typeof(x)), jax.typeof(x).sharding
    if not any(axes[d] for d in dims):
        return x
    whole = P(*(None if i in dims else entry or None for i, entry in enumerate(axes)))
    return meshes.reshard(x, sharding.mesh, sharding.spec, whole, is_explicit=True)


def _joined(x: jax.Array, rows: tuple[int, ...], columns: tuple[int, ...]) -> jax.Array:
    """Returns x as a matrix, with the dimensions `rows` joined to one and the dimensions `columns` to the other. Each
    is sharded as its first dimension was; raises NotAvailable if another one is sharded."""
    shape = tuple(math.prod(x.shape[d] for d in dims) for dims in (rows, columns))
    sharding = None
    if is_explicit(jax.typeof(x)):
        axes, sharding = axes_of_type(jax.typeof(x)), jax.typeof(x).sharding
        joined = [_joined_axes([axes[d] or None for d in dims]) for dims in (rows, columns)]
        sharding = sharding.update(spec=sharding.spec.update(partitions=joined))
    return lax.reshape(lax.transpose(x, (*rows, *columns)), shape, out_sharding=sharding)


def _joined_axes(entries: Sequence[Any]) -> Any:
    """Returns the first of the mesh axes of joined dimensions. Raises NotAvailable if another one is not None."""
    if any(entries[1:]):
        raise NotAvailable("ranks hold joined dimensions interleaved")
    return entries[0] if entries else None
