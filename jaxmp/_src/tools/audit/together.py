"""Operations that give other bits only when they are compiled together, and the remedies that were tried.

Where no operation differs alone and the program does, audit compiles some of its operations as one piece, on both
sides, with equal inputs. It bisects to a small piece that differs: for k of n operations it compiles at most
2 (k + 1) (log2(n) + 1) times, and it looks for at most 3 pieces. Then it tries each remedy on the whole program.
If operations differ alone, it tries `jaxmp.fuse`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxmp._src.fuse.fuse import fuse
from jaxmp._src.platform.jax_internals import jax_compat, jax_tracing
from jaxmp._src.tools.audit import bits, operations
from jaxmp._src.tools.audit.side import Side
from jaxmp._src.tools.audit.walk import Body, Walk

_MOST_PIECES = 3


@dataclasses.dataclass(frozen=True)
class Together:
    """Operations that differ if they are compiled together: as few as the bisection finds.

    `operations`: the primitive and the line of each, in the order of the program.
    """

    operations: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A remedy that was tried on the whole program: with it, `differing` of the `outputs` differ in some variant."""

    remedy: str
    differing: int
    outputs: int


# Pieces ------------------------------------------------------------------------------------------------------------


def pieces(walk: Walk, jaxpr: Any, line: str, most: int = _MOST_PIECES) -> list[Together]:
    """Returns at most `most` small pieces of a jaxpr that `walk` has followed, the program's or a loop's, that differ;
    [] if all together do not. If a piece is one loop, and pieces of its last step differ, returns these instead.
    `line`: of equations without one."""
    body = walk.bodies[jax_tracing.open_jaxpr(jaxpr)[0]]
    pairs, found = body.pairs, list[Together]()
    while len(found) < most and (piece := smallest(lambda some: _differ(walk, body, some), pairs)):
        equations = [eqn for eqn, _ in piece]
        lines = [jax_compat.traced_line(eqn) or line for eqn in equations]
        loops = jax_compat.subjaxprs(equations[0].params) if len(equations) == 1 else ()
        bodies = [loop for loop in loops if loop in walk.bodies]
        inner = [one for inside in bodies for one in pieces(walk, inside, lines[0], most - len(found))]
        found += inner or [Together(tuple(zip(map(operations.name_of, equations), lines, strict=True)))]
        pairs = [pair for pair in pairs if pair is not piece[-1]]
    return list(dict.fromkeys(found))


def smallest(differs: Callable[[list[Any]], bool], items: Sequence[Any]) -> list[Any]:
    """Returns a few of the `items`, in their order, with `differs(few)` True; none if all together do not differ. Asks
    `differs` at most (k + 1) (log2(n) + 1) times for k of n items, also about the result itself."""
    items, kept = list(items), list[Any]()
    if not items or not differs(items):
        return []
    while items:
        fewest, enough = 0 if kept else 1, len(items)  # the first `enough` items and `kept` differ
        while fewest < enough:
            middle = (fewest + enough) // 2
            if differs([*items[:middle], *kept]):
                enough = middle
            else:
                fewest = middle + 1
        if not enough:
            break
        items, kept = items[: enough - 1], [items[enough - 1], *kept]
    return kept


def _differ(walk: Walk, body: Body, some: Sequence[tuple[Any, Any]]) -> bool:
    """True if the pairs of equations `some`, compiled together on each side and run on the values that were found
    before, give other bits. Compares only results that are read elsewhere and are comparable."""
    inside, (_, values) = {id(eqn) for eqn, _ in some}, body.environments
    read = {v for eqn, _ in body.pairs if id(eqn) not in inside for v in jax_tracing.variables(eqn)}
    read |= {v for v in body.outvars if not jax_tracing.is_literal(v)}
    results = [pair for eqn, other in some for pair in zip(eqn.outvars, other.outvars, strict=True) if pair[0] in read]
    made = [(v, w) for v, w in results if values[w].is_comparable]
    ones, others = (
        side.together([pair[i] for pair in some], [pair[i] for pair in made], body.environments[i])
        for i, side in enumerate(walk.sides)
    )
    compared = [
        walk.variation.difference(other, bits.pull(one), values[w].relation)
        for one, other, (_, w) in zip(ones, others, made, strict=True)
    ]
    return any(compared)  # all of them: the processes of a job compare together


# Remedies ----------------------------------------------------------------------------------------------------------

_OPTIONS = (
    {"xla_cpu_experimental_ynn_fusion_type": ""},  # no sums and softmaxes of YNNPACK, which has another exp
    {"xla_disable_hlo_passes": "algsimp"},
    {"xla_disable_hlo_passes": "fusion"},
    {"xla_disable_hlo_passes": "algsimp,fusion", "xla_cpu_experimental_ynn_fusion_type": ""},
)


def trials(walks: Sequence[Walk], vary: str, *, has_rows: bool) -> Iterator[Trial]:
    """Yields a trial of each remedy on the whole program, until with one of them no output differs in the variants
    `walks`. Callers pass only variants with an output that differs, at least one. If the compiler or `fuse` refuses a
    remedy, all outputs count as differing, and the remedy's text has the error. `vary`: sets the level that `fuse`
    gets. `has_rows`: operations differ alone; then it tries `fuse` only."""
    differing = count = len(walks[0].results)
    for remedy, run in _remedies(walks[0], operations.LEVELS[vary], () if has_rows else _OPTIONS):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fuse: the bits of these")  # the trial compares them
                ones = run(walks[0].sides[0])
                compared = [walk.differences(ones, run(walk.sides[1])) for walk in walks]
            differing = sum(any(one) for one in zip(*compared, strict=True))
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:  # the compiler, or `fuse`, does not take it
            remedy, differing = f"{remedy} ({str(error).splitlines()[0]})", count
        yield Trial(remedy, differing, count)
        if not differing:
            return


def _remedies(
    walk: Walk, level: Any, options: Sequence[dict[str, str]]
) -> Iterator[tuple[str, Callable[[Side], list[Any]]]]:
    """Yields (remedy, a function that runs a side with it): `fuse` at `level`, then each of `options` that the first
    side does not have."""
    yield f'jaxmp.fuse(fn, determinism="{level}")', lambda side: side.whole(fuse(side.fn, determinism=level))
    given = walk.sides[0].options
    for each in options:
        if any(given.get(name) != value for name, value in each.items()):
            yield f"jax.jit(fn, compiler_options={given | each})", functools.partial(Side.whole, options=each)
