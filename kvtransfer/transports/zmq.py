"""ZMQ over tcp and ipc: a ROUTER for the server, one DEALER for each connection of a client.

Frames are handed to ZMQ by copy, so that a pool block may be reused as soon as `send` returns. ZMQ never gets to
reconnect by itself: it would lose messages without a word, so a lost connection is lost and the session starts anew.
With a cluster secret tcp speaks CURVE. ipc does not: its sockets lie in folders that only their user may enter, and
bytes that never leave the machine need not cost twice the time.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import socket
import tempfile
from collections.abc import Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from common.clock import SystemClock
from common.errors import ConfigError
from common.logging import FailureLog
from common.plane_security import (
    CURVE_OVERHEAD_BYTES,
    HANDSHAKE_FAILURES,
    LOCAL_FETCH,
    PlaneSecurity,
)
from kvtransfer.frames import Buffer
from kvtransfer.transports.base import Connection, SendStatus, ServerPort, Waitable

logger = logging.getLogger(__name__)

_IPC_PREFIX = "tandem-fetch-"
_SEND_HIGH_WATER = 64  # messages for one peer, each about 1 MiB at most
_RECEIVE_HIGH_WATER = 64
_CLIENT_SEND_HIGH_WATER = 4096  # small frames
# Long after the owner has closed a lost connection. (-1, never, would also throw away what had come in.)
_NO_RECONNECT_MS = 3_600_000
# A client that vanished without a word would keep its connection until the server sends it something.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}
_LOSS_EVENTS: dict[int, str] = {
    zmq.EVENT_CLOSED: "connection refused or closed",
    zmq.EVENT_DISCONNECTED: "connection closed by the peer",
}


def _is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


class ZmqServerPort:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], max_message_bytes: int, security: PlaneSecurity
    ) -> None:
        self.endpoints: list[str] = []
        self._security = security
        self._failures = FailureLog(logger)
        self._clock = SystemClock()
        self._directories: list[str] = []
        self._socket = context.socket(zmq.ROUTER)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + CURVE_OVERHEAD_BYTES)
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(option, value)

    def bind(self, endpoints: Sequence[str]) -> None:
        """tcp last: CURVE holds for all binds that follow."""
        bound = {endpoint: self._bind(endpoint) for endpoint in sorted(endpoints, key=_is_tcp)}
        self.endpoints = [bound[endpoint] for endpoint in endpoints]

    def _bind(self, endpoint: str) -> str:
        self._security.check(endpoint)
        if _is_tcp(endpoint):
            self._security.secure_server(self._socket)
        if endpoint == "ipc://*":
            _remove_abandoned_directories()
            self._directories.append(tempfile.mkdtemp(prefix=_IPC_PREFIX))
            endpoint = f"ipc://{self._directories[-1]}/fetch"
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind fetch endpoint {endpoint}: {error}") from None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def waitables(self) -> list[Waitable]:
        return [self._socket, self._monitor]

    def send(self, peer: bytes, parts: Sequence[Buffer]) -> SendStatus:
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK)
        except zmq.Again:
            # Sending alone may never notice that the peer has left meanwhile; asking for events makes ZMQ look.
            self._socket.getsockopt(zmq.EVENTS)
            return SendStatus.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendStatus.GONE
        return SendStatus.SENT

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        try:
            peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._report_failures()
            return None
        return peer.bytes, [part.buffer for part in parts]

    def _report_failures(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                endpoint = event["endpoint"].decode(errors="replace")
                if endpoint.startswith("ipc:") and event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    continue  # another server of ours looked whether anybody listens at this socket
                text = self._security.serving_failure(event["event"], event["value"], endpoint)
                self._failures.note(self._clock.now(), text)

    def close(self, flush_seconds: float = 0.0) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(flush_seconds * 1000))
        for directory in self._directories:
            _remove_directory(directory)


def _remove_abandoned_directories() -> None:
    """Those of servers that were killed: a socket of ours that nobody listens at."""
    for path in glob.glob(f"{tempfile.gettempdir()}/{_IPC_PREFIX}*/fetch"):
        with contextlib.suppress(OSError):
            if os.stat(path).st_uid == os.getuid() and _is_refused(path):
                _remove_directory(os.path.dirname(path))


def _is_refused(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a live server that is slow to accept is no abandoned one
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _remove_directory(directory: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(f"{directory}/fetch")
    with contextlib.suppress(OSError):
        os.rmdir(directory)


class ZmqConnection:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        max_message_bytes: int,
        connect_seconds: float,
        security: PlaneSecurity,
    ) -> None:
        self._lost_reason: str | None = None
        self._endpoint = endpoint
        self._security = security
        self._socket = context.socket(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket()
        self._socket.linger = 0
        self._socket.setsockopt(zmq.SNDHWM, _CLIENT_SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + CURVE_OVERHEAD_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NO_RECONNECT_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(connect_seconds * 1000))
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(connect_seconds * 1000))
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        if _is_tcp(endpoint):
            security.secure_client(self._socket)
        try:
            security.check(endpoint)
            self._socket.connect(endpoint)
        except ConfigError as error:
            self._lost_reason = error.message
        except zmq.ZMQError as error:
            self._lost_reason = str(error)

    def waitables(self) -> list[Waitable]:
        return [self._socket, self._monitor]

    def send(self, parts: Sequence[Buffer]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[memoryview] | None:
        try:
            return [part.buffer for part in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def lost_reason(self) -> str | None:
        while self._lost_reason is None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            if event["event"] & HANDSHAKE_FAILURES:
                server = f"the fetch server at {self._endpoint}"
                self._lost_reason = self._security.dialling_failure(event["event"], event["value"], server)
            else:
                self._lost_reason = _LOSS_EVENTS.get(int(event["event"]))
        return self._lost_reason

    def close(self, flush_seconds: float = 0.0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(flush_seconds * 1000))


class ZmqTransport:
    def __init__(self, security: PlaneSecurity = LOCAL_FETCH) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = security
        self._allow_list: ThreadAuthenticator | None = None

    def bind(self, endpoints: Sequence[str], max_message_bytes: int) -> ServerPort:
        if self._allow_list is None:
            self._allow_list = self._security.start_allow_list(self._context)
        port = ZmqServerPort(self._context, max_message_bytes, self._security)
        try:
            port.bind(endpoints)
        except ConfigError:
            port.close()
            raise
        return port

    def connect(self, endpoint: str, max_message_bytes: int, connect_seconds: float) -> Connection:
        return ZmqConnection(self._context, endpoint, max_message_bytes, connect_seconds, self._security)

    def close(self) -> None:
        if self._allow_list is not None:
            self._allow_list.stop()
        self._context.term()


def make_transport(security: PlaneSecurity) -> ZmqTransport:
    return ZmqTransport(security)
