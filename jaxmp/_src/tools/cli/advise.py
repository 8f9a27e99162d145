"""Rank the shardings of a product by predicted time: jaxmp advise M K N. `jaxmp.advise` ranks those of a function."""

from __future__ import annotations

import argparse

from jaxmp._src.tools.advise.advise import Choice, advise
from jaxmp._src.tools.cli.output import CommandError, dtype_of, print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (("m", "rows of a"), ("k", "columns of a, rows of b"), ("n", "columns of b")):
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--devices", type=int, default=8, help="how many devices share the product (8)")
    parser.add_argument("--hardware", default="h100-8", help="this, h100-8, h200-8 or gb200-nvl72 (h100-8)")
    parser.add_argument("--dtype", default="bf16", help="type of the operands: f32, bf16, f64, ... (bf16)")
    parser.add_argument("--json", action="store_true", help="print all shardings as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0; extents and numbers of devices that no sharding divides are an error of the command."""
    extents, dtype = (options.m, options.k, options.n), dtype_of(options.dtype)
    try:
        found = advise(*extents, options.devices, hardware=options.hardware, dtype=dtype, quiet=True)
    except ValueError as error:
        raise CommandError(str(error).removeprefix("advise: ")) from None
    if options.json:
        print_json([_fields(each) for each in found.choices])
        return 0
    ((head, *rows),) = found.tables()
    print_table(found.subject, head, rows)
    print("\n".join(found.notes()))
    return 0


def _fields(choice: Choice) -> dict[str, object]:
    shardings = {name: list(getattr(choice, name)) for name in "abd"}
    fields = ("pattern", "splits", "mesh", "seconds", "memory", "bytes_moved", "fits", "is_efficient")
    return {name: getattr(choice, name) for name in fields} | shardings | {"bound": choice.time.bound}
