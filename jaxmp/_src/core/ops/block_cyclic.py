"""Block-cyclic matrices: arrays of ScaLAPACK's local parts, made from global arrays and back, and their products.

A product is one call on the local parts, and its derivatives are such products again. A redistribution is one
all-to-all per dimension, of parts padded to the largest: each process sorts its part of a contiguous sharding by
receiver, exchanges it, and puts what arrives in place. It is a permutation, so its transpose is the way back.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxmp._src.core.contraction.contraction import Contraction, of_matrices
from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.primitive.primitives import bind
from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.sharding.meshes import manual_mesh
from jaxmp._src.core.spec import levels, precisions, process_grid
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern
from jaxmp._src.core.spec.options import Array, AxisName, Mesh
from jaxmp._src.core.spec.process_grid import BlockCyclic, Distributed
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue, NotAvailable, naming
from jaxmp._src.core.spec.request import Request
from jaxmp._src.core.validation import arguments, comm_options, operand_checks, result_types
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat

# The mesh axes of the process rows and of the process columns.
Axes = tuple[tuple[str, ...], tuple[str, ...]]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["shape", "layout", "mesh", "axes"]
)
@dataclasses.dataclass(frozen=True)
class BlockCyclicArray:
    """A matrix in a block-cyclic layout over two mesh axes: a pytree with one array.

    Attributes:
      data: (p * rows, q * columns), sharded P(*axes), where (rows, columns) is the largest part that a process holds:
        each device has its ScaLAPACK buffer, row-major, padded with zeros.
      shape: the shape of the matrix.
      layout: a `jaxmp.BlockCyclic`.
      mesh: the mesh; axes: the mesh axes of the process rows and of the process columns.
    """

    data: jax.Array
    shape: tuple[int, int]
    layout: BlockCyclic
    mesh: Mesh
    axes: Axes

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _as_axes(self.axes))

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return 2

    def __matmul__(self, other: BlockCyclicArray) -> BlockCyclicArray:
        with naming("matmul"):
            return matmul(Request("matmul", self, other))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NoReturn:
        """Raises, because NumPy would silently make an array with this one object in it."""
        raise InvalidType("BlockCyclicArray: is not an array in the global order; pass jaxmp.from_block_cyclic(x)")


@public
def to_block_cyclic(
    x: Array | BlockCyclicArray,
    layout: BlockCyclic,
    *,
    mesh: Mesh | None = None,
    axes: tuple[AxisName, AxisName] | None = None,
) -> BlockCyclicArray:
    """Distributes a matrix block-cyclically; pure, differentiable, and the inverse of `from_block_cyclic`.

    Args:
      x: (m, n), numbers or bools, sharded in any way; or a `BlockCyclicArray`, which gets another layout on its grid.
      layout: a `jaxmp.BlockCyclic` with the grid of the mesh axes.
      mesh: the mesh; by default x's own (if x is not traced), else the ambient one. A `BlockCyclicArray` keeps its own
        mesh and axes, and takes no others.
      axes: the mesh axes of the process rows and of the process columns, each a name or a tuple of names (slowest
        first); by default the two axes of a mesh that has two.

    Returns:
      A `BlockCyclicArray` of shape (m, n).

    Raises:
      TypeError, ValueError: x is not a matrix, there is no mesh, the layout has another grid, or inside shard_map.

    Communicates by one all-to-all per dimension over the axes, after bringing x to the sharding P(*axes); on explicit
    axes first to P(), if the grid does not divide it.

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> x = jaxmp.to_block_cyclic(jnp.ones((5, 3)), jaxmp.BlockCyclic(grid=(1, 1), block=(2, 2)), mesh=mesh)
    >>> jaxmp.from_block_cyclic(x).shape
    (5, 3)
    """
    if not isinstance(layout, BlockCyclic):
        raise InvalidType(f"layout must be a jaxmp.BlockCyclic, got {type(layout).__name__}")
    if isinstance(x, BlockCyclicArray):
        if layout.grid != x.layout.grid:
            raise InvalidValue(
                f"x is on a {x.layout.grid} grid but layout has {layout.grid}; keep the grid, which the mesh axes give"
            )
        if mesh not in (None, x.mesh) or (axes is not None and _find_axes(x.mesh, axes, layout) != x.axes):
            raise InvalidValue(f"x is on axes {x.axes} of its mesh; use from_block_cyclic to bring it to others")
        data = move(x.data, x.mesh, x.axes, Distributed(x.shape, x.layout), layout)
        return dataclasses.replace(x, data=data, layout=layout)
    operand_checks.check_array("x", x, ndim=2)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise InvalidType(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    found = _find_mesh(x, mesh)
    names = _find_axes(found, axes, layout)
    data = spread(jnp.asarray(x), found, names, layout)
    return BlockCyclicArray(data, (x.shape[0], x.shape[1]), layout, found, names)


@public
def from_block_cyclic(x: BlockCyclicArray) -> jax.Array:
    """Returns the matrix that `x` holds, as an ordinary array.

    Args:
      x: a `BlockCyclicArray` of shape (m, n).

    Returns:
      (m, n), sharded P(*x.axes) if the grid divides it. If not, replicated on explicit axes, and sharded as XLA chooses
      on auto axes.

    Raises:
      TypeError: x is not a BlockCyclicArray.

    Communicates by one all-to-all per dimension.

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> x = jaxmp.to_block_cyclic(jnp.ones((5, 3)), jaxmp.BlockCyclic(grid=(1, 1), block=(2, 2)), mesh=mesh)
    >>> jaxmp.from_block_cyclic(jaxmp.matmul(x, x, transpose_a=True))[0, 0]
    Array(5., dtype=float32)
    """
    if not isinstance(x, BlockCyclicArray):
        raise InvalidType(f"x must be a jaxmp.BlockCyclicArray, got {type(x).__name__}")
    return collect(x.data, x.shape, x.mesh, x.axes, x.layout)


def _find_mesh(x: Any, mesh: Mesh | None) -> Mesh:
    """Returns `mesh`, else the mesh of x's sharding if x is not traced, else the ambient mesh. Raises ValueError if
    there is none, and inside shard_map."""
    if manual_mesh() is not None:
        raise InvalidValue("takes global arrays, so it cannot be called inside shard_map; call it outside")
    own = None if isinstance(x, jax.core.Tracer) else getattr(getattr(x, "sharding", None), "mesh", None)
    for found in (mesh, own, jax.sharding.get_abstract_mesh() if mesh is None else None):
        if found is not None and not found.empty:
            return found
    raise InvalidValue("there is no mesh; pass mesh=, or call under jax.set_mesh(mesh)")


def _find_axes(mesh: Mesh, axes: Any, layout: BlockCyclic) -> Axes:
    """Returns `axes`, by default the mesh's, as two tuples of names. Raises ValueError unless `axes` is a pair with the
    grid's sizes."""
    if axes is None:
        axes = tuple(mesh.axis_names)
    if isinstance(axes, str) or not isinstance(axes, Sequence) or len(axes) != 2:
        raise InvalidValue(
            f"axes must be a pair, the mesh axes of the process rows and of the process columns, got {axes!r}"
        )
    rows, cols = _as_axes(axes)
    meshes.check_axes(mesh, rows + cols)
    sizes = tuple(math.prod(mesh.shape[axis] for axis in entry) for entry in (rows, cols))
    if sizes != layout.grid:
        raise InvalidValue(
            f"layout has the grid {layout.grid} but the mesh axes {(rows, cols)} have {sizes}; they must be equal"
        )
    return rows, cols


def _as_axes(axes: Any) -> Any:
    """Returns the pair `axes` with both entries as tuples of names."""
    return tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in axes)


# Redistribution --------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def spread(x: jax.Array, mesh: Mesh, axes: Axes, layout: BlockCyclic) -> jax.Array:
    """Converts a global matrix to `BlockCyclicArray.data`. A matrix that the grid does not divide is padded, on
    explicit axes after it is replicated."""
    shape = (x.shape[0], x.shape[1])
    plain = process_grid.contiguous(shape, layout.grid)
    padding = [(0, nb * p - n) for n, nb, p in zip(shape, plain.block, layout.grid, strict=True)]
    if 0 in shape:
        return empty(shape, layout, x.dtype)
    if any(after for _, after in padding):
        # A sharded dimension cannot grow by a number that its shards do not divide.
        x = jnp.pad(_resharded(x, mesh, P(None, None)), padding)
    return move(_resharded(x, mesh, P(*axes)), mesh, axes, Distributed(shape, plain), layout)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def collect(data: jax.Array, shape: tuple[int, int], mesh: Mesh, axes: Axes, layout: BlockCyclic) -> jax.Array:
    """Converts `BlockCyclicArray.data` to a global array of this shape, without padding."""
    if 0 in shape:
        return jnp.zeros(shape, data.dtype)
    x = move(data, mesh, axes, Distributed(shape, layout), process_grid.contiguous(shape, layout.grid))
    return x if x.shape == shape else _resharded(x, mesh, P(None, None))[: shape[0], : shape[1]]


def empty(shape: tuple[int, int], layout: BlockCyclic, dtype: np.dtype) -> jax.Array:
    rows, cols = layout.local_shape(shape)
    return jnp.zeros((rows * layout.grid[0], cols * layout.grid[1]), dtype)


def _resharded(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Reshards `x` to `spec` on a mesh with explicit axes. On others it returns `x`, which shard_map reshards later."""
    if not meshes.has_explicit_axes(mesh):
        return x
    return meshes.reshard(x, mesh, meshes.type_spec(x), spec, is_explicit=True)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def move(data: jax.Array, mesh: Mesh, axes: Axes, source: Distributed, target: BlockCyclic) -> jax.Array:
    """Converts `data` from the layout of `source` to the layout `target` on the same grid, in `shard_map`, by one
    all-to-all along each dimension on which the layouts differ. Returns zeros if the matrix is empty."""
    shape = source.shape
    if 0 in shape:
        return empty(shape, target, data.dtype)
    exchanges = [process_grid.exchange(shape, dimension, source.layout, target) for dimension in range(2)]

    def exchanged(x: jax.Array) -> jax.Array:
        for dimension, (exchange, names) in enumerate(zip(exchanges, axes, strict=True)):
            if exchange is None:
                continue
            (send, take), me = exchange, lax.axis_index(names)
            parts = jnp.asarray(send.reshape(len(send), -1))[me]
            x = jnp.take(x, parts, axis=dimension, mode="fill", fill_value=0)
            x = collectives.all_to_all(x, names, dimension, dimension)
            x = jnp.take(x, jnp.asarray(take)[me], axis=dimension, mode="fill", fill_value=0)
        return x

    return jax.shard_map(exchanged, mesh=mesh, in_specs=P(*axes), out_specs=P(*axes))(data)


# Products --------------------------------------------------------------------------------------------------------


def matmul(request: Request) -> BlockCyclicArray:
    """Computes `jaxmp.matmul` for block-cyclic operands. Raises NotImplementedError for an alpha or beta that is a JAX
    array, and for the options in `_OF_ARRAYS`: determinism, mesh, in_shardings, scaling, an epilog and its inputs.
    Raises TypeError or ValueError for operands that do not fit."""
    a, b, c = request.a, request.b, request.c
    for argument in _OF_ARRAYS:
        if getattr(request, argument) != Request._field_defaults[argument]:
            raise NotAvailable(f"{argument} is not available for block-cyclic operands; leave it out")
    for argument in ("alpha", "beta"):
        if isinstance(getattr(request, argument), jax.Array):
            raise NotAvailable(
                f"with block-cyclic operands {argument} is a Python number, got an array; scale the data of an "
                "operand instead"
            )
    _check_operands(a, b, c)
    flags = operand_checks.check_flags(request)
    preferred = operand_checks.check_preferred(request.preferred_element_type)
    operand, out = result_types.of_call(((a.dtype, False), (b.dtype, False)), preferred, False)[:2]
    product = of_matrices(2, transpose_a=flags["transpose_a"], transpose_b=flags["transpose_b"])
    *_, d = distributions = _result(request, product)
    _check_blocks(product, distributions)
    like_c = None if c is None else jax.ShapeDtypeStruct(c.shape, c.dtype)
    spec = MatmulSpec(
        out_dtype=out,
        group=Group(Pattern.GRID, tuple(a.mesh.shape.items()), *a.axes),
        **flags,
        alpha=arguments.check_scalar("alpha", request.alpha, out),
        beta=arguments.check_c(like_c, request.beta, out, d.shape),
        precision=precisions.resolve(request.precision, operand, out),
        has_c=c is not None,
        distributions=distributions,
        comm=comm_options.resolve_comm_options(out, operand, request.comm, levels.ANY_ORDER),
    )
    comm_options.check_comm_options(spec, d.shape[-1])
    operands = [x.data.astype(dtype) for x, dtype in ((a, operand), (b, operand), (c, out)) if x is not None]
    return BlockCyclicArray(_multiply(spec, a.mesh, *operands), d.shape, d.layout, a.mesh, a.axes)


# Options that block-cyclic operands do not take.
_OF_ARRAYS = ("determinism", "epilog_inputs", "in_shardings", "mesh", "scaling", "epilog")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _multiply(spec: MatmulSpec, mesh: Mesh, a: jax.Array, b: jax.Array, *c: jax.Array) -> jax.Array:
    """Multiplies `BlockCyclicArray.data`, in `shard_map`. If a or b is empty, returns beta * c, or zeros without c."""
    assert spec.distributions is not None
    d, tiles = spec.distributions[2], P(spec.group.row_axes, spec.group.col_axes)
    if 0 in (*a.shape, *b.shape):  # nothing to contract
        is_added = c and spec.beta != 0
        return c[0] * jnp.asarray(spec.beta, c[0].dtype) if is_added else empty(d.shape, d.layout, spec.out_dtype)

    def multiply(a: jax.Array, b: jax.Array, *c: jax.Array) -> jax.Array:
        extra = {"c": xla_matmul.without_padding(spec, c[0])} if c else {}  # so its cotangent has no padding either
        return bind(spec.replace(is_typed=jax_compat.is_vma_checked()), a, b, extra)["d"]

    return jax.shard_map(multiply, mesh=mesh, in_specs=tiles, out_specs=tiles)(a, b, *c)


def _check_operands(a: Any, b: Any, c: Any) -> None:
    """Raises TypeError unless a, b and c (or None) are block-cyclic arrays of numbers or bools. Raises ValueError for
    different meshes or axes, for host memory, and inside shard_map."""
    for argument, x in ({"a": a, "b": b} | ({} if c is None else {"c": c})).items():
        if not isinstance(x, BlockCyclicArray):
            raise InvalidType(
                f"{argument} must be a jaxmp.BlockCyclicArray as the other operands are, got "
                f"{type(x).__name__}; convert it with jaxmp.to_block_cyclic"
            )
        operand_checks.check_array(argument, jax.ShapeDtypeStruct(x.shape, x.dtype))
        operand_checks.check_memory(argument, x.data)
        if (dict(x.mesh.shape), x.axes) != (dict(a.mesh.shape), a.axes):
            raise InvalidValue(
                f"a is on axes {a.axes} of mesh {dict(a.mesh.shape)} but {argument} on {x.axes} of "
                f"{dict(x.mesh.shape)}; use one mesh and one pair of axes"
            )
    if manual_mesh() is not None:
        raise InvalidValue("takes block-cyclic arrays outside of shard_map only, because they are global")


def _result(request: Request, product: Contraction) -> tuple[Distributed, Distributed, Distributed]:
    """Returns the shapes and layouts of (a, b, the result). The result has the layout `out_sharding`, else c's. Without
    both it has a's blocks along m and b's along n; its first process is in a's first row of processes and b's first
    column, or 0 for an operand that is stored transposed. Raises ValueError if k or the grids differ, or if c has
    another layout than the result. Raises TypeError if `out_sharding` is not a BlockCyclic."""
    a, b, c, asked = request.a, request.b, request.c, request.out_sharding
    of_a, of_b = dict(zip(product.a, a.shape, strict=True)), dict(zip(product.b, b.shape, strict=True))
    if of_a["k"] != of_b["k"]:
        raise InvalidValue(f"b has k={of_b['k']} but a has k={of_a['k']} (global shapes {a.shape}, {b.shape})")
    if asked is not None and not isinstance(asked, BlockCyclic):
        raise InvalidType(f"out_sharding must be a jaxmp.BlockCyclic, got {type(asked).__name__}")
    block = a.layout.block[product.a.index("m")], b.layout.block[product.b.index("n")]
    first = 0 if request.transpose_a else a.layout.first[0], 0 if request.transpose_b else b.layout.first[1]
    layout: BlockCyclic = asked or (BlockCyclic(a.layout.grid, block, first) if c is None else c.layout)
    if layout.grid != a.layout.grid:
        raise InvalidValue(f"out_sharding has the grid {layout.grid} but a is on {a.layout.grid}")
    if c is not None and c.layout != layout:
        raise InvalidValue(f"c has the layout {c.layout} but the result {layout}; they must be equal")
    d = Distributed((of_a["m"], of_b["n"]), layout)
    return Distributed(a.shape, a.layout), Distributed(b.shape, b.layout), d


def _check_blocks(product: Contraction, matrices: tuple[Distributed, Distributed, Distributed]) -> None:
    """Raises ValueError unless two matrices have blocks of one size along a shared m, n or k (cuBLASMp's contract)."""
    names = "a", "b", "the result"
    for index, one, other in (("k", 0, 1), ("m", 0, 2), ("n", 1, 2)):
        x, y = (matrices[i].layout.block[product.indices[i].index(index)] for i in (one, other))
        if x != y:
            raise InvalidValue(
                f"along {index}, {names[one]} has blocks of {x} but {names[other]} has {y}; they must be equal: put "
                f"{names[other]} in blocks of {x}, or {names[one]} in blocks of {y} (jaxmp.to_block_cyclic)"
            )
