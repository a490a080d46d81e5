"""The client's half of the fetch session, one for each connection to a server instance. Sans-IO.

Inputs are the owner's wishes, messages and the time; outputs are effects in the order they must be carried out. A
fetch that has ended is forgotten at once, and its late frames are dropped: that, and the one thread that carries the
effects out, is the fence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.frames import (
    CONNECTION,
    FETCH_PROTOCOL_VERSION,
    Accepted,
    Cancel,
    ClientFrame,
    Data,
    End,
    Fail,
    Hello,
    Hidden,
    Message,
    ServerFrame,
    ServerKeepAlive,
)
from kvtransfer.handshake import mismatch
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.requested_fetch import RequestedFetch, SequencedFrame, WritePool
from kvtransfer.session import FailCode, FetchFailure, FetchTimes, keepalive_seconds
from kvtransfer.store import FetchRequest

DEFAULT_WINDOW_BYTES = 6 << 20
_MAX_BAD_FRAMES = 64


@dataclass(frozen=True)
class SendFrame:
    frame: ClientFrame


@dataclass(frozen=True)
class TellAccepted:
    number: int
    num_cached_tokens: int


@dataclass(frozen=True)
class TellProgress:
    number: int
    num_computed_tokens: int


@dataclass(frozen=True)
class TellHidden:
    """The rows are the payload of the message at hand."""

    number: int


@dataclass(frozen=True)
class TellEnded:
    """code None: all came."""

    number: int
    num_complete_blocks: int
    code: str | None
    message: str


@dataclass(frozen=True)
class Disconnect:
    """This connection is of no use (any more). Fetches that are still open may be tried elsewhere, by `redial`."""

    code: str
    message: str


ClientEffect = SendFrame | WritePool | TellAccepted | TellProgress | TellHidden | TellEnded | Disconnect


class ClientSession:
    """server_id: the instance that it means to talk to."""

    def __init__(
        self,
        plan: LayoutPlan,
        instance_id: str,
        server_id: str,
        now: float,
        times: FetchTimes | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        self.dropped_frames: Counter[str] = Counter()
        self.is_established = False
        self._plan = plan
        self._instance_id = instance_id
        self._server_id = server_id
        self._times = times or FetchTimes()
        self._window_bytes = window_bytes
        self._fetches: dict[int, RequestedFetch] = {}
        self._num_bad_frames = 0
        self._keepalive_seconds = 1.0
        self._keepalive_at = now
        self._dialed_at = self._last_heard = now

    @property
    def num_open_fetches(self) -> int:
        return len(self._fetches)

    # --- from the owner

    def open(self, now: float, number: int, request: FetchRequest) -> list[ClientEffect]:
        """number: from 1 on, never used before by this client instance."""
        effects: list[ClientEffect] = []
        if not self._fetches:
            # An idle connection is silent, so the server may have forgotten us.
            effects.append(self._greet(now))
        fetch_id = (self._instance_id, number)
        fetch = RequestedFetch(fetch_id, self._server_id, request, self._plan, self._times, self._window_bytes, now)
        self._fetches[number] = fetch
        return [*effects, SendFrame(fetch.fetch_frame())]

    def grant(self, now: float, number: int, first_block: int, block_ids: Sequence[int]) -> list[ClientEffect]:
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        return self._guard(number, lambda: fetch.grant(first_block, block_ids, now)) or self._credit(fetch)

    def cancel(self, number: int, code: str = FailCode.CANCELLED, message: str = "") -> list[ClientEffect]:
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        return [SendFrame(fetch.cancel()), self._end(number, code, message)]

    def cancel_all(self, code: str, message: str) -> list[ClientEffect]:
        return [effect for number in list(self._fetches) for effect in self.cancel(number, code, message)]

    def redial(self, now: float) -> list[ClientEffect]:
        """Another connection takes the place of one that never answered."""
        self.is_established = False
        self._dialed_at = now
        effects: list[ClientEffect] = [self._greet(now)]
        for fetch in self._fetches.values():
            fetch.restart(now)
            effects += [SendFrame(fetch.fetch_frame()), *self._credit(fetch)]
        return effects

    def lost(self, code: str, message: str) -> list[ClientEffect]:
        """The connection is gone for good: everything that was open on it ends."""
        return [self._end(number, code, message) for number in list(self._fetches)]

    def _greet(self, now: float) -> SendFrame:
        self._last_heard = now
        self._keepalive_at = now + self._keepalive_seconds
        return SendFrame(self._hello())

    def _hello(self) -> Hello:
        return Hello(
            version=FETCH_PROTOCOL_VERSION,
            sender=self._instance_id,
            receiver=self._server_id,
            layout=self._plan.layout,
            num_layer_groups=self._plan.num_groups,
            lease_seconds=self._times.lease_seconds,
        )

    # --- from the server

    def receive(self, now: float, message: Message[ServerFrame]) -> list[ClientEffect]:
        self._last_heard = now
        frame = message.frame
        if not message.is_intact:
            return self._receive_corrupt(frame)
        if isinstance(frame, Hello):
            return self._receive_hello(frame)
        if isinstance(frame, Fail) and frame.fetch_id[1] == CONNECTION:
            return [Disconnect(frame.code, frame.message)]
        if not self.is_established:
            return self._drop_early(frame)
        number = frame.fetch_id[1]
        fetch = self._fetches.get(number)
        if fetch is None or frame.fetch_id != fetch.fetch_id:
            return self._receive_for_unknown(frame)
        if isinstance(frame, Fail):
            return [self._end(number, frame.code, frame.message)]
        return self._receive_for_fetch(now, number, fetch, frame, message.payload)

    def receive_invalid(self) -> list[ClientEffect]:
        """The server sent something that is no message at all."""
        return self._count_bad("invalid")

    def _receive_hello(self, frame: Hello) -> list[ClientEffect]:
        if frame.sender != self._server_id:
            text = f"meant for instance {self._server_id}, but {frame.sender} answered"
            return [Disconnect(FailCode.WRONG_INSTANCE, text)]
        if problem := mismatch(self._hello(), frame, ours="client", theirs="server"):
            return [Disconnect(*problem)]
        self.is_established = True
        self._keepalive_seconds = keepalive_seconds(frame.lease_seconds)
        self._keepalive_at = min(self._keepalive_at, self._last_heard + self._keepalive_seconds)
        return []

    def _drop_early(self, frame: ServerFrame) -> list[ClientEffect]:
        """Before its HELLO a server can only fail us."""
        if isinstance(frame, Fail) and frame.fetch_id[1] in self._fetches:
            return [self._end(frame.fetch_id[1], frame.code, frame.message)]
        self.dropped_frames["before_hello"] += 1
        return []

    def _receive_for_unknown(
        self, frame: Accepted | Data | Hidden | End | Fail | ServerKeepAlive
    ) -> list[ClientEffect]:
        self.dropped_frames["unknown_fetch"] += 1
        if isinstance(frame, Fail) or frame.fetch_id[0] != self._instance_id:
            return []
        return [SendFrame(Cancel(fetch_id=frame.fetch_id, sequence=0, receiver=self._server_id))]

    def _receive_corrupt(self, frame: ServerFrame) -> list[ClientEffect]:
        """Its fields may be wrong, but ending the fetch that it seems to name is always safe."""
        effects = self._count_bad("corrupt")
        if not isinstance(frame, Hello):
            text = f"checksum of a {type(frame).__name__} frame is wrong"
            effects += self.cancel(frame.fetch_id[1], FailCode.CORRUPT, text)
        return effects

    def _count_bad(self, reason: str) -> list[ClientEffect]:
        self.dropped_frames[reason] += 1
        self._num_bad_frames += 1
        if self._num_bad_frames <= _MAX_BAD_FRAMES:
            return []
        return [Disconnect(FailCode.PROTOCOL_ERROR, f"the server sent {self._num_bad_frames} bad frames")]

    def _receive_for_fetch(
        self,
        now: float,
        number: int,
        fetch: RequestedFetch,
        frame: SequencedFrame | ServerKeepAlive,
        payload: Sequence[memoryview],
    ) -> list[ClientEffect]:
        try:
            if isinstance(frame, ServerKeepAlive):
                has_moved = fetch.receive_keepalive(frame, now)
                return [TellProgress(number, fetch.num_computed_tokens)] if has_moved else []
            if not fetch.is_next(frame):
                self.dropped_frames["duplicate"] += 1
                return []
            return self._receive_next(now, number, fetch, frame, payload)
        except FetchFailure as failure:
            return self.cancel(number, failure.code, failure.message)

    def _receive_next(
        self,
        now: float,
        number: int,
        fetch: RequestedFetch,
        frame: SequencedFrame,
        payload: Sequence[memoryview],
    ) -> list[ClientEffect]:
        if isinstance(frame, Accepted):
            fetch.receive_accepted(frame, now)
            return [TellAccepted(number, frame.num_cached_tokens)]
        if isinstance(frame, Hidden):
            fetch.receive_hidden(now)
            return [TellHidden(number)]
        if isinstance(frame, Data):
            return [*fetch.receive_data(frame, payload, now), *self._credit(fetch)]
        fetch.receive_end(frame)
        return [SendFrame(fetch.done()), self._end(number, None, "")]

    # --- time and end

    def tick(self, now: float) -> list[ClientEffect]:
        if not self._fetches:
            return []
        if not self.is_established and now >= self._dialed_at + self._times.connect_seconds:
            text = f"instance {self._server_id} did not answer within {self._times.connect_seconds} s"
            return [Disconnect(FailCode.UNREACHABLE, text)]
        if now >= self._last_heard + self._times.lease_seconds:
            text = f"nothing was heard from instance {self._server_id} for {self._times.lease_seconds} s"
            return [Disconnect(FailCode.SILENT, text)]
        effects: list[ClientEffect] = []
        for number, fetch in list(self._fetches.items()):
            effects += self._guard(number, lambda fetch=fetch: fetch.check_clocks(now))  # type: ignore[misc]
        return effects + self._keepalives(now)

    def next_deadline(self) -> float | None:
        if not self._fetches:
            return None
        deadlines = [self._last_heard + self._times.lease_seconds, self._keepalive_at]
        if not self.is_established:
            deadlines.append(self._dialed_at + self._times.connect_seconds)
        return min(deadlines + [fetch.next_deadline() for fetch in self._fetches.values()])

    def _keepalives(self, now: float) -> list[ClientEffect]:
        if now < self._keepalive_at:
            return []
        self._keepalive_at = now + self._keepalive_seconds
        return [SendFrame(fetch.keepalive()) for fetch in self._fetches.values()]

    def _credit(self, fetch: RequestedFetch) -> list[ClientEffect]:
        frame = fetch.next_credit()
        return [] if frame is None else [SendFrame(frame)]

    def _guard(self, number: int, act: Callable[[], None]) -> list[ClientEffect]:
        try:
            act()
        except FetchFailure as failure:
            return self.cancel(number, failure.code, failure.message)
        return []

    def _end(self, number: int, code: str | None, message: str) -> TellEnded:
        fetch = self._fetches.pop(number)
        num_blocks = fetch.num_complete_blocks(is_complete=code is None)
        return TellEnded(number, num_blocks, None if code is None else str(code), message)
