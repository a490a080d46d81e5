"""The fetch plane's codec: round trips, and garbage of every kind is refused with PeerError and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PeerError
from common.messages import MAX_PROMPT_TOKENS
from kvtransfer import frames
from kvtransfer.frames import (
    Accepted,
    Cancel,
    Credit,
    Data,
    Done,
    End,
    Fail,
    Fetch,
    Hello,
    Hidden,
    KeepAlive,
    ServerKeepAlive,
    decode_from_client,
    decode_from_server,
    encode,
)
from tests.kvtransfer.doubles import TINY_LAYOUT

HELLO = Hello(version=1, sender="a", receiver="b", layout=TINY_LAYOUT, num_layer_groups=2, lease_seconds=10.0)
IDS: dict[str, Any] = {"fetch_id": ("client", 7), "sequence": 3}
CLIENT_FRAMES = [
    HELLO,
    Fetch(**IDS, receiver="s", tokens=[0, 2**32 - 1], cache_salt="x", hidden="all", units=False, compute=False),
    Credit(**IDS, receiver="s", first_block=4, num_units=9),
    Cancel(**IDS, receiver="s"),
    Done(**IDS, receiver="s"),
    KeepAlive(**IDS, receiver="s"),
    KeepAlive(**IDS, receiver="s", first_block=1, num_units=2),
]
SERVER_FRAMES = [
    HELLO,
    Accepted(**IDS, num_cached_tokens=16),
    Fail(**IDS, code="queue_timeout", message="too late"),
    End(**IDS, num_units=5),
    ServerKeepAlive(**IDS, num_computed_tokens=32),
]


@pytest.mark.parametrize("frame", CLIENT_FRAMES, ids=lambda frame: type(frame).__name__)
def test_client_frames_round_trip(frame: object) -> None:
    message = decode_from_client(encode(frame))
    assert (message.frame, message.is_intact) == (frame, True)


@pytest.mark.parametrize("frame", SERVER_FRAMES, ids=lambda frame: type(frame).__name__)
def test_server_frames_round_trip(frame: object) -> None:
    message = decode_from_server(encode(frame))
    assert (message.frame, message.is_intact) == (frame, True)


@given(
    units=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255)), min_size=1, max_size=8), data=st.data()
)
def test_data_round_trips_with_its_payload(units: list[tuple[int, int]], data: st.DataObject) -> None:
    payload = [data.draw(st.binary(max_size=64)) for _ in units]
    message = decode_from_server(encode(Data(**IDS, units=units), payload))
    assert isinstance(message.frame, Data)
    assert message.frame.units == units
    assert [bytes(part) for part in message.payload] == payload
    assert message.is_intact


@given(part=st.integers(0, 2), position=st.integers(0, 10**6))
def test_any_flipped_bit_shows(part: int, position: int) -> None:
    parts = [bytearray(p) for p in encode(Hidden(**IDS), [b"some rows of float32"])]
    parts[part][position // 8 % len(parts[part])] ^= 1 << position % 8
    try:
        message = decode_from_server(parts)
    except PeerError:
        return
    assert not message.is_intact


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_refused(parts: list[bytes]) -> None:
    for decode in (decode_from_client, decode_from_server):
        with pytest.raises(PeerError):
            decode(parts)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)


@given(
    tag=st.sampled_from(["Fetch", "Credit", "Data", "Hello", "KeepAlive", "End"]), body=st.lists(values, max_size=10)
)
def test_wrong_fields_are_refused_or_well_typed(tag: str, body: list[object]) -> None:
    header = msgspec.msgpack.encode([tag, *body])
    for decode in (decode_from_client, decode_from_server):
        try:
            message = decode([header, b"\0\0\0\0"])
        except PeerError:
            continue
        # Whatever came through must survive its own codec: it is a frame within all its ranges.
        assert decode([msgspec.msgpack.encode(message.frame), b"\0\0\0\0"]).frame == message.frame


FETCH: dict[str, Any] = {"fetch_id": ("client", 7), "sequence": 1, "receiver": "s"}


@pytest.mark.parametrize(
    "frame",
    [
        Fetch(**FETCH, tokens=[]),
        Fetch(**FETCH, tokens=[-1]),
        Fetch(**FETCH, tokens=[2**32]),
        Fetch(**FETCH, tokens=[0], queue_seconds=float("nan")),
        Fetch(**FETCH, tokens=[0], queue_seconds=-1.0),
        Fetch(**FETCH, tokens=[0], hidden="some"),
        Fetch(**FETCH, tokens=[0], cache_salt="s" * 257),
        Fetch(fetch_id=("c" * 129, 1), sequence=1, receiver="s", tokens=[0]),
        Fetch(fetch_id=("client", -1), sequence=1, receiver="s", tokens=[0]),
        Credit(**FETCH, first_block=-1, num_units=0),
        KeepAlive(fetch_id=("client", 1), sequence=-1, receiver="s"),
        msgspec.structs.replace(HELLO, lease_seconds=0.0),
        msgspec.structs.replace(HELLO, num_layer_groups=0),
    ],
)
def test_values_out_of_range_are_refused(frame: object) -> None:
    with pytest.raises(PeerError, match="not valid"):
        decode_from_client(encode(frame))


def test_sizes_are_checked_before_anything_is_decoded() -> None:
    with pytest.raises(PeerError, match=f"at most {frames.MAX_HEADER_BYTES}"):
        decode_from_client([bytes(frames.MAX_HEADER_BYTES + 1), b"\0\0\0\0"])
    with pytest.raises(PeerError, match="not valid"):
        decode_from_client(encode(Fetch(**FETCH, tokens=[0] * (MAX_PROMPT_TOKENS + 1))))


def test_a_prompt_of_the_greatest_length_fits_its_header() -> None:
    fetch = Fetch(**FETCH, tokens=[2**32 - 1] * MAX_PROMPT_TOKENS, cache_salt="s" * 256)
    assert len(encode(fetch)[0]) < frames.MAX_HEADER_BYTES


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (End(**IDS, num_units=1), [b"x"]),
        (Hidden(**IDS), []),
        (Hidden(**IDS), [b"x", b"y"]),
        (Data(**IDS, units=[(0, 0), (1, 0)]), [b"x"]),
        (Data(**IDS, units=[(0, 0)]), [b"x", b"y"]),
    ],
)
def test_payload_must_match_the_frame(frame: frames.ServerFrame, payload: list[bytes]) -> None:
    with pytest.raises(PeerError, match="payload parts"):
        decode_from_server(encode(frame, payload))
