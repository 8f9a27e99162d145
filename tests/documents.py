"""Runs the code of a page: every block that is marked `python`. A section sees only the names of the blocks before the
first section, so that a reader can copy it. Blocks marked `py` quote other libraries' code, and do not run."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


# Runs the file that it is given, whose parts are the head and the sections, with the lines of the file.
PROGRAM = """
import sys
names, line = {"__name__": "__main__"}, 0
for i, part in enumerate(open(sys.argv[1]).read().split("#\\f\\n")):
    exec(compile("\\n" * line + part, sys.argv[1], "exec"), dict(names) if i else names)
    line += part.count("\\n") + 1
"""


def blocks(page, kind="python"):
    """Returns the text of each block of a page."""
    return [block for section in sections(page, kind) for block in section]


def sections(page, kind="python"):
    """Returns the blocks of the head of a page, and the blocks of each section."""
    parts = re.split(r"^## ", page.read_text(), flags=re.M)
    return [re.findall(rf"^```{kind}\n(.*?)^```", part, flags=re.M | re.S) for part in parts]


def run(page, folder, before=""):
    """Runs the code of `page` after the code `before`, in a separate process; returns the output."""
    program = folder / f"{page.stem}.py"
    head, *others = ["\n".join(section) for section in sections(page)]
    program.write_text("#\f\n".join([f"{before}\n{head}", *others]))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, program],
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
    """Runs the Python sessions of a page; returns the number of examples."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    shared = {}
    for i, section in enumerate(sections(page)):
        names = shared if i == 0 else dict(shared)
        for block in section:
            session = doctest.DocTestParser().get_doctest(block, names, page.name, None, 0)
            runner.run(session, clear_globs=False)
            names.update(session.globs)
    results = runner.summarize()
    assert results.failed == 0
    return results.attempted
