"""Executes steps: one flat batch through the model, the head for rows that have caught up, one call of the sampler.

    swap out, swap in, copy on write, zero the tails of partial last blocks
      -> forward, polled between layers -> inbox -> head -> sampler
         masks of grammars, in a thread meanwhile ---------'

The inbox is polled just before the head, so that hidden states computed elsewhere join the step in flight, even one
that has no rows of its own. The runner keeps nothing of a request from one step to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from common.clock import Clock, SystemClock
from common.errors import GrammarError
from common.models.llama import Llama
from common.request import Request
from common.runner.grammar_masks import GrammarMasks
from common.runner.input_batch import InputBatch
from common.runner.kv_cache import KVCache
from common.runner.logits import LogitRules
from common.runner.prompt_scores import score_prompt
from common.runner.sampler import Sampler, SamplingRow
from common.scheduling.output import (
    CancelCheck,
    Inbox,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    Scored,
    StepResult,
)
from kernels.plan import AttentionShape


class ModelRunner:
    """sampler: None for a prefill node, which never samples."""

    def __init__(self, model: Llama, kv_cache: KVCache, sampler: Sampler | None, *, clock: Clock | None = None) -> None:
        layout = kv_cache.layout
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._clock = clock or SystemClock()
        self._shape = AttentionShape(
            num_layers=layout.num_layers,
            num_heads=model.config.num_heads,
            num_kv_heads=layout.num_kv_heads,
            block_size=layout.block_size,
            head_dim=layout.head_dim,
            dtype=kv_cache.pool.dtype,
        )
        self._input_batch = InputBatch(self._shape)
        self._grammar_masks = GrammarMasks()
        self._rules: WeakKeyDictionary[Request, LogitRules | None] = WeakKeyDictionary()

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> StepResult:
        swap_seconds = self._swap(batch)
        self._kv_cache.copy_blocks(batch.copies)
        self._zero_tails(batch.scheduled)
        self._grammar_masks.start(_samplers(batch.scheduled))
        hidden = None
        if batch.scheduled:
            flat = self._input_batch.make(batch.scheduled)
            hidden = self._model.forward(flat, self._kv_cache.pool, lambda _layer: not should_cancel())
            if hidden is None:
                return StepResult(is_cancelled=True, swap_seconds=swap_seconds)
        computed = {} if hidden is None else _computed_rows(batch.scheduled, hidden)
        scored = self._score(batch.scheduled, hidden, inbox)
        sampled, failed = self._sample(batch.scheduled, hidden, inbox)
        return StepResult(sampled=sampled, hidden=computed, failed=failed, scored=scored, swap_seconds=swap_seconds)

    def _score(self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor | None, inbox: Inbox) -> list[Scored]:
        """Log-probabilities of the prompts that want them, from what this step computed and what arrived."""
        scored = []
        if hidden is not None:
            for rows, last in zip(scheduled, _last_rows(scheduled), strict=True):
                if rows.request.is_scoring:
                    own = hidden[last - rows.num_tokens + 1 : last + 1]
                    scored.append(score_prompt(rows.request, rows.start, own, self._model.logits))
        for arrived in inbox.take_prompt_rows():
            vectors = torch.from_numpy(np.array(arrived.rows, np.float32))
            scored.append(score_prompt(arrived.request, arrived.start, vectors, self._model.logits))
        return [piece for piece in scored if piece.logprobs]

    def _swap(self, batch: SchedulerOutput) -> float:
        """Out before in: a block that one leaves may be the one that another comes into. Returns seconds."""
        if not (batch.swap_outs or batch.swap_ins):
            return 0.0
        start = self._clock.now()
        self._kv_cache.swap_out(batch.swap_outs)
        self._kv_cache.swap_in(batch.swap_ins)
        return self._clock.now() - start

    def _zero_tails(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A computation's partial last block is sent whole: what an earlier owner left in its tail must not leave."""
        block_size = self._shape.block_size
        for rows in scheduled:
            end = rows.start + rows.num_tokens
            if rows.request.is_compute_only and rows.is_last_chunk and end % block_size and not rows.recompute_only:
                self._kv_cache.zero_tail(rows.block_table[end // block_size], end % block_size)

    def _sample(
        self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor | None, inbox: Inbox
    ) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Tokens, and for requests whose grammar allows none the reason, by request id."""
        states = _LastStates()
        if hidden is not None:
            for rows, last in zip(scheduled, _last_rows(scheduled), strict=True):
                if rows.is_last_chunk and not rows.request.is_compute_only:
                    states.add(rows.request, hidden[last])
        num_computed = len(states.requests)
        for arrived in inbox.take():
            states.add(arrived.request, torch.from_numpy(np.array(arrived.row, np.float32)))
        requests = states.requests
        if not requests:
            return {}, {}
        assert self._sampler is not None, "a node without a head was asked to sample"
        logits = states.spread(self._model.logits(states.stacked()))
        masks = self._grammar_masks.finish(requests[num_computed:])
        sampled = self._sampler(logits, [self._sampling_row(request, masks.get(request)) for request in requests])
        tokens = {request.request_id: token for request, token in zip(requests, sampled, strict=True)}
        failed = {request.request_id: str(mask) for request, mask in masks.items() if isinstance(mask, GrammarError)}
        return {request_id: token for request_id, token in tokens.items() if request_id not in failed}, failed

    def _sampling_row(self, request: Request, mask: np.ndarray | GrammarError | None) -> SamplingRow:
        assert request.params is not None
        outputs = request.output_token_ids
        return SamplingRow(
            request.params,
            len(outputs),
            request.choice,
            rules=self._rules_of(request),
            output_token_ids=outputs,
            grammar_mask=None if isinstance(mask, GrammarError) else mask,
            num_candidates=request.search.num_candidates if request.search is not None else 0,
        )

    def _rules_of(self, request: Request) -> LogitRules | None:
        if request not in self._rules:
            self._rules[request] = LogitRules.of(request, self._model.config.vocab_size)
        return self._rules[request]


class _LastStates:
    """Hidden states that outputs are sampled from, and who samples: several choices share the state of their prompt."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._vectors: list[torch.Tensor] = []
        self._vector_of: list[int] = []  # by request

    def add(self, request: Request, vector: torch.Tensor) -> None:
        if samplers := request.samplers:
            self.requests += samplers
            self._vector_of += [len(self._vectors)] * len(samplers)
            self._vectors.append(vector)

    def stacked(self) -> torch.Tensor:
        return torch.stack([vector.float() for vector in self._vectors])

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """A row for each request from one for each state."""
        return logits if len(self._vectors) == len(self.requests) else logits[self._vector_of]


def _last_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    ends = np.cumsum([rows.num_tokens for rows in scheduled])
    return [int(end) - 1 for end in ends]


def _samplers(scheduled: Sequence[ScheduledRequest]) -> Iterator[Request]:
    for rows in scheduled:
        if rows.is_last_chunk:
            yield from rows.request.samplers


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
