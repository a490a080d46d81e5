"""Frames of the fetch plane: what they say, their codec and their validation. Knows no socket and no state.

One message is [header, checksum, payload...]: a msgpack header (one of the structs below, as a tagged array), the
zlib.crc32 of header and payload as 4 little-endian bytes, and for DATA one raw buffer for each unit, for HIDDEN one
raw buffer. The header is inside the checksum because a flipped bit in a block number would be as wrong as one in the
data. zlib.crc32: in the standard library, 3.5 GiB/s here, and it lets other threads run meanwhile.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from common.errors import PeerError
from common.kv_layout import KVLayout
from common.messages import Count, Id, Tokens
from kvtransfer.store import HiddenMode

FETCH_PROTOCOL_VERSION = 1
MAX_LAYER_GROUPS = 256
MAX_DATA_UNITS = 256
MAX_HEADER_BYTES = 8 << 20  # a FETCH of the longest prompt is 5 MiB
MAX_HIDDEN_BYTES = 64 << 20
CHECKSUM_BYTES = 4
CONNECTION = 0  # the fetch number that stands for the connection itself, in a FAIL that answers a HELLO

Buffer = bytes | bytearray | memoryview
FetchId = tuple[Id, Count]  # (client instance id, number from 1 on): never reused
Lease = Annotated[float, Meta(gt=0.0, le=3600.0)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Unit = tuple[Annotated[int, Meta(ge=0, lt=2**32)], Annotated[int, Meta(ge=0, lt=MAX_LAYER_GROUPS)]]  # (block, group)


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """First frame both ways. Everything but the ids and the lease must be equal at both ends.

    receiver: the instance it is meant for. lease_seconds: how long the sender waits for a silent peer.
    """

    version: Count
    sender: Id
    receiver: Id
    layout: KVLayout
    num_layer_groups: Annotated[int, Meta(ge=1, le=MAX_LAYER_GROUPS)]
    lease_seconds: Lease


class _FetchFrame(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """sequence: numbers this fetch's frames in this direction from 1; a keep-alive repeats the last one sent."""

    fetch_id: FetchId
    sequence: Count


class _ToServer(_FetchFrame, frozen=True, kw_only=True):
    """receiver: the server instance it is meant for."""

    receiver: Id


# --- client -> server ---------------------------------------------------------------------------------------------


class Fetch(_ToServer, frozen=True, kw_only=True):
    """Stream the KV blocks of `tokens`, and hidden states; fields as in store.FetchRequest."""

    tokens: Annotated[Tokens, Meta(min_length=1)]
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    hidden: HiddenMode = "last"
    units: bool = True
    compute: bool = True
    priority: Priority = 0
    queue_seconds: Annotated[float, Meta(ge=0.0, le=1e7)] = 60.0


class Credit(_ToServer, frozen=True, kw_only=True):
    """The server may have sent `num_units` units in all (a running total), of blocks from `first_block` on."""

    first_block: Count
    num_units: Count


class Cancel(_ToServer, frozen=True, kw_only=True):
    """Forget this fetch. Also the answer to a frame of a fetch that the client does not know."""


class Done(_ToServer, frozen=True, kw_only=True):
    """Everything is in and verified."""


class KeepAlive(_ToServer, frozen=True, kw_only=True):
    """The client is there; repeats its last credit. first_block None: no credit yet."""

    first_block: Count | None = None
    num_units: Count = 0


# --- server -> client ---------------------------------------------------------------------------------------------


class Accepted(_FetchFrame, frozen=True, kw_only=True):
    num_cached_tokens: Count


class Fail(_FetchFrame, frozen=True, kw_only=True):
    """The fetch is over at the server; `code` is one of session.FailCode or the store's own."""

    code: Id
    message: Annotated[str, Meta(max_length=8192)] = ""


class Data(_FetchFrame, frozen=True, kw_only=True):
    """One payload buffer for each unit; a unit is (block of the tokens, layer group)."""

    units: Annotated[list[Unit], Meta(min_length=1, max_length=MAX_DATA_UNITS)]


class Hidden(_FetchFrame, frozen=True, kw_only=True):
    """One payload buffer: rows of float32. Needs no credit."""


class End(_FetchFrame, frozen=True, kw_only=True):
    num_units: Count


class ServerKeepAlive(_FetchFrame, frozen=True, kw_only=True, tag="KeepAlive"):
    num_computed_tokens: Count = 0


ClientFrame = Hello | Fetch | Credit | Cancel | Done | KeepAlive
ServerFrame = Hello | Accepted | Fail | Data | Hidden | End | ServerKeepAlive

_F = TypeVar("_F")

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientFrame] = msgspec.msgpack.Decoder(ClientFrame)
_server_decoder: msgspec.msgpack.Decoder[ServerFrame] = msgspec.msgpack.Decoder(ServerFrame)


@dataclass(frozen=True)
class Message(Generic[_F]):
    """A frame and its payload as they came in. Not intact: the checksum differs, so no field may be acted upon."""

    frame: _F
    payload: Sequence[memoryview] = ()
    is_intact: bool = True


def encode(frame: ClientFrame | ServerFrame, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    header = _encoder.encode(frame)
    return [header, _checksum(header, payload).to_bytes(CHECKSUM_BYTES, "little"), *payload]


def decode_from_client(parts: Sequence[Buffer]) -> Message[ClientFrame]:
    """Raises PeerError when the parts are no valid message of a client."""
    return _decode(parts, _client_decoder)


def decode_from_server(parts: Sequence[Buffer]) -> Message[ServerFrame]:
    """Raises PeerError when the parts are no valid message of a server."""
    return _decode(parts, _server_decoder)


def num_bytes(parts: Sequence[Buffer]) -> int:
    return sum(len(part) for part in parts)


def _checksum(header: Buffer, payload: Sequence[Buffer]) -> int:
    value = zlib.crc32(header)
    for part in payload:
        value = zlib.crc32(part, value)
    return value


def _decode(parts: Sequence[Buffer], decoder: msgspec.msgpack.Decoder[_F]) -> Message[_F]:
    if len(parts) < 2 or len(parts[1]) != CHECKSUM_BYTES:
        raise PeerError(
            f"fetch message has {len(parts)} parts, must be header, {CHECKSUM_BYTES} checksum bytes, payload"
        )
    if len(parts[0]) > MAX_HEADER_BYTES:
        raise PeerError(f"fetch header has {len(parts[0])} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        frame = decoder.decode(parts[0])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"fetch header is not valid: {error}") from None
    payload = [memoryview(part) for part in parts[2:]]
    if len(payload) != _num_payload_parts(frame):
        raise PeerError(f"{type(frame).__name__} has {len(payload)} payload parts, not {_num_payload_parts(frame)}")
    return Message(frame, payload, _checksum(parts[0], payload) == int.from_bytes(parts[1], "little"))


def _num_payload_parts(frame: object) -> int:
    if isinstance(frame, Data):
        return len(frame.units)
    return 1 if isinstance(frame, Hidden) else 0
