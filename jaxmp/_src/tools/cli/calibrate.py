"""The rates of this machine, measured for `jaxmp info --calibrate`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.platform.hardware.clock import interleaved
from jaxmp._src.platform.hardware.processor import processor

_TYPES = ("float32", "float64", "bfloat16", "float16")
# Rows, columns and k of a product that measures the rate, and of one that measures the time of a launch.
_LARGE, _SMALL = 1024, 16
_STREAM = 2**28  # bytes that a pass over memory reads, and writes: more than caches hold
_SENT = 2**22  # bytes that each process of a job sends to each other one at a time
_FLOAT8 = "float8_e4m3fn"


def measure() -> dict[str, Any]:
    """Measures this process's devices in some ten seconds, and returns the fields of a `Hardware` as a dict. All
    processes of a job call this, which adds the fields of `_network`. "link_bandwidth" of one device is memory's."""
    devices, is_shared = jax.local_devices(), jax.default_backend() == "cpu"
    with jax.enable_x64(True):
        both = {dtype: _rates(dtype) for dtype in _TYPES}
        rates, xla_rates = ({dtype: pair[i] for dtype, pair in both.items()} for i in (0, 1))
        if is_shared:  # hostmp decodes either
            rates |= dict.fromkeys(("float8", "float4"), _rates(_FLOAT8)[0])
        mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Explicit,), devices=devices)
        launch = _launch(mesh)
        bandwidth, zeros = _memory_bandwidth(), jax.jit(functools.partial(jnp.zeros, _STREAM // 4, jnp.float32))
        link = _link_bandwidth(mesh) if len(devices) > 1 else bandwidth
    network = _network() if jax.process_count() > 1 else {}
    return {
        "name": f"this ({processor().name if is_shared else devices[0].device_kind})",
        "rates": rates,
        "xla_rates": xla_rates,
        "memory_bandwidth": bandwidth,
        "new_memory_bandwidth": _STREAM / _seconds(zeros)[0],
        "link_bandwidth": link,
        "launch": launch,
        "is_shared": is_shared,
        **network,
        "source": f"measured on {time.strftime('%Y-%m-%d')} with {len(devices)} devices",
    }


def _rates(dtype: str) -> tuple[float, float]:
    """Returns operations per second of jaxmp's product and of XLA's on one device, which on a CPU has all cores."""
    a, b = (jax.random.uniform(jax.random.key(i), (_LARGE, _LARGE), jnp.float32).astype(dtype) for i in range(2))
    product: Callable[..., Any] = matmul
    if dtype == _FLOAT8:
        product = functools.partial(matmul, transpose_b=True, preferred_element_type=jnp.bfloat16)
    ours, xla = _seconds(*(functools.partial(jax.jit(each), a, b) for each in (product, jnp.matmul)))
    return 2 * _LARGE**3 / ours, 2 * _LARGE**3 / xla


def _launch(mesh: jax.sharding.Mesh) -> float:
    """Returns the seconds of a call with next to nothing to do, on all devices."""
    ones = np.ones((_SMALL * mesh.size,) * 2, np.float32)
    a, b = (jax.device_put(ones, NamedSharding(mesh, spec)) for spec in (P("x", None), P(None, "x")))
    call = jax.jit(functools.partial(matmul, out_sharding=NamedSharding(mesh, P(None, "x"))))
    return _seconds(functools.partial(call, a, b))[0]


def _memory_bandwidth() -> float:
    """Returns bytes per second, read and written together, of a pass over memory in place: new pages take longer."""
    call, x = jax.jit(lambda x: x + 1, donate_argnums=0), jnp.zeros(_STREAM // 4, jnp.float32)

    def again() -> Any:
        nonlocal x
        x = call(x)
        return x

    return 2 * _STREAM / _seconds(again)[0]


def _link_bandwidth(mesh: jax.sharding.Mesh) -> float:
    """Returns bytes per second that a device receives in XLA's all-gather; on CPUs, what all devices together
    receive."""
    nbytes = min(_STREAM // mesh.size, 2**25)
    x = jax.device_put(np.zeros(nbytes // 4, np.float32), NamedSharding(mesh, P("x")))
    call = jax.jit(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P(None))))
    received = nbytes * (mesh.size - 1) // mesh.size
    return received * (mesh.size if jax.default_backend() == "cpu" else 1) / _seconds(functools.partial(call, x))[0]


def _network() -> dict[str, Any]:
    """Returns `Hardware` fields of a job's network: devices per process, bytes per second that a process receives in
    XLA's all-gather, the part of the processor that the all-gather takes, and seconds of an all-gather of next to
    nothing. Needs two or more processes, which all call this."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Explicit,))

    def gather(x: jax.Array) -> jax.Array:
        gathered: jax.Array = lax.all_gather(x, "x", tiled=True)
        return gathered[: x.size]

    def seconds(nbytes: int, times: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Returns seconds of one all-gather. `nbytes`: of the gathered array; `times`: how often a call gathers."""
        x = jax.jit(functools.partial(jnp.zeros, nbytes // 4), out_shardings=NamedSharding(mesh, P("x")))()
        local = functools.partial(lax.fori_loop, 0, times, lambda _, x: gather(x))
        call = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
        return _seconds_of_job(functools.partial(call, x), clock) / times

    latency, received = seconds(4 * mesh.size, 64), _SENT * (jax.process_count() - 1)
    large = seconds(_SENT * jax.process_count(), 1)
    return {
        "node": jax.local_device_count(),
        "network_bandwidth": received / max(large - latency, 1e-9),
        "network_latency": latency,
        "network_load": seconds(_SENT * jax.process_count(), 1, time.process_time) / processor().cores / large,
    }


def time_of_small_call() -> float:
    """Returns the median seconds of a small product that all devices of a job sum. All processes call this."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Explicit,))
    call = jax.jit(lambda a, b: matmul(a, b, out_sharding=P()))
    shapes = {P(None, "x"): (8, mesh.size), P("x", None): (mesh.size, 8)}
    of = [
        jax.jit(functools.partial(jnp.ones, x), out_shardings=NamedSharding(mesh, spec))() for spec, x in shapes.items()
    ]
    return _seconds_of_job(functools.partial(call, *of))


def _seconds_of_job(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the median seconds of a call that all processes make, each of them equally often."""
    return interleaved({"": call}, rounds=(9, 9), clock=clock, turn=0)[""]


def _seconds(*calls: Callable[[], Any]) -> list[float]:
    """Returns the median seconds of each call, because predicted work will not run at its fastest either."""
    return list(interleaved({str(i): call for i, call in enumerate(calls)}, seconds=0.6, rounds=(5, 31)).values())
