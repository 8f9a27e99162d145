"""Compares the results of two libraries for the same cases, and names every difference. `conformance` prints the lines.
A difference is a *fault* if hostmp promises something that the other library does not keep: it would make every test on
a CPU worthless for the GPU. hostmp may refuse what the other library takes, because it is strict on purpose, and may
take what it declares as a capability."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

# Names of differences, and why each is one.
FAULTS = {
    "missing": "only one library was asked",
    "ends": "it crashed, hung, or failed after it had accepted the call",
    "divides": "its ranks did not agree whether to accept the call",
    "refuses": "it refuses what hostmp takes, without a capability of hostmp's that says so",
    "differs": "a result is outside of its bound",
    "rounds": "a result that has one right answer is within its bound, but another",
    "overwrites": "it wrote to an operand, or past the end of a buffer",
    "detour": "it does not multiply locally where there is one rank",
}
ALLOWED = {
    "algorithm": "it refuses an algorithm that was asked for by name",
    "capability": "it refuses, or computes otherwise, what hostmp takes as a declared capability",
    "accepts": "it takes what hostmp refuses",
    "reason": "it refuses for another reason than hostmp",
}
_ENDS = ("crash", "hang", "run", "memory")


@dataclasses.dataclass(frozen=True)
class Difference:
    """`kind` is a key of FAULTS or ALLOWED, `detail` says what was seen."""

    kind: str
    case: str
    ranks: int
    detail: str

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS

    def __str__(self) -> str:
        return f"{self.kind}: {self.case} ({self.ranks} ranks): {self.detail}"


def compare(ours: list[dict], theirs: list[dict]) -> list[Difference]:
    """Returns every difference of `theirs` from `ours` (hostmp's), in the order of the cases."""
    host, other = _by_case(ours), _by_case(theirs)
    differences = []
    for key in [*host, *(key for key in other if key not in host)]:
        case, ranks = key
        if key in host and key not in other and host[key][0]["capability"] == "as_documented":
            continue  # not asked
        if key not in host or key not in other:
            by = "hostmp" if key in host else "the other library"
            differences.append(Difference("missing", case, ranks, f"run by {by} alone"))
            continue
        kind_and_detail = _difference(host[key], other[key])
        if kind_and_detail:
            differences.append(Difference(kind_and_detail[0], case, ranks, kind_and_detail[1]))
    return differences


def _by_case(lines: list[dict]) -> dict[tuple[str, int], list[dict]]:
    cases: dict[tuple[str, int], list[dict]] = {}
    for line in lines:
        cases.setdefault((line["case"], line["ranks"]), []).append(line)
    for key, found in cases.items():
        ranks = sorted(line["rank"] for line in found)
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{key[0]} was run twice on {key[1]} ranks; compare one run with one run")
    return cases


def _difference(host: list[dict], other: list[dict]) -> tuple[str, str] | None:
    """Returns (kind, detail) of the gravest difference in one case on all ranks; None if there is none."""
    for line in other:
        if line["stage"] in _ENDS:
            return "ends", f"rank {line['rank']}: {line['stage']}: {line['error']}"
    statuses = {line["rank"]: line["status"] for line in other}
    if len(set(statuses.values())) > 1 or len(other) != len(host):
        return "divides", f"status by rank: {statuses}"
    ours, theirs = host[0], other[0]
    if ours["status"] == 0 != theirs["status"]:
        kind = "capability" if ours["capability"] else "algorithm" if "algorithm" in ours["case"] else "refuses"
        return kind, f"{theirs['stage']} gives status {theirs['status']}: {theirs['error']}"
    if ours["status"] != 0:
        if theirs["status"] == 0:
            return "accepts", f"hostmp says: {ours['error']}"
        if theirs["status"] == ours["status"]:
            return None
        return "reason", f"status {theirs['status']} ({theirs['error']}), hostmp {ours['status']} ({ours['error']})"
    return _difference_of_results(host, other)


def _difference_of_results(host: list[dict], other: list[dict]) -> tuple[str, str] | None:
    exact = {(line["rank"], name) for line in host for name, result in line["results"].items() if result["exact"]}
    found: dict[str, str] = {}
    for line in other:
        if not line["intact"]:
            found.setdefault("overwrites", f"rank {line['rank']}")
        for name, result in line["results"].items():
            where = f"rank {line['rank']}: {name} uses {100 * result['worst']:.3g} % of its bound"
            if result["worst"] > 1:
                is_known = host[0]["capability"] in ("as_documented", "complex_epilogs")  # jaxmp never asks for these
                found.setdefault("capability" if is_known else "differs", where)
            elif not result["exact"] and (line["rank"], name) in exact:
                found.setdefault("rounds", where)
        if line["ranks"] == 1 and line.get("words") and "local" not in line["words"].lower():
            found.setdefault("detour", f"it says {line['words']!r}")
    order = ("differs", "overwrites", "capability", "rounds", "detour")
    return next(((kind, found[kind]) for kind in order if kind in found), None)


def known(path: Path | None) -> list[tuple[str, str]]:
    """Returns (kind, part of the name) of the faults that a file excuses: lines "kind: part", and comments."""
    if path is None:
        return []
    lines = (line.strip() for line in path.read_text().splitlines())
    return [tuple(line.split(": ", 1)) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def report(differences: list[Difference], excuses: list[tuple[str, str]], is_whole: bool = True) -> tuple[str, bool]:
    """Returns (what to print, True if a fault has no excuse or, in a whole run, an excuse has no fault)."""
    counts = collections.Counter(difference.kind for difference in differences)
    lines = [f"{counts[kind]:5d}  {kind}: {why}" for kind, why in (FAULTS | ALLOWED).items() if counts[kind]]
    is_bad, used = False, set()
    for difference in differences:
        excuse = next((e for e in excuses if e[0] == difference.kind and e[1] in difference.case), None)
        used |= {excuse} if excuse else set()
        is_bad = is_bad or (difference.is_fault and excuse is None)
        if difference.is_fault:
            lines.append(f"{'known ' if excuse else 'FAULT '}{difference}")
        elif difference.kind != "capability":
            lines.append(f"{difference}")
    for excuse in excuses:
        if is_whole and excuse not in used:
            lines.append(f"FAULT nothing needs the excuse {excuse[0]}: {excuse[1]}")
            is_bad = True
    return "\n".join(lines) or "no difference", is_bad
