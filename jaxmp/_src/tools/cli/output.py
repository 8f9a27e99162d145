"""Common parts of the commands: errors in one line, tables and progress bars, and the devices that they run on."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.platform.hardware.hardware import Hardware, hardware_of
from jaxmp._src.platform.jax_internals import jax_compat


class CommandError(Exception):
    """Why a command cannot run, in one line."""


def rich(module: str) -> Any:
    """Imports a module of rich, an optional dependency. Raises CommandError where it is not installed."""
    try:
        return importlib.import_module(f"rich.{module}")
    except ImportError:
        raise CommandError("tables need the package rich: pip install 'jaxmp[cli]', or pass --json") from None


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: int = 0) -> None:
    """Prints a table; the last `numbers` columns are aligned to the right. A `title` of "" is not printed, and neither
    are `columns` that are all "". Cells fold at spaces where a terminal is narrow, never within words; in a file or a
    pipe none folds. Raises CommandError where rich is not installed."""
    console, texts = rich("console").Console(), [list(map(str, row)) for row in rows]
    widths = _widths([columns, *texts], console.width if console.is_terminal else None)
    console.width = max(_drawn(widths), console.width if console.is_terminal else len(title))
    if title:
        console.print(rich("text").Text(title, style="table.title"))
    table = rich("table").Table(show_header=any(columns), box=rich("box").SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="right" if i >= len(columns) - numbers else "left", width=width)
    for row in texts:
        table.add_row(*map(rich("text").Text, row))
    console.print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines of text, folded at spaces if standard output is a terminal."""
    console = rich("console").Console()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _widths(cells: Sequence[Sequence[str]], available: int | None) -> list[int]:
    """Returns the widths of a table's columns: as wide as their texts, or if these do not fit, as their longest words;
    the narrowest texts then get the rest first."""
    length = rich("cells").cell_len
    whole = [max(map(length, column)) for column in zip(*cells, strict=True)]
    if available is None or _drawn(whole) <= available:
        return whole
    widths = [max(map(length, " ".join(column).split()), default=0) for column in zip(*cells, strict=True)]
    left = max(available - _drawn(widths), 0)
    for i in sorted(range(len(whole)), key=whole.__getitem__):
        more = min(left, whole[i] - widths[i])
        widths[i], left = widths[i] + more, left - more
    return widths


def _drawn(widths: Sequence[int]) -> int:
    """Returns the width of a table: rich draws a space after each cell, one between cells and one at each edge."""
    return sum(widths) + 2 * len(widths) + 1


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


@contextlib.contextmanager
def progress(what: str, total: int, *, is_quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A context with a progress bar of `total` steps on stderr; without the bar if `is_quiet`, or if stderr is no
    terminal. It yields a function that ends a step and shows the name it gets."""
    if is_quiet:
        yield lambda _: None
        return
    console = rich("console").Console(stderr=True)
    with rich("progress").Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda following: bar.update(task, advance=1, description=following or what)


def require_devices(count: int) -> list[jax.Device]:
    """Returns the first `count` devices, made on CPUs if JAX has not started. Raises CommandError if there are
    fewer."""
    make_cpu_devices(count)
    devices = jax.devices()
    if len(devices) < count:
        platform = jax.default_backend()
        raise CommandError(f"needs {count} devices, but this machine has {len(devices)} of platform {platform}")
    return devices[:count]


def make_cpu_devices(count: int) -> None:
    """Makes JAX create this many CPU devices. Does nothing if its backend has started, or if XLA_FLAGS says how
    many."""
    if not jax_compat.backend_exists():
        with contextlib.suppress(RuntimeError):  # XLA_FLAGS has said how many
            jax.config.update("jax_num_cpu_devices", count)


def named_hardware(name: str) -> Hardware:
    """Returns the machine of --hardware. Raises CommandError if there is none, or "this" has not been measured."""
    try:
        return hardware_of("--hardware", name)
    except ValueError as error:
        raise CommandError(str(error)) from None


_SHORT_TYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn"}
_SHORT_TYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)} | {"c64": "complex64", "c128": "complex128"}


def dtype_of(text: str) -> str:
    """Returns a type's full name from "bf16", "f32" or the name itself. Raises CommandError for other text."""
    name = _SHORT_TYPES.get(text, text)
    try:
        return str(jnp.dtype(name).name)
    except TypeError:
        raise CommandError(f"there is no type {text!r}; pass f32, f64, bf16, f16, c64, c128 or JAX's name") from None
