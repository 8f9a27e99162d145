"""Shared parts of the benchmarks: interleaved timing, the description of the machine, and the command line."""

import argparse
import datetime
import importlib.metadata
import os
import platform
import time
from pathlib import Path

import jax
import tables

import jaxmp
from jaxmp._src.platform.hardware.clock import interleaved as interleaved
from jaxmp._src.platform.hardware.processor import processor
from jaxmp._src.platform.runtime import native

# With these set, OpenBLAS, which is opened later, takes the kernels of another processor than this one.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("jax", "jaxlib", "jaxmp", "numpy", "scipy-openblas32")


def compile_seconds(f, arguments):
    """Returns seconds of tracing with lowering and of compiling, from empty caches; and the compiled function."""
    jax.clear_caches()
    jaxmp.plan_cache_clear()
    started = time.perf_counter()
    lowered = jax.jit(f).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return (traced - started, time.perf_counter() - traced), compiled


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


def table(columns, rows):
    """A markdown table, padded so that it can be read in a terminal as well."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [[str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *rows]]
    rule = ["-" * width for width in widths]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def main(measure):
    """Run `measure(quick)`, which returns the means and the rows of each section, as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, to see that everything works")
    parser.add_argument("--results", type=Path, help="put the measurements into this machine's file in this folder")
    arguments = parser.parse_args()
    about = machine()
    sections = measure(arguments.quick)
    for name, section in sections.items():
        for part in tables.PARTS:
            lines = [[tables.shown(value) for value in row.values()] for row in section[part]]
            print(f"\n{name}: {part}\n{table(list(section[part][0]), lines)}")
    if arguments.results:
        tables.save(arguments.results, about, sections)
