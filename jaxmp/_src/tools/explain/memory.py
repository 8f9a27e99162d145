"""The memory of a compiled program on one device, and its largest arrays."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.tools.explain.hlo import Computation, Instruction, Module, called_by


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that one device holds at the peak of memory: its bytes, its type, and the line that makes it."""

    nbytes: int
    shape: str
    line: str
    operation: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, as assigned by XLA (`compiled.memory_analysis()`).

    Attributes:
      peak: arguments, results and temporaries together, less results in donated arguments (`aliased`).
      largest: the largest buffers at the peak of the schedule, at most ten.
      donatable: bytes of results that donated arguments of the same type could hold, but do not.
      saved_for_gradient: bytes at the peak from a forward pass; `jax.checkpoint` would recompute them.
    """

    peak: int
    arguments: int
    results: int
    temporaries: int
    aliased: int
    largest: tuple[Buffer, ...]
    donatable: int
    saved_for_gradient: int


def memory_of(compiled: Any, module: Module) -> Memory | None:
    """Returns the memory of the compiled program `module`; None if the platform does not report it."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    entry = module.computations[module.entry]
    live, inside = _live_at_peak(module, entry)
    sizes = sorted([*live, *inside], key=lambda each: -each.held)
    largest = [Buffer(each.held, shape_of(each.results), module.line(each), each.op_name) for each in sizes[:10]]
    has_gradient = any("transpose(" in each.op_name for each in entry.instructions.values())
    forward = (each for each in live if "/jvp(" in each.op_name and "transpose(" not in each.op_name)
    saved = sum(each.held for each in forward if has_gradient and each.opcode != "parameter")
    given, made = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temporary, aliased = stats.temp_size_in_bytes, stats.alias_size_in_bytes
    donatable = max(0, _matching(entry) - aliased)
    return Memory(given + made + temporary - aliased, given, made, temporary, aliased, tuple(largest), donatable, saved)


def _live_at_peak(module: Module, computation: Computation) -> tuple[list[Instruction], list[Instruction]]:
    """Returns the instructions with results that live when the schedule holds the most bytes, as two lists: of
    `computation`, and of a loop, branch or call that runs then. Parameters of `computation` always live. Constants,
    results that share the memory of an operand, and what the loop, branch or call takes and returns are left out."""
    order = list(computation.instructions.values())
    last = {each.name: i for i, each in enumerate(order)}
    owners = {each.name: [each.name] for each in order}  # by result: the results that it shares memory with
    for i, each in enumerate(order):
        shared = [owner for name in each.operands for owner in owners[name]]
        last |= dict.fromkeys(shared, i)
        if each.opcode == "get-tuple-element" and len(shared) == len(computation.operands(each)[0].shapes):
            owners[each.name] = [shared[each.numbers("index")[0]]]
        elif each.opcode in ("bitcast", "get-tuple-element", "tuple", "while") or each.opcode.endswith("-done"):
            owners[each.name] = shared
    last |= dict.fromkeys(owners[computation.root.name], len(order))
    ends: dict[int, list[Instruction]] = {}
    live = {each.name: each for each in order if each.opcode == "parameter"}
    now = most = _held([*live.values()])
    found, inside = list(live.values()), list[Instruction]()
    for i, each in enumerate(order):
        if each.opcode not in ("parameter", "constant") and owners[each.name] == [each.name]:
            live[each.name] = each
            now += each.held
            ends.setdefault(last[each.name], []).append(each)
        inner = max(
            (_made_inside(module, name) for name, _ in called_by(each) if each.opcode != "fusion"),
            key=_held,
            default=[],
        )
        if now + _held(inner) > most:
            most, found, inside = now + _held(inner), list(live.values()), inner
        for ended in ends.pop(i, ()):
            now -= ended.held
            del live[ended.name]
    return found, inside


def _made_inside(module: Module, name: str) -> list[Instruction]:
    """Returns what `_live_at_peak` finds of the computation `name`, without its parameters and results."""
    computation = module.computations[name]
    live, inside = _live_at_peak(module, computation)
    results = computation.operands(computation.root) if computation.root.opcode == "tuple" else [computation.root]
    return [each for each in (*live, *inside) if each.opcode != "parameter" and each not in results]


def _held(found: Sequence[Instruction]) -> int:
    return sum(each.held for each in found)


def _matching(entry: Computation) -> int:
    """Returns the bytes of results that can be paired with an argument of the same type, each argument with one."""
    results = entry.operands(entry.root) if entry.root.opcode == "tuple" else [entry.root]
    given = collections.Counter(each.type for each in entry.instructions.values() if each.opcode == "parameter")
    both, nbytes = given & collections.Counter(each.type for each in results), {x.type: x.nbytes for x in results}
    return sum(count * nbytes[each] for each, count in both.items())


def memory_notes(memory: Memory, hardware: Hardware | None) -> list[str]:
    """Returns lines about the peak, and if it fits `hardware`; about the largest arrays; and about bytes that donation
    or `jax.checkpoint` could save, if these are at least 1 % of the peak."""
    fits = ""
    if hardware is not None and math.isfinite(hardware.memory):
        room = hardware.memory - memory.peak
        fits = f"; fits {hardware.name} with {size_of(room)} to spare" if room >= 0 else ""
        fits = fits or f"; does not fit {hardware.name} by {size_of(-room)}"
    notes = [
        f"memory: {size_of(memory.peak)} at the peak of a device ({size_of(memory.arguments)} arguments, "
        f"{size_of(memory.results)} results, {size_of(memory.temporaries)} temporaries){fits}"
    ]
    if memory.largest:
        listed = (f"{size_of(b.nbytes)} {b.shape} {b.line or b.operation}".rstrip() for b in memory.largest[:4])
        notes.append(f"largest then: {', '.join(listed)}")
    least = memory.peak / 100  # less is not worth a line
    if memory.donatable >= least > 0:
        notes.append(f"donate_argnums could save {size_of(memory.donatable)}: results have the types of arguments")
    if memory.saved_for_gradient >= least > 0:
        notes.append(f"jax.checkpoint could save up to {size_of(memory.saved_for_gradient)} kept for the gradient")
    return notes


def shape_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Returns the type without its layout; for a tuple its first part and the number of parts."""
    (kind, extents), *others = shapes or [("token", ())]
    return f"{kind}[{','.join(map(str, extents))}]{f' x{len(others) + 1}' * bool(others)}"


def size_of(nbytes: float) -> str:
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if nbytes >= u or u == 1)
    return f"{nbytes / unit:.3g} {name}"
