"""What a product reads: an operand, back over the equations that a call does beside its product."""

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

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather inside shard_map: of dimension `dimension` over `axes`."""

    axes: tuple[str, ...]
    dimension: int


@dataclasses.dataclass(frozen=True)
class Operand:
    """What a product reads: `value`, cast to `dtype`, with its own dimension numbers; `gather` where it is a shard."""

    value: Any
    dtype: np.dtype
    contract: Dims
    batch: Dims
    equations: frozenset[int] = frozenset()
    gather: Gather | None = None
    is_resharded: bool = False
    is_conjugated: bool = False

    @property
    def ndim(self) -> int:
        return len(self.value.aval.shape)

    @property
    def free(self) -> Dims:
        return tuple(i for i in range(self.ndim) if i not in self.contract + self.batch)

    @property
    def has_rows_first(self) -> bool:
        """Whether it is stored (free dimensions, contraction)."""
        return self.contract == tuple(range(self.ndim - len(self.contract), self.ndim))

    @property
    def is_flat(self) -> bool:
        """Whether its dimensions fold into those of a matrix."""
        return not self.batch and (self.has_rows_first or self.contract == tuple(range(len(self.contract))))

    def folds(self, dimension: int) -> bool:
        """Whether blocks along this dimension are blocks of rows, or of columns, of the matrix that it folds into; for
        the last of the free dimensions leading ones may stay beside it."""
        return dimension in (self.contract[:1] + self.free[:1]) or (self.has_rows_first and dimension in self.free[-1:])


def axes_of_type(aval: Any) -> tuple[tuple[str, ...], ...]:
    """The explicit axes over which each dimension is sharded."""
    spec = aval.sharding.spec.partitions
    entries = [spec[i] if i < len(spec) else None for i in range(len(aval.shape))]
    return tuple(
        () if e is None or not isinstance(e, str | tuple) else (e,) if isinstance(e, str) else e for e in entries
    )


def is_auto(aval: Any) -> bool:
    """Whether XLA's partitioner decides how a value of this type is sharded, as far as tracing knows."""
    mesh = aval.sharding.mesh if not aval.sharding.mesh.empty else jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def is_explicit(aval: Any) -> bool:
    """Whether shardings are part of the type."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types if not aval.sharding.mesh.empty else False


# The equations ahead ---------------------------------------------------------------------------------------------


def operand_of(
    graph: Graph, v: Any, contract: Dims, batch: Dims, gathers: frozenset[int], *, over_pvary: bool = True
) -> Operand:
    """What a product reads for `v`: back to where a gather that it takes in starts, or over transposes, conjugations
    and (`over_pvary`) what makes it vary, whose transpose is a sum that the call's gradient does.

    Casts stay ahead of the product, but for those behind such a gather.
    """
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


def _of_reshard(operand: Operand, eqn: Any) -> Operand:
    return dataclasses.replace(operand, is_resharded=True)


def _of_all_gather(operand: Operand, eqn: Any) -> Operand:
    axes = eqn.params["axis_name"]
    gather = Gather((axes,) if isinstance(axes, str) else tuple(axes), eqn.params["all_gather_dimension"])
    return dataclasses.replace(operand, gather=gather)


def _of_transpose(operand: Operand, eqn: Any) -> Operand | None:
    """Where the free dimensions stay in their order."""
    contract, batch, free = (
        tuple(eqn.params["permutation"][d] for d in dims) for dims in (operand.contract, operand.batch, operand.free)
    )
    is_in_order = operand.gather is None and free == tuple(sorted(free))
    return dataclasses.replace(operand, contract=contract, batch=batch) if is_in_order else None


def _of_pvary(operand: Operand, eqn: Any) -> Operand:
    return operand


def _of_conj(operand: Operand, eqn: Any) -> Operand:
    return dataclasses.replace(operand, is_conjugated=not operand.is_conjugated)


def _of_cast(operand: Operand, eqn: Any) -> Operand | None:
    """Where it may follow a gather as well as come ahead of it: elementwise, of floating-point numbers."""
    return operand if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating) else None


# The operand ahead of an equation that makes it, without its value and its equations, or None.
_Rule = Callable[[Operand, Any], Operand | None]
_GATHERS: dict[str, _Rule] = {"reshard": _of_reshard, "all_gather": _of_all_gather}
_MOVES: dict[str, _Rule] = {"transpose": _of_transpose, "pvary": _of_pvary, "conj": _of_conj}
