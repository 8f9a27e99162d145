"""Connections between processes: peers find each other, and strangers cannot join, delay or exhaust a job. Whoever is
taken for a peer can end a job with one message; so a stranger must not become one."""

import contextlib
import hmac
import logging
import os
import queue
import socket
import struct
import threading
import time

import pytest

from jaxmp._src.jobs import bootstrap
from jaxmp._src.jobs import peers as peers_lib
from jaxmp._src.jobs.peers import Peers

SECRET = b"s" * 32
STRANGERS = int(os.environ.get("JAXMP_FUZZ", "0")) or 300


class Process:
    """One process's connections, without the rest of it: what it wants, has been given and has lost."""

    def __init__(self, job, process, nprocesses, secret=SECRET):
        self.peers = Peers("127.0.0.1", process, nprocesses, secret)
        self.wanted, self.sockets, self.lost, self.is_closed = queue.SimpleQueue(), {}, {}, False
        job[process] = self.peers.port

        def address_of(peer):
            return "127.0.0.1", job[peer]

        def connect(peer, fd):
            assert peer not in self.sockets
            self.sockets[peer] = socket.socket(fileno=fd)
            if self.is_closed:
                self.sockets[peer].close()

        self.peers.start(self.wanted.get, address_of, connect, self.lost.__setitem__)

    def close(self):
        self.is_closed = True
        self.peers.close()
        self.wanted.put([])
        for connection in self.sockets.values():
            connection.close()


@contextlib.contextmanager
def job(nprocesses, **options):
    ports = {}
    processes = [Process(ports, i, nprocesses, **options) for i in range(nprocesses)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def is_joined(one, other):
    """Whether what `one` writes to `other` arrives there: both keep the same connection."""
    one.sockets[other.peers.process].sendall(b"x")
    other.sockets[one.peers.process].settimeout(5)
    return other.sockets[one.peers.process].recv(1) == b"x"


def test_peers_meet_where_no_thread_starts_any_more(monkeypatch):
    """CPython 3.12 starts none at the end. A late wait gets an answer, and does not wait for peers itself."""

    def refuse(thread):
        raise RuntimeError("no thread")

    with job(3) as processes:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for process in processes:
            process.wanted.put([i for i in range(3) if i != process.peers.process])
        for process in processes:
            assert process.peers.wait_for(range(3), 10) == ""
    late = Peers("127.0.0.1", 0, 1, SECRET)
    with contextlib.closing(late), pytest.raises(RuntimeError, match="no thread"):
        late.start(list, None, None, None)


def test_simultaneous_connections_of_peers_become_one():
    for _ in range(20):
        with job(3) as processes:
            for process in processes:
                process.wanted.put([i for i in range(3) if i != process.peers.process])
            for process in processes:
                assert process.peers.wait_for(range(3), 10) == ""
            wait_until(lambda processes=processes: all(len(process.sockets) == 2 for process in processes))
            for one in processes:
                for other in processes:
                    assert one is other or is_joined(one, other)
            assert [process.peers.strangers for process in processes] == [0, 0, 0]


def test_a_process_is_connected_only_when_it_is_wanted():
    with job(4) as processes:
        processes[3].wanted.put([0])
        assert processes[3].peers.wait_for([0], 10) == ""
        wait_until(lambda: processes[0].sockets)
        assert [sorted(process.sockets) for process in processes] == [[3], [], [], [0]]


def test_a_job_of_10000_processes_opens_few_connections():
    """Each connects to its neighbours, and these reach every process, so an end is passed on to all."""
    assert [bootstrap.neighbours(i, 4) for i in range(4)] == [[1, 2], [2, 3], [3, 0], [0, 1]]
    assert bootstrap.neighbours(0, 1) == []
    assert len(bootstrap.neighbours(9_999, 10_000)) == 14
    reached, steps = {0}, 0
    while len(reached) < 10_000:
        reached |= {peer for process in reached for peer in bootstrap.neighbours(process, 10_000)}
        steps += 1
    assert steps <= 14


def test_a_process_that_has_ended_is_known_at_once():
    ports = {}
    gone, asking = Process(ports, 0, 2), Process(ports, 1, 2)
    gone.close()
    try:
        began = time.monotonic()
        asking.wanted.put([0])
        assert asking.peers.wait_for([0], 10) == f"rank 0 has ended: nothing listens at 127.0.0.1:{ports[0]} any more"
        assert "has ended" in asking.lost[0]
        assert time.monotonic() - began < 5
    finally:
        asking.close()


def test_only_the_own_interface_is_listened_at():
    peers = Peers(bootstrap._own_address("127.0.0.1"), 0, 2, SECRET)
    try:
        assert peers.host == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", peers.port), timeout=5)  # another address of this machine
    finally:
        peers.close()


def hello(sender=0, receiver=1, magic=b"jaxmp 3\n"):
    return struct.pack(">8sII32s", magic, sender, receiver, b"n" * 32)


def prove(connection, secret, greeting):
    """Returns a peer's answer, made with `secret`."""
    number = connection.recv(64, socket.MSG_WAITALL)[:32]
    connection.sendall(hmac.digest(secret, b"connects" + greeting + number, "sha256"))


def echo(connection):
    """Sends back what the listener itself proved."""
    connection.sendall(hello())
    connection.sendall(connection.recv(64, socket.MSG_WAITALL)[32:])


def slow(connection):
    with contextlib.suppress(OSError):
        for byte in hello() * 4:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)


def reset(connection):
    connection.sendall(hello()[:10])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


ATTACKS = {
    "nothing": lambda connection: connection.shutdown(socket.SHUT_WR),
    "noise": lambda connection: connection.sendall(os.urandom(200)),
    "a huge length": lambda connection: connection.sendall(b"\xff" * 100_000),
    "http": lambda connection: connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 48),
    "another rank": lambda connection: connection.sendall(hello(receiver=0)),
    "a rank that is not": lambda connection: connection.sendall(hello(sender=7)),
    "the listener's own rank": lambda connection: connection.sendall(hello(sender=1)),
    "another secret": lambda connection: (connection.sendall(hello()), prove(connection, b"t" * 32, hello())),
    "another greeting": lambda connection: (connection.sendall(hello()), prove(connection, SECRET, hello(sender=2))),
    "the listener's proof": echo,
    "a reset": reset,
}


@pytest.fixture
def listener(monkeypatch, caplog):
    monkeypatch.setattr(peers_lib, "_HANDSHAKE", 0.5)
    caplog.set_level(logging.WARNING, logger="jaxmp.distributed")
    with job(3) as processes:
        yield processes[1]


@pytest.mark.parametrize("attack", [*ATTACKS, "silence", "slow bytes"])
def test_a_stranger_is_refused_within_a_handshakes_time(listener, attack, caplog):
    attacks = ATTACKS | {"silence": lambda connection: None, "slow bytes": slow}
    with socket.create_connection(("127.0.0.1", listener.peers.port), timeout=5) as stranger:
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            attacks[attack](stranger)
        if stranger.fileno() >= 0:
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        wait_until(lambda: listener.peers.strangers == 1)
        assert time.monotonic() - began < 2
    assert not listener.sockets
    assert "rank 1: 1 connection to 127.0.0.1:" in caplog.text
    assert "did not prove to be of this job and was closed" in caplog.text


def test_a_late_handshake_ends_no_connection_that_a_peer_keeps(monkeypatch):
    """The peer would take the end of the connection for the end of this process."""
    monkeypatch.setattr(peers_lib, "_HANDSHAKE", 0.5)

    def greet(port, rank):
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        connection.sendall(hello(rank))
        prove(connection, SECRET, hello(rank))
        return connection

    with job(3) as (_, listener, higher):
        with greet(listener.peers.port, 0) as late:
            time.sleep(2 * peers_lib._HANDSHAKE)
            late.sendall(b"\1")
            assert late.recv(1) == b"\1"
            wait_until(lambda: 0 in listener.sockets)
        with greet(listener.peers.port, 2) as breaks_off:
            assert breaks_off.recv(1) == b"\1"
            assert 2 not in listener.sockets
        wait_until(lambda: 2 in listener.sockets and 1 in higher.sockets)
        assert is_joined(listener, higher)


def test_strangers_leak_nothing_and_keep_no_peer_out(listener, caplog):
    """Many at a time, most of them silent, while a peer connects and is served; `JAXMP_FUZZ` says how many."""
    before, held = descriptors(), []
    threads = threading.active_count()
    for number in range(STRANGERS):
        stranger = socket.create_connection(("127.0.0.1", listener.peers.port), timeout=5)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            attack = list(ATTACKS.values())[number % len(ATTACKS)]
            if number % 3 == 0 and attack not in (echo, ATTACKS["another secret"], ATTACKS["another greeting"]):
                attack(stranger)
        held.append(stranger)
        if len(held) > 100:
            held.pop(0).close()
        if number == STRANGERS // 2:
            peer = Process({1: listener.peers.port}, 0, 3)
            peer.wanted.put([1])
            assert peer.peers.wait_for([1], 10) == ""
            wait_until(lambda: 0 in listener.sockets)
            assert is_joined(peer, listener)
            peer.close()
            listener.sockets.pop(0).close()
    while held:
        held.pop().close()
    wait_until(lambda: listener.peers.strangers == STRANGERS)
    wait_until(lambda: descriptors() <= before and threading.active_count() <= threads)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == len(str(STRANGERS))
    assert f": {10 ** (len(str(STRANGERS)) - 1)} connections to" in logged[-1]


def test_a_listener_that_is_not_of_the_job_is_no_peer():
    """It answers something wrong; the peer that connects leaves, and finds the right one when it is there."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        ports = {0: impostor.getsockname()[1]}
        asking = Process(ports, 1, 2)
        ports[0] = impostor.getsockname()[1]
        try:
            asking.wanted.put([0])
            for _ in range(3):
                connection, _ = impostor.accept()
                with connection:
                    connection.recv(48, socket.MSG_WAITALL)
                    connection.sendall(os.urandom(64))
                    assert connection.recv(1) == b""  # no proof of its own for an impostor
            assert not asking.sockets
        finally:
            asking.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition, deadline=15.0):
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)
