"""Several answers to one prompt: each is exactly what a request for it alone gives, whatever happens on the way.

On the tiny model. The prompt is computed once and forks; before and after that it, or its choices, are preempted,
beside strangers, in chunks, with every block size, with outputs that they came with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.engine.events import OutputEvent
from common.engine.step_record import StepRecord
from common.request import Request
from tests.engine_model.conftest import Generator, build
from tests.engine_model.tiny import PROMPT, SAMPLINGS, STRANGER, Shortage, SumGrammar

NUM_OUTPUTS = 12
NUMBERS = (0, 1, 5)
GRAMMAR = SumGrammar(199)
FREE = {**SAMPLINGS, "ending": {"temperature": 1.0, "seed": 7, "stop_token_ids": tuple(range(60, 85))}}
ALL = [*FREE, "grammar"]


def params(sampling: str) -> dict[str, Any]:
    asked = FREE.get(sampling, {"temperature": 1.0, "seed": 9})
    return {**asked, "max_tokens": NUM_OUTPUTS, "ignore_eos": True}


def add(one: Generator, sampling: str, prompt: list[int] = PROMPT, numbers: Sequence[int] = NUMBERS) -> Request:
    request = one.add_choices(prompt, numbers, **params(sampling))
    for choice in request.choices:
        choice.grammar = GRAMMAR if sampling == "grammar" else None
    return request


def alone(
    one: Generator, sampling: str, number: int, prompt: list[int] = PROMPT, outputs: Sequence[int] = ()
) -> list[int]:
    fields = {"choice": number, "output_token_ids": list(outputs)}
    fields["grammar"] = GRAMMAR if sampling == "grammar" else None
    request = one.add(prompt, fields=fields, **params(sampling))
    one.finish(request)
    return request.output_token_ids


def together(one: Generator, sampling: str, prompt: list[int] = PROMPT) -> dict[int, list[int]]:
    request = add(one, sampling, prompt)
    return finished(one, request)


def finished(one: Generator, request: Request) -> dict[int, list[int]]:
    """Its answers, as they were told."""
    choices = list(request.choices)
    told: dict[str, list[int]] = {choice.request_id: [] for choice in choices}
    for event in one.finish(request):
        if isinstance(event, OutputEvent) and event.request_id in told:
            assert event.index == len(told[event.request_id])
            told[event.request_id].append(event.token_id)
    assert told == {choice.request_id: choice.output_token_ids for choice in choices}
    assert all(choice.is_finished for choice in choices)
    return {choice.choice: choice.output_token_ids for choice in choices}


@pytest.fixture(scope="module")
def right(tiny_model_dir: Path) -> dict[str, dict[int, list[int]]]:
    """Each answer by a request of its own, cold, in one chunk, never preempted."""
    parts = build(tiny_model_dir, "--num-gpu-blocks-override", "100")
    one = Generator(parts.engine, parts.model_config.eos_token_ids)
    found: dict[str, dict[int, list[int]]] = {}
    for sampling in ALL:
        found[sampling] = {}
        for number in NUMBERS:
            one.engine.reset_prefix_cache()
            found[sampling][number] = alone(one, sampling, number)
        num_different = len({tuple(outputs) for outputs in found[sampling].values()})
        assert num_different == (1 if sampling == "greedy" else len(NUMBERS))
    assert len({len(outputs) for outputs in found["ending"].values()}) > 1, "all end at once"
    return found


Right = dict[str, dict[int, list[int]]]


@pytest.mark.parametrize(("block_size", "budget"), [("8", "4"), ("8", "512"), ("16", "17"), ("32", "9")])
@pytest.mark.parametrize("sampling", ALL)
def test_chunks_blocks_and_prefix_hits(
    tiny_generator: Callable[..., Generator], right: Right, block_size: str, budget: str, sampling: str
) -> None:
    one = tiny_generator("--block-size", block_size, "--max-num-batched-tokens", budget, "--max-num-seqs", "4")
    for num_cached in (0, 1, 32, 43, 50):  # the prefix that an earlier request left
        one.engine.reset_prefix_cache()
        if num_cached:
            one.generate({"q": [*PROMPT, *right["greedy"][0]][:num_cached]}, max_tokens=1)
        assert together(one, sampling) == right[sampling]
        one.assert_nothing_held()


@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_prompts_of_every_length_around_block_edges(tiny_generator: Callable[..., Generator], caching: str) -> None:
    """Where the last block of the prompt is full nothing is copied when it forks, otherwise it is once for each."""
    one = tiny_generator("--block-size", "8", caching)
    for num_tokens in (1, 2, 7, 8, 9, 15, 16, 17, 24):
        prompt = [(num_tokens * 13 + i * 7) % 199 for i in range(num_tokens)]
        each = {number: alone(one, "seeded", number, prompt) for number in NUMBERS}
        assert len({tuple(outputs) for outputs in each.values()}) == len(NUMBERS)
        for _ in ("cold or warm", "warm"):
            assert together(one, "seeded", prompt) == each
        one.assert_nothing_held()
        one.engine.reset_prefix_cache()


@pytest.mark.parametrize("sampling", ["greedy", "everything", "grammar"])
def test_among_strangers_at_every_slot_of_the_batch(
    tiny_generator: Callable[..., Generator], right: Right, sampling: str
) -> None:
    """The strangers have choices, too; so many come first."""
    one = tiny_generator("--num-gpu-blocks-override", "600")
    for slot in range(0, 13, 2):
        prompts = [[(i * 31 + j * 17) % 199 for j in range(1 + 3 * i)] for i in range(12)]
        strangers = [
            one.add_choices(prompt, [0, 1], temperature=1.0, seed=i) for i, prompt in enumerate(prompts[:slot])
        ]
        request = add(one, sampling)
        strangers += [one.add(prompt, temperature=1.0, seed=3) for prompt in prompts[slot:]]
        assert finished(one, request) == right[sampling]
        one.finish(*strangers)
        one.assert_nothing_held()
        one.engine.reset_prefix_cache()


def run_preempted(
    one: Generator, shortage: Shortage, sampling: str, step: int | None, num_victims: int
) -> tuple[dict[int, list[int]], int, int]:
    """Behind a stranger, preempted just before its step of this number (None: before each).

    The prompt is, before it forks; then the youngest `num_victims` of the choices. Answers, preemptions, steps.
    """
    stranger = one.add(STRANGER, max_tokens=400, ignore_eos=True)
    one.engine.step()
    request = add(one, sampling)
    family = [request, *request.choices]
    num_steps = 0
    while not request.is_finished:
        running = [member for member in family if member.status.value == "running"]
        if any(member.num_computed_tokens for member in running):
            if step in (None, num_steps):
                shortage.sufferer, shortage.num_victims = stranger.request_id, min(num_victims, len(running))
            num_steps += 1
        one.step()
    one.engine.abort(stranger.request_id)
    one.assert_nothing_held()
    answers = {choice.choice: choice.output_token_ids for choice in family[1:]}
    return answers, sum(member.num_preemptions for member in family), num_steps


@pytest.mark.parametrize(
    ("block_size", "sampling", "is_caching"),
    [
        ("8", "greedy", True),
        ("16", "everything", True),
        ("32", "seeded", False),
        ("8", "ending", False),
        ("16", "grammar", True),
    ],
)
@pytest.mark.parametrize(
    ("mode", "num_victims"),
    [
        ("recompute", 3),
        ("swap", 1),
        pytest.param("recompute", 1, marks=pytest.mark.slow),
        pytest.param("swap", 3, marks=pytest.mark.slow),
    ],
)
def test_preempted_at_every_step(
    tiny_generator: Callable[..., Generator],
    right: Right,
    monkeypatch: pytest.MonkeyPatch,
    block_size: str,
    sampling: str,
    is_caching: bool,
    mode: str,
    num_victims: int,
) -> None:
    """One at a time, then all of them; in chunks of 16 beside a stranger."""
    flags = ["--block-size", block_size, "--preemption-mode", mode, "--swap-space", "1MiB"]
    flags += ["--max-num-batched-tokens", "16", "--max-num-seqs", "8"]
    one = tiny_generator(*flags, "--enable-prefix-caching" if is_caching else "--no-enable-prefix-caching")
    shortage = Shortage(one.engine.scheduler.cache, monkeypatch)
    answers, num_preemptions, num_steps = run_preempted(one, shortage, sampling, -1, num_victims)
    assert answers == right[sampling]
    assert num_preemptions == 0
    assert num_steps >= max(map(len, answers.values())) + 1
    for step in range(num_steps):
        one.engine.reset_prefix_cache()
        answers, num_preemptions, _ = run_preempted(one, shortage, sampling, step, num_victims)
        assert num_preemptions >= 1
        assert answers == right[sampling], f"preempted before step {step}"
    one.engine.reset_prefix_cache()
    answers, num_preemptions, _ = run_preempted(one, shortage, sampling, None, num_victims)
    assert num_preemptions >= NUM_OUTPUTS - 1
    assert answers == right[sampling]
    swaps = one.engine.stats().num_swap_preemptions
    assert swaps == (one.engine.stats().num_preemptions if mode == "swap" else 0)


@pytest.mark.parametrize("sampling", ALL)
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_among_strangers_in_a_pool_that_is_too_small(
    tiny_generator: Callable[..., Generator], right: Right, sampling: str, mode: str
) -> None:
    flags = ["--num-gpu-blocks-override", "18", "--max-model-len", "136", "--block-size", "8", "--swap-space", "1MiB"]
    one = tiny_generator(*flags, "--preemption-mode", mode, "--max-num-batched-tokens", "24", "--max-num-seqs", "16")
    strangers = [one.add([(i * 31 + j * 17) % 199 for j in range(5 + 3 * i)], ignore_eos=True) for i in range(4)]
    request = add(one, sampling)
    more = [one.add_choices([i] * (5 + 3 * i), [0, 1], seed=i, temperature=1.0, max_tokens=30) for i in range(4)]
    assert finished(one, request) == right[sampling]
    one.finish(*strangers, *more)
    one.assert_nothing_held()
    assert one.engine.stats().num_preemptions >= 2


@pytest.mark.parametrize("sampling", ALL)
@pytest.mark.parametrize("block_size", ["8", "16"])
def test_resumed_from_outputs_of_each_length(
    tiny_generator: Callable[..., Generator], right: Right, sampling: str, block_size: str
) -> None:
    """As after a move to another node: some choices have outputs, the others begin."""
    one = tiny_generator("--block-size", block_size)
    for number, outputs in right[sampling].items():
        for length in range(1, len(outputs)):
            one.engine.reset_prefix_cache()
            assert alone(one, sampling, number, outputs=outputs[:length]) == outputs
    for length in range(1, len(right[sampling][0])):
        one.engine.reset_prefix_cache()
        fields: dict[str, Any] = {"output_token_ids": right[sampling][0][:length]}
        fields["grammar"] = GRAMMAR if sampling == "grammar" else None
        rest = add(one, sampling, numbers=NUMBERS[1:])
        moved = one.add(PROMPT, fields=fields, **params(sampling))
        assert finished(one, rest) == {number: right[sampling][number] for number in NUMBERS[1:]}
        one.finish(moved)
        assert moved.output_token_ids == right[sampling][0]
    one.assert_nothing_held()


def test_one_that_is_aborted_leaves_the_others(tiny_generator: Callable[..., Generator], right: Right) -> None:
    """At each step, before the prompt has forked, too."""
    one = tiny_generator("--block-size", "8", "--max-num-batched-tokens", "16", "--max-num-seqs", "8")
    for number in range(NUM_OUTPUTS + 3):
        one.engine.reset_prefix_cache()
        request = add(one, "seeded")
        first, *others = request.choices
        for _ in range(number):
            one.step()
        one.engine.abort(first.request_id)
        one.finish(request)
        assert {choice.choice: choice.output_token_ids for choice in others} == {
            choice.choice: right["seeded"][choice.choice] for choice in others
        }
        assert first.output_token_ids == right["seeded"][0][: len(first.output_token_ids)]
        one.assert_nothing_held()


@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_the_prompt_is_computed_once(tiny_generator: Callable[..., Generator], caching: str) -> None:
    """And copied once for each choice but the last, which writes into the prompt's own block."""
    one = tiny_generator("--block-size", "8", "--max-num-batched-tokens", "16", caching)
    records: list[StepRecord] = []
    one.engine.observe_steps(records.append)
    request = add(one, "seeded")
    one.finish(request)
    assert sum(record.num_prefill_tokens for record in records) == len(PROMPT)
    assert sum(record.num_decode_tokens for record in records) == len(NUMBERS) * (NUM_OUTPUTS - 1)
    assert sum(record.num_copied for record in records) == len(NUMBERS) - 1
