"""Every rule of each primitive of products, which `primitive/primitives` describes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental import jet
from jax.interpreters import ad, batching

from jaxmp._src.core.lowering import rules
from jaxmp._src.core.lowering.ffi_call import mesh_position_p, mesh_position_rule
from jaxmp._src.core.primitive import batching as batch_rules
from jaxmp._src.core.primitive import grouped, jvp, primitives, transpose
from jaxmp._src.core.primitive.collectives import collective_p, reshard_p, whole_p
from jaxmp._src.core.primitive.primitives import (
    MATMULS,
    PRODUCTS,
    activated_matmul_p,
    activation_grad_p,
    naming_by_spec,
)
from jaxmp._src.core.sharding import partitioner
from jaxmp._src.platform.jax_internals import jax_compat, jax_rules
from jaxmp._src.platform.jax_internals.jax_compat import as_traced
from jaxmp._src.platform.jax_internals.jax_lowering import mlir

Rule = Callable[..., Any]
_jet_rules: Any = jet.jet_rules


def _register(
    primitive: jax_compat.Primitive, *, abstract_eval: Rule, jvp: Rule, transpose: Rule, batch: Rule, lower: Rule
) -> None:
    """Registers a primitive's rules; `lower(platform)` returns the lowering rule for "cpu", "cuda" or "other" (every
    other platform). Refusals in the rules get the names of the call's function and operands."""
    primitive.def_abstract_eval(naming_by_spec(abstract_eval))
    ad.primitive_jvps[primitive] = naming_by_spec(as_traced(jvp))
    ad.primitive_transposes[primitive] = naming_by_spec(as_traced(transpose))
    batching.primitive_batchers[primitive] = naming_by_spec(as_traced(batch))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, naming_by_spec(as_traced(lower(platform))), platform=platform)
    mlir.register_lowering(primitive, naming_by_spec(as_traced(lower("other"))))


for _product in MATMULS:
    _register(
        _product,
        abstract_eval=batch_rules.abstract_eval,
        jvp=batch_rules.jvp_rule,
        transpose=batch_rules.transpose_rule,
        batch=batch_rules.batch_rule,
        lower=lambda platform: partitioner.partitioned_rule(rules.matmul_rule(platform), partitioner.sharding_rule_of),
    )
    _jet_rules[_product] = naming_by_spec(as_traced(jvp.jet_rule))

_register(
    activation_grad_p,
    abstract_eval=lambda aux, t, **_: t,
    jvp=jvp.activation_grad_jvp_rule,
    transpose=lambda ct, aux, t, *, activation, spec: [None, primitives.activation_grad(activation, aux, ct, spec)],
    batch=batch_rules.activation_grad_batch_rule,
    lower=lambda platform: partitioner.partitioned_rule(
        rules.activation_grad_rule(platform), lambda spec: "m n, m n -> m n"
    ),
)

_register(
    activated_matmul_p,
    abstract_eval=lambda t, *rest, spec, activation: primitives.output_aval(spec, t, rest[-1]),
    jvp=jvp.activated_matmul_jvp_rule,
    transpose=transpose.activated_matmul_transpose_rule,
    batch=batch_rules.activated_matmul_batch_rule,
    lower=lambda platform: mlir.lower_fun(primitives.activated_matmul_parts, multiple_results=False),
)

for _product in grouped.GROUPED:
    _register(
        _product,
        abstract_eval=grouped.abstract_eval,
        jvp=grouped.jvp_rule,
        transpose=grouped.transpose_rule,
        batch=grouped.batch_rule,
        lower=partitioner.grouped_rule,
    )

# The policies of `jax.checkpoint` are asked about products, and checkify looks for NaN in all results.
jax_rules.register_saved((*PRODUCTS, *grouped.GROUPED), primitives.saves_products)
jax_rules.register_nan_checks((*PRODUCTS, activation_grad_p, *grouped.GROUPED))

mlir.register_lowering(mesh_position_p, mesh_position_rule)
for _primitive, _rule in ((collective_p, rules.collective_rule), (reshard_p, rules.reshard_rule)):
    mlir.register_lowering(_primitive, as_traced(functools.partial(_rule, platform="other")))
    mlir.register_lowering(_primitive, as_traced(functools.partial(_rule, platform="cpu")), platform="cpu")
mlir.register_lowering(whole_p, as_traced(rules.whole_rule))
