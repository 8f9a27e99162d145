"""Who a process is in its job, and its connections to the other processes."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import secrets
import socket

from jaxmp import _compat, _cuda
from jaxmp._config import launcher


def check_arguments(coordinator_address, num_processes, process_id) -> None:
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < 3:
        raise ValueError(
            f"initialize: got {', '.join(set(given) - set(missing))} without {', '.join(missing)}; "
            "pass all three, or none under a launcher"
        )
    if missing:
        return
    for name in ("num_processes", "process_id"):
        if not isinstance(given[name], int) or isinstance(given[name], bool):
            raise TypeError(f"initialize: {name} must be an int, got {given[name]!r}")
    if not isinstance(coordinator_address, str) or not re.fullmatch(r".+:\d+", coordinator_address):
        raise ValueError(f"initialize: coordinator_address must be 'host:port', got {coordinator_address!r}")
    if num_processes < 1:
        raise ValueError(f"initialize: num_processes must be at least 1, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"initialize: process_id must be from 0 to num_processes - 1 = {num_processes - 1}, got {process_id}"
        )


def detect(local_device_ids, timeout: int):
    """What the launcher says, through JAX's own detection."""
    found = launcher()
    if found is None:
        raise RuntimeError(
            "initialize: no launcher has started this process; start it with `mpiexec -n 4 python ...` "
            "(pip install 'jaxmp[mpi]') or srun, or pass coordinator_address, num_processes and process_id"
        )
    name, size = found
    if name == "mpi":
        try:
            mpi = importlib.import_module("mpi4py.MPI")
        except ImportError as error:
            raise ImportError(
                f"initialize: this process was started by mpiexec, but mpi4py cannot be imported ({error}); "
                "pip install 'jaxmp[mpi]', or pass coordinator_address, num_processes and process_id"
            ) from error
        if mpi.COMM_WORLD.Get_size() != size:
            raise RuntimeError(
                f"initialize: mpiexec started {size} processes but mpi4py sees {mpi.COMM_WORLD.Get_size()}: they "
                "belong to different MPIs; use the mpiexec that came with mpi4py's MPI"
            )
    return _compat.detect_processes({"mpi": "mpi4py", "slurm": "slurm"}[name], local_device_ids, timeout)


def connect(host: str, process: int, nprocesses: int, generation: int, timeout: int):
    """(a connected socket per process, None for this one; the versions by process)."""
    own = _own_address(host)
    listener = socket.create_server(
        (own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET, backlog=nprocesses
    )
    listener.settimeout(timeout)
    token = secrets.token_hex(16)
    client = _compat.distributed_client()
    key = f"jaxmp/{generation}/"
    client.key_value_set(f"{key}{process}", " ".join((own, str(listener.getsockname()[1]), token, *_versions())))
    entries = [client.blocking_key_value_get(f"{key}{i}", timeout * 1000).split() for i in range(nprocesses)]
    sockets: list[socket.socket | None] = [None] * nprocesses
    for other in range(process):
        address, port, their_token = entries[other][:3]
        connected = socket.create_connection((address, int(port)), timeout=timeout)
        connected.sendall(f"{their_token} {process:8d}".encode())
        sockets[other] = connected
    while any(sockets[other] is None for other in range(process + 1, nprocesses)):
        accepted, _ = listener.accept()
        accepted.settimeout(timeout)
        greeting = accepted.recv(len(token) + 9, socket.MSG_WAITALL).decode(errors="replace").split()
        if len(greeting) == 2 and secrets.compare_digest(greeting[0], token) and greeting[1].isdecimal():
            sockets[int(greeting[1])] = accepted
        else:  # a stranger
            accepted.close()
    listener.close()
    for connected in filter(None, sockets):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets, [entry[3:] for entry in entries]


def _own_address(host: str) -> str:
    """The address of this machine from which the coordinator's is reached."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: sends nothing
        return probe.getsockname()[0]


def _versions() -> tuple[str, ...]:
    return importlib.metadata.version("jaxmp"), importlib.metadata.version("jax"), _cuda.installed()
