"""In which ways one product can be sharded over one mesh axis of all devices, and what a reshard costs there."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from jax.sharding import PartitionSpec as P

from jaxmp._src.advise.candidates import candidate, flops_of, time_of
from jaxmp._src.advise.chain import Node
from jaxmp._src.contraction import moves
from jaxmp._src.hardware.call_time import CallTime, Transfer, call_time
from jaxmp._src.hardware.hardware import Hardware

AXIS = "x"
# Which of m, k, n the axis shards in a, b and the result; "" of an array that is whole on every device.
_ROLES = (
    *(("m", "", "m"), ("", "n", "n"), ("", "", "")),  # local
    *(("m", "n", "n"), ("m", "n", "m")),  # all-gather of rows, of columns
    *(("k", "k", "m"), ("k", "k", "n"), ("k", "k", "")),  # reduce-scatter, all-reduce
    *(("m", "k", "m"), ("k", "n", "n")),  # a grid that gathers b, or a, along k
)


class Option(NamedTuple):
    """One way to run a product: the dimension that is sharded of a, b and the result, or None; the time of one run, and
    how many runs there are."""

    a: int | None
    b: int | None
    d: int | None
    pattern: str
    time: CallTime
    runs: int


def options_of(node: Node, devices: int, hardware: Hardware) -> list[Option]:
    """The ways to run a product."""
    (a, b, d), (of_a, of_b) = node.indices, node.operands
    extents = dict(zip(a + b, of_a.shape + of_b.shape, strict=True))
    batch = [i for i in d if i in a and i in b]
    groups = {
        "m": [i for i in a if i in d and i not in b],
        "k": [i for i in a if i in b and i not in d],
        "n": [i for i in b if i in d and i not in a],
    }
    m, k, n = (math.prod(extents[i] for i in group) for group in groups.values())
    is_plain = not batch and len(groups["k"]) == 1 and a[-1] == b[0]
    found: list[Option] = []

    def add(indices: tuple[str, str, str], role: tuple[str, str, str], runs: int) -> None:
        specs = tuple(
            P(*(AXIS if index == one else None for index in pair))
            for pair, one in zip(("mk", "kn", "mn"), role, strict=True)
        )
        # What every device computes by itself, and one index of a batch for each, count as often as there are devices.
        flops = flops_of(m, k, n, of_a.dtype) * (1 if any(role) else devices)
        for each in candidate("", ((AXIS, devices),), specs, (m, k, n), of_a.dtype, node.dtype, of_b.dtype):
            time = time_of(hardware, each, flops, devices, of_a.dtype)
            dims = [x.index(i) if i else None for x, i in zip(node.indices, indices, strict=True)]
            found.append(Option(dims[0], dims[1], dims[2], each.pattern, time, runs * node.count))

    batches = math.prod(extents[i] for i in batch)
    for i in batch:
        if extents[i] % devices == 0 and devices > 1:
            add((i, i, i), ("", "", ""), batches // devices)
    for role in _ROLES if devices > 1 else (("", "", ""),):
        if (
            (("m" in role and role[1] == "k") or ("n" in role and role[0] == "k"))
            and role[0] != role[1]
            and not is_plain
        ):
            continue
        used = sorted(set(role) - {""})
        for chosen in itertools.product(*(groups[one] for one in used)):
            if all(extents[i] % devices == 0 for i in chosen):
                index = dict(zip(used, chosen, strict=True)) | {"": ""}
                add((index[role[0]], index[role[1]], index[role[2]]), role, batches)
    return found


def reshard_time(
    shape: tuple[int, ...], itemsize: int, have: int | None, want: int | None, devices: int, hardware: Hardware
) -> tuple[CallTime, int]:
    """(the time in which an array of which one dimension is sharded comes to be sharded in another; bytes of its shard
    then)."""
    before, after = (tuple((AXIS,) if i == dim else () for i in range(len(shape))) for dim in (have, want))
    whole = math.prod(shape) * itemsize
    moved = moves.received(shape, before, after, {AXIS: devices}) * itemsize
    shard = whole // (1 if want is None else devices)
    if not moved:
        return CallTime(0.0, 0.0, 0.0, 0.0, 0.0), shard
    local = whole // (1 if have is None else devices)
    time = call_time(
        hardware,
        flops=0,
        kind="",
        ndevices=devices,
        nbytes=local + moved,
        transfers=(Transfer(moved, devices),),
        is_fused=False,
    )
    return time, shard
