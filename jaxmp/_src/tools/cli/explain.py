"""Print what the products of a function of a Python file do: jaxmp explain model.py:forward 'f32[512@x,1024]'

An argument is a type as JAX prints it: float32[512@x,1024] has rows that are sharded over the mesh axis x. A function
without parameters needs none.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.tools.cli.output import CommandError, Result, dtype_of, require_devices
from jaxmp._src.tools.explain import explain as explain_lib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FILE.py:FUNCTION", help="the function, by file and name")
    parser.add_argument("arguments", metavar="TYPE", nargs="*", help="types of its arguments: f32[512@x,1024]")
    parser.add_argument("--mesh", default="", help="mesh of explicit axes that is set meanwhile: x=4 or x=2,y=2")
    parser.add_argument("--hardware", help="predict times on this, h100-8, h200-8 or gb200-nvl72")
    parser.add_argument("--compiled", action="store_true", help="compile it: every collective, its cause, and memory")


def run(options: argparse.Namespace) -> Result:
    """Returns the explanation; as JSON its rows, and of a compiled program also its memory and the rows of its calls.
    Raises CommandError for a mistake in options, function or types, and what `explain` raises."""
    mesh, compiled = mesh_of(options.mesh), bool(options.compiled)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        function, arguments = program(options.function, options.arguments, mesh)
        explained = explain_lib.explain(function, quiet=True, hardware=options.hardware, compiled=compiled)
        found = explained(*arguments)
    value = {"rows": found.rows, "memory": found.memory, "calls": found.calls.rows} if compiled else found.rows
    return Result(str(found), value)


def program(
    place: str, arguments: Sequence[str], mesh: Mesh | None
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Runs the file of `place`, "FILE.py:NAME", with its folder on the import path from then on. Returns (what has that
    name in it, its arguments as `argument_of` reads them); a name with dots is an attribute. Raises CommandError for
    text of another form, if there is no such file, or if nothing callable has the name; and what the file raises."""
    path, _, name = place.rpartition(":")
    file = Path(path)
    if not path or not name:
        raise CommandError(f"takes FILE.py:FUNCTION, got {place!r}")
    if not file.is_file():
        raise CommandError(f"there is no file {path}")
    sys.path.insert(0, str(file.resolve().parent))
    found: Any = types.SimpleNamespace(**runpy.run_path(path, run_name=file.stem))
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise CommandError(f"{path} has no function {name}")
    return found, [argument_of(text, mesh) for text in arguments]


def mesh_of(text: str) -> Mesh | None:
    """Returns a mesh of explicit axes from "x=2,y=2", with new CPU devices if JAX has not started; None from "". Raises
    CommandError for other text, and for too few devices."""
    if not text:
        return None
    if not re.fullmatch(r"\w+=[1-9]\d*(,\w+=[1-9]\d*)*", text):
        raise CommandError(f"--mesh takes axes as x=2,y=2, got {text!r}")
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}
    if len(sizes) <= text.count(","):
        raise CommandError(f"--mesh takes each axis once, got {text!r}")
    devices = require_devices(math.prod(sizes.values()))
    types = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def argument_of(text: str, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """Returns the type that JAX writes as f32[8@x,16] or bfloat16[8@(x,y),16], sharded over `mesh` if there is one. A
    dimension without axes is replicated. Raises CommandError for other text, and for axes without a mesh."""
    found = re.fullmatch(r"(\w+)\[([^\[\]]*)\]", text.replace(" ", ""))
    dims = re.findall(r"(\d+)(?:@(\w+|\([\w,]+\)))?(?:,|$)", found[2]) if found else []
    if not found or ",".join(f"{n}@{axes}" if axes else n for n, axes in dims) != found[2]:
        raise CommandError(f"takes types such as f32[512@x,1024], got {text!r}")
    axes = [tuple(names.strip("()").split(",")) if names else None for _, names in dims]
    if any(axes) and mesh is None:
        raise CommandError(f"{text} names mesh axes; pass --mesh, as --mesh {(axes[0] or axes[-1] or 'x')[0]}=4")
    sharding = None if mesh is None else NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct(tuple(int(n) for n, _ in dims), jnp.dtype(dtype_of(found[1])), sharding=sharding)
