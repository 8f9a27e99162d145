"""Starts the fake GPUs in every Python process that has this folder in PYTHONPATH, such as a rank of `jaxmp accept`."""

import importlib
import importlib.util

if importlib.util.find_spec("jax_cuda13_plugin"):
    importlib.import_module("fake_gpus")
