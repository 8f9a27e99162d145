"""This process's connections to the other processes of its job: opened when first needed, each end proved to the other.

Each process listens at one address, its own on the route to the coordinator. Rank 0 makes a secret, and JAX's
coordination service hands it out. The process that connects and the process that listens prove to each other that they
have it, by HMAC-SHA256 (RFC 2104) over random numbers of both; the secret itself never travels here:

    who connects                                    who listens
    HELLO: magic, from, to, number 1       ->
                                           <-       number 2, HMAC("listens", HELLO, number 2)
    HMAC("connects", HELLO, number 2)      ->

A connection that does not get that far within a few seconds is a stranger's: it is closed and counted. Two processes
may connect to each other at the same time. Then the lower rank decides: it ends each handshake with one byte, 1 for the
connection that both keep and 0 for any other. The higher rank sends the byte back. Both wait for the other's byte
however long it takes, because a peer takes the end of a connection that it keeps for the end of this process.
docs/faults.md: what processes see; SECURITY.md: what this protects.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable

logger = logging.getLogger("jaxmp.distributed")

_HELLO = struct.Struct(">8sII32s")
_MAGIC = b"jaxmp 3\n"
_NUMBER = 32
_HMAC = hashlib.sha256().digest_size
# Seconds that a handshake may take; a peer needs milliseconds.
_HANDSHAKE = 5.0
# Handshakes under way at once; one more ends the oldest. A peer that loses its handshake connects again.
_MOST_HANDSHAKES = 64
_RETRY = 0.1


def _begin(name: str, work: Callable[[], object]) -> None:
    """Runs `work` on a new thread, or on this one if none starts: CPython 3.12 starts none at the end of a process."""
    try:
        threading.Thread(target=work, name=f"jaxmp-{name}", daemon=True).start()
    except RuntimeError:
        work()


class Peers:
    """The listener of one process, and the sockets that have proved to belong to a peer.

    Args:
      address: the address at which this machine listens and peers reach it.
      process, nprocesses: the rank of this process, and the number of processes.
      secret: the job's secret, the same in all processes.
    """

    def __init__(self, address: str, process: int, nprocesses: int, secret: bytes) -> None:
        """Listens at `address`, on a free port, from now on; `start` answers."""
        self.process, self.nprocesses, self._secret = process, nprocesses, secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.host, self.port = address, self._listener.getsockname()[1]
        self.strangers = 0
        self._changed = threading.Condition()
        self._connected: set[int] = set()
        self._lost: dict[int, str] = {}
        self._handshakes: collections.OrderedDict[socket.socket, None] = collections.OrderedDict()
        self._is_open = True

    def start(
        self,
        wanted: Callable[[], Collection[int]],
        address_of: Callable[[int], tuple[str, int]],
        connect: Callable[[int, int], object],
        lose: Callable[[int, str], object],
    ) -> None:
        """Starts a thread that answers peers, and one that connects to the peers that `wanted()` returns. `wanted()`
        blocks until there are some; the second thread ends once it returns none. `address_of(process)` returns the
        (host, port) where the process listens. `connect(process, descriptor)` takes over each socket, also if the peer
        connected first. `lose(process, why)` is called if nothing listens at its address."""
        self._address_of, self._connect, self._lose = address_of, connect, lose
        for name, work in (("accept", self._accept), ("want", lambda: self._want(wanted))):
            threading.Thread(target=work, name=f"jaxmp-{name}", daemon=True).start()

    def wait_for(self, processes: Iterable[int], timeout: float) -> str:
        """Waits at most `timeout` seconds until all of these except this process are connected, or one is given up.
        Returns "", or what is wrong with one."""
        missing: list[int] = []

        def is_settled() -> bool:
            missing[:] = [i for i in processes if i not in self._connected and i != self.process]
            return not missing or any(i in self._lost for i in missing)

        with self._changed:
            self._changed.wait_for(is_settled, timeout)
            lost = [f"rank {i} {self._lost[i]}" for i in missing if i in self._lost]
        if lost:
            return lost[0]
        return f"rank {missing[0]} does not answer" if missing else ""

    def close(self) -> None:
        """Stops listening, and ends accepted connections that have not proved themselves; all others stay open."""
        with self._changed:
            self._is_open = False
            pending = list(self._handshakes)
        # Wakes the thread in accept, which close alone does not do.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in pending:
            _shut(connection)

    def forget(self) -> None:
        """In a forked child, closes its copies of the sockets; the parent's stay open."""
        self._is_open = False
        for connection in (self._listener, *self._handshakes):
            connection.close()

    # Who listens ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accepts connections until `close`, and answers each on a thread of its own. Ends the oldest handshake if
        there are more than `_MOST_HANDSHAKES`."""
        while self._is_open:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors
                time.sleep(_RETRY)
                continue
            with self._changed:
                self._handshakes[connection] = None
                oldest = next(iter(self._handshakes)) if len(self._handshakes) > _MOST_HANDSHAKES else None
            if oldest is not None:
                _shut(oldest)
            _begin("answer", functools.partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> None:
        """Proves both ends of an accepted connection and settles it. Closes and counts it if a proof fails. If the peer
        breaks off after the proofs, connects to the peer instead, to learn whether it has ended."""
        deadline = time.monotonic() + _HANDSHAKE
        try:
            hello = _receive(connection, _HELLO.size, deadline)
            magic, peer, me, _ = _HELLO.unpack(hello)
            if magic != _MAGIC or me != self.process or peer == me or peer >= self.nprocesses:
                raise ConnectionError("no greeting of this job")
            number = secrets.token_bytes(_NUMBER)
            _send(connection, number + self._proof(b"listens", hello, number), deadline)
            proof = _receive(connection, _HMAC, deadline)
            if not hmac.compare_digest(proof, self._proof(b"connects", hello, number)):
                raise ConnectionError("a wrong proof")
            with self._changed:
                self._handshakes.pop(connection, None)
        except OSError as error:
            self._forget_stranger(connection, error)
            connection.close()
            return
        if not self._settle(peer, connection):
            self._reach(peer)  # it may have ended

    def _forget_stranger(self, connection: socket.socket, error: OSError) -> None:
        """Counts a failed handshake, unless `close` ended it. Warns of the 1st, 10th, 100th, ... one. Leaves
        `connection` open, but removes it from the handshakes under way."""
        with self._changed:
            self._handshakes.pop(connection, None)
            if not self._is_open:
                return
            self.strangers += 1
            count = self.strangers
        if count == 10 ** (len(str(count)) - 1):  # 1, 10, 100, ...
            logger.warning(
                "rank %d: %d connection%s to %s:%d did not prove to be of this job and %s closed (the last one: %s)",
                *(self.process, count, "" if count == 1 else "s", self.host, self.port),
                *("was" if count == 1 else "were", error),
            )

    # Who connects --------------------------------------------------------------------------------------------------

    def _want(self, wanted: Callable[[], Collection[int]]) -> None:
        while processes := wanted():
            for peer in processes:
                _begin(f"reach-{peer}", functools.partial(self._reach, peer))

    def _reach(self, peer: int) -> None:
        """Tries to connect to `peer` again and again, until it is connected by either end, or `close` is called. Gives
        the peer up if nothing listens at its address."""
        address = None
        while self._is_open and peer not in self._connected:
            try:
                address = address or self._address_of(peer)
                connection = socket.create_connection(address, timeout=_HANDSHAKE)
            except ConnectionRefusedError:
                host, port = address or ("?", 0)
                self._give_up(peer, f"has ended: nothing listens at {host}:{port} any more")
                return
            except Exception as error:  # the errors of JAX's store have no common type
                logger.debug("rank %d: rank %d is not reached: %s", self.process, peer, error)
                time.sleep(_RETRY)
                continue
            if self._greet(peer, connection):
                return
            time.sleep(_RETRY)

    def _greet(self, peer: int, connection: socket.socket) -> bool:
        """Proves both ends of a connection that this process has opened, and settles it. Returns True if that
        succeeded, also if the connection was closed as the second one; else closes it."""
        deadline = time.monotonic() + _HANDSHAKE
        hello = _HELLO.pack(_MAGIC, self.process, peer, secrets.token_bytes(_NUMBER))
        try:
            _send(connection, hello, deadline)
            reply = _receive(connection, _NUMBER + _HMAC, deadline)
            number, proof = reply[:_NUMBER], reply[_NUMBER:]
            if not hmac.compare_digest(proof, self._proof(b"listens", hello, number)):
                raise ConnectionError("the listener does not belong to this job")
            _send(connection, self._proof(b"connects", hello, number), deadline)
        except OSError as error:
            logger.debug("rank %d: rank %d is not reached: %s", self.process, peer, error)
            connection.close()
            return False
        return self._settle(peer, connection)

    def _give_up(self, peer: int, why: str) -> None:
        """Records that `peer` has ended, for `wait_for`, and calls `lose`; does nothing if it is connected, or after
        `close`."""
        with self._changed:
            if not self._is_open or peer in self._connected:
                return
            self._lost[peer] = why
            self._changed.notify_all()
        self._lose(peer, why)

    # Both ----------------------------------------------------------------------------------------------------------

    def _settle(self, peer: int, connection: socket.socket) -> bool:
        """Keeps this proven connection to `peer` and hands the socket to `connect`; or closes it, if it is not the
        first one that the lower rank has. Returns True in both cases. If the peer breaks off, closes it and returns
        False."""
        is_lower, is_kept = self.process < peer, False
        connection.settimeout(None)
        try:
            if is_lower:
                with self._changed:
                    is_kept = self._is_open and peer not in self._connected
                    if is_kept:
                        self._connected.add(peer)
                connection.sendall(bytes([is_kept]))
            answer = connection.recv(1)
            if not answer:
                raise ConnectionError("it closed the connection")
            if not is_lower:
                connection.sendall(answer)
                is_kept = answer == b"\1"
        except OSError as error:
            logger.debug("rank %d: the handshake with rank %d broke off: %s", self.process, peer, error)
            if is_kept:
                with self._changed:
                    self._connected.discard(peer)
            connection.close()
            return False
        if not is_kept:
            connection.close()
            return True
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connect(peer, connection.detach())
        with self._changed:
            self._connected.add(peer)
            self._changed.notify_all()
        return True

    def _proof(self, side: bytes, hello: bytes, number: bytes) -> bytes:
        return hmac.digest(self._secret, side + hello + number, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Returns exactly `size` bytes. Raises OSError after `deadline` (monotonic time), or if the peer closes before."""
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(received)} of {size} bytes came in time")
    return received


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(data)


def _shut(connection: socket.socket) -> None:
    """Ends another thread's wait on this socket; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
