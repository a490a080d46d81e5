"""The proxy's side of every conversation with nodes: who may join, who is gone, which output belongs to which request.

    Hello -> Welcome or Refused, then the snapshot is compared with what this proxy has placed on the node
    gap, or a stranger -> Rehello -> Hello -> what we do not know is aborted, what the node lacks moves, lost
                                            outputs are asked for again
    lease over, Goodbye -> the node is gone, its requests move

Joins the node pool, admission, the control socket and the requests' dispatchers. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Protocol

from common import messages as m
from common.clock import Clock, SystemClock
from common.errors import PeerError, TandemError
from common.logging import FailureLog, log_event
from common.metrics import BAD_MESSAGES, NODES, Metrics, NodeSample
from common.plane_security import LOCAL_CONTROL, PlaneSecurity
from proxy.admission import Admission
from proxy.control import MAX_LINKS, ControlSocket, Link
from proxy.node_pool import NodePool

log = logging.getLogger(__name__)

_ACKNOWLEDGEMENT_POLL_SECONDS = 0.02


class PlacedRequest(Protocol):
    """A request as the control plane sees it (`Dispatcher`). All methods are called on the event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def leg(self) -> int: ...

    @property
    def node_id(self) -> str | None:
        """Where its current leg is placed; None while it waits for a place."""
        ...

    @property
    def missing(self) -> dict[int, int]:
        """Of each choice that goes on the index of the first output that has not come."""
        ...

    @property
    def decode_sequence(self) -> int:
        """Sequence that its Decode had on the node's connection."""
        ...

    def accepted(self) -> None: ...
    def rejected(self, message: m.Rejected) -> None: ...
    def output(self, output: m.RequestOutput) -> bool:
        """An output of the current leg. False when what comes before it is missing; it is not taken then."""
        ...

    def node_lost(self, reason: str) -> None: ...
    def fail(self, error: TandemError) -> None: ...


class Cluster:
    """Runs on one event loop; `run` is its life.

    is_closing: takes no new requests, since the process is to end.
    heartbeat_seconds, lease_seconds: sent to nodes in Welcome.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        pool: NodePool,
        admission: Admission,
        metrics: Metrics,
        security: PlaneSecurity = LOCAL_CONTROL,
        heartbeat_seconds: float = 1.0,
        lease_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self.instance_id = m.new_instance_id()
        self.is_closing = False
        self.pool = pool
        self.admission = admission
        self._metrics = metrics
        self._heartbeat_seconds = heartbeat_seconds
        self._lease_seconds = lease_seconds
        self._welcome = m.Welcome(heartbeat_seconds=heartbeat_seconds, lease_seconds=lease_seconds)
        self._clock = clock or SystemClock()
        self._failures = FailureLog(log)
        self._requests: dict[str, PlacedRequest] = {}
        self._links: dict[bytes, Link] = {}
        self._link_of: dict[str, Link] = {}  # joined nodes, by instance id
        self._num_resets = 0
        self._resets_at_join: dict[str, int] = {}  # by instance id: what came before need not be told
        self._socket = ControlSocket(endpoint, self.instance_id, self.received, self.received_bad, security)

    @property
    def endpoint(self) -> str:
        return self._socket.endpoint

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._socket.run())
                group.create_task(self._beat())
        finally:
            self._socket.close()

    # --- what dispatchers use ---------------------------------------------------------------------------------------

    def add(self, request: PlacedRequest) -> None:
        self._requests[request.request_id] = request

    def discard(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def pause(self, node_id: str) -> None:
        """No new work for this node before its next Status."""
        self.pool.pause(node_id)

    def end_all(self, error: TandemError) -> None:
        """Every request ends with this error; nodes are told."""
        for request in list(self._requests.values()):
            request.fail(error)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def send(self, node_id: str, message: m.ProxyMessage) -> int | None:
        """The message's sequence on the node's connection, or None when it could not be sent."""
        link = self._link_of.get(node_id)
        if link is None or not self._socket.send(link, node_id, message):
            return None
        return link.sent

    async def reset_prefix_caches(self) -> int:
        """Has every joined node empty its prefix cache; how many did.

        Comes back when each of them has got the message or is gone: no later request finds what was cached. Prefill
        nodes go first, so that a decode node that is done can fetch nothing old. A node that is gone and comes back is
        told then (`_hello`).
        """
        self._num_resets += 1
        num_done = 0
        for role in ("prefill", "decode"):
            node_ids = [node.instance_id for node in self.pool if node.role == role]
            sent = [(node_id, self.send(node_id, m.ResetPrefixCache())) for node_id in node_ids]
            for node_id, sequence in sent:
                num_done += sequence is not None and await self._acknowledged(node_id, sequence)
        return num_done

    async def _acknowledged(self, node_id: str, sequence: int) -> bool:
        """When the node has this message; False when its connection is gone, which its lease brings about."""
        link = self._link_of.get(node_id)
        while link is not None and link.acknowledged < sequence:
            if self._link_of.get(node_id) is not link:
                return False
            await asyncio.sleep(_ACKNOWLEDGEMENT_POLL_SECONDS)  # its next Status tells
        return link is not None

    def node_samples(self) -> Iterator[NodeSample]:
        """What /metrics shows of the nodes."""
        for node in self.pool:
            yield NodeSample(node.instance_id, node.role, node.stats, node.hello.layout)

    # --- received ---------------------------------------------------------------------------------------------------

    def received(self, routing_id: bytes, envelope: m.Envelope, message: m.NodeMessage) -> None:
        link = self._link(routing_id)
        if link is None or link.is_blocked:
            return
        now = self._clock.now()
        if isinstance(message, m.Hello):
            link.note(envelope, now)
            self._hello(link, envelope, message)
            return
        has_gap = link.note(envelope, now)
        if link.instance_id != envelope.sender or envelope.receiver != self.instance_id:
            self._rehello(link, envelope.sender, "unknown")
            return
        if has_gap:
            self._rehello(link, envelope.sender, "messages were lost")
        self.pool.heard(link.instance_id, now)
        self._handle(link.instance_id, message)

    def received_bad(self, routing_id: bytes, error: PeerError) -> None:
        """Counted and dropped; a peer that sends many is not listened to any more."""
        self._metrics.counter(BAD_MESSAGES).inc()
        link = self._link(routing_id)
        if link is None or link.is_blocked:
            return
        link.num_bad_messages += 1
        self._warn("control_message_dropped", "bad message", node=link.instance_id or None, reason=error)
        if link.is_blocked and link.instance_id:
            self.lose(link.instance_id, "it sent too many messages that are not valid")

    def _handle(self, node_id: str, message: m.NodeMessage) -> None:
        if isinstance(message, m.Outputs):
            for output in message.outputs:
                self._output(node_id, output)
        elif isinstance(message, m.Status):
            self._status(node_id, message)
        elif isinstance(message, m.Accepted):
            if (request := self._current(node_id, message.request_id, message.leg)) is not None:
                request.accepted()
        elif isinstance(message, m.Rejected):
            if (request := self._current(node_id, message.request_id, message.leg)) is not None:
                request.rejected(message)
        elif isinstance(message, m.Goodbye):
            level = (
                logging.INFO if message.reason == "stopped" else logging.WARNING
            )  # the first is what somebody wanted
            self.lose(node_id, f"it left: {message.reason or 'no reason given'}", level)

    def _hello(self, link: Link, envelope: m.Envelope, hello: m.Hello) -> None:
        node_id = envelope.sender
        link.rehello_sent_at = None
        try:
            self.pool.register(node_id, hello, self._clock.now())
        except PeerError as error:
            self._refuse(link, node_id, str(error))
            return
        is_new = node_id not in self._link_of
        self._join(link, node_id)
        self._socket.send(link, node_id, self._welcome)
        if self._num_resets > self._resets_at_join.setdefault(node_id, self._num_resets):
            self._socket.send(link, node_id, m.ResetPrefixCache())  # it may have been away, or lost the message
        if is_new:
            log_event(log, "node_joined", node=node_id, role=hello.role, num_blocks=hello.stats.num_blocks)
        self._reconcile(node_id, envelope.received, hello.live_requests)
        self._nodes_changed()

    def _refuse(self, link: Link, node_id: str, reason: str) -> None:
        if reason != link.refusal:  # it asks again and again
            self._warn("node_refused", f"refused: {reason}", node=node_id, reason=reason)
        link.refusal = reason
        self._socket.send(link, node_id, m.Refused(reason=reason))

    def _warn(self, event: str, kind: str, **fields: object) -> None:
        """Of what a peer can cause over many connections, too, each kind is said now and then."""
        if (num_untold := self._failures.due(self._clock.now(), kind)) is not None:
            log_event(log, event, level=logging.WARNING, **fields, untold=num_untold or None)

    def _join(self, link: Link, node_id: str) -> None:
        if link.instance_id and link.instance_id != node_id:
            self.lose(link.instance_id, "another instance took over its connection")
        old = self._link_of.get(node_id)
        if old is not None and old is not link:
            self._links.pop(old.routing_id, None)
        self._links[link.routing_id] = link
        link.instance_id = node_id
        self._link_of[node_id] = link

    def _reconcile(self, node_id: str, seen_sequence: int, live: list[m.LiveRequest]) -> None:
        """Makes node and proxy agree on what the node has. A Decode that it cannot have seen yet is not missing."""
        listed = {item.request_id: item for item in live}
        for item in live:
            request = self._current(node_id, item.request_id, item.leg)
            if request is None:
                self._abort_stranger(node_id, item.request_id, item.leg)
            else:
                self._ask_again(node_id, request, request.missing)
        for request in self._placed_on(node_id):
            found = listed.get(request.request_id)
            if (found is None or found.leg != request.leg) and request.decode_sequence <= seen_sequence:
                request.node_lost("the node does not have it any more")

    def _ask_again(self, node_id: str, request: PlacedRequest, missing: dict[int, int]) -> None:
        """Also when nothing seems to miss: an end without a token leaves no other trace."""
        for choice, index in missing.items():
            message = m.Resend(request_id=request.request_id, leg=request.leg, choice=choice, from_index=index)
            self.send(node_id, message)

    def _output(self, node_id: str, output: m.RequestOutput) -> None:
        request = self._current(node_id, output.request_id, output.leg)
        if request is None:
            if output.finish_reason is None:
                self._abort_stranger(node_id, output.request_id, output.leg)
            return
        if not request.output(output):
            self._ask_again(node_id, request, {output.choice: request.missing[output.choice]})

    def _status(self, node_id: str, status: m.Status) -> None:
        node = self.pool.get(node_id)
        assert node is not None  # joined links have a node
        was_draining = node.is_draining
        node.update(status)
        if node.is_draining and not was_draining:
            log_event(log, "node_draining", node=node_id)
        self.admission.pump()

    def _current(self, node_id: str, request_id: str, leg: int) -> PlacedRequest | None:
        """The request, if this is its current leg and the leg is on this node."""
        request = self._requests.get(request_id)
        is_current = request is not None and request.leg == leg and request.node_id == node_id
        return request if is_current else None

    def _placed_on(self, node_id: str) -> list[PlacedRequest]:
        return [request for request in self._requests.values() if request.node_id == node_id]

    def _abort_stranger(self, node_id: str, request_id: str, leg: int) -> None:
        self.send(node_id, m.Abort(request_id=request_id, leg=leg, reason="not a current leg of this proxy"))

    # --- links, leases ----------------------------------------------------------------------------------------------

    def _link(self, routing_id: bytes) -> Link | None:
        link = self._links.get(routing_id)
        if link is None and len(self._links) < MAX_LINKS:
            link = self._links[routing_id] = Link(routing_id, last_heard=self._clock.now())
        return link

    def _rehello(self, link: Link, receiver: str, reason: str) -> None:
        """At most one at a time; asked again when no answer came."""
        now = self._clock.now()
        if link.rehello_sent_at is not None and now - link.rehello_sent_at < self._heartbeat_seconds:
            return
        link.rehello_sent_at = now
        log_event(log, "node_asked_for_hello", node=receiver, reason=reason)
        self._socket.send(link, receiver, m.Rehello(reason=reason))

    def lose(self, node_id: str, reason: str, level: int = logging.WARNING) -> None:
        """The node is gone; its requests move."""
        if self.pool.remove(node_id) is None:
            return
        if (link := self._link_of.pop(node_id, None)) is not None:
            link.instance_id = ""
        log_event(log, "node_lost", level=level, node=node_id, reason=reason)
        for request in self._placed_on(node_id):
            request.node_lost(reason)
        self._nodes_changed()

    def _nodes_changed(self) -> None:
        for role in ("prefill", "decode"):
            self._metrics.gauge(NODES, role=role).set(len(self.pool.with_role(role)))
        self.admission.pump()

    async def _beat(self) -> None:
        last = self._clock.now()
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            now = self._clock.now()
            # After a pause of our own, messages that prove nodes alive may still be unread.
            if now - last < self._lease_seconds:
                self._expire(now)
            last = now
            for node in self.pool:
                self.send(node.instance_id, m.Heartbeat())

    def _expire(self, now: float) -> None:
        for node_id in self.pool.expired(now):
            self.lose(node_id, f"silent for more than {self._lease_seconds:g} s")
        for link in list(self._links.values()):
            if not link.instance_id and now - link.last_heard > self._lease_seconds:
                del self._links[link.routing_id]
