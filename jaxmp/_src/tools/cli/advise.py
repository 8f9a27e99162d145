"""Rank the shardings of a product, or of a function's arguments, by predicted time: jaxmp advise M K N, or
jaxmp advise model.py:forward 'f32[512,1024]' ... with the types of its arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

import jax

from jaxmp._src.tools.advise.advise import Advice, Choice, advise
from jaxmp._src.tools.advise.program import Plan, ProgramAdvice
from jaxmp._src.tools.cli.explain import mesh_of, program
from jaxmp._src.tools.cli.output import (
    CommandError,
    dtype_of,
    named_hardware,
    print_json,
    print_lines,
    print_table,
    rich,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="M K N | FILE.py:FUNCTION TYPE...",
        nargs="+",
        help="rows of a, columns of a, columns of b; or a function by file and name, and the types of its arguments",
    )
    parser.add_argument("--devices", type=int, help="how many devices share the products (8, or as in --mesh)")
    parser.add_argument("--hardware", default="h100-8", help="this, h100-8, h200-8 or gb200-nvl72 (h100-8)")
    parser.add_argument("--dtype", help="type of the operands of one product: f32, bf16, f64, ... (bf16)")
    parser.add_argument(
        "--mesh", default="", help="mesh of explicit axes for all plans, if the function names axes: x=8"
    )
    parser.add_argument("--json", action="store_true", help="print all shardings as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the choices, as tables or with --json as JSON, and returns 0. Raises CommandError for wrong arguments, or
    if `advise` raises a ValueError."""
    if not options.json:
        rich("table")  # raises before the work where rich is missing
    try:
        found = (_of_program if ":" in options.what[0] else _of_product)(options)
    except ValueError as error:
        if not str(error).startswith("advise: "):
            raise
        raise CommandError(str(error).removeprefix("advise: ")) from None
    if options.json:
        print_json([_plan_fields(each) if isinstance(each, Plan) else _fields(each) for each in found.choices])
        return 0
    for i, (head, *rows) in enumerate(found.tables()):
        print_table("" if i else found.subject, head, rows)
    print_lines(found.notes())
    return 0


def _of_product(options: argparse.Namespace) -> Advice:
    if len(options.what) != 3 or not all(text.lstrip("-").isdecimal() for text in options.what):
        raise CommandError(f"takes M K N or FILE.py:FUNCTION TYPE..., got {' '.join(options.what)}")
    if options.mesh:
        raise CommandError("--mesh applies to a function; for one product pass --devices")
    m, k, n = map(int, options.what)
    machine, dtype = named_hardware(options.hardware), dtype_of(options.dtype or "bf16")
    return advise(m, k, n, _devices(options), hardware=machine, dtype=dtype, quiet=True)


def _of_program(options: argparse.Namespace) -> ProgramAdvice:
    """Advises on a function of a file, under the mesh of --mesh if there is one. Raises CommandError for wrong options,
    and for a function that needs a mesh that is not set."""
    if options.dtype:
        raise CommandError("--dtype applies to one product; a function's arguments have their types")
    place, *types = options.what
    machine, mesh = named_hardware(options.hardware), mesh_of(options.mesh)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        function, arguments = program(place, types, None)
        devices = mesh.size if mesh is not None and options.devices is None else _devices(options)
        try:
            return advise(function, devices=devices, hardware=machine, quiet=True)(*arguments)
        except Exception as error:
            if options.mesh or options.traceback or "set_mesh" not in str(error):
                raise
            first = str(error).splitlines()[0]
            raise CommandError(f"{first} (for this command --mesh x={devices} sets it)") from None


def _devices(options: argparse.Namespace) -> int:
    return 8 if options.devices is None else int(options.devices)


def _fields(choice: Choice) -> dict[str, object]:
    shardings = {name: list(getattr(choice, name)) for name in "abd"}
    fields = ("pattern", "splits", "mesh", "seconds", "memory", "bytes_moved", "fits", "is_efficient")
    return {name: getattr(choice, name) for name in fields} | shardings | {"bound": choice.time.bound}


def _plan_fields(plan: Plan) -> dict[str, object]:
    names = ("name", "mesh", "seconds", "exposed_seconds", "bytes_moved", "memory", "fits")
    fields: dict[str, object] = {name: getattr(plan, name) for name in names}
    return fields | {
        "arguments": [list(spec) for spec in plan.arguments],
        "steps": [
            dataclasses.asdict(step) | {"seconds": step.seconds, "bound": step.time.bound} for step in plan.steps
        ],
    }
