"""What the benchmarks share: interleaved timing, the description of the machine, tables and JSON."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path

import jax

import jaxmp
from jaxmp._src.hardware.clock import interleaved as interleaved
from jaxmp._src.hardware.processor import processor
from jaxmp._src.runtime import native

# With these set, OpenBLAS, which is opened later, takes the kernels of another processor than this one.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("jax", "jaxlib", "jaxmp", "numpy", "scipy-openblas32", "mkl")


@dataclasses.dataclass
class Report:
    """One benchmark's outcome: prose, tables of (title, columns, rows), and everything that was measured."""

    title: str
    prose: str
    tables: list[tuple[str, list[str], list[list[str]]]]
    data: dict


def compile_seconds(f, arguments):
    """Of tracing with lowering, and of compiling, from empty caches; and the compiled function."""
    jax.clear_caches()
    jaxmp.plan_cache_clear()
    started = time.perf_counter()
    lowered = jax.jit(f).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return (traced - started, time.perf_counter() - traced), compiled


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def machine():
    """Processor, cores, versions and the date: without them a number means nothing."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    about = processor()
    return {
        "processor": about.name,
        "extensions": [name for name in EXTENSIONS if name in about.instructions],
        "cores": about.cores,
        "blas": native.blas_info()["config"],
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def header(about):
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return (
        f"{about['processor']} ({', '.join(about['extensions']) or 'no vector extensions found'}), "
        f"{about['cores']} cores, load {about['load']:.1f} at the start, {about['system']}, "
        f"Python {about['python']}, {versions}, {about['blas']}; {about['date']}."
    )


def table(columns, rows):
    """A markdown table, padded so that it can be read in a terminal as well."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [[str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *rows]]
    rule = ["-" * width for width in widths]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def markdown(report):
    parts = [f"## {report.title}", report.prose]
    for title, columns, rows in report.tables:
        parts += [f"**{title}**" if title else "", table(columns, rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(measure):
    """Run `measure(quick)` as a script; with --json the measurements also go to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, to see that everything works")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    arguments = parser.parse_args()
    about = machine()
    report = measure(arguments.quick)
    text = markdown(report)
    print(text)
    if arguments.json:
        record = {"machine": about, "quick": arguments.quick, "markdown": text, **report.data}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
