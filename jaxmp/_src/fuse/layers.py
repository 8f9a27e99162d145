"""Finds two dense layers with an activation between them, and gated layers, for `jaxmp.mlp` and `jaxmp.gated_mlp`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._src.core.ops.gated_mlp import gated_mlp
from jaxmp._src.core.ops.mlp import mlp
from jaxmp._src.core.spec.refusal import of_layer
from jaxmp._src.fuse.emit import Options, out_sharding
from jaxmp._src.fuse.graph import Graph, Group
from jaxmp._src.fuse.products import Product
from jaxmp._src.platform.jax_internals import jax_tracing


def find_layers(graph: Graph, products: Sequence[Product], options: Options) -> list[Group]:
    """Returns a group of each two products with relu or gelu between them and, without a level, of each gated layer
    (with any activation). The products have one precision. Nothing else may read the hidden layer, and it may not be
    resharded. The last product has no activation; an addition after it stays outside the group."""
    by_result = {product.result: product for product in products if product.c is None}
    groups = []
    layers: tuple[Product, ...]
    for product in products:
        down = product if product.c is None else product.before
        if down is None or not _is_layer(down) or down.activation:
            continue
        hidden = down.x.value
        if graph.only_reader(hidden) is None or down.x.is_resharded:
            continue
        first = by_result.get(hidden)
        if first is not None and _is_layer(first) and first.activation in ("relu", "gelu"):
            layers, between = (first, down), frozenset[int]()
        elif not options.level.fixed_order and (pair := _gated(graph, hidden, by_result)) is not None:
            layers, between = (*pair, down), frozenset((graph.producer[hidden],))
        else:
            continue
        if all(each.precision == down.precision for each in layers):
            groups.append(_layers(layers, between, options))
    return groups


def _is_layer(product: Product) -> bool:
    """True if the product is x @ w, w stored (k, n), perhaps with a bias and an activation (not `is_maximum`), but
    without factors, scales, an addition, a gather or a collective. The result has the type of x, because a call of
    layers has one."""
    is_plain = product.alpha is product.collective is None and not (product.scales or product.is_maximum)
    is_kept = product.preactivation is None and product.x.gather is None and product.w.gather is None
    is_layer = product.is_matrix and product.w.contract == (0,) and product.c is None
    return is_layer and is_plain and is_kept and product.dtype == product.x.dtype


def _gated(graph: Graph, hidden: Any, by_result: dict[Any, Product]) -> tuple[Product, Product] | None:
    """Returns (gate, up) if `hidden` is act(gate) * up, both are products of one x, and nothing else reads them; else
    None. `by_result`: the products by their results."""
    eqn = graph.made_by(hidden)
    if eqn is None or eqn.primitive.name != "mul" or any(map(jax_tracing.is_literal, eqn.invars)):
        return None
    parts = [by_result.get(v) for v in eqn.invars]
    if any(part is None or not _is_layer(part) or graph.only_reader(part.result) is None for part in parts):
        return None
    gate, up = sorted((part for part in parts if part is not None), key=lambda part: not part.activation)
    if gate is up or not gate.activation or up.activation or gate.x.value is not up.x.value:
        return None
    return gate, up


def _layers(products: tuple[Product, ...], between: frozenset[int], options: Options) -> Group:
    """Returns the group of `products`, (first, down) or (gate, up, down), with the equations `between` them."""
    biases = (product.bias for product in products if product.bias is not None)
    return Group(
        between.union(*(product.equations for product in products)),
        (products[0].x.value, *(product.w.value for product in products), *biases),
        (products[-1].result,),
        functools.partial(_call, products, options),
        "layers",
    )


def _call(products: tuple[Product, ...], options: Options, x: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Returns [the result] of `mlp` for two products, of `gated_mlp` for three. `arrays`: the weights, then the biases
    that there are."""
    first, down = products[0], products[-1]
    weights = [w.astype(product.w.dtype) for product, w in zip(products, arrays, strict=False)]
    rest = iter(arrays[len(products) :])
    biases = [None if product.bias is None else next(rest) for product in products]
    assert first.activation is not None
    shared: dict[str, Any] = {
        "activation": first.activation,
        "hidden_sharding": out_sharding(first.result.aval),
        "out_sharding": out_sharding(down.result.aval),
        "precision": down.precision,
        "implementation": options.implementation,
    }
    x = x.astype(first.x.dtype)
    with of_layer("", a="lhs", b="rhs"):
        if len(products) == 3:
            return [gated_mlp(x, *weights, *biases, **shared)]
        (w_in, w_out), (b_in, b_out) = weights, biases
        return [mlp(x, w_in, b_in, w_out, b_out, **options.level.option, **shared)]
