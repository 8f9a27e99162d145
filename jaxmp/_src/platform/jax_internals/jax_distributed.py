"""JAX's part in a job of processes: its coordination service, and gloo, XLA's transport between CPUs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pathlib
import re
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import api as _api
from jax._src import clusters as _clusters
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jaxlib import _jax

# Coordinator address, number of processes, process id, local device ids.
Processes = tuple[str | None, int | None, int | None, Sequence[int] | None]


def distributed_client() -> Any:
    """Returns the client of JAX's coordination service, or None."""
    return _distributed.global_state.client


def initialize_distributed(timeout: int, *where: Any, **options: Any) -> None:
    """Calls `jax.distributed.initialize`. If processes do not come within `timeout` seconds, raises JAX's report on all
    others at once. JAX itself aborts, after an hour."""
    start, connect = _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client
    known = vars(_jax) | {
        "get_distributed_runtime_service": functools.partial(start, cluster_register_timeout=timeout),
        # JAX cannot call it, as its argument has no type in Python, and raises RuntimeError("std::bad_cast") instead.
        "get_distributed_runtime_client": functools.partial(connect, missed_heartbeat_callback=lambda status: None),
    }
    vars(_distributed)["_jax"] = types.SimpleNamespace(**known)
    try:
        jax.distributed.initialize(*where, **options)
    except RuntimeError as error:
        if "bad_cast" in str(error):
            distributed_client().shutdown()  # raises the report
        raise
    finally:
        vars(_distributed)["_jax"] = _jax


def end_service() -> None:
    """Ends JAX's coordination service in rank 0, so that its port is free."""
    _distributed.global_state.service = None


def let_gloo_listen_at(host: str) -> None:
    """Makes gloo, XLA's transport between CPUs, listen at the address `host` of this machine when the backend starts.
    By default it listens at the address of the machine's name, which may be a loopback address, or unknown. Replaces
    JAX's factory of CPU clients, and then notes gloo's descriptors for `close_gloo`."""

    def make_client() -> Any:
        client, transport = distributed_client(), _config.cpu_collectives_implementation.value
        collectives = None
        if client is not None and transport == "gloo":
            before = _epolls()
            collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
            _of_gloo.update(_epolls() - before)
        return _xla_bridge.make_cpu_client(collectives)

    _xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


_of_gloo: set[str] = set()  # the descriptor with which gloo polls all its sockets, until the process ends


def _epolls() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # for the descriptor of the listing
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                found.add(descriptor)
    return found


def close_gloo() -> None:
    """Ends gloo's connections, as if this process had ended, so that processes that wait for it get an error."""
    for descriptor in _of_gloo:
        with contextlib.suppress(OSError):
            polled = re.findall(r"^tfd: *(\d+)", pathlib.Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.M)
            for connection in map(int, polled):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as end:
                    end.getpeername()  # raises for listening sockets and pipes
                    end.shutdown(socket.SHUT_RDWR)


def detect_processes(method: str, local_device_ids: int | Sequence[int] | None, timeout: int) -> Processes:
    """Returns (coordinator address, number of processes, process id, local device ids) by JAX's detection `method`."""
    detect = _clusters.ClusterEnv.auto_detect_unset_distributed_params
    local_device_ids = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    return detect(None, None, None, local_device_ids, method, timeout)


def uses_mutual_tls() -> bool:
    """True if JAX checks the name of the host at the other end of the connection."""
    return bool(getattr(jax.config, "jax_mtls_ca_file", None))


def forget_distributed() -> None:
    """Lets a forked child end without JAX's part of the job, because JAX's threads are in the parent. Drops JAX's exit
    handler, client and service without destroying them, and keeps the objects of all modules alive."""
    atexit.unregister(_api.clean_up)
    state = _distributed.global_state
    kept: list[Any] = [state.preemption_sync_manager, state.client, state.service]
    # Also keep the thread pools of backends and of MLIR, which would join threads that are in the parent.
    kept += [dict(vars(module)) for module in sys.modules.values()]
    state.preemption_sync_manager = state.client = state.service = None
    kept.append(kept)  # destroying them would wait for the other processes, so a cycle keeps them
    gc.freeze()
