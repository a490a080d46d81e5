"""The fetch client: one receiver thread that dials servers and is the only one that writes fetched blocks.

Owners talk to it from any thread through a mailbox and never wait. It knows no engine: where blocks may be written is
granted to it, what came is told to listeners.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence

import zmq

from common.clock import Clock, SystemClock
from common.errors import UnavailableError
from common.kv_layout import KVLayout
from common.messages import Source
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.link import Link, tell_ended
from kvtransfer.mailbox import Mailbox
from kvtransfer.session import FailCode, FetchTimes
from kvtransfer.session_client import DEFAULT_WINDOW_BYTES, ClientSession, TellEnded
from kvtransfer.stats import TransferStats
from kvtransfer.store import FetchListener, FetchRequest
from kvtransfer.transports.registry import TransportSet

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.25
_Act = Callable[[float], None]
_LinkKey = tuple[str, tuple[str, ...]]


class ClientHandle:
    """FetchHandle of one fetch. Both methods may be called from any thread and after the fetch has ended."""

    def __init__(self, number: int, client: FetchClient) -> None:
        self._number = number
        self._client = client

    def grant(self, first_block: int, block_ids: Sequence[int]) -> None:
        self._client._post_grant(self._number, first_block, list(block_ids))

    def cancel(self) -> None:
        self._client._post_cancel(self._number)


class FetchClient:
    """Fetches blocks into `memory`, the bytes of the whole pool, writable.

    window_bytes: how much a server may have on the way for one fetch. idle_seconds: after so long without a fetch a
    connection is closed. transports: instead of the usual ones, which reach this machine only.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: memoryview,
        instance_id: str,
        lease_seconds: float = 10.0,
        *,
        connect_seconds: float = 3.0,
        progress_seconds: float = 30.0,
        hold_seconds: float = 30.0,
        idle_seconds: float = 30.0,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        num_layer_groups: int = 1,
        transports: TransportSet | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.stats = TransferStats()
        self._memory = memory.cast("B")
        if self._memory.readonly:
            raise ValueError("the pool's memory is read-only, fetched blocks could not be written")
        self._plan = LayoutPlan(layout, num_layer_groups)
        self._instance_id = instance_id
        self._times = FetchTimes(lease_seconds, progress_seconds, hold_seconds, connect_seconds)
        self._idle_seconds = idle_seconds
        self._window_bytes = window_bytes
        self._transports = transports or TransportSet()
        self._clock = clock or SystemClock()
        self._numbers = itertools.count(1)
        self._mailbox: Mailbox[_Act] = Mailbox()
        self._poller = zmq.Poller()
        self._links: dict[_LinkKey, Link] = {}
        self._must_poll_soon = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="fetch-client", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it works: False before `start`, after `close` and if its thread has failed."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._poller.register(self._mailbox.fd, zmq.POLLIN)
        self._thread.start()

    def open(self, source: Source, request: FetchRequest, listener: FetchListener) -> ClientHandle:
        """Begins a fetch from `source`, with no credit: the server computes, and blocks come once they are granted.

        Never blocks; may be called from any thread. Raises UnavailableError when the client is closed.
        """
        number = next(self._numbers)
        if not self._mailbox.put(lambda now: self._open(now, source, number, request, listener)):
            raise UnavailableError("the fetch client is closed")
        return ClientHandle(number, self)

    def close(self) -> None:
        """Cancels what is open and ends the thread; every listener has been told `ended` when this returns."""
        self._mailbox.put(self._begin_close)
        if self._thread.ident is None:
            self._shut()
        else:
            self._thread.join()

    def _post_grant(self, number: int, first_block: int, block_ids: list[int]) -> None:
        self._mailbox.put(lambda now: self._grant(now, number, first_block, block_ids))

    def _post_cancel(self, number: int) -> None:
        self._mailbox.put(lambda now: self._cancel(now, number))

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception:
            logger.exception("the fetch client failed")
        finally:
            self._shut()

    def _turn(self) -> None:
        self._poller.poll(self._timeout_ms())
        self._must_poll_soon = False
        now = self._clock.now()
        for act in self._mailbox.take_all():
            act(now)
        for link in self._links.values():
            self._must_poll_soon |= link.receive(now)
            link.tick(now)
        self._drop_idle_links(now)

    def _timeout_ms(self) -> int | None:
        if self._must_poll_soon:
            return 0
        deadlines = [link.next_deadline() for link in self._links.values()]
        deadlines += [link.idle_since + self._idle_seconds for link in self._links.values() if not link.listeners]
        nearest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if nearest is None else max(0, math.ceil((nearest - self._clock.now()) * 1000))

    def _open(self, now: float, source: Source, number: int, request: FetchRequest, listener: FetchListener) -> None:
        key = (source.instance_id, tuple(source.endpoints))
        if key not in self._links or self._links[key].is_closed:
            self._links[key] = self._new_link(source, now)
        self._links[key].open(now, number, request, listener)

    def _new_link(self, source: Source, now: float) -> Link:
        session = ClientSession(self._plan, self._instance_id, source.instance_id, now, self._times, self._window_bytes)
        return Link(
            source,
            session,
            self._memory,
            self.stats,
            self._transports,
            self._poller,
            connect_seconds=self._times.connect_seconds,
            max_unit_bytes=self._plan.max_unit_bytes,
            now=now,
        )

    def _link_of(self, number: int) -> Link | None:
        return next((link for link in self._links.values() if number in link.listeners), None)

    def _grant(self, now: float, number: int, first_block: int, block_ids: list[int]) -> None:
        if link := self._link_of(number):
            link.grant(now, number, first_block, block_ids)

    def _cancel(self, now: float, number: int) -> None:
        if link := self._link_of(number):
            link.cancel(now, number)

    def _drop_idle_links(self, now: float) -> None:
        for key, link in list(self._links.items()):
            if not link.listeners and now >= link.idle_since + self._idle_seconds and not link.is_closed:
                link.close(now, FailCode.CANCELLED, "idle", 0.0)
            if link.is_closed:
                del self._links[key]

    def _begin_close(self, now: float) -> None:
        self._is_closing = True

    def _shut(self) -> None:
        """Opens that nobody took any more become ended fetches too."""
        self._is_closing = True
        now = self._clock.now()
        for act in self._mailbox.close():
            act(now)
        for link in self._links.values():
            self._close_link(link, now)
        self._links.clear()
        self._transports.close()

    def _close_link(self, link: Link, now: float) -> None:
        try:
            link.close(now, FailCode.CLOSING, "the fetch client closes", _FLUSH_SECONDS)
        except Exception:
            logger.exception("a fetch connection failed to close")
            for number, listener in list(link.listeners.items()):
                tell_ended(listener, TellEnded(number, 0, FailCode.INTERNAL_ERROR, "the fetch client failed"))
