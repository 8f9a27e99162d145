"""How values lie over some mesh axes, how others want them, and both in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from jaxmp._src.tools.explain.hlo import MOVES, Computation, Instruction
from jaxmp._src.tools.explain.origins import Dim, Origins, is_backward, summed, value
from jaxmp._src.tools.explain.partitioned import Program

# A user of a value, in its computation, and which operand the value is.
Edge = tuple[Computation, Instruction, int]


@dataclasses.dataclass(frozen=True)
class Lies:
    """Values of whole arrays as some mesh axes shard them."""

    origins: Origins
    axes: tuple[str, ...]

    @property
    def program(self) -> Program:
        return self.origins.program

    @property
    def over(self) -> str:
        return joined(self.axes) or "the devices"

    def axes_of(self, at: Dim) -> tuple[str, ...]:
        """Those of the axes that shard a dimension."""
        return tuple(axis for axis in self.origins.axes(at) if axis in self.axes)

    def axes_in(self, dims: Iterable[Dim]) -> set[str]:
        """All axes that shard one of these."""
        return {axis for each in dims for axis in self.origins.axes(each)}

    def all(self, at: Dim) -> list[Dim]:
        """The dimensions of a value that the axes shard."""
        return [each for i in range(len(at.extents)) if self.axes_of(each := at._replace(dim=i))]

    def sharded(self, place: Computation, user: Instruction, number: int) -> list[Dim]:
        """Those of an operand."""
        return self.all(value(place, user, number)) if number < len(user.operands) else []

    def differs(self, place: Computation, user: Instruction, number: int) -> bool:
        """Whether the axes shard a dimension of an operand that its user does not want so."""
        wants = dict[int, set[str]]()
        operand = value(place, user, number)
        for i in range(len(user.shapes[0][1]) if user.shapes else 0):
            above = Dim(place, user, "", i)
            for below in self.origins.operands(above):
                if below[:3] == operand[:3]:
                    wants.setdefault(below.dim, set()).update(self.origins.axes(above))
        if user.opcode == "reduce":  # sums parts where they lie
            wants |= {i: set(self.axes) for i in user.numbers("dimensions")}
        if user.opcode == "dot":
            for mine, other in zip(*(summed(place, user, i) for i in (number, 1 - number)), strict=True):
                wants[mine.dim] = {*self.origins.axes(other)}
        return any(set(self.axes_of(each)) - wants.get(each.dim, set()) for each in self.sharded(place, user, number))

    # Words -------------------------------------------------------------------------------------------------------

    def dims(self, dims: Iterable[Dim], of: str = "") -> str:
        """ "dimension 1 of x (from dimension 0 of w)": dimensions, and what shards them over the axes."""
        texts = []
        for each in dims:
            name, index = (of, each.dim) if of else self.origins.name(each)
            text = f"dimension {index} of {name}"
            ahead = [name for axis in self.axes_of(each) for name in self.origins.ahead(each, axis)]
            axes = () if ahead else self.axes_of(each)
            behind = [name for axis in axes for name in self.origins.behind(each, axis, where=True)]
            named = [name for name in dict.fromkeys(ahead or behind) if name != text][:2]
            texts.append(text + f" ({'from' if ahead else 'to meet'} {joined(named)})" * bool(named))
        return joined(dict.fromkeys(texts))

    def lies(self, dims: Iterable[Dim], of: str = "") -> str:
        """ "model shards dimension 1 of x": how a value lies."""
        by_axes = self._by_axes(dims)
        return joined([f"{shard(axes)} {self.dims(by_axes[axes], of)}" for axes in by_axes])

    def which(self, dims: Iterable[Dim]) -> str:
        """ "dimension 1 of x, which model shards": dimensions, each with those of the axes that shard it."""
        splits = f"XLA splits over {self.over}"
        by_axes = self._by_axes(dims).items()
        texts = [f"{self.dims(alike)}, which {shard(axes) if axes else splits}" for axes, alike in by_axes]
        return ", and ".join(texts) or f"a dimension, which {splits}"

    def _by_axes(self, dims: Iterable[Dim]) -> dict[tuple[str, ...], list[Dim]]:
        by_axes: dict[tuple[str, ...], list[Dim]] = {}
        for each in dims:
            by_axes.setdefault(self.axes_of(each), []).append(each)
        return by_axes

    def has(self, found: Edge) -> str:
        """How an operand lies, or what it is computed of where only that is sharded."""
        if lies := self.lies(self.sharded(*found)):
            each, is_turned = found[0].operands(found[1])[found[2]], False
            while each.opcode in MOVES and each.operands and not is_turned:
                is_turned = each.opcode == "transpose" and not is_backward(each)
                each = found[0].operands(each)[0]
            return lies + ", transposed" * is_turned
        at = value(*found)
        below = (dim for i in range(len(at.extents)) for dim in self.origins.operands(at._replace(dim=i)))
        if dims := [dim for dim in below if self.axes_of(dim)][:1]:
            return f"{self.lies(dims)}, of which {self.origins.name(at)[0]} is made"
        return f"XLA splits {self.origins.name(at)[0]} over {self.over}"

    def begins(self, dims: Iterable[Dim]) -> list[str]:
        """Where the shardings of dimensions begin."""
        names = (name for each in dims for axis in self.axes_of(each) for name in self.origins.of(each, axis))
        return [*dict.fromkeys(names)]

    def leave_whole(self, dims: Iterable[Dim]) -> str:
        """The remedy that leaves a dimension whole, where its sharding begins."""
        names = self.begins(dims)[:2]
        if arrays := [name for name in names if name.startswith("dimension")]:
            return f"leave {joined(arrays)} whole"
        return f"change {joined(names)}" if names else "leave this dimension whole"

    def shard_another(self, dims: Sequence[Dim]) -> str:
        """The remedy that shards another dimension of the array."""
        axes = self.axes_in(dims) & {*self.axes}
        is_other = axes and any(len(each.extents) > 1 for each in dims)
        return self.leave_whole(dims) + (f"; shard another dimension over {joined(axes)}" if is_other else "")


def shard(axes: Collection[str]) -> str:
    """ "data and model shard"."""
    return f"{joined(axes) or 'devices'} shard{'s' * (len(axes) == 1)}"


def joined(names: Collection[str]) -> str:
    return " and ".join(sorted(names) or ["no axis"] if isinstance(names, set) else names)
