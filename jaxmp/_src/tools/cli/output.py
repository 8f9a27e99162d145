"""Common parts of the commands: errors in one line, tables, and the devices that they run on."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import config
from jaxmp._src.platform.runtime.text import aligned

Item = TypeVar("Item")


class CommandError(Exception):
    """Why a command cannot run, in one line."""


class Result(NamedTuple):
    """The result of a command: the text that it prints, the value that it prints with --json, and the exit status."""

    text: str
    value: Any
    status: int = 0

    def show(self, *, as_json: bool) -> None:
        """Prints the text, unless it is empty, or JSON: a dataclass with its fields, a sharding as a list."""
        if self.text:
            print(json.dumps(self.value, indent=1, default=_as_json) if as_json else self.text)


def _as_json(value: Any) -> Any:
    return vars(value) if dataclasses.is_dataclass(value) else list(value)


def table(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Returns lines of rows with aligned columns; the first row may be a header."""
    return aligned([list(map(str, row)) for row in rows])


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
        config.add_xla_flag("xla_force_host_platform_device_count", str(count))


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
