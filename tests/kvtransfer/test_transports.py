"""What every transport must do: carry whole messages both ways, say when a peer is gone, name what it cannot bind."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.errors import ConfigError
from kvtransfer.endpoints import advertised, in_dialing_order
from kvtransfer.transports.base import Connection, SendStatus, ServerPort, Transport, Waitable
from kvtransfer.transports.faulty import Faults, FaultyTransport
from kvtransfer.transports.loopback import LoopbackTransport
from kvtransfer.transports.registry import TransportSet
from kvtransfer.transports.zmq import ZmqTransport

MAX_BYTES = 4 << 20
ENDPOINTS = {"tcp": "tcp://127.0.0.1:0", "ipc": "ipc://*", "loopback": "loopback://here", "faulty": "loopback://here"}


class Pair:
    """A bound port and what dials it."""

    def __init__(self, scheme: str) -> None:
        self.transport: Transport
        if scheme in ("tcp", "ipc"):
            self.transport = ZmqTransport()
        else:
            self.transport = LoopbackTransport(max_queued=4)
        if scheme == "faulty":
            self.transport = FaultyTransport(self.transport, Faults(), seed=1)
        self.endpoint = ENDPOINTS[scheme]
        self.port = self.bind(self.endpoint)
        self.connections: list[Connection] = []

    def bind(self, endpoint: str) -> ServerPort:
        return self.transport.bind([endpoint], MAX_BYTES)

    def dial(self, endpoint: str | None = None) -> Connection:
        self.connections.append(self.transport.connect(endpoint or self.port.endpoints[0], MAX_BYTES, 2.0))
        return self.connections[-1]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.port.close()
        self.transport.close()


@pytest.fixture(params=["tcp", "ipc", "loopback", "faulty"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def wait_for(waitables: list[Waitable], poll: Callable[[], object]) -> object:
    """What `poll` returns once it returns something, polled when one of these says that there is news."""
    poller = zmq.Poller()
    for waitable in waitables:
        poller.register(waitable, zmq.POLLIN)
    deadline = time.monotonic() + 10
    while (result := poll()) is None:
        assert time.monotonic() < deadline, "nothing came"
        poller.poll(1000)
    return result


def receive(end: ServerPort | Connection) -> Any:
    return wait_for(end.waitables(), end.receive)


def test_messages_go_both_ways_whole(pair: Pair) -> None:
    connection = pair.dial()
    pool = bytearray(b"p" * (1 << 20))
    assert connection.send([b"header", b"", memoryview(pool)[:100]])
    peer, parts = receive(pair.port)
    assert [bytes(part) for part in parts] == [b"header", b"", b"p" * 100]
    assert pair.port.send(peer, [b"answer", memoryview(pool)]) is SendStatus.SENT
    pool[:] = b"x" * len(pool)  # a block may be reused at once
    answer = receive(connection)
    assert [bytes(part) for part in answer] == [b"answer", b"p" * (1 << 20)]


def test_peers_are_told_apart(pair: Pair) -> None:
    first, second = pair.dial(), pair.dial()
    peers = {}
    for name, connection in ((b"first", first), (b"second", second)):
        connection.send([name])
        peer, parts = receive(pair.port)
        peers[bytes(parts[0])] = peer
    pair.port.send(peers[b"second"], [b"to the second"])
    assert [bytes(part) for part in receive(second)] == [b"to the second"]
    assert first.receive() is None


def test_sending_to_a_peer_that_is_gone_says_so(pair: Pair) -> None:
    connection = pair.dial()
    connection.send([b"here"])
    peer, _ = receive(pair.port)
    pair.connections.clear()
    connection.close()
    deadline = time.monotonic() + 10
    while pair.port.send(peer, [b"?"]) is not SendStatus.GONE:
        assert time.monotonic() < deadline
    assert pair.port.send(b"never heard of", [b"?"]) is SendStatus.GONE


def test_a_peer_that_does_not_read_fills_up(pair: Pair) -> None:
    connection = pair.dial()
    connection.send([b"here"])
    peer, _ = receive(pair.port)
    statuses = [pair.port.send(peer, [bytes(1 << 18)]) for _ in range(400)]
    assert statuses[0] is SendStatus.SENT
    assert SendStatus.FULL in statuses


def test_a_closed_server_shows_after_what_it_had_sent(pair: Pair) -> None:
    connection = pair.dial()
    connection.send([b"here"])
    peer, _ = receive(pair.port)
    assert connection.lost_reason() is None
    pair.port.send(peer, [b"last words"])
    pair.port.close(flush_seconds=1.0)
    assert wait_for(connection.waitables(), connection.lost_reason)
    assert [bytes(part) for part in receive(connection)] == [b"last words"]


def test_dialing_nobody_shows_as_lost(pair: Pair) -> None:
    endpoint = pair.port.endpoints[0]
    pair.port.close()
    connection = pair.dial(endpoint)
    assert wait_for(connection.waitables(), connection.lost_reason)


@pytest.mark.parametrize("scheme", ["tcp", "loopback"])
def test_an_address_in_use_is_named(scheme: str) -> None:
    pair = Pair(scheme)
    try:
        with pytest.raises(ConfigError, match=r"cannot bind fetch endpoint .*" + pair.port.endpoints[0][-5:]):
            pair.bind(pair.port.endpoints[0])
    finally:
        pair.close()


def test_a_scheme_that_nothing_serves_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'carrier-pigeon', supported are ipc, loopback, tcp"):
        TransportSet().for_endpoint("carrier-pigeon://roof")
    with pytest.raises(ConfigError, match="no scheme"):
        TransportSet().for_endpoint("127.0.0.1:5")


def test_one_socket_serves_tcp_and_ipc() -> None:
    transports = TransportSet()
    groups = transports.group(["tcp://127.0.0.1:0", "ipc://*"])
    assert [endpoints for _, endpoints in groups] == [["tcp://127.0.0.1:0", "ipc://*"]]
    transports.close()


def test_what_is_advertised_can_be_dialed() -> None:
    assert advertised("tcp://127.0.0.1:5", None) == "tcp://127.0.0.1:5"
    assert advertised("tcp://0.0.0.0:5", "node-3") == "tcp://node-3:5"
    assert advertised("tcp://[::]:5", "fe80::1") == "tcp://[fe80::1]:5"
    assert advertised("ipc:///run/x", "node-3") == "ipc:///run/x"
    with pytest.raises(ConfigError, match="which host"):
        advertised("tcp://0.0.0.0:5", None)


def test_a_socket_file_that_is_there_is_dialed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("ipc")
    there = pair.port.endpoints[0]
    assert in_dialing_order(["tcp://127.0.0.1:5", "ipc:///no/such/socket", there]) == [there, "tcp://127.0.0.1:5"]
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.stat("/proc/self").st_uid)
    assert in_dialing_order(["tcp://127.0.0.1:5", there]) == ["tcp://127.0.0.1:5"]  # somebody else's
    pair.close()


def test_faults_happen_and_repeat_with_their_seed() -> None:
    def run(seed: int) -> list[bytes]:
        faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, corrupt=0.1)
        transport = FaultyTransport(LoopbackTransport(max_queued=1000), faults, seed)
        port = transport.bind(["loopback://here"], MAX_BYTES)
        connection = transport.connect("loopback://here", MAX_BYTES, 1.0)
        for number in range(200):
            connection.send([number.to_bytes(4, "big")])
        got = []
        while received := port.receive():
            got.append(bytes(received[1][0]))
        assert all(transport.counts[fault] for fault in ("drop", "duplicate", "reorder", "corrupt"))
        connection.close()
        port.close()
        return got

    assert run(5) == run(5) != run(6)


def test_socket_folders_that_a_killed_server_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, live = tmp_path / "tandem-fetch-dead", Pair("ipc")
    abandoned.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(abandoned / "fetch"))
    other = Pair("ipc")
    assert not abandoned.exists()
    for pair in (live, other):
        assert Path(pair.port.endpoints[0].removeprefix("ipc://")).is_socket()
        pair.close()
    assert not list(tmp_path.iterdir())
