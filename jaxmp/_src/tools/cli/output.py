"""Common parts of the commands: errors in one line, tables, and the devices that they run on."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.text import aligned

Item = TypeVar("Item")


class CommandError(Exception):
    """Why a command cannot run, in one line."""


def print_table(rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows with aligned columns; the first row may be a header."""
    print(*aligned([list(map(str, row)) for row in rows]), sep="\n")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=list))  # shardings have no form of their own


def counted(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items, and counts them on stderr if it is a terminal."""
    for i, item in enumerate(items, 1):
        if sys.stderr.isatty():
            print(f"\r{what}: {i} of {len(items)}", end="\n" * (i == len(items)), file=sys.stderr, flush=True)
        yield item


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


# Abbreviations of types, which JAX prints in jaxprs.
_LONG = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint", "c": "complex"}


def dtype_of(text: str) -> str:
    """Returns a type's full name from "bf16", "f32" or the name itself. Raises CommandError for other text."""
    text = {"f8": "f8_e4m3fn", "fp8": "f8_e4m3fn"}.get(text, text)
    name = re.sub(r"^(bf|[fiuc])(?=\d)", lambda found: _LONG[found[1]], text)
    try:
        return str(jnp.dtype(name).name)
    except TypeError:
        raise CommandError(f"there is no type {text!r}; pass f32, f64, bf16, f16, c64, c128 or JAX's name") from None
