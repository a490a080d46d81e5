"""Preemption by swap: what was computed waits on the host, and its request goes on exactly where it was."""

import pytest

from common.errors import ConfigError
from common.request import FinishReason, Request, RequestStatus
from common.scheduling.output import StepResult
from common.scheduling.preemption import MarginalCost, PreemptionCosts
from common.scheduling.swap_space import SwapSpace


@pytest.fixture
def make_cache(make_scheduler):
    def make(num_blocks, num_host_blocks, **flags):
        return make_scheduler(num_blocks, num_host_blocks=num_host_blocks, **flags).cache

    return make


def filled(cache, request_id, tokens, num_filled=None):
    """A request with a table, its first `num_filled` tokens computed."""
    request = Request(request_id, tokens)
    cache.admit(request, request.num_tokens)
    cache.mark_filled(request, request.num_tokens if num_filled is None else num_filled)
    return request


# --- swap space -------------------------------------------------------------------------------------------------------


def test_swap_space_keeps_a_request_whole_or_not_at_all():
    space = SwapSpace(3)
    table = space.store("a", 2, 9, is_cacheable=True)
    assert len(set(table.host_block_ids)) == 2
    assert space.store("b", 2, 9, is_cacheable=True) is None
    assert "b" not in space
    space.free("b")
    space.free("a")
    assert space.num_free == 3
    space.check_integrity()


def test_swap_space_notices_a_lost_block():
    space = SwapSpace(2)
    space.store("a", 1, 1, is_cacheable=True)
    space._tables.clear()
    with pytest.raises(AssertionError, match="lost"):
        space.check_integrity()


# --- the books --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_out_and_in_again(make_cache, block_size):
    cache = make_cache(5, 4, block_size=block_size, enable_prefix_caching=False)
    request = filled(cache, "a", range(block_size + 3))
    table = list(cache.block_ids("a"))
    out = cache.swap_out("a")
    assert [pool_block for pool_block, _ in out] == table
    assert not cache.has_table("a")
    assert cache.num_free_blocks == 4
    cache.check_integrity()
    assert cache.num_kept_tokens(request) == block_size + 3
    back = cache.swap_in(request, block_size + 4)
    assert [host_block for host_block, _ in back] == [host_block for _, host_block in out]
    assert [pool_block for _, pool_block in back] == list(cache.block_ids("a"))
    assert cache.num_filled_tokens("a") == block_size + 3
    assert cache.swap_space.num_free == 4
    cache.check_integrity()


def test_only_filled_blocks_are_copied(make_cache):
    cache = make_cache(5, 4)
    filled(cache, "a", range(30), num_filled=9)
    assert len(cache.swap_out("a")) == 2  # of four


def test_nothing_computed_nothing_swapped(make_cache):
    cache = make_cache(5, 4)
    filled(cache, "a", range(30), num_filled=0)
    assert cache.swap_out("a") is None
    assert cache.has_table("a")


def test_no_room_on_the_host_changes_nothing(make_cache):
    cache = make_cache(5, 1)
    filled(cache, "a", range(9))
    assert cache.swap_out("a") is None
    assert cache.num_filled_tokens("a") == 9
    cache.check_integrity()


def test_no_room_in_the_pool_leaves_it_on_the_host(make_cache):
    cache = make_cache(3, 4)
    request = filled(cache, "a", range(9))
    cache.swap_out("a")
    filled(cache, "b", range(100, 109))
    assert cache.swap_in(request, 10) is None
    assert "a" in cache.swap_space
    cache.free("b")
    assert cache.swap_in(request, 10, num_spare_blocks=1) is None
    assert cache.swap_in(request, 10) is not None
    cache.check_integrity()


def test_what_the_prefix_cache_still_has_is_not_copied_back(make_cache):
    cache = make_cache(6, 4)
    request = filled(cache, "a", range(19))  # two full blocks, one partial
    head = list(cache.block_ids("a"))[:2]
    out = cache.swap_out("a")
    back = cache.swap_in(request, 20)
    assert [host_block for host_block, _ in back] == [out[2][1]]
    assert list(cache.block_ids("a"))[:2] == head
    assert cache.num_filled_tokens("a") == 19
    cache.check_integrity()


def test_blocks_that_come_back_are_offered_to_the_prefix_cache(make_cache):
    cache = make_cache(6, 4)
    request = filled(cache, "a", range(16))
    cache.swap_out("a")
    filled(cache, "b", range(100, 140))  # takes all five blocks: nothing of `a` is left in the pool
    cache.free("b")
    cache.swap_in(request, 17)
    request.append_output(7)
    cache.mark_filled(request, 17)
    assert len(cache.find_prefix(Request("c", range(16)))) == 2


def test_after_a_reset_blocks_from_the_host_are_not_offered(make_cache):
    cache = make_cache(6, 4)
    request = filled(cache, "a", range(16))
    cache.swap_out("a")
    cache.reset_prefix_cache()
    assert cache.find_prefix(request) == []
    cache.swap_in(request, 17)
    request.append_output(7)
    cache.mark_filled(request, 17)
    assert cache.find_prefix(Request("c", range(16))) == []


def test_a_shared_head_is_copied_for_the_one_that_leaves(make_cache):
    """The others may end before it comes back."""
    cache = make_cache(8, 4)
    filled(cache, "a", range(16))
    request = Request("b", [*range(16), 50, 51])
    cache.admit(request, 18)
    cache.mark_filled(request, 18)
    out = cache.swap_out("b")
    assert len(out) == 3
    cache.free("a")
    filled(cache, "c", range(100, 156))  # all seven blocks
    cache.free("c")
    assert len(cache.swap_in(request, 19)) == 3
    cache.check_integrity()


# --- the scheduler ----------------------------------------------------------------------------------------------------


def two_that_do_not_fit(make_scheduler, make_request, **flags):
    """Two streams that grow until the younger one has to leave."""
    flags = {"num_blocks": 7, "num_host_blocks": 6, "preemption_mode": "swap"} | flags
    scheduler = make_scheduler(**flags)
    older, younger = make_request(15, max_tokens=20), make_request(15, max_tokens=20)
    scheduler.add(older)
    scheduler.add(younger)
    return scheduler, older, younger


def test_a_swapped_request_goes_on_where_it_was(make_scheduler, make_runner, make_request, assert_empty):
    scheduler, older, younger = two_that_do_not_fit(make_scheduler, make_request)
    runner = make_runner(scheduler)
    while younger.status is not RequestStatus.SWAPPED:
        batch = runner.step()
    assert batch.preempted == (younger,)
    assert len(batch.swap_outs) == 3
    num_computed = younger.num_computed_tokens
    assert num_computed > 15
    assert scheduler.stats().num_swapped == 1
    assert scheduler.stats().num_free_host_blocks == 3
    while younger.status is RequestStatus.SWAPPED:
        batch = runner.step()
    assert batch.resumed == (younger,)
    [rows] = [rows for rows in batch.scheduled if rows.request is younger]
    assert (rows.start, rows.num_tokens) == (num_computed, 1)  # not one token is computed again
    while scheduler.requests:
        runner.step()
    for request in (older, younger):
        assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 20)
    assert scheduler.stats().num_swap_preemptions == scheduler.stats().num_preemptions == 1
    assert scheduler.cache.swap_space.num_free == 6
    assert_empty(scheduler)


def test_without_room_on_the_host_it_is_computed_again(make_scheduler, make_runner, make_request, assert_empty):
    scheduler, _, younger = two_that_do_not_fit(make_scheduler, make_request, num_host_blocks=1)
    runner = make_runner(scheduler)
    while not younger.num_preemptions:
        runner.step()
    assert younger.status is RequestStatus.PREEMPTED
    while scheduler.requests:
        runner.step()
    assert younger.output_token_ids == runner.expected_outputs(younger.prompt_token_ids, 20)
    assert_empty(scheduler)


def test_an_aborted_swapped_request_leaves_the_host(make_scheduler, make_runner, make_request, assert_empty):
    scheduler, older, younger = two_that_do_not_fit(make_scheduler, make_request)
    runner = make_runner(scheduler)
    while younger.status is not RequestStatus.SWAPPED:
        runner.step()
    scheduler.abort(younger.request_id)
    assert scheduler.cache.swap_space.num_free == 6
    scheduler.abort(older.request_id)
    assert_empty(scheduler)


def test_a_swapped_request_goes_before_those_that_came_later(make_scheduler, make_runner, make_request):
    scheduler, _, younger = two_that_do_not_fit(make_scheduler, make_request)
    runner = make_runner(scheduler)
    while younger.status is not RequestStatus.SWAPPED:
        runner.step()
    late = make_request(4, max_tokens=2)  # would fit at once
    scheduler.add(late)
    while not late.num_computed_tokens:
        runner.step()
    assert younger.status is RequestStatus.RUNNING or younger.is_finished


def test_an_urgent_new_request_goes_before_a_swapped_one(make_scheduler, make_runner, make_request):
    scheduler, _, younger = two_that_do_not_fit(make_scheduler, make_request)
    runner = make_runner(scheduler)
    while younger.status is not RequestStatus.SWAPPED:
        runner.step()
    urgent = make_request(4, max_tokens=2, priority=-1)
    scheduler.add(urgent)
    while not urgent.num_computed_tokens:
        assert younger.status is RequestStatus.SWAPPED
        runner.step()


def test_a_failed_step_lets_those_it_swapped_out_be_computed_again(make_scheduler, make_runner, make_request):
    scheduler, older, younger = two_that_do_not_fit(make_scheduler, make_request)
    runner = make_runner(scheduler)
    while True:
        batch = scheduler.schedule()
        if batch.swap_outs:
            break
        scheduler.update(batch, runner.execute(batch, None, lambda: False))
    scheduler.forget_swap_outs(batch)  # whether it copied is not known
    scheduler.fail(older)
    scheduler.check_integrity()
    assert younger.status is RequestStatus.PREEMPTED
    while scheduler.requests:
        runner.step()
    assert younger.output_token_ids == runner.expected_outputs(younger.prompt_token_ids, 20)


def test_swap_without_swap_space_is_refused(make_scheduler):
    with pytest.raises(ConfigError, match="--swap-space"):
        make_scheduler(preemption_mode="swap")


def test_copies_of_a_step_that_computes_nothing_are_not_lost(make_scheduler, make_runner, make_request, assert_empty):
    """A victim's blocks may come free while its profiteer still waits for promised ones: a step of copies only."""
    scheduler = make_scheduler(num_blocks=9, num_host_blocks=8, preemption_mode="swap", max_num_seqs=8)
    runner = make_runner(scheduler)
    streams = [make_request(8, max_tokens=30) for _ in range(3)]
    for request in streams:
        scheduler.add(request)
    for _ in range(400):
        if not scheduler.requests:
            break
        batch = runner.step()
        assert batch.needs_runner or not batch.preempted
        assert not (batch.is_idle and batch.swap_outs)
    for request in streams:
        assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 30)
    assert scheduler.num_swap_preemptions > 0
    assert_empty(scheduler)


# --- auto -------------------------------------------------------------------------------------------------------------


def test_auto_takes_what_costs_less():
    costs = PreemptionCosts()
    assert costs.prefers_swap(100, 7)  # never measured: tried
    for _ in range(5):
        costs.compute.observe(64, 0.64)  # 10 ms a token
        costs.swap.observe(4, 0.004)  # 1 ms a block
    assert costs.prefers_swap(16, 1)
    for _ in range(2000):
        costs.swap.observe(4, 4.0)  # the host's memory has become very slow
    assert not costs.prefers_swap(16, 1)


def test_marginal_cost_is_the_slope():
    cost = MarginalCost()
    for num_items in (1, 2, 8, 64, 3):
        cost.observe(num_items, 0.040 + 0.005 * num_items)
    assert cost.seconds_per_item == pytest.approx(0.005, rel=1e-6)


@pytest.mark.parametrize("measured", [[(8, 0.08)] * 3, [(1, 0.09), (8, 0.08)]])
def test_marginal_cost_without_a_slope_is_the_mean(measured):
    cost = MarginalCost()
    for num_items, seconds in measured:
        cost.observe(num_items, seconds)
    total_items, total_seconds = (sum(column) for column in zip(*measured, strict=True))
    assert cost.seconds_per_item == pytest.approx(total_seconds / total_items, rel=0.1)


@pytest.mark.parametrize(
    ("seconds_per_block", "status"), [(1e-6, RequestStatus.SWAPPED), (1.0, RequestStatus.PREEMPTED)]
)
def test_the_scheduler_asks_the_costs(make_scheduler, make_runner, make_request, seconds_per_block, status):
    scheduler, _, younger = two_that_do_not_fit(make_scheduler, make_request, preemption_mode="auto")
    runner = make_runner(scheduler)
    scheduler.costs.compute.observe(16, 0.016)
    scheduler.costs.swap.observe(1, seconds_per_block)
    while not younger.num_preemptions:
        runner.step()
    assert younger.status is status


def test_one_slow_swap_is_not_held_against_it_for_ever(make_scheduler, make_runner, make_request):
    """Nobody measures swaps while all are recomputed."""
    scheduler, _, _ = two_that_do_not_fit(make_scheduler, make_request, preemption_mode="auto")
    runner = make_runner(scheduler)
    scheduler.costs.compute.observe(16, 0.016)
    scheduler.costs.swap.observe(3, 10.0)  # the machine stood still
    for _ in range(100):
        while scheduler.requests:
            runner.step()
        if scheduler.num_swap_preemptions:
            break
        for _ in range(2):
            scheduler.add(make_request(15, max_tokens=20))
    assert scheduler.num_swap_preemptions
    assert scheduler.num_preemptions > 10


def test_recompute_mode_never_swaps(make_scheduler, make_runner, make_request):
    scheduler, _, younger = two_that_do_not_fit(make_scheduler, make_request, preemption_mode="recompute")
    runner = make_runner(scheduler)
    while not younger.num_preemptions:
        runner.step()
    assert younger.status is RequestStatus.PREEMPTED


def test_a_cancelled_step_keeps_what_it_swapped(make_scheduler, make_runner, make_request, assert_empty):
    """The copies are made before the first layer, so a step that is left between layers has made them."""
    scheduler, _, younger = two_that_do_not_fit(make_scheduler, make_request)
    runner = make_runner(scheduler)
    while younger.status is not RequestStatus.SWAPPED:
        batch = scheduler.schedule()
        result = runner.execute(batch, None, lambda: False)
        scheduler.update(batch, StepResult(is_cancelled=True) if batch.swap_outs else result)
    while scheduler.requests:
        runner.step()
    assert younger.output_token_ids == runner.expected_outputs(younger.prompt_token_ids, 20)
    assert younger.finish_reason is FinishReason.LENGTH
    assert_empty(scheduler)
