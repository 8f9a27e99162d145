"""A process's rank in its job, and what all processes must know before they begin."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import ipaddress
import os
import re
import resource
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmp._src.jobs.peers import Peers
from jaxmp._src.jobs.watch import DistributedError
from jaxmp._src.platform.jax_internals import jax_distributed
from jaxmp._src.platform.runtime import cuda_libraries, logs, native
from jaxmp._src.platform.runtime.config import config, is_open_mpi_4, launcher


def check_arguments(coordinator_address: object, num_processes: Any, process_id: Any) -> None:
    """Raises ValueError unless all three arguments of `initialize` are None, or the address is "host:port" with a port
    from 1 to 65535 and 0 <= process_id < num_processes. Raises TypeError if a number is no int, or a bool."""
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
    if not 0 < int(coordinator_address.rpartition(":")[2]) < 2**16:
        raise ValueError(
            f"initialize: coordinator_address must have a port from 1 to 65535, got {coordinator_address!r}"
        )
    if num_processes < 1:
        raise ValueError(f"initialize: num_processes must be at least 1, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"initialize: process_id must be from 0 to num_processes - 1 = {num_processes - 1}, got {process_id}"
        )


def detect(local_device_ids: int | Sequence[int] | None, timeout: int) -> jax_distributed.Processes:
    """Returns what the launcher (mpiexec or srun) says about this process, by JAX's own detection (`Processes`). Raises
    RuntimeError without a launcher, if its variables are incomplete, or if mpi4py sees another number of processes than
    mpiexec started; ImportError under mpiexec without mpi4py, except under Open MPI 4."""
    found = launcher()
    if found is None:
        raise RuntimeError(
            "initialize: no launcher has started this process; start it with `mpiexec -n 4 python ...` "
            "(pip install 'jaxmp[mpi]') or srun, or pass coordinator_address, num_processes and process_id"
        )
    name, size = found
    method = {"mpi": "mpi4py", "slurm": "slurm"}[name]
    if name == "mpi":
        try:
            mpi = importlib.import_module("mpi4py.MPI")
        except ImportError as error:
            if not is_open_mpi_4():
                raise ImportError(
                    f"initialize: this process was started by mpiexec, but mpi4py cannot be imported ({error}); "
                    "pip install 'jaxmp[mpi]', or pass coordinator_address, num_processes and process_id"
                ) from error
            method = "ompi"
        else:
            if mpi.COMM_WORLD.Get_size() != size:
                raise RuntimeError(
                    f"initialize: mpiexec started {size} processes but mpi4py sees {mpi.COMM_WORLD.Get_size()}: they "
                    "belong to different MPIs; use the mpiexec that came with mpi4py's MPI"
                )
    try:
        processes = jax_distributed.detect_processes(method, local_device_ids, timeout)
        check_arguments(*processes[:3])
    except (KeyError, ValueError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise RuntimeError(
            f"initialize: the environment variables that {name} sets do not say which process this is ({why}); pass "
            "them all on to it, or pass coordinator_address, num_processes and process_id"
        ) from error
    return processes


@dataclasses.dataclass(frozen=True)
class Membership:
    """A process's knowledge of the others once all of them have met.

    `peers` answers and opens this process's connections. `address_of(process)` is where a process listens. `refusal`
    says why the job cannot run, or ""; `told` is rank 0's message. Both are the same on every process.
    """

    peers: Peers
    address_of: Callable[[int], tuple[str, int]]
    refusal: str
    told: str


# In a message about absent processes: the most that it lists. Seconds for JAX's service to tell all, then to count.
_LISTED, _TOLD, _COUNTED = 20, 1.0, 10.0
_ROLL = b"jaxmp-absent"


def connect(
    timeout: int, host: str, port: int, coordinator: str, nprocesses: int, process: int, **options: Any
) -> None:
    """Connects to JAX's coordination service, which waits for all processes. If some do not come within `timeout`
    seconds, raises the same DistributedError on all that are here, with their ranks."""
    try:
        jax_distributed.initialize_distributed(timeout, coordinator, nprocesses, process, **options)
    except jax.errors.JaxRuntimeError as error:
        report = re.search(r"reached the barrier: (\d+)/.* task names:\n([\d\n]*)", str(error), flags=re.DOTALL)
        if not report:
            raise
        time.sleep(_TOLD)
        here = int(report[1])
        names = (_absent(host, port, process, here, nprocesses) or report[2].split())[:_LISTED]  # the report has two
        more = f" and {nprocesses - here - len(names)} more" * (here + len(names) < nprocesses)
        missing = f"{here} of {nprocesses} processes are here after {timeout} s; missing: {', '.join(names)}{more}"
        raise DistributedError(f"initialize: {missing}") from None


def _absent(host: str, port: int, process: int, nhere: int, nprocesses: int) -> list[str]:
    """Returns the ranks that have not come, as rank 0 hears from the `nhere` processes that have, at the port of JAX's
    service. Returns an empty list if it does not hear from all of them."""
    deadline, here, heard = time.monotonic() + _COUNTED, {0}, list[socket.socket]()
    while process != 0 and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _COUNTED) as rank_0:
            rank_0.sendall(process.to_bytes(4, "big"))
            told = rank_0.makefile("rb").read()
            if told.startswith(_ROLL):  # not from the service
                return told.decode().split()[1:]
        time.sleep(0.1)
    if process != 0:
        return []
    jax_distributed.end_service()
    own = _own_address(host)
    with contextlib.suppress(OSError), socket.create_server((own, port), family=_family(own), backlog=1024) as listener:
        while len(here) < nhere:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            heard.append(listener.accept()[0])
            heard[-1].settimeout(0.5)
            here.add(min(int.from_bytes(heard[-1].recv(4), "big"), nprocesses))
    here.discard(nprocesses)  # strangers
    absent = [str(rank) for rank in range(nprocesses) if rank not in here] if len(here) == nhere else []
    for connection in heard:
        with contextlib.suppress(OSError), connection:
            connection.sendall(b" ".join([_ROLL, *map(str.encode, absent)]))
    return absent


def join_job(host: str, process: int, nprocesses: int, timeout: int, *, reach: float, tells: str = "") -> Membership:
    """Waits until every process of the job is here. Raises JAX's error if a step takes more than `timeout` seconds.

    The job is refused (`Membership.refusal`) if a process has another version of jaxmp, JAX or cuBLASMp than rank 0, or
    another `num_processes`. Also listens for peers, shares memory with the processes of this machine, and sets
    `native.shared_processes`. The data that a process publishes and reads in JAX's store does not grow with the number
    of processes.

    `host`: the coordinator's. `reach`: seconds to ask for the address of a peer. `tells`: rank 0's message to all.
    """
    client, milliseconds = jax_distributed.distributed_client(), timeout * 1000
    key, common = "jaxmp/", (*_versions(), str(nprocesses))
    if process == 0:
        client.key_value_set(f"{key}begin", "\n".join([secrets.token_hex(32), " ".join(common), tells]))
    secret, commons, told = client.blocking_key_value_get(f"{key}begin", milliseconds).split("\n", 2)
    peers = Peers(_own_address(host), process, nprocesses, bytes.fromhex(secret))
    client.key_value_set(f"{key}at/{process}", f"{peers.host} {peers.port}")
    names = ("jaxmp", "jax", "cuBLASMp", "num_processes")
    for name, own, first in zip(names, common, commons.split(" "), strict=True):
        if own != first:
            remedy = "pass the same to" if name == "num_processes" else "install the same on"
            text = f"rank {process} has {name} {own}, rank 0 has {first}; {remedy} every machine"
            client.key_value_set(f"{key}refused/rank", text, allow_overwrite=True)  # one of them is enough
            break
    machine = _share_arena(client, key, process) if nprocesses > 1 else ""
    client.wait_at_barrier(f"{key}all", milliseconds)
    refused = client.key_value_dir_get(f"{key}refused/")
    if nprocesses > 1:
        native.shared_processes = _shared_processes(client, key, machine, process, milliseconds)

    def address_of(peer: int) -> tuple[str, int]:
        found, port = client.blocking_key_value_get(f"{key}at/{peer}", max(1, round(reach * 1000))).split()
        return found, int(port)

    return Membership(peers, address_of, refused[0][1] if refused else "", told)


def _share_arena(client: Any, key: str, process: int) -> str:
    """Publishes this process's shared memory, or why it has none, to the other processes of its machine. Returns the
    machine's name; or "", with nothing published, if shared memory is off or, with a warning, /proc does not tell."""
    if not config().shares_memory:
        return ""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = "-".join(str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "user"))
    except OSError as error:
        logs.logger("distributed").warning(_NOT_SHARED, process, error)
        return ""
    arena = ""
    try:
        arena = str(native.extension().own_arena())
        _check_file_limit()
    except RuntimeError as error:
        client.key_value_set(f"{key}unshared/{machine}/{process}", str(error))
    client.key_value_set(f"{key}memory/{machine}/{process}", f"{container}-{os.getuid()} {arena}")
    return machine


def _check_file_limit() -> None:
    """Raises RuntimeError if a file may not be as large as the machine's memory (`ulimit -f`): a call may need that."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):  # -1: no limit
        raise RuntimeError(f"File too large: this process may write {limit} bytes to a file, see ulimit -f")


def _shared_processes(client: Any, key: str, machine: str, process: int, milliseconds: int) -> frozenset[int]:
    """Returns the processes of this machine, container and user, which share memory, once each has opened all arenas.
    This process is one of them. Returns an empty set if any process of the machine failed to share or open memory, or
    if `machine` (from `_share_arena`) is "". Waits for all processes of the job in each case; JAX raises an error after
    `milliseconds`. The machine's first process logs a warning if some do not share."""
    published: dict[int, list[str]] = {}
    if machine:
        found = client.key_value_dir_get(f"{key}memory/{machine}/")
        published = {int(name.rpartition("/")[2]): text.split(" ", 1) for name, text in found}
    shared = {i: arena for i, (container, arena) in published.items() if container == published[process][0]}
    try:
        for i, arena in shared.items():
            if arena:
                native.extension().share_arena(i, arena)
    except RuntimeError as error:
        client.key_value_set(f"{key}unshared/{machine}/{process}", str(error))
    client.wait_at_barrier(f"{key}shared", milliseconds)
    refused = client.key_value_dir_get(f"{key}unshared/{machine}/") if machine else []
    why = {int(name.rpartition("/")[2]): text for name, text in refused}
    elsewhere = dict.fromkeys(published.keys() - shared.keys(), "it runs in another container, or as another user")
    if len(published) > 1 and process == min(published) and (why or elsewhere):
        rank = min(why or elsewhere)
        logs.logger("distributed").warning(_NOT_SHARED, rank, (why or elsewhere)[rank])
    return frozenset() if why else frozenset(shared)


_NOT_SHARED = "rank %d shares no memory with the others of its machine, so that calls use the slower sockets (%s)"


def neighbours(process: int, nprocesses: int) -> list[int]:
    """Returns the processes 1, 2, 4, ... ranks further on, around the end to rank 0. This process stays connected to
    them from the start, so that its end is noticed and passed on without a common call. They are always few."""
    return [(process + 2**i) % nprocesses for i in range((nprocesses - 1).bit_length())]


def bind_address(host: str, port: int) -> str | None:
    """Returns where rank 0's coordination service listens: "address:port", at which others reach `host`.

    Returns None, JAX's default of all addresses, if `host` is another name than localhost, but means a loopback address
    here. Raises RuntimeError if the address cannot be used, because JAX's service would crash, and ValueError if
    the name is unknown.
    """
    own = route_to(host)
    try:
        socket.create_server((own, port), family=_family(own)).close()
    except OSError as error:
        raise RuntimeError(
            f"initialize: rank 0 cannot listen at {host}:{port} ({os.strerror(error.errno or 0)}); "
            "pass the address of its machine and a free port"
        ) from error
    if _is_loopback(own) and not _is_loopback(host):
        return None
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


# Reserved for documentation (RFC 5737), so the route to it is the route to any other network.
_ELSEWHERE = "192.0.2.1"


def _own_address(host: str) -> str:
    """Returns this machine's address for the other processes: its address on the route to the coordinator `host`.

    If `host` is another name than localhost, but means a loopback address here (127.0.1.1 on the coordinator's
    machine), returns the address on the route to other networks, if there is one.
    """
    own = route_to(host)
    if _is_loopback(own) and not _is_loopback(host):
        with contextlib.suppress(RuntimeError):  # no other network
            return route_to(_ELSEWHERE)
    return own


def route_to(host: str) -> str:
    """Returns this machine's address on the route to `host`, without sending anything.

    Raises ValueError if the name is unknown, and RuntimeError if no network leads there.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise ValueError(
            f"initialize: coordinator_address names the host {host!r}, which this machine does not know ({error})"
        ) from error
    why = ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket: sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:  # IPv6 is off, perhaps
            why = why or os.strerror(error.errno or 0)
    interface = "its loopback interface, lo" if _is_loopback(host) else "its network"
    raise RuntimeError(f"initialize: this machine has no route to {host} ({why}); bring up {interface}")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_loopback(host: str) -> bool:
    """True if `host` is a loopback address or "localhost"; False for all other names, without resolving them."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _versions() -> tuple[str, ...]:
    return importlib.metadata.version("jaxmp"), importlib.metadata.version("jax"), cuda_libraries.installed()
