"""Both session halves against each other over a channel that may do anything: they agree in the end, memory is
released exactly once, every block counted complete is right, nothing outside a grant is ever written."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from common.errors import PeerError
from kvtransfer.frames import Data, Hidden, decode_from_client, decode_from_server, encode
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.requested_fetch import WritePool
from kvtransfer.served_fetch import Outgoing
from kvtransfer.session import FetchTimes
from kvtransfer.session_client import ClientEffect, ClientSession, Disconnect, SendFrame, TellEnded, TellHidden
from kvtransfer.session_server import OpenStore, ServerEffect, ServerSession
from kvtransfer.store import FetchKey, FetchRequest
from tests.kvtransfer.doubles import TINY_LAYOUT, block_content, hidden_rows

BLOCK_BYTES = TINY_LAYOUT.block_bytes
CLIENT_BLOCKS = 64
MAX_OPEN = 4
TIMES = FetchTimes(lease_seconds=4.0, progress_seconds=6.0, hold_seconds=6.0, connect_seconds=3.0)
picks = st.integers(0, 1000)


@dataclass
class Wanted:
    """A fetch as the client's owner knows it."""

    request: FetchRequest
    first_block: int | None = None
    block_ids: list[int] = field(default_factory=list)
    is_ended: bool = False
    num_hidden: int = 0
    is_tainted: bool = False  # a peer without honour took part: only the containment of writes is promised


@dataclass
class Stored:
    request: FetchRequest
    blocks: list[bytes] = field(default_factory=list)
    is_computed: bool = False


class SessionPair(RuleBasedStateMachine):
    @initialize(num_groups=st.integers(1, 2), window=st.sampled_from([1, 1500, 10**6]))
    def begin(self, num_groups: int, window: int) -> None:
        self.plan = LayoutPlan(TINY_LAYOUT, num_groups)
        self.window = window
        self.now = 100.0
        self.server = ServerSession(self.plan, "server", TIMES)
        self.peer = (0, b"1")
        self.client = self.new_client()
        self.to_server: list[list[bytes]] = []
        self.to_client: list[list[bytes]] = []
        self.number = 0
        self.wanted: dict[int, Wanted] = {}
        self.free_blocks = list(range(CLIENT_BLOCKS))
        self.pool = bytearray(CLIENT_BLOCKS * BLOCK_BYTES)
        self.stored: dict[FetchKey, Stored] = {}
        self.num_opened = 0
        self.releases: Counter[FetchKey] = Counter()
        self.outcomes: Counter[str | None] = Counter()

    def new_client(self) -> ClientSession:
        return ClientSession(self.plan, "client", "server", self.now, TIMES, self.window)

    # --- the owners

    def live(self) -> list[int]:
        return [number for number, wanted in self.wanted.items() if not wanted.is_ended]

    def pick_live(self, pick: int) -> int:
        return self.live()[pick % len(self.live())]

    @precondition(lambda self: len(self.live()) < MAX_OPEN)
    @rule(num_tokens=st.integers(1, 40), hidden=st.sampled_from(["none", "last"]), units=st.integers(0, 4).map(bool))
    def open(self, num_tokens: int, hidden: str, units: bool) -> None:
        self.number += 1
        tokens = [self.number * 100 + i for i in range(num_tokens)]
        request = FetchRequest(tokens, hidden=hidden, units=units, queue_seconds=8.0)
        self.wanted[self.number] = Wanted(request)
        self.perform_client(self.client.open(self.now, self.number, request))

    @precondition(lambda self: self.live())
    @rule(pick=picks, first=st.integers(0, 2), num=st.integers(1, 6))
    def grant(self, pick: int, first: int, num: int) -> None:
        number = self.pick_live(pick)
        wanted = self.wanted[number]
        num_blocks = TINY_LAYOUT.num_blocks_for(len(wanted.request.tokens))
        if wanted.first_block is None:
            wanted.first_block = min(first, num_blocks)
        start = wanted.first_block + len(wanted.block_ids)
        ids = [self.free_blocks.pop() for _ in range(min(num, num_blocks - start))]
        wanted.block_ids += ids
        self.perform_client(self.client.grant(self.now, number, start, ids))

    @precondition(lambda self: self.live())
    @rule(pick=picks, is_meant=st.integers(0, 5))
    def cancel(self, pick: int, is_meant: int) -> None:
        if not is_meant:
            self.perform_client(self.client.cancel(self.pick_live(pick)))

    @precondition(lambda self: self.stored)
    @rule(pick=picks, num=st.integers(1, 3))
    def fill(self, pick: int, num: int) -> None:
        key = list(self.stored)[pick % len(self.stored)]
        self.fill_blocks(key, num)

    def fill_blocks(self, key: FetchKey, num: int) -> None:
        stored = self.stored[key]
        tokens = stored.request.tokens
        first = len(stored.blocks)
        end = min(first + num, TINY_LAYOUT.num_blocks_for(len(tokens)))
        if stored.is_computed or end == first:
            return
        stored.blocks += [block_content(tokens, block, TINY_LAYOUT) for block in range(first, end)]
        self.perform_server(self.server.filled(key, first, range(first, end), self.now))

    @precondition(lambda self: self.stored)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        key = list(self.stored)[pick % len(self.stored)]
        if self.stored[key].is_computed:
            return
        self.fill_blocks(key, 100)
        self.stored[key].is_computed = True
        self.perform_server(self.server.hidden(key, hidden_rows(self.stored[key].request.tokens), self.now))
        self.perform_server(self.server.computed(key, self.now))

    @precondition(lambda self: self.stored)
    @rule(pick=picks, is_meant=st.integers(0, 5))
    def store_fails(self, pick: int, is_meant: int) -> None:
        key = list(self.stored)[pick % len(self.stored)]
        if is_meant:
            return
        self.perform_server(self.server.failed(key, "out_of_luck", "as it happens"))

    # --- the channel

    @rule(num_rounds=st.integers(1, 5))
    def exchange(self, num_rounds: int) -> None:
        """A while without trouble, which is what most of life is."""
        for _ in range(num_rounds):
            self.deliver_to_server(1000)
            self.server_sends(1000)
            self.deliver_to_client(1000)

    @rule(num=st.integers(1, 8))
    def server_sends(self, num: int) -> None:
        for _ in range(num):
            outgoing = self.server.next_send(self.now, self.peer)
            if outgoing is None:
                return
            self.to_client.append([bytes(part) for part in encode(outgoing.frame, self.payload(outgoing))])
            self.server.mark_sent(outgoing, self.now)

    def payload(self, outgoing: Outgoing) -> list[bytes]:
        if isinstance(outgoing.frame, Hidden):
            return [outgoing.payload or b""]
        if not isinstance(outgoing.frame, Data):
            return []
        stored = self.stored[outgoing.frame.fetch_id]
        ranges = [self.plan.unit_range(0, group) for _, group in outgoing.frame.units]
        return [stored.blocks[block][r] for (block, _), r in zip(outgoing.frame.units, ranges, strict=True)]

    @rule(num=st.integers(1, 8))
    def deliver_to_server(self, num: int) -> None:
        for _ in range(min(num, len(self.to_server))):
            self.server_receives(self.to_server.pop(0))

    @rule(num=st.integers(1, 8))
    def deliver_to_client(self, num: int) -> None:
        for _ in range(num):
            if self.to_client:
                self.client_receives(self.to_client.pop(0))

    def server_receives(self, parts: list[bytes]) -> None:
        try:
            message = decode_from_client(parts)
        except PeerError:
            self.perform_server(self.server.receive_invalid(self.now, self.peer))
        else:
            self.perform_server(self.server.receive(self.now, self.peer, message))

    def client_receives(self, parts: list[bytes]) -> None:
        try:
            message = decode_from_server(parts)
        except PeerError:
            self.perform_client(self.client.receive_invalid())
        else:
            self.perform_client(self.client.receive(self.now, message), message.payload)

    @rule(pick=picks, is_to_server=st.booleans(), what=st.sampled_from(["drop", "duplicate", "late", "swap"]))
    def disturb(self, pick: int, is_to_server: bool, what: str) -> None:
        channel = self.to_server if is_to_server else self.to_client
        if not channel:
            return
        index = pick % len(channel)
        if what == "drop":
            del channel[index]
        elif what == "duplicate":
            channel.insert(index, channel[index])
        elif what == "late":
            channel.append(channel[index])
        else:
            channel.insert(index, channel.pop())

    @rule(pick=picks, is_to_server=st.booleans(), part=picks, bit=st.integers(0, 10**6))
    def corrupt(self, pick: int, is_to_server: bool, part: int, bit: int) -> None:
        channel = self.to_server if is_to_server else self.to_client
        if not channel:
            return
        parts = list(channel[pick % len(channel)])
        index = part % len(parts)
        changed = bytearray(parts[index])
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
        parts[index] = bytes(changed)
        channel[pick % len(channel)] = parts

    @precondition(lambda self: self.wanted)
    @rule(
        pick=picks,
        sequence=st.integers(0, 12),
        units=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=4),
        size=st.sampled_from([0, 1, 256, 512, 513]),
    )
    def hostile_data(self, pick: int, sequence: int, units: list[tuple[int, int]], size: int) -> None:
        number = 1 + pick % self.number
        self.wanted[number].is_tainted = True
        frame = Data(fetch_id=("client", number), sequence=sequence, units=units)
        self.client_receives([bytes(p) for p in encode(frame, [b"\xbd" * size] * len(units))])

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.1, 0.3, 1.0, 5.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.perform_client(self.client.tick(self.now))
        self.perform_server(self.server.tick(self.now))

    # --- effects

    def perform_server(self, effects: list[ServerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenStore):
                assert effect.key not in self.stored
                self.num_opened += 1
                self.releases[effect.key] -= 1
                self.stored[effect.key] = Stored(effect.request)
                self.perform_server(self.server.accepted(effect.key, 0))
            else:
                self.releases[effect.key] += 1
                del self.stored[effect.key]

    def perform_client(self, effects: list[ClientEffect], payload: object = ()) -> None:
        for effect in effects:
            if isinstance(effect, SendFrame):
                self.to_server.append([bytes(part) for part in encode(effect.frame)])
            elif isinstance(effect, WritePool):
                self.write(effect, payload[effect.part])  # type: ignore[index]
            elif isinstance(effect, TellHidden):
                wanted = self.wanted[effect.number]
                wanted.num_hidden += 1
                assert wanted.is_tainted or payload[0] == hidden_rows(wanted.request.tokens)  # type: ignore[index]
            elif isinstance(effect, TellEnded):
                self.ended(effect)
            elif isinstance(effect, Disconnect):
                self.reconnect(effect)

    def write(self, effect: WritePool, data: memoryview) -> None:
        block_id, offset = divmod(effect.pool.start, BLOCK_BYTES)
        owners = [n for n in self.live() if block_id in self.wanted[n].block_ids]
        assert len(owners) == 1, "a write into a block that no open fetch was granted"
        assert offset + len(data) <= BLOCK_BYTES
        assert len(data) == effect.pool.stop - effect.pool.start
        self.pool[effect.pool] = data

    def ended(self, effect: TellEnded) -> None:
        wanted = self.wanted[effect.number]
        assert not wanted.is_ended
        wanted.is_ended = True
        self.outcomes[effect.code] += 1
        num_blocks = TINY_LAYOUT.num_blocks_for(len(wanted.request.tokens))
        if effect.code is None and wanted.request.units and not wanted.is_tainted:
            assert effect.num_complete_blocks == num_blocks
            assert wanted.num_hidden == (wanted.request.hidden == "last")
        assert wanted.num_hidden <= 1 or wanted.is_tainted
        first = wanted.first_block or 0
        assert effect.num_complete_blocks <= first + len(wanted.block_ids)
        for block in range(first, effect.num_complete_blocks):
            start = wanted.block_ids[block - first] * BLOCK_BYTES
            expected = block_content(wanted.request.tokens, block, TINY_LAYOUT)
            assert wanted.is_tainted or self.pool[start : start + BLOCK_BYTES] == expected
        self.free_blocks += wanted.block_ids

    def reconnect(self, effect: Disconnect) -> None:
        self.perform_client(self.client.lost(effect.code, effect.message))
        self.client = self.new_client()
        self.perform_server(self.server.peer_gone(self.peer))
        self.peer = (0, str(int(self.peer[1]) + 1).encode())
        self.to_client.clear()
        self.to_server.clear()

    # --- the end

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        for _ in range(120):
            self.exchange(1)
            self.advance(0.5)
        assert not self.live()
        assert self.client.num_open_fetches == self.server.num_open_fetches == 0
        assert not self.stored
        assert not self.server.peers()
        assert not any(self.releases.values())
        assert len(self.free_blocks) == CLIENT_BLOCKS


def pass_on(pair: SessionPair, channel: list[list[bytes]], rng: random.Random, rate: float) -> list[list[bytes]]:
    """Empties the channel, and does to some of its messages what networks do."""
    messages, channel[:] = list(channel), []
    out: list[list[bytes]] = []
    for parts in messages:
        if rng.random() > rate:
            out.append(parts)
            continue
        fault = rng.choice(["drop", "duplicate", "swap", "late", "corrupt"])
        if fault == "corrupt":
            index = rng.choice([-1, -1, *range(len(parts))])
            changed = bytearray(parts[index])
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            out.append([changed if part is parts[index] else part for part in parts])  # type: ignore[misc]
        elif fault == "duplicate":
            out += [parts, parts]
        elif fault == "swap":
            out.insert(max(0, len(out) - 1), parts)
        elif fault == "late":
            channel.append(parts)
    return out


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.0, 0.02, 0.1, 0.3]))
def test_whole_lives_over_a_bad_channel(seed: int, rate: float) -> None:
    """The same pair, driven from end to end: most fetches get as far as their blocks."""
    rng = random.Random(seed)
    pair = SessionPair()
    pair.begin(rng.randint(1, 2), rng.choice([1, 1500, 10**6]))
    for _ in range(30):
        if len(pair.live()) < MAX_OPEN and pair.number < 6:
            pair.open(rng.randint(1, 60), rng.choice(["none", "last"]), True)
        if pair.live():
            pair.grant(rng.randrange(100), rng.randint(0, 2), rng.randint(1, 8))
        if pair.stored:
            if rng.random() < 0.8:
                pair.fill(rng.randrange(100), rng.randint(1, 3))
            else:
                pair.finish(rng.randrange(100))
        for parts in pass_on(pair, pair.to_server, rng, rate):
            pair.server_receives(parts)
        pair.server_sends(rng.randint(0, 20))
        for parts in pass_on(pair, pair.to_client, rng, rate):
            pair.client_receives(parts)
        pair.advance(0.05)
    pair.teardown()
    if not rate:
        assert not set(pair.outcomes) & {"corrupt", "sequence_gap", "protocol_error", "silent", "unreachable"}


TestSessionPair = SessionPair.TestCase
TestSessionPair.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
