"""Options of communication on GPUs: cuBLASMp says what it takes, and its answer is the user's error."""

import functools

import fake_gpus
import jax
import numpy as np
import pytest
from test_calls import PATTERNS, mesh_over, operands

import jaxmp
from jaxmp._src.validation import comm_options


def run(name, mesh, **options):
    product, given, expected = operands(name, mesh)
    with jax.set_mesh(mesh):
        d = jax.jit(functools.partial(product, comm=jaxmp.CommOptions(**options)))(*given)
        np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("algorithm", comm_options.ALGORITHMS)
@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "local"])
def test_the_library_says_which_algorithms_it_has(name, algorithm, monkeypatch):
    """On every rank; our own table, of one version, is not asked."""
    is_taken = name in {each.value for each in comm_options.ALGORITHMS[algorithm]}
    monkeypatch.setattr(comm_options, "ALGORITHMS", dict.fromkeys(comm_options.ALGORITHMS, ()))
    mesh = mesh_over((0, 1))
    for device in (0, 1):
        fake_gpus.cublasmp_calls(device)
    if is_taken:
        return run(name, mesh, algorithm=algorithm)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"\[cublasMpMatmul_bufferSize\].*algorithm={algorithm}"):
        run(name, mesh, algorithm=algorithm)
    for device in (0, 1):
        assert "Matmul" not in fake_gpus.cublasmp_calls(device)
