"""Several answers to one prompt, towards the node: whose events come, and whom a failure ends."""

from dataclasses import replace

import pytest

from common.engine.events import ComputeStartedEvent, FailedEvent, OutputEvent, SearchEndedEvent
from common.request import FinishReason, Request
from common.sampling_params import BeamSearchParams, SamplingParams


def run(engine, limit=200):
    events = []
    for _ in range(limit):
        batch, new = engine.schedule()
        events += new
        if batch.is_idle and not engine.inbox:
            return events
        events += engine.execute(batch)
    raise AssertionError(f"not done after {limit} steps")


def assert_nothing_held(engine):
    engine.scheduler.check_integrity()
    assert not engine.scheduler.requests
    assert engine.scheduler.cache.pool.num_used == 0


@pytest.fixture
def make_samples(make_request):
    def make(count=3, **fields):
        prompt = make_request(12, **fields)
        prompt.choices = [
            Request(f"c{i}", prompt.prompt_token_ids, prompt.params, choice=i, stop_token_ids=prompt.stop_token_ids)
            for i in range(count)
        ]
        return prompt

    return make


@pytest.fixture
def make_search(make_request):
    def make(width=3, max_tokens=6, **fields):
        params = SamplingParams(max_tokens=max_tokens, beam_search=BeamSearchParams(width=width))
        return make_request(12, params=params, max_num_tokens=12 + max_tokens, **fields)

    return make


def outputs(events):
    return [(e.request_id, e.index, e.token_id, e.finish_reason) for e in events if isinstance(e, OutputEvent)]


def fail_one(runner, request_id, *, when):
    """The runner has a reason instead of an output for it, in its step number `when`."""
    execute, num_steps = runner.execute, iter(range(10**6))

    def failing(batch, inbox, should_cancel):
        result = execute(batch, inbox, should_cancel)
        if next(num_steps) != when:
            return result
        sampled = {name: token for name, token in result.sampled.items() if name != request_id}
        assert len(sampled) < len(result.sampled)
        return replace(result, sampled=sampled, failed={request_id: "no token may follow"})

    runner.execute = failing


def test_outputs_are_the_choices_own_and_the_start_is_their_prompts(make_engine, make_samples, runner):
    engine = make_engine()
    runner.scripts |= {"c0": [5, 6, 7], "c1": [5, 9], "c2": [9]}
    engine.add(make_samples(stop_token_ids=frozenset({9})))
    events = run(engine)
    assert [event for event in events if not isinstance(event, OutputEvent)] == [ComputeStartedEvent("r0", 0)]
    assert outputs(events) == [
        ("c0", 0, 5, None),
        ("c1", 0, 5, None),
        ("c2", 0, 9, FinishReason.STOP),
        ("c0", 1, 6, None),
        ("c1", 1, 9, FinishReason.STOP),
        ("c0", 2, 7, FinishReason.LENGTH),
    ]
    assert_nothing_held(engine)


@pytest.mark.parametrize("when", [0, 1])
def test_a_choice_without_an_output_ends_alone(make_engine, make_samples, runner, when):
    engine = make_engine()
    prompt = make_samples()
    first, _, last = prompt.choices
    engine.add(prompt)
    fail_one(runner, "c1", when=when)
    events = run(engine)
    assert [event for event in events if isinstance(event, FailedEvent)] == [FailedEvent("c1", "no token may follow")]
    assert [len(choice.output_token_ids) for choice in (first, last)] == [3, 3]
    assert_nothing_held(engine)


def test_the_last_choice_that_fails_ends_its_prompt(make_engine, make_samples, runner):
    engine = make_engine()
    engine.add(make_samples(1))
    fail_one(runner, "c0", when=0)
    assert FailedEvent("c0", "no token may follow") in run(engine)
    assert_nothing_held(engine)


def test_a_step_that_fails_over_a_prompt_names_the_prompt(make_engine, make_samples, runner):
    engine = make_engine()
    engine.add(make_samples())
    runner.error = ValueError("boom")
    assert run(engine) == [ComputeStartedEvent("r0", 0), FailedEvent("r0", "ValueError: boom")]
    assert_nothing_held(engine)


def test_a_search_is_told_of_once_when_it_is_over(make_engine, make_search):
    engine = make_engine()
    search = make_search()
    engine.add(search)
    assert run(engine) == [ComputeStartedEvent("r0", 0), SearchEndedEvent("r0", search)]
    assert len(search.beam_search.results(3)) == 3
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_step_that_fails_over_beams_names_their_search_once(
    make_engine, make_request, make_search, runner, num_steps
):
    engine = make_engine()
    search = make_search()
    engine.add(search)
    for _ in range(num_steps):
        engine.step()
    runner.error = ValueError("boom")
    assert FailedEvent("r0", "ValueError: boom") in (events := engine.step())
    assert sum(isinstance(event, FailedEvent) for event in events) == 1
    assert_nothing_held(engine)
    engine.add(make_request())
    assert len(outputs(run(engine))) == 3


def test_a_beam_without_candidates_ends_its_search(make_engine, make_search, runner):
    engine = make_engine()
    search = make_search()
    engine.add(search)
    engine.step()
    beam = search.choices[1].request_id
    fail_one(runner, beam, when=0)
    assert engine.step() == [FailedEvent("r0", "no token may follow")]
    assert_nothing_held(engine)


def test_a_step_is_left_only_when_nobody_wants_any_choice(make_engine, make_samples, runner):
    engine = make_engine()
    engine.add(make_samples(2))
    engine.step()
    asked = []
    execute = runner.execute

    def ask(batch, inbox, should_cancel):
        asked.append(should_cancel())
        return execute(batch, inbox, should_cancel)

    runner.execute = ask
    engine.mark_unwanted("c0")
    engine.step()
    engine.mark_unwanted("c1")
    engine.step()
    assert asked == [False, True]
