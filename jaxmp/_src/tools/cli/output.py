"""Common parts of the commands: errors in one line, tables and progress, and the devices that they run on."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.platform.jax_internals import jax_compat


class CommandError(Exception):
    """Why a command cannot run, in one line."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: int = 0) -> None:
    """Prints a table; the last `numbers` columns are aligned to the right.

    Cells fold at spaces where a terminal is narrow, never within words; in a file or a pipe none folds.
    """
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = _widths(cells, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    left = len(columns) - numbers
    lines = [title] * bool(title)
    for row in cells[not any(columns) :]:
        folded = [
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            aligned = (
                part.ljust(width) if i < left else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append("  ".join(aligned).rstrip())
        lines += ["-" * (sum(widths) + 2 * len(widths) - 2)] * (row is cells[0])
    print("\n".join(lines) + "\n")


def _widths(cells: Sequence[Sequence[str]], available: int | None) -> list[int]:
    """Returns the widths of a table's columns: as wide as their texts, or if these do not fit, as their longest words;
    the narrowest texts then get the rest first."""
    gaps = 2 * len(cells[0]) - 2
    whole = [max(1, *map(len, column)) for column in zip(*cells, strict=True)]
    if available is None or sum(whole) + gaps <= available:
        return whole
    widths = [max(map(len, " ".join(column).split()), default=1) for column in zip(*cells, strict=True)]
    left = max(available - sum(widths) - gaps, 0)
    for i in sorted(range(len(whole)), key=whole.__getitem__):
        more = min(left, whole[i] - widths[i])
        widths[i], left = widths[i] + more, left - more
    return widths


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def progress(what: str, total: int, *, is_quiet: bool = False) -> Callable[[str], None]:
    """Returns a function that ends a step and names the next one, in one line of stderr if that is a terminal."""
    steps = itertools.count(1)

    def step(following: str) -> None:
        if not is_quiet and sys.stderr.isatty():
            done = next(steps)
            text = f"{what}: {done} of {total}, {following}" if done < total else ""
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return step


def require_devices(count: int) -> list[jax.Device]:
    """Returns the first `count` devices; on CPUs it makes them, if JAX's backend has not started.

    Raises CommandError if there are fewer.
    """
    make_cpu_devices(count)
    devices = jax.devices()
    if len(devices) < count:
        platform = jax.default_backend()
        raise CommandError(f"needs {count} devices, but this machine has {len(devices)} of platform {platform}")
    return devices[:count]


def make_cpu_devices(count: int) -> None:
    """Makes JAX create this many CPU devices, if its backend has not started."""
    if not jax_compat.backend_exists():
        with contextlib.suppress(RuntimeError):  # XLA_FLAGS has said how many
            jax.config.update("jax_num_cpu_devices", count)


_SHORT_TYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn"}
_SHORT_TYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)} | {"c64": "complex64", "c128": "complex128"}


def dtype_of(text: str) -> str:
    """Returns a type's full name from "bf16", "f32" or the name itself.

    Raises CommandError where there is no such type.
    """
    name = _SHORT_TYPES.get(text, text)
    try:
        return str(jnp.dtype(name).name)
    except TypeError:
        raise CommandError(f"there is no type {text!r}; pass f32, f64, bf16, f16, c64, c128 or JAX's name") from None
