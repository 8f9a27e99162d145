"""A request gets the same log-probabilities, to the bit, in any batch and on any number of devices (example 13)."""

import functools
import importlib
import itertools
import sys
from pathlib import Path

import pytest

import jaxmp

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
serving = importlib.import_module("13_serving")
pytestmark = pytest.mark.usefixtures("promotion_of_users")


@pytest.mark.parametrize("level", [None, "batch", "topology"])
def test_bits_of_a_request_do_not_know_its_batch_nor_the_devices(level):
    """Plain JAX is the control: if it also passed, the test would show nothing."""
    devices = (1,) if level == "batch" else serving.DEVICES
    fuse = functools.partial(jaxmp.fuse, determinism=level) if level else lambda fn: fn
    changed = serving.changed(fuse, itertools.product(serving.BATCHES, devices))
    assert any(changed.values()) == (level is None), changed
