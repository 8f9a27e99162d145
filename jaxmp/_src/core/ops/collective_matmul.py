"""Products inside `jax.shard_map`: the ranks share the work over named mesh axes."""

from __future__ import annotations

import inspect
from typing import Any, Protocol, Unpack, cast, overload

import jax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxmp._src.core.sharding.sharded_call import collective
from jaxmp._src.core.spec.matmul_spec import Pattern
from jaxmp._src.core.spec.options import AxisName
from jaxmp._src.core.spec.refusal import InvalidValue
from jaxmp._src.core.spec.request import OfAny, OfAux, OfPlain, Request, WithResults
from jaxmp._src.core.validation.public import public

_Pair = tuple[AxisName, AxisName]


class OnAxis(Protocol):
    """A product over one axis, as a type checker sees it."""

    @overload
    def __call__(
        self, x: ArrayLike, w: ArrayLike, axis_name: AxisName, c: ArrayLike | None = None, **options: Unpack[OfPlain]
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: ArrayLike, w: ArrayLike, axis_name: AxisName, c: ArrayLike | None = None, **options: Unpack[OfAux]
    ) -> WithResults: ...
    @overload
    def __call__(
        self, x: ArrayLike, w: ArrayLike, axis_name: AxisName, c: ArrayLike | None = None, **options: Unpack[OfAny]
    ) -> Any: ...


def _on_axis(
    name: str, pattern: Pattern, does: str, *, operands: str, of_c: str, result: str, source: str, shardings: str
) -> OnAxis:
    """Returns the public function `name` for products in `pattern`. The other arguments are parts of its docstring."""

    def call(
        x: ArrayLike, w: ArrayLike, axis_name: AxisName, c: ArrayLike | None = None, **options: Unpack[OfAny]
    ) -> jax.Array | WithResults:
        return collective(Request(name, x, w, c, **options), pattern, axis_name)

    call.__name__ = call.__qualname__ = name
    text = f"""{does}

    Inside a full-manual `jax.shard_map`; collective over `axis_name`: every rank calls it with an equal spec.

    Args:
      {operands}
      axis_name: a mesh axis, or a tuple of them, slowest first: the P ranks of a group along it share the product.
        Each combination of the other axes' indices is another group.
      c: like the result, with `beta`{of_c}

    The other options are as in `matmul`.

    Returns:
      {result}

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or for an axis not in the mesh.

    Source: cuBLASMp's {source} (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").

    >>> import functools, jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> @functools.partial(jax.shard_map, mesh=mesh, {shardings})
    ... def call(x, w):
    ...     return jaxmp.{name}(x, w, "x")
    >>> p = jax.device_count()
    >>> call(jnp.ones((4 * p, 2 * p)), jnp.ones((2 * p, 3 * p))).shape == (4 * p, 3 * p)
    True
    """
    call.__doc__ = inspect.cleandoc(text)
    return cast(OnAxis, public(call))


all_gather_matmul = _on_axis(
    "all_gather_matmul",
    Pattern.ALL_GATHER,
    "Gather x's rows over an axis and multiply: `concat(x of every rank) @ w`.",
    operands="""x: (..., m/P, k); the next to last dimension is gathered.
      w: (k, n/P): this rank's columns.""",
    of_c=". A `bias` holds this rank's n/P values.",
    result="(..., m, n/P).",
    source="AllGather + Matmul",
    shardings='in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x")',
)
matmul_reduce_scatter = _on_axis(
    "matmul_reduce_scatter",
    Pattern.REDUCE_SCATTER,
    "Multiply and sum over an axis, each rank keeping its part of the rows.",
    operands="x: (..., m, k/P); w: (k/P, n): this rank's part of the contraction. P divides m.",
    of_c=". A `bias` holds all n values, the same on every rank.",
    result="(..., m/P, n): rank r has the r-th part of the rows of `sum over ranks of x @ w`, rounded once.",
    source="Matmul + ReduceScatter",
    shardings='in_specs=(P(None, "x"), P("x", None)), out_specs=P("x", None)',
)
matmul_all_reduce = _on_axis(
    "matmul_all_reduce",
    Pattern.ALL_REDUCE,
    "Multiply and sum over an axis: `sum over ranks of x @ w` on every rank.",
    operands="x: (..., m, k/P); w: (k/P, n): this rank's part of the contraction.",
    of_c="; it is added once. A `bias` holds all n values. Both are the same on every rank.",
    result="(..., m, n), the same bits on every rank.",
    source="Matmul + AllReduce",
    shardings='in_specs=(P(None, "x"), P("x", None)), out_specs=P()',
)


@overload
def block_matmul(
    a: ArrayLike, b: ArrayLike, axis_names: _Pair, c: ArrayLike | None = None, **options: Unpack[OfPlain]
) -> jax.Array: ...
@overload
def block_matmul(
    a: ArrayLike, b: ArrayLike, axis_names: _Pair, c: ArrayLike | None = None, **options: Unpack[OfAux]
) -> WithResults: ...
@overload
def block_matmul(
    a: ArrayLike, b: ArrayLike, axis_names: _Pair, c: ArrayLike | None = None, **options: Unpack[OfAny]
) -> Any: ...
@public
def block_matmul(
    a: ArrayLike, b: ArrayLike, axis_names: _Pair, c: ArrayLike | None = None, **options: Unpack[OfAny]
) -> jax.Array | WithResults:
    """Multiplies matrices in 2-D blocks on a p x q mesh.

    Inside a full-manual `jax.shard_map`; collective over both axes: every rank calls it with an equal spec.

    Args:
      a: (m/p, k/q): block (i, j) of a on the rank with index i on the first axis and j on the second; with
        `transpose_a` the stored matrix is (k, m) and its block (k/p, m/q).
      b: (k/p, n/q), or (n/p, k/q) with `transpose_b`.
      axis_names: (axis of the rows, axis of the columns); each may be a tuple of axes, slowest first.
      c: (m/p, n/q), with `beta`. A `bias` holds the n/q values of this rank's columns.

    The other options are as in `matmul`.

    Returns:
      (m/p, n/q): block (i, j) of d.

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or unless axis_names is a pair.

    Source: cuBLASMp's 2-D matmul (cublasMpMatmul, "generic"), after van de Geijn and Watts, SUMMA (1997).

    >>> import functools, jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(), 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> tiles = P("x", "y")
    >>> @functools.partial(jax.shard_map, mesh=mesh, in_specs=(tiles, tiles), out_specs=tiles)
    ... def call(a, b):
    ...     return jaxmp.block_matmul(a, b, ("x", "y"))
    >>> p = jax.device_count()
    >>> call(jnp.ones((4 * p, 2 * p)), jnp.ones((2 * p, 3))).shape == (4 * p, 3)
    True
    """
    if not isinstance(axis_names, tuple | list | P) or len(axis_names) != 2:
        raise InvalidValue(f"axis_names must be a pair, the axis of rows and the axis of columns, got {axis_names!r}")
    return collective(Request("block_matmul", a, b, c, **options), Pattern.GRID, *axis_names)
