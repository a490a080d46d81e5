"""Several samples of one prompt: whose blocks they use, when they get seats, and how each of them ends."""

import pytest

from common.errors import InvalidRequestError
from common.request import FinishReason, RequestStatus
from tests.scheduling.steps import assert_outputs, hidden_row, reserve, run_until_done, step_until

# --- shared blocks --------------------------------------------------------------------------------------------------


def test_the_prompt_is_computed_once_and_its_last_block_copied_for_all_writers_but_the_last(
    make_scene, make_samples, assert_empty
):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([4, 4, 4], num_tokens=20)  # two blocks and a half
    scheduler.add(prompt)
    assert runner.step().num_scheduled_tokens == 20
    assert [len(choice.output_token_ids) for choice in choices] == [1, 1, 1]
    assert scheduler.cache.pool.num_used == 3
    [partial] = scheduler.cache.block_ids(prompt.request_id)[2:]
    batch = runner.step()
    assert [rows.request for rows in batch.scheduled] == choices
    assert [source for source, _ in batch.copies] == [partial, partial]
    assert scheduler.cache.block_ids(choices[2].request_id)[2] == partial
    assert scheduler.cache.pool.num_used == 5
    assert runner.step().copies == ()
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert_empty(scheduler)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("lengths", [(5, 5), (1, 12, 3), (9, 1, 1, 2)])
def test_wherever_the_prompt_ends_the_outputs_are_those_of_each_alone(
    make_scene, make_samples, assert_empty, num_tokens, lengths
):
    scheduler, runner = make_scene()
    prompt, choices = make_samples(lengths, num_tokens)
    scheduler.add(prompt)
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert prompt.is_finished
    assert_empty(scheduler)


def test_a_prompt_of_whole_blocks_is_shared_without_a_copy(make_scene, make_samples):
    scheduler, runner = make_scene()
    prompt, _ = make_samples([4, 4, 4], num_tokens=16)
    scheduler.add(prompt)
    runner.step()
    assert scheduler.cache.pool.num_used == 2
    assert runner.step().copies == ()
    assert scheduler.cache.pool.num_used == 5


def test_a_choice_that_ends_early_gives_its_blocks_back(make_scene, make_samples, assert_empty):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([1, 2, 6], num_tokens=20)
    scheduler.add(prompt)
    runner.step()
    assert choices[0].is_finished
    batch = runner.step()
    assert len(batch.copies) == 1, "two writers are left"
    assert choices[1].is_finished
    assert scheduler.cache.pool.num_used == 3
    assert prompt.choices == [choices[2]]
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert_empty(scheduler)


def test_a_cached_prompt_is_looked_at_and_not_computed(make_scene, make_request, make_samples, assert_empty):
    scheduler, runner = make_scene()
    scheduler.add(make_request(16, prompt=range(16), max_tokens=1))
    run_until_done(scheduler, runner)
    prompt, choices = make_samples([3, 3, 3], prompt=range(16))
    scheduler.add(prompt)
    [rows] = runner.step().scheduled
    assert (rows.num_tokens, rows.recompute_only) == (1, True)
    runner.step()
    assert scheduler.cache.pool.num_used == 2 + 3
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert [choice.num_cached_tokens for choice in choices] == [16, 16, 16]
    assert_empty(scheduler)


# --- seats and limits -----------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_a_seat_for_each_choice_and_nobody_overtakes_it(
    make_scene, make_request, make_samples, assert_empty
):
    scheduler, runner = make_scene(max_num_seqs=4)
    first, second = make_request(8, 3), make_request(8, 9)
    prompt, choices = make_samples([5, 5, 5])
    last = make_request(8, 3)
    for request in (first, second, prompt, last):
        scheduler.add(request)
    for _ in range(3):
        assert [rows.request for rows in runner.step().scheduled] == [first, second]
    assert first.is_finished
    assert prompt in [rows.request for rows in runner.step().scheduled]
    for _ in range(3):
        assert [rows.request for rows in runner.step().scheduled] == [second, *choices]
    assert last.status is RequestStatus.WAITING
    run_until_done(scheduler, runner)
    assert_outputs(runner, [first, second, *choices, last])
    assert_empty(scheduler)


def test_as_many_choices_as_there_are_seats(make_scene, make_samples, assert_empty):
    scheduler, runner = make_scene(max_num_seqs=16)
    prompt, choices = make_samples([5] * 16)
    scheduler.add(prompt)
    runner.step()
    assert len(runner.step().scheduled) == 16
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert_empty(scheduler)


def test_more_choices_than_seats_are_refused(make_scene, make_samples, assert_empty):
    scheduler, _ = make_scene(max_num_seqs=4)
    prompt, _ = make_samples([2] * 5)
    with pytest.raises(InvalidRequestError, match=r"^n is 5, this node runs at most 4 sequences at once$") as refusal:
        scheduler.add(prompt)
    assert refusal.value.param == "n"
    assert_empty(scheduler)


@pytest.mark.parametrize(("num_blocks", "fits"), [(8, False), (9, True)])  # one of them is the null block
def test_first_outputs_that_can_never_fit_are_refused_and_others_run(
    make_scene, make_samples, assert_empty, num_blocks, fits
):
    scheduler, runner = make_scene(num_blocks)
    prompt, choices = make_samples([2] * 5, num_tokens=20)
    if not fits:
        text = "^a prompt of 20 tokens with n = 5 needs 8 blocks of KV cache; there are 7$"
        with pytest.raises(InvalidRequestError, match=text):
            scheduler.add(prompt)
        assert_empty(scheduler)
        return
    scheduler.add(prompt)
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert scheduler.num_preemptions == 0
    assert_empty(scheduler)


def test_a_prompt_waits_for_room_for_all_its_first_outputs(make_scene, make_request, make_samples, assert_empty):
    scheduler, runner = make_scene(10)
    stream = make_request(4, 3)
    prompt, choices = make_samples([5] * 5, num_tokens=20)  # 3 blocks and 5
    scheduler.add(stream)
    scheduler.add(prompt)
    for _ in range(3):
        assert [rows.request for rows in runner.step().scheduled] == [stream]
    run_until_done(scheduler, runner)
    assert scheduler.num_preemptions == 0
    assert_outputs(runner, choices)
    assert_empty(scheduler)


# --- aborts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 6], ids=["waits", "chunk", "caught up", "forked", "later"])
@pytest.mark.parametrize("gone", [[0], [2], [1, 0], [0, 1, 2]])
def test_choices_are_aborted_one_by_one_at_any_time(make_scene, make_samples, assert_empty, num_steps, gone):
    scheduler, runner = make_scene(max_num_batched_tokens=8)
    prompt, choices = make_samples([9, 9, 9], num_tokens=20)
    scheduler.add(prompt)
    for _ in range(num_steps):
        runner.step()
    for i in gone:
        assert scheduler.abort(choices[i].request_id) is choices[i]
        assert choices[i].finish_reason is FinishReason.ABORT
        scheduler.check_integrity()
    assert prompt.is_finished == (len(gone) == 3)
    run_until_done(scheduler, runner)
    assert_outputs(runner, [choice for i, choice in enumerate(choices) if i not in gone])
    assert all(len(choices[i].output_token_ids) == max(num_steps - 2, 0) for i in gone)
    assert_empty(scheduler)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 6], ids=["waits", "chunk", "caught up", "forked", "later"])
def test_an_abort_of_the_prompt_ends_all(make_scene, make_samples, assert_empty, num_steps):
    scheduler, runner = make_scene(max_num_batched_tokens=8)
    prompt, choices = make_samples([9, 9, 9], num_tokens=20)
    scheduler.add(prompt)
    for _ in range(num_steps):
        runner.step()
    assert scheduler.abort(prompt.request_id) is prompt
    assert [request.finish_reason for request in (prompt, *choices)] == [FinishReason.ABORT] * 4
    assert_empty(scheduler)


@pytest.mark.parametrize("ends", [["prompt"], ["0", "1"], ["0", "prompt"]])
def test_blocks_of_an_aborted_reservation_wait_for_the_fence(make_scene, make_samples, assert_empty, ends):
    scheduler, runner = make_scene()
    prompt, _ = make_samples([9, 9])
    reserve(scheduler, runner, prompt)
    for end in ends:
        assert scheduler.cache.pool.num_used == 3
        scheduler.abort(prompt.request_id if end == "prompt" else f"{prompt.request_id}/{end}")
        scheduler.check_integrity()
    assert scheduler.requests == {}
    assert scheduler.cache.pool.num_used == 3
    scheduler.release_reservation(prompt.request_id)
    assert_empty(scheduler)


def test_of_a_reservation_one_choice_is_aborted_and_the_others_go_on(make_scene, make_samples, assert_empty):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([4, 4, 4])
    blocks = reserve(scheduler, runner, prompt)
    scheduler.abort(choices[1].request_id)
    runner.step(hidden_row(runner, prompt))
    assert [len(choice.output_token_ids) for choice in choices] == [1, 0, 1]
    assert [choice.num_cached_tokens for choice in choices] == [0, None, 0]
    runner.fetch(prompt, blocks, 0, 20)
    scheduler.adopt(prompt.request_id, 20)
    assert [rows.request for rows in runner.step().scheduled] == [choices[0], choices[2]]
    run_until_done(scheduler, runner)
    assert_outputs(runner, [choices[0], choices[2]])
    assert_empty(scheduler)


# --- another node's KV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_filled", [0, 8, 19, 20])
@pytest.mark.parametrize("has_row", [True, False])
def test_a_fetched_prompt_forks_when_the_rest_is_computed(make_scene, make_samples, assert_empty, num_filled, has_row):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([4, 4, 4])
    blocks = reserve(scheduler, runner, prompt)
    if has_row:
        runner.step(hidden_row(runner, prompt))
    runner.fetch(prompt, blocks, 0, num_filled)
    scheduler.adopt(prompt.request_id, num_filled)
    batch = runner.step()
    missing = 20 - num_filled if has_row else max(20 - num_filled, 1)  # the last row gives the first outputs
    assert batch.num_scheduled_tokens == (missing or 3)
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert_empty(scheduler)


def test_first_outputs_before_there_are_blocks(make_scene, make_request, make_samples, assert_empty):
    scheduler, runner = make_scene(8)
    prompt_ids = list(range(16))
    scheduler.add(make_request(prompt=prompt_ids, max_tokens=1))
    run_until_done(scheduler, runner)
    stream = make_request(30, 10)
    prompt, choices = make_samples([4, 4], prompt=prompt_ids, wants_remote_kv=True)
    scheduler.add(stream)
    runner.step()
    scheduler.add(prompt)
    runner.step(hidden_row(runner, prompt))
    assert prompt.status is RequestStatus.WAITING
    assert [(len(choice.output_token_ids), choice.num_cached_tokens) for choice in choices] == [(1, None)] * 2
    step_until(runner, lambda batch: prompt in batch.reserved)
    scheduler.adopt(prompt.request_id, 0)
    started = [request for _ in range(10) for request in runner.step().started]
    assert started == [], "neither the prompt nor a choice begins anew"
    assert [choice.num_cached_tokens for choice in choices] == [16, 16]
    assert_outputs(runner, [stream, *choices])
    assert_empty(scheduler)


def test_choices_with_outputs_keep_their_reservation_longest(make_scene, make_request, make_samples):
    scheduler, runner = make_scene(14)
    stream = make_request(8, 60)
    (older, _), (younger, choices) = (make_samples([9, 9], num_tokens=24) for _ in range(2))
    scheduler.add(stream)
    for prompt in (older, younger):
        reserve(scheduler, runner, prompt)
    runner.step(hidden_row(runner, younger))
    assert all(choice.output_token_ids for choice in choices)
    assert step_until(runner, lambda batch: batch.revoked).revoked == (older,)


def test_a_repeated_row_gives_no_second_outputs(make_scene, make_samples):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([4, 4])
    reserve(scheduler, runner, prompt)
    assert scheduler.accepts_hidden(prompt.request_id, 20) is prompt
    assert scheduler.accepts_hidden(choices[0].request_id, 20) is None, "it comes to the prompt"
    runner.step(hidden_row(runner, prompt))
    assert scheduler.accepts_hidden(prompt.request_id, 20) is None


def test_with_nothing_left_to_compute_the_choices_run_in_the_same_step(make_scene, make_samples, assert_empty):
    """Its reservation was given up when its KV was in, and in the prefix cache."""
    scheduler, runner = make_scene()
    prompt, choices = make_samples([4, 4], num_tokens=16)
    blocks = reserve(scheduler, runner, prompt)
    runner.step(hidden_row(runner, prompt))
    runner.fetch(prompt, blocks, 0, 16)
    scheduler.cache.mark_filled(prompt, 16)
    scheduler.release_reservation(prompt.request_id)
    scheduler.cancel_remote(prompt.request_id)
    assert [rows.request for rows in runner.step().scheduled] == choices
    run_until_done(scheduler, runner)
    assert_outputs(runner, choices)
    assert_empty(scheduler)


def test_all_ended_by_their_first_output_while_another_node_writes(make_scene, make_samples, assert_empty):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([1, 1, 1])
    reserve(scheduler, runner, prompt)
    runner.step(hidden_row(runner, prompt))
    assert_outputs(runner, choices)
    assert prompt.is_finished
    assert scheduler.requests == {}
    assert scheduler.cache.pool.num_used == 3
    scheduler.adopt(prompt.request_id, 20)  # was on its way
    assert_empty(scheduler)


def test_all_ended_by_their_first_output_while_it_runs(make_scene, make_samples, assert_empty):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([1, 1, 1])
    scheduler.add(prompt)
    runner.step()
    assert_outputs(runner, choices)
    assert_empty(scheduler)


# --- a failure, and the sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_choice_that_fails_leaves_the_others(make_scene, make_samples, assert_empty, is_forked):
    scheduler, runner = make_scene()
    prompt, choices = make_samples([5, 5, 5])
    scheduler.add(prompt)
    runner.step()
    if is_forked:
        runner.step()
    assert scheduler.fail(choices[1]) is choices[1]
    assert scheduler.fail(choices[1]) is None
    assert choices[1].finish_reason is FinishReason.ERROR
    run_until_done(scheduler, runner)
    assert_outputs(runner, [choices[0], choices[2]])
    assert_empty(scheduler)


def test_the_load_counts_sequences(make_scene, make_samples):
    scheduler, runner = make_scene(max_num_seqs=5)
    samples = [make_samples([4] * 3) for _ in range(2)]
    for prompt, _ in samples:
        scheduler.add(prompt)
    runner.step()
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (3, 3)
    runner.step()
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (3, 3)
    prompt, choices = samples[0]
    scheduler.abort(choices[0].request_id)
    assert scheduler.stats().num_running == 2
    scheduler.abort(prompt.request_id)
    remote, _ = make_samples([4, 4])
    remote.wants_remote_kv = True
    scheduler.add(remote)
    runner.step()
    assert scheduler.stats().num_waiting_for_kv == 2
