"""The fastest shardings of a chain of products, in as little memory: dynamic programming over the values alive.

Each value lies on one mesh axis by one of its dimensions, or whole on every device. A product takes its operands in the
shardings of one of its options and gives its result in that option's. An operand that lies otherwise is resharded
ahead of it; the copy stays, so it is moved once for several products. After each product the search keeps, for every
sharding of the values that later ones read, those beginnings of which none other is both faster and smaller.

A reshard comes ahead of elementwise operations, so that a copy serves all that read the value in this shape and type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._src.advise.chain import Node, View
from jaxmp._src.advise.options import Option, options_of, reshard_time
from jaxmp._src.hardware.call_time import CallTime
from jaxmp._src.hardware.hardware import Hardware

# Up to how many beginnings of plans the search is exact; of more it keeps a quarter of that.
CAP = 4096

Sharding = int | None
# What a copy is of: the node, or of views of these dimensions, shape and type alone.
Of = tuple[tuple[int | None, ...], tuple[int, ...], np.dtype] | None
# By value: the sharding that it has, and those in which it has copies.
Places = dict[int, tuple[tuple[Sharding, Of], ...]]
Live = frozenset[tuple[int, tuple[tuple[Sharding, Of], ...]]]


class Reshard(NamedTuple):
    """What `view`'s node, or where `of_node` it itself, is brought to."""

    view: View
    of_node: bool
    have: Sharding
    want: Sharding
    time: CallTime
    runs: int


class Chosen(NamedTuple):
    """How an argument, or a value that is not followed, lies."""

    node: int
    sharding: Sharding


class Run(NamedTuple):
    """How a product runs."""

    node: int
    option: Option


class Cost(NamedTuple):
    """Seconds; of these of communication that no product hides; bytes of arguments, of results and copies."""

    seconds: float = 0.0
    exposed: float = 0.0
    arguments: int = 0
    results: int = 0

    @property
    def memory(self) -> int:
        return self.arguments + self.results

    def plus(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.exposed + other.exposed,
            self.arguments + other.arguments,
            self.results + other.results,
        )


class Label(NamedTuple):
    """The beginning of a plan: its cost, and the last decision with those ahead of it."""

    cost: Cost
    decisions: Any = None


class Search:
    """The plans of one chain on one machine."""

    def __init__(self, nodes: Sequence[Node], devices: int, hardware: Hardware) -> None:
        self._nodes, self._devices, self._hardware = nodes, devices, hardware
        self._options = {i: options_of(x, devices, hardware) for i, x in enumerate(nodes) if x.kind == "product"}
        self._last: dict[int, int] = {}
        for i, node in enumerate(nodes):
            self._last[i] = i
            for used in (*(view.node for view in node.operands), node.loop):
                self._last[used] = i
        self.met_cap = False

    def plans(self, patterns: Collection[str]) -> list[tuple[Cost, list[Any]]]:
        """(cost, decisions) of the plans whose products have these patterns, fastest first, each smaller than all
        before it."""
        front: dict[Live, list[Label]] = {frozenset(): [Label(Cost())]}
        for i, node in enumerate(self._nodes):
            if node.kind in ("argument", "value"):
                continue
            read = {*(view.node for view in node.operands), node.loop}
            steps: dict[Live, list[tuple[Live, Label]]] = {}
            found: dict[Live, list[Label]] = {}
            for live, labels in front.items():
                given = frozenset(pair for pair in live if pair[0] in read)
                if given not in steps:  # what is to be done depends on what it reads alone
                    steps[given] = self._steps(i, dict(given), patterns)
                others = live - given
                for after, step in steps[given]:
                    found.setdefault(others | after, []).extend(
                        Label(label.cost.plus(step.cost), (label.decisions, step.decisions)) for label in labels
                    )
            front = self._capped({live: _efficient(labels) for live, labels in found.items()})
        return [(cost, _flat(decisions)) for cost, decisions in _efficient(itertools.chain(*front.values()))]

    def _capped(self, front: dict[Live, list[Label]]) -> dict[Live, list[Label]]:
        """Where there are too many, the fastest and the smallest."""
        pairs = [(label, live) for live, labels in front.items() for label in labels]
        if len(pairs) <= CAP:
            return front
        self.met_cap = True
        by_time = sorted(pairs, key=lambda pair: pair[0].cost.seconds)
        by_memory = sorted(pairs, key=lambda pair: (pair[0].cost.memory, pair[0].cost.seconds))
        kept: dict[Live, list[Label]] = {}
        for label, live in (*by_time[: CAP // 8], *by_memory[: CAP // 8]):
            kept.setdefault(live, []).append(label)
        return kept

    def _steps(self, i: int, given: Places, patterns: Collection[str]) -> list[tuple[Live, Label]]:
        """(what lies where after it, its cost and decisions) of the efficient ways to do the i-th step."""
        found: dict[Live, list[Label]] = {}
        for after, label in self._ways(i, given, patterns):
            alive = frozenset(pair for pair in after.items() if self._last[pair[0]] > i)
            found.setdefault(alive, []).append(label)
        return [(live, label) for live, labels in found.items() for label in _efficient(labels)]

    def _ways(self, i: int, given: Places, patterns: Collection[str]) -> Iterator[tuple[Places, Label]]:
        """As `_steps`, of all ways."""
        node = self._nodes[i]
        if node.kind == "close":
            home = given[node.loop][0]
            for after, label in self._acquired(given, node.operands, (home[0],)):
                yield after | {node.loop: (home,)}, label
        elif node.kind == "join":
            for sharding in self._shardings(node):
                for after, label in self._acquired(given, node.operands, (sharding,) * len(node.operands)):
                    yield after | {i: ((sharding, None),)}, label
        else:
            for option in self._options[i]:
                if option.pattern not in patterns:
                    continue
                time, runs = option.time, option.runs
                held = node.count * self._bytes(node, option.d)
                own = Cost(runs * time.total, runs * time.exposed, 0, held)
                for after, label in self._acquired(given, node.operands, (option.a, option.b)):
                    yield (
                        after | {i: ((option.d, None),)},
                        Label(label.cost.plus(own), (label.decisions, Run(i, option))),
                    )

    def _acquired(
        self, given: Places, views: Sequence[View], wanted: Sequence[Sharding]
    ) -> Iterator[tuple[Places, Label]]:
        """What lies where once the values are sharded as wanted, at which cost. An argument that is first read here may
        lie in any way."""
        if not views:
            yield given, Label(Cost())
            return
        (view, *views), (want, *wanted) = views, wanted
        node = self._nodes[view.node]
        for have in [given[view.node]] if view.node in given else [((x, None),) for x in self._shardings(node)]:
            cost = Cost()
            decisions: Any = None
            if view.node not in given:
                held = self._bytes(node, have[0][0]) if node.kind == "argument" else 0
                cost, decisions = Cost(arguments=held), Chosen(view.node, have[0][0])
            target = None if want is None else view.dims[want]
            after, usable = have, [sharding for sharding, of in have if of in (None, _of(view))]
            if target not in usable and None not in usable:
                move, shard = min(
                    (self._reshard(view, one, target) for one in usable), key=lambda pair: pair[0].time.total
                )
                time, runs = move.time, move.runs
                cost = cost.plus(Cost(runs * time.total, runs * time.exposed, 0, runs * shard))
                is_whole = move.of_node or _of(view) == (tuple(range(len(node.shape))), node.shape, node.dtype)
                decisions, after = (decisions, move), (*have, (target, None if is_whole else _of(view)))
            for rest, label in self._acquired(given | {view.node: after}, views, wanted):
                yield rest, Label(cost.plus(label.cost), (decisions, label.decisions))

    def _reshard(self, view: View, have: Sharding, want: Sharding) -> tuple[Reshard, int]:
        """The move of a value from one of its node's shardings to another, and the bytes of its shard then: of the
        value as it is read, or where its shards do not show there of the node."""
        node, of_node = self._nodes[view.node], have not in view.dims
        x, count = (node, node.count) if of_node else (view, view.count)
        before, after = have, want
        if not of_node:
            before, after = view.dims.index(have), None if want is None else view.dims.index(want)
        time, shard = reshard_time(x.shape, x.dtype.itemsize, before, after, self._devices, self._hardware)
        return Reshard(view, of_node, before, after, time, count), shard

    def _shardings(self, node: Node) -> list[Sharding]:
        if self._devices == 1:
            return [None]
        return [None, *(i for i, extent in enumerate(node.shape) if extent and extent % self._devices == 0)]

    def _bytes(self, node: Node, sharding: Sharding) -> int:
        return math.prod(node.shape) * node.dtype.itemsize // (1 if sharding is None else self._devices)


def _of(view: View) -> Of:
    return view.dims, view.shape, view.dtype


def _efficient(labels: Iterable[Label]) -> list[Label]:
    """Those that are smaller than all that are faster, fastest first."""
    found: list[Label] = []
    for label in sorted(labels, key=lambda label: (label.cost.seconds, label.cost.memory)):
        if not found or label.cost.memory < found[-1].cost.memory:
            found.append(label)
    return found


def _flat(decisions: Any) -> list[Any]:
    """The decisions of a plan in order, from pairs of those ahead and the last."""
    found, stack = [], [decisions]
    while stack:
        one = stack.pop()
        if isinstance(one, Chosen | Reshard | Run):
            found.append(one)
        elif one is not None:
            stack += one
    return found[::-1]
