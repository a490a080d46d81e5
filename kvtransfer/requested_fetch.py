"""One open fetch as its client sees it: which pool blocks are granted, what is in, what may be written where.

Sans-IO: checks every DATA frame whole before it names a single range to write, so that late, duplicated or hostile
frames cannot reach a byte outside the grant. session_client.py gives it frames and takes the failures it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.frames import (
    Accepted,
    Cancel,
    Credit,
    Data,
    Done,
    End,
    Fetch,
    FetchId,
    Hidden,
    KeepAlive,
    ServerKeepAlive,
    Unit,
)
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.session import Arrival, FailCode, FetchFailure, FetchTimes, IncomingSequence
from kvtransfer.store import FetchRequest

SequencedFrame = Accepted | Data | Hidden | End


@dataclass(frozen=True)
class WritePool:
    """Copy payload buffer `part` of the message at hand into this range of the pool."""

    pool: slice
    part: int


class RequestedFetch:
    """Raises FetchFailure when the fetch must end."""

    def __init__(
        self,
        fetch_id: FetchId,
        receiver: str,
        request: FetchRequest,
        plan: LayoutPlan,
        times: FetchTimes,
        window_bytes: int,
        now: float,
    ) -> None:
        self.fetch_id = fetch_id
        self.request = request
        self._receiver = receiver
        self._plan = plan
        self._times = times
        self._num_blocks = plan.layout.num_blocks_for(len(request.tokens))
        self._window_units = max(2, window_bytes // plan.max_unit_bytes)
        # the grant: pool blocks of token blocks _first_block, _first_block + 1, ..., and which of their groups are in
        self._first_block: int | None = None
        self._block_ids: list[int] = []
        self._missing: list[set[int]] = []
        self._num_received = 0
        self._credit = 0
        # what the server said
        self._num_cached_tokens = 0
        self.num_computed_tokens = 0
        self._is_started = False
        self.restart(now)

    def restart(self, now: float) -> None:
        """Begin anew with another connection; the old one brought nothing."""
        self._sequence = 0
        self._credit = 0
        self._incoming = IncomingSequence()
        self._opened_at = self._moved_at = now

    # --- to the server

    def fetch_frame(self) -> Fetch:
        request = self.request
        self._sequence += 1
        return Fetch(
            fetch_id=self.fetch_id,
            sequence=self._sequence,
            receiver=self._receiver,
            tokens=list(request.tokens),
            cache_salt=request.cache_salt,
            hidden=request.hidden,
            units=request.units,
            compute=request.compute,
            priority=request.priority,
            queue_seconds=request.queue_seconds,
        )

    def next_credit(self) -> Credit | None:
        """A CREDIT when enough has changed since the last one to be worth a frame."""
        if self._first_block is None or not self.request.units:
            return None
        num_granted = len(self._block_ids) * self._plan.num_groups
        target = min(num_granted, self._num_received + self._window_units)
        is_first = self._sequence == 1
        is_worth_it = target - self._credit >= max(1, self._window_units // 4) or target == num_granted
        if not is_first and (target == self._credit or not is_worth_it):
            return None
        self._sequence += 1
        self._credit = target
        return Credit(
            fetch_id=self.fetch_id,
            sequence=self._sequence,
            receiver=self._receiver,
            first_block=self._first_block,
            num_units=target,
        )

    def keepalive(self) -> KeepAlive:
        first_block = self._first_block if self._sequence > 1 else None
        return KeepAlive(
            fetch_id=self.fetch_id,
            sequence=self._sequence,
            receiver=self._receiver,
            first_block=first_block,
            num_units=self._credit,
        )

    def done(self) -> Done:
        return Done(fetch_id=self.fetch_id, sequence=self._sequence + 1, receiver=self._receiver)

    def cancel(self) -> Cancel:
        return Cancel(fetch_id=self.fetch_id, sequence=self._sequence + 1, receiver=self._receiver)

    # --- from the owner

    def grant(self, first_block: int, block_ids: Sequence[int], now: float) -> None:
        """Further grants must go on where the last one ended."""
        if self._first_block is None:
            self._first_block = first_block
        next_block = self._first_block + len(self._block_ids)
        if first_block != next_block or first_block > self._num_blocks:
            text = f"grant begins at block {first_block} of {self._num_blocks}, must begin at {next_block}"
            raise FetchFailure(FailCode.INTERNAL_ERROR, text)
        wanted = block_ids[: self._num_blocks - first_block]
        self._block_ids += wanted
        self._missing += (set(range(self._plan.num_groups)) for _ in wanted)
        self._moved_at = now

    # --- from the server

    def is_next(self, frame: SequencedFrame) -> bool:
        """False: an old frame, to be dropped."""
        return self._incoming.judge(frame.sequence) is Arrival.NEXT

    def receive_accepted(self, frame: Accepted, now: float) -> None:
        self._num_cached_tokens = frame.num_cached_tokens
        self.num_computed_tokens = max(self.num_computed_tokens, frame.num_cached_tokens)
        self._moved_at = now

    def receive_keepalive(self, frame: ServerKeepAlive, now: float) -> bool:
        """True when the server has computed more tokens since."""
        is_repeat = self._incoming.judge_repeat(frame.sequence) is Arrival.NEXT
        if not is_repeat or frame.num_computed_tokens <= self.num_computed_tokens:
            return False
        self.num_computed_tokens = frame.num_computed_tokens
        self._move(now)
        return True

    def receive_hidden(self, now: float) -> None:
        if self.request.hidden == "none":
            raise FetchFailure(FailCode.PROTOCOL_ERROR, "hidden states came that were not asked for")
        self._move(now)

    def receive_data(self, frame: Data, payload: Sequence[memoryview], now: float) -> list[WritePool]:
        """Everything is checked before anything is marked as in."""
        if self._num_received + len(frame.units) > self._credit:
            text = f"{self._num_received + len(frame.units)} units came, credit was for {self._credit}"
            raise FetchFailure(FailCode.PROTOCOL_ERROR, text)
        if len(set(frame.units)) != len(frame.units):
            raise FetchFailure(FailCode.PROTOCOL_ERROR, "a DATA frame names a unit twice")
        writes = [
            WritePool(self._pool_range(unit, part), index)
            for index, (unit, part) in enumerate(zip(frame.units, payload, strict=True))
        ]
        for block, group in frame.units:
            self._missing[block - (self._first_block or 0)].discard(group)
        self._num_received += len(frame.units)
        self._move(now)
        return writes

    def _pool_range(self, unit: Unit, part: memoryview) -> slice:
        block, group = unit
        index = block - (self._first_block or 0)
        if not 0 <= index < len(self._block_ids) or group not in self._missing[index]:
            text = f"unit {unit} came, which was not granted or came before"
            raise FetchFailure(FailCode.PROTOCOL_ERROR, text)
        if part.nbytes != self._plan.unit_bytes(group):
            text = f"unit {unit} has {part.nbytes} bytes, must have {self._plan.unit_bytes(group)}"
            raise FetchFailure(FailCode.PROTOCOL_ERROR, text)
        return self._plan.unit_range(self._block_ids[index], group)

    def receive_end(self, frame: End) -> None:
        """Raises FetchFailure unless all that was wanted is in."""
        if frame.num_units != self._num_received:
            text = f"the server sent {frame.num_units} units, {self._num_received} came"
            raise FetchFailure(FailCode.PROTOCOL_ERROR, text)
        if self.request.units and self._num_leading_blocks() < self._num_blocks:
            text = f"the server had blocks up to {self._num_leading_blocks()} of {self._num_blocks}"
            raise FetchFailure(FailCode.INCOMPLETE, text)

    def _move(self, now: float) -> None:
        self._moved_at = now
        self._is_started = True

    # --- results

    def num_complete_blocks(self, *, is_complete: bool) -> int:
        """Leading blocks that are whole, from block 0 on. A partial last block counts only when everything is in."""
        num_full = len(self.request.tokens) // self._plan.layout.block_size
        return self._num_leading_blocks() if is_complete else min(num_full, self._num_leading_blocks())

    def _num_leading_blocks(self) -> int:
        if self._first_block is None:
            return 0
        num_in = next((i for i, missing in enumerate(self._missing) if missing), len(self._missing))
        return self._first_block + num_in

    # --- clocks

    def check_clocks(self, now: float) -> None:
        code, limit, deadline = self._clock()
        if now >= deadline:
            what = "computing did not start" if code is FailCode.QUEUE_TIMEOUT else "nothing moved"
            raise FetchFailure(code, f"{what} within {limit} s")

    def next_deadline(self) -> float:
        return self._clock()[2]

    def _clock(self) -> tuple[FailCode, float, float]:
        """The lease is slack: the server keeps the same clocks, and its FAIL says more."""
        slack = self._times.lease_seconds
        if not self._is_started:
            limit = self.request.queue_seconds + slack
            return FailCode.QUEUE_TIMEOUT, limit, self._opened_at + limit
        is_waiting = self._credit > self._num_received or self.num_computed_tokens < len(self.request.tokens)
        limit = (self._times.progress_seconds if is_waiting else self._times.hold_seconds) + slack
        return FailCode.NO_PROGRESS, limit, self._moved_at + limit
