"""The runner on a tiny model: hidden rows, the inbox, cancelled steps, tails of partial blocks, copy-on-write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.model_config import load_model_config
from common.request import Request
from common.runner.factory import load_weights, make_layout, make_runner
from common.runner.kv_cache import KVCache
from common.runner.model_runner import ModelRunner
from common.sampling_params import SamplingParams
from common.scheduling.output import HiddenRow, PromptRows, ScheduledRequest, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(i * 29 + 3) % 96 for i in range(21)]


class Arrivals:
    def __init__(self, *rows: HiddenRow) -> None:
        self._rows = list(rows)

    def take_prompt_rows(self) -> list[PromptRows]:
        return []

    def take(self) -> list[HiddenRow]:
        rows, self._rows = self._rows, []
        return rows


def never() -> bool:
    return False


@pytest.fixture
def make(model_dir: Path) -> Any:
    def build(*, with_head: bool = True) -> tuple[ModelRunner, KVCache]:
        config = load_model_config(model_dir)
        model = load_weights(model_dir, config, "float32", with_head=with_head, num_threads=1)
        kv_cache = KVCache(make_layout(config, 8, "float32"), 20)
        return make_runner(model, kv_cache), kv_cache

    return build


def rows_of(request: Request, table: list[int], start: int = 0, **fields: Any) -> ScheduledRequest:
    return ScheduledRequest(request, start, request.num_tokens - start, table, is_last_chunk=True, **fields)


def test_a_hidden_row_from_a_prefill_runner_gives_the_token_that_one_engine_gives(make: Any) -> None:
    prefill, _ = make(with_head=False)
    decode, _ = make()
    request = Request("r", PROMPT, GREEDY)
    own = decode.execute(SchedulerOutput((rows_of(request, [1, 2, 3]),)), Arrivals(), never).sampled["r"]
    computed = prefill.execute(SchedulerOutput((rows_of(Request("c", PROMPT), [4, 5, 6]),)), Arrivals(), never)
    assert computed.sampled == {}
    assert computed.hidden["c"].shape == (1, 32)
    arrived = HiddenRow(request, computed.hidden["c"][0])
    from_row = decode.execute(SchedulerOutput(), Arrivals(arrived), never)  # a step without rows of its own
    assert from_row.sampled["r"].token_id == own.token_id


def test_all_hidden_rows_of_a_chunk(make: Any) -> None:
    prefill, _ = make(with_head=False)
    request = Request("c", PROMPT, want_all_hidden=True)
    hidden = prefill.execute(SchedulerOutput((rows_of(request, [1, 2, 3]),)), Arrivals(), never).hidden["c"]
    last = prefill.execute(SchedulerOutput((rows_of(Request("d", PROMPT), [4, 5, 6]),)), Arrivals(), never).hidden["d"]
    assert hidden.shape == (21, 32)
    np.testing.assert_allclose(hidden[-1:], last, rtol=1e-5, atol=1e-5)


def test_cancelled_between_layers(make: Any) -> None:
    runner, _ = make()
    answers = iter([False, True])
    result = runner.execute(
        SchedulerOutput((rows_of(Request("r", PROMPT, GREEDY), [1, 2, 3]),)), Arrivals(), lambda: next(answers)
    )
    assert result.is_cancelled
    assert result.sampled == {}


def test_tail_of_a_partial_last_block_is_zeroed(make: Any) -> None:
    """DESIGN: no other tenant's KV leaves with a partial block."""
    prefill, cache = make(with_head=False)
    cache.pool.fill_(7.0)
    prefill.execute(SchedulerOutput((rows_of(Request("c", PROMPT), [1, 2, 3]),)), Arrivals(), never)
    assert torch.all(cache.pool[3, :, :, :, 21 % 8 :] == 0)
    assert not torch.any(cache.pool[3, :, :, :, : 21 % 8] == 7.0)


def test_recompute_of_the_last_token_writes_only_the_null_block(make: Any) -> None:
    runner, cache = make()
    request = Request("r", PROMPT[:16], GREEDY)
    first = runner.execute(SchedulerOutput((rows_of(request, [1, 2]),)), Arrivals(), never).sampled["r"]
    before = cache.pool[1:].clone()
    rows = ScheduledRequest(request, 15, 1, [1, 2], is_last_chunk=True, recompute_only=True)
    again = runner.execute(SchedulerOutput((rows,)), Arrivals(), never).sampled["r"]
    assert again.token_id == first.token_id
    assert torch.equal(cache.pool[1:], before)


def test_copies_happen_before_the_forward_pass(make: Any) -> None:
    runner, cache = make()
    request = Request("r", PROMPT, GREEDY)
    first = runner.execute(SchedulerOutput((rows_of(request, [1, 2, 3]),)), Arrivals(), never).sampled["r"]
    rows = rows_of(request, [1, 2, 9], start=20)
    again = runner.execute(SchedulerOutput((rows,), copies=((3, 9),)), Arrivals(), never).sampled["r"]
    assert again.token_id == first.token_id
    assert torch.equal(cache.pool[9, :, :, :, :4], cache.pool[3, :, :, :, :4])
