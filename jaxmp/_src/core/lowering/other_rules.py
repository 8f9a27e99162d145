"""Rules for `jax.experimental.sparse.sparsify` and `jax.experimental.roofline`: the rules of XLA's operations for the
same product.

They are registered when the user imports these modules, because importing them takes longer than importing jaxmp.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.primitive.collectives import Axes, collective_p
from jaxmp._src.core.primitive.primitives import over_batch
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.jax_internals import jax_compat, jax_rules

# JAX has such models for these devices.
_PLATFORM = "cuda"


def register_sparsify(primitives: Iterable[jax_compat.Primitive]) -> None:
    """Registers rules for products of global arrays. JAX reports products of shards as not implemented."""
    transform = sys.modules["jax.experimental.sparse.transform"]
    for primitive in primitives:
        transform.sparse_rules_bcoo[primitive] = functools.partial(_sparsify, transform, primitive)


def _sparsify(
    transform: Any, primitive: jax_compat.Primitive, env: Any, *operands: Any, spec: MatmulSpec
) -> Sequence[Any]:
    """Returns sparsify's values of a product of global arrays. Raises NotImplementedError for a product of shards."""
    if not spec.is_unsettled:
        transform._raise_unimplemented_primitive(primitive)

    def product(*operands: Any) -> list[jax.Array]:
        named = dict(zip(spec.names, operands, strict=True))
        return list(xla_matmul.global_matmul(named, spec, jax_compat.default_platform(), None).values())

    results: Sequence[Any] = transform.sparsify_raw(over_batch(product, spec.batch))(env, *operands)[0]
    return results


def register_roofline(primitives: Iterable[jax_compat.Primitive]) -> None:
    """Registers the roofline of XLA's operations for the same product for each of `primitives`, and the roofline of lax
    for `collective_p`. Gives psum without types the roofline of the typed one. JAX's roofline module has to be
    imported."""
    roofline = sys.modules["jax.experimental.roofline.roofline"]
    untyped, typed = jax_rules.PSUMS
    roofline._rooflines.setdefault(untyped, roofline._rooflines[typed])  # JAX has only the second one
    for primitive in primitives:
        roofline.register_roofline(primitive)(functools.partial(_roofline, primitive))
    roofline.register_roofline(collective_p)(_collective_roofline)


def _roofline(primitive: jax_compat.Primitive, ctx: Any, *operands: Any, spec: MatmulSpec) -> Any:
    def product(*operands: Any) -> list[jax.Array]:
        return [*xla_matmul.matmul(dict(zip(spec.names, operands, strict=True)), spec, _PLATFORM).values()]

    return _roofline_of(over_batch(product, spec.batch), primitive, ctx, operands, spec.group.mesh)


def _collective_roofline(ctx: Any, x: Any, *, kind: str, mesh: Axes, caller: str, **where: Any) -> Any:
    def collective(x: jax.Array) -> jax.Array:
        axes, dimensions = where["axis_name"], where["dimensions"]
        is_moved = kind not in ("vary", "wait", "pass")
        return xla_matmul.collective(kind, x, axes, dimensions, platform=_PLATFORM) if is_moved else x

    return _roofline_of(collective, collective_p, ctx, [x], mesh)


def _roofline_of(
    fn: Callable[..., Any], primitive: jax_compat.Primitive, ctx: Any, operands: Sequence[Any], axes: Axes
) -> Any:
    """Returns JAX's roofline of the operations of `fn`, on shards of a mesh with these axes."""
    jaxpr = jax_rules.jaxpr_on_axes(fn, operands, axes)
    mesh = ctx.mesh or jax.sharding.AbstractMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
    pins = {"pin_lhs_in_vmem": ctx.pin_lhs_in_vmem, "pin_rhs_in_vmem": ctx.pin_rhs_in_vmem}
    interpret = sys.modules["jax.experimental.roofline.roofline"]._roofline_interpreter
    return interpret(primitive.name, jaxpr, mesh, **pins)
