"""The fetch plane with a cluster secret: who has it fetches over tcp, others are refused, and both sides say why."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.cluster_secret import ClusterSecret, new_secret_text
from common.errors import ConfigError
from common.messages import Source
from common.plane_security import HANDSHAKE_FAILURES, PlaneSecurity
from kvtransfer import own_address
from kvtransfer.own_address import host_for_peers
from kvtransfer.server import FetchServer
from kvtransfer.transports.registry import TransportSet
from kvtransfer.transports.zmq import ZmqTransport
from tests.kvtransfer.doubles import ScriptedStore
from tests.kvtransfer.test_transports import receive, wait_for

MakeServer = Callable[..., tuple[FetchServer, Source]]
MakeReceiver = Callable[..., Any]

TCP = ("tcp://127.0.0.1:0",)
SECRET, OTHER = ClusterSecret(new_secret_text()), ClusterSecret(new_secret_text())
NONE = PlaneSecurity("fetch")
OURS = PlaneSecurity("fetch", SECRET.plane_keys("fetch"))
THEIRS = PlaneSecurity("fetch", OTHER.plane_keys("fetch"))
KNOWS_THE_SERVER_ONLY = PlaneSecurity(
    "fetch", type(OURS.keys)(SECRET.plane_keys("fetch").server, OTHER.plane_keys("fetch").client)
)


class Warned:
    """Waits for a warning: the server's comes from its own thread."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._changed = threading.Condition()
        emit = caplog.handler.emit

        def emit_and_tell(record: object) -> None:
            with self._changed:
                emit(record)
                self._changed.notify_all()

        caplog.handler.emit = emit_and_tell

    def wait_for(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: words in self._caplog.text, 20), self._caplog.text


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Warned:
    monkeypatch.setattr(caplog.handler, "emit", caplog.handler.emit)  # puts it back afterwards
    return Warned(caplog)


def having(security: PlaneSecurity) -> TransportSet:
    return TransportSet(security=security)


def test_who_has_the_secret_fetches_over_tcp(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    _, source = make_server(ScriptedStore(), endpoints=TCP, transports=having(OURS))
    receiver = make_receiver(transports=having(OURS))
    receiver.fetch(source, 100).wait_complete()
    assert receiver.client.stats.fetches == {"complete": 1}


@pytest.mark.parametrize(
    ("serving", "dialling", "client_says", "server_says"),
    [
        (OURS, THEIRS, "did not accept this process's cluster secret", "with another cluster secret was refused"),
        (OURS, KNOWS_THE_SERVER_ONLY, "did not accept", "with another cluster secret was refused"),
        # Of two that use different mechanisms each may be the first to hang up.
        (OURS, NONE, "a cluster secret", "secret"),
        (NONE, OURS, "has no", "secret"),
    ],
    ids=["another secret", "not on the list", "the client has none", "the server has none"],
)
def test_who_has_not_is_refused_and_others_go_on(
    make_server: MakeServer,
    make_receiver: MakeReceiver,
    warned: Warned,
    serving: PlaneSecurity,
    dialling: PlaneSecurity,
    client_says: str,
    server_says: str,
) -> None:
    store = ScriptedStore()
    server, source = make_server(store, endpoints=TCP, transports=having(serving))
    error = make_receiver("stranger", transports=having(dialling)).fetch(source, 100).listener.wait_ended()
    assert error.startswith("unreachable: ")
    assert client_says in error
    assert source.endpoints[0] in error
    assert "--cluster-secret-file" in error
    warned.wait_for(server_says)
    assert (store.num_opened, server.stats.num_bytes_received) == (0, 0)
    make_receiver("friend", transports=having(serving)).fetch(source, 100).wait_complete()


def test_the_next_endpoint_is_tried(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    _, strange = make_server(ScriptedStore(), endpoints=TCP, transports=having(THEIRS))
    _, source = make_server(ScriptedStore(), endpoints=TCP, transports=having(OURS))
    both = Source(source.instance_id, [*strange.endpoints, *source.endpoints])
    make_receiver(transports=having(OURS)).fetch(both, 100).wait_complete()


@pytest.mark.parametrize("has_server_key", [False, True])
def test_nothing_is_read_from_a_raw_peer(make_server: MakeServer, has_server_key: bool) -> None:
    """A right first frame, over a bare ZMQ socket, plain or with keys that somebody made up."""
    store = ScriptedStore()
    server, source = make_server(store, endpoints=TCP, transports=having(OURS))
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    monitor = peer.get_monitor_socket(HANDSHAKE_FAILURES)
    if has_server_key:
        peer.curve_serverkey = SECRET.plane_keys("fetch").server.public
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.connect(source.endpoints[0])
    peer.send_multipart([b"\x93", b"crc."])
    assert monitor.poll(10_000)
    assert recv_monitor_message(monitor)["event"] & HANDSHAKE_FAILURES
    peer.disable_monitor()
    context.destroy(linger=0)
    assert server.stats.num_bytes_received == 0
    assert not server.stats.dropped_frames
    assert server.is_alive


def test_without_its_allow_list_a_server_lets_nobody_in() -> None:
    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    OURS.secure_server(server)
    OURS.secure_client(client)
    monitor = client.get_monitor_socket()
    server.bind("tcp://127.0.0.1:*")
    client.connect(server.last_endpoint)
    client.send(b"let me in")
    while not (event := recv_monitor_message(monitor)["event"]) & (HANDSHAKE_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED):
        pass
    assert event & HANDSHAKE_FAILURES
    client.disable_monitor()
    context.destroy(linger=0)


@pytest.mark.parametrize("security", [NONE, OURS], ids=["plain", "curve"])
def test_a_part_of_the_greatest_size_passes(security: PlaneSecurity) -> None:
    transport = ZmqTransport(security)
    port = transport.bind(TCP, 1 << 20)
    connection = transport.connect(port.endpoints[0], 1 << 20, 5.0)
    assert connection.send([bytes(1 << 20)])
    peer, _ = receive(port)
    port.send(peer, [bytes(1 << 20)])
    assert len(receive(connection)[0]) == 1 << 20
    connection.send([bytes((1 << 20) + 100)])
    assert wait_for(connection.waitables(), connection.lost_reason)
    connection.close()
    port.close()
    transport.close()


def test_sockets_within_the_machine_are_guarded_by_their_folder(
    make_server: MakeServer, make_receiver: MakeReceiver
) -> None:
    """The one socket speaks CURVE over tcp and plain ZMQ over ipc."""
    _, source = make_server(ScriptedStore(), transports=having(OURS))
    tcp, ipc = source.endpoints
    assert (tcp[:6], ipc[:6]) == ("tcp://", "ipc://")
    assert stat.S_IMODE(Path(ipc[6:]).parent.stat().st_mode) == 0o700
    receiver = make_receiver(transports=having(NONE))
    receiver.fetch(Source("server", [ipc]), 100).wait_complete()
    assert receiver.fetch(Source("server", [tcp]), 100).listener.wait_ended()


@pytest.mark.parametrize("security", [NONE, OURS], ids=["plain", "curve"])
def test_who_looks_whether_a_socket_is_abandoned_is_no_failure(
    security: PlaneSecurity, caplog: pytest.LogCaptureFixture
) -> None:
    """Every server of the machine does at its start: each warned the others of a secret that might be wrong."""
    transport = ZmqTransport(security)
    port, other = transport.bind(("ipc://*",), 1 << 20), transport.bind(("ipc://*",), 1 << 20)
    connection = transport.connect(port.endpoints[0], 1 << 20, 5.0)
    assert connection.send([b"this one means it"])
    receive(port)
    port.receive()  # what the monitor said until now
    assert not caplog.records
    for opened in (connection, port, other, transport):
        opened.close()


def test_beyond_this_machine_nothing_is_bound_or_dialled_without_it(make_receiver: MakeReceiver) -> None:
    server = FetchServer(ScriptedStore(), "server", ["ipc://*", "tcp://0.0.0.0:0"])
    with pytest.raises(ConfigError, match=r"tcp://0\.0\.0\.0:0 is beyond this machine"):
        server.start()
    server.close()
    error = make_receiver().fetch(Source("server", ["tcp://192.0.2.1:5"]), 100).listener.wait_ended()
    assert error.startswith("unreachable: ")
    assert "tcp://192.0.2.1:5 is beyond this machine" in error


def test_what_peers_dial_when_every_address_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = {"proxy": ["10.1.0.5"], "localhost": ["127.0.0.1"], "192.0.2.1": ["10.2.0.5"], "2001:db8::1": ["fd00::5"]}
    names = ["127.0.1.1", "10.3.0.5"]
    monkeypatch.setattr(own_address, "_leaving_for", lambda host, _: iter(leaving.get(host, [])))
    monkeypatch.setattr(own_address, "_addresses_of", lambda _host, _family: names)
    near, far = "tcp://localhost:8100", "tcp://proxy:8100"
    assert host_for_peers("0.0.0.0", None, ["ipc:///run/x", near, far]) == "10.1.0.5"
    assert host_for_peers("0.0.0.0", None, [near]) == "10.2.0.5"
    assert host_for_peers("::", None, [near]) == "fd00::5"
    del leaving["192.0.2.1"]
    assert host_for_peers("0.0.0.0", None, [near]) == "10.3.0.5"
    names.pop()
    assert host_for_peers("0.0.0.0", None, [near]) == "127.0.0.1"
    assert host_for_peers("0.0.0.0", "node-3", [far]) == "node-3"
    assert host_for_peers("10.9.0.5", None, [far]) is None


def test_this_machine_has_an_address() -> None:
    host = host_for_peers("0.0.0.0", None, ["tcp://no-such-host.invalid:1"])
    assert host
    assert host.count(".") == 3


@pytest.mark.parametrize("security", [NONE, OURS], ids=["plain", "curve"])
def test_who_dials_and_says_nothing_is_hung_up_on(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, warned: Warned, security: PlaneSecurity
) -> None:
    """Else his connections cost file descriptors for half a minute each."""
    monkeypatch.setattr("common.plane_security.HANDSHAKE_SECONDS", 0.1)
    _, source = make_server(ScriptedStore(), endpoints=TCP, transports=having(security))
    host, port = source.endpoints[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        while connection.recv(100):  # until it ends
            pass
    warned.wait_for("fell silent during the handshake")
