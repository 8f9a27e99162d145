"""Computes a product as calls of one shape, so that a library without a promised order of sums keeps a fixed order.

The extents, types, transpositions, leading dimensions and epilog of a call decide which kernel cuBLASLt takes, and the
kernel decides the order of the terms in an element of D. So all calls of a product have the same extents and the like,
for any number of rows and columns and on any mesh: one rank, all of k, ROWS rows, COLUMNS columns, a stored (m, k) and
b stored (k, n). Partial tiles are padded, and the results of padding are dropped.

    ROWS = 512, COLUMNS = 4096, a (1100, k), b (k, 5000): 3 x 2 calls of 512 x k x 4096. The last ones have 76 rows and
    904 columns of d. Row 600 is row 88 of its calls. On four ranks with 275 rows each, it is row 50 of the only call of
    the third rank.

Then an element depends only on its row of op(A), its column of op(B) and its place in the tile. It does not depend on
the place if a kernel sums all its tiles in the same way. No source says so for every kernel of cuBLASLt (a stream-K
schedule splits k differently in each tile), so `jaxmp selftest --implementation cublasmp` tests it on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.spec import levels, low_precision, process_grid, wire
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.extents import SPANS, Extents, extents, result_type, spans
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.runtime.types import Operands, Shape

# The extents of a call: 4 x 32 = 128 tiles of 128 x 128, about one for each of the 132 multiprocessors of an H100 or
# H200. Fewer rows than columns, because batches are often smaller than layers; multiples of 128, because scales of
# blocks and the packed mask of relu need them. Reasoned, not measured: no GPU was available.
ROWS, COLUMNS = 512, 4096
# k is padded to this extent so that a call may multiply by a derivative. The zeros add +0 to sums that begin at +0, so
# that no element changes, not even the sign of a zero. Every rank pads the same, because it holds all of k = 1.
PADDED_K = 2
# `call` of `matmul`.
TileCall = Callable[..., Operands]


def matmul(operands: Operands, spec: MatmulSpec, call: TileCall) -> Operands:
    """Returns the results of a local product by name. `call(operands, spec=spec)` returns the results of a tile, by
    name. XLA computes results without elements, and fp8, fp4 and int8 products with k = 0. If `spec.order` says that
    other patterns transpose the product, it is computed transposed here too."""
    a, b, row = operands["a"], operands["b"], spec.rule
    found = extents(spec, a.shape, b.shape)
    rows, k, _, cols = found.local
    if 0 in (rows, cols) or (k == 0 and low_precision.is_low_precision(a.dtype)):
        return xla_matmul.matmul(operands, spec, "cpu")
    if k == 0:  # cuBLASMp does not take it
        operands = padded_along_k(operands, spec)
    if spec.order.is_transposed:  # on other meshes the same gradient is the transposed product
        transposed = spec.reorder(is_transposed=False).swapped()
        return {"d": matmul({"a": operands["b"], "b": operands["a"]}, transposed, call)["d"].T}
    if row.derivative and row.gradient:
        return _with_sums(operands, spec, call)
    types = {name: x.dtype for name, x in operands.items()}
    moved = {name: _padded(spec, name, wire.as_moved(x)) for name, x in operands.items()}
    nrow, ncol = _count(rows, cols)
    tile = _tile_spec(spec, low_precision.is_scaled(b.dtype))

    def in_rows(name: str) -> bool:  # True if a tile of rows is contiguous in the operand's memory
        return _cuts(spec, name).get(0, ("",))[0] == "m"

    def tiles_of_columns(j: jax.Array | int) -> Operands:
        of_columns = {name: _part(spec, name, x, "n", j) for name, x in moved.items()}
        of_columns["b"] = _stored_as_wanted(of_columns["b"], spec.transpose_b, tile.transpose_b, spec.conjugate_b)

        def one(i: jax.Array | int, rows: Operands) -> Operands:
            parts = {
                name: rows[name] if name in rows else _part(spec, name, x, "m", i) for name, x in of_columns.items()
            }
            parts["a"] = _stored_as_wanted(parts["a"], spec.transpose_a, tile.transpose_a, spec.conjugate_a)
            parts = {name: wire.from_moved(x, types[name]) for name, x in parts.items()}
            return {name: wire.as_moved(x) for name, x in call(parts, spec=tile).items()}

        tiles = {
            name: x.reshape(-1, _cuts(spec, name)[0][1], *x.shape[1:])
            for name, x in of_columns.items()
            if in_rows(name)
        }
        return _each(nrow, one, tiles)

    stacked = _each(ncol, lambda j, _: tiles_of_columns(j), {})
    return {name: _whole(spec, name, stacked[name], found) for name in spec.output_names}


def describe(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, library: str) -> str:
    """Describes the calls of a local product for a message."""
    rows, k, _, cols = extents(spec, a_shape, b_shape).local
    calls = math.prod(_count(cols, rows) if spec.order.is_transposed else _count(rows, cols))
    text = f"{library} {calls} local Matmul of {ROWS}x{k}x{COLUMNS} each, padded, instead of an order of sums"
    return text + "; `jaxmp selftest --implementation cublasmp` checks the card" * (library == "cublasmp")


def _count(rows: int, cols: int) -> tuple[int, int]:
    """Returns the number of tiles of rows and of columns."""
    return -(-rows // ROWS), -(-cols // COLUMNS)


def with_k(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, k: int) -> tuple[Shape, Shape]:
    """Returns the local shapes of a and b as stored, with the contraction's extent replaced by `k`."""
    rows, _, _, cols = extents(spec, a_shape, b_shape).local
    return (k, rows) if spec.transpose_a else (rows, k), (cols, k) if spec.transpose_b else (k, cols)


def padded_along_k(operands: Operands, spec: MatmulSpec) -> Operands:
    """Returns the operands, with zeros appended to a and b along k, from at most PADDED_K terms to PADDED_K."""
    wanted = dict(zip("ab", with_k(spec, operands["a"].shape, operands["b"].shape, PADDED_K), strict=True))
    widths = {
        name: [(0, want - have) for have, want in zip(operands[name].shape, shape, strict=True)]
        for name, shape in wanted.items()
    }
    return operands | {name: jnp.pad(operands[name], width) for name, width in widths.items()}


def _tile_spec(spec: MatmulSpec, is_scaled: bool) -> MatmulSpec:
    """Returns the spec of every call: on one device, a is stored (m, k), b (k, n), neither is conjugated, at the level
    "run_to_run"; the other fields stay. If `is_scaled`, b is stored (n, k). For BGRADA a is stored (k, m), and
    conjugated if `spec` says so."""
    is_summed = spec.epilog == Epilog.BGRADA
    return spec.local().replace(
        **levels.ANY_ORDER.option,
        transpose_a=is_summed,
        conjugate_a=spec.conjugate_a and is_summed,
        transpose_b=is_scaled,
        conjugate_b=False,
    )


def _with_sums(operands: Operands, spec: MatmulSpec, call: TileCall) -> Operands:
    """Returns the results of a product that also sums d over rows (the bias gradient). The sums are a product of ones
    and d that is rounded once, because the library would round the sums of each tile to d's type."""
    outputs = matmul(operands, spec.replace(epilog=spec.rule.without_gradient), call)
    d = outputs["d"]
    ones = jnp.ones((1, d.shape[0]), d.dtype)
    return outputs | {spec.rule.gradient: matmul({"a": ones, "b": d}, spec.plain(spec.out_dtype), call)["d"][0]}


def _cuts(spec: MatmulSpec, name: str) -> dict[int, tuple[str, int]]:
    """Returns {dimension: ("m" or "n", the extent of a tile along it)} of an operand or result `name`, for dimensions
    that go with the rows (m) or columns (n) of d."""
    tile = {"m": ROWS, "n": COLUMNS}
    return {i: (dim, tile[dim] // size) for i, (dim, size) in enumerate(spans(spec, name)) if dim in tile}


def _padded(spec: MatmulSpec, name: str, x: jax.Array) -> jax.Array:
    """Pads `x` with zeros to whole tiles. With amax the last row is repeated, so that padding keeps the maximum."""
    has_amax = spec.scales.amax_d or spec.scales.amax_aux
    for dimension, (way, size) in _cuts(spec, name).items():
        if missing := -x.shape[dimension] % size:
            width = [(0, missing if i == dimension else 0) for i in range(x.ndim)]
            x = jnp.pad(x, width, mode="edge" if has_amax and way == "m" else "constant")
    return x


def _part(spec: MatmulSpec, name: str, x: jax.Array, way: str, index: jax.Array | int) -> jax.Array:
    """Returns tile `index` of the operand `x` along `way`, the rows ("m") or columns ("n") of d; `x` itself if it has
    no such dimension or a single tile."""
    for dimension, (cut, size) in _cuts(spec, name).items():
        if cut == way and x.shape[dimension] != size:
            x = lax.dynamic_slice_in_dim(x, index * size, size, dimension)
    return x


def _stored_as_wanted(x: jax.Array, is_transposed: bool, wants_transposed: bool, is_conjugated: bool) -> jax.Array:
    x = x if is_transposed == wants_transposed else x.T
    return lax.conj(x) if is_conjugated and not wants_transposed else x


def _each(number: int, body: Callable[[jax.Array | int, Operands], Operands], tiles: Operands) -> Operands:
    """Stacks the results of `body(0, first of all tiles)` to `body(number - 1, last of all tiles)` along a new first
    dimension, by a loop if `number` is not 1. XLA:GPU reads and writes a loop's tiles in place if each is contiguous at
    a multiple of the counter; it copies others."""
    if number == 1:
        return {name: x[None] for name, x in body(0, {name: x[0] for name, x in tiles.items()}).items()}
    stacked: Operands = lax.map(lambda each: body(*each), (jnp.arange(number, dtype=jnp.int32), tiles))
    return stacked


def _whole(spec: MatmulSpec, name: str, x: jax.Array, found: Extents) -> jax.Array:
    """Joins the results `name` of all tiles, (tiles of columns, tiles of rows, *shape), to a result of the product, and
    drops the padding. The largest absolute value is the largest of all tiles."""
    dims, (rows, cols) = SPANS.get(name), found.d
    if not dims:  # a largest absolute value
        return jnp.max(x)
    if len(dims) == 1:  # sums of a are equal in all tiles of columns, sums of b in all tiles of rows
        return x[0].reshape(-1)[:rows] if dims[0].dim == "m" else x[:, 0].reshape(-1)[:cols]
    ncol, nrow, height, width = x.shape
    x = x.transpose(1, 2, 0, 3).reshape(nrow * height, ncol * width)
    x = x[:rows, : process_grid.relu_aux_bytes(cols) if name == "relu_aux" else cols * width // COLUMNS]
    return wire.from_moved(x, result_type(name, spec, found).dtype)
