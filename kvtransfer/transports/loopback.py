"""Inside one process: messages pass through deques. For tests; one LoopbackTransport joins both ends."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence

from common.errors import ConfigError
from common.plane_security import PlaneSecurity
from kvtransfer.frames import Buffer
from kvtransfer.mailbox import Mailbox
from kvtransfer.transports.base import Connection, SendStatus, ServerPort, Waitable

_Parts = list[memoryview]


def _copy(parts: Sequence[Buffer]) -> _Parts:
    return [memoryview(bytes(part)) for part in parts]


class LoopbackPort:
    def __init__(self, endpoints: Sequence[str], max_queued: int) -> None:
        self.endpoints = list(endpoints)
        self.max_queued = max_queued
        self.inbox: Mailbox[tuple[bytes, _Parts]] = Mailbox()
        self.peers: dict[bytes, LoopbackConnection] = {}
        self.is_closed = False
        self._taken: deque[tuple[bytes, _Parts]] = deque()

    def waitables(self) -> list[Waitable]:
        return [self.inbox.fd]

    def send(self, peer: bytes, parts: Sequence[Buffer]) -> SendStatus:
        connection = self.peers.get(peer)
        if connection is None:
            return SendStatus.GONE
        return SendStatus.SENT if connection.deliver(_copy(parts)) else SendStatus.FULL

    def receive(self) -> tuple[bytes, _Parts] | None:
        self._taken.extend(self.inbox.take_all())
        return self._taken.popleft() if self._taken else None

    def close(self, flush_seconds: float = 0.0) -> None:
        self.is_closed = True
        for connection in list(self.peers.values()):
            connection.hang_up()
        self.inbox.close()


class LoopbackConnection:
    def __init__(self, name: bytes, port: LoopbackPort | None, endpoint: str) -> None:
        self._name = name
        self._port = port
        self._inbox: Mailbox[_Parts] = Mailbox()
        self._taken: deque[_Parts] = deque()
        self._num_queued = 0
        self._lock = threading.Lock()
        self._lost_reason = None if port else f"nobody is bound to {endpoint}"
        if port:
            port.peers[name] = self
        else:
            self._inbox.wake()

    def waitables(self) -> list[Waitable]:
        return [self._inbox.fd]

    def send(self, parts: Sequence[Buffer]) -> bool:
        if self._port is not None:
            self._port.inbox.put((self._name, _copy(parts)))
        return True

    def receive(self) -> _Parts | None:
        self._taken.extend(self._inbox.take_all())
        if not self._taken:
            return None
        with self._lock:
            self._num_queued -= 1
        return self._taken.popleft()

    def deliver(self, parts: _Parts) -> bool:
        with self._lock:
            if self._port is None or self._num_queued >= self._port.max_queued:
                return False
            self._num_queued += 1
        return self._inbox.put(parts)

    def hang_up(self) -> None:
        self._lost_reason = "connection closed by the peer"
        self._inbox.wake()

    def lost_reason(self) -> str | None:
        return self._lost_reason

    def close(self, flush_seconds: float = 0.0) -> None:
        if self._port is not None:
            self._port.peers.pop(self._name, None)
        self._inbox.close()


class LoopbackTransport:
    """max_queued: messages for one peer before the server sees FULL."""

    def __init__(self, max_queued: int = 64) -> None:
        self._max_queued = max_queued
        self._ports: dict[str, LoopbackPort] = {}
        self._numbers = itertools.count(1)

    def bind(self, endpoints: Sequence[str], max_message_bytes: int) -> ServerPort:
        for endpoint in endpoints:
            if endpoint in self._ports and not self._ports[endpoint].is_closed:
                raise ConfigError(f"cannot bind fetch endpoint {endpoint}: address already in use")
        port = LoopbackPort(endpoints, self._max_queued)
        self._ports.update(dict.fromkeys(endpoints, port))
        return port

    def connect(self, endpoint: str, max_message_bytes: int, connect_seconds: float) -> Connection:
        port = self._ports.get(endpoint)
        is_bound = port is not None and not port.is_closed
        return LoopbackConnection(next(self._numbers).to_bytes(5, "big"), port if is_bound else None, endpoint)

    def close(self) -> None:
        pass


def make_transport(security: PlaneSecurity) -> LoopbackTransport:
    """What stays inside the process needs no protection."""
    return LoopbackTransport()
