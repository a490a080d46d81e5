"""What an engine tells its node, step by step. Plain data, safe to hand to another thread.

Structs and not dataclasses: a full house makes one for each stream in each step, and these cost a fifth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from common.messages import TokenLogprobs
from common.request import FinishReason, Request

if TYPE_CHECKING:
    import numpy as np


class Event(msgspec.Struct, frozen=True):
    request_id: str


class ComputeStartedEvent(Event, frozen=True):
    """It got its blocks and is computed here; this many of its tokens were cached (0 .. all)."""

    num_cached_tokens: int


class OutputEvent(Event, frozen=True):
    """One output. `index` counts from the request's first output, those it came with included; the last one carries
    `finish_reason`. num_cached_tokens: prompt tokens found in this node's prefix cache; None before it got blocks."""

    request: Request
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int | None = None


class ScoredEvent(Event, frozen=True):
    """Log-probabilities of the prompt's tokens from position `start` on. All of them come before the first output."""

    start: int
    logprobs: list[TokenLogprobs]


class SearchEndedEvent(Event, frozen=True):
    """A beam search is over: the best beams are `request.beam_search.results`. Nothing else came of it before."""

    request: Request


class ReservedEvent(Event, frozen=True):
    """Blocks for all its tokens and the next one are reserved. Answer with exactly one of `adopt`,
    `release_reservation` or `cancel_remote`, when nothing writes into them any more.

    num_cached_tokens: KV of this many leading tokens is in already (a multiple of the block size); the blocks that
        hold it are shared and must not be written.
    block_ids: the whole table, position 0 first.
    """

    num_cached_tokens: int
    block_ids: tuple[int, ...]


class RevokedEvent(Event, frozen=True):
    """A running request needs these blocks: stop writing, then `release_reservation`. It will be reserved anew."""


class BlocksFilledEvent(Event, frozen=True):
    """Progress of a computation. Blocks first_block, first_block + 1, ... of its tokens are filled and stay pinned
    until `release`; the last one may be partial, when all tokens are computed. May name no block."""

    first_block: int
    block_ids: tuple[int, ...]
    num_computed_tokens: int


class HiddenEvent(Event, frozen=True):
    """Hidden states of a computation, float32 [num_rows, hidden_size]: its last row, or all rows of a chunk."""

    rows: np.ndarray


class ComputedEvent(Event, frozen=True):
    """A computation is done; its blocks stay pinned until `release`."""


class FailedEvent(Event, frozen=True):
    """It ended without its answer. Reserved or served blocks come back as ever: `release_reservation`, `release`."""

    error: str
