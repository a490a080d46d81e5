"""A request inside an engine: three things (prompt, parameters, outputs so far) and how far its KV has come.

`num_computed_tokens` is the one number that all scheduling works on: each step lets it catch up with `num_tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.block_hash import BlockHash
from common.sampling_params import SamplingParams
from common.structured_output import Grammar


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"  # blocks reserved, another node's KV on its way into them
    RUNNING = "running"
    PREEMPTED = "preempted"  # blocks dropped, waits to be computed again
    SWAPPED = "swapped"  # blocks' content in host memory, waits for room to go on
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """One sequence of tokens that an engine computes.

    params: None for a computation on a prefill node, which ends when its tokens are computed.
    wants_remote_kv: its prompt's KV will be fetched: the scheduler reserves blocks and does not compute.
    want_all_hidden: hidden states of all tokens are wanted, not only of the last (no prefix hits are used then).
    wants_cached_only: a computation that computes nothing: it pins and reports what the prefix cache has, and ends.
    grammar: params.structured_output, compiled; only the runner uses it.
    adapter: content digest of the LoRA adapter it is computed with, empty for the base model.
    precedence: (priority, arrival number), given by the scheduler when it takes the request; smaller goes first.
    num_resets_at_start: how often the prefix cache had been emptied when the scheduler took the request.
    num_cached_tokens: tokens whose KV was found in this node's prefix cache at first admission.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams | None = None
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    max_num_tokens: int = 2**31
    grammar: Grammar | None = None
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    arrival_time: float = 0.0
    wants_remote_kv: bool = False
    want_all_hidden: bool = False
    wants_cached_only: bool = False

    precedence: tuple[int, int] = (0, 0)
    num_resets_at_start: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids: list[int] = [*self.prompt_token_ids, *self.output_token_ids]
        self.num_initial_tokens = len(self.all_token_ids)

    def append_output(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.all_token_ids) - self.num_computed_tokens

    @property
    def is_compute_only(self) -> bool:
        return self.params is None

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, computed {self.num_computed_tokens}/{self.num_tokens},"
            f" outputs {len(self.output_token_ids)})"
        )
