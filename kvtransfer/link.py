"""One server instance as a client reaches it: the endpoints left to try, the connection, its session, its listeners.

Carries out the session's effects. Everything here runs on the client's receiver thread, which is the only writer of
the pool; a listener's `ended` is called from it too, so no write to that fetch's blocks can follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from common.errors import ConfigError, PeerError
from common.messages import Source
from kvtransfer.endpoints import in_dialing_order
from kvtransfer.frames import MAX_HIDDEN_BYTES, ClientFrame, decode_from_server, encode, num_bytes
from kvtransfer.requested_fetch import WritePool
from kvtransfer.session import FailCode
from kvtransfer.session_client import (
    ClientEffect,
    ClientSession,
    Disconnect,
    SendFrame,
    TellAccepted,
    TellEnded,
    TellHidden,
    TellProgress,
)
from kvtransfer.stats import COMPLETE, TransferStats
from kvtransfer.store import FetchListener, FetchRequest
from kvtransfer.transports.base import Connection
from kvtransfer.transports.registry import TransportSet

logger = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 32
_T = TypeVar("_T")


class Link:
    """is_closed: of no more use; whatever was open on it has ended."""

    def __init__(
        self,
        source: Source,
        session: ClientSession,
        memory: memoryview,
        stats: TransferStats,
        transports: TransportSet,
        poller: zmq.Poller,
        *,
        connect_seconds: float,
        max_unit_bytes: int,
        now: float,
    ) -> None:
        self.source = source
        self.listeners: dict[int, FetchListener] = {}
        self.is_closed = False
        self.idle_since = now
        self._session = session
        self._session.dropped_frames = stats.dropped_frames
        self._memory = memory
        self._stats = stats
        self._transports = transports
        self._poller = poller
        self._connect_seconds = connect_seconds
        self._max_message_bytes = max(MAX_HIDDEN_BYTES, max_unit_bytes)
        self._untried = in_dialing_order(source.endpoints)
        self._connection: Connection | None = None
        self._now = now
        self._failure = Disconnect(FailCode.UNREACHABLE, f"no endpoint of {list(source.endpoints)} can be reached")
        self._dial_next()

    # --- from the owner

    def open(self, now: float, number: int, request: FetchRequest, listener: FetchListener) -> None:
        self.listeners[number] = listener
        self._perform(now, self._session.open(now, number, request))
        if self.is_closed:
            self._perform(now, self._session.lost(self._failure.code, self._failure.message))

    def grant(self, now: float, number: int, first_block: int, block_ids: Sequence[int]) -> None:
        self._perform(now, self._session.grant(now, number, first_block, block_ids))

    def cancel(self, now: float, number: int) -> None:
        self._perform(now, self._session.cancel(number))

    def close(self, now: float, code: str, message: str, flush_seconds: float) -> None:
        """Ends everything that is open, and tells the server."""
        self._perform(now, self._session.cancel_all(code, message))
        self.is_closed = True
        self._hang_up(flush_seconds)

    # --- from the connection, and from time

    def receive(self, now: float) -> bool:
        """Takes in what has come; True when there may be more."""
        # Asked before reading: what came before the loss is still there to be read.
        lost_reason = self._connection.lost_reason() if self._connection else None
        for _ in range(_MESSAGES_PER_TURN):
            parts = self._connection.receive() if self._connection else None
            if parts is None:
                break
            self._take(now, parts)
        else:
            return True
        if lost_reason is not None and self._connection is not None:
            self._lose(now, lost_reason)
        return False

    def tick(self, now: float) -> None:
        self._perform(now, self._session.tick(now))

    def next_deadline(self) -> float | None:
        return self._session.next_deadline()

    def _take(self, now: float, parts: list[memoryview]) -> None:
        self._stats.num_bytes_received += num_bytes(parts)
        try:
            message = decode_from_server(parts)
        except PeerError as error:
            logger.warning("fetch server %s sent a bad message: %s", self.source.instance_id, error.message[:256])
            self._perform(now, self._session.receive_invalid())
            return
        self._perform(now, self._session.receive(now, message), message.payload)

    def _lose(self, now: float, reason: str) -> None:
        code = FailCode.CONNECTION_LOST if self._session.is_established else FailCode.UNREACHABLE
        self._disconnect(now, Disconnect(code, f"instance {self.source.instance_id}: {reason}"))

    # --- effects

    def _perform(self, now: float, effects: list[ClientEffect], payload: Sequence[memoryview] = ()) -> None:
        for effect in effects:
            if isinstance(effect, SendFrame):
                self._send(now, effect.frame)
            elif isinstance(effect, WritePool):
                self._memory[effect.pool] = payload[effect.part]
            elif isinstance(effect, Disconnect):
                self._disconnect(now, effect)
            else:
                self._tell(now, effect, payload)

    def _send(self, now: float, frame: ClientFrame) -> None:
        if self._connection is None:
            return
        parts = encode(frame)
        if self._connection.send(parts):
            self._stats.num_bytes_sent += num_bytes(parts)
        elif (lost_reason := self._connection.lost_reason()) is not None:  # ZMQ has no room for one that is lost either
            self._lose(now, lost_reason)
        else:
            text = f"instance {self.source.instance_id} does not read what it is sent"
            self._disconnect(now, Disconnect(FailCode.CONNECTION_LOST, text))

    def _tell(
        self,
        now: float,
        effect: TellAccepted | TellProgress | TellHidden | TellEnded,
        payload: Sequence[memoryview],
    ) -> None:
        listener = self.listeners[effect.number]
        if isinstance(effect, TellAccepted):
            self._call(listener.accepted, effect.num_cached_tokens)
        elif isinstance(effect, TellProgress):
            self._call(listener.progress, effect.num_computed_tokens)
        elif isinstance(effect, TellHidden):
            self._call(listener.hidden, bytes(payload[0]))
        else:
            del self.listeners[effect.number]
            self.idle_since = now
            self._stats.fetches[effect.code or COMPLETE] += 1
            tell_ended(listener, effect)

    def _call(self, tell: Callable[[_T], None], value: _T) -> None:
        try:
            tell(value)
        except Exception:
            logger.exception("a fetch listener failed")

    # --- connections

    def _disconnect(self, now: float, failure: Disconnect) -> None:
        """Tries the next endpoint if this one never answered; otherwise everything that was open ends."""
        self._hang_up()
        self._failure = failure
        if not self._session.is_established and self._dial_next():
            self._perform(now, self._session.redial(now))
        else:
            self.is_closed = True
            self._perform(now, self._session.lost(self._failure.code, self._failure.message))

    def _dial_next(self) -> bool:
        while self._untried:
            endpoint = self._untried.pop(0)
            try:
                transport = self._transports.for_endpoint(endpoint)
                self._connection = transport.connect(endpoint, self._max_message_bytes, self._connect_seconds)
            except (ConfigError, zmq.ZMQError) as error:  # the latter when no file descriptor is left
                self._failure = Disconnect(FailCode.UNREACHABLE, str(error))
                continue
            for waitable in self._connection.waitables():
                self._poller.register(waitable, zmq.POLLIN)
            return True
        self.is_closed = True
        return False

    def _hang_up(self, flush_seconds: float = 0.0) -> None:
        if self._connection is None:
            return
        for waitable in self._connection.waitables():
            self._poller.unregister(waitable)
        self._connection.close(flush_seconds)
        self._connection = None


def tell_ended(listener: FetchListener, effect: TellEnded) -> None:
    try:
        listener.ended(num_complete_blocks=effect.num_complete_blocks, error=error_text(effect.code, effect.message))
    except Exception:
        logger.exception("a fetch listener failed")


def error_text(code: str | None, message: str) -> str | None:
    """What FetchListener.ended is told: None, "cancelled", or "code: message"."""
    if code is None or not message:
        return code
    return f"{code}: {message}"
