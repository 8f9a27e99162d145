"""Rank the shardings of a product, or of a function's arguments, by predicted time: jaxmp advise M K N, or
jaxmp advise model.py:forward 'f32[512,1024]' ... with the types of its arguments."""

from __future__ import annotations

import argparse
import contextlib

import jax

from jaxmp._src.tools.advise.advise import Advice, Choice, advise
from jaxmp._src.tools.advise.program import Plan, ProgramAdvice
from jaxmp._src.tools.cli.explain import mesh_of, program
from jaxmp._src.tools.cli.output import CommandError, Result, dtype_of

_PLAN = ("name", "mesh", "arguments", "seconds", "exposed_seconds", "bytes_moved", "memory", "fits")


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


def run(options: argparse.Namespace) -> Result:
    """Returns the choices. Raises CommandError for wrong arguments, and what `advise` raises."""
    devices = 8 if options.devices is None and not options.mesh else options.devices
    found = (_of_program if ":" in options.what[0] else _of_product)(options, devices)
    return Result(str(found), list(map(_fields, found.choices)))


def _of_product(options: argparse.Namespace, devices: int) -> Advice:
    if len(options.what) != 3 or not all(text.lstrip("-").isdecimal() for text in options.what):
        raise CommandError(f"takes M K N or FILE.py:FUNCTION TYPE..., got {' '.join(options.what)}")
    if options.mesh:
        raise CommandError("--mesh applies to a function; for one product pass --devices")
    m, k, n = map(int, options.what)
    return advise(m, k, n, devices, hardware=options.hardware, dtype=dtype_of(options.dtype or "bf16"), quiet=True)


def _of_program(options: argparse.Namespace, devices: int | None) -> ProgramAdvice:
    """Advises on a function of a file, under the mesh of --mesh if there is one. Raises CommandError for --dtype."""
    if options.dtype:
        raise CommandError("--dtype applies to one product; a function's arguments have their types")
    place, *types = options.what
    mesh = mesh_of(options.mesh)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        function, arguments = program(place, types, None)
        return advise(function, devices=devices, hardware=options.hardware, quiet=True)(*arguments)


def _fields(choice: Choice | Plan) -> dict[str, object]:
    if isinstance(choice, Choice):
        return vars(choice) | {"seconds": choice.seconds, "bound": choice.time.bound}
    steps = [vars(step) | {"seconds": step.seconds, "bound": step.time.bound} for step in choice.steps]
    return {name: getattr(choice, name) for name in _PLAN} | {"steps": steps}
