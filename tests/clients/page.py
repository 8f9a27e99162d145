"""Write docs/works-with.md from benchmarks/results/clients, which has one file for each JAX. `python page.py --keep`
first copies the results of this environment's last `make test-clients` there. For times, run the tests with
CLIENT_TIMES=20."""

import argparse
import json
from pathlib import Path

import programs  # noqa: F401  adds its clients
import sciences  # noqa: F401  adds its clients
import trainers  # noqa: F401  adds its clients
from models import CLIENTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "clients", ROOT / "docs" / "works-with.md"
LOCAL = "so the product is local"  # the end of a reason that tells the details
PLACES = {"none": 'one device with `determinism="batch"`'}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    if parser.parse_args().keep:
        keep()
    PAGE.write_text(page())


def keep():
    from test_clients import FOUND

    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOUND.glob("*.json"))}
    RESULTS.mkdir(exist_ok=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    (RESULTS / f"{FOUND.name.removeprefix('found-')}.json").write_text(f"{{\n{lines}\n}}\n")


def page():
    """Returns the page with new tables, each after a comment that names it."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"), reverse=True)}
    lines, skip = [], False
    for line in PAGE.read_text().splitlines():
        skip = skip and (not line or line.startswith("|"))
        if not skip:
            lines.append(line)
        if line in ("<!-- clients -->", "<!-- suites -->"):
            rows = client_rows(results) if "clients" in line else suite_rows(results)
            lines, skip = [*lines, "", *(f"|{'|'.join(map(str, row))}|" for row in rows), ""], True
    return "\n".join(lines) + "\n"


def client_rows(results):
    yield "Client", "Release", "The line", "Products that became calls", "Speed", "What stays JAX's"
    yield ("---",) * 6
    for name, client in CLIENTS.items():
        found = [(jax, kept[f"run_client-{name}"]) for jax, kept in results.items() if f"run_client-{name}" in kept]
        if not found:
            continue
        newest = {seen["place"]: seen for seen in found[0][1]["results"]}
        calls = [f"{PLACES.get(p, p)}: {seen['calls']} of {seen['met']}" for p, seen in newest.items()]
        left = {"local" if reason.endswith(LOCAL) else reason for seen in newest.values() for reason in seen["left"]}
        speeds = [f"{PLACES.get(p, p)}: {seen['speed']:.2f}" for p, seen in newest.items() if seen["speed"]]
        releases = {
            kept["version"]: [j for j, other in found if other["version"] == kept["version"]] for _, kept in found
        }
        release = "; ".join(f"{version} (JAX {', '.join(jaxes)})" for version, jaxes in releases.items())
        line = f"`{client.line}`"
        cells = "; ".join(calls), "; ".join(speeds), ", ".join(sorted(left)) or "nothing"
        yield name.replace("_", " "), release, line, *cells


def suite_rows(results):
    yield "Tests of", "Release", "JAX", "Mode", "Run", "Pass plain", "Products met", "Fail in this mode alone"
    yield ("---",) * 8
    for jax, kept in results.items():
        for name, found in kept.items():
            for seen in found["results"] if name.startswith("suites-") else ():
                known = "; ".join(sorted(set(seen["known"].values()))) or "none"
                counts = (seen["mode"], seen["run"], seen["passed"], seen["met"])
                yield name.removeprefix("suites-"), found["version"], jax, *counts, known


if __name__ == "__main__":
    main()
