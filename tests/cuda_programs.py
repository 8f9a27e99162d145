"""Programs for CUDA devices, lowered on machines without one."""

import re
import types

import cases
import jax
import pytest

from jaxmp._src.platform.runtime import native


@pytest.fixture
def cards(monkeypatch):
    """Returns `cards("9.0", "9.0")`, which gives this process fake CUDA devices with these compute capabilities."""
    cases.require("host")

    def plug_in(*capabilities, why=""):
        client = types.SimpleNamespace()
        devices = [types.SimpleNamespace(compute_capability=version, client=client) for version in capabilities]
        client.devices = lambda: devices
        monkeypatch.setattr(native, "cuda_devices", lambda: devices[:1])
        monkeypatch.setattr(native, "why_no_cublasmp", lambda: why)

    return plug_in


def texts(f, *args, platform="cuda"):
    """Returns the lines with jaxmp's custom calls of the program for `platform`."""
    lines = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text().splitlines()
    return [line for line in lines if "@jaxmp_matmul" in line]


def number(line, name):
    return int(re.search(rf"\b{name} = (-?\d+)", line)[1])
