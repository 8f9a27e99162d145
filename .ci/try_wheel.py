"""Tries the jaxmp that a wheel has installed in this environment: metadata and command line. `jaxmp selftest` tries its
products.

python -P .ci/try_wheel.py dist/jaxmp-0.2.0-cp312-abi3-manylinux_2_28_x86_64.whl
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

import jax

import jaxmp


def main(wheel: Path) -> None:
    """Ends the process with an assertion's message where something is wrong."""
    try_metadata(wheel)
    try_command_line()
    print(f"{wheel.name} on Python {platform.python_version()} with JAX {jax.__version__}: good")


def try_metadata(wheel: Path) -> None:
    """This environment has that wheel, and not the source tree or another version."""
    _, version, python, abi, system = wheel.name.removesuffix(".whl").split("-")
    assert Path(jaxmp.__file__).is_relative_to(sys.prefix), f"jaxmp comes from {jaxmp.__file__}, not {sys.prefix}"
    assert jaxmp.__version__ == version, f"{wheel.name} has version {jaxmp.__version__} inside"
    tags = [line for line in importlib.metadata.distribution("jaxmp").read_text("WHEEL").split("\n") if "Tag:" in line]
    for platform_tag in system.split("."):
        assert f"Tag: {python}-{abi}-{platform_tag}" in tags, f"{wheel.name} is not installed, but {tags}"


def try_command_line() -> None:
    """The script and the module find the extension, its BLAS and the host implementation."""
    for command in ([Path(sys.executable).parent / "jaxmp"], [sys.executable, "-P", "-m", "jaxmp"]):
        printed = subprocess.run([*command, "info", "--json"], check=True, capture_output=True, text=True, timeout=300)
        facts = json.loads(printed.stdout)
        assert facts["versions"]["jaxmp"] == jaxmp.__version__
        host = facts["host implementation"]
        assert "openblas" in host.get("BLAS", ""), host


if __name__ == "__main__":
    main(Path(sys.argv[1]))
