"""What a request's parameters change in its logits before a token is drawn, in the order of docs/sampling.md:

    masks      grammar -> allowed token ids -> bad words -> min_tokens: a masked token has logit minus infinity
    sums       logit_bias -> repetition penalty -> frequency and presence penalties

A pure function of (prompt, parameters, outputs so far); rows do not see each other. A mask that would leave a row no
token at all is not applied in that step. A grammar's mask is a bit mask as the allowed ids are, and goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from common.request import Request
from common.sampling_params import SamplingParams

_MASKED = float("-inf")
_NO_IDS = np.empty(0, np.int64)

Ids: TypeAlias = np.ndarray
"""Token ids, int64 [n]."""


@dataclass(frozen=True, eq=False)
class LogitRules:
    """What stays the same from step to step, as arrays. No token id is beyond the vocabulary, whatever was asked.

    allowed: packed bit mask, int32 [ceil(vocab_size / 32)], lowest bit first; None allows all.
    end_ids: what min_tokens holds back.
    bad_words: (tokens before, last token) of each, by the last of the tokens before; None: there are none before.
    prompt_ids: the prompt's tokens, each once; only for the repetition penalty.
    """

    params: SamplingParams
    allowed: np.ndarray | None
    end_ids: Ids
    bad_words: dict[int | None, list[tuple[list[int], int]]]
    bias_ids: Ids
    bias: np.ndarray
    prompt_ids: Ids

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> LogitRules | None:
        """None for a request whose logits stay as they are."""
        params = request.params
        if params is None or not params.changes_logits:
            return None
        allowed = params.allowed_token_ids
        bias_ids = _known(params.logit_bias, vocab_size)
        needs_prompt = params.repetition_penalty != 1.0
        return cls(
            params,
            allowed=None if allowed is None else pack_bits(_known(allowed, vocab_size), vocab_size),
            end_ids=_known(request.stop_token_ids, vocab_size) if params.min_tokens else _NO_IDS,
            bad_words=_by_tail(params.bad_words_token_ids, vocab_size),
            bias_ids=bias_ids,
            bias=np.array([params.logit_bias[int(token_id)] for token_id in bias_ids], np.float32),
            prompt_ids=np.unique(_known(request.prompt_token_ids, vocab_size)) if needs_prompt else _NO_IDS,
        )

    def banned(self, output_token_ids: Sequence[int]) -> Iterator[Ids]:
        """Token ids without a chance after these outputs, one array for each mask that acts now."""
        begun = self.bad_words.get(None, []) + self.bad_words.get(
            output_token_ids[-1] if output_token_ids else None, []
        )
        if words := [last for head, last in begun if _ends_with(output_token_ids, head)]:
            yield np.array(words, np.int64)
        if len(output_token_ids) < self.params.min_tokens and len(self.end_ids):
            yield self.end_ids


def pack_bits(token_ids: Ids, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class RuledRow:
    """A row of logits whose request has rules; index: its place in the batch."""

    index: int
    rules: LogitRules
    output_token_ids: Sequence[int]


def adjust_logits(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    """Changes these rows of `logits`, float32 [num_rows, vocab_size], contiguous."""
    for row in rows:
        _mask(logits[row.index], row)
    flat, width = logits.view(-1), logits.shape[-1]
    _add_bias(flat, width, [row for row in rows if len(row.rules.bias_ids)])
    repeating = [row for row in rows if row.rules.params.repetition_penalty != 1.0]
    penalized = [row for row in rows if row.rules.params.penalizes_outputs and row.output_token_ids]
    outputs = {row.index: np.array(row.output_token_ids, np.int64) for row in [*repeating, *penalized]}
    _penalize_repetition(flat, width, repeating, outputs)
    _penalize_outputs(flat, width, penalized, outputs)


def _mask(logits: torch.Tensor, row: RuledRow) -> None:
    """logits: [vocab_size], one row. Each mask is undone if it leaves nothing."""
    if row.rules.allowed is not None:
        before = logits.clone()
        mask_others(logits, row.rules.allowed)
        if logits.amax() == _MASKED:
            logits.copy_(before)
    for token_ids in row.rules.banned(row.output_token_ids):
        ids = torch.from_numpy(token_ids)
        before = logits[ids]
        logits[ids] = _MASKED
        if logits.amax() == _MASKED:
            logits[ids] = before


def mask_others(logits: torch.Tensor, packed: np.ndarray) -> None:
    """logits: [vocab_size], one row. packed: bit mask of the tokens that stay as they are, as `LogitRules.allowed`."""
    bits = np.unpackbits(packed.view(np.uint8), count=logits.shape[-1], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0), _MASKED)


# --- sums: sparse, all rows in one go; a place is row * vocabulary + token id ---------------------------------------


def _add_bias(flat: torch.Tensor, width: int, rows: Sequence[RuledRow]) -> None:
    if rows:
        places = np.concatenate([row.index * width + row.rules.bias_ids for row in rows])
        bias = np.concatenate([row.rules.bias for row in rows])
        flat.index_add_(0, torch.from_numpy(places), torch.from_numpy(bias))


def _penalize_repetition(flat: torch.Tensor, width: int, rows: Sequence[RuledRow], outputs: dict[int, Ids]) -> None:
    if not rows:
        return
    places = np.unique(
        np.concatenate([row.index * width + ids for row in rows for ids in (row.rules.prompt_ids, outputs[row.index])])
    )
    penalties = torch.from_numpy(_of_each(places, width, rows, lambda params: params.repetition_penalty))
    where = torch.from_numpy(places)
    values = flat[where]
    flat[where] = torch.where(values > 0, values / penalties, values * penalties)


def _penalize_outputs(flat: torch.Tensor, width: int, rows: Sequence[RuledRow], outputs: dict[int, Ids]) -> None:
    if not rows:
        return
    places, counts = np.unique(
        np.concatenate([row.index * width + outputs[row.index] for row in rows]), return_counts=True
    )
    frequency = _of_each(places, width, rows, lambda params: params.frequency_penalty)
    presence = _of_each(places, width, rows, lambda params: params.presence_penalty)
    flat.index_add_(0, torch.from_numpy(places), torch.from_numpy(-(frequency * counts.astype(np.float32) + presence)))


def _of_each(
    places: np.ndarray, width: int, rows: Sequence[RuledRow], value: Callable[[SamplingParams], float]
) -> np.ndarray:
    """The parameter of the row that each place is in, float32."""
    by_row = np.zeros(rows[-1].index + 1, np.float32)
    for row in rows:
        by_row[row.index] = value(row.rules.params)
    return by_row[places // width]


def _known(token_ids: Iterable[int], vocab_size: int) -> Ids:
    """An id outside the vocabulary would be a place in another row."""
    found = np.fromiter(token_ids, np.int64)
    return found[(found >= 0) & (found < vocab_size)]


def _by_tail(words: Sequence[Sequence[int]], vocab_size: int) -> dict[int | None, list[tuple[list[int], int]]]:
    found: dict[int | None, list[tuple[list[int], int]]] = {}
    for *head, last in words:
        if last < vocab_size:
            found.setdefault(head[-1] if head else None, []).append((head, last))
    return found


def _ends_with(output_token_ids: Sequence[int], head: list[int]) -> bool:
    return not head or list(output_token_ids[-len(head) :]) == head
