"""`python -m jaxmp` and the script `jaxmp`: reads the command line and runs one command.

A command is a module with `add_arguments(parser)` and `run(options)`, which returns a `Result`. Its docstring is the
text of --help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxmp._src.tools.cli import accept, advise, bench, explain, info, selftest
from jaxmp._src.tools.cli.output import CommandError

_COMMANDS = {"info": info, "selftest": selftest, "accept": accept, "bench": bench, "advise": advise, "explain": explain}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 0 for success, or if the reader closes the pipe; 1 if a check fails;
    2 if the command cannot run or raises (with a line on stderr); 130 if interrupted. With --traceback, raises errors
    other than CommandError. Wrong arguments end in argparse's SystemExit."""
    options = _parser().parse_args(arguments)
    try:
        result = _COMMANDS[options.command].run(options)
        result.show(as_json=options.json)
        return result.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stderr.close()
        return 0
    except CommandError as error:
        message = str(error)
    except Exception as error:
        if options.traceback:
            raise
        message = next(iter(str(error).splitlines()), "")
        own = f"{options.command}: "  # a refusal by the public function of the same name
        if not message.startswith(own):
            message = f"{type(error).__name__}: {message} (--traceback shows where)"
        message = message.removeprefix(own)
    print(f"jaxmp {options.command}: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxmp",
        description="Distributed matrix multiplication for JAX, from the command line.",
        epilog="Exit status: 0 for success, 1 where a check fails, 2 where the command cannot run.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(name, help=text.partition(":")[0], description=text)
        command.add_argument("--traceback", action="store_true", help="show where an unexpected error comes from")
        command.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(command)
    return parser
