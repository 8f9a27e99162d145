"""The needs of operations: which need neighbours or a whole dimension, and which only pass data on."""

from __future__ import annotations

from collections.abc import Collection

from jaxmp._src.tools.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction
from jaxmp._src.tools.explain.origins import ASKING, OWN, value

_OF_MATRICES = {"cholesky", "triangular_solve", "eigh", "svd", "lu", "qr"}
# Operations that XLA computes whole even if the sharded dimension is not one that they need whole.
UNSPLIT = {"sort", "top_k", "approx_top_k", "argmax", "argmin", "reduce", "fft", "rev", *_OF_MATRICES}
# Operations with a dimension along which they need neighbours, or all of it.
ALONG = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "slice", "split", "dynamic_slice", *UNSPLIT}
ALONG |= {"dynamic_update_slice", "concatenate", "pad", "roll", "gather", "scatter", "scatter-add"}
ALONG |= {"conv_general_dilated", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"}
# Ways to move less than these operations.
_ALIGNED = "keep the extents (jnp.roll and a mask), so that no more than the borders of shards move"
_MASKED = "use a mask, jnp.where(jnp.arange(n) == i, ...), which each device applies to its shard"
_VMAPPED = "jax.vmap over it, so that each device indexes in its own shard"
OTHERWISE = {
    "split": "reshape to (parts, n) and shard n, so that each device cuts its own shard",
    "slice": _ALIGNED,
    "pad": _ALIGNED,
    "concatenate": "join along a new dimension, or pad to extents that the axis divides",
    "dynamic_slice": _MASKED,
    "dynamic_update_slice": _MASKED,
    "top_k": "take the top_k of each shard in jax.shard_map, and of what the shards give the top_k again",
}
# Functions of jax.numpy that consist of other operations.
NAMED = {"_roll_static": "roll", "_roll_dynamic": "roll", "_pad": "pad"}
# The functions that a window over a whole dimension computes. JAX turns them into windows.
_CUMULATIVE = {"reduce_window_sum": "cumsum", "reduce_window_max": "cummax", "reduce_window_min": "cummin"}


def cheaper_way(name: str, place: Computation, each: Instruction) -> str:
    """Returns a way to move less than the operation `name`, which the instruction `each` in `place` computes, or "" if
    none is known. A gather or scatter along several dimensions has a way of its own."""
    indexed = {"gather": "start_index_map", "scatter": "scatter_dims_to_operand_dims"}.get(each.opcode, "")
    if len(each.numbers(indexed)) > 1:
        return _ALIGNED if len(value(place, each, 1).extents) < 2 else _VMAPPED  # x.at[1:-1].set, or x.at[i, j]
    return OTHERWISE.get(name, "")


def worked_along(place: Computation, each: Instruction) -> Collection[int] | None:
    """Returns the dimensions of operand 0 that an operation needs whole, or with neighbours; empty if it needs none,
    and None if its needs are unknown."""
    extents = value(place, each, 0).extents
    rank = len(extents)
    if each.primitive in _OF_MATRICES:
        return rank - 2, rank - 1
    if each.opcode in ("concatenate", "reverse", "sort", "reduce"):
        return each.numbers("dimensions")
    if each.opcode in ("slice", "dynamic-slice", "dynamic-update-slice"):
        part = value(place, each, 1).extents if "update" in each.opcode else each.shapes[0][1]
        return [i for i in range(rank) if extents[i] != part[i]]
    if each.opcode == "pad":
        return [i for i, pads in enumerate(each.attribute("padding").split("x")) if set(pads) - set("0_")]
    if each.opcode == "fft":
        return range(rank - len(each.numbers("fft_length")), rank)
    if each.opcode == "reduce-window":
        return [i for i, size in enumerate(_window(each)) if size != "1"]
    if each.opcode == "convolution":
        return [i for i, label in enumerate(each.attribute("dim_labels").partition("_")[0]) if label.isdigit()]
    if each.opcode == "gather":
        sizes = each.numbers("slice_sizes")
        return [i for i in range(rank) if i in each.numbers("start_index_map") or sizes[i] != extents[i]]
    if each.opcode == "scatter":
        return each.numbers("scatter_dims_to_operand_dims")
    return [rank - 1] if each.primitive == "top_k" else None


def _window(each: Instruction) -> list[str]:
    return each.attribute("window").partition("size=")[2].partition(" ")[0].split("x")


def cumulative(name: str, each: Instruction) -> str:
    """Returns "cumsum" or the like if the windows, "size=1x64 pad=0_0x63_0", cover whole dimensions; else `name`."""
    extents = zip(_window(each), each.shapes[0][1], strict=False)
    return _CUMULATIVE.get(name, name) if all(size in ("1", str(extent)) for size, extent in extents) else name


def only_moves(user: Instruction) -> bool:
    """True if the partitioner emitted an instruction that only moves data: a move, a collective or its "-done". The
    program's own reshapes and slices do not count, nor do copies made for a primitive in ASKING."""
    if user.primitive in ASKING and user.opcode == "copy":
        return False
    moves = user.opcode in MOVES or user.kind in COLLECTIVES or user.opcode.endswith("-done")
    return moves and (OWN | {"tile": "reshape"}).get(user.primitive) != user.opcode
