"""Good checksums and bad intentions: no frame writes outside a grant or reaches into another's fetch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from common.kv_layout import KVLayout
from kvtransfer.frames import (
    Accepted,
    Cancel,
    ClientFrame,
    Credit,
    Data,
    End,
    Fail,
    Fetch,
    Hello,
    Hidden,
    KeepAlive,
    Message,
    ServerFrame,
)
from kvtransfer.layout_plan import LayoutPlan
from kvtransfer.requested_fetch import WritePool
from kvtransfer.session_client import ClientEffect, ClientSession, Disconnect, SendFrame, TellEnded
from kvtransfer.session_server import OpenStore, ReleaseStore, ServerLimits, ServerSession
from kvtransfer.store import FetchRequest
from tests.kvtransfer.doubles import TINY_LAYOUT

PLAN = LayoutPlan(TINY_LAYOUT)
BLOCK_BYTES = TINY_LAYOUT.block_bytes
GOOD = bytes(BLOCK_BYTES)
HELLO = Hello(version=1, sender="server", receiver="client", layout=TINY_LAYOUT, num_layer_groups=1, lease_seconds=10.0)
NUMBER = 1
ID = ("client", NUMBER)


def established_client(num_tokens: int = 32, window_bytes: int = 3 * BLOCK_BYTES) -> ClientSession:
    """One fetch of four blocks, open; blocks 1 to 3 are granted: pool blocks 11, 12, 13."""
    client = ClientSession(PLAN, "client", "server", 0.0, window_bytes=window_bytes)
    client.open(0.0, NUMBER, FetchRequest(range(num_tokens)))
    client.receive(0.0, Message(HELLO))
    client.grant(0.0, NUMBER, 1, [11, 12, 13])
    return client


def receive(client: ClientSession, frame: ServerFrame, payload: Sequence[bytes] = ()) -> list[ClientEffect]:
    return client.receive(0.0, Message(frame, [memoryview(part) for part in payload]))


def data(*blocks: int, sequence: int = 1, group: int = 0) -> Data:
    return Data(fetch_id=ID, sequence=sequence, units=[(block, group) for block in blocks])


def assert_ended(effects: list[ClientEffect], code: str) -> None:
    assert not [effect for effect in effects if isinstance(effect, WritePool)]
    assert [effect.code for effect in effects if isinstance(effect, TellEnded)] == [code]
    assert any(isinstance(effect, SendFrame) and isinstance(effect.frame, Cancel) for effect in effects)


def test_honest_data_is_written_where_it_was_granted() -> None:
    effects = receive(established_client(), data(2, 1), [GOOD, GOOD])
    ranges = [effect.pool for effect in effects if isinstance(effect, WritePool)]
    assert ranges == [slice(12 * BLOCK_BYTES, 13 * BLOCK_BYTES), slice(11 * BLOCK_BYTES, 12 * BLOCK_BYTES)]


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (data(0), [GOOD]),  # before the first block wanted
        (data(4), [GOOD]),  # behind the last
        (data(2**32 - 1), [GOOD]),
        (data(1, group=1), [GOOD]),  # no such group
        (data(1, 1), [GOOD, GOOD]),  # twice
        (data(1), [GOOD[:-1]]),  # short
        (data(1), [GOOD + b"x"]),  # long
        (data(1), [b""]),
        (data(1, 0), [GOOD, GOOD]),  # one good unit does not carry a bad one
        (data(1, 2, 3, 1), [GOOD] * 4),  # more than credit allows
    ],
)
def test_bad_data_ends_the_fetch_and_writes_nothing(frame: Data, payload: list[bytes]) -> None:
    assert_ended(receive(established_client(), frame, payload), "protocol_error")


def test_data_without_credit_ends_the_fetch() -> None:
    client = ClientSession(PLAN, "client", "server", 0.0)
    client.open(0.0, NUMBER, FetchRequest(range(32)))
    client.receive(0.0, Message(HELLO))
    assert_ended(receive(client, data(0), [GOOD]), "protocol_error")


def test_a_unit_sent_again_under_a_new_number_ends_the_fetch() -> None:
    client = established_client()
    receive(client, data(1), [GOOD])
    assert_ended(receive(client, data(1, sequence=2), [GOOD]), "protocol_error")


def test_late_and_duplicated_frames_write_nothing() -> None:
    client = established_client()
    receive(client, data(1), [GOOD])
    assert receive(client, data(1), [GOOD]) == []
    assert receive(client, data(2), [GOOD]) == []
    client.cancel(NUMBER)
    effects = receive(client, data(2, sequence=2), [GOOD])
    assert [type(effect.frame) for effect in effects if isinstance(effect, SendFrame)] == [Cancel]
    assert len(effects) == 1


def test_frames_of_another_client_are_not_ours() -> None:
    frame = Data(fetch_id=("another", NUMBER), sequence=1, units=[(1, 0)])
    assert receive(established_client(), frame, [GOOD]) == []


def test_a_gap_ends_the_fetch_and_says_what_is_missing() -> None:
    effects = receive(established_client(), data(1, sequence=3), [GOOD])
    assert_ended(effects, "sequence_gap")
    assert "frames 1 to 2" in next(effect.message for effect in effects if isinstance(effect, TellEnded))


def test_hidden_states_that_nobody_asked_for_end_the_fetch() -> None:
    client = ClientSession(PLAN, "client", "server", 0.0)
    client.open(0.0, NUMBER, FetchRequest(range(32), hidden="none"))
    client.receive(0.0, Message(HELLO))
    assert_ended(receive(client, Hidden(fetch_id=ID, sequence=1), [b"rows"]), "protocol_error")


def test_an_end_that_does_not_add_up_is_no_end() -> None:
    client = established_client()
    receive(client, data(1), [GOOD])
    assert_ended(receive(client, End(fetch_id=ID, sequence=2, num_units=3)), "protocol_error")


def test_an_early_end_is_incomplete_and_the_partial_block_does_not_count() -> None:
    client = established_client(num_tokens=20)  # blocks 0, 1 and half of 2
    receive(client, data(1), [GOOD])
    effects = receive(client, End(fetch_id=ID, sequence=2, num_units=1))
    ended = next(effect for effect in effects if isinstance(effect, TellEnded))
    assert (ended.code, ended.num_complete_blocks) == ("incomplete", 2)


def test_a_corrupt_message_ends_the_fetch_it_names_and_changes_nothing_else() -> None:
    message: Message[ServerFrame] = Message(data(1), [memoryview(GOOD)], is_intact=False)
    assert_ended(established_client().receive(0.0, message), "corrupt")


def test_a_server_that_talks_rubbish_is_left() -> None:
    client = established_client()
    effects = [effect for _ in range(100) for effect in client.receive_invalid()]
    assert any(isinstance(effect, Disconnect) and effect.code == "protocol_error" for effect in effects)


# --- towards a server ---------------------------------------------------------------------------------------------

PEER, OTHER = (0, b"peer"), (0, b"other")


def client_hello(sender: str) -> Hello:
    return msgspec.structs.replace(HELLO, sender=sender, receiver="server")


def established_server(limits: ServerLimits | None = None) -> ServerSession:
    server = ServerSession(PLAN, "server", limits=limits)
    server.receive(0.0, PEER, Message(client_hello("client")))
    server.receive(0.0, OTHER, Message(client_hello("another")))
    assert [type(frame) for frame in replies(server, PEER) + replies(server, OTHER)] == [Hello, Hello]
    return server


def fetch(number: int = NUMBER, client: str = "client", receiver: str = "server", num_tokens: int = 32) -> Fetch:
    return Fetch(fetch_id=(client, number), sequence=1, receiver=receiver, tokens=list(range(num_tokens)))


def replies(server: ServerSession, peer: tuple[int, bytes]) -> list[ServerFrame]:
    frames = []
    while outgoing := server.next_send(0.0, peer):
        frames.append(outgoing.frame)
        server.mark_sent(outgoing, 0.0)
    return frames


def fail_codes(server: ServerSession, peer: tuple[int, bytes] = PEER) -> list[str]:
    return [frame.code for frame in replies(server, peer) if isinstance(frame, Fail)]


def send(server: ServerSession, frame: ClientFrame, peer: tuple[int, bytes] = PEER) -> list[object]:
    return list(server.receive(0.0, peer, Message(frame)))


def test_a_fetch_opens_once_however_often_it_comes() -> None:
    server = established_server()
    assert [type(effect) for effect in send(server, fetch())] == [OpenStore]
    assert send(server, fetch()) == []
    assert fail_codes(server) == []


def test_only_its_own_connection_reaches_a_fetch() -> None:
    server = established_server()
    send(server, fetch())
    for frame in (
        Cancel(fetch_id=ID, sequence=2, receiver="server"),
        Credit(fetch_id=ID, sequence=2, receiver="server", first_block=0, num_units=9),
    ):
        assert send(server, frame, OTHER) == []
    assert server.num_open_fetches == 1
    assert fail_codes(server, OTHER) == ["unknown_fetch"]


def test_nobody_opens_a_fetch_in_anothers_name() -> None:
    server = established_server()
    assert send(server, fetch(client="another")) == []
    assert send(server, fetch(number=0)) == []
    assert fail_codes(server) == ["protocol_error", "protocol_error"]


def test_a_fetch_without_a_hello_is_refused() -> None:
    server = ServerSession(PLAN, "server")
    assert send(server, fetch()) == []
    assert fail_codes(server) == ["hello_required"]


def test_frames_for_another_instance_are_refused() -> None:
    server = established_server()
    assert send(server, fetch(receiver="the one before")) == []
    assert send(server, KeepAlive(fetch_id=ID, sequence=1, receiver="the one before")) == []
    assert fail_codes(server) == ["wrong_instance", "wrong_instance"]


def test_limits_are_kept_and_named() -> None:
    server = established_server(ServerLimits(max_open_fetches=1, max_tokens=40))
    send(server, fetch(1, num_tokens=41))
    send(server, fetch(2))
    send(server, fetch(3))
    fails = [frame for frame in replies(server, PEER) if isinstance(frame, Fail)]
    assert [frame.code for frame in fails] == ["too_many_tokens", "too_many_fetches"]
    assert "41" in fails[0].message
    assert "40" in fails[0].message


@pytest.mark.parametrize(("first_blocks", "code"), [((5,), "protocol_error"), ((1, 2), "protocol_error")])
def test_impossible_credit_ends_the_fetch(first_blocks: tuple[int, ...], code: str) -> None:
    server = established_server()
    send(server, fetch())
    effects: list[object] = []
    for sequence, first in enumerate(first_blocks, 2):
        frame = Credit(fetch_id=ID, sequence=sequence, receiver="server", first_block=first, num_units=1)
        effects += send(server, frame)
    assert effects == [ReleaseStore(ID, code)]
    assert fail_codes(server) == [code]


def test_boundless_credit_is_bounded_by_what_is_filled() -> None:
    server = established_server()
    send(server, fetch())
    send(server, Credit(fetch_id=ID, sequence=2, receiver="server", first_block=3, num_units=2**53 - 1))
    server.accepted(ID, 0)
    server.filled(ID, 0, [7, 8, 9, 10], 0.0)
    frames = replies(server, PEER)
    assert [type(frame) for frame in frames] == [Accepted, Data]
    assert isinstance(frames[1], Data)
    assert frames[1].units == [(3, 0)]


def test_a_peer_that_sends_many_bad_frames_is_no_longer_heard() -> None:
    server = established_server(ServerLimits(max_bad_frames=3))
    send(server, fetch())
    effects = [effect for _ in range(5) for effect in server.receive_invalid(0.0, PEER)]
    assert effects == [ReleaseStore(ID, "protocol_error")]
    assert send(server, fetch(2)) == []
    assert [type(effect) for effect in send(server, fetch(1, client="another"), OTHER)] == [OpenStore]


def test_replies_and_peers_are_bounded() -> None:
    server = ServerSession(PLAN, "server", limits=ServerLimits(max_peers=2, max_replies=3))
    for number in range(1, 10):
        send(server, fetch(number))
    assert len(replies(server, PEER)) == 3
    send(server, client_hello("another"), OTHER)
    send(server, client_hello("third"), (0, b"third"))
    assert len(server.peers()) == 2
    assert server.dropped_frames["too_many_peers"] == 1


def test_a_store_that_breaks_its_promise_fails_only_that_fetch() -> None:
    server = established_server()
    send(server, fetch(1))
    send(server, fetch(2))
    assert server.filled(("client", 1), 1, [3], 0.0) == [ReleaseStore(("client", 1), "internal_error")]
    assert server.num_open_fetches == 1


OTHER_LAYOUTS = {
    "num_layers": KVLayout(3, 1, 4, 8, "float32", "tiny"),
    "num_kv_heads": KVLayout(2, 2, 4, 8, "float32", "tiny"),
    "head_dim": KVLayout(2, 1, 8, 8, "float32", "tiny"),
    "block_size": KVLayout(2, 1, 4, 16, "float32", "tiny"),
    "dtype": KVLayout(2, 1, 4, 8, "bfloat16", "tiny"),
    "model_fingerprint": KVLayout(2, 1, 4, 8, "float32", "other"),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_each_single_mismatch_of_layouts_is_refused_by_both_ends(name: str) -> None:
    """D-16: a refused pair, with both sides' values, never a bad answer."""
    theirs = OTHER_LAYOUTS[name]
    client = ClientSession(PLAN, "client", "server", 0.0)
    client.open(0.0, NUMBER, FetchRequest([1]))
    (refusal,) = client.receive(0.0, Message(msgspec.structs.replace(HELLO, layout=theirs)))
    assert isinstance(refusal, Disconnect)
    server = ServerSession(PLAN, "server")
    server.receive(0.0, PEER, Message(msgspec.structs.replace(client_hello("client"), layout=theirs)))
    (fail,) = replies(server, PEER)
    assert isinstance(fail, Fail)
    for code, message in ((refusal.code, refusal.message), (fail.code, fail.message)):
        assert code == "layout_mismatch"
        for layout in (TINY_LAYOUT, theirs):
            assert f"{name} {getattr(layout, name)}" in message
    assert send(server, fetch()) == []


def test_other_versions_and_layer_groups_are_refused() -> None:
    for change, code in (({"version": 2}, "version_mismatch"), ({"num_layer_groups": 2}, "layout_mismatch")):
        server = ServerSession(PLAN, "server")
        server.receive(0.0, PEER, Message(msgspec.structs.replace(client_hello("client"), **change)))
        (fail,) = replies(server, PEER)
        assert isinstance(fail, Fail)
        assert fail.code == code
        assert "1" in fail.message
        assert "2" in fail.message
