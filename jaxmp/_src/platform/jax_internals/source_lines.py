"""Names a line of a user's program: "train.py:41", or "cell 5:2" in a notebook."""

from __future__ import annotations

import functools
import os
import re
import sys

# The file names that IPython and its kernel give to cells.
_CELL = re.compile(r"<ipython-input-(?P<number>\d+)-.*>|.*[/\\]ipykernel_\d+[/\\]\d+\.py")

# Installed libraries that run layers of a user's model: their lines are the same for all layers of a kind.
_LIBRARY = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?:equinox|flax|haiku|optax)[/\\].*")


def line_name(file: str, line: int) -> str:
    """Returns "train.py:41"; for a notebook's cell "cell 5:41", or "cell:41" if IPython does not know its number."""
    if (cell := _CELL.fullmatch(file)) is None:
        return f"{os.path.basename(file)}:{line}"
    number = cell["number"] or _execution_count(file)
    return f"cell {number}:{line}" if number else f"cell:{line}"


@functools.cache
def is_of_library(file: str) -> bool:
    """True for files of installed Equinox, Flax, Haiku or Optax; users look for the line that calls the library."""
    return _LIBRARY.fullmatch(file) is not None


def _execution_count(file: str) -> str:
    """Returns "5" for the file of the cell that IPython shows as In[5]; "" if IPython does not know the file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = name_of(file) if name_of is not None else None  # ("Cell", "In[5]")
    found = re.search(r"\[(\d+)\]", named[1]) if named else None
    return found[1] if found else ""
