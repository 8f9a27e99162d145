"""A product as calls of one shape: a fixed order over a library that promises no order of sums.

Which kernel cuBLASLt takes, and with it the order in which an element of D is summed, follows from the call: its
extents, types, transpositions, leading dimensions and epilog. So all calls of a product are alike, however many rows
and columns it has and wherever a mesh has cut them: one rank, all of k, ROWS rows, COLUMNS columns, a stored (m, k) and
b stored (k, n). What a tile lacks is padding, and what comes of padding is dropped.

    ROWS = 512, COLUMNS = 4096, a (1100, k), b (k, 5000): 3 x 2 calls of 512 x k x 4096, of which the last ones have 76
    rows and 904 columns of d. Row 600 is row 88 of its calls; on four ranks, each with 275 of the rows, the third has
    it as row 50 of its only one.

Then an element can depend on no more than its row of op(A), its column of op(B) and its place in the tile; and not on
that place where a kernel sums all its tiles alike. No source says that every kernel of cuBLASLt does (a stream-K
schedule cuts k elsewhere in each tile), so this is for `jaxmp selftest --implementation cublasmp` to show on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.spec import levels, low_precision, process_grid
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.extents import SPANS, Extents, extents, result_type, spans
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import Operands, Shape

# The extents of a call where no card is known, and on an H100 or H200: in tiles of 128 x 128 they are 4 x 32 = 128,
# about one for each of its 132 multiprocessors (`columns`). Fewer rows than columns, since batches are small where
# layers are not, and multiples of 128, as scales of blocks and the packed mask of relu have to be. Reasoned, not
# measured: no GPU could be had.
ROWS, COLUMNS = 512, 4096
# What the extents of layers are mostly multiples of, so that whole calls cover them.
_COLUMN_STEP = 1024
# What k is padded to: a call may multiply by a derivative then. The zeros add +0 to sums that begin at +0, so that no
# element changes, not even the sign of a zero, and they lie on every rank alike, for k = 1 is whole on each.
PADDED_K = 2
# As in `matmul`.
TileCall = Callable[..., Operands]


def matmul(operands: Operands, spec: MatmulSpec, call: TileCall) -> Operands:
    """The results of a local product by name; `call(operands, spec=spec)` has a tile's."""
    a, b, row = operands["a"], operands["b"], spec.rule
    found = extents(spec, a.shape, b.shape)
    rows, k, _, cols = found.local
    if 0 in (rows, cols) or (k == 0 and low_precision.is_low_precision(a.dtype)):
        return xla_matmul.matmul(operands, spec, "cpu")
    if k == 0:  # which cuBLASMp does not take
        operands = padded_along_k(operands, spec)
    if spec.order.is_transposed:  # the transposed product is the one that the same gradient is on other meshes
        transposed = spec.reorder(is_transposed=False).swapped()
        return {"d": matmul({"a": operands["b"], "b": operands["a"]}, transposed, call)["d"].T}
    if row.derivative and row.gradient:
        return _with_sums(operands, spec, call)
    types = {name: x.dtype for name, x in operands.items()}
    moved = {name: _padded(spec, name, low_precision.as_moved(x)) for name, x in operands.items()}
    nrow, ncol = _count(rows, cols)
    tile = _tile_spec(spec, low_precision.is_scaled(b.dtype))

    def in_rows(name: str) -> bool:  # whether a tile of rows lies in one piece in the operand's own memory
        return _cuts(spec, name).get(0, ("",))[0] == "m"

    def tiles_of_columns(j: jax.Array | int) -> Operands:
        of_columns = {name: _part(spec, name, x, "n", j) for name, x in moved.items()}
        of_columns["b"] = _stored_alike(of_columns["b"], spec.transpose_b, tile.transpose_b, spec.conjugate_b)

        def one(i: jax.Array | int, rows: Operands) -> Operands:
            parts = {
                name: rows[name] if name in rows else _part(spec, name, x, "m", i) for name, x in of_columns.items()
            }
            parts["a"] = _stored_alike(parts["a"], spec.transpose_a, tile.transpose_a, spec.conjugate_a)
            parts = {name: low_precision.from_moved(x, types[name]) for name, x in parts.items()}
            return {name: low_precision.as_moved(x) for name, x in call(parts, spec=tile).items()}

        tiles = {
            name: x.reshape(-1, _cuts(spec, name)[0][1], *x.shape[1:])
            for name, x in of_columns.items()
            if in_rows(name)
        }
        return _each(nrow, one, tiles)

    stacked = _each(ncol, lambda j, _: tiles_of_columns(j), {})
    return {name: _whole(spec, name, stacked[name], found) for name in spec.output_names}


def describe(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, library: str) -> str:
    """What a local product comes to, for people to read."""
    rows, k, _, cols = extents(spec, a_shape, b_shape).local
    calls = math.prod(_count(cols, rows) if spec.order.is_transposed else _count(rows, cols))
    text = f"{library} {calls} local Matmul of {ROWS}x{k}x{columns()} each, padded, instead of an order of sums"
    return text + "; `jaxmp selftest --implementation cublasmp` checks the card" * (library == "cublasmp")


def columns() -> int:
    """The columns of a call: with ROWS about one tile of 128 x 128 for each multiprocessor, of the job's least card."""
    multiprocessors = native.card_multiprocessors()
    if multiprocessors is None:
        return COLUMNS
    return max(128 * 128 * multiprocessors // ROWS // _COLUMN_STEP, 1) * _COLUMN_STEP


def _count(rows: int, cols: int) -> tuple[int, int]:
    """How many tiles of rows and of columns a product has."""
    return -(-rows // ROWS), -(-cols // columns())


def with_k(spec: MatmulSpec, a_shape: Shape, b_shape: Shape, k: int) -> tuple[Shape, Shape]:
    """The local shapes of a and b as stored, with `k` for the extent along which they are contracted."""
    rows, _, _, cols = extents(spec, a_shape, b_shape).local
    return (k, rows) if spec.transpose_a else (rows, k), (cols, k) if spec.transpose_b else (k, cols)


def padded_along_k(operands: Operands, spec: MatmulSpec) -> Operands:
    """The operands, a and b with zeros behind them along the contraction, which then has PADDED_K terms."""
    wanted = dict(zip("ab", with_k(spec, operands["a"].shape, operands["b"].shape, PADDED_K), strict=True))
    widths = {
        name: [(0, want - have) for have, want in zip(operands[name].shape, shape, strict=True)]
        for name, shape in wanted.items()
    }
    return operands | {name: jnp.pad(operands[name], width) for name, width in widths.items()}


def _tile_spec(spec: MatmulSpec, is_scaled: bool) -> MatmulSpec:
    """The spec of every call. Only what the library takes in one form alone is stored otherwise than (m, k), (k, n)."""
    is_summed = spec.epilog == Epilog.BGRADA
    return spec.local().replace(
        **levels.ANY_ORDER.option,
        transpose_a=is_summed,
        conjugate_a=spec.conjugate_a and is_summed,
        transpose_b=is_scaled,
        conjugate_b=False,
    )


def _with_sums(operands: Operands, spec: MatmulSpec, call: TileCall) -> Operands:
    """With d summed over its rows. The library would round the sums of each tile to d's type, so they are a product
    with ones, rounded once."""
    outputs = matmul(operands, spec.replace(epilog=spec.rule.without_gradient), call)
    d = outputs["d"]
    ones = jnp.ones((1, d.shape[0]), d.dtype)
    return outputs | {spec.rule.gradient: matmul({"a": ones, "b": d}, spec.alike(spec.out_dtype), call)["d"][0]}


def _cuts(spec: MatmulSpec, name: str) -> dict[int, tuple[str, int]]:
    """The dimensions of an operand that are cut: whether with the rows (m) or the columns (n) of d, and into parts of
    what extent."""
    tile = {"m": ROWS, "n": columns()}
    return {i: (dim, tile[dim] // size) for i, (dim, size) in enumerate(spans(spec, name)) if dim in tile}


def _padded(spec: MatmulSpec, name: str, x: jax.Array) -> jax.Array:
    """`x` zero-padded to whole tiles; with amax the last row is repeated, so that padding cannot change the maximum."""
    has_amax = spec.scales.amax_d or spec.scales.amax_aux
    for dimension, (way, size) in _cuts(spec, name).items():
        if missing := -x.shape[dimension] % size:
            width = [(0, missing if i == dimension else 0) for i in range(x.ndim)]
            x = jnp.pad(x, width, mode="edge" if has_amax and way == "m" else "constant")
    return x


def _part(spec: MatmulSpec, name: str, x: jax.Array, way: str, index: jax.Array | int) -> jax.Array:
    """Tile `index` along the rows (m) or columns (n) of d."""
    for dimension, (cut, size) in _cuts(spec, name).items():
        if cut == way and x.shape[dimension] != size:
            x = lax.dynamic_slice_in_dim(x, index * size, size, dimension)
    return x


def _stored_alike(x: jax.Array, is_transposed: bool, wants_transposed: bool, is_conjugated: bool) -> jax.Array:
    x = x if is_transposed == wants_transposed else x.T
    return lax.conj(x) if is_conjugated and not wants_transposed else x


def _each(number: int, body: Callable[[jax.Array | int, Operands], Operands], tiles: Operands) -> Operands:
    """The results of `body(0, first of all tiles)` to `body(number - 1, last of all tiles)`, each stacked along a new
    first dimension.

    A loop's own tiles, which lie in one piece at a multiple of its counter, XLA:GPU takes from where they are and puts
    where they go; others it copies.
    """
    if number == 1:
        return {name: x[None] for name, x in body(0, {name: x[0] for name, x in tiles.items()}).items()}
    stacked: Operands = lax.map(lambda each: body(*each), (jnp.arange(number, dtype=jnp.int32), tiles))
    return stacked


def _whole(spec: MatmulSpec, name: str, x: jax.Array, found: Extents) -> jax.Array:
    """A result from those of its tiles, (tiles of columns, tiles of rows, *shape)."""
    dims, (rows, cols) = SPANS.get(name), found.d
    if not dims:  # the largest values
        return jnp.max(x)
    if len(dims) == 1:  # the sums of a are equal in all tiles of columns, those of b in all of rows
        return x[0].reshape(-1)[:rows] if dims[0].dim == "m" else x[:, 0].reshape(-1)[:cols]
    ncol, nrow, height, width = x.shape
    x = x.transpose(1, 2, 0, 3).reshape(nrow * height, ncol * width)
    x = x[:rows, : process_grid.relu_aux_bytes(cols) if name == "relu_aux" else cols * width // columns()]
    return low_precision.from_moved(x, result_type(name, spec, found).dtype)
