"""vmap over a dimension that is sharded over explicit mesh axes.

JAX leaves such axes out of the shard_map around a call, so they are not manual there, and no custom call can run on
their shards. XLA computes the batch in operations of its own, which follow the axes, and so do their derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp._src.lowering import xla_matmul
from jaxmp._src.primitive.batching import RULES
from jaxmp._src.primitive.primitives import (
    activation_grad_p,
    batched_matmul_epilog_p,
    batched_matmul_p,
    matmul_epilog_p,
    matmul_p,
)
from jaxmp._src.runtime import jax_compat, native
from jaxmp._src.runtime.jax_compat import batching
from jaxmp._src.runtime.types import BatchDims
from jaxmp._src.spec.activations import multiply_by_slope
from jaxmp._src.spec.matmul_spec import MatmulSpec, axes_text


def _explicit_axes(args: Sequence[jax.Array], dims: BatchDims) -> tuple[str, ...]:
    """The axes over which the batch is sharded."""
    for x, dim in zip(args, dims, strict=True):
        entry = None if dim is None else jax.typeof(x).sharding.spec[dim]
        if entry is not None:
            return entry if isinstance(entry, tuple) else (entry,)
    return ()


def _check(spec: MatmulSpec | None, axes: tuple[str, ...]) -> None:
    """Raise NotImplementedError where XLA may not compute the batch."""
    why = ""
    if spec is not None and spec.implementation in ("host", "cublasmp"):
        why = f"implementation={spec.implementation!r}"
    elif spec is not None and spec.fixed_reduction_order:
        why = f"determinism={spec.determinism!r}"
    elif native.has_barrier():
        why = "a job of several processes"
    if why:
        raise NotImplementedError(
            f"jaxmp: vmap over a dimension that is sharded over explicit {axes_text(axes)} is computed by XLA, which "
            f"{why} excludes; pass the batch as leading dimensions of a, or name it in jaxmp.einsum or "
            "jaxmp.dot_general"
        )


def _matmul(*operands: jax.Array, spec: MatmulSpec, is_multiple: bool) -> Any:
    with jax.named_scope(xla_matmul.SCOPE):
        outputs = xla_matmul.matmul(*operands, spec=spec, platform=jax_compat.default_platform())
    return outputs if is_multiple else outputs[0]


def _activation_grad(aux: jax.Array, t: jax.Array, *, activation: str, spec: MatmulSpec | None) -> jax.Array:
    return multiply_by_slope(activation, aux, t)


def _register(primitive: jax_compat.Primitive, of_one: Callable[..., Any]) -> None:
    rule = RULES[primitive]

    def wrapped(args: Sequence[jax.Array], dims: BatchDims, **params: Any) -> Any:
        axes = _explicit_axes(args, dims)
        if not axes:
            return rule(args, dims, **params)
        _check(params["spec"], axes)
        outputs = jax.vmap(functools.partial(of_one, **params), in_axes=tuple(dims))(*args)
        return outputs, jax.tree.map(lambda _: 0, outputs)

    batching.primitive_batchers[primitive] = wrapped


for _primitive in (matmul_p, matmul_epilog_p):
    _register(_primitive, functools.partial(_matmul, is_multiple=_primitive.multiple_results))
for _primitive in (batched_matmul_p, batched_matmul_epilog_p):
    _register(_primitive, jax.vmap(functools.partial(_matmul, is_multiple=_primitive.multiple_results)))
_register(activation_grad_p, _activation_grad)
