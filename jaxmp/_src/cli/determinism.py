"""Check every promise of docs/determinism.md on this machine."""

from __future__ import annotations

import argparse

from jaxmp import testing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `python -m jaxmp.testing determinism`."""
    testing.add_determinism_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """1 where a promise is broken."""
    return testing.run_determinism(options)
