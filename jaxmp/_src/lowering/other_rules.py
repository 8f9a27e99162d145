"""Rules of `jax.experimental.sparse.sparsify` and `jax.experimental.roofline`, which find them by primitive: those of
XLA's operations for the same product.

They are registered once their user has imported them, which takes longer than importing jaxmp.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp._src.lowering import xla_matmul
from jaxmp._src.primitive.batched_matmul import ONE
from jaxmp._src.primitive.primitives import AUTO_TWIN, BATCHED
from jaxmp._src.runtime import jax_compat, jax_rules
from jaxmp._src.spec.matmul_spec import MatmulSpec


def _register_sparsify() -> None:
    transform = sys.modules["jax.experimental.sparse.transform"]
    for primitive in (*AUTO_TWIN.values(), *map(BATCHED.__getitem__, AUTO_TWIN.values())):
        transform.sparse_rules_bcoo[primitive] = functools.partial(_sparsify, transform.sparsify_raw, primitive)


def _sparsify(
    sparsify_raw: Callable[..., Any], primitive: jax_compat.Primitive, env: Any, *operands: Any, spec: MatmulSpec
) -> Sequence[Any]:
    def product(*operands: Any) -> list[jax.Array]:
        named = dict(zip(("a", "b", *spec.operand_names), operands, strict=True))
        return list(xla_matmul.global_matmul(named, spec, jax_compat.default_platform(), None).values())

    results: Sequence[Any] = sparsify_raw(jax.vmap(product) if primitive in ONE else product)(env, *operands)[0]
    return results


def _register_roofline() -> None:
    roofline = sys.modules["jax.experimental.roofline.roofline"]
    untyped, typed = jax_rules.PSUMS
    roofline._rooflines.setdefault(untyped, roofline._rooflines[typed])  # JAX has the second alone
    for primitive in (*BATCHED, *BATCHED.values()):
        roofline.register_roofline(primitive)(functools.partial(_roofline, roofline._roofline_interpreter, primitive))


def _roofline(
    interpret: Callable[..., Any], primitive: jax_compat.Primitive, ctx: Any, *operands: Any, spec: MatmulSpec
) -> Any:
    product = functools.partial(xla_matmul.matmul, spec=spec, platform="cuda")  # as it is on devices with such models
    jaxpr = jax_rules.jaxpr_on_axes(jax.vmap(product) if primitive in ONE else product, operands, spec.group.mesh)
    sizes, names = [size for _, size in spec.group.mesh], [name for name, _ in spec.group.mesh]
    mesh = ctx.mesh or jax.sharding.AbstractMesh(tuple(sizes), tuple(names))
    pins = {"pin_lhs_in_vmem": ctx.pin_lhs_in_vmem, "pin_rhs_in_vmem": ctx.pin_rhs_in_vmem}
    return interpret(primitive.name, jaxpr, mesh, **pins)


jax_rules.when_imported("jax.experimental.sparse", _register_sparsify)
jax_rules.when_imported("jax.experimental.roofline", _register_roofline)
