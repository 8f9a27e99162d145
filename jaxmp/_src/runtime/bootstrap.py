"""Who a process is in its job, and its connections to the other processes."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import re
import secrets
import socket
from collections.abc import Callable

from jaxmp._src.runtime import cuda_libraries, jax_compat
from jaxmp._src.runtime.config import launcher
from jaxmp._src.runtime.peers import Peers


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
    return jax_compat.detect_processes({"mpi": "mpi4py", "slurm": "slurm"}[name], local_device_ids, timeout)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What the processes know of each other once all of them have met.

    `peers` answers and opens their connections, `address_of(process)` is where it listens, and `refusal` says why the
    job cannot run, the same on every process, or "".
    """

    peers: Peers
    address_of: Callable[[int], tuple[str, int]]
    refusal: str


def meet(host: str, process: int, nprocesses: int, generation: int, timeout: int, reach: float) -> Meeting:
    """Wait until every process of the job is here, for `timeout` seconds; `reach`: seconds in which a peer is reached.

    What a process publishes and reads in JAX's store does not grow with the number of processes.
    """
    client, milliseconds = jax_compat.distributed_client(), timeout * 1000
    key = f"jaxmp/{generation}/"
    if process == 0:
        client.key_value_set(f"{key}secret", secrets.token_hex(32))
        client.key_value_set(f"{key}versions", " ".join(_versions()))
    secret = bytes.fromhex(client.blocking_key_value_get(f"{key}secret", milliseconds))
    versions = client.blocking_key_value_get(f"{key}versions", milliseconds).split(" ")
    peers = Peers(_own_address(host), process, nprocesses, secret, reach)
    client.key_value_set(f"{key}at/{process}", f"{peers.host} {peers.port}")
    for name, own, first in zip(("jaxmp", "jax", "cuBLASMp"), _versions(), versions, strict=True):
        if own != first:
            text = f"rank {process} has {name} {own}, rank 0 has {first}; install the same on every machine"
            client.key_value_set(f"{key}refused/{process}", text)
            break
    client.wait_at_barrier(f"{key}all", milliseconds)
    refused = client.key_value_dir_get(f"{key}refused/")

    def address_of(peer: int) -> tuple[str, int]:
        found, port = client.blocking_key_value_get(f"{key}at/{peer}", max(1, round(reach * 1000))).split()
        return found, int(port)

    return Meeting(peers, address_of, min(refused)[1] if refused else "")


def neighbours(process: int, nprocesses: int) -> list[int]:
    """The processes with which this one stays connected from the start, so that an end is noticed, and passed on, also
    where no call joins the two: those 1, 2, 4, ... places further on. There are few of them in the largest job."""
    distances = itertools.takewhile(lambda distance: distance < nprocesses, (2**i for i in itertools.count()))
    return [(process + distance) % nprocesses for distance in distances]


def bind_address(host: str, port: str) -> str:
    """Where rank 0's coordination service listens: at the one address at which it is reached. JAX's default is all."""
    own = _own_address(host)
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _own_address(host: str) -> str:
    """The address of this machine from which the coordinator's is reached."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: sends nothing
        return probe.getsockname()[0]


def _versions() -> tuple[str, ...]:
    return importlib.metadata.version("jaxmp"), importlib.metadata.version("jax"), cuda_libraries.installed()
