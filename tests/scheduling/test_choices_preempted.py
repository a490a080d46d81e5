"""Several samples of one prompt when blocks are short: who gives them up, and that nobody's outputs change."""

import pytest

from common.request import RequestStatus
from tests.scheduling.steps import assert_outputs, hidden_row, reserve, run_until_done, step_until

MODES = [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "num_host_blocks": 20}]


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_preempted_before_it_forks(make_scene, make_request, make_samples, assert_empty, mode):
    scheduler, runner = make_scene(10, long_prefill_token_threshold=1, **mode)
    stream = make_request(8, 60)
    prompt, choices = make_samples([5, 5], num_tokens=40)
    scheduler.add(stream)
    scheduler.add(prompt)
    step_until(runner, lambda batch: prompt in batch.preempted)
    assert 0 < len(stream.output_token_ids) < 60
    assert [choice.output_token_ids for choice in choices] == [[], []]
    assert [choice.status for choice in choices] == [RequestStatus.WAITING_FOR_PROMPT] * 2
    run_until_done(scheduler, runner)
    assert scheduler.num_swap_preemptions == (1 if mode["preemption_mode"] == "swap" else 0)
    assert_outputs(runner, [stream, *choices])
    assert_empty(scheduler)


@pytest.mark.parametrize("mode", MODES)
def test_a_choice_preempted_after_the_fork_goes_on_by_itself(
    make_scene, make_request, make_samples, assert_empty, mode
):
    scheduler, runner = make_scene(12, **mode)
    stream = make_request(8, 40)
    prompt, choices = make_samples([30, 30, 30], num_tokens=12)
    scheduler.add(stream)
    scheduler.add(prompt)
    step_until(runner, lambda batch: batch.preempted)
    assert [choice.num_preemptions for choice in choices] == [0, 0, 1], "the last one has to go"
    assert prompt.num_preemptions == 0
    assert prompt.status is RequestStatus.FORKED
    assert {rows.request for rows in runner.step().scheduled} == {stream, *choices[:2]}
    run_until_done(scheduler, runner)
    assert_outputs(runner, [stream, *choices])
    assert_empty(scheduler)


def test_a_choice_that_is_swapped_out_can_be_aborted(make_scene, make_request, make_samples, assert_empty):
    scheduler, runner = make_scene(12, **MODES[1])
    stream = make_request(8, 40)
    prompt, choices = make_samples([30, 30, 30], num_tokens=12)
    scheduler.add(stream)
    scheduler.add(prompt)
    step_until(runner, lambda _: choices[2].status is RequestStatus.SWAPPED)
    scheduler.abort(choices[2].request_id)
    assert scheduler.cache.swap_space.num_free == 20
    run_until_done(scheduler, runner)
    assert_outputs(runner, [stream, *choices[:2]])
    assert_empty(scheduler)


def test_a_prompt_preempted_after_its_first_outputs_draws_them_once(
    make_scene, make_request, make_samples, assert_empty
):
    """They came by a hidden row; the KV came later, in part."""
    scheduler, runner = make_scene(8, long_prefill_token_threshold=1)
    prompt, choices = make_samples([4, 4], num_tokens=24)
    stream = make_request(8, 40)
    scheduler.add(stream)
    runner.step()
    reserve(scheduler, runner, prompt)
    runner.step(hidden_row(runner, prompt))
    firsts = [list(choice.output_token_ids) for choice in choices]
    assert [len(first) for first in firsts] == [1, 1]
    step_until(runner, lambda _: len(stream.output_token_ids) == 10)
    scheduler.adopt(prompt.request_id, 0)
    step_until(runner, lambda batch: prompt in batch.preempted)
    assert prompt.status is RequestStatus.PREEMPTED
    run_until_done(scheduler, runner)
    assert [choice.output_token_ids[:1] for choice in choices] == firsts
    assert_outputs(runner, [stream, *choices])
    assert_empty(scheduler)


def test_a_revoked_prompt_keeps_its_choices(make_scene, make_request, make_samples, assert_empty):
    scheduler, runner = make_scene(9)
    stream = make_request(8, 40)
    prompt, choices = make_samples([4, 4], num_tokens=24)
    scheduler.add(stream)
    runner.step()
    reserve(scheduler, runner, prompt)
    assert not step_until(runner, lambda batch: prompt in batch.revoked).preempted
    scheduler.release_reservation(prompt.request_id)
    assert prompt.status is RequestStatus.WAITING
    scheduler.cancel_remote(prompt.request_id)
    run_until_done(scheduler, runner)
    assert_outputs(runner, [stream, *choices])
    assert_empty(scheduler)
