"""Log-probabilities of a prompt's tokens, from hidden states of those before them. Keeps nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.request import Request
from common.runner.logprobs import logprobs_of
from common.scheduling.output import Scored

_ROWS_AT_ONCE = 16
"""Bounds the memory: a row of logits of 128,000 tokens has 0.5 MB, and there are three copies of it."""


def score_prompt(
    request: Request, start: int, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> Scored:
    """hidden: [num_rows, hidden_size], of the prompt's tokens from position `start` on; what was scored before is left
    out, and the last token's row, which no token of the prompt follows.

    head: float32 [n, hidden_size] -> logits [n, vocab_size].
    """
    assert request.params is not None
    assert request.params.prompt_logprobs is not None
    first = max(start + 1, request.num_scored_tokens)
    end = min(start + len(hidden) + 1, request.num_prompt_tokens)
    scored = Scored(request, first, [])
    for position in range(first, end, _ROWS_AT_ONCE):
        token_ids = request.prompt_token_ids[position : min(position + _ROWS_AT_ONCE, end)]
        row = position - 1 - start
        logits = head(hidden[row : row + len(token_ids)].float())
        counts = [request.params.prompt_logprobs] * len(token_ids)
        scored.logprobs.extend(logprobs_of(logits, token_ids, counts, with_ranks=True))
    return scored
