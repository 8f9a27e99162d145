"""Run every benchmark, each in a process of its own, and write the pages of all machines.

The measurements replace this kind of machine's in benchmarks/results; then the tables of the README,
docs/performance.md and docs/benchmarks.md are written again.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import tables

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    *("matmul", "layers", "step", "fuse", "batches", "determinism", "overhead", "devices", "processes", "memory"),
    *("compile", "prediction", "products", "experts", "training"),
)


def measure(names, folder, options=()):
    for name in names:
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--results", str(folder), *options]
        subprocess.run(command, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run that keeps nothing, to see that it works")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="run this one; may be repeated")
    parser.add_argument(
        "--page", action="store_true", help="write the pages from benchmarks/results, and measure nothing"
    )
    arguments = parser.parse_args()
    names = arguments.only or BENCHMARKS
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            measure(names, folder, ["--quick"])
            print(tables.page(tables.PAGES[-1], Path(folder)))
        return
    if not arguments.page:
        measure(names, tables.RESULTS)
    for path in tables.PAGES:
        path.write_text(tables.page(path))


if __name__ == "__main__":
    main()
