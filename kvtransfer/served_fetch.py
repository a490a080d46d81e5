"""One open fetch as its server sees it: what the store has filled, what the client allows, what to send next.

Sans-IO: decides frames and pool ranges; session_server.py gives it frames and events, and takes the failures it raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypedDict

from kvtransfer.frames import (
    MAX_DATA_UNITS,
    MAX_HIDDEN_BYTES,
    Accepted,
    Credit,
    Data,
    End,
    Fail,
    Fetch,
    FetchId,
    Hidden,
    KeepAlive,
    ServerFrame,
    ServerKeepAlive,
)
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.session import Arrival, FailCode, FetchFailure, FetchTimes, IncomingSequence, keepalive_seconds
from kvtransfer.store import FetchKey, FetchRequest

GATHER_BYTES = 1 << 20

Peer = tuple[int, bytes]  # names a connection within one server: index of the port, name there


@dataclass(frozen=True)
class Outgoing:
    """A frame to send to a peer. Its payload is either bytes or ranges of the pool."""

    peer: Peer
    frame: ServerFrame
    payload: bytes | None = None
    ranges: Sequence[slice] = ()


class _Ids(TypedDict):
    fetch_id: FetchId
    sequence: int


@dataclass(frozen=True)
class _ReadyUnit:
    block: int
    group: int
    block_id: int


class ServedFetch:
    """Raises FetchFailure from any method when the fetch must end."""

    def __init__(
        self, frame: Fetch, peer: Peer, plan: LayoutPlan, times: FetchTimes, peer_lease: float, now: float
    ) -> None:
        self.fetch_id: FetchId = frame.fetch_id
        self.peer = peer
        self.request = _request_of(frame)
        self._plan = plan
        self._times = times
        self._num_blocks = plan.layout.num_blocks_for(len(frame.tokens))
        self._incoming = IncomingSequence()
        self._incoming.judge(frame.sequence)
        self._sequence = 0
        # what the store said
        self._num_cached_tokens: int | None = None
        self._num_computed_tokens = 0
        self._num_filled = 0
        self._ready: deque[_ReadyUnit] = deque()
        self._hidden: deque[bytes] = deque()
        self._is_started = False
        self._is_computed = False
        # what the client allows, and what it was sent
        self._first_block: int | None = None if frame.units else self._num_blocks
        self._credit = 0
        self._num_sent = 0
        self._is_accept_sent = False
        self._is_end_sent = False
        # clocks
        self._opened_at = self._moved_at = now
        self._keepalive_seconds = keepalive_seconds(peer_lease)
        self._keepalive_at = now + self._keepalive_seconds

    @property
    def key(self) -> FetchKey:
        return self.fetch_id

    @property
    def has_room(self) -> bool:
        """The client has blocks for it: what is computed for it will leave."""
        return self._first_block is not None

    @property
    def is_queued(self) -> bool:
        """The store has not begun with it."""
        return self._num_cached_tokens is None

    @property
    def is_computed(self) -> bool:
        return self._is_computed

    # --- from the client

    def receive_credit(self, frame: Credit, now: float) -> None:
        if self._incoming.judge(frame.sequence) is Arrival.NEXT:
            self._allow(frame.first_block, frame.num_units, now)

    def receive_keepalive(self, frame: KeepAlive, now: float) -> None:
        if self._incoming.judge_repeat(frame.sequence) is Arrival.NEXT and frame.first_block is not None:
            self._allow(frame.first_block, frame.num_units, now)

    def _allow(self, first_block: int, num_units: int, now: float) -> None:
        if self._first_block is None:
            self._start_at(first_block)
        elif first_block != self._first_block:
            text = f"credit names first block {first_block}, an earlier one named {self._first_block}"
            raise FetchFailure(FailCode.PROTOCOL_ERROR, text)
        if num_units > self._credit:
            self._credit = num_units
            self._moved_at = now

    def _start_at(self, first_block: int) -> None:
        if first_block > self._num_blocks:
            text = f"credit names first block {first_block} of a fetch of {self._num_blocks} blocks"
            raise FetchFailure(FailCode.PROTOCOL_ERROR, text)
        self._first_block = first_block
        while self._ready and self._ready[0].block < first_block:
            self._ready.popleft()

    # --- from the store

    def accepted(self, num_cached_tokens: int) -> None:
        self._num_cached_tokens = num_cached_tokens
        self._num_computed_tokens = max(self._num_computed_tokens, num_cached_tokens)

    def filled(self, first_block: int, block_ids: Sequence[int], now: float) -> None:
        """Blocks come in order, each once: a store that does otherwise is at fault."""
        end = first_block + len(block_ids)
        if first_block != self._num_filled or end > self._num_blocks:
            text = f"store filled blocks {first_block} to {end} after {self._num_filled} of {self._num_blocks}"
            raise FetchFailure(FailCode.INTERNAL_ERROR, text)
        self._num_filled = end
        for block, block_id in enumerate(block_ids, first_block):
            if self.request.units and block >= (self._first_block or 0):
                self._ready.extend(_ReadyUnit(block, group, block_id) for group in range(self._plan.num_groups))
        # Cached blocks are filled at once, while the rest may still wait in the queue.
        self._moved(now, is_started=end * self._plan.layout.block_size > (self._num_cached_tokens or 0))

    def progress(self, num_computed_tokens: int, now: float) -> None:
        if num_computed_tokens > self._num_computed_tokens:
            self._num_computed_tokens = num_computed_tokens
            self._moved(now, is_started=True)

    def hidden(self, rows: bytes, now: float) -> None:
        if len(rows) > MAX_HIDDEN_BYTES:
            text = f"hidden states have {len(rows)} bytes, at most {MAX_HIDDEN_BYTES} are sent at once"
            raise FetchFailure(FailCode.INTERNAL_ERROR, text)
        if self.request.hidden != "none":
            self._hidden.append(rows)
        self._moved(now, is_started=True)

    def computed(self, now: float) -> None:
        self._is_computed = True
        self._num_computed_tokens = max(self._num_computed_tokens, self._num_filled_tokens())
        self._moved(now, is_started=True)

    def _num_filled_tokens(self) -> int:
        return min(self._num_filled * self._plan.layout.block_size, len(self.request.tokens))

    def _moved(self, now: float, *, is_started: bool) -> None:
        self._moved_at = now
        self._is_started |= is_started

    # --- to the client

    def next_send(self, now: float) -> Outgoing | None:
        """The frame to send next, if any; call `mark_sent` once it is on its way. HIDDEN passes all waiting units."""
        if self._num_cached_tokens is not None and not self._is_accept_sent:
            return self._outgoing(Accepted(num_cached_tokens=self._num_cached_tokens, **self._next_ids()))
        if self._hidden:
            return self._outgoing(Hidden(**self._next_ids()), payload=self._hidden[0])
        if now >= self._keepalive_at:
            return self._outgoing(self._keepalive())
        if self._can_send_units():
            return self._next_data()
        if self._is_computed and not self._is_end_sent and self._is_all_sent():
            return self._outgoing(End(num_units=self._num_sent, **self._next_ids()))
        return None

    def mark_sent(self, outgoing: Outgoing, now: float) -> None:
        frame = outgoing.frame
        if isinstance(frame, ServerKeepAlive):
            self._keepalive_at = now + self._keepalive_seconds
            return
        self._sequence += 1
        self._moved_at = now
        if isinstance(frame, Accepted):
            self._is_accept_sent = True
        elif isinstance(frame, Hidden):
            self._hidden.popleft()
        elif isinstance(frame, End):
            self._is_end_sent = True
        elif isinstance(frame, Data):
            self._num_sent += len(frame.units)
            for _ in frame.units:
                self._ready.popleft()

    def fail(self, code: str, message: str) -> Fail:
        """The frame that tells the client that this fetch is over."""
        return Fail(code=code, message=message, **self._next_ids())

    def _next_ids(self) -> _Ids:
        return {"fetch_id": self.fetch_id, "sequence": self._sequence + 1}

    def _outgoing(self, frame: ServerFrame, payload: bytes | None = None, ranges: Sequence[slice] = ()) -> Outgoing:
        return Outgoing(self.peer, frame, payload, ranges)

    def _keepalive(self) -> ServerKeepAlive:
        return ServerKeepAlive(
            fetch_id=self.fetch_id, sequence=self._sequence, num_computed_tokens=self._num_computed_tokens
        )

    def _next_data(self) -> Outgoing:
        units: list[tuple[int, int]] = []
        ranges: list[slice] = []
        num_bytes = 0
        for unit in islice(self._ready, min(MAX_DATA_UNITS, self._credit - self._num_sent)):
            num_bytes += self._plan.unit_bytes(unit.group)
            if units and num_bytes > GATHER_BYTES:
                break
            units.append((unit.block, unit.group))
            ranges.append(self._plan.unit_range(unit.block_id, unit.group))
        return self._outgoing(Data(units=units, **self._next_ids()), ranges=ranges)

    def _can_send_units(self) -> bool:
        return self._first_block is not None and bool(self._ready) and self._num_sent < self._credit

    def _is_all_sent(self) -> bool:
        return self._first_block is not None and not self._ready

    # --- clocks

    def check_clocks(self, now: float) -> None:
        """Raises FetchFailure when a clock has run out."""
        code, limit, deadline = self._clock()
        if now >= deadline:
            raise FetchFailure(code, _CLOCK_TEXT[code].format(limit))

    def next_deadline(self) -> float:
        return min(self._keepalive_at, self._clock()[2])

    def _clock(self) -> tuple[FailCode, float, float]:
        """The clock that runs now: its code, its length, when it runs out."""
        if not self._is_started:
            limit = self.request.queue_seconds
            return FailCode.QUEUE_TIMEOUT, limit, self._opened_at + limit
        if self._is_computed and not self._can_send_units():
            limit = self._times.hold_seconds
            return FailCode.NOT_COLLECTED, limit, self._moved_at + limit
        limit = self._times.progress_seconds
        return FailCode.NO_PROGRESS, limit, self._moved_at + limit


_CLOCK_TEXT = {
    FailCode.QUEUE_TIMEOUT: "not one token was computed within the {} s that the fetch may be queued",
    FailCode.NOT_COLLECTED: "all was computed, and not collected within {} s; the blocks stay cached",
    FailCode.NO_PROGRESS: "nothing moved for {} s",
}


def _request_of(frame: Fetch) -> FetchRequest:
    return FetchRequest(
        tokens=frame.tokens,
        cache_salt=frame.cache_salt,
        hidden=frame.hidden,
        units=frame.units,
        compute=frame.compute,
        priority=frame.priority,
        queue_seconds=frame.queue_seconds,
    )
