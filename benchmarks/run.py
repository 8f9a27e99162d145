"""Run every benchmark, each in a process of its own, and put the tables together in one markdown file.

The tables and the measurements go to benchmarks/results; `--write-docs` also replaces the page of this kind of machine:
docs/benchmarks.md with AMX, docs/benchmarks-avx512.md without, docs/benchmarks-mkl.md where MKL is installed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import header

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BENCHMARKS = (
    *("matmul", "layers", "step", "fuse", "batches", "determinism", "overhead", "devices", "processes", "memory"),
    *("compile", "prediction"),
)
INTRODUCTION = """# {title}

Printed by `make bench`, which times all contenders in one run and in turns; `benchmarks/results` then has every
measurement as JSON. Numbers of two machines, or of two runs on a shared one, cannot be compared; ratios can.
[What bounds the speed](bounds.md) puts these numbers beside what was aimed at.
"""


def page_of(about):
    """The page of docs that has the tables of such a machine."""
    if "mkl" in about["versions"]:
        return "benchmarks-mkl.md"
    return "benchmarks.md" if "amx_bf16" in about["extensions"] else "benchmarks-avx512.md"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that everything works")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="run this one; may be repeated")
    parser.add_argument("--resume", action="store_true", help="keep the measurements that are in benchmarks/results")
    parser.add_argument("--write-docs", action="store_true", help="replace the page in docs by this run's tables")
    arguments = parser.parse_args()
    if arguments.write_docs and (arguments.quick or arguments.only):
        parser.error("--write-docs wants a full run, so drop --quick and --only")
    RESULTS.mkdir(exist_ok=True)
    texts, about = [], None
    for name in arguments.only or BENCHMARKS:
        record = RESULTS / f"{name}.json"
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--json", str(record)]
        if not (arguments.resume and record.exists()):
            subprocess.run(command + ["--quick"] * arguments.quick, check=True)
        measured = json.loads(record.read_text())
        about = about or measured["machine"]
        texts.append(measured["markdown"])
    title = "Benchmarks with MKL" if "mkl" in about["versions"] else "Benchmarks"
    text = "\n".join([INTRODUCTION.format(title=title), header(about) + "\n", *texts])
    (RESULTS / "benchmarks.md").write_text(text)
    print(header(about))
    if arguments.write_docs:
        (HERE.parent / "docs" / page_of(about)).write_text(text)


if __name__ == "__main__":
    main()
