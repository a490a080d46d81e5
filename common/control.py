"""A node's end of the control plane: one connection to each proxy, kept alive and in order.

    dial -> Hello until Welcome -> joined: messages both ways, Status every heartbeat
    gap in the proxy's sequence, Rehello, or another proxy instance at the address -> Hello again, with a snapshot
    silence past the lease -> the proxy is lost: its requests are the node's to abort; Hello until it is back
    handshake failed (another cluster secret, or one side has none) -> said in words, dialled again later

`ProxyLink` decides and is pure; `ControlClient` owns the sockets. Neither knows what the messages ask for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from common import messages as m
from common.clock import Clock, SystemClock
from common.errors import PeerError
from common.plane_security import CURVE_OVERHEAD_BYTES, HANDSHAKE_FAILURES, LOCAL_CONTROL, FailureLog, PlaneSecurity

log = logging.getLogger(__name__)

HELLO_INTERVAL_SECONDS = 0.5
FIRST_LEASE_SECONDS = 5.0
REDIAL_SECONDS = 1.0
SEND_HIGH_WATER_MARK = 10_000


class ControlHandler(Protocol):
    """What a node does with its control connections. Called on the event loop; must not block."""

    def hello(self, proxy_id: str) -> m.Hello:
        """Who this node is, and the requests of this proxy that it holds ("" for an unknown proxy)."""
        ...

    def status(self) -> m.Status: ...

    def received(self, proxy_id: str, message: m.ProxyMessage) -> None: ...

    def acknowledged(self, proxy_id: str, sequence: int) -> None:
        """The proxy has everything up to this sequence."""
        ...

    def proxy_lost(self, proxy_id: str) -> None:
        """The proxy was silent past its lease, or another instance took its address."""
        ...


@dataclass
class Delivery:
    """What a received message leads to: hand it over or not, say Hello or not, and whom we lost by it."""

    message: m.ProxyMessage | None = None
    needs_hello: bool = False
    lost_proxy_id: str | None = None


class ProxyLink:
    """State of the connection to one proxy address. Pure: times are passed in, nothing is sent from here."""

    def __init__(self, instance_id: str, now: float) -> None:
        self._instance_id = instance_id
        self.proxy_id = ""
        self.is_joined = False
        self.heartbeat_seconds = 1.0
        self.lease_seconds = FIRST_LEASE_SECONDS
        self.refusal: str | None = None
        self._sent = 0
        self._received = 0
        self._last_heard = now

    def envelope(self) -> m.Envelope:
        """Header of the next message to the proxy."""
        self._sent += 1
        return m.Envelope(self._instance_id, self.proxy_id, self._sent, self._received)

    @property
    def last_sent(self) -> int:
        return self._sent

    def accept(self, envelope: m.Envelope, message: m.ProxyMessage, now: float) -> Delivery:
        if envelope.receiver != self._instance_id:
            return Delivery()  # meant for an earlier process at this address
        lost = self._note_sender(envelope.sender)
        self._last_heard = now
        has_gap = self._received and envelope.sequence != self._received + 1
        self._received = envelope.sequence
        if isinstance(message, m.Welcome):
            self._join(message)
            return Delivery(lost_proxy_id=lost)
        if isinstance(message, m.Refused):
            self.is_joined = False
            self.refusal = message.reason
            return Delivery(message, lost_proxy_id=lost)
        if isinstance(message, m.Rehello) or has_gap or not self.is_joined:
            # After a gap this message is still good: the snapshot that follows tells what we hold, this one included.
            return Delivery(message if self.is_joined else None, needs_hello=True, lost_proxy_id=lost)
        return Delivery(message, lost_proxy_id=lost)

    def expire(self, now: float) -> str | None:
        """The proxy that was lost by its silence, once."""
        if not self.is_joined or now - self._last_heard <= self.lease_seconds:
            return None
        return self._forget()

    def _note_sender(self, sender: str) -> str | None:
        lost = self._forget() if self.proxy_id and sender != self.proxy_id else None
        self.proxy_id = sender
        return lost

    def _forget(self) -> str | None:
        lost = self.proxy_id if self.is_joined else None
        self.proxy_id, self.is_joined, self._received = "", False, 0
        return lost

    def _join(self, welcome: m.Welcome) -> None:
        self.is_joined = True
        self.refusal = None
        self.heartbeat_seconds = welcome.heartbeat_seconds
        self.lease_seconds = welcome.lease_seconds


class _Connection:
    """socket: None after a failed handshake, until it is dialled again. failure: what that meant, in words."""

    def __init__(self, endpoint: str, link: ProxyLink) -> None:
        self.endpoint = endpoint
        self.socket: zmq.asyncio.Socket | None = None
        self.link = link
        self.logged_refusal: str | None = None
        self.failure: str | None = None


class ControlClient:
    """The node's control connections. All methods belong to the event loop that runs `run`.

    Raises ConfigError for an endpoint that `security` does not allow.
    """

    def __init__(
        self,
        instance_id: str,
        endpoints: Iterable[str],
        handler: ControlHandler,
        clock: Clock | None = None,
        *,
        security: PlaneSecurity = LOCAL_CONTROL,
    ) -> None:
        self._instance_id = instance_id
        self._endpoints = list(endpoints)
        for endpoint in self._endpoints:
            security.check(endpoint)
        self._security = security
        self._failures = FailureLog(log)
        self._handler = handler
        self._clock = clock or SystemClock()
        self._context = zmq.asyncio.Context()
        self._connections: list[_Connection] = []
        self.num_bad_messages = 0

    async def run(self) -> None:
        """Serves all connections until cancelled; then says nothing more (see `goodbye`)."""
        now = self._clock.now()
        self._connections = [_Connection(endpoint, ProxyLink(self._instance_id, now)) for endpoint in self._endpoints]
        log.info("waiting for the proxy at %s", ", ".join(self._endpoints))
        try:
            async with asyncio.TaskGroup() as group:
                for connection in self._connections:
                    group.create_task(self._keep_dialled(connection))
                    group.create_task(self._beat(connection))
        finally:
            self._connections = []
            self._context.destroy(linger=200)

    def send(self, proxy_id: str, message: m.NodeMessage) -> int | None:
        """Sends to one proxy; the message's sequence, or None when it is not joined."""
        for connection in self._connections:
            if connection.link.is_joined and connection.link.proxy_id == proxy_id:
                self._send(connection, message)
                return connection.link.last_sent
        return None

    def broadcast(self, message: m.NodeMessage) -> None:
        for connection in self._connections:
            if connection.link.is_joined:
                self._send(connection, message)

    @property
    def num_joined(self) -> int:
        return sum(c.link.is_joined for c in self._connections)

    @property
    def refusals(self) -> list[str]:
        """Why proxies that can be reached do not take this node."""
        return [reason for c in self._connections if (reason := c.link.refusal or c.failure)]

    async def _keep_dialled(self, connection: _Connection) -> None:
        """After some kinds of failed handshake ZMQ never dials again, so this does, after all of them."""
        while True:
            connection.socket = self._dial(connection.endpoint)
            try:
                await self._use(connection, connection.socket)
            finally:
                connection.socket.close()
                connection.socket = None
            await asyncio.sleep(REDIAL_SECONDS)

    async def _use(self, connection: _Connection, socket: zmq.asyncio.Socket) -> None:
        """Until a handshake fails."""
        monitor = socket.get_monitor_socket()  # that of `_dial`
        receiving = asyncio.create_task(self._receive(connection, socket))
        failing = asyncio.ensure_future(recv_monitor_message(monitor))
        try:
            await asyncio.wait({receiving, failing}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # raises
            event = failing.result()
            proxy = f"the proxy at {connection.endpoint}"
            connection.failure = self._security.dialling_failure(event["event"], event["value"], proxy)
            self._failures.note(self._clock.now(), connection.failure)
        finally:
            for task in (receiving, failing):
                task.cancel()
            await asyncio.gather(receiving, failing, return_exceptions=True)
            socket.disable_monitor()
            monitor.close()

    def _dial(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.get_monitor_socket(HANDSHAKE_FAILURES)  # before it can fail
        self._security.secure_client(socket)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(endpoint)
        return socket

    async def _receive(self, connection: _Connection, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            connection.failure = None
            try:
                envelope, message = m.decode_from_proxy(frames)
            except PeerError as error:
                self.num_bad_messages += 1
                log.warning("dropped a message from %s: %s", connection.endpoint, error)
                continue
            self._deliver(connection, envelope, message)

    def _deliver(self, connection: _Connection, envelope: m.Envelope, message: m.ProxyMessage) -> None:
        was_joined = connection.link.is_joined
        delivery = connection.link.accept(envelope, message, self._clock.now())
        if delivery.lost_proxy_id:
            self._lose(connection, delivery.lost_proxy_id)
        if connection.link.is_joined and not was_joined:
            log.info("joined proxy %s at %s", connection.link.proxy_id, connection.endpoint)
        if connection.link.is_joined:
            self._handler.acknowledged(connection.link.proxy_id, envelope.received)
        self._note_refusal(connection)
        if delivery.message is not None:
            self._handler.received(connection.link.proxy_id, delivery.message)
        if delivery.needs_hello:
            self._send(connection, self._handler.hello(connection.link.proxy_id))

    def _note_refusal(self, connection: _Connection) -> None:
        refusal = connection.link.refusal
        if refusal and refusal != connection.logged_refusal:
            log.error("refused by the proxy at %s: %s", connection.endpoint, refusal)
        connection.logged_refusal = refusal

    async def _beat(self, connection: _Connection) -> None:
        link = connection.link
        while True:
            if lost := link.expire(self._clock.now()):
                self._lose(connection, lost)
            if link.is_joined:
                self._send(connection, self._handler.status())
            else:
                self._send(connection, self._handler.hello(link.proxy_id))
            await asyncio.sleep(link.heartbeat_seconds if link.is_joined else HELLO_INTERVAL_SECONDS)

    def _lose(self, connection: _Connection, proxy_id: str) -> None:
        log.warning("lost proxy %s at %s", proxy_id, connection.endpoint)
        self._handler.proxy_lost(proxy_id)

    def _send(self, connection: _Connection, message: m.NodeMessage) -> None:
        frames = m.encode(connection.link.envelope(), message)
        if connection.socket is None:
            return
        sent = connection.socket.send_multipart(frames, zmq.NOBLOCK)  # done at once: sent, or failed with Again
        assert isinstance(sent, asyncio.Future)
        if sent.exception() is not None:  # the sequence moved on: the proxy will see the gap and ask for a snapshot
            log.warning("queue to the proxy at %s is full; dropped a %s", connection.endpoint, type(message).__name__)
