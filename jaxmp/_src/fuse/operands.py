"""Finds a product's operands, before the equations that a call does together with its product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxmp._src.fuse.graph import Graph
from jaxmp._src.platform.jax_internals import jax_tracing


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather of dimension `dimension` over `axes`, inside shard_map."""

    axes: tuple[str, ...]
    dimension: int


@dataclasses.dataclass(frozen=True)
class Operand:
    """A product's operand: `value`, cast to `dtype`, and its contracted and batch dimensions. `equations`: the indices
    of equations between `value` and the product that the call does too: an all_gather (`gather`; then `value` is a
    shard), a reshard, casts, a conjugation, transposes and pvary."""

    value: Any
    dtype: np.dtype
    contract: tuple[int, ...]
    batch: tuple[int, ...]
    equations: frozenset[int] = frozenset()
    gather: Gather | None = None
    is_resharded: bool = False
    is_conjugated: bool = False

    @property
    def ndim(self) -> int:
        return len(self.value.aval.shape)

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.ndim) if i not in self.contract + self.batch)

    @property
    def has_rows_first(self) -> bool:
        """True if it is stored as (free dimensions, contracted dimensions)."""
        return self.contract == tuple(range(self.ndim - len(self.contract), self.ndim))

    @property
    def is_flat(self) -> bool:
        """True if the contracted dimensions are the first or the last ones, in order, and there is no batch: a reshape
        then makes a matrix."""
        return not self.batch and (self.has_rows_first or self.contract == tuple(range(len(self.contract))))

    def folds(self, dimension: int) -> bool:
        """True if blocks along this dimension are blocks of rows or columns of the matrix that the operand folds into.
        It is then the first contracted or free one or, with rows first, the last free one (others stay a batch)."""
        return dimension in (self.contract[:1] + self.free[:1]) or (self.has_rows_first and dimension in self.free[-1:])


def axes_of_type(aval: Any) -> tuple[tuple[str, ...], ...]:
    """Returns for each dimension the explicit axes that shard it, or ()."""
    spec = aval.sharding.spec.partitions
    entries = (*spec, *(None,) * (len(aval.shape) - len(spec)))
    return tuple((e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in entries)


def is_auto(aval: Any) -> bool:
    """True if XLA shards a type's values: there are several devices, and all axes are automatic, of the type's mesh or,
    if it has none, of the mesh that is set."""
    mesh = aval.sharding.mesh if not aval.sharding.mesh.empty else jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def is_explicit(aval: Any) -> bool:
    """True if the type's mesh has explicit axes, so that the sharding is part of the type."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types if not aval.sharding.mesh.empty else False


# The equations before --------------------------------------------------------------------------------------------


def operand_of(
    graph: Graph,
    v: Any,
    contract: tuple[int, ...],
    batch: tuple[int, ...],
    gathers: frozenset[int],
    *,
    over_pvary: bool = True,
) -> Operand:
    """Returns the operand of a product that reads `v` with these dimension numbers. Goes back from `v` over what a call
    does: transposes that keep the order of free dimensions, conjugations, pvary if `over_pvary` (the call's gradient
    does its transpose, a sum), and, at the indices `gathers`, reshards or one all_gather, with one cast and pvary after
    them. Other casts stay outside the operand. If `gathers` is empty, goes only over values that nothing else reads."""
    now = best = Operand(v, v.aval.dtype, tuple(contract), tuple(batch))
    while (eqn := graph.made_by(now.value)) is not None and not all(map(jax_tracing.is_literal, eqn.invars[:1])):
        i, name = graph.producer[now.value], eqn.primitive.name
        is_gather = i in gathers and now.gather is None
        if not is_gather and not gathers and graph.only_reader(now.value) is None:
            break
        is_passed = name == "convert_element_type" or (name == "pvary" and not over_pvary)
        rule = _GATHERS.get(name) if is_gather else _of_cast if is_passed else _MOVES.get(name)
        before = rule and rule(now, eqn)
        if before is None:
            break
        before = dataclasses.replace(before, value=eqn.invars[0], equations=now.equations | {i})
        now, best = before, before if is_gather or (best is now and not is_passed) else best
    return best


def _of_all_gather(operand: Operand, eqn: Any) -> Operand:
    axes = eqn.params["axis_name"]
    gather = Gather((axes,) if isinstance(axes, str) else tuple(axes), eqn.params["all_gather_dimension"])
    return dataclasses.replace(operand, gather=gather)


def _of_transpose(operand: Operand, eqn: Any) -> Operand | None:
    """Returns the operand before a transpose; None if free dimensions change their order, or before an all_gather."""
    contract, batch, free = (
        tuple(eqn.params["permutation"][d] for d in dims) for dims in (operand.contract, operand.batch, operand.free)
    )
    is_in_order = operand.gather is None and free == tuple(sorted(free))
    return dataclasses.replace(operand, contract=contract, batch=batch) if is_in_order else None


def _of_cast(operand: Operand, eqn: Any) -> Operand | None:
    """Returns the operand before its only cast, from floating point, else None: the call does one of two casts, so it
    would lose the rounding of the other. The cast may come before or after a gather."""
    (x,), (y,) = eqn.invars, eqn.outvars
    return operand if jnp.issubdtype(x.aval.dtype, jnp.floating) and y.aval.dtype == operand.dtype else None


# Returns the operand before the equation that makes it, still without its value and equations, or None.
_Rule = Callable[[Operand, Any], Operand | None]
_GATHERS: dict[str, _Rule] = {
    "reshard": lambda operand, eqn: dataclasses.replace(operand, is_resharded=True),
    "all_gather": _of_all_gather,
}
_MOVES: dict[str, _Rule] = {
    "transpose": _of_transpose,
    "pvary": lambda operand, eqn: operand,
    "conj": lambda operand, eqn: dataclasses.replace(operand, is_conjugated=not operand.is_conjugated),
}
