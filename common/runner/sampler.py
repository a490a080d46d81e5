"""Draws the next token of each row from its logits. Stateless: a row depends on its own logits and parameters.

    greedy rows   the highest logit
    other rows    (logits - max) / temperature, in float32 -> top_k -> top_p -> min_p -> one uniform number, inverted
                  through the cumulative probabilities in token order

The most likely token survives every filter. Batches of greedy rows pay for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.messages import TokenLogprobs
from common.runner.random_numbers import uniform
from common.sampling_params import SamplingParams
from common.scheduling.output import SampledToken

_FIRST_RANKS = 1024
"""So many of the most likely tokens are ranked first; all of them only when their mass does not reach top_p."""


@dataclass(frozen=True)
class SamplingRow:
    """What a row of logits is drawn with. output_index: of the token to be drawn."""

    params: SamplingParams
    output_index: int
    choice: int = 0


class Sampler:
    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """logits: float32 [len(rows), vocab_size], not changed."""
        token_ids = logits.argmax(-1).tolist()
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            chosen = logits if len(drawn) == len(rows) else logits[drawn]
            for i, token_id in zip(drawn, _draw(chosen, [rows[i] for i in drawn]), strict=True):
                token_ids[i] = token_id
        logprobs = _logprobs(logits, token_ids, rows)
        return [SampledToken(token_id, found) for token_id, found in zip(token_ids, logprobs, strict=True)]


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    temperature = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float32)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities = filter_probabilities(scaled.softmax(-1), [row.params for row in rows])
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    numbers = [uniform(row.params.seed or 0, row.choice, row.output_index) for row in rows]
    targets = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1) * cumulative[:, -1:]
    positions = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Rounding may put a target on the very end: then the last token with any probability is meant.
    last = logits.shape[-1] - 1 - probabilities.flip(-1).ne(0).to(torch.uint8).argmax(-1)
    found: list[int] = torch.minimum(positions, last).tolist()
    return found


def filter_probabilities(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero where top_k, top_p or min_p removes a token; not normalised again. [R, vocab_size] -> the same."""
    kept = probabilities
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        kept = _keep_top(probabilities, params)
    if any(p.min_p > 0.0 for p in params):
        least = torch.tensor([[p.min_p] for p in params], dtype=torch.float32) * probabilities.amax(-1, keepdim=True)
        kept = torch.where(probabilities >= least, kept, 0.0)
    return kept


def _keep_top(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    num_tokens = probabilities.shape[-1]
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else num_tokens] for p in params])
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float32)
    num_ranks = min(num_tokens, max(_FIRST_RANKS, *(p.top_k for p in params)))
    ranked, token_ids = probabilities.topk(num_ranks, dim=-1)
    is_enough = (ranked.sum(-1, keepdim=True) > top_p) | (top_k <= num_ranks)
    if not bool(is_enough.all()):
        ranked, token_ids = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(ranked.shape[-1])
    ranked = torch.where(ranks < top_k, ranked, 0.0)
    # Probability mass of more likely tokens, within the top_k: a token is kept while it is below top_p.
    total = torch.where(top_k >= num_tokens, 1.0, ranked.sum(-1, keepdim=True))
    before = (ranked.cumsum(-1) - ranked) / total
    is_kept = (before < top_p) | (ranks == 0) | (top_p >= 1.0)
    kept = torch.zeros_like(probabilities).scatter_(-1, token_ids, torch.where(is_kept, ranked, 0.0))
    is_untouched = (top_k >= num_tokens) & (top_p >= 1.0)
    return torch.where(is_untouched, probabilities, kept)


def _logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]
) -> list[TokenLogprobs | None]:
    """Of the raw logits, for rows that ask; the most likely tokens best first."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        if row.params.logprobs is None:
            continue
        logprobs = logits[i].log_softmax(-1)
        top = logprobs.topk(row.params.logprobs)
        found[i] = TokenLogprobs(float(logprobs[token_ids[i]]), top.indices.tolist(), top.values.tolist())
    return found
