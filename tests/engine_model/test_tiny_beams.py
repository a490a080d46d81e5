"""Beam search on real tensors: transformers' beams and scores, every sequence of a tiny vocabulary, and the same beams
whatever happens on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from common.engine.events import OutputEvent, SearchEndedEvent
from common.request import Request
from common.sampling_params import BeamSearchParams
from common.scheduling.beam_search import BeamSearch, Hypothesis
from tests.engine_model.conftest import Generator, build, make_tiny_model, transformers_model
from tests.engine_model.tiny import PROMPT, STRANGER, Shortage

NUM_OUTPUTS = 8
TIE = 1e-5
ENDS = tuple(range(0, 199, 9))
EarlyStopping = bool | Literal["never"]


class Found(NamedTuple):
    token_ids: list[int]
    score: float


def add(
    one: Generator,
    width: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    *,
    ends: Iterable[int] = ENDS,
    prompt: list[int] = PROMPT,
    **params: Any,
) -> Request:
    rules = BeamSearchParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    asked = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "stop_token_ids": tuple(ends), **params}
    return one.add(prompt, beam_search=rules, **asked)


def results(request: Request) -> list[Hypothesis]:
    """All that were kept. Their log-probabilities add up to the scores."""
    search, params = request.beam_search, request.params
    assert isinstance(search, BeamSearch)
    assert params is not None
    assert params.beam_search is not None
    found = search.results(search.width)
    for one in found:
        assert len(one.logprobs) == len(one.token_ids)
        total = sum(logprobs.logprob for logprobs in one.logprobs)
        assert one.cumulative_logprob == pytest.approx(total, abs=1e-9)
        assert one.score == pytest.approx(total / len(one.token_ids) ** params.beam_search.length_penalty, abs=1e-9)
    return found


def finished(one: Generator, request: Request) -> list[Hypothesis]:
    events = one.finish(request)
    told = [event for event in events if event.request_id.startswith(request.request_id)]
    assert [type(event) for event in told if isinstance(event, (OutputEvent, SearchEndedEvent))] == [SearchEndedEvent]
    return results(request)


def check(found: list[Hypothesis], right: list[Found]) -> None:
    """Where two scores tie within rounding, either may be first."""
    assert [one.score for one in found] == pytest.approx([one.score for one in right], abs=1e-4, rel=1e-5)
    scores = [one.score for one in right]
    for place, (mine, other) in enumerate(zip(found, right, strict=True)):
        neighbours = [*scores[max(place - 1, 0) : place], *scores[place + 1 : place + 2]]
        if all(abs(other.score - score) > TIE for score in neighbours):
            assert mine.token_ids == other.token_ids, f"place {place}"


# --- transformers -------------------------------------------------------------------------------------------------


def generated(model: Any, prompt: list[int], rules: BeamSearchParams, ends: Iterable[int]) -> list[Found]:
    stops = list(ends)
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_OUTPUTS,
        do_sample=False,
        num_beams=rules.width,
        num_return_sequences=rules.width,
        length_penalty=rules.length_penalty,
        early_stopping=rules.early_stopping,
        eos_token_id=stops or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for sequence, score in zip(answer.sequences.tolist(), answer.sequences_scores.tolist(), strict=True):
        outputs = sequence[len(prompt) :]
        num_outputs = next((i + 1 for i, token_id in enumerate(outputs) if token_id in stops), len(outputs))
        found.append(Found(outputs[:num_outputs], score))
    return found


@pytest.mark.parametrize("ends", [(), ENDS], ids=["endless", "ends"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (3, -1.0), (4, 2.0), (6, 0.0), (6, 1.0)])
def test_equals_transformers(
    tiny_generator: Callable[..., Generator],
    tiny_model_dir: Path,
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    ends: tuple[int, ...],
) -> None:
    one = tiny_generator("--block-size", "8", "--max-num-batched-tokens", "64")
    prompts = [PROMPT[:length] for length in (1, 8, 13, 16, 31, 43)]
    requests = [add(one, width, length_penalty, early_stopping, ends=ends, prompt=prompt) for prompt in prompts]
    one.finish(*requests)
    lengths = set()
    for prompt, request in zip(prompts, requests, strict=True):
        rules = BeamSearchParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        right = generated(transformers_model(tiny_model_dir), prompt, rules, ends)
        check(results(request), right)
        lengths |= {len(found.token_ids) for found in right}
    if ends and length_penalty < 2.0:
        assert len(lengths) > 1, "none ended early"
    one.assert_nothing_held()


def test_a_beam_of_one_is_greedy(tiny_generator: Callable[..., Generator]) -> None:
    one = tiny_generator()
    [found] = finished(one, add(one, 1, ends=()))
    assert found.token_ids == one.generate({"p": PROMPT}, max_tokens=NUM_OUTPUTS, ignore_eos=True)["p"]


def test_log_probabilities_of_outputs_are_the_models(
    tiny_generator: Callable[..., Generator], tiny_model_dir: Path
) -> None:
    one = tiny_generator()
    for beam in finished(one, add(one, 4, logprobs=3)):
        with torch.inference_mode():
            logits = transformers_model(tiny_model_dir)(torch.tensor([[*PROMPT, *beam.token_ids]])).logits[0]
        right = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
        for token_id, logprobs, row in zip(beam.token_ids, beam.logprobs, right, strict=True):
            assert logprobs.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert logprobs.top_token_ids == row.topk(3).indices.tolist()
            assert logprobs.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


# --- every sequence -----------------------------------------------------------------------------------------------


def every_sequence(
    model: Any, prompt: list[int], vocab_size: int, length: int, ends: set[int]
) -> list[tuple[list[int], float]]:
    """All answers, and the sums of their log-probabilities in float64."""
    found: list[tuple[list[int], float]] = []
    running: list[tuple[list[int], float]] = [([], 0.0)]
    for step in range(1, length + 1):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *outputs] for outputs, _ in running])).logits[:, -1]
        rows = logits.double().log_softmax(-1).tolist()
        longer = [
            ([*outputs, token_id], total + row[token_id])
            for (outputs, total), row in zip(running, rows, strict=True)
            for token_id in range(vocab_size)
        ]
        found += [one for one in longer if step == length or one[0][-1] in ends]
        running = [one for one in longer if one[0][-1] not in ends]
    return found


@pytest.mark.parametrize(
    ("vocab_size", "length", "ends"),
    [(2, 6, ()), (3, 4, ()), (4, 3, (2,)), (5, 3, (0, 4)), (5, 2, (1,)), (6, 2, ())],
)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_with_room_for_all_beams_the_best_of_all_sequences(
    tmp_path: Path, vocab_size: int, length: int, ends: tuple[int, ...], length_penalty: float
) -> None:
    """No beginning is ever left out of 32 beams here, so that the search is exact."""
    model_dir = make_tiny_model(tmp_path, vocab_size)
    parts = build(model_dir, "--num-gpu-blocks-override", "400", "--max-num-seqs", "32", "--block-size", "8")
    one = Generator(parts.engine, parts.model_config.eos_token_ids)
    for prompt in ([1, 0, 1], [0] * 8, [1, 1, 0, 1, 0, 0, 0, 1, 1, 0]):
        fields: dict[str, Any] = {"ends": ends, "prompt": prompt, "max_tokens": length}
        found = finished(one, add(one, 32, length_penalty, **fields))
        every = every_sequence(transformers_model(model_dir), prompt, vocab_size, length, set(ends))
        ranked = sorted(
            (Found(ids, total / len(ids) ** length_penalty) for ids, total in every), key=lambda f: -f.score
        )
        check(found, ranked[:32])
    one.assert_nothing_held()


# --- on the way ---------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "ends": {"width": 4},
    "endless": {"width": 3, "ends": ()},
    "early": {"width": 5, "early_stopping": True, "length_penalty": 0.5},
}


@pytest.fixture(scope="module")
def right(tiny_model_dir: Path) -> dict[str, list[Hypothesis]]:
    """Alone, cold, in one chunk, never preempted."""
    found = {}
    for name, case in CASES.items():
        parts = build(tiny_model_dir, "--num-gpu-blocks-override", "100")
        one = Generator(parts.engine, parts.model_config.eos_token_ids)
        found[name] = finished(one, add(one, **case))
        scores = [beam.score for beam in found[name]]
        assert all(a - b > TIE for a, b in itertools.pairwise(scores)), "two tie, another seed is needed"
    return found


def check_same(found: list[Hypothesis], right: list[Hypothesis]) -> None:
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in right]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in right], abs=1e-5)
    assert [beam.finish_reason for beam in found] == [beam.finish_reason for beam in right]


Right = dict[str, list[Hypothesis]]


@pytest.mark.parametrize(("block_size", "budget"), [("8", "6"), ("16", "17"), ("32", "512")])
@pytest.mark.parametrize("name", CASES)
def test_chunks_blocks_and_prefix_hits(
    tiny_generator: Callable[..., Generator], right: Right, block_size: str, budget: str, name: str
) -> None:
    one = tiny_generator("--block-size", block_size, "--max-num-batched-tokens", budget, "--max-num-seqs", "6")
    for num_cached in (0, 1, 32, 43, 50):
        one.engine.reset_prefix_cache()
        if num_cached:
            one.generate({"q": [*PROMPT, *right[name][0].token_ids][:num_cached]}, max_tokens=1)
        check_same(finished(one, add(one, **CASES[name])), right[name])
        one.assert_nothing_held()


@pytest.mark.parametrize("name", CASES)
def test_among_strangers_at_every_slot_of_the_batch(
    tiny_generator: Callable[..., Generator], right: Right, name: str
) -> None:
    """Streams, choices and other searches; so many come first."""
    one = tiny_generator("--num-gpu-blocks-override", "600")
    prompts = [[(i * 31 + j * 17) % 199 for j in range(1 + 3 * i)] for i in range(9)]
    for slot in range(0, 10, 3):
        strangers = [one.add_choices(prompt, [0, 1], temperature=1.0, seed=3) for prompt in prompts[:slot]]
        request = add(one, **CASES[name])
        strangers += [add(one, 2, prompt=prompt) for prompt in prompts[slot:]]
        check_same(finished(one, request), right[name])
        one.finish(*strangers)
        one.assert_nothing_held()
        one.engine.reset_prefix_cache()


def run_preempted(
    one: Generator, shortage: Shortage, name: str, is_due: Callable[[int], bool]
) -> tuple[list[Hypothesis], Request, int]:
    """Behind a stranger, preempted just before its steps of these numbers."""
    stranger = one.add(STRANGER, max_tokens=400, ignore_eos=True)
    one.engine.step()
    request = add(one, **CASES[name])
    num_steps = 0
    while not request.is_finished:
        running = [member for member in [request, *request.choices] if member.status.value == "running"]
        if any(member.num_computed_tokens for member in running):
            if is_due(num_steps):
                shortage.sufferer = stranger.request_id
            num_steps += 1
        one.step()
    one.engine.abort(stranger.request_id)
    one.assert_nothing_held()
    return results(request), request, num_steps


@pytest.mark.parametrize(("block_size", "is_caching"), [("8", True), ("16", False), ("32", True)])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", CASES)
def test_preempted_at_every_step(
    tiny_generator: Callable[..., Generator],
    right: Right,
    monkeypatch: pytest.MonkeyPatch,
    block_size: str,
    is_caching: bool,
    mode: str,
    name: str,
) -> None:
    """All beams at once; in the middle of a step of theirs, too, when some have been computed again and some not."""
    flags = ["--block-size", block_size, "--preemption-mode", mode, "--swap-space", "1MiB"]
    flags += ["--max-num-batched-tokens", "8", "--max-num-seqs", "8"]
    one = tiny_generator(*flags, "--enable-prefix-caching" if is_caching else "--no-enable-prefix-caching")
    shortage = Shortage(one.engine.scheduler.cache, monkeypatch)
    found, request, num_steps = run_preempted(one, shortage, name, lambda _: False)
    check_same(found, right[name])
    assert request.num_preemptions == 0
    for step in range(num_steps):
        one.engine.reset_prefix_cache()
        found, request, _ = run_preempted(one, shortage, name, step.__eq__)
        assert request.num_preemptions == 1
        check_same(found, right[name])
    one.engine.reset_prefix_cache()
    found, request, _ = run_preempted(one, shortage, name, (8, 11).__contains__)
    assert request.num_preemptions == 2
    check_same(found, right[name])


@pytest.mark.parametrize("name", CASES)
def test_two_searches_and_strangers_in_a_pool_that_is_too_small(
    tiny_generator: Callable[..., Generator], right: Right, name: str
) -> None:
    flags = ["--num-gpu-blocks-override", "30", "--max-model-len", "136", "--block-size", "8", "--max-num-seqs", "16"]
    one = tiny_generator(*flags, "--max-num-batched-tokens", "24")
    strangers = [one.add([(i * 31 + j * 17) % 199 for j in range(20 + 9 * i)], ignore_eos=True) for i in range(3)]
    first, second = add(one, **CASES[name]), add(one, **CASES[name])
    one.finish(first, second, *strangers)
    check_same(results(first), right[name])
    check_same(results(second), right[name])
    one.assert_nothing_held()
    assert one.engine.stats().num_preemptions >= 1
