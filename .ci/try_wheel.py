"""Tries the jaxmp that a wheel has installed in this environment: metadata, command line, products on four CPU devices.

python -P .ci/try_wheel.py dist/jaxmp-0.2.0-cp312-abi3-manylinux_2_28_x86_64.whl
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

RANKS = 4


def main(wheel: Path) -> None:
    """Ends the process with an assertion's message where something is wrong."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    try_metadata(wheel)
    try_command_line()
    try_products()
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


def try_products() -> None:
    """Each pattern once, in one call of the host implementation. Sums of small integers are exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((16, 24), (24, 8)))
    line = jax.make_mesh((RANKS,), ("x",), axis_types=(AxisType.Explicit,))
    square = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    for mesh, of_a, of_b, of_d in (
        (line, P("x", None), P(None, "x"), P(None, "x")),  # gathers the rows of a
        (line, P(None, "x"), P("x", None), P("x", None)),  # scatters the rows of d
        (line, P(None, "x"), P("x", None), P(None, None)),  # sums over all devices
        (square, P("x", "y"), P("x", "y"), P("x", "y")),  # a grid
    ):
        put_a, put_b = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, of_a), (b, of_b)))

        def product(a, b, of_d=of_d):
            return jaxmp.matmul(a, b, out_sharding=of_d, implementation="host")

        def loss(multiply, a, b):
            return (multiply(a, b) ** 2).sum()

        with jax.set_mesh(mesh):
            got = jax.jit(product)(put_a, put_b)
            gradients = jax.jit(jax.grad(lambda a, b, of=product: loss(of, a, b), argnums=(0, 1)))(put_a, put_b)
        expected = jax.grad(lambda a, b: loss(jnp.matmul, a, b), argnums=(0, 1))(a, b)
        np.testing.assert_array_equal(got, a @ b, err_msg=f"{of_a} times {of_b} to {of_d}")
        for one, other in zip(gradients, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"gradient of {of_a} times {of_b} to {of_d}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
