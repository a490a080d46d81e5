"""What both ends of a fetch session share: the life of a fetch, its clocks, its sequence numbers, its reasons to fail.

Both state machines (session_server, session_client) are sans-IO: they take frames, store events and the time, and
return effects. They own no socket, no thread, no clock and no memory.

Life of a fetch, client on the left:

    HELLO, FETCH (no credit) ------>  checked, opened at the store, queued there
                             <------  HELLO, ACCEPTED; KEEPALIVE{num_computed_tokens} while it waits and computes
    grant: CREDIT{first}     ------>  the store fills blocks, chunk by chunk
                             <------  DATA: units of filled blocks from `first` on, in order, as far as credit allows
    writes into granted blocks; CREDIT as units come in; KEEPALIVE{credit}
                             <------  HIDDEN: when computed; ahead of every unit not sent yet, needs no credit
                             <------  DATA ..., END{num_units}: all computed and all sent
    all units in, verified   ------>  DONE: the store releases the blocks

It ends early by CANCEL (client), FAIL (server), or on its own side alone: a gap in the sequence, a clock, a silent or
lost peer. Blocks that are in stay good, and the server keeps its own as ordinary cache, so that a new fetch is cheap.

Clocks (server: all; client: queue and progress too, with the lease as slack, should the server fail to keep its own):
    queue     from FETCH until computing starts                      -> queue_timeout
    progress  computing, or credit is there, and nothing moves       -> no_progress
    hold      all computed, and no credit (or no DONE) comes         -> not_collected; soon, where others need the room
    lease     nothing at all heard from the peer                     -> silent
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class FailCode(StrEnum):
    """Why a fetch ended. A store may add codes of its own."""

    CANCELLED = "cancelled"
    CLOSING = "closing"
    CONNECTION_LOST = "connection_lost"
    CORRUPT = "corrupt"
    HELLO_REQUIRED = "hello_required"
    INCOMPLETE = "incomplete"
    INTERNAL_ERROR = "internal_error"
    LAYOUT_MISMATCH = "layout_mismatch"
    NO_PROGRESS = "no_progress"
    NOT_COLLECTED = "not_collected"
    PROTOCOL_ERROR = "protocol_error"
    QUEUE_TIMEOUT = "queue_timeout"
    SEQUENCE_GAP = "sequence_gap"
    SILENT = "silent"
    TOO_MANY_FETCHES = "too_many_fetches"
    TOO_MANY_TOKENS = "too_many_tokens"
    UNKNOWN_FETCH = "unknown_fetch"
    UNREACHABLE = "unreachable"
    VERSION_MISMATCH = "version_mismatch"
    WRONG_INSTANCE = "wrong_instance"


@dataclass(frozen=True)
class FetchTimes:
    """Deadlines of one end, in seconds. The queue clock comes with each request."""

    lease_seconds: float = 10.0
    progress_seconds: float = 30.0
    hold_seconds: float = 30.0
    connect_seconds: float = 3.0

    def __post_init__(self) -> None:
        for name in ("lease_seconds", "progress_seconds", "hold_seconds", "connect_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be more than 0")


def keepalive_seconds(peer_lease_seconds: float) -> float:
    """How often to say something, so that a peer with this lease hears it several times over."""
    return min(1.0, peer_lease_seconds / 4)


class FetchFailure(Exception):  # noqa: N818 - an outcome, and it never leaves kvtransfer
    """This fetch must end, for this reason."""

    def __init__(self, code: FailCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Arrival(Enum):
    NEXT = "next"
    OLD = "old"


class IncomingSequence:
    """Watches the sequence numbers of one fetch's frames in one direction."""

    def __init__(self) -> None:
        self._last = 0

    def judge(self, sequence: int) -> Arrival:
        """OLD: a duplicate or late frame, to be dropped. Raises FetchFailure when frames before it are missing."""
        if sequence <= self._last:
            return Arrival.OLD
        self._require_none_missing(sequence - 1)
        self._last = sequence
        return Arrival.NEXT

    def judge_repeat(self, sequence: int) -> Arrival:
        """The same for a keep-alive, which repeats the last number sent instead of taking one."""
        self._require_none_missing(sequence)
        return Arrival.NEXT if sequence == self._last else Arrival.OLD

    def _require_none_missing(self, last_sent: int) -> None:
        if last_sent > self._last:
            text = f"frames {self._last + 1} to {last_sent} of the fetch were lost"
            raise FetchFailure(FailCode.SEQUENCE_GAP, text)
