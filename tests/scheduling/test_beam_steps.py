"""Beam searches in steps: beams share blocks, run together or not at all, and find what they would find alone."""

import pytest

from common.errors import InvalidRequestError
from common.request import FinishReason, RequestStatus
from common.sampling_params import BeamSearchParams, SamplingParams
from tests.scheduling.steps import hidden_row, reserve, run_until_done, step_until


@pytest.fixture
def make_search(make_request):
    def make(width=3, num_tokens=12, max_tokens=8, **fields):
        params = SamplingParams(max_tokens=max_tokens, beam_search=BeamSearchParams(width=width))
        return make_request(num_tokens, params=params, max_num_tokens=num_tokens + max_tokens, **fields)

    return make


def assert_right(runner, *searches):
    for prompt in searches:
        assert prompt.finish_reason is FinishReason.STOP
        assert len(found := prompt.beam_search.results(32)) == prompt.num_sequences
        assert found == runner.expected_beams(prompt, prompt.params.max_tokens)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_results_are_those_of_the_search_alone(
    make_scene, make_request, make_search, assert_empty, num_tokens, width, max_tokens
):
    scheduler, runner = make_scene()
    prompt, stranger = make_search(width, num_tokens, max_tokens), make_request(11, 30)
    scheduler.add(stranger)
    scheduler.add(prompt)
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert stranger.output_token_ids == runner.expected_outputs(stranger.prompt_token_ids, 30)
    assert_empty(scheduler)


def test_end_tokens_end_a_search_before_its_last_step(make_scene, make_search, assert_empty):
    scheduler, runner = make_scene()
    prompt = make_search(3, max_tokens=60, stop_token_ids=frozenset(range(40)))
    scheduler.add(prompt)
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert len(runner.batches) < 30
    assert_empty(scheduler)


def test_beams_share_what_they_have_in_common(make_scene, make_search):
    scheduler, runner = make_scene()
    prompt = make_search(4, num_tokens=20)
    scheduler.add(prompt)
    runner.step()
    assert scheduler.cache.pool.num_used == 3
    batch = runner.step()
    assert len(batch.copies) == 3
    assert batch.num_scheduled_tokens == 4


@pytest.mark.parametrize("max_num_batched_tokens", [3, 4])
def test_beams_that_get_no_row_in_a_step_are_waited_for(
    make_scene, make_request, make_search, assert_empty, max_num_batched_tokens
):
    scheduler, runner = make_scene(max_num_batched_tokens=max_num_batched_tokens)
    prompt, other = make_search(3), make_request(30, 4, priority=-1)
    scheduler.add(prompt)
    for _ in range(7):
        runner.step()
    scheduler.add(other)
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert_empty(scheduler)


@pytest.mark.parametrize("mode", [{}, {"preemption_mode": "swap", "num_host_blocks": 20}])
def test_an_older_stream_takes_the_blocks_of_all_beams_or_none(
    make_scene, make_request, make_search, assert_empty, mode
):
    scheduler, runner = make_scene(12, **{"preemption_mode": "recompute"} | mode)
    stream, prompt = make_request(40, 40), make_search(3, num_tokens=12, max_tokens=20)
    scheduler.add(stream)
    scheduler.add(prompt)
    batch = step_until(runner, lambda batch: batch.preempted)
    assert batch.preempted == (prompt,)
    assert len(prompt.choices) == 3
    assert {beam.status for beam in prompt.choices} == {RequestStatus.WAITING_FOR_PROMPT}
    assert not any(scheduler.cache.has_table(beam.request_id) for beam in prompt.choices)
    assert [rows.request for rows in batch.scheduled] == [stream]
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert stream.output_token_ids == runner.expected_outputs(stream.prompt_token_ids, 40)
    assert_empty(scheduler)


def test_of_two_searches_that_do_not_both_fit_the_younger_gives_way(make_scene, make_search, assert_empty):
    scheduler, runner = make_scene(9)  # one may need 7
    searches = [make_search(3, num_tokens=7, max_tokens=9) for _ in range(2)]
    for prompt in searches:
        scheduler.add(prompt)
    step_until(runner, lambda batch: batch.preempted == (searches[1],))
    run_until_done(scheduler, runner)
    assert_right(runner, *searches)
    assert searches[0].num_preemptions == 0
    assert_empty(scheduler)


def test_beams_that_wait_for_blocks_all_wait(make_scene, make_request, make_search, assert_empty):
    """One that had a block of what the others lack would keep it from them."""
    scheduler, runner = make_scene(10)
    computation, prompt = make_request(40, max_tokens=None), make_search(3, num_tokens=7, max_tokens=9)
    scheduler.add(computation)
    runner.step()  # it holds 5 of 9 blocks until it is released
    scheduler.add(prompt)
    counts = [sum(rows.request.parent is prompt for rows in runner.step().scheduled) for _ in range(12)]
    assert set(counts) == {0, 3}
    assert counts[-1] == 0
    assert not prompt.is_finished
    scheduler.release(computation.request_id)
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert_empty(scheduler)


def test_a_search_waits_for_room_for_its_first_beams(make_scene, make_request, make_search, assert_empty):
    scheduler, runner = make_scene(10)
    stream, prompt = make_request(4, 3), make_search(5, num_tokens=20, max_tokens=3)  # 3 blocks and 5
    scheduler.add(stream)
    scheduler.add(prompt)
    for _ in range(3):
        assert [rows.request for rows in runner.step().scheduled] == [stream]
    run_until_done(scheduler, runner)
    assert scheduler.num_preemptions == 0
    assert_right(runner, prompt)
    assert_empty(scheduler)


@pytest.mark.parametrize(("num_blocks", "fits"), [(9, False), (10, True)])
def test_beams_that_might_not_fit_in_the_end_are_refused(make_scene, make_search, assert_empty, num_blocks, fits):
    scheduler, runner = make_scene(num_blocks)
    prompt = make_search(3, num_tokens=20, max_tokens=12)
    if fits:
        scheduler.add(prompt)
        run_until_done(scheduler, runner)
        assert_right(runner, prompt)
    else:
        text = "a beam search of width 3 up to 32 tokens may need 9 blocks of KV cache, there are 8; a smaller"
        with pytest.raises(InvalidRequestError, match=text) as refusal:
            scheduler.add(prompt)
        assert refusal.value.param == "beam_width"
    assert_empty(scheduler)


def test_more_beams_than_seats_are_refused_and_as_many_run(make_scene, make_search, assert_empty):
    scheduler, runner = make_scene(max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="beam_width is 5, this node runs at most 4 sequences at once"):
        scheduler.add(make_search(5))
    first, second = make_search(4), make_search(2)
    scheduler.add(first)
    scheduler.add(second)
    while not first.is_finished:
        assert second.status is RequestStatus.WAITING
        runner.step()
    run_until_done(scheduler, runner)
    assert_right(runner, first, second)
    assert_empty(scheduler)


# --- another node's KV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_filled", [0, 8, 12])
@pytest.mark.parametrize("has_row", [True, False])
def test_a_fetched_prompt_is_searched_from(make_scene, make_search, assert_empty, num_filled, has_row):
    scheduler, runner = make_scene()
    prompt = make_search(3, num_tokens=12)
    blocks = reserve(scheduler, runner, prompt)
    if has_row:
        runner.step(hidden_row(runner, prompt))
        assert [len(beam.output_token_ids) for beam in prompt.choices] == [1, 1, 1]
    runner.fetch(prompt, blocks, 0, num_filled)
    scheduler.adopt(prompt.request_id, num_filled)
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert_empty(scheduler)


@pytest.mark.parametrize("has_row", [True, False])
def test_a_revoked_search_comes_back_with_the_beams_it_has(
    make_scene, make_request, make_search, assert_empty, has_row
):
    scheduler, runner = make_scene(12)
    stream, prompt = make_request(8, 60), make_search(3, num_tokens=24)
    scheduler.add(stream)
    runner.step()
    reserve(scheduler, runner, prompt)
    if has_row:
        runner.step(hidden_row(runner, prompt))
    step_until(runner, lambda batch: prompt in batch.revoked)
    beams = list(prompt.choices)
    assert len(beams) == (3 if has_row else 0)
    scheduler.adopt(prompt.request_id, 0)
    assert prompt.status is RequestStatus.WAITING
    scheduler.cancel_remote(prompt.request_id)
    step_until(runner, lambda batch: prompt in batch.started or prompt.status is RequestStatus.RUNNING)
    run_until_done(scheduler, runner)
    assert_right(runner, prompt)
    assert_empty(scheduler)


def test_over_at_its_first_output_while_another_node_writes(make_scene, make_search, assert_empty):
    scheduler, runner = make_scene()
    prompt = make_search(3, max_tokens=1)
    reserve(scheduler, runner, prompt)
    runner.step(hidden_row(runner, prompt))
    assert_right(runner, prompt)
    assert scheduler.cache.pool.num_used == 2
    scheduler.release_reservation(prompt.request_id)
    assert_empty(scheduler)


# --- the end before the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_ends_all_beams(make_scene, make_search, assert_empty, num_steps):
    scheduler, runner = make_scene()
    prompt = make_search(3)
    scheduler.add(prompt)
    for _ in range(num_steps):
        runner.step()
    scheduler.abort(prompt.request_id)
    assert prompt.finish_reason is FinishReason.ABORT
    assert_empty(scheduler)


def test_a_beam_that_fails_ends_its_search_once(make_scene, make_search, assert_empty):
    scheduler, runner = make_scene()
    prompt, other = make_search(3), make_search(2)
    scheduler.add(prompt)
    scheduler.add(other)
    step_until(runner, lambda batch: len(batch.scheduled) == 5)
    first, second, _ = prompt.choices
    assert scheduler.fail(second) is prompt
    assert scheduler.fail(first) is None
    assert prompt.finish_reason is FinishReason.ERROR
    run_until_done(scheduler, runner)
    assert_right(runner, other)
    assert_empty(scheduler)
