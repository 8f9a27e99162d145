"""Emits products of groups of rows (`lax.ragged_dot` and its derivatives) and exchanges of rows as calls of jaxmp."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._src.core.lowering import decide
from jaxmp._src.core.ops.ragged_all_to_all import ragged_all_to_all
from jaxmp._src.core.ops.ragged_dot_general import ragged_dot_general
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.fuse import emit
from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.operands import is_auto
from jaxmp._src.platform.jax_internals import jax_tracing


def is_of_xla(eqn: Any, options: Options) -> bool:
    """True if a call for this `ragged_dot_general` would itself run XLA's product, here and with these options."""
    where = dataclasses.replace(decide.here(), is_on_shards=not is_auto(eqn.invars[0].aval))
    return bool(decide.why_xla(options.implementation, options.level, where, is_global=True))


def call(eqn: Any, options: Options, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns [the result of a `ragged_dot_general`] from one call. Raises NotAvailable if its type is not JAX's."""
    (lhs, rhs, sizes), aval = operands, eqn.outvars[0].aval
    d = ragged_dot_general(
        lhs,
        rhs,
        sizes,
        eqn.params["ragged_dot_dimension_numbers"],
        precision=eqn.params["precision"],
        preferred_element_type=aval.dtype,
        out_sharding=emit.out_sharding(aval),
        implementation=options.implementation,
        **options.level.option,
    )
    return [_of_type(eqn, d)]


def exchange(eqn: Any, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns [the result of a `ragged_all_to_all`], which jaxmp has on CPU devices too. Raises as `call`."""
    return [_of_type(eqn, ragged_all_to_all(*operands, **eqn.params))]


def _of_type(eqn: Any, d: jax.Array) -> jax.Array:
    aval = eqn.outvars[0].aval
    if not jax_tracing.is_type_of(aval, d):
        raise NotAvailable(f"{aval} became {jax.typeof(d)}")
    return d
