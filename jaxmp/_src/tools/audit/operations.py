"""Equations of a trace: their kinds and names in reports, and pairs of corresponding equations in two traces."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp._src.core.primitive.grouped import GROUPED
from jaxmp._src.core.primitive.primitives import PRODUCTS, is_own_jit
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing

# The level of determinism that keeps bits where this varies.
LEVELS = {"batch": "batch", "mesh": "topology", "processes": "topology"}

_OURS = {primitive.name for primitive in (*PRODUCTS, *GROUPED)}
# Equations with jaxprs that run once, as if they were written out.
INLINED = {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"}
_KINDS = {
    "product": {"dot_general", "ragged_dot_general"},
    "sum": {
        *("reduce_sum", "reduce_prod", "reduce", "reduce_window", "reduce_window_sum", "cumsum", "cumprod"),
        *("cumlogsumexp", "psum", "psum_invariant", "reduce_scatter", "scatter-add", "scatter-mul"),
        "select_and_scatter_add",
    },
    "convolution": {"conv_general_dilated"},
    "linear algebra": {
        *("cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve"),
        *("tridiagonal", "tridiagonal_solve", "hessenberg", "fft"),
    },
    "random": {"random_bits", "threefry2x32", "random_fold_in", "random_split", "rng_bit_generator", "rng_uniform"},
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def inlined_body(eqn: Any) -> Any:
    """Returns the jaxpr, open or closed, that an equation of `INLINED` runs once, as if it was written out. None for
    other equations, for calls of jaxmp, and if the jaxpr has another number of operands."""
    if eqn.primitive.name not in INLINED or our_equation(eqn) is not None:
        return None
    body = next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)
    is_whole = body is not None and len(jax_tracing.open_jaxpr(body)[0].invars) == len(eqn.invars)
    return body if is_whole else None


def name_of(eqn: Any) -> str:
    """Returns an equation's name in reports: its primitive, or jaxmp's primitive that it calls, with the level."""
    ours = our_equation(eqn)
    return str(eqn.primitive.name) if ours is None else f"{ours.primitive.name} ({ours.params['spec'].determinism})"


def kind_of(eqn: Any) -> str:
    """Returns the kind of an operation, as `Row` lists them: "product" for a call of jaxmp, and the kind in `_KINDS` if
    the primitive has one. Other equations are "whole" if they are a Pallas kernel or have a jaxpr inside, or else
    "elementwise"."""
    name = eqn.primitive.name
    is_whole = name == "pallas_call" or any(True for _ in jax_compat.subjaxprs(eqn.params))
    return "product" if our_equation(eqn) is not None else _KIND_OF.get(name, "whole" if is_whole else "elementwise")


def our_equation(eqn: Any) -> Any:
    """Returns jaxmp's product in an equation: the equation, or the first one in a `shard_map` or in a `jit` of jaxmp.
    None if there is none, and for a user's `shard_map` that also has a product or sum of JAX."""
    if eqn.primitive.name in _OURS:
        return eqn
    is_own = is_own_jit(eqn)
    if eqn.primitive.name != "shard_map" and not (eqn.primitive.name == "jit" and is_own):
        return None
    inside = list(_all_equations(eqn))
    if not is_own and any(_KIND_OF.get(one.primitive.name) in ("product", "sum") for one in inside):
        return None
    return next((one for one in inside if one.primitive.name in _OURS), None)


def is_packed(eqn: Any, dtype: np.dtype) -> bool:
    """True if an output of this type is jaxmp's relu mask, the only uint8 result of its products; its bytes are
    arranged by the shape of a device's part."""
    return dtype == np.uint8 and our_equation(eqn) is not None


def is_by_device(eqn: Any, i: int) -> bool:
    """True if output `i` may be in the order of the devices: what `shard_map` keeps on each of them for a gradient,
    also in the body of another equation. JAX stacks these parts along their first dimension, and only that dimension
    has an entry in the spec. If two devices hold half of rows b0 and b1 each, the order is b0[:h] b1[:h] b0[h:] b1[h:].
    A user's `out_specs` may look the same."""
    if eqn.primitive.name == "shard_map":
        spec = eqn.params["out_specs"][i].partitions
        return len(spec) == 1 and spec[0] is not None
    bodies = [x for x in jax_compat.subjaxprs(eqn.params) if len(x.outvars) == len(eqn.outvars)]
    made = [(inner, j, v, x.outvars[i]) for x in bodies for inner in x.eqns for j, v in enumerate(inner.outvars)]
    return any(v is result and is_by_device(inner, j) for inner, j, v, result in made)


def _all_equations(eqn: Any) -> Iterator[Any]:
    for jaxpr in jax_compat.subjaxprs(eqn.params):
        for inner in jaxpr.eqns:
            yield inner
            yield from _all_equations(inner)


def live_equations(jaxpr: Any, line: str) -> list[Any]:
    """Returns the equations that the results need or that have effects. Raises NotImplementedError if any equation of
    `jaxpr` has a mutable array; the message names `line` if the equation has no line."""
    for eqn in reversed(jaxpr.eqns):
        if any(jax_tracing.is_mutable(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            raise NotImplementedError(
                f"audit: does not follow mutable arrays, found {eqn.primitive.name} of one at"
                f" {jax_compat.traced_line(eqn) or line}; write fn without jax.new_ref"
            )
    return jax_tracing.needed(jaxpr.eqns, jaxpr.outvars)


def paired(equations: Sequence[Any], others: Sequence[Any], *, is_batch: bool) -> Iterator[tuple[Any, Any]]:
    """Yields the equations of both traces in pairs that look equal (`_likeness`). Both traces can run in the order of
    the pairs. An equation that only one trace has comes with None."""
    names, other_names = ([_likeness(eqn, is_batch) for eqn in eqns] for eqns in (equations, others))
    if names == other_names:
        yield from zip(equations, others, strict=True)
        return
    for kind, i, j, k, m in difflib.SequenceMatcher(None, names, other_names, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(equations[i:j], others[k:m], strict=True)
        else:
            yield from ((eqn, None) for eqn in equations[i:j])
            yield from ((None, eqn) for eqn in others[k:m])


def _likeness(eqn: Any, is_batch: bool) -> Any:
    """Returns what is equal for equations that make a pair: name, number of operands, shapes and types of the results,
    and line. The name of jaxmp's calls has no level. Relu masks do not count. If `is_batch`, shapes count by rank."""
    ours = our_equation(eqn)
    spec = None if ours is None else ours.params["spec"]
    name = eqn.primitive.name if spec is None else f"jaxmp {getattr(spec, 'epilog', spec.function)}"
    results = tuple(
        (len(v.aval.shape) if is_batch or is_by_device(eqn, i) else v.aval.shape, str(v.aval.dtype))
        for i, v in enumerate(eqn.outvars)
        if not is_packed(eqn, v.aval.dtype)
    )
    return name, len(eqn.invars), results, jax_compat.traced_line(eqn)
