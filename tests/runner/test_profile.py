"""The worst batch by its numbers, and run through a real tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.model_config import load_model_config
from common.runner import sampler
from common.runner.factory import load_weights, make_layout
from common.runner.model_runner import ModelRunner
from common.runner.profile import run_worst_step, worst_batch
from common.scheduling.config import SchedulerConfig
from common.scheduling.output import CancelCheck, HiddenRow, Inbox, PromptRows, SchedulerOutput, StepResult

CONTEXT = 128


def limits(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int = CONTEXT) -> SchedulerConfig:
    return SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len)


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "max_model_len", "rows"),
    [
        (128, 64, 8192, [65] + [1] * 63),
        (32, 4, 128, [29, 1, 1, 1]),
        (64, 64, 128, [32] + [1] * 32),  # half of the budget to the chunk, the rest as far as it goes
        (1, 8, 128, [1]),
        (100, 1, 128, [100]),
        (512, 4, 128, [128] * 4),  # no request has more rows than the context
        (300, 4, 128, [128, 128, 43, 1]),
        (1000, 2, 128, [128, 128]),  # less than the budget, which nothing can fill
    ],
)
def test_the_worst_batch_fills_budget_and_requests_as_far_as_both_go(
    model_dir: Path, budget: int, max_num_seqs: int, max_model_len: int, rows: list[int]
) -> None:
    layout = make_layout(load_model_config(model_dir), 8, "float32")
    batch = worst_batch(layout, limits(budget, max_num_seqs, max_model_len), with_head=True)
    assert [scheduled.num_tokens for scheduled in batch] == rows
    assert batch[0].start + batch[0].num_tokens == max_model_len
    assert len({scheduled.request.request_id for scheduled in batch}) == len(batch)
    for scheduled in batch:
        end = scheduled.start + scheduled.num_tokens
        assert scheduled.request.num_tokens == end
        assert len(scheduled.block_table) == layout.num_blocks_for(end)
        assert scheduled.is_last_chunk


class Recording:
    """Notes what the real runner is given and gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[SchedulerOutput, list[HiddenRow], StepResult]] = []
        execute = ModelRunner.execute

        def recorded(runner: ModelRunner, batch: SchedulerOutput, inbox: Inbox, should_cancel: CancelCheck) -> Any:
            rows = inbox.take()
            result = execute(runner, batch, _Rows(rows), should_cancel)
            self.steps.append((batch, rows, result))
            return result

        monkeypatch.setattr(ModelRunner, "execute", recorded)


class _Rows:
    def __init__(self, rows: list[HiddenRow]) -> None:
        self._rows = rows

    def take_prompt_rows(self) -> list[PromptRows]:
        return []

    def take(self) -> list[HiddenRow]:
        return self._rows


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return Recording(monkeypatch)


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(64, 8), (8, 20)])
def test_all_requests_sample_at_once_with_the_costliest_parameters(
    model_dir: Path, recording: Recording, budget: int, max_num_seqs: int
) -> None:
    """As many as run at once: never more than the budget has rows."""
    config = load_model_config(model_dir)
    model = load_weights(model_dir, config, "float32", with_head=True, num_threads=1)
    run_worst_step(model, make_layout(config, 8, "float32"), limits(budget, max_num_seqs))
    whole, *head_only = recording.steps
    assert whole[0].num_scheduled_tokens == budget
    assert head_only
    for _, _, result in recording.steps:
        assert len(result.sampled) == min(budget, max_num_seqs)
        assert all(token.logprobs is not None for token in result.sampled.values())
    assert not any(batch.scheduled for batch, _, _ in head_only)


def test_the_costliest_parameters_make_the_sampler_rank_the_whole_vocabulary(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked: list[int] = []

    def rank_all_kept(*args: Any) -> Any:
        found = sampler_ranking(*args)
        ranked.append(found[1].shape[1])
        return found

    sampler_ranking = sampler.rank_all_kept
    monkeypatch.setattr(sampler, "_RANKED_WIDTH", 8)
    monkeypatch.setattr(sampler, "rank_all_kept", rank_all_kept)
    config = load_model_config(model_dir)
    model = load_weights(model_dir, config, "float32", with_head=True, num_threads=1)
    run_worst_step(model, make_layout(config, 8, "float32"), limits(16, 4))
    assert max(ranked) >= 0.95 * config.vocab_size


def test_without_a_head_all_hidden_states_of_the_batch_are_computed(model_dir: Path, recording: Recording) -> None:
    config = load_model_config(model_dir)
    model = load_weights(model_dir, config, "float32", with_head=False, num_threads=1)
    run_worst_step(model, make_layout(config, 8, "float32"), limits(64, 8))
    _, arrived, result = recording.steps[0]
    assert not arrived
    assert not result.sampled
    assert sum(len(hidden) for hidden in result.hidden.values()) == 64
