"""The server's half of the fetch session: its peers, its table of open fetches, who may do what. Sans-IO.

Inputs are messages, store events and the time; outputs are effects (open and release at the store) and, pulled by
`next_send` when a transport has room, frames. Nothing a peer sends reaches another peer's fetch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtransfer.frames import (
    CONNECTION,
    FETCH_PROTOCOL_VERSION,
    Cancel,
    ClientFrame,
    Credit,
    Done,
    Fail,
    Fetch,
    FetchId,
    Hello,
    KeepAlive,
    Message,
    ServerFrame,
)
from kvtransfer.handshake import mismatch
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.served_fetch import Outgoing, Peer, ServedFetch
from kvtransfer.session import FailCode, FetchFailure, FetchTimes
from kvtransfer.stats import COMPLETE
from kvtransfer.store import FetchKey, FetchRequest

_IMPASSE_SECONDS = 0.5  # a store that has room begins much sooner


@dataclass(frozen=True)
class ServerLimits:
    """max_bad_frames: a peer that sends more of them is no longer listened to."""

    max_open_fetches: int = 1024
    max_tokens: int = 2**20
    max_peers: int = 1024
    max_bad_frames: int = 64
    max_replies: int = 1024


@dataclass(frozen=True)
class OpenStore:
    key: FetchKey
    request: FetchRequest


@dataclass(frozen=True)
class ReleaseStore:
    """outcome: "complete", or the code it failed with."""

    key: FetchKey
    outcome: str


ServerEffect = OpenStore | ReleaseStore


@dataclass
class _PeerState:
    last_heard: float
    instance_id: str | None = None  # None until its HELLO was good
    lease_seconds: float = 0.0
    num_bad_frames: int = 0
    replies: deque[ServerFrame] = field(default_factory=deque)
    fetches: OrderedDict[FetchId, ServedFetch] = field(default_factory=OrderedDict)


class ServerSession:
    def __init__(
        self,
        plan: LayoutPlan,
        instance_id: str,
        times: FetchTimes | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.dropped_frames: Counter[str] = Counter()
        self._plan = plan
        self._instance_id = instance_id
        self._times = times or FetchTimes()
        self._limits = limits or ServerLimits()
        self._peers: dict[Peer, _PeerState] = {}
        self._fetches: dict[FetchKey, ServedFetch] = {}
        self._is_draining = False
        self._impasse_since: float | None = None

    @property
    def num_open_fetches(self) -> int:
        return len(self._fetches)

    # --- from peers

    def receive(self, now: float, peer: Peer, message: Message[ClientFrame]) -> list[ServerEffect]:
        state = self._peer_state(peer, now)
        if state is None:
            return []
        frame = message.frame
        if not message.is_intact:
            return self._receive_corrupt(state, frame)
        if isinstance(frame, Hello):
            self._receive_hello(state, frame)
            return []
        if frame.receiver != self._instance_id:
            self._reply_wrong_instance(state, frame.fetch_id, frame.receiver)
            return []
        if isinstance(frame, Fetch):
            return self._receive_fetch(peer, state, frame, now)
        return self._receive_for_fetch(state, frame, now)

    def receive_invalid(self, now: float, peer: Peer) -> list[ServerEffect]:
        """The peer sent something that is no message at all."""
        state = self._peer_state(peer, now)
        return [] if state is None else self._count_bad(state, "invalid")

    def peer_gone(self, peer: Peer) -> list[ServerEffect]:
        """The transport says that nothing can reach this peer any more."""
        return self._forget_peer(peer, FailCode.CONNECTION_LOST)

    def _peer_state(self, peer: Peer, now: float) -> _PeerState | None:
        state = self._peers.get(peer)
        if state is None:
            if len(self._peers) >= self._limits.max_peers:
                self.dropped_frames["too_many_peers"] += 1
                return None
            state = self._peers[peer] = _PeerState(last_heard=now)
        if state.num_bad_frames > self._limits.max_bad_frames:
            self.dropped_frames["bad_peer"] += 1
            return None
        state.last_heard = now
        return state

    def _receive_hello(self, state: _PeerState, frame: Hello) -> None:
        if frame.receiver != self._instance_id:
            self._reply_wrong_instance(state, (frame.sender, CONNECTION), frame.receiver)
        elif problem := mismatch(self._hello(frame.sender), frame, ours="server", theirs="client"):
            self._reply_fail(state, (frame.sender, CONNECTION), *problem)
        elif state.fetches and frame.sender != state.instance_id:
            self.dropped_frames["hello"] += 1
        else:
            state.instance_id, state.lease_seconds = frame.sender, frame.lease_seconds
            self._reply(state, self._hello(frame.sender))

    def _hello(self, receiver: str) -> Hello:
        return Hello(
            version=FETCH_PROTOCOL_VERSION,
            sender=self._instance_id,
            receiver=receiver,
            layout=self._plan.layout,
            num_layer_groups=self._plan.num_groups,
            lease_seconds=self._times.lease_seconds,
        )

    def _receive_fetch(self, peer: Peer, state: _PeerState, frame: Fetch, now: float) -> list[ServerEffect]:
        if frame.fetch_id in state.fetches:
            self.dropped_frames["duplicate"] += 1
            return []
        if problem := self._refusal(state, frame):
            self._reply_fail(state, frame.fetch_id, *problem)
            return []
        try:
            fetch = ServedFetch(frame, peer, self._plan, self._times, state.lease_seconds, now)
        except FetchFailure as failure:
            self._reply_fail(state, frame.fetch_id, failure.code, failure.message)
            return []
        self._fetches[fetch.key] = state.fetches[fetch.key] = fetch
        return [OpenStore(fetch.key, fetch.request)]

    def _refusal(self, state: _PeerState, frame: Fetch) -> tuple[FailCode, str] | None:
        limits = self._limits
        if state.instance_id is None:
            return FailCode.HELLO_REQUIRED, "no HELLO came before this FETCH"
        if frame.fetch_id[0] != state.instance_id or frame.fetch_id[1] == CONNECTION or frame.fetch_id in self._fetches:
            return FailCode.PROTOCOL_ERROR, f"fetch id {frame.fetch_id} is not for {state.instance_id} to open"
        if self._is_draining:
            return FailCode.CLOSING, "this server takes no new fetches, it is about to close"
        if len(self._fetches) >= limits.max_open_fetches:
            return FailCode.TOO_MANY_FETCHES, f"{limits.max_open_fetches} fetches are open, the most allowed"
        if len(frame.tokens) > limits.max_tokens:
            return FailCode.TOO_MANY_TOKENS, f"{len(frame.tokens)} tokens, at most {limits.max_tokens} are served"
        return None

    def _receive_for_fetch(
        self, state: _PeerState, frame: Credit | KeepAlive | Cancel | Done, now: float
    ) -> list[ServerEffect]:
        fetch = state.fetches.get(frame.fetch_id)
        if fetch is None:
            return self._receive_for_unknown(state, frame)
        if isinstance(frame, Cancel):
            return self._end(fetch, FailCode.CANCELLED)
        if isinstance(frame, Done):
            return self._end(fetch, COMPLETE)
        if isinstance(frame, Credit):
            return self._guard(fetch, lambda: fetch.receive_credit(frame, now))
        return self._guard(fetch, lambda: fetch.receive_keepalive(frame, now))

    def _receive_for_unknown(self, state: _PeerState, frame: Credit | KeepAlive | Cancel | Done) -> list[ServerEffect]:
        """A client that only wants it gone has its wish; any other must hear that the fetch is over."""
        self.dropped_frames["unknown_fetch"] += 1
        if isinstance(frame, Credit | KeepAlive):
            self._reply_fail(state, frame.fetch_id, FailCode.UNKNOWN_FETCH, "this server has no such fetch open")
        return []

    def _receive_corrupt(self, state: _PeerState, frame: ClientFrame) -> list[ServerEffect]:
        """Its fields may be wrong, but ending the fetch that it seems to name is always safe."""
        fetch = None if isinstance(frame, Hello) else state.fetches.get(frame.fetch_id)
        effects = self._count_bad(state, "corrupt")
        if fetch is not None and fetch.key in self._fetches:
            effects += self._fail(fetch, FailCode.CORRUPT, f"checksum of a {type(frame).__name__} frame is wrong")
        return effects

    def _count_bad(self, state: _PeerState, reason: str) -> list[ServerEffect]:
        self.dropped_frames[reason] += 1
        state.num_bad_frames += 1
        if state.num_bad_frames <= self._limits.max_bad_frames:
            return []
        return self._end_all(state.fetches.values(), FailCode.PROTOCOL_ERROR)

    # --- from the store

    def accepted(self, key: FetchKey, num_cached_tokens: int) -> list[ServerEffect]:
        return self._on_event(key, lambda fetch: fetch.accepted(num_cached_tokens))

    def filled(self, key: FetchKey, first_block: int, block_ids: Sequence[int], now: float) -> list[ServerEffect]:
        return self._on_event(key, lambda fetch: fetch.filled(first_block, block_ids, now))

    def progress(self, key: FetchKey, num_computed_tokens: int, now: float) -> list[ServerEffect]:
        return self._on_event(key, lambda fetch: fetch.progress(num_computed_tokens, now))

    def hidden(self, key: FetchKey, rows: bytes, now: float) -> list[ServerEffect]:
        return self._on_event(key, lambda fetch: fetch.hidden(rows, now))

    def computed(self, key: FetchKey, now: float) -> list[ServerEffect]:
        return self._on_event(key, lambda fetch: fetch.computed(now))

    def failed(self, key: FetchKey, code: str, message: str) -> list[ServerEffect]:
        fetch = self._fetches.get(key)
        return [] if fetch is None else self._fail(fetch, code, message)

    def _on_event(self, key: FetchKey, act: Callable[[ServedFetch], None]) -> list[ServerEffect]:
        """Events of a fetch that has ended meanwhile are nobody's concern."""
        fetch = self._fetches.get(key)
        return [] if fetch is None else self._guard(fetch, lambda: act(fetch))

    # --- to peers

    def peers(self) -> list[Peer]:
        return list(self._peers)

    def next_send(self, now: float, peer: Peer) -> Outgoing | None:
        """The next frame for this peer, its fetches taking turns; call `mark_sent` when the transport has taken it."""
        state = self._peers.get(peer)
        if state is None:
            return None
        if state.replies:
            return Outgoing(peer, state.replies[0])
        for fetch in state.fetches.values():
            if outgoing := fetch.next_send(now):
                return outgoing
        return None

    def mark_sent(self, outgoing: Outgoing, now: float) -> None:
        state = self._peers[outgoing.peer]
        frame = outgoing.frame
        if state.replies and state.replies[0] is frame:
            state.replies.popleft()
        elif not isinstance(frame, Hello):
            state.fetches[frame.fetch_id].mark_sent(outgoing, now)
            state.fetches.move_to_end(frame.fetch_id)

    # --- time and end

    def tick(self, now: float) -> list[ServerEffect]:
        effects: list[ServerEffect] = []
        for peer, state in list(self._peers.items()):
            if now >= state.last_heard + self._times.lease_seconds:
                effects += self._forget_peer(peer, FailCode.SILENT)
        for fetch in list(self._fetches.values()):
            effects += self._guard(fetch, lambda fetch=fetch: fetch.check_clocks(now))  # type: ignore[misc]
        return effects + self._end_impasse(now)

    def next_deadline(self) -> float | None:
        deadlines = [state.last_heard + self._times.lease_seconds for state in self._peers.values()]
        deadlines += [fetch.next_deadline() for fetch in self._fetches.values()]
        if self._impasse_since is not None:
            deadlines.append(self._impasse_since + _IMPASSE_SECONDS)
        return min(deadlines, default=None)

    def _end_impasse(self, now: float) -> list[ServerEffect]:
        """Blocks whose client has no room must not keep out a fetch whose client has: two clients, or two requests
        of one, would wait for each other. They stay cached, so that a new fetch of them is cheap."""
        uncollected = self._in_the_way()
        if not uncollected:
            self._impasse_since = None
        elif self._impasse_since is None:
            self._impasse_since = now
        elif now >= self._impasse_since + _IMPASSE_SECONDS:
            self._impasse_since = None
            text = "all was computed, and others need the room; the blocks stay cached"
            return [effect for fetch in uncollected for effect in self._fail(fetch, FailCode.NOT_COLLECTED, text)]
        return []

    def _in_the_way(self) -> list[ServedFetch]:
        """Computed fetches without room at their client, while the store computes nothing and one with room waits."""
        fetches = self._fetches.values()
        is_computing = any(not fetch.is_queued and not fetch.is_computed for fetch in fetches)
        if is_computing or not any(fetch.is_queued and fetch.has_room for fetch in fetches):
            return []
        return [fetch for fetch in fetches if fetch.is_computed and not fetch.has_room]

    def drain(self) -> None:
        """Refuse new fetches from now on; the open ones go on."""
        self._is_draining = True

    def shut(self, message: str) -> list[ServerEffect]:
        """End every open fetch; its client is told."""
        self.drain()
        fetches = list(self._fetches.values())
        return [effect for fetch in fetches for effect in self._fail(fetch, FailCode.CLOSING, message)]

    def _guard(self, fetch: ServedFetch, act: Callable[[], None]) -> list[ServerEffect]:
        try:
            act()
        except FetchFailure as failure:
            return self._fail(fetch, failure.code, failure.message)
        return []

    def _fail(self, fetch: ServedFetch, code: str, message: str) -> list[ServerEffect]:
        self._reply(self._peers[fetch.peer], fetch.fail(code, message[:8192]))
        return self._end(fetch, code)

    def _end(self, fetch: ServedFetch, outcome: str) -> list[ServerEffect]:
        del self._fetches[fetch.key]
        del self._peers[fetch.peer].fetches[fetch.fetch_id]
        return [ReleaseStore(fetch.key, str(outcome))]

    def _end_all(self, fetches: Iterable[ServedFetch], outcome: str) -> list[ServerEffect]:
        return [effect for fetch in list(fetches) for effect in self._end(fetch, outcome)]

    def _forget_peer(self, peer: Peer, outcome: str) -> list[ServerEffect]:
        if peer not in self._peers:
            return []
        effects = self._end_all(self._peers[peer].fetches.values(), outcome)
        del self._peers[peer]
        return effects

    # --- replies

    def _reply_wrong_instance(self, state: _PeerState, fetch_id: FetchId, receiver: str) -> None:
        text = f"meant for instance {receiver}, but this is {self._instance_id}"
        self._reply_fail(state, fetch_id, FailCode.WRONG_INSTANCE, text)

    def _reply_fail(self, state: _PeerState, fetch_id: FetchId, code: str, message: str) -> None:
        self._reply(state, Fail(fetch_id=fetch_id, sequence=0, code=code, message=message[:8192]))

    def _reply(self, state: _PeerState, frame: ServerFrame) -> None:
        if len(state.replies) >= self._limits.max_replies:
            self.dropped_frames["reply"] += 1
            return
        state.replies.append(frame)
