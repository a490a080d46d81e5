"""The runner on a tiny model: hidden rows, the inbox, cancelled steps, tails of partial blocks, copy-on-write, choices,
prompts' log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
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
from common.sampling_params import BeamSearchParams, SamplingParams
from common.scheduling.beam_search import BeamSearch
from common.scheduling.output import HiddenRow, PromptRows, SampledToken, ScheduledRequest, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(i * 29 + 3) % 96 for i in range(21)]


class Arrivals:
    def __init__(self, *rows: HiddenRow, prompt_rows: Sequence[PromptRows] = ()) -> None:
        self._rows = list(rows)
        self._prompt_rows = list(prompt_rows)

    def take_prompt_rows(self) -> list[PromptRows]:
        rows, self._prompt_rows = self._prompt_rows, []
        return rows

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


# --- choices and prompts' log-probabilities -----------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.5, seed=3, logprobs=2)


def with_choices(request_id: str, *numbers: int, params: SamplingParams = SEEDED) -> Request:
    choices = [Request(f"{request_id}{number}", PROMPT, params, choice=number) for number in numbers]
    return Request(request_id, PROMPT, params, choices=choices)


def count_head_rows(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    head = runner._model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        counts.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(runner._model, "logits", counted)
    return counts


def test_choices_share_a_row_of_logits_and_draw_as_each_would_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = make()
    numbers = (0, 1, 4)
    alone: dict[str, SampledToken] = {}
    for number in numbers:
        rows = rows_of(Request(f"p{number}", PROMPT, SEEDED, choice=number), [1, 2, 3])
        alone |= runner.execute(SchedulerOutput((rows,)), Arrivals(), never).sampled
    assert len({token.token_id for token in alone.values()}) == 3, "the choice's number makes no difference"
    counts = count_head_rows(runner, monkeypatch)
    stranger = rows_of(Request("s", PROMPT[:9], SEEDED), [4, 5])
    batch = SchedulerOutput((stranger, rows_of(with_choices("p", *numbers), [1, 2, 3])))
    together = runner.execute(batch, Arrivals(), never).sampled
    assert counts == [2], "a prompt gives one row, however many choices draw from it"
    assert together.pop("s")
    assert {name: token.token_id for name, token in together.items()} == {
        name: token.token_id for name, token in alone.items()
    }
    for name, token in together.items():
        assert token.logprobs is not None
        right = alone[name].logprobs
        assert right is not None
        assert token.logprobs.logprob == pytest.approx(right.logprob, abs=1e-5)


def test_a_hidden_row_gives_first_outputs_to_the_choices_that_have_none(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = make(with_head=False)
    decode, _ = make()
    batch = SchedulerOutput((rows_of(Request("c", PROMPT), [4, 5, 6]),))
    row = prefill.execute(batch, Arrivals(), never).hidden["c"][0]
    right = decode.execute(SchedulerOutput((rows_of(with_choices("p", 0, 1, 2), [1, 2, 3]),)), Arrivals(), never)
    prompt = with_choices("p", 0, 1, 2)
    prompt.choices[1].append_output(right.sampled["p1"].token_id)
    found = decode.execute(SchedulerOutput(), Arrivals(HiddenRow(prompt, row)), never).sampled
    assert set(found) == {"p0", "p2"}
    assert all(found[name].token_id == right.sampled[name].token_id for name in found)
    counts = count_head_rows(decode, monkeypatch)
    for name in ("p0", "p2"):
        prompt.choices[int(name[1])].append_output(found[name].token_id)
    assert decode.execute(SchedulerOutput(), Arrivals(HiddenRow(prompt, row)), never).sampled == {}
    assert counts == []


def test_a_beam_gets_its_candidates_and_those_beside_it_what_they_asked_for(make: Any) -> None:
    runner, _ = make()
    beams = SamplingParams(temperature=1.5, seed=3, logprobs=1, beam_search=BeamSearchParams(width=4))
    prompt = Request("b", PROMPT, beams, beam_search=BeamSearch(beams, frozenset({1, 2, 3}), 8))
    batch = SchedulerOutput((rows_of(prompt, [1, 2, 3]), rows_of(Request("s", PROMPT, SEEDED), [4, 5, 6])))
    sampled = runner.execute(batch, Arrivals(), never).sampled
    candidates = sampled["b"].logprobs
    assert len(candidates.top_token_ids) == 7
    assert sampled["b"].token_id == candidates.top_token_ids[0], "beams draw nothing"
    assert len(sampled["s"].logprobs.top_token_ids) == 2


def scores_of(runner: ModelRunner, chunks: Sequence[int]) -> list[Any]:
    """Scored pieces of PROMPT, computed in chunks."""
    request = Request("r", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=2))
    pieces = []
    for size in chunks:
        start = request.num_computed_tokens
        is_last = start + size == len(PROMPT)
        rows = ScheduledRequest(request, start, size, [1, 2, 3], is_last_chunk=is_last)
        result = runner.execute(SchedulerOutput((rows,)), Arrivals(), never)
        assert bool(result.sampled) == is_last
        request.num_computed_tokens += size
        for scored in result.scored:
            assert scored.start == request.num_scored_tokens
            request.num_scored_tokens += len(scored.logprobs)
            pieces += scored.logprobs
    return pieces


@pytest.mark.parametrize("chunks", [[21], [1, 20], [20, 1], [7, 7, 7], [1] * 21])
def test_a_prompt_scored_in_chunks_and_from_hidden_rows(make: Any, chunks: list[int]) -> None:
    """Beside each other: what this step computes, and what another node did."""
    prefill, _ = make(with_head=False)
    decode, _ = make()
    all_rows = rows_of(Request("c", PROMPT, want_all_hidden=True), [1, 2, 3])
    hidden = prefill.execute(SchedulerOutput((all_rows,)), Arrivals(), never).hidden["c"]
    here = scores_of(decode, chunks)
    assert len(here) == 20
    fetched = Request("f", PROMPT, SamplingParams(prompt_logprobs=2))
    arrived = [PromptRows(fetched, 0, hidden[:8]), PromptRows(fetched, 8, hidden[8:20])]
    result = decode.execute(SchedulerOutput(), Arrivals(prompt_rows=arrived), never)
    assert [(scored.start, len(scored.logprobs)) for scored in result.scored] == [(1, 8), (9, 12)]
    there = [entry for scored in result.scored for entry in scored.logprobs]
    for one, other in zip(here, there, strict=True):
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
