"""ZMQ over tcp and ipc: a ROUTER for the server, one DEALER for each connection of a client.

Frames are handed to ZMQ by copy, so that a pool block may be reused as soon as `send` returns. ZMQ never gets to
reconnect by itself: it would lose messages without a word, so a lost connection is lost and the session starts anew.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import tempfile
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.errors import ConfigError
from kvtransfer.frames import Buffer
from kvtransfer.transports.base import Connection, SendStatus, ServerPort, Waitable

_IPC_PREFIX = "tandem-fetch-"
_SEND_HIGH_WATER = 64  # messages for one peer, each about 1 MiB at most
_RECEIVE_HIGH_WATER = 64
_CLIENT_SEND_HIGH_WATER = 4096  # small frames
# Long after the owner has closed a lost connection. (-1, never, would also throw away what had come in.)
_NO_RECONNECT_MS = 3_600_000
_LOSS_EVENTS: dict[int, str] = {
    zmq.EVENT_CLOSED: "connection refused or closed",
    zmq.EVENT_DISCONNECTED: "connection closed by the peer",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed: not a ZMQ peer",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake failed: not authorised",
}


class ZmqServerPort:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], max_message_bytes: int) -> None:
        self.endpoints: list[str] = []
        self._directories: list[str] = []
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)

    def bind(self, endpoint: str) -> None:
        if endpoint == "ipc://*":
            _remove_abandoned_directories()
            self._directories.append(tempfile.mkdtemp(prefix=_IPC_PREFIX))
            endpoint = f"ipc://{self._directories[-1]}/fetch"
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind fetch endpoint {endpoint}: {error}") from None
        self.endpoints.append(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def waitables(self) -> list[Waitable]:
        return [self._socket]

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
            return None
        return peer.bytes, [part.buffer for part in parts]

    def close(self, flush_seconds: float = 0.0) -> None:
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
    ) -> None:
        self._lost_reason: str | None = None
        self._socket = context.socket(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket()
        self._socket.linger = 0
        self._socket.setsockopt(zmq.SNDHWM, _CLIENT_SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NO_RECONNECT_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(connect_seconds * 1000))
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(connect_seconds * 1000))
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.connect(endpoint)
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
            self._lost_reason = _LOSS_EVENTS.get(int(event["event"]))
        return self._lost_reason

    def close(self, flush_seconds: float = 0.0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(flush_seconds * 1000))


class ZmqTransport:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def bind(self, endpoints: Sequence[str], max_message_bytes: int) -> ServerPort:
        port = ZmqServerPort(self._context, max_message_bytes)
        try:
            for endpoint in endpoints:
                port.bind(endpoint)
        except ConfigError:
            port.close()
            raise
        return port

    def connect(self, endpoint: str, max_message_bytes: int, connect_seconds: float) -> Connection:
        return ZmqConnection(self._context, endpoint, max_message_bytes, connect_seconds)

    def close(self) -> None:
        self._context.term()
