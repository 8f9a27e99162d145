"""Stores the rates of this machine, measured by `jaxmp info --calibrate`, in the user's cache folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import jax

from jaxmp._src.platform.hardware.processor import processor
from jaxmp._src.platform.runtime import config, native

_FORMAT = 4


def path() -> Path:
    return config.cache_folder() / "hardware.json"


def load() -> dict[str, Any] | None:
    """Returns the measured fields of this machine's `Hardware`; None if there is no readable file, or if the machine
    has changed since (`_key`). Starts JAX's backend if there is a file."""
    try:
        record = json.loads(path().read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("key") != _key():
        return None
    fields: dict[str, Any] = record["hardware"]
    return fields


def for_job() -> str:
    """Returns the fields of this machine's `Hardware` as JSON to share in a new job; "" if its network was not measured
    on this processor in this format. Does not start JAX's backend."""
    try:
        record = json.loads(path().read_text())
        key, fields = record["key"], record["hardware"]
        is_own = (key["format"], key["processor"]) == (_FORMAT, processor().name)
        return json.dumps(fields) if is_own and "network_bandwidth" in fields else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def save(fields: dict[str, Any]) -> None:
    """Stores the fields of a `Hardware` for this machine. The file is replaced as a whole, so a reader sees no part."""
    path().parent.mkdir(parents=True, exist_ok=True)
    partial = path().with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": _key(), "hardware": fields}, indent=1) + "\n")
    partial.replace(path())


def _key() -> dict[str, Any]:
    """Returns the facts on which the rates depend: processor, devices, kernels, jaxlib. Starts JAX's backend."""
    return {
        "format": _FORMAT,
        "processor": processor().name,
        "cores": processor().cores,
        "device": jax.devices()[0].device_kind,
        "kernels": native.blas_info() if jax.default_backend() == "cpu" else {},
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
