"""Taylor mode (`jax.experimental.jet`) of products without an epilog, which are bilinear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._src.primitive.primitives import bind_operands
from jaxmp._src.spec.matmul_spec import MatmulSpec
from jaxmp._src.spec.refusal import NotAvailable


def jet_rule(
    primals: Sequence[jax.Array], series: Sequence[Sequence[Any]], *, spec: MatmulSpec
) -> tuple[list[Any], list[list[Any]]]:
    """The value and the coefficients of a product: each is a sum of products of theirs (the rule of Leibniz)."""
    if not spec.is_bilinear:
        raise NotAvailable(
            f"jax.experimental.jet takes products without C and epilog, got epilog {spec.epilog.name}; nest jax.jvp"
        )
    left, right = ([x, *terms] for x, terms in zip(primals, series, strict=True))
    value, *terms = [sum(bind_operands(spec, left[j], right[i - j])[0] for j in range(i + 1)) for i in range(len(left))]
    return [value], [terms]
