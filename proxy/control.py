"""The proxy's end of the control connections: one ROUTER socket that nodes dial, and the order of messages on each.

A `Link` is one connection of one node; it counts sequences and finds gaps. `ControlSocket` sends and receives and knows
nothing of what messages mean. Sends never wait: what cannot be sent now is reported as not sent. With a cluster secret
only nodes that have it get as far as sending; who failed to is said in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from common import messages as m
from common.clock import SystemClock
from common.errors import ConfigError, PeerError
from common.logging import FailureLog, log_event
from common.plane_security import (
    CURVE_OVERHEAD_BYTES,
    HANDSHAKE_FAILURES,
    LOCAL_CONTROL,
    PlaneSecurity,
)

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 10_000
MAX_BAD_MESSAGES = 20
MAX_LINKS = 4096
CLOSE_LINGER_MILLISECONDS = 200


@dataclass(eq=False)
class Link:
    """One connection. `instance_id` is empty until a Hello was accepted on it.

    sent, received: last sequence in each direction. acknowledged: the last of `sent` that the node says it has.
    """

    routing_id: bytes
    instance_id: str = ""
    sent: int = 0
    received: int = 0
    acknowledged: int = 0
    last_heard: float = 0.0
    rehello_sent_at: float | None = None
    num_bad_messages: int = 0
    refusal: str | None = None

    @property
    def is_blocked(self) -> bool:
        """It sent so much nonsense that nothing more is read from it."""
        return self.num_bad_messages > MAX_BAD_MESSAGES

    def note(self, envelope: m.Envelope, now: float) -> bool:
        """Counts a received message; True when messages before it were lost."""
        has_gap = envelope.sequence != self.received + 1
        self.received = envelope.sequence
        self.acknowledged = min(envelope.received, self.sent)  # a count of an earlier connection says nothing here
        self.last_heard = now
        return has_gap


Received = Callable[[bytes, m.Envelope, m.NodeMessage], None]
Refused = Callable[[bytes, PeerError], None]


class ControlSocket:
    """Binds `endpoint`; raises ConfigError when it cannot, or may not without a secret. Belongs to one event loop.

    on_message, on_bad_message: called on the loop with the routing id of the connection; must not block.
    """

    def __init__(
        self,
        endpoint: str,
        instance_id: str,
        on_message: Received,
        on_bad_message: Refused,
        security: PlaneSecurity = LOCAL_CONTROL,
    ) -> None:
        security.check(endpoint)
        self._security = security
        self._instance_id = instance_id
        self._on_message = on_message
        self._on_bad_message = on_bad_message
        self._context = zmq.asyncio.Context()
        self._allow_list = security.start_allow_list(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        security.secure_server(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen for nodes on {endpoint}: {error.strerror}") from None

    @property
    def endpoint(self) -> str:
        """The address it is bound to, with the real port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Hands every message to `on_message` until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._report_failures())

    async def _report_failures(self) -> None:
        failures, clock = FailureLog(log), SystemClock()
        while True:
            event = await recv_monitor_message(self._monitor)
            failures.note(clock.now(), self._security.serving_failure(event["event"], event["value"], self.endpoint))

    async def _receive(self) -> None:
        while True:
            routing_id, *frames = await self._socket.recv_multipart()
            try:
                envelope, message = m.decode_from_node(frames)
            except PeerError as error:
                self._on_bad_message(routing_id, error)
                continue
            try:
                self._on_message(routing_id, envelope, message)
            except Exception:  # one message must not end the control plane
                log.exception("control_message_failed type=%s", type(message).__name__)

    def send(self, link: Link, receiver: str, message: m.ProxyMessage) -> bool:
        """False when the node's connection is gone or its queue is full; the node will see a gap in the latter case."""
        link.sent += 1
        envelope = m.Envelope(self._instance_id, receiver, link.sent, link.received)
        frames = [link.routing_id, *m.encode(envelope, message)]
        # With NOBLOCK the future is done when it comes back.
        done = cast("asyncio.Future[object]", self._socket.send_multipart(frames, zmq.NOBLOCK))
        if (error := done.exception()) is not None:
            log_event(
                log, "control_send_failed", level=logging.DEBUG, node=receiver, type=type(message).__name__, error=error
            )
        return error is None

    def close(self) -> None:
        """The last aborts get a moment to leave; a node that is gone does not hold us up for longer."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=CLOSE_LINGER_MILLISECONDS)
        if self._allow_list is not None:
            self._allow_list.stop()
        self._context.term()
