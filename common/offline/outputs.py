"""What `LLM.generate` gives back: vLLM's names. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Logprob:
    """rank: 1 for the most likely token; None where it is not known (a drawn token that is not among the top ones)."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    token_ids: all that were generated, the end token and those of a stop text included; logprobs go with them.
    cumulative_logprob: sum over token_ids; None unless log-probabilities were asked for.
    stop_reason: the stop text or the token id of the request's own that ended it.
    error: why it ended before its time; other answers are not touched by it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers so far. prompt: None if it came as token ids.

    prompt_logprobs: None for the first token, then the wanted ones and the token's own, by token id.
    num_cached_tokens: prompt tokens whose KV was in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
