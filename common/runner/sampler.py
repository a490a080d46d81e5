"""Draws the next token of each row from its logits. Stateless: a row's result depends on its logits and parameters.

    greedy rows     the highest logit
    other rows      (logits - max) / temperature, in float32
      no filter     one uniform number, inverted through the cumulative probabilities in token order
      filters       tokens ranked by (probability, then lower id); top_k -> top_p -> min_p each keep a prefix of the
                    ranking; the number is inverted through what is kept, in that order

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

_RANKED_WIDTHS = (256, 4096)
"""So many of the most likely tokens are ranked at first (ranking all costs 4 ms a row at 49,152 tokens)."""
_LEAST_LOGPROB = -9999.0  # what the OpenAI API says for "as good as impossible"; infinities are no JSON
_LEAST_TEMPERATURE = 1e-30  # smaller ones round to 0 in float32


@dataclass(frozen=True)
class SamplingRow:
    """What a row of logits is drawn with. output_index: of the token to be drawn."""

    params: SamplingParams
    output_index: int
    choice: int = 0

    def uniform(self) -> float:
        return uniform(self.params.seed or 0, self.choice, self.output_index)


class Sampler:
    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """logits: float32 [len(rows), vocab_size], not changed."""
        token_ids: list[int] = logits.argmax(-1).tolist()
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        for has_filter, draw in ((False, _draw_unfiltered), (True, _draw_filtered)):
            chosen = [i for i in drawn if _has_filter(rows[i].params) is has_filter]
            if chosen:
                chosen_rows = [rows[i] for i in chosen]
                for i, token_id in zip(chosen, draw(_scale(logits[chosen], chosen_rows), chosen_rows), strict=True):
                    token_ids[i] = token_id
        logprobs = _logprobs(logits, token_ids, rows)
        return [SampledToken(token_id, found) for token_id, found in zip(token_ids, logprobs, strict=True)]


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _scale(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """float32, the best token at 0: no temperature, however small, can overflow it."""
    logits = logits.float()
    temperature = _column([max(row.params.temperature, _LEAST_TEMPERATURE) for row in rows], torch.float32)
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _draw_unfiltered(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    found: list[int] = _invert(scaled.exp().cumsum(-1, dtype=torch.float64), rows).squeeze(1).tolist()
    return found


def _invert(cumulative: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Where each row's uniform number falls in the cumulative mass [R, n] (not normalised); [R, 1].

    Places without mass are never hit; the target stays below the end however it is rounded.
    """
    total = cumulative[:, -1:]
    targets = _column([row.uniform() for row in rows], torch.float64) * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets, right=True)


def _draw_filtered(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Ranks as few tokens as decide it; which number of them that is does not change the result."""
    vocab_size = scaled.shape[-1]
    found = [0] * len(rows)
    pending = list(range(len(rows)))
    for width in (*(w for w in _RANKED_WIDTHS if w < vocab_size), vocab_size):
        part, part_rows = scaled[pending], [rows[i] for i in pending]
        values, token_ids = _rank(part, width)
        num_kept = _count_kept(values, part.exp().sum(-1, keepdim=True, dtype=torch.float64), part_rows)
        drawn = _draw_ranked(values, token_ids, num_kept, part_rows)
        unsettled = []
        for i, token_id, is_settled in zip(pending, drawn, _is_settled(values, num_kept, part_rows), strict=True):
            if is_settled or width == vocab_size:
                found[i] = token_id
            else:
                unsettled.append(i)
        if not (pending := unsettled):
            break
    return found


def _is_settled(values: torch.Tensor, num_kept: torch.Tensor, rows: Sequence[SamplingRow]) -> list[bool]:
    """Ranking more tokens would change nothing: the top_k are ranked, and so is all that ties with the last kept."""
    is_clear: list[bool] = (values.gather(1, num_kept - 1) > values[:, -1:]).squeeze(1).tolist()
    return [clear and row.params.top_k <= values.shape[-1] for clear, row in zip(is_clear, rows, strict=True)]


def _rank(scaled: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` highest values, best first, equal ones by token id, and their token ids. [R, width] each."""
    if width >= scaled.shape[-1]:
        return torch.sort(scaled, dim=-1, descending=True, stable=True)
    token_ids = scaled.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _count_kept(values: torch.Tensor, total: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """How many leading tokens of each row's ranking survive top_k, then top_p, then min_p; at least one. [R, 1].

    values: [R, width] scaled logits, the best (first) at 0. total: float64 [R, 1], mass of the whole vocabulary.
    """
    vocab_bound = 2**31
    mass = values.exp().to(torch.float64)
    top_k = _column([row.params.top_k if row.params.top_k > 0 else vocab_bound for row in rows], torch.int64)
    top_p = _column([row.params.top_p for row in rows], torch.float64)
    min_p = _column([row.params.min_p for row in rows], torch.float64)
    ranks = torch.arange(values.shape[-1])
    is_kept = ranks < top_k
    total_kept = torch.where(top_k < vocab_bound, (mass * is_kept).sum(-1, keepdim=True), total)
    mass_before = mass.cumsum(-1) - mass
    is_kept &= (mass_before < top_p * total_kept) | (top_p >= 1.0)
    is_kept &= mass >= min_p
    return is_kept.sum(-1, keepdim=True).clamp_(min=1)


def _draw_ranked(
    values: torch.Tensor, token_ids: torch.Tensor, num_kept: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[int]:
    is_kept = torch.arange(values.shape[-1]) < num_kept
    cumulative = (values.exp() * is_kept).cumsum(-1, dtype=torch.float64)
    found: list[int] = token_ids.gather(1, _invert(cumulative, rows)).squeeze(1).tolist()
    return found


def _logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]
) -> list[TokenLogprobs | None]:
    """Of the raw logits, for rows that ask; the most likely tokens best first. Never an infinity or NaN."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asking = [(i, k) for i, row in enumerate(rows) if (k := row.params.logprobs) is not None]
    if not asking:
        return found
    chosen = [i for i, _ in asking]
    logprobs = logits[chosen].float().log_softmax(-1).nan_to_num(_LEAST_LOGPROB).clamp_(min=_LEAST_LOGPROB)
    own = logprobs.gather(1, _column([token_ids[i] for i in chosen], torch.int64)).squeeze(1).tolist()
    values, best = _rank(logprobs, max(1, *(k for _, k in asking)))
    for (i, k), logprob, top_values, top_ids in zip(asking, own, values.tolist(), best.tolist(), strict=True):
        found[i] = TokenLogprobs(logprob, top_ids[:k], top_values[:k])
    return found


def _column(numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)
