"""Rank the shardings of a product by predicted time, on this machine or another."""

from __future__ import annotations

import argparse

from jaxmp._src.advise import advise as advise_lib
from jaxmp._src.cli.output import CommandError, dtype_of, named_hardware, print_json, print_table, rich


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Read by `run`."""
    for name, text in (("m", "rows of a"), ("k", "columns of a, rows of b"), ("n", "columns of b")):
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--devices", type=int, default=8, help="how many devices share the product (8)")
    parser.add_argument("--hardware", default="h100-8", help="this, h100-8, h200-8 or gb200-nvl72 (h100-8)")
    parser.add_argument("--dtype", default="bf16", help="type of the operands: f32, bf16, f64, ... (bf16)")
    parser.add_argument("--json", action="store_true", help="print all shardings as JSON")


def run(options: argparse.Namespace) -> int:
    """0; extents and numbers of devices that no sharding divides are an error of the command."""
    if not options.json:
        rich("table")  # ahead of the work, for its error
    machine, dtype = named_hardware(options.hardware), dtype_of(options.dtype)
    try:
        found = advise_lib.advise(
            *(options.m, options.k, options.n, options.devices), hardware=machine, dtype=dtype, quiet=True
        )
    except ValueError as error:
        raise CommandError(str(error).removeprefix("advise: ")) from None
    if options.json:
        print_json([_fields(choice) for choice in found.choices])
        return 0
    head, *rows = found.rows()
    print_table(found.product, head, rows)
    for note in found.notes():
        print(note)
    return 0


def _fields(choice: advise_lib.Choice) -> dict[str, object]:
    shardings = {name: list(getattr(choice, name)) for name in "abd"}
    fields = ("name", "pattern", "mesh", "seconds", "memory", "bytes_moved", "fits", "is_efficient")
    return {name: getattr(choice, name) for name in fields} | shardings | {"bound": choice.time.bound}
