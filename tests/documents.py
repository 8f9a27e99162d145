"""Runs the code of a page: every block that is marked `python`, in order, as one program. Blocks marked `py` quote
other libraries' code for comparison, and do not run."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(page):
    """Returns the text of each Python block of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def run(page, folder, before=""):
    """Runs the code of `page` after the code `before`, in a separate process; returns the output."""
    program = folder / f"{page.stem}.py"
    program.write_text("\n".join([before, *blocks(page)]))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run_doctests(page):
    """Runs the Python sessions of a page in order, with shared names; returns the number of examples."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    names = {}
    for block in blocks(page):
        session = doctest.DocTestParser().get_doctest(block, names, page.name, None, 0)
        runner.run(session, clear_globs=False)
        names = session.globs
    results = runner.summarize()
    assert results.failed == 0
    return results.attempted
