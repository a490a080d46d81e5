"""Policies of the scheduler: chunking on and off, thresholds, partial prefills, order; what paging wastes."""

import pytest

from common.errors import ConfigError
from common.request import Request
from common.scheduling.config import SchedulerConfig


def rows_of(batch):
    """{request id: rows}"""
    return {rows.request.request_id: rows.num_tokens for rows in batch.scheduled}


def finish(scheduler, runner):
    for _ in range(2000):
        if not scheduler.requests:
            return
        runner.step()
    raise AssertionError(f"not done: {scheduler.requests}")


# --- chunking ---------------------------------------------------------------------------------------------------------


def test_a_threshold_lets_short_prompts_pass_a_long_one(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    runner = make_runner(scheduler)
    scheduler.add(make_request(100, max_tokens=2))
    scheduler.add(make_request(6, max_tokens=2))
    scheduler.add(make_request(7, max_tokens=2))
    assert rows_of(runner.step()) == {"r0": 8, "r1": 6, "r2": 7}
    assert rows_of(runner.step()) == {"r0": 8, "r1": 1, "r2": 1}


def test_partial_prefills_are_capped_and_others_wait_in_order(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=8, max_num_partial_prefills=2)
    runner = make_runner(scheduler)
    for _ in range(3):
        scheduler.add(make_request(24, max_tokens=1))
    scheduler.add(make_request(4, max_tokens=1))
    assert rows_of(runner.step()) == {"r0": 8, "r1": 8}  # r3 would fit, but must not overtake r2
    assert rows_of(runner.step()) == {"r0": 8, "r1": 8}
    assert rows_of(runner.step()) == {"r0": 8, "r1": 8, "r2": 8, "r3": 4}  # both end here


def test_a_prompt_that_is_computed_whole_is_no_partial_prefill(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=8, max_num_partial_prefills=1)
    runner = make_runner(scheduler)
    scheduler.add(make_request(100, max_tokens=1))
    scheduler.add(make_request(8, max_tokens=1))
    assert rows_of(runner.step()) == {"r0": 8, "r1": 8}


def test_a_cached_prefix_counts_as_computed_for_the_cap(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=8, max_num_partial_prefills=1)
    runner = make_runner(scheduler)
    prompt = list(range(40))
    scheduler.add(make_request(prompt=prompt, max_tokens=1))
    finish(scheduler, runner)
    scheduler.add(make_request(100, max_tokens=1))
    again = make_request(prompt=prompt, max_tokens=1)
    scheduler.add(again)
    assert rows_of(runner.step()) == {"r1": 8, "r2": 1}


def test_without_chunking_prompts_are_computed_whole(make_scheduler, make_runner, make_request, assert_empty):
    scheduler = make_scheduler(max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False, num_blocks=50)
    runner = make_runner(scheduler)
    requests = [make_request(size, max_tokens=3) for size in (40, 30, 20)]
    for request in requests:
        scheduler.add(request)
    assert rows_of(runner.step()) == {"r0": 40}  # r1 does not fit beside it, r2 must not overtake
    assert rows_of(runner.step()) == {"r0": 1, "r1": 30, "r2": 20}
    finish(scheduler, runner)
    for request in requests:
        assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 3)
    assert_empty(scheduler)


def test_without_chunking_the_budget_must_hold_the_longest_request():
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 512 and --max-model-len is 2048"):
        SchedulerConfig(enable_chunked_prefill=False)


def test_a_threshold_without_chunking_is_refused():
    with pytest.raises(ConfigError, match="needs chunked prefill"):
        SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=2048, long_prefill_token_threshold=64)


@pytest.mark.parametrize(
    "wrong", [{"max_num_partial_prefills": 0}, {"long_prefill_token_threshold": -1}, {"max_model_len": 0}]
)
def test_limits_out_of_range_are_refused_by_name(wrong):
    [name] = wrong
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**wrong)


@pytest.mark.parametrize("budget", [16, 32, 64])
def test_beside_streams_a_long_prompt_advances_in_every_step_and_so_do_they(
    make_scheduler, make_runner, make_request, budget
):
    scheduler = make_scheduler(num_blocks=800, max_num_batched_tokens=budget, max_model_len=1200, max_num_seqs=12)
    runner = make_runner(scheduler)
    streams = [make_request(4, max_tokens=300) for _ in range(10)]
    for stream in streams:
        scheduler.add(stream)
    while not all(stream.output_token_ids for stream in streams):
        runner.step()
    long = make_request(1000, max_tokens=2)
    scheduler.add(long)
    while not long.output_token_ids:
        rows = rows_of(runner.step())
        assert rows.pop(long.request_id) > 0
        assert len(rows) == 10  # a token for each stream in each budgeted step: its gap is one step


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"), [("priority", ["r1", "r3", "r0", "r2"]), ("fcfs", ["r0", "r1", "r2", "r3"])]
)
def test_policies_order_the_queue(make_scheduler, make_runner, make_request, policy, order):
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy=policy)
    runner = make_runner(scheduler)
    for priority in (1, 0, 1, 0):
        scheduler.add(make_request(4, max_tokens=1, priority=priority))
    assert [next(iter(rows_of(runner.step()))) for _ in range(4)] == order


@pytest.mark.parametrize(("policy", "victim"), [("priority", "r0"), ("fcfs", "r1")])
def test_policies_choose_who_gives_up_blocks(make_scheduler, make_runner, make_request, policy, victim):
    scheduler = make_scheduler(num_blocks=7, scheduling_policy=policy)
    runner = make_runner(scheduler)
    scheduler.add(make_request(15, max_tokens=20, priority=5))
    scheduler.add(make_request(15, max_tokens=20, priority=1))
    while not scheduler.num_preemptions:
        batch = runner.step()
    assert [request.request_id for request in batch.preempted] == [victim]


# --- chains and waste -------------------------------------------------------------------------------------------------


def test_adapters_do_not_share(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(20))
    cached = []
    for adapter in ("", "a", "a", "b", ""):
        request = make_request(prompt=prompt, max_tokens=1, adapter=adapter)
        scheduler.add(request)
        finish(scheduler, runner)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 16, 0, 16]


def test_unused_slots_are_those_of_blocks_that_hold_no_kv(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    assert scheduler.stats().num_unused_slots == 0
    scheduler.add(make_request(11, max_tokens=20))
    scheduler.add(make_request(16, max_tokens=20))
    runner.step()
    assert scheduler.stats().num_unused_slots == 5  # 11 of 16; 16 of 16
    runner.step()
    assert scheduler.stats().num_unused_slots == 4 + 7  # 12 of 16; 17 of 24


def test_a_shared_partial_block_is_counted_once(make_scheduler):
    cache = make_scheduler().cache
    parent, child = Request("p", range(11)), Request("c", range(11))
    cache.admit(parent, 11)
    cache.mark_filled(parent, 11)
    cache.fork(parent, child)
    assert cache.num_unused_slots() == 5


@pytest.mark.parametrize("is_reset", [False, True])
def test_kv_that_was_on_its_way_at_a_reset_is_not_found_after_it(
    make_scheduler, make_runner, make_request, assert_empty, is_reset
):
    """A fetch may have been opened, and computed elsewhere, long before its request got its blocks here."""
    scheduler = make_scheduler(max_num_seqs=1)
    runner = make_runner(scheduler)
    scheduler.add(make_request(8, max_tokens=2))
    runner.step()
    prompt = list(range(20))
    remote = make_request(prompt=prompt, max_tokens=2, wants_remote_kv=True)
    scheduler.add(remote)
    if is_reset:
        scheduler.reset_prefix_cache()
    while not (batch := runner.step()).reserved:
        pass
    assert batch.reserved == (remote,)
    runner.fetch(remote, scheduler.cache.block_ids(remote.request_id), 0, 20)
    scheduler.adopt(remote.request_id, 20)
    finish(scheduler, runner)
    again = make_request(prompt=prompt, max_tokens=1)
    scheduler.add(again)
    finish(scheduler, runner)
    assert again.num_cached_tokens == (0 if is_reset else 16)
    assert_empty(scheduler)
