"""Taylor mode (`jax.experimental.jet`) of products without an epilog, which are bilinear."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import jet

from jaxmp._src.primitive.primitives import auto_batched_matmul_p, auto_matmul_p, batched_matmul_p, matmul_p
from jaxmp._src.runtime import jax_compat


def _product(
    primitive: jax_compat.Primitive, primals: Sequence[jax.Array], series: Sequence[Sequence[Any]], **params: Any
) -> tuple[Any, list[Any]]:
    """The value and the coefficients of a product: each is a sum of products of theirs (the rule of Leibniz)."""
    left, right = ([x, *terms] for x, terms in zip(primals, series, strict=True))
    value, *terms = [
        sum(primitive.bind(left[j], right[i - j], **params) for j in range(i + 1)) for i in range(len(left))
    ]
    return value, terms


for _primitive in (matmul_p, auto_matmul_p, batched_matmul_p, auto_batched_matmul_p):
    jet.jet_rules[_primitive] = jax_compat.under_known_flags(functools.partial(_product, _primitive))
