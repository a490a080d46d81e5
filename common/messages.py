"""Control messages between nodes and proxies: what they say, their codec and their validation.

One ZMQ message is two frames: an `Envelope` and one of the structs below, both msgpack. Types, lengths and ranges are
checked by the decoder; a bad message raises PeerError and is never half used. Deadlines travel as remaining seconds.
"""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from common.errors import PeerError
from common.kv_layout import KVLayout
from common.sampling_params import SamplingParams

PROTOCOL_VERSION = 2
MAX_CHOICES = 256
MAX_PROMPT_TOKENS = 2**20
MAX_MESSAGE_BYTES = 64 << 20

Role = Literal["prefill", "decode"]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e7)]
Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=MAX_PROMPT_TOKENS)]


def new_instance_id() -> str:
    """Names one run of one process; a restarted process is another instance."""
    return uuid.uuid4().hex[:16]


def new_node_id(host: str) -> str:
    """The same for a node, with the first part of its host's name in front, by which people find it."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", host.partition(".")[0][:40]).strip("-")
    return f"{name}-{uuid.uuid4().hex[:8]}" if name else new_instance_id()


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Header of every control message.

    sender: the instance that sent it. receiver: the instance it is meant for ("" in a first Hello).
    sequence: counts the sender's messages on this connection from 1; a gap means that ZMQ lost some.
    received: the last sequence the sender had received from the receiver.
    """

    sender: Id
    receiver: Annotated[str, Meta(max_length=128)]
    sequence: Count
    received: Count


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# --- node -> proxy ------------------------------------------------------------------------------------------------


class NodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Load now, and counters since the node's start.

    num_unused_slots: slots of allocated blocks that hold no KV. num_preemptions: those by swap included.
    """

    num_running: Count = 0
    num_waiting: Count = 0
    num_waiting_for_kv: Count = 0
    num_swapped: Count = 0
    num_queued_tokens: Count = 0
    num_free_blocks: Count = 0
    num_blocks: Count = 0
    num_held_blocks: Count = 0
    num_unused_slots: Count = 0
    num_host_blocks: Count = 0
    num_free_host_blocks: Count = 0
    prefix_cache_queries: Count = 0
    prefix_cache_hits: Count = 0
    num_preemptions: Count = 0
    num_swap_preemptions: Count = 0


class LiveRequest(msgspec.Struct, frozen=True, array_like=True):
    request_id: Id
    leg: Count


class Hello(_Message, frozen=True):
    """First message of a node, and its answer to Rehello: who it is, and every request of this proxy it holds."""

    protocol_version: int
    role: Role
    model: Text
    layout: KVLayout
    max_model_len: Count
    vocab_size: Count
    max_num_seqs: Count
    fetch_endpoints: Annotated[list[Text], Meta(max_length=16)]
    stats: NodeStats
    live_requests: Annotated[list[LiveRequest], Meta(max_length=2**16)] = []


class Status(_Message, frozen=True):
    """Heartbeat of a node. A draining node takes no new work."""

    stats: NodeStats
    is_draining: bool = False


class Accepted(_Message, frozen=True):
    request_id: Id
    leg: Count


class Rejected(_Message, frozen=True):
    """`is_retryable`: another node may take it; otherwise the request itself is at fault (`message` names why).

    param: the client's field that is at fault, where the node knows it.
    """

    request_id: Id
    leg: Count
    code: Text
    message: Text
    is_retryable: bool
    param: Text = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token and of the most likely ones in its place (best first), of the raw logits, float32.

    rank: of the token among all, 1 for the most likely one; known of prompt tokens only, otherwise 0.
    """

    logprob: float
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: Count = 0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one choice of one request; `index` is that of the first one. The last one carries finish_reason.

    prompt_logprobs: of the prompt's tokens from position `prompt_start` on (the first token has none). They come before
        the first tokens, in pieces, with the first choice that the Decode names; token_ids is empty then.
    num_cached_tokens: prompt tokens whose KV nobody computed for this request; in a choice's first output of a leg.
    """

    request_id: Id
    leg: Count
    index: Count
    choice: Count = 0
    token_ids: Tokens = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_start: Count = 0
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: int | None = None
    error: Text | None = None
    num_cached_tokens: Count | None = None


class Outputs(_Message, frozen=True):
    """What one engine step made for this proxy's requests."""

    outputs: Annotated[list[RequestOutput], Meta(max_length=2**16)]


class Goodbye(_Message, frozen=True):
    reason: Text = ""


# --- proxy -> node ------------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    heartbeat_seconds: Seconds
    lease_seconds: Seconds


class Heartbeat(_Message, frozen=True):
    pass


class Rehello(_Message, frozen=True):
    """The proxy does not know this node, or noticed a gap: say Hello again, with a snapshot."""

    reason: Text = ""


class Refused(_Message, frozen=True):
    """The node does not fit this cluster (layout, model or version); `reason` has both sides' values."""

    reason: Text


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A node that can serve a fetch."""

    instance_id: Id
    endpoints: Annotated[list[Text], Meta(min_length=1, max_length=16)]


class ChoiceSoFar(msgspec.Struct, frozen=True, array_like=True):
    """A choice to be generated, and its outputs so far (not empty when a request moves)."""

    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
    outputs: Tokens = []


class Decode(_Message, frozen=True):
    """Generate from the three things: prompt, parameters, outputs so far.

    choices: what is to be generated, each a sample of its own; with params.beam_search the best beams, best first.
        When a request moves, only those that have not ended are named.
    leg: number of this placement; outputs of an older leg are dropped by the proxy.
    sources: whom to fetch the KV from, best first; empty: compute it yourself.
    """

    request_id: Id
    leg: Count
    prompt_token_ids: Annotated[Tokens, Meta(min_length=1)]
    params: SamplingParams
    choices: Annotated[list[ChoiceSoFar], Meta(min_length=1, max_length=MAX_CHOICES)] = msgspec.field(
        default_factory=lambda: [ChoiceSoFar(0)]
    )
    sources: Annotated[list[Source], Meta(max_length=16)] = []
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    deadline_seconds: Seconds = 600.0


class Abort(_Message, frozen=True):
    """Nobody wants it any more: one choice, or all of it (None)."""

    request_id: Id
    leg: Count
    choice: Count | None = None
    reason: Text = ""


class Resend(_Message, frozen=True):
    """Outputs of this choice from `from_index` on did not arrive; send them again (0: the prompt's logprobs, too)."""

    request_id: Id
    leg: Count
    choice: Count
    from_index: Count


class Drain(_Message, frozen=True):
    """Take no new work, finish what runs, then leave."""

    grace_seconds: Seconds = 60.0


class ResetPrefixCache(_Message, frozen=True):
    """Forget all finished blocks; later requests find none of them."""


NodeMessage = Hello | Status | Accepted | Rejected | Outputs | Goodbye
ProxyMessage = Welcome | Heartbeat | Rehello | Refused | Decode | Abort | Resend | Drain | ResetPrefixCache

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_node_decoder = msgspec.msgpack.Decoder(NodeMessage)
_proxy_decoder = msgspec.msgpack.Decoder(ProxyMessage)


def encode(envelope: Envelope, message: NodeMessage | ProxyMessage) -> list[bytes]:
    return [_encoder.encode(envelope), _encoder.encode(message)]


def decode_from_node(frames: list[bytes]) -> tuple[Envelope, NodeMessage]:
    """Raises PeerError when the frames are no valid message of a node."""
    return _decode(frames, _node_decoder)


def decode_from_proxy(frames: list[bytes]) -> tuple[Envelope, ProxyMessage]:
    """Raises PeerError when the frames are no valid message of a proxy."""
    return _decode(frames, _proxy_decoder)


def _decode(frames: list[bytes], decoder: msgspec.msgpack.Decoder[_M]) -> tuple[Envelope, _M]:
    if len(frames) != 2:
        raise PeerError(f"control message has {len(frames)} frames, must have 2")
    if (size := sum(map(len, frames))) > MAX_MESSAGE_BYTES:
        raise PeerError(f"control message has {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return _envelope_decoder.decode(frames[0]), decoder.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"control message is not valid: {error}") from None
