"""The fastest shardings of a chain of products, in as little memory: dynamic programming over the values alive.

Each value lies on one mesh axis by one of its dimensions, or whole on every device. A product takes its operands in the
shardings of one of its ways and gives its result in that way's. An operand that lies otherwise is resharded ahead of
it; the copy stays, so it is moved once for several products. After each product the search keeps, for every sharding of
the values that later ones read, those beginnings of which none other is both faster and smaller.

A reshard comes ahead of elementwise operations, so that a copy serves all that read the value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from jaxmp._src.advise.chain import Node, View
from jaxmp._src.contraction import moves, planner
from jaxmp._src.contraction.contraction import Contraction
from jaxmp._src.hardware.call_time import CallTime, Transfer, call_time, kind_of
from jaxmp._src.hardware.hardware import Hardware
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.matmul_spec import accumulator

AXIS = "x"
# Up to how many beginnings of plans the search is exact; of more it keeps a quarter of that.
CAP = 4096

# The dimension that is sharded, or None of a value that is whole on every device.
Sharding = int | None
# By value: the sharding that it has, and those in which it has copies.
Places = dict[int, tuple[Sharding, ...]]
Live = frozenset[tuple[int, tuple[Sharding, ...]]]
# The axes of a mesh and their sizes.
Mesh = tuple[tuple[str, int], ...]


class Way(NamedTuple):
    """A way to run a product.

    `memory` are the bytes of a, b and d on a device, `bytes_moved` the bytes that it receives in one call. The call
    runs `runs` times, once for each index of a batch that a device has.
    """

    call: Contraction
    time: CallTime
    memory: int
    bytes_moved: int
    runs: int


def ways(
    product: Contraction,
    extents: Mapping[str, int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    mesh: Mesh,
    hardware: Hardware,
) -> Iterator[Way]:
    """The ways to run a product of operands and a result of these types, each axis in a role of its own."""
    dtype, sizes, batch = dtypes[0], dict(mesh), product.batch
    itemsizes = (dtypes[0].itemsize, dtypes[1].itemsize, dtypes[2].itemsize, accumulator(dtype).itemsize)
    is_plain = not batch and product.is_stored_in_order
    gathers_k = is_plain and not low_precision.is_scaled(dtype)
    terms = planner.Terms(tuple(extents.items()), mesh, itemsizes, keeps_result=False, gathers_k=gathers_k)
    flops = 2 * math.prod(extents.values()) * (4 if np.issubdtype(dtype, np.complexfloating) else 1)
    devices = moves.size_of(sizes, tuple(sizes))
    for call in planner.layouts(product, terms):
        runs = math.prod(extents[i] // moves.size_of(sizes, call.sharded("d", i)) for i in batch)
        held = planner.local_bytes(call, terms)
        a, b, d, sums = (nbytes // (runs or 1) for nbytes in held)
        transfers = moves.in_call(call, sizes, a, b, sums)
        moved = () if hardware.is_shared else transfers  # read in place, as `explain` counts them
        time = call_time(
            hardware,
            # Devices with one role for all of d, and those with other indices of a batch, compute a product each.
            flops=flops // (runs or 1) * (devices // moves.size_of(sizes, tuple(call.roles))),
            kind=kind_of(dtype.name),
            ndevices=devices,
            nbytes=a + b + d + sum(each.nbytes for each in moved),
            transfers=moved,
            is_fused=True,
        )
        yield Way(call, time, sum(held[:3]), sum(each.nbytes for each in transfers), runs)


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """A product of a plan, or a reshard ahead of one.

    Attributes:
      line: the line of the program, "train.py:41".
      operation: "product" or "reshard"; pattern: `explain`'s word for it; count: how often it runs.
      shapes, shardings: of a, b and the result, as the program's `dot_general` has them; of a reshard ahead and behind.
      time: the predicted time of one run.
    """

    line: str
    operation: str
    pattern: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[PartitionSpec, ...]
    time: CallTime

    @property
    def seconds(self) -> float:
        return self.count * self.time.total


class Chosen(NamedTuple):
    """How an argument, or a value that is not followed, lies."""

    node: int
    sharding: Sharding


class Label(NamedTuple):
    """A part of a plan: its seconds, bytes that it adds to what a device holds, and its decisions; of a beginning these
    are (those of the beginning before it, those of its last step)."""

    seconds: float = 0.0
    memory: int = 0
    decisions: Any = ()

    def plus(self, other: Label) -> Label:
        """This, and a part behind it."""
        return Label(self.seconds + other.seconds, self.memory + other.memory, (*self.decisions, *other.decisions))


class Search:
    """The plans of one chain on one machine."""

    def __init__(self, nodes: Sequence[Node], devices: int, hardware: Hardware) -> None:
        self._nodes, self._devices, self._hardware = nodes, devices, hardware
        self._ways = {i: list(self._ways_of(node)) for i, node in enumerate(nodes) if node.kind == "product"}
        self._last = {used: i for i, node in enumerate(nodes) for used in (i, *_read(node))}
        self.met_cap = False

    def plans(self) -> list[tuple[int, list[Any]]]:
        """(bytes, decisions), fastest first, each smaller than all before it."""
        front: dict[Live, list[Label]] = {frozenset(): [Label()]}
        for i, node in enumerate(self._nodes):
            if node.kind in ("argument", "value"):
                continue
            read = _read(node)
            steps: dict[Live, list[tuple[Live, Label]]] = {}
            found: dict[Live, list[Label]] = {}
            for live, labels in front.items():
                given = frozenset(pair for pair in live if pair[0] in read)
                if given not in steps:  # what is to be done depends on what it reads alone
                    steps[given] = self._steps(i, dict(given))
                for after, step in steps[given]:
                    found.setdefault(live - given | after, []).extend(
                        Label(x.seconds + step.seconds, x.memory + step.memory, (x.decisions, step.decisions))
                        for x in labels
                    )
            front = self._capped({live: _efficient(labels) for live, labels in found.items()})
        labels = _efficient(itertools.chain(*front.values()))
        return [(label.memory, _in_turn(label.decisions)) for label in labels]

    def _capped(self, front: dict[Live, list[Label]]) -> dict[Live, list[Label]]:
        """Where there are too many, the fastest and the smallest."""
        pairs = [(label, live) for live, labels in front.items() for label in labels]
        if len(pairs) <= CAP:
            return front
        self.met_cap = True
        kept: dict[Live, list[Label]] = {}
        for order in (lambda pair: pair[0][:2], lambda pair: pair[0][1::-1]):
            for label, live in sorted(pairs, key=order)[: CAP // 8]:
                kept.setdefault(live, []).append(label)
        return kept

    def _steps(self, i: int, given: Places) -> list[tuple[Live, Label]]:
        """(what lies where after it, its cost and decisions) of the efficient ways to do the i-th step."""
        found: dict[Live, list[Label]] = {}
        for wanted, made, own in self._runs(i, given):
            for after, label in self._acquired(given, list(zip(self._nodes[i].operands, wanted, strict=True)), i):
                alive = frozenset(pair for pair in (after | made).items() if self._last[pair[0]] > i)
                found.setdefault(alive, []).append(label.plus(own))
        return [(live, label) for live, labels in found.items() for label in _efficient(labels)]

    def _runs(self, i: int, given: Places) -> Iterator[tuple[Sequence[Sharding], Places, Label]]:
        """How the i-th step can be done: the shardings of its operands, where its result lies, its own cost."""
        node = self._nodes[i]
        if node.kind == "close":
            home = given[node.loop][:1]
            yield home, {node.loop: home}, Label()
        elif node.kind == "join":
            for sharding in self._shardings(node):
                yield (sharding,) * len(node.operands), {i: (sharding,)}, Label()
        else:
            for (a, b, d), step in self._ways[i]:
                held = node.count * self._bytes(node, d)
                yield (a, b), {i: (d,)}, Label(step.seconds, held, (step,))

    def _acquired(
        self, given: Places, wanted: Sequence[tuple[View, Sharding]], reader: int
    ) -> Iterator[tuple[Places, Label]]:
        """What lies where once these values are sharded as wanted, at which cost. An argument that is first read here
        may lie in any way."""
        if not wanted:
            yield given, Label()
            return
        (view, want), *others = wanted
        node, target = self._nodes[view.node], None if want is None else view.dims[want]
        for places in [given[view.node]] if view.node in given else [(x,) for x in self._shardings(node)]:
            label, after = Label(), places
            if view.node not in given:
                held = self._bytes(node, places[0]) if node.kind == "argument" else 0
                label = Label(0.0, held, (Chosen(view.node, places[0]),))
            if target not in places and None not in places:
                moved = min((self._reshard(view, x, target, reader) for x in places), key=lambda x: x.seconds)
                label, after = label.plus(moved), (*places, target)
            for then, rest in self._acquired(given | {view.node: after}, others, reader):
                yield then, label.plus(rest)

    def _reshard(self, view: View, have: Sharding, want: Sharding, reader: int) -> Label:
        """The move of a value from one of its node's shardings to another: of the value as it is read, or where its
        shards do not show there of the node."""
        x: View | Node = view
        if have in view.dims:
            have, want = view.dims.index(have), None if want is None else view.dims.index(want)
        else:
            x = self._nodes[view.node]
        before, after = (tuple((AXIS,) if i == dim else () for i in range(len(x.shape))) for dim in (have, want))
        moved, time = moves.received(x.shape, before, after, {AXIS: self._devices}) * x.dtype.itemsize, CallTime()
        if moved:
            transfer, nbytes = Transfer(moved, self._devices), self._bytes(x, have) + moved
            time = call_time(self._hardware, ndevices=self._devices, nbytes=nbytes, transfers=(transfer,))
        specs = spec_of(len(x.shape), have), spec_of(len(x.shape), want)
        step = PlanStep(self._nodes[reader].line, "reshard", "", x.count, (x.shape,), specs, time)
        return Label(step.seconds, x.count * self._bytes(x, want), (step,))

    def _ways_of(self, node: Node) -> Iterator[tuple[tuple[Sharding, ...], PlanStep]]:
        a, b = node.operands
        extents = dict(zip(node.product.a + node.product.b, a.shape + b.shape, strict=True))
        mesh = ((AXIS, self._devices),) if self._devices > 1 else ()
        for way in ways(node.product, extents, (a.dtype, b.dtype, node.dtype), mesh, self._hardware):
            shardings = tuple(next((i for i, dim in enumerate(dims) if dim), None) for dims in way.call.layout)
            shapes = a.shape, b.shape, node.shape
            specs = tuple(spec_of(len(shape), i) for shape, i in zip(shapes, shardings, strict=True))
            count = way.runs * node.count
            yield shardings, PlanStep(node.line, "product", way.call.pattern.value, count, shapes, specs, way.time)

    def _shardings(self, node: Node) -> list[Sharding]:
        if self._devices == 1:
            return [None]
        return [None, *(i for i, extent in enumerate(node.shape) if extent and extent % self._devices == 0)]

    def _bytes(self, x: View | Node, sharding: Sharding) -> int:
        return math.prod(x.shape) * x.dtype.itemsize // (1 if sharding is None else self._devices)


def spec_of(ndim: int, dim: Sharding) -> PartitionSpec:
    return PartitionSpec(*(AXIS if i == dim else None for i in range(ndim))) if dim is not None else PartitionSpec()


def _read(node: Node) -> set[int]:
    return {*(view.node for view in node.operands), *([node.loop] if node.kind == "close" else [])}


def _efficient(labels: Iterable[Label]) -> list[Label]:
    """Those that are smaller than all that are faster, fastest first."""
    found: list[Label] = []
    for label in sorted(labels, key=lambda label: label[:2]):
        if not found or label.memory < found[-1].memory:
            found.append(label)
    return found


def _in_turn(decisions: Any) -> list[Any]:
    """The decisions of a plan, from those of each beginning and of its last step."""
    found: list[Any] = []
    while decisions:
        decisions, last = decisions
        found = [*last, *found]
    return found
