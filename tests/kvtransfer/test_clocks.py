"""The clocks of a fetch, driven by a test's own time: queue, progress, hold, lease, connecting, keep-alives."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.frames import (
    Accepted,
    Credit,
    Data,
    Done,
    End,
    Fail,
    Fetch,
    Hello,
    Hidden,
    KeepAlive,
    Message,
    ServerFrame,
    ServerKeepAlive,
)
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.session import FetchTimes
from kvtransfer.session_client import ClientSession, Disconnect, SendFrame, TellEnded
from kvtransfer.session_server import ReleaseStore, ServerEffect, ServerSession
from kvtransfer.store import FetchRequest
from tests.kvtransfer.doubles import TINY_LAYOUT

PLAN = LayoutPlan(TINY_LAYOUT)
TIMES = FetchTimes(lease_seconds=4.0, progress_seconds=20.0, hold_seconds=30.0, connect_seconds=2.0)
PEER = (0, b"peer")
ID = ("client", 1)


class Serving:
    """A server session with one fetch of four blocks open, and a client that stays alive."""

    def __init__(self, *, queue_seconds: float = 50.0, units: bool = True) -> None:
        self.server = ServerSession(PLAN, "server", TIMES)
        self.sequence = 1
        self.now = 0.0
        self.credit: int | None = None
        hello = Hello(
            version=1, sender="client", receiver="server", layout=TINY_LAYOUT, num_layer_groups=1, lease_seconds=4.0
        )
        self.server.receive(0.0, PEER, Message(hello))
        fetch = Fetch(
            fetch_id=ID, sequence=1, receiver="server", tokens=[0] * 32, queue_seconds=queue_seconds, units=units
        )
        self.server.receive(0.0, PEER, Message(fetch))
        self.server.accepted(ID, 0)
        self.sent()

    def sent(self) -> list[ServerFrame]:
        frames = []
        while outgoing := self.server.next_send(self.now, PEER):
            frames.append(outgoing.frame)
            self.server.mark_sent(outgoing, self.now)
        return frames

    def give_credit(self, num_units: int) -> None:
        self.sequence += 1
        self.credit = num_units
        frame = Credit(fetch_id=ID, sequence=self.sequence, receiver="server", first_block=0, num_units=num_units)
        self.server.receive(self.now, PEER, Message(frame))

    def pass_time(self, seconds: float) -> list[ServerEffect]:
        """The client keeps saying that it is there; returns what ended within that time."""
        effects: list[ServerEffect] = []
        end = self.now + seconds
        while self.now < end and not effects:
            self.now = min(end, self.now + 1.0)
            first = None if self.credit is None else 0
            frame = KeepAlive(
                fetch_id=ID, sequence=self.sequence, receiver="server", first_block=first, num_units=self.credit or 0
            )
            effects = self.server.receive(self.now, PEER, Message(frame)) + self.server.tick(self.now)
            if not effects:
                self.sent()
        return effects

    def assert_failed(self, effects: list[ServerEffect], code: str) -> None:
        assert effects == [ReleaseStore(ID, code)]
        (fail,) = self.sent()
        assert isinstance(fail, Fail)
        assert fail.code == code


def test_queue_clock_runs_until_computing_starts() -> None:
    serving = Serving(queue_seconds=10.0)
    assert serving.pass_time(9.5) == []
    serving.assert_failed(serving.pass_time(1.0), "queue_timeout")


def test_queue_clock_ends_with_the_first_computed_token() -> None:
    serving = Serving(queue_seconds=10.0)
    serving.pass_time(5.0)
    serving.server.progress(ID, 8, serving.now)
    assert serving.pass_time(15.0) == []


def test_cached_blocks_do_not_count_as_computing() -> None:
    serving = Serving(queue_seconds=10.0)
    serving.server.accepted(ID, 16)
    serving.server.filled(ID, 0, [1, 2], serving.now)
    serving.assert_failed(serving.pass_time(11.0), "queue_timeout")


def test_progress_clock_runs_while_computing() -> None:
    serving = Serving()
    serving.server.progress(ID, 8, serving.now)
    serving.pass_time(19.0)
    serving.server.progress(ID, 16, serving.now)
    assert serving.pass_time(19.0) == []
    serving.assert_failed(serving.pass_time(2.0), "no_progress")


def test_progress_clock_runs_while_there_is_credit_and_the_transport_takes_nothing() -> None:
    serving = Serving()
    serving.give_credit(4)
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    serving.sent = list  # type: ignore[method-assign] # from now on nothing gets out
    assert serving.pass_time(19.5) == []
    assert serving.pass_time(1.0) == [ReleaseStore(ID, "no_progress")]


def test_hold_clock_fails_a_fetch_that_is_not_collected() -> None:
    serving = Serving()
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    assert serving.pass_time(29.0) == []
    serving.assert_failed(serving.pass_time(2.0), "not_collected")


def open_second_fetch(serving: Serving, *, has_credit: bool) -> tuple[str, int]:
    """Another fetch of the same client, which the store has not begun with."""
    second = ("client", 2)
    fetch = Fetch(fetch_id=second, sequence=1, receiver="server", tokens=[1] * 32, queue_seconds=50.0)
    serving.server.receive(serving.now, PEER, Message(fetch))
    if has_credit:
        credit = Credit(fetch_id=second, sequence=2, receiver="server", first_block=0, num_units=1)
        serving.server.receive(serving.now, PEER, Message(credit))
    return second


def test_uncollected_fetch_does_not_keep_out_one_whose_client_has_room() -> None:
    serving = Serving()
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    open_second_fetch(serving, has_credit=True)
    assert serving.server.tick(0.0) == []
    assert serving.server.next_deadline() == 0.5
    effects = serving.server.tick(0.5)
    assert effects == [ReleaseStore(ID, "not_collected")]
    assert serving.server.tick(3.0) == []


def test_uncollected_fetch_stays_while_nobody_with_room_waits_for_it() -> None:
    serving = Serving()
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    open_second_fetch(serving, has_credit=False)
    serving.server.tick(0.0)
    assert serving.pass_time(20.0) == []


def test_uncollected_fetch_stays_while_the_store_still_computes() -> None:
    serving = Serving()
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    second = open_second_fetch(serving, has_credit=True)
    serving.server.accepted(second, 0)
    serving.server.tick(0.0)
    assert serving.pass_time(10.0) == []


def test_fetch_that_is_being_collected_is_not_in_the_way() -> None:
    serving = Serving()
    serving.give_credit(2)
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    open_second_fetch(serving, has_credit=True)
    serving.server.tick(0.0)
    assert serving.pass_time(10.0) == []


def test_hold_clock_starts_again_with_every_credit() -> None:
    serving = Serving()
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    for num_units in (1, 2, 3):
        serving.pass_time(25.0)
        serving.give_credit(num_units)
        assert [type(frame) for frame in serving.sent()] == [Data]
    serving.assert_failed(serving.pass_time(31.0), "not_collected")


def test_a_fetch_whose_done_never_comes_is_not_held_for_ever() -> None:
    serving = Serving()
    serving.give_credit(4)
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.computed(ID, 0.0)
    assert [type(frame) for frame in serving.sent()] == [Data, End]
    serving.assert_failed(serving.pass_time(31.0), "not_collected")


def test_a_client_silent_past_the_lease_loses_everything_it_had_open() -> None:
    serving = Serving()
    assert serving.server.tick(3.9) == []
    assert serving.server.tick(4.0) == [ReleaseStore(ID, "silent")]
    assert serving.server.peers() == []


def test_hidden_states_alone_need_no_credit() -> None:
    serving = Serving(units=False)
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.hidden(ID, b"rows", 0.0)
    serving.server.computed(ID, 0.0)
    frames = serving.sent()
    assert [type(frame) for frame in frames] == [Hidden, End]
    assert isinstance(frames[1], End)
    assert frames[1].num_units == 0
    done = Done(fetch_id=ID, sequence=2, receiver="server")
    assert serving.server.receive(0.0, PEER, Message(done)) == [ReleaseStore(ID, "complete")]


def test_hidden_states_pass_units_that_wait_for_credit_and_for_the_transport() -> None:
    serving = Serving()
    serving.give_credit(4)
    serving.server.filled(ID, 0, [1, 2, 3, 4], 0.0)
    serving.server.hidden(ID, b"rows", 0.0)
    serving.server.computed(ID, 0.0)
    assert [type(frame) for frame in serving.sent()] == [Hidden, Data, End]


def test_keepalives_say_how_far_computing_is() -> None:
    serving = Serving()
    serving.server.progress(ID, 16, 0.0)
    serving.now = 1.0
    (frame,) = serving.sent()
    assert isinstance(frame, ServerKeepAlive)
    assert (frame.num_computed_tokens, frame.sequence) == (16, 1)


def test_the_next_deadline_is_never_later_than_what_it_announces() -> None:
    serving = Serving(queue_seconds=10.0)
    assert serving.server.next_deadline() == 1.0  # a keep-alive, a quarter of the client's lease
    assert ServerSession(PLAN, "server").next_deadline() is None


# --- the client ---------------------------------------------------------------------------------------------------


def client_with_fetch(queue_seconds: float = 50.0) -> ClientSession:
    client = ClientSession(PLAN, "client", "server", 0.0, TIMES)
    client.open(0.0, 1, FetchRequest([0] * 32, queue_seconds=queue_seconds))
    return client


def say_hello(client: ClientSession, now: float = 0.0) -> None:
    hello = Hello(
        version=1, sender="server", receiver="client", layout=TINY_LAYOUT, num_layer_groups=1, lease_seconds=4.0
    )
    client.receive(now, Message(hello))


def run_client(client: ClientSession, seconds: float, *, frame: ServerFrame) -> tuple[float, str | None]:
    """The server repeats `frame` every second; when and why the fetch ended."""
    now = 0.0
    while now < seconds:
        now += 1.0
        for effect in client.receive(now, Message(frame)) + client.tick(now):
            if isinstance(effect, TellEnded):
                return now, effect.code
    return now, None


def test_a_server_that_never_answers_is_left_soon() -> None:
    client = client_with_fetch()
    assert not any(isinstance(effect, Disconnect) for effect in client.tick(1.9))
    (effect,) = client.tick(2.0)
    assert isinstance(effect, Disconnect)
    assert effect.code == "unreachable"


def test_a_server_that_falls_silent_is_left_after_the_lease() -> None:
    client = client_with_fetch()
    say_hello(client, 1.0)
    assert not any(isinstance(effect, Disconnect) for effect in client.tick(4.9))
    (effect,) = client.tick(5.0)
    assert isinstance(effect, Disconnect)
    assert effect.code == "silent"


def test_a_server_that_keeps_us_waiting_for_ever_is_left_too() -> None:
    client = client_with_fetch(queue_seconds=10.0)
    say_hello(client)
    alive = ServerKeepAlive(fetch_id=ID, sequence=0)
    assert run_client(client, 100, frame=alive) == (14.0, "queue_timeout")


def test_a_server_that_stops_in_the_middle_is_left() -> None:
    client = client_with_fetch()
    say_hello(client)
    client.receive(0.0, Message(Accepted(fetch_id=ID, sequence=1, num_cached_tokens=0)))
    alive = ServerKeepAlive(fetch_id=ID, sequence=1, num_computed_tokens=8)
    assert run_client(client, 100, frame=alive) == (25.0, "no_progress")


def test_a_lost_tail_is_noticed_by_the_next_keepalive() -> None:
    client = client_with_fetch()
    say_hello(client)
    assert run_client(client, 5, frame=ServerKeepAlive(fetch_id=ID, sequence=2)) == (1.0, "sequence_gap")


def test_keepalives_repeat_sequence_and_credit() -> None:
    client = client_with_fetch()
    say_hello(client)
    client.grant(0.5, 1, 2, [5, 6])
    (effect,) = client.tick(1.0)
    assert isinstance(effect, SendFrame)
    alive = KeepAlive(fetch_id=ID, sequence=2, receiver="server", first_block=2, num_units=2)
    assert effect.frame == alive


def test_an_idle_session_wants_nothing() -> None:
    client = client_with_fetch()
    client.cancel(1)
    assert client.next_deadline() is None
    assert client.tick(1e9) == []


def test_credit_follows_what_has_come_in() -> None:
    """A running total, at most a window ahead of what is in and never beyond the grant."""
    block_bytes = TINY_LAYOUT.block_bytes
    client = ClientSession(PLAN, "client", "server", 0.0, TIMES, window_bytes=4 * block_bytes)
    client.open(0.0, 1, FetchRequest([0] * 80))
    say_hello(client)
    credits = [credit_of(client.grant(0.0, 1, 0, list(range(10))))]
    for block in range(10):
        frame = Data(fetch_id=ID, sequence=block + 1, units=[(block, 0)])
        credits.append(credit_of(client.receive(0.0, Message(frame, [memoryview(bytes(block_bytes))]))))
    assert credits == [4, 5, 6, 7, 8, 9, 10, None, None, None, None]


def credit_of(effects: Sequence[object]) -> int | None:
    frames = [effect.frame for effect in effects if isinstance(effect, SendFrame)]
    return next((frame.num_units for frame in frames if isinstance(frame, Credit)), None)
