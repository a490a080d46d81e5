"""The fetch server: one thread that joins a BlockStore, a ServerSession and the ports that clients dial.

Decides nothing about a fetch (session_server.py does) and knows nothing about engines (the store does). Store events
come from any thread through a mailbox, which wakes the thread; otherwise it sleeps until a message or a deadline.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

import zmq

from common.clock import Clock, SystemClock
from common.errors import PeerError
from common.logging import FailureLog
from kvtransfer.endpoints import advertised
from kvtransfer.frames import MAX_HEADER_BYTES, Buffer, decode_from_client, encode, num_bytes
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.mailbox import Mailbox
from kvtransfer.served_fetch import Outgoing
from kvtransfer.session import FailCode, FetchTimes
from kvtransfer.session_server import OpenStore, ReleaseStore, ServerEffect, ServerLimits, ServerSession
from kvtransfer.stats import TransferStats
from kvtransfer.store import BlockStore, FetchKey
from kvtransfer.transports.base import SendStatus, ServerPort
from kvtransfer.transports.registry import TransportSet

logger = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 64
_FRAMES_PER_PEER_AND_TURN = 8  # about 8 MiB: a few milliseconds until a cancel is noticed
_RETRY_MS = 5  # when a peer's queue is full; ZMQ does not say when it no longer is
_FLUSH_SECONDS = 0.25

_Act = Callable[[float], list[ServerEffect]]


class FetchServer:
    """Serves a store's blocks at `endpoints` (tcp://HOST:PORT, ipc://PATH, ipc://*; port 0 picks a free one).

    advertise_host: what peers are to dial instead of the bound host. transports: instead of the usual ones, which serve
    this machine only.
    """

    def __init__(
        self,
        store: BlockStore,
        instance_id: str,
        endpoints: Sequence[str],
        lease_seconds: float = 10.0,
        *,
        progress_seconds: float = 30.0,
        hold_seconds: float = 30.0,
        limits: ServerLimits | None = None,
        num_layer_groups: int = 1,
        advertise_host: str | None = None,
        transports: TransportSet | None = None,
        clock: Clock | None = None,
    ) -> None:
        times = FetchTimes(lease_seconds, progress_seconds, hold_seconds)
        self.stats = TransferStats()
        self._store = store
        self._memory = memoryview(store.memory).cast("B")
        self._session = ServerSession(LayoutPlan(store.layout, num_layer_groups), instance_id, times, limits)
        self._session.dropped_frames = self.stats.dropped_frames
        self._wanted_endpoints = list(endpoints)
        self._advertise_host = advertise_host
        self._transports = transports or TransportSet()
        self._clock = clock or SystemClock()
        self._failures = FailureLog(logger)
        self._mailbox: Mailbox[_Act] = Mailbox()
        self._ports: list[ServerPort] = []
        self._poller = zmq.Poller()
        self._must_poll_soon = self._must_retry = False
        self._close_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="fetch-server", daemon=True)

    @property
    def num_open_fetches(self) -> int:
        return self._session.num_open_fetches

    @property
    def is_alive(self) -> bool:
        """Whether it serves: False before `start`, after `close` and if its thread has failed."""
        return self._thread.is_alive()

    def start(self) -> list[str]:
        """Binds and begins to serve; returns the endpoints to tell peers.

        Raises ConfigError when one is taken or not allowed.
        """
        try:
            for transport, endpoints in self._transports.group(self._wanted_endpoints):
                self._ports.append(transport.bind(endpoints, MAX_HEADER_BYTES))
            bound = [advertised(endpoint, self._advertise_host) for port in self._ports for endpoint in port.endpoints]
        except BaseException:
            self._close_ports()
            raise
        self._poller.register(self._mailbox.fd, zmq.POLLIN)
        for port in self._ports:
            for waitable in port.waitables():
                self._poller.register(waitable, zmq.POLLIN)
        self._thread.start()
        return bound

    def drain(self) -> None:
        """Refuses new fetches from now on; open ones go on."""
        self._mailbox.put(self._begin_drain)

    def close(self, grace_seconds: float = 0.0) -> None:
        """Refuses new fetches, lets open ones finish for `grace_seconds`, fails the rest. Blocks until all is closed.

        Every opened fetch has been released at the store when this returns.
        """
        if self._thread.ident is None:
            self._close_ports()
            return
        self._mailbox.put(lambda now: self._begin_close(now + grace_seconds))
        self._thread.join()

    # --- the thread

    def _begin_drain(self, now: float) -> list[ServerEffect]:
        self._session.drain()
        return []

    def _begin_close(self, close_at: float) -> list[ServerEffect]:
        self._session.drain()
        self._close_at = close_at
        return []

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._turn()
        except Exception:
            logger.exception("the fetch server failed")
        finally:
            self._shut()

    def _is_finished(self) -> bool:
        if self._close_at is None:
            return False
        return not self._session.num_open_fetches or self._clock.now() >= self._close_at

    def _turn(self) -> None:
        self._poller.poll(self._timeout_ms())
        self._must_poll_soon = self._must_retry = False
        now = self._clock.now()
        for act in self._mailbox.take_all():
            self._perform(act(now))
        for index in range(len(self._ports)):
            self._receive(index, now)
        self._perform(self._session.tick(now))
        self._send(now)

    def _timeout_ms(self) -> int | None:
        if self._must_poll_soon:
            return 0
        if self._must_retry:  # whatever is due as well, most likely it is a frame that does not get out
            return _RETRY_MS
        deadlines = [self._session.next_deadline(), self._close_at]
        nearest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if nearest is None else max(0, math.ceil((nearest - self._clock.now()) * 1000))

    def _receive(self, index: int, now: float) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            received = self._ports[index].receive()
            if received is None:
                return
            peer, parts = received
            self._perform(self._take((index, peer), parts, now))
        self._must_poll_soon = True

    def _take(self, peer: tuple[int, bytes], parts: list[memoryview], now: float) -> list[ServerEffect]:
        self.stats.num_bytes_received += num_bytes(parts)
        try:
            message = decode_from_client(parts)
        except PeerError as error:
            text = f"a fetch client sent a bad message: {error.message[:256]}"
            self._failures.note(now, text, kind="bad message")
            return self._session.receive_invalid(now, peer)
        return self._session.receive(now, peer, message)

    def _perform(self, effects: list[ServerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenStore):
                self._open(effect)
            else:
                self._release(effect)

    def _open(self, effect: OpenStore) -> None:
        try:
            self._store.open(effect.key, effect.request, _Events(effect.key, self._session, self._mailbox))
        except Exception:
            logger.exception("the store failed to open a fetch")
            self._perform(self._session.failed(effect.key, FailCode.INTERNAL_ERROR, "the server failed to open it"))

    def _release(self, effect: ReleaseStore) -> None:
        self.stats.fetches[effect.outcome] += 1
        if effect.outcome not in (FailCode.CANCELLED, "complete"):
            logger.info("fetch %s/%d ended: %s", *effect.key, effect.outcome)
        try:
            self._store.release(effect.key)
        except Exception:
            logger.exception("the store failed to release a fetch")

    # --- sending

    def _send(self, now: float) -> None:
        for peer in self._session.peers():
            for _ in range(_FRAMES_PER_PEER_AND_TURN):
                outgoing = self._session.next_send(now, peer)
                if outgoing is None or not self._send_one(outgoing, now):
                    break
            else:
                self._must_poll_soon = True

    def _send_one(self, outgoing: Outgoing, now: float) -> bool:
        index, name = outgoing.peer
        parts = encode(outgoing.frame, self._payload(outgoing))
        status = self._ports[index].send(name, parts)
        if status is SendStatus.SENT:
            self.stats.num_bytes_sent += num_bytes(parts)
            self._session.mark_sent(outgoing, now)
        elif status is SendStatus.FULL:
            self._must_retry = True
        else:
            self._perform(self._session.peer_gone(outgoing.peer))
        return status is SendStatus.SENT

    def _payload(self, outgoing: Outgoing) -> list[Buffer]:
        if outgoing.payload is not None:
            return [outgoing.payload]
        return [self._memory[pool_range] for pool_range in outgoing.ranges]

    # --- the end

    def _shut(self) -> None:
        self._perform(self._session.shut("the server closes"))
        try:
            self._must_retry = False
            self._send(self._clock.now())
        except Exception:
            logger.exception("the fetch server could not tell its clients that it closes")
        self._close_ports(_FLUSH_SECONDS)

    def _close_ports(self, flush_seconds: float = 0.0) -> None:
        for port in self._ports:
            port.close(flush_seconds)
        self._ports.clear()
        self._transports.close()
        self._mailbox.close()


class _Events:
    """StoreEvents of one fetch: each call becomes a turn of the server's thread."""

    def __init__(self, key: FetchKey, session: ServerSession, mailbox: Mailbox[_Act]) -> None:
        self._key = key
        self._session = session
        self._mailbox = mailbox

    def accepted(self, num_cached_tokens: int) -> None:
        self._mailbox.put(lambda now: self._session.accepted(self._key, num_cached_tokens))

    def filled(self, first_block: int, block_ids: Sequence[int]) -> None:
        ids = list(block_ids)
        self._mailbox.put(lambda now: self._session.filled(self._key, first_block, ids, now))

    def progress(self, num_computed_tokens: int) -> None:
        self._mailbox.put(lambda now: self._session.progress(self._key, num_computed_tokens, now))

    def hidden(self, rows: bytes) -> None:
        self._mailbox.put(lambda now: self._session.hidden(self._key, rows, now))

    def computed(self) -> None:
        self._mailbox.put(lambda now: self._session.computed(self._key, now))

    def failed(self, code: str, message: str) -> None:
        self._mailbox.put(lambda now: self._session.failed(self._key, code, message))
