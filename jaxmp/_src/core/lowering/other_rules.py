"""Rules of `jax.experimental.sparse.sparsify` and `jax.experimental.roofline`, which find them by primitive: those of
XLA's operations for the same product.

They are registered once their user has imported them, which takes longer than importing jaxmp.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.primitive.collectives import Axes, collective_p
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.jax_internals import jax_compat, jax_rules

# The devices for which there are such models.
_PLATFORM = "cuda"


def register_sparsify(primitives: Iterable[jax_compat.Primitive]) -> None:
    """Of global arrays; those of shards have none."""
    transform = sys.modules["jax.experimental.sparse.transform"]
    for primitive in primitives:
        transform.sparse_rules_bcoo[primitive] = functools.partial(_sparsify, transform, primitive)


def _sparsify(
    transform: Any, primitive: jax_compat.Primitive, env: Any, *operands: Any, spec: MatmulSpec
) -> Sequence[Any]:
    if not spec.is_unsettled:
        transform._raise_unimplemented_primitive(primitive)

    def product(*operands: Any) -> list[jax.Array]:
        named = dict(zip(spec.names, operands, strict=True))
        return list(xla_matmul.global_matmul(named, spec, jax_compat.default_platform(), None).values())

    results: Sequence[Any] = transform.sparsify_raw(jax.vmap(product) if spec.is_batch else product)(env, *operands)[0]
    return results


def register_roofline(primitives: Iterable[jax_compat.Primitive]) -> None:
    """That of XLA's operations for the same product, or of its collective."""
    roofline = sys.modules["jax.experimental.roofline.roofline"]
    untyped, typed = jax_rules.PSUMS
    roofline._rooflines.setdefault(untyped, roofline._rooflines[typed])  # JAX has the second alone
    for primitive in primitives:
        roofline.register_roofline(primitive)(functools.partial(_roofline, primitive))
    roofline.register_roofline(collective_p)(_collective_roofline)


def _roofline(primitive: jax_compat.Primitive, ctx: Any, *operands: Any, spec: MatmulSpec) -> Any:
    def product(*operands: Any) -> list[jax.Array]:
        return [*xla_matmul.matmul(dict(zip(spec.names, operands, strict=True)), spec, _PLATFORM).values()]

    product = jax.vmap(product) if spec.is_batch else product
    return _roofline_of(product, primitive, ctx, operands, spec.group.mesh)


def _collective_roofline(ctx: Any, x: Any, *, kind: str, mesh: Axes, caller: str, **where: Any) -> Any:
    def collective(x: jax.Array) -> jax.Array:
        axes, dimensions = where["axis_name"], where["dimensions"]
        is_moved = kind not in ("vary", "wait", "pass")
        return xla_matmul.collective(kind, x, axes, dimensions, platform=_PLATFORM) if is_moved else x

    return _roofline_of(collective, collective_p, ctx, [x], mesh)


def _roofline_of(
    fn: Callable[..., Any], primitive: jax_compat.Primitive, ctx: Any, operands: Sequence[Any], axes: Axes
) -> Any:
    jaxpr = jax_rules.jaxpr_on_axes(fn, operands, axes)
    mesh = ctx.mesh or jax.sharding.AbstractMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
    pins = {"pin_lhs_in_vmem": ctx.pin_lhs_in_vmem, "pin_rhs_in_vmem": ctx.pin_rhs_in_vmem}
    interpret = sys.modules["jax.experimental.roofline.roofline"]._roofline_interpreter
    return interpret(primitive.name, jaxpr, mesh, **pins)
