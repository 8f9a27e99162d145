"""The rates of this machine, measured once and kept in the user's cache folder."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.hardware.clock import interleaved
from jaxmp._src.hardware.processor import processor
from jaxmp._src.ops.matmul import matmul
from jaxmp._src.runtime import config, native

_FORMAT = 3
_TYPES = ("float32", "float64", "bfloat16", "float16")
# Rows, columns and k of the product whose rate is taken, and of one whose time is that of launching it.
_LARGE, _SMALL = 1024, 16
_STREAM = 2**28  # bytes that a pass over memory reads, and writes: more than caches hold
_FLOAT8 = "float8_e4m3fn"


def path() -> Path:
    """The file with this machine's rates."""
    return config.cache_folder() / "hardware.json"


def load() -> dict[str, Any] | None:
    """The fields of this machine's `Hardware`; None if it has not been measured, or something was changed since."""
    try:
        record = json.loads(path().read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("key") != _key():
        return None
    fields: dict[str, Any] = record["hardware"]
    return fields


def save(fields: dict[str, Any]) -> None:
    """Keep the fields of a `Hardware` for this machine; a reader sees the old file or the new one, never half."""
    path().parent.mkdir(parents=True, exist_ok=True)
    partial = path().with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": _key(), "hardware": fields}, indent=1) + "\n")
    partial.replace(path())


def measure(on_step: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """The fields of a `Hardware` for the devices of this process, measured in some ten seconds."""
    devices, is_shared = jax.devices(), jax.default_backend() == "cpu"
    rates: dict[str, float] = {}
    xla_rates: dict[str, float] = {}
    with jax.enable_x64(True):
        for dtype in _TYPES:
            rates[dtype], xla_rates[dtype] = _rates(dtype)
            on_step(dtype)
        if is_shared:  # hostmp decodes either
            rates |= dict.fromkeys(("float8", "float4"), _rates(_FLOAT8)[0])
            on_step("float8")
        launch = _launch(devices)
        on_step("launch")
        bandwidth, link = _memory_bandwidth(), _link_bandwidth(devices)
        on_step("memory and links")
    return {
        "name": f"this ({processor().name if is_shared else devices[0].device_kind})",
        "rates": rates,
        "xla_rates": xla_rates,
        "memory_bandwidth": bandwidth,
        "link_bandwidth": link or bandwidth,
        "launch": launch,
        "is_shared": is_shared,
        "source": f"measured on {time.strftime('%Y-%m-%d')} with {len(devices)} devices",
    }


def _key() -> dict[str, Any]:
    """What the rates depend on."""
    return {
        "format": _FORMAT,
        "processor": processor().name,
        "cores": processor().cores,
        "device": jax.devices()[0].device_kind,
        "kernels": native.blas_info() if jax.default_backend() == "cpu" else {},
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


def _rates(dtype: str) -> tuple[float, float]:
    """Operations per second of jaxmp's product and of XLA's on one device, which on a CPU has all cores."""
    a, b = (jax.random.uniform(jax.random.key(i), (_LARGE, _LARGE), jnp.float32).astype(dtype) for i in range(2))
    product: Callable[..., Any] = matmul
    if dtype == _FLOAT8:
        product = functools.partial(matmul, transpose_b=True, preferred_element_type=jnp.bfloat16)
    calls = {
        "jaxmp": functools.partial(jax.jit(product), a, b),
        "xla": functools.partial(jax.jit(jnp.matmul), a, b),
    }
    times = _seconds(calls)
    return 2 * _LARGE**3 / times["jaxmp"], 2 * _LARGE**3 / times["xla"]


def _launch(devices: list[jax.Device]) -> float:
    """Seconds of a call with next to nothing to do, on all devices."""
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Explicit,), devices=devices)
    shape = (_SMALL * len(devices),) * 2
    a, b = (
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec)) for spec in (P("x", None), P(None, "x"))
    )
    call = jax.jit(functools.partial(matmul, out_sharding=NamedSharding(mesh, P(None, "x"))))
    return _seconds({"call": functools.partial(call, a, b)})["call"]


def _memory_bandwidth() -> float:
    """Bytes per second of a pass over memory, read and written together; in place, for new pages take longer."""
    call, x = jax.jit(lambda x: x + 1, donate_argnums=0), jnp.zeros(_STREAM // 4, jnp.float32)

    def again() -> Any:
        nonlocal x
        x = call(x)
        return x

    return 2 * _STREAM / _seconds({"call": again})["call"]


def _link_bandwidth(devices: list[jax.Device]) -> float | None:
    """Bytes per second that devices receive in an all-gather: each, or where they share a processor, all together;
    None of one device."""
    count = len(devices)
    if count == 1:
        return None
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Explicit,), devices=devices)
    nbytes = min(_STREAM // count, 2**25)
    x = jax.device_put(np.zeros(nbytes // 4, np.float32), NamedSharding(mesh, P("x")))
    call = jax.jit(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P(None))))
    seconds = _seconds({"call": functools.partial(call, x)})["call"]
    received = math.floor(nbytes * (count - 1) / count)
    return received * (count if jax.default_backend() == "cpu" else 1) / seconds


def _seconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call: medians, for what is predicted will not run at its fastest either."""
    return interleaved(calls, seconds=0.6, rounds=(5, 31))
