"""A node's end of the control plane: one connection to each proxy, kept alive and in order.

    dial -> Hello until Welcome -> joined: messages both ways, Status every heartbeat
    gap in the proxy's sequence, Rehello, or another proxy instance at the address -> Hello again, with a snapshot
    silence past the lease -> the proxy is lost: its requests are the node's to abort
    silence, joined or not -> dialled anew, its name looked up again; ZMQ by itself waits for the system to give the
        connection up, a quarter of an hour when the other end vanished without a word
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
from common.logging import FailureLog
from common.plane_security import CURVE_OVERHEAD_BYTES, HANDSHAKE_FAILURES, LOCAL_CONTROL, PlaneSecurity

log = logging.getLogger(__name__)

HELLO_INTERVAL_SECONDS = 0.5
FIRST_LEASE_SECONDS = 5.0
REDIAL_SECONDS = 1.0
# For each attempt; ZMQ makes the next one by itself, a moment to a second later.
CONNECT_SECONDS = 2.0
HANDSHAKE_SECONDS = 4.0
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


@dataclass(frozen=True)
class Loss:
    proxy_id: str
    at: float


class ProxyLink:
    """State of the connection to one proxy address. Pure: times are passed in, nothing is sent from here."""

    def __init__(self, instance_id: str, now: float) -> None:
        self._instance_id = instance_id
        self.proxy_id = ""
        self.is_joined = False
        self.heartbeat_seconds = 1.0
        self.lease_seconds = FIRST_LEASE_SECONDS
        self.refusal: str | None = None
        self.lost: Loss | None = None
        self._sent = 0
        self._received = 0
        self._last_heard = now

    def dialled(self, now: float) -> None:
        """On a new connection silence counts from now on."""
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

    def is_silent(self, now: float) -> bool:
        """Whether nothing came for so long that this connection has to be taken for dead."""
        return now - self._last_heard > (self.lease_seconds if self.is_joined else FIRST_LEASE_SECONDS)

    def expire(self, now: float) -> str | None:
        """The proxy that was lost by its silence, once."""
        if not self.is_joined or not self.is_silent(now):
            return None
        self.lost = Loss(self.proxy_id, now)
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
        self.refusal = self.lost = None
        self.heartbeat_seconds = welcome.heartbeat_seconds
        self.lease_seconds = welcome.lease_seconds


class _Connection:
    """socket: None after a failed handshake, until it is dialled again. failure: what that meant, in words.
    is_dead: set when the socket is to be closed and the proxy dialled anew."""

    def __init__(self, endpoint: str, link: ProxyLink) -> None:
        self.endpoint = endpoint
        self.socket: zmq.asyncio.Socket | None = None
        self.link = link
        self.logged_refusal: str | None = None
        self.failure: str | None = None
        self.is_dead = asyncio.Event()


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
        """Why this node is not joined, of each proxy of which that is known."""
        now = self._clock.now()
        return [reason for c in self._connections if (reason := c.link.refusal or c.failure or _loss(c, now))]

    async def _keep_dialled(self, connection: _Connection) -> None:
        """Dials anew after silence, at once, and after a failed handshake: ZMQ never does after some kinds of those."""
        while True:
            connection.is_dead.clear()
            connection.link.dialled(self._clock.now())
            try:
                connection.socket = self._dial(connection.endpoint)
            except zmq.ZMQError as error:  # no file descriptor is left; that may pass
                connection.failure = f"cannot dial the proxy at {connection.endpoint}: {error.strerror}"
                self._failures.note(self._clock.now(), connection.failure)
                await asyncio.sleep(REDIAL_SECONDS)
                continue
            try:
                await self._use(connection, connection.socket)
            finally:
                connection.socket.close()
                connection.socket = None
            if not connection.is_dead.is_set():
                await asyncio.sleep(REDIAL_SECONDS)

    async def _use(self, connection: _Connection, socket: zmq.asyncio.Socket) -> None:
        """Until a handshake fails, or nothing comes any more."""
        monitor = socket.get_monitor_socket()  # that of `_dial`
        receiving = asyncio.create_task(self._receive(connection, socket))
        failing = asyncio.create_task(self._handshake_failure(connection.endpoint, monitor))
        dying = asyncio.create_task(connection.is_dead.wait())
        try:
            await asyncio.wait({receiving, failing, dying}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # raises
            if failing.done():
                connection.failure = failing.result()
                self._failures.note(self._clock.now(), connection.failure)
        finally:
            for task in (receiving, failing, dying):
                task.cancel()
            await asyncio.gather(receiving, failing, dying, return_exceptions=True)
            socket.disable_monitor()
            monitor.close()

    async def _handshake_failure(self, endpoint: str, monitor: zmq.asyncio.Socket) -> str:
        """Waits for one; what it means, in words."""
        loop = asyncio.get_running_loop()
        connected_at = loop.time()
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_CONNECTED:
                connected_at = loop.time()
                continue
            proxy = f"the proxy at {endpoint}"
            if loop.time() - connected_at > HANDSHAKE_SECONDS / 2:  # half: we may have heard late of the connection
                waited = f"said nothing for {HANDSHAKE_SECONDS:g} s"
                return f"{proxy} took the connection and {waited}: it hangs, or is no proxy"
            return self._security.dialling_failure(event["event"], event["value"], proxy)

    def _dial(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.get_monitor_socket(HANDSHAKE_FAILURES | zmq.EVENT_CONNECTED)  # before it can fail
        self._security.secure_client(socket)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_SECONDS * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
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
                text = f"dropped a message from {connection.endpoint}: {error}"
                self._failures.note(self._clock.now(), text, kind=f"bad message from {connection.endpoint}")
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
            now = self._clock.now()
            if link.is_silent(now):
                if lost := link.expire(now):
                    self._lose(connection, lost)
                connection.is_dead.set()
            if link.is_joined:
                self._send(connection, self._handler.status())
            else:
                self._send(connection, self._handler.hello(link.proxy_id))
            await asyncio.sleep(link.heartbeat_seconds if link.is_joined else HELLO_INTERVAL_SECONDS)

    def _lose(self, connection: _Connection, proxy_id: str) -> None:
        log.warning("lost proxy %s at %s; dialling it again", proxy_id, connection.endpoint)
        self._handler.proxy_lost(proxy_id)

    def _send(self, connection: _Connection, message: m.NodeMessage) -> None:
        frames = m.encode(connection.link.envelope(), message)
        if connection.socket is None:
            return
        sent = connection.socket.send_multipart(frames, zmq.NOBLOCK)  # done at once: sent, or failed with Again
        assert isinstance(sent, asyncio.Future)
        if sent.exception() is not None:  # the sequence moved on: the proxy will see the gap and ask for a snapshot
            text = f"queue to the proxy at {connection.endpoint} is full; dropped a {type(message).__name__}"
            self._failures.note(self._clock.now(), text)


def _loss(connection: _Connection, now: float) -> str | None:
    """In words, until it is joined again."""
    if (lost := connection.link.lost) is None:
        return None
    return f"lost proxy {lost.proxy_id} at {connection.endpoint}, {now - lost.at:.0f} s ago; dialling it again"
