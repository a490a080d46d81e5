"""Beam search against a plain one, against every sequence there is, and against transformers.

The model of the first two is a table: the log-probabilities of the next token are a random function of the outputs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.messages import TokenLogprobs
from common.request import FinishReason
from common.sampling_params import BeamSearchParams, SamplingParams
from common.scheduling.beam_search import BeamSearch, Hypothesis

Model = Callable[[Sequence[int]], list[float]]
"""Log-probabilities of all tokens after these outputs."""

LENGTH_PENALTIES = (-1.5, 0.0, 0.7, 1.0, 2.0)
EARLY_STOPPING = (False, True, "never")


def table_model(seed: int, vocab_size: int, levels: int | None = None) -> Model:
    """levels: so many different log-probabilities only, so that many beams tie."""

    def logprobs(outputs: Sequence[int]) -> list[float]:
        draw = random.Random(f"{seed} {list(outputs)}")
        if levels:
            return [-0.5 * draw.randint(1, levels) for _ in range(vocab_size)]
        weights = [draw.random() ** 3 + 1e-6 for _ in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def most_likely(logprobs: Sequence[float], count: int) -> TokenLogprobs:
    best = sorted(range(len(logprobs)), key=lambda token_id: (-logprobs[token_id], token_id))[:count]
    values = [logprobs[token_id] for token_id in best]
    return TokenLogprobs(values[0], best, values)


def search(model: Model, params: SamplingParams, end_token_ids: set[int], max_outputs: int) -> BeamSearch:
    """Runs to the end, with no more candidates than it asks for; the books must fit at each step."""
    beams = BeamSearch(params, frozenset(end_token_ids), max_outputs)
    for _ in range(max_outputs):
        before = beams.running_token_ids
        running = beams.advance([most_likely(model(outputs), beams.num_candidates) for outputs in before])
        assert beams.running_token_ids == [[*before[new.parent], new.token_id] for new in running]
        assert len(running) <= beams.width
        cumulative = [new.cumulative_logprob for new in running]
        assert cumulative == sorted(cumulative, reverse=True)
        if beams.is_over:
            assert not running
            return beams
    raise AssertionError("it runs on after the last output")


def beam_params(
    width: int, length_penalty: float = 1.0, early_stopping: bool | str = False, **fields: object
) -> SamplingParams:
    rules = BeamSearchParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    return SamplingParams(beam_search=rules, **fields)


class Found(NamedTuple):
    token_ids: list[int]
    cumulative: float
    score: float


def found(hypotheses: Sequence[Hypothesis]) -> list[Found]:
    return [Found(one.token_ids, one.cumulative_logprob, one.score) for one in hypotheses]


# --- a plain beam search ------------------------------------------------------------------------------------------


def plain_search(model: Model, rules: BeamSearchParams, end_token_ids: set[int], max_outputs: int) -> list[Found]:
    """As transformers does it, with the whole vocabulary and (1 + end tokens) * width candidates of all beams."""
    width, penalty = rules.width, rules.length_penalty
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Found] = []
    for length in range(1, max_outputs + 1):
        everything = []
        for beam, (outputs, cumulative) in enumerate(beams):
            logprobs = model(outputs)
            for token_id, logprob in enumerate(logprobs):
                everything.append((-(cumulative + logprob), beam, -logprob, token_id))
        everything.sort()
        top = [([*beams[beam][0], token_id], -cost) for cost, beam, _, token_id in everything]
        top = top[: max(2, 1 + len(end_token_ids)) * width]
        has_ended = [outputs[-1] in end_token_ids or length == max_outputs for outputs, _ in top]
        for (outputs, cumulative), ended in list(zip(top, has_ended, strict=True))[:width]:
            if ended:
                finished.append(Found(outputs, cumulative, cumulative / length**penalty))
        finished = sorted(finished, key=lambda one: one.score, reverse=True)[:width]
        beams = [one for one, ended in zip(top, has_ended, strict=True) if not ended][:width]
        if not beams:
            break
        if len(finished) == width:
            hypothetical = max_outputs if rules.early_stopping == "never" and penalty > 0 else length
            hopeless = beams[0][1] / hypothetical**penalty <= finished[-1].score
            if rules.early_stopping is True or hopeless:
                break
    return finished


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(4, 9),
    levels=st.sampled_from([None, None, 3]),
    width=st.integers(1, 5),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    early_stopping=st.sampled_from(EARLY_STOPPING),
    end_token_ids=st.sets(st.integers(0, 3), max_size=2),
    max_outputs=st.integers(1, 9),
)
@example(1, 4, None, 5, 1.0, False, {0, 1}, 3)  # more beams than there are continuations at first
@example(1, 4, 3, 3, 1.0, False, {0, 1, 2, 3}, 4)  # no beam can run on
def test_equals_a_plain_search(
    seed, vocab_size, levels, width, length_penalty, early_stopping, end_token_ids, max_outputs
):
    model = table_model(seed, vocab_size, levels)
    own = tuple(end_token_ids)[:1]
    params = beam_params(width, length_penalty, early_stopping, stop_token_ids=own)
    results = search(model, params, end_token_ids, max_outputs).results(width)
    assert found(results) == plain_search(model, params.beam_search, end_token_ids, max_outputs)
    for one in results:
        last = one.token_ids[-1]
        assert one.finish_reason is (FinishReason.STOP if last in end_token_ids else FinishReason.LENGTH)
        assert one.stop_reason == (last if last in own else None)
        assert sum(logprobs.logprob for logprobs in one.logprobs) == pytest.approx(one.cumulative_logprob)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    early_stopping=st.sampled_from(EARLY_STOPPING),
)
def test_fewer_results_are_the_best_ones(seed, width, length_penalty, early_stopping):
    beams = search(table_model(seed, 6), beam_params(width, length_penalty, early_stopping), {2}, 6)
    results = beams.results(width)
    assert len(results) == width
    assert [one.score for one in results] == sorted((one.score for one in results), reverse=True)
    for count in range(width):
        assert beams.results(count) == results[:count]


# --- every sequence -----------------------------------------------------------------------------------------------


def every_sequence(model: Model, vocab_size: int, end_token_ids: set[int], max_outputs: int) -> list[tuple[int, ...]]:
    complete = []
    for length in range(1, max_outputs + 1):
        for outputs in itertools.product(range(vocab_size), repeat=length):
            ends = outputs[-1] in end_token_ids or length == max_outputs
            if ends and end_token_ids.isdisjoint(outputs[:-1]):
                complete.append(outputs)
    return complete


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(2, 5), (3, 3), (5, 2), (32, 1)]),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    early_stopping=st.sampled_from(EARLY_STOPPING),
    end_token_ids=st.sets(st.integers(0, 1), max_size=1),
)
def test_with_room_for_all_beams_it_ranks_every_sequence(seed, shape, length_penalty, early_stopping, end_token_ids):
    vocab_size, max_outputs = shape
    model = table_model(seed, vocab_size)

    def score(outputs: Sequence[int]) -> float:
        logprobs = [model(outputs[:i])[token_id] for i, token_id in enumerate(outputs)]
        return sum(logprobs) / len(outputs) ** length_penalty

    width = vocab_size**max_outputs
    beams = search(model, beam_params(width, length_penalty, early_stopping), end_token_ids, max_outputs)
    right = sorted(every_sequence(model, vocab_size, end_token_ids, max_outputs), key=score, reverse=True)
    results = beams.results(width)
    assert [tuple(one.token_ids) for one in results] == right
    assert [one.score for one in results] == pytest.approx([score(outputs) for outputs in right])


# --- transformers -------------------------------------------------------------------------------------------------

VOCAB_SIZE = 32


@pytest.fixture(scope="module")
def llama():
    import torch  # here: everything else in this file needs neither, and takes milliseconds
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)  # with this model 84 of the 216 searches with end tokens stop early, 148 have an ended beam
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=64, initializer_range=0.2, **sizes)
    return LlamaForCausalLM(config).eval()


def generated(llama, prompt: list[int], rules: BeamSearchParams, end_token_ids: list[int], max_outputs: int):
    """transformers' token ids and scores of each beam, the padding after an end token taken off."""
    import torch

    answer = llama.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_outputs,
        do_sample=False,
        num_beams=rules.width,
        num_return_sequences=rules.width,
        length_penalty=rules.length_penalty,
        early_stopping=rules.early_stopping,
        eos_token_id=end_token_ids or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for sequence in answer.sequences.tolist():
        outputs = sequence[len(prompt) :]
        ends = [i for i, token_id in enumerate(outputs) if token_id in end_token_ids]
        beams.append(outputs[: ends[0] + 1] if ends else outputs)
    return beams, answer.sequences_scores.tolist()


@pytest.mark.parametrize(
    "end_token_ids", [[], [7], [3, 7, 11, 20], [*range(0, 32, 4)]], ids=["endless", "1-end", "4-ends", "8-ends"]
)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("width", [2, 4])
def test_equals_transformers(llama, width, early_stopping, length_penalty, end_token_ids):
    import torch

    params = beam_params(width, length_penalty, early_stopping)
    num_compared = 0
    for prompt in ([1, 5, 9, 13], [2, 30, 17], [21, 6, 6, 25, 8]):

        def model(outputs: Sequence[int], prompt: list[int] = prompt) -> list[float]:
            with torch.inference_mode():
                logits = llama(torch.tensor([[*prompt, *outputs]])).logits[0, -1]
            return logits.float().log_softmax(-1).tolist()

        right, scores = generated(llama, prompt, params.beam_search, end_token_ids, 8)
        if any(a - b < 1e-5 for a, b in itertools.pairwise(scores)):
            continue  # two sums in another order: either may come first
        results = search(model, params, set(end_token_ids), 8).results(width)
        assert [one.token_ids for one in results] == right
        assert [one.score for one in results] == pytest.approx(scores, abs=1e-4)
        num_compared += 1
    assert num_compared >= 2


# --- single rules -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), length_penalty=st.sampled_from(LENGTH_PENALTIES), early_stopping=st.booleans())
def test_one_beam_is_greedy(seed, length_penalty, early_stopping):
    model, outputs = table_model(seed, 6), []
    while len(outputs) < 8 and 2 not in outputs:
        logprobs = model(outputs)
        outputs.append(logprobs.index(max(logprobs)))
    [result] = search(model, beam_params(1, length_penalty, early_stopping), {2}, 8).results(1)
    assert result.token_ids == outputs


def step(beams: BeamSearch, *logprobs: Sequence[float]) -> list[tuple[int, int]]:
    """Parent and token of each next beam."""
    return [(new.parent, new.token_id) for new in beams.advance([most_likely(row, len(row)) for row in logprobs])]


def test_of_ties_the_better_beam_and_then_the_earlier_candidate_goes_first():
    beams = BeamSearch(beam_params(3), frozenset(), 3)
    assert step(beams, [-1.0, -2.0, -1.0, -1.0]) == [(0, 0), (0, 2), (0, 3)]
    assert step(beams, [-2.0, -9.0, -9.0, -2.0], [-2.0, -1.0, -9.0, -9.0], [-1.0] * 4) == [(1, 1), (2, 0), (2, 1)]


def test_of_ended_beams_that_tie_the_earlier_one_goes_first():
    beams = BeamSearch(beam_params(2, length_penalty=0.0, early_stopping="never"), frozenset({0}), 4)
    step(beams, [-1.0, -0.5, -3.0])
    step(beams, [-0.5, -0.25, -9.0], [-9.0, -9.0, -9.0])
    assert [one.token_ids for one in beams.results(2)] == [[0], [1, 0]]


def test_an_end_token_counts_only_among_the_best():
    beams = BeamSearch(beam_params(2), frozenset({0}), 4)
    assert step(beams, [-3.0, -1.0, -2.0, -4.0]) == [(0, 1), (0, 2)]
    assert beams.results(2) == []
    assert step(beams, [-1.0, -1.5, -9.0, -9.0], [-9.0, -0.25, -9.0, -9.0]) == [(1, 1), (0, 1)]
    assert [one.token_ids for one in beams.results(2)] == [[1, 0]]


def ended_twice(early_stopping: bool | str, length_penalty: float, running: float) -> BeamSearch:
    """[0] (-1) and [1, 0] (-2.5) have ended, [1, 1] runs or would."""
    beams = BeamSearch(beam_params(2, length_penalty, early_stopping), frozenset({0}), 4)
    step(beams, [-1.0, -2.0, -5.0])
    step(beams, [-0.5, running + 2.0, -9.0], [-9.0, -9.0, -9.0])
    assert [one.token_ids for one in beams.results(2)] in ([[0], [1, 0]], [[1, 0], [0]])
    return beams


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "running", "is_over"),
    [
        (True, 1.0, -2.25, True),
        (False, 0.0, -2.75, True),
        (False, 1.0, -2.75, True),  # over 2, both
        (False, 1.0, -2.5, True),  # as good as the worst is not better
        (False, 1.0, -2.25, False),
        (False, 2.0, -2.75, False),  # over 4: better than -1, which this penalty has made the worst
        ("never", 0.0, -2.75, True),
        ("never", 1.0, -2.75, False),  # if the next two outputs cost nothing, over 4: better than -2.5 over 2
        ("never", -1.0, -2.75, True),
        ("never", -1.0, -2.25, False),  # times 2, both: the longer the worse, so the length it has now
    ],
)
def test_when_it_stops(early_stopping, length_penalty, running, is_over):
    assert ended_twice(early_stopping, length_penalty, running).is_over == is_over


def test_beams_that_run_when_it_stops_early_do_not_count():
    beams = ended_twice(early_stopping=True, length_penalty=2.0, running=-2.75)  # [1, 1] would be better than [0]
    assert beams.running_token_ids == []
    assert sorted(one.token_ids for one in beams.results(2)) == [[0], [1, 0]]


def test_logprobs_are_cut_to_what_the_request_wants():
    beams = BeamSearch(beam_params(2, logprobs=1), frozenset({0}), 4)
    first, second = beams.advance([TokenLogprobs(-0.5, [2, 3, 0], [-0.5, -1.0, -2.0])])
    assert first.logprobs == TokenLogprobs(-0.5, [2], [-0.5])
    assert second.logprobs == TokenLogprobs(-1.0, [2], [-0.5])


@pytest.mark.parametrize(("logprobs", "count"), [(None, 4), (0, 4), (20, 20)])
def test_it_asks_for_enough_candidates(logprobs, count):
    params = beam_params(2, logprobs=logprobs, stop_token_ids=(5,))
    assert BeamSearch(params, frozenset({0, 5}), 4).num_candidates == count


@pytest.mark.parametrize("impossible", [-9999.0, -math.inf])
@pytest.mark.parametrize("length_penalty", [-1000.0, -1.0, 0.0, 1.0, 1000.0])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_the_impossible_and_the_extreme_stay_comparable(impossible, length_penalty, early_stopping):
    beams = BeamSearch(beam_params(3, length_penalty, early_stopping), frozenset({0}), 5)
    while not beams.is_over:
        running = beams.running_token_ids
        step(beams, *[[impossible, 0.0, impossible, impossible] for _ in running])
    results = beams.results(3)
    assert len(results) == 3
    assert not any(math.isnan(one.score) for one in results)
    assert results[0].cumulative_logprob == max(one.cumulative_logprob for one in results)


def test_a_long_beam_is_freed_without_deep_recursion():
    beams = BeamSearch(beam_params(1), frozenset(), 50_000)
    while not beams.is_over:
        beams.advance([TokenLogprobs(-0.5, [3], [-0.5])])
    [result] = beams.results(1)
    del beams
    assert result.token_ids == [3] * 50_000
    assert result.score == pytest.approx(-0.5)
