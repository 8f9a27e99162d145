"""Flags that JAX marks as coming defaults. `make test-python RUN=tests/coming_flags.py` runs a part of the tests under
each of them."""

import os
import subprocess
import sys

from jax._src import config

TESTS = (*(f"tests/core/product/test_{name}.py" for name in ("frameworks", "layers", "einsum")), "--share", "1/60")

# Named in JAX's source or changelog, without the mark that others have.
SAID_ELSEWHERE = {"jax_auto_pcast": False, "eager_constant_folding": True}
# A scan has no derivative under this flag in JAX 0.12.
NOT_YET = {"jax_scan3"}
MARK = config.UPGRADE_BOOL_HELP.split("(")[0].strip()
FLAGS = config.config._value_holders


def coming() -> dict[str, bool]:
    """Returns the coming value of each flag of this JAX, if it differs from the current one."""
    marked = {name for name, flag in FLAGS.items() if MARK in (flag.__doc__ or "")}
    values = SAID_ELSEWHERE | dict.fromkeys(sorted(marked - NOT_YET), True)
    return {name: value for name, value in values.items() if FLAGS[name].value is not value}


if __name__ == "__main__":
    for name, value in coming().items():
        print(f"== {name}={value}", flush=True)
        command = [sys.executable, "-m", "pytest", "-n", "2", *TESTS, *sys.argv[1:]]
        subprocess.run(command, env=os.environ | {name.upper(): str(int(value))}, check=True)
