"""The scheduler, step by numbered step, on a shadow memory."""

import pytest

from common.errors import ConfigError, ContextLengthError, InvalidRequestError, OverloadedError
from common.request import FinishReason, RequestStatus
from common.scheduling.config import SchedulerConfig


def rows_of(batch):
    """{request id: (start, num_tokens)}"""
    return {rows.request.request_id: (rows.start, rows.num_tokens) for rows in batch.scheduled}


def test_one_request_from_prompt_to_last_output(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    request = make_request(10, max_tokens=3)
    scheduler.add(request)
    batch = runner.step()  # 1: the whole prompt
    assert rows_of(batch) == {"r0": (0, 10)}
    assert batch.started == (request,)
    assert rows_of(runner.step()) == {"r0": (10, 1)}  # 2
    assert rows_of(runner.step()) == {"r0": (11, 1)}  # 3: the last output is sampled and never computed
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 3)
    assert runner.step().is_idle  # 4
    assert_empty(scheduler)


def test_a_prompt_is_computed_in_chunks_of_the_budget(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=16)
    runner = make_runner(scheduler)
    scheduler.add(make_request(40))
    assert [rows_of(runner.step())["r0"] for _ in range(4)] == [(0, 16), (16, 16), (32, 8), (40, 1)]


def test_a_long_prompt_leaves_a_token_for_each_stream(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=16)
    runner = make_runner(scheduler)
    scheduler.add(make_request(40, max_tokens=20))
    scheduler.add(make_request(4, max_tokens=20))
    assert rows_of(runner.step()) == {"r0": (0, 16)}  # 1: first come, first served
    assert rows_of(runner.step()) == {"r0": (16, 16)}  # 2
    assert rows_of(runner.step()) == {"r0": (32, 8), "r1": (0, 4)}  # 3: what is left admits the next
    scheduler.add(make_request(40, max_tokens=20))
    assert rows_of(runner.step()) == {"r0": (40, 1), "r1": (4, 1), "r2": (0, 14)}  # 4: streams and a chunk
    assert rows_of(runner.step()) == {"r0": (41, 1), "r1": (5, 1), "r2": (14, 14)}  # 5


def test_an_older_long_prompt_does_not_stop_younger_streams(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=16)
    runner = make_runner(scheduler)
    stream = make_request(4, max_tokens=30)
    scheduler.add(stream)
    runner.step()
    urgent = make_request(60, max_tokens=5, priority=-1)  # goes before the stream in every step
    scheduler.add(urgent)
    while urgent.num_computed_tokens < 60:
        assert rows_of(runner.step())["r0"][1] == 1
    assert urgent.output_token_ids


def test_never_more_run_than_max_num_seqs_or_the_budget(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=16)
    runner = make_runner(scheduler)
    for _ in range(6):
        scheduler.add(make_request(1, max_tokens=3))
    assert len(runner.step().scheduled) == 4
    assert len(runner.step().scheduled) == 4
    assert scheduler.stats().num_waiting == 2


def test_priority_orders_the_queue_then_arrival(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    requests = [make_request(4, max_tokens=1, priority=priority) for priority in (1, 0, 1, 0)]
    for request in requests:
        scheduler.add(request)
    order = [runner.step().scheduled[0].request.request_id for _ in range(4)]
    assert order == ["r1", "r3", "r0", "r2"]


def test_what_can_never_fit_is_refused_with_the_numbers(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5, max_model_len=100)  # 4 usable blocks, 32 tokens
    with pytest.raises(InvalidRequestError, match=r"32 tokens.* at least 1 .* holds 32 tokens"):
        scheduler.add(make_request(32))
    with pytest.raises(ContextLengthError, match=r"100 tokens.* maximum context length is 100"):
        scheduler.add(make_request(100))
    with pytest.raises(InvalidRequestError, match="33 tokens"):
        scheduler.add(make_request(33, max_tokens=None))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.check_fits(make_request(0))
    scheduler.add(make_request(31))
    scheduler.add(make_request(32, max_tokens=None))
    assert len(scheduler.requests) == 2


def test_a_full_queue_and_a_used_id_are_refused(make_scheduler, make_request):
    scheduler = make_scheduler(max_num_waiting=2)
    scheduler.add(make_request(request_id="a"))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add(make_request(request_id="a"))
    scheduler.add(make_request(request_id="b"))
    with pytest.raises(OverloadedError, match="2 requests wait, at most 2"):
        scheduler.add(make_request(request_id="c"))


def test_a_moved_request_that_has_all_its_outputs_is_refused(make_scheduler, make_request):
    with pytest.raises(InvalidRequestError, match="came with 4 outputs and max_tokens is 4"):
        make_scheduler().add(make_request(8, max_tokens=4, output_token_ids=[1, 2, 3, 4]))


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        SchedulerConfig(max_num_seqs=0)


def test_preemption_takes_the_youngest_and_keeps_its_outputs(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)  # 5 usable blocks
    runner = make_runner(scheduler)
    old, young = make_request(14, max_tokens=12), make_request(14, max_tokens=6)
    scheduler.add(old)
    scheduler.add(young)
    runner.step()
    runner.step()  # 2 blocks each, the next output needs a third one
    runner.step()
    batch = runner.step()  # old takes the last free block; young is the last in the order and only skips
    assert rows_of(batch) == {"r0": (16, 1)}
    assert young.status is RequestStatus.RUNNING
    while not batch.preempted:
        batch = runner.step()
    assert batch.preempted == (young,)
    assert young.num_preemptions == scheduler.num_preemptions == 1
    kept = list(young.output_token_ids)
    assert kept
    while scheduler.requests:
        batch = runner.step()
        if "r1" in rows_of(batch) and young.num_tokens == 14 + len(kept) + 1:
            assert rows_of(batch)["r1"] == (0, 14 + len(kept))  # prompt and outputs, in one go
    assert young.output_token_ids == runner.expected_outputs(young.prompt_token_ids, 6)
    assert young.output_token_ids[: len(kept)] == kept
    assert old.output_token_ids == runner.expected_outputs(old.prompt_token_ids, 12)
    assert old.num_preemptions == 0
    assert_empty(scheduler)


def test_a_preempted_request_goes_before_those_that_came_later(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=False)
    runner = make_runner(scheduler)
    old, young, later = make_request(15, max_tokens=20), make_request(8, max_tokens=20), make_request(4)
    for request in (old, young):
        scheduler.add(request)
    while not runner.step().preempted:
        pass
    scheduler.add(later)
    assert young.status is RequestStatus.PREEMPTED
    seen = []
    while later.status is not RequestStatus.FINISHED:
        seen += rows_of(runner.step())
    assert seen.index("r1") < seen.index("r2")


def test_a_request_that_outgrows_the_pool_alone_ends_with_length(
    make_scheduler, make_runner, make_request, assert_empty
):
    scheduler = make_scheduler(num_blocks=4, max_model_len=512)  # 24 tokens
    runner = make_runner(scheduler)
    request = make_request(20, max_tokens=100)
    scheduler.add(request)
    while scheduler.requests:
        runner.step()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 25  # 24 have a slot, the last one needs none
    assert_empty(scheduler)


def test_the_context_limit_ends_a_request(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_model_len=20)
    runner = make_runner(scheduler)
    request = make_request(15, max_tokens=100)
    scheduler.add(request)
    while scheduler.requests:
        runner.step()
    assert (request.num_tokens, request.finish_reason) == (20, FinishReason.LENGTH)


def test_aborts_take_effect_at_the_next_step(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    running, waiting = make_request(10), make_request(10)
    scheduler.add(running)
    scheduler.add(waiting)
    runner.step()
    assert scheduler.abort("r0") is running
    assert scheduler.abort("r1") is waiting
    assert scheduler.abort("r1") is None
    assert scheduler.abort("nobody") is None
    assert runner.step().is_idle
    assert running.finish_reason is FinishReason.ABORT
    assert_empty(scheduler)


# --- prefix cache ---------------------------------------------------------------------------------------------------


def run_all(scheduler, runner):
    while scheduler.requests:
        runner.step()


def test_equal_prompts_share_blocks_and_a_full_hit_recomputes_one_token(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(24))
    first, again = make_request(prompt=prompt), make_request(prompt=prompt)
    scheduler.add(first)
    runner.step()
    scheduler.add(again)
    [_, rows] = runner.step().scheduled
    assert (rows.start, rows.num_tokens, rows.recompute_only) == (23, 1, True)
    assert again.num_cached_tokens == 24
    shared = scheduler.cache.block_ids("r0")[:3]
    assert rows.block_table[:3] == shared
    run_all(scheduler, runner)
    assert first.output_token_ids == again.output_token_ids == runner.expected_outputs(prompt, 4)
    assert (scheduler.stats().prefix_cache_queries, scheduler.stats().prefix_cache_hits) == (48, 24)


def test_blocks_are_hidden_until_their_step_is_done(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(24))
    scheduler.add(make_request(prompt=prompt))
    scheduler.add(make_request(prompt=prompt))
    assert rows_of(runner.step()) == {"r0": (0, 24), "r1": (0, 24)}


def test_salts_do_not_share(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(24))
    for salt in ("", "tenant"):
        scheduler.add(make_request(prompt=prompt, cache_salt=salt))
        run_all(scheduler, runner)
    assert scheduler.stats().prefix_cache_hits == 0


def test_outputs_are_cached_too(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    first = make_request(6, max_tokens=12)
    scheduler.add(first)
    run_all(scheduler, runner)
    turn = make_request(prompt=[*first.all_token_ids, 5, 6])
    scheduler.add(turn)
    runner.step()
    assert turn.num_cached_tokens == 16


def test_switched_off_nothing_is_reused(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(enable_prefix_caching=False)
    runner = make_runner(scheduler)
    for _ in range(2):
        request = make_request(prompt=list(range(24)))
        scheduler.add(request)
        run_all(scheduler, runner)
        assert request.num_cached_tokens == 0
    assert (scheduler.stats().prefix_cache_queries, scheduler.cache.pool.num_cached) == (0, 0)


def test_after_a_reset_nothing_computed_before_is_found(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(24))
    running = make_request(prompt=prompt, max_tokens=20)
    scheduler.add(running)
    runner.step()
    scheduler.reset_prefix_cache()
    run_all(scheduler, runner)  # goes on, and fills more blocks
    assert scheduler.cache.pool.num_cached == 0
    scheduler.add(again := make_request(prompt=prompt))
    runner.step()
    assert again.num_cached_tokens == 0


# --- computations for other nodes -----------------------------------------------------------------------------------


def test_chunks_of_a_computation_end_at_block_edges(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(max_num_batched_tokens=20)
    runner = make_runner(scheduler)
    request = make_request(45, max_tokens=None)
    scheduler.add(request)
    assert [rows_of(runner.step())["r0"] for _ in range(3)] == [(0, 16), (16, 16), (32, 13)]
    assert request.is_finished
    assert runner.step().is_idle
    assert scheduler.stats().num_held_blocks == 6  # pinned until its reader is done
    scheduler.release("r0")
    assert_empty(scheduler)


def test_a_chunk_smaller_than_a_block_still_advances(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=3)
    runner = make_runner(scheduler)
    scheduler.add(make_request(10, max_tokens=None))
    assert [rows_of(runner.step())["r0"] for _ in range(4)] == [(0, 3), (3, 3), (6, 2), (8, 2)]


def test_a_computation_waits_for_all_its_blocks_and_is_never_preempted(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=16, enable_prefix_caching=False)
    runner = make_runner(scheduler)
    first, second = make_request(40, max_tokens=None), make_request(40, max_tokens=None)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(3):
        assert list(rows_of(runner.step())) == ["r0"]
    assert first.is_finished
    assert runner.step().is_idle  # 5 of 8 blocks are held
    scheduler.release("r0")
    assert rows_of(runner.step()) == {"r1": (0, 16)}


def test_release_ends_a_computation_that_still_runs(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(max_num_batched_tokens=16)
    runner = make_runner(scheduler)
    scheduler.add(make_request(40, max_tokens=None))
    runner.step()
    scheduler.release("r0")
    assert runner.step().is_idle
    assert_empty(scheduler)


def test_all_hidden_states_use_no_prefix_hits(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(24))
    scheduler.add(make_request(prompt=prompt, max_tokens=None))
    runner.step()
    scheduler.add(make_request(prompt=prompt, max_tokens=None, want_all_hidden=True))
    assert rows_of(runner.step()) == {"r1": (0, 24)}


def test_a_lookup_pins_what_is_cached_and_computes_nothing(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    scheduler.add(make_request(prompt=list(range(24)), max_tokens=9))
    runner.step()
    lookup = make_request(prompt=[*range(24), 7, 7, 7], max_tokens=None, wants_cached_only=True)
    scheduler.add(lookup)
    batch = runner.step()  # beside a full house
    assert batch.started == (lookup,)
    assert "r1" not in rows_of(batch)
    assert (lookup.num_cached_tokens, lookup.is_finished) == (24, True)
    run_all(scheduler, runner)
    assert scheduler.cache.pool.num_used == 3
    scheduler.release("r1")
    assert_empty(scheduler)
