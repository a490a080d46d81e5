"""Log-probabilities of raw logits, float32, for a few tokens of each row. Never an infinity or NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.messages import TokenLogprobs
from common.runner.ranking import rank

_LEAST_LOGPROB = -9999.0  # what the OpenAI API says for "as good as impossible"; infinities are no JSON


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int], *, with_ranks: bool = False
) -> list[TokenLogprobs]:
    """Of one token of each row, and of the `counts` most likely ones of that row, best first.

    logits: [num_rows, vocab_size]; a copy in float32 is made, so few rows at a time. with_ranks: also the place of the
        token among all, the best of those that tie with it.
    """
    logprobs = logits.float().log_softmax(-1).nan_to_num_(_LEAST_LOGPROB).clamp_(min=_LEAST_LOGPROB)
    own = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1))
    ranks = ((logprobs > own).sum(-1) + 1).tolist() if with_ranks else [0] * len(token_ids)
    values, best = rank(logprobs, max(1, *counts))
    rows = zip(counts, own.squeeze(1).tolist(), values.tolist(), best.tolist(), ranks, strict=True)
    return [TokenLogprobs(logprob, ids[:k], top[:k], place) for k, logprob, top, ids, place in rows]
