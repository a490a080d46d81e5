"""Executes steps: one flat batch through the model, the head for rows that have caught up, one call of the sampler.

    copies -> zero the tails of partial last blocks -> forward, polled between layers -> inbox -> head -> sampler

The inbox is polled just before the head, so that hidden states computed elsewhere join the step in flight, even one
that has no rows of its own. The runner keeps nothing of a request from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.models.llama import Llama
from common.request import Request
from common.runner.input_batch import make_flat_batch
from common.runner.kv_cache import KVCache
from common.runner.sampler import Sampler, SamplingRow
from common.scheduling.output import CancelCheck, Inbox, SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from kernels.plan import AttentionShape, Scratch


class ModelRunner:
    """sampler: None for a prefill node, which never samples."""

    def __init__(self, model: Llama, kv_cache: KVCache, sampler: Sampler | None) -> None:
        layout = kv_cache.layout
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._shape = AttentionShape(
            num_layers=layout.num_layers,
            num_heads=model.config.num_heads,
            num_kv_heads=layout.num_kv_heads,
            block_size=layout.block_size,
            head_dim=layout.head_dim,
            dtype=kv_cache.pool.dtype,
        )
        self._scratch = Scratch()

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> StepResult:
        self._kv_cache.copy_blocks(batch.copies)
        self._zero_tails(batch.scheduled)
        hidden = None
        if batch.scheduled:
            flat = make_flat_batch(batch.scheduled, self._shape, self._scratch)
            hidden = self._model.forward(flat, self._kv_cache.pool, lambda _layer: not should_cancel())
            if hidden is None:
                return StepResult(is_cancelled=True)
        computed = {} if hidden is None else _computed_rows(batch.scheduled, hidden)
        return StepResult(sampled=self._sample(batch.scheduled, hidden, inbox), hidden=computed)

    def _zero_tails(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A computation's partial last block is sent whole: what an earlier owner left in its tail must not leave."""
        block_size = self._shape.block_size
        for rows in scheduled:
            end = rows.start + rows.num_tokens
            if rows.request.is_compute_only and rows.is_last_chunk and end % block_size and not rows.recompute_only:
                self._kv_cache.zero_tail(rows.block_table[end // block_size], end % block_size)

    def _sample(
        self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor | None, inbox: Inbox
    ) -> dict[str, SampledToken]:
        requests: list[Request] = []
        vectors: list[torch.Tensor] = []
        if hidden is not None:
            for rows, last in zip(scheduled, _last_rows(scheduled), strict=True):
                if rows.is_last_chunk and not rows.request.is_compute_only:
                    requests.append(rows.request)
                    vectors.append(hidden[last])
        for arrived in inbox.take():
            requests.append(arrived.request)
            vectors.append(torch.from_numpy(np.array(arrived.row, np.float32)))
        if not requests:
            return {}
        assert self._sampler is not None, "a node without a head was asked to sample"
        logits = self._model.logits(torch.stack([vector.float() for vector in vectors]))
        sampled = self._sampler(logits, [_sampling_row(request) for request in requests])
        return {request.request_id: token for request, token in zip(requests, sampled, strict=True)}


def _sampling_row(request: Request) -> SamplingRow:
    assert request.params is not None
    return SamplingRow(request.params, output_index=len(request.output_token_ids))


def _last_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    ends = np.cumsum([rows.num_tokens for rows in scheduled])
    return [int(end) - 1 for end in ends]


def _computed_rows(scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor) -> dict[str, np.ndarray]:
    """Hidden states that computations asked for: the last row once caught up, or every row."""
    found = {}
    for rows, last in zip(scheduled, _last_rows(scheduled), strict=True):
        if not rows.request.is_compute_only:
            continue
        if rows.request.want_all_hidden:
            found[rows.request.request_id] = hidden[last - rows.num_tokens + 1 : last + 1].float().numpy().copy()
        elif rows.is_last_chunk:
            found[rows.request.request_id] = hidden[last : last + 1].float().numpy().copy()
    return found
