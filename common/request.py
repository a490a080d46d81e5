"""A request inside an engine: three things (prompt, parameters, outputs so far) and how far its KV has come.

`num_computed_tokens` is the one number that all scheduling works on: each step lets it catch up with `num_tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from common.block_hash import BlockHash
from common.sampling_params import SamplingParams
from common.structured_output import Grammar

if TYPE_CHECKING:
    from common.messages import TokenLogprobs


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"  # blocks reserved, another node's KV on its way into them
    WAITING_FOR_PROMPT = "waiting_for_prompt"  # a choice whose prompt is being computed or fetched for all of them
    RUNNING = "running"
    PREEMPTED = "preempted"  # blocks dropped, waits to be computed again
    SWAPPED = "swapped"  # blocks' content in host memory, waits for room to go on
    FORKED = "forked"  # a prompt whose blocks are its choices' now
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Search(Protocol):
    """A beam search, as far as a request shows it (see `common/scheduling/beam_search.py`)."""

    @property
    def width(self) -> int: ...

    @property
    def num_candidates(self) -> int:
        """How many of the most likely next tokens it needs of each beam."""
        ...


@dataclass(eq=False)
class Request:
    """One sequence of tokens that an engine computes.

    Several answers to one prompt are requests of their own, its `choices`. The prompt is computed or fetched once, the
    choices draw their first outputs from its last hidden state, and then it forks: each choice shares its blocks and
    goes on by itself. A beam search is a prompt, too; its choices are the running beams, and it makes them itself.

    params: None for a computation on a prefill node, which ends when its tokens are computed.
    wants_remote_kv: its prompt's KV will be fetched: the scheduler reserves blocks and does not compute.
    want_all_hidden: hidden states of all tokens are wanted, not only of the last (no prefix hits are used then).
    num_scored_tokens: with params.prompt_logprobs, how many of the prompt's tokens have theirs; the first needs none.
    wants_cached_only: a computation that computes nothing: it pins and reports what the prefix cache has, and ends.
    grammar: params.structured_output, compiled; only the runner uses it.
    adapter: content digest of the LoRA adapter it is computed with, empty for the base model.
    choice: its number among the answers to the prompt, an ingredient of its random numbers.
    choices: those that go on from this prompt, and have not ended. parent: the prompt that a choice goes on from.
    precedence: (priority, arrival number, number of the choice), given by the scheduler; smaller goes first.
    beam_search: of a prompt whose params ask for one, made by the scheduler.
    candidates: what may follow this beam; it waits for those of the other beams.
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
    choice: int = 0
    choices: list[Request] = field(default_factory=list)

    parent: Request | None = None
    beam_search: Search | None = None
    candidates: TokenLogprobs | None = None
    num_scored_tokens: int = 1
    precedence: tuple[int, int, int] = (0, 0, 0)
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
    def is_scoring(self) -> bool:
        """Log-probabilities of its prompt's tokens are still to come, so hidden states of all of them are needed."""
        if self.params is None or self.params.prompt_logprobs is None or self.parent is not None:
            return False
        return self.num_scored_tokens < len(self.prompt_token_ids)

    @property
    def is_shared_prompt(self) -> bool:
        return bool(self.choices) or self.beam_search is not None

    @property
    def search(self) -> Search | None:
        """The beam search that it is the prompt or a beam of."""
        return self.beam_search if self.parent is None else self.parent.beam_search

    @property
    def num_sequences(self) -> int:
        """How many it will be once it has forked."""
        return self.beam_search.width if self.beam_search is not None else len(self.choices) or 1

    @property
    def samplers(self) -> Sequence[Request]:
        """Whose next outputs its last hidden state gives: its own, or those of its choices that have none yet."""
        if self.choices:
            return [choice for choice in self.choices if not choice.output_token_ids]
        return (self,)

    @property
    def is_ready_to_fork(self) -> bool:
        """All its KV is in, and every choice has its first output."""
        return bool(self.choices) and not self.num_remaining and not self.samplers

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, computed {self.num_computed_tokens}/{self.num_tokens},"
            f" outputs {len(self.output_token_ids)})"
        )
