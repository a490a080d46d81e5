"""The profiling run: the worst batch that the limits allow, once through the real model, sampler and head.

Its KV goes to one single block, which every block table names again and again, so contexts may be as long as the
model's without a pool. What the numbers in it are is all the same; what counts is how much memory the step takes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from common.kv_layout import KVLayout
from common.models.llama import Llama
from common.request import Request
from common.runner.factory import make_runner
from common.runner.kv_cache import KVCache
from common.sampling_params import MAX_LOGPROBS, SamplingParams
from common.scheduling.config import SchedulerConfig
from common.scheduling.output import HiddenRow, PromptRows, ScheduledRequest, SchedulerOutput

COSTLIEST_PARAMS = SamplingParams(
    temperature=1e4, top_p=0.99, repetition_penalty=1.1, presence_penalty=0.1, logprobs=MAX_LOGPROBS, seed=0
)
"""Nearly equal probabilities: the sampler must rank the whole vocabulary to know where top_p ends. Penalties: logits
that are changed are a copy."""

_NUM_REPEATS = 3
_NUM_LAYERS = 4
_BLOCK = 1  # block 0 is the null block


def run_worst_step(model: Llama, layout: KVLayout, config: SchedulerConfig) -> None:
    """With a head, its part of the step is repeated: its large, short-lived tensors fragment the heap, and the peak
    of a single step was measured 15% lower than that of many. The layers' part does not grow, and a few of them show
    it: each uses the memory of the one before."""
    runner = make_runner(_shallow(model), KVCache(layout, _BLOCK + 1))
    scheduled = worst_batch(layout, config, with_head=model.has_head)
    hidden_size, num_requests = model.config.hidden_size, config.max_num_running if model.has_head else 0
    arrivals = _Arrivals(max(num_requests - len(scheduled), 0), hidden_size)
    runner.execute(SchedulerOutput(scheduled), arrivals, lambda: False)
    for _ in range(_NUM_REPEATS):
        runner.execute(SchedulerOutput(), _Arrivals(num_requests, hidden_size), lambda: False)


def _shallow(model: Llama) -> Llama:
    """The same model, its first layers only."""
    shallow = copy.copy(model)
    shallow.layers = model.layers[:_NUM_LAYERS]
    return shallow


def worst_batch(layout: KVLayout, config: SchedulerConfig, *, with_head: bool) -> tuple[ScheduledRequest, ...]:
    """As many requests and rows as the limits allow, the first of them a prompt's last chunk at the context's end.

    with_head: False for computations all of whose hidden states are wanted, True for requests that all sample.
    """
    counts = _row_counts(config.max_num_running, config.max_num_batched_tokens, config.max_model_len)
    ends = [config.max_model_len, *counts[1:]]  # memory of attention is by the longest context
    return tuple(
        ScheduledRequest(
            _make_request(f"profile-{number}", end, with_head=with_head),
            end - count,
            count,
            [_BLOCK] * layout.num_blocks_for(end),
            is_last_chunk=True,
        )
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def _row_counts(max_requests: int, budget: int, max_rows: int) -> Sequence[int]:
    """Rows of each request: as many requests as possible, but at least half of the budget for the first."""
    counts: list[int] = []
    while budget and len(counts) < max_requests:
        num_others = max_requests - len(counts) - 1
        least = 1 if counts else -(-budget // 2)
        counts.append(min(max(budget - num_others, least), max_rows))
        budget -= counts[-1]
    return counts


def _make_request(request_id: str, num_tokens: int, *, with_head: bool) -> Request:
    params = COSTLIEST_PARAMS if with_head else None
    return Request(request_id, [0] * num_tokens, params, want_all_hidden=not with_head)


class _Arrivals:
    """Hidden states for requests that the budget had no row for: they sample in the same step."""

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        row = np.zeros(hidden_size, np.float32)
        self._rows = [HiddenRow(_make_request(f"arrived-{i}", 1, with_head=True), row) for i in range(num_rows)]

    def take_prompt_rows(self) -> list[PromptRows]:
        return []

    def take(self) -> list[HiddenRow]:
        rows, self._rows = self._rows, []
        return rows
