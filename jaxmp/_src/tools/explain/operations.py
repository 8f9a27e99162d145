"""What operations need of a sharding: which of them want neighbours or a whole dimension, and which hand data on."""

from __future__ import annotations

from collections.abc import Collection

from jaxmp._src.tools.explain.hlo import COLLECTIVES, MOVES, Computation, Instruction
from jaxmp._src.tools.explain.origins import ASKING, value

# Operations with a dimension along which they need neighbours, or all of it: (kind, what they do there).
ALONG = {
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), ("sort", "runs along")),
    **dict.fromkeys(("argmax", "argmin", "reduce"), ("reduction", "runs along")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), ("cumulative", "runs along")),
    **dict.fromkeys(("fft", "rev", "cholesky", "triangular_solve", "eigh", "svd", "lu", "qr"), ("whole", "runs along")),
    **dict.fromkeys(("slice", "split", "dynamic_slice"), ("slice", "cuts")),
    "dynamic_update_slice": ("slice", "writes along"),
    **dict.fromkeys(("concatenate", "pad", "roll"), ("slice", "moves data along")),
    **dict.fromkeys(
        ("conv_general_dilated", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"),
        ("window", "has windows that reach over the borders of shards of"),
    ),
    "gather": ("lookup", "looks up along"),
    "scatter": ("scatter", "writes along"),
    "scatter-add": ("scatter", "adds along"),
}
_OF_MATRICES = {"cholesky", "triangular_solve", "eigh", "svd", "lu", "qr"}
# What moves less than they do.
_ALIGNED = "keep the extents (jnp.roll and a mask), so that no more than the borders of shards move"
_MASKED = "use a mask, jnp.where(jnp.arange(n) == i, ...), which each device applies to its shard"
_PADDED = "join along a new dimension, or pad to extents that the axis divides"
OTHERWISE = {
    "split": "reshape to (parts, n) and shard n, so that each device cuts its own shard",
    "slice": _ALIGNED,
    "pad": _ALIGNED,
    "concatenate": _PADDED,
    "dynamic_slice": _MASKED,
    "dynamic_update_slice": _MASKED,
    "top_k": "take the top_k of each shard in jax.shard_map, and of what the shards give the top_k again",
}
# Functions of jax.numpy that other operations make up.
NAMED = {"_roll_static": "roll", "_roll_dynamic": "roll", "_pad": "pad"}
# What a window over a whole dimension computes; JAX makes windows of these.
CUMULATIVE = {"reduce_window_sum": "cumsum", "reduce_window_max": "cummax", "reduce_window_min": "cummin"}
# XLA's operation for a primitive that the partitioner emits for itself too.
_OWN = {
    "reshape": "reshape",
    "tile": "reshape",
    "slice": "slice",
    "split": "slice",
    "pad": "pad",
    "dynamic_slice": "dynamic-slice",
}


def worked_along(place: Computation, each: Instruction) -> Collection[int] | None:
    """The dimensions of the first operand that an operation needs whole, or neighbours along; None where none tells."""
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


def is_cumulative(window: Instruction) -> bool:
    """Whether a window, "size=1x64 pad=0_0x63_0", reaches over whole dimensions of a result that keeps them."""
    return all(size in ("1", str(extent)) for size, extent in zip(_window(window), window.shapes[0][1], strict=False))


def hands_on(user: Instruction) -> bool:
    """Whether an instruction only hands its operand on, as the partitioner emits it around a collective."""
    if user.primitive in ASKING and user.opcode == "copy":
        return False
    # The program's own reshapes and cuts are no such ones.
    moves = user.opcode in MOVES or user.kind in COLLECTIVES or user.opcode.endswith("-done")
    return moves and _OWN.get(user.primitive) != user.opcode
