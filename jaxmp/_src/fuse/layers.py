"""Two dense layers with an activation between them, and gated layers, as `jaxmp.mlp` and `jaxmp.gated_mlp`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._src.fuse.emit import Options, out_sharding
from jaxmp._src.fuse.graph import Graph, Group
from jaxmp._src.fuse.products import Product
from jaxmp._src.ops.gated_mlp import gated_mlp
from jaxmp._src.ops.mlp import mlp
from jaxmp._src.runtime import jax_tracing


def find(graph: Graph, products: Sequence[Product], options: Options) -> list[Group]:
    """The layers among these products."""
    by_result = {product.result: product for product in products if product.c is None}
    groups = []
    for product in products:
        down = product if product.c is None else product.before
        if down is None or not _is_layer(down) or down.activation:
            continue
        hidden = down.x.value
        if graph.only_reader(hidden) is None or down.x.is_resharded:
            continue
        first = by_result.get(hidden)
        if first is not None and _is_layer(first) and first.activation in ("relu", "gelu"):
            groups.append(_mlp(first, down, options))
        elif options.determinism == "run_to_run" and (pair := _gated(graph, hidden, by_result)) is not None:
            groups.append(_gated_mlp(graph, *pair, down, options))
    return groups


def _is_layer(product: Product) -> bool:
    """Whether it is x @ w, perhaps with a bias and an activation."""
    is_plain = product.alpha is None and product.collective is None
    is_kept = product.preactivation is None and product.x.gather is None and product.w.gather is None
    return product.is_matrix and is_plain and is_kept and product.w.contract == (0,) and product.c is None


def _mlp(first: Product, down: Product, options: Options) -> Group:
    biases = [v for v in (first.bias, down.bias) if v is not None]
    has = first.bias is not None, down.bias is not None
    return Group(
        first.equations | down.equations,
        (first.x.value, first.w.value, down.w.value, *biases),
        (down.result,),
        functools.partial(_call_mlp, first, down, has, options),
        f"mlp, {first.activation}",
    )


def _call_mlp(
    first: Product,
    down: Product,
    has: tuple[bool, bool],
    options: Options,
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *biases: jax.Array,
) -> list[jax.Array]:
    rest = iter(biases)
    b_in, b_out = (next(rest) if one else None for one in has)
    assert first.activation is not None
    y = mlp(
        x.astype(first.x.dtype),
        w_in.astype(first.w.dtype),
        b_in,
        w_out.astype(down.w.dtype),
        b_out,
        activation=first.activation,
        hidden_sharding=out_sharding(first.result.aval),
        out_sharding=out_sharding(down.result.aval),
        precision=down.precision,
        implementation=options.implementation,
        determinism=options.determinism,
    )
    return [y]


def _gated(graph: Graph, hidden: Any, by_result: dict[Any, Product]) -> tuple[Product, Product, int] | None:
    """(gate, up, index of their product) where `hidden` is act(gate) * up of one x."""
    eqn = graph.made_by(hidden)
    if eqn is None or eqn.primitive.name != "mul" or any(map(jax_tracing.is_literal, eqn.invars)):
        return None
    parts = [by_result.get(v) for v in eqn.invars]
    if any(part is None or not _is_layer(part) or graph.only_reader(part.result) is None for part in parts):
        return None
    gate, up = sorted((part for part in parts if part is not None), key=lambda part: not part.activation)
    if gate is up or not gate.activation or up.activation or gate.x.value is not up.x.value:
        return None
    return (gate, up, graph.producer[hidden])


def _gated_mlp(graph: Graph, gate: Product, up: Product, index: int, down: Product, options: Options) -> Group:
    biases = [product.bias for product in (gate, up, down)]
    has = tuple(bias is not None for bias in biases)
    return Group(
        gate.equations | up.equations | down.equations | {index},
        (gate.x.value, gate.w.value, up.w.value, down.w.value, *(b for b in biases if b is not None)),
        (down.result,),
        functools.partial(_call_gated, gate, up, down, has, options),
        f"gated_mlp, {gate.activation}",
    )


def _call_gated(
    gate: Product,
    up: Product,
    down: Product,
    has: tuple[bool, ...],
    options: Options,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *biases: jax.Array,
) -> list[jax.Array]:
    rest = iter(biases)
    b_gate, b_up, b_down = (next(rest) if one else None for one in has)
    y = gated_mlp(
        x.astype(gate.x.dtype),
        w_gate.astype(gate.w.dtype),
        w_up.astype(up.w.dtype),
        w_down.astype(down.w.dtype),
        b_gate,
        b_up,
        b_down,
        activation=gate.activation,
        hidden_sharding=out_sharding(gate.result.aval),
        out_sharding=out_sharding(down.result.aval),
        precision=down.precision,
        implementation=options.implementation,
    )
    return [y]
