"""Faults that users of other servers reported in public, each as its symptom (ids as in the list of reports)."""

import os
import random
import subprocess
import sys

import pytest

from common.errors import InvalidRequestError
from common.request import FinishReason
from common.scheduling.output import SampledToken, SchedulerOutput, StepResult

HASH_SCRIPT = """
from common.block_hash import extend_chain, root_hash
from common.kv_layout import KVLayout
layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", model_fingerprint="m")
print(b"".join(extend_chain([], root_hash(layout, cache_salt="s"), range(64), 16)).hex())
"""


def run_until_done(scheduler, runner, limit=5000):
    for _ in range(limit):
        if not scheduler.requests:
            return
        runner.step()
    raise AssertionError(f"not done after {limit} steps: {scheduler.requests}")


@pytest.mark.parametrize("attempt", range(100))
def test_p06_the_tail_of_a_chain_is_evicted_first(make_scheduler, make_runner, make_request, attempt):
    """The head of a chain was evicted first: the rest was unreachable, and still took space."""
    scheduler = make_scheduler(num_blocks=4)  # 3 usable
    runner = make_runner(scheduler)
    prompt = random.Random(attempt).choices(range(1000), k=23)  # its output fills the third block
    scheduler.add(make_request(prompt=prompt, max_tokens=2))
    run_until_done(scheduler, runner)
    scheduler.add(make_request(4, max_tokens=1))  # needs one block
    run_until_done(scheduler, runner)
    repeat = make_request(prompt=prompt, max_tokens=1)
    scheduler.add(repeat)
    run_until_done(scheduler, runner)
    assert repeat.num_cached_tokens == 2 * scheduler.cache.block_size


def test_p06_partial_blocks_go_before_reusable_ones(make_scheduler, make_runner, make_request):
    scheduler = make_scheduler(num_blocks=4)
    runner = make_runner(scheduler)
    prompt = list(range(20))  # two full blocks, one partial
    scheduler.add(make_request(prompt=prompt, max_tokens=1))
    run_until_done(scheduler, runner)
    scheduler.add(make_request(4, max_tokens=1))
    run_until_done(scheduler, runner)
    repeat = make_request(prompt=prompt, max_tokens=1)
    scheduler.add(repeat)
    runner.step()
    assert repeat.num_cached_tokens == 16


def test_p08_hashes_are_the_same_in_every_process():
    """The chain's start was random in each process: nodes never agreed on a hash."""
    found = {
        subprocess.run(
            [sys.executable, "-c", HASH_SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 4 * 32


def test_p09_the_lookup_uses_the_whole_prompt(make_scheduler, make_runner, make_request):
    """The prompt was cut to a chunk before the lookup: never more than a chunk was reused."""
    scheduler = make_scheduler(num_blocks=600, block_size=16, max_num_batched_tokens=512, max_model_len=8192)
    runner = make_runner(scheduler)
    prompt = [i % 251 for i in range(4096)]
    scheduler.add(make_request(prompt=prompt, max_tokens=1))
    run_until_done(scheduler, runner)
    assert len(runner.batches) == 8
    repeat = make_request(prompt=prompt, max_tokens=1)
    scheduler.add(repeat)
    run_until_done(scheduler, runner)
    assert repeat.num_cached_tokens > 4000
    assert runner.batches[8].num_scheduled_tokens == 1


def test_q01_larger_than_the_pool(make_scheduler, make_runner, make_request, assert_empty):
    """Allowed by the context, larger than the pool: it waited at the head for ever, or preempted itself endlessly."""
    scheduler = make_scheduler(num_blocks=126, max_model_len=4000, max_num_batched_tokens=512)  # 1000 tokens
    runner = make_runner(scheduler)
    with pytest.raises(InvalidRequestError, match=r"2000 tokens.*1000 tokens"):
        scheduler.add(make_request(2000))
    growing = make_request(900, max_tokens=500)
    short = make_request(10, max_tokens=5)
    scheduler.add(growing)
    scheduler.add(short)
    for _ in range(12):
        runner.step()
    assert short.is_finished
    run_until_done(scheduler, runner, limit=200)
    assert growing.finish_reason is FinishReason.LENGTH
    assert growing.num_tokens == 1001
    assert growing.num_preemptions == 0
    assert_empty(scheduler)


def test_q03_parked_loads_never_block_each_other(make_scheduler, make_runner, make_request, assert_empty):
    """Requests waiting for remote KV held blocks that the others needed: with nothing running this never resolved."""
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=2)  # 48 tokens
    runner = make_runner(scheduler)
    requests = [make_request(15, max_tokens=30, wants_remote_kv=True) for _ in range(6)]  # each grows to 6 blocks
    for request in requests:
        scheduler.add(request)
    quiet = 0
    while scheduler.requests:
        batch = runner.step()
        quiet = 0 if batch.scheduled else quiet + 1
        assert quiet < 4, "nobody advances"
        for request in batch.reserved:  # the loads of both end at once
            runner.fetch(request, scheduler.cache.block_ids(request.request_id), 0, 15)
            scheduler.adopt(request.request_id, 15)
        for request in batch.revoked:
            scheduler.release_reservation(request.request_id)
    for request in requests:
        assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 30)
    assert_empty(scheduler)


def test_q04_a_long_prompt_does_not_stop_a_running_stream(make_scheduler, make_runner, make_request):
    """Prefill always went first: streams stood still while long prompts kept coming."""
    scheduler = make_scheduler(num_blocks=600, max_num_batched_tokens=32, max_model_len=4096)
    runner = make_runner(scheduler)
    stream = make_request(8, max_tokens=200)
    scheduler.add(stream)
    runner.step()
    long = make_request(32 * 50, max_tokens=1)
    scheduler.add(long)
    scheduler.add(make_request(32 * 50, max_tokens=1))
    while not stream.is_finished:
        before = len(stream.output_token_ids)
        batch = runner.step()
        assert len(stream.output_token_ids) == before + 1  # a token in every step
        assert batch.num_scheduled_tokens <= 32
    assert long.is_finished


def test_q05_streams_do_not_stop_a_new_prompt(make_scheduler, make_runner, make_request):
    """The opposite: while anything decoded, a chunked prefill made no progress."""
    scheduler = make_scheduler(num_blocks=600, max_num_batched_tokens=32, max_model_len=4096)
    runner = make_runner(scheduler)
    for _ in range(4):
        scheduler.add(make_request(8, max_tokens=400))
    runner.step()
    new = make_request(32 * 20, max_tokens=1)
    scheduler.add(new)
    num_steps = 0
    while not new.output_token_ids:
        batch = runner.step()
        num_steps += 1
        assert any(rows.request is new for rows in batch.scheduled)
    assert num_steps <= 20 * 1.25  # 28 of 32 tokens of each step are its


@pytest.mark.parametrize("num_tokens", [31, 32, 33])
@pytest.mark.parametrize("num_cached_blocks", [0, 2])
@pytest.mark.parametrize("has_output", [False, True])
def test_d18_lengths_around_a_block_edge(
    make_scheduler, make_runner, make_request, assert_empty, num_tokens, num_cached_blocks, has_output
):
    """With output 0 appended, a prompt of whole blocks owned a block more than the other node sent."""
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    prompt = list(range(num_tokens))
    if num_cached_blocks:
        scheduler.add(make_request(prompt=prompt[: 8 * num_cached_blocks], max_tokens=1))
        run_until_done(scheduler, runner)
    request = make_request(prompt=prompt, max_tokens=12, wants_remote_kv=True)
    scheduler.add(request)
    assert runner.step().reserved == (request,)
    cache, request_id = scheduler.cache, request.request_id
    assert cache.num_filled_tokens(request_id) == 8 * num_cached_blocks
    assert len(cache.block_ids(request_id)) == num_tokens // 8 + 1  # the prompt's and the first new slot's
    if has_output:
        token = SampledToken(runner.next_token(prompt))
        scheduler.update(SchedulerOutput(), StepResult(sampled={request_id: token}))
    runner.fetch(request, cache.block_ids(request_id), 8 * num_cached_blocks, num_tokens)
    scheduler.adopt(request_id, num_tokens)
    run_until_done(scheduler, runner)
    assert request.output_token_ids == runner.expected_outputs(prompt, 12)
    assert_empty(scheduler)


def test_d19_preempted_after_delivery_is_computed_here(make_scheduler, make_runner, make_request, assert_empty):
    """Preempted after its KV was delivered, a request asked for the one-shot copy again and waited for ever."""
    scheduler = make_scheduler(num_blocks=41, max_num_seqs=8)
    runner = make_runner(scheduler)
    requests = [make_request(20, max_tokens=200, wants_remote_kv=True) for _ in range(8)]  # 28 blocks each
    for request in requests:
        scheduler.add(request)
    delivered = set()
    for _ in range(5000):
        if not scheduler.requests:
            break
        batch = runner.step()
        for request in batch.revoked:
            scheduler.release_reservation(request.request_id)
        for request in batch.reserved:
            assert request.request_id not in delivered, "asked again for what was delivered"
            delivered.add(request.request_id)
            runner.fetch(request, scheduler.cache.block_ids(request.request_id), 0, 20)
            scheduler.adopt(request.request_id, 20)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.output_token_ids == runner.expected_outputs(request.prompt_token_ids, 200)
    assert_empty(scheduler)
