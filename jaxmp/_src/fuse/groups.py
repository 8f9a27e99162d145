"""Finds the groups of equations that calls replace, and why other products have none."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.lowering import decide
from jaxmp._src.core.lowering.backend import LARGE_IN_BATCH
from jaxmp._src.core.spec import low_precision
from jaxmp._src.fuse import convolutions, emit, gathers, layers, products, templates
from jaxmp._src.fuse.between import Between
from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.graph import Graph, Group, each_in_place, with_whole_collectives, without_batch_of_one
from jaxmp._src.fuse.operands import is_auto
from jaxmp._src.fuse.products import Product
from jaxmp._src.fuse.reasons import NOTE, NOTES, name_of, safely
from jaxmp._src.fuse.templates import GELU, Match
from jaxmp._src.fuse.weights import with_narrow_weights
from jaxmp._src.platform.jax_internals import jax_tracing


def grouped(graph: Graph, options: Options) -> tuple[Graph, list[Group], dict[int, str]]:
    """Returns (a changed graph, its groups, by index why other `dot_general`s have none). There, collectives that
    groups take in are one equation, batches of one product have no batch, and narrow weights are read as stored. At a
    level, convolutions are products if they can be."""
    if options.level.fixed_order:
        graph = each_in_place(graph, convolutions.as_product)

    def found(left: Collection[Any]) -> tuple[Graph, list[Group], dict[int, str]]:
        whole = with_whole_collectives(graph, left)
        whole = each_in_place(whole, functools.partial(without_batch_of_one, whole))
        whole = with_narrow_weights(whole, options)
        return whole, *groups_of(whole, whole, options)

    whole, groups, why = found(())
    if not any(map(jax_tracing.without_start, graph.equations)):
        return whole, groups, why
    inside = {i for group in groups for i in group.equations}
    reasons = {whole.equations[i].outvars[0]: reason for i, reason in why.items()}
    graph, groups, why = found({v for i, eqn in enumerate(whole.equations) if i not in inside for v in eqn.outvars})
    return graph, groups, {i: reasons.get(graph.equations[i].outvars[0], reason) for i, reason in why.items()}


def groups_of(graph: Graph, whole: Graph, options: Options) -> tuple[list[Group], dict[int, str]]:
    """Returns (groups, by index why other `dot_general`s of `graph` are in none: keys of `reasons.REASONS`, or names
    from `name_of`). Warns where jaxmp fails, and finds less there. `whole`: the same graph without a barrier; pairs of
    gelu and its derivative are found there."""
    dots = [i for i, eqn in enumerate(graph.equations) if eqn.primitive.name == "dot_general"]
    if not dots:
        return [], {}
    manual, of_dots = bool(jax_tracing.manual_axes()), [graph.equations[i] for i in dots]
    choice = safely(of_dots, lambda: gathers.choose(graph, dots, options.implementation))
    in_calls, of_gathers = choice or (frozenset[int](), dict[int, str]())
    scales = not options.level.global_order  # a call multiplies by them in its own order, and not in every sharding
    find = functools.partial(products.product_at, graph, epilogs=options.epilogs, scales=scales, manual=manual)
    found = [
        safely([eqn], functools.partial(find, i, in_calls)) or products.bare(graph, i)
        for i, eqn in zip(dots, of_dots, strict=True)
    ]
    groups, between = list[Group](), Between(graph)
    if options.epilogs and not manual:
        groups += safely(of_dots, lambda: layers.find_layers(graph, found, options)) or []
        groups += safely(of_dots, lambda: _pairs(whole, found, options)) or []
    taken = {i for group in groups for i in group.equations}
    made = {v for group in groups for v in group.outputs}
    left: dict[int, str] = {}
    for product in found:
        if product.index in taken:
            continue
        has_no_epilog = product.activation not in (None, "relu", "gelu")  # no single product has this epilog
        if product.before is not None and (has_no_epilog or product.result in made):  # another call adds the two
            product = product.before
        why = _why_left(product, options)
        if why in ("local", "batch"):
            why = of_gathers.get(product.index, why)
        if why == "local" and (text := between.reason(product)):
            why = name_of(text)
        if why is None:
            note = of_gathers.get(product.index, "")
            if note not in NOTES:
                note = name_of(text) if manual and (text := between.reason(product)) else ""
            groups.append(of_product(product, options, note))
            made |= {product.result}
        else:
            left[product.index] = why
    return groups, left


def of_product(product: Product, options: Options, note: str = "") -> Group:
    """Returns the group of a product's call. `note`: the name of a note in `reasons` that the call carries, or ""."""
    call = functools.partial(emit.call, product, options)
    call = jax.named_scope(NOTE + note)(call) if note else call
    return Group(product.equations, emit.inputs(product), emit.outputs(product), call, "product")


def _pairs(graph: Graph, found: Sequence[Product], options: Options) -> list[Group]:
    """Finds pairs of a product followed by gelu and a product that this gelu's derivative multiplies. Returns two
    groups for each pair: the first call returns the aux, which the epilog of the second call reads."""
    groups: list[Group] = []
    firsts = (p for p in found if p.is_matrix and not p.activation and p.c is None and p.alpha is None)
    plain = (p for p in found if p.is_matrix and not (p.has_epilog or p.collective or p.alpha))
    seconds = {product.result: product for product in plain}
    cotangents = frozenset(seconds)
    for forward in firsts:
        match = templates.find_activation(graph, GELU, forward.result)
        back = match and templates.find_gelu_cotangent(graph, match, cotangents)
        if match is None or back is None:
            continue
        backward = seconds[back.arguments[1]]
        pair = _pair(graph, forward, match, backward, back)
        if pair is None or backward is forward:
            continue
        kept, after = pair
        call, inputs = functools.partial(emit.gradient, after, options), emit.inputs(after)
        gradient = Group(after.equations, (kept.preactivation, *inputs), (after.result,), call, "gradient")
        groups += [of_product(kept, options), gradient]
    return groups


def _pair(
    graph: Graph, forward: Product, match: Match, backward: Product, back: Match
) -> tuple[Product, Product] | None:
    """Returns (`forward` with its activation `match`, `backward` with the derivative `back` after it). Returns None if
    anything else reads the result of `backward` itself, or a value within gelu or its derivative."""
    both = match.equations | back.equations
    if graph.leaks(both, (match.output, back.output)) or not both.issuperset(graph.readers(backward.result)):
        return None
    kept = dataclasses.replace(
        forward,
        result=match.output,
        equations=forward.equations | match.equations,
        activation="gelu",
        preactivation=forward.result,
    )
    after = dataclasses.replace(backward, result=back.output, equations=backward.equations | back.equations)
    return kept, after


def _why_left(product: Product, options: Options) -> str | None:
    """Returns why JAX computes a product (a key of REASONS), or None if it becomes a call. "type": no operand is
    inexact, and not both are int8. Every other product becomes a call at a level, or if ranks communicate. Without a
    batch it also becomes a call on automatic axes, with relu or gelu, or where XLA is slower. "batch", "local": the
    rest, with and without a batch."""
    dtypes = product.lhs.dtype, product.rhs.dtype
    is_int8 = set(dtypes) == {np.dtype("int8")}
    if not is_int8 and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return "type"
    if options.level.fixed_order or product.communicates:
        return None
    if product.lhs.batch:
        return "batch"
    if is_auto(product.lhs.value.aval):
        return None
    # On CPUs XLA multiplies these more slowly, by far if int8 sums wrap. It converts narrow weights in memory.
    has_16_bits = any(dtype.itemsize == 2 for dtype in dtypes)
    is_narrow = product.is_matrix and (product.dtype == np.int8 or has_16_bits)
    is_weak = any(operand.value.aval.weak_type for operand in (product.lhs, product.rhs))  # JAX's cotangent is not
    is_mixed = low_precision.is_mixed(*dtypes) and product.lhs.is_flat and product.rhs.is_flat and not is_weak
    is_faster = is_narrow or is_mixed or _gains_by_symmetry(product)
    return None if is_faster or product.activation in ("relu", "gelu") else "local"


def _gains_by_symmetry(product: Product) -> bool:
    """True for a large matrix times its transpose on CPUs, because hostmp computes only half of the result."""
    shape = product.lhs.value.aval.shape
    work = 2 * math.prod(shape) * math.prod(shape[i] for i in product.lhs.free)
    is_large = isinstance(work, int) and work >= LARGE_IN_BATCH
    return product.is_symmetric and is_large and decide.here().platform == "cpu"
