"""Draws the next token of each row from its logits. Stateless: a row's result depends on its logits and parameters.

    all rows        what their grammars allow, then what the parameters change in the logits (`logits.py`)
    greedy rows     the highest logit
    other rows      (logits - max) / temperature, in float32
      filters       tokens ranked by (probability, then lower id); top_k -> top_p -> min_p each keep a prefix of the
                    ranking
      draw          a race: of the tokens that are kept the one with the least (exponential number / probability), where
                    each token has a number of its own

The most likely token survives every filter. Batches of greedy rows pay for nothing else. A race, because it forgives:
logits that differ in their last bits (other rows in the batch, KV computed again) give another token only where two
times are equal within as much. One number inverted through cumulative probabilities would hit the neighbour of every
unlikely token, whose share is as small as the rounding of the sum before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from common.messages import TokenLogprobs
from common.runner.logits import LogitRules, RuledRow, adjust_logits, mask_others
from common.runner.logprobs import logprobs_of
from common.runner.random_numbers import draw_key, exponentials
from common.runner.ranking import rank, rank_all_kept
from common.sampling_params import SamplingParams
from common.scheduling.output import SampledToken

_RANKED_WIDTH = 256
"""So many of the most likely tokens are ranked at first (ranking all costs 4 ms a row at 49,152 tokens)."""
_ROWS_AT_ONCE = 8  # their intermediate values stay in the processor's cache: 64 rows take a fifth of the time
_LEAST_TEMPERATURE = 1e-30  # smaller ones round to 0 in float32


@dataclass(frozen=True)
class SamplingRow:
    """What a row of logits is drawn with. output_index: of the token to be drawn.

    rules, output_token_ids: what changes its logits, and the outputs so far; None: nothing does.
    grammar_mask: packed bit mask of the tokens that its grammar goes on with; None: it has no grammar.
    num_candidates: of a beam: how many of the most likely tokens are wanted with their log-probabilities.
    """

    params: SamplingParams
    output_index: int
    choice: int = 0
    rules: LogitRules | None = None
    output_token_ids: Sequence[int] = ()
    grammar_mask: np.ndarray | None = None
    num_candidates: int = 0

    @property
    def num_logprobs(self) -> int | None:
        """None for none, k for the drawn token's and the k most likely ones."""
        return self.num_candidates or self.params.logprobs

    @property
    def key(self) -> int:
        return draw_key(self.params.seed or 0, self.choice, self.output_index)


class Sampler:
    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """logits: float32 [len(rows), vocab_size], not changed."""
        adjusted = _adjust(logits, rows)
        token_ids = [0] * len(rows)
        for draw, chosen in _by_kind(rows):
            for part in _in_parts(chosen):
                drawn = draw(adjusted[part], [rows[i] for i in part])
                for i, token_id in zip(part, drawn, strict=True):
                    token_ids[i] = token_id
        logprobs = _logprobs(logits, token_ids, rows)
        return [SampledToken(token_id, found) for token_id, found in zip(token_ids, logprobs, strict=True)]


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """A changed copy, or the logits themselves when no row asks for a change."""
    ruled = [RuledRow(i, row.rules, row.output_token_ids) for i, row in enumerate(rows) if row.rules is not None]
    masks = [(i, row.grammar_mask) for i, row in enumerate(rows) if row.grammar_mask is not None]
    if not ruled and not masks:
        return logits
    adjusted = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    for i, mask in masks:
        mask_others(adjusted[i], mask)
    adjust_logits(adjusted, ruled)
    return adjusted


class _Draw(Protocol):
    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]: ...


def _by_kind(rows: Sequence[SamplingRow]) -> list[tuple[_Draw, list[int]]]:
    kinds: dict[_Draw, list[int]] = {_draw_greedy: [], _draw_unfiltered: [], _draw_filtered: []}
    for i, row in enumerate(rows):
        params = row.params
        is_greedy = params.is_greedy or row.num_candidates
        kinds[_draw_greedy if is_greedy else _draw_filtered if _has_filter(params) else _draw_unfiltered].append(i)
    return list(kinds.items())


def _in_parts(chosen: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(chosen), _ROWS_AT_ONCE):
        yield chosen[start : start + _ROWS_AT_ONCE]


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _scale(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """float32, the best token at 0: no temperature, however small, can overflow it."""
    logits = logits.float()
    temperature = _column([max(row.params.temperature, _LEAST_TEMPERATURE) for row in rows], torch.float32)
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _draw_greedy(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    found: list[int] = logits.argmax(-1).tolist()
    return found


def _draw_unfiltered(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    mass = _scale(logits, rows).exp_()
    found: list[int] = _race(mass, exponentials([row.key for row in rows], mass.shape[-1])).squeeze(1).tolist()
    return found


def _race(mass: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where the first one arrives, [R, 1]: each place with a chance in proportion to its mass, none without mass."""
    return numbers.div_(mass).argmin(-1, keepdim=True)


def _draw_filtered(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Ranks as few tokens as decide it; which number of them that is does not change the result."""
    scaled = _scale(logits, rows)
    total = _total_mass(scaled, rows)
    values, token_ids = rank(scaled, _RANKED_WIDTH)
    num_kept = _count_kept(values, total, rows)
    found = _draw_ranked(values, token_ids, num_kept, rows)
    if values.shape[-1] < scaled.shape[-1]:
        for i, is_settled in enumerate(_is_settled(values, num_kept, rows)):
            if not is_settled:
                found[i] = _draw_wide(scaled[i : i + 1], total[i : i + 1], rows[i : i + 1])
    return found


def _draw_wide(scaled: torch.Tensor, total: torch.Tensor, rows: Sequence[SamplingRow]) -> int:
    """One row, of which many tokens may be kept."""
    values, token_ids = rank_all_kept(scaled, rows[0].params)
    [token_id] = _draw_ranked(values, token_ids, _count_kept(values, total, rows), rows)
    return token_id


def _total_mass(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Of the whole vocabulary, float64 [R, 1]; 0 when no row needs it: only top_p does, and only without top_k."""
    if all(row.params.top_p >= 1.0 or row.params.top_k > 0 for row in rows):
        return scaled.new_zeros((len(rows), 1), dtype=torch.float64)
    return scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)


def _is_settled(values: torch.Tensor, num_kept: torch.Tensor, rows: Sequence[SamplingRow]) -> list[bool]:
    """Ranking more tokens would change nothing: the top_k are ranked, and so is all that ties with the last kept.

    Or what is not ranked has no mass, as where most tokens are masked.
    """
    last = values[:, -1:]
    is_clear: list[bool] = (values.gather(1, num_kept - 1) > last).squeeze(1).tolist()
    is_all: list[bool] = (last.exp() == 0).squeeze(1).tolist()
    is_wide = [row.params.top_k <= values.shape[-1] for row in rows]
    return [every or (clear and wide) for every, clear, wide in zip(is_all, is_clear, is_wide, strict=True)]


def _count_kept(values: torch.Tensor, total: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """How many leading tokens of each row's ranking survive top_k, then top_p, then min_p; at least one. [R, 1].

    values: [R, width] scaled logits, the best (first) at 0. total: float64 [R, 1], see `_total_mass`.
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
    winners = _race(values.exp() * is_kept, exponentials([row.key for row in rows], token_ids))
    found: list[int] = token_ids.gather(1, winners).squeeze(1).tolist()
    return found


def _logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]
) -> list[TokenLogprobs | None]:
    """Of the raw logits, for rows that ask."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asking = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
    for part in _in_parts(asking):
        counts = [rows[i].num_logprobs or 0 for i in part]
        for i, logprobs in zip(part, logprobs_of(logits[part], [token_ids[i] for i in part], counts), strict=True):
            found[i] = logprobs
    return found


def _column(numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)
