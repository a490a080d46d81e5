"""Requests whose KV comes from another node: reserve, adopt, revoke, fence, in numbered steps on a shadow memory."""

import pytest

from common.request import FinishReason, RequestStatus
from common.scheduling.output import SampledToken, SchedulerOutput, StepResult

NOTHING = SchedulerOutput()


def sample_from_hidden(scheduler, runner, request):
    """A step in which the request's hidden row joins the head."""
    token = runner.next_token(request.all_token_ids, request.cache_salt)
    scheduler.update(NOTHING, StepResult(sampled={request.request_id: SampledToken(token)}))


def receive(scheduler, runner, request, num_tokens):
    """All KV arrives and is adopted."""
    cache = scheduler.cache
    start = cache.num_filled_tokens(request.request_id)
    runner.fetch(request, cache.block_ids(request.request_id), start, num_tokens)
    scheduler.adopt(request.request_id, num_tokens)


def test_reserve_sample_adopt_run(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    request = make_request(20, max_tokens=3, wants_remote_kv=True)
    scheduler.add(request)
    batch = runner.step()  # 1: blocks for 20 tokens and the next one, nothing computed
    assert batch.reserved == (request,)
    assert batch.scheduled == ()
    assert request.status is RequestStatus.WAITING_FOR_KV
    assert len(scheduler.cache.block_ids("r0")) == 3
    assert scheduler.stats().num_waiting_for_kv == 1
    assert runner.step().is_idle  # 2
    sample_from_hidden(scheduler, runner, request)  # 3: output 0 before the blocks are in
    assert request.status is RequestStatus.WAITING_FOR_KV
    receive(scheduler, runner, request, 20)
    [rows] = runner.step().scheduled  # 4: goes on as if it had computed all itself
    assert (rows.start, rows.num_tokens, rows.recompute_only) == (20, 1, False)
    runner.step()
    assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 3)
    assert_empty(scheduler)


def test_all_blocks_but_no_hidden_row_recompute_the_last_token(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    request = make_request(20, wants_remote_kv=True)
    scheduler.add(request)
    runner.step()
    receive(scheduler, runner, request, 20)
    [rows] = runner.step().scheduled
    assert (rows.start, rows.num_tokens, rows.recompute_only) == (19, 1, True)
    assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 1)


@pytest.mark.parametrize("num_arrived", [0, 8, 13, 16])
@pytest.mark.parametrize("has_output", [False, True])
def test_what_did_not_arrive_is_computed_here(make_scheduler, make_runner, make_request, num_arrived, has_output):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    request = make_request(20, wants_remote_kv=True)
    scheduler.add(request)
    runner.step()
    if has_output:
        sample_from_hidden(scheduler, runner, request)
    receive(scheduler, runner, request, num_arrived)
    [rows] = runner.step().scheduled
    assert (rows.start, rows.num_tokens) == (num_arrived, 20 + has_output - num_arrived)
    while scheduler.requests:
        runner.step()
    assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 4)


def test_adopted_blocks_are_cached_only_when_full_and_in(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(20))
    request, same = (make_request(prompt=prompt, wants_remote_kv=remote) for remote in (True, False))
    scheduler.add(request)
    runner.step()
    assert scheduler.cache.find_prefix(same) == []
    receive(scheduler, runner, request, 20)
    assert scheduler.cache.find_prefix(same) == list(scheduler.cache.block_ids("r0")[:2])


def test_a_local_prefix_hit_is_kept_and_shared(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request(prompt=list(range(16)), max_tokens=9))
    runner.step()
    request = make_request(prompt=list(range(30)), wants_remote_kv=True)
    scheduler.add(request)
    runner.step()
    assert scheduler.cache.num_filled_tokens("r1") == 16
    assert scheduler.cache.block_ids("r1")[:2] == scheduler.cache.block_ids("r0")[:2]
    scheduler.adopt("r1", 0)  # nothing arrived: what was cached still counts
    assert request.num_computed_tokens == 16


def test_reservation_is_all_or_nothing_and_never_preempts(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=5)
    runner = make_runner(scheduler)
    running = make_request(9, max_tokens=7)
    scheduler.add(running)
    runner.step()
    request = make_request(16, wants_remote_kv=True)  # needs 3, 2 are free
    scheduler.add(request)
    while not running.is_finished:
        batch = runner.step()
        assert not batch.reserved
        assert not batch.preempted
    assert runner.step().reserved == (request,)


@pytest.mark.parametrize("fence", ["release_reservation", "adopt", "cancel_remote"])
def test_finished_at_output_0_holds_its_blocks_until_the_fence(
    make_scheduler, make_runner, make_request, assert_empty, fence
):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    request = make_request(20, max_tokens=1, wants_remote_kv=True)
    scheduler.add(request)
    runner.step()
    sample_from_hidden(scheduler, runner, request)
    assert request.finish_reason is FinishReason.LENGTH
    assert scheduler.cache.pool.num_used == 3
    assert runner.step().is_idle
    getattr(scheduler, fence)("r0", *([20] if fence == "adopt" else []))
    assert_empty(scheduler)


def test_an_aborted_reservation_holds_its_blocks_until_the_fence(
    make_scheduler, make_runner, make_request, assert_empty
):
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    scheduler.add(make_request(20, wants_remote_kv=True))
    other = make_request(4, max_tokens=1)
    scheduler.add(other)
    runner.step()
    scheduler.abort("r0")
    assert scheduler.cache.pool.num_used == 3
    runner.step()  # it does not count against max_num_seqs any more
    assert other.is_finished
    scheduler.release_reservation("r0")
    assert_empty(scheduler)


def test_cancel_remote_computes_here(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    waiting, reserved = make_request(20, wants_remote_kv=True), make_request(20, wants_remote_kv=True)
    scheduler.add(waiting)
    scheduler.cancel_remote("r0")
    scheduler.add(reserved)
    batch = runner.step()
    assert [rows.request for rows in batch.scheduled] == [waiting]
    scheduler.cancel_remote("r1")  # the reservation crossed the cancel
    assert [rows.request for rows in runner.step().scheduled] == [waiting, reserved]


def grow_until(runner, condition):
    for _ in range(100):
        batch = runner.step()
        if condition(batch):
            return batch
    raise AssertionError("did not happen in 100 steps")


def test_a_running_request_revokes_the_youngest_without_output(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=8)  # 7 usable
    runner = make_runner(scheduler)
    running = make_request(7, max_tokens=30)
    scheduler.add(running)
    runner.step()
    first, second, third = (make_request(9, wants_remote_kv=True) for _ in range(3))
    for request in (first, second, third):
        scheduler.add(request)
    assert runner.step().reserved == (first, second)  # the third would leave no block for the stream
    sample_from_hidden(scheduler, runner, second)
    batch = grow_until(runner, lambda batch: batch.revoked)
    assert batch.revoked == (first,)  # though older: it has shown nothing yet
    assert not batch.scheduled  # the running request waits for the fence
    assert not batch.preempted
    num_tokens = running.num_tokens
    assert runner.step().is_idle  # and does not revoke more meanwhile
    runner.fetch(first, scheduler.cache.block_ids("r1"), 0, 9)  # a late write does no harm
    scheduler.release_reservation("r1")
    assert first.status is RequestStatus.WAITING
    assert first.wants_remote_kv
    runner.step()
    assert running.num_tokens == num_tokens + 1


def test_a_revoked_request_is_reserved_anew_before_later_ones(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    running = make_request(7, max_tokens=26)
    scheduler.add(running)
    runner.step()
    request, later = make_request(9, wants_remote_kv=True), make_request(4)
    scheduler.add(request)
    grow_until(runner, lambda batch: batch.revoked == (request,))
    scheduler.add(later)
    scheduler.release_reservation("r1")
    batch = grow_until(runner, lambda batch: batch.reserved == (request,))
    assert running.is_finished
    assert batch.started == (later,)  # not a step earlier
    receive(scheduler, runner, request, 9)
    grow_until(runner, lambda batch: not scheduler.requests)
    assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 4)


def test_a_revoked_request_whose_kv_came_all_the_same_leaves_it_cached(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    scheduler.add(make_request(7, max_tokens=30))
    runner.step()
    request = make_request(9, wants_remote_kv=True)
    scheduler.add(request)
    grow_until(runner, lambda batch: batch.revoked)
    receive(scheduler, runner, request, 9)
    assert request.status is RequestStatus.WAITING
    assert len(scheduler.cache.find_prefix(request)) == 1


def test_an_aborted_reservation_is_waited_for_rather_than_preempting(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    scheduler.add(make_request(7, max_tokens=30))
    runner.step()
    scheduler.add(make_request(9, wants_remote_kv=True))
    runner.step()
    scheduler.abort("r1")
    batch = grow_until(runner, lambda batch: not batch.scheduled)
    assert not batch.preempted
    scheduler.release_reservation("r1")
    assert runner.step().scheduled


def test_each_short_stream_revokes_for_itself(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=7)  # 6 usable
    runner = make_runner(scheduler)
    streams = [make_request(7, max_tokens=30) for _ in range(2)]
    remote = [make_request(7, wants_remote_kv=True) for _ in range(2)]
    for request in streams:
        scheduler.add(request)
    runner.step()
    for request in remote:
        scheduler.add(request)
    batch = grow_until(runner, lambda batch: batch.revoked)
    assert batch.revoked == (remote[1], remote[0])  # one block each
    assert batch.preempted == ()


def test_a_request_as_long_as_the_pool_can_be_reserved_again(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(num_blocks=4)  # 24 tokens
    runner = make_runner(scheduler)
    request = make_request(23, max_tokens=5, wants_remote_kv=True)
    scheduler.add(request)
    runner.step()
    sample_from_hidden(scheduler, runner, request)
    scheduler.release_reservation("r0")
    assert runner.step().reserved == (request,)  # 24 tokens and no 25th slot: the last output needs none
    receive(scheduler, runner, request, 23)
    runner.step()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 25
    assert_empty(scheduler)


def test_a_computation_in_progress_is_not_preempted(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=2)
    runner = make_runner(scheduler)
    stream, computation = make_request(7, max_tokens=20), make_request(20, max_tokens=None)
    scheduler.add(stream)
    grow_until(runner, lambda batch: stream.output_token_ids)
    scheduler.add(computation)
    for _ in range(15):
        assert not runner.step().preempted
    assert stream.num_tokens == 17  # has no slot for its last token
    grow_until(runner, lambda batch: computation.is_finished)
    scheduler.release("r1")
    grow_until(runner, lambda batch: stream.is_finished)


def test_a_stream_waits_for_a_served_computation_when_nothing_else_can_yield(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=6)
    runner = make_runner(scheduler)
    stream = make_request(7, max_tokens=20)
    scheduler.add(stream)
    scheduler.add(make_request(20, max_tokens=None))
    runner.step()
    grow_until(runner, lambda batch: batch.is_idle)
    scheduler.release("r1")
    grow_until(runner, lambda batch: not scheduler.requests)
    assert stream.output_token_ids == runner.expected_outputs(stream.prompt_token_ids, 20)
    assert stream.num_preemptions == 0


def test_unknown_ids_do_nothing(make_scheduler, assert_empty):
    scheduler = make_scheduler()
    for command in (scheduler.release, scheduler.release_reservation, scheduler.cancel_remote, scheduler.abort):
        command("nobody")
    scheduler.adopt("nobody", 5)
    assert_empty(scheduler)


def test_a_hidden_row_is_accepted_for_the_next_output_only(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    request = make_request(20, wants_remote_kv=True)
    scheduler.add(request)
    runner.step()
    assert scheduler.accepts_hidden("r0", 20) is request
    assert scheduler.accepts_hidden("r0", 19) is None
    sample_from_hidden(scheduler, runner, request)
    assert scheduler.accepts_hidden("r0", 20) is None  # the same row again
    receive(scheduler, runner, request, 20)
    assert scheduler.accepts_hidden("r0", 21) is None  # runs: computes it itself
    assert scheduler.accepts_hidden("nobody", 20) is None
