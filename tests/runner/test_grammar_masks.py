"""Masks of grammars in a step: joined with other filters, beside strangers, with hidden rows, and when there is none.

Scripted grammars; what real ones say is tests/grammar's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.errors import GrammarError
from common.model_config import load_model_config
from common.request import Request
from common.runner.factory import load_weights, make_layout, make_runner
from common.runner.kv_cache import KVCache
from common.runner.logits import LogitRules, pack_bits
from common.runner.model_runner import ModelRunner
from common.runner.sampler import Sampler, SamplingRow
from common.sampling_params import SamplingParams
from common.scheduling.output import HiddenRow, PromptRows, ScheduledRequest, SchedulerOutput

VOCAB = 96
PROMPT = [(i * 29 + 3) % VOCAB for i in range(21)]
GREEDY = SamplingParams(temperature=0.0)


class ScriptedGrammar:
    """After n outputs exactly these tokens may follow; none: it fails."""

    def __init__(self, allowed: Callable[[int], list[int]]) -> None:
        self.allowed = allowed
        self.num_matchers = 0

    def matcher(self) -> ScriptedGrammar:
        self.num_matchers += 1
        return self

    def mask(self, output_token_ids: Sequence[int]) -> np.ndarray:
        found = self.allowed(len(output_token_ids))
        if not found:
            raise GrammarError("no token may follow")
        return np.append(pack_bits(np.array(found), VOCAB), np.int32(0))  # the library's have a word more


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=128, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def runner(model_dir: Path) -> ModelRunner:
    config = load_model_config(model_dir)
    model = load_weights(model_dir, config, "float32", with_head=True, num_threads=1)
    return make_runner(model, KVCache(make_layout(config, 8, "float32"), 20))


class Arrivals:
    def __init__(self, *rows: HiddenRow) -> None:
        self._rows = list(rows)

    def take_prompt_rows(self) -> list[PromptRows]:
        return []

    def take(self) -> list[HiddenRow]:
        rows, self._rows = self._rows, []
        return rows


def request(request_id: str, grammar: ScriptedGrammar | None = None, params: SamplingParams = GREEDY) -> Request:
    return Request(request_id, PROMPT, params, grammar=grammar)


def execute(runner: ModelRunner, *requests: Request, arrived: Sequence[HiddenRow] = (), is_last: bool = True) -> Any:
    rows = tuple(
        ScheduledRequest(r, 0, r.num_tokens, [3 * i + 1, 3 * i + 2, 3 * i + 3], is_last_chunk=is_last)
        for i, r in enumerate(requests)
    )
    return runner.execute(SchedulerOutput(rows), Arrivals(*arrived), lambda: False)


def test_only_what_the_grammar_allows_is_drawn_and_strangers_draw_as_ever(runner: ModelRunner) -> None:
    free = execute(runner, request("free")).sampled["free"].token_id
    other = (free + 1) % VOCAB
    grammar = ScriptedGrammar(lambda _: [other])
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    result = execute(runner, request("g", grammar), request("free"), request("s", grammar, seeded))
    assert {name: token.token_id for name, token in result.sampled.items()} == {"g": other, "free": free, "s": other}
    assert result.failed == {}


def test_log_probabilities_stay_those_of_the_raw_logits(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    free = execute(runner, request("r", params=params)).sampled["r"]
    second = free.logprobs.top_token_ids[1]
    ruled = execute(runner, request("g", ScriptedGrammar(lambda _: [second]), params)).sampled["g"]
    assert ruled.token_id == second
    assert ruled.logprobs.top_logprobs == free.logprobs.top_logprobs
    assert ruled.logprobs.logprob == free.logprobs.top_logprobs[1]


def test_one_that_cannot_go_on_has_a_reason_and_the_others_a_token(runner: ModelRunner) -> None:
    result = execute(runner, request("bad", ScriptedGrammar(lambda _: [])), request("good"))
    assert result.failed == {"bad": "no token may follow"}
    assert list(result.sampled) == ["good"]


def test_one_matcher_follows_a_request_from_step_to_step(runner: ModelRunner) -> None:
    grammar = ScriptedGrammar(lambda count: [[7], [8], [9]][count])
    one = request("g", grammar)
    for expected in (7, 8, 9):
        token_id = execute(runner, one).sampled["g"].token_id
        assert token_id == expected
        one.append_output(token_id)
    assert grammar.num_matchers == 1


def test_hidden_rows_of_other_nodes_are_masked_too(runner: ModelRunner) -> None:
    row = np.ones(32, np.float32)
    result = execute(runner, arrived=[HiddenRow(request("g", ScriptedGrammar(lambda _: [5])), row)])
    assert result.sampled["g"].token_id == 5
    failing = HiddenRow(request("bad", ScriptedGrammar(lambda _: [])), row)
    assert execute(runner, arrived=[failing]).failed == {"bad": "no token may follow"}


def test_nothing_is_masked_before_the_last_chunk_nor_kept_of_a_step_that_was_left(runner: ModelRunner) -> None:
    grammar = ScriptedGrammar(lambda _: [5])
    assert execute(runner, request("g", grammar), is_last=False).sampled == {}
    assert grammar.num_matchers == 0
    left = request("bad", ScriptedGrammar(lambda _: []))
    rows = ScheduledRequest(left, 0, left.num_tokens, [1, 2, 3], is_last_chunk=True)
    assert runner.execute(SchedulerOutput((rows,)), Arrivals(), lambda: True).is_cancelled
    arrived = HiddenRow(request("other", grammar), np.ones(32, np.float32))
    result = execute(runner, arrived=[arrived])
    assert result.failed == {}
    assert result.sampled["other"].token_id == 5


def draw(mask: list[int], params: SamplingParams, stops: frozenset[int] = frozenset()) -> int:
    one = Request("r", [3], params, stop_token_ids=stops)
    rules = LogitRules.of(one, 10)
    row = SamplingRow(params, 0, rules=rules, grammar_mask=pack_bits(np.array(mask), 10))
    return Sampler()(torch.arange(10.0).unsqueeze(0), [row])[0].token_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_grammar_wins_over_every_other_mask_and_bias(temperature: float) -> None:
    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=3, **fields)

    assert draw([2, 4], params(allowed_token_ids=(4, 9))) == 4
    assert draw([2], params(allowed_token_ids=(4, 9))) == 2  # nothing is left: not applied
    assert draw([2], params(bad_words_token_ids=((2,),))) == 2
    assert draw([1], params(min_tokens=5), frozenset({1})) == 1  # it must stop
    assert draw([1, 2], params(min_tokens=5), frozenset({1})) == 2  # it may go on
    assert draw([2], params(logit_bias={9: 100.0, 2: -100.0})) == 2
    assert draw([0, 2], params(top_k=1, presence_penalty=2.0, repetition_penalty=1.5)) == 2
